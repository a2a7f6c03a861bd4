"""`ringtrain launch --elastic` on three hosts: one falls off the network, another one joins and leaves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lab
import launching
import pytest
import sample_ledger

from ringtrain.monitor import journal
from ringtrain.protocol.env import LEASE

TIMEOUT_S = 300.0
SLOW_FIT = Path(__file__).with_name("slow_fit.py")
ATTACKER = launching.ROOT / "tests" / "attacker.py"
EPOCHS = 10
PATHS = os.pathsep.join(map(str, (launching.ROOT, launching.ROOT / "tests" / "faults")))  # there is holding.py
# What the ranks' collectives wait for a host that does not answer; over a real network more.
ENVIRONMENT = {"PYTHONPATH": PATHS, "HOROVOD_GLOO_TIMEOUT_SECONDS": "10", LEASE: "10"}


def attack(hosts: lab.Lab, made: Path) -> None:
    """Calls from host3 what listens on the other two: nothing answers, nothing is run, no value is on a line of ps."""
    for host in ("host1", "host2"):
        listed = hosts.run(host, ["ss", "-Hltn"], TIMEOUT_S).stdout
        places = [line.split()[3].rpartition(":") for line in listed.splitlines()]
        found = {
            port: hosts.run("host3", ["python", ATTACKER, hosts.address(host), port, made], TIMEOUT_S).stdout
            for address, _, port in places
            if port != "22" and "127.0.0.1" not in address
        }
        assert found, listed
        assert {line.split()[0] for answers in found.values() for line in answers.splitlines()} <= {"0", "403"}, found
        assert [address for address, _, port in places if port in found and address != hosts.address(host)] == []
        lines = hosts.processes(host).values()
        assert not [line for line in lines if "RINGTRAIN_TEST_HOLD=" in line or "RENDEZVOUS_ADDR" in line], lines
        assert not [line for line in lines if "StrictHostKeyChecking=no" in line or "task_fn" in line], lines
    assert not made.exists()


def test_a_host_is_cut_off_and_another_one_takes_its_place(three_hosts: lab.Lab, tmp_path: Path) -> None:
    """Nobody is told of the host's end: ranks wait for it in the middle of a step. Nothing is left on any host."""
    listed, run, held = tmp_path / "hosts", tmp_path / "run", tmp_path / "hold"
    listed.write_text("host1:1\nhost2:1\n")
    held.touch()
    hosts = three_hosts
    launch = ["ringtrain", "launch", "--elastic", "--host-discovery", f"cat {listed}", "-np", "2", "--max-np", "2"]
    train = [*hosts.warm_python(), "-m", "ringtrain.train", "--data.name", "digits", "--train.epochs", EPOCHS]
    options = ["--run.name", "run", "--run.directory", tmp_path, "--train.callbacks", "holding:Holding"]
    command = [*launch, "--forward", "RINGTRAIN_TEST_HOLD", "--", *train, *options]

    def events(kind: str, host: str = "") -> list[dict[str, Any]]:
        found = journal.read(run) if run.is_dir() else []
        return [event for event in found if event["event"] == kind and event["host"].startswith(host)]

    output = tmp_path / "output"
    with output.open("w") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        launched = hosts.start(
            "host1", list(map(str, command)), env=ENVIRONMENT | {"RINGTRAIN_TEST_HOLD": str(held)}, **streams
        )
        with launched:
            lab.wait_for(lambda: bool(events("commit", "host2")), TIMEOUT_S, "host2 trains")
            attack(hosts, tmp_path / "made")
            hosts.cut("host2")
            lab.wait_for(lambda: bool(events("resize", "host1")), TIMEOUT_S, "host1 goes on alone")
            listed.write_text("host1:1\nhost3:1\n")
            lab.wait_for(lambda: bool(events("commit", "host3")), TIMEOUT_S, "host3 trains")
            listed.write_text("host1:1\n")
            lab.wait_for(lambda: events("resize", "host1")[-1]["to"] == 1, TIMEOUT_S, "host1 goes on without host3")
            held.unlink()
            launched.wait(TIMEOUT_S)
    said = output.read_text()
    assert launched.returncode == 0, said
    assert "lost host2" in said

    summary = json.loads((run / "summary.json").read_text())
    found = sample_ledger.ledger(journal.read(run), summary["numbers"]["num_steps"])
    assert not found.breaches, found.breaches
    # host1 may meet alone twice: once since a collective failed, once since the launcher heard no more of host2.
    sizes = [(change["from"], change["to"]) for change in summary["resizes"]]
    assert [(before, after) for before, after in sizes if before != after] == [(2, 1), (1, 2), (2, 1)], sizes
    assert summary["hosts"] == ["host1"]

    def alive() -> list[str]:
        # On host2 sshd still waits for a word over the cut network; all else has ended, since it heard nothing.
        lines = [line for host in hosts.names for line in hosts.processes(host).values()]
        return [line for line in lines if not line.startswith("sshd")]

    lab.wait_for(lambda: not alive(), TIMEOUT_S, "nothing of the job lives")


@pytest.mark.parametrize("mirrored", [False, True])
def test_rank_0_and_its_disk_are_lost(three_hosts: lab.Lab, tmp_path: Path, mirrored: bool) -> None:
    """Training goes on at the step where it was, on the disk of another host; a mirror of the run goes on, too.

    With a mirror, a later job on a third host begins with that. Weights and metrics are those of one process.
    """
    hosts, disk = three_hosts, Path("/run") / tmp_path.name  # of each host its own

    def results(folder: Path) -> tuple[dict[str, Any], list[Any]]:
        """Summary, and loss of each epoch."""
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return json.loads((folder / "summary.json").read_text()), [json.loads(line)["loss"] for line in lines]

    def train(name: str, epochs: int, step_s: float) -> list[str | Path]:
        options = {"run.directory": str(disk / name), "train.virtual_ranks": 2, "checkpoint.every_steps": 5}
        if mirrored:
            options["run.mirror"] = str(tmp_path / name)
        return [SLOW_FIT, str(epochs), str(step_s), json.dumps(options)]

    def launch(slots: str, *words: str) -> list[str | Path]:
        return ["ringtrain", "launch", "--elastic", "-H", slots, "--min-np", "1", *words, "--", *hosts.warm_python()]

    alone = hosts.run("host1", ["python", *train("alone", 5, 0)], TIMEOUT_S, env=ENVIRONMENT)
    assert alone.returncode == 0, alone.stderr
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [*launch("host1:1,host2:1", "--blacklist-cooldown", "0", "0"), *train("run", 4, 0.1)]
    with hosts.start("host3", list(map(str, command)), env=ENVIRONMENT, **pipes) as launched:
        folder = tmp_path / "run" / "run" if mirrored else hosts.seen_from_here("host1", disk / "run" / "run")
        saved = folder / "checkpoints"
        lab.wait_for(lambda: bool([*saved.glob("step-00000020*/manifest.json")]), TIMEOUT_S, "a checkpoint in epoch 2")
        hosts.cut("host1")
        said = launched.communicate(timeout=TIMEOUT_S)[0]
    assert launched.returncode == 0, said
    assert "is made on host2" in said, said

    undisturbed = results(hosts.seen_from_here("host1", disk / "alone" / "run"))
    summary, losses = results(hosts.seen_from_here("host2", disk / "run" / "run"))
    changes = [change for change in summary["resizes"] if change["from"] == 2]
    assert [(change["to"], change["global_step"] >= 20) for change in changes] == [(1, True)], summary["resizes"]
    assert losses == undisturbed[1][:4]
    if not mirrored:
        return
    assert results(tmp_path / "run" / "run")[0]["checksum"] == summary["checksum"]

    later = hosts.run("host3", [*launch("host3:1"), *train("run", 5, 0)], TIMEOUT_S, env=ENVIRONMENT)
    said = later.stdout + later.stderr
    assert later.returncode == 0 and "copied from there: step-00000060" in said, said
    assert not hosts.seen_from_here("host1", disk / "run" / "run" / "summary.json").exists()
    for folder in (hosts.seen_from_here("host3", disk / "run" / "run"), tmp_path / "run" / "run"):
        summary, losses = results(folder)
        assert summary["checksum"] == undisturbed[0]["checksum"]
        assert losses == undisturbed[1]
