"""spark.launch: a function run once per combination on real executors, whatever single runs do."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standalone

from ringtrain.cluster import spark
from ringtrain.errors import LaunchError

GPU_PER_TASK = {
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}


@pytest.fixture(scope="module")
def session(cluster: standalone.Cluster) -> Iterator[Any]:
    """Spark on the cluster, a GPU for each task."""
    made = spark.start(cluster.master, GPU_PER_TASK)
    yield made
    made.stop()


def test_the_page_s_runs(session: Any) -> None:
    """The Python of docs/clusters.md, with another session, and a function that computes."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    text = re.search(r"^```python\n(from ringtrain.cluster import spark\n.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    assert "session = spark.start(" in text and "    ...\n" in text
    names: dict[str, Any] = {"made": session}
    text = re.sub(r"^session = .*$", "session = made", text, flags=re.MULTILINE)
    exec(text.replace("    ...\n", "    accuracy = learning_rate * units\n"), names)
    assert [row.result["accuracy"] for row in names["rows"]] == pytest.approx([6.4, 1.28])
    assert names["best"].arguments == {"learning_rate": 0.1, "units": 64}


def test_every_combination_has_a_row_whatever_the_others_do(session: Any, tmp_path: Path) -> None:
    def study(number: int, ending: str) -> Any:
        left_by_another = hasattr(sys, "left_behind")
        sys.left_behind = number
        (tmp_path / f"{number}-{ending}").touch()
        end_s = time.monotonic() + 60
        while ending == "meet" and len([*tmp_path.glob("*-meet")]) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        if ending == "raise":
            raise ValueError(f"no such luck {number}")
        if ending == "exit":
            os._exit(3)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "lock":
            return threading.Lock()
        met = len([*tmp_path.glob("*-meet")])
        return number, os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], left_by_another, met

    endings = ["meet", "raise", "exit", "kill", "lock", "return"]
    rows = spark.launch(session, study, {"ending": endings, "number": [1, 2]})
    assert [(row.arguments["ending"], row.arguments["number"]) for row in rows] == [
        (ending, number) for ending in endings for number in (1, 2)
    ]
    by_ending = {ending: [row for row in rows if row.arguments["ending"] == ending] for ending in endings}
    assert [row.error for row in rows] == 2 * [""] + 2 * ["ValueError"] + 4 * ["ProcessDied"] + 2 * [
        "TypeError"
    ] + 2 * [""]
    assert [row.message for row in by_ending["raise"]] == ["no such luck 1", "no such luck 2"]
    assert "in study" in by_ending["raise"][0].traceback
    assert {row.message for row in by_ending["exit"]} == {"its process called exit(3) before it returned"}
    assert {row.message for row in by_ending["kill"]} == {"its process was killed by SIGKILL before it returned"}
    assert "the result cannot be sent back" in by_ending["lock"][0].message
    good = by_ending["meet"] + by_ending["return"]
    assert all(row.host and row.seconds > 0 for row in rows)
    assert [row.result[0] for row in good] == [1, 2, 1, 2]
    assert len({row.result[1] for row in good}) == 4, "a process for each run"
    assert not any(row.result[3] for row in good), "nothing is left behind by another run"
    # Two ran at the same time, each with a GPU of its own.
    assert {row.result[4] for row in by_ending["meet"]} == {2}
    assert {row.result[2] for row in by_ending["meet"]} == {"5", "7"}
    assert all((row.result[2],) == row.gpus for row in good)


def test_lists_are_paired(session: Any) -> None:
    rows = spark.launch(session, lambda x, y: x * y, {"x": [1, 2, 3], "y": [4, 5, 6]}, how="zip")
    assert [row.result for row in rows] == [4, 10, 18]


def train(learning_rate: float, units: int = 8) -> float:
    return learning_rate * units


def with_a_lock() -> Any:
    lock = threading.Lock()
    return lambda learning_rate: lock


BAD: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "a misspelt argument": (train, {"learning_rat": [1]}, "grid", "got learning_rat from args_dict"),
    "an argument too many": (train, {"learning_rate": [1], "x": [1]}, "grid", "unexpected keyword argument 'x'"),
    "one that is missing": (train, {"units": [1]}, "grid", "missing a required argument: 'learning_rate'"),
    "a number": (train, {"learning_rate": 0.1}, "grid", "args_dict['learning_rate']: got 0.1, expected a list"),
    "a text": (train, {"learning_rate": "0.1"}, "grid", "got '0.1', expected a list"),
    "a set, which has no order": (train, {"learning_rate": {0.1}}, "grid", "expected a list"),
    "nothing to choose from": (train, {"learning_rate": []}, "grid", "got an empty list"),
    "unequal lengths": (train, {"learning_rate": [1, 2], "units": [1]}, "zip", "(learning_rate 2, units 1)"),
    "another way": (train, {"learning_rate": [1]}, "random", "got how='random', expected 'grid' or 'zip'"),
    "no function": (None, {"learning_rate": [1]}, "grid", "got None for map_fun, expected a function"),
    "an unpicklable function": (with_a_lock(), {"learning_rate": [1]}, "grid", "cannot pickle '_thread.lock' object"),
    "unpicklable values": (train, {"learning_rate": [threading.Lock()]}, "grid", "cannot be sent to executors"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_spark_is_asked_for_anything(name: str) -> None:
    function, arguments, how, said = BAD[name]
    with pytest.raises(LaunchError) as raised:
        spark.launch(None, function, arguments, how)  # type: ignore[arg-type]  # which would fail if it were used
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_executors_with_another_python_are_one_line(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.stop()  # a process has one Spark at a time
    for python, said in (
        (standalone.other_python(tmp_path), "executors run Python 3.7, the driver 3."),
        (tmp_path / "no-python", f"cannot start Python as {tmp_path}/no-python: set PYSPARK_PYTHON"),
    ):
        monkeypatch.setenv("PYSPARK_PYTHON", str(python))
        there = spark.start("local[1]", {"spark.ui.enabled": "false"})
        try:
            with pytest.raises(LaunchError) as raised:
                spark.launch(there, train, {"learning_rate": [1]})
        finally:
            there.stop()
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
