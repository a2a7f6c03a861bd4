"""Network in `ringtrain doctor`: ssh, host names, subnets."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import shlex
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from ringtrain.cluster.doctor.findings import Cell, Check, Facts, Probe, Scene
from ringtrain.cluster.doctor.probe import attempt, read

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# ---- facts: these functions run on the hosts ---------------------------------------------------------------------


def host_name(wanted: Mapping[str, Any]) -> str:
    return socket.gethostname()


def addresses(wanted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """[[interface, address/prefix], ...]: the first IPv4 address of each interface, and all IPv6 ones."""
    pairs = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address
                address, mask = (fcntl.ioctl(control, number, request)[20:24] for number in (0x8915, 0x891B))
                bits = bin(int.from_bytes(mask, "big")).count("1")
                pairs.append((name, f"{socket.inet_ntoa(address)}/{bits}"))
    for line in (attempt(read, "/proc/net/if_inet6") or "").splitlines():
        digits, _, prefix, _, _, name = line.split()
        pairs.append((name, f"{ipaddress.IPv6Address(int(digits, 16))}/{int(prefix, 16)}"))
    return pairs


def names(wanted: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """Addresses of all hosts' names as this host resolves them, its own under ""; None for an unknown name."""
    meanings: dict[str, list[str] | None] = dict.fromkeys(["", *wanted["names"]])

    def resolve(name: str) -> None:
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(name or socket.gethostname(), None, type=socket.SOCK_STREAM)
            meanings[name] = sorted({str(answer[4][0]) for answer in answers})

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in meanings]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 3
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return dict(meanings)


# ---- rules -------------------------------------------------------------------------------------------------------


def ssh(probe: Probe, scene: Scene) -> Cell:
    if probe.facts is not None:
        return Cell("ok" if probe.remote else "here")
    port = f" -p {scene.ssh_port}" if scene.ssh_port else ""
    known = shlex.quote(f"[{probe.host.name}]:{scene.ssh_port}") if port else "{host}"
    learn = f"ssh-keyscan{port} -H {{host}} >> ~/.ssh/known_hosts  # if you know that the new key is the host's"
    answers = {
        "identification has changed": ("other key", f"ssh-keygen -R {known}; {learn}"),
        "host key verification failed": ("unknown key", learn),
        "permission denied": ("no key", f"ssh-copy-id{port} {{host}}"),
        "connection refused": ("refused", "sudo systemctl start ssh  # on {host}: no sshd listens there"),
        "could not resolve": ("no address", "echo ADDRESS {host} | sudo tee -a /etc/hosts"),
        "timed out": ("no answer", f"ssh -v{port} {{host}} true  # is it on, and does a firewall let port 22 through?"),
        "ssh: no such file": ("no ssh", "sudo apt-get install openssh-client"),
        "python3: not found": ("no Python", "ssh -t {host} sudo apt-get install python3"),
        "": ("no", f"ssh -v{port} {{host}} true"),
    }
    value, fix = next(answer for words, answer in answers.items() if words in probe.error.lower())
    return Cell(value, "error", probe.error, fix, "here")


def check_names(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    meanings, local_name = facts["names"], facts["host_name"]
    value = next(iter(meanings.get("") or ()), "none")
    if len(scene.probes) == 1:
        return Cell(value)
    by_name = {p.host.name: _address(p, scene) for p in scene.probes if p.facts is not None}
    for name, where in meanings.items():
        if not name or name == probe.host.name or name not in by_name:
            continue
        if where is None:
            fix = f"echo {by_name[name] or 'ADDRESS'} {shlex.quote(name)} | sudo tee -a /etc/hosts"
            return Cell(value, "error", f"it cannot resolve the name {name}", fix)
        if all(map(_is_loopback, where)):
            text = f"there the name {name} means {where[0]}, the host itself"
            return Cell(value, "error", text, _rename(name, by_name[name]))
    if meanings.get("") is None:
        text = f"it cannot resolve its own name, {local_name}"
    elif any(map(_is_loopback, meanings[""])):
        text = f"its own name, {local_name}, means {value} there: a rank that gets this address connects to itself"
    else:
        return Cell(value)
    return Cell(value, "warning", text, _rename(local_name, _address(probe, scene)))


def check_subnet(probe: Probe, facts: Facts, scene: Scene) -> Cell:
    nets = ", ".join(str(interface.network) for interface in _interfaces(facts)) or "none"
    look = "ip -br address  # is the host's cluster interface up?"
    if scene.subnet:
        inside = [i.ip for i in _interfaces(facts) if i.ip in ipaddress.ip_network(scene.subnet, strict=False)]
        if inside:
            return Cell(str(inside[0]))
        text = f"no address in {scene.subnet}, given by --subnet; this host is in {nets}"
        return Cell("none", "error", text, look)
    if len(scene.answers) == 1:
        return Cell("alone")
    shared = shared_subnets(scene)
    if shared:
        return Cell(str(shared[0]))
    text = f"no subnet contains all hosts; this host is in {nets}: if routers connect them, give --subnet CIDR"
    return Cell("none", "warning", text, look)


def shared_subnets(scene: Scene) -> list[Network]:
    """Subnets in which each host has a distinct address, first those that host names resolve to."""
    seen: dict[Network, set[str]] = {}
    answers = [facts for facts in scene.answers if facts["addresses"] is not None]
    for facts in answers:
        for interface in _interfaces(facts):
            seen.setdefault(interface.network, set()).add(str(interface.ip))
    # A container bridge has the same address on every host and connects none of them.
    everywhere = [net for net, distinct in seen.items() if len(distinct) == len(answers)]
    named: list[Any] = []
    for probe in scene.probes:
        named += map(ipaddress.ip_address, _known_as(probe, scene))

    def order(net: Network) -> tuple[int, int, str]:
        return -sum(address in net for address in named), net.version, str(net)

    return sorted(everywhere, key=order)


def _interfaces(facts: Facts) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Addresses of a host that other hosts may reach."""
    interfaces = [ipaddress.ip_interface(address) for _, address in facts["addresses"] or ()]
    reachable = []
    for interface in interfaces:
        is_local = interface.is_loopback or interface.is_link_local
        if not is_local and interface.network.num_addresses > 1:
            reachable.append(interface)
    return reachable


def _known_as(probe: Probe, scene: Scene) -> list[str]:
    """Non-loopback addresses to which the other hosts resolve a host's name."""
    meanings: dict[str, None] = {}
    for other in scene.probes:
        if other.facts is not None and other is not probe:
            names = other.facts["names"] or {}
            meanings |= dict.fromkeys(names.get(probe.host.name) or ())
    return [address for address in meanings if not _is_loopback(address) and "%" not in address]


def _address(probe: Probe, scene: Scene) -> str:
    """Address of a host for the others: in the best shared subnet, else the one its name resolves to; "" if unknown."""
    interfaces = _interfaces(probe.facts) if probe.facts is not None else []
    addresses = []
    for net in shared_subnets(scene)[:1]:
        addresses += [str(interface.ip) for interface in interfaces if interface.ip in net]
    addresses += _known_as(probe, scene)
    return addresses[0] if addresses else ""


def _rename(name: str, address: str) -> str:
    """Command that maps a name to an address in /etc/hosts and removes it from the loopback lines."""
    return rf"sudo sed -i -e '/^127\./s/\b{re.escape(name)}\b//' -e '$a {address or 'ADDRESS'} {name}' /etc/hosts"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


CHECKS = {
    "name": Check(check_names, (names, host_name)),
    "subnet": Check(check_subnet, (addresses,)),
}
