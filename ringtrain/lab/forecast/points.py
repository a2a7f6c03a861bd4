"""Set-ups to predict, from the command line or a file of measured points."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ringtrain.config import nearest
from ringtrain.errors import ConfigError
from ringtrain.lab.forecast import network, profile
from ringtrain.lab.forecast.formulas import Prediction, Setting, calibrated, parameter_servers, predict
from ringtrain.lab.forecast.network import TRANSPORTS, Cluster, Link
from ringtrain.lab.forecast.profile import Profile
from ringtrain.option_rules import COMPRESSION
from ringtrain.options import FILE, NAME, Argument, N, X
from ringtrain.protocol.json_text import INVALID, parse_json

CHOICES = {
    "transport": tuple(TRANSPORTS),
    "algorithm": tuple(network.ALGORITHMS),
}


@dataclass(frozen=True)
class StepOptions:
    """One process' step."""

    profile: Annotated[str, FILE] = ""
    """as bench train writes it, or to be written from a script behind --; in a file of points, a path relative to it"""
    model: Annotated[str, NAME] = ""
    """instead: resnet50, resnet101, inceptionv3 or vgg16"""
    model_images_per_s: Annotated[float, X] = 0.0
    """of that model on one device"""
    model_batch: Annotated[int, N] = 64
    """with this batch"""
    batch: Annotated[int, N] = 0
    """predict for another batch per rank; 0: that of the profile"""
    jitter: Annotated[float, X] = -1.0
    """standard deviation of a step's time, as a share of it; -1: from the profile"""


@dataclass(frozen=True)
class PlaceOptions:
    """Where."""

    link: Annotated[str, Argument("RATE")] = "25Gbps"
    """of a host: 25Gbps, 1.4GB/s, or what doctor or bench allreduce wrote"""
    latency_us: Annotated[float, X] = 25.0
    """of that, one way"""
    local_link: Annotated[str, Argument("RATE")] = "10GB/s"
    """between two ranks of a host"""
    local_latency_us: Annotated[float, X] = 5.0
    """of that, one way"""
    ranks_per_host: Annotated[int, N] = 1
    """ranks of a host"""
    cores_per_host: Annotated[float, X] = 0.0
    """that ranks compute on; 0: each has a GPU"""
    calibrate_ranks: Annotated[int, N] = 0
    """a measured point on one host: so many ranks"""
    calibrate_images_per_s: Annotated[float, X] = 0.0
    """were so fast, all together"""


@dataclass(frozen=True)
class ReductionOptions:
    """How."""

    transport: Annotated[str, NAME] = "nccl-tcp"
    """nccl-tcp, nccl-rdma, mpi, mpi-rdma or gloo"""
    algorithm: Annotated[str, NAME] = "ring"
    """ring, hierarchical, halving: for --reach and parts"""
    compression: Annotated[str, NAME] = "none"
    """none, fp16, bf16, or powersgd:4"""
    local_steps: Annotated[int, N] = 1
    """updates between two reductions"""
    accumulation: Annotated[int, N] = 1
    """steps per update"""
    fusion_mb: Annotated[float, X] = 128.0
    """Horovod's fusion buffer"""
    cycle_ms: Annotated[float, X] = 1.0
    """Horovod's cycle time"""
    servers: Annotated[int, N] = 0
    """also with so many parameter servers"""


@dataclass(frozen=True)
class Case(ReductionOptions, PlaceOptions, StepOptions):
    """Set-up without its number of ranks. The field names are keys of a file and options of ringtrain forecast."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: got {getattr(self, name)}, {nearest(getattr(self, name), choices)}")
        if not COMPRESSION.holds(self.compression):
            raise ConfigError(f"compression: got {self.compression}, expected {COMPRESSION.text}")
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
        """Builds a case from keys and values; raises ConfigError for unknown keys and wrong types."""
        types = get_type_hints(cls)
        for name, value in values.items():
            if name not in types:
                raise ConfigError(f"unknown key {name}: {nearest(name, types)}")
            kinds = (int, float) if types[name] is float else types[name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"{name}: got {value!r}, expected a {types[name].__name__}")
        return cls(**values)

    def read_profile(self, folder: Path) -> Profile:
        """Reads the profile and applies batch and jitter; `folder` is the base of a relative path."""
        if self.model:
            found = profile.known(self.model, self.model_images_per_s, self.model_batch)
        else:
            found = profile.read(folder / self.profile)
        if self.jitter >= 0:
            found = dataclasses.replace(found, jitter=self.jitter, step_s=())
        return found.with_batch(self.batch) if self.batch else found

    def setting(self, num_ranks: int) -> Setting:
        """Settings for a number of ranks."""
        return Setting(
            num_ranks,
            self.algorithm,  # type: ignore[arg-type]  # one of CHOICES
            self.compression,
            self.accumulation,
            self.fusion_mb,
            self.cycle_ms,
            self.local_steps,
        )

    def cluster(self, step: Profile, folder: Path = Path()) -> Cluster:
        """Cluster of the case, calibrated if a point is given; `folder` is the base of a relative link path."""
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
    """Measured point and its prediction."""

    setup: str
    num_ranks: int
    measured: float
    """images/s of all ranks"""
    prediction: Prediction
    fitted: bool
    """measured on one rank, or used for calibration"""

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.prediction.images_per_s / self.measured - 1


def read_points(path: Path) -> list[Point]:
    """Predicts every point of a file.

    Args:
        path: JSON object. "points" is a list of objects with setup (a name), ranks, images_per_s (measured, of all
            ranks) and keys of Case. Instead of ranks and images_per_s, a point may have measured, an object of both:
            {"2": 668, "4": 979}. "defaults" holds default keys of all points. Other keys of the file are ignored.
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
        if case.servers:
            found = parameter_servers(step, cluster, setting, case.servers)
        else:
            found = predict(step, cluster, setting)
        fitted = setting.num_ranks in (1, case.calibrate_ranks)
        points.append(Point(setup, setting.num_ranks, float(images_per_s), found, fitted))
    return points


def parse_ranks(text: str) -> Sequence[int]:
    """Parses numbers of ranks such as 1,2,4, or ..128 for all powers of two below 128 and 128 itself."""
    words = text.removeprefix("..").split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words) or (text.startswith("..") and len(words) > 1):
        raise ConfigError(f"--ranks: got {text}, expected numbers above 0 such as 1,2,4,8, or ..128")
    numbers = sorted({int(word) for word in words})
    if not text.startswith(".."):
        return numbers
    return sorted({2**power for power in range(numbers[0].bit_length())} | {numbers[0]})
