"""What a run of a job has left: weights, slots and metrics, and the samples that all ranks have recorded."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.protocol.json_text import parse_json
from ringtrain.run import checkpoint

LEAST_NORM = 0.01
BY_DESIGN = ("batch normalization", "random layers", "the loss of", "each rank has batches")
"""beginnings of what `ringtrain.fit` says of a model whose weights depend on how a batch is divided"""


@dataclass(frozen=True)
class Outcome:
    """A run of the job."""

    folder: Path
    error: str = ""
    """why it has failed; "": it has not"""
    code: int = 0
    """exit code of its launch"""
    recordings: Path = Path()
    """folder of what `rows.Rows` has written on all ranks"""
    fit: str = ""
    """name of the run"""

    @functools.cached_property
    def last(self) -> checkpoint.Checkpoint:
        """Its last checkpoint."""
        return checkpoint.verify(max((self.folder / "checkpoints").iterdir()))

    def state(self) -> dict[str, NDArray[Any]]:
        """Weights and optimizer at its end."""
        return {name: array for name, array in self.last.arrays("state").items() if name.isdigit()}

    def kinds(self) -> dict[str, str]:
        """Kind of each array of `state`: "weights", or a slot's name."""
        paths = [path for path, *_ in self.last.manifest["variables"]]
        first = next((place for place, path in enumerate(paths) if path.endswith("/iteration")), len(paths))
        kinds = ["weights"] * first + [path.rpartition("_")[2] for path in paths[first:]]
        return {name: kinds[int(name)] for name in self.state()}

    def apart(self, other: Outcome) -> float:
        """Largest distance of an array from that of another run."""
        return apart(self.state(), other.state(), self.kinds())

    @property
    def num_steps(self) -> int:
        return int(parse_json((self.folder / "summary.json").read_text(encoding="utf-8"))["global_step"])

    def metrics(self) -> list[dict[str, float]]:
        """Metrics of its epochs."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        timed = ("epoch", "global_step", "time_s", "train_s", "evaluate_s", "images_per_s", "learning_rate")
        found = []
        for line in lines:
            found.append({name: value for name, value in parse_json(line).items() if name not in timed})
        return found

    def recorded(self) -> list[dict[str, Any]]:
        """Lines of all ranks' `rows.Rows` about this run."""
        found = []
        for file in sorted(self.recordings.glob("*.jsonl")):
            for text in file.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                if line["fit"] == self.fit:
                    found.append(line)
        return found

    def first(self, name: str) -> Any:
        """The first recorded value of a name; None: there is none."""
        return next((line[name] for line in self.recorded() if name in line), None)

    def rows(self) -> dict[int, Counter[int]]:
        """Number of times each sample was trained, by epoch."""
        found: dict[int, Counter[int]] = {}
        for line in self.recorded():
            if "rows" in line:
                found.setdefault(line["epoch"], Counter()).update(line["rows"])
        return found

    def orders(self) -> list[list[int]]:
        """Rows in the order in which they were trained, by rank and epoch."""
        return [line["rows"] for line in self.recorded() if "rows" in line]

    def told(self) -> list[str]:
        """Parts of the model whose results are not, or may not be, those of one process, a phrase each."""
        summary = parse_json((self.folder / "summary.json").read_text(encoding="utf-8"))
        return [*summary.get("unlike_one_process", ()), *summary.get("own_code", ())]

    def unlike_one_process(self) -> list[str]:
        """Parts of the model that depend on how a batch is divided, a phrase each."""
        facts = [line for line in self.recorded() if "seeds" in line]
        by_design = [phrase for phrase in self.told() if phrase.startswith(BY_DESIGN)]
        if by_design:
            return by_design
        phrases = []
        if any(one["seeds"] for one in facts):
            phrases.append("random layers, which draw other numbers on each rank")
        if any(one["batch_norm"] for one in facts):
            phrases.append("batch normalization, which uses each rank's rows")
        return phrases

    def same_bits(self, other: Outcome) -> str:
        """ "" if all bits of weights, slots and metrics are equal, else the first difference."""
        ours, theirs = self.state(), other.state()
        for name, array in ours.items():
            if array.tobytes() != theirs[name].tobytes():
                path = self.last.manifest["variables"][int(name)][0]
                return f"{path} differs by up to {apart({name: array}, theirs, {}):.1e} of its norm"
        if len(self.metrics()) != len(other.metrics()):
            return f"number of epochs differs: {len(self.metrics())} and {len(other.metrics())}"
        for own, others in zip(self.metrics(), other.metrics(), strict=True):
            for name in own:
                if own[name] != others.get(name):
                    return f"metric {name} differs"
        return ""


@dataclass(frozen=True)
class Start:
    """A start of the job, which has a run for each `ringtrain.fit` of a script."""

    folder: Path
    """of the runs"""
    recordings: Path
    error: str = ""
    code: int = 0

    @property
    def fits(self) -> list[str]:
        """Names of the runs, in the order in which they have ended."""
        files = sorted(self.folder.rglob("summary.json"), key=lambda file: file.stat().st_mtime)
        return [str(file.parent.relative_to(self.folder)) for file in files]

    def outcome(self, fit: str) -> Outcome:
        """One of its runs."""
        error = self.error
        if not error and fit not in self.fits:
            error = f"the script has not called ringtrain.fit for {fit} in this start"
        return Outcome(self.folder / fit, error, self.code, self.recordings, fit)


def apart(ours: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]) -> float:
    """Largest distance of two states' arrays, relative to their norms.

    An array of less than `LEAST_NORM` of its kind's norm counts as if it had that: weights whose gradient is zero in
    theory, such as the bias of an attention's keys, are nothing but rounding.
    """
    floats = {name: array for name, array in others.items() if array.dtype.kind == "f" and name in ours}
    norms = {name: float(np.linalg.norm(np.asarray(array, float))) for name, array in floats.items()}
    squares: defaultdict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        squares[kinds.get(name, name)] += norm**2
    distances = [0.0]
    for name, norm in norms.items():
        if ours[name].shape == floats[name].shape:
            least = LEAST_NORM * math.sqrt(squares[kinds.get(name, name)])
            distance = float(np.linalg.norm(np.subtract(ours[name], floats[name], dtype=float)))
            distances.append(distance / max(norm, least, 1e-12))
    return max(distances)
