"""The lab itself: hosts are apart, what happens to one happens to it alone, and nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import lab
import pytest

TIMEOUT_S = 120  # far above what anything here takes
OWNER = """
import sys, time
import lab
with lab.Lab(2) as hosts:
    hosts.start("host1", ["ssh", "host2", "sleep 1001 & exec sleep 1002"])
    lab.wait_for(lambda: "sleep 1002" in hosts.processes("host2").values(), 60, "sleeping on host2")
    print(hosts.folder, *hosts._first.values(), flush=True)
    time.sleep(1000)
"""


def ssh(hosts: lab.Lab, there: str, *command: str, here: str = "host1") -> subprocess.CompletedProcess[str]:
    return hosts.run(here, ["ssh", "-o", "ConnectTimeout=3", there, *command], TIMEOUT_S)


def links() -> set[str]:
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {line.split(":")[1].strip() for line in listed.splitlines()}


def namespaces(process: int) -> set[str]:
    return {os.readlink(f"/proc/{process}/ns/{kind}") for kind in ("net", "pid", "mnt", "uts")}


def in_use() -> set[str]:
    """Every namespace that some process of this machine is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= namespaces(int(process.name))
    return found


@pytest.mark.quick
def test_hosts_have_names_of_their_own_and_reach_each_other_by_ssh(two_hosts):
    for here, there in (("host1", "host2"), ("host2", "host1")):
        assert two_hosts.run(here, ["hostname"], TIMEOUT_S).stdout == f"{here}\n"
        ended = ssh(two_hosts, there, "hostname", here=here)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{there}\n", "")


def test_nothing_comes_through_a_cut_link_until_it_is_restored(two_hosts):
    count = "number=0; while :; do number=$((number + 1)); echo $number; sleep 0.02; done"
    with two_hosts.start("host1", ["ssh", "host2", count], stdout=subprocess.PIPE) as counting:
        assert counting.stdout.readline() == "1\n"
        two_hosts.cut("host2")
        os.set_blocking(counting.stdout.fileno(), False)
        assert ssh(two_hosts, "host2", "true").returncode == 255
        with contextlib.suppress(BlockingIOError):
            while os.read(counting.stdout.fileno(), 65536):
                pass
        assert ssh(two_hosts, "host1", "true", here="host2").returncode == 255  # takes three seconds
        with pytest.raises(BlockingIOError):
            os.read(counting.stdout.fileno(), 65536)
        two_hosts.restore("host2")
        os.set_blocking(counting.stdout.fileno(), True)
        assert os.read(counting.stdout.fileno(), 65536)
        assert ssh(two_hosts, "host2", "true").returncode == 0


def test_two_labs_at_once_and_nothing_is_left_of_either(lab_possible):
    links_before, ssh_folder = links(), Path("~/.ssh").expanduser()
    keys_before = ssh_folder.exists() and sorted(ssh_folder.iterdir())
    with lab.Lab(2) as first, lab.Lab(2) as second:
        used = set().union(*(namespaces(process) for hosts in (first, second) for process in hosts._first.values()))
        assert used < in_use()
        assert used.isdisjoint(namespaces(os.getpid())) and len(used) == 4 * 6  # two hosts and a switch, twice
        assert links() == links_before
        for hosts in (first, second):
            assert ssh(hosts, "host2", "setsid sleep 1007 >/dev/null 2>&1 &").returncode == 0
            lab.wait_for(lambda hosts=hosts: hosts.processes("host2") != {}, TIMEOUT_S, "one on host2")
        first.kill_processes("host2")
        assert second.processes("host2") != {}
    assert used.isdisjoint(in_use())
    assert links() == links_before
    assert not first.folder.exists() and not second.folder.exists()
    assert (ssh_folder.exists() and sorted(ssh_folder.iterdir())) == keys_before


def test_a_lab_goes_when_its_owner_is_killed_and_its_folder_with_the_next_one(make_lab, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where no other lab of this machine cleans up
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=env) as owner:
        folder, *first = owner.stdout.readline().split()
        used = set().union(*map(namespaces, map(int, first)))
        assert used < in_use()
        owner.kill()
    lab.wait_for(lambda: used.isdisjoint(in_use()), TIMEOUT_S, "all of its namespaces have gone")
    assert Path(folder).exists()
    own = make_lab(1).folder
    assert own.exists() and not Path(folder).exists()
