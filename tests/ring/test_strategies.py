"""The same job under every strategy: equal weights, checkpoints and files; what one cannot do is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import trained
from launching import run
from one_start import run_all
from trained import checkpoints, checksums, cut_off, summary

from ringtrain import strategies
from ringtrain.config.sections import Config, with_values
from ringtrain.errors import ConfigError
from ringtrain.strategies.parameter_server.cluster import OPEN_TO_ALL

HERE = Path(__file__).parent
STEPS, EPOCHS = 23, 2
OPTIONS = ["--data.name", "digits", "--model.name", "odd_model:dropping", "--optimizer.clip-norm", "0.5"]
OPTIONS += ["--train.epochs", str(EPOCHS), "--checkpoint.every-steps", "6", "--checkpoint.keep", "99"]
LIMIT_S = 600
WITHOUT_HOROVOD = """
import sys

sys.modules["horovod"] = None  # to import it raises ModuleNotFoundError
from ringtrain.train import main
sys.exit(main())
"""
RANKS = {"ring": 2, "mpi-ring": 2, "towers": 0, "multi-worker": 2}
"""processes under mpirun; 0: one, without"""
OTHERS = list(RANKS)[1:]


def train(folder: Path, strategy: str, *options: object) -> subprocess.CompletedProcess[str]:
    program = ("-m", "ringtrain.train") if strategy == "ring" else ("-c", WITHOUT_HOROVOD)
    return trained.train(folder, *OPTIONS, "--strategy.name", strategy, *options, np=RANKS[strategy], program=program)


def saved(folder: Path) -> tuple[str, dict]:
    """The last weights and optimizer as a checksum; each copy's random seeds and moving statistics."""
    with np.load(checkpoints(folder)[-1] / "ranks.npz") as file:
        return checksums(folder, EPOCHS * STEPS)["state.npz"], {name: file[name].tolist() for name in file}


def same_state(folder: Path, other: Path) -> bool:
    """Whether two runs ended alike. Keras' global seed is left out: not every strategy has one for each copy."""
    (state, own), (of_other, own_of_other) = saved(folder), saved(other)
    common = own.keys() & own_of_other.keys()
    return state == of_other and len(common) >= 2 and all(own[name] == own_of_other[name] for name in common)


def files(folder: Path) -> set[str]:
    """Without the names that have a time in them, and without the logs of the other ranks, which towers do not have."""
    names = {str(path.relative_to(folder)) for path in (folder / "run").rglob("*") if path.is_file()}
    return {name for name in names if "tfevents" not in name and "-1." not in name}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job under every strategy."""
    folders = {}
    for strategy in RANKS:
        folders[strategy] = tmp_path_factory.mktemp(strategy)
        ended = train(folders[strategy], strategy)
        errors = ended.stderr.splitlines()
        if strategy == "multi-worker":
            assert errors.pop().endswith(OPEN_TO_ALL), ended.stderr
        assert "<stderr>" not in ended.stdout and errors == [], ended.stderr
        copies = "towers" if strategy == "towers" else "ranks"
        assert f"2 {copies} in step: gradients averaged, weights and optimizer equal" in ended.stdout
    return folders


@pytest.mark.parametrize("strategy", OTHERS)
def test_a_strategy_ends_with_the_rings_weights_bit_for_bit_and_its_files(runs: dict[str, Path], strategy: str) -> None:
    """Without Horovod: dropout, batch normalization, clipping, Adam, and what is evaluated and saved.

    The last batch of an epoch has 29 rows, of which the first copy trains 15.
    """
    ring, other = summary(runs["ring"]), summary(runs[strategy])
    assert other["checksum"] == ring["checksum"]
    assert same_state(runs[strategy], runs["ring"])
    assert files(runs[strategy]) == files(runs["ring"])
    assert set(other) == set(ring) and other["num_ranks"] == ring["num_ranks"] == 2
    assert other["metrics"] == pytest.approx(ring["metrics"], abs=1e-6)
    assert other["strategy"]["ranks_talk_by"] == "mpi4py" and "horovod" not in other["versions"]


@pytest.mark.parametrize(("strategy", "before"), list(zip(RANKS, [*OTHERS, "ring"], strict=True)))
def test_a_strategy_goes_on_in_an_epoch_where_another_one_was(
    runs: dict[str, Path], tmp_path: Path, strategy: str, before: str
) -> None:
    folder = cut_off(runs[before], tmp_path / "cut", 30)
    ended = train(folder, strategy)
    assert "after step 30," in ended.stdout
    assert summary(folder)["checksum"] == summary(runs["ring"])["checksum"]
    assert same_state(folder, runs["ring"])
    assert summary(folder)["metrics"] == pytest.approx(summary(runs["ring"])["metrics"], abs=1e-6)


def test_another_seed_ends_elsewhere(runs: dict[str, Path], tmp_path: Path) -> None:
    """The negative control; and three towers without a controller."""
    options = ["--seed", 1, "--strategy.towers", 3, "--strategy.reduction", "all", "--train.epochs", 1]
    ended = train(tmp_path, "towers", *options)
    assert "3 towers in step" in ended.stdout
    assert summary(tmp_path)["checksum"] != summary(runs["ring"])["checksum"]


PROPERTIES = [
    *("agreeing.ranks_fail_together_or_not_at_all", "averaging.sgd_with_momentum_equals_big_batch"),
    *("averaging.without_the_wrapper_they_differ", "precision.only_one_rank_overflows"),
    *("batch_norm.training_equals_big_batch", "names.collectives_have_gradients_and_take_numbers_of_any_shape"),
]


def test_what_the_ring_promises_holds_without_horovod_on_three_ranks(tmp_path: Path) -> None:
    """Properties of tests/ring/properties: to 1e-6 of one process with the whole batch, and their negative control."""
    env = {"RINGTRAIN_COLLECTIVES": "mpi4py", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    wrong = run_all("mpirun", 3, PROPERTIES, tmp_path, **env)
    assert not any(wrong.values()), wrong


BROKEN = """
import sys
from ringtrain import strategies

def make(config, crew=None, make=strategies.make):
    from ringtrain.strategies.mirrored import SumReduction
    SumReduction.__call__ = lambda self, gradients, variables, local: gradients
    return make(config)

strategies.make = make
from ringtrain.train import main
sys.exit(main())
"""


def test_gradients_that_are_not_added_up_are_noticed_before_the_first_step(tmp_path: Path) -> None:
    words = [*OPTIONS, "--strategy.name", "towers", "--run.directory", str(tmp_path)]
    ended = run(0, [sys.executable, "-c", BROKEN, *words], LIMIT_S, {"PYTHONPATH": str(HERE)}, warm=True)
    assert ended.returncode == 2 and "the reduction of 2 ranks gave" in ended.stderr, ended.stderr


def test_strategies_choose_the_collectives() -> None:
    environ: dict[str, str] = {}
    towers = with_values(Config(), {"strategy.name": "towers", "train.precision": "mixed_bfloat16"})
    strategies.prepare(towers, environ)
    assert environ == {"RINGTRAIN_COLLECTIVES": "mpi4py"}
    strategies.prepare(Config(), environ)
    assert environ == {}


def test_data_that_copies_do_not_share_are_refused() -> None:
    from ringtrain import data
    from ringtrain.training import configured, rows

    config = with_values(Config(), {"strategy.name": "towers"})
    rows.check_parts(96, 99, 3, "towers")
    with pytest.raises(ConfigError, match=r"^train.batch_size: a step has 96 rows on 3 towers, .* 2 of 98"):
        rows.check_parts(96, 98, 3, "towers")
    batches = data.FitArguments(x=tf.data.Dataset.range(8).map(lambda number: (number, number)).batch(4))
    of_rows = data.FitArguments(x=np.zeros([8, 2]), y=np.zeros(8))
    assert len(configured.data_of(config, of_rows, 4).train) == 8
    with pytest.raises(ConfigError, match=r"^strategy.name towers and training data that are no arrays"):
        configured.data_of(config, batches, 4)
