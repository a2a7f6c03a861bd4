"""Pictures in folders and TFRecords: which are read and when, how they are cropped, what is said of broken ones."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pictures
import pytest
import tensorflow as tf

from ringtrain import data
from ringtrain.config import DataConfig
from ringtrain.data import tfrecords
from ringtrain.data.augment import picture
from ringtrain.data.dataset import Samples
from ringtrain.errors import DataError

pytestmark = pytest.mark.slow

SOURCES = ("image-folder", "imagenet-tfrecords")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Pictures that say which sample they are, as a folder and as records in 5 shards: 47 to train, 9 to test."""
    root = tmp_path_factory.mktemp("numbered")
    pictures.write_numbered(root / "image-folder", 47, 9)
    pictures.write_records(root / "image-folder", root / "imagenet-tfrecords", 5)
    return root


@pytest.fixture
def photographs(tmp_path):
    """The same for crops of photographs: 12 to train, 4 to test, in 2 shards; each test may break its own."""
    pictures.write_folder(tmp_path / "image-folder", 12, 4)
    pictures.write_records(tmp_path / "image-folder", tmp_path / "imagenet-tfrecords", 2)
    return tmp_path


def load(root: Path, name: str, **options) -> data.DataSet:
    return data.source(DataConfig(**{"name": name, "dir": str(root / name), "image_size": 8, **options}))()


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def numbers_in(batches: tf.data.Dataset) -> list[list[int]]:
    found = []
    for images, labels in batches:
        numbers = [pictures.number_of(image) for image in images]
        assert labels.numpy().tolist() == [number % 2 for number in numbers]
        found.append(numbers)
    return found


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("size", "batch_size"), [(2, 6), (3, 4)])
def test_every_sample_is_trained_once_and_the_ring_sees_the_batches_of_one_rank(numbered, name, size, batch_size):
    train = load(numbered, name).train
    ranks = [numbers_in(data.training_batches(train, batch_size, rank, size, 3, 4)) for rank in range(size)]
    together = [flat(batches) for batches in zip(*ranks, strict=True)]
    assert together == numbers_in(data.training_batches(train, 12, 0, 1, 3, 4))
    times = np.zeros(47, int)
    for epoch in range(4):
        trained = flat(together[3 * epoch : 3 * epoch + 3])
        assert len(set(trained)) == 36
        times[trained] += 1
    assert set(times) == {3, 4}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_test_sample_is_evaluated_once(numbered, name, size):
    test = load(numbered, name).test
    shares = [data.evaluation_batches(test, data.evaluation_shard(9, rank, size), 2) for rank in range(size)]
    assert sorted(flat(flat(map(numbers_in, shares)))) == list(range(1000, 1009))


@pytest.mark.parametrize("name", SOURCES)
def test_a_resumed_run_sees_the_same_crops(photographs, name):
    train = load(photographs, name).train
    whole = list(data.training_batches(train, 2, 1, 2, 7, 2))
    rest = list(data.training_batches(train, 2, 1, 2, 7, 2, first_step=4))
    assert len(whole) == 6 and len(rest) == 2
    for (images, labels), (again, labels_again) in zip(whole[4:], rest, strict=True):
        assert np.array_equal(images, again) and np.array_equal(labels, labels_again)


@pytest.mark.parametrize("name", SOURCES)
def test_crops_differ_between_epochs_and_seeds_and_can_be_turned_off(photographs, name):
    def trained(seed: int, augment: bool) -> dict[bytes, int]:
        train = load(photographs, name, augment=augment).train
        images = [image for batch, _ in data.training_batches(train, 12, 0, 1, seed, 2) for image in batch.numpy()]
        return {image.tobytes(): 1 for image in images}

    assert len(trained(0, augment=True)) == 24
    assert len(trained(0, augment=True) | trained(1, augment=True)) == 48
    assert len(trained(0, augment=False) | trained(1, augment=False)) == 12


@pytest.mark.parametrize("encode", [tf.io.encode_jpeg, tf.io.encode_png])
def test_evaluation_sees_the_centre_in_normalised_colours(encode):
    pixels = np.zeros((256, 300, 3), np.uint8)
    pixels[16:240, 38:262] = 124, 116, 104  # ImageNet's mean
    image = picture(encode(pixels), 224, None).numpy()
    assert image.shape == (224, 224, 3)
    assert np.abs(image[8:-8, 8:-8]).max() < 0.05
    assert np.all(picture(encode(np.full_like(pixels, 255)), 224, None).numpy() > 2)


def test_crops_are_of_the_area_and_shape_that_goyal_et_al_name():
    """Of a picture whose colours are its coordinates, the crop's corners can be read off the result."""
    rows, columns = np.mgrid[0:200, 0:200].astype(np.uint8)
    encoded = tf.io.encode_png(np.stack([rows, columns, np.zeros_like(rows)], axis=-1))
    cropped = tf.function(lambda seed: picture(encoded, 50, seed))
    areas, ratios, flipped = [], [], 0
    for number in range(300):
        image = cropped(tf.constant([0, number], tf.int64)).numpy() * [0.229, 0.224, 0.225] + [0.485, 0.456, 0.406]
        height, width = np.ptp(image[..., 0]) * 255 * 50 / 49, np.ptp(image[..., 1]) * 255 * 50 / 49
        areas.append(height * width / 200**2)
        ratios.append(width / height)
        flipped += image[0, 0, 1] > image[0, -1, 1]
    assert 0.07 < min(areas) < 0.15 and 0.85 < max(areas) < 1.02 and 0.45 < np.mean(areas) < 0.63
    assert 0.73 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.36
    assert 110 < flipped < 190


def test_shape_and_classes(numbered):
    for name in SOURCES:
        data_set = load(numbered, name, image_size=0)
        assert (data_set.input_shape, data_set.num_classes) == ((224, 224, 3), 2)
        assert (len(data_set.train), len(data_set.test)) == (47, 9)
    (numbered / "imagenet-tfrecords" / "labels.txt").rename(numbered / "hidden")
    try:
        assert load(numbered, "imagenet-tfrecords").num_classes == 1000
    finally:
        (numbered / "hidden").rename(numbered / "imagenet-tfrecords" / "labels.txt")


# What is broken, and how it is said.


def train_all(data_set: data.DataSet) -> None:
    """Batches of one epoch on one rank, and the error that the trainer would find then."""
    batches = data.training_batches(data_set.train, 4, 0, 1, 0, 1)
    assert [len(labels) for _, labels in batches] == [4, 4, 4]
    data_set.raise_unreadable()


def starts_in(path: Path) -> list[int]:
    return tfrecords.record_starts(path, tfrecords.Unreadable(skip=False)).tolist()


def break_folder(root: Path, how: str) -> str:
    path = root / "image-folder" / "train" / "flower" / "0004.jpg"
    content = path.read_bytes()
    path.write_bytes({"text": b"404 not found", "empty": b"", "cut": content[: len(content) // 3]}[how])
    return str(path)


def break_record(root: Path, how: str) -> str:
    path = root / "imagenet-tfrecords" / "train-00001-of-00002"
    content = bytearray(path.read_bytes())
    start = starts_in(path)[3]
    if how == "flipped":
        content[start + 300] ^= 1
        path.write_bytes(content)
    else:
        records = list(tf.data.TFRecordDataset([str(path)]).as_numpy_iterator())
        example = tf.train.Example.FromString(records[3])
        feature = example.features.feature
        if how == "label":
            feature["image/class/label"].int64_list.value[0] = 3
        elif how == "no picture":
            feature["image/encoded"].bytes_list.value[0] = b"404 not found"
        else:
            del feature["image/encoded"]
        records[3] = example.SerializeToString()
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    return f"{path}: record 3"


BROKEN = {
    "text in the folder": ("image-folder", break_folder, "text", "Unknown image file format"),
    "empty file in the folder": ("image-folder", break_folder, "empty", "Input is empty"),
    "JPEG cut short": ("image-folder", break_folder, "cut", "Invalid JPEG data"),
    "flipped bit": ("imagenet-tfrecords", break_record, "flipped", "corrupt: its checksum differs"),
    "label": ("imagenet-tfrecords", break_record, "label", "label 3, expected 1 to 2"),
    "no picture": ("imagenet-tfrecords", break_record, "no picture", "Unknown image file format"),
    "no feature": ("imagenet-tfrecords", break_record, "no feature", "image/encoded"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_named_or_skipped_and_counted(photographs, case, capfd):
    name, spoil, how, problem = BROKEN[case]
    where = spoil(photographs, how)
    with pytest.raises(DataError) as error:
        train_all(load(photographs, name, augment=False))
    message = str(error.value)
    assert message.startswith(f"{where}: ") and problem in message and "--data.on-error skip" in message
    assert "\n" not in message and "{{" not in message

    capfd.readouterr()
    data_set = load(photographs, name, augment=False, on_error="skip")
    for _ in range(2):  # counted once, however often it is met
        batches = data.training_batches(data_set.train, 4, 0, 1, 0, 1)
        images = [image.tobytes() for batch, _ in batches for image in batch.numpy()]
        assert len(images) == 12 and len(set(images)) == 11  # another of its batch has its place
        assert data_set.skipped == {where}
        assert batches.element_spec[0].shape == (4, 8, 8, 3)
    assert capfd.readouterr().err.count(f"ringtrain: skipped {where}: ") == 1


@pytest.mark.parametrize("name", SOURCES)
def test_a_broken_test_sample_is_left_out(photographs, name):
    if name == "image-folder":
        (photographs / name / "val" / "flower" / "0002.jpg").write_bytes(b"x")
    else:
        path = photographs / name / "validation-00000-of-00001"
        content = bytearray(path.read_bytes())
        content[starts_in(path)[2] + 300] ^= 1
        path.write_bytes(content)
    for batch_size in (1, 2, 4):
        data_set = load(photographs, name, on_error="skip")
        batches = list(data.evaluation_batches(data_set.test, range(4), batch_size))
        assert sum(len(labels) for _, labels in batches) == 3 and min(len(labels) for _, labels in batches) > 0
        assert len(data_set.test.skipped) == 1
        readable = [data_set.test.num_readable(numbers) for numbers in (range(4), range(2), range(2, 4))]
        assert readable in ([3, 2, 1], [3, 1, 2])
    data_set = load(photographs, name)
    data_set.raise_unreadable()
    list(data.evaluation_batches(data_set.test, range(4), 2))
    with pytest.raises(DataError):
        data_set.raise_unreadable()


def test_a_batch_of_which_nothing_can_be_read_ends_training_also_when_skipping(photographs):
    for path in (photographs / "image-folder" / "train").rglob("*.jpg"):
        path.write_bytes(b"x")
    with pytest.raises(DataError, match="no other sample of its batch can be read"):
        train_all(load(photographs, "image-folder", on_error="skip"))


def test_one_thread_is_enough_to_find_out(photographs, monkeypatch):
    """What is broken is read again from within the pipeline: that must not wait for itself."""
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 1)
    break_record(photographs, "flipped")
    with pytest.raises(DataError, match="record 3: corrupt"):
        train_all(load(photographs, "imagenet-tfrecords"))


def first_shard(root: Path) -> Path:
    return root / "imagenet-tfrecords" / "train-00000-of-00002"


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


BROKEN_FILES = {
    "cut within a record": (lambda path: cut(path, -5), "{path}: record 5: the file ends within it", 11),
    "cut within a length": (lambda path: cut(path, starts_in(path)[4] + 5), "{path}: record 4: the file ends", 10),
    "corrupt length": (lambda path: flip(path, starts_in(path)[2] + 1), "{path}: record 2: corrupt length", 8),
    "huge length": (lambda path: flip(path, starts_in(path)[2] + 6), "{path}: record 2: corrupt length", 8),
    "empty": (lambda path: path.write_bytes(b""), "{path}: contains no record", 6),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "{path}: cannot be read: Is a directory", 6),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_of_records_is_named_or_what_is_left_of_it_used(photographs, case):
    spoil, message, left = BROKEN_FILES[case]
    path = first_shard(photographs)
    spoil(path)
    with pytest.raises(DataError) as error:
        load(photographs, "imagenet-tfrecords")
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)
    data_set = load(photographs, "imagenet-tfrecords", on_error="skip")
    batches = data.training_batches(data_set.train, len(data_set.train), 0, 1, 0, 1)
    assert sum(len(labels) for _, labels in batches) == left
    assert len(data_set.skipped) == 1


def test_crc32c_of_the_rfc():
    assert tfrecords.crc32c(bytes(32)) == 0x8A9136AA
    assert tfrecords.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert tfrecords.crc32c(bytes(range(32))) == 0x46DD794E


MISSING = {
    "no folder": ("image-folder", "train", shutil.rmtree, "{path}: cannot be read: No such file or directory"),
    "no classes": ("image-folder", "train", lambda p: (shutil.rmtree(p), p.mkdir()), "{path}: contains no directories"),
    "empty class": (
        "image-folder",
        "train/flower",
        lambda p: (shutil.rmtree(p), p.mkdir()),
        "{path}: contains no image",
    ),
    "no test": ("image-folder", "val", shutil.rmtree, "{root}: contains neither val nor test"),
    "other classes": ("image-folder", "val/x", lambda p: p.mkdir(), "{root}/val: expected the same classes as in"),
    "no records": (
        "imagenet-tfrecords",
        "",
        lambda p: (shutil.rmtree(p), p.mkdir()),
        "{root}: contains no train-",
    ),
    "no record folder": ("imagenet-tfrecords", "", shutil.rmtree, "{root}: cannot be read: No such file"),
    "missing shard": ("imagenet-tfrecords", "train-00001-of-00002", Path.unlink, "{path}: is missing: expected train-"),
    "other shard": ("imagenet-tfrecords", "train-00001-of-00003", Path.touch, "{path}: is not one of 00002"),
    "no validation": (
        "imagenet-tfrecords",
        "validation-00000-of-00001",
        Path.unlink,
        "{root}: contains no validation-0",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_said(photographs, case):
    name, path, spoil, message = MISSING[case]
    spoil(photographs / name / path)
    with pytest.raises(DataError) as error:
        load(photographs, name)
    assert str(error.value).startswith(message.format(path=photographs / name / path, root=photographs / name))


@pytest.mark.parametrize("name", [*SOURCES, "npz", "cifar10"])
def test_a_source_that_needs_a_place_asks_for_it(name):
    with pytest.raises(DataError, match=rf"{name}: give its .* with --data.dir"):
        data.source(DataConfig(name=name))()


@pytest.fixture
def open_to_all(photographs):
    """The photographs where another user can look at them; that user, if this process may become anyone."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(shutil.copytree(photographs, Path(name) / "data"))
        root.chmod(0o755)
        yield root


@contextlib.contextmanager
def somebody():
    """A user who may not do everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("image-folder", "."),
        ("image-folder", "train"),
        ("image-folder", "val"),
        ("image-folder", "train/flower"),
        ("imagenet-tfrecords", "."),
        ("imagenet-tfrecords", "train-00001-of-00002"),
        ("imagenet-tfrecords", "labels.txt"),
        ("cifar10", "."),
        ("npz", "."),
    ],
)
def test_what_may_not_be_read_is_named(open_to_all, name, path):
    (open_to_all / name).mkdir(exist_ok=True)
    (open_to_all / name / path).chmod(0)
    with somebody(), pytest.raises(DataError) as error:
        load(open_to_all, name)
    (open_to_all / name / path).chmod(0o755)
    assert str(error.value).startswith(str(open_to_all / name / path)) and "Permission denied" in str(error.value)


def test_a_picture_that_may_not_be_read_is_named(open_to_all):
    path = open_to_all / "image-folder" / "train" / "temple" / "0003.jpg"
    path.chmod(0)
    with somebody(), pytest.raises(DataError) as error:
        train_all(load(open_to_all, "image-folder"))
    assert str(error.value).startswith(f"{path}: ") and "Permission denied" in str(error.value)


def test_lengths_are_walked_as_they_are_written(photographs):
    path = first_shard(photographs)
    lengths = [len(record) for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator()]
    content, expected = path.read_bytes(), 0
    for start, length in zip(starts_in(path), lengths, strict=True):
        assert start == expected and struct.unpack_from("<Q", content, start) == (length,)
        expected += 16 + length


def test_images_stay_where_they_are(photographs):
    """What a rank holds in memory is where the pictures are, not the pictures."""
    train = load(photographs, "image-folder").train
    assert not any(isinstance(value, np.ndarray | bytes) for value in dataclasses.asdict(train).values())


def seen_in_training(samples: Samples, epoch: int) -> dict[int, np.ndarray]:
    """Every sample as an epoch has it, by its label, which is its number here."""
    batches = list(data.training_batches(samples, 4, 0, 1, 7, epoch + 1, first_step=2 * epoch))
    return {
        int(label): image for images, labels in batches for image, label in zip(images.numpy(), labels, strict=True)
    }


def test_pictures_in_memory_are_shifted_and_flipped_within_their_padding():
    """Each is found again at one of 9 x 9 places, straight or mirrored; both kinds occur, and epochs differ."""
    pixels = np.random.default_rng(0).integers(1, 256, (8, 6, 6, 3)).astype(np.uint8)
    samples = Samples(pixels, np.arange(8), padding=4)
    epochs = [seen_in_training(samples, epoch) for epoch in range(2)]
    places = set()
    for seen in epochs:
        for number, image in seen.items():
            padded = np.pad(pixels[number] / np.float32(255), [(4, 4), (4, 4), (0, 0)])
            found = {
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (1, -1)
                if np.allclose(padded[top : top + 6, left : left + 6][:, ::flip], image, atol=1e-6)
            }
            assert found
            places |= found
    assert {flip for _, _, flip in places} == {1, -1}
    assert any(not np.array_equal(epochs[0][number], epochs[1][number]) for number in range(8))
    again = seen_in_training(samples, 1)
    assert all(np.array_equal(again[number], epochs[1][number]) for number in range(8))
    (images, _) = next(iter(data.evaluation_batches(samples, range(8), 8)))
    assert np.allclose(images, pixels / 255)


def test_a_shift_does_not_depend_on_the_ranks():
    samples = Samples(np.random.default_rng(0).random((8, 6, 6, 1), np.float32), np.arange(8), padding=4)
    alone = seen_in_training(samples, 0)
    for rank in range(2):
        for images, labels in data.training_batches(samples, 2, rank, 2, 7, 1):
            for image, label in zip(images.numpy(), labels.numpy(), strict=True):
                assert np.array_equal(image, alone[int(label)])
