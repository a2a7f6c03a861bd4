"""`ringtrain.run` before it starts ranks: what is imported, refused and warned of."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launching
import pytest

import ringtrain
from ringtrain import function_call
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import JOB
from ringtrain.protocol.failures import Failure

IMPORTS = """
import sys
import ringtrain
import ringtrain.training.console
from ringtrain import run
print(callable(run), run is ringtrain.run)
print(sorted({"tensorflow", "keras", "horovod"} & {*sys.modules}))
"""


def test_the_function_is_there_without_tensorflow() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], cwd=launching.ROOT, capture_output=True, text=True)
    assert ended.stdout == "True True\n[]\n", ended.stderr


def test_a_function_that_uses_the_package_can_be_sent() -> None:
    _, (function, *_) = both(function_call.content_of(lambda: ringtrain, (), {}))
    assert function() is ringtrain


def both(content: bytes) -> list[Any]:
    """The two pickles of a file for ranks."""
    file = io.BytesIO(content)
    return [pickle.load(file), pickle.load(file)]


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot be sent to ranks .*lock.*: create data sets"):
        ringtrain.run(lambda: lock)
    with pytest.raises(LaunchError, match=r"cannot be sent to ranks .*generator"):
        ringtrain.run(print, (number for number in range(3)))


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a module that calls it when it is imported would start ranks without end."""
    monkeypatch.setenv(JOB, "a job")
    with pytest.raises(LaunchError, match="called on a rank"):
        ringtrain.run(print)


@pytest.mark.parametrize(("megabytes", "warned"), [(63, False), (65, True)])
def test_large_arguments_are_warned_of(megabytes: int, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ranks start, here with a launch that fails at once."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with warnings.catch_warnings(record=True) as seen, pytest.raises(LaunchError, match="exited with code 1"):
        warnings.simplefilter("always")
        ringtrain.run(print, bytes(megabytes << 20))
    assert ["65 MB, which every rank reads" in str(one.message) for one in seen] == [True] * warned
    assert [one.filename for one in seen] == [__file__] * warned


def test_source_of_cells_travels_with_the_function() -> None:
    code = compile("def cell():\n    return 1\n", "<a cell>", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    entry = (2, None, ["def cell():\n", "    return 1\n"], "<a cell>")
    function_call.linecache.cache["<a cell>"] = entry
    try:
        caller, _ = both(function_call.content_of(names["cell"], (), {}))
    finally:
        del function_call.linecache.cache["<a cell>"]
    assert caller["cells"]["<a cell>"] == entry
    assert __file__ not in caller["cells"], "files are read on the ranks"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("[1,0]<stdout>:  a\n[1,12]<stderr>: b\n", "  a\nrank 12:  b\n"),
        ("[1,1]<stdout>:a[1,1]<stdout>: [1,1]<stdout>:b[1,1]<stdout>:\n", "rank 1: a b\n"),
        ("[1,0]<stdout>:a[1,1]<stdout>:b\n[1,0]<stdout>:c\n", "a\nrank 1: b\nc\n"),
        ("[1,0]<stdout>:\r1/2[1,0]<stdout>:\r2/2[1,0]<stdout>:\n", "\r1/2\r2/2\n"),
        ("[prterun-host1-99@1,1]<stdout>:  a\n", "rank 1:  a\n"),
        ("[1] a\n2: b\n", "rank 1: a\nrank 2: b\n"),  # Hydra, srun
        ("[1,0]<stdout>:\n[1,0]<stdout>:[1] is no tag\n", "\n[1] is no tag\n"),
    ],
)
def test_output_of_ranks_is_shown_without_tags(output: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["printf", "%s", output], stdout=subprocess.PIPE) as process:
        assert function_call.Shown(process).follow() == 0
    assert capsys.readouterr().out == shown


def test_the_last_message_of_the_launcher_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    output = "ringtrain: one\n[1,0]<stderr>:ringtrain: of a rank\nringtrain: rank 1 has failed:\n  its last line\n"
    with subprocess.Popen(["printf", "%s", output], stdout=subprocess.PIPE) as process:
        shown = function_call.Shown(process)
        shown.follow()
    assert shown.message == "rank 1 has failed:\n  its last line"


@pytest.mark.parametrize(("initialized", "num_gpus"), [(True, 2), (False, 0), (None, 0)])
def test_gpus_that_the_caller_holds_are_counted(initialized: bool | None, num_gpus: int) -> None:
    """None: TensorFlow is not imported. TensorFlow that has not used a device holds none, and asking it would."""
    asked: list[str] = []

    def list_logical_devices(kind: str) -> list[str]:
        asked.append(kind)
        return [f"{kind}:0", f"{kind}:1"]

    context = SimpleNamespace(context_safe=lambda: SimpleNamespace(_initialized=initialized))
    tensorflow = SimpleNamespace(config=SimpleNamespace(list_logical_devices=list_logical_devices))
    modules = {} if initialized is None else {"tensorflow": tensorflow, "tensorflow.python.eager.context": context}
    assert function_call.gpus_in_use(modules) == num_gpus
    assert asked == ["GPU"] * bool(num_gpus)


HELD = """
import sys
import tensorflow as tf
context = sys.modules["tensorflow.python.eager.context"]
before = getattr(context.context_safe(), "_initialized", False)
tf.zeros(1)
print(before, context.context_safe()._initialized)
"""


@pytest.mark.slow
def test_tensorflow_says_whether_it_has_used_a_device() -> None:
    """By a private attribute, which a new release may rename."""
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True)
    assert ended.stdout == "False True\n", ended.stderr


def on_a_full_disk(call: Callable[[], Any]) -> Any:
    """Result of a call in which no file may grow over 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LaunchError, match=r"function and arguments, [\d,]+ bytes, cannot be written: ") as refused:
        on_a_full_disk(lambda: ringtrain.run(print, "x" * 1000))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_a_value_for_which_the_disk_is_full_is_a_failure_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_call, "_called", lambda call, rank: "x" * 1000)
    monkeypatch.setattr(function_call.log_capture, "watch", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    reported: list[BaseException] = []
    monkeypatch.setattr(function_call, "report_failure", lambda error, *_, **__: reported.append(error))
    assert on_a_full_disk(lambda: function_call.main(tmp_path / "call")) == 2
    assert "the value of the function, " in str(reported[0]) and "cannot be written" in str(reported[0])
    assert not (tmp_path / "value-0").exists()


@pytest.mark.parametrize(
    ("message", "rank"), [("rank 1 on b failed first:\nE: 1", 1), ("mpirun exited with code 1", 0)]
)
def test_the_launcher_knows_which_rank_failed_first_and_not_the_hosts_clocks(
    message: str, rank: int, tmp_path: Path
) -> None:
    for number, time_s in ((0, 1.0), (1, 9.0)):
        failure = Failure(number, "host", time_s, "ValueError", f"Traceback\nValueError: {number}")
        (tmp_path / f"failure-{number}").write_text(json.dumps(asdict(failure)))
    first = function_call._first_failure(tmp_path / "call", 2, message)
    assert first == f"rank {rank} on host failed first:\nTraceback\nValueError: {rank}"


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free space"), (errno.EACCES, "allow this user to write"), (errno.ENOENT, "check this directory")],
)
def test_a_file_that_cannot_be_written_is_fixed_by_its_cause(
    number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(LaunchError, match=f"{os.strerror(number)}: {fix}"):
        function_call._write_value(tmp_path / "value", b"")
