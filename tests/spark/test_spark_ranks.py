"""ringtrain launch --launcher spark: ranks on real executors, their ends, and what is refused in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import standalone
from launching import BIN, ROOT

TIMEOUT_S = 240


def start(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ringtrain", "launch", "--launcher", "spark", *map(str, words)],
        cwd=cwd,
        env=os.environ
        | {"PATH": f"{BIN}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
        | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launch(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    process = start(*words, cwd=cwd, **env)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        standalone.kill(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stderr.rstrip().rpartition("\n")[2]


ROWS = """
def digits(spark):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = [((image / 16).tolist(), int(label)) for image, label in zip(images, labels)]
    frames = [spark.createDataFrame(part, "pixels array<float>, label long") for part in (rows[:1501], rows[1501:])]
    return frames[0].repartition(3), frames[1]
"""


def test_trains_on_rows_of_a_data_frame_on_a_cluster(cluster: standalone.Cluster, tmp_path: Path) -> None:
    """A GPU for each rank as well, which here is but an address: TensorFlow finds none, and computes on the CPU."""
    (tmp_path / "rows.py").write_text(ROWS)
    gpus = ["spark.executor.resource.gpu.amount=1", "spark.task.resource.gpu.amount=1", "spark.executor.cores=1"]
    settings = [word for setting in (*gpus, "spark.executor.memory=512m") for word in ("--spark-conf", setting)]
    tell = 'echo "rank $HOROVOD_RANK sees $CUDA_VISIBLE_DEVICES, $(pwd)"; unset CUDA_VISIBLE_DEVICES; exec "$@"'
    train = ["python", "-m", "ringtrain.train", "--data.name", "spark", "--train.epochs", "20"]
    ended = launch(
        *("--master", cluster.master, "-np", "2", "--spark-data", "rows:digits", *settings),
        *("--output", tmp_path / "logs", "--", "sh", "-c", tell, "sh", *train, "--run.name", "on-spark"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks in step: gradients averaged" in ended.stdout
    summary = json.loads((tmp_path / "runs" / "on-spark" / "summary.json").read_text())
    assert (summary["numbers"]["num_train"], summary["numbers"]["num_test"]) == (1501, 296)
    assert summary["test_accuracy"] > 0.85
    for rank in (0, 1):
        logged = (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text()
        assert re.search(rf"rank {rank} sees (5,7|7,5), {tmp_path}\n", logged)
        assert f"[{rank}]<stdout>:rank {rank} sees" in ended.stdout


def test_the_first_failure_ends_the_job_with_its_exit_code_and_is_said_last(tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-sleeper"
    ended = launch(
        *("--master", "local[2]", "-np", "2", "--", "sh", "-c"),
        f'if [ "$HOROVOD_RANK" = 1 ]; then echo why >&2; exit 3; fi; sh -c "sleep 600" {mark}; true',
    )
    assert ended.returncode == 3, ended.stderr
    assert re.search(
        r"ringtrain: rank 1 on \S+ was the first to end, with exit code 3; its last lines:\n  why\n$", ended.stderr
    )
    assert not standalone.alive(mark)


def test_sigterm_lets_ranks_save(tmp_path: Path) -> None:
    there, saved = tmp_path / "there", tmp_path / "saved"
    wait = (
        f'trap "touch {saved}-$HOROVOD_RANK; exit 138" USR1; touch {there}-$HOROVOD_RANK; while :; do sleep 0.05; done'
    )
    process = start("--master", "local[2]", "-np", "2", "--", "sh", "-c", wait)
    try:
        standalone.wait_for(lambda: len([*tmp_path.glob("there-*")]) == 2, TIMEOUT_S, "both ranks run")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        standalone.kill(process)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert stderr.rstrip().endswith("ringtrain: stopped by SIGTERM")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert not standalone.alive(str(there))


def test_slots_that_do_not_come_are_told_in_time(cluster: standalone.Cluster) -> None:
    ended = launch("--master", cluster.master, "-np", "3", "--start-timeout", "5", "--", "true")
    assert ended.returncode == 2
    said = f"ringtrain: got 2 of 3 slots from Spark at {cluster.master} in 5 s, expected one for each rank"
    assert last_line(ended).startswith(said), ended.stderr


def no_java(folder: Path) -> dict[str, str]:
    for program in ("sh", "env"):
        (folder / program).symlink_to(f"/bin/{program}")
    return {"PATH": str(folder), "JAVA_HOME": ""}


def no_pyspark(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['pyspark'] = None\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


BAD: dict[str, tuple[list[str], Any, str]] = {
    "more ranks than slots": (
        ["--master", "local[2]", "-np", "4"],
        None,
        "got -np 4, but Spark's master local[2] has 2 slots",
    ),
    "no number of ranks": (["--master", "spark://host:7077"], None, "got no -np"),
    "no ranks": (["--master", "local[2]", "-np", "0"], None, "got -np 0, expected 1 rank or more"),
    "hosts": (["-H", "localhost:2", "-np", "2"], None, "got hosts with --launcher spark"),
    "a setting that is none": (["-np", "1", "--spark-conf", "cores=2"], None, "got --spark-conf 'cores=2', expected"),
    "a subnet": (["-np", "1", "--subnet", "10.0.0.0/8"], None, "got --subnet, but Spark places its ranks"),
    "no Java": (["--master", "local[1]", "-np", "1"], no_java, "no java on PATH"),
    "no Java at JAVA_HOME": (["--master", "local[1]", "-np", "1"], lambda _: {"JAVA_HOME": "/no"}, "got JAVA_HOME=/no"),
    "no pyspark": (["--master", "local[1]", "-np", "1"], no_pyspark, "pip install 'ringtrain[spark]'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_spark_starts(name: str, tmp_path: Path) -> None:
    words, lacks, said = BAD[name]
    ended = launch(*words, "--", "true", **(lacks(tmp_path) if lacks else {}))
    assert ended.returncode == 2
    assert said in ended.stderr
    assert re.fullmatch("ringtrain: [^\n]+\n", ended.stderr), ended.stderr
