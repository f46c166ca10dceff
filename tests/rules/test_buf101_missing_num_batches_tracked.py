"""BUF101 on real BatchNorms: which counters are supplied, and when to leave it."""

import pickle
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.errors import UsageError
from ckptfix.rules.buf101_missing_num_batches_tracked import missing_num_batches_tracked
from tests.rules.proposals import propose, repaired


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))


def without_counters(module: nn.Module, version: int | None = None) -> OrderedDict[str, torch.Tensor]:
    """Its state_dict without counters, and with `_metadata` of this version for every module, or none."""
    state = OrderedDict(
        (key, value) for key, value in module.state_dict().items() if not key.endswith("num_batches_tracked")
    )
    if version is not None:
        metadata = {name: {"version": version} for name, _ in module.named_modules()}
        state._metadata = metadata  # type: ignore[attr-defined]  # torch hangs it there
    return state


def frozen(module: nn.Module, version: int | None = 1) -> dict[str, torch.Tensor]:
    """The state_dict of a model whose first norm is torchvision's FrozenBatchNorm2d: no counter, and version 1."""
    state = module.state_dict()
    del state["1.num_batches_tracked"]
    state._metadata["1"] = {} if version is None else {"version": version}  # type: ignore[attr-defined]  # torch hangs it there
    return state


STATISTICS = {"obs.running_mean": torch.zeros(3), "obs.running_var": torch.ones(3)}


@pytest.mark.parametrize(
    ("state", "model", "settings"),
    [
        pytest.param(net().state_dict(), None, {}, id="all counters are there"),
        pytest.param(nn.Linear(2, 2).state_dict(), nn.Linear(2, 2), {}, id="no BatchNorm"),
        pytest.param(without_counters(net()), None, {"for_torch": "0.4.0"}, id="for a torch that has no counters"),
        pytest.param(without_counters(net()), net(), {"for_torch": "0.3.1"}, id="the same with a target"),
        pytest.param(without_counters(net(), 3), None, {}, id="version 3: the frozen BatchNorm of detectron2"),
        pytest.param(without_counters(net(), 1), None, {}, id="version 1: torchvision's frozen BatchNorm, or supplied"),
        pytest.param(frozen(net()), None, {}, id="a frozen BatchNorm of version 1 beside a head that counts"),
        pytest.param(frozen(net(), None), None, {}, id="the same where its row has no version"),
        pytest.param(dict(frozen(net())), None, {}, id="a frozen BatchNorm beside one that counts, without metadata"),
        pytest.param(STATISTICS, None, {}, id="statistics of observations, and no norm with a weight"),
        pytest.param(
            {**STATISTICS, "obs.weight": torch.ones(3), "obs.count": torch.tensor(9.0)},
            None,
            {},
            id="a count of its own",
        ),
        pytest.param(without_counters(net()), nn.Conv1d(2, 3, 1), {}, id="the target wants none"),
        pytest.param({"running_mean": torch.zeros(3)}, None, {}, id="a mean alone is no BatchNorm"),
        pytest.param(
            {"running_mean": torch.zeros(3, 2), "running_var": torch.zeros(3, 2)},
            None,
            {},
            id="per-position statistics",
        ),
        pytest.param({"weight": torch.zeros(3)}, nn.BatchNorm1d(3), {}, id="the mean is missing too"),
    ],
)
def test_noop(state, model, settings):
    assert propose(missing_num_batches_tracked, state, model, **settings) == []


@pytest.mark.parametrize(
    ("version", "has_target"),
    [
        pytest.param(None, False, id="no metadata, alone"),
        pytest.param(2, False, id="after 0.4.1, alone"),
        pytest.param(None, True, id="no metadata, with a target"),
        pytest.param(1, True, id="before 0.4.1, with a target"),
        pytest.param(2, True, id="after 0.4.1, with a target"),
    ],
)
def test_supplied(version, has_target):
    model = net()
    state = repaired(missing_num_batches_tracked, without_counters(model, version), model if has_target else None)
    model.load_state_dict(state, strict=True)
    assert state.keys() == model.state_dict().keys()
    for key in ("1.num_batches_tracked", "2.num_batches_tracked"):
        assert (state[key].dtype, state[key].shape, state[key].item()) == (torch.int64, (), 0)


def test_a_stored_count_is_kept():
    model = net()
    state = without_counters(model)
    state["1.num_batches_tracked"] = torch.tensor(7)
    (finding,) = propose(missing_num_batches_tracked, state, model)
    assert finding.keys == ("2.num_batches_tracked",)
    assert repaired(missing_num_batches_tracked, state, model)["1.num_batches_tracked"].item() == 7


@pytest.mark.parametrize("format", ["safetensors", "numpy"])
def test_noop_frozen_norms_in_safetensors(tmp_path, format):
    file, state = tmp_path / "detr", dict(without_counters(net()))
    if format == "safetensors":
        save_file(state, file)
    else:
        file.write_bytes(pickle.dumps({"model": {key: value.numpy() for key, value in state.items()}}))
    assert ckptfix.check(file, select=("BUF",)).findings == ()
    (finding,) = ckptfix.check(file, net(), select=("BUF",)).findings
    assert finding.code == "BUF101", "the target wants them"


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_torch_file_without_metadata_has_old_norms(tmp_path, is_zip):
    torch.save(dict(without_counters(net())), tmp_path / "old.pth", _use_new_zipfile_serialization=is_zip)
    (finding,) = ckptfix.check(tmp_path / "old.pth", select=("BUF",)).findings
    assert finding.code == "BUF101"


@pytest.mark.parametrize("version", [1, 2], ids=["version 1", "version 2"])
def test_one_of_several_norms_of_a_version_lacks_its_counter(version):
    state = without_counters(net(), version)
    state["2.num_batches_tracked"] = torch.tensor(7)
    (finding,) = propose(missing_num_batches_tracked, state)
    assert finding.keys == ("1.num_batches_tracked",)


@pytest.mark.parametrize(
    ("version", "level"),
    [pytest.param(None, Level.WARNING, id="torch supplies it"), pytest.param(2, Level.ERROR, id="a strict load fails")],
)
def test_the_level_depends_on_the_metadata(version, level):
    model = net()
    state = without_counters(model, version)
    (finding,) = propose(missing_num_batches_tracked, state)
    assert finding.level == level
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    if level == Level.ERROR:
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            model.load_state_dict(state, strict=True)
    else:
        model.load_state_dict(state, strict=True)


def test_for_torch_has_to_be_a_version():
    with pytest.raises(UsageError, match="write it like"):
        propose(missing_num_batches_tracked, without_counters(net()), for_torch="old")
