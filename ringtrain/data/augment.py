"""From an encoded picture to what a network trains on, as in Goyal et al. 2017 (arXiv 1706.02677), section 5.1.

Training: a crop of 8 to 100 % of the area, 3:4 to 4:3 in shape (Szegedy et al. 2014, arXiv 1409.4842), resized, and
flipped half of the time. Evaluation: the centre of the picture. Both: colours normalised. Of a JPEG, only the crop is
decoded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width to height
NUM_ATTEMPTS = 10
CENTRE = 224 / 256  # of the shorter side: resizing that to 256 and cutting out 224 takes the same part
# Mean and standard deviation of ImageNet's colours, 0 to 1: https://github.com/facebookarchive/fb.resnet.torch
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


def picture(encoded: tf.Tensor, size: int, seed: tf.Tensor | None) -> tf.Tensor:
    """Decodes one picture.

    Args:
        encoded: JPEG, PNG, BMP or GIF, a string [].
        size: height and width of the result, pixels.
        seed: int64 [2], which crop and flip; None: the centre.

    Returns:
        float32 [size, size, 3], around 0.

    Raises:
        tf.errors.InvalidArgumentError: the bytes are no picture.
    """
    import tensorflow as tf

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
    # By rows, not by colours: over an innermost dimension of 3 TensorFlow is four times slower, for the same numbers.
    rows = tf.reshape(image, [size, 3 * size])
    rows = (rows / 255 - tf.tile(tf.constant(MEAN), [size])) / tf.tile(tf.constant(DEVIATION), [size])
    return tf.reshape(rows, [size, size, 3])


def shifted(images: tf.Tensor, numbers: tf.Tensor, num_samples: int, padding: int, seed: tf.Tensor) -> tf.Tensor:
    """Shifts pictures by up to some pixels, zeros coming in, and flips half of them, as He et al. 2015 do for CIFAR.

    Source: arXiv 1512.03385, section 4.2.

    Args:
        images: [batch, height, width, channels].
        numbers: int64 [batch], of the samples; together with the seed they decide, whatever batch a sample is in.
        seed: int64 [2].

    Returns:
        Shape and type of images.
    """
    import tensorflow as tf

    height, width = images.shape[1:3]
    draws = tf.gather(tf.random.stateless_uniform([num_samples, 3], seed), numbers)
    top, left = (tf.cast(draws[:, axis] * (2 * padding + 1), tf.int32) for axis in (0, 1))
    columns = tf.where(draws[:, 2:] < 0.5, tf.range(width), tf.range(width - 1, -1, -1)) + left[:, tf.newaxis]
    rows = tf.range(height) + top[:, tf.newaxis]
    padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
    return tf.gather(tf.gather(padded, rows, batch_dims=1), columns, axis=2, batch_dims=1)


def _centre(shape: tf.Tensor) -> tf.Tensor:
    import tensorflow as tf

    side = tf.cast(tf.math.ceil(CENTRE * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32)), tf.int32)
    return tf.stack([(shape[0] - side) // 2, (shape[1] - side) // 2, side, side])


def _random_window(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """The first of ten random windows that lies inside of the picture; the centre, if none does."""
    import tensorflow as tf

    draws = tf.random.stateless_uniform([NUM_ATTEMPTS, 4], tf.random.split(seed)[0])
    size = tf.cast(shape[:2], tf.float32)
    area = (AREA[0] + draws[:, 0] * (AREA[1] - AREA[0])) * size[0] * size[1]
    aspect = tf.exp(math.log(ASPECT[0]) + draws[:, 1] * math.log(ASPECT[1] / ASPECT[0]))
    sides = tf.maximum(tf.round(tf.sqrt(tf.stack([area / aspect, area * aspect], axis=1))), 1)
    begins = tf.floor(draws[:, 2:] * (size - sides + 1))
    fits = tf.reduce_all(sides <= size, axis=1)
    windows = tf.cast(tf.concat([begins, sides], axis=1), tf.int32)
    return tf.cond(tf.reduce_any(fits), lambda: windows[tf.argmax(tf.cast(fits, tf.int32))], lambda: _centre(shape))
