"""Files of data behind paths and URLs: which there are, what tells whether one has changed, and reading them again.

URLs are those of fsspec's file systems: s3:// with the package s3fs, gs:// with gcsfs, https:// with aiohttp.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from ringtrain.errors import DataError

NUM_THREADS = 16
"""that look at files"""
NUM_TRIES = 5
"""of a read from a store, besides those of its library"""
FIRST_PAUSE_S = 0.5
"""after the first try; it doubles"""
TAGS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created")
"""fields by which file systems tell that a file has changed"""
Result = TypeVar("Result")


class Remote(NamedTuple):
    """A file behind a URL."""

    url: str

    @property
    def store(self) -> Any:
        """File system of fsspec, one for all files of a store."""
        return self._store_and_path[0]

    @property
    def path(self) -> str:
        """Path in the store."""
        return str(self._store_and_path[1])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def _store_and_path(self) -> tuple[Any, str]:
        try:
            import fsspec

            return fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # fsspec, or the store's package, is missing or does not exist
            is_fsspec = isinstance(error, ModuleNotFoundError) and error.name == "fsspec"
            hint = ": pip install 'ringtrain[records]'" if is_fsspec else ""
            raise DataError(f"{self.url}: cannot be read: {_text_of(error)}{hint}") from error

    def __str__(self) -> str:
        return self.url


File = Path | Remote
AnyFile = TypeVar("AnyFile", bound=File)


def files_of(files: str | Path | Sequence[str | Path]) -> list[File]:
    """Files that a path, folder, pattern, URL, or a list of these stands for; in folders by the order of their names.

    Raises:
        DataError: There is none, or a URL cannot be read.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise DataError("ringtrain.Records: got no files, expected a path, a folder, a pattern, or several in a list")
    paths: list[File] = []
    for text in map(str, given):
        found = _behind_url(text) if "://" in text else _on_disk(text)
        if not found:
            raise DataError(f"ringtrain.Records: no file {text}")
        paths += found
    return paths


def state_of(path: File) -> tuple[int, str]:
    """Size of a file in bytes, and what changes with its content; raises DataError if it cannot be read."""

    def read() -> tuple[int, str]:
        if isinstance(path, Path):
            state = path.stat()
            return state.st_size, str(state.st_mtime_ns)
        path.store.invalidate_cache(path.path.rpartition("/")[0])  # ask the store again
        found = path.store.info(path.path)
        return int(found["size"]), str([found.get(tag) for tag in TAGS])

    return with_retries(read, path, f"{path}: cannot be read")


def of_each(function: Callable[[AnyFile], Result], paths: Iterable[AnyFile]) -> dict[AnyFile, Result]:
    """Results of a function of each file, from several threads, as each takes a while behind a URL."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        different = [*dict.fromkeys(paths)]
        return dict(zip(different, threads.map(function, different), strict=True))


def first_bytes(path: File, number: int) -> bytes:
    """The first bytes of a file; raises DataError if it cannot be read."""

    def read() -> bytes:
        with open_file(path) as file:
            return bytes(file.read(number))

    return with_retries(read, path, f"{path}: cannot be read")


def open_file(path: File) -> Any:
    """A file, opened to be read in binary. What is read behind a URL is not kept."""
    return path.open("rb") if isinstance(path, Path) else path.store.open(path.path, "rb", cache_type="none")


def with_retries(read: Callable[[], Result], path: File, message: str) -> Result:
    """Calls `read`, several times if the file is behind a URL and the error may pass.

    Raises:
        DataError: With a message and the last error, in one line.
    """
    num_tries = NUM_TRIES if isinstance(path, Remote) else 1
    for number in range(num_tries):
        if number:
            time.sleep(FIRST_PAUSE_S * 2 ** (number - 1))
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # of the system, pyarrow, fsspec, or the library of a store
            is_final = isinstance(error, FileNotFoundError | PermissionError)
            if is_final or number == num_tries - 1:
                raise DataError(f"{message}: {_text_of(error)}") from error
    raise AssertionError("the last try returns or raises")


def _text_of(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:300] or type(error).__name__


def _on_disk(text: str) -> list[File]:
    names = [text] if Path(text).exists() else sorted(glob.glob(text, recursive=True))
    return [path for name in names for path in _in_folder(Path(name))]


def _in_folder(path: Path) -> list[Path]:
    """A file, or those in a folder and the folders in it."""
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(path))]


def _behind_url(url: str) -> list[File]:
    given = Remote(url)

    def found() -> list[File]:
        store, path = given.store, given.path
        names: list[str] = []
        for name in store.glob(path) if "*" in path else [path]:
            # fsspec's `exists` and `isdir` take an error for no.
            if store.info(name)["type"] == "directory":
                inside = [(file, PurePosixPath(file).relative_to(PurePosixPath(name))) for file in store.find(name)]
                names += [file for file, part in inside if not _is_hidden(part) and not file.endswith("/")]
            else:
                names.append(name)
        return [Remote(store.unstrip_protocol(name)) for name in sorted(names)]

    return with_retries(found, given, f"{url}: cannot be read")


def _is_hidden(path: PurePosixPath | Path) -> bool:
    """Returns whether a file name such as _SUCCESS or .crc marks a file without data."""
    return any(part.startswith(("_", ".")) for part in path.parts)
