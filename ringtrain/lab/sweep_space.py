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
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ringtrain.config import RULES, Config, nearest, option_types
from ringtrain.config_io import checked, tables_of
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.lab.script import check_option

OF_THE_SWEEP = ("run.", "train.monitor")
"""options that identify trials or define their comparison"""
OF_A_RANGE = ("low", "high", "log")


@dataclass(frozen=True)
class Choice:
    """Option with a list of values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """Option with a range of numbers."""

    low: float
    high: float
    log: bool = False
    """sampled uniformly in the logarithm"""

    @property
    def whole(self) -> bool:
        """Whether its numbers are integers."""
        return isinstance(self.low, int)


Space = Mapping[str, Choice | Range]
"""values or range of each option, by dotted name"""


def read(path: Path, is_trainer: bool) -> Space:
    """Reads a search space.

    Args:
        is_trainer: All names are options of `ringtrain.train`. Else those without a section are the script's own
            values, others options of `ringtrain.fit`.
    """
    types = option_types()
    found: dict[str, Choice | Range] = {}
    for key, value in _entries(path):
        option = key.replace("-", "_")
        is_own = not is_trainer and "." not in option
        if not is_trainer and not is_own:
            check_option(option, str(path))
        elif not is_own and option not in types:
            raise ConfigError(f"{path}: unknown option {key}: {nearest(option, list(types))}")
        if option.startswith(OF_THE_SWEEP):
            raise ConfigError(f"{path}: {key}: is the same for all trials of a sweep: give it after --")
        if option in found:
            raise ConfigError(f"{path}: {key}: stands there twice")
        kind = _kind_of(path, option, value) if is_own else types[option]
        if isinstance(value, list):
            found[option] = _choice(path, option, value, kind)
        else:
            found[option] = _range(path, option, value, kind)
    if not found:
        raise ConfigError(f'{path}: got no option, expected e.g. "optimizer.learning-rate" = [0.001, 0.01]')
    return found


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and values of a file; those in a table of a section have its name before them."""
    sections, types = get_type_hints(Config), option_types()
    for name, value in tables_of(path).items():
        is_section = isinstance(value, dict) and name in sections and name not in types
        if is_section and not {*value} & {*OF_A_RANGE}:
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _kind_of(path: Path, name: str, value: Any) -> type:
    """Type of a script's own values, which are text, numbers, or true and false."""
    numbers = [value]
    if isinstance(value, dict):
        numbers = [number for key, number in value.items() if key != "log"]
    elif isinstance(value, list):
        numbers = value
    kinds = {type(number) for number in numbers}
    if not kinds - {int, float}:
        return float if float in kinds else int
    if len(kinds) > 1 or not kinds <= {str, bool}:
        raise ConfigError(f"{path}: {name}: got {value!r}, expected numbers, text, or true and false")
    return kinds.pop()


def grid(path: Path, space: Space) -> list[dict[str, Any]]:
    """All combinations, the last option changing fastest."""
    points: dict[str, tuple[Any, ...]] = {}
    for option, one in space.items():
        if isinstance(one, Range):
            raise ConfigError(f"{path}: {option}: a grid needs a list of values; or take --sampler random or tpe")
        points[option] = one.values
    return [dict(zip(points, values, strict=True)) for values in itertools.product(*points.values())]


def _choice(path: Path, option: str, values: list[Any], kind: Any) -> Choice:
    found: list[Any] = []
    for value in values:
        one = checked(path, option, value, kind)
        _keep_rule(path, option, one)
        if one in found:
            raise ConfigError(f"{path}: {option}: got {value!r} twice, expected each value once")
        found.append(one)
    if not found:
        raise ConfigError(f"{path}: {option}: got an empty list, expected the values to try")
    return Choice(tuple(found))


def _range(path: Path, option: str, table: Any, kind: Any) -> Range:
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: {option}: got {table!r}, expected a list of values, or a range: {{low = ..., high = ...}}"
        )
    for key in table:
        if key not in OF_A_RANGE:
            raise ConfigError(f"{path}: {option}: unknown key {key} of a range: {nearest(key, OF_A_RANGE)}")
    if kind not in (int, float):
        raise ConfigError(f"{path}: {option}: got a range, expected a list: its values are no numbers")
    for key in ("low", "high"):
        if key not in table:
            raise ConfigError(f"{path}: {option}: got a range without {key}, expected low and high")
    own = {}
    for key, value in table.items():
        kind_of_key = bool if key == "log" else kind
        own[key] = checked(path, f"{option}, {key}", value, kind_of_key)
    _keep_rule(path, option, own["low"])
    _keep_rule(path, option, own["high"])
    found = Range(**own)
    if not found.low < found.high < math.inf:
        raise ConfigError(f"{path}: {option}: got low {found.low} and high {found.high}, expected low below high")
    if found.log and found.low <= 0:
        raise ConfigError(f"{path}: {option}: got log and low {found.low}, expected low above 0")
    return found


def _keep_rule(path: Path, option: str, value: Any) -> None:
    rule = RULES.get(option)
    if rule and not rule.holds(value):
        raise ConfigError(f"{path}: {option}: got {value}, expected {rule.text}")


STATES = {"COMPLETE": "complete", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
"""states of Optuna and their names here"""
STUDY_FILE = "optuna.db"


@dataclass(frozen=True)
class Trial:
    """Current state of a trial."""

    number: int
    state: str
    """a value of STATES"""
    values: Mapping[str, Any]
    """by dotted option"""
    value: float | None
    """of the objective; None: not complete"""
    facts: Mapping[str, Any]
    """further records: reason, epochs, seconds, where"""


class Study:
    """Interface to Optuna.

    Args:
        sampler: grid, random or tpe.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        sampler: str,
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
        self.study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{(folder / STUDY_FILE).absolute()}",
            direction="minimize" if minimize else "maximize",
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
            found[option] = suggest(option, one.low, one.high, log=one.log)
        return found

    def finish(self, trial: Any, state: str, value: float | None = None, **facts: Any) -> None:
        """Records the end of a trial: state complete or failed; value only if complete."""
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        known = {ours: theirs for theirs, ours in STATES.items()}
        self.study.tell(trial.number, value, state=self.optuna.trial.TrialState[known[state]])

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        found = []
        for one in self._all():
            kept = {option: _taken(self.space[option], value) for option, value in one.params.items()}
            found.append(Trial(one.number, STATES[one.state.name], kept, one.value, dict(one.user_attrs)))
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
