"""A run's copy elsewhere: complete checkpoints only, one writer at a time, and what a lost disk needs to go on."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringtrain.errors import CheckpointError, DataError, RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT
from ringtrain.run import checkpoint, mirror, mirror_writer
from ringtrain.run.mirror import Mirror
from ringtrain.run.mirror_writer import WRITER


@pytest.fixture(autouse=True)
def fsspec():
    """The extra that mirrors need."""
    return pytest.importorskip("fsspec")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mirror_writer, "POLL_S", 0.02)
    monkeypatch.setattr(mirror_writer, "RENEWED_S", 0.1)


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
    return sorted(path.name for path in paths if (path / checkpoint.MANIFEST).exists())


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
    assert not (there / "r" / WRITER).exists() and not (there / "r" / ".lock").exists()
    assert copy.failures == []
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
    assert set(names(10, 15)) <= set(steps_in(there / "r"))
    saved(run, 20)  # trained again
    copy.finish(run)
    checkpoint.verify(there / "r" / "checkpoints" / names(20)[0])
    saved(run, 40)
    copy.finish(run)
    copy.close()
    assert sorted(path.name for path in (there / "r" / "checkpoints").iterdir()) == names(10, 15, 20, 40)
    last = Mirror(str(there), "r")
    shutil.rmtree(run)
    assert last.fetch(run) == run / "checkpoints" / names(40)[0]
    last.close()


def test_a_copy_is_complete_or_absent_and_the_newest_is_the_first(quick, tmp_path, fsspec, monkeypatch):
    """In a store of objects, in which no other order is kept than that of the requests."""
    run = saved(tmp_path / "r", 10, 20)
    written: list[str] = []
    copy = Mirror("memory://of-order", "r")
    put = copy.store.put_file

    def noted(path, to, **kwargs):
        written.append(to.partition("/r/")[2])
        put(path, to, **kwargs)

    monkeypatch.setattr(type(copy.store), "put_file", lambda store, path, to, **kwargs: noted(path, to, **kwargs))
    copy.finish(run)
    copy.close()
    of_newest = [place for place, name in enumerate(written) if names(20)[0] in name]
    of_other = [place for place, name in enumerate(written) if names(10)[0] in name]
    assert max(of_newest) < min(of_other) and len(written) == 9, written
    for places in (of_newest, of_other):
        assert [written[place].endswith(checkpoint.MANIFEST) for place in places] == [False, False, True]
    assert max(of_newest) < written.index("metrics.jsonl") < min(of_other)


def test_what_is_not_copied_within_the_grace_is_said(quick, tmp_path, monkeypatch):
    """It is said in time, with what is there; the next start may write at once, and copies it."""
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.finish(run)
    may_go_on, put = threading.Event(), copy.store.put_file

    def late(path, to, **kwargs):
        may_go_on.wait(60)
        put(path, to, **kwargs)

    monkeypatch.setattr(copy.store, "put_file", late)
    saved(run, 20)
    begin_s = time.monotonic()
    expected = (
        rf"there/r: not all is copied, and the time to save is over \(--grace\): not there: {names(20)[0]};"
        rf" newest complete checkpoint there: {names(10)[0]}; .*the same command copies it"
    )
    with pytest.raises(CheckpointError, match=expected):
        copy.finish(run, ends_s=begin_s + mirror.LEAVE_S + 0.5)
    copy.close()
    assert time.monotonic() - begin_s > 0.4, "the upload waits so long"
    assert not (there / "r" / WRITER).exists() and steps_in(there / "r") == names(10)
    may_go_on.set()
    monkeypatch.undo()
    copy._thread.join(60)
    again = Mirror(str(there), "r")
    assert again.fetch(run) is None
    again.finish(run)
    again.close()
    assert steps_in(there / "r") == names(10, 20)


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
    copy._thread.join(60)
    assert not copy._thread.is_alive()

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
    assert not (there / "r" / WRITER).exists()


def test_one_job_writes_at_a_time(quick, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv(ATTEMPT, raising=False)
    first = Mirror(str(tmp_path), "r")
    monkeypatch.setattr(mirror, "_open", [])  # as in another process
    with pytest.raises(RunDirectoryError, match=r"in use by process \d+ on .*another --run\.name"):
        Mirror(str(tmp_path), "r", expires_s=5)
    Mirror(str(tmp_path), "other").close()
    first.close()
    capfd.readouterr()
    Mirror(str(tmp_path), "r").close()
    assert "waiting" not in capfd.readouterr().err, "the first has given it up"
    # One of this process that was not closed ends before the next one of its run.
    left, _ = Mirror(str(tmp_path), "r"), Mirror(str(tmp_path), "r").close()
    assert not left._thread.is_alive()


def test_a_job_that_copies_a_large_file_is_not_taken_for_lost(quick, tmp_path, monkeypatch):
    """Its upload takes longer than a second writer waits for a change."""
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    first = Mirror(str(there), "r")
    may_go_on, put = threading.Event(), first.store.put_file

    def slowly(path, to, **kwargs):
        may_go_on.wait(60)
        put(path, to, **kwargs)

    monkeypatch.setattr(first.store, "put_file", slowly)
    first.add(run)
    with monkeypatch.context() as other_process:
        other_process.setattr(mirror, "_open", [])
        with pytest.raises(RunDirectoryError, match="in use by process"):
            Mirror(str(there), "r", expires_s=2)
    may_go_on.set()
    first.finish(run)
    first.close()
    assert steps_in(there / "r") == names(10)


def test_a_lost_job_is_replaced_after_a_while_and_its_own_restart_at_once(quick, tmp_path, monkeypatch):
    file = tmp_path / "r" / WRITER
    file.parent.mkdir()
    file.write_text(json.dumps({"host": "a", "process": 1, "job": "j7", "token": "t", "time": 3}))
    begin_s = time.monotonic()
    Mirror(str(tmp_path), "r", expires_s=0.3).close()
    assert time.monotonic() - begin_s > 0.3

    monkeypatch.setenv(ATTEMPT, Attempt(number=1, job="j7").to_json())
    file.write_text(json.dumps({"host": "a", "process": 1, "job": "j7", "token": "t", "time": 3}))
    Mirror(str(tmp_path), "r", same_job=True, expires_s=1e6).close()
    for text in ("", "not JSON", "[]"):  # torn
        file.write_text(text)
        Mirror(str(tmp_path), "r", expires_s=0.1).close()


def test_a_job_that_is_no_longer_the_writer_copies_nothing_more(quick, tmp_path):
    run = saved(tmp_path / "runs" / "r", 10)
    copy = Mirror(str(tmp_path / "there"), "r")
    copy.finish(run)
    (tmp_path / "there" / "r" / WRITER).write_text(json.dumps({"host": "b", "process": 2, "token": "x"}))
    copy.writer._thread.join(60)  # it ends when it has noticed
    assert copy.writer.is_lost
    saved(run, 20)
    copy.add(run)
    with pytest.raises(RunDirectoryError, match="taken over by process 2 on b"):
        copy.writer.raise_if_lost()
    with pytest.raises(RunDirectoryError, match="taken over"):
        copy.finish(run)
    copy.close()
    assert steps_in(tmp_path / "there" / "r") == names(10)
    assert (tmp_path / "there" / "r" / WRITER).exists()  # the other job's


def test_a_job_that_was_frozen_for_long_writes_no_more(quick, tmp_path):
    """Another one may have written meanwhile, and ended."""
    run = saved(tmp_path / "r", 10)
    copy = Mirror(str(tmp_path / "there"), "r")
    copy.writer._is_released.set()  # its thread is frozen
    copy.writer._thread.join(60)
    copy.writer._is_released.clear()
    file, expires_s = tmp_path / "there" / "r" / WRITER, copy.writer._expires_s
    file.unlink()
    copy.writer._confirmed_s -= expires_s / 2
    copy.writer.confirm()
    assert file.exists()  # within the time in which no other job takes it over
    file.unlink()
    copy.writer._confirmed_s -= 2 * expires_s
    with pytest.raises(RunDirectoryError, match="taken over by a job that has ended meanwhile"):
        copy.finish(run)
    assert not file.exists() and steps_in(tmp_path / "there" / "r") == []
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
    run, there = saved(tmp_path / "runs" / "r", 5), tmp_path / "there" / "r"
    copy = Mirror(str(there.parent), "r")
    copy.finish(run)
    shutil.rmtree(saved(run, 10) / "checkpoints" / names(5)[0])
    put, fails = copy.store.put_file, True

    def failing(path, there, **kwargs):
        if fails:
            raise OSError(28, "No space left on device")
        return put(path, there, **kwargs)

    monkeypatch.setattr(copy.store, "put_file", failing)
    expected = (
        r"cannot be written: No space left.*: not there: step-00000010; newest complete checkpoint there: step-00000005"
    )
    for _ in range(2):
        with pytest.raises(CheckpointError, match=expected):
            copy.finish(run)
    assert capsys.readouterr().err.count("No space left") == 1, "it is printed once"
    assert steps_in(there) == names(5), "the newest complete one stays"
    assert len(copy.failures) == 2 and copy.summary()["failed"] == copy.failures
    fails = False
    copy.finish(run)  # an earlier error is no error of the end
    copy.close()
    assert steps_in(there) == names(10)


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
    assert "cannot be removed: Access Denied; training continues" in capsys.readouterr().err and len(copy.failures) == 1
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
