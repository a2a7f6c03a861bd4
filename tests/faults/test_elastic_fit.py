"""Scripts with `ringtrain.fit` in an elastic job: ranks are killed and come back, and nothing else changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from launching import BIN, ROOT, run, warm_python

from ringtrain.monitor import journal
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.for_script import ForScript

TIMEOUT_S = 300
SCRIPT = Path(__file__).parent / "elastic_fit.py"
JOBS = ROOT / "tests" / "matrix" / "jobs.py"


def told(folder: Path, **options: object) -> dict[str, str]:
    return {FOR_SCRIPT: ForScript(by="test", options={"run.directory": str(folder), **options}).to_json()}


def elastic(folder: Path, words: list[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Starts a script on 3 ranks that may be lost."""
    launch = [BIN / "ringtrain", "launch", "--elastic", "-H", "localhost:3", "--min-np", "1", "--max-np", "3"]
    folder.mkdir(parents=True, exist_ok=True)
    launch += ["--blacklist-cooldown", "1", "2", "--forward", FOR_SCRIPT, "--"]
    ended = run(0, [*launch, *warm_python(), *words], TIMEOUT_S, told(folder, **options), cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def changes(folder: Path) -> list[tuple[int, int, int]]:
    """Ranks before and after each change, and steps that were repeated."""
    found = {event["generation"]: event for event in journal.read(folder) if event["event"] == "resize"}
    return [(event["from"], event["to"], event["lost_steps"]) for event in found.values()]


def test_two_deaths_and_what_comes_back_change_no_bit(tmp_path: Path) -> None:
    """Shuffled batches, dropout, batch normalization, and callbacks with a state."""
    virtual = {"train.virtual_ranks": 4}
    alone = run(0, [sys.executable, SCRIPT, "1"], TIMEOUT_S, told(tmp_path / "alone", **virtual), warm=True)
    (expected,) = re.findall("RESULT (.*)", alone.stdout)
    assert expected.endswith(f"1 120 {[*range(6)]}")

    chaos = "rank=1 step=20 mode=sigkill, rank=0 step=55 mode=sigkill"
    ended = elastic(tmp_path / "elastic", [SCRIPT, "3"], chaos=chaos, **virtual)
    results = [line.partition("RESULT ")[2] for line in ended.stdout.splitlines() if "RESULT" in line]
    assert results and set(results) == {expected}

    run_folder = tmp_path / "elastic" / "run"
    ledger = journal.ledger(journal.read(run_folder), 6)
    assert ledger.breaches == () and len(set(ledger.epochs.values())) == 1
    sizes = changes(run_folder)
    assert [(before, after) for before, after, _ in sizes] == [(3, 2), (2, 3), (3, 2), (2, 3)]
    assert all(repeated <= 1 for *_, repeated in sizes)


def test_a_step_of_the_model_s_own_is_undone_as_a_whole(tmp_path: Path) -> None:
    """Two optimizers, of which the second needs what the first has done."""
    elastic(tmp_path, [JOBS, "adversarial"], chaos="rank=0 step=9 mode=sigkill")
    ledger = journal.ledger(journal.read(tmp_path / "adversarial"), 3)
    assert ledger.breaches == () and set(ledger.epochs.values()) == {107}
    assert changes(tmp_path / "adversarial")[0][:2] == (3, 2)
