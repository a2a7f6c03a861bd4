"""The one table of what does not go together: options, and facts of a model, its data and the arguments of `fit`.

It is checked for every configuration, again for every job, and printed by the help.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from ringtrain.errors import ConfigError

ELASTIC = "an elastic job"
SEVERAL_RANKS = "several ranks"
BATCH_PER_RANK = "batch_per_rank"
INITIAL_EPOCH = "initial_epoch"
STEPS_PER_EXECUTION = "steps_per_execution"
OWN_BATCHES = "training batches of tf.data, a PyDataset or a generator"
OWN_VALIDATION = "validation batches of tf.data, a PyDataset or a generator"
HOROVOD_CALLBACKS = "callbacks of Horovod"
DISTRIBUTED = "hvd.DistributedOptimizer"
OTHER_ROWS = "training data that are no arrays or Records of dense tensors"
OWN_STEP = "a train_step of its own"
ACCUMULATING_STEP = "a train_step that accumulates gradients"
STATEFUL = "a stateful layer"
SPECTRAL = "SpectralNormalization"
SYNCHRONIZED = "SyncBatchNormalization"
OWN_FIT = "a model with a fit of its own"
SEVERAL_OPTIMIZERS = "several optimizers"
EMA_OF_ALL = "use_ema of an optimizer that is not built"
ROWS_BY_NUMBER = "pass arrays or ringtrain.Records, of which ranks take rows by their numbers"
ADVICE: Mapping[str, str] = {
    BATCH_PER_RANK: "give the batch_size of all ranks together",
    INITIAL_EPOCH: "give the number of epochs that are left",
    STEPS_PER_EXECUTION: "compile the model with 1, as each step is committed by itself",
    OWN_BATCHES: ROWS_BY_NUMBER,
    OWN_VALIDATION: ROWS_BY_NUMBER,
    HOROVOD_CALLBACKS: "leave out BroadcastGlobalVariablesCallback and MetricAverageCallback",
    DISTRIBUTED: "leave hvd.DistributedOptimizer out: the run reduces all gradients, as the options say",
    OTHER_ROWS: "train with ring",
    OWN_STEP: "override compute_loss instead, or leave out the option",
    ACCUMULATING_STEP: "leave out gradient_accumulation_steps: gradients of a rank may be lost",
    STATEFUL: "its state has a row for each of a whole batch: build it for a rank's rows, and pass batch_per_rank=True",
    SPECTRAL: "it changes its kernel in the forward pass, which cannot be undone: leave it out",
    SYNCHRONIZED: "it would use the rows of real ranks: use BatchNormalization",
    EMA_OF_ALL: "call optimizer.build(variables) before, with those that it trains, or all weights are averaged",
}
"""Facts of a model, its data and the arguments of `fit`, with what to do where they do not go together."""

_HOROVOD = (
    "hvd.op",
    "hvd.compression",
    "hvd.groups",
    "train.virtual_ranks",
)
_NOT_IN_TENSORFLOW = (
    *_HOROVOD,
    "hvd.deterministic",
    "optimizer.accumulation_steps",
    "model.sync_batch_norm",
    "train.jit",
    "train.precision mixed_float16",
    "model.split",
    "model.micro_batches",
    OTHER_ROWS,
)
NOT_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "strategy.name mpi-ring": _HOROVOD,
    "strategy.name towers": _NOT_IN_TENSORFLOW,
    "strategy.name multi-worker": _NOT_IN_TENSORFLOW,
    "strategy.name ps": (*_NOT_IN_TENSORFLOW, OWN_STEP),
    ELASTIC: (
        "hvd.compression powersgd",
        "model.split",
        "optimizer.accumulation_steps",
        BATCH_PER_RANK,
        INITIAL_EPOCH,
        STEPS_PER_EXECUTION,
        OWN_BATCHES,
        OWN_VALIDATION,
        HOROVOD_CALLBACKS,
        DISTRIBUTED,
        ACCUMULATING_STEP,
        SPECTRAL,
    ),
    SEVERAL_RANKS: (STATEFUL,),
    # Bits would depend on the number of ranks.
    "train.virtual_ranks": (
        "hvd.op",
        "hvd.compression",
        "hvd.groups",
        "data.name spark",
        "train.jit",
        "model.split",
        "model.micro_batches",
        "model.sync_batch_norm",
        OWN_STEP,
        DISTRIBUTED,
        SPECTRAL,
        SYNCHRONIZED,
    ),
    # XLA has no kernel for an allreduce in the forward pass, nor for stages on several devices.
    "train.jit": ("model.sync_batch_norm", "model.split", "model.micro_batches"),
    "model.split": ("model.sync_batch_norm", "hvd.compression powersgd"),
    "model.micro_batches": ("model.sync_batch_norm",),
    # These reduce all gradients by themselves, or need every step.
    "hvd.compression powersgd": ("hvd.groups", "hvd.op adasum", "train.precision mixed_float16"),
    "hvd.groups": ("hvd.deterministic", "hvd.op adasum", DISTRIBUTED),
    "hvd.op": (DISTRIBUTED,),
    "hvd.compression": (DISTRIBUTED,),
    "hvd.deterministic": (DISTRIBUTED,),
    SEVERAL_OPTIMIZERS: (EMA_OF_ALL,),
    OWN_FIT: (BATCH_PER_RANK,),
    "model.loss": ("model.label_smoothing",),
    OWN_BATCHES: ("optimizer.learning_rate_scaling linear", "optimizer.learning_rate_scaling sqrt"),
}
"""Each with what it does not go together with. An option: it has another value than by default; a word after its name:
a value that begins with this word."""


def check(config: Any, defaults: Mapping[str, Any], facts: Collection[str] = ()) -> None:
    """Raises ConfigError for the first two options, or facts such as ELASTIC, that do not go together."""
    text = problem(config, defaults, facts)
    if text:
        raise ConfigError(text)


def problem(config: Any, defaults: Mapping[str, Any], facts: Collection[str] = ()) -> str:
    """Returns the message on what does not go together, or "" if all does."""
    for first, others in NOT_TOGETHER.items():
        one = _given(config, defaults, facts, first)
        if not one:
            continue
        for other in others:
            text = _given(config, defaults, facts, other)
            if text:
                return f"{one} and {text} do not go together: {ADVICE.get(other, 'leave one out')}"
    return ""


def _given(config: Any, defaults: Mapping[str, Any], facts: Collection[str], condition: str) -> str:
    """The fact, or the option of a condition with its value; "": it is not met."""
    if condition in facts:
        return condition
    option, _, word = condition.partition(" ")
    if option not in defaults:
        return ""
    value = attrgetter(option)(config)
    if value == defaults[option] or not str(value).startswith(word):
        return ""
    if isinstance(value, bool):
        return option
    return f"{option} {value}"


def lines(section: str = "") -> Iterator[str]:
    """Rows of the table as text: all, or those with an option of a section such as "model"."""
    for first, others in NOT_TOGETHER.items():
        shown = [other for other in others if not section or section in (_section(first), _section(other))]
        if shown:
            yield f"{first}: not with {', '.join(shown)}"


def _section(condition: str) -> str:
    """Section of the option of a condition; "": it is a fact."""
    option = condition.partition(" ")[0]
    return option.partition(".")[0] if "." in option else ""
