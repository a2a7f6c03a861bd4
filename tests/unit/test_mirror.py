"""A run's copy elsewhere: complete checkpoints only, one writer at a time, and what an empty disk needs to continue."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ringtrain.checkpoint import checkpoint, mirror
from ringtrain.checkpoint.mirror import WRITER, Mirror
from ringtrain.errors import CheckpointError, DataError, RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT


@pytest.fixture(autouse=True)
def fsspec():
    """The extra that mirrors need."""
    return pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mirror, "POLL_S", 0.02)
    monkeypatch.setattr(mirror, "RENEWED_S", 0.1)
    monkeypatch.setattr(mirror, "EXPIRES_S", 5)


def saved(folder: Path, *steps: int) -> Path:
    """A run folder with these checkpoints."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    for step in steps:
        checkpoint.save(folder / "checkpoints", step, {"state": {"w": np.full(3, step)}, "ranks": {}}, {"metrics": {}})
    (folder / "config.toml").write_text("a = 1\n")
    (folder / "metrics.jsonl").write_text(f"{steps[-1]}\n")
    (folder / "logs" / "journal-0.jsonl").write_text("{}\n")
    (folder / ".lock").write_text("not to be copied")
    return folder


def removed(folder: Path, step: int) -> None:
    shutil.rmtree(folder / "checkpoints" / names(step)[0])


def steps_in(folder: Path) -> list[str]:
    paths = checkpoint.saved_in(folder / "checkpoints")
    return sorted(path.name for path in paths if (path / checkpoint.MANIFEST).exists())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def writer(token: str, job: str = "") -> str:
    return json.dumps({"host": "b", "process": 2, "job": job, "token": token, "time": 3})


def before_each_file(monkeypatch, copy: Mirror, call: Callable[[], object]) -> None:
    """Calls a function before each file that a mirror copies."""
    put = copy.store.put_file

    def called(path, to, **kwargs):
        call()
        put(path, to, **kwargs)

    monkeypatch.setattr(copy.store, "put_file", called)


def test_a_run_continues_where_its_disk_is_gone(tmp_path):
    run, there = saved(tmp_path / "runs" / "r", 10, 20), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.add(run)
    copy.finish(run)
    saved(run, 30)
    removed(run, 10)
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r") == names(20, 30) and copy.failures == []
    assert not (there / "r" / WRITER).exists() and not (there / "r" / ".lock").exists()

    shutil.rmtree(run)
    again = Mirror(str(there), "r")
    assert again.fetch(run) == names(30)[0]
    assert steps_in(run) == names(20, 30), "the older one may be the best"
    assert checkpoint.verify(run / "checkpoints" / names(30)[0]).arrays("state")["w"].tolist() == [30] * 3
    assert (run / "metrics.jsonl").read_text() == "30\n" and (run / "logs" / "journal-0.jsonl").exists()
    removed(saved(run, 40), 20)
    assert again.fetch(run) == "" and steps_in(run) == names(30, 40), "the folder is newer"
    again.close()


def test_an_interrupted_fetch_is_repeated(tmp_path, monkeypatch):
    run, there = saved(tmp_path / "r", 10, 20), tmp_path / "there"
    shutil.copytree(run, there / "r")
    shutil.rmtree(run)
    copy = Mirror(str(there), "r")
    get = copy.store.get_file

    def broken(name, path):
        if name.endswith(f"{names(20)[0]}/{checkpoint.MANIFEST}"):
            raise OSError("no network")
        get(name, path)

    monkeypatch.setattr(copy.store, "get_file", broken)
    with pytest.raises(DataError, match="cannot be read: no network"):
        copy.fetch(run)
    monkeypatch.undo()
    assert steps_in(run) == names(10)
    assert copy.fetch(run) == names(20)[0]
    copy.close()
    checkpoint.verify(run / "checkpoints" / names(20)[0])


def test_an_unfinished_copy_is_no_checkpoint_and_a_damaged_one_is_skipped(tmp_path):
    run, there = saved(tmp_path / "r", 10, 20, 30), tmp_path / "there"
    shutil.copytree(run, there / "r")
    (there / "r" / "checkpoints" / names(30)[0] / checkpoint.MANIFEST).unlink()
    state = there / "r" / "checkpoints" / names(20)[0] / "state.npz"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    shutil.rmtree(run)
    copy = Mirror(str(there), "r")
    assert copy.fetch(run) == names(20)[0]
    newest, refused = checkpoint.newest(run / "checkpoints")
    assert newest and newest.global_step == 10 and names(20)[0] in refused[0]
    checkpoint.remove_after(run / "checkpoints", 10)
    saved(run, 15)
    copy.finish(run)
    copy.close()
    assert sorted(path.name for path in (there / "r" / "checkpoints").iterdir()) == names(10, 15)


def test_a_manifest_is_the_last_of_a_checkpoint_and_the_newest_is_the_first(tmp_path, monkeypatch):
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
    of_saved = [name.split("/")[1:] for name in written if name.startswith("checkpoints/")]
    assert [step for step, _ in of_saved] == [*names(20) * 3, *names(10) * 3]
    assert [file for _, file in of_saved].index(checkpoint.MANIFEST) == 2 and of_saved[-1][1] == checkpoint.MANIFEST
    assert len(written) == 9, written

    written.clear()
    (run / "metrics.jsonl").write_text("more\n")
    copy.finish(run)
    copy.close()
    again = Mirror("memory://of-order", "r")
    assert written == ["metrics.jsonl"], "nothing else has changed"
    again.finish(run)
    again.close()
    assert not any(name.startswith("checkpoints/") for name in written), "a later start knows the checkpoints there"


def test_what_is_not_copied_within_the_grace_is_said(tmp_path, monkeypatch):
    """It is said in time, with what is there; the next start may write at once, and copies it."""
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    copy = Mirror(str(there), "r")
    copy.finish(run)
    may_continue = threading.Event()
    before_each_file(monkeypatch, copy, lambda: may_continue.wait(60))
    saved(run, 20)
    expected = (
        rf"there/r: not all is copied, and the time to save is over \(--grace\): not there: {names(20)[0]};"
        r" .*the same command copies it"
    )
    with pytest.raises(CheckpointError, match=expected):
        copy.finish(run, ends_s=time.monotonic() + mirror.LEAVE_S + 0.5)
    copy.close()
    assert not (there / "r" / WRITER).exists() and steps_in(there / "r") == names(10)
    may_continue.set()
    monkeypatch.undo()
    copy._thread.join(60)
    again = Mirror(str(there), "r")
    again.finish(run)
    again.close()
    assert steps_in(there / "r") == names(10, 20)


def test_one_job_writes_at_a_time(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv(ATTEMPT, raising=False)
    first = Mirror(str(tmp_path), "r")
    with pytest.raises(RunDirectoryError, match=r"in use by process \d+ on .*another --run\.name"):
        Mirror(str(tmp_path), "r")
    Mirror(str(tmp_path), "other").close()
    first.close()
    capfd.readouterr()
    Mirror(str(tmp_path), "r").close()
    assert "waiting" not in capfd.readouterr().err, "the first has given it up"
    (tmp_path / "file").write_text("")
    for place, said in (("nonsense://bucket/runs", "nonsense"), (str(tmp_path / "file"), "cannot be")):
        with pytest.raises(DataError, match=said):
            Mirror(place, "r")


def test_a_job_that_copies_a_large_file_is_not_taken_for_lost(tmp_path, monkeypatch):
    """Its upload takes longer than a second writer waits for a change."""
    run, there = saved(tmp_path / "r", 10), tmp_path / "there"
    first = Mirror(str(there), "r")
    may_continue = threading.Event()
    before_each_file(monkeypatch, first, lambda: may_continue.wait(60))
    first.add(run)
    with pytest.raises(RunDirectoryError, match="in use by process"):
        Mirror(str(there), "r")
    may_continue.set()
    first.finish(run)
    first.close()
    assert steps_in(there / "r") == names(10)


def test_a_lost_job_is_replaced_after_a_while_and_its_own_restart_at_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(mirror, "EXPIRES_S", 0.1)
    file = tmp_path / "r" / WRITER
    file.parent.mkdir()
    for text in (writer("t"), "", "not JSON", "[]"):  # also torn
        file.write_text(text)
        Mirror(str(tmp_path), "r").close()
        assert "waiting" in capfd.readouterr().err

    monkeypatch.setenv(ATTEMPT, Attempt(number=1, job="j7").to_json())
    file.write_text(writer("t", job="j7"))
    Mirror(str(tmp_path), "r", same_job=True).close()
    assert "waiting" not in capfd.readouterr().err


def test_a_job_that_is_no_longer_the_writer_copies_nothing_more(tmp_path):
    run, there = saved(tmp_path / "runs" / "r", 10), tmp_path / "there" / "r"
    copy = Mirror(str(there.parent), "r")
    copy.finish(run)
    (there / WRITER).write_text(writer("x"))
    end_s = time.monotonic() + 60
    while not copy.lost_to and time.monotonic() < end_s:  # it notices between checkpoints
        time.sleep(0.01)
    assert copy.lost_to == "process 2 on b"
    saved(run, 20)
    with pytest.raises(RunDirectoryError, match="taken over by process 2 on b"):
        copy.finish(run)
    with pytest.raises(RunDirectoryError, match="taken over by process 2 on b"):
        copy.raise_if_lost()
    copy.close()
    assert steps_in(there) == names(10)
    assert (there / WRITER).read_text() == writer("x"), "it is the other job's"


def test_a_slow_copy_is_completed_although_the_run_removes_the_checkpoint(tmp_path, monkeypatch):
    run, there = tmp_path / "runs" / "r", tmp_path / "there"
    copy = Mirror(str(there), "r")
    before_each_file(monkeypatch, copy, lambda: time.sleep(0.05))
    complete = []
    for step in range(1, 25):
        saved(run, step)
        checkpoint.prune(run / "checkpoints", 1)
        copy.add(run)
        time.sleep(0.03)
        complete += steps_in(there / "r")
    assert complete and copy.failures == []
    copy.finish(run)
    copy.close()
    assert steps_in(there / "r") == names(24)
    checkpoint.verify(there / "r" / "checkpoints" / names(24)[0])


def test_a_copy_that_fails_is_said_and_tried_again(tmp_path, capsys, monkeypatch):
    run, there = saved(tmp_path / "runs" / "r", 5), tmp_path / "there" / "r"
    copy = Mirror(str(there.parent), "r")
    copy.finish(run)
    removed(saved(run, 10), 5)

    def fail():
        raise OSError(28, "No space left on device")

    before_each_file(monkeypatch, copy, fail)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot be written: No space left.*: not there: step-00000010; "):
            copy.finish(run)
    assert capsys.readouterr().err.count("No space left") == 1, "it is printed once"
    assert steps_in(there) == names(5), "the newest complete one stays"
    assert len(copy.failures) == 2
    monkeypatch.undo()
    copy.finish(run)  # an earlier error is no error of the end
    copy.close()
    assert steps_in(there) == names(10)
