"""Manifests for Kubernetes: an MPIJob (v2beta1) of the MPI Operator, and a TrainJob (v1alpha1) of Kubeflow Trainer.

Both create the hosts, their ssh keys and the hostfile, and have the same pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringtrain.cluster.environment import forwarded, is_private
from ringtrain.cluster.job import Flag, Job, Plan, add_file, check, words
from ringtrain.cluster.plans import mpirun
from ringtrain.errors import LaunchError

HOSTFILE = "/etc/mpi/hostfile"
IMPLEMENTATIONS = {"openmpi4": "OpenMPI", "openmpi5": "OpenMPI", "mpich": "MPICH", "intel": "Intel"}
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,52}[a-z0-9])?")
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?")
LAUNCHER_RESOURCES = {"cpu": "1", "memory": "1Gi"}
"""limits of the container that runs mpirun; a namespace with a quota requires them"""
SECRET = "ringtrain"
"""name of the Secret with the values of variables given by --forward"""
SHARED_MEMORY = "8Gi"
"""size limit of /dev/shm, which NCCL and MPI use between ranks of a worker"""
SSH_HOME = "/home/ringtrain/.ssh"
"""directory of the image user's keys"""
SSHD, SSHD_PORT = "/opt/ringtrain/launch/sshd.sh", 2222
"""command of a worker in ringtrain's image, with a port as its argument, and the default port"""
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"
"""name of the containers that get ssh keys, in both kinds of pods of a TrainJob"""
GROUP = 1000
"""of the image's user, which reads the keys"""
UNPRIVILEGED = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
OF_THIS_MACHINE = ("PATH", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Cluster:
    """Request to the cluster besides the job."""

    image: str = "ringtrain"
    name: str = "ringtrain"
    namespace: str = ""
    """"": kubectl's own"""
    dialect: str = "openmpi4"
    """of the image's mpirun, a key of mpirun.DIALECTS"""
    gpus_per_worker: int = 0
    resources: Mapping[str, str] = field(default_factory=dict)
    """other requests and limits of a worker, e.g. cpu: 8, memory: 32Gi"""


class Commented(tuple[str, ...]):
    """Arguments of one flag, with their reason as a comment in the manifest."""

    reason = ""


def plan(job: Job, cluster: Cluster = Cluster()) -> Plan:
    """Manifest, and the command that applies it. Hosts count by number and slots: workers get the operator's names."""
    return submission(job, cluster, (manifest(job, cluster),), by="MPI Operator")


def submission(job: Job, cluster: Cluster, manifests: Sequence[Mapping[str, Any]], by: str) -> Plan:
    """Plan that applies manifests of objects which a controller of the cluster runs."""
    files: dict[str, str] = {}
    text = "---\n".join("".join(_lines(one)) for one in manifests)
    # The folder of the logs is one of the containers.
    path = add_file(files, replace(job, output=""), "job.yaml", text)
    apply = words("kubectl", "apply", because=f"submits the job to Kubernetes, whose {by} runs it")
    return Plan((apply, words("-f", path, because="the manifest")), (), files=files)


def _check(job: Job, cluster: Cluster) -> None:
    """Raises LaunchError for a job that containers of equal workers cannot run."""
    check(job)
    slots = {host.slots for host in job.hosts}
    if len(slots) != 1:
        raise LaunchError(
            "the workers of a job in Kubernetes all have the same number of ranks: choose hosts with the same slots"
        )
    for what, name in (("name", cluster.name), ("namespace", cluster.namespace or "any")):
        if not LABEL.fullmatch(name):
            raise LaunchError(f"got the {what} {name!r}, expected small letters, digits and '-', 54 at most")
    for name, amount in cluster.resources.items():
        if not QUANTITY.fullmatch(amount):
            raise LaunchError(f"got {amount!r} of the resource {name!r}, expected an amount such as 8, 500m or 32Gi")
    _refuse_local_paths(job)


def _refuse_local_paths(job: Job) -> None:
    """Raises LaunchError for a path in a directory of this machine, which no worker has."""
    local = [job.working_directory, *(job.environment.get(name, "") for name in ("VIRTUAL_ENV", "HOME"))]
    folders = [folder.rstrip("/") for folder in local if folder.rstrip("/")]
    for word in (*job.command, f"--output={job.output}"):
        path = word.rpartition("=")[2]
        if any(path == folder or path.startswith(f"{folder}/") for folder in folders):
            raise LaunchError(
                f"{path} is a path of this machine: containers see what their image holds, and start in its directory:"
                f" give its path there, such as configs/digits.toml"
            )


def manifest(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Manifest of an MPIJob."""
    launcher, worker = pods(job, cluster)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata(cluster),
        "spec": {
            "slotsPerWorker": job.hosts[0].slots,
            "mpiImplementation": IMPLEMENTATIONS[cluster.dialect],
            "sshAuthMountPath": SSH_HOME,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": {"spec": launcher}},
                "Worker": {"replicas": len(job.hosts), "template": {"spec": worker}},
            },
        },
    }


def metadata(cluster: Cluster) -> dict[str, str]:
    """Name of the job, and its namespace if one was given."""
    names = {"name": cluster.name}
    if cluster.namespace:
        names["namespace"] = cluster.namespace
    return names


def pods(
    job: Job, cluster: Cluster, launcher_name: str = "launcher", worker_name: str = "worker"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Specs of the pod that runs mpirun, and of those that run sshd and the ranks. Raises LaunchError."""
    _check(job, cluster)
    kept = {name: value for name, value in job.environment.items() if name not in OF_THIS_MACHINE}
    # Ranks start in the image's directory, not in one of this machine.
    inner = replace(job, working_directory="", environment=kept, allow_root=False, wheel_mpi="")
    names = forwarded(inner)
    # Ranks get the image's PATH, which is forwarded: sshd has another one.
    passed = {**{name: kept[name] for name in names}, "PATH": ""}
    launch = mpirun.plan(replace(inner, environment=passed), cluster.dialect, hostfile=HOSTFILE)
    image = {"image": cluster.image, "imagePullPolicy": "IfNotPresent"}
    launcher = {
        "name": launcher_name,
        **image,
        "command": list(_escaped(launch)),
        "env": _variables(launch, inner, names),
        "securityContext": UNPRIVILEGED,
        "resources": {"limits": LAUNCHER_RESOURCES},
    }

    limits: dict[str, Any] = dict(cluster.resources)
    if cluster.gpus_per_worker:
        limits["nvidia.com/gpu"] = cluster.gpus_per_worker
    sshd = [SSHD, str(job.ssh_port)] if job.ssh_port else [SSHD]
    worker = {
        "name": worker_name,
        **image,
        "command": sshd,
        "readinessProbe": {
            "tcpSocket": {"port": job.ssh_port or SSHD_PORT},
            "initialDelaySeconds": 1,
            "periodSeconds": 2,
        },
        "securityContext": UNPRIVILEGED,
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}
    return {"containers": [launcher]}, {"containers": [worker], "volumes": [volume]}


def _escaped(launch: Plan) -> Iterator[Commented]:
    """Arguments of a plan, escaped so that Kubernetes does not substitute $(NAME)."""
    for flag in (*launch.flags, Flag(launch.command, "command of every rank")):
        part = Commented(word.replace("$", "$$") for word in flag.words)
        part.reason = flag.reason
        yield part


def _variables(launch: Plan, job: Job, names: Sequence[str]) -> list[dict[str, Any]]:
    """Environment of the launcher container: plain values, and a `secretKeyRef` for each forwarded private variable."""
    values = {**{name: job.environment[name] for name in names}, **launch.env}
    variables: list[dict[str, Any]] = []
    for name, value in sorted(values.items()):
        if not is_private(name, job):
            variables.append({"name": name, "value": value.replace("$", "$$")})
        elif name in job.forward:
            variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}})
    return variables


# ---- TrainJob: a runtime of its own describes its pods, one that runs mpirun and one per host, which runs sshd -------


def train_job_plan(job: Job, cluster: Cluster) -> Plan:
    """Manifests of a TrainJob and its runtime, and the command that applies them."""
    return submission(job, cluster, (runtime(job, cluster), train_job(job, cluster)), by="Kubeflow Trainer")


def train_job(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Manifest of the TrainJob, whose runtime has the same name."""
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": metadata(cluster),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": cluster.name},
            "trainer": {"numNodes": len(job.hosts), "numProcPerNode": job.hosts[0].slots},
        },
    }


def runtime(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Manifest of the TrainingRuntime, with the pods of the job."""
    launcher, node = pods(job, cluster, launcher_name=CONTAINER, worker_name=CONTAINER)
    launcher_job = {
        "name": "launcher",
        "dependsOn": [{"name": "node", "status": "Ready"}],
        **_template(launcher),
    }
    # What Kubeflow Trainer adds for the step "trainer" belongs to the pod that knows how the job ends.
    launcher_job["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": {**metadata(cluster), "labels": {"trainer.kubeflow.org/framework": "ringtrain"}},
        "spec": {
            "mlPolicy": {
                "numNodes": len(job.hosts),
                "mpi": {
                    "numProcPerNode": job.hosts[0].slots,
                    "mpiImplementation": IMPLEMENTATIONS[cluster.dialect],
                    "sshAuthMountPath": SSH_HOME,
                    "runLauncherAsNode": False,
                },
            },
            "template": {
                "spec": {
                    "network": {"publishNotReadyAddresses": True},
                    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                    "replicatedJobs": [{"name": "node", **_template(node)}, launcher_job],
                }
            },
        },
    }


def _template(pod: dict[str, Any]) -> dict[str, Any]:
    """Template of a job of such pods."""
    return {"template": {"spec": {"template": {"spec": {"securityContext": {"fsGroup": GROUP}, **pod}}}}}


# ---- YAML ---------------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """String in YAML's double quotes, in ASCII, on one line; Python's escapes are YAML's as well."""
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def _lines(node: Mapping[str, Any] | list[Any], indent: int = 0) -> Iterator[str]:
    """YAML in block style; every string is quoted."""
    space = " " * indent
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = key if PLAIN_KEY.fullmatch(key) else quoted(key)
            if value and isinstance(value, Mapping | list):
                yield f"{space}{name}:\n"
                yield from _lines(value, indent + 2)
            else:
                yield f"{space}{name}: {_scalar(value)}\n"
        return
    for value in node:
        if isinstance(value, Commented):
            comment = f"  # {' '.join(value.reason.split())}"
            for number, word in enumerate(value):
                yield f"{space}- {quoted(word)}{comment * (number == 0)}\n"
        elif isinstance(value, Mapping):
            first, *rest = _lines(value, indent + 2)
            yield f"{space}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{space}- {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[]"
    return "{}"
