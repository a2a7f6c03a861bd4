"""Real JPEGs for the tests: crops of scikit-learn's two sample photographs, a temple and a flower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_sample_images

CLASSES = ("flower", "temple")


def jpegs(num: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Class names and encoded crops of 40x48 pixels, the classes in turn."""
    photographs = dict(zip(("temple", "flower"), load_sample_images().images, strict=True))
    draw = np.random.default_rng(seed)
    crops = []
    for number in range(num):
        name = CLASSES[number % 2]
        top, left = draw.integers(0, 427 - 40), draw.integers(0, 640 - 48)
        crop = photographs[name][top : top + 40, left : left + 48]
        crops.append((name, tf.io.encode_jpeg(crop, quality=90).numpy()))
    return crops


def write_folder(root: Path, num_train: int, num_test: int) -> Path:
    """train/<class>/*.jpg and val/<class>/*.jpg."""
    for split, num, seed in (("train", num_train, 0), ("val", num_test, 1)):
        for number, (name, content) in enumerate(jpegs(num, seed)):
            path = root / split / name / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root


def write_records(source: Path, target: Path, num_shards: int) -> None:
    """The images of a folder as ImageNet has them, shuffled: train-00000-of-... and so on, and labels.txt."""
    target.mkdir()
    classes = sorted(path.name for path in (source / "train").iterdir())
    (target / "labels.txt").write_text("".join(f"{name}\n" for name in classes))
    for stem, folder, shards in (("train", "train", num_shards), ("validation", "val", 1)):
        files = sorted((source / folder).glob("*/*"))
        files = [files[number] for number in np.random.default_rng(0).permutation(len(files))]
        for shard in range(shards):
            with tf.io.TFRecordWriter(str(target / f"{stem}-{shard:05}-of-{shards:05}")) as writer:
                for file in files[len(files) * shard // shards : len(files) * (shard + 1) // shards]:
                    example = tf.train.Example()
                    example.features.feature["image/encoded"].bytes_list.value.append(file.read_bytes())
                    label = classes.index(file.parent.name) + 1
                    example.features.feature["image/class/label"].int64_list.value.append(label)
                    writer.write(example.SerializeToString())


def numbered_png(number: int, size: int = 8) -> bytes:
    """A picture of one colour that says which sample it is: red and green are the number's two bytes."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[:] = number // 256, number % 256, 0
    return tf.io.encode_png(pixels).numpy()


def number_of(image: np.ndarray) -> int:
    """Reads the number of a normalised picture back, after any crop and flip of it."""
    from ringtrain.data.augment import DEVIATION, MEAN

    red, green, _ = np.rint((np.asarray(image)[0, 0] * DEVIATION + MEAN) * 255)
    return int(red) * 256 + int(green)


def write_numbered(root: Path, num_train: int, num_test: int) -> Path:
    """A folder whose pictures say which sample they are; in training 0, 1, ..., in the test 1000, 1001, ..."""
    for split, first, num in (("train", 0, num_train), ("val", 1000, num_test)):
        for number in range(first, first + num):
            path = root / split / CLASSES[number % 2] / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(numbered_png(number))
    return root
