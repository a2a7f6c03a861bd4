"""Brings back results that were silently wrong once, and shows which of the drawn jobs finds each of them.

    python tests/fuzz/defects.py                  # all; exit code 1 if more than one of ten is missed
    python tests/fuzz/defects.py mask shuffle     # those with one of these words in their name
    python tests/fuzz/defects.py --sample 2       # two that the commit chooses
    python tests/fuzz/defects.py --list           # with the number of the jobs that have the construct

A defect is the smallest patch that brings it back, in a copy of the package. Only jobs with its construct are run, in
order, until one fails; a job that fails without the patch as well finds nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grammar
import run  # which lets launching be found

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import launching
from mutants import ROOT, Mutant

# In constructs, & stands for any text, and ~ for text of one line.
FIRST_SEED = 53_000
BATCHES = (1, 1, 2, 4, 8)
"""jobs of the first starts of a defect; the last number is that of all others"""
UNEVEN = r"rows, batch = (\d*[13579], \d+|\d+, 3)\n"
"""a batch whose rows two ranks cannot share evenly"""
ONE_ROW = r"rows, batch = (33, (8|4|16|2)|17, (8|4|16|2)|9, (8|4|2)|7, [32]|5, [42]|40, 3)\n"
"""a last batch of one row"""
SEVERAL = r"    y = [{(]"
"""several outputs"""
SHUFFLED = (
    r"    data = data\.(shuffle\(rows, seed=6\)\n~\n    data = data\.(batch|map|take|skip|repeat)"
    r"|(cache\(\)\.|batch\(batch\)\.)?shuffle\(\w+, seed=3\)(?!\.cache))"
)
"""data of a known length that have another order in each epoch"""
LONG = r"rows, batch = (32|40|33), [2348]\n(?!&steps_per_epoch)"
"""several steps in each epoch"""
ARRAYS = r"&fit\(model, x, y(?!~(validation_split|steps_per_epoch))"
AGAIN = r"&histories\.append"
"""a second fit"""
TWO, RESUMED = "2 ranks", "2 ranks, resumed"

STEP, UNEVEN_LOSS, REDUCTION = "training/step.py", "training/uneven.py", "hvd/reduction.py"
LOOP, RESUME, EVALUATION = "training/loop.py", "training/resume.py", "training/evaluation.py"
CALLBACKS, STATE = "checkpoint/callback_state.py", "checkpoint/model_state.py"
STREAMS, SCRIPT = "data/streams.py", "training/script_model.py"
PLANTED = (
    # A step
    Mutant(
        *("gradients are averaged over ranks, not rows", STEP),
        *("self.share.assign(header.shares[0])", "self.share.assign(1.0)", TWO, UNEVEN),
    ),
    Mutant(
        *("the row in place of none counts in metrics", STEP),
        *("variable.assign(tf.where(self.share > 0, variable.value, value))", "variable.assign(variable.value)"),
        *(TWO, ONE_ROW + r"&metrics=" + ARRAYS),
    ),
    Mutant(
        *("a rank without rows keeps its statistics", STEP, "counted = self._seeds_and_metrics()\n"),
        "counted, header = [*self._seeds_and_metrics(), *hvd.weights_of_one_rank(self.model)], None\n",
        *(TWO, ONE_ROW + r"(?!&steps_per_epoch)&(Counting|SpectralNormalization)\("),
    ),
    Mutant(
        *("masked steps count as others", UNEVEN_LOSS),
        *('is_masked |= getattr(leaf, "_keras_mask", None) is not None', "pass"),
        *(TWO, r"y = rng\.normal\(size=\(rows, 6, 3&mask_zero=True(?!&reduction=)"),
    ),
    Mutant(
        *("ignored classes count as others", UNEVEN_LOSS),
        *('mask = getattr(values, "_keras_mask", None)', "mask = None", TWO, r"ignore_class"),
    ),
    Mutant(
        *("a mean by weights is one by rows", UNEVEN_LOSS),
        *('if loss.reduction != "mean_with_sample_weight":', "if loss.reduction:"),
        *(TWO, r'weights = &"mean_with_sample_weight"|"mean_with_sample_weight"&class_weight='),
    ),
    Mutant(
        *("a sum over rows is averaged", UNEVEN_LOSS),
        *('if loss.reduction in ("sum", "none", None):', 'if loss.reduction in ("none", None):'),
        *(TWO, r'reduction="sum"'),
    ),
    Mutant(
        *("a loss without reduction is averaged", UNEVEN_LOSS),
        *('if loss.reduction in ("sum", "none", None):', 'if loss.reduction == "sum":'),
        *(TWO, r'reduction=(None|"none")'),
    ),
    Mutant(
        *("metrics of one name have the last one's value", "training/metric_results.py"),
        *('unique = f"{name} (result {number})"', "unique = name", TWO, UNEVEN + r"&self\.trackers"),
    ),
    Mutant(
        *("results of a metric that returns a dict are averaged", EVALUATION, "    metrics = metric_results(model)\n"),
        "    metrics = metric_results(model)\n"
        "    metrics = {name: metrics[name] for name in metrics.keys() - {'mean', 'rows'}}\n",
        *(TWO, UNEVEN + r"&metrics=\[Both"),
    ),
    # Optimizers
    Mutant(
        *("parts of sparse gradients are added up", REDUCTION),
        *("merges_rows = self.merges_rows or _are_unique(gradient.indices)", "merges_rows = True"),
        *(
            TWO,
            r"Embedding\(9, 4(, mask_zero=True)?\)&compile\(keras\.optimizers\.(Adam|RMSprop|Nadam)(?!~(clip|accum))",
        ),
    ),
    Mutant(
        *("averages of weights are not put in place", LOOP),
        *("for optimizer in hvd.optimizers_of(model):", "for optimizer in ():"),
        *(TWO, r"use_ema=True"),
    ),
    Mutant(
        *("accumulated gradients stay those of a rank", SCRIPT),
        *("hvd.average_accumulated(optimizer)\n", "pass\n", TWO, r"gradient_accumulation_steps=3"),
    ),
    Mutant(
        *("a second fit trains the layers of its beginning", SCRIPT),
        *("if compiled is None or compiled is not when or model.run_eagerly or then.keys() - now.keys():", "if True:"),
        *(TWO, r"layers\[-1\]\.trainable = False\n    histories\.append"),
    ),
    # Data
    Mutant(
        *("iterators that Keras discards take no order", STREAMS),
        *("self.has_unread = length >= 0 and not steps", "self.has_unread = False"),
        *(TWO, SHUFFLED + r"&fit\(model, data, epochs=[23](?!~steps_per_epoch)"),
    ),
    Mutant(
        *("a second fit without validation has an old order", EVALUATION),
        "        self.run.job.data_set.train.end(was_stopped)\n"
        "        if not self.run.job.numbers.num_test or not self.run.job.validation.is_due(epoch):\n"
        "            return\n",
        "        if not self.run.job.numbers.num_test or not self.run.job.validation.is_due(epoch):\n"
        "            return\n"
        "        self.run.job.data_set.train.end(was_stopped)\n",
        *(TWO, SHUFFLED + r"&\[fit\((?!~validation_(data|split)(?!~freq))" + AGAIN),
    ),
    Mutant(
        *("batches that are padded as a whole are divided", "data/division.py"),
        *('BATCHES = ("_BatchDataset", ', 'BATCHES = ("_PaddedBatchDataset", "_BatchDataset", '),
        *(TWO, r"count_nonzero&padded_batch"),
    ),
    Mutant(
        *("batches of arrays by a number of steps", "data/fit_arguments.py"),
        *("batch_size = math.ceil(num_trained / given.steps_per_epoch)", "pass"),
        *(TWO, r"fit\(model, x, y(?!~batch_size=batch)"),
    ),
    Mutant(
        *("hooks of validation data are called once", STREAMS),
        *("for _ in range(2 if self.is_held_out and self._num_begun else 1):", "for _ in range(1):"),
        *(TWO, r"def on_epoch_end\(self\)&epochs=[23]~validation_data=Batches"),
    ),
    # Held-out data
    Mutant(
        *("validation_steps take an order more", "data/inputs.py"),
        *("stream.has_unread = False", "pass"),
        *(TWO, r"epochs=[23]~shuffle\(9, seed=2\)\.(repeat\(\)\.)?batch\(4\), validation_steps"),
    ),
    Mutant(
        *("caches of held-out data are read in part", STREAMS),
        *("for _ in self._open:", "for _ in ():"),
        *(TWO, r"epochs=[23]~(shuffle\(9~\)\.cache\(\)|cache\(\)\.shuffle\(9~\))\.batch\(4\)(?!, validation_s)"),
    ),
    Mutant(
        *("the end of held-out data counts in losses of outputs", EVALUATION),
        *("if int(batches.cardinality()) == tf.data.UNKNOWN_CARDINALITY else None", "if False else None"),
        *(TWO, SEVERAL + r"&validation_data=tf(?!~(filter|repeat|validation_steps))"),
    ),
    Mutant(
        *("a part of an evaluation begins with the first batch", STREAMS),
        *("if number >= numbers[0]:", "if True:", TWO, r"validation_data=tf~batch\("),
    ),
    # Callbacks
    Mutant(
        *("a stop within an epoch does not end it", LOOP),
        *("if run.callbacks.stop.is_ended and not run.clock.epoch_complete:", "if False:"),
        *(TWO, LONG + r"&stop_training', n == 1"),
    ),
    Mutant(
        *("logs of on_train_end have what callbacks add", EVALUATION),
        *(
            "self.logs = dict(logs)",
            "self.logs = logs",
            TWO,
            r"callbacks=\[~(ReduceLROnPlateau|LearningRateScheduler)~Seen\(\)",
        ),
    ),
    # Resume
    Mutant(
        *("ranks begin without rank 0's weights", STATE),
        *("hvd.broadcast_model(model, root_rank=0)\n    if not length:", "if not length:", RESUMED, LONG + r"&Adam"),
    ),
    Mutant(
        *(
            "slots are not restored",
            STATE,
            "[*model.weights, *slots_of(model)])",
            "[*model.weights])",
        ),
        *(RESUMED, LONG + r"&Adam"),
    ),
    Mutant(
        *("Nadam's product in a LossScaleOptimizer is lost", "hvd/keras_patches.py"),
        "found |= {id(variable): variable for variable in _variables_in(held, set()) if id(variable) not in weights}",
        *("pass", RESUMED, r"LossScaleOptimizer\(keras\.optimizers\.Nadam"),
    ),
    Mutant(
        *("seeds are not restored", STATE, "assign(own_variables(model), state, copy)"),
        *("pass", RESUMED, LONG + r"&(Dropout|GaussianNoise)\("),
    ),
    Mutant(
        *("the seed of all layers is not restored", STATE),
        *("    if hvd.num_copies(model) > 1:\n        return []", "    return []", RESUMED, r"UnseededNoise\(\)"),
    ),
    Mutant(
        *("metrics of a resumed epoch begin anew", "training/clock.py"),
        *("self.metrics_state = start.metrics_state", "self.metrics_state = ()", RESUMED, LONG + r"&metrics="),
    ),
    Mutant(
        *("callbacks begin anew", CALLBACKS),
        *("if len(now) != len(before):", 'if len(now) != len(before) or kind != "History":'),
        *(RESUMED, LONG + r"&class Stateful"),
    ),
    Mutant(
        *("scalars of callbacks become plain numbers", CALLBACKS),
        *("return array.copy()[()]", "return array.copy() if array.ndim else array.item()"),
        *(RESUMED, LONG + r"&class Stateful"),
    ),
    Mutant(
        *("an epoch's schedule is applied again", LOOP),
        *("if clock.epoch_complete and not clock.is_open and is_new:", "if True:"),
        *(RESUMED, LONG + r"&rate \* 0\.5"),
    ),
    Mutant(
        *("layers that a callback has frozen are trained", RESUME),
        *("model_state.freeze_in_training(job.model, start.frozen)", "pass", RESUMED, LONG + r"&'trainable', False"),
    ),
    Mutant(
        *("orders of earlier epochs are not passed over", STREAMS),
        *(
            "for shuffle in shuffles or ():",
            "for shuffle in ():",
            RESUMED,
            LONG + r"&" + SHUFFLED + r"&fit\(model, data, epochs=[23]",
        ),
    ),
    Mutant(
        *("endless data resume behind half a call", STREAMS),
        "math.ceil(self.num_batches / self.steps_per_call) * self.steps_per_call",
        *("self.num_batches", RESUMED, r"steps_per_execution=2&fit\(model, batches\(~steps_per_epoch=[35]"),
    ),
    Mutant(
        *("a complete run gives the weights of its last step", RESUME),
        "model_state.assign(model.weights, checkpoint.load_result(folder))",
        *("pass", RESUMED, r"rows, batch = [2579], (8|16)\n&(use_ema=True|restore_best_weights)"),
    ),
)


def may_find(defect: Mutant, job: grammar.Job) -> bool:
    """Whether a job has the construct of a defect, and its result is judged."""
    if "resumed" not in defect.test and job.unequal:
        return False
    construct = defect.construct.replace("&", ".*").replace("~", "[^\\n]*")
    return bool(re.search(construct, job.script, re.DOTALL))


def results(jobs: Sequence[grammar.Job], test: str, package: Path = ROOT) -> list[run.Result]:
    """Results of jobs in a property, such as "2 ranks, resumed"."""
    return run.results_of(jobs, [int(test[0])], "resumed" in test, package=package)


def failures(defect: Mutant, jobs: Sequence[grammar.Job]) -> Iterator[tuple[grammar.Job, run.Result]]:
    """Jobs that fail with a defect."""
    left = [job for job in jobs if may_find(defect, job)]
    number = 0
    with tempfile.TemporaryDirectory(prefix="ringtrain-planted-") as folder:
        shutil.copytree(ROOT / "ringtrain", Path(folder, "ringtrain"), ignore=shutil.ignore_patterns("__pycache__"))
        defect.apply(Path(folder))
        while left:
            length = BATCHES[min(number, len(BATCHES) - 1)]
            number += 1
            for job, result in zip(left, results(left[:length], defect.test, Path(folder)), strict=False):
                if result.kind in run.FAILURES:
                    yield job, result
            left = left[length:]


def found(defects: Sequence[Mutant], jobs: Sequence[grammar.Job], at_once: int) -> dict[str, grammar.Job]:
    """The first job that finds each defect, by its name. Prints a line for each job that fails."""
    searches = {defect: failures(defect, jobs) for defect in defects}
    finders: dict[str, grammar.Job] = {}
    fails_anyway: dict[tuple[str, int], bool] = {}
    launching.warm_python()

    def next_failure(defect: Mutant) -> grammar.Job | None:
        begin_s, text = time.monotonic(), "MISSED"
        job, result = next(searches[defect], (None, None))
        if job is not None:
            text = f"{job.seed - FIRST_SEED + 1:>4} {result.kind}: {(result.detail.splitlines() or [''])[-1][:110]}"
        print(f"{time.monotonic() - begin_s:5.0f} s  {defect.claim:<54} {text}", flush=True)
        return job

    with ThreadPoolExecutor(at_once) as threads:
        while searches:
            failing = zip(list(searches), threads.map(next_failure, list(searches)), strict=True)
            candidates = {defect: job for defect, job in failing if job is not None}
            # The same jobs without the defects, in one start for each property.
            for test in sorted({defect.test for defect in candidates}):
                chosen = {job.seed: job for defect, job in candidates.items() if defect.test == test}
                untried = [job for seed, job in chosen.items() if (test, seed) not in fails_anyway]
                for job, result in zip(untried, results(untried, test), strict=True):
                    fails_anyway[test, job.seed] = result.kind in run.FAILURES
                    if fails_anyway[test, job.seed]:
                        print(f"seed {job.seed} fails without a defect, {test}: {result.detail}", flush=True)
            for defect in list(searches):
                job = candidates.get(defect)
                if job is None or not fails_anyway[defect.test, job.seed]:
                    searches.pop(defect).close()
                    finders |= {defect.claim: job} if job else {}
    return finders


def main() -> int:
    """Prints a line for each chosen defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="defects with one of these in their name (all)")
    parser.add_argument("--jobs", type=int, default=500, help="number of drawn jobs (500)")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, which the commit chooses")
    parser.add_argument("--at-once", type=int, default=1, help="number of defects that are searched at the same time")
    parser.add_argument("--list", action="store_true", help="print the defects and exit")
    given = parser.parse_args()
    jobs = [grammar.job(seed) for seed in range(FIRST_SEED, FIRST_SEED + given.jobs)]
    chosen = [one for one in PLANTED if not given.words or any(word in one.claim for word in given.words)]
    if given.sample:
        command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        chosen = random.Random(commit).sample(chosen, given.sample)
    finders = {} if given.list else found(chosen, jobs, given.at_once)
    print("\n| defect | construct | found at job | property |\n|---|---|---|---|")
    for defect in chosen:
        number = sum(may_find(defect, job) for job in jobs)
        at = finders[defect.claim].seed - FIRST_SEED + 1 if defect.claim in finders else "-"
        print(f"| {defect.claim} | {number} jobs | {at} | {defect.test} |")
    if given.list:
        return 0
    print(f"{len(chosen)} defects, {len(chosen) - len(finders)} not found")
    return int(len(finders) < 0.9 * len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
