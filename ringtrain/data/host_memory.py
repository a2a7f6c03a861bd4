"""Large arrays in memory once per host, although each rank has made its own.

    the host's first rank   copies its array to a file in memory, and maps the file in place of the array's pages
    the other ranks         compare their array with the file, and map it in place of their pages

The arrays stay the script's: the same objects at the same addresses. A rank that writes to one has its own pages again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.dataset import DataSet
from ringtrain.errors import DataError

PAGE = mmap.PAGESIZE
HEADER, SIZE = 16, 8
"""bytes before the address that malloc of glibc returns; the last of them are the size of the block, with its flags"""
FLAGS, IS_MAPPING = 7, 2
"""flags; that of a block which is a mapping of its own"""
CHUNK = 64 << 20
"""bytes that are copied and mapped, or compared, at once"""
CLOSE_ON_EXEC = 1
"""flag of memfd_create"""
FIXED = 0x10
"""flag of mmap: in place of what is there"""
NAME = "ringtrain-array"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def share(data_set: DataSet) -> dict[str, str]:
    """Lets the ranks of a host hold the large arrays of a data set once; returns the plan's row for them. Collective.

    Raises:
        DataError: On all ranks: an array is not the same on two ranks of a host.
    """
    blocks = _blocks_of([*data_set.train.large, *data_set.test.large])
    are_shared = _map_once([block for block in blocks if block.is_mapping])
    num_bytes = {"once per host": 0, "on each rank": 0}
    for block in blocks:
        num_bytes["once per host" if are_shared.get(block.address) else "on each rank"] += block.num_bytes
    texts = [f"{number / 1e9:.1f} GB {where}" for where, number in num_bytes.items() if number]
    return {"arrays": ", ".join(texts)} if texts else {}


def _map_once(blocks: Sequence[_Block]) -> dict[int, bool]:
    """Maps the same pages for each block on all ranks of a host. Collective.

    Returns whether all of these ranks have them, by the block's address.
    """
    from ringtrain import hvd

    alike = _host(), [block.kind for block in blocks]
    of_ranks = hvd.allgather_object((alike, _shared(blocks), os.getpid()), name="ringtrain_arrays")
    if not any(kinds for (_, kinds), _, _ in of_ranks):
        return {}
    on_host = [rank for rank, (of_rank, _, _) in enumerate(of_ranks) if of_rank == alike]
    first, is_first = on_host[0], hvd.rank() == on_host[0]
    # Those that all of these ranks share already, and none has written to since, stay.
    before = _on_all(of_ranks[rank][1] for rank in on_host)
    to_map = [block for block, is_shared in zip(blocks, before, strict=True) if not is_shared]

    # The first rank of a host writes the files. The others open them while it keeps them open.
    different: list[str] = []
    with contextlib.ExitStack() as files:
        written = []
        if is_first and len(on_host) > 1:
            written = [files.enter_context(block.in_file()) for block in to_map]
        written = hvd.allgather_object(written, name="ringtrain_array_files")[first]
        if not is_first:
            folder = f"/proc/{of_ranks[first][2]}/fd"
            different = [block.map_from(folder, *file) for block, file in zip(to_map, written, strict=True)]
        result = _shared(blocks), next(filter(None, different), "")
        results = hvd.allgather_object(result, name="ringtrain_arrays_are_mapped")

    for rank, (_, text) in enumerate(results):
        if text:
            raise DataError(
                f"ringtrain.fit: rank {rank} has another {text} than the first rank of its host: pass the same arrays"
                f" on every rank"
            )
    if len(on_host) == 1:
        return {}
    after = _on_all(results[rank][0] for rank in on_host)
    return dict(zip([block.address for block in blocks], after, strict=True))


def _on_all(of_ranks: Iterable[Sequence[bool]]) -> list[bool]:
    """Returns, of each block, whether all ranks share it, given what each rank says of each block."""
    return [all(of_block) for of_block in zip(*of_ranks, strict=True)]


def _host() -> tuple[str, int, int]:
    """Identifies machine, process namespace and user: processes with equal ones may open each other's files."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, Path("/proc/self/ns/pid").stat().st_ino, os.getuid()
    except OSError:  # unknown
        return str(uuid.uuid4()), 0, 0


def _shared(blocks: Sequence[_Block]) -> list[bool]:
    """Returns, of each block, whether this process still maps all its whole pages from the memory file.

    A page that is written to becomes the process's own.
    """
    if not blocks:
        return []
    shared_bytes = [0] * len(blocks)
    first = end = 0
    is_ours = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:  # unknown
        lines = []
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):  # a mapping: addresses, access, offset, device, inode, path
            first, end = (int(text, 16) for text in words[0].split("-"))
            is_ours = f"memfd:{NAME}" in line
        elif is_ours and words[0] == "Anonymous:" and words[1] == "0":
            for place, block in enumerate(blocks):
                shared_bytes[place] += max(0, min(end, block.last_page) - max(first, block.first_page))
    return [number == block.last_page - block.first_page for number, block in zip(shared_bytes, blocks, strict=True)]


def _blocks_of(arrays: Sequence[NDArray[Any]]) -> list[_Block]:
    """Blocks of memory that arrays are in, each once; not those of files."""
    blocks: dict[int, _Block] = {}
    for array in arrays:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if not isinstance(owner, np.memmap):
            blocks.setdefault(owner.ctypes.data, _Block(owner)).views.append(array)
    return list(blocks.values())


class _Block:
    """Memory of one array, and of its views.

    In its file, an address has the same place in a page as here.

    Attributes:
        views: Arrays in it that are trained.
        is_mapping: Whether glibc's malloc has mapped it by itself, so that nothing else is in its pages.
        kind: What is equal for arrays that may be equal.
        first_page, last_page: Addresses of its first whole page, and of what follows its last one.
    """

    def __init__(self, owner: NDArray[Any]) -> None:
        self.owner, self.address, self.num_bytes = owner, owner.ctypes.data, owner.nbytes
        self.views: list[NDArray[Any]] = []
        self.kind = str(owner.dtype), owner.shape, owner.strides
        self.is_mapping = self._has_own_mapping()
        self._start = self.address // PAGE * PAGE
        self._begin = self.address - self._start
        self._end = self._begin + self.num_bytes
        self.first_page = self._start + -(-self._begin // PAGE) * PAGE
        self.last_page = self._start + self._end // PAGE * PAGE

    def _has_own_mapping(self) -> bool:
        if not self.owner.flags.owndata or self.owner.dtype.hasobject or self.address % PAGE != HEADER:
            return False
        size = ctypes.c_size_t.from_address(self.address - SIZE).value
        return size & FLAGS == IS_MAPPING and size - IS_MAPPING >= HEADER + self.num_bytes

    @contextlib.contextmanager
    def in_file(self) -> Iterator[tuple[int, str]]:
        """Context with the descriptor and the name of a file in memory that is mapped in place of the array.

        -1: it could not be made.
        """
        number, name = -1, f"{NAME}-{uuid.uuid4()}"
        try:
            # An error on one rank alone would leave the others waiting. What is mapped has the array's content already.
            with contextlib.suppress(Exception):
                number = _libc.memfd_create(name.encode(), CLOSE_ON_EXEC)
                os.ftruncate(number, self._end)
                # A part after the other, so that never much more than one copy is in memory.
                for begin in range(0, self._end, CHUNK):
                    end = min(begin + CHUNK, self._end)
                    _write(number, self._start, max(begin, self._begin), end)
                    self._map(number, begin, end)
            yield (number, name) if _shared([self])[0] else (-1, "")
        finally:
            if number >= 0:
                os.close(number)

    def map_from(self, folder: str, number: int, name: str) -> str:
        """Maps a file of another rank in place of the array, if it can; returns the view that differs, as a phrase.

        Args:
            folder: Of that rank's descriptors.
        """
        path = f"{folder}/{number}"
        with contextlib.suppress(Exception):
            if number < 0 or name not in os.readlink(path):  # or the process has another number there
                return ""
            with open(path, "rb") as file:
                content = mmap.mmap(file.fileno(), self._end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                address = np.frombuffer(content, np.uint8).ctypes.data + self._begin
                if _libc.memcmp(address, self.address, self.num_bytes):
                    return next(filter(None, (self._difference(view, content) for view in self.views)), "")
                self._map(file.fileno(), 0, self._end)
        return ""

    def _map(self, number: int, begin: int, end: int) -> None:
        """Maps the whole pages of a part of the file in place of those of the array."""
        first = -(-max(begin, self._begin) // PAGE) * PAGE
        length = end // PAGE * PAGE - first
        if length <= 0:
            return
        flags, access = mmap.MAP_PRIVATE | FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self._start + first, length, access, flags, number, first) != self._start + first:
            raise OSError(ctypes.get_errno(), "mmap")

    def _difference(self, view: NDArray[Any], content: mmap.mmap) -> str:
        """Type, shape and first row of a view that is another in a file; "": it is equal."""
        offset = view.ctypes.data - self._start
        other: NDArray[Any] = np.ndarray(view.shape, view.dtype, content, offset, view.strides)
        per_chunk = max(1, CHUNK * len(view) // view.nbytes)
        for begin in range(0, len(view), per_chunk):
            part = slice(begin, begin + per_chunk)
            if view[part].tobytes() != other[part].tobytes():
                pairs = zip(view[part], other[part], strict=True)
                row = next(row for row, (one, its) in enumerate(pairs) if one.tobytes() != its.tobytes())
                return f"array, {view.dtype} {view.shape}, from row {begin + row} on,"
        return ""


def _write(number: int, start: int, begin: int, end: int) -> None:
    """Writes memory at `start` + `begin` to a file at `begin`."""
    content = memoryview((ctypes.c_char * (end - begin)).from_address(start + begin)).cast("B")
    written = 0
    while written < len(content):
        written += os.pwrite(number, content[written:], begin + written)
