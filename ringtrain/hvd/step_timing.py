"""Current phase of this process, readable from other threads: a part of a step, evaluation, or waiting for other ranks.

A step is one graph, in which nodes record three timestamps: input, local gradients and reduced gradients are ready.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ringtrain.hvd.keras_patches import innermost, set_untracked
from ringtrain.hvd.train_step import TrainStep, wrap
from ringtrain.monitor.diagnosis import WINDOW_STEPS, Times

if TYPE_CHECKING:
    from ringtrain.training.clock import Clock

MOMENTS = ("input", "computed", "reduced")
GRAPH = "step"
"""phase that the timestamps divide further"""
BETWEEN_MEASUREMENTS_S = 0.05  # since reading the timestamps takes 0.1 ms


class PhaseTracker:
    """Phase and timestamps of this process. The main thread writes, other threads read."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Makes the tracker like new, at the start of each training of a process: no counts, no watched model."""
        self.phase = "start"  # or step, callbacks, evaluate, save, or reduce while it waits for the other ranks
        self.changes = 0  # of phase, evaluated batches and other signs of progress
        self.waited_s = 0.0  # in reduce, outside of the steps' graphs
        self.seconds: dict[str, float] = {}  # in each phase so far, without the current one
        self.measured_s: Sequence[float] = (0.0,) * 4  # input, computation, callbacks, waiting in measured steps
        self.counted_as = self.phase  # phase of which the seconds of the current one are a part
        self._since_s = time.perf_counter()
        self.on_change: Callable[[], None] = lambda: None
        self._moments: tf.Variable | None = None

    def enter(self, phase: str, counted_as: str = "") -> None:
        """Begins a phase, whose seconds may count as those of another."""
        self.seconds, self._since_s = self.seconds_until_now(), time.perf_counter()
        self.phase, self.counted_as = phase, counted_as or phase
        self.advance()
        self.on_change()

    def seconds_until_now(self) -> dict[str, float]:
        """Returns the total seconds in each phase so far; they add up to the time since `reset`."""
        seconds = dict(self.seconds)
        seconds[self.counted_as] = seconds.get(self.counted_as, 0.0) + time.perf_counter() - self._since_s
        return seconds

    def spent(self) -> dict[str, Any]:
        """Returns facts for an event of the journal: seconds in each phase, and in the parts of measured steps."""
        facts: dict[str, Any] = {"spent_s": _rounded(self.seconds_until_now())}
        if any(self.measured_s):
            waited, computed, _, reduced = self.measured_s
            facts["of_steps_s"] = _rounded({"input": waited, "compute": computed, "reduce": reduced})
        return facts

    def advance(self) -> None:
        self.changes += 1

    def moments(self) -> tuple[float, float, float]:
        """Latest timestamps of input, local gradients and reduced gradients. Unix time in seconds; 0.0: none yet."""
        if self._moments is None:
            return 0.0, 0.0, 0.0
        # Takes a tenth of the time of Variable.numpy.
        first, second, third = tf.raw_ops.ReadVariableOp(resource=self._moments.handle, dtype=tf.float64).numpy()
        return float(first), float(second), float(third)

    def note(self, moment: str, tensors: Any) -> list[Any]:
        """Adds graph nodes that record when tensors are ready, and returns the last one; empty without `watch`."""
        if self._moments is None or GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return []  # XLA compiles no clock
        flat = [tensor for tensor in tf.nest.flatten(tensors, expand_composites=True) if tf.is_tensor(tensor)]
        with tf.control_dependencies(flat):
            # The graph continues while a GPU's kernels still run; a copy of their result waits for them.
            if flat and tf.config.list_logical_devices("GPU"):
                last = [tf.reshape(flat[0], [-1])[:1]]
            else:
                last = []
        with tf.device("CPU:0"):
            with tf.control_dependencies([*flat, *(tf.identity(tensor) for tensor in last)]):
                now_s = tf.timestamp()
            index, handle = MOMENTS.index(moment), self._moments.handle
            noted = tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=[index], updates=[now_s])
        return [] if noted is None else [noted]

    def watch(self, model: keras.Model) -> None:
        """Records the steps of a model compiled with a distributed optimizer; call it before the first step."""
        with tf.device("CPU:0"):
            self._moments = tf.Variable([0.0] * len(MOMENTS), trainable=False, dtype=tf.float64)
        apply = model.optimizer.apply

        def noting(train_step: TrainStep) -> TrainStep:
            def noting_train_step(data: Any) -> Any:
                # The step waits for this node: otherwise a single thread might run it after the forward pass.
                with tf.control_dependencies(self.note("input", data)):
                    data = tf.nest.map_structure(lambda part: tf.identity(part) if tf.is_tensor(part) else part, data)
                return train_step(data)

            return noting_train_step

        def noting_apply(grads: Any, trainable_variables: Any = None) -> None:
            if not getattr(innermost(model.optimizer), "_reduced_before", None):
                self.note("computed", [gradient for gradient in grads if gradient is not None])
            apply(grads, trainable_variables)

        wrap(model, "timing", noting)
        set_untracked(model.optimizer, apply=noting_apply)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


PHASES = PhaseTracker()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Sets the phase of this process within a block or a function: "evaluate", "save", or "reduce" for waiting."""
    before, counted_as, begin_s = PHASES.phase, PHASES.counted_as, time.perf_counter()
    # What the ranks exchange for a save or an evaluation is a part of it.
    is_part = phase == "reduce" and counted_as in ("start", "save", "evaluate")
    PHASES.enter(phase, counted_as=counted_as if is_part else "")
    try:
        yield
    finally:
        if phase == "reduce" != before:
            PHASES.waited_s += time.perf_counter() - begin_s
        PHASES.enter(before, counted_as)


class StepTimer(keras.callbacks.Callback):
    """Callback that measures the parts of this rank's steps, after `Clock` in the list; `Activity` of the heartbeat."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.tracker = clock, PHASES
        self.own_steps = 0
        self.begin_s = 0.0
        self.window: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW_STEPS)
        self.totals: list[float] = [0.0] * 4
        self.measured_steps = 0
        self._next = 1
        self._returned_s = 0.0
        self._waited_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._returned_s = 0.0  # time between epochs belongs to no step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin_s = time.time()
        self.tracker.enter("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end_s, waited_s = time.time(), self.tracker.waited_s
        self.own_steps += 1
        if self.own_steps >= self._next:
            self._measure(end_s, waited_s)
            # By number, not by time, which would prefer long steps. With callbacks, which may be what is slow.
            step_s = end_s - (self._returned_s or self.begin_s)
            self._next = self.own_steps + max(1, int(BETWEEN_MEASUREMENTS_S / max(1e-4, step_s)))
        self._returned_s, self._waited_s = end_s, waited_s
        self.tracker.enter("callbacks")

    def _measure(self, end_s: float, waited_s: float) -> None:
        """Adds the parts of the step that has just ended."""
        input_s, computed_s, reduced_s = self.tracker.moments()
        # Without new timestamps, as with a user's train_step, the whole step counts as computing.
        input_s = input_s if self.begin_s <= input_s <= end_s else self.begin_s
        wait_s = max(0.0, reduced_s - computed_s) if computed_s >= input_s else 0.0
        between_s = self.begin_s - self._returned_s if self._returned_s else 0.0
        waited_between_s = waited_s - self._waited_s if self._returned_s else 0.0
        step = (
            max(0.0, input_s - self.begin_s),
            max(0.0, end_s - input_s - wait_s),
            max(0.0, between_s - waited_between_s),
            max(0.0, wait_s + waited_between_s),
        )
        if self.own_steps > 1:  # the first step builds the graph
            self.measured_steps += 1
            self.window.append(step)
            self.totals = [total + seconds for total, seconds in zip(self.totals, step, strict=True)]
            self.tracker.measured_s = self.totals

    def phase(self) -> str:
        """Current phase of this rank, including the parts of a step."""
        if self.tracker.phase != GRAPH:
            return self.tracker.phase
        input_s, computed_s, reduced_s = self.tracker.moments()
        if input_s < self.begin_s - 1e-3:  # timestamps are rounded
            return "input"
        if computed_s < input_s:
            return "compute"
        return "reduce" if reduced_s < computed_s else "update"

    # ---- for the heartbeat ------------------------------------------------------------------------------------------

    def progress(self) -> Any:
        return self.clock.global_step, self.tracker.changes, self.tracker.moments()

    def fields(self) -> dict[str, Any]:
        return {
            "step": self.clock.global_step,
            "own_steps": self.own_steps,
            "phase": self.phase(),
            "times": Times.of(list(self.window)),
        }

    def own_times(self) -> dict[str, Any]:
        """Step times of this rank for summary.json: medians over the last steps, and totals of all but the first."""
        num_steps = max(0, self.own_steps - 1)
        of_all = num_steps / max(1, self.measured_steps)
        scaled = [seconds * of_all for seconds in self.totals]
        totals = dataclasses.replace(Times.of([scaled], sum), num_steps=num_steps)
        return {**dataclasses.asdict(Times.of(list(self.window))), "totals": dataclasses.asdict(totals)}
