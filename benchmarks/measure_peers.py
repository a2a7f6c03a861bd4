"""The same training by ringtrain, by hand, by TensorFlow's strategies and PyTorch, in turns, on this host.

    python benchmarks/measure_peers.py --turns 3 --out peers.json -- --model.name peers.models:wide_mlp

Options of ringtrain.train after `--` are for all of them. Each run has its own start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers.one_start import WARM_STEPS, OneStart

from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table

BENCHMARKS = Path(__file__).parent
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
    backend: str = "tensorflow"
    """of Keras"""

    def ranks(self, workers: int) -> int:
        """Number of processes to start."""
        return {"per worker": workers, "one": 1, "servers": workers + 1}[self.processes]

    def options(self, workers: int) -> list[str]:
        """Options of ringtrain.train in addition to those of all peers."""
        if not self.strategy:
            return []
        words = ["--strategy.name", self.strategy]
        if self.strategy == "towers":
            words += ["--strategy.towers", str(workers)]
        return words


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
    "keras-torch-ddp": Peer("Keras on PyTorch, DDP over Gloo", "torch_ddp:run_keras", backend="torch"),
    "keras-jax-ring": Peer("Keras on JAX, DataParallel over Gloo", "backends:jax_processes", backend="jax"),
    "fit-all-cores": Peer("Keras' fit, one process, all cores", "backends:all_cores", "one"),
    "keras-jax": Peer("Keras on JAX, one process, all cores", "backends:all_cores", "one", backend="jax"),
    "keras-torch": Peer("Keras on PyTorch, one process, all cores", "backends:all_cores", "one", backend="torch"),
    "ringtrain-alone": Peer("ringtrain.train, one core", "", alone=True),
    "fit-alone": Peer("Keras' fit, one core", "by_fit:alone", alone=True),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # TensorFlow's servers print their settings
OVER = {
    "ringtrain-alone": "fit-alone",
    **{name: f"{name}-by-hand" for name in ("towers", "multi-worker", "ps-async")},
}
"""peers that are not compared with ringtrain on all workers"""
ONE_PROCESS = ("fit-alone", "ringtrain-alone")
"""peers whose speed times the number of workers is an efficiency of 1: the first that was run"""


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes."""
    own, more = [*argv], []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="of one thread each, but for those of one process")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--steps", type=int, default=60, help="of a measurement")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of them: ringtrain,by-hand,towers (all)")
    parser.add_argument("--limit", type=int, default=120, help="seconds that one start may take")
    parser.add_argument("--out", help="write the results as JSON")
    options = parser.parse_args(own)
    names, workers = options.peers.split(","), options.workers
    for name in names:
        if name not in PEERS:
            parser.error(f"got --peers {name}, expected some of {','.join(PEERS)}")
    # More ranks than slots, for the parameter server, which mostly waits.
    launch = LaunchOptions(hosts=f"localhost:{workers}", oversubscribe=True)
    os.environ |= QUIET
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    train_args = [*COMMON, *more]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name, before in runs.items():
            if before and not worked(before):  # it would fail again
                before.append(before[-1])
            else:
                before.append(train_once(PEERS[name], workers, options, train_args, launch))
    found = {name: summary(name, runs, workers) for name in names}
    show(found, f"{workers} workers of one thread: {' '.join(train_args)}")
    if options.out:
        about = {"steps": options.steps, "turns": options.turns, "workers": workers, "command": train_args}
        stats.write(Path(options.out), about, found)
    return 0


def train_once(
    peer: Peer, workers: int, options: argparse.Namespace, train_args: Sequence[str], launch: LaunchOptions
) -> dict[str, Any]:
    """Runs one start: images_per_s, losses and checksums of all copies of the weights; or the first error."""
    workers = 1 if peer.alone else workers
    num_ranks = peer.ranks(workers)
    with tempfile.TemporaryDirectory(prefix="ringtrain-peers-") as folder:
        ports = free_ports(workers + 2)
        one = OneStart(peer.run, workers, num_ranks, ports, options.steps, options.limit, folder, time.time())
        os.environ["KERAS_BACKEND"] = peer.backend  # which the ranks inherit
        failure = ""
        try:
            words = [*train_args, *peer.options(workers)]
            ranks.call(replace(launch, np=num_ranks), "peers.one_start:on_ranks", asdict(one), words)
        except LaunchError as error:
            failure = str(error)
        said = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
    errors = sorted((one["time_s"], one["error"]) for one in said if "error" in one)
    if errors or failure:
        return {"error": errors[0][1] if errors else failure}
    # An asynchronous step belongs to one worker, so there are more of them by the number of workers.
    ends_s, images = said[0]["ends_s"], said[0]["images_per_end"]
    timed_s = ends_s[len(ends_s) * WARM_STEPS // (WARM_STEPS + options.steps) - 1 :]
    checksums = []
    for one_rank in said:
        checksums += one_rank["checksums"]
    return {
        "images_per_s": images * (len(timed_s) - 1) / (timed_s[-1] - timed_s[0]),
        "first_step_s": ends_s[0] - one.begin_s,
        "memory_mb": sum(one["memory_mb"] for one in said),
        "losses": said[0]["losses"],
        "checksums": checksums,
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
    told["failed"] = failed
    for quantity in ("images_per_s", "first_step_s", "memory_mb"):
        told[quantity] = stats.Spread.of([one[quantity] for one in good])
    told |= {
        "losses": good[-1]["losses"],
        "checksums": good[-1]["checksums"],
        "equal": all(len(set(one["checksums"])) == 1 for one in good),
    }
    other = ""
    if name in OVER:
        other = OVER[name]
    elif not peer.alone and name != "ringtrain":
        other = "ringtrain"
    pairs = both_worked(own, runs.get(other, ()))
    if pairs:
        told["over"] = other
        told["ratio"] = speed_ratios(pairs)
        told["same_weights"] = all(one["checksums"][0] == another["checksums"][0] for one, another in pairs)
    alone = next((one for one in ONE_PROCESS if one in runs), "")
    if not peer.alone:
        pairs = both_worked(own, runs.get(alone, ()))
        if pairs:
            told["efficiency"] = speed_ratios(pairs).times(1 / workers)
    return told


def both_worked(own: list[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Runs of two peers in the same rounds, without errors."""
    return [pair for pair in zip(own, others, strict=False) if len(worked(pair)) == 2]


def speed_ratios(pairs: Sequence[tuple[dict[str, Any], ...]]) -> stats.Spread:
    """Ratios of images/s, round by round."""
    own, others = zip(*pairs, strict=True)
    return stats.ratios([one["images_per_s"] for one in own], [one["images_per_s"] for one in others])


def worked(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs without an error."""
    return [one for one in runs if "error" not in one]


def show(found: dict[str, dict[str, Any]], title: str) -> None:
    """Prints the measurements, and the reasons of failures."""
    rows, notes = [], []
    for one in found.values():
        if "error" in one:
            rows.append([one["title"], "does not run", "", "", "", "", "", ""])
            notes.append(f"{one['title']} does not run: {one['error']}")
            continue
        notes += [f"{one['title']}, one start of several: {error}" for error in one["failed"]]
        ratio = one["ratio"].text() if "ratio" in one else ""
        if one.get("over", "ringtrain") != "ringtrain":
            notes.append(f"{one['title']}: {ratio} of {PEERS[one['over']].title}")
            ratio = ""
        equal = "one copy"
        if not one["equal"]:
            equal = "DIFFERENT"
        elif len(one["checksums"]) > 1:
            equal = "equal"
        if one.get("same_weights"):
            equal += f", as {one['over']}'s"
        losses = f"{one['losses'][0]:.3f} to {one['losses'][-1]:.3f}"
        efficiency = one["efficiency"].text() if "efficiency" in one else ""
        first_step, memory = (f"{one[name].median:,.0f}" for name in ("first_step_s", "memory_mb"))
        speed = one["images_per_s"].text(",.0f")
        rows.append([one["title"], speed, ratio, efficiency, first_step, memory, losses, equal])
    head = ("", "images/s", "of ringtrain's", "efficiency", "first step (s)", "memory (MB)", "loss", "weights")
    Table(head, rows, title).show()
    print("\n".join(notes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
