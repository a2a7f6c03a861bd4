"""Environment variables that `hvd.init` sets for Open MPI, unless they are set already; the version of Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtrain.errors import MissingDependency
from ringtrain.hvd.collectives import prepare_environment
from ringtrain.hvd.process import check_keras

RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("given", "transports"),
    [
        ({}, "^openib,ofi"),
        ({"OMPI_MCA_btl": "self,tcp"}, "self,tcp"),
        (RANK, None),
        (RANK | {"OMPI_MCA_btl": "^openib"}, "^openib,ofi"),
        (RANK | {"OMPI_MCA_btl": "self,vader,tcp"}, "self,vader,tcp"),
    ],
)
def test_the_ofi_transport_is_excluded_unless_transports_are_given(given, transports, tmp_path: Path) -> None:
    environ = dict(given)
    prepare_environment(environ, tmp_path, num_cores=2, nccl=False)
    assert environ.get("OMPI_MCA_btl") == transports


def test_mpi_yields_the_processor_if_ranks_use_all_cores(tmp_path: Path) -> None:
    yielding = "OMPI_MCA_mpi_yield_when_idle"
    for cores, chosen, expected in ((2, {}, "1"), (8, {}, None), (2, {yielding: "0"}, "0")):
        environ = RANK | chosen
        prepare_environment(environ, tmp_path, num_cores=cores, nccl=False)
        assert environ.get(yielding) == expected


def test_an_old_keras_is_refused_in_one_line() -> None:
    for version in ("3.15.0", "3.15.1", "3.16.0.dev2026112500", "4.0.0rc1"):
        check_keras(version)
    with pytest.raises(MissingDependency, match=r"^ringtrain.hvd needs Keras 3.15 or later, got 3.9.2: .+$"):
        check_keras("3.9.2")
