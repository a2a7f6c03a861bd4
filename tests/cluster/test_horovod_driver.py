"""The network services of Horovod's launcher, as an attacker finds them: nothing is run, nothing is told."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attacker
import cloudpickle
import pytest
from horovod.runner.common.util import network, secret
from horovod.runner.elastic import rendezvous as elastic_rendezvous

from ringtrain.cluster import horovod_driver
from ringtrain.protocol import services

PLAIN = ({"lo": [("127.0.0.1", 41000)]}, b"key")
PUT = "/worker_addresses/host1:0"


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Horovod's module of services, of which this test may change its own copy."""
    specification = importlib.util.spec_from_file_location(network.__name__, network.__file__)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, network.__name__, module)
    return module


class Driver:
    """In place of Horovod's ElasticDriver: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def register_worker_server(self, *told: Any) -> None:
        self.told.append(told)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(driver: Driver) -> Iterator[Any]:
    made = horovod_driver.make_rendezvous()()
    made.start(elastic_rendezvous.create_rendezvous_handler(driver))
    made.init([])
    made.listen("127.0.0.1")
    yield made
    made.stop()


def test_a_rank_finds_the_rendezvous_by_its_address(server: Any, driver: Driver) -> None:
    prefix = f"/{server.token}:{server.port}"  # what Gloo and Horovod make of HOROVOD_GLOO_RENDEZVOUS_ADDR
    body = base64.b64encode(cloudpickle.dumps(PLAIN))
    assert attacker.ask("127.0.0.1", server.port, "PUT", prefix + PUT, body)[0] == 200
    assert driver.told == [("host1", 0, *PLAIN)]
    assert attacker.ask("127.0.0.1", server.port, "PUT", f"{prefix}/global/0", b"bytes") == (200, b"")
    assert attacker.ask("127.0.0.1", server.port, "GET", f"{prefix}/global/0") == (200, b"bytes")
    assert attacker.ask("127.0.0.1", server.port, "DELETE", f"{prefix}/global/0")[0] == 200
    assert attacker.ask("127.0.0.1", server.port, "GET", f"{prefix}/global/0")[0] == 404


def test_without_the_secret_nothing_is_told_or_taken(server: Any, driver: Driver, tmp_path: Path) -> None:
    file, port = tmp_path / "made", server.port
    assert {status for status, _ in attacker.attack("127.0.0.1", port, file)} == {403}
    for path in (PUT, f"/wrong:1{PUT}", f"/{server.token[:-1]}{PUT}", "/", "//", f"/%ff{PUT}"):
        assert attacker.ask("127.0.0.1", port, "PUT", path, b"x")[0] == 403
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"GET /\xff\xff:1/global/0 HTTP/1.0\r\n\r\n")
        assert client.recv(100).split()[1] == b"403"
    assert driver.told == []
    assert not file.exists()
    addresses = [address for _, _, _, _, (address, *_) in socket.getaddrinfo(socket.gethostname(), None)]
    for other in {*addresses} - {"127.0.0.1"}:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, port), 2).close()


def test_of_strangers_nothing_is_printed(server: Any, capfd: Any) -> None:
    attacker.knock("127.0.0.1", server.port)
    assert attacker.ask("127.0.0.1", server.port, "GET", f"/{server.token}:1/global/0")[0] == 404
    assert capfd.readouterr().err == ""


def test_a_stranger_is_not_read_beyond_the_first_line(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
        stranger.sendall(b"GET /wrong:1/global/0 HTTP/1.0\r\n")  # and no end of headers
        assert stranger.recv(100).split()[1] == b"403"


def test_a_length_that_cannot_be(server: Any) -> None:
    for length in (b"-1", b"99999999999", str(horovod_driver.MAX_VALUE_BYTES + 1).encode(), b"1e3", b""):
        request = b"PUT /%s:1/global/0 HTTP/1.0\r\nContent-Length: %s\r\n\r\nx" % (server.token.encode(), length)
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.sendall(request)
            assert client.recv(100).split()[1] == b"400"


def test_a_message_of_a_service_is_signed_and_short(copied: ModuleType, tmp_path: Path) -> None:
    key, file = secret.make_secret_key(), tmp_path / "made"
    services.restrict(copied, "127.0.0.1")

    def sent(body: bytes, with_key: bytes = key, length: int | None = None) -> io.BytesIO:
        digest = secret.compute_digest(with_key, body)
        return io.BytesIO(digest + struct.pack("i", len(body) if length is None else length) + body)

    read = copied.Wire(key).read
    assert read(sent(pickle.dumps([1]))) == [1]
    short = io.BytesIO(b"x")
    for wrong in (
        sent(pickle.dumps(attacker.Touch(file)), b"other"),
        sent(b"x", length=-1),
        sent(b"x", length=1 << 30),
        sent(pickle.dumps(bytes(1 << 15))),
        short,
    ):
        with pytest.raises(EOFError):
            read(wrong)
    assert not file.exists()


def test_a_service_listens_on_its_address_alone(copied: ModuleType) -> None:
    services.restrict(copied, services.address_of("lo"))
    key = secret.make_secret_key()
    service = copied.BasicService("named", key, None)
    try:
        assert service._server.server_address[0] == "127.0.0.1"
        client = copied.BasicClient("named", {"lo": [("127.0.0.1", service.get_port())]}, key, 0)
        assert client.addresses()
    finally:
        service.shutdown()


def test_a_silent_connection_keeps_no_service_from_ending(copied: ModuleType) -> None:
    services.restrict(copied, "127.0.0.1")
    service = copied.BasicService("named", secret.make_secret_key(), None)
    with socket.create_connection(("127.0.0.1", service.get_port()), 10):
        while not (at_it := [each for each in threading.enumerate() if "process_request_thread" in each.name]):
            time.sleep(0.01)
        assert all(thread.daemon for thread in at_it), "the process would wait for it"
        ending = threading.Thread(target=service.shutdown, daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive()


def test_the_interface_is_that_of_the_way_to_the_other_hosts() -> None:
    class Settings:
        nics: Any = None
        verbose = 0

    assert horovod_driver.common_interfaces(Settings(), ["localhost", "127.0.0.1"]) == {"lo"}
    assert horovod_driver.common_interfaces(Settings(), ["other"], ["127.0.0.1"]) == {"lo"}
    Settings.nics = {"eth7"}
    assert horovod_driver.common_interfaces(Settings(), ["localhost"]) == {"eth7"}


def test_hosts_that_only_ssh_knows_are_looked_up_as_ssh_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings:
        nics: Any = None
        verbose = 0

    (tmp_path / "config").write_text("Host gpu1\n  HostName nowhere.invalid\nHost gpu2\n  HostName 127.0.0.1\n")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert horovod_driver.common_interfaces(Settings(), [], ["gpu1.invalid", "gpu1", "gpu2"]) == {"lo"}
    # Where Horovod's launcher looks for interfaces, when it runs to there.
    script = (
        "from types import SimpleNamespace; from horovod.runner import launch; from horovod.runner.driver import"
        " driver_service; from ringtrain.cluster import horovod_driver;"
        " settings = SimpleNamespace(nics=None, verbose=0);"
        " launch.run_commandline = lambda: driver_service.get_common_interfaces(settings, [], ['gpu1']);"
        " horovod_driver.main(['-np', '1'])"
    )
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    said = "ringtrain: gpu1: no IPv4 address found from here: give --network-interface NAME\n"
    assert (ended.returncode, ended.stderr.splitlines(keepends=True)[-1]) == (2, said)
    assert "Traceback" not in ended.stderr


def test_a_rank_that_failed_is_reported_without_a_traceback() -> None:
    """As at each end by Ctrl-C over Gloo, and of an elastic job that failed: in two lines that the launcher reads."""
    script = (
        "from horovod.runner import launch; from ringtrain.cluster import horovod_driver\n"
        "def fail(): raise RuntimeError('Horovod detected that one failed:\\nProcess name: a~2[0]\\nExit code: 3\\n')\n"
        "launch.run_commandline = fail; horovod_driver.main(['-np', '1'])"
    )
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False), ended.stderr
    assert "Process name: a[2]\nExit code: 3\n" in ended.stderr
