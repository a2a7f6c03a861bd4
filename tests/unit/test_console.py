"""Where progress is drawn, decided from tables of processes that do not run."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ringtrain.config import Config, HvdConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from ringtrain.derived import derive
from ringtrain.protocol.launchers import launched_rank
from ringtrain.run.console import (
    Progress,
    SteadyConsole,
    duration,
    show_plan,
    show_ranks,
    show_result,
    terminal_of_launcher,
    waiting,
)
from ringtrain.run.devices import Pinning
from ringtrain.run.tracking import figures_of
from ringtrain.strategies.ring import Ring

PTS = "/dev/pts/3"


def process_table(root: Path, chain: list[tuple[list[str], str, bool]]) -> Path:
    """Writes a /proc of this process' ancestors, nearest first.

    Args:
        root: folder to write to.
        chain: command, standard output, and whether it is in the terminal's foreground.
    """
    numbers = [os.getpid(), *range(100, 100 + len(chain)), 1]
    for number, parent, (command, output, foreground) in zip(
        numbers[:-1], numbers[1:], [(["python"], "pipe:[1]", True), *chain], strict=True
    ):
        folder = root / str(number)
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in command) + b"\0")
        (folder / "stat").write_text(f"{number} (a name) with) S {parent} 55 44 3 {55 if foreground else 66} 0 0")
        (folder / "fd" / "1").symlink_to(output)
    return root


MPIRUN = (["/x/bin/mpirun", "-np", "2"], "pipe:[7]", True)
SHELL = (["bash"], PTS, True)


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([MPIRUN, (["/x/python", "/x/bin/horovodrun", "-np", "2"], PTS, True), SHELL], PTS),
        ([(["mpirun"], PTS, True), SHELL], PTS),
        ([(["mpirun"], PTS, False), (["/x/python", "/x/bin/ringtrain", "launch"], PTS, True), SHELL], PTS),
        ([(["mpirun"], PTS, False), (["python", "-m", "ringtrain", "launch"], PTS, True), SHELL], PTS),
        ([MPIRUN, (["/x/python", "/x/bin/horovodrun"], "pipe:[9]", True), SHELL], ""),  # | tee log
        ([MPIRUN, (["/x/python", "/x/bin/horovodrun"], "/tmp/log", True), SHELL], ""),
        ([MPIRUN, (["/x/python", "/x/bin/horovodrun"], PTS, False), SHELL], ""),  # in the background
        ([(["orted", "--hnp"], "/dev/null", True)], ""),  # on another host than its launcher
        ([SHELL], ""),  # no launcher
    ],
)
def test_progress_is_drawn_where_the_launcher_writes_to_a_terminal(tmp_path, chain, expected):
    assert terminal_of_launcher(process_table(tmp_path, chain)) == expected


def test_no_process_table(tmp_path):
    assert terminal_of_launcher(tmp_path / "none") == ""


def test_rank_before_horovod_is_known_from_the_environment():
    assert launched_rank({}) is None
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert launched_rank({"HOROVOD_RANK": "0"}) == 0
    in_a_batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert launched_rank(in_a_batch_script) is None


def test_piped_progress_is_whole_lines():
    output = io.StringIO()
    with Progress(Console(file=output, width=40), num_steps=4, num_epochs=2) as progress:
        for step in range(1, 5):
            progress.step(step, (step - 1) // 2, "loss 1")
            if step % 2 == 0:
                progress.epoch(step // 2 - 1, ["loss 1.0000", *["and much more"] * 5])
    lines = output.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["epoch 1/2 ", "epoch 2/2 "]
    assert all(line.count("and much more") == 5 for line in lines)
    assert "\x1b" not in output.getvalue()


def test_what_is_said_while_a_bar_moves_stands_above_it_and_in_the_log():
    output, logged, before = io.StringIO(), [], sys.stderr
    console = Console(file=output, width=60, force_terminal=True, color_system=None)
    with Progress(console, num_steps=4, num_epochs=1, to_log=logged.append) as progress:
        progress.step(1, 0, "loss 1")
        print("ringtrain: a line", file=sys.stderr)
        for text in ("1 of 3\r", "2 of 3\r", "and an", "other", "\r\n"):
            sys.stderr.write(text)
        progress.step(2, 0, "loss 1")
    assert sys.stderr is before and logged == ["ringtrain: a line", "and another"]
    # Lines of their own: each drawing of the bar is erased before.
    shown = re.sub(r"[^\n]*\x1b\[2K", "", output.getvalue()).splitlines()
    assert "ringtrain: a line" in shown and "and another" in shown
    with Progress(Console(file=io.StringIO()), num_steps=4, num_epochs=1, to_log=logged.append):
        assert sys.stderr is before


@pytest.mark.parametrize("with_pipe", [False, True])
def test_a_terminal_that_closes_and_a_reader_that_leaves_end_no_run(with_pipe, monkeypatch):
    ours, its = os.pipe() if with_pipe else pty.openpty()
    with open(its, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = SteadyConsole(force_terminal=True)
        with Progress(console, num_steps=4, num_epochs=300) as progress:
            os.close(ours)
            progress.step(1, 0, "loss 0.1")
            progress.epoch(0, ["loss 0.1"])
            progress.bar.refresh()
        console.print("result")
        print("a script's own line", flush=True)
        monkeypatch.undo()


def test_an_epochs_line_and_the_checksum_fit_into_80_columns():
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    record = {"loss": 0.00021, "accuracy": 1.0, "test_loss": 0.0406, "test_accuracy": 0.98061, "images_per_s": 96840.0}
    with Progress(console, num_steps=4, num_epochs=300) as progress:
        progress.epoch(29, figures_of({"epoch": 30, **record}))
    assert "epoch  30/300  loss 0.0002  accuracy 100.00%  test loss 0.0406  accuracy 98.06%\n" in output.getvalue()
    summary = {
        **{"metrics": {}, "saves": {"failed": []}, "restarts": 0, "stopped_by": "", "images_per_s": 1.0, "fit_s": 4.0},
        **{"num_ranks": 2, "checksum": "aa1822a1d28747a5", "strategy": {}},
        "config": {"strategy": {"name": "ring"}, "run": {"resume": "auto"}},
    }
    show_result(console, Path("runs/a"), summary, Ring(Config()).proof(summary, "averaged"), 9.0)
    assert output.getvalue().splitlines()[-1] == "aa1822a1d28747a5"
    times = {f"{part}_s": 0.0523 for part in ("step", "input", "compute", "callbacks", "wait")}
    show_ranks(console, [{"rank": rank, "host": "host12", **times} for rank in (0, 1)], [1])
    *_, head, _, second = output.getvalue().splitlines()
    assert head.split() == ["ms", "per", "step", "host", "step", "input", "compute", "callbacks", "wait"]
    assert second.startswith("rank 1 slow") and second.endswith("      52.3") and len(head) == len(second) <= 72


@pytest.mark.parametrize(("resume", "more"), [("auto", ""), ("never", " --run.resume auto")])
def test_a_stopped_run_tells_how_to_resume_it(resume, more):
    output = io.StringIO()
    summary = {
        **{
            "metrics": {},
            "saves": {"failed": []},
            "restarts": 0,
            "stopped_by": "SIGINT",
            "images_per_s": 1.0,
            "fit_s": 4,
        },
        **{"num_ranks": 2, "checksum": "aa1822a1d28747a5", "strategy": {}, "global_step": 660},
        "config": {"strategy": {"name": "ring"}, "run": {"resume": resume, "name": ""}},
    }
    show_result(Console(file=output, width=120), Path("runs/digits-2"), summary, "proof", 9.0)
    told = f"after step 660, by SIGINT; to resume, repeat the command with --run.name digits-2{more} files"
    assert told in " ".join(output.getvalue().split())


def times_of(input_share, num_steps=500, wait_share=0.0, host="a", device="CPU, 1 thread"):
    totals = {"step_s": 2.0, "input_s": 2.0 * input_share, "wait_s": 2.0 * wait_share, "num_steps": num_steps}
    return {"host": host, "device": device, "totals": totals}


def test_one_process_is_proposed_where_ranks_of_one_host_s_processors_wait_for_each_other():
    def said(*ranks):
        return waiting(ranks).keys()

    assert said(times_of(0, wait_share=0.6), times_of(0, wait_share=0.3)) == {"allreduce"}
    assert not said(times_of(0, wait_share=0.6), times_of(0, wait_share=0.2))  # waits for a slow rank
    assert not said(times_of(0, wait_share=0.6), times_of(0, wait_share=0.6, host="b"))
    assert not said(*[times_of(0, wait_share=0.6, device="GPU 0, all its memory")] * 2)
    assert not said(times_of(0, wait_share=0.6)) and not said({}, {})


@pytest.mark.parametrize("stopped_by", ["", "SIGINT", "a callback"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_finished_run_tells_how_long_it_took_and_what_to_look_at_in_72_columns(stopped_by, is_terminal):
    output = io.StringIO()
    failed = [{"error": "step 20: No space left on device: the checkpoint is skipped, older ones remain"}]
    summary = {
        **{"metrics": {"test_accuracy": 0.98, "test_loss": 0.04}, "saves": {"failed": failed}, "restarts": 2},
        **{
            "stopped_by": stopped_by,
            "images_per_s": 12482.0,
            "fit_s": 192.4,
            "global_step": 660,
            "ranks": [{}, *(times_of(share) for share in (0.02, 0.38, 0.1))],
        },
        "config": {"run": {"resume": "never"}},
    }
    console = Console(file=output, width=200, force_terminal=is_terminal, color_system=None)
    show_result(console, Path("runs/digits-20261120-110602"), summary, "proof", 3700.0)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 72
    has_ended = stopped_by != "SIGINT"  # after Ctrl-C: where it stands, and how to resume
    assert ("time           3 min 12 s of training, 1 h 1 min in all" in lines) is has_ended
    assert any(line.startswith("input          a rank waits 38% of its steps for data") for line in lines) is has_ended
    summary["ranks"] = [times_of(0.08), times_of(0.9, num_steps=3)]
    assert lines[-3:] == ["next           ringtrain report runs/digits-20261120-110602", "", "proof"]
    # A terminal gets what was verified in 72 columns as well, a program that reads it in one line.
    verified = Ring(Config()).proof({"num_ranks": 2, "checksum": "aa1822a1d28747a5"}, "averaged")
    output.seek(0)
    output.truncate()
    show_result(console, Path("runs/a"), summary, verified, 3700.0)
    assert "of its steps" not in output.getvalue()
    assert (verified in output.getvalue().splitlines()) is not is_terminal and len(verified) > 72
    assert max(len(line) for line in output.getvalue().splitlines() if line != verified) <= 72
    # A path is not broken, since it would not work when pasted.
    output.seek(0)
    output.truncate()
    show_result(console, Path("/data/with a space/" + 80 * "a"), summary, "proof", 3700.0)
    assert f"'/data/with a space/{80 * 'a'}'\n" in output.getvalue()


def test_times_have_their_unit():
    times = {0.04: "0.0 s", 59.94: "59.9 s", 60.0: "1 min 0 s", 3599.4: "59 min 59 s", 3600: "1 h 0 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


@pytest.mark.parametrize("width", [50, 60, 80, 120, 300])
def test_the_bar_is_at_most_40_wide_and_fits_into_the_terminal(width):
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None)
    with Progress(console, num_steps=10_000, num_epochs=10) as progress:
        progress.step(10_000, 9, "loss 0.1234")
        progress.bar.refresh()
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", output.getvalue())]
    bars = [line.count("━") for line in drawn if "epoch 10/10" in line]
    assert bars and max(bars) == (40 if width >= 120 else max(bars)) <= 40
    assert max(map(len, drawn)) <= width


def shown_plan(config: Config) -> str:
    output = io.StringIO()
    numbers = derive(config, num_ranks=2, num_train=1437, num_test=360)
    process = SimpleNamespace(config=config, strategy=Ring(config), pinning=Pinning(num_threads=1))
    show_plan(Console(file=output, width=120), process, numbers, ["here", "here"])
    return output.getvalue()


def test_plan_shows_the_rate_at_its_corners():
    shown = shown_plan(
        Config(
            optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, accumulation_steps=2, nesterov=True, momentum=0.0),
            schedule=ScheduleConfig("steps", warmup_epochs=1.5, milestones=(3, 9)),
            train=TrainConfig(epochs=6),
        )
    )
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    table = rows.index("learning rate 0.4 = 0.1 x 128 / 32 (sgd, steps; auto: linear for sgd)")
    assert "global batch 128 = 32 x 2 x 2 batches accumulated" in rows
    assert rows[table + 1 : table + 5] == [
        "step 0, epoch 1 0.1 first step",
        "step 34, epoch 2 0.4 after the warm-up",
        "step 68, epoch 3 0.04 milestone 1",
        "step 137, epoch 6 0.04 last step",
    ]
    assert rows[-3:-1] == [
        "note optimizer.nesterov has no effect: it needs optimizer.name sgd and optimizer.momentum above 0",
        "note schedule.milestones 9: the run ends after epoch 6",
    ]


def test_plan_of_a_constant_rate_is_one_row():
    shown = shown_plan(Config())
    rate = "learning rate  0.00141421 = 0.001 x sqrt(64 / 32) (adam, constant; auto: sqrt for adaptive optimizers"
    assert f"{rate})\nseed " in shown
    assert "note" not in shown
    adasum = shown_plan(Config(hvd=HvdConfig(op="adasum"), train=TrainConfig(batch_size=64)))
    assert f"{rate}; one rank's batch: Adasum" in adasum
    named = shown_plan(Config(optimizer=OptimizerConfig(learning_rate_scaling="linear")))
    assert "learning rate  0.002 = 0.001 x 64 / 32 (adam, constant)\nseed " in named
