"""Device of a rank: one GPU per local rank; without GPUs, its share of the host's cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from ringtrain.config.sections import Config, DeviceConfig
from ringtrain.errors import DeviceError
from ringtrain.protocol.cores import cores_of_job, count_cores, num_threads
from ringtrain.protocol.env import SLOT


@dataclass(frozen=True)
class Pinning:
    """Device, memory limit and threads of one rank."""

    gpu: int | None = None
    """Index in TensorFlow's list of this host's GPUs; None: CPU."""
    memory_growth: bool = False
    memory_mb: int = 0
    """0: no limit."""
    num_threads: int = 0
    """CPU threads; 0: TensorFlow's default."""
    num_devices: int = 1
    """Devices of this process: this GPU and the following ones, or logical CPUs."""

    def __str__(self) -> str:
        several = f"{self.num_devices} times " if self.num_devices > 1 else ""
        if self.gpu is None:
            threads = "thread" if self.num_threads == 1 else "threads"
            return f"{several}CPU, {self.num_threads} {threads}"
        memory = "memory as needed" if self.memory_growth else "all its memory"
        if self.memory_mb:
            memory = f"{self.memory_mb} MB"
        if several:
            return f"{several}GPU, {memory}"
        return f"GPU {self.gpu}, {memory}"


KERNEL_SETTINGS = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_", "DNNL_", "XLA_FLAGS", "TF_XLA_FLAGS", "TF_CUDNN_", "NVIDIA_TF32")
"""environment variables, by their beginnings, with which TensorFlow chooses other kernels"""

PINNED: list[Pinning] = []
"""devices of this process, if it has several: TensorFlow cannot change them later"""


def plan(
    gpus: Sequence[Any],
    local_rank: int,
    local_size: int,
    options: DeviceConfig,
    own_cores: int,
    host_cores: int,
    host: str,
    num_devices: int = 1,
) -> Pinning:
    """Plans a rank's GPUs by its local rank, and its share of the host's cores; DeviceError: too few GPUs."""
    share = max(1, host_cores // (local_size * num_devices))
    num_threads = options.threads or max(1, min(own_cores, share))
    if not gpus:
        return Pinning(num_threads=num_threads, num_devices=num_devices)
    if num_devices > 1:
        # A launcher that shows each rank its own GPUs shows it no more than these.
        first = 0 if len(gpus) == num_devices else local_rank * num_devices
        if first + num_devices > len(gpus):
            noun = "rank" if local_size == 1 else "ranks"
            raise DeviceError(
                f"{host}: {local_size} {noun} with {num_devices} devices each, but {len(gpus)}"
                f" GPUs: start fewer ranks on this host, or take fewer devices"
            )
    else:
        first = local_rank % len(gpus)
        if local_size > len(gpus) > 1 and not options.share_gpus:
            raise DeviceError(
                f"{host}: {local_size} ranks, but {len(gpus)} GPUs: start no more ranks on this host than it has GPUs,"
                f" or let them share with --device.share-gpus"
            )
    memory_growth = options.memory_growth and not options.memory_mb
    return Pinning(first, memory_growth, options.memory_mb, num_threads, num_devices)


def decide(
    local_rank: int,
    local_size: int,
    options: DeviceConfig,
    environ: Mapping[str, str] = os.environ,
    num_devices: int = 1,
) -> Pinning:
    """Plans the devices of this rank as `pin` does, without configuring TensorFlow."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    own_cores, _ = count_cores()
    host_cores, host = cores_of_job(local_size, environ), socket.gethostname()
    return plan(gpus, local_rank, local_size, options, own_cores, host_cores, host, num_devices)


def coordinate(local_size: int, options: DeviceConfig) -> Pinning:
    """Gives a process without a copy of the model its share of the host's cores, and no GPU."""
    import tensorflow as tf

    pinning = plan([], 0, local_size, options, *count_cores(), socket.gethostname())
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(pinning.num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(pinning.num_threads + 1)
    return pinning


def pin(
    local_rank: int,
    local_size: int,
    options: DeviceConfig,
    environ: Mapping[str, str] = os.environ,
    num_devices: int = 1,
    one_thread: bool = False,  # then bits do not depend on the number of threads
) -> Pinning:
    """Configures TensorFlow for this rank's devices, before anything uses one; raises DeviceError, as `plan` does."""
    import tensorflow as tf

    try:
        gpus = tf.config.list_physical_devices("GPU")
        pinning = decide(local_rank, local_size, options, environ, num_devices)
        tf.config.threading.set_intra_op_parallelism_threads(1 if one_thread else pinning.num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(pinning.num_threads * num_devices)
        if one_thread and pinning.gpu is not None:
            tf.config.experimental.enable_op_determinism()
        if pinning.gpu is not None:
            of_rank = range(pinning.gpu, pinning.gpu + num_devices)
            tf.config.set_visible_devices([gpus[index] for index in of_rank], "GPU")
            for index in of_rank:
                _limit_memory(gpus[index], pinning)
        elif num_devices > 1:
            (cpu,) = tf.config.list_physical_devices("CPU")
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
    except DeviceError:  # without GPUs, ranks can still exchange it
        tf.config.set_visible_devices([], "GPU")
        raise
    except RuntimeError as error:  # TensorFlow has initialized its devices, differently
        raise DeviceError(f"device: {error}: start a process of its own for this run") from error
    if num_devices > 1:
        PINNED[:] = [pinning]
    return pinning


def pin_rank(config: Config, slot: int, num_slots: int) -> Pinning:
    """Configures TensorFlow for the devices of one of the slots of a host, as a configuration asks for them."""
    num_devices, one_thread = config.model.num_devices, config.train.virtual_ranks > 0
    return pin(slot, num_slots, config.device, num_devices=num_devices, one_thread=one_thread)


def device_of_sums(options: DeviceConfig) -> str:
    """Device of a reduction, "": that of the gradients. CPU:0 with shared GPUs: NCCL allows one rank per GPU."""
    return "CPU:0" if options.share_gpus else ""


def pin_late(
    local_rank: int, local_size: int, options: DeviceConfig, num_devices: int = 1, one_thread: bool = False
) -> Pinning:
    """Pins as `pin`, in a script that may have built its model: TensorFlow then keeps the devices that it has."""
    import tensorflow as tf

    if PINNED:  # by the script's own call, with a number of devices
        return PINNED[-1]
    try:
        return pin(local_rank, local_size, options, num_devices=num_devices, one_thread=one_thread)
    except DeviceError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
    visible, gpus = tf.config.get_visible_devices("GPU"), tf.config.list_physical_devices("GPU")
    if not visible:
        threads = num_threads(tf.config.threading.get_intra_op_parallelism_threads())
        if options.threads not in (0, threads):
            raise DeviceError(
                f"device.threads: got {options.threads}, but TensorFlow has started with {threads} in this script: call"
                f" ringtrain.start(options) before the model is built"
            )
        return Pinning(num_threads=threads)
    if local_size > 1 and len(visible) > 1:
        raise DeviceError(
            f"{socket.gethostname()}: this process has built its model on the first of {len(visible)} GPUs, as all"
            f" ranks of this host do: call ringtrain.start() before the model is built"
        )
    if one_thread:
        tf.config.experimental.enable_op_determinism()
    return Pinning(gpu=gpus.index(visible[0]))


def slot() -> int:
    """Number of this rank's slot on its host: the local rank, unless ranks are missing, which keep their GPUs."""
    from ringtrain import hvd

    return int(os.environ.get(SLOT, hvd.local_rank()))


def pin_script(options: DeviceConfig, num_devices: int = 1, one_thread: bool = False) -> Pinning:
    """Pins this rank in a script, on all ranks together unless they join and leave: others may then be training."""
    from ringtrain import hvd

    place = slot(), hvd.local_size()
    if hvd.elastic.is_on():
        return pin_late(*place, options, num_devices, one_thread)
    return hvd.run_together(lambda: pin_late(*place, options, num_devices, one_thread))


def missing_gpu(pinning: Pinning, nccl: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Returns a warning where Horovod is built for GPUs and a rank has none, unless GPUs are hidden; else ""."""
    if pinning.gpu is not None or not nccl or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    return (
        f"{socket.gethostname()}: Horovod is built for GPUs (NCCL), but TensorFlow finds none: training runs on CPUs."
        f" Check nvidia-smi and that tensorflow[and-cuda] is installed, or set CUDA_VISIBLE_DEVICES= to hide GPUs"
    )


def _limit_memory(gpu: Any, pinning: Pinning) -> None:
    import tensorflow as tf

    if pinning.memory_mb:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=pinning.memory_mb)
        tf.config.set_logical_device_configuration(gpu, [limit])
    else:
        tf.config.experimental.set_memory_growth(gpu, pinning.memory_growth)


def identity(pinning: Pinning, environ: Mapping[str, str] = os.environ, driver: Any = None) -> str:
    """Returns the UUID of a rank's GPU, else its index on the host, to detect shared GPUs; "" for the CPU."""
    if pinning.gpu is None:
        return ""
    uuid, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        cuda = driver or ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), pinning.gpu)
        if not (failed or cuda.cuDeviceGetUuid(ctypes.byref(uuid), device)):
            return f"GPU-{UUID(bytes=bytes(uuid))}"
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if pinning.gpu < len(visible):
        return f"GPU {visible[pinning.gpu]}"
    return f"GPU {pinning.gpu}"


def of_kernels(
    pinning: Pinning, environ: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")
) -> dict[str, str]:
    """Returns what decides which kernels compute: with others, results differ in the last bits."""
    import tensorflow as tf

    first_processor = cpuinfo.read_text().split("\n\n")[0]
    facts = {}
    for line in first_processor.splitlines():
        name, _, text = line.partition(":")
        facts[name.strip()] = text.strip()
    flags = facts.get("flags", facts.get("Features", ""))
    processor = f"{facts.get('model name', 'unknown')} (instructions with checksum {zlib.crc32(flags.encode()):08x})"
    if pinning.gpu is not None:
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[pinning.gpu])
        processor += f" with {details.get('device_name', 'an unknown GPU')}"
    chosen = sorted(name for name in environ if name.startswith(KERNEL_SETTINGS))
    settings = " ".join(f"{name}={environ[name]}" for name in chosen)
    return {"processor": processor, "setting of kernels": settings or "none", "TensorFlow": tf.__version__}
