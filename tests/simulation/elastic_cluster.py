"""Hosts of an elastic job, what its ranks write, and the program that lists hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from horovod.common.exceptions import HorovodInternalError
from simulation import training
from simulation.cluster import Cluster, Machine, Process
from simulation.horovodrun import Horovodrun, Shell
from simulation.members import Group, Member
from simulation.world import World

from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.errors import LaunchError, RingtrainError

if TYPE_CHECKING:
    from simulation.elastic import Run

EXPECTED = (HorovodInternalError, RingtrainError, ConnectionError)
"""errors that may end a rank"""


class ElasticCluster(Cluster):
    """Hosts of an elastic job, its ranks and what they write."""

    def __init__(self, world: World, run: Run) -> None:
        super().__init__(world)
        self.run = run
        self.files: dict[str, str] = {}
        self.members: dict[int, Member] = {}
        self.groups: dict[Any, Group] = {}
        self.events: list[dict[str, Any]] = []
        self.storage = training.Storage()
        draw = world.random
        self.slow_message_s = draw.choice([0.01, 0.01, 0.5, 5.0])
        self.cooldown_share = draw.random()
        self.step_s = draw.choice([0.2, 1.0, 3.0])
        self.load_s = draw.choice([2.0, 8.0, 15.0])
        self.listing: dict[str, int] = {}
        self.script_fails_until_s = self.script_slow_s = 0.0
        self.failing_starts: deque[int] = deque()
        self.config = Config()
        self.numbers_of_run: Numbers
        self.fresh_modules: Callable[[], None] = lambda: None

    def popen(self, argv: Sequence[str], **options: Any) -> Process:
        if "ringtrain.cluster.horovod_driver" in argv:
            return Horovodrun(self, self.job, argv, self.start_member)
        return super().popen(argv, **options)

    def start_member(self, horovodrun: Horovodrun, shell: Shell, index: int, variables: dict[str, str]) -> Member:
        member = Member(horovodrun, shell, index, variables)
        member.note(f"starts in slot {member.slot}")
        self.run.on_member(member)
        self.world.start(member.process, f"process {member.pid}", lambda: training.main(member))
        return member

    def call(self, words: Sequence[str], timeout_s: float, only_good: bool = False) -> str:
        """The program that lists hosts."""
        self.world.sleep(min(timeout_s, self.script_slow_s + self.world.random.uniform(0.01, 0.2)))
        if self.script_slow_s >= timeout_s:
            raise LaunchError("list-hosts: timed out")
        if self.world.now_s < self.script_fails_until_s:
            raise LaunchError("list-hosts: exited with code 1")
        return "".join(f"{name}:{slots}\n" for name, slots in self.listing.items())

    def write(self, number: int, data: bytes) -> int:
        current = self.world.current
        horovodrun = current.host.facts.get("horovodrun") if current else None
        if number == 2 and horovodrun:
            horovodrun.print(data.decode())
            return len(data)
        return super().write(number, data)

    def starting_fault(self, member: Any) -> Any:
        return self.failing_starts.popleft() if self.failing_starts else 0

    def boxes(self, job: Any, machine: Machine) -> list[tuple[int, int]]:
        return []

    # ---- what the models tell ----------------------------------------------------------------------------------------

    def on_end(self, member: Member) -> None:
        self.run.ended.append(member)

    def on_init(self, member: Member) -> None:
        self.run.on_init(member)

    def on_exchange(self, member: Member, name: str) -> None:
        self.run.on_exchange(member, name)

    def on_complete(self, group: Group, name: str) -> None:
        self.run.on_complete(group, name)

    def on_shell(self, machine: Machine) -> None:
        self.run.on_shell(machine)

    def on_error(self, member: Member, error: BaseException) -> None:
        if not isinstance(error, EXPECTED):
            self.run.violated(f"rank {member.number} ends by {error!r}")

    def on_step(self, member: Member, of_ranks: Sequence[Any], state: training.State) -> None:
        self.run.on_step(member, of_ranks, state)

    def on_agreed(self, member: Member, run: Any) -> None:
        self.run.on_agreed(member, run)
