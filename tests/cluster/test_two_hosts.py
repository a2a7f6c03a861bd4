"""Training on several hosts by a bare horovodrun, as a person types it."""

from __future__ import annotations

import json
import re
import shutil

import lab
import launching
import pytest

TIMEOUT_S = 900  # far above what anything here takes: many TensorFlows on few cores


CALLED = """
import socket
import ringtrain
from ringtrain.errors import RankError

def where():
    return socket.gethostname()

try:
    print(ringtrain.run(where, np=2, hosts="host1:1,host2:1"))
except RankError as error:
    print(error)
"""


def nothing_lives(hosts: lab.Lab) -> bool:
    return not any(hosts.processes(host) for host in hosts.names)


def test_eight_ranks_on_two_hosts_learn_the_digits_in_step(three_hosts, tmp_path):
    train = [*three_hosts.warm_python(), "-m", "ringtrain.train", "--config", "configs/digits.toml"]
    options = ["--run.directory", tmp_path, "--run.name", "main"]
    argv = ["horovodrun", "-np", 8, "-H", "host1:4,host2:4", *train, *options]
    ended = three_hosts.run("host1", argv, TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "main" / "summary.json").read_text())
    assert summary["num_ranks"] == 8
    assert summary["hosts"] == ["host1"] * 4 + ["host2"] * 4
    assert summary["in_sync"] is True
    assert f"8 ranks in step: gradients averaged, weights and optimizer equal {summary['checksum']}" in ended.stdout
    assert summary["test_accuracy"] > 0.96  # 97 to 98 % with two ranks, and with eight
    logs = [(tmp_path / "main" / "logs" / f"rank-{rank}.log").read_text().splitlines()[0] for rank in range(8)]
    assert [f"rank {rank} of 8 on host{1 + rank // 4}" in line for rank, line in enumerate(logs)] == [True] * 8
    lab.wait_for(lambda: nothing_lives(three_hosts), TIMEOUT_S, "nothing of the job lives")


@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_six_ranks_on_hosts_of_one_two_and_three_slots(make_lab, launcher, tmp_path):
    hosts = make_lab(3)
    flags = {"mpi": [], "gloo": ["--gloo"]}[launcher]
    say_places = ["python", "tests/cluster/say_places.py", tmp_path / "places.json"]
    argv = ["horovodrun", "-np", 6, "-H", "host1:1,host2:2,host3:3", *flags, *say_places]
    ended = hosts.run("host1", argv, TIMEOUT_S, env={"PYTHONPATH": str(launching.ROOT)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    slots = [("host1", 0, 1), ("host2", 0, 2), ("host2", 1, 2), ("host3", 0, 3), ("host3", 1, 3), ("host3", 2, 3)]
    total = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert json.loads((tmp_path / "places.json").read_text()) == [
        [host, rank, local_rank, local_size, 6, total] for rank, (host, local_rank, local_size) in enumerate(slots)
    ]
    lab.wait_for(lambda: nothing_lives(hosts), TIMEOUT_S, "nothing of the job lives")


def test_a_rank_with_two_devices_on_each_host_trains_the_weights_of_the_unsplit_model(three_hosts, tmp_path):
    train = [*three_hosts.warm_python(), "-m", "ringtrain.train", "--data.name", "digits", "--train.epochs", "1"]
    train += ["--model.micro-batches", "4", "--device.threads", "1", "--run.directory", tmp_path]
    checksums = {}
    for name, options in {"whole": [], "stages": ["--model.split", "layers:2"], "other": ["--seed", "1"]}.items():
        argv = ["ringtrain", "launch", "-H", "host1:1,host2:1", "--", *train, "--run.name", name, *options]
        ended = three_hosts.run("host1", argv, TIMEOUT_S, env={"PYTHONPATH": str(launching.ROOT)})
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert (" on CPU:1: weights " in ended.stdout) == (name == "stages"), ended.stdout
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["hosts"] == ["host1", "host2"] and summary["in_sync"] is True
        checksums[name] = summary["checksum"]
    assert checksums["stages"] == checksums["whole"] != checksums["other"]


def test_a_function_on_two_hosts_needs_a_directory_that_both_see(two_hosts, tmp_path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    (shared / "job.py").write_text(CALLED)
    options = {"timeout_s": TIMEOUT_S, "env": {"PYTHONPATH": str(launching.ROOT)}, "cwd": shared}
    ended = two_hosts.run("host1", ["python", "job.py"], **options)
    # Before it, the launch may name variables that it does not forward.
    assert ended.stdout.splitlines()[-1:] == ["['host1', 'host2']"], ended.stdout + ended.stderr
    two_hosts.bind("host2", other, shared)
    ended = two_hosts.run("host1", ["python", "job.py"], **options)
    assert ended.stdout.splitlines()[-1].endswith(
        "rank 1 on host2 does not see this file of ringtrain.run: call it in a directory that all hosts share"
    ), ended.stdout + ended.stderr
    assert [path.name for path in shared.iterdir()] == ["job.py"]
    lab.wait_for(lambda: nothing_lives(two_hosts), TIMEOUT_S, "nothing of the job lives")


def test_a_folder_that_hosts_do_not_share_is_sent_before_ranks_start(two_hosts, tmp_path):
    if not shutil.which("rsync"):
        pytest.skip("no rsync: apt-get install rsync")
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "runs", there):
        folder.mkdir(parents=True)
    (here / "data.txt").write_text("sent\n")
    (here / "runs" / "old.txt").write_text("")
    (there / "theirs.txt").write_text("")
    two_hosts.bind("host2", there, here)
    options = {"timeout_s": TIMEOUT_S, "env": {"PYTHONPATH": str(launching.ROOT)}, "cwd": here}
    launch = ["ringtrain", "launch", "-H", "host1:1,host2:1"]
    assert two_hosts.run("host1", [*launch, "cat", "data.txt"], **options).returncode == 1
    ended = two_hosts.run("host1", [*launch, "--sync", "cat", "data.txt"], **options)
    assert ended.returncode == 0 and ended.stdout.count("sent\n") == 2, ended.stdout + ended.stderr
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*")) == ["data.txt", "theirs.txt"]
    two_hosts.stop_sshd("host2")
    ended = two_hosts.run("host1", [*launch, "--sync", "cat", "data.txt"], **options)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert re.search("not synced: host2: .* was not sent: ssh: ", ended.stderr.splitlines()[-1])
    lab.wait_for(lambda: nothing_lives(two_hosts), TIMEOUT_S, "nothing of the job lives")
