"""A checkpoint is whole under its name or not there, and what was damaged is never taken for one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringtrain.checkpoint import checkpoint
from ringtrain.errors import CheckpointError

pytestmark = pytest.mark.quick

FILES = {
    "state": {"00000": np.arange(12.0).reshape(3, 4), "00001": np.array(7)},
    "ranks": {"0/00000": np.ones(2, "u4")},
}


def saved(folder: Path, step: int = 17, **metrics: float) -> Path:
    return checkpoint.save(folder, step, FILES, {"metrics": metrics, "num_ranks": 1})


def test_what_is_saved_is_read_back(tmp_path):
    path = saved(tmp_path, test_accuracy=0.5)
    assert list(tmp_path.iterdir()) == [path] and path.name == "step-00000017"
    found = checkpoint.verify(path)
    assert found.global_step == 17 and found.manifest["metrics"] == {"test_accuracy": 0.5}
    for name, arrays in FILES.items():
        read = found.arrays(name)
        assert list(read) == list(arrays)
        assert all(np.array_equal(read[key], arrays[key]) and read[key].dtype == arrays[key].dtype for key in arrays)


@pytest.mark.slow
def test_an_array_above_2_gib(tmp_path):
    """Beyond what a signed number of 32 bits counts, in bytes and in the file."""
    large = np.zeros(2**31 + 9, "u1")
    large[-1] = 7
    path = checkpoint.save(tmp_path, 1, {"state": {"00000": large}}, {"metrics": {}, "num_ranks": 1})
    assert np.array_equal(checkpoint.verify(path).arrays("state")["00000"][-9:], large[-9:])
    (file,) = path.glob("state*")
    with file.open("r+b") as opened:
        opened.seek(2**31 + 50)
        before = opened.read(1)
        opened.seek(2**31 + 50)
        opened.write(bytes([before[0] ^ 1]))
    with pytest.raises(CheckpointError, match=file.name):
        checkpoint.verify(path)


@settings(max_examples=300)
@example(where=0.0625, change=7, cut=False)  # a line feed of the manifest becomes a carriage return
@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), cut=st.booleans())
def test_any_byte_flipped_or_cut_off_is_noticed(tmp_path, where: float, change: int, cut: bool):
    path = next(iter(tmp_path.iterdir()), None) or saved(tmp_path)
    files = sorted(file for file in path.iterdir())
    number, place = divmod(int(where * sum(file.stat().st_size for file in files)), files[0].stat().st_size)
    file = files[min(number, len(files) - 1)]
    before = file.read_bytes()
    place %= len(before)
    after = before[:place] if cut else before[:place] + bytes([before[place] ^ change]) + before[place + 1 :]
    file.write_bytes(after)
    with pytest.raises(CheckpointError, match=file.name):
        checkpoint.verify(path)
    file.write_bytes(before)
    checkpoint.verify(path)


def test_files_are_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    """Calls of the operating system in order: a power failure after any of them leaves no half checkpoint."""
    calls: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", path.name, os.fstat(descriptor).st_size if path.is_file() else 0))
        fsync(descriptor)

    def recorded_rename(old: Path, new: Path) -> None:
        calls.append(("rename", old.name, 0))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    path = saved(tmp_path)
    files = [("fsync", name, (path / name).stat().st_size) for name in ("state.npz", "ranks.npz", "manifest.json")]
    (unfinished,) = (name for kind, name, _ in calls if kind == "rename")
    assert calls == [*files, ("fsync", unfinished, 0), ("rename", unfinished, 0), ("fsync", tmp_path.name, 0)]


def test_a_file_that_is_missing_and_another_format_are_named(tmp_path):
    path = saved(tmp_path)
    (path / "ranks.npz").unlink()
    with pytest.raises(CheckpointError, match=r"ranks\.npz: cannot be read: No such file"):
        checkpoint.verify(path)
    with pytest.raises(CheckpointError, match="not a checkpoint, or not a whole one"):
        checkpoint.verify(tmp_path)
    newer = checkpoint.save(tmp_path, 18, FILES, {"format": checkpoint.FORMAT + 1})
    with pytest.raises(CheckpointError, match="use the one that has saved it"):
        checkpoint.verify(newer)
    with pytest.raises(CheckpointError, match="use the one that has saved it"):
        checkpoint.newest(tmp_path)  # neither passed over nor removed


def test_the_newest_that_verifies_is_found_and_the_others_named(tmp_path):
    paths = [saved(tmp_path, step) for step in (9, 10, 100)]
    (paths[2] / "manifest.json").write_text("{}")
    found, refused = checkpoint.newest(tmp_path)
    assert found is not None and found.folder == paths[1]
    assert len(refused) == 1 and "step-00000100" in refused[0]
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


def test_a_checkpoint_that_cannot_be_read_is_neither_passed_over_nor_removed(tmp_path):
    """A file of the newer one gives EIO when it is read."""
    saved(tmp_path, 10, test_accuracy=0.1)
    path = saved(tmp_path, 20, test_accuracy=0.9)
    file, kept = path / "state.npz", tmp_path / "kept"
    file.rename(kept)
    file.symlink_to("/proc/self/mem")
    left = tmp_path / ".removed-step-00000001"
    left.mkdir()
    damaged = saved(tmp_path, 30)
    (damaged / "state.npz").write_bytes(b"")
    for action in (
        lambda: checkpoint.newest(tmp_path),
        lambda: saved(tmp_path, 20),
        lambda: checkpoint.remove_after(tmp_path, 10),
    ):
        expected = "step-00000020: cannot be read: Input/output error: nothing was removed"
        with pytest.raises(CheckpointError, match=expected):
            action()
        assert damaged.is_dir() and left.is_dir()
    kept.replace(file)
    found, refused = checkpoint.newest(tmp_path)
    assert found.folder == path and len(refused) == 1


def test_what_a_killed_process_left_half_removed_is_removed(tmp_path):
    left = tmp_path / ".removed-step-00000001"
    for _ in range(2):  # the step may be saved and removed once more
        for step in (1, 2):
            saved(tmp_path, step)
        left.mkdir(exist_ok=True)
        (left / "state.npz").write_bytes(b"")
        checkpoint.prune(tmp_path, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    left.with_name(f"{left.name}-123").mkdir()
    checkpoint.remove_after(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_the_newest_stay_and_no_damaged_one_that_a_resume_has_passed_over(tmp_path):
    for step in (11, 22, 44, 66, 88):
        path = saved(tmp_path, step)
        if step > 22:
            (path / "state.npz").write_bytes(b"")
    found, _ = checkpoint.newest(tmp_path)
    checkpoint.remove_after(tmp_path, found.global_step)
    saved(tmp_path, 28)
    checkpoint.prune(tmp_path, 2)
    assert [path.name[-2:] for path in checkpoint.saved_in(tmp_path)] == ["28", "22"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_one_of_the_same_step_is_written_anew(tmp_path):
    path = saved(tmp_path)
    (path / "state.npz").write_bytes(b"")
    checkpoint.verify(saved(tmp_path))
    stamp = (path / "state.npz").stat().st_mtime_ns
    assert saved(tmp_path) == path
    assert (path / "state.npz").stat().st_mtime_ns == stamp, "a good one is left alone"


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    older = saved(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [older]
    checkpoint.verify(older)


@pytest.mark.slow
def test_the_exported_model_needs_no_ringtrain(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    checkpoint.export(model, tmp_path)
    assert model.compiled
    program = (
        "import json, sys; sys.modules['ringtrain'] = None; import keras, numpy as np;"
        f"x = np.ones((4, 2), 'float32'); a = keras.models.load_model({str(tmp_path / 'model.keras')!r});"
        "print(json.dumps(a.predict(x, verbose=0).tolist()))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    outputs = json.loads(printed.stdout.splitlines()[-1])
    assert np.allclose(outputs, model.predict(np.ones((4, 2)), verbose=0), atol=1e-6)


def test_a_model_that_cannot_be_written_leaves_its_weights(tmp_path):
    class WithoutConfig(keras.layers.Dense):
        def get_config(self):
            raise NotImplementedError

    model, other = (keras.Sequential([keras.Input((2,)), WithoutConfig(1)]) for _ in range(2))
    with pytest.raises(CheckpointError, match=r"model.keras: cannot be written: .*the weights are in"):
        checkpoint.export(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.weights.h5"]
    other.load_weights(tmp_path / "model.weights.h5")
    for weight, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        assert np.array_equal(weight, expected)
