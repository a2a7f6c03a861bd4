"""Every command of docs/launching.md, typed on a host of a lab as the page has it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import lab
import launching
import pytest
import standalone

PAGE = (launching.ROOT / "docs" / "launching.md").read_text()
IN_TABLE = re.findall(r"`(ringtrain launch [^`]* python [^`]*)`", PAGE)
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
IN_BLOCKS = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [*IN_TABLE, *IN_BLOCKS]
# Typed as it stands, with eight TensorFlows; of the others, ranks run something shorter.
WHOLE = "launch/mpirun.sh hostfiles/cluster.txt -np 8 -- python -m ringtrain.train --config configs/digits.toml"
TIMEOUT_S = 900  # far above what anything here takes
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


def test_the_page_has_a_command_for_every_kind_of_cluster() -> None:
    assert len(COMMANDS) == 12
    assert WHOLE in COMMANDS
    for word in ("sbatch", "srun", "mpijob", "horovodrun-gloo", "hosts", "doctor", "--explain", "--dry-run"):
        assert any(word in command for command in COMMANDS), word


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != WHOLE], ids=str)
def test_a_command_of_the_page(two_hosts: lab.Lab, command: str) -> None:
    words = shlex.split(command)
    if "spark" in words:
        standalone.require()
    if "python" in words and not {"--dry-run", "--explain"} & {*words}:
        words[words.index("python") :] = ["true"]
    env = {"PYTHONPATH": str(launching.ROOT), **(SLURM if "srun" in words else {})}
    ended = two_hosts.run("host1", ["python", "-m", *words], TIMEOUT_S, env=env)
    doctors = {0, 1} if "doctor" in words else {0}  # 1: eight ranks on few cores
    assert ended.returncode in doctors, ended.stdout + ended.stderr
    assert "ringtrain:" not in ended.stderr


def test_eight_ranks_on_two_hosts_by_the_script(two_hosts: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Beside networks that each host has for itself, as libvirt and Docker make them, where Open MPI would hang."""
    for host in two_hosts.names:
        two_hosts.add_bridge(host, "virbr0", "192.168.122.1/24")
    two_hosts.add_bridge("host1", "br-compose", "172.18.0.1/16")
    folder = tmp_path_factory.mktemp("runs")
    words = [*shlex.split(WHOLE), "--train.epochs", "2", "--run.directory", folder]
    words[(at := words.index("python")) : at + 1] = two_hosts.warm_python()
    ended = two_hosts.run("host1", words, TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"8 ranks in step: gradients averaged, weights and optimizer equal [0-9a-f]{16}", ended.stdout)
    lab.wait_for(lambda: not any(map(two_hosts.processes, two_hosts.names)), 10, "nothing of the job lives")


@pytest.fixture
def wrong(two_hosts: lab.Lab) -> Callable[[str], int]:
    return lambda command: two_hosts.run("host1", ["python", "-m", *shlex.split(command)], TIMEOUT_S).returncode


def test_a_command_with_a_mistake_would_be_noticed(wrong: Callable[[str], int]) -> None:
    assert wrong("ringtrain launch --hostfiles hostfiles/cluster.txt -np 8 -- true") == 2
    assert wrong("ringtrain launch --hostfile hostfiles/cluster.txt -np 9 -- true") == 2
