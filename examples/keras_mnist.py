# Handwritten digits with a small CNN: a Horovod script of 2019 with Keras callbacks, on Keras 3.
#
# Because of Horovod only one line changed, its import. It was:
#
#     import horovod.keras as hvd
#
# Keras 3 and TensorFlow 2 need other changes, with or without Horovod: tf.config instead of a session's
# ConfigProto, learning_rate= instead of lr=, .keras checkpoints instead of .h5.
#
# Run it with two processes on this machine (writes checkpoints to the current directory):
#
#     horovodrun -np 2 -H localhost:2 python examples/keras_mnist.py
#     horovodrun -np 2 -H localhost:2 python examples/keras_mnist.py --data-dir /usr/share/datasets/fashion-mnist

import argparse
import gzip
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ringtrain.hvd as hvd

parser = argparse.ArgumentParser(description="Keras MNIST example")
parser.add_argument("--data-dir", help="folder with mnist.npz or the gzipped IDX files; default: scikit-learn's digits")
parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.001, help="learning rate of a single process")
args = parser.parse_args()


def load_data():
    """Returns the training and the test set: images of 28x28 pixels from 0 to 255, labels from 0 to 9."""
    if args.data_dir is None:
        # Not MNIST, but real handwriting: 8x8 pixels of 17 gray levels, enlarged three times, with MNIST's margin.
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) * (255 / 16)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        return (images[360:], labels[360:]), (images[:360], labels[:360])
    archive = os.path.join(args.data_dir, "mnist.npz")
    if os.path.exists(archive):
        with np.load(archive) as arrays:
            return (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])

    def read(name, header):
        with gzip.open(os.path.join(args.data_dir, name)) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    def split(name):
        labels = read(name + "-labels-idx1-ubyte.gz", 8)
        return read(name + "-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28), labels

    return split("train"), split("t10k")


# Start Horovod.
hvd.init()

# Pin one GPU per process, by its local rank.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

(x_train, y_train), (x_test, y_test) = load_data()
x_train = x_train[..., np.newaxis].astype("float32") / 255
x_test = x_test[..., np.newaxis].astype("float32") / 255

# Each process trains on its own shard. Shards have equal length, so that all processes run the same number of steps.
share = len(x_train) // hvd.size()
x_train = x_train[hvd.rank() :: hvd.size()][:share]
y_train = y_train[hvd.rank() :: hvd.size()][:share]

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.25),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)

# N processes multiply the global batch by N: scale the learning rate with it.
scaled_lr = args.base_lr * hvd.size()
optimizer = keras.optimizers.Adam(learning_rate=scaled_lr)

# Average gradients over all processes.
optimizer = hvd.DistributedOptimizer(optimizer)

model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    # Broadcast the random initial weights of process 0 to all processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Average the metrics of an epoch over all processes. Must precede callbacks that read them.
    hvd.callbacks.MetricAverageCallback(),
    # Large learning rates diverge at the start of training: warm up from base_lr.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=1),
]

# Only process 0 saves checkpoints, so that processes do not overwrite each other's files.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=1 if hvd.rank() == 0 else 0,
)

test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"Test loss: {test_loss:.4f}")
    print(f"Test accuracy: {test_accuracy:.4f}")
