"""PyTorch's DistributedDataParallel over Gloo: pip install 'ringtrain[torch]', or the smaller CPU-only wheels."""

from __future__ import annotations

from typing import Any

from peers.training import Training
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.lab.bench.peers import Trained, checksum

try:
    import torch
    from torch import distributed, nn
except ImportError as error:
    raise MissingDependency(f"PyTorch is not installed ({error}): pip install 'ringtrain[torch]'") from error


def run(training: Training) -> Trained:
    """Runs one process per worker."""
    config, numbers = training.config, training.numbers
    if config.optimizer.name != "sgd" or config.model.name not in MODELS:
        raise ConfigError(f"PyTorch's part is written for sgd, and model.name {' or '.join(MODELS)}")
    torch.set_num_threads(config.device.threads)
    torch.manual_seed(config.seed)
    address = f"tcp://localhost:{training.ports[0]}"
    distributed.init_process_group("gloo", address, rank=training.rank, world_size=training.num_workers)
    height, width, channels = training.data_set.input_shape
    model = MODELS[config.model.name](height, width, channels, training.data_set.num_classes)
    for layer in model:
        if hasattr(layer, "weight"):  # initialized as in Keras
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), numbers.learning_rate, config.optimizer.momentum)
    images, labels = training.samples(range(training.rank, training.rank + 1))
    inputs = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())  # channels first, as in PyTorch
    batches = zip(inputs.split(numbers.batch_size), torch.from_numpy(labels).split(numbers.batch_size), strict=True)
    trained = Trained(numbers.batch_size * training.num_workers)
    for x, y in batches:
        loss = nn.functional.cross_entropy(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained.note(loss.item())
    trained.checksums = [checksum(weight.detach() for weight in model.parameters())]
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


MODELS = {"cnn": _cnn, "mlp": _mlp}
