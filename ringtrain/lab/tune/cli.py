"""ringtrain tune: measures which settings make a training faster and writes them as TOML.

    ringtrain tune -H localhost:2 --out tuned.toml -- --model.name cnn --data.name synthetic --train.batch-size 64

Tuning parameters are tried one by one, the largest expected gain first. The best so far and the candidates are measured
alternately (A B A B ...), and a candidate replaces the best only if the ratios of these rounds are unambiguous.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io
from ringtrain.config import nearest
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.options import seconds_of
from ringtrain.lab.tables import Table
from ringtrain.lab.tune.candidates import (
    LEVERS,
    UNDECIDED,
    BudgetOver,
    Choice,
    Facts,
    Outcome,
    Trial,
    compare,
    next_lever,
    order,
)
from ringtrain.options import FILE, LIST, Argument

BLOCK_S = 2.0
BLOCK_WITHIN_S = 1.0
SHORTEST_BLOCK_STEPS = 3  # one of them warms up
GRAPH_S = 1.5  # to trace the graph of a further variant
AUTOTUNE_S = 20.0
FOR_RANKS = 0.9  # fraction of the remaining time; the launcher needs the rest
MARGIN = 1.15  # a start may take this factor longer than the longest one before


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    only: Annotated[str, LIST] = ""
    """levers to try, e.g. groups,threads; else all"""
    budget: Annotated[str, Argument("TIME")] = "5m"
    """at most so long: 90s, 5m, 1h"""
    out: Annotated[str, FILE] = ""
    """write the settings as TOML, for ringtrain.train --config"""
    allow_compression: bool = False
    """keep compressed gradients or local steps if they are faster: numbers change"""


class Budget:
    """Time budget of a search."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.seconds, self.begin_s, self.longest_s = now, seconds, now(), 0.0
        self.too_short_by_s = math.inf  # for the start that came closest to fitting

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self.now() - self.begin_s

    def start(self, extra_s: float) -> Callable[[], None]:
        """Begins a start; the returned function ends it.

        Args:
            extra_s: Seconds on top of those that every start takes.
        """
        missing_s = self.longest_s * MARGIN + extra_s - (self.seconds - self.spent_s)
        if missing_s > 0:
            self.too_short_by_s = min(missing_s, self.too_short_by_s)
            raise BudgetOver
        begun_s = self.now()

        def end() -> None:
            self.longest_s = max(self.longest_s, self.now() - begun_s - extra_s)

        return end


class Trials:
    """Measures by starting ranks, within the budget."""

    def __init__(self, call: ranks.Call, train_args: Sequence[str], budget: Budget, say: Callable[[str], None]) -> None:
        self.call, self.train_args, self.budget, self.say = call, list(train_args), budget, say
        self.step_s = 0.0
        self.facts: dict[str, Facts] = {}

    def run(self, choice: Choice, variants: Sequence[Choice], turns: int) -> list[list[float]]:
        """Images per second, per variant and round; see Run."""
        several = len(variants) > 1
        block_s = BLOCK_WITHIN_S if several else BLOCK_S
        # A start's own time includes one block of one variant; on slow links a block is as long as its fewest steps.
        each_s = GRAPH_S + SHORTEST_BLOCK_STEPS * self.step_s + turns * max(block_s, SHORTEST_BLOCK_STEPS * self.step_s)
        results = self._start(
            choice,
            ", ".join(variant.text() for variant in variants) if several else choice.text(),
            Trial([variant.words() for variant in variants], 0, turns, block_s),
            len(variants) * each_s if several else 0.0,
        )
        self.step_s = results["step_s"]
        return results["images_per_s"]

    def autotuned(self, best: Choice) -> Choice | None:
        """Fusion and cycle time found by Horovod's autotuner; None if it found none in its time."""
        free = Choice({"hvd.fusion_mb": -1, "hvd.cycle_time_ms": -1}).over(best)
        trial = Trial([[]], 0, autotune_s=AUTOTUNE_S)
        found = self._start(free, "Horovod's autotuner", trial, 1.5 * AUTOTUNE_S)["autotuned"]
        return Choice({f"hvd.{name}": round(value, 2) for name, value in found.items()}) if found else None

    def _start(self, choice: Choice, shown: str, trial: Trial, extra_s: float) -> dict[str, Any]:
        ended = self.budget.start(extra_s)
        self.say(shown)
        begin_s = self.budget.spent_s
        limit_s = max(1, int(FOR_RANKS * (self.budget.seconds - begin_s)))
        trial = dataclasses.replace(trial, limit_s=limit_s)
        try:
            results = self.call(
                on_ranks, trial, [*self.train_args, *choice.words()], 0, choice.environ, choice.launcher
            )
        except LaunchError:
            if self.budget.spent_s - begin_s >= limit_s:  # the ranks exited at their time limit
                raise BudgetOver from None
            raise
        ended()
        self.facts[choice.text()] = Facts(**results["facts"])
        return results


def on_ranks(options: Trial, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures on all ranks."""
    from ringtrain.lab.tune import measure

    return measure.trial(options, train_args)


def search(
    trials: Trials, allow_compression: bool, launcher: str, say: Callable[[Outcome], None], only: Sequence[str] = ()
) -> Choice:
    """Tries each tuning parameter and returns the best choice.

    Args:
        say: Called with the outcome of every candidate.
        only: Tuning parameters to try; empty: all.
    """
    best, budget = Choice(), trials.budget
    has_measured, undecided = False, 0
    try:
        trials.run(best, [best], 1)
    except BudgetOver:
        raise LaunchError(f"not one start ended in {budget.seconds:g} s: give a larger --budget") from None
    facts = trials.facts[best.text()]
    for name in order(facts, allow_compression):
        if only and name not in only:
            continue
        facts = trials.facts.get(best.text(), facts)  # variants within one start share its facts
        config = config_io.read([*trials.train_args, *best.words()])
        lever = next_lever(name, facts, config, best.launcher or launcher, allow_compression)
        if lever.autotuned:
            try:
                found = trials.autotuned(best)
            except (BudgetOver, LaunchError):
                found = None
            lever = dataclasses.replace(lever, candidates=(*lever.candidates, *([found] if found else [])))
        outcomes = compare(lever, best, trials.run) if lever.candidates else []
        for outcome in outcomes:
            say(outcome)
            has_measured |= bool(outcome.ratios)
            undecided += outcome.verdict == UNDECIDED
            if outcome.verdict == "kept":
                best = outcome.choice.over(best)
    if undecided and not has_measured:
        missing_s = budget.too_short_by_s if math.isfinite(budget.too_short_by_s) else budget.longest_s
        raise LaunchError(
            f"compared nothing in {budget.seconds:g} s, of which the first start took {budget.longest_s:.0f} s:"
            f" expected --budget {math.ceil((budget.seconds + missing_s) / FOR_RANKS)}s or more"
        )
    return best


def toml(best: Choice, told: Sequence[str], line: str, outcomes: Sequence[Outcome]) -> str:
    """Formats a file for ringtrain.train --config; settings that TOML cannot hold are in its comments."""
    measured = [f"# {' | '.join(row)}" for row in rows(outcomes)]
    head = ["# Made by ringtrain tune. Launch it so:", f"#   {line}", "# Measured, as ratios of images/s:", *measured]
    return "\n".join(head) + "\n" + config_io.to_toml(config_io.read([*told, *best.words()]))


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Tuning parameter, candidate, ratio, rounds and result of each outcome."""
    return [
        [
            one.lever,
            one.choice.text(),
            stats.Spread.of(one.ratios).text(".3f") if one.ratios else "",
            str(len(one.ratios)),
            " ".join(one.verdict.split()),
        ]
        for one in outcomes
    ]


def launch_line(best: Choice, words: Sequence[str], told: Sequence[str]) -> str:
    """Formats the command that trains with the best choice; `words` are the given options of ringtrain launch."""
    exported = [f"{name}={shlex.quote(value)}" for name, value in best.environ.items()]
    launcher = ["--launcher", best.launcher] if best.launcher else []
    forwarded = [word for name in best.environ for word in ("--forward", name)]
    train = ["python", "-m", "ringtrain.train", *told]
    return " ".join([*exported, shlex.join(["ringtrain", "launch", *words, *launcher, *forwarded, "--", *train])])


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Searches, prints the outcomes and writes the TOML."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    budget = Budget(seconds_of(options.budget))
    only = [name for name in options.only.split(",") if name]
    for name in only:
        if name not in LEVERS:
            raise LaunchError(f"got --only {name}: {nearest(name, LEVERS)}")
    config_io.read(start.train_args)  # report a mistake in it before anything starts
    console = Console(stderr=True)
    columns = (
        TextColumn("tune"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("of {task.fields[most]}  {task.description}"),
    )
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=budget.seconds, most=options.budget)

        def say(what: str) -> None:
            bar.update(task, completed=min(budget.spent_s, budget.seconds), description=what)
            if not console.is_terminal:
                print(f"tune: {budget.spent_s:.0f} s of {budget.seconds:.0f} s: {what}", file=console.file, flush=True)

        trials = Trials(call, start.train_args, budget, say)
        best = search(trials, options.allow_compression, start.launch.launcher, outcomes.append, only)
    title = f"images/s over those of the best so far, median (p10 to p90), in {budget.spent_s:.0f} s"
    Table(("lever", "candidate", "ratio", "turns", "verdict"), rows(outcomes), title).show()
    train = ["--config", options.out] if options.out else [*start.train_args, *best.words()]
    line = launch_line(best, start.launch_words, train)
    if options.out:
        Path(options.out).write_text(toml(best, start.train_args, line, outcomes), encoding="utf-8")
    print(f"best: {best.text()}")
    print(line)
    return 0
