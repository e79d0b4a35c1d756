"""A web server for a folder: with byte ranges or without, with faults, and as if it were the hub."""

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40  # of the repository, when it is asked as if it were the Hugging Face hub


class Served:
    """A running server. Its attributes may be changed while it runs."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self.has_ranges = True
        self.faults: dict[str, list[int]] = {}  # by file: statuses of the next answers; 0 is one cut short
        self.open = threading.Event()  # cleared, it holds back answers of more than a byte
        self.open.set()
        self.answered: list[tuple[str, int, int]] = []  # file, first byte, bytes of each answer
        self._lock = threading.Lock()

    def take_fault(self, name: str) -> int | None:
        with self._lock:
            return self.faults[name].pop(0) if self.faults.get(name) else None

    def bytes_of(self, name: str) -> int:
        """Bytes of a file that were sent, without the single bytes by which a client looks at it."""
        return sum(size for file, _, size in self.answered if file == name and size > 1)

    def repeated(self) -> list[tuple[str, int]]:
        """Ranges that were sent more than once, without those single bytes."""
        counts = Counter((name, start) for name, start, size in self.answered if size > 1)
        return [part for part, count in counts.items() if count > 1]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Serve a folder until the end of the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that has seen enough closes its connection
    served = Served(folder, server.server_port)
    server.served = served  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        served: Served = self.server.served  # type: ignore[attr-defined]
        name = self.path.lstrip("/")
        if name.startswith("api/models/"):
            return self._about_repository(name, served.folder)
        name = re.sub(rf"^.+/resolve/{COMMIT}/", "", name)
        fault, path = served.take_fault(name), served.folder / name
        if fault or not path.is_file():
            return self._answer(fault or 404, b"")
        content = path.read_bytes()
        start, end = 0, len(content)
        asked = self.headers.get("Range", "") if served.has_ranges else ""
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(content))
            if start >= len(content):
                return self._answer(416, b"")
        etag = hashlib.sha1(content).hexdigest()
        about = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": COMMIT,
            "Content-Range": f"bytes {start}-{end - 1}/{len(content)}",
        }
        if not asked:
            about.pop("Content-Range")
        body = content[start:end]
        if len(body) > 1:
            served.open.wait(30)
        served.answered.append((name, start, len(body)))
        return self._answer(206 if asked else 200, body, cut=fault == 0, **about)

    def _answer(self, status: int, body: bytes, *, cut: bool = False, **about: str) -> None:
        self.send_response(status)
        for key, value in (about | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has what it wants
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def _about_repository(self, name: str, folder: Path) -> None:
        """Answer as the Hugging Face hub does: a repository's commit, or its files."""
        about: object = {"id": "Qwen/Tiny", "sha": COMMIT, "siblings": []}
        if "/tree/" in name:
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            about = [
                {"type": "file", "path": path, "size": size, "oid": "0" * 40} for path, size in sizes.items()
            ]
        self._answer(200, json.dumps(about).encode(), **{"Content-Type": "application/json"})

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""
