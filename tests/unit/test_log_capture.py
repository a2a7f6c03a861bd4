"""What reaches the terminal of a process that keeps chatter away, and what its log."""

from __future__ import annotations

import signal
import sys

import launching
import pytest

from ringtrain.training.log_capture import CHATTER

NOISE = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
    b"I0000 00:00:1795168715.773533    4855 port.cc:153] oneDNN custom operations are on.\n",
    b"E0000 00:00:1795168715.773533 4855 cuda_dnn.cc:8579] Unable to register cuDNN factory\n",
    b"W1120 10:15:11.773533    4855 local_rendezvous.cc:404] Local rendezvous is aborting\n",
    b"2026-11-20 10:15:11.773533: I tensorflow/core/platform/cpu_feature_guard.cc:210] This binary\n",
    b"To enable the following instructions: AVX2 AVX512F, in other operations, rebuild\n",
    b"/job:worker/replica:0/task:0\n",
]
SIGNAL = [
    b"F0000 00:00:1795168715.773533    4855 tensor.cc:12] Check failed\n",
    b"[2026-11-20 10:15:11.773533: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted\n",
    b"Traceback (most recent call last):\n",
    b"WARNING: your own\n",
    b"terminate called after throwing an instance of 'std::runtime_error'\n",
]


def test_chatter_is_known_and_nothing_else():
    assert [line for line in NOISE if not CHATTER.match(line)] == []
    assert [line for line in SIGNAL if CHATTER.match(line)] == []


def watched(body: str) -> tuple[int, str]:
    """Runs a program that writes NOISE[1] to file descriptor 2 and then does what body says."""
    watching = "import os, sys, signal\nfrom ringtrain.training import log_capture\nlog_capture.watch()"
    program = f"{watching}\nos.write(2, {NOISE[1]!r})\n{body}"
    buffered = {"PYTHONUNBUFFERED": ""}  # Python's default, under which a failed flush at exit becomes exit code 120
    ended = launching.run(0, [sys.executable, "-c", program], timeout_s=60, env=buffered)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


ENDINGS = {
    "normal": ("print('hello', file=sys.stderr)", 0, "hello\n"),
    "exit code": ("print('hello', file=sys.stderr)\nsys.exit(2)", 2, "hello\n"),
    "exception": ("raise OSError('disk full')", 1, "OSError: disk full\n"),
    "crash": ("os.write(2, b'last words\\n')\nos.abort()", -signal.SIGABRT, "last words\n"),
    "killed": ("os.write(2, b'last words\\n')\nos.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "last words\n"),
    "watcher killed": (
        "watcher = int(open(f'/proc/self/task/{os.getpid()}/children').read())\nos.kill(watcher, signal.SIGKILL)\n"
        "os.waitid(os.P_PID, watcher, os.WEXITED | os.WNOWAIT)\nsys.stderr.write('half a line')",
        0,
        "half a line",
    ),
    "no line end": ("os.write(2, b'half a line')", 0, "half a line"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_last_words_reach_the_terminal_however_it_ends(ending):
    body, code, words = ENDINGS[ending]
    got_code, got = watched(body)
    assert got_code == code
    assert got.endswith(words) and "oneDNN" not in got


@pytest.mark.parametrize(("before", "shown"), [("", "late\n"), ("log_capture.log_only()\n", "")])
def test_what_c_code_writes_after_pythons_end_is_shown_unless_only_the_log_is_asked_for(before, shown):
    late = "class Late:\n    def __del__(self, write=os.write):\n        write(2, b'late\\n')\n"
    assert watched(f"{before}{late}late = Late()") == (0, shown)


def test_the_log_keeps_everything_from_the_start(tmp_path):
    log = tmp_path / "new" / "folder" / "rank-0.log"
    body = (
        "from pathlib import Path\nos.write(2, b'before\\n')\n"
        f"log_capture.log_to(Path({str(log)!r}), 'rank 0')\nos.write(2, b'after')"
    )
    assert watched(body) == (0, "before\nafter")
    assert log.read_bytes() == b"rank 0\n" + NOISE[1] + b"before\nafter"


def test_progress_without_line_ends_is_shown_and_logged_while_it_goes_on(tmp_path):
    log = tmp_path / "rank-0.log"
    body = (
        f"from pathlib import Path\nlog_capture.log_to(Path({str(log)!r}), 'rank 0')\n"
        "os.write(2, b'50 %\\r' + b'100 %')\n"
        f"while not Path({str(log)!r}).read_bytes().endswith(b'100 %'): pass\n"
        "os.write(2, b'\\0ringtrain:log only\\nnot shown\\n')"
    )
    assert watched(body) == (0, "50 %\n100 %"), "as text, in which a carriage return ends a line too"
    assert log.read_bytes().endswith(b"50 %\r100 %not shown\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_all_processes_of_a_rank_does_not_silence_one_that_goes_on(name):
    heard = f"signal.signal(signal.{name}, lambda *_: None); os.killpg(0, signal.{name})"
    assert watched(f"{heard}; print('saved', file=sys.stderr)") == (0, "saved\n")
