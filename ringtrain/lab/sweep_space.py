"""Search space of a sweep: TOML file whose keys are options, each with a list of values or a range.

For a script other than the trainer, names without a section are the script's own: learning_rate = [0.1, 0.01].

"optimizer.name" = ["sgd", "adam"]

[optimizer]
learning-rate = {low = 1e-4, high = 1e-1, log = true}

[train]
batch-size = [16, 32, 64]

Trials and their results are in Optuna's storage, which survives an interruption.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.config.files import checked, tables_of
from ringtrain.config.sections import OF_SCRIPT, RULES, nearest, option_types
from ringtrain.errors import ConfigError, MissingDependency

OF_THE_SWEEP = ("run.", "train.monitor")
"""options that identify trials or define their comparison"""
STUDY_FILE = "optuna.db"
Space = Mapping[str, Any]
"""Optuna's distribution of each option, by dotted name"""


def optuna() -> Any:
    """The package."""
    try:
        import optuna
    except ImportError:
        raise MissingDependency("ringtrain sweep needs Optuna: pip install 'ringtrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def read(path: Path, is_trainer: bool) -> Space:
    """Reads a search space: the trainer's options, or a script's values (no section) and options of ringtrain.fit."""
    known = [option for option in option_types() if not option.startswith(OF_THE_SWEEP)]
    if not is_trainer:
        known = [option for option in known if option.startswith(OF_SCRIPT)]
    found: dict[str, Any] = {}
    for key, value in _entries(path):
        option = key.replace("-", "_")
        is_own = not is_trainer and "." not in option
        if not is_own and option not in known:
            text = f"{path}: {key}: is no option that differs between trials: {nearest(option, known)}"
            if not is_trainer:
                text += " (names of the script's own values have no section)"
            raise ConfigError(text)
        found[option] = _distribution(path, option, value, is_own)
    if not found:
        raise ConfigError(f'{path}: got no option, expected e.g. "optimizer.learning-rate" = [0.001, 0.01]')
    return found


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and values of a file; those in a table of a section have its name before them."""
    for name, value in tables_of(path).items():
        if isinstance(value, dict) and "low" not in value:
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _distribution(path: Path, option: str, value: Any, is_own: bool) -> Any:
    """Distribution of the list or range of an option, or of a script's own value."""
    distributions = optuna().distributions
    try:
        if isinstance(value, list):
            return distributions.CategoricalDistribution([_valid(path, option, one, is_own) for one in value])
        limits = dict(value)
        is_log = limits.pop("log", False)
        for key, limit in limits.items():
            limits[key] = _valid(path, option, limit, is_own)
        if all(type(limit) is int for limit in limits.values()):
            return distributions.IntDistribution(**limits, log=is_log)
        return distributions.FloatDistribution(**limits, log=is_log)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {option}: got {value!r}, expected a list of values, or a range {{low = ..., high = ...}} of"
            f" numbers: {error}"
        ) from None


def _valid(path: Path, option: str, value: Any, is_own: bool) -> Any:
    """A value in the type of its option."""
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: {option}: got {value!r}, expected numbers, text, or true and false")
    if is_own:
        return value
    value = checked(path, option, value)
    rule = RULES.get(option)
    if rule and not rule.holds(value):
        raise ConfigError(f"{path}: {option}: got {value}, expected {rule.text}")
    return value


def grid(path: Path, space: Space) -> list[dict[str, Any]]:
    """All combinations, the last option changing fastest."""
    lists = []
    for option, distribution in space.items():
        if not hasattr(distribution, "choices"):
            raise ConfigError(f"{path}: {option}: a grid needs a list of values; or take --sampler random or tpe")
        lists.append(distribution.choices)
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


class Study:
    """Trials of a sweep in Optuna's storage. `points` are the values of all trials of a grid, in place of a sampler."""

    def __init__(
        self, folder: Path, space: Space, sampler: str, minimize: bool, points: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.optuna, self.space, self.points, self.minimize = optuna(), space, points, minimize
        warnings.filterwarnings("ignore", category=self.optuna.exceptions.ExperimentalWarning)
        self.study = self.optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{(folder / STUDY_FILE).absolute()}",
            direction="minimize" if minimize else "maximize",
            load_if_exists=True,
        )
        # A sampler that is created again must not repeat earlier draws.
        own_seed = 1_000_003 * len(self.trials()) % 2**32
        if sampler == "tpe":
            self.study.sampler = self.optuna.samplers.TPESampler(seed=own_seed, constant_liar=True)
        else:
            self.study.sampler = self.optuna.samplers.RandomSampler(seed=own_seed)

    def trials(self) -> list[Any]:
        """Optuna's records of all trials, by number."""
        return self.study.get_trials(deepcopy=False)

    def interrupted(self) -> list[Any]:
        """Trials that were running when an earlier process ended, to be run again."""
        # Created from its number in the file, a trial keeps its values and draws only missing ones.
        running = [one for one in self.trials() if one.state.name == "RUNNING"]
        return [self.optuna.trial.Trial(self.study, one._trial_id) for one in running]

    def next(self, most: int) -> Any:
        """Asks Optuna for another trial; None if there are enough."""
        known = self.trials()
        if not any(one.state.name == "WAITING" for one in known):
            if len(known) >= most:
                return None
            if self.points:
                self.study.enqueue_trial(self.points[len(known)])
        return self.study.ask()

    def values(self, trial: Any) -> dict[str, Any]:
        """Values of a trial, by dotted option."""
        found = {}
        for option, one in self.space.items():
            if hasattr(one, "choices"):
                found[option] = trial.suggest_categorical(option, one.choices)
            elif isinstance(one, self.optuna.distributions.IntDistribution):
                found[option] = trial.suggest_int(option, one.low, one.high, log=one.log)
            else:
                found[option] = trial.suggest_float(option, one.low, one.high, log=one.log)
        return found

    def finish(self, trial: Any, value: float | None, **facts: Any) -> None:
        """Records the end of a trial; a value of None: it has failed."""
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        state = self.optuna.trial.TrialState.FAIL
        if value is not None:
            state = self.optuna.trial.TrialState.COMPLETE
        self.study.tell(trial.number, value, state=state)

    def best(self) -> list[Any]:
        """Complete trials, the best first; among equals the earlier one."""
        complete = [one for one in self.trials() if one.state.name == "COMPLETE"]
        return sorted(complete, key=lambda one: one.value if self.minimize else -one.value)
