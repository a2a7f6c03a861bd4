"""Trials of a sweep: what they train, on which slots, each under its own ringtrain launch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.cluster import processes
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.restart import ASKED_TO_STOP
from ringtrain.config import nearest
from ringtrain.errors import LaunchError
from ringtrain.lab import script
from ringtrain.lab.script import Script
from ringtrain.lab.sweep_space import Study, Trial
from ringtrain.protocol.env import HOST_SLOTS, YIELDING
from ringtrain.protocol.for_script import ForScript, Tuned
from ringtrain.protocol.json_text import INVALID, parse_json

if TYPE_CHECKING:
    import subprocess

BY = "ringtrain sweep"


class Trials:
    """Trials of a script, which reads their values from its command line, `ringtrain.trial` or its options.

    Args:
        templates: Words of the command line with names of values in braces.
        objective: Metric that trials are compared by.
        names: Of the values that are the script's own.
    """

    def __init__(self, job: Script, templates: Sequence[str], objective: str, names: Collection[str]) -> None:
        self.job, self.templates, self.objective, self.names = job, templates, objective, names
        self._arguments(dict.fromkeys(names, 1))  # report a mistake before anything starts

    def _arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Words of the command line for these values."""
        words = []
        for template in self.templates:
            try:
                words += [word.format_map(values) for word in shlex.split(template)]
            except KeyError as error:
                name = str(error.args[0])
                raise LaunchError(f"got --set {template!r}: unknown value {name}: {nearest(name, [*values])}") from None
            except (ValueError, LookupError, AttributeError) as error:
                raise LaunchError(f"got --set {template!r}, expected e.g. '--lr={{learning_rate}}': {error}") from None
        return words

    def settings(self) -> dict[str, Any]:
        """Settings that all starts of the sweep have in common."""
        return {"command": [*self.job.command], "--set": [*self.templates], "--objective": self.objective}

    def _divided(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divides values by name into options and the script's own."""
        options, own = {}, {}
        for name, value in values.items():
            if name in self.names:
                own[name] = value
            else:
                options[name] = value
        return options, own

    def start(self, folder: Path, values: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Command and variables of the ranks of a trial with these values, which goes on if it has begun."""
        options, own = self._divided(values)
        for_script = ForScript(by=BY, options=options, trial=own, folder=os.path.abspath(folder))
        return [*self.job.command, *self._arguments(own)], script.variables(for_script)

    def write_best(self, folder: Path, best: Trial, num_ranks: int) -> str:
        """Writes the values of the best trial, and returns the command that trains with them."""
        options, own = self._divided(best.values)
        path, by = folder / "best.json", f"{BY}, trial {best.number}"
        Tuned(by=by, options=options, trial=own).write(path, objective=self.objective, value=best.value)
        command = shlex.join([*self.job.command, *self._arguments(own)])
        return f"ringtrain launch -np {num_ranks} --tuned {path} -- {command}"


def epochs_of(runs: Sequence[Path], monitor: str) -> list[tuple[int, float | None]]:
    """Epochs of a trial with their monitored value, counted through all its runs."""
    epochs: list[tuple[int, float | None]] = []
    for run in runs:
        before = epochs[-1][0] if epochs else 0
        with contextlib.suppress(FileNotFoundError):
            own = epochs_in(run / "metrics.jsonl", monitor)
            epochs += [(before + epoch, value) for epoch, value in own]
    return epochs


POLL_S = 0.1
SETTLE_S = 1.0  # a signal that ends a trial usually reaches this process as well, a moment later


@dataclass
class Running:
    """Running trial of a sweep."""

    trial: Any
    """Optuna trial"""
    values: Mapping[str, Any]
    folder: Path
    place: Place
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float = field(default_factory=time.monotonic)


class Sweep:
    """Runs trials until the study has enough or a signal arrives.

    Args:
        launch_words: Options of ringtrain launch for all trials.
    """

    def __init__(
        self,
        folder: Path,
        study: Study,
        job: Trials,
        most: int,
        num_ranks: int,
        hosts: Sequence[Host],
        launch_words: Sequence[str],
    ) -> None:
        self.folder, self.study, self.job, self.most, self.num_ranks = folder, study, job, most, num_ranks
        self.hosts = hosts
        self.launch_words = launch_words
        self.free = {host.name: set(numbers(host)) for host in hosts}
        self.running: list[Running] = []
        self.waiting = study.interrupted()
        self.no_more = False
        self.stopped_by = 0

    def go(self) -> None:
        """Runs all trials in the main thread; stopped_by is then the signal that ended the sweep, or 0."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            while (not self.stopped_by and self._begin_another()) or self.running:
                time.sleep(POLL_S)
                for one in [*self.running]:
                    code = one.process.poll()
                    if code is not None:
                        self._end(one, code)
        finally:
            self._stop()
            for one in self.running:
                one.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if not self.stopped_by:
            self.stopped_by = number
            self._stop()

    def _stop(self) -> None:
        """Asks all trials to save and exit, with SIGTERM to their ringtrain launch."""
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)

    # ---- beginning ------------------------------------------------------------------------------------------------

    def _begin_another(self) -> bool:
        """Starts a trial on each free set of slots; False if there are no more trials to start."""
        while not self.no_more:
            place = allot(self.free, self.num_ranks)
            if not place:
                break
            trial = self.waiting.pop(0) if self.waiting else self.study.next(self.most)
            if trial is None:
                self.no_more = True
                break
            if not self._begin(trial, place):
                self.waiting.append(trial)  # its previous attempt is still exiting
                break
        return not self.no_more

    def _begin(self, trial: Any, place: Place) -> bool:
        """Starts a trial; False if its previous attempt is still exiting."""
        name = f"trial-{trial.number:04d}"
        starts = self.folder / "starts"
        starts.mkdir(exist_ok=True)
        with held(starts / f"{name}.lock") as lock:
            if lock is None:
                return False
            values = self.study.values(trial)
            own, log = self.folder / name, starts / f"{name}.log"
            command, variables = self.job.start(own, values)
            words = [*self.launch_words, *words_of(place, self.hosts)]
            process = script.start_launch(words, command, {**self._environ(place), **variables}, log, [lock])
        for host, taken in place.items():
            self.free[host] -= {*taken}
        self.running.append(Running(trial, values, own, place, process, log))
        if self.stopped_by:  # a signal arrived since the last check
            process.send_signal(signal.SIGTERM)
        processes.say(f"sweep: trial {trial.number}: {values_in_words(values)} on {in_words(place)}")
        return True

    def _environ(self, place: Place) -> dict[str, str]:
        most = max(host.slots for host in self.hosts if host.name in place)
        # Ranks of several trials together fill a host.
        full = {YIELDING: "1"} if most >= len(os.sched_getaffinity(0)) else {}
        return {**full, **os.environ, HOST_SLOTS: str(most)}

    # ---- ending ---------------------------------------------------------------------------------------------------

    def _end(self, one: Running, code: int) -> None:
        """Frees the slots of a trial and records its result."""
        self.running.remove(one)
        for host, taken in one.place.items():
            self.free[host] |= {*taken}
        if code < 0 or code in ASKED_TO_STOP:
            if not self.stopped_by:
                time.sleep(SETTLE_S)
            if self.stopped_by:
                return  # resumed when the sweep is
        self._judge(one, code)

    def _judge(self, one: Running, code: int) -> None:
        runs = script.runs_in(one.folder)
        epochs = epochs_of(runs, self.job.objective)
        value = epochs[-1][1] if epochs else None
        facts: dict[str, Any] = {
            "epochs": epochs[-1][0] if epochs else 0,
            "seconds": round(time.monotonic() - one.began_s, 3),
            "where": in_words(one.place),
        }
        reason = ""
        if code:
            reason = script.reason_of(one.log, code)
        elif not runs:
            reason = "it has recorded no epoch: expected a script that calls ringtrain.fit"
        elif not epochs:
            reason = f"it has no {self.job.objective}: {nearest(self.job.objective, script.metrics_of(runs[-1]))}"
        elif value is None or not math.isfinite(value):
            reason = f"its last epoch has no {self.job.objective}"
        said = f"sweep: trial {one.trial.number} after {facts['epochs']} epochs, {facts['seconds']:.1f} s"
        if reason:
            self.study.finish(one.trial, "failed", reason=reason, **facts)
            processes.say(f"{said}: failed: {reason}")
        else:
            self.study.finish(one.trial, "complete", value, **facts)
            processes.say(f"{said}: {self.job.objective} {number_text(value)}")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held(path: Path) -> Iterator[int | None]:
    """File lock, held until all processes with its descriptor have exited; yields None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def claim(path: Path, own: Mapping[str, Any]) -> None:
    """Records the settings that a folder belongs to, or checks that they match those on record."""
    own = json.loads(json.dumps(own))
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    try:
        known = dict(parse_json(path.read_text(encoding="utf-8")))
    except INVALID:
        raise LaunchError(f"{path}: expected a JSON object that says what the folder is for: delete it") from None
    for name in {**known, **own}:
        if known.get(name) != own.get(name):
            raise LaunchError(
                f"{path.parent}: holds a sweep whose {name} is {known.get(name)}, got {own.get(name)}: give another"
                " --folder, or delete it"
            )


def epochs_in(path: Path, monitor: str) -> list[tuple[int, float | None]]:
    """Reads epochs, from 1, with their monitored value; incomplete lines are skipped."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(*INVALID):
            record = parse_json(line)
            value = record[monitor]
            found.append((int(record["epoch"]), None if value is None else float(value)))
    return found


Place = Mapping[str, tuple[int, ...]]
"""slot numbers by host"""


def allot(free: Mapping[str, Collection[int]], num_ranks: int) -> Place:
    """Allocates slots on the fullest host where a trial fits, else on the fewest hosts; empty if too few are free."""
    fitting = [name for name, slots in free.items() if len(slots) >= num_ranks]
    if fitting:
        name = min(fitting, key=lambda name: len(free[name]))
        return {name: tuple(sorted(free[name])[:num_ranks])}
    place, left = {}, num_ranks
    for name, slots in sorted(free.items(), key=lambda one: -len(one[1])):
        if left and slots:
            place[name] = tuple(sorted(slots)[:left])
            left -= len(place[name])
    return {} if left else place


def words_of(place: Place, hosts: Sequence[Host]) -> list[str]:
    """Options of ringtrain launch for a placement."""
    used = [Host(host.name, max(numbers(host)) + 1) for host in hosts if host.name in place]
    chosen = []
    for host in used:
        name, _, _ = str(host).rpartition(":")
        chosen += [f"{name}:{slot}" for slot in place[host.name]]
    return ["-H", ",".join(map(str, used)), "--include", ",".join(chosen)]


def numbers(host: Host) -> Sequence[int]:
    """Slot numbers of a host."""
    return host.indices or range(host.slots)


def in_words(place: Place) -> str:
    """Formats a placement, e.g. "host1:0,1"."""
    return " ".join(f"{host}:{','.join(map(str, taken))}" for host, taken in place.items())


def values_in_words(values: Mapping[str, Any]) -> str:
    """Formats values, e.g. "train.batch_size=32 optimizer.learning_rate=0.00123"."""
    return " ".join(f"{option}={number_text(value)}" for option, value in values.items())


def number_text(value: Any) -> str:
    """Formats a value with few characters."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return json.dumps(value)
    return str(value)
