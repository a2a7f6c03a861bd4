"""The lab itself: hosts are apart, what happens to one happens to it alone, and nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import lab
import launching
import pytest

TIMEOUT_S = 120  # far above what anything here takes
MANY_BYTES = 4_000_000
RECEIVE = f"""
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as sender:
        missing = {MANY_BYTES}
        while missing:
            missing -= len(sender.recv(65536)) or exit("too little")
"""
SEND = f"""
import socket, time
started = time.monotonic()
with socket.create_connection(("host2", 5000)) as receiver:
    receiver.sendall(bytes({MANY_BYTES}))
    receiver.recv(1)  # the end, when it has them all
print({MANY_BYTES} * 8 / (time.monotonic() - started) / 1e6)
"""
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


def megabits_per_s(hosts: lab.Lab) -> float:
    with hosts.start("host2", [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout.readline() == "ready\n"
        sent = hosts.run("host1", [sys.executable, "-c", SEND], TIMEOUT_S)
        assert sent.returncode == 0, sent.stderr
        return float(sent.stdout)


@pytest.mark.quick
def test_hosts_have_names_of_their_own_and_reach_each_other_by_ssh(two_hosts):
    for here, there in (("host1", "host2"), ("host2", "host1")):
        assert two_hosts.run(here, ["hostname"], TIMEOUT_S).stdout == f"{here}\n"
        ended = ssh(two_hosts, there, "hostname", here=here)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{there}\n", "")


def test_a_command_over_ssh_finds_a_bare_path_and_the_labs_own_home(two_hosts):
    found = ssh(two_hosts, "host2", "echo $PATH; echo ~; env").stdout.splitlines()
    assert str(launching.BIN) not in found[0].split(":") and "/usr/bin" in found[0].split(":")
    assert found[1] == str(two_hosts.home)
    assert not [line for line in found if line.startswith(("VIRTUAL_ENV=", "PYTHONPATH=", "OMPI_"))]
    own = two_hosts.run("host1", ["sh", "-c", "echo ~; command -v horovodrun"], TIMEOUT_S).stdout.splitlines()
    assert own == [str(two_hosts.home), str(launching.BIN / "horovodrun")]


def test_processes_are_known_by_their_host_alone_and_can_be_killed(two_hosts):
    assert two_hosts.processes("host1") == two_hosts.processes("host2") == {}
    assert ssh(two_hosts, "host2", "setsid sleep 1003 >/dev/null 2>&1 &").returncode == 0
    lab.wait_for(lambda: list(two_hosts.processes("host2").values()) == ["sleep 1003"], TIMEOUT_S, "the one of host2")
    assert two_hosts.processes("host1") == {}
    listed = {host: two_hosts.run(host, ["ps", "-e", "-o", "args"], TIMEOUT_S).stdout for host in two_hosts.names}
    assert "sleep 1003" in listed["host2"] and "sleep 1003" not in listed["host1"]
    two_hosts.kill_processes("host2")
    assert two_hosts.processes("host2") == {}
    assert ssh(two_hosts, "host2", "true").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command_and_its_end_comes_back(two_hosts, number):
    wait = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    argv = [sys.executable, "-c", wait.format(int(number))]
    with two_hosts.start("host1", argv, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 7


def test_a_killed_command_is_killed_and_a_signal_is_seen_as_one(two_hosts):
    with two_hosts.start("host1", ["sleep", "1004"]) as process:
        lab.wait_for(lambda: "sleep 1004" in two_hosts.processes("host1").values(), TIMEOUT_S, "sleeping")
        process.kill()
        lab.wait_for(lambda: not two_hosts.processes("host1"), TIMEOUT_S, "nothing left on host1")
    assert two_hosts.run("host1", ["sh", "-c", "kill -USR1 $$"], TIMEOUT_S).returncode == -signal.SIGUSR1


def test_what_is_too_slow_is_killed_on_every_host(two_hosts):
    with pytest.raises(TimeoutError, match="still running after 3 s, killed"):
        two_hosts.run("host1", ["ssh", "host2", "echo here; sleep 1005 & wait"], timeout_s=3)
    assert two_hosts.processes("host1") == two_hosts.processes("host2") == {}


def test_a_terminal_is_the_commands_own(two_hosts):
    outside, inside = os.openpty()
    with two_hosts.start("host1", ["sh", "-c", "sleep 1006"], stdin=inside) as process:
        os.close(inside)
        lab.wait_for(lambda: "sleep 1006" in two_hosts.processes("host1").values(), TIMEOUT_S, "sleeping")
        os.write(outside, b"\x03")
        assert process.wait(TIMEOUT_S) == -signal.SIGINT
    os.close(outside)


def test_a_links_rate_is_what_it_was_set_to(two_hosts):
    free = megabits_per_s(two_hosts)
    two_hosts.limit("host2", 20)
    limited = megabits_per_s(two_hosts)
    two_hosts.limit("host2", None)
    freed = megabits_per_s(two_hosts)
    assert limited < 25
    assert min(free, freed) > 3 * limited


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


def test_sshd_can_be_stopped_and_started(two_hosts):
    two_hosts.stop_sshd("host2")
    refused = ssh(two_hosts, "host2", "true")
    assert refused.returncode == 255 and "Connection refused" in refused.stderr
    assert ssh(two_hosts, "host1", "true", here="host2").returncode == 0
    two_hosts.start_sshd("host2")
    assert ssh(two_hosts, "host2", "true").returncode == 0


def test_a_changed_host_key_is_noticed(two_hosts):
    two_hosts.change_host_key("host2")
    refused = ssh(two_hosts, "host2", "true")
    assert refused.returncode == 255 and "HOST IDENTIFICATION HAS CHANGED" in refused.stderr


def test_a_folder_can_be_another_on_one_host(two_hosts, tmp_path):
    two_hosts.bind("host2", tmp_path, launching.ROOT / "ringtrain")
    version = [sys.executable, "-c", "import ringtrain; print(ringtrain.__version__)"]
    assert "has no attribute '__version__'" in two_hosts.run("host2", version, TIMEOUT_S).stderr
    assert two_hosts.run("host1", version, TIMEOUT_S).returncode == 0
    assert (launching.ROOT / "ringtrain" / "__init__.py").exists()


def test_interfaces_may_have_other_names(make_lab):
    hosts = make_lab(2, interfaces={"host2": "ens5"})
    listed = hosts.run("host2", ["ip", "-brief", "address", "show", "dev", "ens5"], TIMEOUT_S).stdout
    assert hosts.address("host2") in listed
    hosts.limit("host2", 100)
    assert ssh(hosts, "host2", "true").returncode == 0


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
