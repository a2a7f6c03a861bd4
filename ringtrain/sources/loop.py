"""Steps that a script makes by itself, on its own data: by Keras' own `fit`, or in a loop with `ringtrain.loop`."""

from __future__ import annotations

import contextlib
import gc
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.config import Config
from ringtrain.errors import ConfigError
from ringtrain.hvd.keras_patches import has_weights, set_untracked
from ringtrain.run import evaluation, identity, model_state
from ringtrain.run.context import Job, Process, Validation
from ringtrain.sources import script, script_model

MAX_NAMES = 3


class StepsOfScript(script.ModelOfScript):
    """A model and the length of its epochs.

    Args:
        steps: Of an epoch.
        rows: Of a step on all ranks.
    """

    def __init__(self, config: Config, model: keras.Model, steps: int, rows: int) -> None:
        super().__init__(config, model)
        self.steps, self.rows = steps, rows

    def job_of(self, process: Process, on_resume: str, shard: str, **more: Any) -> Job:
        """The job without data; `on_resume` and `shard` are rows of the plan, `more` further fields of the job."""
        model = self.model
        numbers = script.adopt(process, model, "script", self.steps * self.rows, 0, self.rows)
        plan = script.plan_of(process, model, numbers, on_resume)
        compiled = identity.of_script(model)
        return Job(
            data_set=data.DataSet(data.NoSamples(), data.NoSamples(), 0, ()),
            numbers=numbers,
            checksums={"model": script.checksum_of_shapes(model_state.shapes_of(model.weights)), **compiled},
            of_name=compiled,
            model=model,
            validation=Validation("val_"),
            plan={**plan, "data": "the script's own, which is not compared", "shard": shard},
            facts={"script": sys.argv[0], "on_resume": on_resume},
            **more,
        )


class ModelsOfLoop(keras.Model):
    """The models, optimizers and metrics of a loop as one model, which a run saves, restores and compares.

    Attributes:
        means: Metrics by name: means of an epoch of what the script has logged.
    """

    def __init__(
        self,
        models: Sequence[keras.Model],
        optimizers: Sequence[keras.optimizers.Optimizer],
        metrics: Sequence[keras.Metric],
    ) -> None:
        super().__init__(name=models[0].name)
        self.models, self.optimizers, self.metrics_of_script = [*models], [*optimizers], [*metrics]
        self.means: dict[str, keras.metrics.Mean] = {}
        self.optimizer = optimizers[0]
        self.jit_compile = False
        self.built = True

    def log(self, values: Mapping[str, Any], weight: float) -> None:
        """Adds values of a step to the means of the epoch; not those that have the name of a metric of the script."""
        names = {metric.name for metric in self.metrics_of_script}
        for name, value in values.items():
            if name in names:
                continue
            if name not in self.means:
                self.means[name] = keras.metrics.Mean(name)
            self.means[name].update_state(value, sample_weight=weight)

    @contextlib.contextmanager
    def weighing_numbers(self, weight: tf.Variable) -> Iterator[None]:
        """Context in which a number that a step adds to a mean, such as the loss of its rows, counts by these rows."""
        means = [metric for metric in self.metrics_of_script if type(metric) is keras.metrics.Mean]
        for metric in means:
            set_untracked(metric, update_state=_weighing(metric, weight))
        try:
            yield
        finally:
            for metric in means:
                vars(metric).pop("update_state", None)


def _weighing(metric: keras.metrics.Mean, weight: tf.Variable) -> Callable[..., Any]:
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = tf.cast(weight, metric.dtype)
        return update_state(values, sample_weight=sample_weight)

    return update


class LoopOfScript(StepsOfScript):
    """Models of `ringtrain.loop`.

    Args:
        distributes: Whether plain optimizers are made distributed, instead of the script's own tape.
    """

    model: ModelsOfLoop

    def __init__(self, config: Config, model: ModelsOfLoop, steps: int, rows: int, distributes: bool) -> None:
        super().__init__(config, model, steps, rows)
        self.distributes, self.history = distributes, keras.callbacks.History()

    def job(self, process: Process) -> Job:
        model = self.model
        for part in model.models:
            if not has_weights(part):
                raise ConfigError(
                    f"ringtrain.loop: {part.name} has no weights yet: begin it with keras.Input, or call it on a batch"
                    f" before"
                )
        script_model.synchronize_batch_norm(process.config, model)
        if self.distributes:
            script_model.distribute(process, model.optimizers, "ringtrain.loop")
        self._build_optimizers()
        script_model.seed_by_rank(model, process.config.seed)
        exported = {part.name: part for part in model.models}
        if len(model.models) == 1:
            exported = {"model": model.models[0]}
        return self.job_of(
            process,
            "the loop continues after the last checkpoint",
            "the rows that the script gives each rank",
            users_callbacks=[self.history],
            exported=exported,
            evaluation=EvaluationOfLoop,
            named_in_errors="run.batches",
            ends_with_callbacks=True,
            follows_schedule=False,
            script_averages=not self.distributes,
        )

    def _build_optimizers(self) -> None:
        """Builds the optimizers, or their state could not be restored before the first step."""
        models, optimizers = self.model.models, self.model.optimizers
        if all(optimizer.built for optimizer in optimizers):
            return
        if len(optimizers) == 1:
            optimizers[0].build(self.model.trainable_variables)
        elif len(optimizers) == len(models):
            for model, optimizer in zip(models, optimizers, strict=True):
                if not optimizer.built:
                    optimizer.build(model.trainable_variables)
        else:
            raise ConfigError(
                f"ringtrain.loop: got {len(models)} models and {len(optimizers)} optimizers: call"
                f" optimizer.build(variables) for each before, or pass an optimizer for each model, in their order"
            )


class OtherVariables:
    """Keras' variables of this process that are part of no model, optimizer or metric of a loop, with their values."""

    def __init__(self, model: ModelsOfLoop) -> None:
        saved = [*model_state.own_variables(model)]
        for part in (*model.models, *model.optimizers):
            saved += part.variables
        known = {id(variable) for variable in saved}
        variables = []
        for thing in gc.get_objects():
            # Not isinstance, which asks an object for its class: a lazy module would be loaded.
            if issubclass(type(thing), keras.Variable):
                variables.append(thing)
            elif issubclass(type(thing), keras.Metric):  # one that is not saved is of the script's own output
                known |= {id(variable) for variable in getattr(thing, "variables", ())}
        self._before: list[tuple[keras.Variable, int]] = []
        for variable in variables:
            # One without a value, such as a variable of a graph, is no state of the script; Keras raises any error.
            with contextlib.suppress(Exception):
                if id(variable) not in known:
                    self._before.append((variable, _checksum(variable)))

    def name_changed(self) -> None:
        """Says which have another value now."""
        names = [variable.path for variable, before in self._before if _checksum(variable) != before]
        if not names:
            return
        if len(names) > MAX_NAMES:
            names[MAX_NAMES:] = [f"{len(names) - MAX_NAMES} more"]
        text = (
            f"ringtrain.loop: {', '.join(names)}: changes, but is of no model, optimizer or metric of the loop: it is"
            f" not saved, and a resumed run begins with its first value: pass its model to ringtrain.loop, too"
        )
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def _checksum(variable: keras.Variable) -> int:
    return zlib.crc32(keras.ops.convert_to_numpy(variable).tobytes())


class EvaluationOfLoop(evaluation.Evaluation):
    """Metrics of all ranks, at the end of an epoch's steps, and what the script logs until the next epoch."""

    others: OtherVariables | None = None
    """on rank 0, until the first epoch has ended"""

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.run.rank == 0:
            self.others = OtherVariables(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self.trained: dict[str, Any] | None = None
        self.logged: dict[str, Any] = {}

    def end_steps(self) -> None:
        """Gives the metrics on every rank the state of all ranks, for what the script does between two epochs."""
        if self.trained is None:
            hvd.end_round(self.model)
            hvd.average_moving_statistics(self.model, self.run.config.model.not_averaged)
            self.trained = self.summed(1)
            if self.others is not None:
                self.others.name_changed()
                self.others = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.run.clock.epoch_complete:
            return
        self.end_steps()
        logs = {} if logs is None else logs
        logs.clear()  # they are of the last step alone
        logs |= self.logged
        self.replace_by_means(logs, ())
        logs |= self.trained or {}
        self.logs = dict(logs)
