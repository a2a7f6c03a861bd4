"""The lab itself: hosts are apart, and nothing of them stays."""

from __future__ import annotations


def test_hosts_have_names_of_their_own_and_reach_each_other_by_ssh(two_hosts):
    for here, there in (("host1", "host2"), ("host2", "host1")):
        assert two_hosts.run(here, ["hostname"], timeout_s=60).stdout == f"{here}\n"
        ended = two_hosts.run(here, ["ssh", there, "hostname"], timeout_s=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{there}\n", "")
