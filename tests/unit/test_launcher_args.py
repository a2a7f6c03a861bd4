"""What a launcher was told, read off its command line by a rank."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ringtrain.protocol import env
from ringtrain.protocol.env import PLAN
from ringtrain.protocol.launcher_args import expectation, launcher_among_ancestors, placement_on_command_line
from ringtrain.protocol.placement import PlannedPlacement

HOSTFILE = "# ours\nhost1 slots=4 max_slots=8\n\nhost2 slots=4 # the other\n"
FOUR_AND_FOUR = (("host1", 4), ("host2", 4))


def told(line: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    expected = placement_on_command_line(
        shlex.split(line), lambda path: HOSTFILE.splitlines() if path == "hosts" else []
    )
    assert expected is not None
    return expected.size, expected.hosts


@pytest.mark.parametrize(
    "line",
    [
        "horovodrun -np 8 -H host1:4,host2:4 python -m ringtrain.train",
        "/usr/bin/horovodrun --gloo -np 8 --hosts host1:4,host2:4 python train.py -n 3 -H other:8",
        "mpirun --allow-run-as-root --tag-output -np 8 -H host1:4,host2:4 -bind-to none -map-by slot"
        " -mca pml ob1 -mca btl ^openib -x PATH python train.py",
        "mpirun -n 8 --hostfile hosts --mca plm_rsh_args -p python train.py --np 2",
        "mpirun --host host1:4,host2:4 -np 8 --tag-output python -m train -n 5",
        "mpiexec -machinefile hosts -n 8 python x.py",
    ],
)
def test_ranks_and_hosts(line: str) -> None:
    assert told(line) == (8, FOUR_AND_FOUR)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("mpirun -np 8 -H host1:4,host2:4 --map-by node python x.py", 8),  # dealt out otherwise
        ("mpirun -np 8 -H host1:4,host2:4 --map-by ppr:4:node python x.py", 8),
        ("mpirun -np 8 -H host1:4,host2:4 -rf ranks python x.py", 8),
        ("mpirun --mca rmaps_base_mapping_policy node -np 8 -H host1:4,host2:4 python x.py", 8),
        ("mpirun -np 8 -H host1,host2 --oversubscribe python x.py", 8),
        ("mpirun -np 8 -H host1:4,host1:4 python x.py", 8),  # a name twice
        ("mpirun -np 8 -H host1:2,host2:4 python x.py", 8),  # fewer slots than ranks: the launcher knows why
        ("mpirun -np 8 --hostfile missing python x.py", 8),
        ("mpirun -np 2 python x.py : -np 6 python y.py", 2),
        ("mpirun -np 8 python x.py -H a:4,b:4", 8),
        ("mpirun -H host1:4,host2:4 python x.py", 0),
    ],
)
def test_where_it_is_not_sure_only_the_number_counts(line: str, size: int) -> None:
    assert told(line) == (size, ())


def process_table(folder: Path, *lines: str) -> int:
    """Processes that each are the parent of the next; the number of the last."""
    for number, line in enumerate(lines, start=2):
        (folder / str(number)).mkdir()
        (folder / str(number) / "cmdline").write_text("\0".join(shlex.split(line)) + "\0")
        (folder / str(number) / "stat").write_text(f"{number} (a) b) S {number - 1} 1 1 0")
    return len(lines) + 1


def test_the_nearest_launcher_is_found(tmp_path: Path) -> None:
    last = process_table(
        tmp_path, "bash", "python /x/bin/horovodrun -np 8 -H a:8 x", "python x", "sh -c 'mpirun -np 3'"
    )
    assert launcher_among_ancestors(last, tmp_path) == ["/x/bin/horovodrun", "-np", "8", "-H", "a:8", "x"]
    assert launcher_among_ancestors(2, tmp_path) == []


def test_the_plan_wins_over_the_command_line_and_that_over_the_environment(tmp_path: Path) -> None:
    last = process_table(tmp_path, "mpirun -np 8 -H host1:4,host2:4 python x", "python x")
    plan = PlannedPlacement(2, (("a", 2),))
    environ = {PLAN: plan.to_json(), "OMPI_COMM_WORLD_SIZE": "8"}
    assert expectation(environ, last, tmp_path) == plan
    del environ[PLAN]
    found = expectation(environ, last, tmp_path)
    assert found is not None and (found.size, found.hosts) == (8, FOUR_AND_FOUR)
    assert found.source == "`mpirun -np 8 -H host1:4,host2:4`"
    # A command line that cannot be ours (a launcher inside a launcher's rank) is not believed.
    other = expectation({"OMPI_COMM_WORLD_SIZE": "3"}, last, tmp_path)
    assert other == PlannedPlacement(3, source="the launcher")
    assert expectation({"SLURM_STEP_NUM_TASKS": "4"}, 1, tmp_path) == PlannedPlacement(4, source="the launcher")
    assert expectation({}, 1, tmp_path) is None


def test_a_process_that_a_rank_has_started_is_no_rank(tmp_path: Path) -> None:
    of_launchers = ("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMI_FD", "MPI_LOCALRANKID", "HOROVOD_GLOO_IFACE")
    of_job = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "RINGTRAIN_JOB", PLAN)
    kept = {"OPAL_PREFIX": "/venv", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", "RINGTRAIN_KEPT": "60"}
    rank = {**dict.fromkeys((*of_launchers, *of_job), "2"), **kept}
    env.mark_rank(rank)
    assert not env.has_left_rank(rank)
    env.leave_rank(rank)
    assert {*of_launchers} <= {*rank}, "the rank itself keeps all"
    child = {**rank, env.RANK_PROCESS: "1"}  # as with another process ID
    env.leave_rank(child)
    assert child == {**kept, env.RANK_PROCESS: "1"}
    last = process_table(tmp_path, "mpirun -np 8 -H host1:8 python x", "python x", "python child")
    assert expectation(child, last, tmp_path) is None
    alone = {"HOME": "/"}
    env.mark_rank(alone)
    assert alone == {"HOME": "/"}, "not a rank: a notebook, which may start ranks"


def test_open_mpi_begins_with_the_launching_host_wherever_it_is_named() -> None:
    words = shlex.split("mpirun -np 8 -H host2:4,host1:4 python x.py")
    for own_name, hosts in (("host1", ()), ("host1.cluster", ()), ("host2", None), ("login", None)):
        expected = placement_on_command_line(words, lambda path: [], own_name)
        assert expected is not None and expected.size == 8
        assert expected.hosts == ((("host2", 4), ("host1", 4)) if hosts is None else hosts)


@pytest.mark.parametrize("name", ["OMPI_MCA_rmaps_base_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy"])
def test_a_mapping_policy_in_the_environment_makes_places_unsure(name: str, tmp_path: Path) -> None:
    last = process_table(tmp_path, "mpirun -np 8 -H host2:4,host3:4 python x.py", "python x.py")
    environ = {"OMPI_COMM_WORLD_SIZE": "8"}
    sure, unsure = (expectation({**environ, name: policy}, last, tmp_path) for policy in ("slot", "node"))
    assert sure is not None and unsure is not None
    assert (len(sure.hosts), unsure.hosts, unsure.size) == (2, (), 8)
