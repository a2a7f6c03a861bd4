"""Matrices that PowerSGD sends as factors."""

from __future__ import annotations

from ringtrain.hvd import Compression


def test_matrices_that_become_smaller() -> None:
    powersgd = Compression.powersgd
    assert powersgd(4).matrix_of((5, 5, 32, 64)) == (800, 64)
    assert powersgd(4).matrix_of((3136, 1024)) == (3136, 1024)
    assert [powersgd(4).matrix_of(shape) for shape in ((64,), (1024, 2), ())] == [None] * 3
    assert powersgd(8).matrix_of((1024, 10)) is None
    assert powersgd(8, min_ratio=1.0).matrix_of((1024, 10)) == (1024, 10)
    assert powersgd(7, min_ratio=0.0).matrix_of((6, 6)) is None
