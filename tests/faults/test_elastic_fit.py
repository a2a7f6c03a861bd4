"""Scripts with `ringtrain.fit` in an elastic job: ranks are killed and come back, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import sample_ledger
from launching import BIN, ROOT, run, warm_python

from ringtrain.monitor import goodput, journal
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.for_script import ForScript

TIMEOUT_S = 300
SCRIPT = Path(__file__).parent / "elastic_fit.py"
ENDING = Path(__file__).parent / "ending_fit.py"
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)])}


def told(folder: Path, **options: object) -> dict[str, str]:
    return ForScript(by="test", options={"run.directory": str(folder), **options}).variables()


def elastic(
    folder: Path, words: list[str | Path], num_ranks: int = 3, cooldown_s: tuple[int, int] = (1, 2), **options: object
) -> subprocess.CompletedProcess[str]:
    """Starts a script on ranks that may be lost. `cooldown_s`: until a lost one comes back; (0, 0): never."""
    launch = [BIN / "ringtrain", "launch", "--elastic", "-H", f"localhost:{num_ranks}", "--min-np", 1]
    folder.mkdir(parents=True, exist_ok=True)
    launch += ["--max-np", num_ranks, "--blacklist-cooldown", *cooldown_s, "--forward", FOR_SCRIPT, "--"]
    ended = run(0, [*launch, *warm_python(), *words], TIMEOUT_S, {**PATH, **told(folder, **options)}, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def changes(folder: Path) -> list[tuple[int, int]]:
    """Ranks before and after each change."""
    found = {event["generation"]: event for event in journal.read(folder) if event["event"] == "resize"}
    return [(event["from"], event["to"]) for event in found.values()]


def test_two_deaths_and_what_comes_back_change_no_bit(tmp_path: Path) -> None:
    """Shuffled rows, dropout, batch normalization, and callbacks with a state."""
    virtual = {"train.virtual_ranks": 4}
    alone = run(0, [sys.executable, SCRIPT, "1"], TIMEOUT_S, told(tmp_path / "alone", **virtual), warm=True)
    (expected,) = re.findall("RESULT (.*)", alone.stdout)
    assert expected.endswith(f"1 120 {[*range(6)]}")

    chaos = "rank=1 step=20 mode=sigkill, rank=0 step=55 mode=sigkill"
    ended = elastic(tmp_path / "elastic", [SCRIPT, "3"], chaos=chaos, **virtual)
    results = [line.partition("RESULT ")[2] for line in ended.stdout.splitlines() if "RESULT" in line]
    assert results and set(results) == {expected}

    run_folder = tmp_path / "elastic" / "run"
    ledger = sample_ledger.ledger(journal.read(run_folder), 120)
    assert ledger.breaches == () and ledger.undone <= 2
    assert changes(run_folder) == [(3, 2), (2, 3), (3, 2), (2, 3)]

    spent = goodput.of(journal.read(run_folder))
    assert spent is not None and spent.num_starts == 1
    assert spent.seconds["start"] > 0 and spent.seconds["away"] == 0


def test_deaths_where_epochs_and_training_end_change_no_bit(tmp_path: Path) -> None:
    """At the end of an epoch, after an agreed stop, and at the end of training; nothing is done twice or forgotten.

    The second rank 0 has the best model of the first, and the last checkpoint the trained weights, not the averages.
    """
    options = {"train.virtual_ranks": 4, "health.agree_every_steps": 1}
    folders = [tmp_path / "alone", tmp_path / "elastic"]
    folders[0].mkdir()
    alone = run(0, [sys.executable, ENDING, folders[0], "0"], TIMEOUT_S, told(folders[0], **options), warm=True)
    chaos = "rank=1 step=46 mode=sigkill"
    ended = elastic(folders[1], [ENDING, folders[1], "1"], 4, (0, 0), chaos=chaos, **options)
    (expected,) = re.findall("RESULT (.*)", alone.stdout)
    assert re.findall("RESULT (.*)", ended.stdout) == [expected]
    assert expected.endswith("[0, 1, 2, 3, 4] 7.59375 [0, 1, 2, 3, 4]")

    assert changes(folders[1] / "run") == [(4, 3), (3, 2), (2, 1)]
    summaries = [json.loads((folder / "run" / "summary.json").read_text()) for folder in folders]
    for key in ("global_step", "stopped_by", "metrics", "checksum"):
        assert summaries[0][key] == summaries[1][key], key
    one, other = (np.load(folder / "run" / "checkpoints" / "step-00000050" / "state.npz") for folder in folders)
    assert {*one} == {*other}
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    lines = [(folder / "log.csv").read_text().splitlines() for folder in folders]
    twice = [*lines[0][:5], *lines[0][4:]]
    assert lines[1] in (lines[0], twice), "epochs that rank 0 wrote are lost; the fourth may be twice"
    one, other = (keras.models.load_model(folder / "best.keras", compile=False).get_weights() for folder in folders)
    for weight, same in zip(one, other, strict=True):
        np.testing.assert_array_equal(weight, same)


def test_the_configured_trainer_loses_a_rank_with_targets_of_any_kind(tmp_path: Path) -> None:
    """With a smaller last batch; weights and metrics are those of one process."""
    words = ["-m", "ringtrain.train", "--data.name", "targets:data", "--model.name", "targets:model"]
    words += ["--model.loss", "mse", "--model.metrics", "mae", "--run.name", "run"]
    words += ["--train.batch-size", "4", "--train.virtual-ranks", "4", "--train.epochs", "4"]
    alone, changed = tmp_path / "alone", tmp_path / "elastic"
    run(0, [sys.executable, *words, "--run.directory", alone], TIMEOUT_S, PATH, warm=True)
    elastic(changed, [*words, "--run.directory", changed, "--chaos", "rank=0 step=9 mode=sigkill"], 2, (0, 0))
    summaries = [json.loads((folder / "run" / "summary.json").read_text()) for folder in (alone, changed)]
    for key in ("checksum", "metrics", "global_step"):
        assert summaries[0][key] == summaries[1][key], key
    assert sample_ledger.ledger(journal.read(changed / "run"), summaries[0]["global_step"]).breaches == ()
    assert changes(changed / "run")[0] == (2, 1)
