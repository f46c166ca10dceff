"""Megatron's folders of torch.distributed.checkpoint: a genuine one, and small ones with an optimizer."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptfix
from ckptfix.core.facts import clauses
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.boxes import row_major_bytes
from ckptfix.reading.folders.ranks.torch_dist import unstacked
from ckptfix.report.advice import remedies_text
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked

HIDDEN, FFN, VOCABULARY, LAYERS = 16, 24, 32, 4


def test_layers_that_torch_dist_stacks_are_one_by_one(tmp_path: Path) -> None:
    """Under their names on disk, where a norm is a part of the layer that follows it."""
    folder, truth = unpacked("megatron_dist_tp2pp2", tmp_path)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert (checkpoint.container, checkpoint.specs.keys()) == (("model",), truth.keys())
    root: Any = checkpoint.root
    assert root["args"].attributes["tensor_model_parallel_size"] == root["iteration"] == 1
    for key, value in truth.items():
        got = checkpoint.read(key)
        assert (got.shape, bytes_of(got)) == (value.shape, bytes_of(value)), key
    (folder / "common.pt").unlink()
    with pytest.raises(UnreadableError, match=r"lacks the shard common\.pt: .* salvage=True"):
        ckptfix.open_checkpoint(folder)
    torch.save([1, 2], folder / "common.pt")
    with pytest.raises(UnreadableError, match=r"common\.pt: lacks the data next to the chunks"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("lost", ["missing", "empty", "no dict"])
def test_layers_are_one_by_one_without_the_common_data(tmp_path: Path, lost: str) -> None:
    folder, truth = unpacked("megatron_dist_tp2pp2", tmp_path)
    common = folder / "common.pt"
    common.unlink()
    if lost != "missing":
        torch.save([1, 2], common) if lost == "no dict" else common.touch()
    with pytest.raises(UnreadableError, match=r"common\.pt"):
        ckptfix.open_checkpoint(folder)
    checkpoint = ckptfix.open_checkpoint(folder, salvage=True)
    assert (checkpoint.container, checkpoint.specs.keys()) == (("model",), truth.keys())
    assert all(bytes_of(checkpoint.read(key)) == bytes_of(value) for key, value in truth.items())
    assert "common.pt" in clauses(checkpoint.damage)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    (finding,) = (each for each in report.left if each.level)
    assert remedies_text(finding.remedies).endswith("otherwise training starts at step 0")  # it had no optimizer


@pytest.mark.parametrize("change", ["other-depth", "numbered", "other-arguments"])
def test_what_is_not_stacked_stays(change: str) -> None:
    spec = TensorSpec("float32", (4, 3), (3, 1))
    root: dict[Any, Any] = {"decoder.layers.mlp.weight": spec, "other.layers.mlp.weight": spec}
    assert len(unstacked(root, None)) == len(unstacked(root, 4)) == 8
    if change == "other-depth":
        root["other.layers.mlp.weight"] = TensorSpec("float32", (2, 3), (3, 1))
    elif change == "numbered":
        root = {"decoder.layers.0.mlp.weight": spec}
    assert unstacked(root, 3 if change == "other-arguments" else 4) == root


def write_torch_dist(
    folder: Path, groups: list[dict[str, Any]], step: Any = 3.0, is_in_chunks: Any = False, **changed: Any
) -> dict[str, torch.Tensor]:
    """Write what megatron-core does of a mixed-precision optimizer, whose common data is in one of the chunks since
    0.20; return the masters."""
    masters = {
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(LAYERS, FFN, HIDDEN),
        "decoder.layers.mlp.linear_fc1.bias": torch.randn(LAYERS, FFN),
        "decoder.final_layernorm.weight": torch.randn(HIDDEN),
        "output_layer.weight": torch.randn(VOCABULARY, HIDDEN),
    }
    saved: dict[str, Any] = {key: value.bfloat16() for key, value in masters.items()}
    for number, field in enumerate(("fp32_param", "exp_avg", "exp_avg_sq")):
        saved |= {f"optimizer.state.{field}.{key}": value + 1000 * number for key, value in masters.items()}
    optimizer = {
        "optimizer": {"param_groups": groups, "state": {} if step is None else {"common_step": torch.tensor(step)}}
    }
    common = {"args": Namespace(num_layers=LAYERS), "iteration": 3, "optimizer": optimizer}
    inside: dict[str, Any] = {"common_state/shard_0_1": [common]} if is_in_chunks else {}
    inside |= {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{place}": [None] for place in ("0_2", "0.1_2.4")}
    save_dcp({**saved, **inside, **changed}, checkpoint_id=folder)
    if not is_in_chunks:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return masters


GROUPS = [{"lr": 0.1, "wd_mult": 1.0, "params": [0]}, {"lr": 0.1, "wd_mult": 0.0, "params": [1]}]


@pytest.mark.parametrize("is_in_chunks", [False, True], ids=["common.pt", "common_state"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_optimizer_of_torch_dist_is_there_by_name(tmp_path: Path, count: int, is_in_chunks: bool) -> None:
    masters = write_torch_dist(tmp_path / "saved", [*GROUPS, GROUPS[0]][:count], is_in_chunks=is_in_chunks)
    report = ckptfix.repair(tmp_path / "saved", output=tmp_path / "whole.pth").report
    assert [finding.evidence for finding in report.findings if finding.code == "FIL105"] == [{"trained in": "bfloat16"}]
    whole = torch.load(tmp_path / "whole.pth")
    state, groups = whole["optimizer"]["state"], whole["optimizer"].get("param_groups")
    bias = [f"decoder.layers.{number}.mlp.linear_fc1.bias" for number in range(LAYERS)]
    for number in range(LAYERS):
        master = masters["decoder.layers.mlp.linear_fc1.weight"][number]
        name = f"decoder.layers.{number}.mlp.linear_fc1.weight"
        assert torch.equal(whole["model"][name], master)
        assert torch.equal(state[name]["exp_avg"], master + 1000)
        assert torch.equal(state[name]["exp_avg_sq"], master + 2000)
        assert state[name]["step"] == 3
    assert state.keys() == whole["model"].keys()
    assert whole.keys() == {"model", "optimizer", "args", "iteration"}
    if count == 3:
        assert groups is None
    else:
        assert sorted(key for group in groups for key in group["params"]) == sorted(state)
        assert count == 1 or groups[1]["params"] == [*bias, "decoder.final_layernorm.weight"]


@pytest.mark.parametrize("is_list", [False, True])
def test_the_optimizers_of_a_chain_are_one(tmp_path: Path, is_list: bool) -> None:
    """With expert parallelism, experts have their own, each with its steps and groups."""
    experts = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    names = {experts: 1, "decoder.final_layernorm.weight": 0, "output_layer.weight": 0}
    saved = {name: torch.randn(3, 4).bfloat16() for name in names}
    for field in ("param", "exp_avg"):
        saved |= {
            f"chained_{chain}.optimizer.state.{field}.{name}": saved[name].float() for name, chain in names.items()
        }
    save_dcp(saved, checkpoint_id=tmp_path)
    chain = [
        {"optimizer": {"param_groups": [{**GROUPS[0], "step": 7}]}},
        {"optimizer": {"param_groups": [{**GROUPS[0], "step": 7, "is_expert_parallel": True}]}},
    ]
    common = {"args": Namespace(), "iteration": 7, "optimizer": chain if is_list else dict(enumerate(chain))}
    torch.save(common, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    state, groups = root["optimizer"]["state"], root["optimizer"]["param_groups"]
    assert {name: (row["step"], row.keys()) for name, row in state.items()} == {
        name: (7, {"exp_avg", "step"}) for name in names
    }
    assert [sorted(group["params"]) for group in groups] == [[*names][1:], [experts]]
    assert groups[1]["is_expert_parallel"]


@pytest.mark.parametrize("home", ["weights", "iter_0000003"])
def test_the_folder_around_a_torch_dist_folder_is_the_same_checkpoint(tmp_path: Path, home: str) -> None:
    """NeMo has it in ``weights``; of several iterations of Megatron, the latest is taken."""
    write_torch_dist(tmp_path / home, GROUPS)
    if home != "weights":
        write_torch_dist(tmp_path / "iter_0000002", GROUPS)
        with pytest.raises(UnreadableError, match="holds 2 checkpoints"):
            ckptfix.open_checkpoint(tmp_path)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
        assert ckptfix.open_checkpoint(tmp_path / "latest_checkpointed_iteration.txt").path == str(tmp_path / home)
    around, inner = (ckptfix.open_checkpoint(folder) for folder in (tmp_path, tmp_path / home))
    assert [around.keys(), around.container] == [inner.keys(), ("model",)]
    got, wanted = around.state_dict(), inner.state_dict()
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("shape", [(VOCABULARY * HIDDEN,), (3, 1, 170), (2, 1, HIDDEN), (0, 1, HIDDEN), ()])
def test_moments_of_another_shape_than_the_weights_stay_as_they_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    flat = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(shape)}
    write_torch_dist(
        tmp_path, GROUPS, **{"scalar": torch.tensor(1.0), "optimizer.state.exp_avg.scalar": torch.tensor(1.0)}, **flat
    )
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    root: Any = checkpoint.root
    assert checkpoint.specs["output_layer.weight"].dtype == "bfloat16"
    assert root.keys() >= flat.keys()


@pytest.mark.parametrize("chain", ["", "chained_0."])
def test_buckets_of_the_distributed_optimizer_are_left_out(tmp_path: Path, chain: str) -> None:
    """The form ``dp_reshardable``: gaps between the parameters in a bucket were never written, and may be NaN."""
    write_torch_dist(tmp_path, GROUPS)
    wanted: Any = ckptfix.open_checkpoint(tmp_path).root
    bucket = f"{chain}optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_torch.float32.bucket_idx_0"
    garbage = {f"{bucket}.{field}": torch.full((40,), torch.nan) for field in ("param", "exp_avg", "exp_avg_sq")}
    write_torch_dist(tmp_path, GROUPS, **garbage)
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    assert root.keys() == wanted.keys()
    found = [finding for finding in ckptfix.check(tmp_path).findings if finding.code in ("FIL105", "VAL101")]
    assert [finding.evidence["left out"] for finding in found if "left out" in finding.evidence] == [
        [f"{chain}optimizer.distributed"]
    ]
    assert {finding.code for finding in found} == {"FIL105"}


@pytest.mark.parametrize("counts", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_moments_in_flat_parts_are_put_together(tmp_path: Path, counts: tuple[int, int]) -> None:
    """As the distributed optimizer saves them (``fully_sharded_model_space``), with the step in its groups."""
    whole = torch.arange(VOCABULARY * HIDDEN, dtype=torch.float32).view(VOCABULARY, HIDDEN)
    rows = [rows.chunk(counts[1], 1) for rows in whole.chunk(counts[0])]
    flat = torch.stack([torch.stack([part.flatten() for part in row]) for row in rows])
    names = {f"optimizer.state.{field}.output_layer.weight": flat for field in ("fp32_param", "exp_avg")}
    write_torch_dist(tmp_path, [{**group, "step": 7} for group in GROUPS], step=None, **names)
    root: Any = (checkpoint := ckptfix.open_checkpoint(tmp_path)).root
    assert torch.equal(checkpoint.state_dict()["output_layer.weight"], whole)
    state = root["optimizer"]["state"]["output_layer.weight"]
    assert bytes(row_major_bytes(state["exp_avg"], "")) == bytes_of(whole)
    assert state["step"] == 7


def test_masters_of_torch_dist_that_are_not_the_weights_are_named(tmp_path: Path) -> None:
    write_torch_dist(tmp_path, GROUPS, **{"output_layer.weight": torch.ones(VOCABULARY, HIDDEN).bfloat16()})
    found = [
        (finding.code, finding.keys)
        for finding in ckptfix.check(tmp_path, select=("FIL105",)).findings
        if finding.level
    ]
    assert found == [("FIL105", ("output_layer.weight",))]


@pytest.mark.parametrize("groups", [[5, None], {"a": 1}, None])
def test_groups_that_are_none_are_not_taken(tmp_path: Path, groups: Any) -> None:
    write_torch_dist(tmp_path, groups)
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    assert root["optimizer"].keys() == {"state"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("module", ["experts.experts", "shared_experts"])
def test_gates_in_blocks_are_in_the_order_of_the_ranks(tmp_path: Path, module: str, ranks: int) -> None:
    """Megatron splits the rows of each rank into halves, whose order is right on as many ranks only."""
    is_shared = module == "shared_experts"
    args = {
        "moe_shared_expert_glu_interleave_size" if is_shared else "moe_mlp_glu_interleave_size": 2,
        "tensor_model_parallel_size": ranks if is_shared else 8,
        "expert_tensor_parallel_size": 8 if is_shared else ranks,
    }
    experts = () if is_shared else (3,)
    wanted, saved = {}, {"output_layer.weight": torch.randn(VOCABULARY, HIDDEN)}
    for name, shape in {"weight": (2 * FFN, HIDDEN), "bias": (2 * FFN,)}.items():
        key = f"decoder.layers.0.mlp.{module}.linear_fc1.{name}"
        whole = torch.randn(*experts, *shape)
        halves = [part.chunk(2, len(experts)) for part in whole.chunk(ranks, len(experts))]
        wanted[key] = whole
        saved[key] = torch.cat([*(first for first, _ in halves), *(second for _, second in halves)], len(experts))
    moments = {f"optimizer.state.exp_avg.{key}": value + 1 for key, value in saved.items()}
    save_dcp({**saved, **moments}, checkpoint_id=tmp_path)
    torch.save({"args": Namespace(**args), "iteration": 3}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    root: Any = checkpoint.root
    for key, value in wanted.items():
        assert bytes_of(checkpoint.read(key)) == bytes_of(value)
        assert bytes(row_major_bytes(root["optimizer"]["state"][key]["exp_avg"], "")) == bytes_of(value + 1)
    assert root["args"].attributes["expert_tensor_parallel_size"] == 1
