"""A run's copy elsewhere: complete checkpoints only, one writer at a time, and what a lost disk needs to go on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringtrain.errors import CheckpointError, DataError, RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT
from ringtrain.run import checkpoint, last_copy, lease, mirror
from ringtrain.run.mirror import Mirror
from ringtrain.run.run_folder import LEASE


@pytest.fixture(autouse=True)
def fsspec():
    """The extra that mirrors need."""
    return pytest.importorskip("fsspec")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease, "POLL_S", 0.02)
    monkeypatch.setattr(lease, "RENEWED_S", 0.1)


def saved(folder: Path, *steps: int, accuracy: float = 0.5) -> Path:
    """A run folder with these checkpoints."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    for step in steps:
        files = {"state": {"w": np.full(3, step)}, "ranks": {}}
        checkpoint.save(folder / "checkpoints", step, files, {"metrics": {"accuracy": accuracy}})
    (folder / "config.toml").write_text("a = 1\n")
    (folder / "metrics.jsonl").write_text(f"{steps[-1]}\n")
    (folder / "logs" / "journal-0.jsonl").write_text("{}\n")
    (folder / ".lock").write_text("not to be copied")
    return folder


def steps_in(folder: Path) -> list[str]:
    paths = checkpoint.saved_in(folder / "checkpoints")
    return sorted(path.name[:13] for path in paths if (path / checkpoint.MANIFEST).exists())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def test_a_run_goes_on_where_its_disk_is_gone(quick, tmp_path):
    run, there = saved(tmp_path / "runs" / "r", 10, 20), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.add(run)
    copy.finish(run)
    saved(run, 30)
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r") == names(20, 30)
    assert not (there / "r" / LEASE).exists() and not (there / "r" / ".lock").exists()
    assert copy.copied == [20, 30] and copy.failures == []
    as_it_is, _ = checkpoint.newest(there / "r" / "checkpoints")
    assert as_it_is and as_it_is.global_step == 30

    shutil.rmtree(run)
    again = Mirror(str(there), "r")
    assert again.fetch(run) == run / "checkpoints" / "step-00000030"
    assert checkpoint.verify(run / "checkpoints" / "step-00000030").arrays("state")["w"].tolist() == [30] * 3
    assert (run / "metrics.jsonl").read_text() == "30\n" and (run / "logs" / "journal-0.jsonl").exists()
    again.finish(run)
    assert steps_in(run) == names(20, 30)  # the other one, which may be the best, has followed
    assert again.fetch(run) is None  # the local folder is as far
    again.close()


def test_an_unfinished_copy_is_no_checkpoint_and_a_damaged_one_is_left_out(quick, tmp_path, capsys):
    run, there = saved(tmp_path / "r", 10, 20, 30), tmp_path / "there"
    shutil.copytree(run, there / "r")
    (there / "r" / "checkpoints" / names(30)[0] / checkpoint.MANIFEST).unlink()
    state = there / "r" / "checkpoints" / names(20)[0] / "state.npz"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    shutil.rmtree(run)
    copy = Mirror(str(there), "r")
    assert copy.fetch(run) == run / "checkpoints" / names(10)[0]
    assert "step-00000020" in capsys.readouterr().err
    saved(run, 15)
    copy.finish(run)
    assert steps_in(run) == names(10, 15)
    # What another job has left stays until there is a later one: that job may not have ended.
    assert set(names(10, 15)) <= set(steps_in(there / "r"))
    saved(run, 40)
    copy.finish(run)
    copy.close()
    assert sorted(path.name[:13] for path in (there / "r" / "checkpoints").iterdir()) == names(10, 15, 40)
    last = Mirror(str(there), "r")
    shutil.rmtree(run)
    assert last.fetch(run) == run / "checkpoints" / names(40)[0]
    last.close()


def test_a_process_of_its_own_makes_the_last_copy(tmp_path):
    """It holds the lease meanwhile, and gives it up at its end. If it is killed, this process copies."""
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.finish(run)
    saved(run, 20)
    copy.leave(run, time.monotonic() + 60)
    assert copy.lease.is_lent and not copy.lease.is_lost
    (run / "metrics.jsonl").write_text("at the end\n")
    copy.finish(run)
    assert (there / "r" / "metrics.jsonl").read_text() == "at the end\n"
    assert steps_in(there / "r") == names(10, 20) and not (there / "r" / LEASE).exists()
    copy.close()
    assert (
        copy.failures == [] and "all is copied; complete checkpoints there: 10, 20" in (run / last_copy.LOG).read_text()
    )

    again = Mirror(str(there), "r")
    saved(run, 30)
    again.leave(run, time.monotonic() + 60)
    begun = re.compile(r" process (\d+) copies ")
    end_s = time.monotonic() + 60
    while len(processes := begun.findall((run / last_copy.LOG).read_text())) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    os.kill(int(processes[1]), signal.SIGKILL)
    again.finish(run)
    again.close()
    assert names(30)[0] in steps_in(there / "r") and not (there / "r" / LEASE).exists()


def test_a_store_that_cannot_be_sent_to_another_process(tmp_path, monkeypatch, capsys):
    LocalFileSystem = pytest.importorskip("fsspec.implementations.local").LocalFileSystem

    class Own(LocalFileSystem):
        cachable = False

    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    monkeypatch.setattr(mirror, "store_of", lambda url: (Own(), url))
    copy = Mirror(str(there), "r")
    copy.leave(run, time.monotonic() + 60)
    assert "makes the last copy itself" in capsys.readouterr().err
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r") == names(10) and not (there / "r" / LEASE).exists()


def test_an_error_of_the_last_copy_is_that_of_the_run(tmp_path):
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    copy = Mirror(str(there), "r")
    (there / "r" / "checkpoints").write_text("no folder")
    copy.leave(run, time.monotonic() + 60)
    assert copy.lease.is_lent
    with pytest.raises(CheckpointError, match="cannot be written"):
        copy.finish(run)
    copy.close()
    assert copy.failures and not (there / "r" / LEASE).exists()


def test_the_last_copy_removes_nothing_that_is_not_on_this_disk_yet(tmp_path):
    run, there = saved(tmp_path / "r", 10, 20), tmp_path / "there"
    first = Mirror(str(there), "r")
    for step in (10, 20):
        shutil.rmtree(run / "checkpoints")
        first.finish(saved(run, step))
    first.close()
    second = Mirror(str(there), "r")
    second.leave(saved(run, 30), time.monotonic() + 60)
    second.finish(run)
    second.close()
    assert {name[:13] for name in steps_in(there / "r")} >= {"step-00000020", "step-00000030"}


def test_the_last_copy_begins_while_an_earlier_one_is_under_way(tmp_path, monkeypatch):
    """Neither removes what the other one reads."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "ring")
    import gated

    run, gate = saved(tmp_path / "r", 10), tmp_path / "gate"
    monkeypatch.setattr(mirror, "store_of", lambda url: (gated.Gated(gate=str(gate)), url))
    copy, is_under_way, goes_on = Mirror(str(tmp_path / "there"), "r"), threading.Event(), threading.Event()
    put = copy._put

    def late(path: Path, name: str) -> None:
        is_under_way.set()
        goes_on.wait(60)
        put(path, name)

    monkeypatch.setattr(copy, "_put", late)
    copy.add(run)
    assert is_under_way.wait(60)
    copy.leave(saved(run, 20), time.monotonic() + 60)
    end_s = time.monotonic() + 60
    while len([*run.glob("checkpoints/.unfinished-mirror*")]) < 2:  # the process waits at the gate
        assert time.monotonic() < end_s
        time.sleep(0.02)
    goes_on.set()
    while copy._is_busy:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    gate.touch()
    copy.finish(run)
    copy.close()
    assert names(20)[0] in steps_in(tmp_path / "there" / "r") and copy.failures == []


@pytest.mark.parametrize("ends_s", [0.0, math.inf])
def test_the_last_copy_ends_with_its_rank_and_the_time_to_save(monkeypatch, ends_s: float):
    class Ended(Exception):
        pass

    slept: list[float] = []

    def end(code: int) -> None:
        raise Ended

    rank, other = socket.socketpair()
    monkeypatch.setattr(last_copy.sys, "stdin", other)
    monkeypatch.setattr(last_copy.time, "sleep", slept.append)
    monkeypatch.setattr(last_copy.os, "_exit", end)
    rank.shutdown(socket.SHUT_WR)  # it waits for the process

    def run() -> None:
        with pytest.raises(Ended):
            last_copy._end_in_time(ends_s, [])

    ended = threading.Thread(target=run, daemon=True)
    ended.start()
    assert ended.is_alive() and not slept
    rank.close()
    ended.join(60)
    other.close()
    assert not ended.is_alive() and slept == [last_copy.ALONE_S if ends_s else 0.0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_waits_for_the_last_copy_of_another_one(quick, tmp_path, monkeypatch, number):
    """Also a restart of the same job, which would take over any other lease at once; another rank does not wait."""
    there = tmp_path / "there"
    monkeypatch.setenv(ATTEMPT, Attempt(job="j").to_json())
    first = Mirror(str(there), "r")
    first.close()

    def pipe_file(path: str, text: bytes, mode: str = "overwrite") -> None:
        """Writes it whole, as a bucket does."""
        Path(f"{path}.new").write_bytes(text)
        (os.link if mode == "create" else os.replace)(f"{path}.new", path)

    monkeypatch.setattr(first.store, "pipe_file", pipe_file)
    holder = lease.Lease(first.store, first.path, first.url, lent=first.lease.lend())
    holder._check()  # writes it
    monkeypatch.setenv(ATTEMPT, Attempt(job="j", number=number).to_json())
    seconds: list[Mirror] = []
    start = threading.Thread(
        target=lambda: seconds.append(Mirror(str(there), "r", same_job=True, expires_s=60)), daemon=True
    )
    start.start()
    if number:
        start.join(0.5)
        assert not seconds  # it would be there by now
        holder.release()
    start.join(30)
    assert len(seconds) == 1
    holder.release()
    seconds[0].close()


def test_another_rank_of_the_job_goes_on(quick, tmp_path, monkeypatch):
    """With another disk: files that it has stay, and the checkpoints of the first follow."""
    monkeypatch.setenv(ATTEMPT, Attempt(job="j").to_json())
    first, second, there = saved(tmp_path / "1" / "r", 10), tmp_path / "2" / "r", tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.finish(first)
    saved(first, 20)
    copy.finish(first)
    (second / "logs").mkdir(parents=True)
    (second / "logs" / "journal-0.jsonl").write_text("own")
    copy.hand_over()
    saved(first, 25)
    copy.add(first)
    with pytest.raises(RunDirectoryError, match="another rank of this job"):
        copy.finish(first)

    other = Mirror(str(there), "r", same_job=True)
    other.fetch_missing(second)
    assert (second / "metrics.jsonl").read_text() == "20\n"
    assert (second / "logs" / "journal-0.jsonl").read_text() == "own"
    other.finish(second)
    assert steps_in(second) == steps_in(there / "r") == names(10, 20)
    saved(second, 30)
    other.finish(second)
    other.close()
    assert steps_in(there / "r") == names(10, 20, 30)
    assert (there / "r" / "logs" / "journal-0.jsonl").read_text() == "{}\n"  # as `saved` has written it
    assert not (there / "r" / LEASE).exists()


def test_one_job_writes_at_a_time(quick, tmp_path, monkeypatch):
    monkeypatch.delenv(ATTEMPT, raising=False)
    first = Mirror(str(tmp_path), "r")
    monkeypatch.setattr(mirror, "_open", [])  # as in another process
    with pytest.raises(RunDirectoryError, match=r"in use by process \d+ on .*another --run\.name"):
        Mirror(str(tmp_path), "r", expires_s=5)
    Mirror(str(tmp_path), "other").close()
    first.close()
    Mirror(str(tmp_path), "r").close()
    # One of this process that was not closed ends before the next one of its run.
    left, _ = Mirror(str(tmp_path), "r"), Mirror(str(tmp_path), "r").close()
    assert not left._thread.is_alive()


def test_a_lost_job_is_replaced_after_a_while_and_its_own_restart_at_once(quick, tmp_path, monkeypatch):
    file = tmp_path / "r" / LEASE
    file.parent.mkdir()
    file.write_text(json.dumps({"host": "a", "process": 1, "job": "j7", "token": "t", "renewals": 3}))
    begin_s = time.monotonic()
    Mirror(str(tmp_path), "r", expires_s=0.3).close()
    assert time.monotonic() - begin_s > 0.3

    monkeypatch.setenv(ATTEMPT, Attempt(number=1, job="j7").to_json())
    file.write_text(json.dumps({"host": "a", "process": 1, "job": "j7", "token": "t", "renewals": 3}))
    Mirror(str(tmp_path), "r", same_job=True, expires_s=1e6).close()
    for text in ("", "not JSON", "[]"):  # torn
        file.write_text(text)
        Mirror(str(tmp_path), "r", expires_s=0.1).close()


def test_a_job_that_has_lost_the_lease_copies_nothing_more(quick, tmp_path):
    run = saved(tmp_path / "runs" / "r", 10)
    copy = Mirror(str(tmp_path / "there"), "r")
    copy.finish(run)
    (tmp_path / "there" / "r" / LEASE).write_text(json.dumps({"host": "b", "process": 2, "token": "x"}))
    copy.lease._thread.join(60)  # it ends when it has noticed
    assert copy.lease.is_lost
    saved(run, 20)
    copy.add(run)
    with pytest.raises(RunDirectoryError, match="taken over by process 2 on b"):
        copy.lease.raise_if_lost()
    with pytest.raises(RunDirectoryError, match="taken over"):
        copy.finish(run)
    copy.close()
    assert steps_in(tmp_path / "there" / "r") == names(10)
    assert (tmp_path / "there" / "r" / LEASE).exists()  # the other job's


def test_a_job_loses_a_lease_that_another_one_may_have_had_and_given_up(quick, tmp_path):
    copy = Mirror(str(tmp_path), "r")
    copy.lease._is_released.set()  # its thread is frozen
    copy.lease._thread.join(60)
    file, expires_s = tmp_path / "r" / LEASE, copy.lease._expires_s
    file.unlink()
    copy.lease._confirmed_s -= expires_s / 2
    copy.lease._check()
    assert not copy.lease.is_lost  # within the time in which no other job takes it over
    file.unlink(missing_ok=True)
    copy.lease._confirmed_s -= 2 * expires_s
    with pytest.raises(RunDirectoryError, match="taken over by another job, which may have ended"):
        copy.lease.confirm()
    assert not file.exists()
    copy.close()


def test_a_slow_copy_is_completed_although_the_run_removes_the_checkpoint(quick, tmp_path, monkeypatch):
    run, there = tmp_path / "runs" / "r", tmp_path / "there"
    copy = Mirror(str(there), "r")
    put = copy.store.put_file

    def slowly(path, to, **kwargs):
        time.sleep(0.05)
        put(path, to, **kwargs)

    monkeypatch.setattr(copy.store, "put_file", slowly)
    complete = []
    for step in range(1, 25):
        saved(run, step)
        checkpoint.prune(run / "checkpoints", 1, "accuracy")
        copy.add(run)
        time.sleep(0.03)
        complete += steps_in(there / "r")
    assert complete and copy.failures == []
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r")[-1] == names(24)[0]
    assert not list((run / "checkpoints").glob(".unfinished*"))


def test_a_damaged_local_checkpoint_is_replaced_and_the_best_one_is_kept(quick, tmp_path):
    run, there = saved(tmp_path / "runs" / "r", 10, 20, 30), tmp_path / "there"
    copy = Mirror(str(there), "r")
    for step in (10, 20, 30):
        copy._copy_checkpoint(run / "checkpoints" / names(step)[0])
    copy.close()
    for step in (20, 30):
        (run / "checkpoints" / names(step)[0] / "state.npz").write_bytes(b"x")
    shutil.rmtree(run / "checkpoints" / names(10)[0])
    again = Mirror(str(there), "r")
    assert again.fetch(run) == run / "checkpoints" / names(30)[0]
    again.close()
    checkpoint.verify(run / "checkpoints" / names(30)[0])

    # A start that has fetched the newest one alone ended before it saved: the next one fetches the others.
    shutil.rmtree(run / "checkpoints" / names(20)[0])
    last = Mirror(str(there), "r")
    assert last.fetch(run) is None
    saved(run, 40)
    last.finish(run)
    last.close()
    assert steps_in(run) == steps_in(there / "r") == names(10, 20, 30, 40)


def test_an_upload_may_take_longer_than_other_requests_to_s3():
    class Store:
        read_timeout = 15

        def __init__(self, **options):
            self.storage_options = options

    uploads = mirror._for_uploads(Store(key="a", config_kwargs={"retries": 2}))
    assert uploads.storage_options == {"key": "a", "config_kwargs": {"retries": 2, "read_timeout": 600}}
    own = mirror._for_uploads(Store(config_kwargs={"read_timeout": 5}))  # a person's
    assert own.storage_options["config_kwargs"] == {"read_timeout": 5}


def test_a_copy_that_fails_is_said_and_tried_again(quick, tmp_path, capsys, monkeypatch):
    run = saved(tmp_path / "runs" / "r", 10)
    copy = Mirror(str(tmp_path / "there"), "r")
    put, fails = copy.store.put_file, True

    def failing(path, there, **kwargs):
        if fails:
            raise OSError(28, "No space left on device")
        return put(path, there, **kwargs)

    monkeypatch.setattr(copy.store, "put_file", failing)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left.*its mirror is not"):
        copy.finish(run)
    assert "No space left" in capsys.readouterr().err and len(copy.failures) == 1
    fails = False
    copy.finish(run)  # an earlier error is no error of the end
    copy.close()
    assert steps_in(tmp_path / "there" / "r") == names(10)


def test_what_cannot_be_removed_is_said_and_the_copy_is_complete(quick, tmp_path, capsys, monkeypatch):
    run, there = saved(tmp_path / "runs" / "r", 10), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.finish(run)

    def refused(path):
        raise PermissionError(13, "Access Denied")

    remove = copy.store.rm_file
    monkeypatch.setattr(copy.store, "rm_file", refused)
    shutil.rmtree(saved(run, 20) / "checkpoints" / names(10)[0])
    copy.finish(run)
    assert "cannot be removed: Access Denied; it stays there" in capsys.readouterr().err and len(copy.failures) == 1
    assert steps_in(there / "r") == names(10, 20)
    monkeypatch.setattr(copy.store, "rm_file", remove)
    saved(run, 30)
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r") == names(20, 30)


def test_what_cannot_be_written_or_reached_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be"):
        Mirror(str(tmp_path / "file"), "r")
    with pytest.raises(DataError, match="nonsense"):
        Mirror("nonsense://bucket/runs", "r")
