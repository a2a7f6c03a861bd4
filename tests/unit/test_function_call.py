"""`ringtrain.run` before it starts ranks: what is imported, refused and warned of."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import launching
import pytest

import ringtrain
from ringtrain import function_call
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import JOB

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
        caller = pickle.loads(function_call.content_of(names["cell"], (), {}))  # the first of two pickles
    finally:
        del function_call.linecache.cache["<a cell>"]
    assert caller["cells"]["<a cell>"] == entry
    assert __file__ not in caller["cells"], "files are read on the ranks"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("[1,0]<stdout>:  a\n[1,12]<stderr>: b\n", "  a\nrank 12:  b\n"),
        ("[1,0]<stdout>:a[1,1]<stdout>:b\n[1,0]<stdout>:c\n", "a\nrank 1: b\nc\n"),
        ("[1,0]<stdout>:\r1/2[1,0]<stdout>:\r2/2[1,0]<stdout>:\n", "\r1/2\r2/2\n"),
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


HELD = """
import sys
import tensorflow as tf
from ringtrain.function_call import gpus_in_use
context = sys.modules["tensorflow.python.eager.context"]
context.context()  # as an import may make it, without devices
print(gpus_in_use(sys.modules), context.context_safe()._initialized)
tf.zeros(1)
print(context.context_safe()._initialized)
context.context()._logical_devices = [tf.config.LogicalDevice(f"/device:GPU:{n}", "GPU") for n in (0, 1)]
print(gpus_in_use(sys.modules))
"""


@pytest.mark.slow
def test_gpus_that_the_caller_holds_are_counted_and_asking_takes_none() -> None:
    """By private attributes of TensorFlow, which a new release may rename."""
    ended = subprocess.run([sys.executable, "-c", HELD], cwd=launching.ROOT, capture_output=True, text=True)
    assert ended.stdout == "0 False\nTrue\n2\n", ended.stderr


def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may be larger
    try:
        with pytest.raises(LaunchError, match=r"function and arguments, [\d,]+ bytes, cannot be written: ") as refused:
            ringtrain.run(print, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]
