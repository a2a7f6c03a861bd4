"""ringtrain tune, a short one: that it ends in its time, and that what it writes trains."""

from __future__ import annotations

import json
import re

import pytest
from launching import BIN, ROOT, run

pytestmark = pytest.mark.launch

BUDGET = "1h"  # far above what this takes


def test_every_candidate_is_decided_and_the_toml_trains(tmp_path):
    small = ["--data.name", "synthetic", "--data.num-samples", 512, "--data.image-size", 8, "--model.name", "mlp"]
    train = [*small, "--train.batch-size", 16, "--run.directory", tmp_path / "runs", "--run.name", "tuned"]
    only = ["--only", "groups,compression", "--allow-compression", "--budget", BUDGET]
    argv = [BIN / "ringtrain", "tune", "-H", "localhost:2", *only, "--out", tmp_path / "tuned.toml", "--", *train]
    ended = run(0, [str(word) for word in argv], 600, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "of 3600 s: as it was" in ended.stderr
    candidates = ["hvd.groups=1", "hvd.groups=2", "hvd.compression=fp16", "hvd.local_steps=8"]
    if not re.search(r"^ *groups .* kept", ended.stdout, re.M):  # groups that were faster do not go with it
        candidates.append("hvd.compression=powersgd:4")
    for candidate in candidates:
        assert re.search(rf"^ *(groups|compression) +{candidate} .*(kept|certain|better)", ended.stdout, re.M)
    line = ended.stdout.splitlines()[-1]
    assert re.search(r"ringtrain launch --hosts localhost:2 .*-- python -m ringtrain.train --config ", line)
    assert f"#   {line}" in (tmp_path / "tuned.toml").read_text().splitlines()[:5]
    told = ["--config", tmp_path / "tuned.toml", "--train.epochs", "1"]
    told += ["--hvd.compression", "none", "--hvd.groups", "2"]
    trained = run(2, ["python", "-m", "ringtrain.train", *map(str, told)], 300, warm=True)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    summary = json.loads((tmp_path / "runs" / "tuned" / "summary.json").read_text())
    assert summary["in_sync"] and summary["config"]["hvd"]["groups"] == 2


def test_a_script_is_tuned_by_short_starts_and_launched_with_what_was_chosen(tmp_path):
    """One candidate. Whichever was faster: a file with settings is launched in any case."""
    script = ["python", ROOT / "tests" / "ring" / "own_trial.py", "--epochs", "1", "--rows", "20000"]
    only = ["--only", "ranks", "--budget", BUDGET, "--out", tmp_path / "tuned.json"]
    argv = [str(word) for word in [BIN / "ringtrain", "tune", "-H", "localhost:2", *only, "--", *script]]
    ended = run(0, argv, 600, warm=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    decided = re.search(r"^ *ranks +-np 1 .*(kept|certain)", ended.stdout, re.M)
    assert decided
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert tuned["by"] == "ringtrain tune" and len(tuned["measured"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]  # measurements leave nothing behind
    tuned["options"] = {"hvd.groups": 2}
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    line = ended.stdout.splitlines()[-1].split()
    launched = run(0, [BIN / "ringtrain", *line[1:]], 300, warm=True, cwd=tmp_path)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    assert "hvd.groups=2 (hvd.groups from ringtrain tune)" in launched.stdout
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    content = json.loads(summary.read_text())
    assert content["in_sync"] and content["config"]["hvd"]["groups"] == 2
    assert content["num_ranks"] == (1 if decided[1] == "kept" else 2)
