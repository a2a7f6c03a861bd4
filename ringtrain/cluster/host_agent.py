"""Host agent: a shell script on each host of a job, over ssh, that checks the host, forwards signals and cleans up.

At the launcher's order, or without a heartbeat from it for LEASE_S, the agent kills every process on its host with the
job's ID in its environment, whatever started it.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import shlex
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringtrain.protocol import as_main
from ringtrain.protocol.env import JOB, LEASE
from ringtrain.protocol.status import STATUS_FILES, STATUS_LENGTH

SAYS = "ringtrain-agent:"
LEASE_S = int(os.environ.get(LEASE, 30))
"""seconds without the launcher's heartbeat after which an agent cleans up"""
BEAT_S = LEASE_S / 6
PATIENCE_S = 2
"""seconds for launchers whose ranks were killed to exit by themselves and remove their files"""
ALIVE_S, ALIVE_COUNT = 3, 5
"""interval in seconds, and number, of ssh's keep-alive messages to a silent host before it gives up"""
LOOK_UP_S, MAX_LOOKING_UP = 10.0, 256
"""seconds for looking up all host names, and number of concurrent look-ups"""
OWN_CONNECTION = {
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
}
"""options of ssh: a shared connection has its own keep-alive, which hides that a host is lost; no host gets the user's
keys or display"""

# A signal would end these wrappers, so it goes to the program that they started. They catch SIGINT to wait for a child,
# which a terminal signals as well. A script's process has its own name, and is recognized by its program.
WRAPPERS = " | ".join(
    [f"{program}:*" for program in ("sh", "bash", "dash", "ksh*", "zsh", "make")]
    + [f"*:{name}" for name in ("uv", "conda", "mamba", "micromamba")]
)
# Shell functions for signal $number. caught: whether a process catches it. catches: the processes that do. takers: the
# outermost of these processes and their children that are no wrappers, or catch it. hand_on: signals the processes of
# the rank of $1 that catch it, or fails.
SIGNALLING = f"""
caught() {{
    bits=$(sed -n 's/^SigCgt:.*\\(........\\)$/\\1/p' "/proc/$1/status" 2>/dev/null)
    [ $((0x${{bits:-0}} >> (number - 1) & 1)) = 1 ]
}}
catches() {{ for process; do ! caught "$process" || echo "$process"; done; }}
takers() {{
    for process; do
        program=$(readlink "/proc/$process/exe" 2>/dev/null)
        case ${{program##*/}}:$(cat "/proc/$process/comm" 2>/dev/null) in
        {WRAPPERS})
            if [ "$number" = {int(signal.SIGINT)} ] || ! caught "$process"; then
                takers $(grep -ls "^PPid:[[:space:]]*$process\\$" /proc/[0-9]*/status | cut -d/ -f3)
                continue
            fi ;;
        esac
        echo "$process"
    done
}}
hand_on() {{
    chosen=$(catches $(takers "$1"))
    [ -n "$chosen" ] && kill -"$number" $chosen
}}
"""

# Arguments: the job's ID, the directory and program of the ranks, their PATH and PYTHONPATH, and whether the program is
# a Python that must have ringtrain. SAYS distinguishes the output from that of a login shell.
SCRIPT = f"""
trap '' HUP INT TERM PIPE
job=$1 folder=$2 program=$3 path=$4 modules=$5 wants_ringtrain=$6
echo  # ends the line of a login shell whose start-up files print one without its end
mine() {{ grep -ls "{JOB}=$job" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }}
daemons() {{
    for process in $(mine); do
        parent=$(sed -n "s/^PPid:[[:space:]]*//p" "/proc/$process/status" 2>/dev/null)
        case $(cat "/proc/$parent/comm" 2>/dev/null) in
        orted | prted | hydra_pmi_proxy) echo "$parent" ;;
        esac
    done | sort -u
}}
uptime() {{ read -r seconds _ </proc/uptime; echo "${{seconds%%.*}}"; }}  # the clock may be set
# Files of Open MPI, which it leaves where it is killed.
sessions() {{
    for process in $(mine) $others; do
        sed -n 's#^[^/]*\\(/.*/ompi\\.[^/]*/\\(pid\\|jf\\)\\.[0-9]*\\)/.*#\\1#p
            s#^[^/]*\\(/dev/shm/vader_segment\\.[^/ ]*\\)$#\\1#p' "/proc/$process/maps" 2>/dev/null
    done | sort -u
}}
sweep() {{
    others=$(daemons) began=$(uptime)
    files=$(sessions)
    while :; do
        first= then=
        for process in $(mine) $others; do
            name=
            {{ read -r name <"/proc/$process/comm"; }} 2>/dev/null
            case $name in
            "") ;;
            mpirun | mpiexec* | orterun | prterun | orted | prted | hydra_* | srun | ssh) then="$then $process" ;;
            *) first="$first $process" ;;
            esac
        done
        waited=$(($(uptime) - began))
        [ -n "$first$then" ] || [ $waited -lt $least ] || break
        [ $waited -lt {PATIENCE_S} ] || first="$first $then"
        kill -s KILL $first 2>/dev/null
        [ $waited -lt {3 * PATIENCE_S} ] || break
        sleep 0.05
    done
    echo "$files" | while IFS= read -r path; do
        [ ! -O "$path" ] || rm -rf "$path"
    done
}}
boxes() {{
    for box in {STATUS_FILES}-"$job"-*; do
        # Other users of the host may leave files and links of such names.
        [ -f "$box" ] && [ -O "$box" ] && [ ! -L "$box" ] || continue
        rank=${{box##*-}}
        case $rank in
        "" | *[!0-9]*) ;;
        *) echo "{SAYS}box $rank $(head -c {STATUS_LENGTH} "$box" | tr -c "[:alnum:],.:_-" " ")" ;;
        esac
        rm -f "$box"
    done
}}
{SIGNALLING}
networks() {{
    PATH=$PATH:/usr/sbin:/sbin ip -o -4 address show up 2>/dev/null | while read -r _ name _ address _; do
        [ ! -d "/sys/class/net/$name/bridge" ] || address=$address:bridge
        printf " %s" "$address"
    done
}}
killed_for_memory() {{ sed -n "s/^oom_kill //p" /proc/vmstat 2>/dev/null; }}
before=$(killed_for_memory)
version= missing=
cd "$folder" 2>/dev/null || missing=$program
if [ -n "$missing" ]; then
    echo "{SAYS}lacks-folder $(uname -n)"
    exit
elif [ -n "$program" ] && [ -z "$(PATH=$path; command -v "$program")" ]; then
    echo "{SAYS}lacks $(uname -n)"
    exit
elif [ -n "$wants_ringtrain" ]; then
    version=$(PATH=$path; [ -z "$modules" ] || export PYTHONPATH="$modules"
        "$program" -c "import ringtrain; print(ringtrain.__version__)" 2>/dev/null)
    version=${{version:-none}}
fi
echo "{SAYS}networks$(networks)"
set -- ${{SSH_CONNECTION:-}}
case ${{3:-}} in *[!0-9.]*) set -- ;; esac
echo "{SAYS}reached ${{3:-}}"
echo "{SAYS}ready $(uname -n) $version"
# Unless all ranks had started, mpirun may start some here until it is killed on its own host.
least={2 * PATIENCE_S}
# The reader outlives an agent that is killed: what it prints then would be taken for a reason of ssh.
while order=$(timeout -s KILL {LEASE_S} sh -c "IFS= read -r order && echo "'"$order"' 2>/dev/null); do
    case $order in
    end)
        least=0
        break ;;
    "end starting") break ;;
    signal*)
        set -- $order
        number=$2 taken=
        shift 2
        for pair; do
            # The process that a rank has told of, and the first one: in a namespace of their own numbers mean others.
            for process in ${{pair%%:*}} ${{pair##*:}}; do
                grep -qs "{JOB}=$job" "/proc/$process/environ" || continue
                taken=$((taken + 0))
                ! hand_on "$process" || taken=$((taken + 1))
                break
            done
        done
        [ -z "$taken" ] || echo "{SAYS}taken $taken" ;;
    esac
done
sweep
boxes
[ "$(killed_for_memory)" = "$before" ] || echo "{SAYS}memory"
echo "{SAYS}swept$first"
"""


def local_networks(hosts: Iterable[str], reached: Iterable[str] = ()) -> tuple[str, ...]:
    """CIDRs of networks that connect no hosts: those with one address on two hosts, and bridges of a single host."""
    # A host is a text such as "10.1.0.3/16 192.168.122.1/24:bridge"; "": its networks are not known.
    distinct = dict.fromkeys(hosts)  # two names of one machine have the same networks
    places: dict[Any, list[tuple[Any, bool]]] = {}
    for host in distinct:
        for place, is_bridge in interfaces(host):
            if not place.is_loopback:
                places.setdefault(place.network, []).append((place.ip, is_bridge))
    times = Counter(address for seen in places.values() for address, _ in seen)
    # Networks by which hosts reach each other are not local, unless two hosts have the address.
    joining = set()
    for text in reached:
        joining |= {place.ip for place, _ in interfaces(text) if times[place.ip] < 2}
    networks = []
    for network, seen in places.items():
        has_equal_addresses = len({address for address, _ in seen}) < len(seen)
        is_own_bridge = len(seen) == 1 and seen[0][1]
        is_joining = any(address in network for address in joining)
        if (has_equal_addresses or is_own_bridge) and not is_joining:
            networks.append(network)
    return tuple(map(str, sorted(networks))) if len(distinct) > 1 else ()


def interfaces(networks: str) -> list[tuple[ipaddress.IPv4Interface, bool]]:
    """Addresses of a host, and whether each is a bridge's; a host may print anything, and the rest is left out."""
    places = []
    for text in networks.split():
        address, _, kind = text.partition(":")
        with contextlib.suppress(ValueError):
            places.append((ipaddress.IPv4Interface(address), kind == "bridge"))
    return places


def source_address(host: str, family: int = socket.AF_INET, scope: Sequence[int] = ()) -> str:
    """Local address from which packets to a host are sent. Raises OSError without an address or a route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9, *scope))  # sends nothing: the kernel selects the source address
        return str(probe.getsockname()[0])


def argv(
    host: str,
    job: str,
    command: Sequence[str],
    folder: Path,
    path: str,
    modules: str,
    *,
    timeout_s: float,
    port: int = 0,
) -> list[str]:
    """Command that starts a host agent. host "": this one; command (): no check; port 0: ssh's own configuration."""
    program = command[0] if command else ""
    wants_ringtrain = as_main.is_python(command) and any(word.startswith("ringtrain.") for word in command[1:3])
    words = [
        "sh",
        "-c",
        SCRIPT,
        "ringtrain-agent",
        job,
        str(folder),
        program,
        path,
        modules,
        "1" if wants_ringtrain else "",
    ]
    if not host:
        return words
    # On one line, which every login shell understands, csh included.
    script = f'eval "$(echo {base64.b64encode(SCRIPT.encode()).decode()} | base64 -d)"'
    return [*ssh(timeout_s, port), "--", host, shlex.join([*words[:2], script, *words[3:]])]


def ssh(timeout_s: float, port: int = 0) -> list[str]:
    """Command line of an ssh that never prompts, and notices a lost host."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, int(timeout_s))),
        "ServerAliveInterval": str(ALIVE_S),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        **OWN_CONNECTION,
    }
    words = ["ssh", "-T", *(f"-o{name}={value}" for name, value in options.items())]
    if port:
        words += ["-p", str(port)]
    return words


def here(hosts: Iterable[str], timeout_s: float = LOOK_UP_S) -> frozenset[str]:
    """Names that mean this machine, looked up concurrently; those not resolved within `timeout_s` do not."""
    waiting = [*dict.fromkeys(hosts)]
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(IndexError):
            while True:
                name = waiting.pop()
                found.extend([name] if is_here(name) else [])

    # Daemon threads, not a pool, which Python joins at exit: a resolver may take half a minute for each name.
    num_threads = min(len(waiting), MAX_LOOKING_UP)
    threads = [threading.Thread(target=look_up, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return frozenset(found)


def is_here(host: str) -> bool:
    """Returns whether a name means this machine: one of its addresses, or its own name."""
    if host in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, _, _, _, (address, _, *scope) in answers:
        with contextlib.suppress(OSError):  # a local address is its own source address
            if source_address(str(address), family, scope) == address or str(address).startswith("127."):
                return True
    return False
