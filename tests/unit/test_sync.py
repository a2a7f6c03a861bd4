"""`ringtrain launch --sync`: what is sent to which host, and what is said about a host that fails."""

from __future__ import annotations

import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from ringtrain.cluster import sync
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError

HOSTS = (Host("localhost", 1), Host("host.invalid", 2), Host("other.invalid", 2))


def options(**chosen: object) -> LaunchOptions:
    return LaunchOptions(command=("true",), **chosen)  # type: ignore[arg-type]


def argv(host: str, folder: sync.Folder, **chosen: object) -> list[str]:
    return list(sync.plan(host, folder, options(sync=True, **chosen)).argv)


def test_every_other_host_gets_the_folder_and_this_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sync.transfers(options(), HOSTS) == []
    chosen = sync.transfers(options(sync=True), HOSTS)
    assert [transfer.host for transfer in chosen] == ["host.invalid", "other.invalid"]
    assert [transfer.plan.argv[-2:] for transfer in chosen] == [
        (f"{tmp_path}/", f"{transfer.host}:{tmp_path}/") for transfer in chosen
    ]


def test_rsync_uses_the_ssh_of_host_agents() -> None:
    told = argv("fd00::2", sync.Folder("/srv/a b", ""), ssh_port=2222, start_timeout=7.5)
    ssh = shlex.split(told[told.index("-e") + 1])
    assert ssh[0] == "ssh" and "-oBatchMode=yes" in ssh and ssh[-2:] == ["-p", "2222"]
    assert "--timeout=7" in told and told[-1] == "[fd00::2]:/srv/a b/"


def test_nothing_is_deleted_unless_asked_and_never_beside_the_environment() -> None:
    project = sync.project(Path("/srv/job"), Path("/srv/job/.venv"), "/home/me")
    environment, python = sync.environment("/srv/job/.venv", "/home/me/.local/share/uv/python/cpython-3.12")
    for folder in (project, environment, python):
        assert not [word for word in argv("host1", folder) if "delete" in word]
    deleting = [
        folder
        for folder in (project, environment, python)
        if "--delete-after" in argv("host1", folder, sync_delete=True)
    ]
    assert deleting == [project, environment]


def test_an_environment_in_the_project_is_sent_only_if_asked() -> None:
    assert sync.project(Path("/srv/job"), Path("/srv/job/envs/tf"), "/home/me").left_out[-1] == "/envs/tf"
    assert sync.project(Path("/srv/job"), Path("/elsewhere"), "/home/me").left_out == sync.LEFT_OUT
    assert [folder.path for folder in sync.environment("/srv/job/.venv", "/usr")] == ["/srv/job/.venv"]
    with pytest.raises(LaunchError, match="runs in the system's Python"):
        sync.environment("/usr", "/usr")


@pytest.mark.parametrize("folder", ["/home/me", "/home", "/"])
def test_a_home_is_no_project(folder: str) -> None:
    with pytest.raises(LaunchError, match="call it in the project's own folder"):
        sync.project(Path(folder), Path("/opt/env"), "/home/me")


@pytest.mark.parametrize("launcher", ["srun", "sbatch", "mpijob", "spark"])
@pytest.mark.parametrize("option", ["sync", "sync_environment", "sync_delete"])
def test_it_is_refused_where_ssh_reaches_no_host(launcher: str, option: str) -> None:
    with pytest.raises(LaunchError, match=f"got --{option.replace('_', '-')} with --launcher {launcher}"):
        options(launcher=launcher, **{option: True}).checked()


def test_deleting_alone_is_refused() -> None:
    with pytest.raises(LaunchError, match="got --sync-delete, expected --sync"):
        options(sync_delete=True).checked()


CLOSED = "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\n"


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (127, f"bash: rsync: command not found\n{CLOSED}", "host1 has no rsync: install it there"),
        (255, f"Welcome!\nssh: no route to host\n{CLOSED}", "host1 does not answer: ssh: no route to host"),
        (12, f"ssh: connect to host host1 port 22: refused\n{CLOSED}", "host1 does not answer: ssh: connect to host"),
        (30, "rsync error: timeout (code 30)", "host1: /srv: rsync exited with code 30: check the network, or"),
        (11, "rsync: mkdir failed\nrsync error: x", "host1: /srv could not be sent: rsync: mkdir failed"),
        (
            1,
            "rsync: --mkpath: unknown option",
            "host1: rsync: --mkpath: unknown option: rsync 3.2.3 or later is needed",
        ),
    ],
)
def test_a_host_that_fails_is_named_in_one_line(code: int, text: str, expected: str) -> None:
    folder = sync.Folder("/srv", "")
    transfer = sync.Transfer("host1", folder, sync.plan("host1", folder, options(sync=True)))
    line = sync.why_failed(transfer, code, text)
    assert line.startswith(expected) and "\n" not in line


def test_what_is_sent_is_the_projects_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("rsync"):
        pytest.skip("no rsync")
    here, there = tmp_path / "here", tmp_path / "there"
    sent = {
        "train.py",
        "data/kept.csv",
        "lib/runs/code.py",
        "big/wanted.npz",
        ".gitignore",
        ".rsync-filter",
        "odd name",
    }
    left_out = {"runs/a/summary.json", ".git/HEAD", ".venv/bin/python", "lib/__pycache__/x.pyc", "data/raw.bin"}
    for name in sent | left_out:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / ".gitignore").write_text("*.bin\n*.npz\n")
    (here / ".rsync-filter").write_text("+ wanted.npz\n")
    for name in ("runs/theirs", "theirs.txt"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("")
    folder = sync.project(here, Path("/opt/env"), "/home/me")
    flags = [word for flag in sync.rules(folder) for word in flag.words]

    def files() -> set[str]:
        return {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}

    subprocess.run(["rsync", "-a", *flags, f"{here}/", f"{there}/"], check=True, timeout=60)
    assert files() == sent | {"runs/theirs", "theirs.txt"}
    subprocess.run(["rsync", "-a", "--delete-after", *flags, f"{here}/", f"{there}/"], check=True, timeout=60)
    assert files() == sent | {"runs/theirs"}


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
    folder = sync.Folder("/srv/job", "")
    chosen = [sync.Transfer(host, folder, sync.plan(host, folder, options(sync=True))) for host in ("bad", "good")]
    with pytest.raises(LaunchError, match=r"^not synced: bad: /srv/job could not be sent: no space$"):
        sync.send(chosen, is_elastic=False)
    assert (tmp_path / "done").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no rsync on this host"):
        sync.send(chosen, is_elastic=False)
