"""A server of scores: the other end of server.py. All requests that wait are scored together.

POST any path  {"samples": [{"prompt", "response", "messages", ...}, ...]}  ->  {"scores": [...]}
GET any path   200, once samples can be scored
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

from verl_megatron.rewards.functions import described
from verl_megatron.rewards.server import MOST_BYTES

Sample = dict[str, Any]
Score = Callable[[Sequence[Sample]], list[Any]]  # samples -> a number or a dict for each
# Python may run a signal's handler only after a wait, if the signal comes just before it.
POLL_S = 0.5
_Waiting = tuple[list[Sample], "Future[list[Any]]"]


class _BadRequestError(ValueError):
    """What is wrong with a request; the client is told."""


class ScoreServer:
    """Listens from its construction on; `serve` answers.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int):
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._closed = False
        self._http = _Server((host, port), _Handler)
        self._http.waiting = self._waiting
        self.address = f"http://{host}:{self._http.server_port}"

    def serve(self, score: Score) -> None:
        """Score what is sent, in this thread, until `close`. What `score` raises fails its requests only."""
        thread = threading.Thread(target=self._http.serve_forever, daemon=True, name="http")
        thread.start()
        try:
            for requests in self._batches():
                samples = [sample for own, _ in requests for sample in own]
                try:
                    scores = iter(score(samples))
                except Exception as error:  # the server goes on
                    for _, future in requests:
                        future.set_exception(error)
                    continue
                for own, future in requests:
                    future.set_result([next(scores) for _ in own])
        finally:
            self._http.shutdown()
            self._http.server_close()

    def close(self) -> None:
        """Let `serve` return after what it is scoring. A signal's handler may call this."""
        self._closed = True

    def _batches(self) -> Iterator[list[_Waiting]]:
        while not self._closed:
            requests: list[_Waiting] = []
            with contextlib.suppress(Empty):
                requests.append(self._waiting.get(timeout=POLL_S))
                while True:
                    requests.append(self._waiting.get_nowait())
            if requests:
                yield requests


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    waiting: "SimpleQueue[_Waiting]"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 60.0  # of a client that sends nothing
    server: _Server

    def do_GET(self) -> None:
        self._send(200, {"status": "ready"})

    def do_POST(self) -> None:
        try:
            samples = self._samples()
            future: Future[list[Any]] = Future()
            self.server.waiting.put((samples, future))
            self._send(200, {"scores": future.result() if samples else []})
        except _BadRequestError as error:
            self._send(400, {"error": str(error)})
        except Exception as error:
            self._send(500, {"error": described(error)})

    def _samples(self) -> list[Sample]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= MOST_BYTES):
            raise _BadRequestError(f"a request needs a Content-Length of at most {MOST_BYTES}")
        try:
            samples = json.loads(self.rfile.read(int(length)))["samples"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _BadRequestError('a request is {"samples": [...]} as JSON') from None
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise _BadRequestError("samples are a list of objects")
        return samples

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""
