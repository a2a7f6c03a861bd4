"""Arrays with an integer class for each row, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import augment
from ringtrain.data.arrays import Arrays
from ringtrain.data.dataset import DataSet
from ringtrain.errors import DataError


def checked(name: str, train: tuple[Any, Any], test: tuple[Any, Any], num_classes: int = 0) -> DataSet:
    """Checks inputs [rows, ...] and labels [rows] or [rows, 1]; raises DataError if they are invalid."""
    splits = []
    largest = 0
    for split, (inputs, labels) in (("training", train), ("test", test)):
        inputs, labels = np.asarray(inputs), np.asarray(labels)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or labels.size == 0 or inputs.shape[:1] != labels.shape:
            one_hot = ""
            if labels.ndim > 1:
                one_hot = ": for one-hot labels use np.argmax(labels, axis=1), for others --model.loss"
            raise DataError(
                f"{name}: {split} data: got inputs of shape {inputs.shape} and labels of shape {labels.shape}, expected"
                f" one integer class per sample, shape {inputs.shape[:1]}, and at least one sample{one_hot}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
            raise DataError(
                f"{name}: {split} data: got labels of {labels.dtype} from {labels.min()}, expected classes 0, 1, ...,"
                f" or --model.loss for other targets"
            )
        if num_classes and labels.max() >= num_classes:
            raise DataError(
                f"{name}: {split} data: sample {labels.argmax()} has label {labels.max()}, expected 0 to"
                f" {num_classes - 1}"
            )
        check_numbers(f"{name}: {split} data", inputs)
        if inputs.ndim == 3:  # images without a channel get one
            inputs = inputs[..., np.newaxis]
        splits.append((inputs, labels.astype(np.int64)))
        largest = max(largest, int(labels.max()))
    shapes = [inputs.shape[1:] for inputs, _ in splits]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"{name}: a training sample has shape {shapes[0]}, a test sample {shapes[1]}: expected the same"
        )
    transform = None
    if splits[0][0].dtype == np.uint8:
        transform = augment.pixels
    rows = [Arrays(*split, shuffle=True, transform=transform) for split in splits]
    return DataSet(rows[0], rows[1], num_classes or largest + 1, shapes[0], of_classes=True)


def check_numbers(where: str, inputs: NDArray[Any]) -> None:
    """Raises DataError, which begins with `where`, unless samples are finite numbers."""
    if inputs.dtype.kind not in "buif":
        raise DataError(f"{where}: got inputs of {inputs.dtype}, expected numbers")
    if inputs.dtype.kind == "f":
        for number, sample in enumerate(inputs):  # one by one: no second array of the data's size
            if not np.isfinite(sample).all():
                raise DataError(
                    f"{where}: sample {number} contains {'NaN' if np.isnan(sample).any() else 'an infinite value'}"
                )
