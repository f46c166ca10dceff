import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val202_all_zero import all_zero
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import loud, propose


def net(**zero: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Five healthy matrices, and zeros of the given shapes under keys in which ``__`` means a dot."""
    torch.manual_seed(0)
    healthy = {f"layer{index}.weight": torch.randn(8, 8) for index in range(5)}
    return healthy | {key.replace("__", "."): torch.zeros(shape) for key, shape in zero.items()}


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(all_zero, build(name).state_dict()) == [], name
        assert propose(all_zero, build(name).state_dict(), build(name)) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(net(bn__weight=(8,), bn__bias=(8,)), id="residual-gamma"),
        pytest.param(net(norm__bias=(8, 8)), id="bias-of-a-2d-layer-norm"),
        pytest.param(net(q__lora_B__weight=(8, 2)), id="lora"),
        pytest.param(net(q__lora_B__default__weight=(8, 2)), id="peft"),
        pytest.param(net(q__delora_B__default=(8, 2)), id="another-lora"),
        pytest.param(net(heads__0__low_rank__weight=(8, 2)), id="low-rank head"),
        pytest.param(net(q__randlora_lambda=(8, 2)), id="randlora"),
        pytest.param(net(q__weight_integer=(8, 8)), id="integer-copy"),
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
        pytest.param(net(user_bias__weight=(8, 1)), id="a-bias-for-each-user"),
        pytest.param(net(grn__weight=(1, 1, 1, 8)), id="scale-of-the-last-axis"),
        pytest.param(net(k_cache=(4, 8)), id="buffer"),
        pytest.param(net(latent_avg=(14, 8)), id="buffer-of-an-unknown-name"),
        pytest.param(net(noisy__weight_epsilon=(8, 8)), id="noise-of-a-noisy-layer"),
        pytest.param(net(layer__eps_weight=(8, 8)), id="noise-of-a-bayesian-layer"),
        pytest.param(net(dec_bbox_head__layers__2__weight=(4, 8)), id="boxes-of-rt-detr"),
        pytest.param(net(flows__0__s__2__weight=(8, 8), flows__1__s__2__weight=(8, 8)), id="last-of-each-block"),
        pytest.param(
            net(down__0__conv2__conv__weight=(8, 8), mid_1__conv2__conv__weight=(8, 8))
            | {"down.0.conv1.conv.weight": torch.ones(8, 8), "mid_1.conv1.conv.weight": torch.ones(8, 8)},
            id="second-of-each-block",
        ),
        pytest.param(net(empty=(0, 8)), id="empty"),
    ],
)
def test_noop_zero_by_design(state):
    assert loud(propose(all_zero, state)) == []


def test_noop_zero_in_the_initial_model():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    state = model.state_dict() | {"b.weight": torch.zeros(8, 8)}
    assert [finding.keys for finding in propose(all_zero, state, model)] == [("b.weight",)]
    nn.init.zeros_(model["b"].get_parameter("weight"))
    assert propose(all_zero, state, model) == []


def test_the_model_counts_more_than_the_name():
    model = nn.ModuleDict({"proj_out": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    state = model.state_dict() | {"proj_out.weight": torch.zeros(8, 8)}
    assert propose(all_zero, state) == []
    assert [finding.keys for finding in propose(all_zero, state, model)] == [("proj_out.weight",)]


@pytest.mark.parametrize("key", ["conv__weight", "mlp__gate_proj__weight", "layers__0__weight"])
def test_a_zero_matrix_is_a_warning(key):
    (finding,) = propose(all_zero, net(**{key: (8, 16)}))
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, (key.replace("__", "."),), None)
    assert finding.message == "1 of 6 weight matrices holds nothing but zeros"
    assert finding.evidence["tensors"][finding.keys[0]] == {"zeros": 128, "numel": 128}


def test_a_layer_of_every_block_is_a_warning_if_one_is_not_zero():
    blocks = net(flows__0__s__2__weight=(8, 8), flows__1__s__2__weight=(8, 8))
    (finding,) = propose(all_zero, blocks | {"flows.2.s.2.weight": torch.ones(8, 8)})
    assert (finding.level, len(finding.keys)) == (Level.WARNING, 2)


def test_a_layer_still_at_its_initial_zero_is_a_note():
    blocks = net(blocks__0__mlp_gate__3__weight=(8, 8))
    assert propose(all_zero, blocks) == []
    (finding,) = propose(all_zero, blocks | {"blocks.1.mlp_gate.3.weight": torch.ones(8, 8)})
    assert (finding.level, finding.keys) == (Level.NOTE, ("blocks.0.mlp_gate.3.weight",))


def test_a_possible_buffer_is_a_note():
    state = net(latent_avg=(14, 8), bn__num_batches_tracked=()) | {"bn.num_batches_tracked": torch.tensor(7)}
    (finding,) = propose(all_zero, state)
    assert (finding.level, finding.keys) == (Level.NOTE, ("latent_avg",))


def test_the_norm_that_is_zero_as_well_is_listed():
    (finding,) = propose(all_zero, net(conv__weight=(8, 8), bn__weight=(8,), bn__bias=(8,)))
    assert finding.keys == ("conv.weight", "bn.weight", "bn.bias")


def test_a_file_of_mostly_zeros_is_an_error():
    state = {"head.weight": torch.randn(4, 4)} | {f"gate.{index}.weight": torch.zeros(4, 4) for index in range(3)}
    (finding,) = propose(all_zero, state)
    assert (finding.level, len(finding.keys)) == (Level.ERROR, 3)


@pytest.mark.parametrize(
    "key",
    "head.weight head.fc.weight embeddings.time_embeddings classifier.weight lm_head.weight output.weight".split(),
)
def test_a_last_layer_is_not_zero_after_training(key):
    state = net(**{key.replace(".", "__"): (8, 16)})
    assert [(finding.level, finding.keys) for finding in propose(all_zero, state)] == [(Level.NOTE, (key,))]
    assert [finding.keys for finding in propose(all_zero, state, root={"step": 400})] == [(key,)]
    trained = {**state, "bn.num_batches_tracked": torch.tensor(7)}
    assert [finding.keys for finding in propose(all_zero, trained)] == [(key,)]


def test_layers_of_every_block_are_not_zero_after_training():
    state = net(blocks__0__conv4__3__weight=(8, 8), blocks__1__conv4__3__weight=(8, 8))
    both = ("blocks.0.conv4.3.weight", "blocks.1.conv4.3.weight")
    assert [(finding.level, finding.keys) for finding in propose(all_zero, state)] == [(Level.NOTE, both)]
    assert [finding.level for finding in propose(all_zero, state, root={"step": 400})] == [Level.WARNING]
    alive = {**state, "blocks.2.conv4.3.weight": torch.ones(8, 8)}
    assert [(finding.level, finding.keys) for finding in propose(all_zero, alive)] == [(Level.WARNING, both)]


def fixup(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Ten blocks and a head as Fixup starts them: most matrices of the file are zero."""
    state: dict[str, torch.Tensor] = {}
    for block in range(10):
        state |= {f"{block}.conv1.weight": torch.randn(8, 8), f"{block}.conv2.weight": torch.zeros(8, 8)}
        state |= {f"{block}.scale": torch.tensor([scale]), f"{block}.bias1a": torch.zeros(1)}
    return state | {"fc.weight": torch.zeros(4, 8)}


def test_branches_that_start_at_zero_are_a_note():
    assert [finding.level for finding in propose(all_zero, fixup())] == [Level.NOTE]
    assert [finding.level for finding in propose(all_zero, fixup(), root={"step": 400})] == [Level.ERROR]
    assert [finding.level for finding in propose(all_zero, fixup(scale=0.0))] == [Level.ERROR]


@pytest.mark.parametrize("key", ["out.weight", "final_conv.weight", "conv_last.weight", "model.out.weight"])
def test_the_last_layer_by_its_name_and_place(key):
    state = net(**{key.replace(".", "__"): (8, 8)})
    assert [finding.level for finding in propose(all_zero, state)] == [Level.NOTE]
    assert [finding.level for finding in propose(all_zero, state, root={"step": 400})] == [Level.WARNING]
    assert [finding.level for finding in propose(all_zero, state | {"z.weight": torch.ones(8, 8)})] == [Level.WARNING]


def test_the_last_layer_with_its_bias():
    state = net(net__4__weight=(8, 8), net__4__bias=(8,))
    assert [(finding.level, finding.keys) for finding in propose(all_zero, state)] == [(Level.NOTE, ("net.4.weight",))]
    alive = state | {"net.4.bias": torch.ones(8)}
    assert [finding.level for finding in propose(all_zero, alive)] == [Level.WARNING]
    assert [finding.level for finding in propose(all_zero, state | {"z.weight": torch.ones(8, 8)})] == [Level.WARNING]


@pytest.mark.parametrize("model", [nn.GRU(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
def test_biases_that_are_all_zero(model):
    state = model.state_dict()
    lost = {key: value * 0 if "bias" in key else value for key, value in state.items()}
    assert [finding.level for finding in propose(all_zero, lost)] == [Level.NOTE]
    assert propose(all_zero, state) == []


def test_a_norm_whose_weight_is_zero_is_noted():
    state = {"fc.weight": torch.randn(8, 8), "act.weight": torch.zeros(1), "norm.weight": torch.ones(8)}
    assert propose(all_zero, state, root={"step": 400}) == []  # the slope of a PReLU
    lost = state | {"norm.weight": torch.zeros(8)}
    assert propose(all_zero, lost) == []  # it may start so
    (finding,) = propose(all_zero, lost, root={"step": 400})
    assert (finding.level, finding.keys) == (Level.NOTE, ("norm.weight",))


def test_an_adapter_alone_is_not_a_file_of_zeros():
    state = {f"base_model.model.layers.{index}.q_proj.boft_R": torch.zeros(8, 8) for index in range(4)}
    assert propose(all_zero, state) == []
    full = {f"base_model.model.{index}.lora_{side}.weight": torch.zeros(8, 8) for index in range(4) for side in "AB"}
    assert [finding.level for finding in propose(all_zero, full)] == [Level.ERROR]


def test_a_zero_matrix_is_replaced_on_request():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    before = {"a.weight": torch.zeros(8, 8), "b.weight": torch.randn(8, 8)}
    after = {**before, "a.weight": model.get_parameter("a.weight").detach()}
    check_repaired(before, after, "VAL202", model, replace="VAL202", fill="target")


def test_noop_most_matrices_of_every_block_start_at_zero():
    blocks = {f"blocks.{i}.{name}.weight": torch.zeros(16, 16) for i in range(3) for name in ("key", "output", "value")}
    alive = {f"blocks.{i}.{name}.weight": torch.randn(16, 16) for i in range(3) for name in ("in_proj", "up")}
    (finding,) = propose(all_zero, blocks | alive)
    assert finding.level == Level.NOTE
    (finding,) = propose(all_zero, blocks | alive | {"up.weight": torch.zeros(16, 16)})
    assert finding.level == Level.ERROR, "that one is no block's"


@pytest.mark.parametrize(("others", "level"), [({}, Level.NOTE), ({"fc.weight": torch.randn(8, 8)}, Level.WARNING)])
def test_the_vectors_of_contexts_start_at_zero_in_a_file_of_tables(others, level):
    state = {"u_embeddings.weight": torch.randn(50, 8), "v_embeddings.weight": torch.zeros(50, 8)}
    assert [finding.level for finding in propose(all_zero, state | others)] == [level]
