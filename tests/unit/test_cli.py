"""The command `ringtrain`: what it refuses in one line, what it prints, and that it starts at once. Starts no ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import launching
import pytest

import ringtrain as ringtrain_package
from ringtrain import cli
from ringtrain.cluster import host_agent, processes, supervisor
from ringtrain.cluster import launch as launch_module
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.plans import openmpi
from ringtrain.errors import LaunchError
from ringtrain.protocol import as_main
from ringtrain.protocol.reader import Lines

ROOT = Path(__file__).parents[2]
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.8"


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A folder for PATH with an mpirun that says it is Open MPI 4, and notes every other start."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake(folder / "mpirun", OPEN_MPI_4)
    return folder


def fake(program: Path, version: str) -> None:
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo started >>"$0.started"\necho "{version}"\n')
    program.chmod(0o755)


def ringtrain(
    *words: str | Path,
    bin_dir: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line in a process of its own."""
    return subprocess.run(
        [python, "-m", "ringtrain", *map(str, words)],
        env=environment(bin_dir, env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def here(
    *words: str | Path, bin_dir: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a command line in this process: one that prints or refuses, and starts nothing."""
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment(bin_dir, env), clear=True))
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        try:
            code = cli.main([*map(str, words)])
        except SystemExit as ended:  # after the help
            assert not ended.code
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())


def environment(bin_dir: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    own = Path(sys.executable).parent  # on PATH already: else it would come first, before the fakes
    return {"PATH": f"{bin_dir}:/usr/bin:/bin:{own}", "PYTHONPATH": str(ROOT), **(env or {})}


def test_ranks_that_fill_a_host_yield_unless_the_environment_says_otherwise(bin_dir):
    words = ["launch", "-H", "localhost:512", "--dry-run", "--", "true"]
    for env, yields in (({}, True), ({"OMPI_MCA_mpi_yield_when_idle": "0"}, False)):
        assert ("mpi_yield_when_idle 1" in here(*words, bin_dir=bin_dir, env=env).stdout) is yields


REFUSED = {
    "launch --hostfile missing.txt -- true": "missing.txt: cannot be read",  # more in test_hosts.py
    "launch -np 0 -- true": "got -np 0, expected 1 rank or more",
    "launch -H localhost:2 -np 3 -- true": "got -np 3, but 1 host with 2 slots",
    "launch -np two -- true": "invalid int value: 'two'",
    "launch --grace=-- -- true": "argument --grace: expected a value, got '--'",
    "launch -np 1": "got no command to run",
    "launch --hostfile x -H y -- true": "argument -H/--hosts: not allowed with argument --hostfile",
    "launch -H a;id:2 -- true": "got 'a;id', expected a host's name",
    "launch --nonsense -- true": "unrecognized arguments: --nonsense",
    "launch --subnet ten -- true": "got --subnet 'ten'",
    "launch --bind c -- true": "argument --bind: invalid choice: 'c'",
    "launch --bind core -- true": "got --bind core without --threads",
    "launch --elastic --host-discovery it's -- true": "expected a program and its arguments: No closing quotation",
    "launch --start-timeout 0 -- true": "got --start-timeout 0, expected",
    "launch -- no-such-program": "this host has no 'no-such-program' on PATH=",
    "launch python -u -": "got python -u -, which reads its program from standard input",
    "launch fit.py --epochs 3": ": start it by python fit.py",
    "launch --forward NOT_SET -- true": "--forward NOT_SET",
    "launch --launcher sbatch -H a:4 --include a:2-3 -- true": "a: slots that are not its first ones",
    "launch --nproc_per_node=2 true": "--nproc_per_node=2: did you mean -np? (see ringtrain launch",
    "launch --oversubscirbe true": "--oversubscirbe: did you mean --oversubscribe?",
    "launch python -m ringtrain.train --trian.epochs 3": "did you mean --train.epochs?",
    "lauch -np 2 python fit.py": "got lauch, did you mean launch? (see ringtrain --help)",
    "nonsense": "got nonsense, expected one of bench, doctor, hosts,",
    "bench": "the following arguments are required: KIND",
    "hosts --hostfile": "expected one argument",
    "prove python fit.py": "expected a command after --: ringtrain prove ... -- python fit.py",
    "doctor host1 host2": "got host1, expected hosts after -H: ringtrain doctor -H host1,host2",
    "train -np 2 --train.epochs 0": "train.epochs: got 0, expected 1 or more",
    "train --config a.toml -np 2": "got -np after --config, expected options of launch before those of",
    "train --threads 2 --config a.toml": "got --threads without ranks to start: give -np N",
    "train -np 2 fit.sh": "got fit.sh, expected SCRIPT.py or options of the trainer",
}
IN_PROCESSES = ("launch -np 1", "launch -- no-such-program", "launch fit.py --epochs 3")
"""of these: one for all that are refused at once, and those for which the host agent is asked"""


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_line_and_nothing_starts(line: str, bin_dir: Path) -> None:
    ended = (ringtrain if line in IN_PROCESSES else here)(*line.split(), bin_dir=bin_dir)
    assert ended.returncode == 2, ended.stderr
    assert REFUSED[line] in ended.stderr
    assert re.fullmatch("ringtrain: [^\n]+\n", ended.stderr)
    assert ended.stdout == ""
    assert [path.name for path in bin_dir.iterdir()] == ["mpirun"]


def test_a_command_that_would_read_its_program_from_standard_input() -> None:
    reading = ["python -", "python3.12 -u", "python -X dev -W error - 3", "sh -s", "/bin/python -I /proc/self/fd/0"]
    others = ["python -um train", "python train.py -", "python -i -u train.py", "python --version", "bash -ec x", "tee"]
    assert [line for line in (*reading, *others) if as_main.reads_its_program(line.split())] == reading


def test_good_input_starts_mpirun(bin_dir: Path) -> None:
    """The control of the test above; this mpirun starts no ranks, which is found out."""
    ended = ringtrain("launch", "-H", "localhost:2", "--", "true", bin_dir=bin_dir)
    assert ended.returncode == 2
    assert "2 of 2 ranks did not start although mpirun exited with code 0" in ended.stderr
    assert (bin_dir / "mpirun.started").exists()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "no mpirun on PATH"),
        ("Our Own MPI 1.0", "mpirun --version printed 'Our Own MPI 1.0'"),
    ],
)
def test_an_mpirun_that_is_missing_or_unknown(bin_dir: Path, version: str | None, said: str) -> None:
    if version is None:
        (bin_dir / "mpirun").unlink()
    else:
        fake(bin_dir / "mpirun", version)
    ended = ringtrain("launch", "-np", "1", "--", "true", bin_dir=bin_dir, **alone(bin_dir))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"ringtrain: {said}")
    assert len(ended.stderr.splitlines()) == 1


def alone(bin_dir: Path) -> dict[str, Any]:
    """An interpreter with this one's packages and the fake programs beside it alone, and nothing else on PATH."""
    (bin_dir / "python").symlink_to(os.path.realpath(sys.executable))
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    return {"python": bin_dir / "python", "env": {"PATH": "/usr/bin:/bin", "PYTHONPATH": packages}}


def test_an_environment_need_not_be_activated(bin_dir: Path) -> None:
    ended = ringtrain("launch", "-np", "1", "--", "python", "-c", "1", bin_dir=bin_dir, **alone(bin_dir))
    assert (bin_dir / "mpirun.started").exists(), ended.stderr  # the fake starts no ranks
    (bin_dir / "mpirun.started").unlink()
    (bin_dir / "python").unlink()
    activated = alone(bin_dir)
    activated["env"] |= {"VIRTUAL_ENV": "/another", "PATH": f"/another/bin:{activated['env']['PATH']}"}
    ended = ringtrain("launch", "-np", "1", "--", "python", "-c", "1", bin_dir=bin_dir, **activated)
    assert not (bin_dir / "mpirun.started").exists(), "another environment is activated"


def test_hosts_are_printed_as_they_can_be_given(bin_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nhost1 slots=4\nhost2 slots=2\nhost3:1\n")
    ended = ringtrain("hosts", "--hostfile", tmp_path / "hosts", "--exclude", "host3", bin_dir=bin_dir)
    assert (ended.returncode, ended.stdout) == (0, "host1:4\nhost2:2\n")
    again = ringtrain("hosts", "-H", ",".join(ended.stdout.split()), bin_dir=bin_dir)
    assert again.stdout == ended.stdout


def test_without_hosts_the_schedulers_count_then_this_machines(bin_dir: Path) -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}
    assert here("hosts", bin_dir=bin_dir, env=slurm).stdout == "host1:3\nhost2:1\n"
    assert re.fullmatch(r"localhost:\d+\n", here("hosts", bin_dir=bin_dir).stdout)


def test_a_dry_run_prints_a_line_that_can_be_pasted(bin_dir: Path, tmp_path: Path) -> None:
    words = ["python", "-c", "print('a b', \"$HOME\", `ls`)", "*"]
    ended = ringtrain("launch", "-H", "host1:2,host2:2", "--dry-run", "--", *words, bin_dir=bin_dir)
    assert ended.returncode == 0
    assert not (bin_dir / "mpirun.started").exists()
    (line,) = ended.stdout.splitlines()
    (bin_dir / "mpirun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pasted = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert pasted.splitlines()[-4:] == words
    assert "host1:2,host2:2" in pasted.splitlines()


def test_a_dry_run_for_a_scheduler_prints_what_is_submitted(bin_dir: Path) -> None:
    for launcher, first, line in (
        ("sbatch", "#!/usr/bin/env bash\n", "sbatch --export="),
        ("mpijob", 'apiVersion: "kubeflow.org/v2beta1"\n', "kubectl apply -f job.yaml"),
        ("trainjob", 'apiVersion: "trainer.kubeflow.org/v1alpha1"\n', "kubectl apply -f job.yaml"),
    ):
        ended = here("launch", "--launcher", launcher, "-H", "a:2,b:2", "--dry-run", "--", "true", bin_dir=bin_dir)
        assert ended.returncode == 0
        assert ended.stdout.startswith(first)
        assert line in ended.stderr
        assert tempfile.gettempdir() not in ended.stderr.replace(str(launching.ROOT), "")


def test_the_logs_of_an_mpijob_are_in_its_containers(bin_dir: Path) -> None:
    words = ("-H", "a:2,b:2", "--output", "logs", "--dry-run", "--", "true")
    ended = here("launch", "--launcher", "mpijob", *words, bin_dir=bin_dir)
    assert '- "--output-filename"' in ended.stdout and '- "logs"' in ended.stdout
    assert os.getcwd() not in ended.stdout + ended.stderr and "mkdir" not in ended.stderr


def test_it_starts_in_milliseconds_without_the_heavy_libraries(bin_dir: Path) -> None:
    names = "('tensorflow', 'keras', 'horovod', 'numpy', 'rich', 'ringtrain.cluster.supervisor', 'subprocess')"
    script = (
        f"import sys, ringtrain.cli as c; c.parse(['launch', 'true']); print([n for n in {names} if n in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_ringtrain_alone_is_the_help_which_names_every_command(bin_dir: Path) -> None:
    alone = here(bin_dir=bin_dir)
    assert (alone.stdout, alone.stderr) == (here("--help", bin_dir=bin_dir).stdout, "")
    assert all(name in alone.stdout for name in ("train", "launch", "hosts", "doctor"))
    assert here("--version", bin_dir=bin_dir).stdout == f"ringtrain {ringtrain_package.__version__}\n"


@pytest.mark.parametrize("between", [[], ["--"]], ids=["plain", "dashes"])
@pytest.mark.parametrize(
    "program",
    [["python", "fit.py"], ["python", "fit.py", "-np", "7", "--launcher", "none"], ["./fit", "--", "-H", "x", "--"]],
    ids=" ".join,
)
def test_options_after_the_program_are_its_own(program: list[str], between: list[str]) -> None:
    for options in (["-np", "2"], ["--output=logs", "--elastic", "--blacklist-cooldown", "1", "2"], []):
        given = LaunchOptions.of(cli.parse(["launch", *options, *between, *program])[1])
        assert given.command == (*program,)
        assert given.np == (2 if "-np" in options else None)
    given = LaunchOptions.of(cli.parse(["train", "--threads", "2", *between, *program])[1])
    assert (given.command, given.threads) == ((*program,), 2)


def test_an_option_may_be_abbreviated() -> None:
    given = LaunchOptions.of(cli.parse(["launch", "--hostf", "hosts.txt", "--dry", "python", "fit.py"])[1])
    assert (given.hostfile, given.dry_run, given.command) == ("hosts.txt", True, ("python", "fit.py"))


def test_train_starts_ranks_if_it_is_given_a_number_or_hosts(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "slots_here", lambda: 2)  # a machine with one core has one slot
    recipe = ["--config", "configs/digits.toml", "--train.epochs", "3"]
    for words, command in (
        (recipe, f"python -m ringtrain.train {' '.join(recipe)}"),
        (["fit.py", "-np", "7"], "python fit.py -np 7"),
        ([], "python -m ringtrain.train"),
    ):
        assert here("train", "--dry-run", *words, bin_dir=bin_dir).stdout == f"{command}\n"
        for start in (["-np", "2"], ["-H", "localhost:2"], ["--launcher", "mpirun"]):
            ended = here("train", *start, "--dry-run", *words, bin_dir=bin_dir)
            assert ended.stdout.endswith(f" rank {command}\n") and "mpirun" in ended.stdout, ended
            launched = here("launch", *start, "--dry-run", *command.split(), bin_dir=bin_dir)
            assert launched.stdout == ended.stdout


def test_train_without_ranks_runs_the_script_in_this_process(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "fit.py").write_text("import os, sys; print(os.getpid(), sys.argv, __name__); sys.exit(3)")
    program = [sys.executable, "-m", "ringtrain", "train", "fit.py", "--a", "-np", "2"]
    env = {"PATH": str(bin_dir), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        out = process.communicate()[0]
    assert out == f"{process.pid} ['fit.py', '--a', '-np', '2'] __main__\n"
    assert process.returncode == 3


# ---- launch/ ------------------------------------------------------------------------------------------------------


def test_launch_py_needs_no_installation(tmp_path: Path, bin_dir: Path) -> None:
    words = ["-H", "host1:2", "--dry-run", "--", "true"]
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin"}
    argv = [sys.executable, ROOT / "launch" / "launch.py", *words]
    said = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert said.returncode == 0, said.stderr
    expected = here("launch", *words, bin_dir=bin_dir, cwd=tmp_path, env=env)
    assert said.stdout == expected.stdout.replace(" -x PYTHONPATH", "")


def test_help_shows_only_options_that_the_command_uses(bin_dir: Path) -> None:
    for command, used, unused in (
        ("launch", "--dry-run --elastic --master --image --max-restarts -np --hostfile", ""),
        ("hosts", "--hostfile --include", "--ssh-port --subnet -np"),
        ("doctor", "--ssh-port --timeout", "-np --launcher"),
        ("sweep", "--max-restarts --launcher", "--dry-run --elastic --np --bind --oversubscribe --master --image"),
        ("bench train", "-np --oversubscribe --bind", "--dry-run --explain --elastic --image --host-discovery"),
    ):
        text = here(*command.split(), "--help", bin_dir=bin_dir).stdout
        shown = {*re.findall(r"(?:  |, )(--?[a-z-]+)", text)}
        assert {*used.split()} <= shown and not {*unused.split()} & shown, command


def test_an_elastic_job_starts_with_all_slots(bin_dir: Path) -> None:
    words = ["--elastic", "-H", "a:4,b:4", "--min-np", "4"]
    (bin_dir / "horovodrun").symlink_to(bin_dir / "mpirun")
    for more, first in (([], "-np 4"), (["-np", "6"], "-np 6")):
        ended = here("launch", *words, *more, "--dry-run", "--", "true", bin_dir=bin_dir)
        assert ended.returncode == 0, ended.stderr
        assert f" {first} --min-np 4 --max-np 8 " in ended.stdout
        assert "a:4 b:4 >" in ended.stdout, "the file of hosts names both"
    ended = here("launch", "--elastic", "-H", "localhost:4", "--dry-run", "--", "true", bin_dir=bin_dir)
    assert " --network-interfaces lo " in ended.stdout, ended.stderr


def test_without_an_ssh_client_other_hosts_are_refused_in_one_line(bin_dir: Path) -> None:
    (bin_dir / "sh").symlink_to("/bin/sh")
    env = {"PATH": str(bin_dir)}
    ended = ringtrain("launch", "-H", "localhost:1,192.0.2.1:1", "--", "sh", "-c", "true", bin_dir=bin_dir, env=env)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("ringtrain: 192.0.2.1: ssh cannot be started here")
    assert not (bin_dir / "mpirun.started").exists()


def test_output_that_is_cut_off_is_no_error(bin_dir: Path) -> None:
    hosts = ",".join(f"host{number}:4" for number in range(20_000))
    (bin_dir / "hosts").write_text(hosts.replace(",", "\n"))
    script = f"'{sys.executable}' -m ringtrain hosts --hostfile '{bin_dir}/hosts' | head -1"
    ended = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "host0:4\n"
    assert "Traceback" not in ended.stderr


def test_files_of_a_launch_are_this_users_alone_and_go_again(tmp_path: Path) -> None:
    own = tmp_path / "own"
    plan = Plan((), ("true",), files={str(own / "hosts.txt"): "host1\n", str(tmp_path / "kept" / "x"): "y"})
    with processes.written_files(plan, str(own)):
        assert (own / "hosts.txt").read_text() == "host1\n"
        assert own.stat().st_mode & 0o077 == 0
    assert not (own / "hosts.txt").exists() and (tmp_path / "kept" / "x").exists()
    own.chmod(0o777)
    with pytest.raises(LaunchError, match="others may write there"), processes.written_files(plan, str(own)):
        pass


def test_a_progress_bar_is_shown_while_it_is_written_and_never_half_a_report(capfd) -> None:
    job = Job(("true",), 1, (Host("localhost"),), here=frozenset({"localhost"}), id="job")
    watch = supervisor.Supervisor(job, LaunchOptions())
    source, sink = os.pipe()
    watch._selector.register(source, selectors.EVENT_READ, None)
    for step in range(5000):
        os.write(sink, b"\r%d of 5000" % step)
    os.write(sink, b"\n[1,0]<stderr>:last words")
    shown = ""
    while not shown.endswith("last words"):
        watch._poll()
        shown += capfd.readouterr().err
    assert shown.count("of 5000") == 5000
    assert [*watch.output.tails[0]] == ["last words"], "what a bar overwrites is not kept"
    os.write(sink, b"\n[1,1]<stderr>:loading[1,0]<stderr>:ringtrain-report:job:sea")
    before = time.monotonic()
    while time.monotonic() < before + 2 * Lines.WAIT_S:
        watch._poll()
    os.write(sink, b"t:0:1:0:77:host1\n")
    os.close(sink)
    while not watch.reports.ranks:
        watch._poll()
    assert capfd.readouterr().err == "\n[1,1]<stderr>:loading"
    os.close(source)


@pytest.mark.skipif(
    not shutil.which("ssh") and "RINGTRAIN_REQUIRE_LAB" not in os.environ, reason="needs apt-get install openssh-client"
)
@pytest.mark.parametrize("words", [host_agent.ssh(10), ["ssh", *openmpi.SSH_OPTIONS]], ids=["agent", "MPI"])
def test_ssh_takes_a_connection_of_its_own_whatever_its_user_has_configured(words: list[str], tmp_path: Path) -> None:
    """A shared one would not notice that the host is lost."""
    config = tmp_path / "config"
    config.write_text("ControlMaster auto\nControlPath ~/.ssh/%C\nLocalForward 8888 localhost:8888\n")
    asked = subprocess.run([*words, "-F", config, "-G", "host1"], capture_output=True, text=True, check=True)
    said = dict(line.split(maxsplit=1) for line in asked.stdout.splitlines())
    assert said["controlmaster"] == "false" and said["clearallforwardings"] == "yes"
    assert said.get("controlpath", "none") == "none"


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh"])
def test_an_agent_for_another_host_is_one_line_for_its_login_shell(shell: str, tmp_path: Path) -> None:
    """csh takes no line breaks within quotes. Where tcsh is not installed, the line has to have none."""
    *_, line = host_agent.argv("host1", "job", ["sh"], tmp_path, "/usr/bin:/bin", "", timeout_s=10)
    assert "\n" not in line
    if shutil.which(shell):
        ended = subprocess.run([shell, "-c", line], input="end\n", capture_output=True, text=True, check=False)
        assert f"{host_agent.SAYS}ready" in ended.stdout and f"{host_agent.SAYS}swept" in ended.stdout, ended.stderr


def test_a_host_is_here_by_name_or_address_and_no_other_is() -> None:
    names = ["localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()]
    others = ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"]
    assert [name for name in (*names, *others) if host_agent.is_here(name)] == names
