"""`ringtrain.loop`: a script's own training loop, with the run folder, checkpoints and checks of `ringtrain.fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain import keras_fit, strategies
from ringtrain.config import Config, changed_options, with_values
from ringtrain.errors import ConfigError
from ringtrain.own_loop_run import Loop
from ringtrain.protocol.for_script import ForScript
from ringtrain.sources import OF_FIT, OPTIONS

if TYPE_CHECKING:
    import keras


def loop(
    model: keras.Model | Sequence[keras.Model],
    optimizer: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer],
    *,
    steps_per_epoch: int,
    epochs: int = 1,
    name: str = "",
    batch_size: int = 1,
    metrics: Sequence[keras.Metric] = (),
    distribute: bool = True,
    seed: int = 0,
    verbose: bool = True,
    resume: str = "auto",
    options: Config | Mapping[str, Any] | None = None,
) -> Loop:
    """Makes a run of a training loop that a script has written itself, with `tf.GradientTape`.

    Every rank runs the loop. In its context, the optimizers average gradients over the ranks, so that a loss must be a
    mean over rows, not a sum. The run has what `ringtrain.fit` gives: comparisons of the ranks, a folder with
    checkpoints, a resume after the last one, and an end of all ranks after the same step.

    Args:
        model: Model with weights, or several, such as those of a GAN.
        optimizer: Optimizer that updates them, or one for each model. Plain ones average gradients until the context
            ends.
        steps_per_epoch: Steps of an epoch, the same on all ranks.
        epochs: Epochs in all, those before a resume included.
        name: Folder of the run in `runs`. "": its time, so that nothing is resumed.
        batch_size: Rows of a step on all ranks together, for arrays in `Loop.batches` and the speed that is shown.
        metrics: Metrics that the step updates. They are reset when an epoch begins. After its last step, each rank has
            those of all ranks' rows.
        distribute: False: the step averages gradients itself, with `hvd.DistributedGradientTape`.
        seed: Of the order of arrays and, on the other ranks than rank 0, of dropout.
        verbose: Whether plan, progress and result are printed.
        resume: "auto", "must" (fail without a checkpoint), "never", or the path of a run or checkpoint.
        options: Further options, as for `ringtrain.fit`.

    Returns:
        Context manager, whose value is itself.

    Raises:
        RingtrainError: On every rank: a model without weights, ranks that differ, a non-finite loss, gradients that are
            not averaged.
        SystemExit, KeyboardInterrupt: At the end of the context: a signal has ended the run, which was saved.

    Example:
        >>> with ringtrain.loop(model, optimizer, name="own", epochs=3, steps_per_epoch=100) as run:
        ...     for epoch in run.epochs():
        ...         for step, (x, y) in run.batches(dataset):
        ...             run.log(loss=train_step(x, y))
    """
    with keras_fit.in_words_of_a_script():
        models = [*model] if isinstance(model, list | tuple) else [model]
        optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
        given = keras_fit.options_of("ringtrain.loop", options)
        _check_counts(steps_per_epoch=steps_per_epoch, epochs=epochs, batch_size=batch_size)
        if len(models) > 1 and given.checkpoint.saved_model:
            raise ConfigError(
                "ringtrain.loop: options set checkpoint.saved_model, which is for one model: leave it out"
            )
        values = {
            "run.name": name,
            "run.resume": resume,
            "model.name": ", ".join(type(model).__name__ for model in models),
            "optimizer.learning_rate_scaling": "none",
            "train.epochs": epochs,
            "seed": seed,
        }
        config = _config(given, values)
    # Which library the ranks talk by is decided before ringtrain.hvd is imported.
    strategies.prepare(config)
    from ringtrain.sources.loop import LoopOfScript, ModelsOfLoop

    source = LoopOfScript(config, ModelsOfLoop(models, optimizers, metrics), steps_per_epoch, batch_size, distribute)
    return Loop(config, source, verbose)


def _check_counts(**counts: int) -> None:
    for argument, number in counts.items():
        if number < 1:
            raise ConfigError(f"ringtrain.loop: got {argument} {number}, expected at least 1")


def _config(given: Config, values: Mapping[str, Any]) -> Config:
    command = ForScript.from_environment().by
    if command:
        raise ConfigError(
            f"ringtrain.loop: {command} chooses options and folders of ringtrain.fit: train with that, by a train_step"
            f" of the model"
        )
    for option in changed_options(given):
        if not option.startswith(OPTIONS):
            raise ConfigError(
                f"ringtrain.loop: options set {option}, which is an argument or the script's own here: leave it out"
            )
    for option in OF_FIT:
        if option in changed_options(given):
            raise ConfigError(
                f"ringtrain.loop: options set {option}, which needs the steps of ringtrain.fit: leave it out, or put"
                f" the step into a train_step of the model"
            )
    if given.strategy.name not in keras_fit.STRATEGIES:
        raise ConfigError(f"ringtrain.loop: got strategy.name {given.strategy.name}, expected ring or mpi-ring")
    return with_values(given, values)
