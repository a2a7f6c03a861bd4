"""bench input: samples/s of the input pipeline, beside reading and decoding without it.

    ringtrain bench input -np 1 --out input.json --rank-images-per-s 900
    ringtrain bench input -np 2 -- python own.py

Alternately, all ranks at once, on as many threads: the batches that `ringtrain.train` trains on; samples of the same
arrays selected by NumPy, or pictures of the same TFRecords read sequentially and decoded in full at their original
size; and for pictures the same work as the pipeline's, including crop and resizing, in a plain parallel map. Of a
script: the batches of its first `ringtrain.fit` alone, beside its training.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from ringtrain import config_io, data
from ringtrain.config import Config
from ringtrain.errors import DataError
from ringtrain.lab import measured, ranks, stats
from ringtrain.lab.options import by_flag
from ringtrain.lab.script import Script
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_1, FILE, N, X
from ringtrain.protocol import cores

if TYPE_CHECKING:
    import tensorflow as tf

WARM_BATCHES = 2
NUM_PICTURES = 256
RECORDS = "imagenet-tfrecords"
SOURCES = ("digits", "fashion-mnist", RECORDS)
PIPELINE, ALONE, SAME = "pipeline", "alone", "same work"


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 7
    """measurements of each kind, in turns"""
    batches: Annotated[int, N, AT_LEAST_1] = 20
    """batches of a measurement"""
    rank_images_per_s: Annotated[float, X] = 0.0
    """that a rank trains; 0: unknown"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures, prints and writes."""
    is_script = bool(start.train_args) and not start.train_args[0].startswith("-")
    script = Script.of(start.train_args) if is_script else None
    if script is not None:
        return of_script(options, start, script)
    title, results = call(on_ranks, options, start.train_args)
    rows, failed = [], []
    for name, rates in results.items():
        if isinstance(rates, str):
            failed.append([f"{name}: {rates}", ""])
            continue
        for what, spread in rates.items():
            form = ".3f" if what[0] == "/" else ",.0f"
            rows.append([f"{name}, {what}", spread.text(form)])
        if options.rank_images_per_s:
            times = rates[PIPELINE].times(1 / options.rank_images_per_s)
            rows.append([f"{name}, {PIPELINE} / what a rank trains", times.text(".1f")])
    Table(["", "median (p10 to p90)"], rows + failed, title).show()
    if options.out:
        stats.write(Path(options.out), "input", by_flag(options), results)
    return 0


def of_script(options: Options, start: ranks.Start, script: Script) -> int:
    """Measures a script's batches without and with training, prints and writes."""
    settings: dict[str, Any] = {"turns": options.turns, "steps": options.batches}
    alone = measured.measure(start, script, input_only=True, **settings)
    training = measured.measure(start, script, **settings)
    speeds = {"input alone": alone, "training": training}
    results = {name: stats.Spread.of(found["rows_per_s"]) for name, found in speeds.items()}
    waiting = training["parts"]["input_s"] / training["step_s"]
    rows = [[f"{name}, rows/s", spread.text(",.0f")] for name, spread in results.items()]
    ratio = results["input alone"].median / results["training"].median
    rows += [["input alone / training", f"{ratio:.2f}"], ["of a step, rank 0 waits for data", f"{waiting:.0%}"]]
    title = f"{script.name}: first fit of {training['model']}, all of its {training['num_ranks']} ranks"
    Table(["", "median (p10 to p90)"], rows, title).show()
    if options.out:
        about = {**by_flag(options), "command": [*script.command]}
        stats.write(Path(options.out), "input", about, {script.name: {**results, "waiting": waiting}})
    return 0


def on_ranks(options: Options, train_args: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Measures every source on all ranks; a source without data is its error."""
    from ringtrain import hvd

    config = config_io.read(train_args)
    ranks.begin(config)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ringtrain-input-") as folder:
        for name in SOURCES:
            path = ""
            if name == RECORDS:
                path = str(make_records(Path(folder), NUM_PICTURES))
            source = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=path))
            try:
                results[name] = measure(source, name, options.batches, options.turns)
            except DataError as error:
                results[name] = str(error)
    return f"samples/s of rank 0 of {hvd.size()}, batch {config.train.batch_size}", results


def measure(config: Config, name: str, num_batches: int, turns: int) -> dict[str, stats.Spread]:
    """Times a data source. A collective.

    Returns:
        Samples per second of this rank, by PIPELINE, ALONE and SAME, and the ratios of PIPELINE to the others.
    """
    import tensorflow as tf

    from ringtrain import hvd
    from ringtrain.data import augment, tfrecords

    its = dataclasses.replace(config.data, name=name)
    data_set = data.source(its)()
    batch_size, rank, size = config.train.batch_size, hvd.rank(), hvd.size()
    epochs = (num_batches + WARM_BATCHES) * batch_size * size // max(1, len(data_set.train) - batch_size * size) + 2
    pipeline = data.training_batches(data_set.train, batch_size, rank, size, config.seed, epochs)
    kinds: dict[str, Callable[[], Iterable[Any]]] = {PIPELINE: lambda: pipeline}
    if name == RECORDS:
        files = [str(path) for path in tfrecords.shards(Path(its.dir), "train")]
        draw = tf.constant([config.seed, 1], tf.int64) if its.augment else None
        image_size = data_set.input_shape[0]
        kinds[ALONE] = lambda: decoded(files, lambda encoded: tf.io.decode_jpeg(encoded, channels=3), batch_size)
        kinds[SAME] = lambda: decoded(files, lambda encoded: augment.picture(encoded, image_size, draw), batch_size)
    else:
        kinds[ALONE] = lambda: cut_out(data_set.train, batch_size, config.seed)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(turns + 1):
        for kind, make in kinds.items():
            hvd.allreduce([0.0], name="ringtrain_bench_barrier")
            batches = iter(make())
            for _ in itertools.islice(batches, WARM_BATCHES):
                pass
            begin_s = time.perf_counter()
            num_samples = sum(len(labels) for _, labels in itertools.islice(batches, num_batches))
            rates[kind].append(num_samples / (time.perf_counter() - begin_s))
    spreads = {kind: stats.Spread.of(measured[1:]) for kind, measured in rates.items()}
    shares = {f"/ {kind}": stats.ratios(rates[PIPELINE][1:], rates[kind][1:]) for kind in kinds if kind != PIPELINE}
    return spreads | shares


def decoded(files: Sequence[str], decode: Callable[[tf.Tensor], tf.Tensor], batch_size: int) -> Iterator[Any]:
    """Reads records sequentially and endlessly, and decodes them in parallel.

    Args:
        batch_size: Of batches of a pixel and the label per picture: pictures of different sizes cannot be batched.
    """
    import tensorflow as tf

    from ringtrain.data import tfrecords

    threads = cores.num_threads(tf.config.threading.get_intra_op_parallelism_threads())

    def one(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        encoded, label = tfrecords.encoded_and_class(record)
        return tf.reshape(decode(encoded), [-1])[0], label  # unused pixels are not computed

    options = tf.data.Options()
    options.autotune.enabled = False
    pairs = tf.data.TFRecordDataset(list(files)).repeat().map(one, num_parallel_calls=threads, deterministic=False)
    return iter(pairs.batch(batch_size).prefetch(2).with_options(options))


def cut_out(samples: Any, batch_size: int, seed: int) -> Iterator[Any]:
    """Batches of arrays in random order, by NumPy alone."""
    order = np.random.default_rng(seed).permutation(len(samples))
    scale = np.float32(1)
    if samples.inputs.dtype == np.uint8:
        scale = np.float32(1 / 255)
    for first in itertools.cycle(range(0, len(order) - batch_size + 1, batch_size)):
        chosen = order[first : first + batch_size]
        yield samples.inputs[chosen].astype(np.float32) * scale, samples.labels[chosen]


def make_records(folder: Path, num_pictures: int) -> Path:
    """Writes TFRecords of JPEG pictures: crops of scikit-learn's two photographs in sizes typical of ImageNet."""
    import tensorflow as tf
    from sklearn.datasets import load_sample_images

    from ringtrain.data import make_tfrecords

    random = np.random.default_rng(0)
    photographs = load_sample_images()
    for split, count in (("train", num_pictures), ("val", 2)):
        for number in range(count):
            image = photographs.images[number % 2]
            height, width = (int(random.integers(side * 3 // 4, side + 1)) for side in image.shape[:2])
            top, left = (
                int(random.integers(image.shape[0] - height + 1)),
                int(random.integers(image.shape[1] - width + 1)),
            )
            path = folder / "pictures" / split / ("china", "flower")[number % 2] / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            encoded = tf.io.encode_jpeg(image[top : top + height, left : left + width], quality=92)
            path.write_bytes(encoded.numpy())
    make_tfrecords.make(folder / "pictures", folder / "records", 4, seed=0)
    return folder / "records"
