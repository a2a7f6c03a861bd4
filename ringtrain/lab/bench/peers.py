"""bench peers: the same training by ringtrain, by hand, by TensorFlow's strategies and PyTorch, on this host.

Each run has its own start. The alternatives are in benchmarks/peers of the repository, which is not installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np

from ringtrain import config_io
from ringtrain.cluster.hosts import parse_hosts
from ringtrain.config import Config
from ringtrain.derived import derive
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_1, FILE, LIST, N
from ringtrain.protocol.launchers import launched_rank
from ringtrain.run import setup

if TYPE_CHECKING:
    import keras

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WARM_STEPS = 10
POLL_S = 0.5
COMMON = (
    "--model.name",
    "cnn",
    "--data.name",
    "synthetic",
    "--train.batch-size",
    "64",
    "--device.threads",
    "1",
    "--optimizer.name",
    "sgd",
    "--optimizer.learning-rate",
    "0.01",
)


@dataclass(frozen=True)
class Peer:
    """A way to train."""

    title: str
    run: str
    """module:function of benchmarks/peers; "": ringtrain.train"""
    processes: str = "per worker"
    """per worker; one; servers: one more than workers"""
    alone: bool = False
    """one worker"""
    strategy: str = ""
    """of ringtrain.train; "": ring"""

    def ranks(self, workers: int) -> int:
        """Number of processes to start."""
        return {"per worker": workers, "one": 1, "servers": workers + 1}[self.processes]

    def options(self, workers: int) -> list[str]:
        """Options of ringtrain.train in addition to those of all peers."""
        towers = ["--strategy.towers", str(workers)] if self.strategy == "towers" else []
        return ["--strategy.name", self.strategy, *towers] if self.strategy else []


PEERS = {
    "ringtrain": Peer("ringtrain.train", ""),
    "by-hand": Peer("Horovod, GradientTape by hand", "by_hand:run"),
    "mpi-ring": Peer("ringtrain.train, mpi-ring", "", strategy="mpi-ring"),
    "towers": Peer("ringtrain.train, towers", "", "one", strategy="towers"),
    "towers-by-hand": Peer("MirroredStrategy by hand", "synchronous:mirrored", "one"),
    "multi-worker": Peer("ringtrain.train, multi-worker", "", strategy="multi-worker"),
    "multi-worker-by-hand": Peer("MultiWorkerMirrored by hand", "synchronous:multi_worker"),
    "multi-worker-fit": Peer("MultiWorkerMirrored, fit", "synchronous:multi_worker_fit"),
    "ps-sync": Peer("ringtrain.train, ps-sync", "", "servers", strategy="ps-sync"),
    "ps-async": Peer("ringtrain.train, ps-async", "", "servers", strategy="ps-async"),
    "ps-async-by-hand": Peer("ParameterServer by hand, async", "parameter_servers:run", "servers"),
    "ps-fit": Peer("ParameterServer, fit", "parameter_servers:run_fit", "servers"),
    "torch": Peer("PyTorch DDP, Gloo", "torch_ddp:run"),
    "ringtrain-alone": Peer("ringtrain.train, one process", "", alone=True),
    "fit-alone": Peer("Keras' fit, one process", "by_fit:alone", alone=True),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # TensorFlow's servers print their settings
OVER = {
    "ringtrain-alone": "fit-alone",
    **{name: f"{name}-by-hand" for name in ("towers", "multi-worker", "ps-async")},
}
"""peers that are not compared with ringtrain on all workers"""
ONE_PROCESS = ("fit-alone", "ringtrain-alone")
"""peers whose speed times the number of workers is an efficiency of 1: the first that was run"""


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 5
    """measurements of each kind, in turns"""
    steps: Annotated[int, N, AT_LEAST_1] = 60
    """steps of a measurement"""
    peers: Annotated[str, LIST] = ""
    """some of them: ringtrain,by-hand,towers (all)"""
    limit: Annotated[int, N, AT_LEAST_1] = 120
    """seconds that one start may take"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


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


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures, prints and writes."""
    names = options.peers.split(",") if options.peers else list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise LaunchError(f"got --peers {unknown[0]}, expected some of {','.join(PEERS)}")
    hosts = start.launch.hosts
    workers = start.launch.np or (sum(host.slots for host in parse_hosts(hosts)) if hosts else 2)
    call = ranks.caller(start.oversubscribed())  # for the parameter server, which mostly waits
    train_args = [*COMMON, *start.train_args]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name, before in runs.items():
            never = before and not worked(before)  # it would fail again
            before.append(before[-1] if never else train_once(PEERS[name], workers, options, train_args, call))
    found = {name: summary(name, runs, workers) for name in names}
    show(found, f"{workers} workers of one thread: {' '.join(train_args)}")
    if options.out:
        about = {"steps": options.steps, "turns": options.turns, "workers": workers, "command": train_args}
        stats.write(Path(options.out), "peers", about, found)
    return 0


def train_once(
    peer: Peer, workers: int, options: Options, train_args: Sequence[str], call: ranks.Call
) -> dict[str, Any]:
    """Runs one start: images_per_s, losses and checksums of all copies of the weights; or the first error."""
    if peer.run and not BENCHMARKS.is_dir():
        return {"error": f"{BENCHMARKS} is missing: it is not installed, run from a checkout of ringtrain's repository"}
    workers = 1 if peer.alone else workers
    num_ranks = peer.ranks(workers)
    with tempfile.TemporaryDirectory(prefix="ringtrain-peers-") as folder:
        one = OneStart(peer.run, workers, num_ranks, free_ports(workers + 2), options.steps, options.limit, folder)
        failure = ""
        try:
            call(on_ranks, one, [*train_args, *peer.options(workers)], num_ranks, QUIET)
        except LaunchError as error:
            failure = str(error)
        said = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
    errors = sorted((one["time_s"], one["error"]) for one in said if "error" in one)
    if errors or failure:
        return {"error": errors[0][1] if errors else failure}
    # An asynchronous step belongs to one worker, so there are more of them by the number of workers.
    ends_s, images = said[0]["ends_s"], said[0]["images_per_end"]
    timed_s = ends_s[len(ends_s) * WARM_STEPS // (WARM_STEPS + options.steps) - 1 :]
    return {
        "images_per_s": images * (len(timed_s) - 1) / (timed_s[-1] - timed_s[0]),
        "losses": said[0]["losses"],
        "checksums": [checksum for one in said for checksum in one["checksums"]],
    }


def free_ports(number: int) -> list[int]:
    """Unused ports of this host."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]


def summary(name: str, runs: dict[str, list[dict[str, Any]]], workers: int) -> dict[str, Any]:
    """Summary of a peer's runs; `workers` applies to peers that are not alone."""
    peer, own = PEERS[name], runs[name]
    told: dict[str, Any] = {"title": peer.title, "workers": 1 if peer.alone else workers}
    good, failed = worked(own), [one["error"] for one in own if "error" in one]
    if not good:
        return {**told, "error": failed[0]}
    told |= {
        "failed": failed,
        "images_per_s": stats.Spread.of([one["images_per_s"] for one in good]),
        "losses": good[-1]["losses"],
        "checksums": good[-1]["checksums"],
        "equal": all(len(set(one["checksums"])) == 1 for one in good),
    }
    other = OVER.get(name, "" if peer.alone or name == "ringtrain" else "ringtrain")
    pairs = both_worked(own, runs.get(other, ()))
    if pairs:
        told["over"] = other
        told["ratio"] = speed_ratios(pairs)
        told["same_weights"] = all(one["checksums"][0] == another["checksums"][0] for one, another in pairs)
    alone = next((one for one in ONE_PROCESS if one in runs), "")
    if not peer.alone and (pairs := both_worked(own, runs.get(alone, ()))):
        told["efficiency"] = speed_ratios(pairs).times(1 / workers)
    return told


def both_worked(own: list[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Runs of two peers in the same rounds, without errors."""
    return [pair for pair in zip(own, others, strict=False) if len(worked(pair)) == 2]


def speed_ratios(pairs: Sequence[tuple[dict[str, Any], ...]]) -> stats.Spread:
    """Ratios of images/s, round by round."""
    return stats.ratios(*([one["images_per_s"] for one in each] for each in zip(*pairs, strict=True)))


def worked(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs without an error."""
    return [one for one in runs if "error" not in one]


def show(found: dict[str, dict[str, Any]], title: str) -> None:
    """Prints the measurements, and the reasons of failures."""
    rows, notes = [], []
    for one in found.values():
        if "error" in one:
            rows.append([one["title"], "does not run", "", "", "", ""])
            notes.append(f"{one['title']} does not run: {one['error']}")
            continue
        notes += [f"{one['title']}, one start of several: {error}" for error in one["failed"]]
        ratio = one["ratio"].text() if "ratio" in one else ""
        if one.get("over", "ringtrain") != "ringtrain":
            notes.append(f"{one['title']}: {ratio} of {PEERS[one['over']].title}")
            ratio = ""
        equal = "DIFFERENT" if not one["equal"] else "equal" if len(one["checksums"]) > 1 else "one copy"
        if one.get("same_weights"):
            equal += f", as {one['over']}'s"
        losses = f"{one['losses'][0]:.3f} to {one['losses'][-1]:.3f}"
        efficiency = one["efficiency"].text() if "efficiency" in one else ""
        rows.append([one["title"], one["images_per_s"].text(",.0f"), ratio, efficiency, losses, equal])
    Table(("", "images/s", "of ringtrain's", "efficiency", "loss", "weights"), rows, title).show()
    print("\n".join(notes))


def on_ranks(options: OneStart, train_args: Sequence[str]) -> None:
    """Trains on all ranks; each writes rank-N.json, and rank 0 exits last."""
    rank, folder = launched_rank() or 0, Path(options.folder)
    end = End(folder, rank, options.limit_s)
    try:
        config = _enough(config_io.read(train_args), options)
        trained = _by_hand(config, options, rank) if options.run else _ringtrain(config, options)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # not a failure of the peer
    except BaseException as error:
        end.now({"error": in_a_line(error)})
    end.write(dataclasses.asdict(trained))
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
        raise ConfigError(f"data.name: got {config.data.name}, expected synthetic, of which bench peers makes enough")
    num_train = (WARM_STEPS + options.steps) * config.train.batch_size * options.workers
    data = dataclasses.replace(config.data, num_samples=-(-8 * num_train // 7))  # an eighth is for the test
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
    asynchronous = config.strategy.name == "ps-async"
    WATCHED[-1].images_per_end = config.train.batch_size * (1 if asynchronous else options.workers)
    return WATCHED[-1]


def _by_hand(config: Config, options: OneStart, rank: int) -> Trained:
    """Runs a function of benchmarks/peers."""
    sys.path.insert(0, str(BENCHMARKS))
    module, _, function = options.run.partition(":")
    run = getattr(importlib.import_module(f"peers.{module}"), function)
    data_set = setup.find(config).read_data()
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
        value = zlib.crc32(np.ascontiguousarray(weight).tobytes(), value)
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
            copies = [getattr(weight.value, "values", (weight.value,)) for weight in self.model.trainable_variables]
            self.trained.checksums = [checksum(copy) for copy in zip(*copies, strict=True)]

    return Watch()
