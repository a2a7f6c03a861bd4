"""Breaks the code behind each main claim, in a temporary worktree, and shows whether the claim's test fails.

    python tests/support/mutants.py                  # all; exit code 1 if a mutant survives
    python tests/support/mutants.py tests/unit       # those with this in their line: here those that take seconds
    python tests/support/mutants.py --sample 3       # of these, 3 that the commit chooses, as `make test-all` does
    python tests/support/mutants.py --list

It uses the last commit. Each test must pass before its code is broken.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
"""time limit of one test in seconds; one that exceeds it counts as failed"""
FAILED = 1
"""exit code of pytest if tests failed; any other than this and 0 is an error in the table"""


class Mutant(NamedTuple):
    claim: str
    """description of the broken code"""
    file: str
    """path from ringtrain/"""
    text: str
    """original code, which occurs once in the file"""
    replacement: str
    test: str
    """node ID of the claim's test, or its file; in tests/fuzz/defects.py, how drawn jobs run: "2 ranks, resumed" """
    construct: str = ""
    """regular expression of the scripts of drawn jobs in which the code matters, for tests/fuzz/defects.py"""

    @property
    def line(self) -> str:
        return f"{self.claim:<54} {self.file:<32} {self.test}"

    def apply(self, root: Path) -> None:
        """Changes the file below `root`; raises ValueError or SyntaxError if the table does not fit it."""
        path = root / "ringtrain" / self.file
        before = path.read_text(encoding="utf-8")
        if before.count(self.text) != 1:
            raise ValueError(f"{self.claim}: {path} has {self.text!r} {before.count(self.text)} times, expected once")
        after = before.replace(self.text, self.replacement)
        compile(after, path, "exec")
        path.write_text(after, encoding="utf-8")


def _property(name: str, np: int = 2) -> str:
    return f"tests/ring/test_properties.py::test_property[mpi-{np}-{name}]"


UNIT = "tests/unit"
SUM = ('            "op": self.op,', '            "op": Sum if self.op == Average else self.op,')
MUTANTS = (
    # Gradients and weights
    Mutant(
        "a sum in place of the average",
        "hvd/reduction.py",
        *SUM,
        _property("averaging.sgd_with_momentum_equals_big_batch"),
    ),
    Mutant(
        *("a sum, noticed by the check before training", "hvd/reduction.py", *SUM),
        _property("optimizers.the_check_names_a_sum_in_place_of_the_average_for_every_optimizer"),
    ),
    Mutant(
        *("a check before training that takes any result", "hvd/verify_averaging.py"),
        *("if not np.allclose(result, expected, rtol=1e-2):", "if not np.all(np.isfinite(result)):"),
        _property("optimizers.the_check_names_a_sum_in_place_of_the_average_for_every_optimizer"),
    ),
    Mutant(
        *("no broadcast", "hvd/sync.py", "[v for v in variables if id(v) not in local]", "variables[:0]"),
        _property("agreeing.broadcast_model_makes_everything_equal_but_seeds"),
    ),
    Mutant(
        *("optimizers that are not broadcast", "hvd/sync.py", "[*model.weights, *slots,", "[*model.weights,"),
        _property("agreeing.broadcast_model_makes_everything_equal_but_seeds"),
    ),
    Mutant(
        *("ranks out of step that nothing notices", "hvd/sync.py", "if len(set(gathered)) > 1:", "if not gathered:"),
        _property("agreeing.a_disturbed_weight_is_named"),
    ),
    Mutant(
        *(
            "a rank that fails alone",
            "hvd/together.py",
            "        if other is not None:\n",
            "        if rank == horovod.rank() and other:\n",
        ),
        _property("agreeing.ranks_fail_together_or_not_at_all"),
    ),
    # Steps that all ranks share
    Mutant(
        *("a failed step that is not undone", "training/summed_step.py", "variable.assign(before)\n", "pass\n"),
        _property("steps.a_failed_step_changes_nothing"),
    ),
    Mutant(
        *("virtual ranks that are added in another order", "training/virtual_ranks.py"),
        *("    return tf.gather(rows, order)", "    return rows"),
        f"{UNIT}/test_virtual_sums.py::test_the_sum_is_that_of_the_tree_for_any_number_of_ranks",
    ),
    Mutant(
        *("weights that a step assigns and nothing sees", "hvd/keras_patches.py"),
        *("            note(weight)\n", ""),
        f"{UNIT}/test_train_step.py::test_weights_that_a_step_assigns_are_noted",
    ),
    # Fewer bytes
    Mutant(
        *("what a step leaves out is forgotten", "hvd/powersgd.py"),
        *("matrix.error.assign(tf.reshape(gradients[index] - result, matrix.error.shape))", "pass"),
        _property("slow_links.what_is_left_out_comes_later"),
    ),
    Mutant(
        *("matrices that are not orthonormal", "hvd/powersgd.py", "tf.linalg.qr(mean)[0]", "mean"),
        _property("slow_links.full_rank_equals_the_ring"),
    ),
    Mutant(
        *("columns of zeros that stay zero", "hvd/powersgd.py"),
        *("tf.where(is_zero, matrix.right.value, right)", "right"),
        _property("slow_links.a_gradient_of_zeros_does_not_stop_the_iteration"),
    ),
    # Samples
    Mutant(
        *("no parts: every rank trains the first", "data/parts.py"),
        *("return cls(range(rank, rank + 1), size)", "return cls(range(1), size)"),
        f"{UNIT}/test_arrays.py::test_every_row_once_per_epoch",
    ),
    Mutant(
        *("the last, smaller batch is not trained", "data/arrays.py"),
        "self.num_whole, self.rest = divmod(len(samples), global_batch_size)",
        "self.num_whole, self.rest = len(samples) // global_batch_size, 0",
        f"{UNIT}/test_arrays.py::test_every_row_once_per_epoch",
    ),
    Mutant(
        *("rows of a block that depend on the steps before", "data/row_order.py"),
        *("int(self._blocks[index]) + 1]", "self._order_of_block.cache_info().misses]"),
        f"{UNIT}/test_row_order.py::test_any_steps_are_those_of_the_whole_order",
    ),
    Mutant(
        *("every rank evaluates the first shard", "data/row_order.py"),
        *("part_of(-(-num_samples // whole), rank, size)", "part_of(-(-num_samples // whole), 0, size)"),
        f"{UNIT}/test_row_order.py::test_evaluation_covers_every_row_once",
    ),
    Mutant(
        *("a resumed run at the beginning of its epoch", "data/arrays.py"),
        *("epoch * self.steps_per_epoch + first_step, (epoch", "epoch * self.steps_per_epoch, (epoch"),
        f"{UNIT}/test_arrays.py::test_epochs_differ_and_a_resumed_epoch_does_not",
    ),
    Mutant(
        *("crops that do not follow from the row", "data/augment.py"),
        *("draw[1] * num_rows + number]", "draw[1]]"),
        f"{UNIT}/test_image_files.py::test_rows_with_the_same_image_have_different_crops",
    ),
    Mutant(
        *("ranks of Spark that train rows of others", "data/spark_rows.py"),
        *("order = first + row_order.permutation(", "order = row_order.permutation("),
        f"{UNIT}/test_spark_rows.py::test_every_row_is_trained_once_by_the_rank_that_has_it",
    ),
    Mutant(
        *("an elastic ledger that takes steps that nobody has made", "../tests/sample_ledger.py"),
        *("if last_step not in reached or min(reached) < first_step:", "if min(reached) < first_step:"),
        f"{UNIT}/test_journal.py::test_what_is_false_is_noticed",
    ),
    Mutant(
        *("elastic ranks that train each other's rows", "data/parts.py"),
        *("places += range(begin, end) if begin < end else (0,)", "places += range(max(1, end - begin))"),
        "tests/faults/test_elastic.py::test_ranks_come_and_go_and_nothing_is_different",
    ),
    # Checkpoints
    *(
        Mutant(
            *(f"a checkpoint without flushing {what}", "checkpoint/checkpoint.py", text, "pass"),
            f"{UNIT}/test_checkpoint.py::test_files_are_flushed_before_the_rename_and_the_folder_after_it",
        )
        for what, text in (
            ("its files", f"file.flush()\n{' ' * 16}os.fsync(file.fileno())"),
            ("its manifest", "os.fsync(text.fileno())"),
            ("its folder", "durable.flush(unfinished)"),
            ("the folder above it", "durable.flush(folder)"),
        )
    ),
    Mutant(
        *("a checkpoint whose files are not verified", "checkpoint/checkpoint.py"),
        *('if checksum != expected["sha256"]:', "if not checksum:"),
        f"{UNIT}/test_checkpoint.py::test_any_byte_flipped_or_cut_off_is_noticed",
    ),
    # Launch, limits and stops
    Mutant(
        *("--grace ignored", "cluster/supervisor.py"),
        *("return self._received_s + self.options.grace if is_final", "return self._received_s if is_final"),
        f"{UNIT}/test_time_limits.py",
    ),
    Mutant(
        *("--grace of a constant length", "cluster/supervisor.py"),
        *("return self._received_s + self.options.grace if is_final", "return self._received_s + 8 if is_final"),
        f"{UNIT}/test_time_limits.py",
    ),
    Mutant(
        *(
            "--start-timeout ignored",
            "cluster/supervisor.py",
            "now > began_s + self.options.start_timeout",
            "now > began_s + 60",
        ),
        f"{UNIT}/test_time_limits.py",
    ),
    Mutant(
        *("a stall timeout shorter than slow steps", "monitor/diagnosis.py"),
        *("return max(timeout_s, TIMES_MEDIAN * _step_s(rows))", "return timeout_s"),
        f"{UNIT}/test_diagnosis.py::test_the_stall_timeout_is_at_least_20_median_steps",
    ),
    Mutant(
        *("no agreement of the ranks on when to stop", "training/stopping.py"),
        *("        if run.size > 1:\n            local = hvd", "        if run.size > 99:\n            local = hvd"),
        "tests/ring/test_stopping.py::test_a_callback_that_stops_one_rank_stops_all_after_the_same_step",
    ),
    Mutant(
        *(
            "the last failure in place of the first",
            "protocol/reader.py",
            "for rank in self._pieces if",
            "for rank in reversed(self._pieces) if",
        ),
        f"{UNIT}/test_exit_cause.py::test_the_first_failure_is_printed_last_with_its_exit_code",
    ),
    Mutant(
        *("values on a command line", "cluster/plans/openmpi.py"),
        *('for word in ("-x", name)', 'for word in ("-x", f"{name}={job.environment.get(name)}")'),
        f"{UNIT}/test_plans.py::test_no_value_of_the_environment_is_in_a_plan",
    ),
    Mutant(
        *(
            "a misspelled parameter of Open MPI",
            "cluster/plans/openmpi.py",
            "odls_base_sigkill_timeout",
            "odls_base_kill_timeout",
        ),
        "tests/cluster/test_dialects.py::test_every_parameter_of_a_plan_is_known_to_that_mpi",
    ),
    Mutant(
        *("heartbeats of programs without the token", "protocol/transport.py"),
        *("hmac.digest(token.encode(),", 'hmac.digest(b"",'),
        f"{UNIT}/test_transport.py",
    ),
    # Figures
    Mutant(
        *(
            "square-root scaling of the learning rate that is linear",
            "config/derived.py",
            '"sqrt": math.sqrt',
            '"sqrt": lambda k: k',
        ),
        f"{UNIT}/test_config.py::test_derived_numbers",
    ),
    Mutant(
        *("a lost host that is used again at once", "cluster/restart.py"),
        *("frozenset(result.hosts if result.kind == HOST_LOST else ())", "frozenset()"),
        f"{UNIT}/test_restart.py",
    ),
)


def passes(test: str, root: Path) -> tuple[bool, float]:
    """Runs a test in a worktree; returns whether it passes, and its seconds. Raises RuntimeError if it cannot run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    # Python files are compared by size and by the second of their change: a mutant could run as the one before.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    begin_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        try:
            output, _ = ran.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            ran.send_signal(signal.SIGINT)  # then it ends what it has started
            ran.communicate()
            return False, time.monotonic() - begin_s
    if ran.returncode not in (0, FAILED):
        raise RuntimeError(f"{test}: pytest ended with {ran.returncode}:\n{output[-2000:]}")
    return ran.returncode == 0, time.monotonic() - begin_s


def git(*words: str | Path) -> None:
    subprocess.run(["git", "-C", ROOT, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def sample(number: int) -> list[Mutant]:
    """Mutants of unit tests, others for each commit."""
    command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return random.Random(commit).sample([mutant for mutant in MUTANTS if mutant.test.startswith(UNIT)], number)


def main() -> int:
    """Prints a line for each chosen mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="mutants with one of these in their line (all)")
    parser.add_argument("--sample", type=int, metavar="N", help="N of those with unit tests, which the commit chooses")
    parser.add_argument("--list", action="store_true", help="print the lines and exit")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.words or any(word in one.line for word in options.words)]
    if options.sample:
        chosen = sample(options.sample)
    if options.list:
        print("\n".join(one.line for one in chosen))
        return 0
    survived = 0
    with tempfile.TemporaryDirectory(prefix="ringtrain-mutants-") as folder:
        root = Path(folder, "worktree")
        git("worktree", "add", "--detach", root, "HEAD")
        try:
            unchanged = functools.cache(lambda test: passes(test, root)[0])
            for one in chosen:
                if not unchanged(one.test):
                    print(f"no test   {one.line}: it fails without a mutant", flush=True)
                    survived += 1
                    continue
                one.apply(root)
                lives, seconds = passes(one.test, root)
                survived += lives
                print(f"{'SURVIVED' if lives else 'killed  '} {seconds:5.0f} s  {one.line}", flush=True)
                git("-C", root, "checkout", "--", ".")
        finally:
            git("worktree", "remove", "--force", root)
    print(f"{len(chosen)} mutants, {survived} not killed")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
