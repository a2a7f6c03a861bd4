"""Copies of a run's state in the memory of its hosts, from which it goes on after the loss of any one of them.

Weights and optimizer are equal on all ranks, so the first rank of each host writes its own copy: only what differs
between ranks, and what rank 0 alone has, is sent for it. The copies are in a `memory_folder`.

A run gets its ID when it begins anew. The ID is in memory.json of its folder, too, and in the manifest of every copy.
A copy is taken only if it has the ID of rank 0's folder, or one that this launch has written in an earlier attempt.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import config_io
from ringtrain.config import Config
from ringtrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from ringtrain.run import checkpoint, durable
from ringtrain.run.memory_folder import (
    KEEP,
    ROOT,
    Copies,
    Copy,
    Host,
    folder_of,
    free_in_memory,
    in_memory,
    mark_of,
    name_of,
    remove,
    write_mark,
)
from ringtrain.run.run_folder import METRICS

if TYPE_CHECKING:
    from ringtrain.run.context import Job, Process
    from ringtrain.run.resume import Start

OPTION = "checkpoint.memory_every_steps"
PIECE_BYTES = 1 << 26
"""of a file that are sent to rank 0 in one message"""


# ---- before training -------------------------------------------------------------------------------------------------


def fetch(process: Process) -> bool:
    """Copies the newest state in the memory of the hosts to rank 0's disk, if it is newer than what is there.

    Every copy is compared with its checksums after it has arrived. One that is damaged is reported, and the next newest
    is taken. Collective.

    Returns:
        Whether there is one, with which the run goes on.
    """
    from ringtrain import hvd

    config, rank = process.config, hvd.rank()
    if process.strategy.ranks_change:
        raise ConfigError(
            f"{OPTION} does not work in elastic jobs, whose other ranks have the state when one is lost: leave one out"
        )
    if not config.run.name or (config.run.resume == "never" and not process.attempt.number):
        return False
    run = Path(config.run.directory) / config.run.name
    here = hvd.run_together(lambda: in_memory(folder_of(run)) if hvd.local_rank() == 0 else Host())
    hosts = hvd.allgather_object(here, name="ringtrain_memory")
    if not any(host.copies or host.problems for host in hosts):
        return False
    # Rank 0 knows its disk, and decides.
    runs, disk_step = hvd.on_rank_0(lambda: _wanted(hosts, process, run))
    found, notes = candidates(hosts, runs, disk_step)
    fetched = False
    for copy, source in found:
        problem = _copy_to_disk(copy, source, run, config)
        fetched, name = not problem, hosts[source].name
        if fetched:
            notes.append(f"step {copy.step:,} is from the memory of {name}")
            break
        notes.append(f"memory of {name}: {problem}: not taken")
    for note in notes if rank == 0 else ():
        print(f"ringtrain: {note}", file=sys.stderr, flush=True)
    return fetched


def begin(process: Process, job: Job, folder: Path, start: Start) -> None:
    """Opens the run's copies on each host that has memory for them, and adds their row to the plan. Collective."""
    from ringtrain import hvd

    every = process.config.checkpoint.memory_every_steps
    if not every:
        return
    _refuse(job.model)
    run = hvd.on_rank_0(lambda: _id_of(folder, start, process))
    needed_bytes = KEEP * _num_bytes(job.model)

    def open_here() -> tuple[str, int, str]:
        """Host, free bytes and why it has no copies."""
        if hvd.local_rank():
            return "", 0, ""
        host, memory = socket.gethostname(), folder_of(folder)
        try:
            copies = Copies(memory, run, process.attempt.job, start.global_step)
            free_bytes = free_in_memory(memory)
        except OSError as error:
            return host, 0, f"{error.filename or memory}: {error.strerror}"
        if free_bytes < needed_bytes:
            problem = f"{free_bytes / 1e6:,.0f} MB free in {ROOT}, {needed_bytes / 1e6:,.0f} MB needed"
            return host, free_bytes, problem
        process.memory = copies
        return host, free_bytes, ""

    opened = [on_host for on_host in hvd.allgather_object(open_here(), name="ringtrain_memory") if on_host[0]]
    row = f"every {every} steps, {KEEP} x {needed_bytes / KEEP / 1e6:,.3g} MB in {ROOT} of each host"
    free = [free_bytes for _, free_bytes, problem in opened if not problem]
    if free:
        row += f", of which {min(free) / 1e6:,.0f} MB are free"
    without = [f"{host} ({problem})" for host, _, problem in opened if problem]
    if without:
        row += f"; none on {', '.join(without)}"
        if hvd.rank() == 0:
            print(f"ringtrain: {OPTION}: no copies on {', '.join(without)}", file=sys.stderr, flush=True)
    job.plan["memory copies"] = row


def end(process: Process, folder: Path) -> None:
    """Removes the copies of a complete run on this host, given the run's folder."""
    from ringtrain import hvd

    if process.config.checkpoint.memory_every_steps and not hvd.local_rank():
        remove(folder_of(folder))


def candidates(
    hosts: Sequence[Host], runs: Collection[str], disk_step: int
) -> tuple[list[tuple[Copy, int]], list[str]]:
    """Returns copies that may be taken, newest first, each with a rank that has it; and why others are not.

    Args:
        hosts: By rank.
        runs: IDs of runs whose copies may be taken.
        disk_step: Newest step on disk, which a copy must exceed.
    """
    problems = [problem for host in hosts for problem in host.problems]
    sources: dict[tuple[int, str], list[int]] = {}
    copies: dict[tuple[int, str], Copy] = {}
    different: set[tuple[int, str]] = set()
    for rank, host in enumerate(hosts):
        for copy in host.copies:
            if copy.run not in runs or copy.step <= disk_step:
                continue
            key = copy.step, copy.run
            first = copies.setdefault(key, copy)
            sources.setdefault(key, []).append(rank)
            if copy.digest != first.digest:
                different.add(key)
    for step, _ in sorted(different):
        problems.append(f"copies of step {step:,} in memory differ between hosts: not taken")
    found = []
    for key in sorted(copies.keys() - different, reverse=True):
        for rank in sources[key]:
            found.append((copies[key], rank))
    return found, problems


def _wanted(hosts: Sequence[Host], process: Process, run: Path) -> tuple[frozenset[str], int]:
    """IDs whose copies may be taken, and the newest step on disk, -1 if there is none; on rank 0."""
    newest, _ = checkpoint.newest(run / "checkpoints")
    disk_step = newest.global_step if newest else -1
    attempt, of_disk = process.attempt, mark_of(run).get("run", "")
    # A restart: whatever this launch has written, as rank 0's disk may be another one.
    of_job = frozenset(host.run for host in hosts if attempt.number and host.job and host.job == attempt.job)
    if of_job:
        return of_job, disk_step
    if of_disk:
        return frozenset([of_disk]), disk_step
    # Without the run's folder, nothing tells an old run of this name from this one: a person has to.
    of_all = {copy.run for host in hosts for copy in host.copies}
    if process.config.run.resume == "must" and not newest:
        return frozenset([max(of_all, default="")]), disk_step
    if of_all and not newest:
        text = (
            f"{run} is new: copies in memory of an earlier run of this name are not taken; run.resume must takes them"
        )
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)
    return frozenset(), disk_step


def _id_of(folder: Path, start: Start, process: Process) -> str:
    """ID of the run in a folder: a new one if it begins anew. On rank 0."""
    run = ""
    if start.source and Path(start.source).parent == folder / "checkpoints":
        run = str(mark_of(folder).get("run", ""))
    run = run or f"{time.time_ns()}-{secrets.token_hex(8)}"  # the newest is the greatest
    write_mark(folder, run, process.attempt.job)
    return run


# ---- from the memory of one host to the disk of another --------------------------------------------------------------


@dataclass
class _Arriving:
    """A checkpoint of which rank 0 writes the files as they arrive; does nothing after an error."""

    folder: Path
    problem: str = ""

    def write(self, name: str, content: NDArray[np.uint8]) -> None:
        if self.problem:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / name, "ab") as file:
                file.write(content.data)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}"


def _copy_to_disk(copy: Copy, source: int, run: Path, config: Config) -> str:
    """Sends a copy to rank 0, which verifies it and makes it a checkpoint; returns why not, or "". Collective."""
    from ringtrain import hvd

    memory = folder_of(run) / name_of(copy.step)
    arriving = _Arriving(run / "checkpoints" / f"{checkpoint.UNFINISHED}memory-{os.getpid()}")
    shutil.rmtree(arriving.folder, ignore_errors=True)
    for name, size in copy.sizes.items():
        for begin in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - begin)
            piece = np.zeros(0, np.uint8)
            if hvd.rank() == source:
                piece = _read(memory / name, begin, length)
            received = hvd.forward_bytes(piece, length, source, name="ringtrain_memory")
            if hvd.rank() == 0:
                arriving.write(name, received)
    return hvd.on_rank_0(lambda: _install(arriving, copy, run, config))


def _read(path: Path, begin: int, length: int) -> NDArray[np.uint8]:
    """Part of a file; zeros for what cannot be read, which its checksum then shows."""
    content = np.zeros(length, np.uint8)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(begin)
        file.readinto(content.data)
    return content


def _install(arriving: _Arriving, copy: Copy, run: Path, config: Config) -> str:
    """Makes a copy that has arrived the newest checkpoint of a run; returns why not, or ""."""
    if arriving.problem:
        shutil.rmtree(arriving.folder, ignore_errors=True)
        return arriving.problem
    try:
        saved = checkpoint.verify(arriving.folder)
        if checkpoint.read_manifest(arriving.folder)[1] != copy.digest:
            raise DamagedCheckpoint(f"{name_of(copy.step)}: has changed meanwhile")
        # With these files, the folder is that of a run, as on the host that is lost.
        if not (run / "config.toml").exists():
            durable.write(run / "config.toml", config_io.to_toml(config))
        records = saved.manifest.get("records", "")
        if records:
            durable.write(run / METRICS, records)
        write_mark(run, copy.run, "")
        final = run / "checkpoints" / name_of(copy.step)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        os.rename(arriving.folder, final)
        durable.flush(final.parent)
    except CheckpointError as error:
        return str(error).replace(str(arriving.folder), name_of(copy.step))
    except OSError as error:
        return f"{error.filename or run}: {error.strerror}"
    finally:
        shutil.rmtree(arriving.folder, ignore_errors=True)
    return ""


# ---- of the model ----------------------------------------------------------------------------------------------------


def _refuse(model: Any) -> None:
    """Raises ConfigError for a model of which no rank has the whole state."""
    from ringtrain import hvd
    from ringtrain.run import model_state

    sharded = any(hvd.part_of(variable) for variable in model_state.shared_variables(model))
    if sharded or hvd.local_steps_of(model) > 1:
        raise ConfigError(
            f"{OPTION}: the optimizer is sharded or makes local steps: no rank has the whole state: leave one out"
        )


def _num_bytes(model: Any) -> int:
    """Bytes of a copy, without what callbacks and reducers keep."""
    import tensorflow as tf

    from ringtrain import hvd
    from ringtrain.run import model_state

    of_ranks = [*hvd.seeds(model), *hvd.weights_of_one_rank(model)] * hvd.size()
    variables = [*model_state.shared_variables(model), *of_ranks]
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
