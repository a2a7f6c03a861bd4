"""Two hosts of a lab, each in the image with launch/sshd.sh, as `docker run --network host` would have them.

    python3 tests/cluster/image_hosts.py FOLDER     # the image's files; image.sh calls this

Four ranks train over both, by both launchers. A host that has not the cluster's key is not believed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lab

TIMEOUT_S = 600
USER = 1000
HOME = "/opt/ringtrain"
TRAIN = "python -m ringtrain.train --config configs/digits.toml --train.epochs 1"


def inside(files: Path, environment: dict[str, str], command: str) -> list[str]:
    """A command as the image's user, among the image's files."""
    words = [f"{name}={value}" for name, value in environment.items()]
    return [
        "chroot",
        f"--userspec={USER}:{USER}",
        str(files),
        "env",
        "-i",
        *words,
        "sh",
        "-c",
        f"cd {HOME} && exec {command}",
    ]


def main(files: Path) -> None:
    environment = {
        "HOME": "/home/ringtrain",
        "PATH": f"{HOME}/.venv/bin:{lab.SYSTEM_PATH}",
        "OPAL_PREFIX": f"{HOME}/.venv",
    }
    keys = files / "keys"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", keys / "id_rsa"], check=True)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", keys], check=True)
    with lab.Lab(2) as hosts:
        servers = []
        for host in hosts.names:
            for source in ("/proc", "/dev", "/dev/shm", "/sys"):
                hosts.bind(host, source, f"{files}{source}")
            hosts.bind(host, "/etc/hosts", files / "etc" / "hosts")
            hosts.run(host, ["chmod", "1777", "/dev/shm"], TIMEOUT_S)
            servers.append(hosts.start(host, inside(files, environment, "launch/sshd.sh")))

        def run(command: str) -> subprocess.CompletedProcess[str]:
            return hosts.run("host1", inside(files, environment, command), TIMEOUT_S, cwd=Path("/"))

        for host in hosts.names:
            lab.wait_for(lambda host=host: run(f"ssh -o BatchMode=yes {host} true").returncode == 0, 60, f"ssh {host}")
        # The lab's own sshd has a key that is not the cluster's.
        expect(run("ssh -o BatchMode=yes -p 22 host2 true"), (255,), "Host key verification failed")
        expect(run(f"horovodrun -np 4 -H host1:2,host2:2 {TRAIN}"), (0,), "4 ranks in step")
        expect(run(f"ringtrain launch -H host1:2,host2:2 -- {TRAIN}"), (0,), "4 ranks in step")
        expect(run("ringtrain doctor -H host1:2,host2:2"), (0, 1), "2 hosts: ")  # 1: with warnings
        for server in servers:
            server.terminate()
            server.wait()


def expect(ended: subprocess.CompletedProcess[str], codes: tuple[int, ...], said: str) -> None:
    """Shows what a command printed, and ends all where it was something else."""
    print(ended.stdout, ended.stderr, sep="\n", flush=True)
    if ended.returncode not in codes or said not in ended.stdout + ended.stderr:
        raise SystemExit(f"{ended.args[-1]}: exit code {ended.returncode}, expected one of {codes} and {said!r}")


main(Path(sys.argv[1]))
