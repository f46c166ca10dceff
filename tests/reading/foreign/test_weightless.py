import io
import random

import numpy as np
import pytest
import torch

from ckptfix.errors import UnreadableError
from tests.reading.files import opened, saved

STATE = {
    "state": {0: {"exp_avg": torch.zeros(4), "step": torch.tensor(1.0)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"optimizer": STATE, "net": {"fc.weight": torch.ones(2)}}, id="state"),
        pytest.param([STATE, {"fc.weight": torch.ones(2)}], id="in-a-list"),
        pytest.param({"optimizer": torch.optim.Adam([torch.ones(2)]), "net": torch.nn.Linear(2, 2)}, id="object"),
    ],
)
def test_weights_next_to_an_optimizer_are_found(value, tmp_path):
    assert opened(saved(value, tmp_path)).keys()[0].endswith("weight")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(STATE, id="state"),
        pytest.param({"optimizer": STATE, "epoch": 3}, id="below"),
        pytest.param({"optimizer_states": [STATE, STATE]}, id="several"),
        pytest.param([STATE, 3], id="in-a-list"),
        pytest.param((STATE,), id="in-a-tuple"),
        pytest.param(torch.optim.Adam([torch.ones(2)]), id="object"),
        pytest.param({"optimizer": torch.optim.SGD([torch.ones(2)])}, id="object-below"),
        pytest.param({"gan": {"generator": {"optimizer": STATE}}}, id="deep"),
        pytest.param(
            {n: {"step": 3, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for n in (4, 5)}, id="shard"
        ),
    ],
)
def test_an_optimizer_alone_is_named(value, tmp_path):
    with pytest.raises(UnreadableError, match="an optimizer's state and no model weights"):
        opened(saved(value, tmp_path))


def test_a_scheduler_alone_is_named(tmp_path):
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(2)]), 3)
    with pytest.raises(UnreadableError, match="the state of a learning-rate scheduler and no model weights; look for"):
        opened(saved(scheduler.state_dict(), tmp_path))


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ({}, r"an empty dict; is it"),
        ([], r"an empty list; is it"),
        (None, r"None and nothing else; is it"),
        (3, r"an int without tensors under names; is it"),
        ([3] * 5000, r"a list without tensors under names; is it"),
        ({"epoch": 3, "loss": 0.1}, r"a dict without tensors under names \(it has 'epoch', 'loss'\); is it"),
        (torch.ones(3, 4), r"a single tensor of float32 \(3, 4\), which has no name; is it"),
    ],
    ids=["empty", "empty-list", "none", "number", "numbers", "log", "bare-tensor"],
)
def test_anything_else_is_described(value, held, tmp_path):
    with pytest.raises(UnreadableError, match=f"no weights found in it: the file holds {held}"):
        opened(saved(value, tmp_path))


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ([torch.ones(2), torch.ones(3)], "2 tensors in lists; if they"),
        ({"decay": 0.9, "shadow_params": [torch.ones(2)]}, "1 tensor in lists under 'decay', 'shadow_params'; if"),
    ],
    ids=["parameters", "average"],
)
def test_tensors_without_names_are_counted(value, held, tmp_path):
    with pytest.raises(UnreadableError, match=f"no weights under names: the file holds {held}"):
        opened(saved(value, tmp_path))


@pytest.mark.parametrize(
    "wrap", [lambda file: file.getvalue(), lambda file: bytearray(file.getvalue()), lambda file: file]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_torch_file_in_bytes_is_named(wrap, zipped, tmp_path):
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnreadableError, match="entry 'torch' holds a torch file as bytes"):
        opened(saved({"torch": wrap(file), "config": "{}"}, tmp_path))


def test_a_value_in_itself_is_described(tmp_path):
    value: list[object] = []
    value.append(value)
    with pytest.raises(UnreadableError, match="the file holds a list without tensors"):
        opened(saved(value, tmp_path))


RANDOM = {"python": random.getstate(), "numpy": np.random.RandomState(0).get_state(), "cpu": torch.get_rng_state()}


@pytest.mark.parametrize(
    "value",
    [torch.get_rng_state(), RANDOM, {**RANDOM, "cuda": [torch.zeros(16, dtype=torch.uint8)]}],
    ids=["bare", "of-a-trainer", "of-gpus"],
)
def test_states_of_random_generators_are_not_weights(value, tmp_path):
    with pytest.raises(UnreadableError, match="holds the states of random generators and no model weights"):
        opened(saved(value, tmp_path))


def test_a_row_of_bytes_may_be_a_weight(tmp_path):
    assert opened(saved({"absmax": torch.zeros(17, dtype=torch.uint8)}, tmp_path)).keys() == ["absmax"]


def test_weights_without_names_next_to_an_optimizer_are_named_first(tmp_path):
    """As Gaussian splatting saves them: a tuple of parameters, with the optimizer's state among them."""
    splats = (3, torch.nn.Parameter(torch.ones(5, 3)), torch.ones(5, 1), STATE, 5.0)
    with pytest.raises(UnreadableError, match="no weights under names: the file holds 2 tensors in lists; if they"):
        opened(saved((splats, 30000), tmp_path))


def test_a_table_of_numbers_is_not_a_set_of_weights(tmp_path):
    """Textual inversion keeps the number of its word under ``string_to_token``, next to the weights."""
    value = {"string_to_token": {"*": torch.tensor(265)}, "string_to_param": {"*": torch.ones(2, 4)}, "step": 500}
    checkpoint = opened(saved(value, tmp_path))
    assert [candidate.name for candidate in checkpoint.candidates] == ["string_to_param"]


def test_statistics_of_the_inputs_are_not_a_set_of_weights(tmp_path):
    net = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}
    value = {"actor": net, "obs_rms": {"mean": torch.zeros(3), "var": torch.ones(3), "count": 9.0}}
    assert [candidate.name for candidate in opened(saved(value, tmp_path)).candidates] == ["actor"]
    assert opened(saved({"mean": torch.zeros(3), "std": torch.ones(3)}, tmp_path)).keys() == ["mean", "std"]
