"""Calls a function on ranks that ringtrain launch starts, and returns its result; what such functions begin with."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ringtrain import data
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.restart import ASKED_TO_STOP
from ringtrain.config import Config
from ringtrain.derived import Numbers, derive
from ringtrain.errors import LaunchError, RingtrainError
from ringtrain.lab import stats
from ringtrain.protocol.failures import report_init
from ringtrain.protocol.launchers import launched_rank
from ringtrain.run import log_capture, setup

if TYPE_CHECKING:
    import keras


Call = Callable[..., Any]
"""as caller() returns it"""


@dataclass(frozen=True)
class Start:
    """Ranks that a command of the lab starts."""

    name: str
    """of the command"""
    launch: LaunchOptions
    launch_words: Sequence[str] = ()
    """options of ringtrain launch that repeat those of the command line"""
    hosts: Sequence[Host] = ()
    """of the command line, for a command that places ranks itself"""

    @property
    def train_args(self) -> tuple[str, ...]:
        """Options of ringtrain.train."""
        return self.launch.command


def caller(start: Start) -> Call:
    """Returns a function that calls a function on ranks, which it starts as the command line says."""

    def call(
        on_ranks: Callable[[Any, Sequence[str]], Any],
        options: Any,
        train_args: Sequence[str] = (),
        num_ranks: int = 0,
        launcher: str = "",
    ) -> Any:
        """Calls on_ranks(options, train_args) on every rank of one start and returns the result of rank 0.

        Args:
            on_ranks: Function of a module; its parameter `options` is annotated with the dataclass.
            options: Dataclass of values that JSON can hold.
            num_ranks: 0: `-np` of the command line, else all slots.
            launcher: "": from the command line.
        """
        from ringtrain.cluster.launch import launch

        with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
            out = Path(folder, "out.json")
            function = f"{on_ranks.__module__}:{on_ranks.__qualname__}"
            command = ["python", "-m", "ringtrain.lab.ranks", function, json.dumps(asdict(options)), str(out)]
            code = launch(
                replace(
                    start.launch,
                    command=(*command, "--", *train_args),
                    np=num_ranks or start.launch.np,
                    launcher=launcher or start.launch.launcher,
                )
            )
            if code in ASKED_TO_STOP:  # a signal also cancels the following starts
                raise SystemExit(code)
            if code:
                raise LaunchError(f"{start.name}: ranks exited with code {code}, see above")
            if not out.exists():
                raise LaunchError(
                    f"{folder} on rank 0's host is not this one: start from that host, or set TMPDIR to a"
                    f" folder that both see"
                )
            return json.loads(out.read_text(encoding="utf-8"), object_hook=stats.Spread.from_json)

    return call


def main(argv: Sequence[str]) -> int:
    """Entry point on ranks: calls `module:function` with the options in a JSON word; rank 0 writes the result."""
    function, given, out, _, *train_args = argv
    log_capture.watch()  # before TensorFlow is loaded, which logs messages
    report_init(launched_rank() or 0)  # some benches compare other ways to meet
    module, _, name = function.partition(":")
    try:
        on_ranks = getattr(importlib.import_module(module), name)
        options = get_type_hints(on_ranks)["options"](**json.loads(given))
        result = on_ranks(options, train_args)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    if not launched_rank():
        Path(out).write_text(json.dumps(result, default=asdict), encoding="utf-8")
    if not {"horovod", "mpi4py"} & set(sys.modules):  # else MPI must be finalized
        sys.stdout.flush()
        os._exit(0)  # TensorFlow's servers may keep a process from exiting
    return 0


def begin(config: Config) -> None:
    """Starts Horovod and pins this rank's device."""
    from ringtrain import hvd
    from ringtrain.run import devices

    hvd.configure(config.hvd)
    hvd.init()
    place = hvd.local_rank(), hvd.local_size()
    pinning = devices.pin(*place, config.device, num_devices=config.model.num_devices)
    device = "" if config.device.share_gpus else devices.identity(pinning)
    hvd.check_placement(device)


@dataclass(frozen=True)
class Training:
    """Data, model and derived numbers of a configuration, for training without a fixed end."""

    config: Config
    named: setup.Named
    data_set: data.DataSet
    numbers: Numbers

    @classmethod
    def of(cls, config: Config) -> Training:
        """Reads the training data of a configuration."""
        from ringtrain import hvd

        named = setup.find(config)
        data_set = named.read_data()
        return cls(config, named, data_set, derive(config, hvd.size(), len(data_set.train), len(data_set.test)))

    def model(self, distributed: bool = True) -> keras.Model:
        """Builds and compiles a new model; see setup.compiled_model."""
        from ringtrain import strategies

        return setup.compiled_model(
            self.named, self.data_set, self.config, self.numbers, strategies.make(self.config), distributed
        )

    def batches(self) -> Any:
        """Batches of this rank, for more epochs than any bench trains."""
        from ringtrain import hvd

        epochs = 10**6 // self.numbers.steps_per_epoch + 1
        batch_size = self.config.train.batch_size
        return data.training_batches(self.data_set.train, batch_size, hvd.rank(), hvd.size(), self.config.seed, epochs)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
