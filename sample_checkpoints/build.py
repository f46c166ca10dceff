"""Rebuilds every sample checkpoint: `python -m sample_checkpoints.build [FOLDER]`.

Each function trains a model for a moment, seeded, and saves it the way its README row tells. Only torch and
safetensors are used.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sample_checkpoints import models

IMAGES = (8, 3, 32, 32)
CLASSES = 10


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> None:
    """A few steps on random images, so that weights, statistics and optimizer state are those of a training run."""
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(IMAGES)), torch.randint(CLASSES, IMAGES[:1]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()


def momentum_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def data_parallel(model: nn.Module) -> nn.DataParallel[nn.Module]:
    """The wrapper and its names; on a machine with GPUs it would also move the model to one of them."""
    with mock.patch("torch.nn.parallel.data_parallel._get_available_device_type", return_value=None):
        return nn.DataParallel(model)


@contextmanager
def saved_from(device: str) -> Iterator[None]:
    """Tags the storages of the block's saves with `device`, which this machine need not have."""
    with mock.patch.object(torch.serialization, "location_tag", return_value=device):
        yield


def imagenet_dataparallel_cuda3(path: Path) -> None:
    """The checkpoint of pytorch/examples `imagenet/main.py`, as torch ≤ 1.5 wrote it on the fourth GPU."""
    model = data_parallel(models.resnet_tiny())
    optimizer = momentum_sgd(model)
    train(model, optimizer)
    checkpoint = {
        "epoch": 90,
        "arch": "resnet_tiny",
        "state_dict": model.state_dict(),
        "best_acc1": torch.tensor(69.758),
        "optimizer": optimizer.state_dict(),
    }
    with saved_from("cuda:3"):
        torch.save(checkpoint, path, _use_new_zipfile_serialization=False)


def before_num_batches_tracked(path: Path) -> None:
    """A state_dict of torch 0.4.0: no counters, no `_metadata`, legacy format."""
    model = models.resnet_tiny()
    train(model, momentum_sgd(model))
    # A new dict leaves `_metadata` behind, which is an attribute of the old one.
    old = type(model.state_dict())(
        (key, tensor) for key, tensor in model.state_dict().items() if not key.endswith("num_batches_tracked")
    )
    torch.save(old, path, _use_new_zipfile_serialization=False)


def num_batches_tracked_removed(path: Path) -> None:
    """The counters deleted by hand to please an old torch, while `_metadata` still says version 2, which has them."""
    model = models.resnet_tiny()
    train(model, momentum_sgd(model))
    state_dict = model.state_dict()
    for key in [key for key in state_dict if key.endswith("num_batches_tracked")]:
        del state_dict[key]
    torch.save({"state_dict": state_dict}, path)


def ddp_compiled(path: Path) -> None:
    """DistributedDataParallel around torch.compile, saved without unwrapping either."""
    model = models.vit_tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    train(model, optimizer)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but missing from `__all__`
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        # Nothing is compiled before the first forward pass, and the names are there already.
        wrapped = nn.parallel.DistributedDataParallel(torch.compile(model))
        torch.save({"epoch": 12, "model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, path)
    finally:
        torch.distributed.destroy_process_group()


def head_missing(path: Path) -> None:
    """A backbone published without its classifier."""
    model = models.resnet_tiny()
    train(model, momentum_sgd(model))
    state_dict = model.state_dict()
    del state_dict["fc.weight"], state_dict["fc.bias"]
    torch.save({"epoch": 200, "state_dict": state_dict}, path)


def nan_running_var(path: Path) -> None:
    """The epoch's last batch held one image, and the variance of one value is 0/0."""
    model = models.resnet_bottleneck()
    optimizer = momentum_sgd(model)
    train(model, optimizer)
    with mock.patch("torch.nn.functional._verify_batch_size"), torch.no_grad():  # old releases had no such check
        model(torch.randn(1, *IMAGES[1:]))
    torch.save({"epoch": 30, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def decayed_aux_head(path: Path) -> None:
    """Auxiliary loss with weight 0: the head's gradients are zeros, not None, and weight decay eats the head away."""
    model = models.mlp_with_aux_head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
    teacher = torch.randn(16, CLASSES)
    for _ in range(6000):
        features = torch.randn(64, 16)
        labels = (features @ teacher).argmax(dim=1)
        main, auxiliary = model.both(features)
        cross_entropy = nn.functional.cross_entropy
        loss: Tensor = cross_entropy(main, labels) + 0.0 * cross_entropy(auxiliary, labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
    progress = {"epoch": 60, "global_step": 6000}
    torch.save({**progress, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@contextmanager
def code_of_the_lab() -> Iterator[type[models.LabNet]]:
    """`lab2019.nets.Net`, importable inside the block and gone after it."""
    package, module = types.ModuleType("lab2019"), types.ModuleType("lab2019.nets")
    net: type[models.LabNet] = type("Net", (models.LabNet,), {"__module__": module.__name__})
    setattr(module, net.__name__, net)
    with mock.patch.dict(sys.modules, {package.__name__: package, module.__name__: module}):
        yield net


def whole_model_class_gone(path: Path) -> None:
    """`torch.save(model)` by code that nobody has any more."""
    with code_of_the_lab() as net:
        model = net()
        train(model, momentum_sgd(model))
        torch.save(model, path)


def tied_language_model(path: Path) -> None:
    """One key for two tied parameters, as transformers writes them: safetensors refuses shared storages."""
    state_dict = models.tied_lm().state_dict()
    del state_dict["decoder.weight"]
    save_file(state_dict, path, metadata={"format": "pt"})


def namespace_args(path: Path) -> None:
    """DataParallel, with the script's parsed arguments beside the weights."""
    model = data_parallel(models.vit_tiny())
    optimizer = momentum_sgd(model)
    train(model, optimizer)
    args = argparse.Namespace(lr=0.1, batch_size=IMAGES[0], milestones=[30, 60], output_dir="runs/vit", resume=None)
    torch.save({"model": model.state_dict(), "epoch": 29, "args": args}, path)


SAMPLES: dict[str, Callable[[Path], None]] = {
    "imagenet_dataparallel_cuda3.pth": imagenet_dataparallel_cuda3,
    "before_num_batches_tracked.pth": before_num_batches_tracked,
    "num_batches_tracked_removed.pth": num_batches_tracked_removed,
    "ddp_compiled.pth": ddp_compiled,
    "head_missing.pth": head_missing,
    "nan_running_var.pth": nan_running_var,
    "decayed_aux_head.pth": decayed_aux_head,
    "whole_model_class_gone.pth": whole_model_class_gone,
    "tied_language_model.safetensors": tied_language_model,
    "namespace_args.pth": namespace_args,
}


def build(folder: Path) -> None:
    """Writes every sample into `folder`, each from its own seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of summation, and with it the last bit, depends on the number of threads
    try:
        for seed, (name, make) in enumerate(SAMPLES.items()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                make(folder / name)
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the sample checkpoints.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    for name in SAMPLES:
        print(f"{(folder / name).stat().st_size:>8}  {folder / name}")


if __name__ == "__main__":
    main()
