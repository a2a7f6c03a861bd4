"""PyTorch's DistributedDataParallel over Gloo: pip install 'ringtrain[torch]', or the smaller CPU-only wheels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.one_start import Trained, checksum
from peers.training import Training
from ringtrain.errors import ConfigError, MissingDependency

try:
    import torch
    from torch import distributed, nn
except ImportError as error:
    raise MissingDependency(f"PyTorch is not installed ({error}): pip install 'ringtrain[torch]'") from error


def run(training: Training) -> Trained:
    """Runs one process per worker, with the model written in PyTorch."""
    if training.config.model.name not in MODELS:
        raise ConfigError(f"PyTorch's part is written for model.name {' or '.join(MODELS)}")

    def build() -> Any:
        height, width, channels = training.data_set.input_shape
        model = MODELS[training.config.model.name](height, width, channels, training.data_set.num_classes)
        for layer in model:
            if hasattr(layer, "weight"):  # initialized as in Keras
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        return model

    return _train(training, build, lambda images: images.transpose(0, 3, 1, 2).copy())  # channels first


def run_keras(training: Training) -> Trained:
    """Runs one process per worker, with Keras' model on Keras' PyTorch backend."""
    return _train(training, training.model, lambda images: images)


def _train(training: Training, build: Callable[[], Any], layout: Callable[[Any], Any]) -> Trained:
    config, numbers = training.config, training.numbers
    if config.optimizer.name not in OPTIMIZERS:
        raise ConfigError(f"PyTorch's part is written for optimizer.name {' or '.join(OPTIMIZERS)}")
    torch.set_num_threads(config.device.threads)
    torch.manual_seed(config.seed)
    address = f"tcp://localhost:{training.ports[0]}"
    distributed.init_process_group("gloo", address, rank=training.rank, world_size=training.num_workers)
    model = build()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = OPTIMIZERS[config.optimizer.name](model.parameters(), numbers.learning_rate, config.optimizer.momentum)
    images, labels = training.samples(range(training.rank, training.rank + 1))
    inputs = torch.from_numpy(layout(images))
    batches = zip(inputs.split(numbers.batch_size), torch.from_numpy(labels).split(numbers.batch_size), strict=True)
    trained = Trained(numbers.batch_size * training.num_workers)
    for x, y in batches:
        loss = nn.functional.cross_entropy(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained.note(loss.item())
    trained.checksums = [checksum(model.parameters())]
    distributed.destroy_process_group()
    return trained


def _mlp(height: int, width: int, channels: int, num_classes: int) -> Any:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(height * width * channels, 100), nn.Sigmoid(), nn.Linear(100, num_classes)
    )


def _cnn(height: int, width: int, channels: int, num_classes: int) -> Any:
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 1024), nn.ReLU()),
        nn.Linear(1024, num_classes),
    )


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD,
    "adam": lambda weights, learning_rate, momentum: torch.optim.Adam(weights, learning_rate),
}
MODELS = {"cnn": _cnn, "mlp": _mlp}
