"""Losses and metrics: those of classifiers, those of Keras by name, and the user's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain.config.by_name import find, imported, made
from ringtrain.config.sections import ModelConfig
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    import keras


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """Returns the cross-entropy of integer labels and logits, computed in float32 for logits of any dtype.

    With label smoothing s (Szegedy et al. 2015, arXiv 1512.00567, section 7), the true class of K counts 1 - s + s / K
    and every other class s / K:

        loss = (1 - s) * -log p(label) + s * mean over classes of -log p

    The loss on test data is smoothed, too. A saved model contains Keras' plain loss, without smoothing.
    """
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if label_smoothing:
        plain = loss.fn

        def smoothed(labels: Any, logits: Any, **options: Any) -> Any:
            to_every_class = -keras.ops.mean(keras.ops.log_softmax(logits), axis=-1)
            return (1 - label_smoothing) * plain(labels, logits, **options) + label_smoothing * to_every_class

        loss.fn = smoothed
    return loss


# Listed here, so that a misspelled name is reported before TensorFlow is loaded; a test compares the lists with Keras'.
LOSSES = """
bce binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
categorical_hinge circle cosine_similarity ctc dice hinge huber kl_divergence kld log_cosh mae mape mean_absolute_error
mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error mse msle poisson
sparse_categorical_crossentropy squared_hinge tversky
""".split()  # noqa: SIM905
KERAS_METRICS = """
accuracy auc bce binary_accuracy binary_crossentropy binary_io_u categorical_accuracy categorical_crossentropy
categorical_hinge concordance_correlation cosine_similarity f1_score f_beta_score false_negatives false_positives hinge
kl_divergence log_cosh_error mae mape mean_absolute_error mean_absolute_percentage_error mean_squared_error
mean_squared_logarithmic_error mse msle pearson_correlation poisson precision r2_score recall root_mean_squared_error
sparse_categorical_accuracy sparse_categorical_crossentropy sparse_top_k_categorical_accuracy squared_hinge
top_k_categorical_accuracy true_negatives true_positives
""".split()  # noqa: SIM905
"""metrics of Keras that need no arguments"""
OF_CLASSES = "sparse_categorical_crossentropy"


def needs_classes(config: ModelConfig) -> bool | None:
    """Returns whether the loss needs integer classes as targets; False: other targets; None: it is not known."""
    if config.loss in LOSSES:
        return None if config.loss == OF_CLASSES else False
    return None if config.loss or ":" in config.name else True


def loss(config: ModelConfig) -> Callable[[], Any]:
    """Resolves model.loss, else the cross-entropy of classes, to a function that makes it; both raise ConfigError."""
    name = config.loss
    if not name:
        return functools.partial(cross_entropy, config.label_smoothing)
    if ":" in name:
        return functools.partial(_own_loss, name)
    # Models that ringtrain builds return logits, which Keras' cross-entropies are then computed from.
    return find(
        "model.loss", name, {one: functools.partial(_keras_loss, one, ":" not in config.name) for one in LOSSES}
    )


def _keras_loss(name: str, from_logits: bool) -> Any:
    import keras

    if from_logits and _is_cross_entropy(name):
        kind = {"bce": "binary_crossentropy"}.get(name, name)
        return getattr(keras.losses, kind.title().replace("_", ""))(from_logits=True)
    return name


def _is_cross_entropy(name: str) -> bool:
    return name == "bce" or name.endswith("_crossentropy")


def _own_loss(name: str) -> Any:
    """The user's function of (y_true, y_pred) or Loss, or the result of a class or function without arguments."""
    import keras

    loss = imported("model.loss", name)
    if isinstance(loss, keras.losses.Loss):
        return loss
    needed = []
    for argument in inspect.signature(loss).parameters.values():
        is_any = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if argument.default is argument.empty and not is_any:
            needed.append(argument.name)
    if len(needed) == 2 and not isinstance(loss, type):
        return loss
    if needed:
        raise ConfigError(
            f"model.loss: {name} needs {', '.join(needed)}, expected a function of (y_true, y_pred), or a Loss class or"
            f" function without arguments"
        )
    return made("model.loss", name, loss, Callable, "a Keras loss")


def accuracy(config: ModelConfig) -> list[Any]:
    """Returns the metric "accuracy" if the loss is a cross-entropy; Keras chooses its kind by targets and outputs."""
    if config.loss and not _is_cross_entropy(config.loss):
        return []
    if config.loss.startswith("b") and ":" not in config.name:
        import keras

        return [keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)]  # of logits
    return ["accuracy"]


def _top_5() -> keras.metrics.Metric:
    import keras

    return keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5")


METRICS: dict[str, Callable[[], keras.metrics.Metric]] = {"top-5": _top_5}


def metrics(names: Sequence[str]) -> Callable[[], list[Any]]:
    """Resolves metrics by name without creating them. Their variables are added over all ranks: sums or counts."""
    # Those of Keras stay names, which `compile` resolves.
    known: dict[str, Callable[[], Any]] = {one: functools.partial(str, one) for one in KERAS_METRICS}
    named = [(name, find("model.metrics", name, known | METRICS)) for name in names]

    def make() -> list[Any]:
        import keras

        # Keras' own stay names; a function of the user's makes a metric.
        kinds = {name: keras.metrics.Metric if ":" in name else str | keras.metrics.Metric for name in names}
        return [made("model.metrics", name, function, kinds[name], "a Keras metric") for name, function in named]

    return make
