"""What production code and Horovod's runner get in virtual time, in place of what they import."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from horovod.runner import gloo_run, mpi_run
from horovod.runner import launch as horovod_launch
from horovod.runner.common.util import codec, env, safe_shell_exec, timeout
from horovod.runner.driver import driver_service
from horovod.runner.elastic import discovery, driver, registration, rendezvous
from horovod.runner.http import http_server
from horovod.runner.util import remote
from simulation import training
from simulation.horovodrun import HttpServer, NotificationClient, request
from simulation.locks import LockedThreading
from simulation.members import Member
from simulation.training import Kept, Model
from simulation.world import World, in_place

from ringtrain import hvd, train
from ringtrain.checkpoint import model_state
from ringtrain.cluster import elastic as of_launcher
from ringtrain.cluster import horovod_driver, host_agent, rank_process, supervisor
from ringtrain.errors import RingtrainError
from ringtrain.strategies import elastic
from ringtrain.strategies.ring import Ring
from ringtrain.training import loop, run_files, stopping
from ringtrain.training.clock import Start
from ringtrain.training.run import Opening


class OfProcess:
    """Attributes of the process whose code runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.current_host.facts["member"], name)


class Tensor(np.ndarray):  # type: ignore[type-arg]
    def numpy(self) -> Any:
        return np.asarray(self)


class Horovod:
    """`horovod.tensorflow`, and the functions of `hvd` that communicate."""

    Max = "max"

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def member(self) -> Member:
        found: Member = self.world.current_host.facts["member"]
        return found

    def rank(self) -> int:
        return self.member.number

    def size(self) -> int:
        return self.member.size

    def init(self) -> None:
        self.member.init()

    def shutdown(self) -> None:
        self.member.shutdown()

    def allreduce(self, value: Any, op: str = "", name: str = "") -> Any:
        return np.max(np.array(self.member.exchange(name, value)), axis=0).view(Tensor)

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return self.member.exchange(name, value)

    def broadcast_object(self, value: Any, root_rank: int = 0, name: str = "object") -> Any:
        found = self.member.exchange(name, value)[root_rank]
        return dict(found) if isinstance(found, dict) else found

    def run_together(self, action: Any) -> Any:
        result, error = None, None
        try:
            result = action()
        except RingtrainError as raised:
            error = raised
        errors = [one for one in self.member.exchange("ringtrain_run_together", error) if one]
        if errors:
            raise errors[0]
        return result

    def on_rank_0(self, action: Any) -> Any:
        result, error = None, None
        if self.rank() == 0:
            try:
                result = action()
            except RingtrainError as raised:
                error = raised
        result, error = self.broadcast_object((result, error), name="ringtrain_on_rank_0")
        if error:
            raise error
        return result

    def broadcast_model(self, model: Model, root_rank: int, optimizer: Any = None) -> None:
        for number, variable in enumerate(model.variables):
            variable.assign(self.member.exchange(f"variable {number}", variable.value)[root_rank])


class Manager:
    """Horovod's notification manager of each process."""

    def __init__(self, world: World) -> None:
        self._member = OfProcess(world)
        self._world = world

    @property
    def _listeners(self) -> list[Any]:
        found: list[Any] = self._member.listeners
        return found

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        self._listeners.remove(listener)

    def init(self) -> None:
        """Listens, and tells the driver where."""
        member: Member = self._world.current_host.facts["member"]
        value = codec.dumps_base64(({"eth0": [("10.0.0.2", member.pid)]}, b"key"), to_ascii=False)
        name = f"{member.variables['HOROVOD_HOSTNAME']}:{member.variables['HOROVOD_LOCAL_RANK']}"
        request(member, "PUT", member.path("worker_addresses", name), value)


class FromCheckpoint:
    """`run_files`: checkpoints and the folder, on the ranks' disk."""

    def __init__(self, horovod: Horovod) -> None:
        self.horovod = horovod

    def restore(self, run: Any) -> tuple[Start, Mapping[str, Any]]:
        horovod, storage = self.horovod, self.horovod.member.cluster.storage
        horovod.on_rank_0(lambda: run.lock.take(PurePath("run"), same_job=True))
        saved = storage.checkpoints[-1] if storage.checkpoints else None
        saved, summary = horovod.broadcast_object((saved, storage.summary), name="ringtrain_start")
        if saved is None:
            return Start(), {}
        for variable, value in zip(run.job.model.variables, saved["values"], strict=True):
            variable.assign(value)
        return Start(saved["global_step"], "run/checkpoints"), summary

    def take_over(self, run: Any, folder: PurePath, records: str) -> None:
        run.lock.take(folder, same_job=True)

    def open_folder(self, run: Any) -> Opening:
        facts = {"global_step": run.start.global_step}
        return Opening(folder=Path("run"), log=f"rank-{self.horovod.rank()}.log", event="start", facts=facts)


class Terminal:
    def __init__(self, horovod: Horovod) -> None:
        self.horovod = horovod

    def print(self, text: str, highlight: bool = False) -> None:
        if self.horovod.rank() == 0:
            self.horovod.member.say(text)


class Files:
    """`Path` of the launcher: what it writes for Horovod's driver."""

    def __init__(self, cluster: Any, path: Any) -> None:
        self.cluster, self.path = cluster, PurePath(getattr(path, "path", path))
        self.name = self.path.name

    def with_suffix(self, suffix: str) -> Files:
        return Files(self.cluster, self.path.with_suffix(suffix))

    def write_text(self, text: str, encoding: str = "") -> None:
        self.cluster.files[str(self.path)] = text


def _of_launcher(cluster: Any) -> Iterator[tuple[Any, str, Any]]:
    def replace(part: Files, path: Files) -> None:
        cluster.files[str(path.path)] = cluster.files.pop(str(part.path))

    @contextlib.contextmanager
    def written(plan: Any, folder: str) -> Iterator[None]:
        cluster.files.update(plan.files)
        yield

    yield of_launcher, "Path", lambda path: Files(cluster, path)
    yield of_launcher, "os", SimpleNamespace(replace=replace)
    yield of_launcher, "call", cluster.call
    yield of_launcher, "raise_limits", lambda: None
    yield supervisor, "written_files", written
    yield host_agent, "here", lambda names, *_: frozenset({cluster.here.name} & set(names))


def _of_horovodrun(world: World, cluster: Any) -> Iterator[tuple[Any, str, Any]]:
    def current() -> Any:
        return world.current_host.facts["horovodrun"]

    def activate(server: Any) -> None:
        current().server = server
        server.is_listening = True

    def bind(server: Any) -> None: ...

    def warn(text: str, *values: Any) -> None:
        current().print(text % values if values else text)

    def silent(*_: Any, **__: Any) -> None: ...

    def signals(number: int, handler: Any) -> None:
        current().handlers[number] = handler

    logging = SimpleNamespace(
        debug=silent, info=silent, warning=warn, error=warn, exception=warn, getLogger=lambda *_: None
    )
    threads = LockedThreading(world)
    for module in (driver, registration, discovery, gloo_run):
        yield module, "threading", threads
    for module in (driver, registration, discovery, rendezvous, http_server):
        yield module, "logging", logging
    yield driver, "WorkerNotificationClient", lambda *arguments: NotificationClient(cluster, *arguments)
    yield discovery, "random", SimpleNamespace(uniform=lambda low, high: low + cluster.cooldown_share * (high - low))
    yield discovery, "safe_shell_exec", SimpleNamespace(execute=lambda *a, **k: current().list_hosts(*a, **k))
    yield rank_process, "run", lambda *a, **k: current().run(*a, **k)
    yield gloo_run, "signal", SimpleNamespace(signal=signals, SIGINT=2, SIGTERM=15)
    yield gloo_run, "print", lambda text: current().print(text)
    local = SimpleNamespace(
        resolve_host_address=lambda name: name,
        get_local_host_addresses=lambda: [cluster.here.name],
        get_driver_ip=lambda interfaces: "10.0.0.1",
    )
    yield gloo_run, "network", local
    yield horovod_launch, "gloo_built", lambda verbose=False: True
    yield http_server, "in_thread", lambda target: SimpleNamespace(join=lambda: None)
    yield http_server, "RendezvousHTTPServer", HttpServer
    yield horovod_driver, "services", SimpleNamespace(Server=type("Server", (), {}))
    tcp = SimpleNamespace(server_bind=bind, server_activate=activate)
    yield horovod_driver, "socketserver", SimpleNamespace(TCPServer=tcp)
    yield horovod_driver, "common_interfaces", lambda *_: {"eth0"}


def _of_ranks(world: World) -> Iterator[tuple[Any, str, Any]]:
    horovod, process = Horovod(world), OfProcess(world)
    shared = hvd.elastic
    of_elastic = SimpleNamespace(run=shared.run, SharedKerasState=shared.SharedKerasState)
    yield shared, "horovod", horovod
    for name in ("init", "shutdown", "allgather_object", "broadcast_object", "broadcast_model"):
        yield shared, name, getattr(horovod, name)
    yield shared, "PROCESS", process
    yield shared, "notification_manager", Manager(world)
    yield shared, "services", SimpleNamespace(restrict=lambda *_: None, address_of=lambda _: "")
    yield shared, "is_on", lambda: True
    of_tf = SimpleNamespace(device=lambda _: contextlib.nullcontext(), constant=lambda one: one, errors=tf.errors)
    yield shared, "tf", of_tf
    of_keras = SimpleNamespace(ops=SimpleNamespace(convert_to_numpy=lambda variable: Kept(variable.value)))
    yield shared, "keras", of_keras
    yield shared, "compiled_optimizer", lambda model: model.optimizer
    yield shared, "slots_of", lambda model, optimizer=None: model.slots
    yield shared, "has_weights", lambda model: True
    yield shared, "is_shared", lambda model: False

    communicating = {
        name: getattr(horovod, name)
        for name in ("rank", "size", "run_together", "on_rank_0", "allgather_object", "broadcast_object", "allreduce")
    }
    tracker = SimpleNamespace(PHASES=SimpleNamespace(enter=lambda phase: None))
    optimizer = SimpleNamespace(finalize_variable_values=lambda _: None, _trainable_variables=())
    names = SimpleNamespace(
        **communicating,
        Max=Horovod.Max,
        elastic=of_elastic,
        step_timing=tracker,
        optimizers_of=lambda model: [optimizer],
    )
    for module in (elastic, stopping, loop):
        yield module, "hvd", names

    def report(kind: str, *fields: str) -> None:
        horovod.member.report(":".join((kind, *fields)))

    restored = FromCheckpoint(horovod)
    yield elastic, "run_files", restored
    for name in ("restore", "open_folder"):
        yield run_files.FromCheckpoint, name, getattr(restored, name)

    def together(name: str) -> Any:
        return lambda *_: horovod.allgather_object(None, name)

    for name in ("rank", "size", "allgather_object"):
        yield hvd, name, getattr(horovod, name)
    yield hvd, "check_placement", together("ringtrain_placement")
    yield hvd, "check_in_sync", together("ringtrain_in_sync")
    yield train, "agreement", SimpleNamespace(same_code=together("ringtrain_code"), same_job=lambda *_: None)
    yield train, "run_files", SimpleNamespace(open_log=lambda *_: None)
    shown = SimpleNamespace(terminal_of=lambda _: None, show_plan=lambda *_: None, show_start=lambda *_: None)
    yield train, "console", shown
    yield train, "devices", SimpleNamespace(identity=lambda _: "")
    yield train, "_check_averaging", lambda _: ""
    yield model_state, "frozen_layers", lambda _: []
    yield elastic, "failures", SimpleNamespace(report=report)
    yield elastic, "console", SimpleNamespace(terminal_of=lambda _: Terminal(horovod))

    yield elastic, "evaluation", SimpleNamespace(states_of_metrics=lambda _: ())
    yield elastic, "Snapshot", training.Snapshot
    yield Ring, "training", training.steps
    unchanged = SimpleNamespace(restore_callbacks=lambda *_: None, Snapshot=training.Snapshot)
    yield loop, "callback_state", unchanged


CHANGED_BY_INSTALL = (
    (gloo_run, "ElasticDriver _exec_command_fn RendezvousServer get_run_command _slot_info_to_command_fn"),
    (gloo_run, "get_remote_command safe_shell_exec"),
    (safe_shell_exec, "execute"),
    (discovery.HostDiscoveryScript, "find_available_hosts_and_slots"),
    (discovery.HostManager, "order_available_hosts"),
    (discovery.DiscoveredHosts, "available_hosts"),
    (env, "is_exportable"),
    (mpi_run.env_util, "is_exportable"),
    (remote, "SSH_COMMAND_PREFIX"),
    (driver_service, "get_common_interfaces"),
    (driver, "WorkerNotificationClient WorkerStateRegistry"),
)
"""what `horovod_driver.install` changes in the process of one horovodrun"""


@contextlib.contextmanager
def replaced(world: World, cluster: Any) -> Iterator[None]:
    """Gives launcher, horovodrun and ranks the simulated world."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(world, of_launcher, driver, discovery, timeout, gloo_run))
        stack.enter_context(in_place(world, elastic, stopping))
        values = [*_of_launcher(cluster), *_of_horovodrun(world, cluster), *_of_ranks(world)]
        for module, name, value in values:
            stack.enter_context(mock.patch.object(module, name, value, create=name == "print"))
        stack.enter_context(mock.patch.object(horovod_driver.sys, "argv", ["horovodrun"]))
        clean = []
        for owner, names in CHANGED_BY_INSTALL:
            for name in names.split():
                value = vars(owner)[name]
                stack.enter_context(mock.patch.object(owner, name, value))
                clean.append((owner, name, value))

        def fresh_modules() -> None:
            for owner, name, value in clean:
                setattr(owner, name, value)

        cluster.fresh_modules = fresh_modules
        yield
