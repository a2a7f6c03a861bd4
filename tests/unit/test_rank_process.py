"""Processes that horovodrun starts: their ends and their output, also where others hold it."""

from __future__ import annotations

import functools
import io
import os
import shlex
import signal
import subprocess
import sys
import threading

import pytest

from ringtrain.cluster import horovod_driver, rank_process

HOLDS = "sleep 600 & echo out; echo err >&2; "
CATCHES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: eval(sys.argv[1]))
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", -9)])
def test_a_process_that_others_outlive_has_ended_with_its_output(end: str, code: int) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    argv = ["sh", "-c", HOLDS + end]
    assert rank_process.run(argv, os.environ, stdout=stdout, stderr=stderr, index=3) == code
    assert (stdout.getvalue(), stderr.getvalue()) == ("[3]<stdout>:out\n", "[3]<stderr>:err\n")


def test_of_one_that_has_ended_well_others_may_go_on_printing() -> None:
    stdout = io.StringIO()
    argv = ["sh", "-c", "read -r given; (sleep 0.3; echo $given) &"]
    assert rank_process.run(argv, os.environ, given="given\n", stdout=stdout, index=0) == 0
    assert stdout.getvalue() == "[0]<stdout>:given\n"


@pytest.mark.parametrize(("how", "code"), [("sys.exit(3)", 3), ("0", -signal.SIGKILL)])
def test_an_event_ends_it_by_sigterm_and_after_a_while_by_sigkill(how: str, code: int) -> None:
    event = threading.Event()

    class Begun(io.StringIO):
        def write(self, text: str) -> int:
            event.set()
            return super().write(text)

    argv = [sys.executable, "-c", CATCHES, how]
    assert rank_process.run(argv, os.environ, grace_s=0.5, stdout=Begun(), events=[event]) == code


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_on_another_host_what_holds_the_output_of_a_failed_rank_is_killed(end: str, code: int) -> None:
    """And the rank has its variables, and SIGINT is not ignored."""
    rank = f'trap "echo caught" INT; kill -INT $$; echo "$A"; sleep 600 & {end}'
    line = horovod_driver.REMOTE % shlex.join(["sh", "-c", rank])
    begin = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # these tests may run in the background
    ended = subprocess.run(
        ["sh", "-c", line],
        input="export A='b c'\n",
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=begin,
    )
    assert (ended.returncode, ended.stdout) == (code, "caught\nb c\n")
