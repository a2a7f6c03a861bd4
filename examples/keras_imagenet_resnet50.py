# ResNet-50 on ImageNet, after Goyal et al. 2017 (arXiv 1706.02677): a Horovod script of 2019 with warm-up, a learning
# rate schedule, gradient accumulation, checkpoints by process 0, and resume, on Keras 3.
#
# Because of Horovod only one line changed, its import. It was:
#
#     import horovod.tensorflow.keras as hvd
#
# Keras 3 and TensorFlow 2 need other changes, with or without Horovod: tf.config instead of a session's ConfigProto,
# learning_rate= instead of lr=, .keras checkpoints instead of .h5, image_dataset_from_directory and fit instead of
# ImageDataGenerator and fit_generator, which were removed.
#
# Run it on two hosts with four GPUs each. If restarted, it resumes from the newest checkpoint of process 0:
#
#     horovodrun -np 8 -H host1:4,host2:4 python examples/keras_imagenet_resnet50.py \
#         --train-dir /data/imagenet/train --val-dir /data/imagenet/validation

import argparse
import os

import keras
import tensorflow as tf

import ringtrain.hvd as hvd

parser = argparse.ArgumentParser(
    description="Keras ImageNet example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--train-dir", required=True, help="training images, one folder per class")
parser.add_argument("--val-dir", required=True, help="validation images, one folder per class")
parser.add_argument("--log-dir", default="./logs", help="TensorBoard's folder")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.keras", help="file name of a checkpoint")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit floats")
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches averaged before each exchange")
parser.add_argument("--model", default="ResNet50", help="name of a network in keras.applications")
parser.add_argument("--image-size", type=int, default=224)
# The defaults below are those of the paper, section 5.1, for 90 epochs of ImageNet.
parser.add_argument("--batch-size", type=int, default=32, help="images per process and batch")
parser.add_argument("--val-batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate for one process and one batch")
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.0001, help="weight decay: factor of the L2 norm of convolutions")
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

# Start Horovod.
hvd.init()

# Pin one GPU per process, by its local rank.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# The same seed on all processes, which gives the same file order, so that shards do not overlap.
tf.random.set_seed(args.seed)

# Process 0 finds the newest checkpoint and broadcasts its epoch: the others need no access to its disk.
resume_from_epoch = 0
if hvd.rank() == 0:
    epochs = range(1, args.epochs + 1)
    existing = [epoch for epoch in epochs if os.path.exists(args.checkpoint_format.format(epoch=epoch))]
    resume_from_epoch = max(existing, default=0)
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))

# Only process 0 prints.
verbose = 1 if hvd.rank() == 0 else 0


def images(folder, shuffle):
    """Returns this process' shard of a directory as a dataset of images, and the number of all images and classes."""
    dataset = keras.utils.image_dataset_from_directory(
        folder,
        batch_size=None,
        image_size=(args.image_size, args.image_size),
        crop_to_aspect_ratio=True,
        shuffle=shuffle,
        seed=args.seed,
        verbose=bool(verbose),
    )
    return dataset.shard(hvd.size(), hvd.rank()), len(dataset.file_paths), len(dataset.class_names)


def scale(image, label):
    return image / 127.5 - 1, label


def augment(image, label):
    return tf.image.random_flip_left_right(image), label


train, num_images, num_classes = images(args.train_dir, shuffle=True)
val, _, _ = images(args.val_dir, shuffle=False)
# The same number of steps on every process: a process with more steps would wait forever for the others.
steps_per_epoch = num_images // (args.batch_size * hvd.size())
train = train.map(scale).map(augment).batch(args.batch_size).take(steps_per_epoch).prefetch(2)
val = val.map(scale).batch(args.val_batch_size).prefetch(2)

# The global batch consists of size() * batches_per_allreduce batches: scale the learning rate with it.
initial_lr = args.base_lr * hvd.size() * args.batches_per_allreduce
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


def regularized(layer):
    """Returns a copy of a layer, with weight decay if it is a convolution."""
    copy = type(layer).from_config(layer.get_config())
    if isinstance(copy, keras.layers.Conv2D):
        copy.kernel_regularizer = keras.regularizers.L2(args.wd)
    return copy


if resume_from_epoch > 0 and hvd.rank() == 0:
    # Restores weights, optimizer and momentum; hvd.load_model wraps the optimizer in DistributedOptimizer again.
    checkpoint = args.checkpoint_format.format(epoch=resume_from_epoch)
    print(f"Resuming after epoch {resume_from_epoch} from {checkpoint}")
    model = hvd.load_model(checkpoint, compression=compression)
else:
    network = getattr(keras.applications, args.model)
    model = network(weights=None, classes=num_classes, input_shape=(args.image_size, args.image_size, 3))
    model = keras.models.clone_model(model, clone_function=regularized)
    optimizer = keras.optimizers.SGD(learning_rate=initial_lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        average_aggregated_gradients=True,
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=optimizer,
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=5, name="top5")],
    )

callbacks = [
    # Broadcast the weights of process 0, random or from its checkpoint, to all processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Average the metrics of an epoch over all processes. Must precede callbacks that read them.
    hvd.callbacks.MetricAverageCallback(),
    # Large learning rates diverge at the start of training: warm up from initial_lr / size().
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr, warmup_epochs=args.warmup_epochs, steps_per_epoch=steps_per_epoch, verbose=verbose
    ),
    # Then initial_lr until epoch 30, a tenth of it until 60, a hundredth until 80, a thousandth to the end. These are
    # functions because Horovod interprets a plain number c as the decay c ** (epoch - start_epoch).
    hvd.callbacks.LearningRateScheduleCallback(initial_lr, lambda epoch: 1.0, args.warmup_epochs, end_epoch=30),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr, lambda epoch: 1e-1, start_epoch=30, end_epoch=60),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr, lambda epoch: 1e-2, start_epoch=60, end_epoch=80),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr, lambda epoch: 1e-3, start_epoch=80),
]

# Only process 0 writes, so that processes do not overwrite each other's files.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
    callbacks.append(keras.callbacks.TensorBoard(args.log_dir))

model.fit(
    train,
    epochs=args.epochs,
    initial_epoch=resume_from_epoch,
    validation_data=val,
    callbacks=callbacks,
    verbose=verbose,
)
