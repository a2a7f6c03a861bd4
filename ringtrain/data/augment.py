"""Decoding and augmentation of images, as in Goyal et al. 2017 (arXiv 1706.02677), section 5.1.

Training: a crop of 8 to 100 % of the area with an aspect ratio from 3:4 to 4:3 (Szegedy et al. 2014, arXiv 1409.4842),
resized, and flipped half of the time. Evaluation: the center of the image. Both: normalized colors. Of a JPEG, only the
crop is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width to height
NUM_ATTEMPTS = 10
CENTRE = 224 / 256  # of the shorter side, as if that were resized to 256 and 224 cut out
# Mean and standard deviation of ImageNet's colors, 0 to 1: https://github.com/facebookarchive/fb.resnet.torch
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)

Transform = Callable[[Any, Any, Any], Any]
"""Called with a batch, the numbers of its rows, int64 [rows], and what random numbers follow from, int64 [2]: seed and
epoch; None in evaluation. Each row is changed by itself."""


def pixels(images: tf.Tensor, labels: tf.Tensor) -> Any:
    """Converts images, uint8 from 0 to 255, to floats from 0 to 1."""
    return tf.cast(images, keras.config.floatx()) * (1 / 255), labels


def pictures(
    batch: Any,
    numbers: tf.Tensor,
    draw: tf.Tensor | None,
    num_rows: int,  # of the training data
    size: int,  # height and width of the results in pixels
    num_classes: int,
    first_label: int,  # number of the first class in the files
    is_random: bool,  # whether training images are cropped and flipped
) -> Any:
    """Decodes images, a string each, and counts classes from 0. Raises InvalidArgumentError, as `picture` does."""
    encoded, labels = batch
    last_label = first_label + num_classes - 1
    in_range = tf.reduce_all((labels >= first_label) & (labels <= last_label))
    problem = tf.strings.format(f"label {{}}, expected {first_label} to {last_label}", labels[0])
    tf.raw_ops.Assert(condition=in_range, data=[problem])  # tf.debugging.Assert has another text outside of a graph

    def decoded(one: Any) -> tf.Tensor:
        image, number = one
        seed = None
        if is_random and draw is not None:
            seed = tf.stack([draw[0], draw[1] * num_rows + number])
        return picture(image, size, seed)

    return tf.map_fn(decoded, (encoded, numbers), fn_output_signature=tf.float32), labels - first_label


def picture(encoded: tf.Tensor, size: int, seed: tf.Tensor | None) -> tf.Tensor:
    """Decodes a JPEG, PNG, BMP or GIF to float32 [size, size, 3]; seed: int64 [2], of crop and flip; None: center."""
    is_jpeg = tf.io.is_jpeg(encoded)
    decoded = tf.cond(
        is_jpeg,
        lambda: tf.zeros([0, 0, 3], tf.uint8),
        lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False),
    )
    shape = tf.cond(is_jpeg, lambda: tf.io.extract_jpeg_shape(encoded), lambda: tf.shape(decoded))
    window = _centre(shape) if seed is None else _random_window(shape, seed)
    top, left, height, width = tf.unstack(window)
    crop = tf.cond(
        is_jpeg,
        lambda: tf.image.decode_and_crop_jpeg(encoded, window, channels=3),
        lambda: tf.slice(decoded, [top, left, 0], [height, width, 3]),
    )
    image = tf.image.resize(tf.ensure_shape(crop, [None, None, 3]), [size, size])
    if seed is not None:
        image = tf.image.stateless_random_flip_left_right(image, tf.random.split(seed)[1])
    # By rows, not by colors: with an innermost dimension of 3, TensorFlow is four times slower, for equal results.
    rows = tf.reshape(image, [size, 3 * size])
    rows = (rows / 255 - tf.tile(tf.constant(MEAN), [size])) / tf.tile(tf.constant(DEVIATION), [size])
    return tf.reshape(rows, [size, size, 3])


def _centre(shape: tf.Tensor) -> tf.Tensor:
    side = tf.cast(tf.math.ceil(CENTRE * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32)), tf.int32)
    return tf.stack([(shape[0] - side) // 2, (shape[1] - side) // 2, side, side])


def _random_window(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns the first of ten random windows that fits into the image, or the center crop if none does."""
    draws = tf.random.stateless_uniform([NUM_ATTEMPTS, 4], tf.random.split(seed)[0])
    size = tf.cast(shape[:2], tf.float32)
    area = (AREA[0] + draws[:, 0] * (AREA[1] - AREA[0])) * size[0] * size[1]
    aspect = tf.exp(math.log(ASPECT[0]) + draws[:, 1] * math.log(ASPECT[1] / ASPECT[0]))
    sides = tf.maximum(tf.round(tf.sqrt(tf.stack([area / aspect, area * aspect], axis=1))), 1)
    begins = tf.floor(draws[:, 2:] * (size - sides + 1))
    fits = tf.reduce_all(sides <= size, axis=1)
    windows = tf.cast(tf.concat([begins, sides], axis=1), tf.int32)
    return tf.cond(tf.reduce_any(fits), lambda: windows[tf.argmax(tf.cast(fits, tf.int32))], lambda: _centre(shape))
