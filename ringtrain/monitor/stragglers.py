"""Stragglers: ranks whose own part of a step takes longer than that of the others. Pure, standard library only."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

from ringtrain.monitor.diagnosis import WINDOW_STEPS, Row

MIN_LAG_S = 0.002
"""minimum delay per step of a straggler"""
MIN_LOST_S = 5.0
"""minimum time that a straggler costs without a pause: other load makes any rank slow for a moment"""
PARTS = ("input", "compute", "callbacks")


def stragglers(rows: Collection[Row], factor: float) -> list[tuple[Row, str, float]]:
    """Ranks whose work takes `factor` (0: off) times the others' median, the part that costs most, and the ratio."""
    if not factor or len(rows) < 2 or any(row.times.num_steps < WINDOW_STEPS for row in rows):
        return []
    # Sorted once, since there may be thousands of ranks.
    ordered = {}
    for part in ("own", *PARTS):
        ordered[part] = sorted(_part_s(row, part) for row in rows)
    slow = []
    for row in rows:
        usual_s = _median_of_others(ordered["own"], row.times.own_s)
        if row.times.own_s > max(factor * usual_s, usual_s + MIN_LAG_S):
            lags = {}
            for part in PARTS:
                part_s = _part_s(row, part)
                lags[part] = part_s - _median_of_others(ordered[part], part_s)
            slowest = max(PARTS, key=lags.__getitem__)
            slow.append((row, slowest, row.times.own_s / max(usual_s, 1e-9)))
    return slow


def _part_s(row: Row, part: str) -> float:
    seconds: float = getattr(row.times, f"{part}_s")
    return seconds


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Median of sorted values, excluding `value`."""
    index = bisect.bisect_left(ordered, value)
    num_others = len(ordered) - 1
    low, high = (num_others - 1) // 2, num_others // 2
    if low >= index:  # `value` itself is left out
        low += 1
    if high >= index:
        high += 1
    return (ordered[low] + ordered[high]) / 2


class SlowRanks:
    """Selection of new stragglers: each is returned once, when it has cost the job MIN_LOST_S."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.named: set[int] = set()
        self._since: dict[int, int] = {}

    def look(self, rows: Collection[Row]) -> list[tuple[Row, str, float]]:
        """Returns the stragglers to report now, in the format of `stragglers`."""
        slow = stragglers(rows, self.factor)
        self._since = {row.rank: self._since.get(row.rank, row.own_steps - WINDOW_STEPS) for row, _, _ in slow}
        due = []
        for row, part, times in slow:
            num_steps = row.own_steps - self._since[row.rank]
            lost_s = num_steps * row.times.own_s * (1 - 1 / times)
            if row.rank not in self.named and lost_s >= MIN_LOST_S:
                due.append((row, part, times))
        self.named |= {row.rank for row, _, _ in due}
        return due


def straggler_text(row: Row, part: str, times: float) -> str:
    """Sentence about a straggler."""
    part_s = _part_s(row, part)
    return (
        f"straggler: rank {row.rank} on {row.host} takes {times:.1f} times the other ranks' median per step"
        f" ({1000 * row.times.own_s:.1f} ms, of which {1000 * part_s:.1f} ms in {part}); all ranks wait for it"
    )
