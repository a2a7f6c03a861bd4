"""`ringtrain launch --sync`: what is sent to which host, and what is said about a host that fails."""

from __future__ import annotations

import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from ringtrain.cluster import rsync
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError

HOSTS = (Host("localhost", 1), Host("host.invalid", 2), Host("other.invalid", 2))


def options(**chosen: object) -> LaunchOptions:
    return LaunchOptions(command=("true",), **chosen)  # type: ignore[arg-type]


def test_every_other_host_gets_the_folder_and_this_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rsync.transfers(options(), HOSTS) == []
    chosen = rsync.transfers(options(sync=True), HOSTS)
    assert [transfer.host for transfer in chosen] == ["host.invalid", "other.invalid"]
    assert [transfer.plan.argv[-2:] for transfer in chosen] == [
        (f"{tmp_path}/", f"{transfer.host}:{tmp_path}/") for transfer in chosen
    ]


def test_rsync_uses_the_ssh_of_host_agents() -> None:
    told = rsync.plan("fd00::2", "/srv/a b", (), options(sync=True, ssh_port=2222, start_timeout=7.5)).argv
    ssh = shlex.split(told[told.index("-e") + 1])
    assert ssh[0] == "ssh" and "-oBatchMode=yes" in ssh and ssh[-2:] == ["-p", "2222"]
    assert "--timeout=7" in told and told[-1] == "[fd00::2]:/srv/a b/"
    for option in ("sync", "sync_environment"):
        with pytest.raises(LaunchError, match=f"got --{option.replace('_', '-')} with --launcher srun"):
            options(launcher="srun", **{option: True}).checked()


def test_an_environment_in_the_project_is_sent_only_if_asked() -> None:
    assert rsync.project_rules(Path("/srv/job"), Path("/srv/job/envs/tf"), "/home/me")[-1] == "/envs/tf"
    assert rsync.project_rules(Path("/srv/job"), Path("/elsewhere"), "/home/me") == rsync.LEFT_OUT
    assert rsync.environment("/srv/job/.venv", "/usr") == ["/srv/job/.venv"]
    assert rsync.environment("/srv/job/.venv", "/opt/python") == ["/srv/job/.venv", "/opt/python"]
    with pytest.raises(LaunchError, match="runs in the system's Python"):
        rsync.environment("/usr", "/usr")

    for home in ("/home/me", "/"):
        with pytest.raises(LaunchError, match="call it in the project's own folder"):
            rsync.project_rules(Path(home), Path("/opt/env"), "/home/me")


def test_what_is_sent_is_the_projects_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("rsync"):
        pytest.skip("no rsync")
    here, there = tmp_path / "here", tmp_path / "there"
    sent = {"train.py", "lib/runs/code.py", "big/wanted.npz", ".gitignore", ".rsync-filter", "odd name"}
    left_out = {"runs/a/summary.json", ".git/HEAD", ".venv/bin/python", "lib/__pycache__/x.pyc", "data/raw.bin"}
    for name in sent | left_out:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / ".gitignore").write_text("*.bin\n*.npz\n")
    (here / ".rsync-filter").write_text("+ wanted.npz\n")
    for name in ("runs/theirs", "theirs.txt"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("")
    plan = rsync.plan("there", str(here), rsync.project_rules(here, Path("/opt/env"), "/home/me"), options(sync=True))
    flags = plan.argv[plan.argv.index("-F") : -2]

    def files() -> set[str]:
        return {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}

    subprocess.run(["rsync", "-a", *flags, f"{here}/", f"{there}/"], check=True, timeout=60)
    assert files() == sent | {"runs/theirs", "theirs.txt"}


def test_hosts_that_fail_do_not_keep_others_from_getting_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync is a script here, which fails for one of two hosts."""
    program = tmp_path / "bin" / "rsync"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nfor last; do :; done\n"
        f'case $last in bad*) echo "no space" >&2; exit 11 ;; esac\ntouch "{tmp_path}/done"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    chosen = [rsync.Transfer(host, rsync.plan(host, "/srv/job", (), options(sync=True))) for host in ("bad", "good")]
    with pytest.raises(LaunchError, match=r"^not synced: bad: /srv/job/ was not sent: no space: .+$"):
        rsync.send(chosen)
    assert (tmp_path / "done").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no rsync on this host"):
        rsync.send(chosen)
