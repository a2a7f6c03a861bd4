"""ringtrain compare: in turns, killed, gone on with, beside a strategy that fails; under the real launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from launching import BIN, ROOT, run, warm_env

from ringtrain.lab import jobs
from ringtrain.monitor import journal

pytestmark = pytest.mark.launch

HERE = Path(__file__).parent
EPOCHS, BATCH, SAMPLES = 16, 16, 1437 // 32 * 32
STRATEGIES = "ring,towers:reduction=all,towers:controller=gpu:0"
TIMEOUT_S = 600  # far above what anything here takes
ENV = {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}


def command(folder: Path, *words: object) -> list[str]:
    own = ["--strategies", STRATEGIES, "--budget", f"accuracy={EPOCHS / 20},epochs=20", "-np", 2, "-H", "localhost:2"]
    train = ["--run.directory", folder, "--train.batch-size", BATCH, "--train.callbacks", "odd_callbacks:LocalAccuracy"]
    return [str(word) for word in [BIN / "ringtrain", "compare", *own, "--seeds", 2, *words, "--", *train]]


def starts_of(own: Path) -> list[dict]:
    return [event for event in journal.read(own) if event["event"] == "start"]


def kill_when(path: Path, argv: list[str]) -> None:
    """Starts a comparison, kills it with SIGKILL when a run has a checkpoint, and waits for what it had started."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **warm_env(ENV["PYTHONPATH"])}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as comparison:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not list(path.glob("checkpoints/step-*")):
                assert comparison.poll() is None and time.monotonic() < deadline, comparison.communicate()[1]
                time.sleep(0.01)
        finally:
            comparison.kill()
            comparison.communicate()
    while True:
        with jobs.held(path.parent / "lock") as lock:
            if lock is not None:
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_runs_take_turns_and_what_is_finished_is_not_done_again(tmp_path):
    """Rank 0's accuracy reaches the target after 16 epochs, rank 1's at once: all go by rank 0's."""
    folder = tmp_path / "compare-digits"
    ring, towers = (folder / f"{name}-0" for name in ("ring", "towers-reduction-all"))
    kill_when(towers, command(tmp_path))
    before = {path: path.read_bytes() for path in ring.rglob("*") if path.is_file()}
    assert jobs.is_done(ring) and not jobs.is_done(towers)

    files = {name: tmp_path / f"compared.{name}" for name in ("json", "png", "html")}
    words = [word for pair in zip(("--out", "--plot", "--html"), files.values(), strict=True) for word in pair]
    ended = run(0, command(tmp_path, *words), TIMEOUT_S, env=ENV, warm=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    begun = re.findall(r"^compare: (\S+), seed (\d): /", ended.stderr, re.MULTILINE)
    other, failing = STRATEGIES.split(",")[1:]
    assert begun == [(other, "0"), (failing, "0"), ("ring", "1"), (other, "1")]
    assert {path: path.read_bytes() for path in ring.rglob("*") if path.is_file()} == before
    assert [start["global_step"] for start in starts_of(towers)] == [0]  # begun anew

    record = json.loads(files["json"].read_text())
    assert record["options"]["copies"] == 2 and record["machine"]["versions"]["keras"]
    runs = {(one["strategy"], one["seed"]): one for one in record["results"]["runs"]}
    for one in (one for one in runs.values() if "error" not in one):
        assert one["stopped_by"] == "train.target_accuracy" and len(one["points"]) == EPOCHS
        assert one["points"][-1]["samples"] == one["to_target_samples"] == EPOCHS * SAMPLES
        times = [point["train_s"] for point in one["points"]]
        assert times == sorted(times) and one["to_target_s"] == times[-1] and 0 <= one["waiting_share"] < 1
        summary = json.loads((Path(one["folder"]) / "summary.json").read_text())
        assert summary["in_sync"] and summary["numbers"]["num_ranks"] == 2
    for seed in (0, 1):  # the same samples, weights and updates
        assert runs["ring", seed]["checksum"] == runs[other, seed]["checksum"]
    assert runs["ring", 0]["checksum"] != runs["ring", 1]["checksum"]
    weights = 64 * 100 + 100 + 100 * 10 + 10
    assert [runs[name, 0]["bytes_per_update"] for name in ("ring", other)] == [4 * weights, 0]
    failed = record["results"]["strategies"][failing]
    assert failed["runs"] == 0 and "strategy.controller: got gpu:0, this run has 0 GPUs" in failed["errors"][0]
    assert record["results"]["strategies"]["ring"]["images_per_s"]["repeats"] == 2

    assert failed["errors"][0] in ended.stdout and "s to 80 %" in ended.stdout and "staleness" not in ended.stdout
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert (
        failed["errors"][0] in page and "samples seen" in page and not re.search(r"https?:|\bsrc=|None|\bnan\b", page)
    )

    # A run that has ended by its target stays ended; and figures of another number of copies are not mixed in.
    train = ["python", "-m", "ringtrain.train", "--config", towers / "config.toml"]
    again = run(0, train, TIMEOUT_S, env=ENV, warm=True)
    assert again.returncode == 0, again.stderr
    assert json.loads((towers / "summary.json").read_text())["global_step"] == runs[other, 0]["global_step"]
    argv = [word if word != "2" else "1" for word in command(tmp_path)]
    refused = run(0, argv, TIMEOUT_S, env=ENV)
    assert refused.returncode == 2 and "holds a comparison whose -np is 2, got 1" in refused.stderr
