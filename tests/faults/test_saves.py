"""Whatever happens to a process that saves, and to what it saved: nothing wrong is ever taken for a checkpoint."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringtrain.checkpoint import checkpoint
from ringtrain.errors import CheckpointError

# Saves one step after the other until it is killed, and says which are done. "naive" is the negative control: it writes
# under the final name, which a careless writer would do.
PROGRAM = """
import os, sys
import numpy as np
from pathlib import Path
from ringtrain.checkpoint import checkpoint
folder, step, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
while True:
    step += 1
    files = {name: {"0": np.random.default_rng([step, part]).normal(size=200_000)}
             for part, name in enumerate(("state", "ranks"))}
    if way == "naive":
        source = checkpoint.save(folder.parent / "elsewhere", step, files, {})
        (folder / source.name).mkdir(exist_ok=True)
        for path in sorted(source.iterdir()):
            with open(folder / source.name / path.name, "wb") as file:
                for start in range(0, path.stat().st_size, 100_000):
                    file.write(path.read_bytes()[start : start + 100_000])
                    file.flush()
                    os.fsync(file.fileno())
    else:
        checkpoint.save(folder, step, files, {})
    checkpoint.prune(folder, 3)
    print(step, flush=True)
"""


def expected(step: int, part: int) -> np.ndarray:
    return np.random.default_rng([step, part]).normal(size=200_000)


def kill_in_saves(folder: Path, times: int, way: str, seed: int = 7) -> tuple[int, list[str]]:
    """Kills a process that saves, again and again.

    Returns:
        How many of the kills left a checkpoint half written; and what was found wrong afterwards.
    """
    draw, last, broken_off, wrong = random.Random(seed), 0, 0, []
    for number in range(times):
        words = [sys.executable, "-c", PROGRAM, str(folder), str(last), way]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            lines = process.stdout
            assert lines is not None
            last = int(lines.readline())
            begin_s = time.perf_counter()
            last = int(lines.readline())
            one_save_s = time.perf_counter() - begin_s
            begin_s = time.perf_counter()
            while number % 2 and not list(folder.glob(f"{checkpoint.UNFINISHED}*")):  # surely while it writes
                if time.perf_counter() > begin_s + 5 * one_save_s:
                    break  # the careless writer has no such folder
            time.sleep(draw.uniform(0, one_save_s / (4 if number % 2 else 1)))  # else anywhere within the next one
            process.send_signal(signal.SIGKILL)
            last = int([last, *lines.read().split()][-1])
        halves = list(folder.glob(f"{checkpoint.UNFINISHED}*"))
        broken_off += bool(halves)
        found, refused = checkpoint.newest(folder)
        wrong += refused
        if found is None or found.global_step not in (last, last + 1):
            wrong.append(f"step {last} was saved, newest is {found}")
            continue
        for part, name in enumerate(("state", "ranks")):
            if not np.array_equal(found.arrays(name)["0"], expected(found.global_step, part)):
                wrong.append(f"{found.folder}/{name} holds something else")
        last = found.global_step
        checkpoint.remove_after(folder, last)  # as a run that goes on
    return broken_off, wrong


def test_killed_inside_a_save(tmp_path: Path, count, tally) -> None:
    times = count(15, 200)
    broken_off, wrong = kill_in_saves(tmp_path, times, "ringtrain")
    assert not wrong
    assert broken_off > times // 10, "else the kills came at other times"
    tally(f"{times} kills inside a save", f"{broken_off} left one half written; the newest whole one found each time")


def test_a_save_that_is_not_atomic_is_caught(tmp_path: Path) -> None:
    """The negative control."""
    for name in ("checkpoints", "elsewhere"):
        (tmp_path / name).mkdir()
    assert kill_in_saves(tmp_path / "checkpoints", 12, "naive")[1]


def test_every_region_of_a_checkpoint_is_watched(tmp_path: Path, count, tally) -> None:
    files = {"state": {"0": np.arange(5000.0), "1": np.ones((3, 7), "f4")}, "ranks": {"0/0": np.arange(9)}}
    saved = checkpoint.save(tmp_path, 17, files, {"metrics": {"loss": 1.0}, "numbers": {"global_batch_size": 64}})
    draw, cases = random.Random(3), 0
    regions = count(40, 200)
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        edges = np.linspace(0, len(whole), regions + 1).astype(int)
        for first, end in itertools.pairwise(edges):
            place = draw.randrange(first, max(end, first + 1))
            flipped = bytes([whole[place] ^ draw.randrange(1, 256)])
            damaged = {
                "flipped": whole[:place] + flipped + whole[place + 1 :],
                "cut": whole[:place],
                "left out": whole[:place] + whole[place + 1 :],
            }
            for how, content in damaged.items():
                path.write_bytes(content)
                with pytest.raises(CheckpointError):
                    checkpoint.verify(saved)
                    pytest.fail(f"{path.name}: byte {place} {how}, and not noticed")
                cases += 1
        path.write_bytes(whole)
    checkpoint.verify(saved)
    shutil.rmtree(saved)
    assert cases >= 300
    tally(f"{cases} places of a checkpoint flipped, cut or left out", "all noticed")
