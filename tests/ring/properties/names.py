"""Horovod's names, and what is passed on."""

from __future__ import annotations

import inspect
import types

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import numpy as np
import small
import tensorflow as tf

import ringtrain.hvd as hvd

# An import of Horovod's own that shows in its module.
NOT_API = {"is_version_greater_equal_than"}


def every_public_name_is_here_with_its_parameters():
    pairs = [(module, hvd) for module in (horovod.tensorflow.keras, horovod.keras)]
    pairs += [(horovod.tensorflow.keras.callbacks, hvd.callbacks), (horovod.tensorflow.keras.elastic, hvd.elastic)]
    for theirs, ours in pairs:
        for name in getattr(theirs, "__all__", dir(theirs)):
            value = getattr(theirs, name)
            if name.startswith("_") or isinstance(value, types.ModuleType) or name in NOT_API:
                continue
            assert hasattr(ours, name), f"{theirs.__name__}.{name} is missing"
            if inspect.isfunction(value) or (inspect.isclass(value) and "horovod" in value.__module__):
                _takes_the_same(value, getattr(ours, name))


def names_of_horovod_tensorflow_are_here():
    """Apart from those of its own inside, and of sessions."""
    inside = {
        "LocalGradientAggregationHelper",
        "handle_average_backwards_compatibility",
        "refs_to_vars",
        "vars_to_refs",
    }
    inside |= {"check_extension", "split_list"}
    for theirs, ours in ((horovod.tensorflow, hvd), (horovod.tensorflow.elastic, hvd.elastic)):
        for name in getattr(theirs, "__all__", dir(theirs)):
            is_module = isinstance(getattr(theirs, name), types.ModuleType)
            assert name.startswith("_") or is_module or name in inside or hasattr(ours, name), name


def what_graphs_ask_is_passed_on():
    answers = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op(0)]
    expected = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
    assert [int(answer) for answer in answers] == expected
    assert not hvd.gpu_available("tensorflow")
    assert hvd.check_num_rank_power_of_2(4) and not hvd.check_num_rank_power_of_2(3)
    assert hvd.broadcast_object_fn(root_rank=1)(hvd.rank()) == 1
    own = keras.Variable([float(hvd.rank())])
    hvd.broadcast_([own], root_rank=1)
    assert own.numpy() == [1.0]


def allreduce_refuses_horovod_tensorflows_order():
    """There, the second argument is average."""
    message = small.raised(TypeError, lambda: hvd.allreduce(tf.constant([1.0]), False))
    assert "op=hvd.Sum" in message
    assert hvd.allreduce(tf.constant([1.0]), device_dense="CPU:0", op=hvd.Sum).numpy() == [hvd.size()]


def broadcasts_of_one_function_keep_apart():
    """Horovod's TensorFlow 2 example broadcasts model and optimizer in its first step."""
    values = [[keras.Variable(np.full(3, 10.0 * hvd.rank() + number))] for number in range(3)]

    @tf.function
    def step():
        for variables in values:
            hvd.broadcast_variables(variables, root_rank=1)

    step()
    assert [float(variable.numpy()[0]) for (variable,) in values] == [10.0, 11.0, 12.0]


def collectives_take_keras_variables():
    size, rank = hvd.size(), hvd.rank()
    own = keras.Variable([float(rank), 1.0])
    total = np.array([size * (size - 1) / 2, size])
    assert np.allclose(hvd.allreduce(own), total / size)
    assert np.allclose(hvd.allreduce(own, op=hvd.Sum, name="named"), total)
    assert np.allclose(hvd.allreduce(np.array([1.0, rank]), op=hvd.Max), [1.0, size - 1])
    assert [float(t.numpy()[0]) for t in hvd.grouped_allreduce([own, own], op=hvd.Sum)] == [total[0]] * 2
    assert hvd.allgather(tf.fill((rank + 1,), rank)).numpy().tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.broadcast(own, root_rank=size - 1).numpy().tolist() == [size - 1.0, 1.0]
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(rank) == list(range(size))
    part = hvd.reducescatter(np.arange(2.0 * size), op=hvd.Sum).numpy()
    assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    received = hvd.alltoall(np.full(size, float(rank)))
    received = received[0] if isinstance(received, tuple) else received
    assert received.numpy().tolist() == list(map(float, range(size)))
    assert hvd.join() in range(size)


def collectives_work_inside_a_tf_function():
    @tf.function
    def both(value):
        return hvd.allreduce(value, op=hvd.Sum), hvd.allgather(value)

    reduced, gathered = both(tf.constant([float(hvd.rank())]))
    assert reduced.numpy()[0] == sum(range(hvd.size()))
    assert gathered.shape[0] == hvd.size()

    outside = tf.constant([float(hvd.rank())])

    @tf.function
    def captured():
        return hvd.allreduce(outside, op=hvd.Sum), hvd.allgather(outside), hvd.broadcast(outside, 1)

    reduced, gathered, sent = captured()
    assert reduced.numpy()[0] == sum(range(hvd.size()))
    assert gathered.numpy().tolist() == list(range(hvd.size()))
    assert sent.numpy()[0] == 1


def collectives_have_gradients_and_take_numbers_of_any_shape():
    """The same with Horovod and with mpi4py; docs/from-horovod.md has what is special about the gradients."""
    size, rank = hvd.size(), hvd.rank()
    value, total = tf.ones((size, 2)) * float(rank), sum(range(1, size + 1))
    own_root = 1.0 if rank == 1 else 0.0
    expected = {
        "sum": (lambda value: hvd.allreduce(value, op=hvd.Sum), np.full((size, 2), total)),
        "average": (hvd.allreduce, np.full((size, 2), total / size)),
        "allgather": (hvd.allgather, np.full((size, 2), total / size)),
        "broadcast": (lambda value: hvd.broadcast(value, 1), np.full((size, 2), own_root * total / size)),
    }
    for name, (collective, gradient) in expected.items():
        _has_gradient(collective, value, gradient, name)
    for dtype in ("float16", "float32", "float64", "int32"):
        assert hvd.allreduce(tf.constant(rank + 1, dtype), op=hvd.Sum).numpy() == total, dtype
        assert hvd.allreduce(tf.constant([rank + 1], dtype), op=hvd.Max).numpy().tolist() == [size], dtype


def alltoall_has_a_gradient():
    size = hvd.size()
    value = tf.ones((size, 2)) * float(hvd.rank())
    received = hvd.alltoall(value, [1] * size)[0].numpy()
    np.testing.assert_array_equal(received, np.arange(size)[:, None] * np.ones(2))
    gradient = np.arange(1, size + 1)[:, None] * np.ones(2)
    _has_gradient(lambda value: hvd.alltoall(value, [1] * size)[0], value, gradient, "alltoall")


def tape_reduces_for_keras_variables():
    model, reference = small.build(), small.build()
    (x, y), (all_x, all_y) = small.shares(1)[0], small.global_batches(1)[0]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    with tf.GradientTape() as plain:
        loss = tf.reduce_mean(tf.square(reference(all_x) - all_y))
    expected = plain.gradient(loss, [v.value for v in reference.trainable_variables])
    assert all(np.allclose(ours, theirs, atol=1e-12) for ours, theirs in zip(gradients, expected, strict=True))
    partial = hvd.PartialDistributedGradientTape(
        tf.GradientTape(), local_layers=model.layers[0], scale_local_gradients=False
    )
    with partial as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    kernels = hvd.allgather_object([np.asarray(gradients[0]), np.asarray(gradients[2])])
    assert not np.allclose(kernels[0][0], kernels[1][0])
    assert np.allclose(kernels[0][1], kernels[1][1])


def elastic_state_of_variables():
    variables = [tf.Variable([float(hvd.rank())]), keras.Variable([2.0 * hvd.rank()])]
    state = hvd.elastic.TensorFlowState(variables, batch=hvd.rank())
    state.sync()
    assert [float(variable.numpy()[0]) for variable in variables] == [0.0, 0.0] and state.batch == 0
    variables[0].assign([5.0])
    state.commit()
    variables[0].assign([6.0])
    state.restore()
    assert float(variables[0].numpy()[0]) == 5.0
    assert "got no variables" in small.raised(ValueError, hvd.elastic.TensorFlowState)
    model = small.train(small.build(), "sgd", [])
    assert hvd.elastic.TensorFlowKerasState(model, backend=None, batch=3).batch == 3


def _has_gradient(collective, value, gradient, name):
    """Of a sum that each rank weighs by its number."""

    def found():
        with tf.GradientTape() as tape:
            tape.watch(value)
            weighted = tf.reduce_sum(collective(value) * (hvd.rank() + 1.0))
        return tape.gradient(weighted, value)

    for run in (found, tf.function(found)):
        np.testing.assert_allclose(run().numpy(), gradient, rtol=1e-6, err_msg=name)


def _takes_the_same(theirs, ours):
    wanted, given = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
        return
    missing = [name for name in wanted if name not in given]
    assert not missing, f"{theirs.__module__}.{theirs.__name__}: no parameter {missing}"
    shared = [name for name in given if name in wanted]
    if "horovod.keras" not in theirs.__module__:  # whose parameters are the same with a few left out
        assert shared == list(wanted), f"{theirs.__name__}: order {shared}, Horovod has {list(wanted)}"
    for name, parameter in wanted.items():
        default = given[name].default
        if parameter.default is not parameter.empty:
            assert default is not parameter.empty, f"{theirs.__name__}: {name} must be optional"
