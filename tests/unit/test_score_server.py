"""A server of scores: what it answers, together with the pool that asks it."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rewards.serving import ScoreServer
from verl_megatron.rewards.worker import SERVER, WRONG_TYPE


@contextlib.contextmanager
def serving(score) -> Iterator[ScoreServer]:
    server = ScoreServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve, args=(score,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive()


def asked(server: ScoreServer, body: str | None, **headers: str) -> tuple[int, dict]:
    host, _, port = server.address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET" if body is None else "POST", "/score", body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def waits(server: ScoreServer, requests: int) -> bool:
    return server._waiting.qsize() == requests


def wait_until(is_so) -> None:
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def lengths(samples) -> list:
    """Score by length; "none" has no score."""
    return [
        {"error": "no words"} if sample["response"] == "none" else float(len(sample["response"]))
        for sample in samples
    ]


def test_a_pool_gets_its_scores_and_a_bad_sample_costs_itself_only():
    with serving(lengths) as server, RewardPool(server.address, workers=3) as pool:
        for number in range(600):
            pool.submit(number, "p", "none" if number == 7 else "r" * (number % 50), "t")
        rewards = pool.results()
    assert [rewards[number].score for number in range(600) if number != 7] == [
        float(number % 50) for number in range(600) if number != 7
    ]
    assert rewards[7].failure == WRONG_TYPE and "no words" in str(pool.first_failure)


def test_long_samples_go_in_several_requests():
    response = "\u6c49" * 1_000_000  # six bytes each
    with serving(lengths) as server, RewardPool(server.address, timeout_s=30) as pool:
        for number in range(12):
            pool.submit(number, "p", response, "t")
        assert {reward.score for reward in pool.results().values()} == {1e6}


def test_a_sample_that_json_cannot_hold_fails_alone():
    with serving(lengths) as server, RewardPool(server.address) as pool:
        for number in range(3):
            pool.submit(number, "p", "r", {(1, 2): 3} if number == 1 else "t")
        rewards = pool.results()
    assert [rewards[number].failure for number in range(3)] == [None, SERVER, None]
    assert "keys must be str" in str(pool.first_failure)


def test_what_waits_is_scored_together():
    sizes, may_go = [], threading.Event()

    def score(samples):
        sizes.append(len(samples))
        assert may_go.wait(10)
        return [1.0] * len(samples)

    with serving(score) as server, RewardPool(server.address, workers=8) as pool:
        pool.submit(0, "p", "r", "t")
        wait_until(lambda: bool(sizes))
        for number in range(1, 8):
            pool.submit(number, "p", "r", "t")
            wait_until(partial(waits, server, number))  # each is a request of its own
        may_go.set()
        assert len(pool.results()) == 8
    assert sizes == [1, 7]


def test_a_model_that_fails_costs_its_requests_and_the_server_goes_on():
    def score(samples):
        if samples[0]["response"] == "bad":
            raise RuntimeError("out of memory")
        return [1.0] * len(samples)

    with serving(score) as server:
        body = json.dumps({"samples": [{"response": "bad"}]})
        assert asked(server, body) == (500, {"error": "RuntimeError: out of memory"})
        assert asked(server, body.replace("bad", "good")) == (200, {"scores": [1.0]})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "as JSON"),
        ("{}", "as JSON"),
        ("[]", "as JSON"),
        ("\x00", "as JSON"),
        ("[" * 100_000, "as JSON"),
        ('{"samples": 3}', "list of objects"),
        ('{"samples": [3]}', "list of objects"),
    ],
)
def test_a_request_that_is_none_is_said(body, said):
    with serving(lengths) as server:
        status, answer = asked(server, body)
        assert status == 400 and said in answer["error"]
        for length in ("-1", "x", "99999999999999999999"):
            status, answer = asked(server, "{}", **{"Content-Length": length})
            assert status == 400 and "Content-Length" in answer["error"]
        assert asked(server, '{"samples": []}') == (200, {"scores": []})
        assert asked(server, None) == (200, {"status": "ready"})


def test_a_pool_hears_of_a_server_that_ends():
    with serving(lengths) as server, RewardPool(server.address, timeout_s=5.0) as pool:
        pool.submit(0, "p", "rrr", "t")
        assert pool.results()[0].score == 3
        server.close()
        server._http.server_close()
        pool.submit(1, "p", "r", "t")
        assert pool.results()[1].failure == SERVER
