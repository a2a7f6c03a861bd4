"""Files of data behind paths and URLs: which there are, and reading them again.

URLs are those of fsspec's file systems: s3:// with the package s3fs, gs:// with gcsfs, https:// with aiohttp.
"""

from __future__ import annotations

import glob
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from ringtrain.errors import DataError, RingtrainError

NUM_THREADS = 16
"""that look at files"""
NUM_TRIES = 5
"""of a read from a store, besides those of its library"""
FIRST_PAUSE_S = 0.5
"""after the first try; it doubles"""
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
"""ends of the names of images"""
NOTES = (".json", ".md", ".txt")
"""ends of the names of files that lie beside others in a folder"""
Result = TypeVar("Result")
Key = TypeVar("Key")


class DataFile(NamedTuple):
    """A file on disk or behind a URL."""

    url: str
    """or its path"""
    size: int
    """bytes"""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def folder_name(self) -> str:
        return self.url.rpartition("/")[0].rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        return "://" in self.url

    def __str__(self) -> str:
        return self.url


def files_of(files: str | Path | Sequence[str | Path]) -> list[DataFile]:
    """Files of a path, folder, pattern, URL, or a list of these, in folders by name; raises DataError without any."""
    given = [files] if isinstance(files, str | Path) else list(files)
    if not all(map(str, given)) or not given:
        raise DataError("ringtrain.Records: got no files, expected a path, a folder, a pattern, or several in a list")
    urls: list[str] = []
    for text in map(str, given):
        found = _behind_url(text) if "://" in text else _on_disk(text)
        if not found:
            raise DataError(f"ringtrain.Records: no file {text}")
        urls += found
    twice = next((url for url, count in Counter(urls).items() if count > 1), None)
    if twice:
        raise DataError(f"ringtrain.Records: {twice} is named twice: its rows would be trained twice as often")
    sizes = of_each(size_of, urls)
    return [DataFile(url, sizes[url]) for url in urls]


def size_of(url: str) -> int:
    """Size of a file in bytes; raises DataError if it cannot be read."""

    def read() -> int:
        if "://" not in url:
            return os.path.getsize(url)
        store, path = store_of(url)
        return int(store.info(path)["size"])

    return with_retries(read, url, f"{url}: cannot be read")


def of_each(function: Callable[[Key], Result], keys: Iterable[Key]) -> dict[Key, Result]:
    """Results of a function of each file, from several threads, as each takes a while behind a URL."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        different = [*dict.fromkeys(keys)]
        return dict(zip(different, threads.map(function, different), strict=True))


def read_file(file: DataFile, read: Callable[[Any], Result], message: str = "", cache: str = "none") -> Result:
    """Calls `read` with an open binary file, as `with_retries`; raises DataError."""

    def from_begin() -> Result:
        if not file.is_remote:
            with open(file.url, "rb", buffering=0) as opened:
                return read(opened)
        store, path = store_of(file.url)
        with store.open(path, "rb", cache_type=cache) as opened:  # of fsspec; "none": asks for what is read alone
            return read(opened)

    return with_retries(from_begin, file.url, message or f"{file}: cannot be read")


def with_retries(read: Callable[[], Result], url: str, message: str) -> Result:
    """Calls `read`, several times for a URL if the error may pass; raises DataError, in one line after the message."""
    num_tries = NUM_TRIES if "://" in url else 1
    for number in range(num_tries):
        if number:
            time.sleep(FIRST_PAUSE_S * 2 ** (number - 1))
        try:
            return read()
        except (RingtrainError, MemoryError):
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


def store_of(url: str) -> tuple[Any, str]:
    """File system of fsspec, one for all files of a store, and the path in it; raises DataError if there is none."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except Exception as error:  # fsspec, or the store's package, is missing, or the store does not answer
        is_fsspec = isinstance(error, ModuleNotFoundError) and error.name == "fsspec"
        hint = ": pip install 'ringtrain[records]'" if is_fsspec else ""
        raise DataError(f"{url}: cannot be read: {_text_of(error)}{hint}") from error


def _on_disk(text: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(text))
    names = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    return [*dict.fromkeys(file for name in names for file in _in_folder(name))]


def _in_folder(path: str) -> list[str]:
    """A file, or those in a folder and the folders in it, also behind symbolic links."""
    if not os.path.isdir(path):
        return [path]

    def refuse(error: OSError) -> None:  # os.walk would leave the folder out
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[str] = []
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        found += [os.path.join(folder, name) for name in names]
        folders[:] = [name for name in folders if not _leads_upwards(os.path.join(folder, name))]
    files = [file for file in found if not _is_hidden(os.path.relpath(file, path)) and os.path.isfile(file)]
    return sorted(files, key=_parts)


def _leads_upwards(path: str) -> bool:
    """Returns whether a folder is a link to one that it is in."""
    return os.path.islink(path) and os.path.realpath(path) in map(os.path.realpath, Path(path).parents)


def _behind_url(url: str) -> list[str]:
    store, path = store_of(url)

    def found() -> list[str]:
        names: list[str] = []
        for name in sorted(store.glob(path), key=_parts) if "*" in path else [path]:
            # fsspec's `exists` and `isdir` take an error for no.
            if store.info(name)["type"] == "directory":
                inside = [
                    (file, str(PurePosixPath(file).relative_to(PurePosixPath(name)))) for file in store.find(name)
                ]
                files = [file for file, part in inside if not _is_hidden(part) and not file.endswith("/")]
                names += sorted(files, key=_parts)
            else:
                names.append(name)
        return [store.unstrip_protocol(name) for name in dict.fromkeys(names)]

    return with_retries(found, url, f"{url}: cannot be read")


def _parts(path: str) -> list[str]:
    return path.split("/")


def _is_hidden(path: str) -> bool:
    """Returns whether a name in a folder, such as _SUCCESS, .crc or labels.txt, marks a file without rows."""
    starts, name = {part[0] for part in _parts(path)}, path.lower()
    return "." in starts or name.endswith(NOTES) or ("_" in starts and not name.endswith(IMAGES))
