"""Data by name: arrays in a file, and what their rows become."""

from __future__ import annotations

from pathlib import Path

import batches
import numpy as np
import pytest

from ringtrain import data
from ringtrain.config.sections import DataConfig
from ringtrain.data.classes import checked
from ringtrain.errors import ConfigError, DataError


def test_digits_are_real_deterministic_and_split_evenly():
    first, second = (data.source(DataConfig(name="digits"))() for _ in range(2))
    assert (len(first.train), len(first.test), first.num_classes) == (1437, 360, 10)
    (images, _), (test_images, test_labels) = first.train.nest, first.test.nest
    assert np.array_equal(images, second.train.nest[0])
    assert np.bincount(test_labels).min() >= 34
    assert images.dtype == np.float32 and images.max() == 1.0
    assert len({image.tobytes() for image in (*images, *test_images)}) == 1797  # no test image is trained


def test_synthetic_is_the_same_every_time_and_as_large_as_asked():
    config = DataConfig(name="synthetic", num_samples=80, image_size=6)
    first, second = (data.source(config)() for _ in range(2))
    assert (len(first.train), len(first.test), first.input_shape) == (70, 10, (6, 6, 1))
    assert np.array_equal(first.train.nest[0], second.train.nest[0])


def test_names():
    with pytest.raises(ConfigError, match=r"data.name: got digit, did you mean digits\?"):
        data.source(DataConfig(name="digit"))
    with pytest.raises(ConfigError, match="importing no_such_module failed: No module named 'no_such_module'"):
        data.source(DataConfig(name="no_such_module:function"))()
    with pytest.raises(ConfigError, match=r"math has no function 'sine': did you mean sin"):
        data.source(DataConfig(name="math:sine"))()


def own():
    inputs = np.arange(12.0).reshape(6, 2)
    return (inputs, np.array([[0], [1], [2]] * 2)), (inputs[:3], [0, 1, 2])


def test_own_data(monkeypatch):
    data_set = data.source(DataConfig(name=f"{__name__}:own"))()
    assert (len(data_set.train), len(data_set.test), data_set.num_classes) == (6, 3, 3)
    assert data_set.train.nest[1].tolist() == [0, 1, 2, 0, 1, 2]


INPUTS, LABELS = np.zeros((4, 2)), np.array([0, 1, 2, 0])
BAD_OWN = {
    "labels as floats": (INPUTS, np.zeros(4), "labels of float64"),
    "negative label": (INPUTS, np.array([0, 1, -1, 0]), "from -1"),
    "large label": (INPUTS, np.array([0, 1, 0, 3]), "sample 3 has label 3, expected 0 to 2"),
    "one-hot labels": (
        INPUTS,
        np.zeros((4, 3), int),
        r"labels of shape \(4, 3\), expected one integer class per sample, shape \(4,\),.* np.argmax\(labels, axis=1\)",
    ),
    "empty": (INPUTS[:0], LABELS[:0], "at least one"),
    "other shape": (np.zeros((4, 3)), LABELS, "a test sample"),
    "NaN": (np.where(np.eye(4)[:, :2], np.nan, 0), LABELS, "training data: sample 0 contains NaN"),
    "infinity": (np.where(np.eye(4)[:, :2], -np.inf, 0), LABELS, "training data: sample 0 contains an infinite value"),
    "text": (np.array([["a"]] * 4), LABELS, "training data: got inputs of <U1, expected numbers"),
}


@pytest.mark.parametrize("case", BAD_OWN)
def test_what_cannot_be_trained_is_named(case):
    inputs, labels, message = BAD_OWN[case]
    with pytest.raises(DataError, match=f"^mine:load: .*{message}"):
        checked("mine:load", (inputs, labels), (INPUTS, LABELS), num_classes=3)


def arrays(num: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(num).integers(0, 256, (num, 4, 4, 3), np.uint8), np.arange(num) % 3


def save_npz(path: Path, **changes) -> Path:
    (x_train, y_train), (x_test, y_test) = arrays(9), arrays(3)
    values = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test} | changes
    np.savez_compressed(path, **{name: value for name, value in values.items() if value is not None})
    return path


def test_npz_by_file_and_by_folder_and_file(tmp_path):
    path = save_npz(tmp_path / "mine.npz")
    for place in ({"file": str(path)}, {"dir": str(tmp_path), "file": "mine.npz"}):
        data_set = data.source(DataConfig(name="npz", **place))()
        assert np.array_equal(data_set.train.nest[0], arrays(9)[0])
        assert data_set.test.nest[1].tolist() == [0, 1, 2]
        assert (data_set.num_classes, data_set.input_shape) == (3, (4, 4, 3))
    assert data.source(DataConfig(name="npz", file=str(path), num_classes=5))().num_classes == 5


BAD_NPZ = {
    "none": (Path.unlink, "{path}: cannot be read: No such file or directory"),
    "text": (lambda path: path.write_text("404 not found"), "{path}: not a file of arrays written by numpy.savez"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-50]), "{path}: not a file of arrays"),
    "flipped": (lambda path: flip(path, 100), "{path}: not a file of arrays"),
    "objects": (lambda path: save_npz(path, x_test=np.array([{}] * 3, object)), "{path}: not a file of arrays"),
    "one array": (lambda path: np.save(path.open("wb"), np.zeros(3)), "{path}: not a file of arrays"),
    "no y_test": (lambda path: save_npz(path, y_test=None), "{path}: contains x_train, y_train, x_test, expected x_"),
    "label": (lambda path: save_npz(path, y_train=np.arange(9)), "{path}: training data: sample 8 has label 8, exp"),
}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("case", BAD_NPZ)
def test_broken_npz_is_named(tmp_path, case):
    path = save_npz(tmp_path / "mine.npz")
    spoil, message = BAD_NPZ[case]
    spoil(path)
    with pytest.raises(DataError) as error:
        data.source(DataConfig(name="npz", file=str(path), num_classes=3))()
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)


def test_rows_are_shuffled_in_training_and_bytes_become_fractions() -> None:
    for dtype, factor in ((np.uint8, 1 / 255), (np.float32, 1), (np.float64, 1)):
        pair = np.arange(23, dtype=dtype).reshape(-1, 1), np.arange(23)
        made = checked("mine", pair, pair)
        trained = batches.of_rank(made.train, 6, 1, 2)
        tested = [*data.evaluation_batches(made.test, range(12, 23), 3)]
        for inputs, labels in trained + tested:
            np.testing.assert_allclose(inputs.numpy()[:, 0], labels.numpy() * factor, rtol=1e-6)
            assert inputs.dtype == "float32"
        assert [len(labels) for _, labels in trained + tested] == [3, 3, 3, 2, 3, 3, 3, 2]
        numbers = np.concatenate([labels for _, labels in trained])
        assert not np.array_equal(numbers, np.sort(numbers))
        assert np.concatenate([labels for _, labels in tested]).tolist() == list(range(12, 23))
