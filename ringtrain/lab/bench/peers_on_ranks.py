"""bench peers, on a rank: trains once under one strategy, and writes down when steps ended or what went wrong."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ringtrain import config_io
from ringtrain.config import Config
from ringtrain.derived import derive
from ringtrain.errors import ConfigError
from ringtrain.lab import stats
from ringtrain.lab.bench.baselines.training import Trained, Training
from ringtrain.run import console, setup

WARM_STEPS = 10
SECONDS_BETWEEN_LOOKS = 0.5


def main(argv: Sequence[str]) -> int:
    """Trains on all ranks; each writes rank-N.json, and rank 0 exits last."""
    own, told = stats.split(argv)
    parser = argparse.ArgumentParser(prog="bench peer", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--run", required=True, help="module:function of ringtrain.lab.bench.baselines; empty: ringtrain"
    )
    parser.add_argument("--workers", type=int, required=True, help="that train, each with a batch of its own")
    parser.add_argument("--ranks", type=int, required=True, help="processes")
    parser.add_argument("--ports", required=True, help="free ones: 1234,1235")
    parser.add_argument("--steps", type=int, required=True, help="after those that warm up")
    parser.add_argument("--limit", type=float, required=True, help="seconds, after which this process ends")
    parser.add_argument("--folder", required=True, type=Path, help="for what ranks write")
    parser.add_argument("--out", required=True, type=Path, help="file that says that rank 0 was here")
    options = parser.parse_args(own)
    rank = console.launched_rank() or 0
    if rank == 0:
        stats.write(options.out, "peers", {}, {})
    end = End(options.folder, rank, options.limit)
    try:
        config = _enough(config_io.read(told), options)
        found = _ringtrain(config, options) if not options.run else _strategy(config, options, rank)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # not a failure of the peer
    except BaseException as error:
        end.now({"error": in_a_line(error)})
    end.write(dataclasses.asdict(found))
    while rank == 0 and len(list(options.folder.glob("rank-*.json"))) < options.ranks:
        time.sleep(0.1)  # other ranks may need rank 0 until they have exited
    if {"horovod", "mpi4py"} & set(sys.modules):
        return 0  # MPI must be finalized
    end.now({})


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
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for path in self.folder.glob("rank-*.json"):
                if path != self.path and "error" in json.loads(path.read_text(encoding="utf-8")):
                    self.now({"error": f"ended because of {path.stem}"})
        self.now({"error": f"TimeoutError: no end within {self.limit_s:g} s"})


def _enough(config: Config, options: argparse.Namespace) -> Config:
    """Sets as many samples as one epoch of these steps needs."""
    if config.data.name != "synthetic":
        raise ConfigError(f"data.name: got {config.data.name}, expected synthetic, of which bench peers makes enough")
    num_train = (WARM_STEPS + options.steps) * config.train.batch_size * options.workers
    data = dataclasses.replace(config.data, num_samples=-(-8 * num_train // 7))  # an eighth is for the test
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, epochs=1))


def _ringtrain(config: Config, options: argparse.Namespace) -> Trained:
    """Runs the ordinary trainer with one more callback."""
    from ringtrain import train
    from ringtrain.lab.bench.baselines.by_fit import Watch

    watch = f"{Watch.__module__}:{Watch.__name__}"
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, directory=str(options.folder)),
        train=dataclasses.replace(config.train, callbacks=(*config.train.callbacks, watch)),
    )
    train.train(config)
    if (watched := Watch.latest) is None:
        return Trained(0)  # a rank of parameter servers
    asynchronous = config.strategy.name == "ps-async"
    watched.trained.images_per_end = config.train.batch_size * (1 if asynchronous else options.workers)
    return watched.trained


def _strategy(config: Config, options: argparse.Namespace, rank: int) -> Trained:
    module, _, function = options.run.partition(":")
    data_set = setup.find(config).read_data()
    numbers = derive(config, options.workers, len(data_set.train), len(data_set.test))
    ports = tuple(int(port) for port in options.ports.split(","))
    training = Training(config, numbers, data_set, options.workers, rank, ports, options.folder)
    run: Callable[[Training], Trained] = getattr(
        importlib.import_module(f"ringtrain.lab.bench.baselines.{module}"), function
    )
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        here = -(-options.workers // options.ranks)  # workers in this process
        tf.config.threading.set_intra_op_parallelism_threads(config.device.threads)
        tf.config.threading.set_inter_op_parallelism_threads(config.device.threads * here)
    return run(training)
