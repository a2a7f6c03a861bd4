"""Training step of one process: compute time, and when each gradient is ready."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import Any

from ringtrain.config import nearest
from ringtrain.errors import ConfigError
from ringtrain.protocol.json_text import INVALID, parse_json


@dataclass(frozen=True)
class Gradient:
    """Gradient of one weight, reduced by one allreduce."""

    bytes: int
    """in float32, before compression"""
    ready_s: float
    """seconds from the start of the step until the backward pass has computed it"""
    name: str = ""
    shape: tuple[int, ...] | None = None
    """None: not known"""


@dataclass(frozen=True)
class Profile:
    """Step of one process alone, without communication."""

    name: str
    batch_size: int
    """samples per step"""
    compute_s: float
    """mean seconds of forward and backward pass"""
    gradients: tuple[Gradient, ...]
    """in any order; sorted by ready_s"""
    update_s: float = 0.0
    """seconds of the optimizer's update"""
    jitter: float = 0.0
    """standard deviation of compute_s as a fraction of it; used if step_s is empty"""
    step_s: tuple[float, ...] = ()
    """measured seconds of single steps, of compute_s alone or whole steps: only their spread is used"""

    def __post_init__(self) -> None:
        times = (self.compute_s, self.update_s, self.jitter, *self.step_s, *(g.ready_s for g in self.gradients))
        if not all(math.isfinite(value) and value >= 0 for value in times) or not self.compute_s or not self.gradients:
            raise ConfigError(
                f"profile {self.name}: expected gradients, compute_s above 0 and no negative or infinite times"
            )
        if self.batch_size < 1 or any(gradient.bytes < 1 for gradient in self.gradients):
            raise ConfigError(f"profile {self.name}: expected batch_size and every gradient's bytes to be 1 or more")
        late = [gradient for gradient in self.gradients if gradient.ready_s > self.compute_s * (1 + 1e-6)]
        if late:
            raise ConfigError(
                f"profile {self.name}: gradient {late[0].name or '?'} is ready after {late[0].ready_s:g} s, expected it"
                f" within compute_s, {self.compute_s:g} s"
            )
        object.__setattr__(self, "gradients", tuple(sorted(self.gradients, key=lambda gradient: gradient.ready_s)))

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients, before compression."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def images_per_s(self) -> float:
        """Speed of one process alone."""
        return self.batch_size / (self.compute_s + self.update_s)

    def with_batch(self, batch_size: int) -> Profile:
        """Scales the profile to another batch size: compute time is proportional to it, the update is constant."""
        factor = batch_size / self.batch_size
        gradients = tuple(dataclasses.replace(g, ready_s=g.ready_s * factor) for g in self.gradients)
        jitter = self.spread / self.compute_s
        return dataclasses.replace(
            self,
            batch_size=batch_size,
            compute_s=self.compute_s * factor,
            gradients=gradients,
            jitter=jitter,
            step_s=tuple(value * factor for value in self.step_s),
        )

    @property
    def spread(self) -> float:
        """Standard deviation of a step's compute time, in seconds."""
        if len(self.step_s) > 1:
            return pstdev(self.step_s)
        return self.jitter * self.compute_s

    def waiting_s(self, num_ranks: int, num_steps: int = 1) -> float:
        """Expected delay of the slowest of many ranks behind the mean, in seconds; 0 for one rank.

        The expected maximum of a sample: of the measured steps while there are as many of them as ranks, above that in
        proportion to a normal distribution's (Blom, Statistical Estimates and Transformed Beta Variables, 1958). Ranks
        are assumed to be independent.

        Args:
            num_steps: Steps between two waits, whose times add up.
        """
        if len(self.step_s) < 2 or num_steps > 1:
            return self.spread * math.sqrt(num_steps) * expected_maximum(num_ranks)
        ordered, known = sorted(self.step_s), min(num_ranks, len(self.step_s))
        shares = [(place / len(ordered)) ** known for place in range(len(ordered) + 1)]
        highest = sum(value * (upper - lower) for value, lower, upper in zip(ordered, shares, shares[1:], strict=False))
        beyond = 1.0
        if num_ranks > known:
            beyond = expected_maximum(num_ranks) / expected_maximum(known)
        return max(0.0, highest - fmean(ordered)) * beyond

    def to_json(self) -> str:
        """Serializes the profile for from_json."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Parses a profile.

        Args:
            text: JSON object with the fields of this class; gradients is a list of objects with bytes, ready_s and,
                optionally, name. Other keys (versions, machine) are ignored.
        """
        try:
            return cls.from_values(parse_json(text))
        except INVALID as error:
            raise ConfigError(
                f"{source}: {type(error).__name__}: {error}: expected a JSON object with name, batch_size, compute_s"
                f" and gradients, a list of {{bytes, ready_s}}, as bench train writes it"
            ) from None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Profile:
        """Builds a profile from a parsed object; raises the errors of INVALID for other contents."""
        gradients = []
        for entry in values["gradients"]:
            num_bytes, ready_s = int(entry["bytes"]), float(entry["ready_s"])
            shape = entry.get("shape")
            if shape is not None:
                shape = tuple(map(int, shape))
            gradients.append(Gradient(num_bytes, ready_s, entry.get("name", ""), shape))
        return cls(
            name=str(values["name"]),
            batch_size=int(values["batch_size"]),
            compute_s=float(values["compute_s"]),
            gradients=tuple(gradients),
            update_s=float(values.get("update_s", 0.0)),
            jitter=float(values.get("jitter", 0.0)),
            step_s=tuple(float(value) for value in values.get("step_s", ())),
        )


def read(path: Path) -> Profile:
    """Reads a profile from a file; raises ConfigError."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}: expected a profile as bench train writes it") from None


def expected_maximum(num: int) -> float:
    """Expected maximum of `num` standard normal variables: Blom's approximation, exact for one."""
    if num > 1:
        return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))
    return 0.0


# Known models: layers from input to output, as (thousands of weights, outputs that share them, repetitions). A layer's
# compute time is proportional to weights x outputs, which also gives its position in the backward pass.
Layer = tuple[float, int, int]


def _bottlenecks(*blocks: int) -> list[Layer]:
    """ResNet's stages (He et al. 2015, table 1): per block 1x1, 3x3 and 1x1 convolutions of width 64, 128, 256, 512."""
    layers: list[Layer] = [(9.4, 112 * 112, 1)]
    for stage, count in enumerate(blocks):
        width, outputs = 0.064 * 2**stage, (56 >> stage) ** 2
        k = 1000 * width * width
        layers += [(4 * k, outputs, 1), (9 * k, outputs, 1), (4 * k, outputs, 1), (8 * k, outputs, 1)]
        layers += [(4 * k, outputs, 1), (9 * k, outputs, 1), (4 * k, outputs, 1)] * (count - 1)
    return [*layers, (2048.0, 1, 1)]


MODELS: dict[str, tuple[float, list[Layer]]] = {
    # millions of parameters, to which the layers' are scaled; then the layers
    "resnet50": (25.6, _bottlenecks(3, 4, 6, 3)),
    "resnet101": (44.5, _bottlenecks(3, 4, 23, 3)),
    # Simonyan and Zisserman 2014, table 1, column D
    "vgg16": (
        138.4,
        [
            (1.7, 224**2, 1),
            (36.9, 224**2, 1),
            (73.7, 112**2, 1),
            (147.5, 112**2, 1),
            (294.9, 56**2, 1),
            (589.8, 56**2, 2),
            (1179.6, 28**2, 1),
            (2359.3, 28**2, 2),
            (2359.3, 14**2, 3),
            (102760.4, 1, 1),
            (16777.2, 1, 1),
            (4096.0, 1, 1),
        ],
    ),
    # Szegedy et al. 2015, table 1: each block as ten equal convolutions
    "inceptionv3": (
        23.9,
        [
            (0.9, 149**2, 1),
            (9.2, 147**2, 2),
            (5.1, 73**2, 1),
            (138.2, 71**2, 1),
            (27.0, 35**2, 30),
            (115.0, 17**2, 10),
            (129.0, 17**2, 10),
            (169.0, 17**2, 20),
            (214.0, 17**2, 10),
            (170.0, 8**2, 10),
            (504.0, 8**2, 10),
            (607.0, 8**2, 10),
            (2048.0, 1, 1),
        ],
    ),
}
FORWARD_SHARE = 1 / 3
"""fraction of the compute time; the backward pass does this work twice, for inputs and for weights"""
JITTER = 0.02
"""of the known models; two GPUs on one node lost 0.6 and 3.4 %, which is 0.56 of it"""


def known(model: str, images_per_s: float, batch_size: int, jitter: float = JITTER) -> Profile:
    """Profile of a known model on a device of known speed."""
    if model not in MODELS:
        raise ConfigError(f"model: got {model}, {nearest(model, MODELS)}")
    if not images_per_s > 0 or batch_size < 1:
        raise ConfigError(f"{model}: got {images_per_s:g} images/s with batches of {batch_size}, expected more than 0")
    millions, groups = MODELS[model]
    layers: list[tuple[float, int]] = []
    for weights, outputs, count in groups:
        layers += [(weights, outputs)] * count
    scale = millions * 1e6 / sum(weights for weights, _ in layers)
    work = sum(weights * outputs for weights, outputs in layers)
    compute_s = batch_size / images_per_s
    gradients, done = [], 0.0
    for weights, outputs in reversed(layers):
        done += weights * outputs / work
        ready_s = compute_s * min(1.0, FORWARD_SHARE + (1 - FORWARD_SHARE) * done)
        gradients.append(Gradient(round(4 * weights * scale), ready_s))
    return Profile(model, batch_size, compute_s, tuple(gradients), jitter=jitter)
