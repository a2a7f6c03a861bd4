"""bench input: how many samples per second the pipeline gives with no model to eat them, beside the same without it.

    ringtrain bench input -np 1 --out input.json --rank-images-per-s 900

In turns, each rank for itself and all at once, on as many threads: what `ringtrain.train` trains from; samples of the
same arrays cut out by NumPy, or pictures of the same TFRecords read from first to last and decoded, whole and at their
own size; and for pictures the very work of the pipeline, crop and resizing too, in a plain parallel map.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain import config_io, data, hvd
from ringtrain.config import Config
from ringtrain.data import augment, make_tfrecords, tfrecords
from ringtrain.errors import DataError
from ringtrain.lab import ranks, stats

WARM_BATCHES = 2
NUM_PICTURES = 256
RECORDS = "imagenet-tfrecords"
SOURCES = ("digits", "fashion-mnist", RECORDS)
PIPELINE, ALONE, SAME = "pipeline", "alone", "same work"


def measure(config: Config, name: str, num_batches: int, turns: int) -> dict[str, stats.Spread]:
    """Times a data source. A collective.

    Returns:
        Samples per second of this rank, by PIPELINE, ALONE and SAME, and the ratios of PIPELINE to the others.

    Raises:
        DataError: The data are missing.
    """
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
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))

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
    scale = np.float32(1 / 255 if samples.inputs.dtype == np.uint8 else 1)
    for first in itertools.cycle(range(0, len(order) - batch_size + 1, batch_size)):
        chosen = order[first : first + batch_size]
        yield samples.inputs[chosen].astype(np.float32) * scale, samples.labels[chosen]


def make_records(folder: Path, num_pictures: int) -> Path:
    """Writes TFRecords of JPEG pictures: crops of scikit-learn's two photographs in sizes typical of ImageNet."""
    from sklearn.datasets import load_sample_images

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


def main(argv: Sequence[str]) -> int:
    """Measures on all ranks and writes on rank 0."""
    own, told = stats.split(argv)
    parser = argparse.ArgumentParser(prog="bench input", description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7, help="measurements of each kind")
    parser.add_argument("--batches", type=int, default=20, help="of a measurement")
    parser.add_argument("--rank-images-per-s", type=float, default=0, help="that a rank trains")
    parser.add_argument("--out", required=True, help="JSON file of the results")
    options = parser.parse_args(own)
    config = config_io.read(told)
    ranks.begin(config)
    found: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="ringtrain-input-") as folder:
        for name in SOURCES:
            its = dataclasses.replace(config.data, dir="")
            if name == RECORDS:
                its = dataclasses.replace(its, dir=str(make_records(Path(folder), NUM_PICTURES)))
            try:
                found[name] = measure(dataclasses.replace(config, data=its), name, options.batches, options.turns)
            except DataError as error:
                found[name] = str(error)
                continue
            rows += [
                [f"{name}, {what}", spread.text(",.0f" if what[0] != "/" else ".3f")]
                for what, spread in found[name].items()
            ]
            if options.rank_images_per_s:
                times = found[name][PIPELINE].times(1 / options.rank_images_per_s)
                rows.append([f"{name}, {PIPELINE} / what a rank trains", times.text(".1f")])
    rows += [[f"{name}: {error}", ""] for name, error in found.items() if isinstance(error, str)]
    if hvd.rank() == 0:
        title = f"samples/s of rank 0 of {hvd.size()}, batch {config.train.batch_size}"
        found["table"] = [title, ["", "median (p10 to p90)"], rows]
        stats.write(Path(options.out), "input", {"batches": options.batches, "turns": options.turns}, found)
    return 0
