"""Jobs of Keras, drawn from a seed: each is a script of its own.

A choice is drawn from the seed and its name alone, and its first option is the simplest one. So a job is made simpler
by taking first options, while all its other choices stay.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

HEAD = """
import keras, numpy as np, tensorflow as tf
from keras import layers, ops

OPTIONS = GIVEN
keras.config.set_floatx("FLOATX")
keras.config.set_dtype_policy("POLICY")
keras.utils.set_random_seed(SEED)
rng = np.random.default_rng(SEED)
seen = []
"""
TAIL = """
if __name__ == "__main__":
    import functools, ringtrain

    # The reference: keras.Model.fit, keras.Model.evaluate and keras.Model.predict.
    print(job(functools.partial(ringtrain.fit, options=OPTIONS), ringtrain.evaluate, ringtrain.predict))
"""


class Draw:
    """Choices of a job by name; `given` has those that are not drawn, by their numbers or texts."""

    def __init__(self, seed: int, given: Mapping[str, int | str], is_whole: bool = False) -> None:
        self.seed, self.given = seed, given
        self.is_whole = is_whole
        """whether choices that are not given take their first options"""
        self.taken: dict[str, int] = {}
        self.words: dict[str, str] = {}
        self.reasons: list[str] = []

    def __call__(self, name: str, *options: T, often: int = 1) -> T:
        """One of the options; the first one is `often` times as likely as another."""
        drawn = random.Random(f"{self.seed}/{name}").randrange(len(options) - 1 + often) - often + 1
        given = self.given.get(name, 0 if self.is_whole else max(0, drawn))
        number = [str(option) for option in options].index(given) if isinstance(given, str) else given
        number = min(number, len(options) - 1)
        self.taken[name], self.words[name] = number, str(options[number])
        return options[number]

    def flag(self, name: str, often: int = 3) -> bool:
        """False `often` times as often as True."""
        return self(name, False, True, often=often)

    def unequal(self, reason: str) -> None:
        """Notes why ranks train another model than one process, as docs/fit.md says."""
        self.reasons.append(reason)


@dataclass(frozen=True)
class Job:
    """A script with a function `job(fit, evaluate, predict)`, which returns what is compared."""

    seed: int
    choices: Mapping[str, int]
    """number of the option by name of the choice"""
    words: Mapping[str, str]
    """text of the option by name of the choice"""
    script: str
    unequal: tuple[str, ...]
    """why ranks do not train the model of one process"""
    is_resumable: bool
    """whether a run that is ended and started again equals an undisturbed one"""


@dataclass(frozen=True)
class Task:
    """Data of a job: expressions of `rows` rows."""

    inputs: Mapping[str, str]
    """expression by name of the input; one nameless input is no nest"""
    targets: Mapping[str, tuple[str, str]]
    """expression and kind, "numbers", "classes", "one-hot" or "flags", by name of the output"""
    is_sequence: bool = False
    """whether targets have a dimension of time"""


VECTOR, TOKENS = (
    "rng.normal(size=(rows, 5))",
    "rng.integers(0, 9, (rows, 6)) * (np.arange(6) < rng.integers(1, 7, (rows, 1)))",
)
IMAGE, SERIES = "rng.normal(size=(rows, 6, 6, 2))", "rng.normal(size=(rows, 6, 3))"
NUMBERS, CLASSES = ("rng.normal(size=(rows, 3))", "numbers"), ("rng.integers(0, 3, rows)", "classes")
ONE_HOT, FLAGS = ("np.eye(3)[rng.integers(0, 3, rows)]", "one-hot"), ("1.0 * rng.integers(0, 2, (rows, 3))", "flags")
STEPS = ("rng.normal(size=(rows, 6, 3))", "numbers")

SHAPES = {VECTOR: "(5,)", TOKENS: "(None,)", IMAGE: "(6, 6, 2)", SERIES: "(6, 3)"}
TYPES = {TOKENS: "int32"}

TASKS = {
    "numbers": Task({"": VECTOR}, {"": NUMBERS}),
    "classes": Task({"": VECTOR}, {"": CLASSES}),
    "one-hot": Task({"": VECTOR}, {"": ONE_HOT}),
    "flags": Task({"": VECTOR}, {"": FLAGS}),
    "tokens": Task({"": TOKENS}, {"": CLASSES}),
    "tokens, steps": Task({"": TOKENS}, {"": STEPS}, is_sequence=True),
    "images": Task({"": IMAGE}, {"": CLASSES}),
    "series": Task({"": SERIES}, {"": NUMBERS}),
    "two inputs, outputs": Task({"a": VECTOR, "b": TOKENS}, {"p": NUMBERS, "q": CLASSES}),
    "two inputs": Task({"a": VECTOR, "b": SERIES}, {"": FLAGS}),
    "two outputs": Task({"": VECTOR}, {"p": NUMBERS, "q": ("rng.normal(size=(rows, 3))", "numbers")}),
}


def job(seed: int, given: Mapping[str, int | str] | None = None, is_whole: bool = False) -> Job:
    """The job of a seed, with the options of the choices that are given, and, if these are the whole, first ones."""
    draw = Draw(seed, given or {}, is_whole)
    task = TASKS[draw("task", *TASKS)]
    policy = draw("policy", "float64", "float32", "mixed_float16", "mixed_bfloat16", often=60)
    if policy != "float64":
        draw.unequal(f"rounding of {policy}")
    nest = draw("nest", "dict", "tuple", often=3)
    model = _model(draw, task, nest)
    compiled = _compile(draw, task, nest)
    body = [*_data(draw, task, nest), *model, *compiled, *_fits(draw, task, compiled)]
    options = draw("options", {}, {"train.virtual_ranks": 4}, often=7)
    if "batch normalization" in draw.reasons and draw.flag("synchronized", often=1) and not options:
        options = {"model.sync_batch_norm": True}
        draw.reasons.remove("batch normalization")
    is_linear = "SGD" in draw.words["optimizer"] and "clip" not in draw.words["optimizer options"]
    if options and TOKENS in task.inputs.values() and not is_linear:
        draw.unequal("rows of an embedding are added up")
    lines = ["def job(fit, evaluate, predict):", *(f"    {line}" for line in body)]
    head = HEAD.replace("SEED", str(seed)).replace("GIVEN", str(options)).replace("POLICY", policy)
    head = head.replace("FLOATX", "float64" if policy == "float64" else "float32")
    script = head + "\n".join(["", *lines, TAIL])
    # TensorFlow refuses a file of a cache that a process which has ended left unfinished.
    reads_ahead = _is_endless_and_shuffled(draw) and draw.words["second fit"] == "True"
    # A callback's train_on_batch is traced with the layers that are frozen then, which a resumed process does not know.
    callbacks = " ".join(draw.words[f"callback {number}"] for number in range(3))
    traces_later = "train_on_batch" in callbacks and any(word in callbacks for word in OF_FREEZING)
    traces_later &= draw.words.get("eager") != "True"
    is_resumable = ".cache('" not in script and not reads_ahead and not traces_later
    return Job(seed, dict(draw.taken), dict(draw.words), script, tuple(draw.reasons), is_resumable)


def _nest(values: Mapping[str, str], nest: str) -> str:
    """Expression of one value, or of a dict or tuple of several."""
    if "" in values:
        return values[""]
    if nest == "tuple":
        return f"({', '.join(values.values())})"
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


# ---- models ----------------------------------------------------------------------------------------------------------

LAYER_CLASSES = {
    "Counting": (
        "class Counting(layers.Layer):",
        "    def build(self, shape):",
        '        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)',
        "    def call(self, x, training=False):",
        "        if training:",
        "            self.scale.assign(self.scale * 0.9 + 0.2)",
        "        return x * self.scale",
    ),
    "MovingMean": (
        "class MovingMean(layers.Layer):",
        "    def build(self, shape):",
        '        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)',
        "    def call(self, x, training=False):",
        "        if training:",
        "            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x))",
        "        return x - self.mean",
    ),
    "Temperature": (
        "class Temperature(layers.Layer):",
        "    def build(self, shape):",
        '        self.scale = self.add_weight(shape=(), initializer="ones")',
        "    def call(self, x):",
        "        return x * self.scale",
    ),
    "Penalty": (
        "class Penalty(layers.Layer):",
        "    def call(self, x):",
        "        self.add_loss(0.01 * ops.mean(ops.square(x)))",
        "        return x",
    ),
    "UnseededNoise": (
        "class UnseededNoise(layers.Layer):",
        "    def call(self, x, training=False):",
        "        return x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype) if training else x",
    ),
    "Attend": (
        "class Attend(layers.Layer):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.attention = layers.MultiHeadAttention(2, 3, use_bias=False)",
        "    def call(self, x):",
        "        return self.attention(x, x)",
    ),
}
DENSE_MORE = (
    "",
    ", kernel_regularizer=keras.regularizers.L2(0.01)",
    ", kernel_constraint=keras.constraints.MaxNorm(0.7)",
    ", activity_regularizer=keras.regularizers.L2(0.01)",
    ', kernel_constraint=keras.constraints.NonNeg(), bias_regularizer="l1"',
    ", kernel_constraint=keras.constraints.UnitNorm()",
)
MIDDLES = (
    "",
    "layers.LayerNormalization()",
    "layers.UnitNormalization()",
    "layers.GroupNormalization(2)",
    "layers.RMSNormalization()",
    "layers.Normalization(mean=0.1, variance=2.0)",
    "layers.Rescaling(0.5)",
    "layers.Activation('gelu')",
    "layers.Lambda(lambda x: ops.tanh(2 * x))",
    "layers.ActivityRegularization(l1=0.01)",
    "Counting()",
    "Temperature()",
    "Penalty()",
    "layers.EinsumDense('...i,io->...o', 4)",
    "layers.SpectralNormalization(layers.Dense(4))",
    "layers.BatchNormalization(trainable=False)",
)
UNEQUAL_MIDDLES = (
    "MovingMean()",
    "layers.BatchNormalization(momentum=0.8)",
    "layers.Dropout(0.3)",
    "layers.Dropout(0.3, seed=5)",
    "layers.GaussianNoise(0.1)",
    "UnseededNoise()",
)
NET = (
    "    def __init__(self):",
    "        super().__init__()",
    "        self.parts = parts",
    "    def call(self, x):",
    "        return forward(x)",
)


def _model(draw: Draw, task: Task, nest: str) -> list[str]:
    """Lines that make `model` of layers in nests, which a functional, sequential or subclassed model calls."""
    middle = draw("unequal middle", "", *UNEQUAL_MIDDLES, often=160) or draw("middle", *MIDDLES, often=8)
    if "BatchNormalization(m" in middle:
        draw.unequal("batch normalization")
    if "MovingMean" in middle:
        draw.unequal("a layer that mixes rows")
    if "Dropout" in middle or "Noise" in middle:
        draw.unequal("random layers")
    encoders = {name: _encoder(draw, task, name, value) for name, value in task.inputs.items()}
    body = [f'layers.Dense(4, "tanh"{draw("dense", *DENSE_MORE, often=5)})', *[middle] * bool(middle)]
    form = draw("model", "functional", "sequential", "subclassed", "nested", often=2)
    if draw.flag("shared layer") and form != "sequential":
        body += ['again := layers.Dense(4, "tanh")', "again"]
    layers = [layer for encoder in encoders.values() for layer in encoder]
    lines = []
    for name, definition in LAYER_CLASSES.items():
        if any(f"{name}(" in layer for layer in [*layers, *body]):
            lines += definition
    step = draw("step", "", *STEPS_OF_MODELS, often=18)
    if not task.is_sequence:
        step = draw("unequal step", "", *UNEQUAL_STEPS, often=60) or step
    draw.reasons += UNEQUAL_STEPS.get(step, ((), ()))[1]
    is_one = len(task.inputs) == 1 and "" in task.targets
    methods = UNEQUAL_STEPS[step][0] if step in UNEQUAL_STEPS else STEPS_OF_MODELS.get(step, ())
    if form == "sequential" and is_one:
        lines.append(f"parts = [{', '.join([*layers, *body, 'layers.Dense(3)'])}]")
        if not draw.flag("unbuilt"):
            lines.append(f"parts.insert(0, {_input('', task.inputs[min(task.inputs)])})")
        return [
            *lines,
            *_class_of("keras.Sequential", methods),
            f"model = {'Own' if methods else 'keras.Sequential'}(parts)",
        ]
    residual = draw.flag("residual")
    encoded = _nest({name: f"[{', '.join(encoder)}]" for name, encoder in encoders.items()}, nest)
    heads = _nest({name: f"layers.Dense(3{_named(name)})" for name in task.targets}, nest)
    lines += [
        f"encoders, heads = {encoded}, {heads}",
        f"body, residual = [{', '.join(body)}], layers.Dense(4)",
        "def through(x, *parts):",
        "    for part in parts:",
        "        x = part(x)",
        "    return x",
        "def forward(x):",
    ]
    parts = _items(task.inputs, "through(xAT, *encodersAT)", nest)
    joined = parts[0] if len(parts) == 1 else f"ops.concatenate([{', '.join(parts)}], -1)"
    lines.append(f"    x = through({joined}, *body)")
    if residual:
        lines.append("    x = x + residual(x)")
    outputs = dict(zip(task.targets, _items(task.targets, "headsAT(x)", nest), strict=True))
    lines.append(f"    return {_nest(outputs, nest)}")
    if form == "subclassed":
        lines.append(f"parts = [encoders, body, {'residual, ' * residual}heads]")
        return [*lines, *_class_of("keras.Model", (*NET, *methods)), "model = Own()"]
    inputs = _nest({name: _input(name, value) for name, value in task.inputs.items()}, nest)
    lines.append(f"inputs = {inputs}")
    whole = "inputs, forward(inputs)"
    if form == "nested" and is_one and not task.is_sequence:
        whole = 'inputs, layers.Dense(3)(keras.Model(inputs, forward(inputs), name="inner")(inputs))'
    return [*lines, *_class_of("keras.Model", methods), f"model = {'Own' if methods else 'keras.Model'}({whole})"]


def _class_of(base: str, methods: tuple[str, ...]) -> list[str]:
    return [f"class Own({base}):", *methods] if methods else []


def _items(names: Mapping[str, object], text: str, nest: str) -> list[str]:
    """A text for each part of a nest, with its key in place of AT."""
    keys = [f"[{number}]" if nest == "tuple" else f'["{name}"]' for number, name in enumerate(names)]
    if "" in names:
        keys = [""]
    return [text.replace("AT", key) for key in keys]


def _named(name: str) -> str:
    return f', name="{name}"' if name else ""


def _input(name: str, value: str) -> str:
    dtype = f', dtype="{TYPES[value]}"' if value in TYPES else ""
    return f"keras.Input({SHAPES[value]}{dtype}{_named(name)})"


def _encoder(draw: Draw, task: Task, name: str, value: str) -> list[str]:
    """Layers that turn an input into features, of each step of time if the targets are a sequence."""
    if value == VECTOR:
        return []
    if value == IMAGE:
        return draw(
            f"image {name}",
            ["layers.Conv2D(4, 3, activation='tanh')", "layers.GlobalAveragePooling2D()"],
            ["layers.SeparableConv2D(3, 3)", "layers.Flatten()"],
            ["layers.Conv2D(3, 3, strides=2, padding='same')", "layers.MaxPooling2D()", "layers.Flatten()"],
            ["layers.DepthwiseConv2D(3)", "layers.GlobalMaxPooling2D()"],
            ["layers.Conv2D(4, 2, use_bias=False)", "layers.BatchNormalization(trainable=False)", "layers.Flatten()"],
            ["layers.Conv2DTranspose(2, 2)", "layers.AveragePooling2D(3)", "layers.Flatten()"],
        )
    first = []
    if value == TOKENS:
        mask = draw(f"mask {name}", "", ", mask_zero=True")
        first = [f"layers.Embedding(9, 4{mask}{draw(f'embedding {name}', *EMBEDDING_MORE, often=5)})"]
    over_time = "True" if task.is_sequence else "False"
    kinds = ("GRU", "LSTM", "SimpleRNN", "Bidirectional", "Attend", "mean", "Conv1D", "TimeDistributed", "RNN")
    kind = draw(f"recurrent {name}", *kinds)
    pooled = [] if task.is_sequence else ["layers.GlobalAveragePooling1D()"]
    if kind == "Bidirectional":
        return [*first, f"layers.Bidirectional(layers.GRU(3, return_sequences={over_time}))"]
    if kind == "RNN":
        cells = "layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(4)])"
        return [*first, f"layers.RNN({cells}, return_sequences={over_time})"]
    if kind in ("Attend", "mean", "Conv1D", "TimeDistributed"):
        made = {"Attend": ["Attend()"], "Conv1D": ["layers.Conv1D(4, 3, padding='causal')"], "mean": []}
        return [*first, *made.get(kind, ["layers.TimeDistributed(layers.Dense(3))"]), *pooled]
    return [*first, f"layers.{kind}(4, return_sequences={over_time})"]


EMBEDDING_MORE = ("", ', embeddings_constraint="max_norm"', ', embeddings_regularizer="l2"')
TRAIN_STEP = (
    "    def train_step(self, data):",
    "        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)",
    "        with tf.GradientTape() as tape:",
    "            predicted = self(x, training=True)",
    "            loss = self.compute_loss(x, y, predicted, sample_weight)",
    "        variables = self.trainable_variables",
    "        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))",
    "        return self.compute_metrics(x, y, predicted, sample_weight)",
)
STEPS_OF_MODELS = {
    "train_step": TRAIN_STEP,
    "own tracker": (
        "    def compile(self, *args, **more):",
        "        super().compile(*args, **more)",
        '        self.tracker = keras.metrics.Mean("own")',
        "    @property",
        "    def metrics(self):",
        "        return [*super().metrics, self.tracker]",
        *TRAIN_STEP[:5],
        "        self.tracker.update_state(ops.mean(ops.square(keras.tree.flatten(predicted)[0]), -1))",
        *TRAIN_STEP[5:],
    ),
    "trackers of one name": (
        "    def compile(self, *args, **more):",
        "        super().compile(*args, **more)",
        '        self.trackers = [keras.metrics.Mean("own"), keras.metrics.Mean("own")]',
        *TRAIN_STEP[:5],
        "        for number, tracker in enumerate(self.trackers):",
        "            tracker.update_state(number + ops.mean(ops.square(keras.tree.flatten(predicted)[0]), -1))",
        *TRAIN_STEP[5:7],
        "        first, second = (tracker.result() for tracker in self.trackers)",
        '        return {**self.compute_metrics(x, y, predicted, sample_weight), "first": first, "second": second}',
    ),
    "two updates": (
        *TRAIN_STEP[:2],
        "        for factor in (1.0, 0.5):",
        *(f"    {line}" for line in TRAIN_STEP[2:4]),
        "                loss = factor * self.compute_loss(x, y, predicted, sample_weight)",
        *(f"    {line}" for line in TRAIN_STEP[5:7]),
        *TRAIN_STEP[7:],
    ),
    "two optimizers": (
        "    def compile(self, *args, **more):",
        "        super().compile(*args, **more)",
        "        self.second = keras.optimizers.Adam(0.01)",
        *TRAIN_STEP[:6],
        "        gradients = list(zip(tape.gradient(loss, variables), variables))",
        "        self.optimizer.apply_gradients(gradients[:-2])",
        "        self.second.apply_gradients(gradients[-2:])",
        *TRAIN_STEP[7:],
    ),
    "compute_loss": (
        "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):",
        "        loss = super().compute_loss(x, y, y_pred, sample_weight, training)",
        "        return loss + 0.01 * sum(ops.sum(ops.square(v)) for v in self.trainable_variables)",
    ),
    "compute_metrics": (
        "    def compute_metrics(self, x, y, y_pred, sample_weight=None):",
        '        return {**super().compute_metrics(x, y, y_pred, sample_weight), "more": {"one": ops.ones(())}}',
    ),
    "test_step": (
        "    def test_step(self, data):",
        "        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)",
        "        predicted = self(x, training=False)",
        "        self.compute_loss(x, y, predicted, sample_weight, training=False)",
        "        return self.compute_metrics(x, y, predicted, sample_weight)",
    ),
}
UNEQUAL_STEPS = {
    "scalar loss": (
        (
            *TRAIN_STEP[:4],
            "            loss = sum(ops.mean(ops.square(part)) for part in keras.tree.flatten(predicted))",
            *TRAIN_STEP[5:7],
            '        return {"loss": loss}',
        ),
        ("a train_step without compute_loss",),
    ),
    "adversaries": (
        (
            "    def compile(self, *args, **more):",
            "        super().compile(*args, **more)",
            "        self.critic = keras.Sequential([keras.Input((3,)), layers.Dense(1)])",
            "        self.second, self.noise = keras.optimizers.Adam(0.01), keras.random.SeedGenerator(3)",
            *TRAIN_STEP[:2],
            "        real = keras.tree.flatten(y)[0]",
            "        with tf.GradientTape(persistent=True) as tape:",
            "            made = keras.tree.flatten(self(x, training=True))[0]",
            "            made = made + 0.1 * keras.random.normal(ops.shape(made), seed=self.noise)",
            "            loss = ops.mean(self.critic(made) ** 2)",
            "            critic_loss = ops.mean((self.critic(made) - 1) ** 2) + loss",
            "        theirs = self.critic.trainable_variables",
            "        own = [v for v in self.trainable_variables if not any(v is one for one in theirs)]",
            "        self.second.apply_gradients(zip(tape.gradient(critic_loss, theirs), theirs))",
            "        self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own))",
            '        return {"loss": loss, "critic": critic_loss}',
        ),
        ("a train_step without compute_loss", "random numbers"),
    ),
}
"""methods, and why ranks train another model"""


# ---- compile ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = (
    "SGD(RATE)",
    "SGD(RATE, momentum=0.9, nesterov=True)",
    "Adam(RATE)",
    "Adam(RATE, amsgrad=True)",
    "AdamW(RATE)",
    "Adamax(RATE)",
    "Nadam(RATE)",
    "RMSprop(RATE, centered=True, momentum=0.5)",
    "Adagrad(RATE)",
    "Adadelta(RATE)",
    "Ftrl(RATE, l2_regularization_strength=0.01)",
    "Lamb(RATE)",
    "Lion(RATE)",
    "Adafactor(RATE)",
    "ScheduleFreeAdamW(RATE)",
)
RATES = (
    "0.02",
    "keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)",
    "keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.05, 0.02, 0.01])",
    "keras.optimizers.schedules.CosineDecay(0.03, 7)",
    "keras.optimizers.schedules.CosineDecay(0.0, 9, warmup_target=0.05, warmup_steps=4)",
    "keras.optimizers.schedules.InverseTimeDecay(0.05, 2, 0.5, staircase=True)",
)
OPTIMIZER_MORE = (
    "",
    ", clipnorm=0.1",
    ", clipvalue=0.05",
    ", global_clipnorm=0.2",
    ", use_ema=True, ema_momentum=0.8",
    ", use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3",
    ", weight_decay=0.01",
    ", gradient_accumulation_steps=2",
    ", gradient_accumulation_steps=3, global_clipnorm=0.2",
    ", gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.7, weight_decay=0.02",
)
WRAPPERS = (
    "OPTIMIZER",
    "keras.optimizers.LossScaleOptimizer(OPTIMIZER, initial_scale=64.0)",
    "keras.optimizers.LossScaleOptimizer(OPTIMIZER, initial_scale=4.0, dynamic_growth_steps=2)",
    'keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(OPTIMIZER, {".*bias": keras.optimizers.SGD(0.1)}))',
)
LOSSES = {
    "numbers": (
        "keras.losses.MeanSquaredError(REDUCED)",
        "keras.losses.MeanAbsoluteError(REDUCED)",
        "keras.losses.Huber(REDUCED)",
        "keras.losses.LogCosh(REDUCED)",
        "keras.losses.CosineSimilarity(REDUCED)",
        '"mse"',
        "lambda y, p: ops.mean(ops.abs(y - p) ** 3, -1)",
    ),
    "classes": (
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, REDUCED)",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, REDUCED)",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=-1, REDUCED)",
    ),
    "one-hot": (
        "keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, REDUCED)",
        "keras.losses.CategoricalHinge(REDUCED)",
        "keras.losses.CategoricalFocalCrossentropy(from_logits=True, REDUCED)",
    ),
    "flags": (
        "keras.losses.BinaryCrossentropy(from_logits=True, REDUCED)",
        "keras.losses.SquaredHinge(REDUCED)",
        "keras.losses.BinaryFocalCrossentropy(from_logits=True, REDUCED)",
    ),
}
OF_WHOLE_BATCHES = {
    "numbers": "lambda y, p: ops.mean(ops.square(y - p)) + ops.square(ops.mean(p))",
    "classes": "",
    "one-hot": "keras.losses.Dice(REDUCED)",
    "flags": "keras.losses.Tversky(REDUCED)",
}
REDUCTIONS = ("", 'reduction="sum"', 'reduction="mean"', 'reduction="mean_with_sample_weight"', "reduction=None")
OF_ANY = ("Moment()", "Largest()", "Both()")
METRICS = {
    "numbers": (
        '"mae"',
        'keras.metrics.MeanAbsoluteError(name="mae"), "mse"',
        "keras.metrics.RootMeanSquaredError()",
        "keras.metrics.CosineSimilarity()",
        *OF_ANY,
        "keras.metrics.R2Score()",
        "keras.metrics.PearsonCorrelation()",  # the last two not of sequences
    ),
    "classes": (
        '"accuracy"',
        "keras.metrics.MeanMetricWrapper(lambda y, p: ops.max(p, -1), name='highest')",
        "keras.metrics.SparseCategoricalCrossentropy(from_logits=True)",
        "keras.metrics.MeanIoU(3, sparse_y_pred=False)",
        *OF_ANY[1:],
    ),
    "one-hot": (
        '"accuracy"',
        "keras.metrics.F1Score()",
        "keras.metrics.AUC(from_logits=True)",
        "keras.metrics.OneHotMeanIoU(3)",
        *OF_ANY,
    ),
    "flags": (
        '"accuracy"',
        "keras.metrics.AUC(num_thresholds=20, multi_label=True, num_labels=3, from_logits=True)",
        "keras.metrics.Precision(thresholds=[0.1, 0.3]), keras.metrics.TruePositives()",
        "keras.metrics.F1Score(average='macro', threshold=0.2)",
        *OF_ANY,
    ),
}
METRIC_CLASSES = {
    "Moment": (
        "class Moment(keras.metrics.Metric):",
        "    def __init__(self):",
        "        super().__init__()",
        '        self.total, self.rows = (self.add_variable((), "zeros") for _ in range(2))',
        "    def update_state(self, y, p, sample_weight=None):",
        "        self.total.assign_add(ops.sum(ops.cast(y, self.dtype) * ops.cast(p, self.dtype)))",
        "        self.rows.assign_add(ops.cast(ops.shape(p)[0], self.dtype))",
        "    def result(self):",
        "        return ops.sqrt(ops.abs(self.total)) / self.rows",
    ),
    "Largest": (
        "class Largest(keras.metrics.Metric):",
        "    def __init__(self):",
        "        super().__init__()",
        '        self.most = self.add_variable((), "zeros")',
        "    def update_state(self, y, p, sample_weight=None):",
        "        self.most.assign(ops.maximum(self.most, ops.cast(ops.max(p), self.dtype)))",
        "    def result(self):",
        "        return self.most + 0.0",
    ),
    "Both": (
        "class Both(keras.metrics.Mean):",
        "    def update_state(self, y, p, sample_weight=None):",
        "        super().update_state(ops.max(p, -1), sample_weight)",
        "    def result(self):",
        '        return {"mean": super().result(), "rows": self.count + 0.0}',
    ),
}


def _compile(draw: Draw, task: Task, nest: str) -> list[str]:
    rate = draw("rate", *RATES, often=5)
    more = draw("optimizer options", *OPTIMIZER_MORE, often=6)
    optimizer = "keras.optimizers." + draw("optimizer", *OPTIMIZERS).replace("RATE", rate)
    if "ScheduleFree" in optimizer:
        draw.unequal("ScheduleFreeAdamW")
    optimizer = draw("wrapper", *WRAPPERS, often=9).replace("OPTIMIZER", f"{optimizer[:-1]}{more})")
    losses, metrics, weighted = {}, {}, {}
    # Keras cannot add a loss of each row to the scalars of regularizers and other outputs.
    has_others = len(task.targets) > 1 or any(word in str(draw.words) for word in ("egulariz", "Penalty"))
    reductions = REDUCTIONS[:-1] if has_others else REDUCTIONS
    for name, (_, kind) in task.targets.items():
        loss = draw(f"loss {name}", *LOSSES[kind], often=4)
        if OF_WHOLE_BATCHES[kind] and draw.flag(f"loss of the batch {name}", often=50):
            loss = OF_WHOLE_BATCHES[kind]
            draw.unequal("a loss of the whole batch")
        reduction = draw(f"reduction {name}", *reductions, often=5)
        if reduction == "reduction=None" and draw.words["step"] == "compute_loss":
            draw.unequal("compute_loss adds to a loss of each row")
        losses[name] = loss.replace("REDUCED", reduction).replace(", )", ")")
        of_kind = METRICS[kind][:-2] if task.is_sequence else METRICS[kind]
        metrics[name] = f"[{draw(f'metric {name}', *of_kind, often=4)}]"
        weighted[name] = f"[{draw(f'weighted metric {name}', '', *of_kind, often=4)}]"
    if "q" in losses and draw.flag("no loss", often=9):
        losses["q"] = "None"
    arguments = [optimizer, f"loss={_nest(losses, nest)}"]
    given = []
    if "a train_step without compute_loss" not in draw.reasons:  # it updates none
        given += [f"metrics={_nest(metrics, nest)}"] * draw.flag("metrics", often=1)
        given += [f"weighted_metrics={_nest(weighted, nest)}"] * any(len(value) > 2 for value in weighted.values())
    if len(task.targets) > 1 and draw.flag("loss weights"):
        given.append("loss_weights=" + _nest({"p": "0.3", "q": "2.0"}, nest))
    arguments += given
    if any("Largest" in argument for argument in given):
        draw.unequal("a metric that is no sum")
    if draw.flag("eager", often=4):
        arguments.append("run_eagerly=True")
    elif draw.flag("steps per execution", often=9):
        arguments.append("steps_per_execution=2")
    elif draw.flag("jit", often=20):
        arguments.append("jit_compile=True")
    lines = []
    for name, definition in METRIC_CLASSES.items():
        if any(f"{name}()" in argument for argument in given):
            lines += definition
    return [*lines, f"model.compile({', '.join(arguments)})"]


# ---- data ------------------------------------------------------------------------------------------------------------

PYDATASET = (
    "class Batches(keras.utils.PyDataset):",
    "    def __init__(self, *arrays, **more):",
    "        super().__init__(**more)",
    "        self.arrays, self.epoch = arrays, 0",
    "    def __len__(self):",
    "        return -(-rows // batch)",
    "    def __getitem__(self, index):",
    "        return keras.tree.map_structure(lambda a: a[index * batch : (index + 1) * batch], self.arrays)",
)
PYDATASET_EPOCHS = (
    "    def on_epoch_end(self):",
    "        x, *more = self.arrays",
    "        self.arrays = (keras.tree.map_structure(lambda a: np.roll(a, 1, 0), x), *more)",
)
GENERATOR = (
    "def batches(*arrays, passes=99):",
    "    for _ in range(passes):",
    "        for begin in range(0, rows, batch):",
    "            yield keras.tree.map_structure(lambda a: a[begin : begin + batch], arrays)",
)
RECORDS = (
    'with tf.io.TFRecordWriter("rows") as file:',
    "    for features, target in zip(x, y):",
    "        values = {name: tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(value)))",
    '                  for name, value in {"x": features, "y": target}.items()}',
    "        file.write(tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString())",
    "import ringtrain",
    'records = ringtrain.Records("rows", inputs="x", target="y")',
)
ORDERS = (
    ".shuffle(9, seed=2)",
    ".shuffle(9, seed=2).cache()",
    ".cache().shuffle(9, seed=2)",
    ".take(7)",
    ".shard(2, 1)",
)
"""of held-out data"""
PIPELINES = (
    "data.batch(batch)",
    "data.batch(batch).prefetch(2)",
    "data.shuffle(7, seed=3).batch(batch)",
    "data.shuffle(7).batch(batch)",
    "data.shuffle(rows, seed=3, reshuffle_each_iteration=False).batch(batch)",
    "data.cache().shuffle(rows, seed=3).batch(batch)",
    "data.shuffle(rows, seed=3).cache().batch(batch)",
    "data.batch(batch).cache()",
    "data.batch(batch).shuffle(5, seed=3)",
    "data.map(lambda *row: row, num_parallel_calls=2).batch(batch)",
    "data.batch(batch).map(lambda *parts: parts)",
    "data.batch(batch).map(lambda x, *more: (tf.nest.map_structure(lambda p: tf.reverse(p, [0]), x), *more))",
    "data.batch(batch, drop_remainder=True)",
    "data.take(rows - 1).batch(batch)",
    "data.skip(2).batch(batch)",
    "data.filter(lambda *row: tf.random.stateless_uniform((), (1, 2)) < 2).batch(batch)",
    "data.enumerate().filter(lambda n, row: n % 3 != 1).map(lambda n, row: row).batch(batch)",
    "data.repeat(2).batch(batch)",
    "data.interleave(lambda *row: tf.data.Dataset.from_tensors(row), cycle_length=2).batch(batch)",
    "tf.data.Dataset.zip(data, data.shuffle(rows, seed=5)).map(lambda a, b: a).batch(batch)",
    "data.concatenate(data.take(3)).batch(batch)",
    "data.shuffle(4, seed=1).repeat().batch(batch)",
    "data.batch(3).rebatch(batch)",
    "data.padded_batch(batch)",
    "data.ragged_batch(batch).map(lambda *parts: tf.nest.map_structure("
    "lambda p: p.to_tensor() if isinstance(p, tf.RaggedTensor) else p, parts))",
    "tf.data.Dataset.sample_from_datasets([data, data], [0.5, 0.5], seed=4).batch(batch)",
    "data.window(batch).flat_map(lambda *parts: tf.data.Dataset.zip(tf.nest.map_structure("
    "lambda p: p.batch(batch), parts)))",
    "tf.data.Dataset.from_generator(lambda: iter(both), output_signature=data.element_spec).batch(batch)",
    "data.batch(batch).apply(tf.data.experimental.assert_cardinality(-(-rows // batch)))",
    "data.snapshot('snapshot').batch(batch)",
    "data.cache('cached').shuffle(5, seed=8).batch(batch)",
)
UNKNOWN_LENGTH = ("filter", "interleave", "window", "from_generator", "rebatch", "sample_from", "snapshot")
SHORTENED = "data = data.map(lambda t, *more: (t[: 1 + tf.math.count_nonzero(t)], *more))"
"""rows of several lengths"""
END_AS_STEP = "the end of an unknown length is a step of Keras"
RESULTS = (
    'results = {"histories": histories, "seen": seen}',
    'results["weights"] = [weight.numpy() for weight in model.weights]',
    'results["optimizer"] = [variable.numpy() for variable in model.optimizer.variables]',
    'results["trainable"] = [weight.trainable for weight in model.weights]',
)


def _data(draw: Draw, task: Task, nest: str) -> list[str]:
    lines = [f"rows, batch = {draw('rows', 32, 40, 33, 17, 9, 7, 5, 2)}, {draw('batch', 8, 4, 16, 3, 2)}"]
    lines.append(f"x = {_nest(task.inputs, nest)}")
    lines.append(f"y = {_nest({name: value for name, (value, _) in task.targets.items()}, nest)}")
    kinds = (
        "rng.random(rows)",
        "rng.random(rows) * (np.arange(rows) % batch < batch // 2)",
        "np.where(np.arange(rows) < rows // 2, 0.0, rng.random(rows))",
    )
    if task.is_sequence:
        kinds = ("rng.random((rows, 6))",)
    weights = draw("sample weight", "", *kinds, often=5)
    if weights and len(task.targets) > 1:
        weights = _nest(dict.fromkeys(task.targets, weights), nest)
    return [*lines, *[f"weights = {weights}"] * bool(weights)]


def _given(draw: Draw) -> str:
    """Expression of inputs, targets and weights, if there are any."""
    return "(x, y, weights)" if draw.taken["sample weight"] else "(x, y)"


def _training_data(draw: Draw, task: Task, arguments: list[str]) -> tuple[list[str], str]:
    """Lines before the call of `fit`, and what it gets as x, y; its arguments get what follows from them."""
    given = _given(draw)
    kinds = [kind for _, kind in task.targets.values()]
    form = draw("data", "arrays", "tf.data", "tf.data", "PyDataset", "generator", "tensors", "Records", often=2)
    if form == "Records" and (draw.words["task"] not in ("numbers", "flags") or given != "(x, y)"):
        form = "arrays"
    if kinds == ["classes"] and given == "(x, y)" and form != "generator" and draw.flag("class weight", often=6):
        arguments.append("class_weight={0: 0.5, 1: 2.0, 2: 1.0}")
    if form == "tf.data":
        return _pipeline(draw, given, arguments)
    if form == "PyDataset":
        if draw.flag("other order", often=15):
            draw.unequal("order of rows")
        else:
            arguments.append("shuffle=False")
        more = draw(
            "workers", "", ", workers=2", ", workers=2, max_queue_size=1", ", workers=2, use_multiprocessing=False"
        )
        return _py_dataset(draw), f"Batches(*{given}{more})"
    if form == "generator":
        passes = draw("passes", "", ", passes=2", ", passes=1", often=4)
        if passes != ", passes=1" or draw.flag("steps of a short generator"):
            arguments.append(f"steps_per_epoch={draw('steps of a generator', 3, 2, 5)}")
        return [*GENERATOR], f"batches(*{given}{passes})"
    if form == "Records":
        arguments += ["**({'batch_size': batch, 'seed': 3} if fit is not keras.Model.fit else {})"]
        return [*RECORDS], "records if fit is not keras.Model.fit else records.dataset(batch, seed=3)"
    arguments += draw("batch size", ["batch_size=batch"], ["steps_per_epoch=2"], often=9)
    if draw.flag("other order", often=15):
        draw.unequal("order of rows")
    else:
        arguments.append("shuffle=False")
    if given != "(x, y)":
        arguments.append("sample_weight=weights")
    if draw.flag("steps per epoch", often=9) and "batch_size=batch" in arguments:
        arguments.append("steps_per_epoch=1")
    if form == "tensors":
        return [], "*(keras.tree.map_structure(tf.convert_to_tensor, one) for one in (x, y))"
    return [], "x, y"


def _py_dataset(draw: Draw) -> list[str]:
    return [*PYDATASET, *(PYDATASET_EPOCHS if draw.flag("epochs of data", often=2) else ())]


def _pipeline(draw: Draw, given: str, arguments: list[str]) -> tuple[list[str], str]:
    """Lines that make `data`, and its name; arguments of `fit` get what follows from them."""
    pipeline = draw("pipeline", *PIPELINES)
    lines = [f"data = tf.data.Dataset.from_tensor_slices({given})"]
    if pipeline.startswith(("data.padded", "data.ragged")) and draw.words["task"] == "tokens":
        lines.append(SHORTENED)
    if draw.flag("shuffled rows", often=2):
        lines.append("data = data.shuffle(rows, seed=6)")
    if ".shuffle(7)." in pipeline:
        draw.unequal("order of rows")
    if ".repeat()." in pipeline or draw.flag("steps of data", often=9):
        arguments.append("steps_per_epoch=2")
    return [*lines, "both = data", f"data = {pipeline}"], "data"


def _validation(draw: Draw, lines: list[str], data: str) -> list[str]:
    """Arguments of `fit` on held-out data; `lines` stand before the call."""
    unshuffled = ("arrays", "tf.data", "split", "PyDataset", "generator", "taken", "repeated", "filtered")
    kind = draw("validation", "", *unshuffled, "PyDataset", "Records", "shuffled", "shuffled", "shuffled", often=3)
    given = _given(draw) if draw.flag("weighted validation", often=1) else "(x, y)"
    held_out = f"tf.data.Dataset.from_tensor_slices({given})"
    arguments = [f"validation_data={held_out}.take(7).batch(3)"]
    if kind == "":
        return []
    if kind == "split" and data == "x, y":
        arguments = ["validation_split=0.3"]
    elif kind == "arrays":
        sizes = ([], ["validation_batch_size=5"], ["validation_batch_size=3", "validation_steps=2"])
        arguments = [f"validation_data={given}", *draw("validation batch", *sizes)]
    elif kind == "shuffled":
        order = draw("shuffled", *(f"{order}.batch(4)" for order in ORDERS))
        steps = draw("steps", [], ["validation_steps=1"], often=2)
        if steps and "shuffle(9, seed=2).cache()" in order:  # Keras' iterator reads ahead, perhaps to its end
            draw.unequal("order of rows")
        arguments = [f"validation_data={held_out}{order}", *steps]
    elif kind == "PyDataset":
        lines += _py_dataset(draw) * (not data.startswith("Batches"))
        arguments = [f"validation_data=Batches(*{given})"]
    elif kind == "Records" and draw.words["task"] in ("numbers", "flags") and given == "(x, y)":
        lines += [*RECORDS] * (not data.startswith("records"))
        arguments = ["validation_data=records if fit is not keras.Model.fit else records.dataset(3)"]
        arguments += ["**({'validation_batch_size': 3} if fit is not keras.Model.fit else {})"]
    elif kind == "generator":
        lines += [*GENERATOR] * (not data.startswith("batches"))
        arguments = [f"validation_data=batches(*{given})", "validation_steps=2"]
    elif kind == "repeated":
        arguments = [f"validation_data={held_out}.repeat().batch(4)", "validation_steps=2"]
    elif kind == "filtered":
        condition = "lambda *row: tf.random.stateless_uniform((), (1, 2)) < 2"
        arguments = [f"validation_data={held_out}.filter({condition}).batch(4)"]
    elif kind in ("taken", "split") and data == "data":
        order = draw("taken", ", reshuffle_each_iteration=False", "")
        at = lines.index("both = data")
        lines[at] = f"both = data.shuffle(rows, seed=4{order}); data = both.skip(rows // 3)"
        arguments = ["validation_data=both.take(rows // 3).batch(4)"]
    return [*arguments, *draw("validation freq", [], ["validation_freq=2"], ["validation_freq=[1, 3]"], often=4)]


BETWEEN = (
    "",
    "COMPILED",
    "model.layers[-1].trainable = False; COMPILED",
    "model.layers[0].trainable = False; COMPILED",
    "model.layers[-1].trainable = False",
    "evaluate(model, x, y, batch_size=batch, verbose=0)",
    "model.set_weights([0.9 * weight for weight in model.get_weights()])",
    "model.optimizer.learning_rate = 0.01",
    "keras.utils.set_random_seed(7)",
    "model.evaluate(x, y, batch_size=batch, verbose=0)",
)
EVALUATED = (
    "x, y, batch_size=batch",
    "x, y, batch_size=3, steps=2",
    "tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)",
    "tf.data.Dataset.from_tensor_slices((x, y)).shuffle(5, seed=1).repeat().batch(3), steps=3",
    "tf.data.Dataset.from_tensor_slices((x, y)).batch(1)",
    "*WEIGHED",
)
PREDICTED = (
    "x, batch_size=5",
    "x",
    "tf.data.Dataset.from_tensor_slices((x, y)).batch(3)",
    "tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(2), steps=3",
)


def _is_endless_and_shuffled(draw: Draw) -> bool:
    return draw.words["data"] == "tf.data" and ".shuffle(4, seed=1).repeat()." in draw.words["pipeline"]


def _note_steps(draw: Draw, arguments: str) -> None:
    if "steps=3" in arguments and draw.words.get("steps per execution") == "True":
        draw.unequal("steps that are no multiple of steps_per_execution")


def _fits(draw: Draw, task: Task, compiled: list[str]) -> list[str]:
    """Lines that train, evaluate and predict, and return what is compared."""
    epochs = draw("epochs", 2, 1, 3)
    arguments = [f"epochs={epochs}", "verbose=0"]
    lines, data = _training_data(draw, task, arguments)
    arguments += _validation(draw, lines, data)
    if epochs > 1 and draw.flag("initial epoch", often=4):
        arguments.append("initial_epoch=1")
    before, after = _callbacks(draw, task, arguments)
    has_end = draw.words["data"] == "tf.data" and any(word in draw.words["pipeline"] for word in UNKNOWN_LENGTH)
    if has_end and (draw.taken["rate"] or any("on_train_batch_begin" in line for line in before)):
        draw.unequal(END_AS_STEP)
    if len(task.targets) > 1 and (has_end or draw.words["validation"] == "filtered"):
        draw.unequal("the end of an unknown length counts in losses of outputs")
    if _is_endless_and_shuffled(draw) and draw.words["validation"] in ("taken", "split"):
        draw.unequal("order of rows")  # Keras' iterator reads ahead, also of a shuffle that validation data share
    call = f"fit(model, {data}, {', '.join(arguments)})"
    if any(f"steps_per_epoch={odd}" in call for odd in (1, 3, 5)) and draw.words.get("steps per execution") == "True":
        draw.unequal("steps_per_epoch that is no multiple of steps_per_execution")
    lines += [*before, f"histories = [{call}.history]"]
    if draw.flag("second fit"):
        if _is_endless_and_shuffled(draw):  # Keras' iterator reads ahead: its next one has other orders in each run
            draw.unequal("order of rows")
        between = draw("between", *BETWEEN)
        if "learning_rate" in between and draw.taken["rate"]:  # a schedule
            between = ""
        if between.endswith("trainable = False") and "MultiOptimizer" in draw.words["wrapper"]:
            between = ""
        if between.endswith("trainable = False") and "use_ema" in draw.words["optimizer options"]:
            draw.unequal("averages of frozen layers")
        lines += [line for part in between.split("; ") for line in (compiled if part == "COMPILED" else [part]) if line]
        lines.append(f"histories.append({call}.history)")
    # Of two optimizers, each has slots of all weights, in Keras of those alone that it updates: see docs/fit.md.
    has_parts = draw.words["step"] == "two optimizers"
    if has_parts and has_end:  # the second counts its steps
        draw.unequal(END_AS_STEP)
    lines += [line for line in RESULTS if not (has_parts and "optimizer.variables" in line)]
    if draw.words.get("unequal step") == "adversaries":
        lines.append('results["second"] = [variable.numpy() for variable in model.second.variables]')
    if draw.flag("evaluate", often=2):
        weighed = "x, y, batch_size=4" + ", sample_weight=weights" * (_given(draw) != "(x, y)")
        evaluated = draw("evaluated", *EVALUATED, often=2).replace("*WEIGHED", weighed)
        _note_steps(draw, evaluated)
        lines.append(f'results["evaluate"] = evaluate(model, {evaluated}, verbose=0, return_dict=True)')
    if draw.flag("predict", often=2):
        predicted = draw("predicted", *PREDICTED, often=2)
        _note_steps(draw, predicted)
        lines.append(f'results["predict"] = predict(model, {predicted}, verbose=0)')
    return [*lines, *after, "return results"]


# ---- callbacks -------------------------------------------------------------------------------------------------------

CALLBACK_CLASSES = {
    "Seen": (
        "class Seen(keras.callbacks.Callback):",
        "    total = 0",
        "    def on_train_batch_end(self, batch, logs=None):",
        "        self.total += 1",
        "    def on_epoch_begin(self, epoch, logs=None):",
        "        seen.append(('begin', epoch, self.total))",
        "    def on_epoch_end(self, epoch, logs=None):",
        "        seen.append(('end', epoch, self.total, dict(logs)))",
        "    def on_test_end(self, logs=None):",
        "        seen.append(('test end', self.total))",
        "    def on_train_end(self, logs=None):",
        "        seen.append(('train end', sorted(logs or {}), self.model.stop_training))",
    ),
    "Stateful": (
        "class Stateful(keras.callbacks.Callback):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.count, self.best, self.names, self.scalar = 0, np.inf, [], np.float32(0)",
        "        self.losses, self.variable = np.zeros(9), keras.Variable(1.0)",
        "    def on_train_batch_end(self, batch, logs=None):",
        "        self.count += 1",
        "        last = self.model.weights[-1]",
        "        last.assign(last + 0.001 * ops.cast(self.variable, last.dtype))",
        "    def on_epoch_end(self, epoch, logs=None):",
        "        self.best, self.losses[epoch] = min(self.best, logs['loss']), logs['loss']",
        "        self.variable.assign(self.variable * 0.5 + self.count)",
        "        self.names.append(self.count)",
        "        self.scalar += np.float32(self.scalar.nbytes)",
    ),
    "Decay": (
        "class Decay(keras.callbacks.Callback):",
        "    steps = 0",
        "    def on_train_batch_begin(self, batch, logs=None):",
        "        self.steps += 1",
        "        self.model.optimizer.learning_rate = 0.05 / self.steps",
    ),
    "Thaw": (
        "class Thaw(keras.callbacks.Callback):",
        "    epochs = 0",
        "    def on_epoch_begin(self, epoch, logs=None):",
        "        self.epochs += 1",
        "        if self.epochs > 1:",
        "            self.model.layers[-1].trainable = self.epochs != 2",
    ),
}
CALLBACKS = (
    "keras.callbacks.EarlyStopping('loss', patience=0, min_delta=0.05, restore_best_weights=True)",
    "keras.callbacks.EarlyStopping('val_loss', patience=1, start_from_epoch=1, restore_best_weights=True)",
    "keras.callbacks.ReduceLROnPlateau('loss', factor=0.5, patience=0, min_delta=0.2)",
    "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch))",
    "keras.callbacks.TerminateOnNaN()",
    "keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: setattr(model, 'stop_training', n == 1))",
    "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model.layers[-1], 'trainable', False))",
    "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: "
    "seen.append(model.evaluate(x, y, batch_size=batch, verbose=0)))",
    "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.train_on_batch(x, y))",
    "keras.callbacks.SwapEMAWeights()",
    "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "keras.callbacks.CSVLogger('log.csv')",
    "keras.callbacks.ModelCheckpoint('best.weights.h5', 'loss', save_best_only=True, save_weights_only=True)",
    "keras.callbacks.ModelCheckpoint('last.weights.h5', save_weights_only=True)",
    "Stateful()",
    "Decay()",
    "Thaw()",
)
OF_RATES = ("ReduceLR", "RateScheduler", "Decay")
OF_FREEZING = ("'trainable'", "Thaw")
FILES = {
    "log.csv": "np.genfromtxt('log.csv', delimiter=',', skip_header=1)",
    "best.weights.h5": "[model.load_weights('best.weights.h5'), *model.get_weights()][1:]",
    "last.weights.h5": "[model.load_weights('last.weights.h5'), *model.get_weights()][1:]",
}
"""contents of files that callbacks write, as arrays"""


def _callbacks(draw: Draw, task: Task, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Lines before the call, whose arguments get `callbacks`, and lines with results."""
    chosen = [draw(f"callback {number}", "", *CALLBACKS, often=8) for number in range(3)]
    left_out = []
    if draw.taken["rate"] or "MultiOptimizer" in draw.words["wrapper"]:  # no rate that can be set
        left_out += OF_RATES
    if "MultiOptimizer" in draw.words["wrapper"]:  # which trains the layers of its beginning
        left_out += OF_FREEZING
    has_averages = "use_ema" in draw.words["optimizer options"]
    if has_averages and not draw.flag("averages of frozen layers", often=9):  # not equal
        left_out += OF_FREEZING
    if not has_averages:
        left_out.append("SwapEMA")
    if not any(argument.startswith("validation") for argument in arguments):
        left_out.append("val_loss")
    chosen = [one for one in chosen if not any(word in one for word in left_out)]
    _note_reasons(draw, task, chosen)
    if draw.flag("backup", often=80):  # refused
        chosen.append("keras.callbacks.BackupAndRestore('backup')")
    if draw.flag("seen", often=1):
        chosen.append("Seen()")
    chosen = [*dict.fromkeys(one for one in chosen if one)]
    lines, results = [], []
    for name, definition in CALLBACK_CLASSES.items():
        if f"{name}()" in chosen:
            lines += definition
    if "Stateful()" in chosen:
        chosen[chosen.index("Stateful()")] = "stateful"
        lines.append("stateful = Stateful()")
        of = "[stateful.count, stateful.best, stateful.names, stateful.losses, stateful.scalar, stateful.variable]"
        results.append(f'results["stateful"] = {of}')
    for name, content in FILES.items():
        if any(name in one for one in chosen):
            results += [f"if tf.io.gfile.exists('{name}'):", f'    results["files {name}"] = {content}']
    if chosen:
        arguments.append(f"callbacks=[{', '.join(chosen)}]")
    return lines, results


def _note_reasons(draw: Draw, task: Task, callbacks: list[str]) -> None:
    """Notes why ranks train another model with these callbacks and steps."""
    if draw.words.get("steps") == "['validation_steps=1']" and draw.words.get("steps per execution") == "True":
        draw.unequal("validation_steps that are no multiple of steps_per_execution")
    if "use_ema" in draw.words["optimizer options"] and any(word in one for word in OF_FREEZING for one in callbacks):
        draw.unequal("averages of frozen layers")
    if any("train_on_batch" in one for one in callbacks):  # each rank trains all of its rows
        words = " ".join(draw.words.values())
        if '"sum"' in words or "reduction=None" in words:
            draw.unequal("train_on_batch with a sum over rows")
        if TOKENS in task.inputs.values():
            draw.unequal("train_on_batch with an embedding")
