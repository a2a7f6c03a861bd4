"""Where a model is cut, what is refused, and which devices a rank with several has."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from ringtrain import hvd
from ringtrain.config.sections import DeviceConfig
from ringtrain.errors import DeviceError
from ringtrain.hvd.model_parallel import stages
from ringtrain.training import devices

CPU = ["CPU:0"] * 9


@given(st.lists(st.integers(0, 50), min_size=4, max_size=9), st.integers(2, 4))
def test_no_stage_has_more_than_its_share_and_the_two_largest_layers(costs: list[int], number: int) -> None:
    edges = [0, *stages.balanced(costs, range(1, len(costs)), number), len(costs)]
    assert edges == sorted(set(edges)) and len(edges) == number + 1
    largest = max(sum(costs[begin:end]) for begin, end in itertools.pairwise(edges))
    assert largest <= sum(costs) / number + 2 * max(costs)


def test_a_stage_begins_where_one_tensor_is_all_that_it_needs() -> None:
    inputs = keras.Input((6,))
    first = layers.Dense(6, name="first")(inputs)
    second = layers.Dense(6, name="second")(first)
    model = keras.Model(inputs, layers.Dense(2, name="last")(layers.Add(name="sum")([first, second])))
    assert begins(model) == ["second", "last"]
    made = stages.stages_of(model, 3, CPU[:3])
    assert [[layer.name for layer in stage.layers] for stage in made] == [["first"], ["second", "sum"], ["last"]]
    with pytest.raises(ValueError, match="9 stages, but the model can be cut at 2 places: second, last"):
        stages.stages_of(model, 9, CPU)


def begins(model: keras.Model) -> list[str]:
    """Names of the layers with which a stage can begin."""
    nodes = stages.nodes_of(model)
    return [nodes[index].operation.name for index in stages.places_to_cut(nodes, model.outputs)]


def test_a_stage_does_not_begin_with_the_activation_of_a_layer() -> None:
    hidden = [layers.Dense(4, name="first"), layers.Activation("tanh", name="tanh"), layers.Dense(4, name="last")]
    model = keras.Sequential([keras.Input((6,)), *hidden])
    assert begins(model._functional) == ["last"]


def test_a_layer_that_occurs_twice_is_in_one_stage() -> None:
    inputs, twice = keras.Input((6,)), layers.Dense(6, name="twice")
    tensor = layers.Dense(6, name="between")(twice(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="last")(twice(tensor)))
    assert begins(model) == ["last"]


class Own(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def test_what_cannot_be_split_is_refused() -> None:
    inputs = keras.Input((6,))
    with pytest.raises(ValueError, match="Own has a train_step or call of its own"):
        hvd.split(Own(inputs, layers.Dense(1)(inputs)), 1)
    with pytest.raises(ValueError, match="is not built"):
        hvd.split(keras.Sequential([layers.Dense(1)]), 1)
    with pytest.raises(ValueError, match="needs 9 devices, this process has "):
        hvd.split(keras.Sequential([keras.Input((6,)), layers.Dense(1)]), 9)
    trained = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    trained.compile("sgd", "mse")
    trained.train_on_batch(np.ones((2, 6)), np.ones((2, 1)))
    with pytest.raises(ValueError, match="has slots already"):
        hvd.split(trained, 1)


def test_each_rank_has_the_next_gpus_of_its_host() -> None:
    def of(gpus: int, local_rank: int, local_size: int, num_devices: int) -> devices.Pinning:
        return devices.plan([*range(gpus)], local_rank, local_size, DeviceConfig(), 8, 8, "node1", num_devices)

    assert [of(8, rank, 4, 2).gpu for rank in range(4)] == [0, 2, 4, 6]
    assert of(2, 3, 4, 2).gpu == 0, "the launcher shows each rank its own two"
    assert str(of(8, 1, 4, 2)).startswith("2 times GPU")
    with pytest.raises(DeviceError, match=r"^node1: 4 ranks with 3 devices each, but 8 GPUs: start fewer ranks"):
        of(8, 2, 4, 3)
    assert of(0, 0, 2, 2) == devices.Pinning(num_threads=2, num_devices=2), "logical CPUs share the rank's cores"
