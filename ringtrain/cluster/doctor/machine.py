"""Hardware and limits in `ringtrain doctor`: GPUs, cores, memory, disk, run directory, shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ringtrain.cluster.doctor.findings import Cell, Check, Facts, Level, Probe, Scene
from ringtrain.cluster.doctor.probe import outcome, read
from ringtrain.cluster.hosts import count

MEMORY_PER_RANK_MB = 1024  # TensorFlow, Keras and a small model take about 0.7 GB
SHM_PER_RANK_MB = 64  # a container's default for all its ranks together, without --shm-size
DISK_MB, DISK_TIGHT_MB = 1024, 10240
# TensorFlow's CUDA 12 runs from driver 525 on. Horovod with NCCL, as launch/setup.sh builds it, contains kernels
# compiled by nvcc 13, the only one on PyPI, which need 580.
OLDEST_DRIVER, OLDEST_DRIVER_NCCL = 525, 580

# ---- facts: these functions run on the hosts ---------------------------------------------------------------------


def gpus(wanted: Mapping[str, Any]) -> list[str]:
    """One entry per GPU, from nvidia-smi, or else from the driver's directory."""
    answer = outcome(wanted["path"], "nvidia-smi", "--query-gpu=name,uuid,memory.total", "--format=csv,noheader")
    if answer and answer["status"] == 0:
        return [line.strip() for line in answer["said"].splitlines() if line.strip()]
    folder = "/proc/driver/nvidia/gpus"
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def driver(wanted: Mapping[str, Any]) -> str | None:
    """Version of NVIDIA's kernel driver, e.g. "580.65.06"; None without a driver."""
    match = re.search(r"Kernel Module\D*([\d.]+)", read("/proc/driver/nvidia/version"))
    return match.group(1) if match else None


def cores(wanted: Mapping[str, Any]) -> int:
    """Number of cores that this process may use, including a container's limit."""
    available = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        allowed_us, period_us = read("/sys/fs/cgroup/cpu.max").split()
        available = min(available, max(1, int(allowed_us) // int(period_us)))
    return available


def memory(wanted: Mapping[str, Any]) -> dict[str, int]:
    """{"total_mb", "available_mb"}, including a container's limit."""
    kb = dict(re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE))
    total, available = int(kb["MemTotal"]) // 1024, int(kb["MemAvailable"]) // 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(read("/sys/fs/cgroup/" + name)) >> 20
            total, available = min(total, limit), min(available, limit)
    return {"total_mb": total, "available_mb": available}


def disk(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{"folder", "free_mb", "writable"} of the run directory, or of its nearest existing parent."""
    folder = os.path.join(wanted["folder"], wanted["run_directory"])
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    free_mb = status.f_bavail * status.f_frsize >> 20
    return {"folder": folder, "free_mb": free_mb, "writable": os.access(folder, os.W_OK | os.X_OK)}


def shared(wanted: Mapping[str, Any]) -> bool | None:
    """Returns whether the run directory has the file that doctor has written there; None: it could not write one."""
    if not wanted["marker"]:
        return None
    return os.path.exists(wanted["marker"])


def shm_mb(wanted: Mapping[str, Any]) -> int:
    status = os.statvfs("/dev/shm")
    return status.f_blocks * status.f_frsize >> 20


# ---- rules -------------------------------------------------------------------------------------------------------


def check_gpus(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    available, slots, version = len(facts["gpus"] or ()), probe.host.slots, facts["driver"]
    if not any(answer["gpus"] for answer in scene.answers):
        return Cell("0")
    value = f"{available}, {version}" if version else str(available)
    if available < slots:
        text = f"{count(slots, 'slot')}, but {count(available, 'GPU')}: each rank needs its own GPU"
        fix = f"{{host}} slots={available}" if available else "# without {host}"
        return Cell(value, "error", text, fix, "file")
    oldest, reason = OLDEST_DRIVER, "TensorFlow's CUDA 12"
    if "NCCL" in (facts["horovod_operations"] or ()):
        oldest, reason = OLDEST_DRIVER_NCCL, "Horovod's CUDA 13"
    if version and int(version.partition(".")[0]) < oldest:
        text = f"driver {version}, {reason} needs {oldest} or newer"
        return Cell(value, "error", text, "sudo apt-get install --only-upgrade nvidia-driver && sudo reboot")
    return Cell(value)


def check_cores(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    available, slots = facts["cores"], probe.host.slots
    if available < slots:
        text = f"{count(slots, 'slot')} on {count(available, 'core')}: ranks wait for each other"
        return Cell(str(available), "warning", text, f"{{host}} slots={available}", "file")
    return Cell(str(available))


def check_memory(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    total, available = facts["memory"]["total_mb"], facts["memory"]["available_mb"]
    needed = probe.host.slots * MEMORY_PER_RANK_MB
    if available >= needed:
        return Cell(_size(available))
    text = f"{_size(available)} of {_size(total)} free for {count(probe.host.slots, 'rank')}, each takes about 1 GB"
    level: Level = "warning" if total >= needed else "error"
    return Cell(_size(available), level, text, f"{{host}} slots={max(1, available // MEMORY_PER_RANK_MB)}", "file")


def check_disk(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    folder, free = facts["disk"]["folder"], facts["disk"]["free_mb"]
    if not facts["disk"]["writable"]:
        return Cell("read-only", "error", f"{folder} is not writable", f"ls -ld {shlex.quote(folder)}")
    if free < DISK_TIGHT_MB:
        level: Level = "error" if free < DISK_MB else "warning"
        fix = f"df -h {shlex.quote(folder)}  # free space, or train with another --run.directory"
        return Cell(_size(free), level, f"{_size(free)} free in {folder}, for checkpoints and logs", fix)
    return Cell(_size(free))


def check_shared(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if len(scene.probes) == 1:
        return Cell("alone")
    if facts["shared"]:
        return Cell("yes")
    text = (
        "the run directory is not shared with this machine: logs of this host's ranks stay there, and a run can"
        " only be resumed with rank 0 on the host it was on"
    )
    folder = shlex.quote(facts["disk"]["folder"]) if facts["disk"] else "FOLDER"
    fix = f"sudo mount -t nfs SERVER:EXPORT {folder}  # or set --run.directory to a shared directory"
    return Cell("no", "warning", text, fix)


def check_shm(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    size, slots = facts["shm_mb"], probe.host.slots
    if slots > 1 and size < slots * SHM_PER_RANK_MB:
        text = f"/dev/shm has {_size(size)} for {slots} ranks, which communicate through it: {SHM_PER_RANK_MB} MB each"
        fix = "sudo mount -o remount,size=8G /dev/shm  # in Docker: docker run --shm-size=8g"
        level: Level = "error" if facts["gpus"] else "warning"
        return Cell(_size(size), level, text, fix)
    return Cell(_size(size))


def _size(mb: int) -> str:
    if mb >= 10240:
        return f"{mb / 1024:.0f} GB"
    if mb >= 1024:
        return f"{mb / 1024:.1f} GB"
    return f"{mb} MB"


CHECKS = {
    "GPUs": Check(check_gpus, (gpus, driver), may_lack=True),
    "cores": Check(check_cores, (cores,)),
    "memory": Check(check_memory, (memory,)),
    "disk": Check(check_disk, (disk,)),
    "shared": Check(check_shared, (shared,)),
    "/dev/shm": Check(check_shm, (shm_mb,)),
}
