"""ps-async: each worker updates the weights independently."""

from __future__ import annotations

import contextlib
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.strategies.base import StepsOf
from ringtrain.strategies.parameter_server.cluster import LOOK_S
from ringtrain.strategies.parameter_server.coordinator import AHEAD, ParameterServers
from ringtrain.training import devices

if TYPE_CHECKING:
    from ringtrain.training.run import Run


class Asynchronous(ParameterServers):
    """ps-async: each worker reads the weights, computes a gradient and applies it, independently of the others.

    A step is one worker's update. TensorFlow's ClusterCoordinator schedules steps and repeats those of lost workers.
    """

    def begin(self) -> devices.Pinning:
        pinning = super().begin()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self.staleness = Counter[int]()
        self.ahead = AHEAD * self.num_workers
        self.given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.step = tf.function(lambda where: self.strategy.run(self._on_a_worker, args=(where,)), autograph=False)
        return pinning

    def trial(self, optimizer: Any) -> NDArray[Any]:
        """[[1]]: nothing is reduced, each worker's gradient is an update."""
        return np.ones((1, 1))

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[StepsOf]:
        # Updates that were in flight when an earlier training was interrupted do not count as steps.
        run.job.model.optimizer.iterations.assign(run.clock.global_step)
        with super().training(run) as steps_of:
            yield steps_of

    def _on_a_worker(self, where: tf.Tensor) -> tf.Tensor:
        iterations = self.model.optimizer.iterations.value
        batch, share, begun = self.batch(where)
        with tf.control_dependencies([begun]):
            version = iterations.read_value()
            loss, reported, gradients = self.gradients(batch)
        there = [one for one in tf.nest.flatten(gradients, expand_composites=True) if one is not None]
        with tf.control_dependencies(there):
            end_s, newest = tf.timestamp(), iterations.read_value()  # before this update is counted, in code order
        self.model.optimizer.apply(gradients, [v.value for v in self.model.trainable_variables])
        return self.report([begun, end_s, newest - version, loss, share], reported)

    def thread_targets(self) -> Sequence[Callable[[], None]]:
        """One thread per step that may be scheduled in advance; it waits for the step's result."""
        return [self._wait_for_steps] * self.ahead

    def release(self) -> None:
        for _ in range(self.ahead):
            self.given.put(None)

    def _wait_for_steps(self) -> None:
        while (step := self.given.get()) is not None:
            try:
                self.done.put(step.fetch())
            except Exception as error:
                self.done.put(error)

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        end = self.global_step + num_steps
        self.ended_s.clear()
        for step in range(self.global_step, min(self.global_step + self.ahead, end)):
            self._give_out(step)
        while self.global_step < end:
            report = self._next()
            if self.global_step + self.ahead < end:
                self._give_out(self.global_step + self.ahead)
            self.global_step += 1
            self.staleness[int(report[3])] += 1
            self.record_times(report)
            yield self.count(report)

    def _give_out(self, step: int) -> None:
        self.given.put(self.coordinator.schedule(self.step, args=(self.where(step // self.num_workers, step),)))

    def _next(self) -> Any:
        while True:
            try:
                report = self.done.get(timeout=LOOK_S)
            except queue.Empty:
                self.wait_on(range(self.num_workers))
                continue
            if isinstance(report, BaseException):
                raise report
            return report

    def gradients_seen(self, gradients: str) -> str:
        mean, most = (self.about["staleness"][name] for name in ("mean", "max"))
        return (
            f"each applied gradients of its own, {mean:.1f} updates late ({most} at most), so nothing is proven equal"
        )

    def statistics(self) -> dict[str, Any]:
        """Adds the staleness: the number of updates between reading the weights and updating them."""
        values = np.array(sorted(self.staleness.elements()) or [0])
        spread = {"mean": float(values.mean()), "max": int(values.max())}
        spread |= {f"p{share}": int(np.percentile(values, share, method="nearest")) for share in (50, 90)}
        return {
            **super().statistics(),
            "staleness": spread,
            "not_promised": "bit-exact results, samples seen once, equality with ring",
        }
