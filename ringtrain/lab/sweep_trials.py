"""Trials of a sweep: what they train, on which slots, each under its own ringtrain launch."""

from __future__ import annotations

import contextlib
import fcntl
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
from ringtrain.config.sections import nearest
from ringtrain.errors import LaunchError
from ringtrain.lab import script
from ringtrain.lab.script import Script
from ringtrain.lab.sweep_space import Study
from ringtrain.protocol.env import HOST_SLOTS, YIELDING
from ringtrain.protocol.for_script import ForScript

if TYPE_CHECKING:
    import subprocess

BY = "ringtrain sweep"
POLL_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Place = Mapping[str, tuple[int, ...]]
"""slot numbers by host"""


@dataclass(frozen=True)
class TrialJob:
    """Script of all trials, which reads their values from its command line, `ringtrain.trial` or its options."""

    script: Script
    templates: Sequence[str]
    """words of the command line with names of values in braces"""
    objective: str
    """metric that trials are compared by"""
    names: Collection[str]
    """of the values that are the script's own"""

    def command(self, values: Mapping[str, Any]) -> list[str]:
        """Command line with these values."""
        words = [*self.script.command]
        for template in self.templates:
            try:
                words += [word.format_map(values) for word in shlex.split(template)]
            except (ValueError, LookupError, AttributeError) as error:
                raise LaunchError(
                    f"got --set {template!r}, expected e.g. '--lr={{learning_rate}}' with values of the script, which"
                    f" are {', '.join(self.names)}: {error}"
                ) from None
        return words

    def divided(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values by name, divided into options and the script's own."""
        options, own = {}, {}
        for name, value in values.items():
            if name in self.names:
                own[name] = value
            else:
                options[name] = value
        return options, own

    def write_best(self, path: Path, best: Any, num_ranks: int) -> str:
        """Writes the values of the best trial, and returns the command that trains with them."""
        options, own_values = self.divided(best.params)
        tuned = ForScript(by=f"{BY}, trial {best.number}", options=options, trial=own_values)
        tuned.write(path, objective=self.objective, value=best.value)
        return f"ringtrain launch -np {num_ranks} --tuned {path} -- {shlex.join(self.command(best.params))}"


@dataclass
class Running:
    """Running trial of a sweep."""

    trial: Any
    """Optuna's"""
    folder: Path
    place: Place
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float = field(default_factory=time.monotonic)


class Sweep:
    """Runs trials until the study has `most` in all, or a signal arrives."""

    def __init__(
        self,
        folder: Path,
        study: Study,
        job: TrialJob,
        most: int,
        num_ranks: int,
        hosts: Sequence[Host],
        launch_words: Sequence[str],
    ) -> None:
        self.folder, self.study, self.job, self.most, self.num_ranks = folder, study, job, most, num_ranks
        self.hosts = hosts
        self.launch_words = launch_words
        self.free = {host.name: set(slots_of(host)) for host in hosts}
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
            options, own_values = self.job.divided(values)
            for_script = ForScript(by=BY, options=options, trial=own_values, folder=os.path.abspath(own))
            words = [*self.launch_words, *words_of(place, self.hosts)]
            environ = {**self._environ(place), **for_script.variables()}
            process = script.start_launch(words, self.job.command(values), environ, log, [lock])
        for host, taken in place.items():
            self.free[host] -= {*taken}
        self.running.append(Running(trial, own, place, process, log))
        if self.stopped_by:  # a signal arrived since the last check
            process.send_signal(signal.SIGTERM)
        processes.say(f"sweep: trial {trial.number}: {values_in_words(values)} on {in_words(place)}")
        return True

    def _environ(self, place: Place) -> dict[str, str]:
        most = max(host.slots for host in self.hosts if host.name in place)
        # Ranks of several trials together fill a host.
        full = {YIELDING: "1"} if most >= len(os.sched_getaffinity(0)) else {}
        return {**full, **os.environ, HOST_SLOTS: str(most)}

    def _end(self, one: Running, code: int) -> None:
        """Frees the slots of a trial and records its result; one that a signal ended is resumed by the next sweep."""
        self.running.remove(one)
        for host, taken in one.place.items():
            self.free[host] |= {*taken}
        if code < 0 or code in ASKED_TO_STOP:
            processes.say(f"sweep: trial {one.trial.number} was stopped: the same command goes on")
            return
        epochs: list[Any] = []
        for run in script.runs_in(one.folder):
            epochs += run.epochs
        objective, value, reason = self.job.objective, None, ""
        if code:
            reason = script.reason_of(one.log, code)
        elif not epochs:
            reason = "it has recorded no epoch: expected a script that calls ringtrain.fit"
        elif objective not in epochs[-1]:
            reason = f"it has no {objective}: {nearest(objective, [*epochs[-1]])}"
        else:
            value = epochs[-1][objective]
            if value is None or not math.isfinite(value):
                value, reason = None, f"its last epoch has no {objective}"
        seconds = round(time.monotonic() - one.began_s, 3)
        facts = {"epochs": len(epochs), "seconds": seconds, "where": in_words(one.place), "reason": reason}
        self.study.finish(one.trial, value, **facts)
        result = f"failed: {reason}" if reason else f"{objective} {number_text(value)}"
        processes.say(f"sweep: trial {one.trial.number} after {len(epochs)} epochs, {seconds:.1f} s: {result}")


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


def allot(free: Mapping[str, Collection[int]], num_ranks: int) -> Place:
    """Allocates slots on the first host where a trial fits, else on the fewest hosts; empty if too few are free."""
    for name, slots in free.items():
        if len(slots) >= num_ranks:
            return {name: tuple(sorted(slots)[:num_ranks])}
    place, left = {}, num_ranks
    for name, slots in sorted(free.items(), key=lambda one: -len(one[1])):
        if left and slots:
            place[name] = tuple(sorted(slots)[:left])
            left -= len(place[name])
    return {} if left else place


def words_of(place: Place, hosts: Sequence[Host]) -> list[str]:
    """Options of ringtrain launch for a placement."""
    used = [Host(host.name, max(slots_of(host)) + 1) for host in hosts if host.name in place]
    chosen = []
    for host in used:
        name, _, _ = str(host).rpartition(":")
        chosen += [f"{name}:{slot}" for slot in place[host.name]]
    return ["-H", ",".join(map(str, used)), "--include", ",".join(chosen)]


def slots_of(host: Host) -> Sequence[int]:
    """Slot numbers of a host."""
    return host.indices or range(host.slots)


def in_words(place: Place) -> str:
    """Formats a placement, e.g. "host1:0,1"."""
    return " ".join(f"{host}:{','.join(map(str, taken))}" for host, taken in place.items())


def values_in_words(values: Mapping[str, Any]) -> str:
    """Formats values, e.g. "train.batch_size=32 optimizer.learning_rate=0.00123"."""
    return " ".join(f"{option}={number_text(value)}" for option, value in values.items())


def number_text(value: Any) -> str:
    """Formats a value with few characters; None is empty."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)
