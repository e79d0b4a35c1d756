"""Files of a folder behind a URL, in byte ranges and with retries."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import reason_of

T = TypeVar("T")
ATTEMPTS, FIRST_PAUSE_S = 5, 0.5  # of a request; each pause is twice the one before
CONNECT_S, SILENCE_S = 15.0, 60.0  # most seconds to connect, and between two pieces of an answer
VERSION = ("ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "mtime", "blob_id")
ABSENT = (403, 404, 410)  # buckets that may not be listed answer 403 for absent files
FORMS = (
    "give a folder, a hub name such as Qwen/Qwen2.5-0.5B, or a URL such as https://host/folder or "
    "s3://bucket/folder"
)
RESUMES = "what has arrived is kept, and the same command goes on from there"


class UnreachableError(ValueError):
    """A server or file system that does not answer, or not as it should."""


class _AgainError(Exception):
    """A failure that may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its server describes it."""

    size: int  # bytes
    version: str  # changes with the content; empty: the server does not tell
    has_ranges: bool


def shown(url: str) -> str:
    """Return a URL without the password that it may carry, for messages."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def checked(url: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        ValueError: it is none, or names no place.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{short_repr(url)} is no URL ({error}); {FORMS}") from None
    is_web = parts.scheme in ("http", "https")
    if not parts.scheme or not (parts.hostname if is_web else parts.netloc or parts.path.strip("/")):
        raise ValueError(f"{short_repr(url)} is no URL of a folder; {FORMS}")
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url} names the host {parts.netloc}; write file:///folder, with three slashes")
    return parts


def open_source(url: str) -> "Source":
    """Return the source of a URL.

    Raises:
        ValueError: fsspec does not know the scheme or lacks its package, the URL has a query, or its system
            cannot be reached.
    """
    import fsspec

    parts = checked(url)
    if parts.query or parts.fragment:
        raise ValueError(
            f"{shown(url)} has a query or a fragment; name the folder of the model's files alone"
        )
    kind = HttpSource if parts.scheme in ("http", "https") else Source
    options: dict[str, Any] = HttpSource.options() if kind is HttpSource else {}
    try:
        system, root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
    except ImportError as error:
        raise ValueError(f"{shown(url)} needs a package ({reason_of(error)}); install it") from None
    except OSError as error:  # of a system that connects at once
        raise UnreachableError(
            f"{shown(url)} cannot be reached ({reason_of(error)}); look at its server and the network"
        ) from None
    except Exception as error:  # each file system has errors of its own
        raise ValueError(f"{shown(url)} cannot be read ({reason_of(error)}); {FORMS}") from None
    return kind(url.rstrip("/"), system, root)


class Source:
    """A folder on one of fsspec's file systems, such as S3.

    All methods raise UnreachableError after `ATTEMPTS` failures.
    """

    def __init__(self, url: str, system: Any, root: str):
        self.url, self._system, self._root = url, system, root

    def look(self, name: str) -> RemoteFile | None:
        """Return what is known of a file; None if there is none."""
        return self._retried(name, lambda: self._look(name))

    def read(self, name: str, start: int, end: int, *, version: str) -> bytes:
        """Return the bytes [start, end) of a file.

        Raises:
            UnreachableError: also if the file has another version by now.
        """
        return self._retried(name, lambda: self._read(name, start, end, version))

    def copy(self, name: str, write: Callable[[int, bytes], None]) -> None:
        """Call `write(position, piece)` for the whole file in order; from the start again after a failure."""
        self._retried(name, lambda: self._copy(name, write))

    def _look(self, name: str) -> RemoteFile | None:
        try:
            info = self._system.info(f"{self._root}/{name}")
        except (FileNotFoundError, PermissionError):  # buckets that may not be listed say the latter
            return None
        version = next((str(info[key]) for key in VERSION if info.get(key)), "")
        return RemoteFile(size=int(info["size"]), version=version, has_ranges=True)

    def _read(self, name: str, start: int, end: int, version: str) -> bytes:
        content = self._system.cat_file(f"{self._root}/{name}", start=start, end=end)
        _check_length(len(content), end - start)
        return content

    def _copy(self, name: str, write: Callable[[int, bytes], None]) -> None:
        raise NotImplementedError  # all of fsspec's other systems have ranges

    def _retried(self, name: str, act: Callable[[], T]) -> T:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return act()
            except UnreachableError as error:
                raise UnreachableError(f"{shown(self.url)}/{name}: {error}") from None
            except (FileNotFoundError, PermissionError) as error:
                reason = f"it cannot be read any more ({type(error).__name__})"
                raise UnreachableError(f"{shown(self.url)}/{name}: {reason}; {RESUMES}") from None
            except ValueError:  # already in words: of the disk that `write` writes to
                raise
            except Exception as error:  # each file system has errors of its own
                if attempt == ATTEMPTS:
                    raise UnreachableError(
                        f"{shown(self.url)}/{name} cannot be read ({reason_of(error)}), tried {ATTEMPTS} "
                        f"times; look at the server and the network: {RESUMES}"
                    ) from None
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError


class HttpSource(Source):
    """A folder on a web server."""

    @staticmethod
    def options() -> dict[str, Any]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        return {"client_kwargs": {"timeout": timeout}, "skip_instance_cache": True}

    def _look(self, name: str) -> RemoteFile | None:
        return self._request(name, (0, 1), self._describe)

    def _read(self, name: str, start: int, end: int, version: str) -> bytes:
        async def take(answer: Any) -> bytes:
            if answer is None:
                raise UnreachableError(f"it is gone from the server; {RESUMES} once it is back")
            if answer.status != 206:
                raise _AgainError(f"it answered a range with status {answer.status}")
            if version and (now := _version_of(answer)) != version:
                raise UnreachableError(
                    f"it has changed on the server ({short_repr(version)} is now {short_repr(now)}); "
                    "start again, which fetches the new file"
                )
            content = await answer.read()
            _check_length(len(content), end - start)
            return content

        return self._request(name, (start, end), take)

    def _copy(self, name: str, write: Callable[[int, bytes], None]) -> None:
        async def take(answer: Any) -> None:
            if answer is None:
                raise UnreachableError("it is gone from the server")
            position = 0
            async for piece in answer.content.iter_chunked(1 << 20):
                write(position, piece)
                position += len(piece)
            _check_length(position, answer.content_length)

        self._request(name, None, take)

    @staticmethod
    async def _describe(answer: Any) -> RemoteFile | None:
        if answer is None:
            return None
        if answer.status == 416:  # an empty file has no first byte
            return RemoteFile(size=0, version="", has_ranges=False)
        has_ranges = answer.status == 206
        size = (
            answer.headers.get("Content-Range", "").rpartition("/")[2]
            if has_ranges
            else answer.content_length
        )
        if not str(size).isdecimal():
            raise UnreachableError("the server does not say how long it is; use a server that does")
        return RemoteFile(size=int(size), version=_version_of(answer), has_ranges=has_ranges)

    def _request(self, name: str, part: tuple[int, int] | None, take: Callable[[Any], Any]) -> Any:
        """GET a file or the bytes [start, end) of it, and return what `take` makes of the answer.

        `take` gets None for a file that is not there.
        """
        from fsspec.asyn import sync

        headers = {"Accept-Encoding": "identity"}
        if part is not None:
            headers["Range"] = f"bytes={part[0]}-{part[1] - 1}"

        async def get() -> Any:
            session = await self._system.set_session()
            async with session.get(f"{self.url}/{quote(name)}", headers=headers) as answer:
                if answer.status in ABSENT:
                    return await take(None)
                if answer.status >= 500 or answer.status == 429:
                    raise _AgainError(f"status {answer.status}")
                if answer.status not in (200, 206, 416):
                    raise UnreachableError(f"the server answers with status {answer.status}")
                return await take(answer)

        try:
            return sync(self._system.loop, get)
        except TimeoutError:
            raise _AgainError(f"no answer within {SILENCE_S:.0f} s") from None


def _version_of(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _check_length(actual: int, expected: int) -> None:
    if actual != expected:
        raise _AgainError(f"it answered {actual:,} of {expected:,} bytes")
