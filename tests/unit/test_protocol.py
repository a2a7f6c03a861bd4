"""What ranks and launcher tell each other: places that differ from the plan, and failures, also in torn lines."""

from __future__ import annotations

import os
import random
import resource
import subprocess

import pytest

from ringtrain.protocol import failures, status
from ringtrain.protocol.env import JOB, PLAN, STARTER
from ringtrain.protocol.failures import Failure, report
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement, difference, expectation
from ringtrain.protocol.reader import Reader

TWO_HOSTS = PlannedPlacement(8, (("host1", 4), ("host2", 4)))


def seats(*hosts: str, size: int = 0, devices: bool = False) -> list[RankPlacement]:
    """Ranks on hosts, in order, with the local ranks that follow."""
    return [
        RankPlacement(
            rank, size or len(hosts), host, hosts[:rank].count(host), f"GPU-{hosts[:rank].count(host)}" * devices
        )
        for rank, host in enumerate(hosts)
    ]


# ---- where ranks are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("host1", "host2"),
        ("host1.cluster", "HOST2"),  # with a domain
        ("ip-10-0-0-1", "ip-10-0-0-2"),  # hosts that call themselves otherwise
    ],
)
def test_ranks_in_their_places_differ_in_nothing(names: tuple[str, str]) -> None:
    assert difference(TWO_HOSTS, seats(*[names[0]] * 4, *[names[1]] * 4, devices=True)) == ""


@pytest.mark.parametrize(
    ("found", "row", "advice"),
    [
        (seats(*["host1"] * 8), "4  host2, local rank 0  host1, local rank 4", "the launcher did not get the hosts"),
        (seats(*["host2"] * 4, *["host1"] * 4), "0  host1, local rank 0  host2, local rank 0", "win over the plan"),
        (seats(*["x"] * 3, *["y"] * 5), "3  host1, local rank 3  y, local rank 0", "win over the plan"),
        ([RankPlacement(0, 1, "host1", 0)] * 8, "0  one of 8  alone in its world, on host1", "each process is alone"),
        (seats(*["host1"] * 4, *["host2"] * 4, size=9), "0  one of 8  one of 9, on host1", "win over the plan"),
        ([RankPlacement(3, 8, "host1"), RankPlacement(3, 8, "host1")], "3  one of 8  one of 8, on host1", ""),
    ],
)
def test_each_wrong_place_is_a_row(found: list[RankPlacement], row: str, advice: str) -> None:
    said = difference(TWO_HOSTS, found)
    assert said.startswith("ranks are not where ringtrain launch has them\n  rank  planned")
    assert row.split() in [line.split() for line in said.splitlines()]
    assert advice in said.splitlines()[-1]


def test_a_plan_without_hosts_has_a_number_of_ranks_and_a_long_table_is_cut() -> None:
    assert difference(PlannedPlacement(4), seats("x", "x", "y", "z")) == ""
    said = difference(PlannedPlacement(1000), seats(*["x"] * 999))
    assert "... and 983 more" in said and len(said.splitlines()) < 25


def test_two_ranks_on_one_gpu_of_one_host() -> None:
    expected = PlannedPlacement(2, (("host1", 2),))
    apart = [RankPlacement(0, 2, "host1", 0, "GPU-a"), RankPlacement(1, 2, "host1", 1, "GPU-b")]
    together = [apart[0], RankPlacement(1, 2, "host1", 1, "GPU-a")]
    assert difference(expected, apart) == ""
    assert "GPU-a, which rank 0 has" in difference(expected, together)
    assert "--device.share-gpus" in difference(expected, together)
    other_host = [RankPlacement(0, 2, "host1", 0, "GPU-0"), RankPlacement(1, 2, "host2", 0, "GPU-0")]
    assert difference(PlannedPlacement(2, (("host1", 1), ("host2", 1))), other_host) == ""


def test_the_plan_survives_the_environment_and_large_ones_lose_their_hosts() -> None:
    assert PlannedPlacement.from_json(TWO_HOSTS.to_json()) == TWO_HOSTS
    large = PlannedPlacement(80_000, tuple((f"host{number}.cluster.local", 8) for number in range(10_000)))
    assert len(large.to_json()) < 131_072
    assert PlannedPlacement.from_json(large.to_json()) == PlannedPlacement(80_000)


@pytest.mark.parametrize("text", ["", "null", '{"size": 2, "hosts": 3}'])
def test_a_plan_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RINGTRAIN_PLAN="):
        PlannedPlacement.from_json(text)


# ---- a rank's first line ------------------------------------------------------------------------------------------


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA, HOROVOD, SLURM], ids=lambda names: names[0])
def test_a_rank_says_where_it_is_and_becomes_its_command(names: tuple[str, str, str]) -> None:
    environ = {"SLURM_PROCID": "0"} | dict(zip(names, "381", strict=True))
    command = ["sh", "-c", 'echo $$ "$1"; exit 7', "x", "a $(touch b) 'c'"]
    ended = subprocess.run(
        ["sh", "-c", STARTER, "rank", *command],
        env={"PATH": "/usr/bin:/bin", JOB: "j1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    reader = Reader("j1")
    assert [reader.take(line) for line in ended.stderr.splitlines()] == [True]
    (seat,) = reader.ranks
    assert (seat.rank, seat.size, seat.local_rank) == (3, 8, 1)
    assert ended.stdout == f"{seat.process} a $(touch b) 'c'\n"  # the same process, the same words
    assert ended.returncode == 7


# ---- failures -----------------------------------------------------------------------------------------------------

LONG = "".join(random.Random(0).choices("abcdefgh \n", k=15_000))


def failure(rank: int, time_s: float, text: str = "ValueError: no") -> Failure:
    return Failure(rank, "host1", time_s, text.partition(":")[0], text)


@pytest.mark.parametrize(
    "tag", ["", "[1,3]<stderr>:", "[prterun-host1-99@1,3]<stderr>: ", "[3] ", "3: ", "[3]<stderr>:"]
)
def test_a_failure_comes_through_every_launchers_tags(tag: str) -> None:
    reader, sent = Reader("j"), failure(3, 1.0, LONG)
    lines = sent.lines("j")
    assert len(lines) > 3
    assert max(map(len, lines)) < 1000
    assert all(reader.take(tag + line) for line in lines)
    assert reader.first_failure() == sent


def test_what_a_launcher_tore_comes_through_the_second_time() -> None:
    reader, sent = Reader("j"), failure(0, 1.0, LONG)
    first, second = sent.lines("j"), sent.lines("j")
    first[1] = first[1][:300]
    second[2] = second[2][:200] + "[1,0]<stderr>:" + second[2][200:]  # cut in two, the tag between
    for line in first:
        reader.take(line)
    assert reader.first_failure() is None
    for line in second:
        reader.take(line)
    assert reader.first_failure() == sent


@pytest.mark.parametrize("line", ["[1,0]<stderr>:hello", "ringtrain-report:other:seat:0:1:0:1:x"])
def test_other_lines_are_not_taken(line: str) -> None:
    assert Reader("j").take(line) is False


def test_what_ranks_have_recovered_from_is_no_cause_any_more(capfd: pytest.CaptureFixture) -> None:
    reader = Reader("j")
    for line in failure(1, 1.0).lines("j"):
        reader.take(line)
    report("recovery", "", environ={"RINGTRAIN_JOB": "j"})
    assert reader.take(capfd.readouterr().err)
    assert reader.first_failure() is None
    for line in failure(1, 2.0, "OSError: gone").lines("j"):
        reader.take(line)
    assert reader.first_failure() == failure(1, 2.0, "OSError: gone")


def test_nothing_is_said_without_a_launcher_that_listens(capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.delenv(JOB, raising=False)
    failures.report_failure(ValueError("x"), 0, 1, with_traceback=True)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(JOB, "j")
    monkeypatch.setattr(failures, "THREADS_S", 1e6)  # this process goes on
    failures.report_failure(ValueError("x"), 0, 1, with_traceback=True)
    assert capfd.readouterr().err.startswith("ringtrain-report:j:failure:0:1/1:")


def test_hosts_of_one_short_name_in_two_domains_are_two_hosts() -> None:
    expected = PlannedPlacement(2, (("node1.rack1", 1), ("node1.rack2", 1)))
    seats = [RankPlacement(0, 2, "node1.rack1", 0), RankPlacement(1, 2, "node1.rack2", 0)]
    assert difference(expected, seats) == ""
    assert difference(expected, [seats[0], RankPlacement(1, 2, "node1.rack1", 1)]) != ""


# ---- where a rank stands ------------------------------------------------------------------------------------------


def test_a_ranks_line_is_written_and_no_disk_and_no_foreign_file_ends_training(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "STATUS_FILES", str(tmp_path / "box"))
    own = tmp_path / "box-job-0"
    box = status.StatusLine(0, {JOB: "job"})
    box.put(7, "reduce")
    assert own.read_text().split() == ["7", "reduce"] and own.stat().st_mode & 0o777 == 0o600
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow, as on a full disk
    try:
        own.write_text("")
        box.put(8, "reduce")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert own.read_text() == ""

    kept = tmp_path / "kept"
    kept.write_text("kept")
    os.mkfifo(tmp_path / "box-job-1")
    os.symlink(kept, tmp_path / "box-job-2")
    os.link(kept, tmp_path / "box-job-3")
    (tmp_path / "box-job-4").mkdir()
    for rank in range(1, 5):
        line = status.StatusLine(rank, {JOB: "job"})
        line.put(9, "reduce")
        assert status.look_at(os.getpid(), line.descriptor)["step"] == 9
    assert kept.read_text() == "kept"
    assert len([*tmp_path.iterdir()]) == 6


def test_the_plan_wins_over_the_launchers_own_number_of_ranks() -> None:
    plan = PlannedPlacement(2, (("a", 2),))
    environ = {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "4"}
    assert expectation({**environ, PLAN: plan.to_json()}) == plan
    assert expectation(environ) == PlannedPlacement(8, source="the launcher")
    assert expectation({"SLURM_STEP_NUM_TASKS": "4"}) == PlannedPlacement(4, source="the launcher")
    assert expectation({}) is None
