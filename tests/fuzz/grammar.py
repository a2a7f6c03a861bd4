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

keras.config.set_floatx("float64")
keras.utils.set_random_seed(SEED)
rng = np.random.default_rng(SEED)
seen = []
"""
TAIL = """
if __name__ == "__main__":
    import ringtrain

    # The reference: keras.Model.fit, keras.Model.evaluate and keras.Model.predict.
    print(job(ringtrain.fit, ringtrain.evaluate, ringtrain.predict))
"""


class Draw:
    """Choices of a job by name; `given` has the numbers of options that are not drawn."""

    def __init__(self, seed: int, given: Mapping[str, int]) -> None:
        self.seed, self.given = seed, given
        self.taken: dict[str, int] = {}
        self.reasons: list[str] = []

    def __call__(self, name: str, *options: T, often: int = 1) -> T:
        """One of the options; the first one is `often` times as likely as another."""
        drawn = random.Random(f"{self.seed}/{name}").randrange(len(options) - 1 + often) - often + 1
        number = min(self.given.get(name, max(0, drawn)), len(options) - 1)
        self.taken[name] = number
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
    script: str
    unequal: tuple[str, ...]
    """why ranks do not train the model of one process"""


@dataclass(frozen=True)
class Task:
    """Data of a job: expressions of `rows` rows."""

    inputs: Mapping[str, str]
    """expression by name of the input; one nameless input is no dict"""
    targets: Mapping[str, tuple[str, str]]
    """expression and kind, "numbers" or "classes", by name of the output"""
    is_sequence: bool = False
    """whether targets have a dimension of time"""


VECTOR, TOKENS = (
    "rng.normal(size=(rows, 5))",
    "rng.integers(0, 9, (rows, 6)) * (np.arange(6) < rng.integers(1, 7, (rows, 1)))",
)
IMAGE, SERIES = "rng.normal(size=(rows, 6, 6, 2))", "rng.normal(size=(rows, 6, 3))"
NUMBERS, CLASSES = ("rng.normal(size=(rows, 3))", "numbers"), ("rng.integers(0, 3, rows)", "classes")
STEPS = ("rng.normal(size=(rows, 6, 3))", "numbers")

SHAPES = {VECTOR: "(5,)", TOKENS: "(6,)", IMAGE: "(6, 6, 2)", SERIES: "(6, 3)"}
TYPES = {TOKENS: "int32"}


def job(seed: int, given: Mapping[str, int] | None = None) -> Job:
    """The job of a seed, with the options of the choices that are given."""
    draw = Draw(seed, given or {})
    task = _task(draw)
    model = _model(draw, task)
    compiled = _compile(draw, task)
    body = [*_data(draw, task), *model, *compiled, *_fits(draw, task, compiled)]
    lines = ["def job(fit, evaluate, predict):", *(f"    {line}" for line in body)]
    script = HEAD.replace("SEED", str(seed)) + "\n".join(["", *lines, TAIL])
    return Job(seed, dict(draw.taken), script, tuple(draw.reasons))


def _task(draw: Draw) -> Task:
    one = {"": NUMBERS}
    return draw(
        "task",
        Task({"": VECTOR}, one),
        Task({"": VECTOR}, {"": CLASSES}),
        Task({"": TOKENS}, {"": CLASSES}),
        Task({"": TOKENS}, {"": STEPS}, is_sequence=True),
        Task({"": IMAGE}, {"": CLASSES}),
        Task({"": SERIES}, one),
        Task({"a": VECTOR, "b": TOKENS}, {"p": NUMBERS, "q": CLASSES}),
        Task({"a": VECTOR, "b": SERIES}, one),
        Task({"": VECTOR}, {"p": NUMBERS, "q": ("rng.normal(size=(rows, 3))", "numbers")}),
    )


# ---- models ----------------------------------------------------------------------------------------------------------

LAYER_CLASSES = {
    "counting": (
        "class Counting(layers.Layer):",
        "    def build(self, shape):",
        '        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)',
        "    def call(self, x, training=False):",
        "        if training:",
        "            self.scale.assign(self.scale * 0.9 + 0.2)",
        "        return x * self.scale",
    ),
    "temperature": (
        "class Temperature(layers.Layer):",
        "    def build(self, shape):",
        '        self.scale = self.add_weight(shape=(), initializer="ones")',
        "    def call(self, x):",
        "        return x * self.scale",
    ),
    "penalty": (
        "class Penalty(layers.Layer):",
        "    def call(self, x):",
        "        self.add_loss(0.01 * ops.mean(ops.square(x)))",
        "        return x",
    ),
}
DENSE_MORE = (
    "",
    ", kernel_regularizer=keras.regularizers.L2(0.01)",
    ", kernel_constraint=keras.constraints.MaxNorm(0.7)",
    ", activity_regularizer=keras.regularizers.L2(0.01)",
    ', kernel_constraint=keras.constraints.NonNeg(), bias_regularizer="l1"',
)
MIDDLES = (
    "",
    "layers.LayerNormalization()",
    "layers.UnitNormalization()",
    "layers.GroupNormalization(2)",
    "layers.Activation('gelu')",
    "Counting()",
    "Temperature()",
    "Penalty()",
    "layers.SpectralNormalization(layers.Dense(4))",
    "layers.BatchNormalization()",
    "layers.Dropout(0.3)",
    "layers.GaussianNoise(0.1)",
)


def _model(draw: Draw, task: Task) -> list[str]:
    lines: list[str] = []
    middle = draw("middle", *MIDDLES, often=8)
    for name, definition in LAYER_CLASSES.items():
        if f"{name.capitalize()}(" in middle:
            lines += definition
    if "BatchNormalization" in middle:
        draw.unequal("batch normalization")
    if "Dropout" in middle or "Noise" in middle:
        draw.unequal("random layers")
    hidden = f'layers.Dense(4, "tanh"{draw("dense", *DENSE_MORE, often=5)})'
    lines += [f"hidden = {hidden}"]
    names = {name: f"inputs_{name or 'x'}" for name in task.inputs}
    for name, value in task.inputs.items():
        more = f', name="{name}"' if name else ""
        dtype = f', dtype="{TYPES[value]}"' if value in TYPES else ""
        lines.append(f"{names[name]} = keras.Input({SHAPES[value]}{dtype}{more})")
    parts = [_features(draw, task, name, value, names[name]) for name, value in task.inputs.items()]
    joined = parts[0] if len(parts) == 1 else f"layers.Concatenate()([{', '.join(parts)}])"
    lines.append(f"features = hidden({joined})")
    if middle:
        lines.append(f"features = {middle}(features)")
    if draw.flag("shared layer"):
        lines.append('again = layers.Dense(4, "tanh"); features = again(again(features))')
    if draw.flag("residual"):
        lines.append("features = layers.Add()([features, layers.Dense(4)(features)])")
    outputs = {}
    for name in task.targets:
        more = f', name="{name}"' if name else ""
        outputs[name] = f"layers.Dense(3{more})(features)"
    inputs = _nest(names)
    form = draw("model class", "plain", "train_step", "two updates", "scalar loss", often=7)
    if form == "plain":
        lines.append(f"model = keras.Model({inputs}, {_nest(outputs)})")
        return lines
    if form == "scalar loss":
        draw.unequal("a train_step without compute_loss")
    lines += TRAIN_STEPS[form]
    lines.append(f"model = Own({inputs}, {_nest(outputs)})")
    return lines


TRAIN_STEPS = {
    "train_step": (
        "class Own(keras.Model):",
        "    def train_step(self, data):",
        "        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)",
        "        with tf.GradientTape() as tape:",
        "            predicted = self(x, training=True)",
        "            loss = self.compute_loss(x, y, predicted, sample_weight)",
        "        gradients = tape.gradient(loss, self.trainable_variables)",
        "        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))",
        "        return self.compute_metrics(x, y, predicted, sample_weight)",
    ),
    "two updates": (
        "class Own(keras.Model):",
        "    def train_step(self, data):",
        "        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)",
        "        for factor in (1.0, 0.5):",
        "            with tf.GradientTape() as tape:",
        "                predicted = self(x, training=True)",
        "                loss = factor * self.compute_loss(x, y, predicted, sample_weight)",
        "            gradients = tape.gradient(loss, self.trainable_variables)",
        "            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))",
        "        return self.compute_metrics(x, y, predicted, sample_weight)",
    ),
    "scalar loss": (
        "class Own(keras.Model):",
        "    def train_step(self, data):",
        "        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)",
        "        with tf.GradientTape() as tape:",
        "            predicted = self(x, training=True)",
        "            loss = sum(ops.mean(ops.square(part)) for part in keras.tree.flatten(predicted))",
        "        gradients = tape.gradient(loss, self.trainable_variables)",
        "        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))",
        '        return {"loss": loss}',
    ),
}


def _features(draw: Draw, task: Task, name: str, value: str, given: str) -> str:
    """Expression that turns an input into features, of each step of time if the targets are a sequence."""
    if value == VECTOR:
        return given
    if value == IMAGE:
        return draw(
            f"image {name}",
            f"layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation='tanh')({given}))",
            f"layers.Flatten()(layers.SeparableConv2D(3, 3)({given}))",
            f"layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(3, 3, strides=2, padding='same')({given})))",
            f"layers.GlobalMaxPooling2D()(layers.DepthwiseConv2D(3)({given}))",
        )
    if value == TOKENS:
        mask = draw(f"mask {name}", "", ", mask_zero=True")
        given = f"layers.Embedding(9, 4{mask})({given})"
    over_time = "True" if task.is_sequence else "False"
    recurrent = draw(f"recurrent {name}", "GRU", "LSTM", "SimpleRNN", "Bidirectional", "attention", "mean")
    if recurrent == "Bidirectional":
        return f"layers.Bidirectional(layers.GRU(3, return_sequences={over_time}))({given})"
    if recurrent == "attention":
        attended = f"(lambda t: layers.MultiHeadAttention(2, 3, use_bias=False)(t, t))({given})"
        return attended if task.is_sequence else f"layers.GlobalAveragePooling1D()({attended})"
    if recurrent == "mean":
        return given if task.is_sequence else f"layers.GlobalAveragePooling1D()({given})"
    return f"layers.{recurrent}(4, return_sequences={over_time})({given})"


def _nest(values: Mapping[str, str]) -> str:
    if "" in values:
        return values[""]
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


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
    "Adafactor(RATE)",
    "Muon(RATE)",
)
RATES = (
    "0.02",
    "keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)",
    "keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.05, 0.02, 0.01])",
    "keras.optimizers.schedules.CosineDecay(0.03, 7)",
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
)
LOSSES = {
    "numbers": (
        "keras.losses.MeanSquaredError(REDUCED)",
        "keras.losses.MeanAbsoluteError(REDUCED)",
        "keras.losses.Huber(REDUCED)",
        "keras.losses.LogCosh(REDUCED)",
        "keras.losses.CosineSimilarity(REDUCED)",
        "lambda y, p: ops.mean(ops.abs(y - p) ** 3, -1)",
        "lambda y, p: ops.mean(ops.square(y - p)) + ops.square(ops.mean(p))",
    ),
    "classes": (
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, REDUCED)",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, REDUCED)",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=-1, REDUCED)",
    ),
}
WHOLE_BATCH = "ops.square(ops.mean(p))"
REDUCTIONS = ("", 'reduction="sum"', 'reduction="mean"', 'reduction="mean_with_sample_weight"')
METRICS = {
    "numbers": (
        '"mae"',
        "keras.metrics.RootMeanSquaredError()",
        "keras.metrics.R2Score()",
        "keras.metrics.CosineSimilarity()",
    ),
    "classes": (
        '"accuracy"',
        "keras.metrics.MeanMetricWrapper(lambda y, p: ops.max(p, -1), name='largest')",
        "keras.metrics.SparseCategoricalCrossentropy(from_logits=True)",
    ),
}


def _compile(draw: Draw, task: Task) -> list[str]:
    rate = draw("rate", *RATES, often=5)
    more = draw("optimizer options", *OPTIMIZER_MORE, often=6)
    optimizer = "keras.optimizers." + draw("optimizer", *OPTIMIZERS).replace("RATE", rate)
    optimizer = optimizer[:-1] + more + ")"
    if draw.flag("loss scale", often=9):
        optimizer = f"keras.optimizers.LossScaleOptimizer({optimizer}, initial_scale=64.0)"
    losses, metrics, weighted = {}, {}, {}
    for name, (_, kind) in task.targets.items():
        reduction = draw(f"reduction {name}", *REDUCTIONS, often=5)
        kinds = LOSSES[kind]
        if task.is_sequence:
            kinds = kinds[:4]
        loss = draw(f"loss {name}", *kinds, often=2)
        if WHOLE_BATCH in loss:
            draw.unequal("a loss of the whole batch")
        losses[name] = loss.replace("REDUCED", reduction).replace(", )", ")")
        of_kind = METRICS[kind]
        if task.is_sequence:
            of_kind = of_kind[:2]
        metrics[name] = draw(f"metric {name}", *of_kind)
        weighted[name] = draw(f"weighted metric {name}", "", *of_kind, often=4)
    arguments = [optimizer, _nest(losses)]
    if draw.flag("metrics", often=1) and "a train_step without compute_loss" not in draw.reasons:  # it updates none
        arguments.append(f"metrics={_nest({name: f'[{value}]' for name, value in metrics.items()})}")
    if any(weighted.values()) and "a train_step without compute_loss" not in draw.reasons:
        arguments.append(f"weighted_metrics={_nest({name: f'[{value}]' for name, value in weighted.items()})}")
    if len(task.targets) > 1 and draw.flag("loss weights"):
        arguments.append('loss_weights={"p": 0.3, "q": 2.0}')
    if draw.flag("eager", often=15):
        arguments.append("run_eagerly=True")
    elif draw.flag("steps per execution", often=9):
        arguments.append("steps_per_execution=2")
    return [f"model.compile({', '.join(arguments)})"]


# ---- data ------------------------------------------------------------------------------------------------------------

PYDATASET = (
    "class Batches(keras.utils.PyDataset):",
    "    def __init__(self, *arrays):",
    "        super().__init__()",
    "        self.arrays = arrays",
    "    def __len__(self):",
    "        return -(-rows // batch)",
    "    def __getitem__(self, index):",
    "        return keras.tree.map_structure(lambda a: a[index * batch : (index + 1) * batch], self.arrays)",
)
GENERATOR = (
    "def batches():",
    "    while True:",
    "        for begin in range(0, rows, batch):",
)
GENERATOR_INDENT = "            yield keras.tree.map_structure(lambda a: a[begin : begin + batch], "
ORDERS = (".shuffle(9, seed=2)", ".shuffle(9, seed=2).cache()", ".cache().shuffle(9, seed=2)")
"""of held-out data"""
RESULTS = (
    'results = {"histories": histories, "seen": seen}',
    'results["weights"] = [weight.numpy() for weight in model.weights]',
    'results["optimizer"] = [variable.numpy() for variable in model.optimizer.variables]',
)
PIPELINES = (
    "data.batch(batch)",
    "data.batch(batch).prefetch(2)",
    "data.shuffle(7, seed=3).batch(batch)",
    "data.shuffle(rows, seed=3, reshuffle_each_iteration=False).batch(batch)",
    "data.cache().shuffle(rows, seed=3).batch(batch)",
    "data.shuffle(rows, seed=3).cache().batch(batch)",
    "data.batch(batch).cache()",
    "data.batch(batch).shuffle(5, seed=3)",
    "data.map(lambda *row: row, num_parallel_calls=2).batch(batch)",
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
    "data.rebatch(3).rebatch(batch)",
)


def _data(draw: Draw, task: Task) -> list[str]:
    lines = [f"rows, batch = {draw('rows', 32, 40, 33, 17, 9, 7, 5)}, {draw('batch', 8, 4, 16, 3, 2)}"]
    lines.append(f"x = {_nest(task.inputs)}")
    lines.append(f"y = {_nest({name: value for name, (value, _) in task.targets.items()})}")
    return lines


def _weights(draw: Draw, task: Task) -> str:
    """Expression of sample weights, or ""."""
    if len(task.targets) > 1 or task.is_sequence:
        return ""
    return draw(
        "sample weight",
        "",
        "rng.random(rows)",
        "rng.random(rows) * (np.arange(rows) % batch < batch // 2)",
        "np.where(np.arange(rows) < rows // 2, 0.0, rng.random(rows))",
        often=4,
    )


def _training_data(draw: Draw, task: Task, arguments: list[str]) -> tuple[list[str], str]:
    """Lines before the call of `fit`, and what it gets as x, y; its arguments get what follows from them."""
    lines = []
    weights = _weights(draw, task)
    given = "(x, y)"
    if weights:
        lines.append(f"weights = {weights}")
        given = "(x, y, weights)"
    kinds = [kind for _, kind in task.targets.values()]
    form = draw("data", "arrays", "tf.data", "PyDataset", "generator", "tensors", often=3)
    may_weigh = kinds == ["classes"] and not weights and form != "generator"
    if may_weigh and draw.flag("class weight", often=6):
        arguments.append("class_weight={0: 0.5, 1: 2.0, 2: 1.0}")
    if form == "tf.data":
        pipeline = draw("pipeline", *PIPELINES)
        lines += [f"data = tf.data.Dataset.from_tensor_slices({given})", f"data = {pipeline}"]
        if ".repeat()." in pipeline or draw.flag("steps of data", often=9):
            arguments.append("steps_per_epoch=2")
        return lines, "data"
    if form == "PyDataset":
        arguments.append("shuffle=False")
        return [*lines, *PYDATASET], f"Batches{given}"
    if form == "generator":
        arguments.append(f"steps_per_epoch={draw('steps of a generator', 3, 2, 5)}")
        return [*lines, *GENERATOR, f"{GENERATOR_INDENT}{given})"], "batches()"
    arguments += ["batch_size=batch", "shuffle=False"]
    if weights:
        arguments.append("sample_weight=weights")
    if draw.flag("steps per epoch", often=9):
        arguments.append("steps_per_epoch=1")
    if form == "tensors":
        return lines, "*(keras.tree.map_structure(tf.convert_to_tensor, one) for one in (x, y))"
    return lines, "x, y"


def _validation(draw: Draw, data: str) -> list[str]:
    """Arguments of `fit` on held-out data."""
    kind = draw("validation", "", "arrays", "tf.data", "split", "shuffled", "PyDataset", often=2)
    held_out = "tf.data.Dataset.from_tensor_slices((x, y))"
    if kind == "split" and data == "x, y":
        arguments = ["validation_split=0.3"]
    elif kind == "arrays":
        sizes = ([], ["validation_batch_size=5"], ["validation_batch_size=3", "validation_steps=2"])
        arguments = ["validation_data=(x, y)", *draw("validation batch", *sizes)]
    elif kind == "tf.data":
        arguments = [f"validation_data={held_out}.take(7).batch(3)"]
    elif kind == "shuffled":
        order = draw("shuffled", *(f"{order}.batch(4)" for order in ORDERS))
        arguments = [f"validation_data={held_out}{order}", *draw("steps", [], ["validation_steps=1"], often=3)]
    elif kind == "PyDataset" and data.startswith("Batches"):
        arguments = ["validation_data=Batches(x, y)"]
    else:
        return []
    return [*arguments, *draw("validation freq", [], ["validation_freq=2"], often=4)]


def _fits(draw: Draw, task: Task, compiled: list[str]) -> list[str]:
    """Lines that train, evaluate and predict, and return what is compared."""
    epochs = draw("epochs", 2, 1, 3)
    arguments = [f"epochs={epochs}", "verbose=0"]
    lines, data = _training_data(draw, task, arguments)
    arguments += _validation(draw, data)
    if epochs > 1 and draw.flag("initial epoch", often=12):
        arguments.append("initial_epoch=1")
    lines += _callbacks(draw, arguments)
    call = f"fit(model, {data}, {', '.join(arguments)})"
    lines.append(f"histories = [{call}.history]")
    if draw.flag("second fit", often=6):
        lines += draw("between", [], ["model.layers[-1].trainable = False", *compiled], compiled)
        lines.append(f"histories.append({call}.history)")
    lines += RESULTS
    if draw.flag("evaluate", often=2):
        lines.append('results["evaluate"] = evaluate(model, x, y, batch_size=batch, verbose=0, return_dict=True)')
    if draw.flag("predict", often=2):
        lines.append('results["predict"] = predict(model, x, batch_size=5, verbose=0)')
    return [*lines, "return results"]


SEEN = (
    "class Seen(keras.callbacks.Callback):",
    "    total = 0",
    "    def on_train_batch_end(self, batch, logs=None):",
    "        self.total += 1",
    "    def on_epoch_begin(self, epoch, logs=None):",
    "        seen.append(('begin', epoch, self.total))",
    "    def on_epoch_end(self, epoch, logs=None):",
    "        seen.append(('end', epoch, self.total, dict(logs)))",
    "    def on_train_end(self, logs=None):",
    "        seen.append(('train end', sorted(logs or {}), self.model.stop_training))",
)
CALLBACKS = (
    "keras.callbacks.EarlyStopping('loss', patience=0, min_delta=0.05, restore_best_weights=True)",
    "keras.callbacks.ReduceLROnPlateau('loss', factor=0.5, patience=0, min_delta=0.2)",
    "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "keras.callbacks.TerminateOnNaN()",
    "keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: setattr(model, 'stop_training', n == 1))",
    "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model.layers[-1], 'trainable', False))",
    "keras.callbacks.SwapEMAWeights()",
)


def _callbacks(draw: Draw, arguments: list[str]) -> list[str]:
    """Lines before the call, whose arguments get `callbacks`."""
    chosen = []
    for number in range(2):
        chosen.append(draw(f"callback {number}", "", *CALLBACKS, often=5))
    if draw.taken["rate"]:  # a schedule
        chosen = [one for one in chosen if "ReduceLR" not in one and "RateScheduler" not in one]
    if "use_ema" not in OPTIMIZER_MORE[draw.taken["optimizer options"]]:
        chosen = [one for one in chosen if "SwapEMA" not in one]
    sees = draw.flag("seen", often=1)
    words = [one for one in chosen if one] + ["Seen()"] * sees
    if words:
        arguments.append(f"callbacks=[{', '.join(dict.fromkeys(words))}]")
    return [*SEEN] if sees else []
