"""ringtrain compare: trains the same job alternately under several strategies and compares the results.

    ringtrain compare --strategies ring,towers --config configs/digits.toml -np 2 --seeds 3

Each run is one of ringtrain.train, in its own folder. Finished runs are not repeated: the same command resumes an
interrupted comparison.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

from ringtrain import config_io
from ringtrain.cluster.hosts import take
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config import Config, nearest, option_types, value_of
from ringtrain.errors import LaunchError, RunDirectoryError
from ringtrain.lab import jobs, ranks, stats
from ringtrain.lab.compare import results
from ringtrain.lab.compare.results import Result
from ringtrain.lab.options import seconds_of
from ringtrain.lab.tables import counted
from ringtrain.options import AT_LEAST_1, FILE, LIST, N
from ringtrain.protocol.env import HOST_SLOTS
from ringtrain.run import setup
from ringtrain.strategies import STRATEGIES

ALONE = "one"
"""instead of a strategy: one copy of the model, with the fraction of the cores that one of several has"""
BUDGETS = {"epochs": "--train.epochs", "time": "--train.max-time-s", "accuracy": "--train.target-accuracy"}
LAUNCHERS = ("mpirun", "horovodrun", "horovodrun-gloo", "srun")


@dataclass(frozen=True)
class Entry:
    """Strategy and options to compare."""

    label: str
    """as on the command line, e.g. "towers:reduction=all"; prefix of the folders of its runs"""
    name: str
    """of the strategy, or ALONE"""
    words: tuple[str, ...]
    """options of ringtrain.train"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    strategies: Annotated[str, LIST]
    """e.g. ring,towers:reduction=all,one (one: a copy alone)"""
    config: Annotated[str, FILE] = ""
    """TOML of the job, as of ringtrain.train"""
    budget: Annotated[str, LIST] = ""
    """epochs=5, time=60s, accuracy=0.97, what comes first; else as the job has it"""
    seeds: Annotated[int, N, AT_LEAST_1] = 3
    """runs under each"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""
    plot: Annotated[str, FILE] = ""
    """draw them as PNG"""
    html: Annotated[str, FILE] = ""
    """write a page about them"""


def main(options: Options, start: ranks.Start, _: ranks.Call) -> int:
    """Trains, prints and writes the results.

    Returns:
        0, or 1 if a run failed.
    """
    refuse(start.launch)
    servers = start.launch.ps or 1
    copies = start.launch.np or sum(host.slots for host in start.hosts)
    slots = take(start.hosts, copies, start.launch.oversubscribe)[0].slots
    train_args = [*start.train_args, *budget(options.budget)]
    if options.config:
        train_args = ["--config", options.config, *train_args]
    base = config_io.read(train_args)
    entries = read(options.strategies, copies)
    # Report a mistake before anything starts.
    for entry in entries:
        setup.find(config_io.read([*train_args, *entry.words]))
    name = base.run.name or f"compare-{Path(options.config or base.data.name).stem}"
    folder = Path(base.run.directory) / name
    (folder / "starts").mkdir(parents=True, exist_ok=True)
    before = {number: signal.signal(number, end) for number in jobs.SIGNALS}
    try:
        with jobs.held(folder / "lock") as lock:
            if lock is None:
                raise RunDirectoryError(
                    f"{folder}: another ringtrain compare works there: wait, or give another --run.name"
                )
            claim(folder, base, copies, servers, start.launch_words)
            trained: list[Result] = []
            for seed in range(base.seed, base.seed + options.seeds):
                for entry in entries:
                    earlier = [result for result in trained if result.label == entry.label]
                    if earlier and all(result.error for result in earlier):  # it would fail again
                        continue
                    # One copy alone has the cores of one slot, too.
                    host_slots = slots if entry.name == ALONE else 1
                    words = [*start.launch_words, *launch_words(entry.name, copies, servers)]
                    trained.append(train_once(entry, seed, folder, words, train_args, host_slots, lock))
                    say(results.in_words(trained[-1]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return conclude(trained, options, train_args, {"copies": copies, "servers": servers})


def refuse(launch: LaunchOptions) -> None:
    """Rejects options of launch that a comparison cannot use."""
    if launch.ps is not None and launch.ps < 1:
        raise LaunchError(f"got --ps {launch.ps}, expected 1 or more")
    if launch.workers is not None:
        raise LaunchError(f"got --workers {launch.workers}: all have as many, -np: leave it out")
    for name in ("output", "timeline"):
        if getattr(launch, name):
            raise LaunchError(f"got --{name}: each run keeps its own in its folder: leave it out")
    if launch.launcher not in LAUNCHERS:
        raise LaunchError(f"got --launcher {launch.launcher}, expected one of {', '.join(LAUNCHERS)}")


def budget(text: str) -> list[str]:
    """Converts a budget such as "accuracy=0.97,epochs=50" to options of ringtrain.train; "": none."""
    words: list[str] = []
    for part in filter(None, text.split(",")):
        kind, _, value = part.partition("=")
        if kind not in BUDGETS:
            raise LaunchError(f"got --budget {part}, expected epochs=5, time=60s or accuracy=0.97, or several: a,b")
        if kind == "time":
            value = str(seconds_of(value))
        words += [BUDGETS[kind], value]
    return words


def read(text: str, copies: int) -> list[Entry]:
    """Parses the strategies to compare.

    Args:
        text: E.g. "ring,towers:reduction=all,ring:hvd.groups=4"; options without a section are those of the strategy.
    """
    known = [*get_args(option_types()["strategy.name"]), ALONE]
    entries: dict[str, Entry] = {}
    for label in text.split(","):
        name, *options = re.split(r":(?=[\w.-]+=)", label)
        if name not in known:
            raise LaunchError(f"got --strategies {text}: {name!r} is none: {nearest(name, known)}")
        words = ["--strategy.name", name]
        if name == ALONE:
            words = ["--strategy.name", "ring"]
        elif name == "towers":
            words += ["--strategy.towers", str(copies)]
        for word in options:
            option, _, value = word.partition("=")
            if "." not in option:
                option = f"strategy.{option}"
            words += [f"--{option}", value]
        entry = Entry(label, name, tuple(words))
        if file_name(entry) in entries:
            raise LaunchError(f"got --strategies {text}: {label} is there twice: leave one out")
        entries[file_name(entry)] = entry
    return list(entries.values())


def file_name(entry: Entry) -> str:
    """Prefix of the folder names of its runs."""
    return re.sub(r"[^\w.]+", "-", entry.label)


def launch_words(strategy: str, copies: int, servers: int) -> list[str]:
    """Options of ringtrain launch for a strategy with the given copies of the model, and servers if it uses any."""
    if strategy == ALONE:
        return ["-np", "1"]
    return STRATEGIES[strategy].launch_words(copies, servers)


def claim(folder: Path, base: Config, copies: int, servers: int, words: Sequence[str]) -> None:
    """Records this comparison's settings in the folder, or checks them; strategies and seeds may be added."""
    settings: dict[str, Any] = {"-np": copies, "--ps": servers, "launch": list(words)}
    for option in option_types():
        if not option.startswith("run."):
            settings[option] = value_of(base, option)
    jobs.claim(folder / "compare.json", settings, "comparison")


def train_once(
    entry: Entry, seed: int, folder: Path, words: Sequence[str], train_args: Sequence[str], slots: int, lock: int
) -> Result:
    """Trains once, unless the run is finished. An interrupted run is deleted first, since its times are useless.

    Args:
        words: Options of ringtrain launch.
        train_args: Options of ringtrain.train; the entry's, seed and folder are added.
        slots: Slots of the host; each of the run's ranks gets the share of the cores of one of them.
        lock: Held until all processes of the run have exited.
    """
    name = f"{file_name(entry)}-{seed}"
    run = folder / name
    log = folder / "starts" / f"{name}.log"
    if jobs.is_done(run):
        return Result(entry.label, seed, run)
    shutil.rmtree(run, ignore_errors=True)
    say(f"{entry.label}, seed {seed}: {run}")
    added = ["--seed", str(seed), "--run.directory", str(folder), "--run.name", name]
    command = ["python", "-m", "ringtrain.train", *train_args, *entry.words, *added]
    environ = {**os.environ, HOST_SLOTS: str(slots)}
    process = jobs.start_launch(words, command, environ, log, [lock])
    try:
        code = process.wait()
    finally:
        if process.poll() is None:  # a signal arrived
            process.send_signal(signal.SIGTERM)
            process.wait()
    error = ""
    if code:
        error = jobs.reason_of(log, code)
    return Result(entry.label, seed, run, error)


def conclude(trained: Sequence[Result], options: Options, train_args: Sequence[str], numbers: Mapping[str, int]) -> int:
    """Prints and writes the results; returns 1 if a run failed, else 0."""
    title = f"{numbers['copies']} copies, {counted(options.seeds, 'seed')}: {shlex.join(train_args)}"
    summaries = results.summaries(trained)
    tables = results.tables(summaries, config_io.read(train_args).train.target_accuracy)
    print(title)
    for table in tables:
        table.show()
    if options.out:
        runs = [result.told() for result in trained]
        about = {"strategies": options.strategies, "seeds": options.seeds, **numbers, "command": train_args}
        stats.write(Path(options.out), "compare", about, {"strategies": summaries, "runs": runs})
    if options.plot:
        results.draw(Path(options.plot), trained, title)
    if options.html:
        results.write_page(Path(options.html), trained, tables, title)
    failed = [result for result in trained if result.error]
    for result in failed:
        print(results.in_words(result))
    if failed:
        return 1
    return 0


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(f"compare: {text}", file=sys.stderr, flush=True)


def end(number: int, _: object) -> NoReturn:
    """Signal handler that ends the comparison; the current run is asked to save and exit."""
    say(f"stopped by {signal.Signals(number).name}; the same command goes on")
    raise SystemExit(128 + number)
