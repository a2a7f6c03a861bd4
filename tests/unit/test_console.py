"""What rank 0 prints of a run."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtrain.config.derived import derive
from ringtrain.config.sections import Config, OptimizerConfig, ScheduleConfig, TrainConfig
from ringtrain.protocol.launchers import launched_rank
from ringtrain.strategies.ring import Ring
from ringtrain.training.console import Progress, Terminal, show_plan, show_result
from ringtrain.training.devices import Pinning
from ringtrain.training.tracking import figures_of


def test_rank_before_horovod_is_known_from_the_environment():
    assert launched_rank({}) is None
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert launched_rank({"HOROVOD_RANK": "0"}) == 0
    in_a_batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert launched_rank(in_a_batch_script) is None


def test_progress_is_whole_lines(capsys):
    progress = Progress(Terminal(False), num_steps=4, num_epochs=10)
    assert not progress.is_due()
    progress.last_line_s -= 60
    assert progress.is_due()
    progress.step(1, 0, "loss 1")
    assert not progress.is_due()
    record = {"loss": 0.00021, "accuracy": 1.0, "test_loss": 0.0406, "test_accuracy": 0.98061, "images_per_s": 96840.0}
    progress.epoch(2, figures_of({"epoch": 3, **record}))
    Progress(Terminal(True), num_steps=4, num_epochs=10).epoch(3, [])
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/10  step 1/4  loss 1",
        "epoch  3/10  loss 0.0002  accuracy 100.00%  test loss 0.0406  accuracy 98.06%  96,840 images/s",
    ]


@pytest.mark.parametrize("with_pipe", [False, True])
def test_a_terminal_that_closes_and_a_reader_that_leaves_end_no_run(with_pipe, monkeypatch):
    ours, its = os.pipe() if with_pipe else pty.openpty()
    with open(its, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        os.close(ours)
        Terminal(False).print("result")
        print("a script's own line", flush=True)
        monkeypatch.undo()


SUMMARY = {"metrics": {}, "saves": {"failed": []}, "restarts": 0, "stopped_by": "", "images_per_s": 1.0, "fit_s": 4}


@pytest.mark.parametrize(("resume", "more"), [("auto", ""), ("never", " --run.resume auto")])
def test_a_stopped_run_tells_how_to_resume_it(resume, more, capsys):
    config = {"strategy": {"name": "ring"}, "run": {"resume": resume, "name": ""}}
    summary = {**SUMMARY, "stopped_by": "SIGINT", "global_step": 660, "config": config}
    show_result(Terminal(False), Path("runs/digits-2"), summary, "proof", 9.0)
    told = f"after step 660, by SIGINT; to resume, repeat the command with --run.name digits-2{more} files"
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_finished_run_tells_how_long_it_took_and_what_to_look_at(capsys):
    summary = {**SUMMARY, "fit_s": 192.4, "global_step": 660, "config": {"run": {"resume": "never"}}}
    show_result(Terminal(False), Path("runs/a"), summary, "proof", 3700.0)
    lines = capsys.readouterr().out.splitlines()
    assert "time           3 min 12 s of training, 1 h 1 min in all" in lines
    assert lines[-3:] == ["next           ringtrain report runs/a", "", "proof"]
    # Neither what was verified nor a path is broken: a path would not work when pasted.
    verified = Ring(Config()).proof({"num_ranks": 2, "checksum": "aa1822a1d28747a5"}, "averaged")
    show_result(Terminal(False), Path("/data/with a space/" + 80 * "a"), summary, verified, 3700.0)
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == verified and len(verified) > 72
    assert f"'/data/with a space/{80 * 'a'}'\n" in shown


def test_plan_shows_the_rate_at_its_corners_and_what_has_no_effect(capsys):
    config = Config(
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, accumulation_steps=2, nesterov=True, momentum=0.0),
        schedule=ScheduleConfig("steps", warmup_epochs=1.5, milestones=(3, 9)),
        train=TrainConfig(epochs=6),
    )
    numbers = derive(config, num_ranks=2, num_train=1437, num_test=360)
    run = SimpleNamespace(config=config, strategy=Ring(config), pinning=Pinning(num_threads=1), hosts=["here", "here"])
    run.terminal, run.job = Terminal(False), SimpleNamespace(numbers=numbers, plan={})
    show_plan(run)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    table = rows.index("learning rate 0.4 = 0.1 x 128 / 32 (sgd, steps; auto: linear for sgd)")
    assert "global batch 128 = 32 x 2 x 2 batches accumulated" in rows
    assert rows[table + 1 : table + 5] == [
        "step 0, epoch 1 0.1 first step",
        "step 34, epoch 2 0.4 after the warm-up",
        "step 68, epoch 3 0.04 milestone 1",
        "step 137, epoch 6 0.04 last step",
    ]
    assert rows[-2].startswith("note schedule.milestones 9: the run ends after epoch 6")
