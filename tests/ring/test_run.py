"""`ringtrain.run`: a function of a script or notebook on ranks, its values and failures, and nothing that is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import pytest

from ringtrain.cluster import launch

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        launch.slots_here() < 2,
        reason="ringtrain.run starts two ranks here, and this machine has one core, which is one slot",
    ),
]
LIMIT_S = 300
LEFT_S = 20  # far above what it takes
NOTEBOOK = launching.ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Running processes that the test has started, and that these have started; none is left after the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(launching.MARK, mark)
    yield lambda: launching.marked(mark)
    launching.end_marked(mark)


def ends(alive: Callable[[], dict[int, str]], but: int = 0) -> bool:
    """Whether all processes but one end, in time."""
    until = time.monotonic() + LEFT_S
    while {*alive()} - {but} and time.monotonic() < until:
        time.sleep(0.05)
    return not {*alive()} - {but}


VALUES = """
import dataclasses, json, os, sys
import beside
import ringtrain

FACTOR = 3

@dataclasses.dataclass
class Result:
    rank: int
    total: float

def train(scale, *, offset):
    import numpy
    import ringtrain.hvd as hvd
    hvd.init()
    summed = hvd.allreduce(numpy.array([FACTOR * scale * (hvd.rank() + 1.0)]), op=hvd.Sum).numpy()
    print("of", hvd.size(), flush=False)
    return Result(hvd.rank(), beside.doubled(summed[0] + offset)), os.getcwd(), sys.argv[1:]

values = ringtrain.run(train, 2, np=2, offset=0.5)
assert all(type(value[0]) is Result for value in values)
imported = sorted({"tensorflow", "horovod"} & {*sys.modules})
print(json.dumps([[dataclasses.asdict(result), *rest] for result, *rest in values] + [imported]))
"""


@pytest.mark.quick
def test_values_of_a_script_without_a_guard(tmp_path: Path, alive) -> None:
    """Its function, constants, classes and the module beside it reach the ranks; TensorFlow stays out of the script."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "job.py").write_text(VALUES)
    (tmp_path / "scripts" / "beside.py").write_text("def doubled(value):\n    return 2 * value\n")
    ended = launching.run(0, [sys.executable, "scripts/job.py", "an argument"], LIMIT_S, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *shown, values = ended.stdout.splitlines()
    same = [str(tmp_path), ["an argument"]]
    assert json.loads(values) == [[{"rank": rank, "total": 2 * (3 * 2 * (1 + 2) + 0.5)}, *same] for rank in (0, 1)] + [
        []
    ]
    assert sorted(shown) == ["of 2", "rank 1: of 2"], "nothing of TensorFlow's, no tags"
    assert alive() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


FAILS = """
import ringtrain
from ringtrain.errors import RankError

def check(batch):
    raise ValueError(f"{batch} is bad")

def train():
    import numpy
    import ringtrain.hvd as hvd
    hvd.init()
    for step in range(10_000):
        hvd.allreduce(numpy.ones(1), name="step")
        if hvd.rank() == 1 and step == 3:
            check("batch 3")

try:
    ringtrain.run(train, np=2)
except RankError as error:
    print(error)
"""


def test_the_first_failure_is_raised_with_its_traceback(tmp_path: Path, alive) -> None:
    """Not the follow-up error of rank 0, whose allreduce then fails."""
    (tmp_path / "job.py").write_text(FAILS)
    ended = launching.run(0, [sys.executable, "job.py"], LIMIT_S, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    shown, _, error = ended.stdout.partition("\nrank 1 on ")
    assert shown.splitlines()[-1].endswith("failed first: ValueError: batch 3 is bad"), "the launcher's last line"
    lines = error.splitlines()
    assert lines[0].endswith(" failed first:") and lines[1] == "Traceback (most recent call last):"
    assert [line.rpartition(", in ")[2] for line in lines if line.startswith("  File ")] == ["train", "check"]
    assert lines[-2:] == ['    raise ValueError(f"{batch} is bad")', "ValueError: batch 3 is bad"]
    assert alive() == {}


INTERRUPTED = """
import time
import numpy
import ringtrain

def train():
    import keras
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ringtrain.fit(model, x, x[:, :1], name="stopped", batch_size=32, epochs=100_000)

x = numpy.random.default_rng(0).normal(size=(3200, 6))
try:
    ringtrain.run(train, np=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_saves_and_ends_all_ranks(tmp_path: Path, alive) -> None:
    (tmp_path / "job.py").write_text(INTERRUPTED)
    with started(tmp_path / "job.py") as script:
        shown = until(script, "epoch")
        assert len(alive()) > 5, "ranks, their launcher and its agent"
        script.send_signal(signal.SIGINT)  # to this process alone, as from a terminal: ranks are in groups of their own
        shown += until(script, "interrupted")
        assert ends(alive, but=script.pid), alive()
        assert script.poll() is None
    summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGINT" and summary["num_ranks"] == 2 and summary["in_sync"] is True
    assert [*(tmp_path / "runs" / "stopped" / "checkpoints").iterdir()]
    assert "ringtrain: stopped by SIGINT\n" in shown


WAITS = """
import pathlib, signal, sys, time
import ringtrain

def wait(folder):
    def save(number, frame):
        pathlib.Path(folder, f"saved-{number}").touch()
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, save)
    print("begun")
    time.sleep(600)
"""


@pytest.mark.quick
def test_the_end_of_the_calling_process_ends_all_ranks(tmp_path: Path, alive) -> None:
    """Whatever ends it; ranks may save."""
    (tmp_path / "job.py").write_text(f"{WAITS}\nringtrain.run(wait, {str(tmp_path)!r})\n")
    with started(tmp_path / "job.py") as script:
        until(script, "begun", "rank 1: begun")
        script.kill()
        assert ends(alive), alive()
    assert (tmp_path / f"saved-{int(signal.SIGTERM)}").exists()


@contextlib.contextmanager
def started(script: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that runs; a second interrupt would end it."""
    env = os.environ | {"PYTHONPATH": str(launching.ROOT), "PYTHONUNBUFFERED": "1"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=env, cwd=script.parent, text=True, process_group=0, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], *beginnings: str) -> str:
    """What a process prints, to the line with which a line has begun with each text."""
    assert process.stdout is not None
    shown, missing = "", {*beginnings}
    while missing:
        line = process.stdout.readline()
        assert line, shown
        shown += line
        missing -= {text for text in missing if line.startswith(text)}
    return shown


def test_a_notebook(tmp_path: Path, alive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as it ships, in a real Jupyter kernel."""
    manager = pytest.importorskip("jupyter_client.manager")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", os.defpath)  # not activated, as in a notebook server of another environment
    env = os.environ | {"PYTHONPATH": str(launching.ROOT)}
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=env)
    try:
        (process,) = [number for number, command in alive().items() if "ipykernel" in command]
        shipped = nbformat.read(NOTEBOOK, as_version=4)
        executed = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(executed, km=kernel, timeout=LIMIT_S).execute()
        for ours, theirs in zip(executed.cells, shipped.cells, strict=True):
            assert first_words(theirs) <= first_words(ours)
        assert first_words(shipped.cells[3]) >= {"ranks", "epoch", "val", "2"}, "it ships with its outputs"
        assert "equal weights: True\n" in executed.cells[5].outputs[-1]["text"]
        assert ends(alive, but=process), alive()
    finally:
        client.stop_channels()
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)


def first_words(cell: Any) -> set[str]:
    """First word of each line that a cell prints: the rest, and further lines, depend on the machine."""
    lines = [line for output in cell.get("outputs", ()) for line in output["text"].splitlines()]
    return {line.split()[0] for line in lines if line.strip()}
