from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from tests.checks import bytes_of


def places(state_dict: Any) -> dict[str, tuple[int, int]]:
    return {key: (value.data_ptr(), value.untyped_storage().data_ptr()) for key, value in state_dict.items()}


def net() -> nn.Module:
    """With ties and buffers."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("with_model", [True, False], ids=["for a model", "without one"])
def test_renaming_copies_no_tensor(prefix: str, values: bool, with_model: bool) -> None:
    model, source = net(), net().state_dict()
    given = {prefix + key: value for key, value in source.items()}
    repaired, report = ckptfix.repair_state_dict(given, model if with_model else None, values=values)
    assert bool(report.fixed) is bool(prefix)
    assert places(repaired) == places(source)


def test_changing_metadata_copies_no_tensor() -> None:
    given = net().state_dict()
    del given["1.num_batches_tracked"]
    repaired, report = ckptfix.repair_state_dict(given, net())
    assert report.fixed
    added = repaired.pop("1.num_batches_tracked")
    assert added.item() == 0
    assert places(repaired) == places(given)


def test_only_changed_tensors_are_copied() -> None:
    given = {"module." + key: value for key, value in net().state_dict().items()}
    before = {key: bytes_of(value) for key, value in given.items()}
    given["module.2.bias"][3] = float("nan")
    repaired, _ = ckptfix.repair_state_dict(given, net(), zero_non_finite=True)
    was, now = places(given), places(repaired)
    assert [key for key in now if now[key] != was[f"module.{key}"]] == ["2.bias"]
    assert repaired["2.bias"][3] == 0
    assert given["module.2.bias"][3].isnan()
    for key, value in before.items():
        assert key == "module.2.bias" or bytes_of(given[key]) == value


def test_a_cast_does_not_copy_tensors_of_that_dtype() -> None:
    given = {"a": torch.ones(3, dtype=torch.float16), "b": torch.ones(3), "n": torch.tensor(2)}
    repaired, _ = ckptfix.repair_state_dict(given, dtype="fp16")
    assert repaired["b"].dtype == torch.float16
    assert [repaired[key].data_ptr() == given[key].data_ptr() for key in given] == [True, False, True]


def test_views_of_other_layouts_are_returned_unchanged() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    given = {"t": base.t(), "column": base[:, 2], "wide": torch.ones(1).expand(9), "parameter": nn.Parameter(base[1])}
    repaired, _ = ckptfix.repair_state_dict({"module." + key: value for key, value in given.items()})
    assert places(repaired) == places(given)
    assert {key: value.stride() for key, value in repaired.items()} == {k: v.stride() for k, v in given.items()}
    assert repaired["parameter"].requires_grad
