"""ps-sync: the gradients of workers are averaged before each update; backup workers may be late."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.config.sections import Config
from ringtrain.hvd.reduction import weighed
from ringtrain.strategies.parameter_server.cluster import LOOK_S, RankGroup
from ringtrain.strategies.parameter_server.coordinator import SHARE, ParameterServers
from ringtrain.training import devices


class Synchronous(ParameterServers):
    """ps-sync: a step averages the first gradients of the current weights and drops late ones.

    It waits for the number of workers minus `strategy.backup_workers` (Chen et al. 2016, arXiv 1604.00981, section 3).
    A worker contributes at most one gradient per step.
    """

    def __init__(self, config: Config, group: RankGroup) -> None:
        super().__init__(config, group)
        self.copies = self.num_workers - config.strategy.backup_workers
        self.dropped = Counter[int]()
        self.changed = threading.Condition()
        self.version, self.arrived, self.ended = 0, [], False  # type: ignore[var-annotated]
        self.failure: BaseException | None = None
        self.compute = tf.function(self._on_a_worker, autograph=False)
        self.update = tf.function(self._together, autograph=False)

    def trial(self, optimizer: Any) -> NDArray[Any]:
        vectors = []
        for worker in range(self.copies):
            with tf.device(f"/job:worker/task:{worker}"):
                vectors.append([tf.one_hot(worker, self.copies)])
        return np.stack([self._means(vectors, self.copies, ["/job:ps/task:0"])[0].numpy()])

    def _on_a_worker(self, where: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        batch, share, begun = self.batch(where)
        with tf.control_dependencies([begun]):
            loss, reported, gradients = self.gradients(batch)
        dense = [None if one is None else tf.convert_to_tensor(weighed(one, share)) for one in gradients]
        with tf.control_dependencies([one for one in dense if one is not None]):
            end_s = tf.timestamp()
        return self.report([begun, end_s, 0, loss, share], reported), dense

    def _together(self, of_workers: Any, total: tf.Tensor) -> None:
        variables = [variable.value for variable in self.model.trainable_variables]
        means = self._means(of_workers, total, [one.device for one in variables])
        self.strategy.run(self.model.optimizer.apply, args=(means, variables))  # Keras requires it

    def _means(self, of_workers: Any, total: Any, places: Sequence[str]) -> list[Any]:
        """Means over workers, summed in their order on the device of the weight; `total` is the sum of shares."""
        means = []
        for place, parts in zip(places, zip(*of_workers, strict=True), strict=True):
            with tf.device(place):
                mean = None
                if parts[0] is not None:
                    mean = sum(parts[1:], parts[0]) / tf.cast(total, parts[0].dtype)
                means.append(mean)
        return means

    def begin(self) -> devices.Pinning:
        pinning = super().begin()
        self.strategy.extended._allow_run_without_coordinator = True
        return pinning

    def thread_targets(self) -> Sequence[Callable[[], None]]:
        """One thread per worker."""
        self.ended = False
        return [functools.partial(self._work, worker, self.version) for worker in range(self.num_workers)]

    def release(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _work(self, worker: int, done: int) -> None:
        """Thread of a worker: computes one gradient per version of the weights, unless it would be too late."""
        device = f"/job:worker/replica:0/task:{worker}"
        while True:
            with self.changed:
                # A gradient that would certainly be late is not started.
                while not self.ended and (self.version == done or len(self.arrived) >= self.copies):
                    self.changed.wait()
                if self.ended:
                    return
                done = version = self.version
                where = self.where(self.global_step, self.global_step)
            try:
                with tf.device(device):
                    result, gradients = self.compute(where)
                report = result.numpy()
            except Exception as error:
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()
                return
            self.record_times(report)
            with self.changed:
                if version == self.version and len(self.arrived) < self.copies:
                    self.arrived.append((worker, report, gradients))
                    self.changed.notify_all()
                else:
                    self.dropped[worker] += 1

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        self.ended_s.clear()
        for _ in range(num_steps):
            with self.changed:
                self.version += 1
                self.arrived = []
                self.changed.notify_all()
                while not self.changed.wait_for(lambda: self.failure or len(self.arrived) >= self.copies, LOOK_S):
                    there = {worker for worker, _, _ in self.arrived}
                    self.wait_on([worker for worker in range(self.num_workers) if worker not in there])
                if self.failure:
                    raise self.failure
                first = sorted(self.arrived, key=lambda each: each[0])
            total = sum(report[SHARE] for _, report, _ in first)
            self.update([gradients for _, _, gradients in first], tf.constant(total, tf.float64))
            self.global_step += 1
            for _, report, _ in first:
                logs = self.count(report)
            yield logs

    def gradients_seen(self, gradients: str) -> str:
        return f"gradients {gradients}, {sum(self.about['dropped'])} dropped"

    def statistics(self) -> dict[str, Any]:
        """Adds the number of dropped gradients by worker."""
        return {**super().statistics(), "dropped": [self.dropped[worker] for worker in range(self.num_workers)]}
