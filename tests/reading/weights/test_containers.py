import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.errors import HostileError, UnreadableError, UsageError
from tests.attacks.crafted import name, tensor, text, torch_zip
from tests.reading.files import opened, saved

NET = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.zeros(2)}
EMA = {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)}
AVERAGED = torch.optim.swa_utils.AveragedModel(torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 2)})).state_dict()
OPTIMIZER = {
    "state": {0: {"exp_avg": torch.zeros(4), "step": torch.tensor(1.0)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (NET, ()),
        ({"state_dict": NET}, ("state_dict",)),
        ({"model": NET, "epoch": 3}, ("model",)),
        ({"state_dict": NET, "optimizer": OPTIMIZER}, ("state_dict",)),
        ({"optimizer": OPTIMIZER, "net": {"state_dict": NET}}, ("net", "state_dict")),
        ({"model_ema": EMA, "model": NET}, ("model",)),
        ({"ema": EMA, "something": NET}, ("something",)),
        ({"average": {**EMA, "decay": torch.ones(1)}, "student": NET}, ("student",)),
        ({"slow": AVERAGED, "student": NET}, ("student",)),
        ({"replay": {"obs": torch.ones(9, 2), "a": torch.ones(9), "i": torch.arange(9)}, "agent": NET}, ("agent",)),
        ({"splats": {name: torch.ones(9, 2) for name in "xyz"}, "camera": NET}, ("splats",)),
        ({"normalizer": {"_mean": torch.ones(9), "_var": torch.ones(9), "_std": torch.ones(9)}, "a": NET}, ("a",)),
        ({"opt": {"state": [{"mom": torch.ones(9), "sqr": torch.ones(9)}], "hypers": []}, "agent": NET}, ("agent",)),
        ({"model": {**NET, "more": torch.ones(1)}, "state_dict": NET}, ("state_dict",)),
        ([3, NET], (1,)),
        ((NET, 3), (0,)),
        ({"a": {"b": {"c": NET}}}, ("a", "b", "c")),
        ({5: NET}, (5,)),
        ({**NET, "epoch": 3}, ()),
        ({"count": torch.tensor(3), "state_dict": NET}, ("state_dict",)),
    ],
    ids=[
        "the top",
        "state_dict",
        "model",
        "beside an optimizer",
        "below the top",
        "beside its average",
        "beside an average",
        "beside an average with a number",
        "beside an AveragedModel of any name",
        "beside a replay buffer",
        "Gaussians",
        "beside a normaliser",
        "beside fastai's optimizer",
        "the better name",
        "in a list",
        "in a tuple",
        "deep",
        "under a number",
        "with a number among it",
        "beside a tensor",
    ],
)
def test_the_state_dict_is_found(value, path, tmp_path):
    checkpoint = opened(saved(value, tmp_path))
    assert checkpoint.container == path
    assert all(each.name not in ("replay", "opt.state[0]", "normalizer") for each in checkpoint.candidates)


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_the_other_state_dict_is_taken_when_it_is_named(weights, tmp_path):
    checkpoint = opened(saved({"ema": EMA, "model": NET}, tmp_path), weights)
    assert checkpoint.container == (weights,)
    assert {candidate.name for candidate in checkpoint.candidates} == {"ema", "model"}


def test_a_dict_of_tensors_in_a_state_dict_is_taken_when_it_is_named(tmp_path):
    path = saved({**NET, "ema": EMA}, tmp_path)
    assert opened(path).container == ()
    assert list(opened(path, "ema").specs) == list(EMA)


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(UsageError, match="found: ema, model"):
        opened(saved({"ema": EMA, "model": NET}, tmp_path), "teacher")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": torch.empty(3, device="meta")}, "saved from the meta device"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "the key 1 twice"),
    ],
    ids=["no values", "a key twice"],
)
def test_weights_that_cannot_be_had_say_why(value, message, tmp_path):
    with pytest.raises(UnreadableError, match=message):
        opened(saved(value, tmp_path))


def test_keys_that_are_not_text_become_text_and_are_remarked(tmp_path):
    checkpoint = opened(saved({0: torch.ones(1), (1, "a"): torch.zeros(1)}, tmp_path))
    assert checkpoint.keys() == ["0", "(1, 'a')"]
    assert [remark.kind.value for remark in checkpoint.remarks] == ["non-string-key"] * 2


def test_the_metadata_goes_with_its_state_dict(tmp_path):
    net = torch.nn.Linear(1, 1).state_dict()
    assert opened(saved({"a": OrderedDict(NET), "state_dict": net}, tmp_path)).metadata == {"": {"version": 1}}


def test_the_sizes_and_devices_of_tensordict_stay_in_the_metadata(tmp_path):
    state: Any = OrderedDict(NET)
    state._metadata = OrderedDict({"": {"batch_size": torch.Size([3]), "device": torch.device("cpu"), "of": [1, "a"]}})
    checkpoint = opened(saved(state, tmp_path))
    opened_state: Any = checkpoint.state_dict()
    assert (checkpoint.remarks, opened_state._metadata) == ((), state._metadata)
    for form in ("pth", "safetensors"):
        path = tmp_path / f"out.{form}"
        assert ckptfix.repair(checkpoint.path, format=form, output=path).report.exit_code == 0
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert (written._metadata, type(written._metadata[""]["batch_size"])) == (state._metadata, torch.Size)


def test_device_tags_are_facts_and_nothing_is_put_there(tmp_path):
    path = tmp_path / "cuda.pth"
    from tests.attacks.crafted import PROTO, storage

    path.write_bytes(torch_zip(PROTO + b"}" + text("w") + tensor(base=storage(device=text("cuda:3"))) + b"s."))
    checkpoint = opened(path)
    assert checkpoint.devices == ("cuda:3",)
    assert checkpoint.read("w").device.type == "cpu"


def test_a_state_dict_inside_of_an_unknown_object_is_found(tmp_path):
    from tests.attacks.crafted import PROTO

    inner = b"}(" + text("module.w") + tensor() + b"u"
    path = tmp_path / "object.pth"
    path.write_bytes(torch_zip(PROTO + name("trainer.State") + b")\x81}" + text("weights") + inner + b"sb."))
    assert opened(path).container == ("weights",)
    written = ckptfix.repair(path, output=tmp_path / "out.pth").report.output
    assert written is not None
    assert list(torch.load(written, weights_only=True)["weights"]) == ["w"]


def test_the_graphs_of_a_dataset_are_not_weights(tmp_path):
    from tests.attacks.crafted import PROTO

    graph = name("torch_geometric.data.data.Data") + b")\x81}" + text("_mapping") + b"}" + text("x") + tensor() + b"ssb"
    path = tmp_path / "dataset.pt"
    path.write_bytes(torch_zip(PROTO + b"](" + graph + b"e."))
    with pytest.raises(UnreadableError, match="no weights"):
        opened(path)


FURTHER_DOWN = {
    "a list of state_dicts beside a figure": ({"state_dict": [NET], "acc": torch.tensor(0.5)}, ("state_dict", 0)),
    "two networks beside a step": ({"models": {"g": NET, "d": NET}, "step": torch.tensor(3)}, ("models", "g")),
    "a dict in a dict": ({"ckpt": {"model": NET}, "iter": torch.tensor(3)}, ("ckpt", "model")),
    "several figures": ({"net_g": NET, "mean": torch.ones(3), "std": torch.ones(3)}, ("net_g",)),
}


@pytest.mark.parametrize(("value", "path"), FURTHER_DOWN.values(), ids=FURTHER_DOWN)
def test_figures_around_the_weights_are_not_the_weights(value, path, tmp_path):
    assert opened(saved(value, tmp_path)).container == path


def test_an_extra_state_does_not_hide_its_state_dict(tmp_path):
    value = {"a.weight": torch.ones(2), "a._extra_state": {"scale": torch.ones(1)}}
    assert opened(saved(value, tmp_path)).container == ()


class VecNormalize:
    """What stable-baselines3 pickles next to its models."""


def test_running_statistics_and_a_random_state_are_not_weights(tmp_path):
    value = VecNormalize()
    value.__dict__["obs_rms"] = {"mean": np.zeros(3), "var": np.ones(3), "count": np.float64(3)}
    value.__dict__["np_random"] = np.random.RandomState(0)
    path = tmp_path / "vecnormalize.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(UnreadableError, match="no weights found"):
        opened(path)


def test_a_random_state_next_to_figures_is_not_weights(tmp_path):
    path = tmp_path / "state.pkl"
    path.write_bytes(pickle.dumps({"w": {"a.weight": np.ones((3, 3))}, "rng": np.random.RandomState(0)}))
    assert opened(path).container == ("w",)
    path.write_bytes(pickle.dumps({"rng": np.random.RandomState(0)}))
    with pytest.raises(UnreadableError, match="no weights found"):
        opened(path)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_key_of_numpys_generator_is_not_weights(legacy, tmp_path):
    state = np.random.RandomState(0).get_state(legacy=legacy)
    path = tmp_path / "state.pkl"
    for value in ({"rng": state, "w": {"a.weight": np.ones((3, 3))}}, {"a.weight": np.ones((3, 3)), "rng": state}):
        path.write_bytes(pickle.dumps(value))
        checkpoint = opened(path)
        assert (list(checkpoint.specs), len(checkpoint.candidates)) == (["a.weight"], 1)
    for value in (state, {"rng": state, "python": [1]}):
        path.write_bytes(pickle.dumps(value))
        with pytest.raises(UnreadableError, match="holds the states of random generators"):
            opened(path)


def test_a_plain_dict_of_arrays_is_weights(tmp_path):
    path = tmp_path / "params.pkl"
    path.write_bytes(pickle.dumps({"mean": np.zeros(3), "var": np.ones(3)}))
    assert opened(path).keys() == ["mean", "var"]


@pytest.mark.parametrize("digits", [900, 1000, 5000])
def test_a_number_of_thousands_of_digits_in_a_name_is_refused(digits, tmp_path):
    """Numbers of layers are compared as such, which Python refuses for so many digits."""
    path = saved({"layers.1.w": torch.ones(2), f"layers.{'1' * digits}.w": torch.ones(2)}, tmp_path)
    if digits < 1000:
        assert len(opened(path).specs) == 2
        return
    with pytest.raises(HostileError, match="a number of 1000 digits"):
        opened(path)
