"""`ringtrain.fit` on 1, 2 and 3 ranks trains the model that Keras' own `fit` trains in one process."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, run

JOBS = Path(__file__).parent / "run_fit.py"
ALONE = Path(__file__).parent / "run_fit_alone.py"
LIMIT_S, START_LIMIT_S = 120, 900
HANDED_OVER = {"resumed_by_other_ranks", "seeds_go_on_with_another_number_of_ranks"}
"""jobs that 2 ranks begin and 3 continue"""


def _jobs() -> list[str]:
    # Those of the configured trainer first: it sets the threads of TensorFlow, which nothing may have used before.
    trees = [ast.parse(file.read_text()) for file in (*sorted(JOBS.parent.glob("*_jobs.py")), JOBS)]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_") and name not in ("plain_average", "main")]


NAMES = _jobs()
ON_2_RANKS = {
    "random_pipelines",
    "metrics_that_are_never_reset",
    *(
        "fitted_before",
        "fitted_twice",
        "unbuilt_and_unseeded",
        "early_stopping",
        "eagerly",
        "own_train_step",
        "mixed_float16",
    ),
    *("a_signal_saves_and_ends_all", "another_run_is_not_resumed", "what_differs_is_refused"),
    *("another_order_on_a_rank_is_refused", "averaged_weights", "fine_tuning", "distillation", "vae"),
    *("a_kept_fit_resumes_after_a_whole_epoch", "a_kept_fit_ends_on_all_ranks", "a_kept_fit_refuses_what_cannot_work"),
    *("multi_label", "several_steps_per_call", "segmentation", "texts_with_masks_and_lstm", "gan", "from_files"),
    *("configured_regression", "configured_batches", "configured_inputs_and_outputs", "rates_that_begin_at_0"),
    *("a_run_that_a_callback_has_stopped_trains_no_further", "one_rank_that_stops_before_the_first_step_stops_all"),
    *("logs_that_differ_by_rank", "a_kept_fit_leaves_random_numbers_as_keras_does"),
    *("a_stop_saves_the_weights_of_its_step", "a_callback_that_stops_within_an_epoch_leaves_the_averages"),
    *("an_epoch_begins_once", "a_kept_fit_saves_before_and_exports_after_other_callbacks"),
    *("configured_averages_and_rates", "numbers_without_a_seed_of_their_own"),
    *("a_fit_of_its_own", "what_shards_cannot_be_is_refused", "snippets", "configured_snippet"),
    *("nothing_to_train", "a_failure_of_evaluation_on_one_rank_is_raised_on_all"),
}
"""Jobs that a third rank adds nothing to. Batches of 32 are cut into equal parts on 2 ranks, and unequal ones on 3."""
JOB = """
import keras, numpy as np, ringtrain
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
ringtrain.fit(model, np.ones((32, 4)), np.ones((32, 1)), verbose=0)
"""
CASES = [(np, name) for np in (2, 3) for name in NAMES if np == 2 or name not in ON_2_RANKS]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """What is wrong with the selected jobs on so many ranks, which run in one start."""
    folder = tmp_path_factory.mktemp("fit")
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_job"]
    selected = {(item.callspec.params["np"], item.callspec.params["name"]) for item in items}
    selected |= {(2, name) for _, name in selected if name in HANDED_OVER}

    @functools.cache
    def of(np: int) -> dict[str, str]:
        names = [name for name in NAMES if (np, name) in selected]
        ended = run(np, [sys.executable, JOBS, folder, LIMIT_S, *names], START_LIMIT_S, warm=True)
        wrong = {}
        for name in names:
            files = [folder / str(np) / str(rank) / name for rank in range(np)]
            said = [file.read_text() if file.exists() else f"not reached: {ended.stderr[-5000:]}" for file in files]
            wrong[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
        return wrong

    return of


@pytest.mark.parametrize(("np", "name"), CASES)
def test_job(outcomes: Callable[[int], dict[str, str]], np: int, name: str) -> None:
    if name in HANDED_OVER:
        outcomes(2)  # begins it
    wrong = outcomes(np)[name]
    assert not wrong, wrong


def test_alone_it_is_keras_fit(tmp_path: Path) -> None:
    ended = run(0, [sys.executable, ALONE, tmp_path], START_LIMIT_S, warm=True)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    assert "bit for bit" in ended.stdout


def test_the_example_under_the_launcher_and_alone(tmp_path: Path) -> None:
    """The same model on 2 ranks and on 1; started again, the run is complete."""
    python, script = sys.executable, ROOT / "examples" / "own_fit.py"
    for np in (2, 0):
        ended = run(np, [python, script, "--name", f"on-{np}"], START_LIMIT_S, cwd=tmp_path, warm=True)
        assert ended.returncode == 0, ended.stderr[-5000:]
    once_more = run(2, [python, script, "--name", "on-2"], START_LIMIT_S, cwd=tmp_path, warm=True)
    assert "complete" in once_more.stdout and "files in runs/on-2" in once_more.stdout
    summaries = [json.loads((tmp_path / f"runs/on-{np}/summary.json").read_text()) for np in (2, 0)]
    assert [one["num_ranks"] for one in summaries] == [2, 1]
    assert summaries[0]["metrics"].keys() == summaries[1]["metrics"].keys()
    for metric, value in summaries[0]["metrics"].items():
        assert value == pytest.approx(summaries[1]["metrics"][metric], rel=0.05), metric


def test_a_rank_with_another_script_is_refused(tmp_path: Path) -> None:
    """As on a host with an older copy."""
    for rank in range(2):
        (tmp_path / f"job{rank}.py").write_text(f"{JOB}print({rank})\n")
    start = ["bash", "-c", f"exec {sys.executable} job$OMPI_COMM_WORLD_RANK.py"]
    ended = run(2, start, START_LIMIT_S, cwd=tmp_path)
    assert ended.returncode != 0 and "has another script than rank 0" in ended.stderr, ended.stderr[-3000:]
