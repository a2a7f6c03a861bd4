"""Ranks come and go while a run goes on: it ends well, and every sample was trained once in each epoch.

Names of this machine stand for hosts: Horovod's driver knows hosts by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attacker
import psutil
import pytest
import sample_ledger
from faulty import left_of
from holding import HOLD, STEP_S
from launching import BIN, ROOT, run, warm_python
from recording import NUM_TRAIN, RECORDS, WRONG, recorded_s, trained_by_epoch

from ringtrain.monitor import journal
from ringtrain.protocol.for_script import ForScript

sys.path.append(str(ROOT / "tests" / "cluster"))
from lab import wait_for

TIMEOUT_S = 300.0
ONE, ANOTHER, THIRD = "localhost:1\n", "127.0.0.1:1\n", f"{socket.gethostname()}:1\n"
FULL = os.environ.get("RINGTRAIN_CHAOS") == "full"
NUM_KILLS = 20 if FULL else 3
TRAIN = [
    "--data.name",
    "recording:data",
    "--model.name",
    "recording:model",
    "--train.batch-size",
    "51",
    "--schedule.name",
    "cosine",
    "--run.name",
    "run",
]
DIGITS = ["--data.name", "digits", "--run.name", "run"]
PATHS = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))


class Elastic:
    """A launch into folder/run that takes its time until `finish`.

    Args:
        program: Arguments of Python; () for the trainer, with `options`.
        environ: Variables of the ranks.
    """

    def __init__(
        self,
        folder: Path,
        hosts: str,
        *options: str,
        program: Sequence[str | Path] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.hosts, self.held = folder / "hosts", folder / "hold"
        self.hosts.write_text(hosts)
        self.held.touch()
        launch = [BIN / "ringtrain", "launch", "--elastic", "--max-np", "3", "--network-interface", "lo"]
        launch += ["--host-discovery", f"cat {self.hosts}", "--blacklist-cooldown", "1", "3"]
        launch += [word for name in (HOLD, RECORDS, WRONG, *environ) for word in ("--forward", name)]
        if not program:
            program = ["-m", "ringtrain.train", *TRAIN, *options, "--run.directory", folder]
            program += ["--train.callbacks", "recording:Recording", "holding:Holding"]
        command = [*launch, "--", *warm_python(), *program]
        # So long, that whoever waits for it does not get through here.
        timeout = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
        variables = {WRONG: "0"} | os.environ | {"PYTHONPATH": PATHS, HOLD: str(self.held), RECORDS: str(folder)}
        self.output = folder / "output"
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**variables, **timeout, **environ},
                start_new_session=True,
            )

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in journal.read(self.folder / "run") if event["event"] in kinds]

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        wait_for(
            lambda: condition() or self.process.poll() is not None, TIMEOUT_S, f"{what}\n{self.output.read_text()}"
        )
        assert self.process.poll() is None, self.output.read_text()

    def wait_for_ranks(self, num_changes: int) -> None:
        """Until there were so many changes, and something was committed since."""

        def committed() -> bool:
            changes = {event["generation"]: event["time_s"] for event in self.events("resize")}
            commits = self.events("commit")
            return len(changes) == num_changes and any(e["generation"] == list(changes)[-1] for e in commits)

        self.wait_for(committed, f"change {num_changes} of ranks")

    def wait_for_size(self, size: int, since: int) -> int:
        """Until there were more than `since` changes, the last to `size` ranks, which have committed; their number."""

        def changes() -> dict[str, int]:
            return {event["generation"]: event["to"] for event in self.events("resize")}

        def committed() -> bool:
            last, to = [*changes().items()][-1] if changes() else ("", 0)
            is_new = len(changes()) > since and to == size
            return is_new and any(event["generation"] == last for event in self.events("commit"))

        self.wait_for(committed, f"{size} ranks")
        return len(changes())

    def wait_for_commits(self, count: int) -> None:
        self.wait_for(lambda: len(self.events("commit")) >= count, "commits")

    def process_of(self, rank: int) -> int:
        return [event for event in self.events("start", "resize") if event["rank"] == rank][-1]["process"]

    def attack(self) -> None:
        """Calls whatever of the job listens: only this machine reaches it, and it neither answers nor runs anything."""
        made = self.folder / "made"
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        connections, lines = [], []
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # one of a moment, such as a compiler's
                lines.append(" ".join(one.cmdline()))
                connections += one.net_connections("tcp")
        listening = [each.laddr for each in connections if each.status == "LISTEN"]
        assert {address for address, _ in listening} == {"127.0.0.1"}
        # Held open until the job has ended, which they must not delay.
        self.silent = [socket.create_connection(address, 10) for address in listening]
        found = [answer for address, port in listening for answer in attacker.attack(address, port, made)]
        assert {status for status, _ in found} <= {0, 403}
        assert (403, b"") in found, "Horovod's rendezvous is among them"
        assert not made.exists()
        assert not any(f"{HOLD}=" in line or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in line for line in lines), lines

    def finish(self, code: int = 0) -> str:
        self.held.unlink(missing_ok=True)
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
        output = self.output.read_text()
        assert self.process.returncode == code, output
        assert not left_of(self.folder), "ranks are left"
        return output

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "run" / "summary.json").read_text())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Elastic]]:
    started: list[Elastic] = []

    def begin(*options: str, **script: Any) -> Elastic:
        started.append(Elastic(tmp_path, *options, **script))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()  # it ends its ranks
            one.process.wait(TIMEOUT_S)


def kill_at_random(
    elastic: Elastic, num_changes: int, draw: random.Random, within_s: float = STEP_S
) -> tuple[list[float], int]:
    """Kills a random one of three ranks at a random moment, and waits for its return, several times.

    Returns the times of the kills, and the number of changes after them.
    """
    killed_s = []
    for _ in range(NUM_KILLS):
        time.sleep(draw.random() * within_s)
        killed_s.append(time.time())
        os.kill(elastic.process_of(draw.randrange(3)), signal.SIGKILL)
        num_changes = elastic.wait_for_size(3, since=num_changes + 1)
    return killed_s, num_changes


def seconds_to_a_step(elastic: Elastic, killed_s: Sequence[float]) -> list[float]:
    """Seconds from each kill to the next step that any rank has recorded."""
    steps_s = sorted(recorded_s(elastic.folder))
    return [min(at for at in steps_s if at > begin_s + 0.2) - begin_s for begin_s in killed_s]


def proven(elastic: Elastic, num_steps: int) -> sample_ledger.Ledger:
    found = sample_ledger.ledger(journal.read(elastic.folder / "run"), num_steps)
    assert not found.breaches, found.breaches
    return found


def recorded(elastic: Elastic, num_epochs: int, batch_size: int = 51) -> list[Counter[int]]:
    """How often each sample was really trained in each epoch, by the batches that the steps got."""
    by_epoch = trained_by_epoch(elastic.folder, journal.read(elastic.folder / "run"), batch_size)
    assert set(by_epoch) == set(range(num_epochs))
    return [by_epoch[epoch] for epoch in range(num_epochs)]


def test_a_pipeline_that_reads_wrong_samples_is_seen_in_the_batches(
    start: Callable[..., Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the journals, which have the numbers of steps."""
    monkeypatch.setenv(WRONG, "1")
    elastic = start(ONE, "--train.epochs", "1")
    elastic.finish()
    proven(elastic, 29)
    (trained,) = recorded(elastic, 1)
    assert len(trained) < NUM_TRAIN and 2 in trained.values()


def test_ranks_come_and_go_and_nothing_is_different(start: Callable[..., Elastic], tmp_path: Path) -> None:
    """Two hosts come, the rank of one is killed and comes again, rank 0 is killed and comes again, a host goes.

    The global batch of 51 stays, which two ranks share unevenly: weights are, up to rounding, those of one process.
    """
    epochs = 20
    elastic = start(ONE, "--train.epochs", str(epochs), "--chaos", "rank=2 step=1 mode=sigkill")
    elastic.wait_for_commits(2)
    elastic.attack()  # someone who is no part of the job calls its services in the meantime
    elastic.hosts.write_text(ONE + ANOTHER + THIRD)
    elastic.wait_for_ranks(3)  # rank 2 came, was killed, and came again
    os.kill(elastic.process_of(0), signal.SIGKILL)
    elastic.wait_for_ranks(5)
    elastic.hosts.write_text(ANOTHER + THIRD)
    elastic.wait_for_ranks(6)
    output = elastic.finish()

    proven(elastic, epochs * 29)
    for trained in recorded(elastic, epochs):
        assert len(trained) == NUM_TRAIN and set(trained.values()) == {1}
    summary = elastic.summary()
    assert [(change["from"], change["to"]) for change in summary["resizes"]] == [
        (1, 3),
        *[(3, 2), (2, 3)] * 2,
        (3, 2),
    ], output
    assert summary["num_ranks"] == 2
    assert summary["global_step"] == epochs * 29

    alone = tmp_path / "alone"
    train = [sys.executable, "-m", "ringtrain.train", *TRAIN, "--train.epochs", epochs, "--run.directory", alone]
    ended = run(0, train, 300, env={"PYTHONPATH": PATHS})
    assert ended.returncode == 0, ended.stderr
    undisturbed = json.loads((alone / "run" / "summary.json").read_text())
    assert summary["metrics"] == pytest.approx(undisturbed["metrics"], rel=1e-3)


def test_deaths_cost_a_step_and_no_bit(start: Callable[..., Elastic], tmp_path: Path) -> None:
    """One rank of a host to three, of which a random one is killed at a random moment and comes again, to two.

    Weights, slots, moving statistics, dropout and metrics are those of one process that nothing happened to.
    """
    epochs = 20 + 6 * NUM_KILLS
    options = ("--model.name", "recording:odd_model", "--train.virtual-ranks", "4", "--train.batch-size", "48")
    options = (*options, "--train.epochs", str(epochs), "--checkpoint.every-epochs", "50")
    elastic = start(ONE, *options)
    elastic.wait_for_commits(2)
    elastic.hosts.write_text("localhost:3\n")
    num_changes = elastic.wait_for_size(3, since=0)
    seed = secrets.randbelow(2**32)
    killed_s, num_changes = kill_at_random(elastic, num_changes, random.Random(seed))
    elastic.hosts.write_text("localhost:2\n")
    elastic.wait_for_size(2, since=num_changes)
    elastic.finish()
    assert proven(elastic, epochs * 8).undone == 0, seed
    for trained in recorded(elastic, epochs, 4 * 48):
        assert len(trained) == NUM_TRAIN and set(trained.values()) == {1}, seed
    summary = elastic.summary()
    changes = summary["resizes"]
    waited_s = seconds_to_a_step(elastic, killed_s)
    print(f"seed {seed}; {changes}; seconds from a kill to a step: {[round(one, 2) for one in waited_s]}")
    assert len(changes) >= 2 * NUM_KILLS + 2 and changes[-1]["to"] == summary["num_ranks"] == 2, (seed, changes)

    alone = tmp_path / "alone"
    train = [sys.executable, "-m", "ringtrain.train", *TRAIN, *options, "--run.directory", alone]
    ended = run(0, train, 300, env={"PYTHONPATH": PATHS})
    assert ended.returncode == 0, ended.stderr
    undisturbed = json.loads((alone / "run" / "summary.json").read_text())
    assert {name: summary[name] for name in ("checksum", "metrics")} == {
        name: undisturbed[name] for name in ("checksum", "metrics")
    }, seed


@pytest.mark.skipif(not FULL, reason="make chaos; test_elastic_fit.py has fewer deaths")
def test_deaths_cost_a_text_classifier_of_fit_a_step_and_no_bit(
    start: Callable[..., Elastic], tmp_path: Path, tally: Callable[[str, str], None]
) -> None:
    """Embedding, LSTM with masks, dropout: a random one of three ranks is killed at a random moment, and returns."""
    epochs = 250

    def of_script(folder: Path) -> dict[str, str]:
        options = {"run.directory": str(folder), "train.virtual_ranks": 4}
        return ForScript(by="test", options=options).variables()

    script = [Path(__file__).parent / "killed_text.py", str(epochs)]
    elastic = start("localhost:3\n", program=script, environ=of_script(tmp_path))
    elastic.wait_for_commits(2)
    seed = int(os.environ.get("RINGTRAIN_TEST_SEED", secrets.randbelow(2**32)))
    killed_s, _ = kill_at_random(elastic, 0, random.Random(seed), within_s=2.0)
    load = os.getloadavg()[1]
    output = elastic.finish()

    summary = elastic.summary()
    assert proven(elastic, summary["numbers"]["num_steps"]).undone == 0, seed
    changes = summary["resizes"]
    assert len(changes) >= 2 * NUM_KILLS, (seed, changes)
    alone = tmp_path / "alone"
    alone.mkdir()
    environ = {**of_script(alone), "PYTHONPATH": PATHS, HOLD: str(tmp_path / "released"), RECORDS: str(alone)}
    undisturbed = run(0, [sys.executable, *script], 600, environ, warm=True)
    (expected,) = re.findall("RESULT (.*)", undisturbed.stdout)
    assert {*re.findall("RESULT (.*)", output)} == {expected}, seed

    waited_s = seconds_to_a_step(elastic, killed_s)
    times = f"{statistics.median(waited_s):.1f} s ({min(waited_s):.1f} to {max(waited_s):.1f})"
    result = f"same bits; {times} to the next step, at a load of {load:.1f}; seed {seed}"
    tally(f"{NUM_KILLS} kills of 3 ranks, a text classifier", result)


def test_a_killed_launcher_leaves_no_rank(start: Callable[..., Elastic]) -> None:
    elastic = start(ONE + ANOTHER, "--train.epochs", "1000")
    elastic.wait_for_commits(2)
    assert len(left_of(elastic.folder)) >= 2
    elastic.process.kill()
    elastic.process.wait()
    wait_for(lambda: not left_of(elastic.folder), TIMEOUT_S, "the end of all ranks")


def test_a_job_that_has_lost_all_its_ranks_is_restarted(tmp_path: Path) -> None:
    launch = [BIN / "ringtrain", "launch", "--elastic", "--max-restarts", "1", "-np", "2", "-H", "localhost:2"]
    command = [*launch, "--", sys.executable, "-m", "ringtrain.train", *DIGITS]
    kill = [
        "--chaos",
        "rank=0 step=60 mode=sigkill,rank=1 step=60 mode=sigkill",
        "--checkpoint.every-steps",
        "10",
        "--train.epochs",
        "4",
    ]
    ended = run(0, [*command, *kill, "--run.directory", tmp_path], TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["in_sync"] is True and summary["num_ranks"] == 2 and summary["restarts"] == 1
    # Rank 0 may have been killed before it had written what it had to save.
    assert int(summary["resumed_from"][-8:]) in (50, 60) and "SIGKILL" in summary["restart_causes"][0]


FAILING = """
import keras, sys, tensorflow as tf
import ringtrain.hvd as hvd
hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
tries = 0

@hvd.elastic.run
def train(state):
    global tries
    tries += 1
    if sys.argv[1] == "commits":
        state.commit()
    if tries < 6:
        raise tf.errors.UnknownError(None, None, f"socket {tries} of this host is broken")

try:
    train(hvd.elastic.KerasState(model))
finally:
    print("tried", tries)
"""


def test_a_failure_that_stays_is_no_lost_worker() -> None:
    """The third of the same kind ends the job, unless something was committed in between."""
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    ended = run(0, [sys.executable, "-c", FAILING, "nothing"], TIMEOUT_S, env=alone)
    assert ended.returncode == 1
    assert "tried 3\n" in ended.stdout
    assert "socket 3 of this host is broken" in ended.stderr
    ended = run(0, [sys.executable, "-c", FAILING, "commits"], TIMEOUT_S, env=alone)
    assert (ended.returncode, ended.stdout) == (0, "tried 6\n"), ended.stderr
