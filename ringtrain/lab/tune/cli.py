"""ringtrain tune: measures which settings make a training faster and writes them as TOML.

    ringtrain tune -H localhost:2 --out tuned.toml -- --model.name cnn --data.name synthetic --train.batch-size 64
    ringtrain tune -H localhost:2 --out tuned.json -- python own.py

Tuning parameters are tried one by one, the largest expected gain first. The best so far and the candidates are measured
alternately (A B A B ...), and a candidate replaces the best only if the ratios of these rounds are unambiguous.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io
from ringtrain.config import Config, nearest, with_values
from ringtrain.errors import LaunchError
from ringtrain.lab import measured, ranks, stats
from ringtrain.lab.options import seconds_of
from ringtrain.lab.script import Script
from ringtrain.lab.tables import Table
from ringtrain.lab.tune.candidates import (
    AUTOTUNE,
    LEVERS,
    OF_RANKS,
    UNDECIDED,
    BudgetOver,
    Choice,
    Facts,
    Outcome,
    Trial,
    best_point,
    compare,
    next_lever,
    order,
)
from ringtrain.options import FILE, LIST, Argument
from ringtrain.protocol.for_script import Tuned

BY = "ringtrain tune"
BLOCK_S = 2.0
BLOCKS = 3  # of a start of a script, of which the median counts
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
    """write the settings: TOML for ringtrain.train --config; of a script JSON for ringtrain launch --tuned"""
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

    needs_starts = False
    """whether every measurement is a start of its own"""

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
        shown, extra_s = choice.text(), 0.0
        if several:
            shown = ", ".join(variant.text() for variant in variants)
            extra_s = len(variants) * each_s
        trial = Trial([variant.words() for variant in variants], 0, turns, block_s)
        results = self._start(choice, shown, trial, extra_s)
        self.step_s = results["step_s"]
        return results["images_per_s"]

    def autotuned(self, best: Choice) -> Choice | None:
        """Fusion and cycle time found by Horovod's autotuner; None if it found none in its time."""
        free = Choice({"hvd.fusion_mb": -1, "hvd.cycle_time_ms": -1}).over(best)
        trial = Trial([[]], 0, autotune_s=AUTOTUNE_S)
        found = self._start(free, "Horovod's autotuner", trial, 1.5 * AUTOTUNE_S)["autotuned"]
        if not found:
            return None
        return Choice({f"hvd.{name}": round(value, 2) for name, value in found.items()})

    def _start(self, choice: Choice, shown: str, trial: Trial, extra_s: float) -> dict[str, Any]:
        ended = self.budget.start(extra_s)
        self.say(shown)
        begin_s = self.budget.spent_s
        limit_s = max(1, int(FOR_RANKS * (self.budget.seconds - begin_s)))
        trial = dataclasses.replace(trial, limit_s=limit_s)
        try:
            results = self._measured(choice, trial)
        except LaunchError:
            if self.budget.spent_s - begin_s >= limit_s:  # the ranks exited at their time limit
                raise BudgetOver from None
            raise
        ended()
        self.facts[choice.text()] = Facts(**results["facts"])
        return results

    def _measured(self, choice: Choice, trial: Trial) -> dict[str, Any]:
        """Results of one start; see measure.trial."""
        words = [*self.train_args, *choice.words()]
        results: dict[str, Any] = self.call(on_ranks, trial, words, choice.ranks, choice.environ, choice.launcher)
        return results

    def config(self, best: Choice) -> Config:
        """Configuration with the best choice so far."""
        return config_io.read([*self.train_args, *best.words()])


class ScriptTrials(Trials):
    """Measures by starting a script, once for each measurement."""

    needs_starts = True

    def __init__(self, start: ranks.Start, job: Script, budget: Budget, say: Callable[[str], None]) -> None:
        super().__init__(lambda *_: None, (), budget, say)
        self.start, self.job = start, job
        self.optimizer = "adam"
        self.rows_per_step = 0

    def _measured(self, choice: Choice, trial: Trial) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ringtrain-tune-") as folder:
            log = Path(folder, "autotune.csv")
            environ = dict(choice.environ)
            if trial.autotune_s:
                environ |= {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(log)}
            results = measured.measure(
                self.start,
                self.job,
                num_ranks=choice.ranks,
                options=choice.options,
                environ=environ,
                launcher=choice.launcher,
                limit_s=trial.limit_s,
                turns=BLOCKS,
                block_s=trial.block_s / BLOCKS,
                seconds=trial.autotune_s,
            )
            self.optimizer = results["optimizer"]
            if choice.ranks:
                self._check_ranks(results)
            self.rows_per_step = results["rows_per_step"]
            speed = stats.Spread.of(results["rows_per_s"]).median
            return {**results, "images_per_s": [[speed]], "autotuned": best_point(log)}

    def _check_ranks(self, results: Mapping[str, Any]) -> None:
        """Raises LaunchError if fewer ranks train something else."""
        rows, found = results["rows_per_step"], [name for name in OF_RANKS if name in results["options"]]
        if found:
            raise LaunchError(f"with {found[0]}, fewer ranks train by another algorithm")
        if rows != self.rows_per_step:
            raise LaunchError(f"a step has {rows} rows in place of {self.rows_per_step}: batches are those of a rank")

    def config(self, best: Choice) -> Config:
        return with_values(Config(), {"optimizer.name": self.optimizer, **best.options})


def on_ranks(options: Trial, train_args: Sequence[str]) -> dict[str, Any]:
    """Measures on all ranks."""
    from ringtrain.lab.tune import measure

    return measure.trial(options, train_args)


def search(
    trials: Trials,
    allow_compression: bool,
    launcher: str,
    say: Callable[[Outcome], None],
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Choice:
    """Tries each tuning parameter and returns the best choice.

    Args:
        say: Called with the outcome of every candidate.
        only: Tuning parameters to try; empty: all.
        without: Tuning parameters that are not tried.
    """
    best, budget = Choice(), trials.budget
    has_measured, undecided = False, 0
    try:
        trials.run(best, [best], 1)
    except BudgetOver:
        raise LaunchError(f"not one start ended in {budget.seconds:g} s: give a larger --budget") from None
    facts = trials.facts[best.text()]
    for name in order(facts, allow_compression):
        if (only and name not in only) or name in without:
            continue
        facts = trials.facts.get(best.text(), facts)  # variants within one start share its facts
        config, used = trials.config(best), best.launcher or launcher
        lever = next_lever(name, facts, config, used, allow_compression, is_script=trials.needs_starts)
        if lever.autotuned:
            try:
                found = trials.autotuned(best)
            except (BudgetOver, LaunchError):
                found = None
            if found is not None:
                lever = dataclasses.replace(lever, candidates=(*lever.candidates, found))
        if not lever.candidates:
            continue
        for outcome in compare(lever, best, trials.run, trials.needs_starts):
            say(outcome)
            has_measured |= bool(outcome.ratios)
            undecided += outcome.verdict == UNDECIDED
            if outcome.verdict == "kept":
                best = outcome.choice.over(best)
    if undecided and not has_measured:
        if math.isfinite(budget.too_short_by_s):
            missing_s = budget.too_short_by_s
        else:
            missing_s = budget.longest_s
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
    found = []
    for one in outcomes:
        ratio = stats.Spread.of(one.ratios).text(".3f") if one.ratios else ""
        verdict = " ".join(one.verdict.split())
        found.append([one.lever, one.choice.text(), ratio, str(len(one.ratios)), verdict])
    return found


def launch_line(best: Choice, words: Sequence[str], told: Sequence[str]) -> str:
    """Formats the command that trains with the best choice; `words` are the given options of ringtrain launch."""
    exported = [f"{name}={shlex.quote(value)}" for name, value in best.environ.items()]
    launch = ["ringtrain", "launch", *words, *best.launch_words()]
    for name in best.environ:
        launch += ["--forward", name]
    train = ["python", "-m", "ringtrain.train", *told]
    return " ".join([*exported, shlex.join([*launch, "--", *train])])


def write_for_script(best: Choice, start: ranks.Start, script: Script, out: str, outcomes: Sequence[Outcome]) -> str:
    """Writes the settings of a script, if there is a file for them; returns the command that launches with them."""
    if not out:
        return "give --out FILE to write these settings, for ringtrain launch --tuned FILE"
    tuned = Tuned(by=BY, options=best.options, environ=best.environ, launcher=best.launcher)
    tuned.write(Path(out), measured=rows(outcomes))
    words = [*start.launch_words, *best.launch_words(), "--tuned", out]
    return shlex.join(["ringtrain", "launch", *words, "--", *script.command])


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Searches, prints the outcomes and writes the TOML."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    budget = Budget(seconds_of(options.budget))
    only = [name for name in options.only.split(",") if name]
    for name in only:
        if name not in LEVERS:
            raise LaunchError(f"got --only {name}: {nearest(name, LEVERS)}")
    script = Script.of(start.train_args)
    if script is None:
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
        if script is not None:
            trials = ScriptTrials(start, script, budget, say)
        without = ["ranks"] if start.launch.threads else []  # the number of threads is of each rank
        best = search(trials, options.allow_compression, start.launch.launcher, outcomes.append, only, without)
    unit = "images/s" if script is None else "rows/s"
    title = f"{unit} over those of the best so far, median (p10 to p90), in {budget.spent_s:.0f} s"
    Table(("lever", "candidate", "ratio", "turns", "verdict"), rows(outcomes), title).show()
    if script is not None:
        print(f"best: {best.text()}")
        print(write_for_script(best, start, script, options.out, outcomes))
        return 0
    if options.out:
        train = ["--config", options.out]
    else:
        train = [*start.train_args, *best.words()]
    line = launch_line(best, start.launch_words, train)
    if options.out:
        Path(options.out).write_text(toml(best, start.train_args, line, outcomes), encoding="utf-8")
    print(f"best: {best.text()}")
    print(line)
    return 0
