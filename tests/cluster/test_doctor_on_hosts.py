"""The doctor on several hosts, as a person calls it: what is wrong with one is seen, and said of that one alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lab
import launching
import pytest

from ringtrain.cluster.doctor import software

TIMEOUT_S = 300  # far above what anything here takes


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder to start in, with a copy of ringtrain and a user's script: nobody edits them meanwhile."""
    folder = tmp_path / "job"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(launching.ROOT / "ringtrain", folder / "ringtrain", ignore=ignored)
    (folder / "train.py").write_text("print('mine')\n")
    return folder


def doctor(hosts: lab.Lab, job: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ringtrain doctor on host1, over all hosts with two slots each unless the options name others."""
    everywhere = [] if "-H" in options else ["-H", ",".join(f"{name}:2" for name in hosts.names)]
    argv = [sys.executable, "-m", "ringtrain", "doctor", *everywhere, *options]
    return hosts.run("host1", argv, TIMEOUT_S, env={"PYTHONPATH": str(job)}, cwd=job)


def examined(hosts: lab.Lab, job: Path, *options: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What --json says, and of its checks those that are not ok: for each the hosts, in their order."""
    ended = doctor(hosts, job, "--json", *options)
    assert ended.stderr == ""
    report = json.loads(ended.stdout)
    assert ended.returncode == {"ok": 0, "warning": 1, "error": 2}[report["level"]]
    wrong: dict[str, list[str]] = {}
    for host in report["hosts"]:
        for check, cell in host["checks"].items():
            if cell["level"] in ("warning", "error"):
                wrong.setdefault(check, []).append(host["name"])
    return report, wrong


def nothing_left(hosts: lab.Lab, job: Path) -> bool:
    return not any(hosts.processes(name) for name in hosts.names) and not list(job.rglob(".ringtrain-doctor*"))


def cells(report: dict[str, Any], check: str) -> Sequence[str]:
    return [host["checks"][check]["value"] for host in report["hosts"]]


def test_hosts_that_are_well_and_the_table_that_says_so(make_lab, job):
    hosts = make_lab(3)
    report, wrong = examined(hosts, job)
    assert wrong == {}
    assert report["findings"] == []
    assert report["subnet"] == "10.77.0.0/24"
    assert cells(report, "subnet") == ["10.77.0.0/24"] * 3
    assert cells(report, "name") == [hosts.address(name) for name in hosts.names]
    assert cells(report, "shared") == ["yes"] * 3
    assert [host["remote"] for host in report["hosts"]] == [False, True, True]
    table = doctor(hosts, job)
    assert re.search(r"^ssh +here \(host1\), ok \(host2, host3\)$", table.stdout, re.MULTILINE)
    assert "all hosts are in 10.77.0.0/24: ringtrain launch --subnet 10.77.0.0/24" in table.stdout
    assert "\x1b" not in table.stdout
    lab.wait_for(lambda: nothing_left(hosts, job), TIMEOUT_S, "nothing of the doctor lives")


def test_the_commands_of_the_page(two_hosts, job):
    shutil.copytree(launching.ROOT / "hostfiles", job / "hostfiles")
    page = (launching.ROOT / "docs" / "doctor.md").read_text()
    commands = re.findall(r"^ringtrain doctor.*$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = command.replace("ringtrain", f"{sys.executable} -m ringtrain", 1)
        ended = two_hosts.run("host1", ["sh", "-c", words], TIMEOUT_S, env={"PYTHONPATH": str(job)}, cwd=job)
        assert ended.returncode in (0, 1), ended.stdout + ended.stderr  # 1: eight ranks on few cores
        assert ended.stderr == ""
    assert len(json.loads((job / "doctor.json").read_text())["hosts"]) == 2


def test_hosts_that_ssh_does_not_reach(make_lab, job):
    hosts = make_lab(4)
    hosts.stop_sshd("host2")
    hosts.change_host_key("host3")
    report, wrong = examined(hosts, job, "-H", "host1,host2,host3,host4,host5")
    assert wrong == {"ssh": ["host2", "host3", "host5"]}
    assert cells(report, "ssh")[1:3] == ["refused", "other key"]
    by_host = {finding["hosts"][0]: finding for finding in report["findings"] if finding["check"] == "ssh"}
    assert by_host["host2"]["text"] == "connect to host host2 port 22: Connection refused"
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in by_host["host3"]["text"]
    assert "known_hosts:3" in by_host["host3"]["text"]
    assert by_host["host3"]["fix"].startswith("ssh-keygen -R host3; ssh-keyscan -H host3")
    assert "Could not resolve hostname host5" in by_host["host5"]["text"]


def test_the_fix_command_for_a_host_key_fixes_it(two_hosts, job):
    two_hosts.change_host_key("host2")
    report, wrong = examined(two_hosts, job)
    assert wrong == {"ssh": ["host2"]}
    (finding,) = report["findings"]
    fixed = two_hosts.run("host1", ["sh", "-c", finding["fix"]], TIMEOUT_S)
    assert fixed.returncode == 0, fixed.stderr
    assert examined(two_hosts, job)[1] == {}


def test_a_key_that_nobody_knows_and_a_login_that_is_refused(two_hosts, job):
    known = two_hosts.home / ".ssh" / "known_hosts"
    known.write_text("")
    report, _ = examined(two_hosts, job)
    assert cells(report, "ssh") == ["here", "unknown key"]
    (finding,) = report["findings"]
    assert two_hosts.run("host1", ["sh", "-c", finding["fix"]], TIMEOUT_S).returncode == 0
    (two_hosts.home / ".ssh" / "authorized_keys").write_text("")
    report, _ = examined(two_hosts, job)
    assert cells(report, "ssh") == ["here", "no key"]
    (finding,) = report["findings"]
    assert "Permission denied (publickey)" in finding["text"]
    assert finding["fix"] == "ssh-copy-id host2"


def test_another_version_of_ringtrain_on_one_host(make_lab, job, tmp_path):
    hosts = make_lab(3)
    theirs = tmp_path / "theirs"
    shutil.copytree(job, theirs)
    init = theirs / "ringtrain" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    hosts.bind("host2", theirs, job)
    report, wrong = examined(hosts, job)
    assert wrong == {"ringtrain": ["host2"], "shared": ["host2"]}
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert "version 9." in by_check["ringtrain"]["text"]
    assert by_check["ringtrain"]["fix"] == f"rsync -aR {job}/ringtrain host2:/"
    table = doctor(hosts, job)
    assert table.returncode == 2
    assert "\n!! host2: ringtrain: version 9." in table.stdout


def test_a_host_without_the_environment(two_hosts, job, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    two_hosts.bind("host2", empty, sys.prefix)
    two_hosts.bind("host2", empty, job)
    report, wrong = examined(two_hosts, job)
    assert {"Python", "TensorFlow", "Keras", "Horovod", "ringtrain", "MPI"} <= wrong.keys()
    assert {host for hosts in wrong.values() for host in hosts} == {"host2"}
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert f"no {sys.executable}, which ranks are started with" in by_check["Python"]["text"]
    assert by_check["Python"]["fix"] == f"rsync -aR {sys.prefix} host2:/"


def test_a_name_that_means_loopback_and_a_small_shared_memory(two_hosts, job, tmp_path):
    theirs = tmp_path / "hosts"
    theirs.write_text(f"127.0.0.1 localhost\n127.0.1.1 host2\n{two_hosts.address('host1')} host1\n")
    two_hosts.bind("host2", theirs, "/etc/hosts")
    shrunk = two_hosts.run("host2", ["mount", "-o", "remount,size=64m", "/dev/shm"], TIMEOUT_S)
    assert shrunk.returncode == 0, shrunk.stderr
    report, wrong = examined(two_hosts, job)
    assert wrong == {"name": ["host2"], "/dev/shm": ["host2"]}
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert "its own name, host2, means 127.0.1.1" in by_check["name"]["text"]
    assert f"{two_hosts.address('host2')} host2" in by_check["name"]["fix"]


def test_a_host_that_stops_answering_is_given_up_in_time(two_hosts, job):
    two_hosts.cut("host2")
    report, wrong = examined(two_hosts, job, "--timeout", "3")
    assert wrong == {"ssh": ["host2"]}
    assert "timed out" in report["findings"][0]["text"]


def test_horovod_itself_says_what_the_probe_read_of_it():
    program = "import horovod.tensorflow as h; print(h.mpi_built(), h.gloo_built(), bool(h.nccl_built()))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    operations = software.horovod_operations({}) or []
    assert ended.stdout.split() == [str(name in operations) for name in ("MPI", "Gloo", "NCCL")]
