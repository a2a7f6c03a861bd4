"""CIFAR-10 in both versions, unpacked and as archives, made of a few generated pictures."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
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


def content(name: str, version: str, protocol: int = 2) -> bytes:
    images, labels = generated(name)
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    if version == "bin":
        return b"".join(bytes([label]) + plane.tobytes() for label, plane in zip(labels, planes, strict=True))
    return pickle.dumps({b"data": planes, b"labels": labels, b"batch_label": b"x", b"filenames": []}, protocol)


def write(place: Path, version: str, how: str) -> Path:
    """Puts the batches into a folder, into the folder that the archive unpacks to, or into the archive."""
    ending = ".bin" if version == "bin" else ""
    files = {f"{name}{ending}": content(name, version) for name in BATCHES} | {"batches.meta": b"not read"}
    inside = f"cifar-10-batches-{version}"
    if how == "archive":
        with tarfile.open(place / f"cifar-10-{'binary' if version == 'bin' else 'python'}.tar.gz", "w:gz") as tar:
            for name, value in files.items():
                member = tarfile.TarInfo(f"{inside}/{name}")
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
        return place
    folder = place if how == "files" else place / inside
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name).write_bytes(value)
    return place


def load(place: Path) -> data.DataSet:
    return data.source(DataConfig(name="cifar10", dir=str(place)))()


def is_what_was_generated(data_set: data.DataSet) -> bool:
    images, labels = zip(*(generated(name) for name in ("data_batch_1", "data_batch_2")), strict=True)
    assert np.array_equal(data_set.train.inputs, np.concatenate(images))
    assert data_set.train.labels.tolist() == [*labels[0], *labels[1]]
    assert np.array_equal(data_set.test.inputs, generated("test_batch")[0])
    return (data_set.num_classes, data_set.input_shape) == (10, (32, 32, 3))


@pytest.mark.parametrize("version", ["bin", "py"])
@pytest.mark.parametrize("how", ["files", "folder", "archive"])
def test_both_versions_unpacked_or_not(tmp_path, version, how):
    assert is_what_was_generated(load(write(tmp_path, version, how)))


def test_an_archive_may_be_named_itself(tmp_path):
    write(tmp_path, "py", "archive")
    assert is_what_was_generated(load(tmp_path / "cifar-10-python.tar.gz"))


def test_both_versions_side_by_side_are_not_trained_twice(tmp_path):
    write(tmp_path, "py", "files")
    assert is_what_was_generated(load(write(tmp_path, "bin", "files")))


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_any_age(tmp_path, protocol):
    write(tmp_path, "py", "files")
    for name in BATCHES:
        (tmp_path / name).write_bytes(content(name, "py", protocol))
    assert is_what_was_generated(load(tmp_path))


class Command:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("how", ["alone", "in the batch", "in an array", "by name"])
def test_a_pickle_that_calls_something_is_not_loaded(tmp_path, how):
    write(tmp_path, "py", "files")
    command = Command(tmp_path / "was here")
    in_array = np.array([command], dtype=object)
    danger = {"alone": command, "in the batch": {b"data": command}, "in an array": in_array, "by name": eval}[how]
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(danger, 2))
    with pytest.raises(DataError, match=rf"{tmp_path}/data_batch_2: the pickle asks for .*: not loaded"):
        load(tmp_path)
    assert not (tmp_path / "was here").exists()


def replaced(**changes) -> bytes:
    batch = pickle.loads(content("data_batch_2", "py"))
    return pickle.dumps(batch | {key.encode(): value for key, value in changes.items()}, 2)


BAD = {
    "pickle cut": ("py", content("data_batch_2", "py")[:-100], "not a batch of CIFAR-10's Python version"),
    "pickle empty": ("py", b"", "not a batch of CIFAR-10's Python version"),
    "pickle of a list": ("py", pickle.dumps([1]), "not a batch of CIFAR-10's Python version"),
    "no data": ("py", replaced(data=None), "its data is a NoneType"),
    "other size": ("py", replaced(data=np.zeros((3, 99), np.uint8)), "got data of uint8 and shape (3, 99) with 3"),
    "other type": ("py", replaced(data=np.zeros((3, 3072))), "got data of float64"),
    "fewer labels": ("py", replaced(labels=[1, 2]), "with 2 labels"),
    "label": ("py", replaced(labels=[1, 2, 10]), "image 2 has label 10, expected 0 to 9"),
    "negative label": ("py", replaced(labels=[1, -2, 1]), "image 1 has label -2, expected 0 to 9"),
    "no labels": ("py", replaced(data=np.zeros((0, 3072), np.uint8), labels=[]), "contains no image"),
    "binary cut": ("bin", content("data_batch_2", "bin")[:-1], "got 9218 bytes, expected a multiple of 3073"),
    "binary empty": ("bin", b"", "got 0 bytes"),
    "binary label": ("bin", b"\x0b" + content("data_batch_2", "bin")[1:], "image 0 has label 11, expected 0 to 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_batch_is_named(tmp_path, case):
    version, broken, problem = BAD[case]
    write(tmp_path, version, "files")
    path = tmp_path / f"data_batch_2{'.bin' if version == 'bin' else ''}"
    path.write_bytes(broken)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and problem in message and "\n" not in message


@pytest.mark.parametrize("how", ["cut", "text", "flipped"])
def test_a_broken_archive_is_named(tmp_path, how):
    path = write(tmp_path, "bin", "archive") / "cifar-10-binary.tar.gz"
    whole = path.read_bytes()
    flipped = whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:]
    path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"404 not found", "flipped": flipped}[how])
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}") and "\n" not in str(error.value)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(
        DataError, match=rf"{tmp_path}: contains no CIFAR-10, expected data_batch_1, ... and test_batch"
    ):
        load(tmp_path)
    write(tmp_path, "bin", "files")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="contains no CIFAR-10"):
        load(tmp_path)
