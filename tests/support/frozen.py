"""Checksums of runs, launch plans, help texts and run folders, recorded in a file and compared with it later.

python tests/support/frozen.py record FILE [--only REGEX]     runs all items, or the chosen ones; writes them to FILE
python tests/support/frozen.py compare FILE [--only REGEX]    runs them again; a line per item; exit code 1: some differ
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from launching import BIN, ROOT, run

TIMEOUT_S = 300.0
MAX_LINES = 30
"""printed for an item that differs"""
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py", "rich")

TRAIN = "python -m ringtrain.train --data.name digits --model.name cnn --train.epochs 1 --device.threads 1"
LAUNCH = "python -m ringtrain launch -np 2 -H localhost:2 --"
RECIPE = (
    "--optimizer.name sgd --optimizer.learning-rate 0.05 --optimizer.nesterov --optimizer.weight-decay 0.0005"
    " --optimizer.clip-norm 1 --schedule.name cosine --schedule.warmup-epochs 0.5 --model.label-smoothing 0.1"
    " --model.metrics top-5 --hvd.compression fp16 --hvd.groups 2"
)
FILES = "--tracking.every-steps 5"
RESNET = "--data.name synthetic --data.num-samples 320 --data.image-size 16 --model.name resnet20"
ELASTIC = "python -m ringtrain launch --elastic -H localhost:2 --min-np 2 --max-np 2 --network-interface lo --"
# With more than two ranks, the gradients that travel together decide the order of additions.
RUNS = {
    "ring np 1": TRAIN,
    "ring np 2 MPI": f"horovodrun -np 2 -H localhost:2 {TRAIN}",
    "ring np 2 Gloo": f"horovodrun --gloo -np 2 -H localhost:2 {TRAIN}",
    "ring np 3 MPI": f"env HOROVOD_FUSION_THRESHOLD=0 horovodrun -np 3 -H localhost:3 {TRAIN}",
    "deterministic np 3": f"python -m ringtrain launch -np 3 -H localhost:3 -- {TRAIN} --hvd.deterministic",
    "towers": f"{TRAIN} --strategy.name towers --strategy.towers 2",
    "multi-worker": f"{LAUNCH} {TRAIN} --strategy.name multi-worker",
    "mpi-ring": f"{LAUNCH} {TRAIN} --strategy.name mpi-ring",
    "ps-sync": f"python -m ringtrain launch -H localhost:3 --ps 1 -- {TRAIN} --strategy.name ps-sync",
    "elastic": f"{ELASTIC} {TRAIN}",
    "resumed": f"{LAUNCH} {TRAIN} --train.epochs 2 --chaos 'rank=1 step=25 mode=sigterm'",
    "accumulation": f"{LAUNCH} {TRAIN} --optimizer.accumulation-steps 4 --train.batch-size 8",
    "mixed_float16": f"{LAUNCH} {TRAIN} --train.precision mixed_float16",
    "mixed_bfloat16": f"{LAUNCH} {TRAIN} --train.precision mixed_bfloat16",
    "jit": f"{LAUNCH} {TRAIN} --train.jit",
    "batch norm": f"{LAUNCH} {TRAIN} {RESNET} --model.sync-batch-norm",
    "recipe": f"{LAUNCH} {TRAIN} {RECIPE} {FILES}",
}
EXIT_CODES = {"resumed": (143, 0)}
"""of consecutive starts of a run; of all others: one start, which exits with 0"""
FOLDERS = ("recipe", "resumed", "elastic", "ps-sync")
"""runs whose folder is recorded as well"""

PROGRAM = "-- python -m ringtrain.train --config configs/digits.toml"
LAUNCHERS = ("mpirun", "horovodrun", "horovodrun-gloo", "srun", "sbatch", "mpijob")
SLURM = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3"},
    **{"SLURM_JOB_NODELIST": "n[01-03]", "SLURM_TASKS_PER_NODE": "4(x3)"},
}
LAUNCHES = {
    **{f"two hosts, {name}": f"-H host1:4,host2:4 -np 8 --launcher {name}" for name in LAUNCHERS},
    **{f"this host, {name}": f"-H localhost:2 --launcher {name}" for name in LAUNCHERS[:3]},
    "hostfile": "--hostfile hostfiles/cluster.txt --ssh-port 2222 --threads 2 --bind core --output logs",
    "hostfile, slots chosen": "--hostfile hostfiles/deepspeed.txt --subnet 10.1.0.0/16 --network ucx -np 2",
    "more ranks than slots": "-H host1:1,host2:1 -np 4 --oversubscribe --forward LANG",
    "too few slots": "-H host1:1,host2:1 -np 4",
    "servers": "-H host1:2,host2:3 --ps 1",
    "elastic": "--elastic -H host1:2,host2:2 --min-np 1 --max-np 4 --network-interface eth0 --blacklist-cooldown 5 60",
    "mpijob with GPUs": "-H w0:4,w1:4 --launcher mpijob --gpus 4 --image i:1 --job-name big --resources cpu=8",
    "in a job of Slurm": "",
    "in a job of Slurm, srun": "--launcher srun",
}
HOSTFILES = ("cluster", "deepspeed", "hydra", "ipv6")

COMMANDS = ("train", "launch", "init", "runs", "report", "bench", "sweep", "hosts", "doctor")
BENCHES = ("train", "allreduce")
HELP = (
    *("ringtrain", *(f"ringtrain {name}" for name in COMMANDS), *(f"ringtrain bench {name}" for name in BENCHES)),
    "ringtrain.train",
)


class RunFailedError(Exception):
    """A training ended with an unexpected exit code."""


def items(scratch: Path) -> dict[str, Callable[[], Any]]:
    """Returns a function for each item by its name, the fast ones first; a run that two items need happens once."""

    @functools.cache
    def trained(name: str) -> Path:
        command = f"{RUNS[name]} --run.directory {scratch} --run.name '{name}'"
        for expected in EXIT_CODES.get(name, (0,)):
            ended = start(command, scratch)
            if ended.returncode != expected:
                raise RunFailedError(f"exit code {ended.returncode}, not {expected}\n{ended.stdout}{ended.stderr}")
        return scratch / name

    functions: dict[str, Callable[[], Any]] = {}
    for name in HELP:
        functions[f"help: {name}"] = functools.partial(printed, f"python -m {name} --help", scratch)
    functions["help: all options"] = functools.partial(printed, "python -m ringtrain.train --help all", scratch)
    for name in HOSTFILES:
        command = f"python -m ringtrain hosts --hostfile hostfiles/{name}.txt"
        functions[f"hosts: {name}"] = functools.partial(printed, command, scratch)
    for name in LAUNCHES:
        functions[f"plan: {name}"] = functools.partial(plan, name, scratch)
    for name in RUNS:
        functions[f"run: {name}"] = lambda name=name: result(trained(name))  # type: ignore[misc]
    for name in FOLDERS:
        functions[f"folder: {name}"] = lambda name=name: contents(trained(name))  # type: ignore[misc]
    return functions


def start(command: str, scratch: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line in the root of the repository, with a fixed environment in place of this process' own."""
    environment = {
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(scratch),
        "XDG_RUNTIME_DIR": str(scratch),
        "LANG": "C.UTF-8",
        "COLUMNS": "80",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # else it depends on the number of cores
        **variables,
    }
    return run(0, ["env", "-i", *map("=".join, environment.items()), *shlex.split(command)], TIMEOUT_S)


def printed(command: str, scratch: Path, **variables: str) -> list[str]:
    """Returns the lines that a command prints and its exit code, with placeholders for paths and random names."""
    ended = start(command, scratch, **variables)
    text = ended.stdout + ended.stderr
    for path, placeholder in ((BIN, "<bin>"), (ROOT, "<root>"), (scratch, "<scratch>")):
        text = text.replace(str(path), placeholder)
    text = re.sub("-[0-9a-f]{8}[.]", "-<id>.", text)
    text = re.sub(
        " --allow-run-as-root|^--allow-run-as-root  # .*\n", "", text, flags=re.MULTILINE
    )  # the flag, or its row
    return [*(line.rstrip() for line in text.splitlines()), f"exit code {ended.returncode}"]


def plan(name: str, scratch: Path) -> list[str]:
    """Returns the command that a launch would start, then the reasons of its parts."""
    command = f"python -m ringtrain launch {LAUNCHES[name]}"
    variables = SLURM if "Slurm" in name else {}
    rows = printed(f"{command} --explain {PROGRAM}", scratch, **variables)
    return [*printed(f"{command} --dry-run {PROGRAM}", scratch, **variables), *rows]


def result(folder: Path) -> dict[str, Any]:
    """Returns the checksum and the metrics of a run that has ended."""
    summary = json.loads((folder / "summary.json").read_text())
    return {
        **{key: summary[key] for key in ("checksum", "global_step", "num_ranks", "metrics")},
        "resumed_from": Path(summary["resumed_from"]).name,
        "strategy": summary["config"]["strategy"]["name"],
    }


def contents(folder: Path) -> dict[str, list[str]]:
    """Returns the files of a run, with N for numbers in their names, and each one's keys or members."""
    files: dict[str, set[str]] = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        name = re.sub("tfevents.*", "tfevents", str(path.relative_to(folder)))  # goes on with time and host
        files.setdefault(re.sub("[0-9]+", "N", name), set()).update(members(path))
    return {name: sorted(files[name]) for name in sorted(files)}


def members(path: Path) -> Iterator[str]:
    """Yields the key paths of a TOML, JSON or JSONL file, or the names in an archive; nothing for other files."""
    if path.suffix in (".npz", ".keras"):
        with zipfile.ZipFile(path) as archive:
            yield from archive.namelist()
    elif path.suffix == ".toml":
        yield from key_paths(tomllib.loads(path.read_text()))
    elif path.suffix == ".json":
        text = path.read_text()
        # A manifest starts with a line that has the checksum of the rest.
        yield from key_paths(json.loads(text.partition("\n")[2] if path.name == "manifest.json" else text))
    elif path.suffix == ".jsonl":
        for line in map(json.loads, path.read_text().splitlines()):
            yield from (f"{line.get('event', '')}{key}" for key in key_paths(line))


def key_paths(value: Any, above: str = "") -> Iterator[str]:
    """Yields the paths of all keys inside a value read from JSON, with N for numbers in them and [] for lists."""
    if isinstance(value, list):
        for child in value:
            yield from key_paths(child, f"{above}[]")
    elif isinstance(value, dict):
        for key, child in value.items():
            path = f"{above}.{re.sub('[0-9]+', 'N', key)}"
            yield path
            yield from key_paths(child, path)


def facts() -> dict[str, Any]:
    """Returns the properties of this machine that checksums, or the layout of help texts, may depend on."""
    cpu = dict(re.findall(r"^(model name|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    versions = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in metadata.distributions()}
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "instructions": [flag for flag in sorted(cpu.get("flags", "").split()) if re.match("avx|amx|fma", flag)],
        "python": platform.python_version(),
        "mpi": run(0, [BIN / "mpirun", "--version"], TIMEOUT_S).stdout.partition("\n")[0],
        **{name: versions[name] for name in PACKAGES if name in versions},
    }


def record(file: Path, chosen: re.Pattern[str], scratch: Path) -> int:
    """Writes all items to a file, or replaces the chosen ones in it."""
    revision = run(0, ["git", "describe", "--always", "--dirty"], TIMEOUT_S).stdout.strip()
    old = json.loads(file.read_text()) if chosen.pattern else {"facts": facts(), "items": {}}
    if old["facts"] != facts():
        print(f"{file} is from another machine or other versions: record it without --only")
        return 1
    values = {name: value for name, value in old["items"].items() if not chosen.search(name)}
    for name, item in items(scratch).items():
        if chosen.search(name):
            values[name] = item()
            print(f"recorded  {name}", flush=True)
    written = {"revision": revision, "facts": facts(), "items": dict(sorted(values.items()))}
    file.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return 0


def compare(file: Path, chosen: re.Pattern[str], scratch: Path) -> int:
    """Prints for each item that it is equal, or the lines that differ."""
    recorded, now, different = json.loads(file.read_text()), facts(), []
    for name in sorted(recorded["facts"].keys() | now.keys()):
        if recorded["facts"].get(name) != now.get(name):
            print(f"{name}: {recorded['facts'].get(name)} when recorded, now {now.get(name)}: checksums may differ")
    current = items(scratch)
    for name in filter(chosen.search, [*current, *(recorded["items"].keys() - current.keys())]):
        try:
            value = current[name]() if name in current else "no longer run"
        except RunFailedError as failure:
            value = str(failure).splitlines()
        before, after = (
            json.dumps(one, indent=1, ensure_ascii=False).splitlines() for one in (recorded["items"].get(name), value)
        )
        changes = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        print("DIFFERS" if changes else "equal  ", name, flush=True)
        different += [name] if changes else []
        for line in changes[:MAX_LINES]:
            print(f"    {line}")
        if len(changes) > MAX_LINES:
            print(f"    ... {len(changes) - MAX_LINES} more lines")
    print(f"{len(different)} items differ from revision {recorded['revision']}")
    return int(bool(different))


def main() -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", metavar="REGEX", type=re.compile, default="", help="items whose name matches it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="frozen-") as scratch:
        return {"record": record, "compare": compare}[options.command](options.file, options.only, Path(scratch))


if __name__ == "__main__":
    raise SystemExit(main())
