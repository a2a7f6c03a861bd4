"""Opens the folder of a run on rank 0: lock, mirror, logs, and its take-over by a rank that becomes rank 0."""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.checkpoint import checkpoint, durable, run_folder
from ringtrain.config import files
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.errors import CheckpointError, ConfigError, DataError, RunDirectoryError
from ringtrain.protocol import failures
from ringtrain.training import log_capture
from ringtrain.training.run import Opening

if TYPE_CHECKING:
    from ringtrain.training.clock import Start
    from ringtrain.training.run import Run

PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")
"""in a URL"""


class FromCheckpoint:
    """State of a run from its newest checkpoint: a base class of sources, see `training.run.Source`."""

    def restore(self, run: Run) -> tuple[Start, Mapping[str, Any]]:
        from ringtrain.training import resume  # loads TensorFlow

        find_files(run)
        return resume.restore(run)

    def open_folder(self, run: Run) -> Opening:
        from ringtrain import hvd
        from ringtrain.training import tracking

        # Journals of all ranks have the same start, by which a reader knows the lines of one attempt.
        folder = make_folder(run)
        facts = {
            "global_step": run.start.global_step,
            "resumed_from": run.start.source,
            "stages": run.stages.moments,
            "versions": tracking.versions(),
        }
        start_s = hvd.broadcast_object(time.time(), root_rank=0, name="ringtrain_start_s")
        return Opening(folder=folder, log=f"rank-{hvd.rank()}.log", event="start", facts=facts, start_s=start_s)


def find_files(run: Run) -> None:
    """Locks a run's folder, and brings its newest checkpoints to rank 0's disk. Collective."""
    from ringtrain import hvd

    # Locked before anything is read: another job, or an earlier attempt of this one, may still write to the folder.
    lock_folder(run)
    if run.config.run.mirror:
        hvd.on_rank_0(lambda: _fetch(run))
        lock_folder(run)


def lock_folder(run: Run) -> None:
    """Lets rank 0 lock an existing run folder before anything is read from it. Collective; raises RunDirectoryError."""
    from ringtrain import hvd

    config = run.config
    existing = Path(config.run.directory) / config.run.name

    def take() -> None:
        if config.run.name and run_folder.is_run(existing):
            run.lock.take(existing, same_job=run.attempt.number > 0)

    hvd.on_rank_0(take)


def _fetch(run: Run) -> None:
    """Becomes the writer of the run's mirror, and copies the run from there if it is further than the local folder."""
    from ringtrain.checkpoint.mirror import Mirror

    config, lock = run.config, run.lock
    if not config.run.name:
        raise ConfigError("run.mirror needs the name by which a start on another host finds the run: give --run.name")
    if PASSWORD.search(config.run.mirror):
        raise ConfigError("run.mirror has a password, which config.toml would contain: use the store's own credentials")
    folder = Path(config.run.directory) / config.run.name
    there, here = Path(config.run.mirror).resolve() / config.run.name, folder.resolve()
    if "://" not in config.run.mirror and (there.is_relative_to(here) or here.is_relative_to(there)):
        raise ConfigError(f"run.mirror: got {config.run.mirror}, which is run.directory or in the run: choose another")
    is_again = run.attempt.number > 0
    lock.mirror = lock.mirror or Mirror(config.run.mirror, config.run.name, same_job=is_again)
    if config.run.resume == "never" and not is_again:
        if lock.mirror.has_run():
            raise RunDirectoryError(f"{lock.mirror.url}: exists already: choose another --run.name, or delete it")
        return
    fetched = lock.mirror.fetch(folder)
    if fetched:
        print(f"ringtrain: {lock.mirror.url}: copied from there: {fetched}", file=sys.stderr, flush=True)


def open_log(run: Run, path: Path) -> None:
    """Also writes standard error to the log of this rank from now on."""
    from ringtrain import hvd

    first_line = f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}: {run.pinning}"
    run.strategy.together(lambda: log_capture.log_to(path, first_line))


def make_folder(run: Run) -> Path:
    """Creates the run folder on rank 0, or reuses that of the previous attempt, and broadcasts its path. Collective."""
    from ringtrain import hvd

    config, lock = run.config, run.lock

    # On rank 0, whose clock names it; with the lock, so that no second job can take it.
    def make() -> Path:
        name = config.run.name or run_folder.default_name(run_folder.script_name() or config.data.name)
        folder = run_folder.create_folder(
            Path(config.run.directory),
            name,
            number_if_taken=not config.run.name,
            # Without the lock, the folder did not exist when checkpoints were searched.
            reuse=lock.folder is not None and (config.run.resume != "never" or run.attempt.number > 0),
        )
        lock.take(folder)
        _write_config(folder, config, run.job.numbers)
        return folder

    # The others get its name. Checkpoints after the one that training resumes from belong to a past that is left.
    folder = hvd.on_rank_0(make)
    if hvd.rank() == 0 and run.is_first:
        failures.report_run(folder.name)
    if run.start.source:
        hvd.on_rank_0(lambda: checkpoint.remove_after(folder / "checkpoints", run.start.global_step))
    return folder


def _write_config(folder: Path, config: Config, numbers: Numbers) -> None:
    derived = "".join(f"# {name} = {value}\n" for name, value in dataclasses.asdict(numbers).items())
    durable.write(folder / "config.toml", f"# derived:\n{derived}\n{files.to_toml(config)}")


def take_over(run: Run, folder: Path, records: str) -> None:
    """Lets a rank that has become rank 0 write to the folder of its run, which its host may not have. On rank 0."""
    config, lock = run.config, run.lock
    if lock.folder == folder:
        return
    is_here = (folder / "config.toml").is_file()
    if not is_here:
        run_folder.make_subfolders(folder)
    lock.take(folder, same_job=True)
    if config.run.mirror:
        _take_over_mirror(run, folder)
    if len(run_folder.records_of(folder)) < len(records):
        durable.write(folder / run_folder.METRICS, records)
    if not is_here:
        _write_config(folder, config, run.job.numbers)
        text = f"{folder} is made on {socket.gethostname()}, the host of rank 0 now"
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def _take_over_mirror(run: Run, folder: Path) -> None:
    """Becomes the writer of the run's mirror. If that cannot be reached, training continues without it."""
    from ringtrain.checkpoint.mirror import Mirror

    config, lock = run.config, run.lock
    try:
        lock.mirror = Mirror(config.run.mirror, config.run.name, same_job=True)
        lock.mirror.fetch(folder)
        lock.mirror.add(folder)  # the former rank 0 may not have copied all
    except DataError as error:
        if lock.mirror:
            lock.mirror.close()
            lock.mirror = None
        text = f"{error}: nothing more is copied there; when training is over, the same command copies what is missing"
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def finish_mirror(run: Run, exit_code: int, ends_s: float) -> None:
    """Waits until the run's mirror has all of it. Collective; raises CheckpointError, or reports it after a signal."""
    if not run.config.run.mirror:
        return

    def finish() -> None:
        if run.lock.mirror is None:  # not on rank 0
            return
        try:
            run.lock.mirror.finish(run.folder, ends_s)
        except CheckpointError as error:
            if not exit_code:
                raise
            print(f"ringtrain: {error}", file=sys.stderr, flush=True)  # the exit code asks to be started again

    run.strategy.together(finish)
