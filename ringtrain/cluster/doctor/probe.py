"""Collects facts of one host; doctor sends this source to each host, where Python runs it.

It needs only the standard library of Python 3.8, since a host may lack ringtrain. It imports neither TensorFlow nor
Horovod, reads files where possible, and answers each line of JSON with a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

# Distributions that provide a package; the first one found is used.
DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "horovod": ("horovod",),
    "mpi4py": ("mpi4py",),
}
# C++ classes of Horovod that exist only if it was built with an operation. A stripped library keeps their names.
OPERATIONS = {
    "MPI": b"N7horovod6common13MPIControllerE",
    "Gloo": b"N7horovod6common14GlooControllerE",
    "NCCL": b"N7horovod6common13NCCLAllreduceE",
}
CODE = (".py", ".toml")
MOST_ENTRIES = 20000
PROGRAM_TIMEOUT_S = 8
NAMES_TIMEOUT_S = 3


def facts(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of this host by name; None for a fact that cannot be read.

    Args:
        wanted: "folder" (working directory of ranks), "path" and "python_path" (of ranks), "run_directory", "code"
            (directory to compare), "names" (of all hosts).
    """
    sys.path[:1] = [wanted["folder"], *filter(None, wanted["python_path"].split(os.pathsep))]
    path = os.pathsep.join([os.path.dirname(sys.executable), wanted["path"], os.environ.get("PATH", os.defpath)])
    mpirun = start(shutil.which("mpirun", path=path), "--version")
    query = "--query-gpu=name,uuid,memory.total"
    nvidia_smi = start(shutil.which("nvidia-smi", path=path), query, "--format=csv,noheader")
    found = {
        "host_name": attempt(socket.gethostname),
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "packages": attempt(packages),
        "horovod_operations": attempt(horovod_operations),
        "ringtrain": attempt(ringtrain),
        "code": attempt(hashes, wanted["code"], wanted["run_directory"]),
        "cores": attempt(cores),
        "memory": attempt(memory),
        "disk": attempt(disk, os.path.join(wanted["folder"], wanted["run_directory"])),
        "shm_mb": attempt(shm_mb),
        "ptrace_scope": attempt(lambda: int(read("/proc/sys/kernel/yama/ptrace_scope"))),
        "cma_error": attempt(cma_error),
        "addresses": attempt(addresses),
        "names": attempt(resolved, wanted["names"]),
        "open_files": attempt(resource.getrlimit, resource.RLIMIT_NOFILE),
        "driver": attempt(driver),
        "pci_gpus": attempt(pci_gpus),
    }
    found["mpirun"] = attempt(outcome, mpirun)
    found["gpus"] = attempt(gpus, nvidia_smi)
    return found


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function and returns its result; None if it raises."""
    try:
        return function(*arguments)
    except Exception:  # one failure must not lose the other facts
        return None


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


# ---- programs ----------------------------------------------------------------------------------------------------


def start(program: str | None, *arguments: str) -> subprocess.Popen[bytes] | None:
    """Starts a program whose output `outcome` reads; None if it does not exist or start."""
    if program is None:
        return None
    command, pipe, nothing = [program, *arguments], subprocess.PIPE, subprocess.DEVNULL
    with contextlib.suppress(OSError):
        return subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=subprocess.STDOUT)
    return None


def outcome(process: subprocess.Popen[bytes] | None) -> dict[str, Any] | None:
    """Waits for a process and returns {"program", "said" (output), "status"}; None without a process."""
    if process is None:
        return None
    try:
        said = process.communicate(timeout=PROGRAM_TIMEOUT_S)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        process.kill()
        said = f"no answer in {PROGRAM_TIMEOUT_S} s"
    command: Any = process.args
    return {"program": command[0], "said": said[:400], "status": process.poll()}


# ---- software ----------------------------------------------------------------------------------------------------


def packages() -> dict[str, Any]:
    """{package: {"distribution", "version"}}; None for a package that is not installed."""
    from importlib import metadata

    found: dict[str, Any] = {}
    for package, names in DISTRIBUTIONS.items():
        found[package] = None
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = found[package] or {"distribution": name, "version": metadata.version(name)}
    return found


def folder_of(package: str) -> str:
    """Directory of a package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package)
    return os.path.dirname(spec.origin)


def horovod_operations() -> list[str] | None:
    """Operations that Horovod's TensorFlow library was built with, e.g. ["MPI", "Gloo"]; None without a library."""
    from importlib.machinery import EXTENSION_SUFFIXES

    folder = os.path.join(folder_of("horovod"), "tensorflow")
    for suffix in EXTENSION_SUFFIXES:
        library = os.path.join(folder, "mpi_lib" + suffix)
        if os.path.exists(library):
            with open(library, "rb") as file:
                content = file.read()
            return [name for name, mark in OPERATIONS.items() if mark in content]
    return None


def ringtrain() -> dict[str, Any]:
    """{"version", "folder", "hash", "files"} of the installed ringtrain."""
    folder = folder_of("ringtrain")
    version = re.search(r'^__version__ = "(.+)"$', read(os.path.join(folder, "__init__.py")), re.MULTILINE)
    return {"version": version.group(1) if version else "?", **(hashes(folder, "") or {})}


def hashes(folder: str, leave_out: str) -> dict[str, Any] | None:
    """{"folder", "hash", "files": {name: hash}} of the .py and .toml files in a folder; None if it does not exist.

    Skips environments, hidden folders, caches and `leave_out`, a relative path. With over MOST_ENTRIES entries the
    hash is None.
    """
    if not os.path.isdir(folder):
        return None
    files: dict[str, str] = {}
    entries, together = 0, hashlib.sha256()
    left_out = os.path.normpath(os.path.join(folder, leave_out)) if leave_out else ""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("__pycache__", "node_modules", "site-packages")
            and os.path.join(parent, name) != left_out
            and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
        )
        entries += len(names) + len(folders)
        if entries > MOST_ENTRIES:
            return {"folder": folder, "hash": None, "files": {}}
        for name in sorted(names):
            path = os.path.join(parent, name)
            if name.endswith(CODE) and os.path.isfile(path):
                with open(path, "rb") as file:
                    files[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()[:12]
    for name in sorted(files):
        together.update(f"{files[name]} {name}\n".encode(errors="surrogateescape"))
    return {"folder": folder, "hash": together.hexdigest()[:12], "files": files}


# ---- hardware ----------------------------------------------------------------------------------------------------


def gpus(nvidia_smi: subprocess.Popen[bytes] | None) -> list[str]:
    """One entry per GPU, from nvidia-smi, or else from the driver's directory."""
    answer = outcome(nvidia_smi)
    if answer and answer["status"] == 0:
        return [line.strip() for line in answer["said"].splitlines() if line.strip()]
    folder = "/proc/driver/nvidia/gpus"
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def driver() -> str | None:
    """Version of NVIDIA's kernel driver, e.g. "580.65.06"; None without a driver."""
    found = re.search(r"Kernel Module\D*([\d.]+)", read("/proc/driver/nvidia/version"))
    return found.group(1) if found else None


def pci_gpus() -> int:
    """Number of NVIDIA display devices on the PCI bus, with or without a driver."""
    folder = "/sys/bus/pci/devices"
    kinds = [(read(f"{folder}/{name}/vendor"), read(f"{folder}/{name}/class")) for name in os.listdir(folder)]
    return sum(vendor == "0x10de" and kind.startswith("0x03") for vendor, kind in kinds)


def cores() -> int:
    """Number of cores that this process may use, including a container's limit."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        allowed_us, period_us = read("/sys/fs/cgroup/cpu.max").split()
        count = min(count, max(1, int(allowed_us) // int(period_us)))
    return count


def memory() -> dict[str, int]:
    """{"total_mb", "available_mb"}, including a container's limit."""
    kb = dict(re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE))
    total, available = int(kb["MemTotal"]) // 1024, int(kb["MemAvailable"]) // 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(read("/sys/fs/cgroup/" + name)) >> 20
            total, available = min(total, limit), min(available, limit)
    return {"total_mb": total, "available_mb": available}


def disk(folder: str) -> dict[str, Any]:
    """{"folder", "free_mb", "writable"} of a folder, or of its nearest existing parent."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    free_mb = status.f_bavail * status.f_frsize >> 20
    return {"folder": folder, "free_mb": free_mb, "writable": os.access(folder, os.W_OK | os.X_OK)}


def shm_mb() -> int:
    status = os.statvfs("/dev/shm")
    return status.f_blocks * status.f_frsize >> 20


def cma_error() -> int:
    """Tests whether a process can read a sibling's memory, as MPI's local ranks do: 0, or the errno, e.g. 1 (EPERM)."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"ringtrain"), ctypes.create_string_buffer(10)
    size = ctypes.sizeof(source)
    remote = (ctypes.c_size_t * 2)(ctypes.addressof(source), size)  # an iovec: address, length
    local = (ctypes.c_size_t * 2)(ctypes.addressof(target), size)
    wait, go_on = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(go_on)
        os.read(wait, 1)  # returns when the parent closes its end
        os._exit(0)
    reader = os.fork()
    if reader == 0:
        one = ctypes.c_ulong(1)
        copied = libc.process_vm_readv(owner, ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0))
        os._exit(0 if copied == size else ctypes.get_errno() or 255)
    status = os.waitpid(reader, 0)[1]
    os.close(go_on)
    os.close(wait)
    os.waitpid(owner, 0)
    return status >> 8


# ---- network -----------------------------------------------------------------------------------------------------


def addresses() -> list[list[Any]]:
    """[[interface, address/prefix, Mb/s or None], ...]: the first IPv4 address of each interface, and all IPv6 ones."""
    found: list[list[Any]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address
                address, mask = (fcntl.ioctl(control, number, request)[20:24] for number in (0x8915, 0x891B))
                bits = bin(int.from_bytes(mask, "big")).count("1")
                found.append([name, f"{socket.inet_ntoa(address)}/{bits}", speed_mbps(name)])
    for line in (attempt(read, "/proc/net/if_inet6") or "").splitlines():
        digits, _, prefix, _, _, name = line.split()
        found.append([name, f"{ipaddress.IPv6Address(int(digits, 16))}/{int(prefix, 16)}", speed_mbps(name)])
    return found


def speed_mbps(interface: str) -> int | None:
    speed = attempt(lambda: int(read(f"/sys/class/net/{interface}/speed")))
    return speed if speed and speed > 0 else None


def resolved(names: Iterable[str]) -> dict[str, list[str] | None]:
    """Addresses by name as this host resolves them, its own name under ""; None for an unknown name."""
    found: dict[str, list[str] | None] = dict.fromkeys(["", *names])

    def ask(name: str) -> None:
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(name or socket.gethostname(), None, type=socket.SOCK_STREAM)
            found[name] = sorted({str(answer[4][0]) for answer in answers})

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + NAMES_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return dict(found)


# ---- requests ----------------------------------------------------------------------------------------------------


def serve(mark: str, lines: Iterable[bytes], answers: TextIO) -> None:
    """Answers requests until the input ends, then deletes the files it wrote.

    Args:
        mark: Prefix of each answer, which tells it from output of a login shell.
        lines: One request per line, as JSON: {"do": "facts" | "clock" | "leave" | "find", ...}.
    """
    left = []
    try:
        for line in lines:
            question = json.loads(line.decode())
            answer: Any = None
            if question["do"] == "facts":
                answer = facts(question)
            elif question["do"] == "clock":
                answer = time.time()
            elif question["do"] == "leave":
                with contextlib.suppress(OSError), open(question["path"], "x", encoding="utf-8") as file:
                    left.append(question["path"])
                    answer = file.write(question["text"]) > 0
            elif question["do"] == "find":
                answer = attempt(read, question["path"]) == question["text"]
            answers.write(mark + json.dumps(answer) + "\n")
            answers.flush()
    finally:
        for path in left:
            with contextlib.suppress(OSError):
                os.unlink(path)


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout)
