"""Writes a folder of images as TFRecords that imagenet-tfrecords reads.

python -m ringtrain.data.make_tfrecords --from pictures --to records --shards 8
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ringtrain.data.image_files import class_names, evaluation_folder, pictures
from ringtrain.data.tfrecords import FIRST_LABEL, LABELS_FILE
from ringtrain.errors import DataError, RingtrainError
from ringtrain.options import Argument, N, Parser, add, options_of, read

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Options:
    """Writes a directory of images as TFRecords: train/<class>/*.jpg and val/<class>/*.jpg (or test/)."""

    source: Annotated[str, Argument("DIR", ("--from",))]
    """directory of the images"""
    to: Annotated[str, Argument("DIR")]
    """directory for the records, which must not exist"""
    shards: Annotated[int, N] = 16
    """number of training files; validation gets an eighth of it, at least one"""
    seed: Annotated[int, N] = 0
    """random seed of the order in which the images are written"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that the user can fix, printed in one line."""
    parser = Parser(prog="python -m ringtrain.data.make_tfrecords", description=Options.__doc__)
    add(parser, options_of(Options).values())
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        options = read(Options, vars(parser.parse_args(argv)))
        counts = make(Path(options.source), Path(options.to), options.shards, options.seed)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    print("".join(f"{stem}: {count:,} images\n" for stem, count in counts.items()), end="")
    return 0


def make(source: Path, target: Path, num_shards: int, seed: int) -> dict[str, int]:
    """Writes train-*-of-*, validation-*-of-* and labels.txt, all or none; returns the number of images per split.

    Raises DataError if the source or target cannot be used, or if an image is damaged (the message names it).
    """
    classes = class_names(source / "train")
    folders = {"train": source / "train", "validation": evaluation_folder(source, classes)}
    if num_shards < 1:
        raise DataError(f"--shards: got {num_shards}, expected 1 or more")
    if target.exists():
        raise DataError(f"{target}: already exists: choose another directory with --to")
    counts = {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
        ) as temporary:
            unfinished = Path(temporary)
            for stem, folder in folders.items():
                files = [(path, k) for k, name in enumerate(classes, FIRST_LABEL) for path in pictures(folder / name)]
                files = [files[k] for k in np.random.default_rng(seed).permutation(len(files))]
                shards = num_shards if stem == "train" else max(1, num_shards // 8)
                if shards > len(files):
                    raise DataError(
                        f"{folder}: {len(files)} images for {shards} shards, expected at least one image per shard"
                    )
                ends = [len(files) * shard // shards for shard in range(shards + 1)]
                for shard, (start, end) in enumerate(itertools.pairwise(ends)):
                    _write(unfinished / f"{stem}-{shard:05}-of-{shards:05}", files[start:end], classes)
                counts[stem] = len(files)
            (unfinished / LABELS_FILE).write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
            unfinished.chmod(0o755)
            unfinished.rename(target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}") from error
    return counts


def _write(path: Path, files: Sequence[tuple[Path, int]], classes: Sequence[str]) -> None:
    import tensorflow as tf

    try:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for file, label in files:
                writer.write(_example(file, label, classes[label - FIRST_LABEL]).SerializeToString())
    except tf.errors.OpError as error:
        raise DataError(f"{path}: cannot be written: {error.message}") from error


def _example(path: Path, label: int, name: str) -> tf.train.Example:
    """Converts an image to the schema of ImageNet's TFRecords. Raises DataError if it cannot be read or decoded."""
    import tensorflow as tf

    try:
        encoded = path.read_bytes()
        height, width, _ = tf.io.decode_image(encoded, channels=3, expand_animations=False).shape
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except tf.errors.InvalidArgumentError as error:
        raise DataError(f"{path}: not a complete JPEG or PNG image: fix or remove it") from error

    texts = {
        "image/encoded": encoded,
        "image/format": b"JPEG" if encoded[:2] == b"\xff\xd8" else b"PNG",
        "image/filename": os.fsencode(path.name),
        "image/colorspace": b"RGB",
        "image/class/synset": os.fsencode(name),
        "image/class/text": os.fsencode(name),
    }
    numbers = {"image/height": height, "image/width": width, "image/channels": 3, "image/class/label": label}
    example = tf.train.Example()
    for key, text in texts.items():
        example.features.feature[key].bytes_list.value.append(text)
    for key, number in numbers.items():
        example.features.feature[key].int64_list.value.append(number)
    return example


if __name__ == "__main__":
    raise SystemExit(main())
