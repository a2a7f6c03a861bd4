"""The run's folder, and what is written to it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time

import pytest

from ringtrain.checkpoint import run_folder
from ringtrain.errors import RunDirectoryError


def test_a_name_of_ones_own_is_taken_once_and_a_default_name_is_numbered(tmp_path, monkeypatch):
    def create(name: str, **more: bool) -> str:
        return str(run_folder.create_folder(tmp_path / "runs", name, **{"number_if_taken": False, **more}).name)

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    name = run_folder.default_name("my/module.x:load", 0)
    assert name == "my-module.x-load-19700101-000000"
    names = [create(name, number_if_taken=True) for _ in range(3)]
    assert names == [name, f"{name}-2", f"{name}-3"]
    (tmp_path / "runs" / "mine").mkdir()  # an empty folder may be used
    assert create("mine") == "mine"
    mine = tmp_path / "runs" / "mine"
    assert sorted(path.name for path in mine.iterdir()) == ["checkpoints", "logs", "tensorboard"]
    (mine / "metrics.jsonl").write_text("")
    (mine / "checkpoints" / "step-00000010").mkdir()
    with pytest.raises(RunDirectoryError, match=r"mine: exists already: choose another --run.name, or delete it"):
        create("mine")
    assert run_folder.is_run(mine) and create("mine", reuse=True) == "mine", "also without its configuration"
    with pytest.raises(RunDirectoryError, match=r"cannot be created: Not a directory: .*--run.directory"):
        create("mine/metrics.jsonl/other")


def test_a_complete_run_without_checkpoints_is_not_trained_again(tmp_path, capsys):
    look = run_folder.look_for_lost_checkpoints
    look(None, 20)
    look(tmp_path, 20)
    assert not capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    look(tmp_path, 20)
    assert "has metrics, but no checkpoint any more: training begins anew" in capsys.readouterr().err
    run_folder.write_summary(tmp_path, {"global_step": 20})
    with pytest.raises(RunDirectoryError, match="is complete, but has no checkpoint any more"):
        look(tmp_path, 20)
    look(tmp_path, 30)  # more epochs are asked for


def test_a_folder_of_a_run_that_was_killed_while_it_began_may_be_used(tmp_path):
    folder = run_folder.create_folder(tmp_path, "mine", number_if_taken=False)
    run_folder.RunLock().take(folder)
    assert run_folder.is_run(folder)
    assert run_folder.create_folder(tmp_path, "mine", number_if_taken=False, reuse=True) == folder
    (folder / "notes.txt").write_text("")
    assert not run_folder.is_run(folder)
    with pytest.raises(RunDirectoryError, match="exists already"):
        run_folder.create_folder(tmp_path, "mine", number_if_taken=False, reuse=True)


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked a folder; killed at the end."""
    ready, tell = os.pipe()
    process = os.fork()
    if not process:
        try:
            lock = run_folder.RunLock()
            lock.take(tmp_path)
            os.write(tell, b"1")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1)
    yield process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_one_process_writes_to_a_run(tmp_path, holder):
    lock = run_folder.RunLock()
    expected = rf"in use by process {holder} on {socket.gethostname()} since 20\d\d-.*choose another --run.name"
    with pytest.raises(RunDirectoryError, match=expected):
        lock.take(tmp_path)
    assert lock.folder is None


def test_a_killed_process_has_no_lock(tmp_path, holder):
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    lock = run_folder.RunLock()
    lock.take(tmp_path)
    lock.take(tmp_path)
    assert json.loads((tmp_path / run_folder.LOCK).read_text())["process"] == os.getpid()
    lock.release()
    run_folder.RunLock().take(tmp_path)


def test_a_restart_waits_for_the_lock_and_another_start_does_not(tmp_path, holder, monkeypatch, capfd):
    """A file server releases the lock of a lost host in that time."""
    monkeypatch.setattr(run_folder, "WAIT_S", 0.5)
    monkeypatch.setattr(run_folder, "REPORTED_S", 0.1)
    begin_s = time.monotonic()
    with pytest.raises(RunDirectoryError, match="in use by process"):
        run_folder.RunLock().take(tmp_path)
    assert "waiting" not in capfd.readouterr().err
    with pytest.raises(RunDirectoryError, match="in use by process"):
        run_folder.RunLock().take(tmp_path, same_job=True)
    assert time.monotonic() - begin_s > 0.5
    waiting = f"in use by process {holder} on .*: waiting up to 0.5 s until it has ended, or its file server has"
    assert len(re.findall(waiting, capfd.readouterr().err)) == 1

    monkeypatch.setattr(run_folder, "WAIT_S", 60.0)
    killer = threading.Timer(0.5, os.kill, (holder, signal.SIGKILL))
    killer.start()
    lock = run_folder.RunLock()
    lock.take(tmp_path, same_job=True)
    killer.join()
    assert json.loads((tmp_path / run_folder.LOCK).read_text())["process"] == os.getpid()


def test_the_lock_of_a_file_that_was_deleted_is_none(tmp_path, holder):
    """As a person deletes it who knows that its host is lost."""
    (tmp_path / run_folder.LOCK).unlink()
    lock = run_folder.RunLock()
    lock.take(tmp_path)
    assert json.loads((tmp_path / run_folder.LOCK).read_text())["process"] == os.getpid()
    assert not lock_is_free(tmp_path)


def lock_is_free(folder) -> bool:
    """Whether another process can take a folder's lock."""
    process = os.fork()
    if not process:
        try:
            run_folder.RunLock().take(folder)
        except RunDirectoryError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_copy_of_the_folder_leaves_its_lock_alone(tmp_path):
    folder = run_folder.create_folder(tmp_path, "mine", number_if_taken=False)
    lock = run_folder.RunLock()
    lock.take(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert not lock_is_free(folder)
    again = run_folder.RunLock()
    again.take(folder)  # this process may
    assert not lock_is_free(folder) and lock.folder is None
    again.release()
    assert lock_is_free(folder)


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    lock = run_folder.RunLock()
    lock.take(tmp_path)
    until, end = os.pipe()
    process = os.fork()
    if not process:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    lock.release()
    assert lock_is_free(tmp_path)
    os.close(end)
    os.waitpid(process, 0)


def test_where_the_file_system_has_no_locks_that_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 12345)  # which no kernel knows
    lock = run_folder.RunLock()
    lock.take(tmp_path)
    assert "the file system has no locks" in capfd.readouterr().err and lock.folder == tmp_path


def test_summary_is_json_that_everybody_reads(tmp_path):
    run_folder.write_summary(tmp_path, {"images_per_s": math.nan, "numbers": {"x": math.inf}, "hosts": ["a"], "y": 1.5})
    text = (tmp_path / "summary.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"images_per_s": None, "numbers": {"x": None}, "hosts": ["a"], "y": 1.5}
