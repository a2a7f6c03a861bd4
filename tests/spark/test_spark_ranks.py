"""ringtrain launch --launcher spark: ranks on real executors, their ends, and what is refused in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import standalone
from launching import BIN, ROOT

TIMEOUT_S = 400


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


@dataclass(frozen=True)
class Job:
    """A launch that has been started."""

    process: subprocess.Popen[str]
    folder: Path

    def end(self) -> tuple[int, str, str]:
        """Waits for its end: exit code, standard output and standard error."""
        try:
            stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            standalone.kill(self.process)
        return self.process.returncode, stdout, stderr


PREPARED = """

def prepared(spark):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = [(int(n >= 296), (image / 16).tolist(), int(labels[n])) for n, image in enumerate(images)]
    frame = spark.createDataFrame(rows, "fold int, pixels array<float>, label long")
    frame.repartition(3).write.parquet({path!r})
    return digits(spark)
"""


def test_trains_on_rows_of_a_data_frame_on_a_cluster(cluster: standalone.Cluster, tmp_path: Path) -> None:
    """A GPU for each rank as well, which here is but an address: TensorFlow finds none, and computes on the CPU."""
    path = str(tmp_path / "digits.parquet")
    of_page = re.search(r"^def digits\(spark\):\n.*?(?=^```)", (ROOT / "docs/clusters.md").read_text(), re.M | re.S)[0]
    assert "/shared/digits.parquet" in of_page
    (tmp_path / "rows.py").write_text(of_page.replace("/shared/digits.parquet", path) + PREPARED.format(path=path))
    gpus = ["spark.executor.resource.gpu.amount=1", "spark.task.resource.gpu.amount=1", "spark.executor.cores=1"]
    settings = [word for setting in (*gpus, "spark.executor.memory=512m") for word in ("--spark-conf", setting)]
    tell = 'echo "rank $HOROVOD_RANK sees $CUDA_VISIBLE_DEVICES, $(pwd)"; unset CUDA_VISIBLE_DEVICES; exec "$@"'
    train = ["python", "-m", "ringtrain.train", "--data.name", "spark", "--train.epochs", "20"]
    started = start(
        *("--master", cluster.master, "-np", "2", "--spark-data", "rows:prepared", *settings),
        *("--start-timeout", TIMEOUT_S),  # a machine that is busy with other tests starts Spark slowly
        *("--output", tmp_path / "logs", "--", "sh", "-c", tell, "sh", *train, "--run.name", "on-spark"),
        cwd=tmp_path,
    )
    code, stdout, stderr = Job(started, tmp_path).end()
    assert code == 0, stderr
    assert "2 ranks in step: gradients averaged" in stdout
    summary = json.loads((tmp_path / "runs" / "on-spark" / "summary.json").read_text())
    assert (summary["numbers"]["num_train"], summary["numbers"]["num_test"]) == (1501, 296)
    assert summary["test_accuracy"] > 0.85
    for rank in (0, 1):
        logged = (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text()
        assert re.search(rf"rank {rank} sees (5,7|7,5), {tmp_path}\n", logged)
        assert f"[{rank}]<stdout>:rank {rank} sees" in stdout


@pytest.fixture(scope="module")
def jobs(cluster: standalone.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Jobs that need Spark to start, which takes its time: all at once."""
    folder = tmp_path_factory.mktemp("jobs")
    fails = f'if [ "$HOROVOD_RANK" = 1 ]; then echo why >&2; exit 3; fi; sh -c "sleep 600" {folder}/sleeper; true'
    saves = f'trap "touch {folder}/saved-$HOROVOD_RANK; exit 138" USR1; touch {folder}/there-$HOROVOD_RANK'
    local = ["--master", "local[2]", "-np", "2", "--", "sh", "-c"]
    waits = ["--master", cluster.master, "-np", "3", "--start-timeout", "60", "--", "true"]
    words = {"fails": [*local, fails], "saves": [*local, f"{saves}; while :; do sleep 0.05; done"], "waits": waits}
    started = {name: Job(start(*each), folder) for name, each in words.items()}
    yield started
    for job in started.values():
        standalone.kill(job.process)


def test_the_first_failure_ends_the_job_with_its_exit_code_and_is_said_last(jobs: dict[str, Job]) -> None:
    code, _, stderr = jobs["fails"].end()
    assert code == 3, stderr
    said = r"ringtrain: rank 1 on \S+ exited first, with exit code 3; its last lines:\n  why\n$"
    assert re.search(said, stderr)
    assert not standalone.alive(f"{jobs['fails'].folder}/sleeper")


def test_sigterm_lets_ranks_save(jobs: dict[str, Job]) -> None:
    job = jobs["saves"]
    standalone.wait_for(lambda: len([*job.folder.glob("there-*")]) == 2, TIMEOUT_S, "both ranks run")
    job.process.send_signal(signal.SIGTERM)
    code, _, stderr = job.end()
    assert code == 128 + signal.SIGTERM, stderr
    assert stderr.rstrip().endswith("ringtrain: stopped by SIGTERM")
    assert sorted(path.name for path in job.folder.glob("saved-*")) == ["saved-0", "saved-1"]
    assert not standalone.alive(f"{job.folder}/there")


def test_slots_that_do_not_come_are_told_in_time(cluster: standalone.Cluster, jobs: dict[str, Job]) -> None:
    code, _, stderr = jobs["waits"].end()
    assert code == 2
    said = rf"ringtrain: got [012] of 3 slots from Spark at {cluster.master} in 60 s, expected one for each rank.*\n$"
    assert re.search(said, stderr), stderr


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
    "another launcher": (
        ["--launcher", "horovodrun-gloo", "--master", "local[2]"],
        None,
        "got --master with --launcher horovodrun-gloo, expected --launcher spark",
    ),
    "a subnet": (["-np", "1", "--subnet", "10.0.0.0/8"], None, "got --subnet, but Spark places its ranks"),
    "no Java": (["--master", "local[1]", "-np", "1"], no_java, "no java on PATH"),
    "no Java at JAVA_HOME": (["--master", "local[1]", "-np", "1"], lambda _: {"JAVA_HOME": "/no"}, "got JAVA_HOME=/no"),
    "no pyspark": (["--master", "local[1]", "-np", "1"], no_pyspark, "pip install 'ringtrain[spark]'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_spark_starts(name: str, tmp_path: Path) -> None:
    words, lacks, said = BAD[name]
    code, _, stderr = Job(start(*words, "--", "true", **(lacks(tmp_path) if lacks else {})), tmp_path).end()
    assert code == 2
    assert said in stderr
    assert re.fullmatch("ringtrain: [^\n]+\n", stderr), stderr
