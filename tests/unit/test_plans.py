"""Plans: what each launcher is told, as tests/golden has it; what is never on a command line; what becomes of words.

After a change that is meant: python tests/planning.py, and look at what git diff says.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import planning
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import ENVIRONMENT, GOLDEN, JOBS, PLANNERS, TWO_HOSTS, VALUE

from ringtrain.cluster import environment, host_agent, job
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job, Plan, explain
from ringtrain.cluster.plans import horovodrun, kubernetes, mpirun, openmpi, slurm
from ringtrain.errors import LaunchError

TIMEOUT_S = 60
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORDS = st.lists(WORD.filter(lambda word: word != ":"), max_size=4).map(tuple)
QUICK = settings(max_examples=40)


def text_of(plan: Plan) -> str:
    return "\n".join([*plan.argv, plan.shell(), *map("\n".join, explain(plan)), *plan.files.values()])


# ---- the golden files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", PLANNERS)
def test_a_plan_is_what_its_golden_file_says(launcher: str) -> None:
    assert planning.described(launcher) == (GOLDEN / f"{launcher}.txt").read_text()
    assert len([*GOLDEN.iterdir()]) == len(PLANNERS), "each launcher has one"


@pytest.mark.parametrize("path", planning.examples(), ids=lambda path: path.name)
def test_an_example_is_what_its_planner_prints(path: Path) -> None:
    assert path.read_text() == planning.examples()[path]


# ---- which MPI ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mpirun (Open MPI) 3.1.6\n\nReport", "mpirun (Open MPI) 50.1", "\n"])
def test_another_mpi_is_refused_by_its_first_line(text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(repr(text.strip().partition("\n")[0]))) as error:
        mpirun.identify(text)
    assert "\n" not in str(error.value)


# ---- the environment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", PLANNERS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_no_value_of_the_environment_is_in_a_plan(launcher: str, job: Job) -> None:
    try:
        plan = PLANNERS[launcher](job)
    except LaunchError as error:
        assert VALUE not in str(error)
        return
    if launcher.startswith(("mpijob", "trainjob")):
        # Kubernetes takes values from the manifest: those that are no secret.
        values = re.compile(rf'- name: "NCCL_DEBUG"\n +value: "{VALUE}"')
        plan = replace(plan, files={path: values.sub("", text) for path, text in plan.files.items()})
    assert VALUE not in text_of(plan)


@pytest.mark.parametrize("dialect", mpirun.DIALECTS)
def test_names_on_the_list_are_handed_on_and_no_others(dialect: str) -> None:
    names = ("XLA_FLAGS", "KERAS_BACKEND", "UCX_TLS", "CUDA_DEVICE_ORDER", "TFX", "OMPI_X", "CUDA_VISIBLE_DEVICES")
    terraform = ("TF_VAR_db", "TF_TOKEN_app_io", "TF_CLI_ARGS")
    job = replace(TWO_HOSTS, environment={**ENVIRONMENT, **dict.fromkeys((*names, *terraform), "")})
    argv = mpirun.plan(job, dialect).argv
    removed, flags = argv[: argv.index("mpirun")], argv[argv.index("mpirun") :]
    assert {"AWS_SECRET_ACCESS_KEY", "TFX", "TF_TOKEN_app_io"} <= {*removed} and not {"PATH", "OMPI_X"} & {*removed}
    found = {word for word in re.split("[ ,]", " ".join(flags)) if word in job.environment}
    wanted = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "NCCL_DEBUG", "TF_API_KEY", "XLA_FLAGS"}
    assert found == wanted | {"KERAS_BACKEND", "UCX_TLS", "CUDA_DEVICE_ORDER"}
    asked = mpirun.plan(replace(job, forward=("HF_TOKEN",)), dialect).argv
    assert "HF_TOKEN" in re.split("[ ,]", " ".join(asked))


def test_a_secret_is_known_by_its_name() -> None:
    secrets = ["HF_TOKEN", "aws_secret_access_key", "MYSQL_PASSWORD", "GITHUB_PAT", "API_KEYS", "DB_PWD"]
    secrets += ["SLURM_JWT", "PBS_JOBCOOKIE"]
    others = ["PATH", "PWD", "SSH_AUTH_SOCK", "KERAS_HOME", "TF_CPP_MIN_LOG_LEVEL", "MONKEY", "PATTERN"]
    assert [name for name in (*secrets, *others) if environment.is_secret(name)] == secrets


@pytest.mark.parametrize("name", ["HF_TOKEN=sesame", "NOT_SET", "x;id"])
def test_a_name_that_cannot_be_forwarded(name: str) -> None:
    with pytest.raises(LaunchError, match="--forward") as error:
        mpirun.plan(replace(TWO_HOSTS, forward=(name,)), "openmpi4")
    assert "sesame" not in str(error.value)


def test_horovodrun_sees_nothing_that_it_would_hand_on() -> None:
    job = replace(TWO_HOSTS, environment={**ENVIRONMENT, "bad;name": "x", "SSH_AUTH_SOCK": "s", "SLURM_JOB_ID": "1"})
    for gloo in (False, True):
        made = horovodrun.plan(job, gloo=gloo)
        (flag,) = [flag for flag in made.flags if "-u" in flag.words]
        assert set(flag.words) - {"-u"} == {"AWS_SECRET_ACCESS_KEY", "EDITOR", "HF_TOKEN", "bad;name"}
        exported = made.argv[made.argv.index("--export") + 1].split(",")
        assert "PATH" in exported
        assert not {*exported} & {*flag.words, "SSH_AUTH_SOCK", "SLURM_JOB_ID"}


OWN = ("KRB5CCNAME", "CUDA_HOME", "CUDA_PATH", "MPIEXEC_TIMEOUT", "HWLOC_XMLFILE", "PYTHONHOME", "PYTHONUTF8")
IMPORTS = ("PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH")


def test_a_launcher_keeps_what_it_needs_itself_and_ranks_import_alike() -> None:
    job = replace(TWO_HOSTS, environment={**ENVIRONMENT, **dict.fromkeys((*OWN, *IMPORTS), "x")})
    assert environment.withheld(job) == ("AWS_SECRET_ACCESS_KEY", "EDITOR", "HF_TOKEN")
    names = set(environment.forwarded(job))
    assert names >= {*IMPORTS}
    assert not names & {*OWN}


@pytest.mark.parametrize("launcher", ["mpirun-openmpi4", "horovodrun", "horovodrun-gloo", "srun"])
def test_ranks_of_the_wheels_mpi_find_its_files_and_functions(launcher: str) -> None:
    plan = PLANNERS[launcher](replace(TWO_HOSTS, wheel_mpi="/venv"))
    assert plan.env["OPAL_PREFIX"] == "/venv" and "LD_BIND_NOW" not in plan.env, "srun does not start with it"
    assert "OPAL_PREFIX" in {*re.split("[ ,=]", " ".join(plan.argv))}, "ranks of other hosts get it by name"
    bind_now = "LD_BIND_NOW=1"
    assert bind_now in " ".join(plan.argv)
    set_here = replace(TWO_HOSTS, wheel_mpi="/venv", environment={"LD_BIND_NOW": ""})
    for other in (TWO_HOSTS, set_here):
        assert bind_now not in " ".join(PLANNERS[launcher](other).argv)


# ---- networks -----------------------------------------------------------------------------------------------------

VIRTUAL = "192.168.122.1/24:bridge"


@pytest.mark.parametrize(
    ("hosts", "reached", "excluded"),
    [
        (["127.0.0.1/8 10.1.0.1/16", "127.0.0.1/8 10.1.0.2/16"], [], []),
        ([f"10.1.0.1/16 {VIRTUAL} 172.18.0.1/16:bridge", "10.1.0.2/16"], [], ["172.18.0.0/16", "192.168.122.0/24"]),
        (["10.0.2.15/24 10.1.0.1/16", "10.0.2.15/24 10.1.0.2/16", "10.1.0.3/16"], [], ["10.0.2.0/24"]),
        # A bridge that all hosts are on, as hosts of virtual machines have it.
        (["10.1.0.1/16:bridge", "10.1.0.2/16:bridge"], [], []),
        # Bridges in networks of their own, which a router joins; and of other masks.
        ([f"10.1.1.3/24:bridge {VIRTUAL}", "10.1.2.3/24:bridge"], ["10.1.1.3", "10.1.2.3"], ["192.168.122.0/24"]),
        (["10.1.0.3/16:bridge", "10.1.0.4/24"], ["10.1.0.4"], []),
        # An address that both have joins nobody, though ssh reaches each host by it.
        (["10.0.2.15/24 10.1.0.1/16", "10.0.2.15/24 10.1.0.2/16"], ["10.0.2.15"], ["10.0.2.0/24"]),
        # Two names of one machine; a host that cannot say, and one of those on the other's bridge.
        ([f"10.1.0.1/16 {VIRTUAL}", f"10.1.0.1/16 {VIRTUAL}"], ["10.1.0.1"], []),
        ([f"10.1.0.1/16 {VIRTUAL}", ""], ["10.1.0.1", "10.1.0.2"], ["192.168.122.0/24"]),
        ([f"10.1.0.1/16 {VIRTUAL}", ""], ["192.168.122.7"], []),
    ],
)
def test_networks_that_lead_to_no_other_host_are_left_out(
    hosts: list[str], reached: list[str], excluded: list[str]
) -> None:
    found = host_agent.local_networks(hosts, reached)
    assert found == tuple(excluded)
    line = mpirun.plan(replace(TWO_HOSTS, local_networks=found), "openmpi4").argv
    assert line[line.index("btl_tcp_if_exclude") + 1] == ",".join(["127.0.0.0/8", "docker0", *excluded])


@pytest.mark.parametrize(("dialect", "flag"), [("openmpi4", "--mca orte"), ("openmpi5", "--prtemca prte")])
def test_full_names_of_hosts_are_kept(dialect: str, flag: str) -> None:
    def line(*names: str) -> str:
        return " ".join(mpirun.plan(replace(TWO_HOSTS, hosts=tuple(Host(name, 4) for name in names)), dialect).argv)

    kept = f"{flag}_keep_fqdn_hostnames 1"
    assert kept in line("host1", "host2.pods.example")
    for names in (("host1", "host2"), ("10.1.0.1", "10.1.0.2")):
        assert "fqdn" not in line(*names)
    assert kept in " ".join(mpirun.plan(TWO_HOSTS, dialect, hostfile="/etc/mpi/hostfile").argv), "its names may be full"


def test_interfaces_that_the_user_has_chosen_stay(tmp_path: Path) -> None:
    """Open MPI takes btl_tcp_if_include or btl_tcp_if_exclude, not both; its value from a plan would replace theirs."""
    include, exclude = "btl_tcp_if_include", "btl_tcp_if_exclude"
    file = tmp_path / "mca-params.conf"
    file.write_text(f"# {include} = eth9\n {exclude} = lo\n")
    of_file = openmpi.own_interfaces({}, [tmp_path / "missing", file])
    of_variable = openmpi.own_interfaces({f"OMPI_MCA_{include}": "eth1"}, [file])
    assert openmpi.own_interfaces({}, [tmp_path]) == ("", "")
    assert of_file == (exclude, f"{exclude} is set in {file}")
    assert of_variable == (include, f"OMPI_MCA_{include} is set here")
    assert exclude in PLANNERS["mpirun-openmpi5"](TWO_HOSTS).argv
    for chosen in (of_file, of_variable):
        plan = PLANNERS["mpirun-openmpi5"](replace(TWO_HOSTS, own_interfaces=chosen))
        assert exclude not in plan.argv
    with pytest.raises(LaunchError, match="horovodrun gives mpirun btl_tcp_if_include"):
        horovodrun.plan(replace(TWO_HOSTS, own_interfaces=of_file))
    assert horovodrun.plan(replace(TWO_HOSTS, own_interfaces=of_file), gloo=True)
    job = replace(TWO_HOSTS, subnet="10.1.0.0/16")
    for launcher in ("mpirun-openmpi5", "srun"):
        PLANNERS[launcher](replace(job, own_interfaces=of_variable))  # replaces the same parameter
        with pytest.raises(LaunchError, match=f"got --subnet 10.1.0.0/16, and {exclude} is set in"):
            PLANNERS[launcher](replace(job, own_interfaces=of_file))


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": ()}, "command"),
        ({"command": ("--help",)}, "begin with a program"),
        ({"command": ("python", ":", "id")}, "':' as an argument"),
        ({"command": ("python", "a\0b")}, "zero byte"),
        ({"command": ("python", "caf\udce9.py")}, "expected UTF-8"),
        ({"threads_per_rank": -1}, "-1 threads"),
        ({"ssh_port": 70000}, "--ssh-port 70000"),
        ({"subnet": "10.1.0.0/16; id"}, "10.1.0.0/16; id"),
        ({"hosts": (Host("fe80::1", 8),)}, "fe80::1"),
    ],
)
@pytest.mark.parametrize("launcher", [name for name in PLANNERS if not name.startswith(("mpijob", "trainjob"))])
def test_what_cannot_be_launched(launcher: str, change: Mapping[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)) as error:
        PLANNERS[launcher](replace(TWO_HOSTS, **change))
    assert "\n" not in str(error.value)


def test_what_only_one_launcher_refuses() -> None:
    at_home = replace(TWO_HOSTS, environment={"HOME": "/home/me"})
    for refused, said in (
        (lambda: horovodrun.plan(TWO_HOSTS, dialect="openmpi5"), "Open MPI 4 only"),
        (lambda: horovodrun.plan(replace(TWO_HOSTS, working_directory="/a b"), gloo=True), "'/a b'"),
        (lambda: horovodrun.plan(replace(TWO_HOSTS, bind="core", threads_per_rank=4), gloo=True), "got --bind core"),
        (lambda: horovodrun.elastic(TWO_HOSTS, min_ranks=9, max_ranks=10), "9 ranks at least"),
        (lambda: horovodrun.elastic(JOBS["one host"], min_ranks=1, max_ranks=2), "one host"),
        (lambda: mpirun.plan(replace(TWO_HOSTS, output="/a:b"), "openmpi4"), "/a:b"),
        (lambda: mpirun.plan(replace(TWO_HOSTS, subnet="10.0.0.0/8"), "mpich"), "by name only"),
        (lambda: slurm.sbatch(JOBS["uneven hosts"]), "same slots"),
        (lambda: kubernetes.plan(JOBS["uneven hosts"]), "same slots"),
        (lambda: kubernetes.plan(TWO_HOSTS, kubernetes.Cluster(name="Bad: name")), "'Bad: name'"),
        (lambda: kubernetes.plan(TWO_HOSTS, kubernetes.Cluster(resources={"memory": "a lot"})), "'a lot'"),
        (lambda: kubernetes.plan(replace(at_home, output="/home/me/logs")), "/home/me/logs is a path of this machine"),
        (lambda: kubernetes.plan(replace(at_home, command=("sh", "--config=/home/me/a"))), "/home/me/a is a path of"),
    ):
        with pytest.raises(LaunchError, match=re.escape(said)):
            refused()


# ---- lines that are pasted ----------------------------------------------------------------------------------------

# Stands for a launcher: writes what it got.
TELLTALE = f"""#!{sys.executable} -S
import json, os, sys
with open(sys.argv[0] + ".json", "w") as out:
    json.dump({{"argv": sys.argv, "environment": dict(os.environ)}}, out)
"""
LAUNCHERS = ("mpirun", "python3", "srun", "sbatch", "scontrol", "kubectl")


@pytest.fixture
def launchers(tmp_path: Path) -> Path:
    """A folder for PATH, with a telltale in place of each launcher."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in LAUNCHERS:
        (folder / name).write_text(TELLTALE)
        (folder / name).chmod(0o755)
    return folder


def bash(text: str, launchers: Path) -> subprocess.CompletedProcess[str]:
    """Pastes text into a bash."""
    return subprocess.run(
        ["bash", "--norc", "--noprofile"],
        input=text + "\n",
        env={"PATH": f"{launchers}:/usr/bin:/bin"},
        cwd=launchers.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def pasted(plan: Plan, launchers: Path) -> None:
    """Pastes a plan's line, and checks that its launcher got the plan."""
    result = bash(plan.shell(), launchers)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    program = next(word for word in plan.argv if word in LAUNCHERS)
    told = json.loads((launchers / f"{program}.json").read_text())
    assert told["argv"][1:] == list(plan.argv[plan.argv.index(program) + 1 :])
    assert {name: told["environment"].get(name) for name in plan.env} == plan.env
    assert {path: Path(path).read_bytes().decode() for path in plan.files} == plan.files


ACCEPTED = [
    (launcher, name)
    for launcher, text in {launcher: planning.described(launcher) for launcher in PLANNERS}.items()
    for name in re.findall(r"^=+ (.*)\n(?!refused)", text, re.MULTILINE)
    if "logs" not in name  # of which the folder would be at the disk's root
]


@pytest.mark.parametrize(("launcher", "name"), ACCEPTED)
def test_a_pasted_line_is_the_plan(launcher: str, name: str, launchers: Path) -> None:
    job = replace(JOBS[name], files_folder=str(launchers.parent / "its 'own' $folder"))
    pasted(PLANNERS[launcher](job), launchers)


@pytest.mark.parametrize("launcher", ["mpirun-intel", "horovodrun-elastic", "srun"])
def test_a_pasted_line_makes_a_folder_that_no_other_user_can_have_made(launcher: str, launchers: Path) -> None:
    plan = PLANNERS[launcher](replace(JOBS["uneven hosts"], files_folder=job.FRESH))
    (written,) = plan.files
    result = bash(f'{plan.shell()}; stat -c %a "${job.FRESH_NAME}"; echo "${job.FRESH_NAME}"', launchers)
    assert result.returncode == 0, result.stderr
    mode, folder = result.stdout.split()
    try:
        program = next(word for word in plan.argv if word in LAUNCHERS)
        told = json.loads((launchers / f"{program}.json").read_text())
        made = written.replace(job.FRESH, folder)
        assert Path(made).read_text() == plan.files[written]
        assert made in " ".join([*told["argv"], told["environment"].get("SLURM_HOSTFILE", "")])
        assert mode == "700"
        assert Path(folder).name != Path(job.FRESH).name
    finally:
        shutil.rmtree(folder)


@QUICK
@given(arguments=WORDS, folder=WORD.filter(lambda word: "/" not in word and word not in ("", ".", "..")))
def test_no_argument_and_no_path_becomes_a_command(launchers: Path, arguments: tuple[str, ...], folder: str) -> None:
    if len(folder.encode()) > 200:
        return
    job = replace(TWO_HOSTS, command=("python", *arguments), files_folder=str(launchers.parent / folder))
    for plan in (mpirun.plan(job, "intel"), horovodrun.plan(replace(job, working_directory=str(launchers)))):
        assert tuple(shlex.split(shlex.join(plan.argv))) == plan.argv
        pasted(plan, launchers)


def test_a_badly_quoted_line_would_be_noticed(launchers: Path) -> None:
    class Careless(Plan):
        def shell(self) -> str:
            return " ".join(self.argv)

    plan = mpirun.plan(JOBS["awkward words"], "openmpi4")
    with pytest.raises(AssertionError):
        pasted(Careless(plan.flags, plan.command), launchers)


@pytest.mark.parametrize("launcher", ["mpirun-openmpi4", "mpirun-openmpi5", "mpirun-mpich", "mpirun-intel", "srun"])
def test_ten_thousand_hosts_fit_on_a_command_line(launcher: str, launchers: Path) -> None:
    hosts = tuple(Host(f"node{number:05d}.cluster.example.org", 8) for number in range(10_000))
    job = replace(TWO_HOSTS, hosts=hosts, num_ranks=80_000, files_folder=str(launchers.parent))
    plan = PLANNERS[launcher](job)
    for path, text in plan.files.items():
        Path(path).write_text(text)
        assert all(host.name in text for host in hosts[::1000])
    subprocess.run(plan.argv, env={"PATH": f"{launchers}:/usr/bin:/bin", **plan.env}, check=True, timeout=TIMEOUT_S)


def test_every_word_of_a_plan_has_a_reason() -> None:
    for planner in PLANNERS.values():
        plan = planner(TWO_HOSTS)
        rows = explain(plan)
        assert all(reason.strip() for _, reason in rows)
        told = [word for words, _ in rows for word in shlex.split(words)]
        assert [word for word in plan.argv if word not in told] == []
        assert {name for name in plan.env if not any(words.startswith(f"{name}=") for words, _ in rows)} == set()


# ---- Slurm's script -----------------------------------------------------------------------------------------------


@QUICK
@given(arguments=WORDS, output=WORD)
def test_the_script_starts_what_it_was_told(launchers: Path, arguments: tuple[str, ...], output: str) -> None:
    job = replace(TWO_HOSTS, command=("python", *arguments), output=output)
    (script,) = slurm.sbatch(job).files.values()
    result = bash(script, launchers)
    assert (result.returncode, result.stderr) == (0, "")
    told = json.loads((launchers / "srun.json").read_text())["argv"]
    assert tuple(told[-len(job.command) :]) == job.command
    assert not output or output in told
    assert not (launchers / "scontrol.json").exists(), "it is not queued again"


# ---- Kubernetes' manifest -----------------------------------------------------------------------------------------


def containers(manifest: Any) -> list[Any]:
    """The launcher's and the worker's."""
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    return [replicas[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")]


def test_containers_are_admitted_where_a_namespace_has_rules() -> None:
    """They are limited and unprivileged."""
    limits = {"cpu": "8", "memory": "32Gi"}
    cluster = kubernetes.Cluster(image="team/own:1", resources=limits, gpus_per_worker=4)
    launcher, worker = containers(parsed(TWO_HOSTS, cluster))
    assert launcher["image"] == worker["image"] == "team/own:1"
    assert worker["resources"] == {"limits": {**limits, "nvidia.com/gpu": 4}}
    assert launcher["resources"]["limits"].keys() == limits.keys()
    assert launcher["securityContext"] == worker["securityContext"]
    assert worker["securityContext"]["runAsNonRoot"] is True
    assert worker["securityContext"]["allowPrivilegeEscalation"] is False


def parsed(job: Job, cluster: kubernetes.Cluster = kubernetes.Cluster()) -> Any:  # noqa: B008 - it is frozen
    (text,) = kubernetes.plan(job, cluster).files.values()
    return yaml.safe_load(text)


def test_a_train_job_has_the_pods_of_an_mpi_job() -> None:
    cluster = kubernetes.Cluster(gpus_per_worker=4, namespace="team-a")
    (text,) = kubernetes.train_job_plan(TWO_HOSTS, cluster).files.values()
    runtime, job = yaml.safe_load_all(text)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    nodes, launchers = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [one["template"]["spec"]["template"]["spec"]["containers"][0] for one in (launchers, nodes)]
    of_mpi_job = containers(parsed(TWO_HOSTS, cluster))
    assert [{**pod, "name": ""} for pod in pods] == [{**pod, "name": ""} for pod in of_mpi_job]
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}


@pytest.mark.parametrize("dialect", mpirun.DIALECTS)
@pytest.mark.parametrize("name", ["two hosts", "awkward words"])
def test_the_text_of_a_manifest_is_its_values(dialect: str, name: str) -> None:
    cluster = kubernetes.Cluster(dialect=dialect, gpus_per_worker=4, namespace="team-a")
    manifest, values = parsed(JOBS[name], cluster), kubernetes.manifest(JOBS[name], cluster)
    (launcher,) = values["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    launcher["command"] = [word for words in launcher["command"] for word in words]
    assert manifest == values
    spec = manifest["spec"]
    assert spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"] == JOBS[name].num_ranks


def expanded(word: str, values: Mapping[str, str]) -> str:
    """What Kubernetes makes of a word of a command: $(NAME) is a value, $$ is $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else values.get(m[1], m[0]), word)


@QUICK
@given(arguments=WORDS)
def test_kubernetes_starts_what_it_was_told(arguments: tuple[str, ...]) -> None:
    arguments = (*arguments, "$(PATH)", "$$", "$", "$(NCCL_DEBUG", "\x7f\x85\u2028\ufeff\U0001f600\ud7ff")
    job = replace(TWO_HOSTS, command=("python", *arguments), environment={"NCCL_DEBUG": "".join(arguments)})
    launcher, _ = containers(parsed(job))
    values = {"PATH": "wrong", "NCCL_DEBUG": "wrong"}
    assert tuple(expanded(word, values) for word in launcher["command"][-len(job.command) :]) == job.command
    (value,) = [each["value"] for each in launcher["env"] if each["name"] == "NCCL_DEBUG"]
    assert expanded(value, values) == "".join(arguments)


def test_a_secret_is_in_the_manifest_by_reference() -> None:
    launcher, _ = containers(parsed(replace(TWO_HOSTS, forward=("HF_TOKEN",))))
    (found,) = [each for each in launcher["env"] if each["name"] == "HF_TOKEN"]
    assert found == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "ringtrain", "key": "HF_TOKEN"}}}
    words = launcher["command"]
    assert words[words.index("HF_TOKEN") - 1] == "-x"
    # A name says nothing of a password in an address: what is asked for is by reference, whatever it is called.
    job = replace(TWO_HOSTS, forward=("DATABASE_URL",), environment={"DATABASE_URL": "postgres://me:sesame@db"})
    (text,) = kubernetes.plan(job).files.values()
    assert "DATABASE_URL" in text and "sesame" not in text
