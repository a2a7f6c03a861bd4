"""Update rules against loops in NumPy, and what is spared from weight decay."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain import hvd
from ringtrain.config.derived import derive
from ringtrain.config.sections import Config, OptimizerConfig, ScheduleConfig, TrainConfig, option_types
from ringtrain.optim.optimizers import (
    LARS,
    OPTIMIZERS,
    SGD,
    LearningRate,
    build,
    first_and_largest_rate,
    last_learning_rate,
)

STEPS = 12
RATES = np.array([0.5 * (step + 1) / 4 if step < 4 else 0.5 * 0.1 ** (step >= 8) for step in range(STEPS)])


class Given(keras.optimizers.schedules.LearningRateSchedule):
    """The rates of a list."""

    def __call__(self, step):
        return tf.gather(tf.constant(RATES), step)


def start():
    """A matrix, a bias, the scale of a batch norm, and a matrix of zeros, with their gradients of every step."""
    random = np.random.default_rng(0)
    weights = {"kernel": random.normal(size=(4, 3)), "bias": random.normal(size=3), "gamma": np.ones(3)}
    weights["zeros"] = np.zeros((2, 2))
    return weights, [{name: random.normal(size=w.shape) for name, w in weights.items()} for _ in range(STEPS)]


def trained(optimizer):
    """The weights after STEPS steps, traced once as in fit."""
    weights, gradients = start()
    variables = [keras.Variable(value, name=name, dtype="float64") for name, value in weights.items()]
    optimizer.build(variables)
    step = tf.function(lambda *now: optimizer.apply(now, variables))
    for now in gradients:
        step(*(tf.constant(gradient) for gradient in now.values()))
    return {variable.name: variable.numpy() for variable in variables}


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"global_clipnorm": 0.5}, {"weight_decay": 0.1}])
def test_keras_momentum_in_one_kernel_has_the_bits_of_keras(options):
    def sgd(momentum=0.9):
        return keras.optimizers.SGD(Given(), momentum=momentum, **options)

    hvd.init()
    in_one_kernel, expected, other = trained(hvd.DistributedOptimizer(sgd())), trained(sgd()), trained(sgd(0.8))
    for name, weights in expected.items():
        assert np.array_equal(in_one_kernel[name], weights)
        assert not np.array_equal(other[name], weights), "the control"


def lars(momentum, decay, trust, spared=("bias", "gamma")):
    """You et al. 2017, algorithm 1, word for word."""
    weights, gradients = start()
    velocities = {name: np.zeros_like(w) for name, w in weights.items()}
    for rate, now in zip(RATES, gradients, strict=True):
        for name, w in weights.items():
            local, own_decay = 1.0, 0.0
            if name not in spared:
                own_decay = decay
                if np.linalg.norm(w) > 0:
                    local = trust * np.linalg.norm(w) / (np.linalg.norm(now[name]) + decay * np.linalg.norm(w))
            velocities[name] = momentum * velocities[name] + rate * local * (now[name] + own_decay * w)
            weights[name] = w - velocities[name]
    return weights


def sgd(momentum, decay, nesterov, spared=("bias", "gamma")):
    """Goyal et al. 2017, equation 10 with momentum correction: the velocity holds the rate, and is scaled with it."""
    weights, gradients = start()
    velocities = {name: np.zeros_like(w) for name, w in weights.items()}
    for step, now in enumerate(gradients):
        rate, before = RATES[step], RATES[max(0, step - 1)]
        for name, w in weights.items():
            slope = now[name] + (0 if name in spared else decay) * w
            velocities[name] = momentum * rate / before * velocities[name] + rate * slope
            weights[name] = w - (momentum * velocities[name] + rate * slope if nesterov else velocities[name])
    return weights


def apart(ours, theirs):
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_lars_is_the_algorithm_of_the_paper(momentum, decay):
    ours = trained(LARS(Given(), momentum=momentum, weight_decay=decay, trust_coefficient=0.02))
    assert apart(ours, lars(momentum, decay, 0.02)) < 1e-6
    for other in (
        lars(momentum, decay, 0.021),
        lars(momentum, decay + 0.001, 0.02),
        lars(momentum, decay, 0.02, spared=("bias",)),
        lars(momentum + 0.05, decay, 0.02),
    ):
        assert apart(ours, other) > 1e-5


@pytest.mark.parametrize(("momentum", "decay", "nesterov"), [(0.0, 0.01, False), (0.9, 0.0, True), (0.9, 0.01, False)])
def test_sgd_needs_no_momentum_correction(momentum, decay, nesterov):
    ours = trained(SGD(Given(), momentum=momentum, nesterov=nesterov, weight_decay=decay))
    assert apart(ours, sgd(momentum, decay, nesterov)) < 1e-6
    if momentum:
        assert apart(ours, sgd(momentum, decay, not nesterov)) > 1e-3
        uncorrected = trained(keras.optimizers.SGD(Given(), momentum=momentum, nesterov=nesterov))
        assert apart(ours, uncorrected) > 1e-3
    if decay:
        assert apart(ours, sgd(momentum, decay, nesterov, spared=())) > 1e-4


def test_sparse_gradients_are_those_of_a_matrix():
    table = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)
    rows = np.ones((3, 2), np.float32)
    for make in (lambda: SGD(0.1, 0.9, weight_decay=0.1), lambda: LARS(1.0, weight_decay=0.1, global_clipnorm=1.0)):
        sparse, dense = (keras.Variable(table), make()), (keras.Variable(table), make())
        for variable, optimizer in (sparse, dense):
            gradient = tf.IndexedSlices(tf.constant(rows), tf.constant([0, 3, 4]), tf.constant([5, 2]))
            for _ in range(3):
                optimizer.apply([gradient if variable is sparse[0] else tf.convert_to_tensor(gradient)], [variable])
        assert np.allclose(sparse[0].numpy(), dense[0].numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.8, True, 1e-4), LARS(2.0, 0.8, 1e-4, 0.01, global_clipnorm=3.0)])
def test_keras_saves_and_loads_ours(optimizer, tmp_path):
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(loaded) is type(optimizer) and loaded.get_config() == optimizer.get_config()
    model = layered_model()
    model.compile(optimizer, "mse")
    model.fit(np.ones((8, 4, 4, 1)), np.ones((8, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.decayed == optimizer.decayed
    for ours, theirs in zip(again.optimizer.variables, optimizer.variables, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())


def layered_model():
    layers = [
        keras.layers.Conv2D(3, 3, name="stem"),
        keras.layers.BatchNormalization(name="normal"),
        keras.layers.Reshape((4, 3)),
        keras.layers.GRU(2, name="gru"),
        keras.layers.LayerNormalization(name="layer_normal"),
        keras.layers.Dense(2, name="head"),
    ]
    return keras.Sequential([keras.Input((4, 4, 1)), *layers])


MATRICES = {"stem/kernel", "gru/gru_cell/kernel", "gru/gru_cell/recurrent_kernel", "head/kernel"}


def configured(model=None, **options):
    config = Config(
        optimizer=OptimizerConfig(**options), schedule=ScheduleConfig("cosine"), train=TrainConfig(1, batch_size=4)
    )
    return build(config, derive(config, 1, 400, 10), model or layered_model())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_weight_decay_shrinks_matrices_and_spares_the_rest(name):
    """Where gradients are 0, decay is all that moves; without the exclusion, everything would shrink."""

    def largest(exclude):
        model = layered_model()
        variables = model.trainable_variables
        for variable in variables:
            variable.assign(tf.ones(variable.shape))
        optimizer = configured(model, name=name, weight_decay=0.5, learning_rate=0.01, trust_coefficient=0.5)
        if not exclude:
            optimizer.exclude_from_weight_decay([])
        optimizer.apply([tf.zeros(one.shape) for one in variables], variables)
        return {one.path.partition("/")[2]: float(one.numpy().max()) for one in variables}

    for path, value in largest(exclude=True).items():
        assert value < 1 - 1e-4 if path in MATRICES else value == pytest.approx(1, abs=1e-6), path
    if name in ("adam", "adamw", "lamb"):
        assert all(value < 1 - 1e-4 for value in largest(exclude=False).values())


def test_every_name_of_the_configuration_is_built_and_no_other():
    assert set(OPTIMIZERS) == set(option_types()["optimizer.name"].__args__)
    classes = {name: type(configured(name=name)) for name in OPTIMIZERS}
    of_keras = {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW, "lamb": keras.optimizers.Lamb}
    assert classes == {"sgd": SGD, "lars": LARS, **of_keras}


def test_options_arrive():
    optimizer = configured(
        name="lars", momentum=0.7, weight_decay=0.2, trust_coefficient=0.3, clip_norm=5.0, accumulation_steps=4
    )
    assert (optimizer.momentum, optimizer.decay, optimizer.trust_coefficient) == (0.7, 0.2, 0.3)
    assert (optimizer.global_clipnorm, optimizer.gradient_accumulation_steps) == (5.0, 4)
    assert optimizer.weight_decay is None  # else Keras would decay once more
    assert configured(name="sgd", nesterov=True).nesterov
    plain = configured(name="adamw", weight_decay=0.3)
    assert (plain.weight_decay, plain.global_clipnorm, plain.gradient_accumulation_steps) == (0.3, None, None)


def test_a_constant_rate_is_a_number_that_callbacks_may_set():
    config = Config()
    optimizer = build(config, derive(config, 2, 400, 10), layered_model())
    assert last_learning_rate(optimizer) == pytest.approx(0.001 * 2**0.5)
    optimizer.learning_rate = 0.5
    assert last_learning_rate(optimizer) == 0.5
    assert isinstance(configured()._learning_rate, LearningRate)


def test_a_function_as_learning_rate_is_called_without_the_step() -> None:
    assert first_and_largest_rate(keras.optimizers.SGD(lambda: 0.1)) == (0.1, 0.1)
