"""Scores from a server: batches of samples are sent over HTTP while others are being generated.

POST {"samples": [{"prompt", "response", "ground_truth", "data_source", "extra", "messages"}, ...]}
200  {"scores": [0.5, {"score": 1.0, "words": 7}, ...]}
"""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Event, Thread, Timer
from typing import Any
from urllib.parse import urlsplit

from parallel.runtime.refusal import short_repr
from verl_megatron.data.columns import source_of
from verl_megatron.rewards.functions import described, one_line
from verl_megatron.rewards.worker import SERVER, TIMEOUT, WRONG_TYPE, read_value

MOST_SAMPLES = 256  # of a request
REQUEST_BYTES = 16 << 20  # to a request of this size no sample is added
MOST_BYTES = 64 << 20  # of an answer
CONNECT_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0  # between attempts; each is twice the one before
_RETRIED = (429, 500, 502, 503, 504)

Waiting = tuple[tuple[Any, ...], "Future[list[Any]]"]  # a sample's call, and where its outcome goes
Encoded = tuple[str, "Future[list[Any]]"]  # the same, as JSON


class _FailedError(Exception):
    """A request that gives no scores: kind of failure, and its text."""


def server_problem(url: str, *, timeout_s: float = CONNECT_S) -> str:
    """Connect to the server of `url`; return why that fails, as a clause with the remedy, or ""."""
    try:
        with contextlib.closing(_connection(url, timeout_s)) as connection:
            connection.connect()
    except ValueError as error:
        return f"is no address of a server ({error}); write http://HOST:PORT/PATH"
    except OSError as error:
        return (
            f"cannot be reached ({one_line(error.strerror or str(error))}); start the server, or mend the "
            "address"
        )
    return ""


class ServerScorer(Thread):
    """A thread that sends what waits in `samples` to `url`, one request at a time; None ends it.

    All samples of a request fail if it gets no answer within `timeout_s`, with what attempts there were.
    """

    def __init__(self, url: str, samples: "SimpleQueue[Waiting | None]", *, timeout_s: float):
        super().__init__(daemon=True, name="reward server")
        self._url, self._samples, self._timeout_s = url, samples, timeout_s
        self._closing = Event()
        self._socket: socket.socket | None = None  # of the request in progress

    def run(self) -> None:
        while (first := self._samples.get()) is not None:
            if batch := self._batch(first):
                self._score(batch)

    def _batch(self, first: Waiting) -> list[Encoded]:
        """Return what waits, up to the limits of a request; a sample that JSON cannot hold fails alone."""
        batch: list[Encoded] = []
        waiting: Waiting | None = first
        num_bytes = 0
        with contextlib.suppress(Empty):
            while waiting is not None:
                call, future = waiting
                try:
                    text = json.dumps(_sample(*call), default=str)
                except Exception as error:
                    future.set_result([0.0, {}, SERVER, described(error), 0.0])
                else:
                    batch.append((text, future))
                    num_bytes += len(text)
                if len(batch) == MOST_SAMPLES or num_bytes >= REQUEST_BYTES:
                    return batch
                waiting = self._samples.get_nowait()
            self._samples.put(None)
        return batch

    def close(self) -> None:
        """End a request in progress and the thread; the caller has queued None."""
        self._closing.set()
        self._hang_up()
        self.join(1.0)

    def _hang_up(self) -> None:
        """End the request in progress; called by another thread."""
        now = self._socket
        if now is not None:
            with contextlib.suppress(OSError):
                now.shutdown(socket.SHUT_RDWR)

    def _score(self, batch: Sequence[Encoded]) -> None:
        started = time.perf_counter()
        try:
            texts = [text for text, _ in batch]
            found = [list(read_value(value)) for value in self._ask(texts)]
        except _FailedError as error:
            found = [[0.0, {}, *error.args] for _ in batch]
        except Exception as error:  # such as no thread for the time limit
            found = [[0.0, {}, SERVER, described(error)] for _ in batch]
        elapsed_ms = (time.perf_counter() - started) * 1000
        for outcome, (_, future) in zip(found, batch):
            future.set_result([*outcome, elapsed_ms])

    def _ask(self, texts: Sequence[str]) -> list[Any]:
        """Return the scores of samples; repeat what may pass. Raises _FailedError."""
        body = f'{{"samples": [{", ".join(texts)}]}}'.encode()
        until, wait_s, last = time.monotonic() + self._timeout_s, _FIRST_WAIT_S, "no answer"
        while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
            try:
                status, text = self._post(body, until)
            except TimeoutError:
                break
            except ssl.SSLCertVerificationError as error:
                raise _FailedError(SERVER, self._said(str(error))) from None
            except (OSError, http.client.HTTPException) as error:
                last = described(error)
            else:
                if status == 200:
                    return _scores(text, len(texts), self._url)
                last = f"HTTP {status}: {one_line(text[:200].decode(errors='replace'))}"
                if status not in _RETRIED:
                    raise _FailedError(SERVER, self._said(last))
            self._closing.wait(min(wait_s, max(left, 0)))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        kind = TIMEOUT if last == "no answer" else SERVER
        raise _FailedError(kind, self._said(f"{last} within {self._timeout_s} s"))

    def _said(self, text: str) -> str:
        return f"{short_repr(self._url)}: {text}"

    def _post(self, body: bytes, until: float) -> tuple[int, bytes]:
        """Send a request; return status and text of the answer. TimeoutError after the time `until`.

        A socket's own time limit begins anew with each byte, so a timer ends what arrives too slowly.
        """
        parts = urlsplit(self._url)
        timer = Timer(_left(until), self._hang_up)
        timer.daemon = True
        with contextlib.closing(_connection(self._url, _left(until))) as connection:
            try:
                connection.connect()
                self._socket = connection.sock  # the connection forgets it before the end of some answers
                timer.start()
                path = (parts.path or "/") + f"?{parts.query}" * bool(parts.query)
                headers = {"Content-Type": "application/json", "Accept": "application/json"}
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                length, text = answer.length, bytearray()
                while chunk := answer.read1(1 << 16):
                    text += chunk
                    if len(text) > MOST_BYTES:
                        raise _FailedError(WRONG_TYPE, self._said(f"answered more than {MOST_BYTES} bytes"))
                if length is not None and len(text) < length:
                    raise http.client.IncompleteRead(bytes(text), length - len(text))
                _left(until)
                return answer.status, bytes(text)
            except (OSError, http.client.HTTPException):
                _left(until)
                raise
            finally:
                timer.cancel()
                self._socket = None


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection that is not open yet; ValueError for an address that is none."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("it has no host")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError("it has white space, or signs beyond ASCII")
    if parts.username is not None or parts.fragment:
        raise ValueError("it has a user name or a fragment")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout_s)


def _sample(
    prompt: str, response: str, ground_truth: Any, extra: dict[str, Any], messages: Any
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "response": response,
        "ground_truth": ground_truth,
        "data_source": source_of(extra),
        "extra": extra,
        "messages": messages,
    }


def _scores(text: bytes, count: int, url: str) -> list[Any]:
    """Return the scores of an answer. Raises _FailedError."""
    expected = f'expected {{"scores": [...]}} with {count} entries'
    try:
        scores = json.loads(text)["scores"]
    except (ValueError, TypeError, KeyError, RecursionError):
        said = one_line(text[:200].decode(errors="replace"))
        raise _FailedError(WRONG_TYPE, f"{short_repr(url)}: {expected}, got {said}") from None
    if not isinstance(scores, list) or len(scores) != count:
        said = f"{len(scores)} entries" if isinstance(scores, list) else short_repr(scores)
        raise _FailedError(WRONG_TYPE, f"{short_repr(url)}: {expected}, got {said}")
    return scores
