"""One start of a peer, on its ranks: trains, and records steps, losses and checksums."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ringtrain.config import files
from ringtrain.config.derived import derive
from ringtrain.config.sections import Config
from ringtrain.errors import ConfigError
from ringtrain.protocol.launchers import launched_rank
from ringtrain.training import configured

if TYPE_CHECKING:
    import keras

WARM_STEPS = 10
POLL_S = 0.5


@dataclass(frozen=True)
class OneStart:
    """One start of a peer."""

    run: str
    """as of Peer"""
    workers: int
    ranks: int
    """processes"""
    ports: Sequence[int]
    """unused ones, one more than processes"""
    steps: int
    """after the warm-up steps"""
    limit_s: int
    """after which each process exits"""
    folder: str
    """for the results of all ranks"""
    begin_s: float
    """Unix time at which it was started"""


def on_ranks(given: dict[str, Any], train_args: Sequence[str]) -> None:
    """Trains on all ranks; each writes rank-N.json, and rank 0 exits last. given: fields of OneStart."""
    options = OneStart(**given)
    rank, folder = launched_rank() or 0, Path(options.folder)
    end = End(folder, rank, options.limit_s)
    try:
        config = _enough(files.read(train_args), options)
        if options.run:
            trained = _by_hand(config, options, rank)
        else:
            trained = _ringtrain(config, options)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # not a failure of the peer
    except BaseException as error:
        end.now({"error": in_a_line(error)})
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end.write({"memory_mb": peak_kb / 1024, **dataclasses.asdict(trained)})
    while rank == 0 and len(list(folder.glob("rank-*.json"))) < options.ranks:
        time.sleep(0.1)  # other ranks may need rank 0 until they have exited


def in_a_line(error: BaseException) -> str:
    """Formats an error's type and the first and last line of its message."""
    lines = [line[:200] for line in str(error).strip().splitlines()] or [""]
    return f"{type(error).__name__}: {' ... '.join([lines[0], *lines[1:][-1:]])}"


class End:
    """Exit of this process: within the time limit, after an error of another rank, and with the reason recorded."""

    def __init__(self, folder: Path, rank: int, limit_s: float) -> None:
        self.folder, self.path, self.limit_s = folder, folder / f"rank-{rank}.json", limit_s
        signal.alarm(int(limit_s) + 5)  # if Python code no longer runs
        threading.Thread(target=self._look, daemon=True).start()

    def write(self, found: dict[str, Any]) -> None:
        """Writes the result of this rank, once."""
        if not self.path.exists():
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"time_s": time.time(), **found}), encoding="utf-8")
            unfinished.replace(self.path)

    def now(self, found: dict[str, Any]) -> NoReturn:
        """Writes the result and exits at once, since TensorFlow's servers may keep a process from exiting."""
        self.write(found)
        sys.stdout.flush()
        os._exit(0)

    def _look(self) -> None:
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + self.limit_s:
            time.sleep(POLL_S)
            for path in self.folder.glob("rank-*.json"):
                if path != self.path and "error" in json.loads(path.read_text(encoding="utf-8")):
                    self.now({"error": f"ended because of {path.stem}"})
        self.now({"error": f"TimeoutError: no end within {self.limit_s:g} s"})


def _enough(config: Config, options: OneStart) -> Config:
    """Sets as many samples as one epoch of these steps needs."""
    if config.data.name != "synthetic":
        raise ConfigError(f"data.name: got {config.data.name}, expected synthetic, of which a start makes enough")
    num_train = (WARM_STEPS + options.steps) * config.train.batch_size * options.workers
    num_samples = num_train // 7 * 8 + num_train % 7  # an eighth is for the test
    data = dataclasses.replace(config.data, num_samples=num_samples)
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, epochs=1))


def _ringtrain(config: Config, options: OneStart) -> Trained:
    """Runs the ordinary trainer with one more callback."""
    from ringtrain import train

    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, directory=options.folder),
        train=dataclasses.replace(config.train, callbacks=(*config.train.callbacks, f"{__name__}:watch")),
    )
    train.train(config)
    if not WATCHED:
        return Trained(0)  # a rank of parameter servers
    WATCHED[-1].images_per_end = config.train.batch_size
    if config.strategy.name != "ps-async":
        WATCHED[-1].images_per_end *= options.workers
    return WATCHED[-1]


def _by_hand(config: Config, options: OneStart, rank: int) -> Trained:
    """Runs a function of benchmarks/peers."""
    module, _, function = options.run.partition(":")
    run = getattr(importlib.import_module(f"peers.{module}"), function)
    data_set = configured.find(config).read_data()
    numbers = derive(config, options.workers, len(data_set.train), len(data_set.test))
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        here = -(-options.workers // options.ranks)  # workers in this process
        tf.config.threading.set_intra_op_parallelism_threads(config.device.threads)
        tf.config.threading.set_inter_op_parallelism_threads(config.device.threads * here)
    training = importlib.import_module("peers.training").Training
    return run(training(config, numbers, data_set, options.workers, rank, options.ports, Path(options.folder)))


@dataclass
class Trained:
    """Measurements of one process."""

    images_per_end: int
    """samples of all workers per step"""
    ends_s: list[float] = field(default_factory=list)
    """end times of steps, by the clock that all processes of a host share"""
    losses: list[float] = field(default_factory=list)
    """of these steps, on one worker's batch"""
    checksums: list[str] = field(default_factory=list)
    """of each copy of the weights in this process, at the end"""

    def note(self, loss: Any) -> None:
        """Records the end of a step."""
        self.ends_s.append(time.time())
        self.losses.append(float(loss))


def checksum(weights: Iterable[Any]) -> str:
    """Checksum of arrays or variables."""
    value = 0
    for weight in weights:
        array = weight.detach() if hasattr(weight, "detach") else weight  # PyTorch's
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return f"{value:08x}"


WATCHED: list[Trained] = []
"""of the callbacks that watch() has made, which train.train makes by name"""


def watch() -> keras.callbacks.Callback:
    """Callback that records when steps end, in its `trained` and in WATCHED."""
    import keras

    class Watch(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.sum = Trained(0), 0.0
            WATCHED.append(self.trained)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            so_far = float((logs or {})["loss"]) * (len(self.trained.losses) + 1)  # Keras reports the mean so far
            self.trained.note(so_far - self.sum)
            self.sum = so_far

        def on_train_end(self, logs: Any = None) -> None:
            values = [weight.value for weight in self.model.trainable_variables]
            # MirroredStrategy's have several copies; a tensor of PyTorch has a method of that name.
            copies = []
            for value in values:
                has_copies = isinstance(getattr(value, "values", None), tuple)
                copies.append(value.values if has_copies else (value,))
            self.trained.checksums = [checksum(copy) for copy in zip(*copies, strict=True)]

    return Watch()
