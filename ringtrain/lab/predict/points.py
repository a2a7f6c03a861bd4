"""What is to be predicted, as the command line or a file of measured points names it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ringtrain.config import nearest
from ringtrain.errors import ConfigError
from ringtrain.lab.predict import network, profile
from ringtrain.lab.predict.formulas import Prediction, Setting, calibrated, parameter_servers, predict
from ringtrain.lab.predict.network import TRANSPORTS, Cluster, Link
from ringtrain.lab.predict.profile import Profile
from ringtrain.protocol.json_text import INVALID, parse_json

CHOICES = {
    "transport": tuple(TRANSPORTS),
    "algorithm": tuple(network.ALGORITHMS),
    "compression": ("none", "fp16"),
}


@dataclass(frozen=True)
class Case:
    """A set-up but for its number of ranks. The field's names are keys of a file, and options of ringtrain predict."""

    profile: str = ""
    """path of a profile, as bench train writes it; in a file of points relative to that"""
    model: str = ""
    """instead of a profile: a known model, of whose device only the speed is known"""
    model_images_per_s: float = 0.0
    """of one process with that model"""
    model_batch: int = 64
    """and its batch"""
    jitter: float = -1.0
    """standard deviation of a step as a share; -1: as the profile has it"""
    batch: int = 0
    """per rank; 0: the profile's"""
    link: str = "25Gbps"
    """of each host, or the path of what doctor --json printed or bench allreduce --out wrote"""
    latency_us: float = 25.0
    local_link: str = "10GB/s"
    """between two ranks of a host"""
    local_latency_us: float = 5.0
    ranks_per_host: int = 1
    cores_per_host: float = 0.0
    transport: str = "nccl-tcp"
    calibrate_ranks: int = 0
    """ranks of a measured point on one host, to calibrate copying and adding by; 0: none"""
    calibrate_images_per_s: float = 0.0
    """of that point"""
    algorithm: str = "ring"
    compression: str = "none"
    accumulation: int = 1
    fusion_mb: float = 128.0
    cycle_ms: float = 1.0
    servers: int = 0
    """parameter servers; 0: none"""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: got {getattr(self, name)}, {nearest(getattr(self, name), choices)}")
        for name in ("latency_us", "local_latency_us", "cores_per_host", "batch", "servers", "fusion_mb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        if self.ranks_per_host < 1:
            raise ConfigError(f"ranks_per_host: got {self.ranks_per_host}, expected 1 or more")
        if bool(self.profile) == bool(self.model):
            raise ConfigError(
                "expected either profile, a file that bench train wrote, or model with model_images_per_s"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Case:
        """From keys and values; raises ConfigError for unknown keys and values of another kind."""
        types = get_type_hints(cls)
        for name, value in values.items():
            if name not in types:
                raise ConfigError(f"unknown key {name}: {nearest(name, types)}")
            kinds = (int, float) if types[name] is float else types[name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"{name}: got {value!r}, expected a {types[name].__name__}")
        return cls(**values)

    def read_profile(self, folder: Path) -> Profile:
        """The profile, with this case's batch and jitter.

        Args:
            folder: that its path is relative to.
        """
        if self.model:
            found = profile.known(self.model, self.model_images_per_s, self.model_batch)
        else:
            found = profile.read(folder / self.profile)
        if self.jitter >= 0:
            found = dataclasses.replace(found, jitter=self.jitter, step_s=())
        return found.with_batch(self.batch) if self.batch else found

    def setting(self, num_ranks: int) -> Setting:
        """How it runs on so many ranks."""
        return Setting(
            num_ranks,
            self.algorithm,  # type: ignore[arg-type]  # one of CHOICES
            self.compression,  # type: ignore[arg-type]
            self.accumulation,
            self.fusion_mb,
            self.cycle_ms,
        )

    def cluster(self, step: Profile, folder: Path = Path()) -> Cluster:
        """Where it runs, calibrated where a point for that was given.

        Args:
            folder: that the path of a link is relative to.
        """
        made = Cluster(
            network.read_link(self.link, self.latency_us / 1e6, folder),
            Link(network.parse_rate(self.local_link), self.local_latency_us / 1e6),
            self.ranks_per_host,
            TRANSPORTS[self.transport],
            self.cores_per_host,
        )
        if not self.calibrate_ranks:
            return made
        return calibrated(step, made, self.setting(self.calibrate_ranks), self.calibrate_images_per_s)


@dataclass(frozen=True)
class Point:
    """A measured point beside its prediction."""

    setup: str
    num_ranks: int
    measured: float
    """images/s of all ranks"""
    prediction: Prediction
    fitted: bool
    """it was measured on one rank, or is what the case was calibrated by"""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.prediction.images_per_s / self.measured - 1


def read_points(path: Path) -> list[Point]:
    """Predicts every point of a file.

    Args:
        path: a JSON object. "points" is a list of objects with setup (a name), ranks, images_per_s (measured, of all
            ranks) and keys of Case; or, instead of ranks and images_per_s, with measured, an object of both:
            {"2": 668, "4": 979}. "defaults" holds keys that all points have unless they have their own. Other keys of
            the file are left alone.

    Raises:
        ConfigError: it is something else; names the point.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        defaults, listed = content.get("defaults", {}), list(content["points"])
    except (OSError, *INVALID) as error:
        raise ConfigError(
            f'{path}: {type(error).__name__}: {error}: expected a JSON object with a list "points"'
        ) from None
    points: list[Point] = []
    for number, values in enumerate(listed, start=1):
        try:
            points += _points({**defaults, **values}, path.parent)
        except (ConfigError, *INVALID) as error:
            named = values.get("setup", "") if isinstance(values, dict) else ""
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: point {number} {named}: {what}") from None
    return points


def _points(values: dict[str, Any], folder: Path) -> list[Point]:
    setup = values.pop("setup")
    measured = values.pop("measured", None) or {values.pop("ranks"): values.pop("images_per_s")}
    case = Case.of(values)
    step = case.read_profile(folder)
    cluster = case.cluster(step, folder)
    points = []
    for ranks, images_per_s in measured.items():
        if not float(images_per_s) > 0:
            raise ConfigError(f"got {images_per_s} images/s at {ranks} ranks, expected more than 0")
        setting = case.setting(int(ranks))
        found = (
            parameter_servers(step, cluster, setting, case.servers) if case.servers else predict(step, cluster, setting)
        )
        fitted = setting.num_ranks in (1, case.calibrate_ranks)
        points.append(Point(setup, setting.num_ranks, float(images_per_s), found, fitted))
    return points


def parse_ranks(text: str) -> Sequence[int]:
    """Reads numbers of ranks.

    Args:
        text: such as 1,2,4 or, for all powers of two up to a number and that number, ..128.

    Raises:
        ConfigError: it is neither.
    """
    words = text.removeprefix("..").split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words) or (text.startswith("..") and len(words) > 1):
        raise ConfigError(f"--ranks: got {text}, expected numbers above 0 such as 1,2,4,8, or ..128")
    numbers = sorted({int(word) for word in words})
    if not text.startswith(".."):
        return numbers
    return sorted({2**power for power in range(numbers[0].bit_length())} | {numbers[0]})
