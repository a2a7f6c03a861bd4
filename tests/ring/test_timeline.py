"""Timelines of two ranks in one file: one run, looked at in several ways."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from launching import run

from ringtrain import cli
from ringtrain.monitor import trace

STEPS = 40


def spans(events: list[dict[str, Any]], track: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Begin and end, microseconds, by rank and step."""
    tracks = {(e["pid"], e["tid"]): e["args"].get("name") for e in events if e.get("name") == "thread_name"}
    found = [e for e in events if e.get("ph") == "X" and tracks.get((e["pid"], e["tid"])) == track]
    return {(e["pid"], e["args"]["step"]): (e["ts"], e["ts"] + e["dur"]) for e in found if "step" in e.get("args", {})}


def overlapping(events: list[dict[str, Any]], track: str) -> float:
    """The share of steps in which both ranks are in a track at the same time."""
    found = spans(events, track)
    steps = {step for _, step in found}
    pairs = [(found[0, step], found[1, step]) for step in steps if (0, step) in found and (1, step) in found]
    assert len(pairs) >= STEPS / 2
    return sum(max(one[0], two[0]) <= min(one[1], two[1]) for one, two in pairs) / len(pairs)


def merged(folder: Path, out: Path) -> list[dict[str, Any]]:
    assert cli.main(["report", str(folder), "--timeline", str(out)]) == 0
    return json.loads(out.read_text())["traceEvents"]


def test_both_ranks_are_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    words = ["--run.directory", tmp_path, "--run.name", "run", "--train.epochs", 2, "--model.name", "mlp"]
    steps = ["--tracking.timeline-steps", STEPS]
    command = [sys.executable, "-m", "ringtrain.train", *words, *steps]
    ended = run(2, command, 300, {"HOROVOD_TIMELINE": str(out)}, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert sorted(names) == [0, 1] and all(names[rank].startswith(f"rank {rank} on ") for rank in names)
    own = [e for e in events if e.get("cat") == "horovod"]
    assert {e["pid"] for e in own} == {0} and {"ALLREDUCE", "MPI_ALLREDUCE"} <= {e.get("name") for e in own}

    # Every step of every rank with its phases in their order; and the same allreduce on both at the same time.
    whole = spans(events, "steps")
    assert sorted(whole) == [(rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)]
    phases = [e for e in events if e.get("name") in trace.PHASES]
    told = defaultdict(list)
    for event in phases:
        told[event["pid"], event["args"]["step"]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    assert len(told) > 1.8 * STEPS
    for key, parts in told.items():
        assert [name for name, _, _ in parts] == [*trace.PHASES]
        assert whole[key][0] <= parts[0][1] + 1 and parts[-1][2] <= whole[key][1] + 1
    gradients = {
        e["args"]["name"] for e in events if e.get("name") == "thread_name" and "allreduce of" in e["args"]["name"]
    }
    assert len(gradients) == 4
    for track in gradients:
        assert overlapping(events, track) > 0.8, track
    # Clocks that are apart are noticed: the same parts, one of them ten seconds off.
    parts = tmp_path / "run" / trace.PARTS
    assert overlapping(merged(tmp_path / "run", tmp_path / "again.json"), min(gradients)) > 0.8
    own_part = parts / "rank-1.jsonl"
    about, *lines = own_part.read_text().splitlines()
    own_part.write_text("\n".join([json.dumps(json.loads(about) | {"offset_s": 10.0}), *lines]))
    assert overlapping(merged(tmp_path / "run", tmp_path / "off.json"), min(gradients)) == 0

    # What a killed run leaves is merged as far as it goes.
    for path in parts.iterdir():
        text = path.read_text()
        path.write_text(text[: len(text) * 2 // 3])
    torn = merged(tmp_path / "run", tmp_path / "torn.json")
    assert {e["pid"] for e in torn} == {0, 1} and len(events) / 2 < len(torn) < len(events)
