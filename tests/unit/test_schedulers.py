"""Hosts from the environments of Slurm, LSF, PBS and Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.schedulers import SCHEDULERS, expand, find
from ringtrain.errors import HostsError

NOWHERE = Path("/nonexistent")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}


NODE_LISTS = {
    "host[08-11]": "host08 host09 host10 host11",
    "host[8-11]": "host8 host9 host10 host11",
    "n[098-101,7,007]": "n098 n099 n100 n101 n7 n007",
    "r[1-2]n[01-02]-ib.org": "r1n01-ib.org r1n02-ib.org r2n01-ib.org r2n02-ib.org",
    "login,gpu[1,3],cpu[2]x": "login gpu1 gpu3 cpu2x",
    "[1-2]": "1 2",
}


@pytest.mark.parametrize("nodelist", NODE_LISTS)
def test_a_node_list_is_written_out(nodelist: str) -> None:
    assert expand(nodelist) == tuple(NODE_LISTS[nodelist].split())


WRONG_NODE_LISTS = {
    "": "SLURM_JOB_NODELIST: got '', expected names such as host1,gpu[08-10,12]",
    "a[1-2": "got 'a[1-2', expected names",
    "a[]": "got '' in brackets, expected a number, or two that rise as in 08-10",
    "a[3-1]": "got '3-1' in brackets",
    "a[1-999999999]": "got more than 100,000 hosts at '1-999999999', expected fewer",
    "a[1-2]" * 500: "got more than 100,000 hosts",
    "a[1-60000],b[1-60000]": "got more than 100,000 hosts at 'b[1-60000]', expected fewer",
    "-o[1-2]": "got '-o1', expected a host's name",
    "a b": "got 'a b', expected a host's name",
}


@pytest.mark.parametrize("nodelist", WRONG_NODE_LISTS, ids=lambda nodelist: nodelist[:30])
def test_a_wrong_node_list_is_named(nodelist: str) -> None:
    with pytest.raises(HostsError) as caught:
        expand(nodelist)
    assert WRONG_NODE_LISTS[nodelist] in str(caught.value)
    assert len(str(caught.value)) < 250


@given(st.integers(0, 99_999), st.integers(0, 500), st.integers(1, 6), st.integers(0, 2))
@example(98, 3, 3, 0)
def test_padding_is_kept(first: int, more: int, width: int, num_digits_after: int) -> None:
    """Written by hand: every number gets the digits of the range's first."""
    tail = "[0-9]" * num_digits_after
    names = expand(f"h[{first:0{width}d}-{first + more:0{width}d}]{tail}")
    tails = [""] if not num_digits_after else [f"{n:0{num_digits_after}d}" for n in range(10**num_digits_after)]
    assert list(names) == [f"h{n:0{width}d}{tail}" for n in range(first, first + more + 1) for tail in tails]


def test_slurm() -> None:
    source = "Slurm: SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE"
    assert find(SLURM, NOWHERE) == ((Host("host1", 3), Host("host2", 1)), source)
    found = find({**SLURM, "SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_TASKS_PER_NODE": "4(x2),3(x1),1"}, NOWHERE)
    assert found
    assert found[0] == (Host("gpu08", 4), Host("gpu09", 4), Host("gpu10", 3), Host("login", 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST: not set, though other variables say that a job is running"),
        (
            {"SLURM_TASKS_PER_NODE": "3(x3)"},
            "SLURM_TASKS_PER_NODE: got tasks of 3 nodes, expected 2 as in SLURM_JOB_NOD",
        ),
        ({"SLURM_TASKS_PER_NODE": "3(x0),1,1"}, "got '3(x0)', expected tasks of each node such as 4(x2),3"),
        ({"SLURM_TASKS_PER_NODE": "3(x999999999)"}, "got '3(x999999999)', expected tasks of each node"),
        ({"SLURM_TASKS_PER_NODE": "0,1"}, "SLURM_TASKS_PER_NODE: got '0' slots, expected a number from 1 to 4096"),
        (
            {"SLURM_JOB_NODELIST": "a,a"},
            "SLURM_JOB_NODELIST: got a with 1 slot, expected each host's slots once: it has",
        ),
    ],
)
def test_a_slurm_job_that_does_not_fit_is_named(changes: Mapping[str, str], message: str) -> None:
    with pytest.raises(HostsError, match=re.escape(message)):
        find({**SLURM, **changes}, NOWHERE)


def test_pbs(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.example.org\nn1.example.org\nn2.example.org\nn1.example.org\n")
    environment = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(nodes)}
    assert find(environment, NOWHERE) == ((Host("n1.example.org", 3), Host("n2.example.org", 1)), "PBS: PBS_NODEFILE")
    nodes.write_text("n1\n$(id)\n")
    with pytest.raises(HostsError, match=r"PBS_NODEFILE: .*/nodes:2: got '\$\(id\)', expected a host's name"):
        find(environment, NOWHERE)
    nodes.unlink()
    with pytest.raises(HostsError, match=r"PBS_NODEFILE: .*/nodes: cannot be read: No such file"):
        find(environment, NOWHERE)
    with pytest.raises(HostsError, match="PBS_NODEFILE: not set, though"):
        find({"PBS_JOBID": "12.server"}, NOWHERE)


def test_lsf(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    pairs = {"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "n1 4 n2 2 "}
    assert find(pairs, NOWHERE) == ((Host("n1", 4), Host("n2", 2)), "LSF: LSB_MCPU_HOSTS")
    both = {**pairs, "LSB_DJOB_HOSTFILE": str(nodes)}
    assert find(both, NOWHERE) == ((Host("n1", 2), Host("n2", 1)), "LSF: LSB_DJOB_HOSTFILE")
    nodes.unlink()
    assert find(both, NOWHERE) == find(pairs, NOWHERE)
    for value, message in {
        "n1 4 n2": "LSB_MCPU_HOSTS: got 3 words, expected pairs",
        "-v 2": "LSB_MCPU_HOSTS: got '-v', expected a host's name",
    }.items():
        with pytest.raises(HostsError, match=re.escape(message)):
            find({**pairs, "LSB_MCPU_HOSTS": value}, NOWHERE)
    with pytest.raises(HostsError, match="LSB_DJOB_HOSTFILE: not set, though"):
        find({"LSB_JOBID": "3"}, NOWHERE)


def test_lsf_with_a_batch_host_has_only_compute_hosts() -> None:
    """And, as the control, a host with one slot stays where no batch host is known of."""
    listed = {"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"}
    found = find({**listed, "CSM_ALLOCATION_ID": "7"}, NOWHERE)
    assert found and found[0] == (Host("n1", 42), Host("n2", 42))
    found = find(listed, NOWHERE)
    assert found and [host.name for host in found[0]] == ["batch1", "n1", "n2"]


@pytest.mark.parametrize("variable", ["SLURM_HET_SIZE", "SLURM_PACK_SIZE"])
def test_a_heterogeneous_slurm_job_is_refused(variable: str) -> None:
    """SLURM_JOB_NODELIST has the first component's hosts alone."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert find(slurm, NOWHERE)
    with pytest.raises(HostsError, match=f"{variable}: a heterogeneous job of '2' components"):
        find({**slurm, variable: "2"}, NOWHERE)


@pytest.mark.parametrize(
    ("variable", "value", "name"), [("PE_HOSTFILE", "/var/spool/hosts", "SGE"), ("FLUX_JOB_ID", "f2", "Flux")]
)
def test_a_job_of_another_scheduler_is_refused_by_name(variable: str, value: str, name: str) -> None:
    """It would train on this host alone. Beside a scheduler that is read, the variable is a left-over."""
    with pytest.raises(HostsError, match=f"{variable}: this is a job of {name}, .*: name the hosts with --hostfile"):
        find({variable: value}, NOWHERE)
    found = find({variable: value, "LSB_JOBID": "3", "LSB_MCPU_HOSTS": "n1 4"}, NOWHERE)
    assert found and found[1].startswith("LSF: ")


def test_the_mpi_operator(tmp_path: Path) -> None:
    hostfile, script = tmp_path / "hostfile", tmp_path / "discover_hosts.sh"
    first, second = (f"mnist-worker-{number}.mnist.team.svc" for number in range(2))
    default = {"OMPI_MCA_orte_set_default_slots": "8"}
    script.write_text(f"#!/bin/sh\necho {first}:4\necho {second}:2\n")
    assert find({}, tmp_path) == ((Host(first, 4), Host(second, 2)), f"Kubernetes: {script}")
    hostfile.write_text(f"{first} slots=4\n{second}:3\n")
    assert find(default, tmp_path) == ((Host(first, 4), Host(second, 3)), f"Kubernetes: {hostfile}")
    hostfile.write_text(f"{first}\n{second}\n")
    source = f"Kubernetes: {hostfile} and OMPI_MCA_orte_set_default_slots"
    assert find(default, tmp_path) == ((Host(first, 8), Host(second, 8)), source)
    hostfile.unlink()
    marker = tmp_path / "was_run"
    for line, message in {
        f"touch {marker}": "got 'touch .*', expected 'echo host:4'",
        f"echo $(touch {marker})": "got ",
        "echo a;id": "got 'a;id', expected a host's name",
    }.items():
        script.write_text(f"#!/bin/sh\n\n{line}\n")
        script.chmod(0o755)
        with pytest.raises(HostsError, match=rf"discover_hosts.sh:3: {message}"):
            find({}, tmp_path)
    assert not marker.exists()


def test_outside_any_scheduler_there_is_nothing(tmp_path: Path) -> None:
    assert find({}, tmp_path) is None
    assert find({"PATH": "/bin", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "K_MPI_JOB_ROLE": "worker"}, NOWHERE) is None
    with pytest.raises(HostsError, match="hostfile: cannot be read: No such file"):
        find({"K_MPI_JOB_ROLE": "launcher"}, tmp_path)


def test_the_more_complete_scheduler_is_believed(tmp_path: Path) -> None:
    nodes, gone = tmp_path / "nodes", str(tmp_path / "gone")
    nodes.write_text("n1\n")
    (tmp_path / "hostfile").write_text("worker-0 slots=2\n")
    pbs = {"PBS_JOBID": "1", "PBS_NODEFILE": str(nodes)}
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "n1 4"}
    left_over_slurm = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "3,1"}
    for environment, folder, scheduler in (
        ({**SLURM, **pbs, **lsf}, tmp_path, "Slurm"),
        ({**left_over_slurm, **pbs}, NOWHERE, "PBS"),
        ({**pbs, **lsf}, NOWHERE, "LSF"),
        (pbs, tmp_path, "PBS"),
        ({"PBS_JOBID": "1", "PBS_NODEFILE": gone}, tmp_path, "Kubernetes"),
        ({"SLURM_JOB_ID": "7"}, tmp_path, "Kubernetes"),
        ({"PBS_NODEFILE": gone}, NOWHERE, None),
    ):
        found = find(environment, folder)
        assert (found[1].partition(":")[0] if found else None) == scheduler
    assert list(SCHEDULERS) == ["Slurm", "LSF", "PBS", "Kubernetes"]


def test_the_winner_must_be_whole(tmp_path: Path) -> None:
    """No silent step down: Slurm's list is wrong, and PBS' is not taken instead."""
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\n")
    with pytest.raises(HostsError, match="SLURM_JOB_NODELIST"):
        find({**SLURM, "SLURM_JOB_NODELIST": "host[2-1]", "PBS_NODEFILE": str(nodes)}, NOWHERE)


VARIABLES = (*SLURM, "PBS_JOBID", "PBS_NODEFILE", "LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "K_MPI_JOB_ROLE")
VALUES = st.text() | st.from_regex(r"([a-c]{1,2}(\[[0-9]{1,2}(-[0-9]{1,2})?\])?[, ]?){1,3}", fullmatch=True)
VALUES |= st.from_regex(r"([0-9](\(x[0-9]\))?,?){1,3}", fullmatch=True) | st.sampled_from(["/", "\0", "x" * 5000])


@given(st.dictionaries(st.sampled_from((*VARIABLES, "OMPI_MCA_orte_set_default_slots")), VALUES))
@example({"PBS_JOBID": "1", "PBS_NODEFILE": "\0"})
def test_any_environment_is_hosts_or_one_line_of_error(environment: Mapping[str, str]) -> None:
    try:
        found = find(environment, NOWHERE)
    except HostsError as error:
        assert str(error).isprintable()
    else:
        for host in found[0] if found else ():
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9a-f:.]+", host.name)
            assert 1 <= host.slots <= 4096
