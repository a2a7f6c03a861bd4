"""Large arrays in memory once per host, although each rank has made its own.

    the host's first rank   copies its array to a file in memory, and maps the file in place of the array's pages
    the other ranks         compare their array with the file, and map it in place of their pages

The arrays stay the script's: the same objects at the same addresses. A rank that writes to one has its own pages again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.dataset import DataSet
from ringtrain.errors import DataError

PAGE = mmap.PAGESIZE
HEADER = 16
"""bytes before the address that malloc of glibc returns; the last 8 are the size of the block and its flags"""
FLAGS, IS_MAPPING = 7, 2
"""flags; that of a block which is a mapping of its own"""
CHUNK = 16_384 * PAGE
"""bytes that are copied and mapped at once"""
FIXED = 0x10
"""flag of mmap: in place of what is there"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_shared: dict[int, weakref.ref[NDArray[Any]]] = {}
"""arrays whose pages are mapped already, by their address"""


def share(data_set: DataSet) -> dict[str, str]:
    """Lets the ranks of a host hold the large arrays of a data set once; returns the plan's row for them. Collective.

    Every rank has the same arrays. Those whose memory is not NumPy's own, such as a `np.memmap`, stay as they are.

    Raises:
        DataError: On all ranks: an array is not the same on two ranks of a host.
    """
    blocks = _blocks_of([*data_set.train.large, *data_set.test.large])
    _map_once([block for block in blocks if not block.is_shared])
    num_bytes = sum(block.num_bytes for block in blocks)
    num_shared = sum(block.num_bytes for block in blocks if block.is_shared)
    rows = {"once per host": num_shared, "on each rank": num_bytes - num_shared}
    texts = [f"{number / 1e9:.1f} GB {where}" for where, number in rows.items() if number]
    return {"arrays": ", ".join(texts)} if texts else {}


def _map_once(blocks: Sequence[_Block]) -> None:
    """Maps the same pages for each block on all ranks of a host. Collective."""
    from ringtrain import hvd

    mine = _host(), [block.kind for block in blocks]
    of_ranks = hvd.allgather_object((mine, os.getpid()), name="ringtrain_arrays")
    on_host = [rank for rank, (of_rank, _) in enumerate(of_ranks) if of_rank == mine]
    first, is_first = on_host[0], hvd.rank() == on_host[0]
    if not any(kinds for (_, kinds), _ in of_ranks):
        return

    # The first rank of a host writes the files. The others open them while it keeps them open.
    different = ""
    with contextlib.ExitStack() as files:
        own = [files.enter_context(block.in_file()) for block in blocks] if is_first and len(on_host) > 1 else []
        numbers = hvd.allgather_object(own, name="ringtrain_array_files")[first]
        if not is_first:
            paths = [f"/proc/{of_ranks[first][1]}/fd/{number}" for number in numbers]
            texts = [block.map_from(path) for block, path in zip(blocks, paths, strict=True)]
            different = next(filter(None, texts), "")
        of_ranks = hvd.allgather_object(different, name="ringtrain_arrays_are_mapped")
    for rank, text in enumerate(of_ranks):
        if text:
            raise DataError(
                f"ringtrain.fit: rank {rank} has another {text} than the first rank of its host: pass the same arrays"
                f" on every rank"
            )


def _host() -> tuple[str, int, int]:
    """What two processes have in common if one may open the files of the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, Path("/proc/self/ns/pid").stat().st_ino, os.getuid()
    except OSError:  # unknown
        return str(uuid.uuid4()), 0, 0


def _blocks_of(arrays: Sequence[NDArray[Any]]) -> list[_Block]:
    """Blocks of memory of NumPy's own that arrays are in, each once."""
    blocks = {}
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        if array.flags.owndata and _is_mapping(array):
            blocks[array.ctypes.data] = _Block(array)
    return list(blocks.values())


def _is_mapping(array: NDArray[Any]) -> bool:
    """Whether glibc's malloc has mapped the memory of an array by itself, so that nothing else is in its pages."""
    address = array.ctypes.data
    if address % PAGE != HEADER:
        return False
    size = ctypes.c_size_t.from_address(address - HEADER // 2).value
    return size & FLAGS == IS_MAPPING and size - IS_MAPPING >= HEADER + array.nbytes


class _Block:
    """Memory of one array.

    In its file, an address has the same place in a page as here.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.num_bytes = array, array.nbytes
        self._start = array.ctypes.data // PAGE * PAGE
        self._begin = array.ctypes.data - self._start
        self._end = self._begin + self.num_bytes
        self.kind = str(array.dtype), array.shape, array.strides

    @property
    def is_shared(self) -> bool:
        """Whether its pages are those of a file in memory."""
        known = _shared.get(self._start)
        return known is not None and known() is self.array

    @contextlib.contextmanager
    def in_file(self) -> Iterator[int]:
        """Context with the descriptor of a file in memory that is mapped in place of the array; -1: not possible."""
        number = -1
        try:
            # A part after the other, so that never much more than one copy is in memory.
            with contextlib.suppress(OSError):
                number = os.memfd_create("ringtrain-array", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(number, self._end)
                for begin in range(0, self._end, CHUNK):
                    end = min(begin + CHUNK, self._end)
                    _write(number, self._start, max(begin, self._begin), end)
                    self._map(number, begin, end)
                fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                self._is_mapped()
            yield number if self.is_shared else -1
        finally:
            if number >= 0:
                os.close(number)

    def map_from(self, path: str) -> str:
        """Maps another rank's file in place of the array, if it can be opened; returns what differs, as a phrase."""
        with contextlib.suppress(OSError), open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), self._end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            address = np.frombuffer(content, np.uint8).ctypes.data
            if _libc.memcmp(address + self._begin, self._start + self._begin, self.num_bytes):
                return self._difference(content)
            self._map(file.fileno(), 0, self._end)
            self._is_mapped()
        return ""

    def _is_mapped(self) -> None:
        _shared[self._start] = weakref.ref(self.array)

    def _map(self, number: int, begin: int, end: int) -> None:
        """Maps the whole pages of a part of the file in place of those of the array."""
        first = -(-max(begin, self._begin) // PAGE) * PAGE
        length = end // PAGE * PAGE - first
        if length <= 0:
            return
        flags, access = mmap.MAP_PRIVATE | FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self._start + first, length, access, flags, number, first) != self._start + first:
            raise OSError(ctypes.get_errno(), "mmap")

    def _difference(self, content: mmap.mmap) -> str:
        """Type and shape of the array, and of rows that follow each other the first that is another in a file."""
        array = self.array
        text = f"array, {array.dtype} {array.shape}"
        if not array.flags.c_contiguous or not array.ndim:
            return text
        other = np.frombuffer(content, array.dtype, array.size, self._begin).reshape(array.shape)
        for row, (one, another) in enumerate(zip(array, other, strict=True)):
            if one.tobytes() != another.tobytes():
                return f"{text}, from row {row} on,"
        return text


def _write(number: int, start: int, begin: int, end: int) -> None:
    """Writes memory at `start` + `begin` to a file at `begin`."""
    content = memoryview((ctypes.c_char * (end - begin)).from_address(start + begin)).cast("B")
    written = 0
    while written < len(content):
        written += os.pwrite(number, content[written:], begin + written)
