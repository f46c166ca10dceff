"""One rank's part of a distributed checkpoint is distinguished from a complete checkpoint."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.rank_shards import local_part, rank_shard

EMPTY, MATRIX, VECTOR = (TensorSpec("float32", shape, (1,) * len(shape)) for shape in ((0,), (4, 3), (3,)))


def sharded(name: str = "ShardedTensor") -> Opaque:
    return Opaque(Global("torch.distributed._shard.sharded_tensor.api", name))


@pytest.mark.parametrize(
    ("root", "entries"),
    [
        pytest.param(None, {}, id="nothing"),
        pytest.param(None, {"a.weight": MATRIX, "a.bias": EMPTY}, id="one-empty-bias"),
        pytest.param(
            None,
            {"a.weight": MATRIX, "a.min_val": EMPTY, "a.max_val": EMPTY, "b.min_val": EMPTY},
            id="observers-that-never-ran",
        ),
        pytest.param(
            None,
            {**{f"{n}.weight": MATRIX for n in range(20)}, "x.weight": EMPTY, "y.weight": EMPTY},
            id="two-empty-ones-of-many",
        ),
        pytest.param(
            None,
            {
                f"{n}.{key}": spec
                for n in range(3)
                for key, spec in (
                    ("linear.weight", VECTOR),
                    ("linear.bias", EMPTY),
                    ("linear.output_mask", VECTOR),
                    ("convolution.weight", EMPTY),
                    ("convolution.output_mask", VECTOR),
                )
            },
            id="layers-of-e3nn",
        ),
        pytest.param({"module": 1, "ds_version": "0.9"}, {"a.weight": MATRIX}, id="deepspeed-without-partition"),
        pytest.param(None, {"flat_parameters.weight": MATRIX}, id="a-module-named-flat"),
        pytest.param({"sharded": Opaque(Global("my.code", "ShardedTensor"))}, {}, id="a-class-of-the-same-name"),
        pytest.param({"state": {}, "param_groups": []}, {}, id="an-optimizer"),
        pytest.param({"ds_version": "0.9", "mp_world_size": 1}, {"a.weight": MATRIX}, id="deepspeed-on-one-rank"),
        pytest.param(
            {"args": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}, "iteration": 9},
            {"a.weight": MATRIX},
            id="megatron-on-one-rank",
        ),
        pytest.param({"args": {"tensor_model_parallel_size": 8}}, {"a.weight": MATRIX}, id="other-arguments"),
    ],
)
def test_what_stands_for_itself(root: Any, entries: dict[str, Any]) -> None:
    assert rank_shard(root, entries) is None


@pytest.mark.parametrize(
    ("root", "entries", "what", "remedy", "keys"),
    [
        pytest.param(
            {"shard_metadata": {"rank": 0}},
            {"bn.running_mean": VECTOR, "_fsdp_shard._fsdp_wrapped_module.flat_param_0": VECTOR},
            "1 parameter of torch_xla's FSDP",
            "consolidate_sharded_ckpts --ckpt_prefix",
            ["_fsdp_shard._fsdp_wrapped_module.flat_param_0"],
            id="torch_xla",
        ),
        pytest.param(
            {"module": {}, "ds_version": "0.9"},
            {"a.weight": EMPTY, "b.weight": MATRIX},
            "1 weight of shape (0,)",
            "files of all ranks",
            ["a.weight"],
            id="deepspeed-with-one-empty-weight",
        ),
        pytest.param(
            None,
            {"a.weight": EMPTY, "a.bias": VECTOR, "b.weight": EMPTY, "b.bias": VECTOR, "norm.weight": VECTOR},
            "2 weights of shape (0,)",
            "files of all ranks",
            ["a.weight", "b.weight"],
            id="small-parameters-stay-whole",
        ),
        pytest.param(
            None,
            {"_fsdp_wrapped_module._flat_param": VECTOR, "bn.running_mean": VECTOR},
            "flattened parameters of FSDP, 1 tensor of one rank",
            "full_state_dict",
            ["_fsdp_wrapped_module._flat_param"],
            id="fsdp-local",
        ),
        pytest.param(
            {"modules": [{"handles": [{"flat_param.data": VECTOR}]}]},
            {"flat_param.data": VECTOR},
            "flattened parameters of FSDP of one rank, as OLMo saves them",
            "scripts/unshard.py",
            ["flat_param.data"],
            id="olmo-local",
        ),
        pytest.param(
            {"model": {"a.weight": sharded(), "b.weight": sharded()}},
            {},
            "one rank's part of 2 sharded tensors",
            "files of all ranks",
            ["a.weight", "b.weight"],
            id="fsdp-sharded",
        ),
        pytest.param(
            {"optimizer_state_dict": {"zero_stage": 2, "partition_count": 8}},
            {},
            "one ZeRO rank",
            "files of all ranks",
            [],
            id="zero-optimizer",
        ),
    ],
)
def test_what_is_a_part(root: Any, entries: dict[str, Any], what: str, remedy: str, keys: list[str]) -> None:
    shard = rank_shard(root, entries)
    assert shard is not None
    assert what in shard.what
    assert remedy in shard.remedy
    assert list(shard.keys) == keys


def test_a_zero_optimizer_file_is_named(tmp_path: Path) -> None:
    state = {
        "optimizer_state_dict": {
            "loss_scaler": None,
            "zero_stage": 1,
            "partition_count": [2],
            "base_optimizer_state": [{"exp_avg": torch.zeros(6), "exp_avg_sq": torch.zeros(6)}],
            "single_partition_of_fp32_groups": [torch.zeros(6)],
        },
        "ds_version": "0.14.0",
    }
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(state, path)
    with pytest.raises(UnreadableError, match=r"optimizer states of one ZeRO rank.*files of all ranks"):
        ckptfix.open_checkpoint(path)


LOCAL = TensorSpec("float32", (2, 3), (3, 1))


def dtensor_state(*placements: str, local: Any = LOCAL) -> Any:
    made = tuple(Opaque(Global("torch.distributed.tensor.placement_types", name)) for name in placements)
    spec = Opaque(Global("torch.distributed.tensor._dtensor_spec", "DTensorSpec"), state={"placements": made})
    return None, {"_local_tensor": local, "_spec": spec}


@pytest.mark.parametrize("placements", [("Replicate",), ("Shard",), ("Shard", "Replicate")], ids="-".join)
def test_a_local_tensor_of_the_whole_shape_is_the_tensor(placements: tuple[str, ...]) -> None:
    assert local_part(Global("torch.distributed.tensor", "DTensor"), (2, 3), dtensor_state(*placements), {}) is LOCAL


@pytest.mark.parametrize(
    ("size", "placement"),
    [
        pytest.param((4, 3), "Shard", id="half-of-it"),
        pytest.param((2, 3), "_Partial", id="a-term-of-a-sum"),
        pytest.param((2, 3), "Partial", id="a-term-of-a-sum-since-2.3"),
    ],
)
def test_any_other_stays_closed(size: tuple[int, ...], placement: str) -> None:
    cls = Global("torch.distributed.tensor", "DTensor")
    made = local_part(cls, size, dtensor_state(placement), {})
    assert isinstance(made, Opaque)
    assert made.cls is cls


SIZE = Global("torch", "Size")
SPEC = Global("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
SHARD = Global("torch.distributed.tensor.placement_types", "Shard")
MESH = Opaque(Global("torch.distributed.device_mesh", "DeviceMesh"), state={"_coordinate_on_dim": [0]})


def layout(mesh: Opaque = MESH, dim: Any = 0, shape: tuple[int, ...] = (4, 3), **more: Any) -> Opaque:
    size = Opaque(SIZE, (shape,))
    placements = (Opaque(SHARD, state={"dim": dim}),)
    state = {"mesh": mesh, "placements": placements, "tensor_meta": [size], **more}
    return Opaque(SPEC, state=state)


LAYOUTS = {
    "mesh": layout(mesh=Opaque(MESH.cls, state=MESH.state)),
    "dimension": layout(dim=1),
    "type": layout(dim=False),
    "shape": layout(shape=(4, 3, 1)),
    "attribute": layout(split_factor=2),
    "many parts": layout(shard_order=(0,) * 200),
}


def test_tensors_with_one_layout_share_its_description() -> None:
    """Ten thousand descriptions would take 15 MB."""
    known: dict[Any, Opaque] = {}
    cls, first = Global("torch.distributed.tensor", "DTensor"), layout()
    made = [local_part(cls, None, (None, {"_local_tensor": LOCAL, "_spec": spec}), known) for spec in (first, layout())]
    assert [tensor.attributes["_spec"] is first for tensor in made] == [True, True]
    for what, spec in LAYOUTS.items():
        other = local_part(cls, None, (None, {"_local_tensor": LOCAL, "_spec": spec}), known)
        assert other.attributes["_spec"] is spec, what


@pytest.mark.parametrize("state", [None, {}, (None, {"_local_tensor": 3}), OrderedDict(a=1)], ids=str)
def test_no_local_tensor(state: Any) -> None:
    assert local_part(Global("torch.distributed.tensor", "DTensor"), (2, 3), state, {}) is NotImplemented


def sharded_state(*shapes: tuple[int, ...]) -> Any:
    """What a ``ShardedTensor`` pickles (its ``__getstate__``): the shards of this rank, and four things more."""
    cls = Global("torch.distributed._shard.sharded_tensor.shard", "Shard")
    tensors = [TensorSpec("float32", shape, (1,) * len(shape)) for shape in shapes]
    return [Opaque(cls, state=(None, {"tensor": tensor, "metadata": None})) for tensor in tensors], None, None, None, {}


def test_the_only_shard_of_a_sharded_tensor_is_the_tensor() -> None:
    state = sharded_state((2, 3))
    assert local_part(sharded().cls, (2, 3), state, {}) is state[0][0].attributes["tensor"]


@pytest.mark.parametrize("shapes", [((1, 3),), ((1, 3), (1, 3)), ((2, 3), (0, 3)), ()], ids=str)
def test_a_sharded_tensor_of_several_ranks_stays_closed(shapes: tuple[tuple[int, ...], ...]) -> None:
    made = local_part(sharded().cls, (2, 3), sharded_state(*shapes), {})
    assert rank_shard({"_flat_param": made}, {}) is not None


@pytest.mark.parametrize(
    ("size", "quantizer", "is_whole"),
    [((2, 3, 4), None, True), ((2, 3, 5), None, False), ((2, 3, 4), "MXFP8Quantizer", False)],
)
def test_unquantised_experts_in_one_tensor_are_plain(
    size: tuple[int, ...], quantizer: str | None, is_whole: bool
) -> None:
    """The ``GroupedTensor`` of Transformer Engine, with Megatron's ``moe_single_grouped_weight``."""
    state = {"rowwise_data": TensorSpec("float32", (24,), (1,)), "quantizer": quantizer, "num_tensors": 2}
    made = local_part(Global("transformer_engine.pytorch.tensor.grouped_tensor", "GroupedTensor"), size, state, {})
    assert made == TensorSpec("float32", (2, 3, 4), (12, 4, 1)) if is_whole else made is NotImplemented
