"""Weights on parameter servers, and workers that compute gradients of them: each by itself, or all together.

One copy of the weights, spread over the servers. The chief, which is rank 0, gives out steps and counts them: its walk
is that of a single rank. Samples come from the workers' own processes, see server.py.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from numpy.typing import NDArray

from ringtrain import chaos, devices, fingerprint, hvd, journal, reports, stderr
from ringtrain.config import Config
from ringtrain.errors import ConfigError
from ringtrain.hvd.subclass import distribute
from ringtrain.strategies import listening, server
from ringtrain.strategies.ring import Ring
from ringtrain.strategies.roles import LOOK_S, Crew

if TYPE_CHECKING:
    from ringtrain.resume import Segment

AHEAD = 2
"""steps per worker that are given out before they are done"""
NUM_FACTS = 5
"""that a worker tells of a batch besides labels and outputs"""


class Untouched:
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
        config: the resolved configuration.
        crew: all ranks, of which this one is the chief.
    """

    def __init__(self, config: Config, crew: Crew) -> None:
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
        fingerprint.refuse([(self.crew.roles.hosts[0], own), *self.prints])

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
        untouched: Any = Untouched(self.trial)
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

    def _of_servers(self, model: keras.Model) -> list[chaos.Saboteur]:
        """What lets faults happen to servers, which have no steps."""
        faults, folder, roles = chaos.parse(self.config.chaos), self.folder, self.crew.roles
        made = []
        for rank in {fault.rank for fault in faults} & {*roles.servers[1:]}:
            own = journal.Journal(folder, rank, self.crew.size, reports.Attempt.from_environment().number)
            kill = functools.partial(self.crew.tell, rank, "signal")
            length = self.numbers.num_steps, self.numbers.steps_per_epoch
            made.append(chaos.Saboteur(faults, rank, *length, folder, own, kill))
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
        hvd.marks.PLACE.phase = f"the wait for gradients of rank {ranks}{', ...' * (len(workers) > 4)}"

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
        stderr.log_only()


class Asynchronous(ParameterServers):
    """ps-async: a worker reads weights, computes a gradient and applies it, whatever others do in the meantime.

    A step is an update by one worker. TensorFlow's coordinator gives steps out, and again where a worker was lost.
    """

    def begin(self) -> devices.Pinning:
        """As Ring's."""
        pinning = super().begin()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self.staleness = Counter[int]()
        self.ahead = AHEAD * self.num_workers
        self.given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.step = tf.function(lambda where: self.strategy.run(self._on_a_worker, args=(where,)), autograph=False)
        return pinning

    def trial(self, probe: Any) -> NDArray[Any]:
        """Nothing is added up: each worker's gradient is an update."""
        return np.ones((1, 1))

    def gradient_norm(self, optimizer: keras.optimizers.Optimizer) -> None:
        """None: while one update's is read, others' are written."""

    def fit(
        self, model: keras.Model, batches: Any, part: Segment, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        """As Ring's. Updates that were under way when an earlier part was broken off are no steps of the run."""
        model.optimizer.iterations.assign(part.first_step)
        super().fit(model, batches, part, callbacks)

    def _on_a_worker(self, where: tf.Tensor) -> tf.Tensor:
        iterations = self.model.optimizer.iterations.value
        inputs, labels, begun = self.batch(where)
        with tf.control_dependencies([inputs]):
            version = iterations.read_value()
            loss, outputs, gradients = self.gradients(inputs, labels)
        there = [one for one in tf.nest.flatten(gradients, expand_composites=True) if one is not None]
        with tf.control_dependencies(there):
            end_s, newest = tf.timestamp(), iterations.read_value()  # before this update is counted, as written here
        self.model.optimizer.apply(gradients, [v.value for v in self.model.trainable_variables])
        return self.seen([begun, end_s, newest - version, loss], labels, outputs)

    def beside(self) -> Sequence[Callable[[], None]]:
        """One that waits for a step, for each that may be given out."""
        return [self._wait_for_steps] * self.ahead

    def release(self) -> None:
        """As ParameterServers'."""
        for _ in range(self.ahead):
            self.given.put(None)

    def _wait_for_steps(self) -> None:
        while (step := self.given.get()) is not None:
            try:
                self.done.put(step.fetch())
            except Exception as error:
                self.done.put(error)

    def steps(self, part: Segment) -> Iterator[dict[str, Any]]:
        """As ParameterServers'."""
        for _ in range(part.first_epoch, part.end_epoch):
            end = self.global_step + part.num_steps
            self.ended_s.clear()
            for step in range(self.global_step, min(self.global_step + self.ahead, end)):
                self._give_out(step)
            while self.global_step < end:
                found = self._next()
                if self.global_step + self.ahead < end:
                    self._give_out(self.global_step + self.ahead)
                self.global_step += 1
                self.staleness[int(found[3])] += 1
                self.note(found)
                yield self.saw(found)

    def _give_out(self, step: int) -> None:
        self.given.put(self.coordinator.schedule(self.step, args=(self.where(step // self.num_workers, step),)))

    def _next(self) -> Any:
        while True:
            try:
                found = self.done.get(timeout=LOOK_S)
            except queue.Empty:
                self.wait_on(range(self.num_workers))
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def told(self) -> dict[str, Any]:
        """As ParameterServers', and how many updates came between reading weights and updating them."""
        values = np.array(sorted(self.staleness.elements()) or [0])
        spread = {"mean": float(values.mean()), "max": int(values.max())}
        spread |= {f"p{share}": int(np.percentile(values, share, method="nearest")) for share in (50, 90)}
        return {
            **super().told(),
            "staleness": spread,
            "not_promised": "bit-exact results, samples seen once, equality with ring",
        }


class Synchronous(ParameterServers):
    """ps-sync: a step takes the first gradients that are of its own weights, and drops the late ones.

    All workers but `strategy.backup_workers` make up a step (Chen et al. 2016, arXiv 1604.00981, section 3). No worker
    gives a step more than one gradient.
    """

    def __init__(self, config: Config, crew: Crew) -> None:
        super().__init__(config, crew)
        self.copies = self.num_workers - config.strategy.backup_workers
        self.dropped = Counter[int]()
        self.changed = threading.Condition()
        self.version, self.arrived, self.ended = 0, [], False  # type: ignore[var-annotated]
        self.failure: BaseException | None = None
        self.compute = tf.function(self._on_a_worker, autograph=False)
        self.update = tf.function(self._together, autograph=False)

    def trial(self, probe: Any) -> NDArray[Any]:
        """As ParameterServers', by the function that adds up gradients."""
        vectors = []
        for worker in range(self.copies):
            with tf.device(f"/job:worker/task:{worker}"):
                vectors.append([tf.one_hot(worker, self.copies)])
        return np.stack([self._means(vectors, ["/job:ps/task:0"])[0].numpy()])

    def _on_a_worker(self, where: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        inputs, labels, begun = self.batch(where)
        with tf.control_dependencies([inputs]):
            loss, outputs, gradients = self.gradients(inputs, labels)
        dense = [None if one is None else tf.convert_to_tensor(one) for one in gradients]
        with tf.control_dependencies([one for one in dense if one is not None]):
            end_s = tf.timestamp()
        return self.seen([begun, end_s, 0, loss], labels, outputs), dense

    def _together(self, everybody: Any) -> None:
        variables = [variable.value for variable in self.model.trainable_variables]
        means = self._means(everybody, [one.device for one in variables])
        self.strategy.run(self.model.optimizer.apply, args=(means, variables))  # Keras wants to be run by it

    def _means(self, everybody: Any, places: Sequence[str]) -> list[Any]:
        """Means over workers, in their order, each where its weight is."""
        means = []
        for place, parts in zip(places, zip(*everybody, strict=True), strict=True):
            with tf.device(place):
                means.append(None if parts[0] is None else sum(parts[1:], parts[0]) / len(parts))
        return means

    def begin(self) -> devices.Pinning:
        """As Ring's."""
        pinning = super().begin()
        self.strategy.extended._allow_run_without_coordinator = True
        return pinning

    def beside(self) -> Sequence[Callable[[], None]]:
        """One for each worker."""
        self.ended = False
        return [functools.partial(self._work, worker, self.version) for worker in range(self.num_workers)]

    def release(self) -> None:
        """As ParameterServers'."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _work(self, worker: int, done: int) -> None:
        """Lets a worker compute a gradient of every version of the weights that it is not too late for."""
        device = f"/job:worker/replica:0/task:{worker}"
        while True:
            with self.changed:
                # What would come too late for sure is not begun.
                while not self.ended and (self.version == done or len(self.arrived) >= self.copies):
                    self.changed.wait()
                if self.ended:
                    return
                done = version = self.version
                where = self.where(self.global_step, self.global_step)
            try:
                with tf.device(device):
                    seen, gradients = self.compute(where)
                found = seen.numpy()
            except Exception as error:
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()
                return
            self.note(found)
            with self.changed:
                if version == self.version and len(self.arrived) < self.copies:
                    self.arrived.append((worker, found, gradients))
                    self.changed.notify_all()
                else:
                    self.dropped[worker] += 1

    def steps(self, part: Segment) -> Iterator[dict[str, Any]]:
        """As ParameterServers'."""
        for number in range(part.num_steps * (part.end_epoch - part.first_epoch)):
            self.ended_s = self.ended_s if number % part.num_steps else {}
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
            self.update([gradients for _, _, gradients in first])
            self.global_step += 1
            for _, found, _ in first:
                logs = self.saw(found)
            yield logs

    def told(self) -> dict[str, Any]:
        """As ParameterServers', and how many gradients came too late."""
        return {**super().told(), "dropped": [self.dropped[worker] for worker in range(self.num_workers)]}
