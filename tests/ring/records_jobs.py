"""Rows of files with `ringtrain.fit`; see run_fit.py."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import OUTPUT, KillAfter, Killed, X, Y, compiled, dense, distance, options

import ringtrain
from ringtrain import hvd
from ringtrain.config.sections import CheckpointConfig
from ringtrain.data.records import RecordRows

NUM = 203
"""rows, with a last, smaller batch that no number of ranks divides"""


def _written() -> Path:
    """Folder of three TFRecord files, which one rank writes."""
    folder = OUTPUT / f"records-{hvd.size()}"
    if hvd.rank() == 0:
        folder.mkdir()
        for file, rows in enumerate(np.array_split(np.arange(NUM), [50, 120])):
            with tf.io.TFRecordWriter(str(folder / f"part-{file}")) as writer:
                for row in rows:
                    values = {"x": X[row % 100], "y": Y[row % 100] + row}
                    features = {name: tf.train.Feature(float_list={"value": value}) for name, value in values.items()}
                    writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    hvd.allgather_object(0, name="records_are_written")
    return folder


def _scaled(x: Any, y: Any) -> Any:
    return x, y / 100


def records_in_files() -> None:
    """As Keras' `fit` on the same rows in the same order, although killed within an epoch; validated and evaluated."""
    folder = _written()

    def make() -> keras.Model:
        return compiled(dense(), metrics=["mae"])

    def rows() -> ringtrain.Records:
        records = ringtrain.Records(folder, inputs="x", target="y", transform=_scaled)
        records.lanes = 3
        return records

    held_out = ringtrain.Records(folder / "part-1", inputs="x", target="y", transform=_scaled)
    more: dict[str, Any] = {"batch_size": 32, "epochs": 2, "verbose": 0, "validation_data": held_out, "name": "records"}
    saves = {**more, "options": options(checkpoint=CheckpointConfig(every_steps=1))}
    with contextlib.suppress(Killed):
        ringtrain.fit(make(), rows(), callbacks=[KillAfter(9)], **saves)
        raise AssertionError("was not killed")
    ours, reference = make(), make()
    history = ringtrain.fit(ours, rows(), **saves)

    numbers = np.arange(NUM)
    x, y = X[numbers % 100].astype(np.float32), _scaled(0, (Y[numbers % 100] + numbers[:, None]).astype(np.float32))[1]
    for epoch in range(2):
        of_epoch = RecordRows(rows(), shuffle=True).order_of_pass(32, 0, epoch)
        order = np.concatenate([of_epoch.rows(step) for step in range(of_epoch.num_steps)])
        assert sorted(order) == list(range(NUM))
        reference.fit(x[order], y[order], batch_size=32, shuffle=False, verbose=0)
    assert distance(ours, reference) < 1e-6, distance(ours, reference)
    expected = reference.evaluate(x[50:120], y[50:120], verbose=0, return_dict=True)
    assert abs(history.history["val_mae"][-1] - expected["mae"]) < 1e-5
    evaluated = ringtrain.evaluate(ours, held_out, batch_size=32, verbose=0, return_dict=True)
    assert abs(evaluated["mae"] - expected["mae"]) < 1e-5
