"""Our optimizers and schedules on a ring: as on one rank with the big batch, and after loading as before."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import small

import ringtrain.hvd as hvd
from ringtrain.optim.optimizers import LARS, SGD, LearningRate, last_learning_rate
from ringtrain.optim.schedules import DECAYS, Schedule

TIGHT = 1e-6
WARMING = Schedule("cosine", learning_rate=0.4, initial_learning_rate=0.1, warmup_steps=3, num_steps=8)


def lars_equals_big_batch(wrap=hvd.DistributedOptimizer):
    for options in ({"weight_decay": 0.01}, {"global_clipnorm": 0.01}, {"momentum": 0.0}):
        _equals_big_batch(lambda options=options: LARS(_rate(), trust_coefficient=0.1, **options), wrap)


def sgd_equals_big_batch(wrap=hvd.DistributedOptimizer):
    for options in ({"weight_decay": 0.01}, {"nesterov": True}, {"global_clipnorm": 0.01}):
        _equals_big_batch(lambda options=options: SGD(_rate(), momentum=0.9, **options), wrap)


def without_the_wrapper_they_differ():
    for control in (lars_equals_big_batch, sgd_equals_big_batch):
        message = small.raised(AssertionError, lambda control=control: control(wrap=small.plain))
        assert "apart" in message


def every_rank_steps_at_the_rate_of_the_schedule():
    for name in DECAYS:
        schedule = dataclasses.replace(WARMING, name=name, milestone_steps=(5,))
        model = small.build()
        model.compile(hvd.DistributedOptimizer(SGD(_rate(schedule))), "mse")
        used = []
        for x, y in small.shares(8):
            model.train_on_batch(x, y)
            used.append(last_learning_rate(model.optimizer))
        assert np.allclose(used, schedule.rate(np.arange(8)), rtol=1e-6)
        everybody = hvd.allgather_object(used)
        assert all(others == used for others in everybody)


def accumulated_steps_are_those_of_the_big_batch_at_its_rates():
    """Keras hands its schedules batches, not updates: a schedule that does not know would be at the wrong rate."""
    updates = small.global_batches(8)
    merged = [tuple(np.concatenate(part) for part in zip(*updates[i : i + 2], strict=True)) for i in range(0, 8, 2)]
    slow = dataclasses.replace(WARMING, warmup_steps=4, num_steps=8, accumulation_steps=2)
    fast = dataclasses.replace(WARMING, warmup_steps=2, num_steps=4)
    unaware = dataclasses.replace(slow, accumulation_steps=1)
    for make in (lambda rate, **k: LARS(rate, trust_coefficient=0.1, **k), lambda rate, **k: SGD(rate, 0.9, **k)):
        reference = small.alone(small.build(), make(_rate(fast)), merged)
        for schedule, right in ((slow, True), (unaware, False)):
            optimizer = hvd.DistributedOptimizer(make(_rate(schedule), gradient_accumulation_steps=2))
            apart = small.distance(small.train(small.build(), optimizer, small.shares(8)), reference)
            assert (apart < TIGHT) == right, apart


def a_loaded_optimizer_goes_on_at_the_rate_where_it_was():
    lars = lambda: LARS(_rate(), weight_decay=0.01, trust_coefficient=0.1)  # noqa: E731
    sgd = lambda: SGD(_rate(), momentum=0.9, nesterov=True, weight_decay=0.01)  # noqa: E731
    for make in (lars, sgd):
        whole = small.train(small.build(), hvd.DistributedOptimizer(make()), small.shares(8))
        half = small.train(small.build(), hvd.DistributedOptimizer(make()), small.shares(8)[:4])
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            half.save(path)
            config = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
            loaded = hvd.load_model(path)
        assert config["registered_name"] == f"ringtrain>{type(make()).__name__}", config
        assert config["config"]["learning_rate"]["registered_name"] == "ringtrain>LearningRate", config
        assert hvd.check_averaging(loaded.optimizer) == "averaged"
        assert loaded.optimizer._learning_rate.schedule == WARMING
        for x, y in small.shares(8)[4:]:
            loaded.train_on_batch(x, y)
        assert small.distance(loaded, whole) == 0
        hvd.check_in_sync(loaded)


def _rate(schedule: Schedule = WARMING) -> LearningRate:
    return LearningRate(**dataclasses.asdict(schedule))


def _equals_big_batch(make, wrap):
    model = small.train(small.build(), wrap(make()), small.shares(8))
    apart = small.distance(model, small.alone(small.build(), make(), small.global_batches(8)))
    assert apart < TIGHT, f"{apart} apart from the reference"
    start = small.distance(model, small.build())
    assert start > 1e-3, f"moved by no more than {start}"
