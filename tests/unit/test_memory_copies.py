"""Copies of a run in the memory of its hosts: which one is taken, and that a damaged or an old one never is."""

from __future__ import annotations

import random
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringtrain import hvd, strategies
from ringtrain.config import Config, with_values
from ringtrain.errors import ConfigError
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import checkpoint, memory_copies, memory_folder
from ringtrain.run.memory_folder import Copies, Copy, Host
from ringtrain.run.resume import Start

FACTS = {"metrics": {"loss": 0.5}, "num_ranks": 1, "records": "{}\n"}
NUM_FLIPS = 300


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, of the only rank."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory_folder, "ROOT", folder)
    monkeypatch.setattr(memory_copies, "PIECE_BYTES", 100)
    for name in ("rank", "local_rank"):
        monkeypatch.setattr(hvd, name, lambda: 0, raising=False)
    monkeypatch.setattr(hvd, "run_together", lambda action: action())
    monkeypatch.setattr(hvd, "allgather_object", lambda thing, name: [thing])
    monkeypatch.setattr(hvd, "on_rank_0", lambda action: action())
    monkeypatch.setattr(hvd, "forward_bytes", lambda sent, length, source, name: sent)
    return folder


def files(step: int) -> dict[str, dict[str, Any]]:
    arrays = {"00000": np.arange(12.0).reshape(3, 4) + step, "00001": np.array(step)}
    return {"state": arrays, "ranks": {"0/00000": np.ones(2, "u4")}}


def written(run: Path, *steps: int, of: str = "1-a", job: str = "", start: int = 0) -> Path:
    """Folder in memory with copies of a run."""
    copies = Copies(memory_folder.folder_of(run), of, job, start)
    for step in steps:
        copies.write(step, files(step), FACTS)
    assert copies.facts["failed"] == []
    return copies.folder


def on_disk(run: Path, *steps: int, of: str = "1-a") -> None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    memory_folder.write_mark(run, of, "")
    for step in steps:
        checkpoint.save(run / "checkpoints", step, files(step), FACTS)


def fetched(run: Path, attempt: Attempt | None = None, resume: str = "auto") -> int:
    """Step that the run then resumes from; -1: it begins anew."""
    config = with_values(Config(), {"run.name": run.name, "run.directory": str(run.parent), "run.resume": resume})
    strategy = SimpleNamespace(ranks_change=False)
    process: Any = SimpleNamespace(config=config, attempt=attempt or Attempt(), strategy=strategy)
    has_fetched = memory_copies.fetch(process)
    newest, _ = checkpoint.newest(run / "checkpoints")
    assert not has_fetched or newest is not None
    return newest.global_step if newest else -1


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step_of(path.name) for path in checkpoint.saved_in(folder)]


def test_the_newest_copy_is_taken_if_it_is_newer_than_the_disk(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    on_disk(run, 4)
    folder = written(run, 2, 6, 8)
    assert steps_in(folder) == [8, 6]
    assert fetched(run) == 8
    assert "step 8 is from the memory of" in capsys.readouterr().err
    taken = checkpoint.verify(run / "checkpoints" / "step-00000008")
    assert np.array_equal(taken.arrays("state")["00000"], files(8)["state"]["00000"])
    assert (run / "metrics.jsonl").read_text() == "{}\n" and (run / "config.toml").exists()
    assert fetched(run) == 8 and not capsys.readouterr().err  # the disk is as far
    assert not [*(run / "checkpoints").glob(f"{checkpoint.UNFINISHED}*")]


def test_a_copy_of_an_older_run_is_not_taken(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    folder = written(run, 6, 8, of="1-old", job="first")
    # The run begins anew, in a new folder or in one of another run.
    assert fetched(run) == -1
    assert "run.resume must takes them" in capsys.readouterr().err
    on_disk(run, 2, of="2-new")
    assert fetched(run) == 2
    # A restart of another launch, whose rank 0 has lost its disk.
    shutil.rmtree(run)
    assert fetched(run, Attempt(number=1, job="second")) == -1
    # The new run has a copy of its own: the others go.
    copies = Copies(folder, "2-new", "second", 0)
    assert steps_in(folder) == [8, 6]
    copies.write(4, files(4), FACTS)
    assert steps_in(folder) == [4]
    assert fetched(run, Attempt(number=1, job="second")) == 4


def test_a_restart_takes_what_its_launch_has_written_and_a_person_may_take_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run, 6, 8, job="first")
    assert fetched(run, resume="never") == -1
    assert fetched(run, Attempt(number=1, job="first"), resume="never") == 8
    shutil.rmtree(run)
    assert fetched(run, resume="must") == 8


def begun(run: Path, start: Start, monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1000) -> tuple[Any, str]:
    """Process with the copies of a run that begins, of 100 bytes each, and the plan's row."""
    monkeypatch.setattr(memory_copies, "_refuse", lambda model: None)
    monkeypatch.setattr(memory_copies, "_num_bytes", lambda model: 100)
    monkeypatch.setattr(memory_copies, "free_in_memory", lambda folder: free_bytes)
    run.mkdir(parents=True, exist_ok=True)
    config = with_values(Config(), {"checkpoint.memory_every_steps": 5})
    process: Any = SimpleNamespace(config=config, attempt=Attempt(job="first"), memory=None)
    job: Any = SimpleNamespace(model=None, plan={})
    memory_copies.begin(process, job, run, start)
    return process, job.plan["memory copies"]


def test_a_run_keeps_its_id_until_it_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    first = begun(run, Start(), monkeypatch)[0].memory.run
    resumed = Start(global_step=8, source=str(run / "checkpoints" / "step-00000008"))
    assert begun(run, resumed, monkeypatch)[0].memory.run == first
    of_another = Start(global_step=8, source=str(tmp_path / "other" / "checkpoints" / "step-00000008"))
    assert first < begun(run, of_another, monkeypatch)[0].memory.run < begun(run, Start(), monkeypatch)[0].memory.run


def test_a_host_without_enough_memory_has_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    process, row = begun(tmp_path / "run", Start(), monkeypatch, free_bytes=199)
    assert process.memory is None and "none on" in row
    assert capsys.readouterr().err.count("checkpoint.memory_every_steps: no copies on") == 1
    process, row = begun(tmp_path / "run", Start(), monkeypatch, free_bytes=200)
    assert process.memory is not None and row.startswith("every 5 steps, 2 x 0.0001 MB") and "none on" not in row


def test_a_start_after_an_earlier_step_removes_later_copies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run, 6, 8)
    assert steps_in(written(run, start=6)) == [6]
    assert steps_in(written(run, start=6, of="2-b")) == [6]


def test_flipped_bits_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a copy with one wrong bit, anywhere in it. Without checksums, wrong states are loaded."""
    run = tmp_path / "run"
    path = written(run, 8) / "step-00000008"
    whole = {file: file.read_bytes() for file in path.iterdir()}
    draw = random.Random(1)
    flips = []
    for number in range(NUM_FLIPS):
        file = sorted(whole)[number % len(whole)]
        flips.append((file, draw.randrange(8 * len(whole[file]))))
    on_disk(run)
    for file, bit in flips:
        with flipped(file, whole[file], bit):
            assert fetched(run) == -1, (file, bit)
    monkeypatch.setattr(checkpoint, "hashlib", SimpleNamespace(sha256=unchecked, file_digest=unchecked))
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda *_: None)
    are_wrong = set()
    for file, bit in flips:
        with flipped(file, whole[file], bit):
            if file not in are_wrong and is_wrong(run):
                are_wrong.add(file)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    assert are_wrong == set(whole)


class flipped:
    """Context in which one bit of a file is another."""

    def __init__(self, file: Path, content: bytes, bit: int) -> None:
        self.file, self.content, self.bit = file, content, bit

    def __enter__(self) -> None:
        wrong = bytearray(self.content)
        wrong[self.bit // 8] ^= 1 << self.bit % 8
        self.file.write_bytes(wrong)

    def __exit__(self, *_: object) -> None:
        self.file.write_bytes(self.content)


class Anything(str):
    """Checksum that is equal to all others."""

    def __ne__(self, other: object) -> bool:
        return False


def unchecked(*_: object) -> Any:
    return SimpleNamespace(hexdigest=lambda: Anything())


def is_wrong(run: Path) -> bool:
    """Whether a state is loaded that was never written."""
    try:
        if fetched(run) == -1:
            return False
        newest, _ = checkpoint.newest(run / "checkpoints")
        assert newest is not None
        arrays = {name: newest.arrays(name) for name in files(8)}
    except Exception:  # not loaded
        return False
    facts = newest.global_step, newest.manifest.get("metrics"), newest.manifest.get("num_ranks")
    same = facts == (8, FACTS["metrics"], 1)
    for name, wanted in files(8).items():
        same = same and wanted.keys() == arrays[name].keys()
        same = same and all(np.array_equal(arrays[name][key], wanted[key]) for key in wanted)
    return not same


def test_a_damaged_copy_is_named_and_the_one_before_is_taken(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    on_disk(run, 4)
    state = written(run, 6, 8) / "step-00000008" / "state.npz"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert fetched(run) == 6
    said = capsys.readouterr().err
    assert "state.npz: does not have the checksum" in said and "step 6 is from the memory" in said


def test_copies_that_differ_between_hosts_are_not_taken() -> None:
    hosts = [
        Host("a", copies=(Copy(8, "1", "x", {}), Copy(6, "1", "z", {}))),
        Host(),
        Host("b", copies=(Copy(8, "1", "y", {}), Copy(6, "1", "z", {}), Copy(9, "2", "x", {}))),
    ]
    found, problems = memory_copies.candidates(hosts, {"1"}, 4)
    assert [(copy.step, rank) for copy, rank in found] == [(6, 0), (6, 2)]
    assert problems == ["copies of step 8 in memory differ between hosts: not taken"]


def test_a_folder_of_others_is_not_used(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    folder = written(run, 8)
    on_disk(run, 4)
    folder.parent.chmod(0o777)
    assert fetched(run) == 4
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        Copies(folder, "1-a", "", 0)


def test_a_copy_that_does_not_fit_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    copies = Copies(memory_folder.folder_of(tmp_path / "run"), "1-a", "", 0)
    copies.write(2, files(2), FACTS)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for step in (4, 6):
        copies.write(step, files(step), FACTS)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert [failure["global_step"] for failure in copies.facts["failed"]] == [4, 6]
    assert steps_in(copies.folder) == [2]


@pytest.mark.parametrize(
    ("option", "value"),
    [("optimizer.sharded", True), ("hvd.local_steps", 4), ("strategy.name", "towers"), ("strategy.name", "ps-async")],
)
def test_options_without_copies_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory_every_steps.*leave"):
        strategies.prepare(with_values(Config(), {"checkpoint.memory_every_steps": 5, option: value}), {})
