"""Megatron's ranks: genuine ones from megatron-core, and small ones of every kind of parallelism."""

import re
import shutil
from argparse import Namespace
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks.megatron import stage_offsets
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import swap, unpacked

HIDDEN, FFN, HEADS, VOCABULARY, LAYERS = 16, 24, 4, 32, 4


def test_genuine_ranks_are_what_megatron_loads_on_one(tmp_path: Path) -> None:
    folder, truth = unpacked("megatron_tp2pp2", tmp_path)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert checkpoint.producer == "Megatron, TP 2, PP 2"
    got = checkpoint.state_dict()
    wanted = {key: value for key, value in truth.items() if isinstance(value, torch.Tensor)}
    assert checkpoint.specs.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (got[key].shape, bytes_of(got[key])) == (value.shape, bytes_of(value)), key


@pytest.mark.parametrize("form", ["sequential", "grouped", "dist"])
def test_genuine_ranks_with_experts_are_what_megatron_loads_on_one(tmp_path: Path, form: str) -> None:
    folder, truth = unpacked("megatron_grouped_tp2ep2", tmp_path)
    checkpoint = ckptfix.open_checkpoint(folder / form)
    got = {key: checkpoint.read(key) for key in checkpoint.specs}
    stacks: dict[str, list[torch.Tensor]] = {}
    for key in [key for key in truth if form != "sequential" and ".local_experts." in key]:
        prefix, number, rest = re.split(r"local_experts\.(\d+)\.", key)
        value = truth.pop(key)
        if form == "grouped":
            truth[f"{prefix}{rest}{number}"] = value
        else:  # names on disk
            stacks.setdefault(f"{prefix}experts.{rest}", []).append(value)
    truth |= {key: torch.stack(values) for key, values in stacks.items()}
    if form == "dist":
        names = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
        names |= {".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"}
        for old, new in names.items():
            truth = {key if key in got else key.replace(old, new): value for key, value in truth.items()}
    assert got.keys() == truth.keys()
    for key, value in truth.items():
        assert (got[key].shape, bytes_of(got[key])) == (value.shape, bytes_of(value)), key


RANK = "iter_0000001/mp_rank_00_000"


@pytest.mark.parametrize("named", ["", RANK, f"{RANK}/model_optim_rng.pt"])
def test_a_rank_without_the_others_is_not_the_model(tmp_path: Path, named: str) -> None:
    """Its arguments say how many there were."""
    folder, truth = unpacked("megatron_tp2pp2", tmp_path)
    for other in ("mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
        shutil.rmtree(folder / "iter_0000001" / other)
    with pytest.raises(UnreadableError, match="lacks 3 ranks of 4: mp_rank_00_001, mp_rank_01_000, mp_rank_01_001"):
        ckptfix.open_checkpoint(folder / named)
    got = ckptfix.open_checkpoint(folder / named, salvage=True).state_dict()
    weights = {key: value for key, value in got.items() if isinstance(value, torch.Tensor)}
    assert weights
    assert all(bytes_of(value) == bytes_of(truth[key]) for key, value in weights.items())


RANKS = ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001")


@pytest.mark.parametrize("target", RANKS)
@pytest.mark.parametrize("source", RANKS)
@pytest.mark.parametrize("has_processes", [False, True])
def test_of_two_copies_the_one_at_the_wrong_place_is_named(
    tmp_path: Path, source: str, target: str, has_processes: bool
) -> None:
    folder, truth = unpacked("megatron_tp2pp2", tmp_path)
    files = {name: folder / "iter_0000001" / name / "model_optim_rng.pt" for name in RANKS}
    for number, name in enumerate(RANKS) if has_processes else ():
        root = torch.load(files[name], weights_only=False)
        root["args"].rank = 2 * (number % 2) + number // 2  # stages are one after the other
        torch.save(root, files[name])
    if source == target:
        assert not ckptfix.open_checkpoint(folder).remarked(Kind.RANK_REPEATED, Kind.RANK_RENAMED)
        return
    shutil.copy(files[source], files[target])
    is_of_other_stage = source[-3:] != target[-3:]
    if is_of_other_stage:
        with pytest.raises(UnreadableError, match=f"copied over {target}; {target} holds .* values as {source}: fetch"):
            ckptfix.open_checkpoint(folder)
    else:
        (mark,) = ckptfix.open_checkpoint(folder).remarked(Kind.RANK_REPEATED)
        assert {mark.place, mark.data["other"]} == {source, target}
        assert mark.place == target or not has_processes
    held = ckptfix.open_checkpoint(folder, salvage=True)
    places = [fact.place for fact in held.damage if fact.kind is Kind.RANK_MISPLACED]
    assert places == ([target] if is_of_other_stage or has_processes else sorted((source, target)))
    got = {key: value for key, value in held.state_dict().items() if isinstance(value, torch.Tensor)}
    assert got
    assert all(bytes_of(value) == bytes_of(truth[key]) for key, value in got.items())


def test_each_of_several_missing_ranks_has_its_own_bytes(tmp_path: Path) -> None:
    folder, _ = unpacked("megatron_tp2pp2", tmp_path)

    def lost(*names: str) -> Any:
        for name in names:
            (folder / "iter_0000001" / name).rename(tmp_path / name)
        damage = ckptfix.open_checkpoint(folder, salvage=True).damage
        for name in names:
            (tmp_path / name).rename(folder / "iter_0000001" / name)
        return next(fact.data for fact in damage if fact.kind is Kind.BYTES_LACKING)

    single = {name: lost(name)["nbytes"] for name in RANKS[2:]}
    both = lost(*RANKS[2:])
    assert both["files"] == single
    assert both["nbytes"] == sum(single.values())


def test_the_folder_of_a_rank_stands_for_all(tmp_path: Path) -> None:
    folder, truth = unpacked("megatron_tp2pp2", tmp_path)
    checkpoint = ckptfix.open_checkpoint(folder / RANK)
    assert {key: bytes_of(checkpoint.read(key)) for key in checkpoint.specs} == {
        key: bytes_of(value) for key, value in truth.items() if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "expert"])
def test_one_of_several_ranks_is_not_written_under_another_name(tmp_path: Path, kind: str, salvage: bool) -> None:
    for size in (1, 2):
        args = Namespace(**{f"{kind}_model_parallel_size": size})
        root = {"args": args, "iteration": 1, "model": {"output_layer.weight": torch.arange(12.0).reshape(3, 4)}}
        torch.save(root, tmp_path / "lone.pt")
        report = ckptfix.repair(tmp_path / "lone.pt", output=tmp_path / f"{size}.pth", salvage=salvage).report
        assert report.is_refused == (size > 1)
        assert (tmp_path / f"{size}.pth").exists() == (size == 1)


@pytest.mark.parametrize("lost", [None, "rows", "layer"])
def test_weights_that_were_merged_keep_the_arguments_of_training(tmp_path: Path, lost: str | None) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    model = {f"decoder.layers.{layer}.mlp.linear_fc1.bias": torch.randn(3) for layer in range(2 - (lost == "layer"))}
    model["embedding.word_embeddings.weight"] = torch.randn(8 // (1 + (lost == "rows")), 3)
    root = {"args": Namespace(**sizes, padded_vocab_size=8, num_layers=2), "iteration": 1, "model": model}
    torch.save(root, tmp_path / "merged.pt")
    report = ckptfix.repair(tmp_path / "merged.pt", output=tmp_path / "out.pth").report
    assert (report.is_refused, (tmp_path / "out.pth").exists()) == (lost is not None, lost is None)


def test_a_model_of_one_rank_is_a_file(tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / f"{world}" / "iter_0000001" / "mp_rank_00"
        folder.mkdir(parents=True)
        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        args = Namespace(**sizes, unlike_tensor_model_parallel_size=world)
        weights = {"language_model": torch.ones(2)}
        torch.save({"args": args, "iteration": 1, "model": weights}, folder / "model_optim_rng.pt")
        checkpoint = ckptfix.open_checkpoint(folder.parents[1])
        assert (checkpoint.format, [*checkpoint.specs]) == ("torch-zip", ["language_model"])


def test_what_is_written_is_of_one_rank(tmp_path: Path) -> None:
    folder, _ = unpacked("megatron_tp2pp2", tmp_path)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth").report
    assert "FIL105" not in [finding.code for finding in report.findings]
    whole = torch.load(tmp_path / "whole.pth")
    args = whole["args"]
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"], whole["iteration"]) == (1, 1, 1)


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata", "__0_0.distcp"])
def test_any_file_of_torch_dist_stands_for_the_folder(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked("megatron_dist_tp2pp2", tmp_path)
    assert ckptfix.open_checkpoint(folder / name).specs.keys() == truth.keys()


def layer(gated: bool) -> dict[str, torch.Tensor]:
    return {
        "self_attention.linear_qkv.weight": torch.randn(3 * HIDDEN, HIDDEN),
        "self_attention.linear_proj.weight": torch.randn(HIDDEN, HIDDEN),
        "self_attention.linear_proj.bias": torch.randn(HIDDEN),
        "input_layernorm.weight": torch.randn(HIDDEN),
        "mlp.linear_fc1.weight": torch.randn((1 + gated) * FFN, HIDDEN),
        "mlp.linear_fc1.bias": torch.randn((1 + gated) * FFN),
        "mlp.linear_fc2.weight": torch.randn(HIDDEN, FFN),
    }


def divided(key: str, value: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """The part of a tensor that a rank holds, as Megatron's layers have it."""
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(ranks, 1)[rank].clone()
    if "linear_fc1" in key and gated:
        return torch.cat([half.chunk(ranks)[rank] for half in value.chunk(2)])
    if key.endswith(("linear_proj.bias", "layernorm.weight")):
        return value.clone()
    return value.chunk(ranks)[rank].clone()


def write_megatron(
    folder: Path,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    gated: bool = True,
    tied: bool = False,
    layers: int = LAYERS,
) -> dict[str, torch.Tensor]:
    """Write a GPT as Megatron does: layers in stages, and in each stage in chunks, numbered from 0 in each."""
    stack = [layer(gated) for _ in range(layers)]
    embedding, norm = torch.randn(VOCABULARY, HIDDEN), torch.randn(HIDDEN)
    head = embedding if tied else torch.randn(VOCABULARY, HIDDEN)
    whole = {"embedding.word_embeddings.weight": embedding}
    for number, entries in enumerate(stack):
        whole |= {f"decoder.layers.{number}.{key}": value for key, value in entries.items()}
    whole |= {"decoder.final_layernorm.weight": norm, "output_layer.weight": head}
    names = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    args = Namespace(**names, untie_embeddings_and_output_weights=not tied, padded_vocab_size=VOCABULARY)
    each = layers // pipeline // virtual
    for rank in range(tensor):
        for stage in range(pipeline):
            root: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "optimizer": {"a": 1}}
            for chunk in range(virtual):
                begin = chunk * each * pipeline + stage * each
                state = OrderedDict()
                for number in range(each):
                    for key, value in stack[begin + number].items():
                        state[f"decoder.layers.{number}.{key}"] = divided(key, value, rank, tensor, gated)
                if stage == chunk == 0:
                    state["embedding.word_embeddings.weight"] = embedding.chunk(tensor)[rank].clone()
                if (stage, chunk) == (pipeline - 1, virtual - 1):
                    state["decoder.final_layernorm.weight"] = norm.clone()
                    state["output_layer.weight"] = head.chunk(tensor)[rank].clone()
                root["model" if virtual == 1 else f"model{chunk}"] = state
            home = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (pipeline > 1))
            home.mkdir(parents=True)
            torch.save(root, home / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return whole


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual"), [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 2), (1, 2, 2), (4, 4, 1)]
)
def test_every_kind_of_parallelism(tmp_path: Path, tensor: int, pipeline: int, virtual: int, gated: bool) -> None:
    whole = write_megatron(tmp_path, tensor, pipeline, virtual, gated)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert got.keys() == whole.keys()
    assert all(torch.equal(got[key], value) for key, value in whole.items())


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2)])
def test_the_copy_of_a_tied_embedding_in_the_last_stage_is_left_out(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """Megatron's model of one stage has none; a copy that has drifted is kept and named."""
    whole = write_megatron(tmp_path / "same", tensor, pipeline, tied=True)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "same")
    assert checkpoint.specs.keys() == whole.keys() - {"output_layer.weight"}
    assert not [mark for mark in checkpoint.remarks if mark.kind is Kind.RANK_COPIES]
    whole = write_megatron(tmp_path / "other", tensor, pipeline)
    for file in (tmp_path / "other").rglob("*.pt"):
        root = torch.load(file, weights_only=False)
        root["args"].untie_embeddings_and_output_weights = False
        torch.save(root, file)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "other")
    assert torch.equal(checkpoint.read("output_layer.weight"), whole["output_layer.weight"])
    assert [mark.place for mark in checkpoint.remarks if mark.kind is Kind.RANK_COPIES] == ["output_layer.weight"]


def write_rank(home: Path, state: dict[str, torch.Tensor], **sizes: int) -> None:
    """Write the file of one rank; ``sizes`` are those of parallelism in its arguments."""
    home.mkdir()
    args = Namespace(**{f"{kind}_model_parallel_size": sizes.get(kind, 1) for kind in ("tensor", "pipeline", "expert")})
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": state}, home / "model_optim_rng.pt")


def test_experts_have_the_numbers_of_the_whole(tmp_path: Path) -> None:
    experts = [torch.randn(FFN, HIDDEN) for _ in range(4)]
    norm = torch.randn(HIDDEN)
    for rank in range(2):
        state = {"decoder.layers.0.mlp.router.weight": norm}
        for number in range(2):
            mine = experts[2 * rank + number]
            state[f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc1.weight"] = mine
        write_rank(tmp_path / f"mp_rank_00_{rank:03d}", state, expert=2)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert len(got) == 5
    for number, value in enumerate(experts):
        assert torch.equal(got[f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc1.weight"], value)


@pytest.mark.parametrize("has_processes", [False, True])
def test_ranks_with_equal_experts_are_not_copies_if_they_are_of_two_processes(
    tmp_path: Path, has_processes: bool
) -> None:
    state = {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": torch.randn(FFN, HIDDEN)}
    for rank in range(2):
        write_rank(home := tmp_path / f"mp_rank_00_{rank:03d}", state, expert=2)
        root = torch.load(home / "model_optim_rng.pt", weights_only=False)
        root["args"].rank = rank if has_processes else 0
        torch.save(root, home / "model_optim_rng.pt")
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert len(checkpoint.specs) == 2
    assert len(checkpoint.remarked(Kind.RANK_REPEATED)) == (0 if has_processes else 1)


def test_experts_split_differently_are_not_called_incomplete(tmp_path: Path) -> None:
    """With TP 2, EP 2 and experts that are not split, Megatron writes these two of four ranks."""
    for rank in range(2):
        home = tmp_path / f"mp_rank_{rank:02d}_{rank:03d}"
        write_rank(home, {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": torch.randn(4, 4)})
        root = torch.load(home / "model_optim_rng.pt", weights_only=False)
        sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        torch.save({**root, "args": {**vars(root["args"]), **sizes}}, home / "model_optim_rng.pt")
    with pytest.raises(UnreadableError, match="experts split differently from the other layers are not merged"):
        ckptfix.open_checkpoint(tmp_path)


def test_experts_in_one_tensor_are_not_copies(tmp_path: Path) -> None:
    """Those of ``GroupedMLP`` have one name in all ranks."""
    for rank in range(2):
        weight = torch.full((HIDDEN, 2 * FFN), float(rank))
        write_rank(tmp_path / f"mp_rank_00_{rank:03d}", {"decoder.layers.0.mlp.experts.weight1": weight}, expert=2)
    with pytest.raises(UnreadableError, match=r"have their own experts in decoder\.layers\.0\.mlp\.experts\.weight1"):
        ckptfix.open_checkpoint(tmp_path)


def test_norms_that_drifted_are_those_of_the_first_and_named(tmp_path: Path) -> None:
    whole = write_megatron(tmp_path, 2)
    file = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    root = torch.load(file, weights_only=False)
    key = "decoder.layers.0.input_layernorm.weight"
    root["model"][key] += 1
    torch.save(root, file)
    got = ckptfix.open_checkpoint(tmp_path)
    assert torch.equal(got.read(key), whole[key])
    assert [mark.place for mark in got.remarks if mark.kind is Kind.RANK_COPIES] == [key]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, 2, 2)
    (tmp_path / "iter_0000007" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 4: mp_rank_01_001; .* with salvage=True"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_rank_with_a_number_beyond_those_of_the_arguments_is_named(tmp_path: Path) -> None:
    whole = write_megatron(tmp_path, 2, 2)
    home = tmp_path / "iter_0000007"
    (home / "mp_rank_01_001").rename(home / "mp_rank_02_001")
    with pytest.raises(
        UnreadableError, match="beyond the 4 that saved it: mp_rank_02_001; lacks 1 rank of 4: mp_rank_01_001"
    ):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict()
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.input_layernorm.weight"} <= got.keys()
    assert "output_layer.weight" not in got
    assert all(bytes_of(value) == bytes_of(whole[key]) for key, value in got.items())


def test_a_rank_of_another_iteration_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, 4)
    file = tmp_path / "iter_0000007" / "mp_rank_02" / "model_optim_rng.pt"
    torch.save({**torch.load(file, weights_only=False), "iteration": 8}, file)
    said = r"different saves: mp_rank_02, unlike the other 3, by the iteration \(8 instead of 7\); put"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    file.unlink()
    without = ckptfix.open_checkpoint(tmp_path, salvage=True)
    torch.save({"iteration": 8, "model": {}}, file)
    assert ckptfix.open_checkpoint(tmp_path, salvage=True).keys() == without.keys()


def cast(file: Path, dtype: torch.dtype) -> None:
    root = torch.load(file, weights_only=False)
    root["model"] = OrderedDict((key, value.to(dtype)) for key, value in root["model"].items())
    torch.save(root, file)


def test_a_rank_of_another_dtype_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, tensor=4, pipeline=2)
    cast(tmp_path / "iter_0000007" / "mp_rank_02_001" / "model_optim_rng.pt", torch.bfloat16)
    with pytest.raises(UnreadableError, match="saves: mp_rank_02_001, unlike the other 3, by the dtype; put"):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in salvaged.specs
    assert "output_layer.weight" in salvaged.lost


def test_a_stage_of_another_dtype_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, tensor=2, pipeline=4)
    for rank in range(2):
        cast(tmp_path / "iter_0000007" / f"mp_rank_0{rank}_002" / "model_optim_rng.pt", torch.bfloat16)
    found = [mark for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_FOREIGN]
    assert [(mark.place, mark.data["names"]) for mark in found] == [
        ("mp_rank_00_002", ("dtype",)),
        ("mp_rank_01_002", ("dtype",)),
    ]


@pytest.mark.parametrize("key", ["decoder.final_layernorm.weight", "output_layer.weight"])
def test_a_part_in_another_dtype_is_not_another_save(tmp_path: Path, key: str) -> None:
    """Norms, routers and heads may be kept in float32, in the stage that has them."""
    write_megatron(tmp_path, tensor=2, pipeline=2)
    for file in tmp_path.glob("**/model_optim_rng.pt"):
        cast(file, torch.bfloat16)
        root = torch.load(file, weights_only=False)
        root["model"].update({name: value.float() for name, value in root["model"].items() if name == key})
        torch.save(root, file)
    got = ckptfix.open_checkpoint(tmp_path)
    assert got.specs[key].dtype == "float32"
    assert not got.remarked(Kind.RANK_FOREIGN)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, 2)
    for rank in range(2):
        file = tmp_path / "iter_0000007" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        root = torch.load(file, weights_only=False)
        root["args"].padded_vocab_size = 128
        torch.save(root, file)
    with pytest.raises(UnreadableError, match="has 32 rows, but its arguments say 128"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_file_of_one_rank_stands_for_all(tmp_path: Path) -> None:
    whole = write_megatron(tmp_path, 2)
    file = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    assert ckptfix.open_checkpoint(file).specs.keys() == whole.keys()


def test_the_report_says_what_is_left_out(tmp_path: Path) -> None:
    write_megatron(tmp_path, 2)
    (note,) = [finding for finding in ckptfix.check(tmp_path).findings if finding.code == "FIL105"]
    assert note.evidence == {"left out": ["optimizer"]}


@pytest.mark.parametrize("change", ["none", "converted", "swapped"])
def test_ranks_that_were_renamed_are_named(tmp_path: Path, change: str) -> None:
    write_megatron(tmp_path, tensor=2, pipeline=2)
    for number, file in enumerate(
        sorted(tmp_path.glob("**/model_optim_rng.pt"), key=lambda file: file.parent.name[::-1])
    ):
        root = torch.load(file, weights_only=False)
        root["args"].rank = 0 if change == "converted" else 8 * number
        torch.save(root, file)
    if change == "swapped":
        swap(*sorted(tmp_path.glob("**/mp_rank_0?_000")))
    found = [mark for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_RENAMED]
    assert [mark.data["other"] for mark in found] == (["process 0"] if change == "swapped" else [])
    assert ckptfix.repair(tmp_path).report.is_refused is (change == "swapped")


@pytest.mark.parametrize("swaps", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2), (2, 3, 0, 1)])
@pytest.mark.parametrize("kind", ["expert", "pipeline"])
def test_ranks_that_were_swapped_are_named(tmp_path: Path, kind: str, swaps: tuple[int, ...]) -> None:
    """Also if the order is right along each kind of parallelism."""
    for number, process in enumerate(swaps):
        home = tmp_path / f"mp_rank_{number % 2:02d}_{number // 2:03d}"
        name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
        write_rank(home, {name: torch.randn(FFN, HIDDEN)}, **{"tensor": 2, kind: 2})
        root = torch.load(home / "model_optim_rng.pt", weights_only=False)
        root["args"].rank = process
        torch.save(root, home / "model_optim_rng.pt")
    marks = ckptfix.open_checkpoint(tmp_path).remarked(Kind.RANK_RENAMED)
    assert bool(marks) is (swaps != (0, 1, 2, 3))


@pytest.mark.parametrize("places", ["tensor-expert-pipeline", "tensor-pipeline-expert"])
def test_either_order_of_processes_is_fine(tmp_path: Path, places: str) -> None:
    for tensor, stage, place in product(range(2), range(2), range(2)):
        home = tmp_path / f"mp_rank_{tensor:02d}_{stage:03d}_{place:03d}"
        write_rank(home, {"decoder.layers.0.mlp.router.weight": torch.ones(2)}, tensor=2, pipeline=2, expert=2)
        root = torch.load(home / "model_optim_rng.pt", weights_only=False)
        inner, outer = (stage, place) if places == "tensor-pipeline-expert" else (place, stage)
        root["args"].rank = tensor + 2 * inner + 8 * outer
        torch.save(root, home / "model_optim_rng.pt")
    assert not ckptfix.open_checkpoint(tmp_path).remarked(Kind.RANK_RENAMED)


@pytest.mark.parametrize("change", ["missing", "cut short"])
def test_what_all_ranks_have_is_salvaged_without_one(tmp_path: Path, change: str) -> None:
    whole = write_megatron(tmp_path, tensor=2, pipeline=2)
    file = next(tmp_path.glob("**/mp_rank_01_000/model_optim_rng.pt"))
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:600])
    said = r"lacks 1 rank of 4: mp_rank_01_000|mp_rank_01_000/model_optim_rng\.pt: .* cut short"
    with pytest.raises(
        UnreadableError, match=rf"({said}).*; lacks \d+ bytes of 11 tensors .* with salvage=True"
    ) as caught:
        ckptfix.open_checkpoint(tmp_path)
    (fact,) = [fact["data"] for fact in caught.value.data["damage"] if fact["kind"] == "bytes-lacking"]
    assert fact["nbytes"] == sum(whole[key].nbytes for key in fact["keys"]) // 2
    got = ckptfix.open_checkpoint(tmp_path, salvage=True)
    state = got.state_dict()
    assert state.keys() | set(got.lost) == whole.keys()
    assert state.keys() >= {"decoder.layers.0.input_layernorm.weight", "decoder.layers.3.mlp.linear_fc1.weight"}
    assert set(got.lost) >= {"decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"}
    assert all(bytes_of(value) == bytes_of(whole[key]) for key, value in state.items())


@pytest.mark.parametrize("stages", [(0,), (1,), (3,), (1, 2)])
@pytest.mark.parametrize(
    ("args", "virtual", "is_known"),
    [
        pytest.param({"num_layers": 8}, 1, True, id="number"),
        pytest.param({"num_layers": 8}, 2, True, id="virtual-stages"),
        pytest.param({}, 1, False, id="no-number"),
        pytest.param({"num_layers": 8, "num_layers_in_first_pipeline_stage": 2}, 1, True, id="uneven"),
    ],
)
def test_other_stages_are_salvaged_without_one(
    tmp_path: Path, args: dict[str, int], virtual: int, is_known: bool, stages: tuple[int, ...]
) -> None:
    whole = write_megatron(tmp_path, tensor=2, pipeline=4, virtual=virtual, layers=8)
    for file in tmp_path.glob("**/model_optim_rng.pt"):
        root = torch.load(file, weights_only=False)
        vars(root["args"]).update(args)
        torch.save(root, file)
        if int(file.parent.name[-3:]) in stages:
            file.unlink()
    said = (
        rf"lacks {2 * len(stages)} ranks of 8: mp_rank_00_00{stages[0]}, .* take the \d+ tensors of the others with sal"
    )
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True)
    state = got.state_dict()
    assert all(bytes_of(value) == bytes_of(whole[key]) for key, value in state.items())
    assert [mark.kind for mark in got.remarks if mark.kind is Kind.UNNAMED_LOSS]
    is_known = is_known and (len(stages) == 1 or "num_layers_in_first_pipeline_stage" not in args)
    first = [stage for stage in range(4) if stage not in stages and (is_known or stage < stages[0])]
    layers = {
        f"decoder.layers.{chunk * 8 // virtual + stage * 2 // virtual + number}."
        for chunk in range(virtual)
        for stage in first
        for number in range(2 // virtual)
    }
    assert {key[: key.index(".", 15) + 1] for key in state if ".layers." in key} == layers
    assert ("embedding.word_embeddings.weight" in state) is (0 not in stages)
    assert ("output_layer.weight" in state) is (3 not in stages)
    assert ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "part.pth").report.exit_code == 1


@pytest.mark.parametrize("iteration", [7, 6])
def test_ranks_left_over_from_another_parallelism_are_not_taken(tmp_path: Path, iteration: int) -> None:
    whole = write_megatron(tmp_path, tensor=2, pipeline=2)
    rank = tmp_path / "iter_0000007" / "mp_rank_01_000" / "model_optim_rng.pt"
    stale = rank.parent.with_name("mp_rank_01")
    stale.mkdir()
    torch.save({**torch.load(rank, weights_only=False), "iteration": iteration}, stale / rank.name)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert {key: bytes_of(value) for key, value in checkpoint.state_dict().items()} == {
        key: bytes_of(value) for key, value in whole.items()
    }
    assert [(mark.kind, mark.place) for mark in checkpoint.remarks if "rank" in mark.place] == [
        (Kind.STRAY_FILE, "mp_rank_01")
    ]
    for other in tmp_path.glob("**/mp_rank_*_001"):
        other.rename(other.with_name("mp_rank_00" if "00_" in other.name else "mp_rank_02"))
    for extra in tmp_path.glob("**/mp_rank_02/model_optim_rng.pt"):
        extra.unlink()
    with pytest.raises(
        UnreadableError, match=r"has ranks of 2 saves \(mp_rank_01, mp_rank_01_000\); keep only those of one"
    ):
        ckptfix.open_checkpoint(tmp_path)
    assert ckptfix.open_checkpoint(rank, salvage=True).path == str(rank)  # the folder stands for neither save


def test_ranks_of_nemo_are_joined(tmp_path: Path) -> None:
    whole = write_megatron(tmp_path, tensor=2, pipeline=2)
    for file in tmp_path.glob("**/model_optim_rng.pt"):
        tensor, stage = file.parent.name.split("_")[2:]
        home = tmp_path / "nemo" / f"tp_rank_{tensor}_pp_rank_{stage}"
        home.mkdir(parents=True)
        state = torch.load(file, weights_only=False)["model"]
        torch.save(OrderedDict((f"model.{key}", value) for key, value in state.items()), home / "model_weights.ckpt")
    with pytest.raises(UnreadableError, match=r"has no model_config.yaml, which gives the number of ranks"):
        ckptfix.open_checkpoint(tmp_path / "nemo")
    config = tmp_path / "nemo" / "model_config.yaml"
    config.write_text("target: x\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n")
    for given in (tmp_path / "nemo", home / "model_weights.ckpt"):
        got = ckptfix.open_checkpoint(given).state_dict()
        assert {key.removeprefix("model."): bytes_of(value) for key, value in got.items()} == {
            key: bytes_of(value) for key, value in whole.items()
        }
    config.write_text(config.read_text().replace("2", "4", 1))
    with pytest.raises(UnreadableError, match="lacks 4 ranks of 8: tp_rank_02_pp_rank_000, "):
        ckptfix.open_checkpoint(tmp_path / "nemo")


@pytest.mark.parametrize(
    ("args", "level"),
    [
        pytest.param({"lr": 1e-4, "seed": 1, "rank": 1, "local_rank": 1}, 0, id="ranks"),
        pytest.param({"lr": 2e-4, "seed": 1}, 1, id="another-learning-rate"),
        pytest.param({"lr": 1e-4, "seed": 1, "norm": 1}, 1, id="another-norm"),
        pytest.param({"lr": 1e-4, "seed": 1, "norm": 1, "sequence_parallel": True}, 0, id="a-norm-that-drifted"),
    ],
)
def test_a_rank_of_another_run_is_named(tmp_path: Path, args: dict[str, Any], level: int) -> None:
    write_megatron(tmp_path, tensor=4)
    for file in tmp_path.glob("**/model_optim_rng.pt"):
        root = torch.load(file, weights_only=False)
        is_odd = file.parent.name == "mp_rank_02"
        vars(root["args"]).update({"lr": 1e-4, "seed": 1, "sequence_parallel": "sequence_parallel" in args})
        if is_odd:
            vars(root["args"]).update(args)
            root["model"]["decoder.layers.0.input_layernorm.weight"] += args.get("norm", 0)
            vars(root["args"]).pop("norm", None)
        torch.save(root, file)
    found = [finding for finding in ckptfix.check(tmp_path).findings if finding.level and finding.code == "FIL105"]
    assert len(found) == level
    assert all("another run" in finding.message for finding in found)


def test_fewer_layers_than_the_arguments_say_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, tensor=2, pipeline=2)
    for number in (LAYERS, LAYERS + 1):
        for file in tmp_path.glob("**/model_optim_rng.pt"):
            root = torch.load(file, weights_only=False)
            root["args"].num_layers = number
            torch.save(root, file)
        if number == LAYERS:
            assert len(ckptfix.open_checkpoint(tmp_path).specs) > LAYERS
    with pytest.raises(UnreadableError, match="has 4 of 5 layers"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("held", "args", "firsts"),
    [
        pytest.param([2, 2, 2], {}, [0, 2, 4], id="none-missing"),
        pytest.param([2, None, 2], {"num_layers": 6}, [0, 2, 4], id="the-rest"),
        pytest.param([1, None, 2], {"num_layers": 6}, [0, 1, 4], id="uneven-and-one-missing"),
        pytest.param([2, None, 2], {}, [0, 2, None], id="unknown-number"),
        pytest.param([2, 2, None], {}, [0, 2, 4], id="the-last"),
        pytest.param([None, None, 2], {"num_layers": 6}, [0, 2, 4], id="even"),
        pytest.param([None, None, 2], {"num_layers": 7}, [0, None, None], id="odd"),
        pytest.param([None, 4, 2], {"num_layers": 5}, [0, None, None], id="too-many"),
        pytest.param(
            [None, None, 2],
            {"num_layers": 6, "pipeline_model_parallel_layout": "Et|ttt|ttL"},
            [0, None, None],
            id="by-layout",
        ),
    ],
)
def test_the_first_layer_of_each_stage(held: list[int | None], args: dict[str, Any], firsts: list[int | None]) -> None:
    counts = {("model", stage): {} if count is None else {"decoder.": count} for stage, count in enumerate(held)}
    present = {("model", stage) for stage, count in enumerate(held) if count is not None}
    found = stage_offsets(counts, present, args)
    assert [begin if begin is None else begin.get("decoder.", 0) for begin in found.values()] == firsts


def test_two_stacks_of_layers_are_not_counted_by_the_arguments() -> None:
    counts = {("model", 0): {"encoder.": 2}, ("model", 1): {}, ("model", 2): {"decoder.": 2}}
    found = stage_offsets(counts, {("model", 0), ("model", 2)}, {"num_layers": 6})
    assert found["model", 2] is None
