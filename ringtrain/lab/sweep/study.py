"""Trials of a sweep and their results in Optuna's storage, which survives an interruption."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.errors import MissingDependency
from ringtrain.lab.sweep.space import Choice, Space

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
"""states of Optuna and their names here"""
FILE = "optuna.db"
FIRST_RUNG_EPOCHS, ONE_OF = 1, 3
"""of ASHA: after 1, 3, 9, ... epochs a third of the trials continues"""


@dataclass(frozen=True)
class Trial:
    """Current state of a trial."""

    number: int
    state: str
    """a value of STATES"""
    values: Mapping[str, Any]
    """by dotted option"""
    value: float | None
    """of the monitor: final, or last reported"""
    epochs: int
    """number of reported epochs"""
    facts: Mapping[str, Any]
    """further records: reason, seconds, where"""


class Study:
    """Interface to Optuna.

    Args:
        sampler: grid, random or tpe.
        prune: asha or none.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        sampler: str,
        prune: str,
        minimize: bool,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        try:
            import optuna
        except ImportError:
            raise MissingDependency("ringtrain sweep needs Optuna: pip install 'ringtrain[sweep]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.optuna, self.space, self.points, self.is_grid = optuna, space, points, sampler == "grid"
        self.minimize = minimize
        pruner: Any = optuna.pruners.NopPruner()
        if prune == "asha":
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST_RUNG_EPOCHS, reduction_factor=ONE_OF)
        self.study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{(folder / FILE).absolute()}",
            direction="minimize" if minimize else "maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        # A sampler that is created again must not repeat earlier draws.
        own_seed = 1_000_003 * len(self._all()) % 2**32
        if sampler == "tpe":
            self.study.sampler = optuna.samplers.TPESampler(seed=own_seed, constant_liar=True)
        else:
            self.study.sampler = optuna.samplers.RandomSampler(seed=own_seed)

    def _all(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    def interrupted(self) -> list[Any]:
        """Optuna's trials that were running when an earlier process ended, to be run again."""
        running = self.optuna.trial.TrialState.RUNNING
        # Created from its number in the file, a trial keeps its values and draws only missing ones.
        return [self.optuna.trial.Trial(self.study, one._trial_id) for one in self._all() if one.state == running]

    def next(self, most: int) -> Any:
        """Asks Optuna for another trial; None if there are enough."""
        known = self._all()
        if not any(one.state.name == "WAITING" for one in known):
            if len(known) >= most:
                return None
            if self.is_grid:
                self.study.enqueue_trial({option: _kept(one) for option, one in self.points[len(known)].items()})
        return self.study.ask()

    def values(self, trial: Any) -> dict[str, Any]:
        """Values of a trial, by dotted option."""
        found: dict[str, Any] = {}
        for option, one in self.space.items():
            if isinstance(one, Choice):
                kept = {_kept(value): value for value in one.values}
                found[option] = kept[trial.suggest_categorical(option, list(kept))]
                continue
            suggest = trial.suggest_int if one.whole else trial.suggest_float
            # Optuna expects the last value that a step reaches as the upper bound.
            if one.step:
                high = one.low + one.step * math.floor((one.high - one.low) / one.step + 1e-9)
            else:
                high = one.high
            step = {"step": one.step} if one.step else {}
            found[option] = suggest(option, one.low, high, log=one.log, **step)
        return found

    def report(self, trial: Any, epoch: int, value: float) -> bool:
        """Reports the value of an epoch, from 1 (NaN: non-finite); returns whether to prune the trial."""
        trial.report(value, epoch)
        return bool(trial.should_prune())

    def finish(self, trial: Any, state: str, value: float | None = None, **facts: Any) -> None:
        """Records the end of a trial: state complete, pruned or failed; value only if complete."""
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        known = {ours: theirs for theirs, ours in STATES.items()}
        self.study.tell(trial.number, value, state=self.optuna.trial.TrialState[known[state]])

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        found = []
        for one in self._all():
            reported = one.intermediate_values
            last = reported[max(reported)] if reported else None
            value = one.value if one.state.name == "COMPLETE" else last
            kept = {option: _taken(self.space[option], value) for option, value in one.params.items()}
            epochs = max(reported, default=0)
            found.append(Trial(one.number, STATES[one.state.name], kept, value, epochs, dict(one.user_attrs)))
        return found

    def best(self) -> list[Trial]:
        """Complete trials, the best first; among equals the earlier one."""
        complete = [one for one in self.trials() if one.state == "complete"]
        return sorted(complete, key=lambda one: (one.value or 0.0) * (1 if self.minimize else -1))


def _kept(value: Any) -> Any:
    """Converts a value for Optuna's storage: lists become text."""
    return json.dumps(value) if isinstance(value, tuple) else value


def _taken(one: Any, value: Any) -> Any:
    """Inverse of _kept."""
    is_text = isinstance(one, Choice) and isinstance(one.values[0], tuple)
    return tuple(json.loads(value)) if is_text else value
