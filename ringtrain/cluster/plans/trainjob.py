"""Manifest of a TrainJob (v1alpha1) for Kubeflow Trainer, with a runtime of its own that describes its pods.

Kubeflow Trainer creates the ssh keys and the hostfile as the MPI Operator does. The job has a pod that runs mpirun and
reports its end, and a pod per host, which runs sshd.
"""

from __future__ import annotations

from typing import Any

from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.plans import kubernetes
from ringtrain.cluster.plans.kubernetes import Cluster
from ringtrain.errors import LaunchError

API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"
"""name of the containers that get ssh keys, in both kinds of pods"""
GROUP = 1000
"""of the image's user, which reads the keys"""


def plan(job: Job, cluster: Cluster) -> Plan:
    """Manifest, and the command that applies it."""
    if kubernetes.IMPLEMENTATIONS[cluster.dialect] != "OpenMPI":
        raise LaunchError("Kubeflow Trainer runs Open MPI alone: choose an image with it")
    return kubernetes.submission(job, cluster, (runtime(job, cluster), manifest(job, cluster)), by="Kubeflow Trainer")


def manifest(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Manifest of the TrainJob, whose runtime has the same name."""
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(cluster),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": cluster.name},
            "trainer": {"numNodes": len(job.hosts), "numProcPerNode": job.hosts[0].slots},
        },
    }


def runtime(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Manifest of the TrainingRuntime, with the pods of the job."""
    launcher, node = kubernetes.pods(job, cluster, launcher_name=CONTAINER, worker_name=CONTAINER)
    launcher_job = {
        "name": "launcher",
        "dependsOn": [{"name": "node", "status": "Ready"}],
        **_template(launcher),
    }
    # What Kubeflow Trainer adds for the step "trainer" belongs to the pod that knows how the job ends.
    launcher_job["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {**kubernetes.metadata(cluster), "labels": {"trainer.kubeflow.org/framework": "ringtrain"}},
        "spec": {
            "mlPolicy": {
                "numNodes": len(job.hosts),
                "mpi": {
                    "numProcPerNode": job.hosts[0].slots,
                    "mpiImplementation": kubernetes.IMPLEMENTATIONS[cluster.dialect],
                    "sshAuthMountPath": kubernetes.SSH_HOME,
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
