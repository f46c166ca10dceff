import pytest
import torch
from torch import nn

from ckptfix.finding import Level
from ckptfix.rules.all_zero import all_zero
from tests.rules.healthy import HEALTHY, build
from tests.rules.value_findings import loud, propose, without_values


def net(**zero: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Five healthy matrices, and zeros of the given shapes under keys in which ``__`` stands for a dot."""
    torch.manual_seed(0)
    healthy = {f"layer{index}.weight": torch.randn(8, 8) for index in range(5)}
    return healthy | {key.replace("__", "."): torch.zeros(shape) for key, shape in zero.items()}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_quiet(name):
    assert propose(all_zero, build(name).state_dict()) == []
    assert propose(all_zero, build(name).state_dict(), build(name)) == []


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(net(bn__weight=(8,), bn__bias=(8,)), id="residual-gamma"),
        pytest.param(net(norm__bias=(8, 8)), id="bias-of-a-2d-layer-norm"),
        pytest.param(net(q__lora_B__weight=(8, 2)), id="lora"),
        pytest.param(net(q__lora_B__default__weight=(8, 2)), id="peft"),
        pytest.param(net(zero_convs__0__0__weight=(8, 8, 1, 1)), id="controlnet"),
        pytest.param(net(controlnet_down_blocks__0__weight=(8, 8, 1, 1)), id="controlnet-in-diffusers"),
        pytest.param(net(blocks__0__adaLN_modulation__1__weight=(48, 8)), id="adaln-zero"),
        pytest.param(net(final_layer__linear__weight=(8, 8)), id="dit-head"),
        pytest.param(net(rezero__alpha=(1,)), id="rezero"),
        pytest.param(net(pos_embed=(1, 9, 8)), id="position-embedding"),
        pytest.param(net(blocks__0__attn__rel_pos_h=(27, 8)), id="relative-position"),
        pytest.param(net(attn__relative_position_bias_table=(49, 4)), id="bias-table"),
        pytest.param(net(conv_offset__weight=(18, 8, 3, 3)), id="deformable-convolution"),
        pytest.param(net(sampling_offsets__weight=(64, 8)), id="deformable-attention"),
        pytest.param(net(fc_loc__2__weight=(6, 8)), id="spatial-transformer"),
        pytest.param(net(cls_token=(1, 1, 8)), id="vector"),
        pytest.param(net(k_cache=(4, 8)), id="buffer"),
        pytest.param(net(empty=(0, 8)), id="empty"),
    ],
)
def test_zero_by_design_is_quiet(state):
    assert loud(propose(all_zero, state)) == []


def test_what_the_model_starts_with_is_by_design():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    state = model.state_dict() | {"b.weight": torch.zeros(8, 8)}
    assert [finding.keys for finding in propose(all_zero, state, model)] == [("b.weight",)]
    nn.init.zeros_(model["b"].get_parameter("weight"))
    assert propose(all_zero, state, model) == []


def test_the_model_outweighs_the_name():
    model = nn.ModuleDict({"proj_out": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    state = model.state_dict() | {"proj_out.weight": torch.zeros(8, 8)}
    assert propose(all_zero, state) == []
    assert [finding.keys for finding in propose(all_zero, state, model)] == [("proj_out.weight",)]


@pytest.mark.parametrize("key", ["conv__weight", "mlp__gate_proj__weight", "layers__0__weight"])
def test_a_zero_matrix_is_a_warning(key):
    (finding,) = propose(all_zero, net(**{key: (8, 16)}))
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, (key.replace("__", "."),), None)
    assert finding.message == "1 of 6 weight matrices hold nothing but zeros"
    assert finding.evidence["tensors"][finding.keys[0]] == {"zeros": 128, "numel": 128}


def test_the_norm_that_is_zero_as_well_is_listed():
    (finding,) = propose(all_zero, net(conv__weight=(8, 8), bn__weight=(8,), bn__bias=(8,)))
    assert finding.keys == ("conv.weight", "bn.weight", "bn.bias")


def test_a_file_of_mostly_zeros_is_an_error_whatever_the_names():
    state = {"head.weight": torch.randn(4, 4)} | {f"gate.{index}.weight": torch.zeros(4, 4) for index in range(3)}
    (finding,) = propose(all_zero, state)
    assert (finding.level, len(finding.keys)) == (Level.ERROR, 3)


def test_an_adapter_that_was_never_trained_is_a_warning():
    def adapter(b: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = {f"{index}.lora_A.weight": torch.randn(2, 8) for index in range(2)}
        return pairs | {"0.lora_B.weight": torch.zeros(8, 2), "1.lora_B.weight": b}

    assert propose(all_zero, adapter(torch.randn(8, 2))) == []
    (finding,) = propose(all_zero, adapter(torch.zeros(8, 2)))
    assert (finding.level, finding.keys) == (Level.WARNING, ("0.lora_B.weight", "1.lora_B.weight"))


def test_values_are_left_alone_where_the_user_says_so():
    assert without_values(all_zero) == []
