"""The last word of a job: the first cause, and the exit code of the rank that had it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from ringtrain.cluster.exit_cause import JobResult, decide, rank_of, without_init
from ringtrain.cluster.output import Output
from ringtrain.errors import ConfigError
from ringtrain.protocol.failures import Failure, failure_of
from ringtrain.protocol.placement import RankPlacement
from ringtrain.protocol.reader import Reader

SHUT_DOWN = "UnknownError: {{function_node __wrapped__HorovodAllreduce}} Horovod has been shut down. This was caused by"
OPEN_MPI_KILLED = (
    "-----\nmpirun noticed that process rank 1 with PID 0 on node host2 exited on signal 9 (Killed).\n-----"
)
OPEN_MPI_EXITED = (
    "termination. The first process to do so was:\n\n  Process name: [[12481,1],1]\n  Exit code:    5\n-----"
)
PRRTE_KILLED = OPEN_MPI_KILLED.replace("mpirun", "prterun").replace("exited on signal", "exited on\nsignal")
MPICH_KILLED = (
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 77 RUNNING AT host2\n=   EXIT CODE: 9\n"
    "=   CLEANING UP\n=====\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
)
INTEL_KILLED = "=   RANK 1 PID 77 RUNNING AT host2\n=   KILLED BY SIGNAL: 9 (Killed)\n"
MPICH_EXITED = "=   PID 77 RUNNING AT host2\n=   EXIT CODE: 5\n=   CLEANING UP\n====\n"
PRRTE_EXITED = "The first process to do so was:\n\n   Process name: [prterun-host1-99@1,1]\n   Exit code:    5\n"
HOROVODRUN_GLOO = "RuntimeError: Horovod detected ...\nProcess name: 1\nExit code: 5\n"


def reader(*failures: tuple[int, float, str, int]) -> Reader:
    reports = Reader("j")
    reports.ranks = [RankPlacement(0, 2, "host1", 0, process=76), RankPlacement(1, 2, "host2", 0, process=77)]
    for rank, time_s, text, code in sorted(failures, key=lambda failure: failure[1]):
        for line in Failure(rank, f"host{rank + 1}", time_s, text.partition(":")[0], text, code).lines("j"):
            reports.take(line)
    return reports


def test_a_job_that_ends_well_says_nothing() -> None:
    assert decide(0, reader((0, 1.0, "ValueError: caught", 1)), "", {}, "mpirun").text == ""


@pytest.mark.parametrize(("of_rank_0", "later_s"), [(SHUT_DOWN, -1.0), (SHUT_DOWN, 1.0), ("OSError: disk full", 1.0)])
def test_the_first_failure_is_printed_last_with_its_exit_code(of_rank_0: str, later_s: float) -> None:
    """A follow-up error may come earlier, another cause later."""
    reports = reader((0, 2.0 + later_s, of_rank_0, 1), (1, 2.0, "Traceback\nValueError: batch 3", 3))
    decided = decide(1, reports, OPEN_MPI_EXITED, {}, "mpirun")
    assert (decided.exit_code, decided.text) == (3, "rank 1 on host2 failed first:\nTraceback\nValueError: batch 3")


def test_clocks_of_hosts_decide_nothing_between_hosts() -> None:
    """Rank 2, whose host's clock is behind, reports later; of the two ranks of host1 the clock knows the first."""
    reports = Reader("j")
    for rank, host, time_s in ((1, "host1", 5002.0), (2, "host2", 10.0), (0, "host1", 5001.0)):
        for line in Failure(rank, host, time_s, "E", f"E: {rank}", 3).lines("j"):
            reports.take(line)
    first = reports.first_failure()
    assert first is not None and first.rank == 0


@pytest.mark.parametrize("text", [OPEN_MPI_EXITED, PRRTE_EXITED, HOROVODRUN_GLOO])
@pytest.mark.parametrize("others", [(), ((0, 1.0, SHUT_DOWN, 1),)])
def test_a_rank_that_left_without_a_word_is_named_before_those_it_took_along(text: str, others: tuple) -> None:
    decided = decide(1, reader(*others), text, {1: ["last", "words"]}, "mpirun")
    said = "rank 1 on host2 exited first, with exit code 5; its last lines:\n  last\n  words"
    assert (decided.exit_code, decided.text) == (5, said)


@pytest.mark.parametrize("said", [OPEN_MPI_KILLED, PRRTE_KILLED, MPICH_KILLED, INTEL_KILLED])
def test_a_killed_rank_is_named_with_its_signal(said: str) -> None:
    decided = decide(9, reader((0, 1.0, SHUT_DOWN, 1)), said, {}, "mpirun")
    assert (decided.exit_code, decided.text) == (137, "rank 1 on host2 was killed by SIGKILL (signal 9)")


def test_hydra_names_a_process_and_we_its_rank() -> None:
    decided = decide(5, reader(), MPICH_EXITED, {}, "mpirun")
    assert (decided.exit_code, decided.text) == (5, "rank 1 on host2 exited first, with exit code 5")
    strange = decide(5, Reader("j"), MPICH_EXITED, {}, "mpirun")
    assert strange.text == "process 77 on host2 exited first, with exit code 5"


def test_of_an_elastic_job_the_host_is_named() -> None:
    said = "The first process to do so was:\nProcess name: host2[0]\nExit code: {}\n"
    killed = decide(1, reader(), said.format(137), {}, "horovodrun")
    why = "of the last ranks, one on host2 was killed by SIGKILL (signal 9), or exited with its code"
    assert (killed.exit_code, killed.text) == (137, why)
    left = decide(1, reader(), said.format(5), {}, "horovodrun")
    assert (left.exit_code, left.text) == (5, "of the last ranks, one on host2 exited first, with exit code 5")


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        (["no-init:77"], "2 ranks ran without meeting: they import ringtrain.hvd, and none called hvd.init()."),
        ([], ""),  # a program without ringtrain: nothing is known
        (["no-init:77", "init:1"], ""),  # one rank has, which another process of the job need not
    ],
)
def test_ranks_that_never_met_are_named_and_no_others(reported: list[str], message: str) -> None:
    reports = reader()
    for line in reported:
        assert reports.take(f"[1,0]<stderr>:ringtrain-report:j:{line}")
    text = without_init(2, reports)
    assert text.startswith(message) and bool(text) == bool(message)
    assert without_init(1, reports) == ""


OPEN_MPI_IMPROPERLY = (
    "mpirun has exited due to process rank 1 with PID 0 on\nnode host2 exiting improperly. There are three"
)


@pytest.mark.parametrize(
    ("said", "of_rank_0", "left"),
    [
        ("", SHUT_DOWN, [1]),
        ("", SHUT_DOWN, [0, 1]),  # rank 0 has reported why
        (OPEN_MPI_IMPROPERLY, "", []),
        (HOROVODRUN_GLOO.replace("name: 1", "name: 0"), SHUT_DOWN, [1]),
    ],
)
def test_a_rank_that_left_as_if_all_were_well_is_named(said: str, of_rank_0: str, left: list[int]) -> None:
    reports = reader(*[(0, 1.0, of_rank_0, 1)] if of_rank_0 else [])
    for rank in left:
        reports.take(f"ringtrain-report:j:left:{rank}")
    decided = decide(1, reports, said, {1: ["words"]}, "mpirun")
    first, last = decided.text.splitlines()
    assert first.startswith("rank 1 on host2 exited first, by itself and without an error, while the others waited")
    assert (decided.exit_code, decided.rank, last) == (1, 1, "  words")
    reports.take("ringtrain-report:j:recovery:")
    assert not reports.left and decide(0, reports, "", {}, "mpirun") == JobResult(0)


def test_of_a_killed_ssh_the_host_is_named_and_its_rank_is_not_blamed() -> None:
    over_gloo = reader((0, 1.0, SHUT_DOWN, 1))
    over_gloo.take("ringtrain-report:j:cut:1:9:")
    decided = decide(1, over_gloo, HOROVODRUN_GLOO.replace("code: 5", "code: 137"), {}, "horovodrun-gloo")
    why = "the ssh from this host to rank 1 on host2 was killed by SIGKILL (signal 9), not the rank itself"
    assert (decided.exit_code, decided.text) == (137, why)


def test_shut_down_is_never_the_last_word() -> None:
    decided = decide(1, reader((0, 1.0, SHUT_DOWN, 1)), "", {}, "mpirun")
    assert "Horovod has been shut down" not in decided.text.splitlines()[-1]
    assert "another rank exited before" in decided.text


def test_where_nobody_says_who_was_first_the_last_errors_are_shown() -> None:
    decided = decide(5, reader(), "", {1: ["some", "words"]}, "mpirun")
    said = "a rank exited with code 5, mpirun does not name it; last errors:\n  rank 1 on host2: words"
    assert (decided.exit_code, decided.text) == (5, said)
    assert decide(213, Reader("j"), "no slots", {}, "mpirun").text == "mpirun exited with code 213"
    assert decide(-9, Reader("j"), "", {}, "mpirun").exit_code == 137


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[1,12]<stderr>:hello [x]", (12, "hello [x]")),
        ("[prterun-host1-4242@1,3]<stderr>: hello", (3, "hello")),
        ("[1,12]<stderr>:hello[1,12]<stderr>:", (12, "hello")),
        ("[3] hello", (3, "hello")),
        ("3: hello", (3, "hello")),
        ("hello", None),
        ("[host1:12345] *** Process received signal ***", None),
    ],
)
def test_whose_line_it_is(line: str, found: tuple[int, str] | None) -> None:
    assert rank_of(line) == found


def test_a_host_that_is_silent_at_the_end_is_the_cause_where_no_rank_has_another() -> None:
    said = "lost host2 while the job ran: its host or network failed"
    for code in (0, 255):  # Open MPI 5 calls it a success
        assert decide(code, Reader("job"), "", {}, "mpirun", ["host2"]) == JobResult(2, said)
    assert decide(0, Reader("job"), "", {}, "mpirun") == JobResult(0)


# ---- what is printed before -----------------------------------------------------------------------------------------


def fails_in_a_library(text: str) -> Failure:
    """Failure of a rank within json, which this file has called."""
    try:
        json.loads(text)
    except ValueError as error:
        return failure_of(error, 0, 1, with_traceback=True)
    raise AssertionError(text)


def test_the_last_words_are_the_users_frame_and_one_line_of_at_most_500_characters() -> None:
    failure = fails_in_a_library("{")
    frame, code, last = failure.last.splitlines()
    assert frame.startswith(f'  File "{__file__}", line ') and code == "    json.loads(text)"
    assert last.startswith("JSONDecodeError: Expecting property name") and "decoder.py" in failure.text
    of_keras = ValueError("Exception when calling call().\n\n\x1b[1mWrong shape\x1b[0m\n\nArguments:\n  - inputs=1")
    assert failure_of(of_keras, 0, 1, True).last == "ValueError: Exception when calling call(). Wrong shape Arguments:"
    long = failure_of(ValueError(10_000 * "a" + "end"), 0, 1, with_traceback=True)
    assert 490 < len(long.last) <= 500 and long.last.endswith("end") and len(long.text) > 10_000
    # ringtrain's own error is whole, as its lines tell what to do, and without a traceback.
    table = failure_of(ConfigError("ranks differ\n  rank 1"), 0, 2, with_traceback=True)
    assert table.last == table.text == "ConfigError: ranks differ\n  rank 1"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_equal_tracebacks_are_shown_once_and_follow_up_errors_and_a_terminals_notices_not(
    is_terminal: bool, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: is_terminal)
    cause, other = fails_in_a_library("{"), Failure(3, "host2", 4.0, "OSError", "OSError: other", last="OSError: other")
    consequence = Failure(2, "host2", 3.0, "UnknownError", f"Traceback\n{SHUT_DOWN}", last=SHUT_DOWN)
    output = Output(Reader("j"), defers_failures=True)
    output.add(b"[1,1]<stderr>:I0000 00:00:1795918612.684766    1686 port.cc:153] oneDNN is on\n")
    output.add(f"[1,1]<stderr>:{1000 * 'a'}\n".encode())
    for failure in replace(cause, rank=1), consequence, replace(cause, rank=0), other, replace(cause, rank=5):
        for line in [*failure.lines("j"), *failure.text.splitlines()]:
            output.add(f"[1,{failure.rank}]<stderr>:{line}\n".encode())
    output.show_others(1)
    shown = capfd.readouterr().err
    assert shown.count("Traceback") == shown.count("JSONDecodeError") == 1
    assert "shut down" not in shown
    assert shown.splitlines()[-3:] == [
        "ringtrain: rank 3 on host2: OSError: other",
        "ringtrain: the same error on ranks 0, 5",
        "ringtrain: follow-up errors, not shown, on rank 2",
    ]
    assert ("oneDNN" in shown) is not is_terminal
    assert len(output.tails[1][0]) <= 500 < len(shown.splitlines()[0 if is_terminal else 1])
