"""Python of the README and of pages that is no whole script, run on every rank; see run_fit.py and tests/pages.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import CLASSES, OUTPUT, ROOT, X, Y, dense, distance, snippet
from only import only

from ringtrain import hvd


def _write_files() -> None:
    """Writes the rows that snippets read."""
    for part in range(4):
        np.savetxt(f"rows-{part}.csv", np.hstack([X, Y])[part * 25 :][:25], delimiter=",", fmt="%.9g")
    for name in ("rows", "held-out"):
        Path(name).mkdir()
        with tf.io.TFRecordWriter(f"{name}/people") as writer:
            for age in range(300):
                of_person = {"age": age, "income": 10.0 * age, "label": age / 3}
                features = {key: tf.train.Feature(float_list={"value": [value]}) for key, value in of_person.items()}
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def _given(**more: Any) -> dict[str, Any]:
    return {"keras": keras, "tf": tf, "ringtrain": __import__("ringtrain"), "x": X, "y": Y, **more}


def _compiled() -> keras.Model:
    model = dense()
    model.compile("adam", "mse")
    return model


def _enter_folder() -> None:
    folder = OUTPUT / "snippets"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)


@only(np=2)
def snippets() -> None:
    _enter_folder()
    rows = np.array_split(np.arange(96), hvd.size())[hvd.rank()]
    horovod = _given(model=dense(activation="softmax"), x_train=X[rows], y_train=CLASSES[rows])
    exec(snippet("README.md", "import ringtrain.hvd as hvd  # was:"), horovod)
    hvd.check_in_sync(horovod["model"])

    small, in_order = ("batch(32", "batch(10"), (".shuffle(1024, seed=int(epoch))", "")
    for end in ("epoch < 1", "epoch < 2"):  # the second resumes after the first epoch
        loop = _given(model=dense(), loss_fn=keras.losses.MeanSquaredError())
        exec(snippet("docs/from-keras.md", "import ringtrain.hvd as hvd\n", small, in_order, ("epoch < 2", end)), loop)
    assert int(loop["optimizer"].iterations) == 10
    alone = dense()
    alone.compile(keras.optimizers.Adam(0.01), "mse")
    alone.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    assert distance(loop["model"], alone) < 1e-10

    exec(snippet("docs/fit.md", "def prepare():"), _given(Path=Path))

    fit = _given(model=dense())
    exec(snippet("docs/fit.md", "import ringtrain\n\nmodel.compile", ('"first"', '"of-fit"')), fit)
    assert len(fit["history"].history["val_mae"]) == 10

    folds = [(np.arange(50), None), (np.arange(50, 100), None)]
    cheap = ("epochs=20", "epochs=1")
    exec(snippet("docs/fit.md", "for fold, (train, test) in", cheap), _given(build=_compiled, folds=folds))
    exec(
        snippet(
            "docs/fit.md", "model = keras.models.load_model(", ("runs/first", "runs/of-fit"), ("epochs=5", "epochs=1")
        ),
        {**fit, "new_x": X, "new_y": Y},
    )
    model, shown = _compiled(), []
    more = {"model": model, "show_samples": lambda model: shown.append(int(model.optimizer.iterations))}
    exec(snippet("docs/fit.md", "for epoch in range(1, 41):", ("1, 41", "1, 4")), _given(**more))
    assert shown == [4, 8, 12]

    exec(
        snippet(
            "docs/fit.md",
            'options = {"checkpoint.every_steps": 500',
            ('"first"', '"of-options"'),
        ),
        _given(model=_compiled()),
    )
    assert "fp16" in Path("runs/of-options/config.toml").read_text()

    exec(
        snippet("docs/verification.md", 'options = {"train.virtual_ranks": 4}', ('"first"', '"of-bits"')),
        _given(model=_compiled()),
    )
    assert "virtual_ranks = 4" in Path("runs/of-bits/config.toml").read_text()

    normalized = dense(keras.layers.BatchNormalization())
    exec(snippet("docs/models.md", "import ringtrain.hvd as hvd\n"), _given(model=normalized))
    exec(snippet("docs/from-horovod.md", "import horovod.tensorflow.keras as hvd"), {})


@only(np=2)
def snippet_of_models() -> None:
    """Several configured runs in one process, of fewer epochs."""
    rate = '"--optimizer.learning-rate", rate'
    shorter = (rate, f'{rate}, "--train.epochs", "1", "--run.directory", {str(OUTPUT / "of-models")!r}')
    text = snippet("docs/models.md", "from ringtrain import config, train", shorter)
    keras.config.set_floatx("float32")
    os.chdir(ROOT)
    exec(text, {})
    assert len([*(OUTPUT / "of-models").glob("*/summary.json")]) == 2


@only(np=2)
def snippets_of_data() -> None:
    _enter_folder()
    if hvd.rank() == 0:
        _write_files()
    hvd.allgather_object(0, name="rows_written")

    def read(path: Any) -> tf.data.Dataset:
        lines = tf.data.TextLineDataset([path]).map(lambda line: tf.stack(tf.io.decode_csv(line, [[0.0]] * 9)))
        return lines.map(lambda row: (row[:6], row[6:]))

    steps = ("steps_per_epoch=500", "steps_per_epoch=5, name='of-shards'")
    exec(snippet("docs/fit.md", "def shard(rank", steps), _given(model=_compiled(), read=read, held_out=(X, Y)))
    assert Path("runs/of-shards/summary.json").exists()

    queue = _given(model=_compiled(), batches_of_a_queue=lambda: ((X[:32] + hvd.rank(), Y[:32]) for _ in range(99)))
    exec(
        snippet(
            "docs/fit.md",
            "source = ringtrain.from_rank_0",
            ("steps_per_epoch=500", "steps_per_epoch=5, name='of-queue'"),
        ),
        queue,
    )
    assert Path("runs/of-queue/summary.json").exists()

    people = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    people.compile("adam", "mse")
    exec(snippet("docs/fit.md", "rows = ringtrain.Records", ("rows/*.parquet", "rows/*")), _given(model=people))
    assert Path("runs/files/summary.json").exists()
