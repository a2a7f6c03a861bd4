"""The training job under the real launcher: what it learns, writes, shows, and how it refuses."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sys
from pathlib import Path

import launching
import numpy as np
import pytest

from ringtrain import config_io
from ringtrain.config import Config, DataConfig
from ringtrain.data.sources import DEBIAN_FOLDER
from ringtrain.monitor import goodput, journal

TRAIN = [sys.executable, "-m", "ringtrain.train"]
TIMEOUT_S = 600  # far above what anything here takes: for machines with other work to do
CONFIGS = launching.ROOT / "configs"
SMALL = ["--data.name", "synthetic", "--data.num-samples", "408", "--data.image-size", "8", "--train.epochs", "2"]
ODD = {"PYTHONPATH": str(Path(__file__).parent)}
SUMMARY_KEYS = {
    *("test_accuracy", "test_loss", "images_per_s", "num_ranks", "global_step", "in_sync", "checksum", "versions"),
    *("hosts", "config", "numbers", "git_revision", "started", "fit_s", "check_s", "stopped_by", "resumed_from"),
    *("skipped_samples", "metrics", "evaluate_s", "saves", "restarts", "restart_causes", "ranks", "strategy"),
    *("num_parameters", "samples", "frozen", "frozen_as_compiled"),
}


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def said(ended, stream: str = "stdout") -> list[str]:
    """Lines that ranks wrote, without the launcher's prefix and without its own lines."""
    lines = getattr(ended, stream).splitlines()
    return [line.partition(f"<{stream}>:")[2] for line in lines if f"<{stream}>:" in line]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The main job, at two ranks, and the folder that it was given."""
    folder = tmp_path_factory.mktemp("digits")
    options = ["--config", CONFIGS / "digits.toml", "--run.directory", folder, "--run.name", "main"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, launcher="mpi")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended, folder / "main"


@pytest.mark.quick
def test_digits_are_learned_and_the_summary_is_complete(digits):
    _, folder = digits
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["test_accuracy"] > 0.97
    assert summary["num_ranks"] == 2 and len(summary["hosts"]) == 2
    assert summary["in_sync"] is True and len(summary["checksum"]) == 16
    assert summary["global_step"] == summary["numbers"]["num_steps"] == 30 * (1437 // 64)
    assert summary["images_per_s"] > 0
    assert {"ringtrain", "tensorflow", "keras", "horovod", "python"} <= set(summary["versions"])


@pytest.mark.quick
def test_files_are_where_they_are_promised(digits):
    _, folder = digits
    steps = 30 * (1437 // 64)
    events = {name for name in files_in(folder) if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(events) == 1  # rank 0's alone
    checkpoints = {name for name in files_in(folder) if name.startswith("checkpoints/")}
    kept = sorted({Path(name).parent.name for name in checkpoints})
    assert kept[-3:] == [f"step-{step:08d}" for step in (steps - 44, steps - 22, steps)]
    assert len(kept) <= 4  # the newest three and the best
    assert checkpoints == {f"checkpoints/{n}/{f}" for n in kept for f in ("state.npz", "ranks.npz", "manifest.json")}
    assert files_in(folder) - events - checkpoints == {
        *(".lock", "config.toml", "metrics.jsonl", "steps.jsonl", "summary.json", "model.keras"),
        *("logs/rank-0.log", "logs/rank-1.log", "logs/journal-0.jsonl", "logs/journal-1.jsonl"),
    }
    assert [path.name for path in folder.parent.iterdir()] == ["main"]


def test_configuration_in_the_folder_starts_the_same_run(digits):
    _, folder = digits
    config = config_io.read_toml(folder / "config.toml")
    assert config.run.name == "main"
    assert config.model == config_io.read_toml(CONFIGS / "digits.toml").model
    assert "# global_batch_size = 64" in (folder / "config.toml").read_text().splitlines()


def test_metrics_of_every_epoch_once(digits):
    _, folder = digits
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert [record["epoch"] for record in records] == list(range(1, 31))
    assert [record["global_step"] for record in records] == [22 * epoch for epoch in range(1, 31)]
    assert records[-1]["test_accuracy"] == summary["test_accuracy"]
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(record["images_per_s"] > 0 for record in records)


def test_the_journal_tells_where_the_time_went(digits):
    """The parts add up to the clock; what other files say of saves and steps agrees with them."""
    _, folder = digits
    events = journal.read(folder)
    of_rank_0 = [event for event in events if event["rank"] == 0]
    spent = goodput.of(events)
    assert spent is not None
    assert spent.total_s == pytest.approx(of_rank_0[-1]["time_s"] - of_rank_0[0]["begun_s"], rel=0.01)
    summary = json.loads((folder / "summary.json").read_text())
    assert spent.seconds["save"] == pytest.approx(summary["saves"]["stall_s"], rel=0.5, abs=0.5)
    assert 0 < spent.seconds["steps"] + spent.seconds["input"] < summary["fit_s"]
    assert spent.seconds["repeated"] == spent.seconds["restart"] == spent.seconds["away"] == 0
    assert not any("spent_s" in event for event in events if event["rank"])


def test_tensorboard_can_read_the_scalars(digits):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = digits
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"loss", "accuracy", "test_loss", "test_accuracy", "learning_rate", "images_per_s"} <= set(
        events.Tags()["tensors"]
    )
    assert [event.step for event in events.Tensors("test_accuracy")] == [22 * epoch for epoch in range(1, 31)]


@pytest.mark.quick
def test_terminal_shows_the_proof_last_and_no_chatter(digits):
    ended, folder = digits
    lines = said(ended)
    checksum = json.loads((folder / "summary.json").read_text())["checksum"]
    assert lines[-1] == f"2 ranks in step: gradients averaged, weights and optimizer equal {checksum}"
    assert any(line.startswith("test accuracy") and "%" in line for line in lines)
    assert any(line.startswith("global batch") and "64 = 32 x 2" in line for line in lines)
    assert any(line.startswith("files") and str(folder) in line for line in lines)
    assert {line.partition("]")[0] for line in ended.stdout.splitlines() if line} == {"[1,0"}  # rank 0 alone speaks
    assert said(ended, "stderr") == []
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all(f"rank {rank} of 2" in log for rank, log in enumerate(logs))


def test_in_a_real_terminal_the_bar_moves_and_the_launcher_adds_no_prefix(tmp_path):
    horovodrun = [launching.BIN / "horovodrun", "-np", "2", "-H", "localhost:2"]
    line = shlex.join(map(str, [*horovodrun, *TRAIN, *SMALL, "--run.directory", tmp_path]))
    ended = launching.run(0, ["script", "-qec", line, "/dev/null"], timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout
    assert "[1,0]<stdout>" not in ended.stdout
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ended.stdout)
    assert shown != ended.stdout
    assert re.search(r"epoch 2/2 ━+ +10/10 steps", shown)
    assert "2 ranks in step: gradients averaged" in ended.stdout


@pytest.mark.quick
def test_exported_model_is_plain_keras_with_the_accuracy_it_was_said_to_have(digits):
    import keras

    from ringtrain import data

    _, folder = digits
    summary = json.loads((folder / "summary.json").read_text())
    model = keras.models.load_model(folder / "model.keras")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    test = data.source(DataConfig(name="digits"))().test
    loss, accuracy = model.evaluate(test.inputs, test.labels, verbose=0)
    assert accuracy == pytest.approx(summary["test_accuracy"], abs=1e-6)
    assert loss == pytest.approx(summary["test_loss"], abs=1e-5)


def test_another_run_under_a_taken_name_is_refused_and_the_old_run_stays(digits):
    _, folder = digits

    def written_ns() -> dict[str, int]:
        return {name: (folder / name).stat().st_mtime_ns for name in files_in(folder) - {".lock"}}

    before = written_ns()
    options = ["--run.directory", folder.parent, "--run.name", "main"]
    ended = launching.run(2, [*TRAIN, *SMALL, *options], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 2
    complaint = "was made with data.name = 'digits', this run has 'synthetic': use the same value, or give the run"
    assert sum(complaint in line for line in said(ended, "stderr")) == 1
    assert written_ns() == before


@pytest.mark.quick
def test_one_rank_without_launcher(tmp_path):
    ended = launching.run(0, [*TRAIN, *SMALL, "--run.directory", tmp_path], timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("synthetic-20")
    summary = json.loads((folder / "summary.json").read_text())
    last = ended.stdout.splitlines()[-1]
    assert last == f"1 rank: nothing to compare, weights and optimizer {summary['checksum']}"
    assert ended.stderr == ""
    assert (folder / "logs" / "rank-0.log").exists() and summary["num_ranks"] == 1


@pytest.mark.quick
def test_two_ranks_over_gloo_learn_what_one_rank_with_the_big_batch_learns(tmp_path):
    """The whole path: shards, averaged gradients, and evaluation of 51 samples, which two ranks cannot halve."""
    common = [*TRAIN, *SMALL, "--optimizer.learning-rate-scaling", "none", "--run.directory", tmp_path]
    two = [*common, "--train.batch-size", "16", "--run.name", "two"]
    one = [*common, "--train.batch-size", "32", "--run.name", "one"]
    ended = launching.run(2, two, timeout_s=TIMEOUT_S, launcher="gloo", warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert launching.run(0, one, timeout_s=TIMEOUT_S, warm=True).returncode == 0
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for alone, together in zip(*records, strict=True):
        for metric in ("loss", "accuracy", "test_loss", "test_accuracy"):
            assert together[metric] == pytest.approx(alone[metric], abs=2e-5), metric


def test_own_model_and_data_of_the_example(tmp_path):
    own = ["--model.name", "examples.own_model:model", "--data.name", "examples.own_model:data"]
    options = ["--train.epochs", "25", "--schedule.warmup-epochs", "2"]
    options += ["--train.callbacks", "examples.own_callbacks:WeightNorm"]
    folder = ["--run.directory", tmp_path, "--run.name", "own"]
    ended = launching.run(2, [*TRAIN, *own, *options, *folder], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.95 and summary["in_sync"] is True
    records = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["weight_norm"] > records[0]["weight_norm"] > 0
    rates = [record["learning_rate"] for record in records]
    base = Config().optimizer.learning_rate
    assert base < rates[0] < rates[1] < rates[2] == pytest.approx(2**0.5 * base) == pytest.approx(rates[-1])


def test_a_model_that_cannot_be_saved_any_more_leaves_weights_and_summary(tmp_path):
    own = ["--model.name", "odd_model:serializable_untrained", "--run.directory", tmp_path, "--run.name", "own"]
    ended = launching.run(0, [*TRAIN, *SMALL, *own], timeout_s=TIMEOUT_S, env=ODD, warm=True)
    assert ended.returncode == 2
    assert "model.keras: cannot be written: TypeError: cannot serialize a lock: the weights are in" in ended.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["global_step"] == summary["numbers"]["num_steps"] and "a lock" in summary["not_exported"]
    files = files_in(tmp_path / "own")
    assert {"model.weights.h5", "metrics.jsonl"} < files and "model.keras" not in files
    assert any(name.endswith(f"step-{summary['global_step']:08d}/manifest.json") for name in files)


def test_fashion_mnist_cnn_over_84_percent_after_an_epoch(tmp_path):
    if not (DEBIAN_FOLDER / "fashion-mnist").exists():
        pytest.skip(f"Debian's package dataset-fashion-mnist is not installed: no {DEBIAN_FOLDER}/fashion-mnist")
    options = ["--config", CONFIGS / "fashion_mnist.toml", "--run.directory", tmp_path, "--run.name", "fashion"]
    options += ["--train.epochs", "1"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "fashion" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.84
    assert summary["config"]["model"]["name"] == "cnn"


# Bad input: one clear line, exit code 2, nothing written.


def corrupt_mnist(folder: Path) -> Path:
    """Four IDX files, one of them cut short."""
    folder.mkdir()
    for name, shape in (("train-images-idx3", (9, 4, 4)), ("train-labels-idx1", (9,)), ("t10k-images-idx3", (3, 4, 4))):
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        (folder / f"{name}-ubyte").write_bytes(header + bytes(int(np.prod(shape))))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3, 1])))
    return folder


BAD_INPUT = {
    "unknown model": (
        ["--model.name", "ccn"],
        "model.name: got ccn, did you mean cnn? (or module:function for your own)",
    ),
    "unknown data": (["--data.name", "digit"], "data.name: got digit, did you mean digits? "),
    "unknown option": (
        ["--train.epoch", "3"],
        "command line: unknown option --train.epoch: did you mean --train.epochs?",
    ),
    "wrong type": (["--train.epochs", "many"], "command line: argument --train.epochs: invalid int value: 'many'"),
    "unknown key": (
        ["--config", "{folder}/bad.toml"],
        "{folder}/bad.toml: unknown key train.epoch: did you mean train.epochs?",
    ),
    "no file": (["--config", "{folder}/none.toml"], "{folder}/none.toml: cannot be read: No such file or directory"),
    "large batch": (["--train.batch-size", "2000"], "train.batch_size: 2000 on "),
    "missing data": (
        ["--data.name", "mnist", "--data.dir", "{folder}/none"],
        "{folder}/none/train-images-idx3-ubyte: not found, nor the same with .gz",
    ),
    "corrupt data": (
        ["--data.name", "mnist", "--data.dir", "{folder}/mnist"],
        "{folder}/mnist/t10k-labels-idx1-ubyte.gz: truncated: got 9 bytes, expected 11",
    ),
    "unwritable": (["--run.directory", "{folder}/bad.toml/runs"], "{folder}/bad.toml/runs/"),
    "unwritable /proc": (["--run.directory", "/proc/runs"], "/proc/runs/"),
}


def bad_input(folder: Path, case: str) -> tuple[list[str], str]:
    (folder / "bad.toml").write_text("[train]\nepoch = 3\n")
    corrupt_mnist(folder / "mnist")
    options, message = BAD_INPUT[case]
    return [option.format(folder=folder) for option in options], "ringtrain: " + message.format(folder=folder)


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """By case: the folder, its files before, the message that is expected, and the end; all in one start."""
    cases, lines = {}, []
    for case in BAD_INPUT:
        folder = tmp_path_factory.mktemp("refused")
        options, message = bad_input(folder, case)
        cases[case] = (folder, files_in(folder), message)
        lines.append((folder, *options))
    ended = launching.train_each(lines, TIMEOUT_S)
    return {case: (*known, end) for (case, known), end in zip(cases.items(), ended, strict=True)}


def expect_refusal(folder, before, message, ended):
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(message)
    assert ended.stdout == ""
    assert files_in(folder) == before and not (folder / "runs").exists()


@pytest.mark.quick
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case, refused):
    expect_refusal(*refused[case])


@pytest.mark.quick
def test_bad_input_ends_a_process_of_its_own_alike(tmp_path):
    options, message = bad_input(tmp_path, "unknown model")
    before = files_in(tmp_path)
    ended = launching.run(0, [*TRAIN, *options], timeout_s=TIMEOUT_S, cwd=tmp_path)
    expect_refusal(tmp_path, before, message, ended)


def test_no_network_is_said_with_what_to_do(tmp_path):
    nowhere = {"https_proxy": "http://127.0.0.1:9", "KERAS_HOME": str(tmp_path), "HOME": str(tmp_path)}
    options = ["--data.name", "mnist", "--run.directory", tmp_path / "runs"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, env=nowhere)
    assert ended.returncode == 2
    (line,) = (line for line in said(ended, "stderr") if line.strip())
    assert line.startswith("ringtrain: mnist: not on this host, and the download failed (")
    assert "--data.dir" in line and not (tmp_path / "runs").exists()


BY_RANK = """
import os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
from ringtrain.train import main
sys.exit(main({options!r}[rank] + ["--run.directory", {runs!r}]))
"""


def refused_by_rank(options: list[list[str]], runs: Path) -> str:
    """Starts each rank with options of its own, and returns the one line with which the job is refused."""
    program = BY_RANK.format(options=options, runs=str(runs))
    ended = launching.run(2, [sys.executable, "-c", program], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 2
    assert not runs.exists()
    (line,) = (line for line in said(ended, "stderr") if line.strip())
    return line


@pytest.mark.quick
def test_what_only_one_rank_misses_ends_all_and_names_it(tmp_path):
    good = corrupt_mnist(tmp_path / "good")
    (good / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 0, 2])))
    options = [["--data.name", "mnist", "--data.dir", str(folder)] for folder in (good, tmp_path / "none")]
    line = refused_by_rank(options, tmp_path / "runs")
    where = f"ringtrain: rank 1 on {os.uname().nodename}: {tmp_path}/none/train-images-idx3-ubyte: not found"
    assert line.startswith(where)


def test_an_error_before_horovod_starts_on_rank_1_alone_is_said_by_rank_1(tmp_path):
    options = [["--data.name", "synthetic"], ["--data.name", "synthetik"]]
    assert refused_by_rank(options, tmp_path / "runs").startswith("ringtrain: data.name: got synthetik, did you mean")


def test_ranks_with_other_data_are_refused_before_they_wait_for_each_other(tmp_path):
    options = [["--data.name", "synthetic", "--data.num-samples", number] for number in ("400", "800")]
    line = refused_by_rank(options, tmp_path / "runs")
    assert line.startswith("ringtrain: rank 1 has data.num_samples 800, rank 0 has 400: ")


UNLIKE = """
import os
import numpy as np

def data():
    inputs = np.full((400, 4), os.environ["OMPI_COMM_WORLD_RANK"] == "1", np.float32)
    labels = np.arange(400) % 2
    return (inputs, labels), (inputs, labels)
"""
FROM_FOLDERS = """
import os, sys
sys.path.insert(0, {folders!r}[int(os.environ["OMPI_COMM_WORLD_RANK"])])
from ringtrain.train import main
sys.exit(main({options!r}))
"""


def test_ranks_with_other_code_or_samples_are_refused(tmp_path):
    for rank, text in enumerate(("", "# changed\n")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "unlike.py").write_text(UNLIKE + text)
    options = ["--data.name", "unlike:data"]
    for folders, what in ((("0", "1"), "module unlike"), (("0", "0"), "test data")):
        program = FROM_FOLDERS.format(folders=[str(tmp_path / folder) for folder in folders], options=options)
        ended = launching.run(2, [sys.executable, "-c", program], timeout_s=TIMEOUT_S, cwd=tmp_path, warm=True)
        assert ended.returncode == 2, ended.stderr
        host = os.uname().nodename
        line = f"ringtrain: rank 1 on {host} has another {what} than rank 0 on {host}: "
        assert [text for text in said(ended, "stderr") if text.startswith(line)], ended.stderr
        assert not (tmp_path / "runs").exists()


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from ringtrain.train import main
sys.exit(main([]))
"""


@pytest.mark.parametrize("name", ["horovod", "tensorflow"])
def test_what_is_not_installed_is_said_with_how_to_get_it(name, tmp_path):
    ended = launching.run(0, [sys.executable, "-c", WITHOUT.format(name=name)], timeout_s=TIMEOUT_S, cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert name in line and line.startswith("ringtrain: ")
    assert "set-up" in line.lower() or "setup" in line.lower() or "install" in line.lower()
    assert list(tmp_path.iterdir()) == []
