"""Slurm on a lab's hosts: a slurmctld on host1, a slurmd on every host, munge between them.

    with Lab(2) as hosts, Slurm(hosts) as slurm:
        slurm.run(["srun", "-N2", "hostname"])

All of its files are in the lab's folder, and its daemons are processes of the hosts: they end with the lab. On a host,
Slurm's commands find them as on a real cluster, by /etc/slurm and /run/munge, which the lab's hosts have of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import lab

START_TIMEOUT_S = 60
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "munged": "munge",
}
PMIX = Path(
    "/usr/lib/x86_64-linux-gnu/pmix2/lib"
)  # of libpmix2: Slurm's plug-in loads it, its package does not ask for it
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


def missing() -> str:
    """What this machine lacks for Slurm besides a lab, in words; empty: nothing."""
    packages = {package for tool, package in PACKAGES.items() if not shutil.which(tool, path=lab.SYSTEM_PATH)}
    if not (PMIX / "libpmix.so.2").exists():
        packages.add("libpmix2")
    return f"apt-get install {' '.join(sorted(packages))}" if packages else ""


class Slurm:
    """A cluster of all hosts of a lab, in one partition named main. A context manager."""

    def __init__(self, hosts: lab.Lab, cores: int = 8) -> None:
        """Describes it.

        Args:
            hosts: of the lab, which must be entered before.
            cores: that Slurm believes each host has.
        """
        self.hosts = hosts
        self.cores = cores
        self.folder = hosts.folder / "slurm"

    def __enter__(self) -> Slurm:
        self._write_files()
        # Made by the package, empty, for the administrator's files; each host gets its cluster's there.
        Path("/etc/slurm").mkdir(exist_ok=True)
        try:
            for host in self.hosts.names:
                self.hosts.bind(host, self.folder / "etc", "/etc/slurm")
                self.hosts.bind(host, self.folder / "pmix", PMIX)
                self._daemon(host, ["mkdir", "-p", "/run/munge"])
                key, said = self.folder / "munge.key", self.folder / f"munged.{host}.log"
                files = [f"--key-file={key}", f"--log-file={said}", "--pid-file=/run/munge/munged.pid"]
                self._daemon(host, ["munged", "--force", *files, "--seed-file=/run/munge/munged.seed"])
            self._daemon(self.hosts.names[0], ["slurmctld", "-L", self.folder / "slurmctld.log"])
            for host in self.hosts.names:
                self._daemon(host, ["slurmd", "-N", host, "-L", self.folder / f"slurmd.{host}.log"])
            lab.wait_for(self._all_idle, START_TIMEOUT_S, "Slurm has all its nodes")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every job and daemon on the hosts; their sshd goes on."""
        self.hosts.kill_processes(*self.hosts.names)

    def run(
        self, argv: Sequence[str | Path], timeout_s: float = START_TIMEOUT_S, host: str = "host1", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host; for the options see lab.Lab.run."""
        return self.hosts.run(host, argv, timeout_s, **options)

    def show(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, by name; empty: Slurm does not know it (any more)."""
        said = self.run(["scontrol", "show", "job", "--oneliner", job]).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def wait(self, job: str, states: Collection[str], timeout_s: float) -> dict[str, str]:
        """Waits until a job is in one of some states.

        Returns:
            What scontrol says of it then.

        Raises:
            TimeoutError: it was not, or it has ended otherwise; with the daemons' logs.
        """
        end = time.monotonic() + timeout_s
        while True:
            shown = self.show(job)
            state = shown.get("JobState", "unknown")
            if state in states:
                return shown
            if time.monotonic() > end or state in ENDED:
                raise TimeoutError(f"job {job} is {state}, not {' or '.join(states)}: {shown}\n{self.logs()}")
            time.sleep(0.2)  # each look is a process

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-25:]) for log in found)

    def _all_idle(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--Node", "--format=%T"]).stdout.split()
        return states == ["idle"] * len(self.hosts.names)

    def _daemon(self, host: str, argv: Sequence[str | Path]) -> None:
        """Starts what goes into the background by itself."""
        said = self.folder / f"{argv[0]}.{host}.start"
        with (
            said.open("w") as output,  # not a pipe, which the daemon would hold open
            self.hosts.start(host, argv, stdout=output, stderr=output) as process,
        ):
            code = process.wait(START_TIMEOUT_S)
        if code:
            raise RuntimeError(f"{argv[0]} on {host}: {said.read_text()}\n{self.logs()}")

    def _write_files(self) -> None:
        etc = self.folder / "etc"
        etc.mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # The plug-in looks for a name that only libpmix-dev has, which brings compilers along.
        shutil.copytree(PMIX, self.folder / "pmix", symlinks=True)
        if not (self.folder / "pmix" / "libpmix.so").exists():
            (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
        (self.folder / "state").mkdir()
        for host in self.hosts.names:
            (self.folder / f"spool.{host}").mkdir()
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{self.hosts.names[0]}({self.hosts.address(self.hosts.names[0])})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A job that is requeued waits until what its hosts were told of it has expired; usually two minutes.
            "AuthInfo": "cred_expire=5",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool.%n",
            "SlurmctldPidFile": "/run/slurmctld.pid",
            "SlurmdPidFile": "/run/slurmd.pid",
            "TmpFS": "/run",  # the hosts share /tmp, where they would take each other's files for their own
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",
            "KillWait": "30",
            "ReturnToService": "2",
            "SchedulerParameters": "sched_interval=2,batch_sched_delay=0",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for host in self.hosts.names:
            lines.append(f"NodeName={host} NodeAddr={self.hosts.address(host)} CPUs={self.cores} State=UNKNOWN")
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP")
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
