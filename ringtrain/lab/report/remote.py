"""Runs behind a URL, such as the mirror of `run.mirror`: their small files, copied to a temporary folder."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ringtrain.errors import RunDirectoryError
from ringtrain.run.run_folder import WRITER

FILES = re.compile(
    rf"([^/]+/)?(config\.toml|(metrics|steps)\.jsonl|summary\.json|{re.escape(WRITER)}|logs/journal-\d+\.jsonl)"
)
"""files that a report reads, of a run or of the runs in a folder"""
TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
"""fields in which file systems have the time of the last change"""


@contextlib.contextmanager
def local(words: Sequence[str]) -> Iterator[list[Path]]:
    """Yields the paths; for a URL, a temporary folder with the files of its run or runs. Raises RunDirectoryError."""
    with tempfile.TemporaryDirectory(prefix="ringtrain-") as folder:
        paths = []
        for number, word in enumerate(words):
            path = Path(word)
            if is_url(word):
                path = _copied(word, Path(folder) / str(number))
            paths.append(path)
        yield paths


def is_url(word: str) -> bool:
    return "://" in word


def _copied(url: str, folder: Path) -> Path:
    """Copies the files of the run or runs behind a URL into a folder of the URL's name."""
    from ringtrain.data.data_files import of_each, store_of, with_retries

    store, path = store_of(url.rstrip("/"))

    def find() -> Mapping[str, Mapping[str, Any]]:
        return store.find(path, detail=True)

    there = with_retries(find, url, f"{url}: cannot be listed")
    files = {name: facts for name, facts in there.items() if FILES.fullmatch(name.removeprefix(path).lstrip("/"))}
    if not files:
        raise RunDirectoryError(f"{url}: holds no runs: give the URL of --run.mirror, or of a run in it")
    copied = folder / path.rpartition("/")[2]

    def copy(name: str) -> None:
        to = copied / name.removeprefix(path).lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        with_retries(lambda: store.get_file(name, str(to)), url, f"{url}: {name}: cannot be read")
        changed_s = _time_s(files[name])
        os.utime(to, (changed_s, changed_s))

    of_each(copy, files)
    return copied


def _time_s(facts: Mapping[str, Any]) -> float:
    """Unix time of a file's last change; 0.0 if its file system does not tell."""
    for name in TIMES:
        value = facts.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0
