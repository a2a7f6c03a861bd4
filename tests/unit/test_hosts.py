"""Hosts: every format of hostfile, -H, --include and --exclude, and ranks dealt out over slots."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringtrain.cluster.hosts import Host, parse_hostfile, parse_hosts, read_hostfile, select, take
from ringtrain.errors import HostsError

ROOT = Path(__file__).parents[2]
FOUR_AND_FOUR = (Host("host1", 4), Host("host2", 4))
ONE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")

PROVIDED = {
    "localhost.txt": (Host("localhost", 2),),
    "cluster.txt": FOUR_AND_FOUR,
    "hydra.txt": FOUR_AND_FOUR,
    "names.txt": (Host("host1", 2), Host("host2", 2)),
    "deepspeed.txt": (Host("worker-0", 8), Host("worker-1", 8)),
    "ipv6.txt": (Host("2001:db8::1", 4), Host("2001:db8::2", 4), Host("192.0.2.3", 4), Host("gpu4.example.org", 4)),
}


def test_the_hostfiles_we_provide_are_read_and_begin_with_a_comment() -> None:
    files = sorted((ROOT / "hostfiles").iterdir())
    assert {file.name: read_hostfile(file) for file in files} == PROVIDED
    assert all(file.read_text().startswith("# ") for file in files)


READ = {
    "host1 slots=4 max_slots=8": (Host("host1", 4, 8),),
    "host1 max-slots=8 slots = 4 # the large one": (Host("host1", 4, 8),),
    "host1 max_slots=3": (Host("host1", 3, 3),),
    "host1:4 max_slots=5": (Host("host1", 4, 5),),
    "a slots=2\nb:3\na\n": (Host("a", 3), Host("b", 3)),
    "Node1\nnode1\n": (Host("Node1", 2),),
    "\n# nothing but this\n\n\t host_1.example.org.\t slots=1 \r\n": (Host("host_1.example.org.", 1),),
    "FE80:0:0::1 slots=2\nfe80::1\n": (Host("fe80::1", 3),),
    "10.0.0.01 slots=2\n10.0.0.1\n": (Host("10.0.0.1", 3),),
    "10.0.0.08:2": (Host("10.0.0.08", 2),),
    "[fe80::1]:4": (Host("fe80::1", 4),),
    "[fe80::1:4]": (Host("fe80::1:4", 1),),
    "fe80:0:0:0:0:0:1:4": (Host("fe80::1:4", 1),),
}


@pytest.mark.parametrize("text", READ)
def test_a_hostfile_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding, newline="")
        assert read_hostfile(path) == READ[text]


REFUSED = {
    "a\nb slots=2\nb slots=4": "hosts.txt:3: got b with 4 slots, expected each host's slots once: it has 2 since",
    "b\nB slots=2": "hosts.txt:2: got B with 2 slots, expected each host's slots once: it has 1 since hosts.txt:1",
    "::1 slots=2\n[0::1]:2": "hosts.txt:2: got ::1 with 2 slots",
    "a slots=0": "hosts.txt:1: got '0' slots, expected a number from 1 to 4096",
    f"a slots={'9' * 5000}": "hosts.txt:1: got '9999",
    "a slots=²": "got '²' slots",
    "a slots": "got '' slots",
    "a slots=2 max_slots=2\na": "hosts.txt:2: got 3 slots for a, expected 2 at most",
    "a:2 slots=2": "hosts.txt:1: got slots twice, expected 'host', 'host:4' or 'host slots=4'",
    "a slot=4": "hosts.txt:1: got 'slot=4', expected",
    "root@a slots=2": "(a user's name goes to ~/.ssh/config)",
    "-oProxyCommand=id slots=2": "got '-oProxyCommand=id', expected a host's name",
    "$(id):2": "got '$(id)', expected a host's name",
    "a" * 254: "got 'aaa",
    "fe80::1%eth0 slots=2": "got 'fe80::1%eth0', expected a host's name",
    "[fe80::1": "got '[fe80::1', expected a host's name",
    "fe80::1:4": "hosts.txt:1: got fe80::1:4, which may mean 4 slots of fe80::1 or an address in full: expected [fe80",
    "# a\n\n": "hosts.txt: got no host, expected 'host', 'host:4' or 'host slots=4' at least once",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_a_wrong_line_is_named(text: str) -> None:
    with pytest.raises(HostsError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert REFUSED[text] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_is_no_hostfile_is_one_line(tmp_path: Path) -> None:
    binary, latin, large = (tmp_path / name for name in ("binary", "latin", "large"))
    binary.write_bytes(b"\x7fELF\0\0")
    latin.write_bytes(b"h\xf6st1 slots=4\n")
    with large.open("wb") as file:
        file.truncate(17 * 2**20)
    expected = {
        tmp_path / "missing": "missing: cannot be read: No such file or directory: expected a hostfile",
        tmp_path / "two\nlines": "lines': cannot be read: No such file or directory",
        Path("nul\0"): "cannot be read: embedded null byte",
        tmp_path: "cannot be read: Is a directory",
        binary: "binary: got a binary file, expected a hostfile",
        latin: "latin: got a binary file",
        large: "large: got more than 16,777,216 bytes, expected a hostfile",
    }
    for path, message in expected.items():
        with pytest.raises(HostsError) as caught:
            read_hostfile(path)
        assert message in str(caught.value)
        assert ONE_LINE.fullmatch(str(caught.value))


def test_hosts_of_the_command_line() -> None:
    assert parse_hosts("host1:4,host2:4") == FOUR_AND_FOUR
    assert parse_hosts("localhost") == (Host("localhost", 1),)
    assert parse_hosts("a, b:2 ,a") == (Host("a", 2), Host("b", 2))
    assert parse_hosts("[fe80::1]:4,10.0.0.1:2") == (Host("fe80::1", 4), Host("10.0.0.1", 2))
    for text, message in {
        "a:2,": "-H, item 2: got '', expected",
        "a:2,b:0": "-H, item 2: got '0' slots, expected a number from 1 to 4096",
        "a:2,b:2,a:2": "-H, item 3: got a with 2 slots, expected each host's slots once: it has 2 since -H, item 1",
        "a:2:3": "-H, item 1: got 'a:2:3', expected a host's name",
    }.items():
        with pytest.raises(HostsError, match=re.escape(message)):
            parse_hosts(text)


def test_no_host_has_an_unsafe_name_whoever_makes_it() -> None:
    for name in ("", "-l", "a b", "a\n", "a;b", "*", "../a", "fe80::1%lo", "[::1]", ":\0", "::\ud800", "'", "ａ"):
        with pytest.raises(HostsError, match="expected a host's name"):
            Host(name)
    with pytest.raises(HostsError):
        replace(Host("a"), name="$HOME")


ALPHABET = st.sampled_from("ab1:.-_[]%=#,;@$`'\"*~ \t\n\r\0\\é0") | st.characters()
LINES = st.text(ALPHABET) | st.from_regex(
    r"(\[?[a-c0-9:.]{1,6}\]?(:[0-9]{0,3})?( (max_)?slots ?= ?[0-9]{1,3})?( #.*)?[,\n]){1,5}", fullmatch=True
)


def assert_safe(hosts: tuple[Host, ...]) -> None:
    assert hosts
    assert len({host.name.lower() for host in hosts}) == len(hosts)
    for host in hosts:
        assert 1 <= host.slots <= (host.max_slots or 4096)
        if ":" in host.name:
            assert str(ipaddress.IPv6Address(host.name).scope_id) == "None"
        assert shlex.quote(host.name) == host.name or ":" in host.name
        assert set(host.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:")
        assert not host.name.startswith("-")


@given(LINES)
@example("a\x85slots=2")
@example("a:\n4")
@example("\ud800:4")
def test_any_text_is_hosts_or_one_line_of_error(text: str) -> None:
    for parse in (lambda text: parse_hostfile(text, "hosts.txt"), parse_hosts):
        try:
            hosts = parse(text)
        except HostsError as error:
            assert ONE_LINE.fullmatch(str(error))
            assert len(str(error)) < 400
        else:
            assert_safe(hosts)


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True) | st.binary(min_size=16, max_size=16).map(
    lambda address: socket.inet_ntop(socket.AF_INET6, address)
)
HOSTS = st.lists(
    st.builds(Host, NAMES, st.integers(1, 4096), st.just(0) | st.integers(4096, 4096)),
    min_size=1,
    max_size=8,
    unique_by=lambda host: host.name.lower(),
).map(tuple)


@given(HOSTS)
def test_what_is_written_is_read_again(hosts: tuple[Host, ...]) -> None:
    plain = tuple(replace(host, max_slots=0) for host in hosts)
    assert parse_hosts(",".join(map(str, hosts))) == plain
    assert parse_hostfile("\n".join(map(str, hosts)), "") == plain
    lines = [f"{host.name} slots={host.slots} max_slots={host.max_slots or 4096}" for host in hosts]
    assert parse_hostfile("\n".join(lines), "") == tuple(replace(host, max_slots=4096) for host in hosts)
    names = [host.name for host in hosts for _ in range(min(host.slots, 9)) if ":" not in host.name]
    if names:
        assert sum(host.slots for host in parse_hostfile("\n".join(names), "")) == len(names)


def test_ranks_fill_the_slots_in_order() -> None:
    assert take(FOUR_AND_FOUR, 8) == FOUR_AND_FOUR
    assert take(FOUR_AND_FOUR, 5) == (Host("host1", 4), Host("host2", 1))
    assert take(FOUR_AND_FOUR, 4) == (Host("host1", 4),)
    assert take((Host("a", 1), Host("b", 2, 7), Host("c", 3)), 6) == (Host("a", 1), Host("b", 2), Host("c", 3))
    assert take((Host("a", 3, indices=(1, 2, 5)),), 2) == (Host("a", 2, indices=(1, 2)),)


def test_what_exceeds_the_slots_is_dealt_out_evenly() -> None:
    uneven = (Host("a", 1), Host("b", 3), Host("c", 2))
    assert take(uneven, 8, oversubscribe=True) == (Host("a", 2), Host("b", 4), Host("c", 2))
    assert take(uneven, 12, oversubscribe=True) == (Host("a", 3), Host("b", 5), Host("c", 4))
    assert take(uneven, 2, oversubscribe=True) == (Host("a", 1), Host("b", 1))
    limited = (Host("a", 1, 2), Host("b", 3), Host("c", 2, 3))
    assert take(limited, 12, oversubscribe=True) == (Host("a", 2), Host("b", 7), Host("c", 3))


def test_too_few_slots_are_said_in_numbers() -> None:
    many = tuple(Host(f"host{number}", 4) for number in range(1, 7))
    for hosts, num_ranks, oversubscribe, message in (
        (FOUR_AND_FOUR, 0, False, "got -np 0, expected 1 rank or more"),
        (many, 25, False, "but 6 hosts with 24 slots in all (host1:4, host2:4, host3:4, host4:4, ...): ask for"),
        ((Host("a", 1),), 2, False, "got -np 2, but 1 host with 1 slot in all (a:1)"),
        ((Host("a", 1, 2), Host("b", 1, 3)), 6, True, "got -np 6, but 2 hosts that take 5 ranks at most"),
    ):
        with pytest.raises(HostsError, match=re.escape(message)):
            take(hosts, num_ranks, oversubscribe)


@given(HOSTS, st.integers(1, 2000), st.booleans())
def test_every_rank_gets_a_slot(hosts: tuple[Host, ...], num_ranks: int, oversubscribe: bool) -> None:
    num_slots = sum(host.slots for host in hosts)
    try:
        taken = take(hosts, num_ranks, oversubscribe)
    except HostsError:
        assert num_ranks > num_slots
        assert not oversubscribe
        return
    assert sum(host.slots for host in taken) == num_ranks
    there = {host.name: host.slots for host in hosts}
    assert [host.name for host in taken] == [name for name in there if name in {host.name for host in taken}]
    if num_ranks <= num_slots:
        assert all(host.slots == there[host.name] for host in taken[:-1])
        assert taken[-1].slots <= there[taken[-1].name]
    else:
        extra = [host.slots - there[host.name] for host in taken]
        assert len(taken) == len(hosts)
        assert max(extra) - min(extra) <= 1 or max(host.slots for host in taken) == 4096


SELECTED = {
    ("", ""): ("host1:4", "host2:4", "::1:2"),
    ("[::1],HOST1", ""): ("host1:4", "::1:2"),
    ("", "host1,::1"): ("host2:4",),
    ("host1:0-1,host1:1", ""): ("host1:2",),
    ("host1:0,host1:3,host2", ""): ("host1:2@0,3", "host2:4"),
    ("", "host1:0,[::1]:1"): ("host1:3@1,2,3", "host2:4", "::1:1"),
    ("host1,host2:0-2", "host2:1"): ("host1:4", "host2:2@0,2"),
    ("", "host1:0-3"): ("host2:4", "::1:2"),
}


@pytest.mark.parametrize(("include", "exclude"), SELECTED)
def test_hosts_and_slots_are_chosen(include: str, exclude: str) -> None:
    chosen = select((*FOUR_AND_FOUR, Host("::1", 2)), include, exclude)
    texts = [f"{h.name}:{h.slots}" + f"@{','.join(map(str, h.indices))}" * bool(h.indices) for h in chosen]
    assert tuple(texts) == SELECTED[include, exclude]


def test_a_choice_can_be_narrowed() -> None:
    chosen = select(FOUR_AND_FOUR, "host1:1-3")
    assert select(chosen, exclude="host1:2") == (Host("host1", 2, indices=(1, 3)),)
    with pytest.raises(HostsError, match="got slot '0' of host1, expected 1 to 3"):
        select(chosen, "host1:0")
    assert select((Host("a", 4, 6),), "a:2-3") == (Host("a", 2, 6, (2, 3)),)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("host3", "", "--include, item 1: got host3, expected one of 2 hosts: host1:4, host2:4"),
        ("", "host1,host3", "--exclude, item 2: got host3, expected one of 2 hosts"),
        ("host1:4", "", "--include, item 1: got slot '4' of host1, expected 0 to 3"),
        ("host1:3-2", "", "got slot '3-2' of host1, expected 0 to 3, or two that rise"),
        ("host1:0-9999999999999", "", "got slot '0-9999999999999' of host1"),
        ("host1,", "", "--include, item 2: got '', expected a host's name"),
        ("host1", "host1", "got --include 'host1' --exclude 'host1', which leave none of 8 slots (host1:4, host2:4)"),
    ],
)
def test_a_wrong_choice_is_named(include: str, exclude: str, message: str) -> None:
    with pytest.raises(HostsError, match=re.escape(message)):
        select(FOUR_AND_FOUR, include, exclude)


@given(HOSTS, LINES, LINES)
def test_any_choice_keeps_slots_that_are_there(hosts: tuple[Host, ...], include: str, exclude: str) -> None:
    try:
        chosen = select(hosts, include, exclude)
    except HostsError as error:
        assert ONE_LINE.fullmatch(str(error))
        return
    slots = {host.name: host.slots for host in hosts}
    assert all(1 <= host.slots <= slots[host.name] for host in chosen)
    assert all(max(host.indices, default=0) < slots[host.name] for host in chosen)


MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "num_ranks", "oversubscribe"),
    [
        ("host1 slots=4 # comment\nhost2 slots = 4 max_slots=8\n", 6, False),
        ("host1 slots=2\nhost2\nhost1\n", 4, False),
        ("host1 max_slots=2\nhost2\n", 3, False),
        ("host1 slots=1\nhost2 slots=3\nhost3 slots=2\n", 13, True),
        ("host1\nhost1 slots=2\n", 2, False),
        ("host1 slots=4 max_slots=2\n", 2, False),
        ("host1 slots=2\nhost2 slots=2\n", 5, False),
    ],
)
def test_open_mpi_reads_the_same(text: str, num_ranks: int, oversubscribe: bool, tmp_path: Path) -> None:
    """Its mpirun maps the ranks and starts nothing: the same ranks on the same hosts, or both refuse."""
    if not MPIRUN.exists():
        pytest.skip(f"no {MPIRUN}: `make test` runs this test where there is one")
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    argv = [str(MPIRUN), "--allow-run-as-root", "--mca", "plm", "isolated", "--hostfile", str(path)]
    argv += ["-np", str(num_ranks), *["--oversubscribe"] * oversubscribe, "--display-map", "--do-not-launch", "true"]
    env = dict(os.environ)  # without what MPI_Init adds to a process in which another test has trained
    result = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)
    theirs = re.findall(r"Data for node: (\S+)\s.*Num procs: (\d+)", result.stdout)
    try:
        ours = [(host.name, str(host.slots)) for host in take(read_hostfile(path), num_ranks, oversubscribe)]
    except HostsError:
        ours = []
    assert theirs == ours
    assert theirs or re.search("hostfile|enough slots", result.stderr)
