"""N ranks with batch B are one rank with batch N * B, whatever the optimizer."""

from __future__ import annotations

import contextlib

import horovod.tensorflow.keras
import keras
import numpy as np
import small
import tensorflow as tf
from only import only, quick

import ringtrain.hvd as hvd
from ringtrain.errors import RingtrainError

TIGHT = 1e-6


@quick
def sgd_with_momentum_equals_big_batch(wrap=hvd.DistributedOptimizer):
    make = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    model = small.train(small.build(), wrap(make()), small.shares(5))
    _close(model, small.alone(small.build(), make(), small.global_batches(5)))


@quick
def without_the_wrapper_they_differ():
    assert "apart" in small.raised(AssertionError, lambda: sgd_with_momentum_equals_big_batch(wrap=small.plain))


def horovods_own_wrapper_trains_a_model_per_rank():
    """What README.md says of Horovod 0.28.1 under Keras 3."""
    model = small.train(
        small.build(), horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(4)
    )
    assert small.spread(model) > 1e-3


def backward_passes_are_summed_unless_averaged():
    summed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=4)
    averaged = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.4), backward_passes_per_step=4, average_aggregated_gradients=True
    )
    _close(*(small.train(small.build(), optimizer, small.shares(8)) for optimizer in (summed, averaged)))


def accumulation_reduces_once_per_update():
    for passes in (1, 4):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
        reduce, count = type(optimizer).reduce, tf.Variable(0)

        def counted(self, gradients, variables, reduce=reduce, count=count):
            count.assign_add(1)
            return reduce(self, gradients, variables)

        type(optimizer).reduce = counted
        small.train(small.build(), optimizer, small.shares(8))
        assert int(count) == 8 // passes


def sum_predivide_groups_and_fp16():
    sgd = lambda rate=0.1: keras.optimizers.SGD(rate, momentum=0.9)  # noqa: E731
    reference = small.alone(small.build(), sgd(), small.global_batches(4))
    _close(_trained(sgd(0.1 / hvd.size()), op=hvd.Sum), reference)
    _close(_trained(sgd(), gradient_predivide_factor=2.0), reference)
    _close(_trained(sgd(), num_groups=2), reference)
    _close(_trained(sgd(), groups=3), reference)
    model = small.build()
    listed = [model.trainable_variables[:2], model.trainable_variables[3:]]
    optimizer = hvd.DistributedOptimizer(sgd(), groups=listed)
    _close(small.train(model, optimizer, small.shares(4)), reference)
    compressed = _trained(sgd(), compression=hvd.Compression.fp16)
    assert TIGHT < small.distance(compressed, reference) < 1e-2
    assert small.spread(compressed) == 0


@only(np=2, launcher="mpi")
def adasum_follows_its_formula():
    """Maleki et al. 2020, section 3: (1 - ab/2|a|^2) a + (1 - ab/2|b|^2) b."""
    ours = np.array([[1.0, 2.0, 0.5], [0.5, -1.0, 3.0]])
    model = keras.Sequential(
        [keras.Input((3,), dtype="float64"), keras.layers.Dense(1, use_bias=False, dtype="float64")]
    )
    before = model.get_weights()[0]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    optimizer.apply_gradients([(tf.constant(ours[hvd.rank()].reshape(3, 1)), model.trainable_variables[0])])
    a, b = ours
    expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    assert np.allclose(before - model.get_weights()[0], expected.reshape(3, 1), atol=1e-6)
    assert hvd.check_averaging(optimizer) == "combined by Adasum"
    compressed = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum, compression=hvd.Compression.fp16)
    variable = keras.Variable(np.zeros(3))
    compressed.apply_gradients([(tf.constant(2e4 * ours[hvd.rank()], tf.float32), variable)])
    assert np.allclose(-variable.numpy(), 2e4 * expected, rtol=5e-3)
    assert hvd.check_averaging(compressed) == "combined by Adasum"


@only(launcher="gloo")
def adasum_over_gloo_is_refused():
    message = small.raised(ValueError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum))
    assert "mpirun" in message


def sparse_gradients_equal_big_batch():
    indices = np.random.default_rng(5).integers(0, 20, (4, hvd.size() * small.BATCH, 5))
    targets = np.random.default_rng(6).normal(size=(4, hvd.size() * small.BATCH, 2))
    own = slice(hvd.rank() * small.BATCH, (hvd.rank() + 1) * small.BATCH)
    whole, share = list(zip(indices, targets, strict=True)), list(zip(indices[:, own], targets[:, own], strict=True))
    for clip in ({}, {"global_clipnorm": 0.1}, {"gradient_accumulation_steps": 2}):
        reference = small.alone(_embedding(), keras.optimizers.Adam(0.01, **clip), whole)
        for options in ({}, *(({"num_groups": 2}, {"gradient_predivide_factor": 2.0}) if not clip else ())):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, **clip), **options)
            _close(small.train(_embedding(), optimizer, share), reference, 1e-5)
        # Keras squares the parts of a row one by one; here a row comes once.
        merged = _train_on_dense_gradients(_embedding(), keras.optimizers.Adam(0.01, **clip), whole)
        assert clip or small.distance(merged, reference) > 1e-3
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, **clip), sparse_as_dense=True)
        _close(small.train(_embedding(), optimizer, share), merged, 1e-5)


def sparse_gradients_leave_ranks_equal():
    """To the last bit, though rows have many parts, which several threads would add in any order."""
    random = np.random.default_rng(hvd.rank())
    batches = [(random.integers(0, 2000, (200, 100)), random.normal(size=(200, 2))) for _ in range(20)]
    kinds = keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.RMSprop, keras.optimizers.Adam
    for kind in kinds:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(2000, 16), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((100,), dtype="int32"), *layers])
        small.train(model, hvd.DistributedOptimizer(kind(0.1)), batches)
        assert small.spread(model) == 0, small.spread(model)
        assert hvd.check_in_sync(model)


def tapes_sum_sparse_gradients_in_one_order():
    """Beside dense ones, in and outside of a graph; Horovod's own leaves a part per rank and use of a row."""
    table, scale = keras.Variable(np.ones((6, 2))), keras.Variable(np.ones(2))
    rows = tf.constant([[3, 1, 3], [1, 5, 1]][hvd.rank() % 2])

    def gradients(wrap):
        with wrap(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table.value, rows) * scale)
        return tape.gradient(loss, [table.value, scale.value])

    for run in (gradients, tf.function(gradients, autograph=False)):
        for _ in range(2):
            sparse, dense = run(hvd.DistributedGradientTape)
            parts = [2.0, 3.0, 1.0] if hvd.size() == 2 else [4.0, 4.0, 1.0]
            assert sparse.indices.numpy().tolist() == [3, 1, 5]
            assert np.allclose(sparse.values, np.divide(parts, hvd.size())[:, None] * np.ones((1, 2)))
            assert np.allclose(dense, 3.0)
    theirs, _ = gradients(horovod.tensorflow.DistributedGradientTape)
    assert len(theirs.indices) == 3 * hvd.size()


def local_variables_stay_local():
    for scale, divisor in ((True, hvd.size()), (False, 1)):
        model = small.build()
        first, last = model.layers
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.Adam(0.1), local_layers=first, scale_local_gradients=scale
        )
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        sgd.register_local_var(first.kernel)
        before = first.kernel.numpy()
        ones = [tf.ones_like(v.value) * (hvd.rank() + 1) for v in (first.kernel, last.kernel)]
        sgd.apply_gradients(zip(ones, (first.kernel, last.kernel), strict=True))
        assert np.allclose(before - first.kernel.numpy(), (hvd.rank() + 1) / divisor)
        model = small.train(small.build(), "sgd", [])
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.Adam(0.1), local_layers=model.layers[0], scale_local_gradients=scale
        )
        small.train(model, optimizer, small.shares(2))
        kernels = hvd.allgather_object([layer.kernel.numpy() for layer in model.layers])
        assert not np.array_equal(kernels[0][0], kernels[1][0])
        assert np.array_equal(kernels[0][1], kernels[1][1])
        hvd.check_in_sync(model)


@only(np=3, launcher="mpi")
def process_sets_reduce_among_themselves():
    pair = hvd.add_process_set([0, 1])
    alone = hvd.add_process_set([2])
    try:
        own = pair if hvd.rank() < 2 else alone
        model = small.train(
            small.build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=own), small.shares(3)
        )
        kernels = hvd.allgather_object(model.get_weights()[0])
        assert np.array_equal(kernels[0], kernels[1])
        assert not np.array_equal(kernels[0], kernels[2])
        hvd.check_in_sync(model)
        # With the pair's set on all ranks, as in Horovod, the third trains by itself.
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=pair)
        model = small.train(small.build(), optimizer, small.shares(3))
        assert hvd.check_averaging(optimizer) == ("averaged" if hvd.rank() < 2 else "left to this rank")
        checksums = hvd.allgather_object((hvd.check_in_sync(model), model.get_weights()[0]))
        assert checksums[0][0] == checksums[1][0] != checksums[2][0]
        reference = small.train(small.build(), keras.optimizers.SGD(0.1), small.shares(3))
        assert np.array_equal(checksums[2][1], hvd.allgather_object(reference.get_weights()[0])[2])
    finally:
        hvd.remove_process_set(pair)
        hvd.remove_process_set(alone)


def ranks_may_name_their_layers_differently():
    """Horovod matches tensors by name: a rank that has built a model more must not wait for ever."""
    for _ in range(hvd.rank() + 1):
        keras.layers.Dense(1)
        keras.Sequential([keras.layers.Embedding(2, 2)])
        keras.optimizers.SGD()
    model = small.train(small.build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(2))
    hvd.broadcast_model(model)
    assert hvd.check_in_sync(model)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    sparse = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    batches = [(np.full((small.BATCH, 6), hvd.rank()), y) for _, y in small.shares(2)]
    small.train(sparse, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), batches)
    assert hvd.check_in_sync(sparse)


class _Taped(keras.Model):
    """A plain optimizer whose gradients Horovod's tape reduces."""

    def __init__(self):
        super().__init__()
        self.net = small.build()

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(self.net(x) - y))
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def steps_that_reduce_go_without_xla():
    """XLA has no kernel for the allreduce. Where a GPU is listed, Keras' compile would turn XLA on."""
    options = {"jit_compile": True}
    model = small.train(small.build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), small.shares(2), **options)
    assert model.jit_compile is False and small.spread(model) == 0
    assert small.train(small.build(), keras.optimizers.SGD(0.1), [], **options).jit_compile is True
    keras.utils.clear_session()  # Horovod's tape names tensors after layers: the same names on all ranks
    with _listed_gpu():
        model = _Taped()
        model.compile(keras.optimizers.SGD(0.1))
        for x, y in small.shares(2):
            model.train_on_batch(x, y)
        _close(model.net, small.alone(small.build(), keras.optimizers.SGD(0.1), small.global_batches(2)))
        model.compile(keras.optimizers.SGD(0.1), jit_compile=True)
        assert "jit_compile=False" in small.raised(RingtrainError, lambda: model.train_on_batch(*small.shares(1)[0]))


@contextlib.contextmanager
def _listed_gpu():
    listed = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda kind=None: [*listed(kind), *([gpu] if kind in (None, "GPU") else [])]
    try:
        yield
    finally:
        tf.config.list_physical_devices = listed


def wrong_use_is_refused():
    wrap, sgd = hvd.DistributedOptimizer, keras.optimizers.SGD
    assert "wrap it once" in small.raised(ValueError, lambda: wrap(wrap(sgd())))
    assert "Keras 3" in small.raised(TypeError, lambda: wrap(tf.compat.v1.train.GradientDescentOptimizer(0.1)))
    built = sgd()
    built.build(small.build().trainable_variables)
    assert "built already" in small.raised(ValueError, lambda: wrap(built, backward_passes_per_step=2))


def _embedding():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def _close(model, reference, tolerance=TIGHT):
    apart = small.distance(model, reference)
    assert apart < tolerance, f"{apart} apart from the reference"


def _trained(optimizer, **options):
    return small.train(small.build(), hvd.DistributedOptimizer(optimizer, **options), small.shares(4))


def _train_on_dense_gradients(model, optimizer, batches):
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - tf.cast(y, tf.float32)))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], model.trainable_variables)
    return model
