"""Every sample has the defect that its README row claims, as torch shows; and the script makes exactly these files."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sample_checkpoints import models
from sample_checkpoints.build import SAMPLES, build, code_of_the_lab


def load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def without_prefix(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    assert all(key.startswith(prefix) for key in state_dict)
    return {key.removeprefix(prefix): tensor for key, tensor in state_dict.items()}


def strict_load_error(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict") as caught:
        model.load_state_dict(state_dict)
    return str(caught.value)


def keys_in(error: str, kind: str) -> list[str]:
    """The keys that torch's message lists as "Missing" or "Unexpected"."""
    listed = re.search(rf'{kind} key\(s\) in state_dict: ((?:"[^"]+"(?:, )?)+)', error)
    return re.findall(r'"([^"]+)"', listed[1]) if listed else []


def rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def test_folder_holds_the_samples_of_the_script_and_nothing_else(samples: Path) -> None:
    weights = [*samples.glob("*.pth"), *samples.glob("*.safetensors")]
    files = [path for path in weights if ".fixed" not in path.name]
    assert sorted(path.name for path in files) == sorted(SAMPLES)
    assert sum(path.stat().st_size for path in files) < 1_000_000


@pytest.mark.parametrize("name", SAMPLES)
def test_readme_has_a_row_for_each_sample(samples: Path, name: str) -> None:
    rows = [line for line in (samples / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert sum(f"`{name}`" in row.split("|")[1] for row in rows) == 1


def test_imagenet_dataparallel_is_a_legacy_file(samples: Path) -> None:
    head = (samples / "imagenet_dataparallel_cuda3.pth").read_bytes()[:32]
    assert pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) in head  # torch.serialization.MAGIC_NUMBER


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="this machine has a cuda:3")
def test_imagenet_dataparallel_asks_for_a_device_that_is_not_there(samples: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Attempting to deserialize object on (a )?CUDA device"):
        torch.load(samples / "imagenet_dataparallel_cuda3.pth", weights_only=True)


def test_imagenet_dataparallel_tags_every_storage_with_cuda_3(samples: Path) -> None:
    tags = set()

    def note(storage: Any, tag: str) -> Any:
        tags.add(tag)
        return storage

    torch.load(samples / "imagenet_dataparallel_cuda3.pth", map_location=note, weights_only=True)
    assert tags == {"cuda:3"}


def test_imagenet_dataparallel_differs_by_the_prefix_only(samples: Path) -> None:
    checkpoint = load(samples / "imagenet_dataparallel_cuda3.pth")
    assert list(checkpoint) == ["epoch", "arch", "state_dict", "best_acc1", "optimizer"]
    error = strict_load_error(models.resnet_tiny(), checkpoint["state_dict"])
    assert keys_in(error, "Unexpected") == list(checkpoint["state_dict"])
    models.resnet_tiny().load_state_dict(without_prefix(checkpoint["state_dict"], "module."))


def test_before_num_batches_tracked_loads_only_because_metadata_is_missing(samples: Path) -> None:
    state_dict = load(samples / "before_num_batches_tracked.pth")
    model = models.resnet_tiny()
    counters = {key for key in model.state_dict() if key.endswith("num_batches_tracked")}
    assert set(model.state_dict()) - set(state_dict) == counters
    assert not hasattr(state_dict, "_metadata")
    model.load_state_dict(state_dict)
    state_dict._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # torch's own attribute of the dict
    assert set(keys_in(strict_load_error(model, state_dict), "Missing")) == counters


def test_num_batches_tracked_removed_is_refused(samples: Path) -> None:
    state_dict = load(samples / "num_batches_tracked_removed.pth")["state_dict"]
    assert state_dict._metadata["bn1"] == {"version": 2}
    missing = keys_in(strict_load_error(models.resnet_tiny(), state_dict), "Missing")
    assert len(missing) == 12
    assert all(key.endswith(".num_batches_tracked") for key in missing)


def test_ddp_compiled_differs_by_the_wrappers_only(samples: Path) -> None:
    state_dict = load(samples / "ddp_compiled.pth")["model"]
    error = strict_load_error(models.vit_tiny(), state_dict)
    assert keys_in(error, "Unexpected") == list(state_dict)
    models.vit_tiny().load_state_dict(without_prefix(state_dict, "module._orig_mod."))


def test_head_missing_lacks_the_head_and_nothing_else(samples: Path) -> None:
    error = strict_load_error(models.resnet_tiny(), load(samples / "head_missing.pth")["state_dict"])
    assert keys_in(error, "Missing") == ["fc.weight", "fc.bias"]
    assert not keys_in(error, "Unexpected")


def test_nan_running_var_loads_and_gives_nan(samples: Path) -> None:
    state_dict = load(samples / "nan_running_var.pth")["state_dict"]
    assert [key for key, tensor in state_dict.items() if not tensor.isfinite().all()] == ["bottleneck.running_var"]
    model = models.resnet_bottleneck()
    model.load_state_dict(state_dict)
    model.eval()
    assert model(torch.randn(2, 3, 32, 32)).isnan().all()
    model.train()
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()  # so it is not noticed in training


def test_decayed_aux_head_shrank_as_its_optimizer_says(samples: Path) -> None:
    checkpoint = load(samples / "decayed_aux_head.pth")
    state_dict = checkpoint["state_dict"]
    model = models.mlp_with_aux_head()
    fresh = model.state_dict()
    (group,) = checkpoint["optimizer"]["param_groups"]
    predicted = math.exp(-checkpoint["global_step"] * group["lr"] * group["weight_decay"] / (1 - group["momentum"]))
    assert rms(state_dict["aux_head.weight"]) / rms(fresh["aux_head.weight"]) == pytest.approx(predicted, rel=0.5)
    for key in ("trunk.0.weight", "trunk.2.weight", "head.weight"):
        assert rms(state_dict[key]) > rms(fresh[key])
    model.load_state_dict(state_dict)
    assert model(torch.randn(2, 16)).isfinite().all()


def test_whole_model_cannot_be_unpickled(samples: Path) -> None:
    path = samples / "whole_model_class_gone.pth"
    with pytest.raises(pickle.UnpicklingError, match=r"Unsupported global: GLOBAL lab2019\.nets\.Net"):
        load(path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'lab2019'"):
        torch.load(path, map_location="cpu", weights_only=False)


def test_tied_language_model_has_one_of_two_keys(samples: Path) -> None:
    state_dict = load_file(samples / "tied_language_model.safetensors")
    model = models.tied_lm()
    assert model.decoder.weight is model.embedding.weight
    assert keys_in(strict_load_error(model, state_dict), "Missing") == ["decoder.weight"]
    model.load_state_dict({**state_dict, "decoder.weight": state_dict["embedding.weight"]})


def test_namespace_args_needs_unsafe_loading_and_has_a_prefix(samples: Path) -> None:
    path = samples / "namespace_args.pth"
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        load(path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)  # our own file
    assert checkpoint["args"].milestones == [30, 60]
    strict_load_error(models.vit_tiny(), checkpoint["model"])
    models.vit_tiny().load_state_dict(without_prefix(checkpoint["model"], "module."))


def assert_same(built: Any, shipped: Any) -> None:
    """Equal, except for what training amplifies: other CPUs sum in another order, so trained weights agree in RMS."""
    if isinstance(shipped, nn.Module):
        assert_same(built.state_dict(), shipped.state_dict())
    elif isinstance(shipped, dict):
        assert list(built) == list(shipped)
        for key in shipped:
            assert_same(built[key], shipped[key])
    elif isinstance(shipped, Tensor) and shipped.is_floating_point() and shipped.isfinite().all():
        assert (built.shape, built.dtype) == (shipped.shape, shipped.dtype)
        assert rms(built) == pytest.approx(rms(shipped), rel=0.25)
    elif isinstance(shipped, Tensor):
        torch.testing.assert_close(built, shipped, rtol=0, atol=0, equal_nan=True)
    else:
        assert built == shipped


@pytest.mark.slow
def test_script_rebuilds_what_is_shipped(samples: Path, tmp_path: Path) -> None:
    def read(path: Path) -> Any:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=False)  # our own files

    build(tmp_path)
    with code_of_the_lab():
        for name in SAMPLES:
            assert_same(read(tmp_path / name), read(samples / name))
