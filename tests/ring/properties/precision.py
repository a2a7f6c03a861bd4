"""Precision, XLA, and additions in one order.

Under mixed_float16 one rank's overflow is everybody's, however LossScaleOptimizer and DistributedOptimizer are nested.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import keras
import numpy as np
import small
import tensorflow as tf
from only import only, quick

import ringtrain.hvd as hvd
from ringtrain.config import HvdConfig
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.hvd.keras_patches import teach_keras

OVERFLOWING_STEP = 3
NUM_STEPS = 6


def distributed_around_loss_scale():
    _overflow_is_everybodys(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(_sgd())))


def loss_scale_around_distributed():
    _overflow_is_everybodys(lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(_sgd())))


def the_one_that_compile_adds():
    _overflow_is_everybodys(lambda: hvd.DistributedOptimizer(_sgd()))


def with_accumulation_and_fp16_compression():
    def make():
        sgd = hvd.DistributedOptimizer(
            _sgd(), backward_passes_per_step=2, average_aggregated_gradients=True, compression=hvd.Compression.fp16
        )
        return keras.optimizers.LossScaleOptimizer(sgd)

    _overflow_is_everybodys(make, updates=(NUM_STEPS - 1) // 2)


@quick
def only_one_rank_overflows():
    """The negative control of this file: decided rank by rank, as Keras does it, the ranks would part."""
    teach_keras()
    decided_alone = keras.optimizers.LossScaleOptimizer.check_finite.before_ringtrain
    gradients = [tf.constant([np.inf if hvd.rank() == 1 else 1.0])]
    decisions = hvd.allgather_object(bool(decided_alone(keras.optimizers.LossScaleOptimizer(_sgd()), gradients)))
    assert decisions == [rank != 1 for rank in range(hvd.size())]


def a_plain_loss_scale_optimizer_stays_keras_own():
    optimizer = keras.optimizers.LossScaleOptimizer(_sgd())
    assert bool(optimizer.check_finite([tf.constant([1.0])]))
    assert not bool(optimizer.check_finite([tf.constant([np.inf])]))


def sixteen_bits_do_not_overflow_in_the_sum():
    """The mean of the ranks' gradients is in the range of float16, their sum is not."""
    alone = hvd.allreduce(tf.constant([4e4]), compression=hvd.Compression.fp16, op=hvd.Sum).numpy()
    assert np.isinf(alone), "Horovod's own sum: if it does not overflow, this shows nothing"
    for dtype, compression in (("float32", hvd.Compression.fp16), ("float16", hvd.Compression.none)):
        for options in ({}, {"deterministic": True}, {"groups": 1}, {"gradient_predivide_factor": hvd.size() * 1.5}):
            sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), compression=compression, **options)
            variables = [keras.Variable([0.0], dtype=dtype) for _ in range(2)]
            sgd.apply([tf.constant([4e4], dtype)] * 2, variables)
            assert np.allclose([variable.numpy() for variable in variables], -40.0, rtol=2e-3), (dtype, options)
    total = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), compression=hvd.Compression.fp16, op=hvd.Sum)
    variable = keras.Variable([0.0])
    total.apply([tf.constant([4e4])], [variable])
    assert np.allclose(variable.numpy(), -40.0 * hvd.size(), rtol=2e-3)


def an_overflow_of_the_compressed_sum_halves_the_loss_scale():
    """The scaled gradients are reduced, then asked whether they are finite; what float16 cannot hold is not applied."""
    for nested in (
        lambda sgd, wrap: wrap(keras.optimizers.LossScaleOptimizer(sgd)),
        lambda sgd, wrap: keras.optimizers.LossScaleOptimizer(wrap(sgd)),
    ):
        optimizer = nested(_sgd(), lambda one: hvd.DistributedOptimizer(one, compression=hvd.Compression.fp16))
        variable = keras.Variable([1.0])
        for gradient in (1e6 * hvd.size() * (hvd.rank() == 1), 32.0):  # the first is finite, on every rank
            optimizer.apply_gradients([(tf.constant([gradient]), variable)])
        assert float(optimizer.dynamic_scale) == 2.0**14
        assert int(optimizer.iterations) == 1
        assert np.allclose(variable.numpy(), 1 - 0.01 * 32 / 2.0**14, rtol=1e-6)


def under_a_loss_scale_gradients_travel_while_others_are_computed(accumulation=None):
    """No allreduce is in the branch that waits until all gradients are checked, and none is made for the check."""
    model = small.build(dtype="float32")
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    model.compile(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd)), "mse")
    x, y = (tf.constant(part, tf.float32) for part in small.shares(1)[0])
    model.train_on_batch(x, y)
    graph = tf.function(lambda x, y: model.train_step((x, y))).get_concrete_function(x, y).graph.as_graph_def()
    library = {function.signature.name: function.node_def for function in graph.library.function}
    branches = {
        node.attr[branch].func.name
        for nodes in (graph.node, *library.values())
        for node in nodes
        for branch in ("then_branch", "else_branch")
        if branch in node.attr
    }
    reduced = {name: sum(node.op == "HorovodAllreduce" for node in nodes) for name, nodes in library.items()}
    late = sum(reduced[name] for name in branches)
    early = sum(node.op == "HorovodAllreduce" for node in graph.node) + sum(reduced.values()) - late
    weights = len(model.trainable_variables)
    assert (early, late) == ((weights, 0) if accumulation is None else (1, weights)), (early, late)


def accumulated_gradients_are_reduced_in_the_branch():
    """The negative control of the one before."""
    under_a_loss_scale_gradients_travel_while_others_are_computed(accumulation=2)


def local_gradients_that_overflow_skip_the_step_on_all():
    """They are not reduced, so they are finite on some ranks alone."""
    optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(_sgd()))
    local, shared = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer.inner_optimizer.register_local_var(local)
    own = np.inf if hvd.rank() == 1 else 1.0
    optimizer.apply_gradients([(tf.constant([own]), local), (tf.constant([1.0]), shared)])
    assert float(optimizer.dynamic_scale) == 2.0**14 and int(optimizer.iterations) == 0
    assert shared.numpy() == local.numpy() == 1.0


def parts_of_a_multi_optimizer_reduce_once_under_a_loss_scale():
    def make(wrap):
        parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(0.01)})
        return keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.MultiOptimizer(parts)), initial_scale=8.0)

    summing = lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum)  # noqa: E731
    model = small.train(small.build(), make(hvd.DistributedOptimizer), small.shares(4))
    assert small.distance(model, small.alone(small.build(), make(small.plain), small.global_batches(4))) < 1e-6
    assert small.distance(model, small.train(small.build(), make(summing), small.shares(4))) > 1e-3


def loss_scale_equals_big_batch_without_overflow():
    def make(wrap):
        return keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), initial_scale=8.0)

    model = small.train(small.build(), make(hvd.DistributedOptimizer), small.shares(4))
    reference = small.alone(small.build(), make(small.plain), small.global_batches(4))
    assert small.distance(model, reference) < 1e-6


def a_check_finite_of_ones_own_is_refused():
    class Own(keras.optimizers.LossScaleOptimizer):
        def check_finite(self, grads):
            return tf.constant(True)

    message = small.raised(ValueError, lambda: hvd.DistributedOptimizer(Own(_sgd())))
    assert "LossScaleOptimizer(hvd.DistributedOptimizer" in message


def mixed_bfloat16_trains_in_step():
    model, batches = _convolutional("mixed_bfloat16"), _pictures()
    x, y = batches[0]
    before = float(np.square(model(x, training=True) - y).mean())
    small.train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), batches * 5)
    assert model.layers[0].compute_dtype == "bfloat16" and model.layers[0].kernel.dtype == "float32"
    assert float(np.square(model(x, training=True) - y).mean()) < before
    hvd.check_in_sync(model)


@only(np=2, launcher="mpi")
def jit_equals_no_jit():
    """In float32 to 1e-4 after six steps: XLA adds up in another order. Loss scale and sparse gradients included."""
    # XLA keeps intermediate results in more than 16 bits: near the largest float16, one may overflow without the other.
    scaled = lambda sgd: keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)  # noqa: E731
    for precision, wrap, tolerance in (("float32", small.plain, 1e-4), ("mixed_float16", scaled, 2e-2)):
        models = [_convolutional(precision) for _ in range(2)]
        hvd.jit_gradients(models[0])
        losses = [[], []]
        for model, seen in zip(models, losses, strict=True):
            model.compile(hvd.DistributedOptimizer(wrap(_sgd())), "mse", metrics=["mae"], jit_compile=False)
            for x, y in _pictures():
                seen.append(model.train_on_batch(x, y))
            hvd.check_in_sync(model)
        assert np.allclose(*losses, rtol=tolerance, atol=tolerance), losses
        assert small.distance(*models) < tolerance
        assert small.distance(models[0], _convolutional(precision)) > 0
    embeddings = [_embedding() for _ in range(2)]
    hvd.jit_gradients(embeddings[0])
    words = np.random.default_rng(hvd.rank()).integers(0, 20, (4, small.BATCH, 5))
    for model in embeddings:
        small.train(model, hvd.DistributedOptimizer(_sgd()), [(x, np.ones((small.BATCH, 2))) for x in words])
    assert small.distance(*embeddings) < 1e-5


@only(launcher="mpi")
def jit_equals_big_batch_under_fit():
    x, y = (np.concatenate(part) for part in zip(*small.shares(6), strict=True))
    reference = small.alone(small.build(), _sgd(), small.global_batches(6))
    model = small.build()
    model.compile(hvd.DistributedOptimizer(_sgd()), "mse", jit_compile=False)
    hvd.jit_gradients(model)
    model.fit(x, y, batch_size=small.BATCH, shuffle=False, verbose=0)
    assert small.distance(model, reference) < 1e-6


def with_jit_the_gradients_are_compiled_and_the_allreduce_is_not():
    model = small.build()
    model.compile(hvd.DistributedOptimizer(_sgd()), "mse", jit_compile=False)
    hvd.jit_gradients(model)
    x, y = small.shares(1)[0]
    model.train_on_batch(x, y)  # builds metrics and slots
    graph = tf.function(lambda x, y: model.train_step((x, y))).get_concrete_function(tf.constant(x), tf.constant(y))
    library = {function.signature.name: function for function in graph.graph.as_graph_def().library.function}
    compiled = {name: function for name, function in library.items() if function.attr["_XlaMustCompile"].b}
    assert len(compiled) == 1
    inside = {node.op for function in compiled.values() for node in function.node_def}
    everywhere = {node.op for function in library.values() for node in function.node_def}
    everywhere |= {operation.type for operation in graph.graph.get_operations()}
    assert "MatMul" in inside and "HorovodAllreduce" not in inside
    assert "HorovodAllreduce" in everywhere


def jit_is_refused_where_keras_refuses_it():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(name="norm")])
    hvd.jit_gradients(model)
    hvd.synchronize_batch_norm(model)
    assert "layer norm (BatchNorm" in small.raised(RingtrainError, lambda: hvd.jit_gradients(model))
    assert "Own has a train_step" in small.raised(RingtrainError, lambda: hvd.jit_gradients(Own()))


@quick
def deterministic_equals_big_batch(deterministic=True):
    """All gradients of a dtype travel as one vector; counted in rank 0's Horovod timeline."""
    with TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.json"
        model = small.build()
        model.compile(hvd.DistributedOptimizer(_sgd(), deterministic=deterministic), "mse")
        hvd.start_timeline(str(timeline))
        for x, y in small.shares(5):
            model.train_on_batch(x, y)
        hvd.stop_timeline()
        names = (
            set(re.findall(r"HorovodAllreduce_DistributedSGD_\d", timeline.read_text())) if hvd.rank() == 0 else set()
        )
    assert len(names) == ((1 if deterministic else 4) if hvd.rank() == 0 else 0), names
    assert small.distance(model, small.alone(small.build(), _sgd(), small.global_batches(5))) < 1e-6


def not_deterministic_equals_big_batch_too():
    deterministic_equals_big_batch(deterministic=False)


def deterministic_knows_several_dtypes_and_compression():
    variables = [keras.Variable(np.zeros((2, 3)), dtype=dtype) for dtype in ("float32", "float64", "float32")]
    gradients = [tf.cast(tf.fill((2, 3), index + hvd.rank()), v.dtype) for index, v in enumerate(variables)]
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), deterministic=True, compression=compression)
        for variable in variables:
            variable.assign(np.zeros((2, 3)))
        sgd.apply(gradients, variables)
        for index, variable in enumerate(variables):
            assert np.allclose(variable.numpy(), -(index + (hvd.size() - 1) / 2))


def deterministic_and_groups_exclude_each_other():
    wrap = hvd.DistributedOptimizer
    assert "leave groups" in small.raised(ValueError, lambda: wrap(_sgd(), deterministic=True, groups=2))


def configure_sets_what_horovod_reads():
    environ = {"HOROVOD_CYCLE_TIME": "7"}
    configure = lambda **options: hvd.configure(HvdConfig(**options), environ)  # noqa: E731
    configure()
    assert environ == {"HOROVOD_CYCLE_TIME": "7"}
    configure(fusion_mb=1.5, cycle_time_ms=0.5)
    assert environ == {"HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_FUSION_THRESHOLD": str(3 * 2**19)}
    configure(deterministic=True)
    assert environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    environ["HOROVOD_AUTOTUNE"] = "1"
    assert "unset it" in small.raised(ConfigError, lambda: configure(deterministic=True))


def _convolutional(precision):
    keras.utils.set_random_seed(7)
    options = {"dtype": precision}
    layers = [
        keras.layers.Conv2D(4, 3, **options),
        keras.layers.BatchNormalization(**options),
        keras.layers.MaxPooling2D(2, **options),
        keras.layers.Flatten(**options),
        keras.layers.Dense(2, dtype="float32"),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def _pictures():
    random = np.random.default_rng(hvd.rank())
    pictures = random.normal(size=(6, small.BATCH, 8, 8, 1)).astype(np.float32)
    return [(x, x.mean(axis=(1, 2)) * np.ones((1, 2), np.float32)) for x in pictures]


def _embedding():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def _overflow_is_everybodys(make, updates=NUM_STEPS - 1):
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, dtype=policy), keras.layers.Dense(3, dtype=policy)]
    )
    # compile looks at the model's own policy
    model.dtype_policy = policy
    model.compile(make(), "mse")
    hvd.broadcast_model(model)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    for step, (x, y) in enumerate(small.shares(NUM_STEPS)):
        if step == OVERFLOWING_STEP and hvd.rank() == 1:
            x = np.full_like(x, 6e4)
        model.train_on_batch(x, y)
    scale = float(model.optimizer.dynamic_scale)
    assert scale == 2.0**14, f"the loss scale is {scale}, expected one halving of 2 ** 15"
    assert int(model.optimizer.iterations) == updates
    assert small.spread(model) == 0
    hvd.check_in_sync(model)


def _sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)
