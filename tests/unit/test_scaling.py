"""The forecast of published and measured speeds, and what docs/performance.md says of its errors."""

from __future__ import annotations

import re

import launching
import pytest
import scaling

PAGE = (launching.ROOT / "docs" / "performance.md").read_text()


def test_the_page_has_the_errors_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.show(scaling.DOCS / "scaling.json")
    published = capsys.readouterr().out
    rings, servers = re.findall(
        r"(\d+) of [a-z ]+: ([\d.]+)% on average, ([\d.]+)% at most, .*, (\d+) within 15%", published
    )
    rows = [line for line in published.splitlines() if line.startswith("|")][2:]
    assert rings[0] == rings[3]
    text = " ".join(PAGE.split())
    assert f"Of the {len(rows)} published points (up to 512 GPUs), all {rings[0]} of rings that were not fitted" in text
    assert f"are within 15 %, {rings[1]} % on average" in text
    assert f"The {servers[0]} of parameter servers have larger errors, up to {servers[2]} %" in text

    scaling.show(scaling.DOCS / "measured" / "here.json")
    here = re.search(r"(\d+) of rings: .*, (\d+) within 10%", capsys.readouterr().out)
    assert here and f"Of {here[1]} points measured here (on CPUs), {here[2]} are within 10 %" in text


@pytest.mark.parametrize("name", scaling.TRANSPORTS)
def test_the_page_has_the_costs_of_each_transport(name: str) -> None:
    payload, network, work = scaling.TRANSPORTS[name]
    assert f"| `{name}` | {payload:.1%} | {network:g} | {work:g} |".replace("%", " %") in PAGE


def test_a_ring_sends_twice_the_gradients_but_for_a_share_and_waits_for_the_slower_link() -> None:
    point = {**scaling.DEFAULTS, "transport": "mpi", "link": 8, "latency_us": 0, "local_latency_us": 0}
    cluster = scaling.Cluster(point, scaling.DOCS)
    took_s, waited_s = cluster.ring(1e9, 4)
    wire, system, work = 1 / scaling.TCP, 0.71, 0.38
    assert took_s == pytest.approx(1.5 * (wire + system + work)) and waited_s == pytest.approx(1.5 * wire)
