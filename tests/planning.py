"""Jobs and planners that tests of plans share, and the text of a plan as tests/golden keeps it.

python tests/planning.py    writes tests/golden/*.txt, launch/slurm.sbatch and launch/mpijob.yaml anew
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ringtrain.cluster.hosts import Host  # noqa: E402
from ringtrain.cluster.job import Job, Plan, explain  # noqa: E402
from ringtrain.cluster.plans import horovodrun, kubernetes, mpirun, slurm  # noqa: E402 - also runs as a script
from ringtrain.errors import LaunchError  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
VALUE = "sesame-open"
"""of every variable here: it must not turn up on a command line"""
ENVIRONMENT = dict.fromkeys(
    (
        *("HOME", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "EDITOR", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TF_API_KEY"),
        *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    ),
    VALUE,
)
COMMAND = ("python", "-m", "ringtrain.train", "--config", "configs/fashion_mnist.toml")

TWO_HOSTS = Job(COMMAND, 8, (Host("host1", 4), Host("host2", 4)), ENVIRONMENT)
JOBS = {
    "one host": Job(COMMAND, 2, (Host("localhost", 2),), ENVIRONMENT, yield_when_idle=True),
    "two hosts": TWO_HOSTS,
    "uneven hosts": replace(TWO_HOSTS, num_ranks=3, hosts=(Host("host1", 1), Host("host2", 2))),
    "by subnet": replace(TWO_HOSTS, subnet="10.1.0.0/16"),
    "InfiniBand": replace(TWO_HOSTS, network="ucx"),
    "root, port, threads on cores of their own": replace(
        TWO_HOSTS, allow_root=True, ssh_port=2222, threads_per_rank=4, bind="core"
    ),
    "a secret, logs, more ranks than slots": replace(
        TWO_HOSTS, forward=("HF_TOKEN",), output="/logs/run 1", working_directory="/data/it's here", oversubscribe=True
    ),
    "64 hosts by full names": replace(
        TWO_HOSTS, num_ranks=64, hosts=tuple(Host(f"n{number:02d}.example.org") for number in range(64))
    ),
    "supervised": replace(TWO_HOSTS, id="0123", attempt='{"number": 1}'),
    "awkward words": replace(TWO_HOSTS, command=("python", "a b.py", "it's", '"', "$HOME", "`id`", "two\nlines", "ü")),
}
OF_MANIFESTS = ("two hosts", "uneven hosts", "a secret, logs, more ranks than slots", "awkward words")
"""the rest of a manifest is mpirun's line, which has a file of its own"""


def _elastic(job: Job) -> Plan:
    return horovodrun.elastic(job, min_ranks=1, max_ranks=2 * job.num_ranks)


PLANNERS: dict[str, Callable[[Job], Plan]] = {
    **{f"mpirun-{name}": lambda job, name=name: mpirun.plan(job, name) for name in mpirun.DIALECTS},  # type: ignore[misc]
    "horovodrun": horovodrun.plan,
    "horovodrun-gloo": lambda job: horovodrun.plan(job, gloo=True),
    "horovodrun-elastic": _elastic,
    "srun": slurm.srun,
    "sbatch": slurm.sbatch,
    **{
        f"mpijob-{name}": lambda job, name=name: kubernetes.plan(job, kubernetes.Cluster(dialect=name))  # type: ignore[misc]
        for name in mpirun.DIALECTS
    },
    "trainjob": lambda job: kubernetes.train_job_plan(job, kubernetes.Cluster()),
}

EXAMPLE = Job(COMMAND, 8, (Host("localhost", 8),))
EXAMPLE_OF_WORKERS = Job(COMMAND, 8, (Host("worker-0", 4), Host("worker-1", 4)))


def examples() -> dict[Path, str]:
    """The files in launch/ that are what the planners print, for one job."""
    (script,) = slurm.sbatch(EXAMPLE).files.values()
    name, tasks = "#SBATCH --job-name=ringtrain\n", "#SBATCH --ntasks=8\n"
    script = script.replace(name, f"{name}#SBATCH --time=1-00:00:00\n#SBATCH --nodes=2\n")
    script = script.replace(tasks, f"{tasks}#SBATCH --ntasks-per-node=4\n")
    (manifest,) = kubernetes.plan(EXAMPLE_OF_WORKERS, kubernetes.Cluster(gpus_per_worker=4)).files.values()
    return {ROOT / "launch" / "slurm.sbatch": script, ROOT / "launch" / "mpijob.yaml": manifest}


def described(launcher: str) -> str:
    """What a planner makes of each job: every row of its explanation and every file, or its refusal."""
    planner, parts = PLANNERS[launcher], []
    for name, job in JOBS.items():
        if launcher.startswith(("mpijob", "trainjob")) and name not in OF_MANIFESTS:
            continue
        parts.append(f"======== {name}")
        try:
            plan = planner(job)
        except LaunchError as error:
            parts.append(f"refused: {error}")
            continue
        parts += [f"{words}  # {reason}" for words, reason in explain(plan)]
        parts += [f"---- {path}\n{text}----" for path, text in plan.files.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for name in PLANNERS:
        (GOLDEN / f"{name}.txt").write_text(described(name))
    for path, text in examples().items():
        path.write_text(text)
