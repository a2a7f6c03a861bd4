"""Parts of timelines, merged: Horovod's torn list, and ends of what began before it was written."""

from __future__ import annotations

import json
from pathlib import Path

from ringtrain.monitor import trace


def test_horovods_list_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    about = {"rank": 0, "host": "near", "offset_s": 0.0, "error_s": 0.0, "gradients": []}
    (tmp_path / "rank-0.jsonl").write_text(f"{json.dumps(about)}\n[7, [100, 101, 102, 103, 104], [], []]\n[8, [10")
    listed = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 99_000_000}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a [0] {tensor}"}},
        {"ph": "E", "ts": 1_000_000, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 2_500_000, "pid": 1},
        {"ph": "i", "name": "CYCLE_START", "ts": 2_600_000, "s": "g"},
        {"ph": "E", "ts": 3_000_000, "pid": 1},
    ]
    (tmp_path / trace.HOROVOD).write_text(json.dumps(listed)[:-1] + ', {"ph": "B", "na')
    assert trace.merge(tmp_path, tmp_path / "out" / "all.json") == 1
    events = json.loads((tmp_path / "out" / "all.json").read_text())["traceEvents"]
    own = [(event["ph"], event["ts"], event["tid"]) for event in events if event.get("cat") == "horovod"]
    assert [(kind, at) for kind, at, _ in own] == [("B", 1_500_000), ("i", 1_600_000), ("E", 2_000_000)]
    assert own[0][2] == own[2][2] != own[1][2]
    phases = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("name") in trace.PHASES]
    assert phases == [(name, 1_000_000 * at, 1_000_000) for at, name in enumerate(trace.PHASES)]
