"""Measurements are summed up as medians and spreads, and ratios are those of neighbours in time."""

from __future__ import annotations

import json

from ringtrain.lab import stats


def test_ratios_are_of_turns_and_not_of_medians():
    """While the machine slows down by half, the ratio of the two stays what it is."""
    first, second = [10.0, 8.0, 6.0, 5.0], [20.0, 16.0, 12.0, 10.0]
    assert stats.ratios(first, second) == stats.Spread(0.5, 0.5, 0.5, 4)
    assert stats.ratios(first, second[::-1]).p10 < 0.5


def test_what_is_written_says_where_it_was_measured(tmp_path):
    path = tmp_path / "new" / "train.json"
    stats.write(path, {"turns": 3}, {"images_per_s": stats.Spread.of([1.0, 2.0])})
    record = json.loads(path.read_text())
    assert record["results"]["images_per_s"]["median"] == 1.5
    assert record["cores"] >= 1 and "numpy" in record["versions"]
