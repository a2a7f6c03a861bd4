"""A bucket in memory behind a network that loses and delays, with the methods of fsspec that the mirror uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulation.world import Host, World

from ringtrain.run import checkpoint

TIMEOUT_S = 15.0
"""seconds after which a client gives a request up"""
LATE_S = 40.0
"""seconds for which a request whose client has given it up may still be under way, at most"""


class Bucket:
    """Objects by name. A write is seen whole or not at all, at the moment at which it arrives; of files, in two parts.

    Attributes:
        has_conditions: Whether a write can be refused because the object exists.
        has_files: Whether it is a shared file system in place of an object store.
        on_change: Called after each change, with the host that made it and the object's name.
    """

    def __init__(self, world: World, has_conditions: bool = True, has_files: bool = False) -> None:
        self.world, self.has_conditions, self.has_files = world, has_conditions, has_files
        self.objects: dict[str, bytes] = {}
        self.on_change: Callable[[Host, str], None] = lambda host, name: None

    def put(self, host: Host, name: str, content: bytes, only_new: bool = False) -> None:
        if only_new and self.has_conditions and name in self.objects:
            raise FileExistsError(name)
        self.objects[name] = content
        self.world.note(host.name, f"has written {name}")
        self.on_change(host, name)

    def remove(self, host: Host, name: str) -> None:
        if name in self.objects:
            del self.objects[name]
            self.world.note(host.name, f"has removed {name}")
            self.on_change(host, name)

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def whole_steps(self, folder: str) -> dict[str, int]:
        """Steps of the checkpoints that can be loaded, by the names of their folders."""
        found = {}
        manifests = [name for name in self.objects if name.startswith(folder) and name.endswith(checkpoint.MANIFEST)]
        for name in manifests:
            parent = name.rpartition("/")[0]
            try:
                manifest = json.loads(self.objects[name].partition(b"\n")[2])
            except ValueError:  # half of it
                continue
            is_whole = all(
                hashlib.sha256(self.objects.get(f"{parent}/{file}", b"")).hexdigest() == facts["sha256"]
                for file, facts in manifest["files"].items()
            )
            if is_whole:
                found[parent] = int(manifest["global_step"])
        return found


class Network:
    """Faults of the requests of one host. Requests to a shared file system arrive in order or not at all."""

    def __init__(self, host: Host, error_rate: float, has_files: bool) -> None:
        self.host, self.error_rate = host, error_rate
        self.fates = ["refused", "slow"]
        if not has_files:
            self.fates += ["lost", "answer lost", "late"]
        self.cut_until_s = 0.0
        self.pause: Callable[[], None] = lambda: None
        """called before a request and after its answer, where a process may be frozen"""

    def request(self, what: str, act: Callable[[], Any]) -> Any:
        """Lets an action happen at the bucket, after a while, or not at all, or although an error is returned."""
        world, draw = self.host.world, self.host.world.random
        self.pause()
        if world.now_s < self.cut_until_s:
            self._fail(what, "no route")
        world.sleep(draw.uniform(0.01, 0.2))
        if draw.random() < self.error_rate:
            fate = draw.choice(self.fates)
            if fate == "refused":
                raise OSError("503 Slow Down")
            if fate == "lost":
                self._fail(what, "request lost")
            if fate == "late":
                world.at(world.now_s + draw.uniform(0, LATE_S), lambda: self._act_late(act))
                self._fail(what, "request late")
            if fate == "answer lost":
                act()
                self._fail(what, "answer lost")
            world.sleep(draw.uniform(0, TIMEOUT_S))
        if world.now_s < self.cut_until_s:
            self._fail(what, "no route")
        result = act()
        world.sleep(draw.uniform(0.01, 0.2))
        self.pause()
        return result

    def _fail(self, what: str, why: str) -> None:
        self.host.world.note(self.host.name, f"{what}: {why}")
        self.host.world.sleep(TIMEOUT_S)
        raise OSError(f"timed out ({why})")

    def _act_late(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError:
            self.host.world.note(self.host.name, "late request is refused")


class Store:
    """File system of fsspec for a host."""

    protocol = "s3"

    def __init__(self, bucket: Bucket, network: Network, on_write: Callable[[Host, str], None]) -> None:
        self.bucket, self.network, self.on_write = bucket, network, on_write
        self.host = network.host

    def invalidate_cache(self, path: str | None = None) -> None: ...

    def find(self, path: str) -> list[str]:
        prefix = f"{path.rstrip('/')}/"
        return self.network.request(
            "list", lambda: sorted(name for name in self.bucket.objects if name.startswith(prefix))
        )

    def cat_file(self, path: str) -> bytes:
        return self.network.request(f"read {path}", lambda: self.bucket.get(path))

    def pipe_file(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        self.network.request(
            f"write {path}", lambda: self.bucket.put(self.host, path, content, only_new=mode == "create")
        )

    def put_file(self, source: str, path: str) -> None:
        self.on_write(self.host, path)
        content = Path(source).read_bytes()
        if self.bucket.has_files:
            half = content[: len(content) // 2]
            self.network.request(f"write half of {path}", lambda: self.bucket.put(self.host, path, half))
        self.network.request(f"write {path}", lambda: self.bucket.put(self.host, path, content))

    def get_file(self, path: str, target: str) -> None:
        Path(target).write_bytes(self.network.request(f"read {path}", lambda: self.bucket.get(path)))

    def rm_file(self, path: str) -> None:
        self.network.request(f"remove {path}", lambda: self.bucket.remove(self.host, path))

    def rmdir(self, path: str) -> None: ...
