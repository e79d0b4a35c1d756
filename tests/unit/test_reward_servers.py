"""Scores from a server: what it is sent, and servers that are slow, wrong or not there."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl_megatron.rewards.checks import check_reward
from verl_megatron.rewards.pool import REMEDIES, RewardPool
from verl_megatron.rewards.server import MOST_SAMPLES, server_problem
from verl_megatron.rewards.worker import SERVER

Answer = Callable[[dict], tuple[int, bytes]]


def lengths(request: dict) -> tuple[int, bytes]:
    """Score each response by its length."""
    scores = [{"score": len(sample["response"]), "words": 1} for sample in request["samples"]]
    return 200, json.dumps({"scores": scores}).encode()


@contextlib.contextmanager
def serving(answer: Answer, requests: list | None = None) -> Iterator[str]:
    """Serve on a free port; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if requests is not None:
                requests.append(request | {"path": self.path})
            status, text = answer(request) or (200, b"")
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Hold a port, so that nobody comes to listen at it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def asked(answer: Answer, *, count: int = 2, timeout_s: float = 5.0) -> tuple[dict, RewardPool]:
    """Score `count` samples, in one request, by a server that answers so."""
    is_asked, are_there = threading.Event(), threading.Event()

    def after_one(request: dict) -> tuple[int, bytes] | None:
        if request["samples"][0]["prompt"] != "one that keeps the server busy":
            return answer(request)
        is_asked.set()
        are_there.wait(100)
        return lengths(request)

    with serving(after_one) as url, RewardPool(url, timeout_s=timeout_s, failure_score=-1) as pool:
        pool.submit(count, "one that keeps the server busy", "", None)
        assert is_asked.wait(100)
        for number in range(count):
            pool.submit(number, "p", "x" * number, None)
        are_there.set()
        pool.results([count])
        return pool.results(), pool


def test_samples_are_sent_as_they_are_and_scored():
    requests: list = []
    with serving(lengths, requests) as url:
        spec = f"{url}/score/all?model=a"
        assert check_reward(spec) == []
        with RewardPool(spec) as pool:
            extra, messages = {"data_source": "s", "level": 3}, [{"role": "user", "content": "hi"}]
            pool.submit(7, "the prompt", "the \ud800 response", {"a": 1}, extra, messages)
            reward = pool.results()[7]
    assert reward.score == 14 and reward.metrics == {"words": 1} and pool.refused == ""
    (request,) = requests
    assert request["path"] == "/score/all?model=a"
    assert request["samples"] == [
        {
            "prompt": "the prompt",
            "response": "the \ud800 response",
            "ground_truth": {"a": 1},
            "data_source": "s",
            "extra": extra,
            "messages": messages,
        }
    ]


def test_what_waits_is_sent_together():
    requests: list = []

    def slowly(request: dict) -> tuple[int, bytes]:
        time.sleep(0.3)
        return lengths(request)

    with serving(slowly, requests) as url, RewardPool(url, workers=1) as pool:
        count = 2 * MOST_SAMPLES
        for number in range(count):
            pool.submit(number, "", "x" * number, None)
        rewards = pool.results()
        assert [rewards[number].score for number in range(count)] == list(range(count))
        sizes = [len(request["samples"]) for request in requests]
        assert sum(sizes) == count and max(sizes) == MOST_SAMPLES and len(sizes) <= 4


def test_a_server_is_a_part_of_a_sum_and_of_routes(tmp_path):
    (tmp_path / "mine.py").write_text("def half(response): return 0.5\n")
    with serving(lengths) as url:
        spec = f"{{a:[{url}/len:2,{tmp_path}/mine.py:half],b:match}}"
        assert check_reward(spec) == []
        with RewardPool(spec) as pool:
            pool.submit(0, "", "xx", "xx", {"data_source": "a"})
            pool.submit(1, "", "xx", "xx", {"data_source": "b"})
            rewards = pool.results()
    assert rewards[0].score == 4.5 and rewards[1].score == 1
    assert rewards[0].metrics == {"len": 2, "len/words": 1, "half": 0.5}


WRONG = {
    "HTML": (
        lambda _: (200, b"<html>hello"),
        "wrong type",
        'expected {"scores": [...]} with 2 entries, got <html>',
    ),
    "a list": (lambda _: (200, b"[1, 2]"), "wrong type", "with 2 entries, got [1, 2]"),
    "too few": (lambda _: (200, b'{"scores": [1]}'), "wrong type", "with 2 entries, got 1 entries"),
    "no list": (lambda _: (200, b'{"scores": 5}'), "wrong type", "with 2 entries, got 5"),
    "nothing": (lambda _: (200, b""), "wrong type", "with 2 entries, got "),
    "deep": (lambda _: (200, b"[" * 100_000), "wrong type", "got [[["),
    "NaN": (lambda _: (200, b'{"scores": [NaN, NaN]}'), "not finite", "score is nan"),
    "text": (lambda _: (200, b'{"scores": ["1", null]}'), "wrong type", "expected a number or a dict"),
    "not found": (lambda _: (404, b"no such path"), "server error", "HTTP 404: no such path"),
    "moved": (lambda _: (302, b""), "server error", "HTTP 302"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_a_failure_by_name(name):
    answer, kind, words = WRONG[name]
    rewards, pool = asked(answer)
    assert [rewards[number].failure for number in (0, 1)] == [kind, kind]
    assert rewards[0].score == -1 and words in str(pool.first_failure)
    assert "failed on all 2 samples" in pool.complaint(pool.failed, pool.calls)


def test_one_wrong_score_costs_its_sample_only():
    rewards, _ = asked(lambda _: (200, b'{"scores": [NaN, 3]}'))
    assert rewards[0].failure == "not finite" and rewards[1].score == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_repeated(status):
    attempts = []

    def answer(request: dict) -> tuple[int, bytes]:
        attempts.append(1)
        return lengths(request) if len(attempts) > 2 else (status, b"later")

    rewards, _ = asked(answer)
    assert rewards[1].score == 1 and len(attempts) >= 3


def test_a_server_that_stays_wrong_fails_after_the_time_limit():
    began = time.monotonic()
    rewards, pool = asked(lambda _: (500, b"out of memory"), timeout_s=4.0)
    assert rewards[0].failure == "server error" and time.monotonic() - began > 3.9
    assert "HTTP 500: out of memory within 4.0 s" in str(pool.first_failure)
    assert REMEDIES[SERVER] in pool.complaint(2, 2)


def test_a_slow_server_is_a_timeout():
    began = time.monotonic()
    rewards, pool = asked(lambda _: time.sleep(60), timeout_s=0.5)
    assert rewards[0].failure == "timeout" and time.monotonic() - began < 50
    assert "no answer within 0.5 s" in str(pool.first_failure)


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nX-Name: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["text", "connection closes", "header", "continue"],
)
def test_bytes_that_drip_do_not_outlast_the_limit(begin, drop):
    def drip(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.sendall(begin)
            for _ in range(500):
                connection.sendall(drop)
                time.sleep(0.1)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        with RewardPool(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1) as pool:
            began = time.monotonic()
            pool.submit(0, "", "", None)
            assert pool.results()[0].failure == "timeout" and time.monotonic() - began < 45


def test_an_answer_that_breaks_off_is_asked_for_again():
    text = b'{"scores": [1.5]}'

    def answer_twice(listener: socket.socket) -> None:
        for sent in (text[:9], text):
            connection, _ = listener.accept()
            with connection:
                received = b""
                while not received.endswith(b"}]}"):
                    received += connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + sent)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_twice, args=(listener,), daemon=True).start()
        with RewardPool(f"http://127.0.0.1:{listener.getsockname()[1]}") as pool:
            pool.submit(0, "", "", None)
            assert pool.results()[0].score == 1.5


def test_a_server_that_ends_and_comes_back():
    with closed_port() as port, RewardPool(f"http://127.0.0.1:{port}", timeout_s=4) as pool:
        pool.submit(0, "", "", None)
        assert pool.results()[0].failure == "server error"
        assert "Connection refused" in str(pool.first_failure)
    with serving(lengths) as url, RewardPool(f"[{url}:0.5,match]") as pool:
        pool.submit(0, "", "xx", "xx")
        assert pool.results()[0].score == 2


def test_close_does_not_wait_for_an_answer():
    with serving(lambda _: time.sleep(30)) as url:
        pool = RewardPool(url, workers=2, timeout_s=60)
        for number in range(3):
            pool.submit(number, "", "", None)
        time.sleep(0.3)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 25


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{port}/x", "cannot be reached (Connection refused); start the server"),
        ("http://:80/x", "it has no host"),
        ("http://", "it has no host"),
        ("http://a b/c", "it has white space"),
        ("http://ä/b", "signs beyond ASCII"),
        ("http://me:x@127.0.0.1/x", "a user name"),
        ("http://127.0.0.1:99999/x", "Port out of range"),
        ("http://127.0.0.1:port/x", "Port could not be cast"),
        ("http://[::1/x", "Invalid IPv6"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_before_the_run(url, words):
    with closed_port() as port:
        url = url.format(port=port)
        (problem,) = check_reward(json.dumps([url, "match"]))
    assert problem.startswith(f"reward.function='{url}' ") and words in problem


def test_a_server_without_the_right_certificate_is_refused():
    with serving(lengths) as url:
        assert "cannot be reached" in server_problem(url.replace("http:", "https:"), timeout_s=5)
