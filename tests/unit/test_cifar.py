"""CIFAR-10 in the binary version, made of a few generated pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ringtrain import data
from ringtrain.config import DataConfig
from ringtrain.errors import DataError

BATCHES = {"data_batch_1": 4, "data_batch_2": 3, "test_batch": 2}


def generated(name: str) -> tuple[np.ndarray, list[int]]:
    draw = np.random.default_rng(len(name) * 100 + BATCHES[name])
    num = BATCHES[name]
    return draw.integers(0, 256, (num, 32, 32, 3), np.uint8), [int(label) for label in draw.integers(0, 10, num)]


def content(name: str) -> bytes:
    images, labels = generated(name)
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return b"".join(bytes([label]) + plane.tobytes() for label, plane in zip(labels, planes, strict=True))


def write(place: Path, how: str) -> Path:
    """Puts the batches into a folder, or into the folder that the archive unpacks to."""
    files = {f"{name}.bin": content(name) for name in BATCHES} | {"batches.meta.txt": b"not read"}
    inside = "cifar-10-batches-bin"
    folder = place if how == "files" else place / inside
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name).write_bytes(value)
    return place


def load(place: Path) -> data.DataSet:
    return data.source(DataConfig(name="cifar10", dir=str(place)))()


def is_what_was_generated(data_set: data.DataSet) -> bool:
    images, labels = zip(*(generated(name) for name in ("data_batch_1", "data_batch_2")), strict=True)
    pixels, classes = data_set.train.nest
    assert np.array_equal(pixels, np.concatenate(images)) and classes.tolist() == [*labels[0], *labels[1]]
    assert np.array_equal(data_set.test.nest[0], generated("test_batch")[0])
    return (data_set.num_classes, data_set.input_shape) == (10, (32, 32, 3))


@pytest.mark.parametrize("how", ["files", "folder"])
def test_files_and_their_folder(tmp_path, how):
    assert is_what_was_generated(load(write(tmp_path, how)))


BAD = {
    "cut": (content("data_batch_2")[:-1], "got 9218 bytes, expected a multiple of 3073"),
    "empty": (b"", "got 0 bytes"),
    "label": (b"\x0b" + content("data_batch_2")[1:], "image 0 has label 11, expected 0 to 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_batch_is_named(tmp_path, case):
    broken, problem = BAD[case]
    write(tmp_path, "files")
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(broken)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and problem in message and "\n" not in message


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(
        DataError, match=rf"{tmp_path}: contains no CIFAR-10 in the binary version, expected data_batch_1.bin"
    ):
        load(tmp_path)
    write(tmp_path, "files")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="contains no CIFAR-10"):
        load(tmp_path)
