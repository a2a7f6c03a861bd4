"""bench peers: the same training by ringtrain and its alternatives, alternately, each run in its own start."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.cluster.hosts import parse_hosts
from ringtrain.errors import LaunchError
from ringtrain.lab import stats
from ringtrain.lab.bench.peers_on_ranks import WARM_STEPS
from ringtrain.lab.starts import Start

COMMON = (
    *("--model.name", "cnn", "--data.name", "synthetic", "--train.batch-size", "64", "--device.threads", "1"),
    *("--optimizer.name", "sgd", "--optimizer.learning-rate", "0.01"),
)


@dataclass(frozen=True)
class Peer:
    """A way to train."""

    title: str
    run: str
    """module:function of ringtrain.lab.bench.baselines; "": ringtrain.train"""
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


def main(options: argparse.Namespace, start: Start) -> int:
    """Measures, prints and writes.

    Raises:
        LaunchError: A peer is unknown.
    """
    names = options.peers.split(",") if options.peers else list(PEERS)
    strangers = [name for name in names if name not in PEERS]
    if strangers:
        raise LaunchError(f"got --peers {strangers[0]}, expected some of {','.join(PEERS)}")
    workers = options.np or (sum(host.slots for host in parse_hosts(options.hosts)) if options.hosts else 2)
    options.oversubscribe = True  # for the parameter server, which mostly waits
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name, before in runs.items():
            never = before and not worked(before)  # it would fail again
            before.append(before[-1] if never else train_once(PEERS[name], workers, options, start))
    found = {name: summary(name, runs, workers) for name in names}
    show(found, workers, options)
    if options.out:
        told = {
            "steps": options.steps,
            "turns": options.turns,
            "workers": workers,
            "command": [*COMMON, *options.command],
        }
        stats.write(Path(options.out), "peers", told, found)
    return 0


def train_once(peer: Peer, workers: int, options: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Runs one start: images_per_s, losses and checksums of all copies of the weights; or the first error."""
    workers = 1 if peer.alone else workers
    ranks = peer.ranks(workers)
    with tempfile.TemporaryDirectory(prefix="ringtrain-peers-") as folder:
        words = ["peer", "--run", peer.run, "--workers", str(workers), "--ranks", str(ranks)]
        words += ["--ports", ",".join(map(str, free_ports(workers + 2))), "--steps", str(options.steps)]
        words += ["--limit", str(options.limit), "--folder", folder]
        words += ["--", *COMMON, *peer.options(workers), *options.command]
        failure = ""
        try:
            start(words, ranks, QUIET)
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
    pairs = [pair for pair in zip(own, runs.get(other, ()), strict=False) if len(worked(pair)) == 2]
    if pairs:
        told["over"] = other
        told["ratio"] = stats.ratios(*([one["images_per_s"] for one in each] for each in zip(*pairs, strict=True)))
        told["same_weights"] = all(one["checksums"][0] == another["checksums"][0] for one, another in pairs)
    return told


def worked(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs without an error."""
    return [one for one in runs if "error" not in one]


def show(found: dict[str, dict[str, Any]], workers: int, options: argparse.Namespace) -> None:
    """Prints the measurements, and the reasons of failures."""
    rows, notes = [], []
    for one in found.values():
        if "error" in one:
            rows.append([one["title"], "does not run", "", "", ""])
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
        rows.append([one["title"], one["images_per_s"].text(",.0f"), ratio, losses, equal])
    title = f"{workers} workers of one thread: {' '.join([*COMMON, *options.command])}"
    stats.show(title, ("", "images/s", "of ringtrain's", "loss", "weights"), rows)
    print("\n".join(notes))
