"""`ringtrain launch` on two hosts when something goes wrong: it says what, and leaves nothing behind where it can."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import lab
import launching
import mpis
import pytest

from ringtrain.protocol.env import LEASE

TIMEOUT_S = 300  # far above what anything here takes
LEFT_S = 10  # what the launch promises
LAUNCH = ["python", "-m", "ringtrain", "launch", "-H", "host1:2,host2:2"]
DEAF = ["sh", "-c", "trap '' INT TERM HUP USR1; echo begun; while :; do sleep 600; done"]
RANK_2_LEAVES = ["sh", "-c", '[ "$OMPI_COMM_WORLD_RANK" = 2 ] || exec sleep 600; echo "why it left" >&2; exit 5']


class Started:
    """A launch on host1 whose four ranks have begun."""

    def __init__(self, hosts: lab.Lab, words: list[str], env: Mapping[str, str] | None = None, **streams) -> None:
        self.hosts = hosts
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = hosts.start("host1", words, env=environment(env), **(pipes | streams))
        lab.wait_for(lambda: self.num_ranks() == 4, TIMEOUT_S, "all ranks have begun")

    def num_ranks(self) -> int:
        return sum(
            command.startswith("sleep 600")
            for host in self.hosts.names
            for command in self.hosts.processes(host).values()
        )

    def end(self) -> tuple[int, str]:
        """Waits for its end, and gives its exit code and standard error."""
        try:
            _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        return self.process.returncode, stderr


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    return {"PYTHONPATH": str(launching.ROOT), **(env or {})}


def nothing_is_left(hosts: lab.Lab, *names: str) -> None:
    lab.wait_for(
        lambda: not any(hosts.processes(host) for host in names or hosts.names), LEFT_S, "nothing of the job lives"
    )


def run(hosts: lab.Lab, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Its exit code and standard error, without a warning of Open MPI, whose ssh may be a step ahead of it."""
    ended = hosts.run("host1", words, TIMEOUT_S, env=environment(env))
    beside = r"^\[\S+\] plm:rsh: Warning: setpgid.*\n"
    return ended.returncode, re.sub(beside, "", ended.stderr, flags=re.MULTILINE)


def find(hosts: lab.Lab, host: str, program: str) -> int:
    """A process of a host by its program, as the machine counts."""
    (found,) = [
        process
        for process, command in hosts.processes(host).items()
        if os.path.basename(command.split(" ")[0]) == program
    ]
    return found


# ---- whatever ends a job, nothing is left ---------------------------------------------------------------------------


def crash(started: Started) -> None:
    os.kill(find_rank(started.hosts, "host2"), signal.SIGKILL)


def find_rank(hosts: lab.Lab, host: str) -> int:
    return next(process for process, command in hosts.processes(host).items() if command.startswith("sh -c trap"))


def interrupt_twice(started: Started) -> None:
    started.process.send_signal(signal.SIGINT)
    while "a second one ends them at once" not in (line := started.process.stderr.readline()):
        assert line
    started.process.send_signal(signal.SIGINT)


def terminate(started: Started) -> None:
    started.process.send_signal(signal.SIGTERM)


def kill_launcher(started: Started) -> None:
    started.process.kill()


def kill_mpirun(started: Started) -> None:
    os.kill(find(started.hosts, "host1", "mpirun"), signal.SIGKILL)


def kill_daemon(started: Started) -> None:
    os.kill(find(started.hosts, "host2", "orted"), signal.SIGKILL)


def crash_launching_host(started: Started) -> None:
    started.hosts.kill_processes("host1")


CAUSES = {
    crash: (137, r"ringtrain: rank [23] on host2 was killed by SIGKILL \(signal 9\)"),
    interrupt_twice: (130, "ringtrain: stopped by SIGINT"),
    terminate: (143, "ringtrain: stopped by SIGTERM"),
    kill_mpirun: (137, r"ringtrain: mpirun was killed by SIGKILL \(signal 9\)"),
    kill_daemon: (205, "ringtrain: mpirun lost its daemon on host2: .*"),
    kill_launcher: (-9, None),
    crash_launching_host: (-9, None),
}


@pytest.mark.parametrize(
    "cause",
    [pytest.param(cause, marks=[pytest.mark.quick] if cause is kill_launcher else []) for cause in CAUSES],
    ids=lambda cause: cause.__name__,
)
def test_nothing_is_left(two_hosts: lab.Lab, cause: Callable[[Started], None]) -> None:
    started = Started(two_hosts, [*LAUNCH, "--grace", "2", "--", *DEAF])
    cause(started)
    code, stderr = started.end()
    nothing_is_left(two_hosts)
    expected_code, last = CAUSES[cause]
    assert code == expected_code, stderr
    assert last is None or re.fullmatch(last, stderr.splitlines()[-1]), stderr


def test_a_closed_terminal_leaves_nothing(two_hosts: lab.Lab) -> None:
    terminal, inside = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
    started = Started(two_hosts, [*LAUNCH, "--grace", "2", "--", *DEAF], **streams)
    os.close(inside)
    os.close(terminal)
    started.process.wait(TIMEOUT_S)
    nothing_is_left(two_hosts)


def test_a_bare_mpirun_leaves_ranks_when_it_is_killed(two_hosts: lab.Lab) -> None:
    """The negative control: what is looked for would be found."""
    bare = ["mpirun", "--allow-run-as-root", "-np", "4", "-H", "host1:2,host2:2", "-bind-to", "none", *DEAF]
    started = Started(two_hosts, bare)
    kill_launcher(started)
    started.end()
    with pytest.raises(TimeoutError):
        nothing_is_left(two_hosts)


@pytest.mark.parametrize("launcher", ["horovodrun", "horovodrun-gloo"])
def test_a_killed_launch_by_horovodrun_leaves_nothing(two_hosts: lab.Lab, launcher: str) -> None:
    started = Started(two_hosts, [*LAUNCH, "--launcher", launcher, "--", *DEAF])
    kill_launcher(started)
    started.end()
    nothing_is_left(two_hosts)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
def test_ranks_of_both_hosts_may_save(two_hosts: lab.Lab, tmp_path: Path, launcher: str) -> None:
    rank = "${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}"
    script = f"trap 'touch {tmp_path}/{rank}; exit 143' TERM; sleep 600 & wait"
    started = Started(two_hosts, [*LAUNCH, "--launcher", launcher, "--", "sh", "-c", script])
    started.process.send_signal(signal.SIGTERM)
    code, stderr = started.end()
    assert code == 143
    assert stderr.splitlines()[-1] == "ringtrain: stopped by SIGTERM"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"}
    nothing_is_left(two_hosts)


def test_a_cut_link_ends_the_job_and_names_the_host(two_hosts: lab.Lab) -> None:
    started = Started(two_hosts, [*LAUNCH, "--", *DEAF])
    two_hosts.cut("host2")
    code, stderr = started.end()
    assert code != 0
    assert re.match(r"ringtrain: .*\bhost2\b", stderr.splitlines()[-1]), stderr
    nothing_is_left(two_hosts, "host1")
    # The host that nobody reaches ends its part by itself, a little later.
    lab.wait_for(lambda: started.num_ranks() == 0, TIMEOUT_S, "no rank lives on the host that was cut off")


def test_a_link_cut_in_the_middle_of_training_ends_the_job_names_the_host_and_keeps_what_was_saved(
    three_hosts: lab.Lab, tmp_path: Path
) -> None:
    python = three_hosts.warm_python()
    train = [*python, "-m", "ringtrain.train", "--config", "configs/digits.toml", "--train.epochs", "5000"]
    options = ["--run.directory", str(tmp_path), "--run.name", "run"]
    launch = ["python", "-m", "ringtrain", "launch", "-H", "host1:1,host2:1", "--", *train, *options]
    env = environment({LEASE: "10"})
    process = three_hosts.start("host1", launch, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with process:
        lab.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, TIMEOUT_S, "two epochs")
        three_hosts.cut("host2")
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2, stderr
    assert stderr.splitlines()[-1].startswith("ringtrain: lost host2 while the job ran"), stderr
    nothing_is_left(three_hosts, "host1")
    three_hosts.restore("host2")
    lab.wait_for(lambda: not three_hosts.processes("host2"), TIMEOUT_S, "the part that was cut off has ended by itself")
    again = three_hosts.run("host1", [*launch, "--train.max-time-s", "0.001"], TIMEOUT_S, env=environment())
    assert again.returncode == 0, again.stderr
    assert "resumes" in again.stdout and "2 ranks in step" in again.stdout


def test_a_rank_of_another_host_is_named_with_its_last_words(two_hosts: lab.Lab) -> None:
    code, stderr = run(two_hosts, *LAUNCH, "--", *RANK_2_LEAVES)
    assert code == 5
    *_, before, last = stderr.splitlines()
    # Open MPI 4 says who was first in nine of ten cases.
    assert (before, last) in (
        ("ringtrain: rank 2 on host2 exited first, with exit code 5; its last lines:", "  why it left"),
        (
            "ringtrain: a rank exited with code 5, mpirun does not name it; last errors:",
            "  rank 2 on host2: why it left",
        ),
    )
    nothing_is_left(two_hosts)


# ---- hosts that a job cannot start on -------------------------------------------------------------------------------


def stop_sshd(hosts: lab.Lab, folder: Path) -> None:
    hosts.stop_sshd("host2")


def other_key(hosts: lab.Lab, folder: Path) -> None:
    hosts.change_host_key("host2")


def no_network(hosts: lab.Lab, folder: Path) -> None:
    hosts.cut("host2")


def no_ringtrain(hosts: lab.Lab, folder: Path) -> None:
    hosts.bind("host2", empty(folder), launching.ROOT / "ringtrain")


def other_version(hosts: lab.Lab, folder: Path) -> None:
    hosts.bind("host2", changed_copy(folder), launching.ROOT / "ringtrain")


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def changed_copy(folder: Path) -> Path:
    """The package with another version."""
    copy = shutil.copytree(launching.ROOT / "ringtrain", folder / "copy")
    init = copy / "__init__.py"
    init.write_text(re.sub('__version__ = ".*"', '__version__ = "9.9.9"', init.read_text()))
    return copy


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (stop_sshd, "host2 does not answer: .*Connection refused"),
        (other_key, "host2 does not answer: Host key verification failed."),
        (no_network, "host2 does not answer: (.*timed out.*|.*No route to host|no answer in 3 s)"),
        (no_ringtrain, "host2: its python has no ringtrain: .*"),
        (other_version, r"host2 has ringtrain 9\.9\.9, this host has .*: install the same everywhere"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_line_and_nothing_started(
    two_hosts: lab.Lab, tmp_path: Path, fault: Callable[[lab.Lab, Path], None], said: str
) -> None:
    fault(two_hosts, tmp_path)
    trace = tmp_path / "started"
    program = f"open({str(trace)!r}, 'w')"
    words = [*LAUNCH, "--start-timeout", "3", "--", "python", "-m", "ringtrain.protocol.placement", program]
    code, stderr = run(two_hosts, *words)
    assert code == 2, stderr
    assert re.fullmatch(f"ringtrain: {said}\n", stderr)
    assert not trace.exists()
    nothing_is_left(two_hosts)


@pytest.mark.quick
def test_hosts_without_a_fault_start_it(two_hosts: lab.Lab) -> None:
    """The control of the tests above."""
    assert run(two_hosts, *LAUNCH, "--", "python", "-m", "ringtrain.protocol.placement") == (0, "")
    nothing_is_left(two_hosts)


def test_a_program_that_one_host_lacks(two_hosts: lab.Lab, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    assert run(two_hosts, *LAUNCH, "--", str(program)) == (0, "")
    two_hosts.bind("host2", empty(tmp_path), program.parent)
    code, stderr = run(two_hosts, *LAUNCH, "--", str(program))
    assert code == 2
    assert re.fullmatch(f"ringtrain: host2 has no '{program}' .*\n", stderr)


# ---- a launcher that starts ranks elsewhere -------------------------------------------------------------------------


def misled(folder: Path, dialect: str, dropped: str) -> dict[str, str]:
    """A PATH on which mpirun is that MPI's own, but never hears an option with a value."""
    folder.mkdir()
    script = folder / "mpirun"
    real = mpis.bin_folder(dialect) / "mpirun"
    script.write_text(
        "#!/bin/bash\nwords=()\nwhile (($#)); do\n"
        f'    if [[ $1 == {dropped} ]]; then shift 2; else words+=("$1"); shift; fi\n'
        f'done\nexec {real} "${{words[@]}}"\n'
    )
    script.chmod(0o755)
    path = [folder, mpis.bin_folder(dialect), launching.BIN, lab.SYSTEM_PATH]
    return {"PATH": os.pathsep.join(map(str, path)), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def test_open_mpi_5_that_did_not_get_its_hosts_is_found_out(two_hosts: lab.Lab, tmp_path: Path) -> None:
    sleep = ["sleep", "600"]
    code, stderr = run(
        two_hosts, *LAUNCH, "--oversubscribe", "--", *sleep, env=misled(tmp_path / "lie", "openmpi5", "-H")
    )
    assert code == 2, stderr
    table = stderr.partition("ringtrain: ")[2].splitlines()
    assert table[0] == "ranks are not where ringtrain launch has them"
    assert [line.split() for line in table[2:4]] == [
        ["2", "host2,", "local", "rank", "0", "host1,", "local", "rank", "2"],
        ["3", "host2,", "local", "rank", "1", "host1,", "local", "rank", "3"],
    ]
    assert table[4].startswith("all run on host1: the launcher did not get the hosts")
    nothing_is_left(two_hosts)


def test_open_mpi_5_that_got_its_hosts_passes(two_hosts: lab.Lab, tmp_path: Path) -> None:
    """The control of the test above."""
    env = misled(tmp_path / "honest", "openmpi5", "--nothing")
    code, stderr = run(two_hosts, *LAUNCH, "--oversubscribe", "--", "true", env=env)
    assert code == 0, stderr
    nothing_is_left(two_hosts)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun-gloo"])
def test_hosts_may_be_named_in_any_order(two_hosts: lab.Lab, launcher: str) -> None:
    """Open MPI 4 begins with the launching host, wherever it is named; that is no wrong place."""
    words = ["python", "-m", "ringtrain", "launch", "--launcher", launcher, "-H", "host2:2,host1:1", "--", "true"]
    ended = two_hosts.run("host1", words, TIMEOUT_S, env=environment())
    assert ended.returncode == 0, ended.stderr


def test_the_launching_host_may_be_none_of_the_jobs(make_lab: Callable[[int], lab.Lab]) -> None:
    hosts = make_lab(3)
    ended = hosts.run("host3", [*LAUNCH, "--", "hostname"], TIMEOUT_S, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"host\d$", ended.stdout, re.MULTILINE)) == ["host1", "host1", "host2", "host2"]


def test_a_bare_horovodrun_may_name_hosts_in_any_order(two_hosts: lab.Lab) -> None:
    program = ["python", "-c", "import ringtrain.hvd as hvd; hvd.init(); hvd.check_placement(); print('placed')"]
    words = ["horovodrun", "-np", "2", "-H", "host2:1,host1:1", *program]
    ended = two_hosts.run("host1", words, TIMEOUT_S, env=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("placed") == 2
