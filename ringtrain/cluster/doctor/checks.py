"""Table of `ringtrain doctor`: every check on every host."""

from __future__ import annotations

import inspect
from typing import Any

from ringtrain.cluster.doctor import machine, network, software
from ringtrain.cluster.doctor.findings import UNKNOWN, Cell, Check, Probe, Scene

CHECKS = {**software.CHECKS, **machine.CHECKS, **network.CHECKS}


def judge(scene: Scene) -> dict[str, list[Cell]]:
    """Runs every check on every host; returns, by check name, one cell per host in the order of `scene.probes`."""
    table = {"ssh": [network.ssh(probe, scene) for probe in scene.probes]}
    for name, check in CHECKS.items():
        if name != "job" or any(answer.get("job") for answer in scene.answers):
            table[name] = [_cell(check, probe, scene) for probe in scene.probes]
    return table


def _cell(check: Check, probe: Probe, scene: Scene) -> Cell:
    facts = probe.facts
    if facts is None or (not check.may_lack and any(facts.get(fact.__name__) is None for fact in check.facts)):
        return UNKNOWN
    return check.rule(probe, facts, scene)


def request() -> dict[str, Any]:
    """Part of the request to probe.facts that names the facts and carries the source of the functions behind them."""
    functions = {}
    for check in CHECKS.values():
        for fact in check.facts:
            functions[fact.__name__] = fact
    return {"facts": [*functions], "source": "\n".join(map(inspect.getsource, functions.values()))}
