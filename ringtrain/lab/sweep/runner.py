"""Runs the trials of a sweep in parallel, each under its own ringtrain launch on its own slots."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.restart import ASKED_TO_STOP
from ringtrain.config import nearest
from ringtrain.lab import jobs, script
from ringtrain.lab.jobs import Place
from ringtrain.lab.sweep import trials
from ringtrain.lab.sweep.progress import Shown
from ringtrain.lab.sweep.study import Study
from ringtrain.lab.sweep.trials import Trials
from ringtrain.protocol.env import HOST_SLOTS, YIELDING

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
    process: Any
    log: Path
    began_s: float = field(default_factory=time.monotonic)
    epoch: int = 0
    """last reported epoch"""
    value: float | None = None
    seen: Mapping[Path, tuple[float, int]] = field(default_factory=dict)
    """modification time and size of each run's metrics.jsonl when last read"""
    stopped_at: int = 0
    """epoch at which the trial was pruned; 0: not pruned"""

    @property
    def seconds(self) -> float:
        """Time since the start of the trial."""
        return time.monotonic() - self.began_s

    @property
    def where(self) -> str:
        """Placement as text, e.g. "host1:0,1"."""
        return jobs.in_words(self.place)


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
        shown: Shown,
    ) -> None:
        self.folder, self.study, self.job, self.most, self.num_ranks = folder, study, job, most, num_ranks
        self.hosts, self.shown = hosts, shown
        self.launch_words = launch_words
        self.free = {host.name: set(jobs.numbers(host)) for host in hosts}
        self.running: list[Running] = []
        self.waiting = study.interrupted()
        self.no_more = False
        self.stopped_by = 0

    def go(self) -> None:
        """Runs all trials in the main thread; stopped_by is then the signal that ended the sweep, or 0."""
        before = {number: signal.signal(number, self._receive) for number in jobs.SIGNALS}
        try:
            while (not self.stopped_by and self._begin_another()) or self.running:
                time.sleep(POLL_S)
                for one in [*self.running]:
                    code = one.process.poll()
                    self._follow(one)
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
            place = jobs.allot(self.free, self.num_ranks)
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
        """Starts a trial, or records that it was pruned before."""
        name = f"trial-{trial.number:04d}"
        starts = self.folder / "starts"
        starts.mkdir(exist_ok=True)
        with jobs.held(starts / f"{name}.lock") as lock:
            if lock is None:
                return False
            values = self.study.values(trial)
            own, log = self.folder / name, starts / f"{name}.log"
            one = Running(trial, values, own, place, None, log)
            kept = self.study.trials()[trial.number]
            one.epoch, one.stopped_at = kept.epochs, kept.facts.get("stopped_at", 0)
            if one.stopped_at:
                self._finish(trial, values, "pruned")
                return True
            command, variables = self.job.start(own, values)
            words = [*self.launch_words, *jobs.words_of(place, self.hosts)]
            environ = {**self._environ(place), **variables}
            one.process = jobs.start_launch(words, command, environ, log, [lock])
        for host, taken in place.items():
            self.free[host] -= {*taken}
        self.running.append(one)
        if self.stopped_by:  # a signal arrived since the last check
            one.process.send_signal(signal.SIGTERM)
        self.shown.began(one)
        return True

    def _environ(self, place: Place) -> dict[str, str]:
        most = max(host.slots for host in self.hosts if host.name in place)
        # Ranks of several trials together fill a host.
        full = {YIELDING: "1"} if most >= len(os.sched_getaffinity(0)) else {}
        return {**full, **os.environ, HOST_SLOTS: str(most)}

    # ---- while it runs --------------------------------------------------------------------------------------------

    def _follow(self, one: Running) -> None:
        """Reports new epochs of a trial and stops it if Optuna prunes it."""
        runs = script.runs_in(one.folder)
        seen: dict[Path, tuple[float, int]] = {}
        for run in runs:
            with contextlib.suppress(FileNotFoundError):
                stat = (run / "metrics.jsonl").stat()
                seen[run] = stat.st_mtime, stat.st_size
        if one.seen == seen:
            return
        one.seen = seen
        for epoch, value in trials.epochs_of(runs, self.job.objective):
            one.value = value
            if epoch <= one.epoch:
                continue
            one.epoch = epoch
            reported = math.nan if value is None else value
            enough = self.study.report(one.trial, epoch, reported)
            if enough and not one.stopped_at and one.process:
                one.stopped_at = epoch
                one.trial.set_user_attr("stopped_at", epoch)
                one.process.send_signal(signal.SIGTERM)

    # ---- ending ---------------------------------------------------------------------------------------------------

    def _end(self, one: Running, code: int) -> None:
        """Frees the slots of a trial and records its result."""
        self.running.remove(one)
        for host, taken in one.place.items():
            self.free[host] |= {*taken}
        if (code < 0 or code in ASKED_TO_STOP) and not one.stopped_at:
            if not self.stopped_by:
                time.sleep(SETTLE_S)
            if self.stopped_by:
                return  # resumed when the sweep is
        self._judge(one, code)

    def _judge(self, one: Running, code: int) -> None:
        runs = script.runs_in(one.folder)
        rate = trials.rate_of(runs)
        facts: dict[str, Any] = {"seconds": round(one.seconds, 3), "where": one.where, "learning_rate": rate}
        if code and one.stopped_at:
            self._finish(one.trial, one.values, "pruned", **facts)
        elif code:
            self._finish(one.trial, one.values, "failed", reason=jobs.reason_of(one.log, code), **facts)
        elif one.value is None or not math.isfinite(one.value):
            why = "it ended before its first epoch"
            if one.epoch:
                why = f"its last epoch has no {self.job.objective}"
            if not runs:
                why = "it has recorded no epoch: expected a script that calls ringtrain.fit"
            recorded = script.metrics_of(runs[-1]) if runs else []
            if recorded and self.job.objective not in recorded:
                why = f"it has no {self.job.objective}: {nearest(self.job.objective, recorded)}"
            self._finish(one.trial, one.values, "failed", reason=why, **facts)
        else:
            self._finish(one.trial, one.values, "complete", one.value, **facts)

    def _finish(
        self, trial: Any, values: Mapping[str, Any], state: str, value: float | None = None, **facts: Any
    ) -> None:
        self.study.finish(trial, state, value, **facts)
        self.shown.ended(self.study.trials()[trial.number])
