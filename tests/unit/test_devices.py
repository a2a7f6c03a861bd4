"""Which device a rank gets, decided from lists of devices that are not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ringtrain.config.sections import DeviceConfig
from ringtrain.errors import DeviceError
from ringtrain.protocol import cores
from ringtrain.training.devices import Pinning, count_cores, identity, missing_gpu, plan


def decide(num_gpus, local_rank, local_size, own_cores=8, host_cores=8, **options):
    gpus = [f"gpu {index}" for index in range(num_gpus)]
    return plan(gpus, local_rank, local_size, DeviceConfig(**options), own_cores, host_cores, "host7")


@pytest.mark.parametrize(
    ("num_gpus", "local_size", "options", "expected"),
    [
        (4, 4, {}, [0, 1, 2, 3]),
        (4, 2, {}, [0, 1]),
        (2, 4, {"share_gpus": True}, [0, 1, 0, 1]),
        (1, 4, {}, [0, 0, 0, 0]),  # its launcher shows each rank one of its own, as Slurm's --gpus-per-task does
    ],
)
def test_the_gpu_of_each_local_rank(num_gpus, local_size, options, expected):
    assert [decide(num_gpus, rank, local_size, **options).gpu for rank in range(local_size)] == expected


def test_more_ranks_than_gpus_is_an_error_naming_host_and_counts():
    with pytest.raises(DeviceError, match=r"^host7: 3 ranks, but 2 GPUs: .*--device.share-gpus$"):
        decide(2, 0, 3)


def test_memory_grows_unless_it_is_limited():
    assert decide(1, 0, 1) == Pinning(gpu=0, memory_growth=True, num_threads=8)
    assert decide(1, 0, 1, memory_growth=False) == Pinning(gpu=0, num_threads=8)
    assert decide(1, 0, 1, memory_mb=500) == Pinning(gpu=0, memory_mb=500, num_threads=8)


@pytest.mark.parametrize(
    ("num_gpus", "own_cores", "host_cores", "local_size", "threads", "expected"),
    [
        (0, 8, 8, 3, 0, 2),
        (0, 2, 2, 4, 0, 1),  # more ranks than cores
        (0, 1, 8, 2, 0, 1),  # bound to one core by the launcher
        (0, 16, 32, 4, 0, 8),  # bound to a socket
        (0, 8, 8, 2, 3, 3),  # asked for
        (4, 32, 32, 4, 0, 8),
    ],
)
def test_cores_are_divided(num_gpus, own_cores, host_cores, local_size, threads, expected):
    assert decide(num_gpus, 0, local_size, own_cores, host_cores, threads=threads).num_threads == expected


def test_ranks_of_a_gpu_build_without_a_gpu_are_warned():
    assert "CUDA_VISIBLE_DEVICES=" in missing_gpu(Pinning(num_threads=1), True, {})
    assert "CPUs" in missing_gpu(Pinning(num_threads=1), True, {"CUDA_VISIBLE_DEVICES": "0"})
    for given in (
        (Pinning(num_threads=1), True, {"CUDA_VISIBLE_DEVICES": ""}),
        (Pinning(num_threads=1), False, {}),
        (Pinning(gpu=0), True, {}),
    ):
        assert missing_gpu(*given) == ""


def test_a_containers_limit_counts(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert count_cores(quota) == (1, 1)
    quota.write_text("50000 100000\n")
    assert count_cores(quota) == (1, 1)
    quota.write_text("max 100000\n")
    assert count_cores(quota) == count_cores(tmp_path / "missing")


OF_A_HOST = "OMPI_COMM_WORLD_LOCAL_SIZE"


@pytest.mark.parametrize(
    ("environ", "own", "expected"),
    [
        ({OF_A_HOST: "4"}, 8, "2"),
        ({OF_A_HOST: "2", "RINGTRAIN_HOST_SLOTS": "4"}, 8, "2"),
        ({OF_A_HOST: "2"}, 1, "1"),  # bound by its launcher
        ({OF_A_HOST: "1", "RINGTRAIN_HOST_SLOTS": "4"}, 8, "2"),
        ({OF_A_HOST: "1", "RINGTRAIN_FOR_SCRIPT": '{"options": {"train.virtual_ranks": 2}}'}, 8, "1"),
        ({OF_A_HOST: "4", "RINGTRAIN_FOR_SCRIPT": "junk"}, 8, "2"),
        ({OF_A_HOST: "2", "TF_NUM_INTRAOP_THREADS": "7"}, 8, None),
        ({OF_A_HOST: "2", "TF_NUM_INTEROP_THREADS": "7"}, 8, None),
        ({OF_A_HOST: ""}, 8, None),
        ({}, 8, None),
    ],
)
def test_ranks_of_a_host_divide_its_cores_before_tensorflow_starts(monkeypatch, environ, own, expected):
    monkeypatch.setattr(cores, "count_cores", lambda: (own, 8))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", None)
    before = dict(environ)
    cores.share_cores(environ)
    assert environ == (before if expected is None else {**before, cores.INTRA_OP: expected, cores.INTER_OP: expected})


def test_threads_that_tensorflow_has_started_stay(monkeypatch):
    started = SimpleNamespace(context=lambda: SimpleNamespace(_initialized=True))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", started)
    environ = {OF_A_HOST: "2"}
    cores.share_cores(environ)
    assert environ == {OF_A_HOST: "2"}


def test_a_wrapper_of_a_bound_rank_is_not_taken_for_its_launcher(monkeypatch, tmp_path):
    """bash under mpirun, whose cores are the host's; above it, a shell that has more, which do not count."""
    cores_of = {0: {0, 1}, 30: {0, 1}, 20: {0, 1, 2, 3}, 10: set(range(8))}
    for process, parent, name in ((30, 20, "bash"), (20, 10, "mpirun"), (10, 1, "bash")):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "comm").write_text(f"{name}\n")
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name} a) S {parent} 0 0\n")
    monkeypatch.setattr(cores, "PROCESSES", tmp_path)
    monkeypatch.setattr(cores.os, "getppid", lambda: 30)
    monkeypatch.setattr(cores.os, "sched_getaffinity", cores_of.__getitem__)
    assert cores.count_cores(tmp_path / "missing") == (2, 4)


def test_a_gpu_is_known_by_its_place_on_the_host_if_the_driver_tells_no_uuid():
    driver = SimpleNamespace(cuInit=lambda flags: 100)
    assert identity(Pinning(gpu=1), {}, driver) == "GPU 1"
    assert identity(Pinning(gpu=1), {"CUDA_VISIBLE_DEVICES": "2,GPU-abc"}, driver) == "GPU GPU-abc"
    assert identity(Pinning(num_threads=2)) == ""
