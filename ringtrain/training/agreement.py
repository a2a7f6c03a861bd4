"""Agreement of the ranks before training: the same placement, code, options and data."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config, option_types, value_of
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from ringtrain.data import DataSet
    from ringtrain.training.run import Run

PACKAGE = Path(__file__).parents[1]


def of_code(config: Config, versions: Mapping[str, str]) -> dict[str, str]:
    """Returns this rank's versions, and checksums of ringtrain's files and of the user's modules."""
    checksums = {f"version of {name}": version for name, version in versions.items()}
    files = sorted(PACKAGE.rglob("*.py"))
    checksums |= {f"ringtrain/{path.relative_to(PACKAGE)}": checksum_of(path) for path in files}
    # Modules that the configuration names, by their files: they are not imported here.
    model = config.model
    for name in (config.data.name, model.name, model.loss, *model.metrics, *config.train.callbacks):
        module, colon, _ = name.partition(":")
        path = _path_of(module) if colon else None
        if path is not None:
            checksums[f"module {module}"] = checksum_of(path)
    return checksums


DIVIDED = " (fit divides it itself)"
"""end of the names of data that scripts for Horovod divide themselves"""


def of_data(data_set: DataSet) -> dict[str, str]:
    """Checksums of training and validation data."""
    splits = {"training data": data_set.train, "validation data": data_set.test}
    return {f"{name}{DIVIDED}": f"with checksum {split.checksum():08x}" for name, split in splits.items()}


def checksum_of(path: Path) -> str:
    """Returns the CRC-32 of a file as text."""
    return f"with checksum {zlib.crc32(path.read_bytes()):08x}"


def refuse(of_ranks: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raises ConfigError with the first rank that differs from rank 0. `of_ranks`: host and values of each rank."""
    # Versions come before files, whose differences they explain: their names have no slash.
    host_0, first = of_ranks[0]
    for rank, (host, other) in enumerate(of_ranks):
        for name in sorted({*first, *other}, key=lambda name: ("/" in name, name)):
            expected, received = first.get(name, "missing"), other.get(name, "missing")
            # A user's module that only one rank has is a different configuration, which another check reports.
            if expected != received and not (name.startswith("module ") and "missing" in (expected, received)):
                what = f"another {name}"
                advice = f"{received}, not {expected}: bring code, libraries and data to the same state on all hosts"
                if name.endswith(DIVIDED):
                    what = f"other {name.removesuffix(DIVIDED)}"
                    advice = "pass all rows on every rank (no x[rank::size]), and give random data a seed"
                raise ConfigError(f"rank {rank} on {host} has {what} than rank 0 on {host_0}: {advice}")


def _path_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None  # reported where the module is imported
    if spec and spec.origin and spec.has_location:
        return Path(spec.origin)
    return None


def refuse_options(plans: Sequence[tuple[Config, Numbers | None]]) -> None:
    """Raises ConfigError with the first rank and value that differ from rank 0: unequal step counts would hang."""
    # By option, so that a person reads which one to change.
    flat = []
    for config, numbers in plans:
        values = {option: value_of(config, option) for option in option_types()}
        if numbers:
            values |= dataclasses.asdict(numbers)
        flat.append(values)
    for rank, values in enumerate(flat):
        for name, value in values.items():
            if value != flat[0][name]:
                raise ConfigError(
                    f"rank {rank} has {name} {value}, rank 0 has {flat[0][name]}: start all ranks with the same"
                    f" configuration, and give them the same data"
                )


# ---- collectives of all ranks --------------------------------------------------------------------------------------


def same_code(run: Run) -> None:
    """Verifies that all ranks have the same code as rank 0. Collective."""
    from ringtrain import hvd

    refuse(hvd.allgather_object((socket.gethostname(), run.code), name="ringtrain_code"))


def same_job(run: Run) -> None:
    """Verifies that all ranks have the same options, derived numbers and data. Collective."""
    from ringtrain import hvd

    # Options first: data that differ would often follow from them, and name the cause worse.
    refuse_options(hvd.allgather_object((run.config, run.job.numbers), name="ringtrain_numbers"))
    refuse(hvd.allgather_object((socket.gethostname(), run.job.checksums), name="ringtrain_data"))
    # Workers of parameter servers read the data, too, and are no ranks of these collectives. They have no model.
    own = {**run.code, **run.job.checksums}
    for host, others in run.strategy.of_others:
        refuse([(socket.gethostname(), {name: own.get(name, "missing") for name in others}), (host, others)])
