"""The chief of ps-async and ps-sync: weights on parameter servers, and workers that compute gradients of them.

One copy of the weights, spread over the servers. The chief, which is rank 0, hands out steps and counts them: its walk
is that of a single rank. Samples come from the workers' own processes, see server.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.config import Config
from ringtrain.errors import ConfigError
from ringtrain.hvd.distributed import distribute
from ringtrain.monitor import fault_injection, journal
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import consistency, devices, log_capture
from ringtrain.strategies.parameter_server import listening, server
from ringtrain.strategies.parameter_server.cluster import RankGroup
from ringtrain.strategies.ring import Ring

if TYPE_CHECKING:
    from ringtrain.run.resume import Segment


AHEAD = 2
"""steps per worker that are given out before they are done"""
NUM_FACTS = 5
"""that a worker tells of a batch besides labels and outputs"""


class NoReduction:
    """In place of hvd's Reduction: gradients go on as they are."""

    op = hvd.Average
    accumulated_scale = 1.0
    process_set = hvd.global_process_set

    def __init__(self, trial: Callable[[Any], NDArray[Any]]) -> None:
        self.trial = trial

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[bool]) -> list[Any]:
        """Those that came."""
        return list(gradients)

    def settings(self) -> dict[str, Any]:
        """What has to be the same on every rank: there is one."""
        return {}


class ParameterServers(Ring):
    """What both kinds share.

    Args:
        crew: all ranks, of which this one is the chief.
    """

    def __init__(self, config: Config, crew: RankGroup) -> None:
        super().__init__(config)
        self.crew = crew
        self.num_workers = len(crew.roles.workers)
        self.updates = Counter[int]()
        """by worker"""
        self.busy_s, self.idle_s = Counter[int](), Counter[int]()
        """of each worker, within epochs and after its first gradient, for which TensorFlow makes its graph; busy from
        the moment at which it wants samples"""
        self.ended_s: dict[int, float] = {}
        """when each has computed its last gradient of this epoch, by its own clock"""
        self.global_step = 0

    def begin(self) -> devices.Pinning:
        """As Ring's: the chief has no GPU, and cores like any rank of its host."""
        roles = self.crew.roles
        pinning = devices.coordinate(roles.hosts.count(roles.hosts[0]), self.config.device)
        server.start(roles, "ps", 0, pinning)
        ready = self.crew.wait_until_ready()
        self.tokens = {ready[rank].token for rank in roles.workers}
        if len(self.tokens) > 1:
            raise ConfigError(f"workers name their functions {', '.join(sorted(self.tokens))}: expected the same name")
        self.prints = [(ready[rank].host, ready[rank].prints) for rank in roles.workers]
        cluster = tf.train.ClusterSpec(roles.cluster)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, "", "chief", 0, rpc_layer="grpc")
        with listening.only_for(roles.addresses, [roles.port_of("chief", 0)]):
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.load = [0] * len(roles.servers)
        """bytes of variables, by server"""
        self.about |= {
            "servers": [f"rank {rank} on {roles.hosts[rank]}" for rank in roles.servers],
            "workers": [f"rank {rank} on {roles.hosts[rank]}: {ready[rank].pinning}" for rank in roles.workers],
        }
        return pinning

    def check(self, own: dict[str, str]) -> None:
        """Makes sure that workers run the chief's code and have its data."""
        consistency.refuse([(self.crew.roles.hosts[0], own), *self.prints])

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """As Ring's."""
        with self.strategy.scope(), tf.variable_creator_scope(self._placed):
            yield

    def _placed(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        """Makes a variable on the server whose turn it is, or on the one that holds the fewest bytes."""
        if "colocate_with" in options:  # an optimizer's slots are where their weights are
            return next_creator(**options)
        count, by_size = self.strategy.extended._variable_count, self.config.strategy.variables == "by-size"
        place = min(range(len(self.load)), key=self.load.__getitem__) if by_size else count % len(self.load)
        self.strategy.extended._variable_count = place
        variable = next_creator(**options)
        self.strategy.extended._variable_count = count + 1
        self.load[place] += variable.shape.num_elements() * variable.dtype.size
        return variable

    def distribute(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """As Ring's: its gradients are everybody's already, or one worker's."""
        untouched: Any = NoReduction(self.trial)
        distributed: keras.optimizers.Optimizer = distribute(optimizer, untouched, 1)
        return distributed

    def trial(self, probe: Any) -> NDArray[Any]:
        """What becomes of vectors with an entry per worker, of which each sets its own; optimizers get the result."""
        raise NotImplementedError

    def make_ready(self, model: keras.Model, input_shape: tuple[int, ...], num_classes: int) -> None:
        """As Ring's."""
        if type(model).train_step is not TensorFlowTrainer.train_step:
            raise ConfigError(
                f"strategy.name: {self.config.strategy.name} makes steps of its own, and {type(model).__name__} has a"
                f" train_step: train it with ring"
            )
        self.make_all(model, input_shape, num_classes)
        counter = model.optimizer._iterations
        # Keras' assigns what it has read before plus 1: of two updates at the same time it would count one.
        object.__setattr__(counter, "assign_add", counter.value.assign_add)
        self.model, self.input_shape = model, input_shape
        self.about["server_bytes"] = list(self.load)

    def watch(self, model: keras.Model) -> None:
        """As Ring's: steps are made elsewhere."""

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> hvd.GradientNorm | None:
        """As Ring's: on a server, where workers reach it."""
        with self.strategy.scope():
            return hvd.track_gradient_norm(optimizer)

    def batch(self, where: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """A worker's next inputs and labels; its number, and when it wanted them. In a graph that it runs."""
        (token,) = self.tokens
        inputs, labels, begun = tf.raw_ops.PyFunc(input=[where], token=token, Tout=[tf.float32, tf.int64, tf.float64])
        inputs.set_shape([self.config.train.batch_size, *self.input_shape])
        labels.set_shape([self.config.train.batch_size])
        begun.set_shape([2])
        return inputs, labels, begun

    def where(self, position: int, step: int) -> tf.Tensor:
        """What `batch` wants to know, see server.Feed."""
        return tf.constant(f"{position} {step} {self.folder}")

    def gradients(self, inputs: Any, labels: Any) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """Loss, outputs and gradients, as a step of Keras' would have them."""
        model = self.model
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = model.compute_loss(inputs, labels, outputs, None, training=True)
        return loss, outputs, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    def fit(
        self, model: keras.Model, batches: Any, part: Segment, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        """As Ring's, with the workers' own batches."""
        self.global_step, self.saboteurs = part.first_step, self._of_servers(model)
        with self.stepping():
            self.call(model, self.steps(part), part, callbacks)
        self.crew.look()
        self.about |= self.told()

    def _of_servers(self, model: keras.Model) -> list[fault_injection.FaultInjector]:
        """What lets faults happen to servers, which have no steps."""
        faults, folder, roles = fault_injection.parse(self.config.chaos), self.folder, self.crew.roles
        made = []
        for rank in {fault.rank for fault in faults} & {*roles.servers[1:]}:
            own = journal.Journal(folder, rank, self.crew.size, Attempt.from_environment().number)
            kill = functools.partial(self.crew.tell, rank, "signal")
            length = self.numbers.num_steps, self.numbers.steps_per_epoch
            made.append(fault_injection.FaultInjector(faults, rank, *length, folder, own, kill))
        return made

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """With threads beside this one; of no pool, which would wait for steps of workers that never come back."""
        threads = [threading.Thread(target=target, daemon=True) for target in self.beside()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.release()
        for thread in threads:
            thread.join()

    def beside(self) -> Sequence[Callable[[], None]]:
        """What threads do while steps are made."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets those threads end, when they have done what they have begun."""
        raise NotImplementedError

    def steps(self, part: Segment) -> Iterator[dict[str, Any]]:
        """The metrics after each step of a part of the run."""
        raise NotImplementedError

    def seen(self, facts: Sequence[Any], labels: Any, outputs: Any) -> tf.Tensor:
        """What a worker tells the chief of a batch: one vector, since each tensor is a message of its own.

        Args:
            facts: number of the worker, when it began and ended to compute, updates in between, loss; as scalars and
                vectors.
            labels: int64 [batch_size].
            outputs: of the model, [batch_size, num_classes].

        Returns:
            float64.
        """
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in (*facts, labels, outputs)], 0)

    @tf.function(autograph=False, reduce_retracing=True)
    def observe(self, seen: Any) -> dict[str, Any]:
        """Lets the chief's metrics see what a worker has seen."""
        model, batch_size = self.model, self.config.train.batch_size
        loss, labels = seen[NUM_FACTS - 1], tf.cast(seen[NUM_FACTS : NUM_FACTS + batch_size], tf.int64)
        outputs = tf.cast(tf.reshape(seen[NUM_FACTS + batch_size :], [batch_size, -1]), tf.float32)
        model._loss_tracker.update_state(loss, sample_weight=batch_size)
        results: dict[str, Any] = model.compute_metrics(None, labels, outputs, sample_weight=None)
        return results

    def saw(self, seen: NDArray[np.float64]) -> dict[str, Any]:
        """Counts a gradient that was applied.

        Args:
            seen: from `seen`.
        """
        self.crew.look()
        for saboteur in self.saboteurs:
            saboteur.after_step(self.global_step, self.model)
        self.updates[int(seen[0])] += 1
        return self.observe(seen)

    def note(self, seen: NDArray[np.float64]) -> None:
        """Notes when a gradient was computed, whatever becomes of it.

        Args:
            seen: from `seen`.
        """
        worker, begin_s, end_s = int(seen[0]), seen[1], seen[2]
        if worker in self.ended_s:
            self.busy_s[worker] += end_s - begin_s
            self.idle_s[worker] += max(0.0, begin_s - self.ended_s[worker])
        self.ended_s[worker] = end_s

    def wait_on(self, workers: Sequence[int]) -> None:
        """Hears what other ranks have told, and says what training waits for: where it stands still, that is known."""
        self.crew.look()
        ranks = ", ".join(str(self.crew.roles.workers[worker]) for worker in workers[:4])
        hvd.step_timing.PLACE.phase = f"the wait for gradients of rank {ranks}{', ...' * (len(workers) > 4)}"

    def told(self) -> dict[str, Any]:
        """What summary.json says of the steps."""
        shares = [(self.idle_s[worker], self.busy_s[worker]) for worker in range(self.num_workers)]
        return {
            "updates": [self.updates[worker] for worker in range(self.num_workers)],
            "waiting": [idle_s / (idle_s + busy_s) if busy_s else None for idle_s, busy_s in shares],
            "workers_lost": self.crew.lost,
        }

    def end(self, exit_code: int) -> None:
        """As Ring's: the other ranks may end; TensorFlow, which takes leave of them afterwards, complains."""
        self.crew.end(exit_code)
        log_capture.log_only()
