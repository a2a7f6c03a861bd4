"""Host agents' words, as the launcher reads them."""

from __future__ import annotations

import os
import selectors
from collections import deque
from typing import Any

from planning import TWO_HOSTS

from ringtrain.cluster.run import Keeper, Terms, Watch


def test_a_line_that_comes_in_two_parts_is_read_whole() -> None:
    watch = Watch("id", TWO_HOSTS, Terms(over_ssh=False))
    process: Any = None
    agents = [Keeper(host, process, lines=deque(maxlen=20)) for host in ("host1", "host2")]
    pipes = [os.pipe() for _ in agents]
    for agent, (end, _) in zip(agents, pipes, strict=True):
        watch._selector.register(end, selectors.EVENT_READ, agent)
    for part in (b"ringtrain-keeper:netw", b"orks 10.1.0.\xc3", b"\xbc3/16\nringtrain-keeper:ready host", b"1 1.0"):
        for _, start in pipes:
            os.write(start, part)
        watch._poll()
    assert [agent.networks for agent in agents] == ["10.1.0.ü3/16"] * 2
    assert not any(agent.ready for agent in agents)
    for _, start in pipes:
        os.close(start)
    watch._poll()
    assert all(agent.ready and agent.closed for agent in agents)
    assert agents[0].lines[-1] == "ringtrain-keeper:ready host1 1.0"
    for end, _ in pipes:
        os.close(end)
