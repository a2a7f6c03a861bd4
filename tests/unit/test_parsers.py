"""What comes from files, launchers and other processes may hold anything: readers take or refuse it."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import PLANNERS, TWO_HOSTS

from ringtrain import cli
from ringtrain.checkpoint import checkpoint
from ringtrain.cluster import exit_cause
from ringtrain.cluster.agents import HostAgent
from ringtrain.cluster.host_agent import SAYS
from ringtrain.cluster.job import explain
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.supervisor import Supervisor
from ringtrain.config import files as config_options
from ringtrain.errors import CheckpointError, ConfigError, LaunchError
from ringtrain.lab import postmortem, runs, sweep
from ringtrain.monitor import journal
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT, MARK
from ringtrain.protocol.failures import Failure
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement, difference
from ringtrain.protocol.reader import Reader
from ringtrain.training import tracking

EXAMPLES = 40
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 10**12, 10**30, 10**400, math.inf, -math.inf, math.nan, 0.5, 1e308]),
    st.text(max_size=5),
    st.sampled_from(["", "9" * 5000, "²", "٣", "é", "\0", "\ud800", "1", "nan", "/dev/null"]),
    st.just([]),
    st.just({}),
    st.recursive(
        st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    ),
)
DEEP = st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900])


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """A value in which one thing, somewhere inside, is another, or is missing."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 4)) == 0:
        return draw(ODD)
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    value = copy.copy(value)
    if draw(st.integers(0, 3)) == 0:
        del value[key]
    else:
        value[key] = draw(altered(value[key]))
    return value


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A text with a piece cut out and another put in."""
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(len(text), begin + 30)))
    put = draw(
        st.text(max_size=5) | st.sampled_from(["9" * 5000, "²", "[" * 2000, '"', ",", "\0", "-", " ", "\n", ":"])
    )
    return text[:begin] + put + text[end:]


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    return folder / name


# ---- readers of JSON ----------------------------------------------------------------------------------------------


def read_plan(text: str, folder: Path) -> None:
    plan = PlannedPlacement.from_json(text)
    difference(plan, [RankPlacement(0, 2, "a"), RankPlacement(1, 2, "b")])


def read_failure(text: str, folder: Path) -> None:
    reports = Reader("j")
    data = base64.b64encode(zlib.compress(text.encode(errors="surrogatepass"))).decode()
    reports.take(f"{MARK}:j:failure:1:1/1:{data}")
    failure = reports.first_failure()
    decided = exit_cause.decide(1, reports, "", {}, "mpirun")
    assert 0 <= decided.exit_code < 256, failure


def read_attempt(text: str, folder: Path) -> None:
    attempt = Attempt.from_environment({ATTEMPT: text})
    attempt.number + attempt.num_ranks  # numbers
    "".join((*attempt.causes, attempt.run_name))  # texts


def read_journal(text: str, folder: Path) -> None:
    written(folder, "logs/journal-0.jsonl", f"{text}\n" + json.dumps(EVENTS[0]))
    events = journal.read(folder)
    assert events, "the other line is whole"
    postmortem.verdict(events)
    for event in events:
        postmortem.facts_of(event)
        time.localtime(event["time_s"])


def read_run(text: str, folder: Path) -> None:
    for name in ("summary.json", "metrics.jsonl", "steps.jsonl"):
        written(folder, name, text)
    written(folder, "config.toml", f"# num_ranks = {text}\nrun = {text}")
    runs.read(folder)


def read_manifest(text: str, folder: Path) -> None:
    written(folder, checkpoint.MANIFEST, f"{text}\n{text}")
    with pytest.raises(CheckpointError):
        checkpoint.verify(folder)


def read_claim(text: str, folder: Path) -> None:
    written(folder, "sweep.json", text)
    sweep.claim(folder, {"a": 1})


def read_records(text: str, folder: Path) -> None:
    records = tracking._records_until(written(folder, "metrics.jsonl", f'{text}\n{{"global_step": 3}}'), 5)
    assert records[-1] == {"global_step": 3}


EVENTS: list[dict[str, Any]] = [
    {
        **{"time_s": 1.5, "event": event, "rank": 0, "size": 2, "host": "a", "process": 1, "run_start": 0},
        **{"start_s": 1.0, "global_step": 3, "versions": {"keras": "3"}, "stall_s": 0.1, "text": "x", "exit_code": 0},
    }
    for event in ("start", "save", "failure", "stall", "straggler", "end")
]
MANIFEST = {
    "format": checkpoint.FORMAT,
    "files": {"missing": {"bytes": 1, "sha256": "x"}},
    "metrics": {"accuracy": 0.5},
}
RUN = {
    **{"global_step": 1, "started": 1.0, "fit_s": 2.0, "stopped_by": "", "epoch": 1, "accuracy": 0.5},
    "numbers": {"num_ranks": 2, "num_steps": 4},
}
JSON: dict[str, tuple[Callable[[str, Path], Any], list[Any], tuple[type[Exception], ...]]] = {
    "plan": (read_plan, [{"size": 2, "hosts": [["a", 1], ["b", 1]], "source": "x"}], (ValueError,)),
    "failure": (read_failure, [vars(Failure(1, "a", 1.0, "E", "x", 3))], ()),
    "attempt": (read_attempt, [{"number": 1, "causes": ["x"], "run_name": "a", "num_ranks": 2}], ()),
    "journal": (read_journal, EVENTS, ()),
    "run": (read_run, [RUN], ()),
    "manifest": (read_manifest, [MANIFEST], ()),
    "claim": (read_claim, [{"a": 1}], (LaunchError,)),
    "records": (read_records, [{"global_step": 1, "loss": 0.5}], ()),
}


@pytest.mark.parametrize("name", JSON)
def test_a_reader_of_json_takes_what_is_right(name: str, tmp_path: Path) -> None:
    read, right, _ = JSON[name]
    for number, value in enumerate(right):
        (tmp_path / str(number)).mkdir()
        read(json.dumps(value), tmp_path / str(number))


@pytest.mark.parametrize("name", JSON)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_reader_of_json_refuses_in_its_own_way(name: str, data: st.DataObject) -> None:
    read, right, refusals = JSON[name]
    value = data.draw(st.sampled_from(right))
    text = data.draw(st.one_of(altered(value).map(json.dumps), damaged(json.dumps(value)), DEEP))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(*refusals):
        read(text, Path(folder))


# ---- readers of launchers' words ----------------------------------------------------------------------------------

REPORTS = [
    "mpirun noticed that process rank 3 with PID 12 on node a exited on signal 9 (Killed).",
    "  Process name: [[1,1],2]\n  Exit code:    3\n",
    "Process name: 1\nExit code: -9\n",
    "Process name: a[0]\nExit code: 139\n",
    "=   PID 7 RUNNING AT a\n=   EXIT CODE: 9\n=  EXIT STRING: Killed (signal 9)\n",
    "[1,3]<stderr>: Error",
    "3: Error",
    *[
        f"{MARK}:j:{report}"
        for report in (
            *("seat:0:2:0:123:a", "seat:-1:2:0:123:a", "seat:7:2:-3:123:a", "process:123:124:a", "init:0", "left:0"),
            *("failure:0:1/2:eJw=", "cut:1:9:", "box:1:20:save", "box:-1:20:save", "run:YQ==:"),
        )
    ],
]
COMMANDS = [
    "launch -np 2 -H a:2 --ps 1 --grace 8 --max-restarts 3 -- python train.py",
    "launch --elastic --min-np 1 --blacklist-cooldown 5 60 --hosts a:1,b:1 true",
    "train -np 2 --train.epochs 3",
    "report --out a.html runs/a",
]
AGENT = [
    f"{SAYS}{report}"
    for report in (
        *("networks 10.1.0.3/16 192.168.1.1/24:bridge", "networks 10.2.0.3/24", "reached 10.1.0.3"),
        *("ready host1 0.1.0", "box 1 20 save", "taken 2", "memory", "swept"),
    )
]


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(data=st.data())
def test_what_host_agents_and_ranks_report_ends_in_a_result(data: st.DataObject) -> None:
    """Whatever stands in it: networks, addresses, ranks and steps of hosts, also of a rank beyond the job's."""
    watch = Supervisor(replace(TWO_HOSTS, id="j"), LaunchOptions(launcher="srun"))
    process: Any = None
    agent = HostAgent("host2", process)
    watch.agents.members = [HostAgent("host1", process, networks="10.1.0.4/16", reached="10.1.0.4"), agent]
    lines = st.sampled_from(AGENT).flatmap(damaged)
    watch.agents.read(agent, "\n".join(data.draw(st.lists(lines, max_size=4))).encode(errors="surrogatepass"))
    watch.agents.local_networks()
    for line in data.draw(st.lists(st.sampled_from(REPORTS).flatmap(damaged), max_size=4)):
        watch.output.add(line.encode(errors="surrogatepass") + b"\n")
    assert all(watch._agent_host(rank) in ("", "host1", "host2") for rank in watch.reports.ranks)
    difference(watch.planned_placement, watch.reports.ranks)
    watch._missing_ranks("in time")
    result = watch.conclude(data.draw(st.integers(-64, 255)))
    assert 0 <= result.exit_code < 256 and result.in_a_line is not None


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_command_line_is_read_or_refused(data: st.DataObject) -> None:
    words = data.draw(st.sampled_from(COMMANDS).flatmap(damaged)).split(" ")
    at = data.draw(st.integers(0, len(words)))
    more = data.draw(st.sampled_from(["", "--", "--ps=--", "-np=--", "--blacklist-cooldown=--", "-H", "--json", "-"]))
    with contextlib.suppress(LaunchError):
        _, given = cli.parse([*words[:at], more, *words[at:]])
        if given.name == "launch":
            LaunchOptions.of(given).checked()


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_command_of_any_bytes_is_planned_or_refused(data: st.DataObject) -> None:
    """As Python has the bytes of a command line, and those that are no UTF-8."""
    texts = st.binary(max_size=6).map(lambda text: os.fsdecode(text.replace(b"\0", b"x")))
    job = replace(
        TWO_HOSTS, command=("python", data.draw(texts)), output=data.draw(texts), working_directory=data.draw(texts)
    )
    for planner in PLANNERS.values():
        with contextlib.suppress(LaunchError):
            plan = planner(job)
            "\n".join([plan.shell(), *plan.files.values(), *map("\n".join, explain(plan))]).encode()


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.sampled_from(
        ['[train]\nepochs = 3\nbatch_size = 8\n[optimizer]\nname = "sgd"\n', "[schedule]\nsteps = [1, 2]\n"]
    ).flatmap(damaged)
    | st.sampled_from(["a = " + "[" * 100_000, "[optimizer]\nlearning_rate = " + "9" * 400, "[train]\nepochs = inf"])
)
def test_a_configuration_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            config_options.read_toml(written(Path(folder), "c.toml", text))
        except ConfigError as error:
            assert "c.toml" in str(error)
