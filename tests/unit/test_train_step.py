"""What a model's training step assigns, and the layers around it that stay when a callback sets another step."""

from __future__ import annotations

from typing import Any

import keras

from ringtrain.hvd import keras_patches, train_step


def noting(seen: list[str], layer: str) -> Any:
    def wrapper(inner: Any) -> Any:
        def step(batch: Any) -> Any:
            seen.append(layer)
            return inner(batch)

        return step

    return wrapper


def test_weights_that_a_step_assigns_are_noted() -> None:
    """Not those that an optimizer updates."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    kernel, bias = model.trainable_weights
    optimizer = keras.optimizers.SGD(0.1)
    assigned: list[Any] = []
    with keras_patches.assigned_weights(model.trainable_weights, assigned.append):
        optimizer.apply([keras.ops.ones_like(kernel), keras.ops.ones_like(bias)], [kernel, bias])
        assert not assigned
        bias.assign_add([1.0])
        kernel.assign(kernel * 2)
    assert [id(weight) for weight in assigned] == [id(bias), id(kernel)]
    kernel.assign(kernel * 2)
    assert len(assigned) == 2 and "assign" not in vars(kernel)


def test_a_step_that_a_callback_sets_later_is_kept_with_what_it_calls() -> None:
    seen: list[str] = []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    vars(model)["train_step"] = lambda batch: seen.append("first")
    train_step.wrap(model, "timing", noting(seen, "timing"))
    inner = model.train_step
    vars(model)["train_step"] = lambda batch: (seen.append("own"), inner(batch))
    assert train_step.is_set_on_object(model)
    train_step.wrap(model, "ranks", noting(seen, "ranks"))
    model.train_step(None)
    assert seen == ["ranks", "own", "timing", "first"]
    train_step.unwrap(model, "ranks")
    seen.clear()
    model.train_step(None)
    assert seen == ["own", "timing", "first"]
