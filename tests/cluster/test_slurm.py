"""Jobs on a real Slurm: submitted, started by srun, told to save, brought back, cancelled; and what does not work."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import lab
import launching
import pytest
from slurm_lab import Slurm

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job
from ringtrain.cluster.plans import slurm as planner

TIMEOUT_S = 900  # far above what anything here takes: many TensorFlows on few cores
RINGTRAIN = ["python", "-m", "ringtrain"]
ONE_EACH = ["-H", "host1:1,host2:1"]

# Stands for training where only Slurm is looked at: begins, saves when it is told to, and has nothing left to do when
# it begins again. The first rank saves quickly, the other slowly.
PRETEND = """
state=$0/state.$SLURM_PROCID
[[ -e $state ]] && { echo "rank $SLURM_PROCID goes on"; exit 0; }
save() { sleep "$SLURM_PROCID"; touch "$state"; echo "rank $SLURM_PROCID saved"; exit "$1"; }
trap 'save 138' USR1
trap 'save 143' TERM
echo "rank $SLURM_PROCID begins"
while :; do sleep 0.1; done
"""
PLACES = """
import os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
places = world.gather((socket.gethostname(), world.rank, local.rank, world.allreduce(world.rank)))
if world.rank == 0:
    print("places", *places)
"""
FIND = "import os; from ringtrain.cluster import schedulers; print(*schedulers.find(os.environ)[0])"


def pretended(folder: Path) -> list[str]:
    return ["bash", "-c", PRETEND, str(folder)]


def submitted(slurm: Slurm, folder: Path, options: list[str], command: list[str], **env: str) -> str:
    """Submits a job by ringtrain launch; its id."""
    argv = [*RINGTRAIN, "launch", "--launcher", "sbatch", *options, "--output", folder / "out", "--", *command]
    ended = slurm.run(argv, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Submitted batch job "), ended.stdout
    return ended.stdout.split()[-1]


def said(folder: Path) -> str:
    """What all ranks of the jobs of a folder have written so far."""
    return "".join(log.read_text(errors="replace") for log in folder.glob("out/slurm-*.log"))


def wait_for_words(folder: Path, *words: str) -> None:
    lab.wait_for(lambda: all(word in said(folder) for word in words), TIMEOUT_S, f"{words} in {folder}")


def began(folder: Path) -> None:
    wait_for_words(folder, "0: rank 0 begins", "1: rank 1 begins")


def finished(slurm: Slurm, job: str, state: str) -> dict[str, str]:
    """Waits for a job's end, and that Slurm has cleaned up after it, or has put it into the queue again."""
    shown = slurm.wait(job, [state], TIMEOUT_S)
    lab.wait_for(lambda: not slurm.run(["squeue", "--noheader"]).stdout, TIMEOUT_S, "nothing is queued")
    return slurm.wait(job, [state], 0) if shown else {}


def test_a_job_trains_saves_when_it_is_told_to_comes_back_and_finishes(slurm, tmp_path):
    train = [*slurm.hosts.warm_python(), "-m", "ringtrain.train", "--config", "configs/digits.toml"]
    train += ["--train.epochs", "40"]
    run = ["--run.directory", str(tmp_path), "--run.name", "main", "--health.agree-every-steps", "1"]
    job = submitted(slurm, tmp_path, ["-H", "host1:2,host2:2"], [*train, *run])
    wait_for_words(tmp_path, "epoch  2/40  loss")
    assert slurm.run(["scancel", "--batch", "--signal=USR1", job]).returncode == 0
    slurm.wait(job, ["PENDING"], TIMEOUT_S)
    first = json.loads((tmp_path / "main" / "summary.json").read_text())
    assert first["stopped_by"] == "SIGUSR1"
    assert 2 * 12 <= first["global_step"] < 40 * 12
    try:
        shown = finished(slurm, job, "COMPLETED")
    except TimeoutError as error:
        raise AssertionError(said(tmp_path)) from error
    assert shown["Restarts"] == "1"
    summary = json.loads((tmp_path / "main" / "summary.json").read_text())
    assert summary["num_ranks"] == 4
    assert summary["hosts"] == ["host1"] * 2 + ["host2"] * 2
    assert summary["in_sync"] is True
    assert summary["resumed_from"].endswith(f"step-{first['global_step']:08d}")
    assert (summary["global_step"], summary["stopped_by"]) == (40 * 12, "")
    assert summary["test_accuracy"] > 0.96
    assert "psec" not in said(tmp_path) and "help file" not in said(tmp_path)


def test_slurm_gives_notice_before_the_time_limit_and_the_job_comes_back(slurm, tmp_path):
    limits = {"SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "B:USR1@50"}
    job = submitted(slurm, tmp_path, ONE_EACH, pretended(tmp_path), **limits)
    shown = finished(slurm, job, "COMPLETED")
    assert (shown["TimeLimit"], shown["Restarts"]) == ("00:01:00", "1")
    for rank in (0, 1):
        assert f"{rank}: rank {rank} saved\n" in said(tmp_path)
        log = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert log == f"rank {rank} begins\nrank {rank} saved\nrank {rank} goes on\n"


@pytest.mark.parametrize("left_out", ["trap pass_on USR1 TERM\n", '    scontrol requeue "$SLURM_JOB_ID"\n'])
def test_without_these_lines_a_job_does_not_come_back(slurm, tmp_path, left_out):
    wanted = Job(tuple(pretended(tmp_path)), 2, (Host("host1", 1), Host("host2", 1)))
    (script,) = planner.sbatch(wanted).files.values()
    assert left_out in script
    edited = tmp_path / "edited.sbatch"
    edited.write_text(script.replace(left_out, "    :\n"))
    (tmp_path / "out").mkdir()
    started = slurm.run(["sbatch", "--parsable", "--output", tmp_path / "out" / "slurm-%j.log", edited])
    job = started.stdout.strip()
    began(tmp_path)
    assert slurm.run(["scancel", "--batch", "--signal=USR1", job]).returncode == 0
    assert finished(slurm, job, "FAILED")["Restarts"] == "0"


def test_a_cancelled_job_saves_and_does_not_come_back(slurm, tmp_path):
    job = submitted(slurm, tmp_path, ONE_EACH, pretended(tmp_path))
    began(tmp_path)
    assert slurm.run(["scancel", job]).returncode == 0
    assert finished(slurm, job, "CANCELLED")["Restarts"] == "0"
    assert "rank 0 saved" in said(tmp_path) and "rank 1 saved" in said(tmp_path)


def test_a_job_whose_rank_fails_ends_on_all_hosts_and_does_not_come_back(slurm, tmp_path):
    fail = "((SLURM_PROCID == 1)) && exit 3; exec sleep 1008"
    job = submitted(slurm, tmp_path, ONE_EACH, ["bash", "-c", fail])
    assert finished(slurm, job, "FAILED")["Restarts"] == "0"
    assert "task 1: Exited with exit code 3" in said(tmp_path)
    left = [line for host in slurm.hosts.names for line in slurm.hosts.processes(host).values()]
    assert "sleep 1008" not in left


def test_ranks_have_what_the_script_sets_and_no_secret(slurm, tmp_path):
    own = {"NCCL_DEBUG": "INFO", "MY_API_TOKEN": "sesame-open", "EDITOR": "sesame-open"}
    job = submitted(slurm, tmp_path, ONE_EACH, ["env"], **own)
    finished(slurm, job, "COMPLETED")
    for rank in (0, 1):
        given = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert {"OMPI_MCA_pml=ob1", "PMIX_MCA_psec=^munge", "NCCL_DEBUG=INFO"} <= set(given.splitlines())
        assert "sesame" not in given
    assert slurm.run(["scontrol", "write", "batch_script", job, "-"]).stdout.startswith("#!/usr/bin/env bash\n#SBATCH")


def in_allocation(slurm: Slurm, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command as a person does who has typed salloc."""
    return slurm.run(["salloc", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *command], TIMEOUT_S)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_inside_an_allocation_ranks_are_where_slurm_wants_them(slurm, launcher):
    ended = in_allocation(slurm, [*RINGTRAIN, "launch", "--launcher", launcher, "--", "python", "-c", PLACES])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    places = [("host1", 0, 0, 6), ("host1", 1, 1, 6), ("host2", 2, 0, 6), ("host2", 3, 1, 6)]
    assert f"places {' '.join(map(str, places))}" in ended.stdout.replace("[1,0]<stdout>:", "")


def test_hosts_may_take_different_numbers_of_ranks(slurm):
    launch = [*RINGTRAIN, "launch", "--launcher", "srun", "-H", "host1:1,host2:2", "--", "python", "-c", PLACES]
    ended = slurm.run(["salloc", "--nodes=2", "--ntasks-per-node=2", *launch], TIMEOUT_S)
    assert "places ('host1', 0, 0, 3) ('host2', 1, 0, 3) ('host2', 2, 1, 3)" in ended.stdout, ended.stderr


def test_a_ranks_exit_code_comes_back_through_srun(slurm):
    ended = in_allocation(slurm, [*RINGTRAIN, "launch", "--launcher", "srun", "--", "sh", "-c", "exit 5"])
    assert ended.returncode == 5, ended.stderr


def test_training_under_srun_goes_on_as_if_nothing_had_happened(slurm, tmp_path):
    """After SIGTERM to a rank, by the same command again; after SIGKILL, by itself. Two ranks: any sum is the same."""

    def train(name: str, chaos: str, *options: str) -> subprocess.CompletedProcess[str]:
        job = ["--data.name", "digits", "--train.epochs", "2", "--checkpoint.every-steps", "6", "--run.name", name]
        python = slurm.hosts.warm_python()
        words = [*python, "-m", "ringtrain.train", *job, "--run.directory", str(tmp_path), "--chaos", chaos]
        launch = [*RINGTRAIN, "launch", "--launcher", "srun", *options, "--", *words]
        return slurm.run(["salloc", "--nodes=2", "--ntasks-per-node=1", *launch], TIMEOUT_S)

    def checksum(name: str) -> str:
        return json.loads((tmp_path / name / "summary.json").read_text())["checksum"]

    assert train("whole", "").returncode == 0
    stopped = train("stopped", "rank=1 step=9 mode=sigterm")
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    assert "stopped        after step 10, by SIGTERM" in stopped.stdout
    assert train("stopped", "rank=1 step=9 mode=sigterm").returncode == 0
    killed = train("killed", "rank=1 step=21 mode=sigkill", "--max-restarts", "1")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "restart 1 of 1, after: " in killed.stderr and "(step 21" in killed.stderr
    assert checksum("stopped") == checksum("killed") == checksum("whole")


def test_open_mpi_from_pypi_finds_its_ranks_by_pmix_alone(slurm):
    assert {"pmix", "pmi2"} <= set(slurm.run(["srun", "--mpi=list"]).stdout.split())
    wanted = Job(("python", "-c", PLACES), 2, (Host("host1", 1), Host("host2", 1)))
    for mpi, starts in {"pmix": True, "pmi2": False}.items():
        plan = planner.srun(wanted)
        ended = slurm.run([word.replace("--mpi=pmix", f"--mpi={mpi}") for word in plan.argv], env=plan.env)
        assert (ended.returncode == 0) is starts, ended.stdout + ended.stderr
        # What Open MPI says of pmi2 may be cut off: srun ends the other rank, and with it what it was about to write.
        assert ("places ('host1', 0, 0, 1) ('host2', 1, 0, 1)" in ended.stdout) is starts


def test_the_hosts_of_an_allocation_are_found(slurm):
    allocation = ["salloc", "--nodes=2", "--ntasks=3", "--nodelist=host1,host2", "--distribution=block"]
    assert slurm.run([*allocation, "python", "-c", FIND]).stdout == "host1:2 host2:1\n"
    in_step = ["srun", "--nodes=2", "--ntasks=3", "python", "-c", FIND]
    assert slurm.run([*allocation, *in_step]).stdout == "host1:2 host2:1\n" * 3
    alone = slurm.run(["srun", "--nodes=1", "--ntasks=1", "python", "-c", FIND]).stdout
    assert alone in ("host1:1\n", "host2:1\n")
    # A step on a part of the allocation is told of itself only.
    partial = slurm.run([*allocation, "srun", "--nodes=1", "--ntasks=1", "python", "-c", FIND])
    assert partial.returncode != 0
    assert "this is a step of srun on 1 of them: start it outside of srun" in partial.stderr


def test_the_script_in_the_repository_is_accepted(slurm, tmp_path):
    script = launching.ROOT / "launch" / "slurm.sbatch"
    accepted = slurm.run(["sbatch", "--test-only", script])
    assert accepted.returncode == 0, accepted.stderr
    assert "using 8 processors on nodes host[1-2]" in accepted.stderr
    # It would not be if it asked for what there is not.
    other = tmp_path / "other.sbatch"
    other.write_text(script.read_text().replace("--ntasks-per-node=4", "--ntasks-per-node=9").replace("=8", "=18"))
    assert slurm.run(["sbatch", "--test-only", other]).returncode != 0


def test_the_script_that_is_shown_can_be_submitted(slurm, tmp_path):
    launch = [*RINGTRAIN, "launch", "--launcher", "sbatch", *ONE_EACH, "--output", tmp_path / "out", "--dry-run"]
    shown = slurm.run([*launch, "--", "hostname"])
    (tmp_path / "job.sbatch").write_text(shown.stdout)
    line = shown.stderr.partition("submit it by: ")[2]
    job = slurm.run(["bash", "-c", f"cd {tmp_path} && {line}"]).stdout.split()[-1]
    finished(slurm, job, "COMPLETED")
    assert {"0: host1", "1: host2"} <= set(said(tmp_path).splitlines()), shlex.quote(line)
