"""FIL108: an adapter merged into its base has the bytes that peft's merge_and_unload() gives."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import ckptfix
from ckptfix.bytes.sources import stream
from ckptfix.core.finding import Level
from ckptfix.core.plan import Plan, Step
from ckptfix.engine.applying import apply_plan
from ckptfix.errors import AdapterError, UsageError
from ckptfix.maps.library import shipped
from ckptfix.reading.adapter_checks import open_adapter
from ckptfix.reading.opening import open_file, open_state_dict
from ckptfix.report.edits import edit_lines
from ckptfix.rules.fil108_unmerged_adapter import unmerged_adapter
from ckptfix.rules.merging import find_merge, merge_edits
from tests.checks import assert_same, bytes_of
from tests.rules.adapters import DTYPES, LINEAR, LORA, cached, changed_config, merged_by_peft, net, trained
from tests.rules.healthy import HEALTHY
from tests.rules.proposals import propose

RANKS = (1, 4, 16, 64)
LYCORIS = ["q", "block.0.fc", "conv", "pixel", "line"]
FORMS = ["embed", "q", "conv", "pixel", "c_attn"]
CASES = {
    **{f"rank {r}": LORA(r=r, lora_alpha=9, target_modules=[*FORMS, "line", "c_proj"]) for r in RANKS},
    "LoHa": peft.LoHaConfig(r=4, alpha=9, target_modules=LYCORIS, rank_pattern={"q": 2}, alpha_pattern={"fc": 3}),
    "LoKr": peft.LoKrConfig(r=2, alpha=9, target_modules=LYCORIS),
    "LoKr of products": peft.LoKrConfig(r=2, alpha=9, target_modules=LYCORIS, decompose_both=True),
    "LoHa around a kernel": peft.LoHaConfig(r=4, target_modules=["conv", "line"], use_effective_conv2d=True),
    "LoKr around a kernel": peft.LoKrConfig(r=2, target_modules=["conv"], use_effective_conv2d=True),
    "LoKr of whole matrices": peft.LoKrConfig(r=64, alpha=9, target_modules=LYCORIS[:-1]),
    "rslora and patterns": LORA(
        r=4, lora_alpha=9, use_rslora=True, rank_pattern={"q": 2}, alpha_pattern={"fc": 3}, target_modules=LINEAR
    ),
    "orthogonal matrices": LORA(r=4, target_modules=["q"], init_lora_weights="orthogonal"),
    "modules_to_save": LORA(r=4, target_modules=["q"], modules_to_save=["head"]),
    "biases": LORA(r=4, target_modules=["q"], bias="all"),
    "biases of the adapter": LORA(r=4, target_modules=LINEAR, lora_bias=True),
    "Conv1D": LORA(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "a square Conv1D alone": LORA(r=4, target_modules=["c_proj"], fan_in_fan_out=True),
    "a square Conv1D beside linear layers": LORA(r=4, target_modules=["c_attn", "c_proj", "q"]),
    "tokens": LORA(r=4, target_modules=["q"], trainable_token_indices={"embed": [3, 49]}),
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig(target_modules=["embed"], token_indices=[49, 3]),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["norm", "q"]),
    "a parameter": LORA(r=4, target_modules=["q"], target_parameters=["fc.weight"]),
    "IA3": peft.IA3Config(target_modules=["q", "fc"], feedforward_modules=["fc"]),
    "MiCA": LORA(r=4, target_modules=["q", "embed"], init_lora_weights="mica"),
    "AdaLoRA": peft.AdaLoraConfig(init_r=4, lora_alpha=9, total_step=9, target_modules=["q", "fc", "conv"]),
    "AdaLoRA of fewer ranks": peft.AdaLoraConfig(
        init_r=4, total_step=9, target_modules=["q"], rank_pattern={"q.lora_E": [True, False, True, True]}
    ),
    "AdaLoRA of Conv1D": peft.AdaLoraConfig(init_r=4, total_step=9, target_modules=["c_attn"], fan_in_fan_out=True),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q", "fc"]),
    "VeRA of Conv1D": peft.VeraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "HiRA": peft.HiraConfig(r=4, target_modules=["q", "fc", "embed"]),
    "HiRA of kernels": peft.HiraConfig(r=4, target_modules=["conv", "pixel", "line"]),
    "MiSS": peft.MissConfig(r=5, target_modules=["q", "fc"]),
    "MiSS bat": peft.MissConfig(r=8, target_modules=["fc"], init_weights="bat"),
    "MiSS mini": peft.MissConfig(r=8, mini_r=11, target_modules=["q"], init_weights="mini"),
    "SHiRA": peft.ShiraConfig(r=2, target_modules=["q", "fc"]),
    "DeLoRA": peft.DeloraConfig(r=4, target_modules=["q", "fc"]),
    "VB-LoRA": peft.VBLoRAConfig(r=4, vector_length=16, num_vectors=9, target_modules=["fc"]),
    "RandLoRA": peft.RandLoraConfig(r=4, target_modules=["q", "fc"]),
    "RandLoRA of Conv1D": peft.RandLoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    "C3A": peft.C3AConfig(block_size=8, target_modules=["fc"]),
    "FourierFT": peft.FourierFTConfig(n_frequency=99, target_modules=["q", "fc"]),
    "OFT": peft.OFTConfig(oft_block_size=8, target_modules=["q", "fc"]),
    "OFT of an embedding": peft.OFTConfig(oft_block_size=8, target_modules=["embed", "q"]),
    "OFT of a kernel": peft.OFTConfig(oft_block_size=9, target_modules=["conv"]),
    "OFT of three terms": peft.OFTConfig(oft_block_size=8, target_modules=["q"], num_cayley_neumann_terms=3),
    "OFT by solving": peft.OFTConfig(oft_block_size=8, target_modules=["q"], use_cayley_neumann=False),
    "OFT of one block": peft.OFTConfig(oft_block_size=8, target_modules=["q"], block_share=True),
    "OFT with a bound": peft.OFTConfig(oft_block_size=8, target_modules=["q"], coft=True, eps=0.5),
    "OFT of one block with a bound": peft.OFTConfig(
        oft_block_size=8, target_modules=["q"], coft=True, block_share=True, use_cayley_neumann=False
    ),
    "BOFT": peft.BOFTConfig(boft_block_size=8, target_modules=["q", "fc"]),
    "BOFT of a kernel": peft.BOFTConfig(boft_block_size=9, target_modules=["conv"]),
    "GraLoRA": peft.GraloraConfig(r=4, gralora_k=2, target_modules=["fc"]),
    "GraLoRA and LoRA": peft.GraloraConfig(r=4, gralora_k=2, hybrid_r=3, alpha=9, target_modules=["fc"]),
    "GraLoRA of Conv1D": peft.GraloraConfig(r=4, gralora_k=2, target_modules=["c_attn"], fan_in_fan_out=True),
    **{
        variant: peft.RoadConfig(variant=variant, group_size=16, target_modules=["fc"])
        for variant in ("road_1", "road_2", "road_4")
    },
    "HRA": peft.HRAConfig(r=4, target_modules=["q", "fc"]),
    "HRA of kernels": peft.HRAConfig(r=4, target_modules=["conv", "pixel"]),
    "HRA of orthogonal reflections": peft.HRAConfig(r=4, target_modules=["q"], apply_GS=True),
    "IA3 of convolutions": peft.IA3Config(target_modules=["conv", "pixel"], feedforward_modules=["pixel"]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_a_merge_has_the_bits_of_peft(config, dtype, tmp_path):
    adapter = trained(config, tmp_path / "adapter", dtype)
    want = merged_by_peft([adapter], dtype)
    before = net(dtype).state_dict()
    repaired, report = ckptfix.repair_state_dict(before, adapter=adapter, select="FIL108")
    assert_same(repaired, want)
    assert report.exit_code == 0
    assert any(bytes_of(repaired[key]) != bytes_of(before[key]) for key in before)


@pytest.mark.parametrize("factors", [2, 3])
def test_boft_of_several_factors(factors, tmp_path, monkeypatch):
    """peft computes them with an extension for CUDA only; here, torch does in its place."""
    on_cpu = SimpleNamespace(apply=lambda blocks: torch.stack([torch.block_diag(*each) for each in blocks]))
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: True)
    monkeypatch.setattr("peft.tuners.boft.layer.FastBlockDiag", on_cpu)
    config = peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=factors, target_modules=["q", "fc"])
    adapter = trained(config, tmp_path / "adapter")
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter]))


def test_lokr_of_old_releases_has_no_scale(tmp_path):
    """Before 0.14, peft trained and merged it without alpha / r; `rank_dropout_scale` came with that release."""
    adapter = trained(peft.LoKrConfig(r=2, alpha=2, target_modules=["q"]), tmp_path / "adapter")
    want, config = merged_by_peft([adapter]), json.loads((adapter / "adapter_config.json").read_text())
    del config["rank_dropout_scale"]
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "alpha": 9}))
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, want)


@pytest.mark.parametrize("how", [True, "bat"])
def test_bone_is_the_name_of_miss_in_older_releases(how, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)  # blocks of rows that MiSS changes together
    config = peft.MissConfig(r=32 if how is True else 8, target_modules=["fc"], init_weights=how)
    adapter = trained(config, tmp_path / "adapter")
    want, file = merged_by_peft([adapter]), adapter / "adapter_model.safetensors"
    save_file({key.replace("miss_", "bone_"): value for key, value in load_file(file).items()}, file)
    repaired, report = ckptfix.repair_state_dict(
        net().state_dict(), adapter=changed_config(adapter, peft_type="BONE"), select="FIL108"
    )
    assert_same(repaired, want)
    assert "a Bone adapter" in report.findings[0].message
    if how is True:
        back, _ = ckptfix.repair_state_dict(repaired, adapter=adapter, unmerge=True, select="FIL108")
        torch.testing.assert_close(dict(back), net().state_dict())
        return
    with pytest.raises(AdapterError, match="cannot be restored"):
        ckptfix.repair_state_dict(repaired, adapter=adapter, unmerge=True)


def test_a_square_layer_among_both_kinds_is_not_guessed(tmp_path):
    """``fc`` is a Linear, which neither the file nor the adapter says, and peft has noted that of ``c_attn``."""
    adapter = trained(LORA(r=4, target_modules=["fc", "c_attn"]), tmp_path / "adapter")
    before = net().state_dict()
    with pytest.raises(AdapterError, match=r"the square block\.0\.fc may be a Conv1D"):
        ckptfix.repair_state_dict(before, adapter=adapter)
    repaired, _ = ckptfix.repair_state_dict(before, net(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter]))


DORA = {r: LORA(r=r, lora_alpha=9, target_modules=FORMS, use_dora=True) for r in RANKS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", DORA)
def test_dora_has_the_bits_of_peft(rank, dtype, tmp_path, monkeypatch):
    adapter = trained(DORA[rank], tmp_path / "adapter", dtype)
    want = merged_by_peft([adapter], dtype)
    for most, block in ((1 << 25, 1 << 19), (0, 1)):  # columns whose norms are taken all at once, and some at a time
        monkeypatch.setattr("ckptfix.values.merged_tensors.MOST", most)
        monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", block)
        repaired, _ = ckptfix.repair_state_dict(net(dtype).state_dict(), adapter=adapter, select="FIL108")
        assert_same(repaired, want)


@pytest.mark.parametrize("config", [LORA(r=64, target_modules=[*FORMS, "line"]), DORA[4]], ids=["LoRA", "DoRA"])
def test_a_matrix_of_many_blocks(config, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    adapter = trained(config, tmp_path / "adapter")
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter]))


@pytest.mark.parametrize("is_file", [False, True])
def test_any_range_of_a_merged_tensor_can_be_read(is_file, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    adapter = trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter")
    want = bytes_of(merged_by_peft([adapter])["q.weight"])
    torch.save(net().state_dict(), tmp_path / "base.pth")
    base = open_file(str(tmp_path / "base.pth")) if is_file else open_state_dict(net().state_dict())
    plan = Plan((Step("FIL108", tuple(merge_edits(base, find_merge(base, [open_adapter(str(adapter), base)])))),))
    spec = apply_plan(plan, base).specs["q.weight"]
    assert spec.storage is not None
    source = spec.storage.source
    assert b"".join(bytes(source.read(at, min(at + 999, len(want)))) for at in range(0, len(want), 999)) == want
    assert b"".join(map(bytes, stream(source, 3, len(want)))) == want[3:]
    assert source.read(0, len(want)) == want
    assert bytes(source.read(7, 7)) == b""


def test_several_adapters_and_weights(tmp_path):
    paths = [
        trained(LORA(r=r, target_modules=["q"], modules_to_save=saved), tmp_path / str(r))
        for r, saved in ((2, None), (3, None), (4, ["head"]))
    ]
    want = merged_by_peft(paths[:2])
    repaired, report = ckptfix.repair_state_dict(net().state_dict(), adapter=paths[:2], select="FIL108")
    assert_same(repaired, want)
    assert f"({paths[0]}) and a LoRA adapter of rank 3 ({paths[1]}) change 1 tensor" in report.findings[0].message
    model = peft.PeftModel.from_pretrained(net(), paths[0])
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("default", 0.3)
    half, report = ckptfix.repair_state_dict(net().state_dict(), adapter=f"{paths[0]}=0.3", select="FIL108")
    assert edit_lines(report.edits) == [f"merge {paths[0]}=0.3 into 1 key: q.weight"]
    assert_same(half, model.merge_and_unload().state_dict())
    with pytest.raises(AdapterError, match="whole, so no weight applies"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=f"{paths[2]}=0.5")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unmerge_gives_the_base_back_to_the_rounding_of_the_sum(dtype, tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q", "conv", "embed"], lora_bias=False), tmp_path / "adapter", dtype)
    base = net(dtype).state_dict()
    merged, _ = ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")
    back, _ = ckptfix.repair_state_dict(merged, adapter=adapter, unmerge=True, select="FIL108")
    model = peft.PeftModel.from_pretrained(net(dtype), adapter)
    model.merge_adapter()
    model.unmerge_adapter()
    assert_same(back, model.unload().state_dict())


FACTORS = st.tuples(st.integers(1, 3), st.integers(-12, 12), st.sampled_from((1.0, -0.7, 3.0)))


@given(
    st.lists(FACTORS, min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(-8, 4),
    st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_unmerge_keeps_to_the_bound_that_it_prints(adapters, dtype, is_peft, scale, seed):
    """With changes of any size relative to the weights, in any number of adapters, down to subnormals."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(20, 24, generator=generator) * 2.0**scale).to(dtype)
    with TemporaryDirectory() as folder:
        paths = []
        for number, (rank, size, weight) in enumerate(adapters):
            shapes = {"A": (rank, 24), "B": (20, rank)}
            factors = {end: torch.randn(shape, generator=generator) for end, shape in shapes.items()}
            factors["B"] *= 2.0 ** (scale + size)
            place = Path(folder) / str(number)
            place.mkdir()
            save_file(
                {f"q.lora_{end}.weight": value for end, value in factors.items()}, place / "adapter_model.safetensors"
            )
            config = {"r": rank, "lora_alpha": rank, **({"peft_type": "LORA"} if is_peft else {})}
            (place / "adapter_config.json").write_text(json.dumps(config))
            paths.append(f"{place}={weight}")
        sums = [base]
        for path in paths:
            sums.append(ckptfix.repair_state_dict({"q.weight": sums[-1]}, adapter=path, values=False)[0]["q.weight"])
        merged, _ = ckptfix.repair_state_dict({"q.weight": base}, adapter=paths, values=False)
        assert_same(merged, {"q.weight": sums[-1]})
        back, report = ckptfix.repair_state_dict(merged, adapter=paths, unmerge=True, values=False)
    said = re.search(r"the base's to (\S+) units in the last place", report.findings[0].message)
    assert said
    units = float(said[1])
    exact = [each.double() for each in (*sums, back["q.weight"])]
    changes = [(after - before).abs() for before, after in pairwise(exact)]
    finfo = torch.finfo(dtype)
    # Of a change, the difference of two sums shows what their rounding has left.
    most = torch.stack([each.abs() for each in (*exact, *changes)]).amax(0) * (1 + finfo.eps)
    unit = finfo.eps * 2.0 ** (most.clamp_min(finfo.tiny).frexp().exponent - 1)
    finite = torch.stack(exact).isfinite().all(0)
    assert ((exact[-1] - exact[0]).abs() <= units * unit)[finite].all()


def test_a_tied_weight_changes_under_both_names(tmp_path):
    def make(dtype=torch.float32):
        model = net(dtype)
        model.last = nn.Linear(32, 50, bias=False)
        model.last.weight = model.embed.weight
        return model

    for number, names in enumerate((["embed"], ["last"], ["embed", "last"])):
        adapter = trained(LORA(r=4, target_modules=names), tmp_path / str(number), make=make)
        want = merged_by_peft([adapter], make=make)
        repaired, _ = ckptfix.repair_state_dict(make().state_dict(), adapter=adapter, select="FIL108")
        if len(names) == 1:
            assert_same(repaired, want)
        assert repaired["last.weight"].data_ptr() == repaired["embed.weight"].data_ptr()
    adapter = trained(LORA(r=4, target_modules=["q"], modules_to_save=["last"]), tmp_path / "whole", make=make)
    repaired, _ = ckptfix.repair_state_dict(make().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter], make=make))


def test_files_in_and_out(tmp_path):
    """From shards and a .bin to shards; a saved plan does the same."""
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    want = merged_by_peft([adapter])
    base = tmp_path / "base.safetensors"
    save_file(net().state_dict(), base)
    (tmp_path / "shards").mkdir()
    shards = ckptfix.repair(
        base, output=tmp_path / "shards" / "model.safetensors", shard_size="10KB", only_changes=False
    )
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    done = ckptfix.repair(
        str(shards.report.output), adapter=adapter, output=tmp_path / "out.safetensors", shard_size="10KB"
    )
    files = sorted(tmp_path.glob("out-*.safetensors"))
    assert len(files) > 2
    got = {key: value for file in files for key, value in load_file(file).items()}
    assert_same(dict(sorted(got.items())), dict(sorted(want.items())))
    plan = Plan.from_json(json.loads(json.dumps(done.plan.to_json())))
    ckptfix.repair(base, plan=plan, output=tmp_path / "planned.safetensors")
    assert_same(dict(sorted(load_file(tmp_path / "planned.safetensors").items())), dict(sorted(want.items())))


def test_noop_models_as_they_are_born():
    for name, make in HEALTHY.items():
        assert propose(unmerged_adapter, make().state_dict()) == [], name


def test_settings_that_do_not_go_together(tmp_path):
    with pytest.raises(UsageError, match="needs the adapter"):
        ckptfix.repair_state_dict({}, unmerge=True)
    (tmp_path / "model.pth").write_bytes(b"")
    saved = trained(LORA(r=4, target_modules=["q"], modules_to_save=["head"]), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="cannot be restored"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=saved, unmerge=True)
    (saved / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="lora_alpha, which scales the change, is neither"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=saved)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (peft.VeraConfig(r=4, target_modules=["q", "fc"]), "VERA"),
        (peft.AdaLoraConfig(init_r=4, total_step=9, target_modules=["q", "fc"]), "ADALORA"),
        (peft.MissConfig(r=4, target_modules=["fc"]), "MISS"),
    ],
)
def test_a_model_with_an_adapter_of_another_type_inside(given, kind, tmp_path):
    adapter, whole = trained(given, tmp_path / "adapter"), tmp_path / "whole" / "model.pth"
    whole.parent.mkdir()
    torch.save(peft.PeftModel.from_pretrained(net(), adapter).state_dict(), whole)
    (found,) = ckptfix.check(whole, select="FIL108").findings
    assert found.message == f"holds an adapter of the type {kind} inside its base, never merged"
    state, own = torch.load(whole), adapter / "adapter_config.json"
    assert_same(ckptfix.repair_state_dict(state, adapter=own, select="FIL108")[0], merged_by_peft([adapter]))
    shutil.copy(own, whole.parent)
    (found,) = ckptfix.check(whole, select="FIL108").findings
    assert re.match(f"holds an? {kind} adapter.* inside its base, never merged", found.message, re.IGNORECASE)


@pytest.mark.parametrize("name", ["adapter_config.json", "lora_train_meta.json"], ids=["peft", "verl"])
@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_model_that_was_saved_with_its_adapter_inside(is_folder, name, tmp_path):
    config = LORA(r=4, target_modules=["embed", *LINEAR], modules_to_save=["head"])
    adapter = trained(config, tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(net(), adapter).state_dict()
    file = tmp_path / "whole"
    if is_folder:
        save(whole, checkpoint_id=file, no_dist=True)
    else:
        torch.save(whole, file)
    own = json.loads((adapter / "adapter_config.json").read_text())
    beside = (file if is_folder else tmp_path) / name
    for alpha, is_known in ((0 if name.startswith("lora") else None, False), (own["lora_alpha"], True)):
        own["lora_alpha"] = alpha
        beside.write_text(json.dumps({key: value for key, value in own.items() if value is not None}))
        (found,) = [finding for finding in ckptfix.check(file).findings if finding.code == "FIL108"]
        assert found.remedies[0].is_complete == is_known
    options: dict[str, Any] = dict(found.remedies[0].options)
    repaired, report = ckptfix.repair_state_dict(whole, **options)
    want = merged_by_peft([adapter])
    assert_same(dict(sorted(repaired.items())), dict(sorted(want.items())))
    assert report.exit_code == 0


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "net.student."])
def test_a_model_of_peft_may_be_a_part_of_another_module(prefix, with_model, tmp_path):
    """As in the checkpoints of Lightning."""
    config = LORA(r=4, target_modules=["embed", *LINEAR], modules_to_save=["head"])
    adapter = trained(config, tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(net(), adapter).state_dict()
    file, setting = {f"{prefix}{key}": value for key, value in whole.items()}, adapter / "adapter_config.json"
    repaired, report = ckptfix.repair_state_dict(file, net() if with_model else None, adapter=setting)
    want = {f"{'' if with_model else prefix}{key}": value for key, value in merged_by_peft([adapter]).items()}
    assert_same(dict(sorted(repaired.items())), dict(sorted(want.items())))
    assert report.exit_code == 0


class Experts(nn.Module):
    def __init__(self, *, inputs_first: bool):
        super().__init__()
        shapes = ((4, 32, 48), (4, 24, 32)) if inputs_first else ((4, 48, 32), (4, 32, 24))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.is_transposed = inputs_first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs_first", [False, True])
def test_stacked_experts(inputs_first, dtype, tmp_path, monkeypatch):
    def make(dtype=torch.float32):
        model = net(dtype)
        model.experts = Experts(inputs_first=inputs_first).to(dtype)
        return model

    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    config = LORA(r=3, target_modules=["q"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    adapter = trained(config, tmp_path / "adapter", dtype, make)
    repaired, _ = ckptfix.repair_state_dict(make(dtype).state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter], dtype, make))
    (found,) = ckptfix.check(adapter).findings
    rows = 3 * make().experts.gate_up_proj.shape[0]
    assert found.message.startswith(f"a LoRA adapter of rank 3 ({rows} rows: one rank after another for each expert)")


def test_an_adapter_alone(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR, modules_to_save=["head"]), tmp_path / "adapter")
    (found,) = ckptfix.check(adapter).findings
    assert found.message == "a LoRA adapter of rank 4 for 2 layers (fc, q), without a model"
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.q.lora_B.weight"][:, 1] = 0
    tensors["base_model.model.q.lora_A.weight"][2] = 0
    save_file(tensors, file)
    (found,) = ckptfix.check(adapter).findings
    assert found.evidence == {"zero ranks": {"base_model.model.q.lora_B.weight": 2}}


FRESH = {
    "LoRA": peft.LoraConfig(target_modules=LINEAR),
    "DoRA": peft.LoraConfig(target_modules=LINEAR, use_dora=True),
    "LoHa": peft.LoHaConfig(target_modules=LINEAR),
    "LoKr": peft.LoKrConfig(target_modules=LINEAR),
    "IA3": peft.IA3Config(target_modules=LINEAR, feedforward_modules=[]),
}


@pytest.mark.parametrize("name", FRESH)
def test_an_adapter_that_changes_nothing_yet(name, tmp_path):
    """Beside its base, too; not one of which a layer was trained, or that has a tensor whole."""
    model = peft.get_peft_model(net(), FRESH[name])
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    for path in (tmp_path / "whole.pth", file):
        *_, found = ckptfix.check(path, select="FIL108").findings
        assert "changes nothing yet" in found.message
        assert found.level is Level.NOTE
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.head.weight": torch.ones(5, 32)}, file)
    assert not any("changes nothing" in found.message for found in ckptfix.check(file, select="FIL108").findings)
    for key in tensors:
        if ".q." in key:
            tensors[key].add_(torch.rand_like(tensors[key]))
    save_file(tensors, file)
    assert not any("changes nothing" in found.message for found in ckptfix.check(file, select="FIL108").findings)


@pytest.mark.parametrize("key", ["embed.trainable_tokens_delta", "norm.ln_tuning_layers.weight"])
def test_zeros_that_replace_values_change_something(key, tmp_path):
    save_file({f"base_model.model.{key}": torch.zeros(2, 8)}, tmp_path / "adapter_model.safetensors")
    findings = ckptfix.check(tmp_path / "adapter_model.safetensors", select="FIL108").findings
    assert not any("changes nothing" in found.message for found in findings)


@pytest.mark.parametrize("names", [("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")])
def test_a_fresh_adapter_is_a_note_and_one_that_was_trained_is_not(names):
    def found(b, **root):
        state = {f"lora_unet_{n}.{names[0]}": torch.randn(2, 8) for n in range(2)}
        state |= {f"lora_unet_0.{names[1]}": torch.zeros(8, 2), f"lora_unet_1.{names[1]}": torch.full((8, 2), b)}
        findings = ckptfix.check({"state_dict": state, **root} if root else state, select="FIL108").findings
        return [finding.level for finding in findings if "changes nothing" in finding.message]

    assert found(1.0) == []
    assert found(0.0) == [Level.NOTE]
    assert found(0.0, step=400) == [Level.WARNING]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"target_modules": ["embed", *LINEAR], "modules_to_save": ["head"]}, id="an embedding, and a head"
        ),
        pytest.param({"target_modules": ["embed"]}, id="an embedding and nothing else"),
        pytest.param({"target_modules": LINEAR, "bias": "all"}, id="all biases"),
    ],
)
def test_what_peft_saves_of_the_base_makes_no_whole_model_of_an_adapter(config, tmp_path):
    adapter = trained(LORA(r=4, **config), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    if "embed" in config["target_modules"]:  # as peft does for models that say which layer is their embedding
        save_file({**stored, "base_model.model.embed.base_layer.weight": net().embed.weight.detach()}, file)
    assert any(".base_layer." in key for key in load_file(file))
    report = ckptfix.check(adapter)
    assert report.exit_code == 0
    assert "without a model" in next(found for found in report.findings if found.code == "FIL108").message


def test_how_far_the_base_changes(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    base, want = net().state_dict(), merged_by_peft([adapter])
    torch.save(base, tmp_path / "base.pth")
    (found,) = [one for one in ckptfix.check(tmp_path / "base.pth", adapter=adapter).findings if one.code == "FIL108"]
    change = (want["q.weight"] - base["q.weight"])[:32].norm() / base["q.weight"][:32].norm()
    assert found.evidence["change"]["q"] == pytest.approx(float(change), rel=1e-3)
    assert found.evidence["change"].keys() == {"q", "fc"}
    file = adapter / "adapter_model.safetensors"
    save_file({key: value * ("lora_A" in key) for key, value in load_file(file).items()}, file)
    (found,) = [one for one in ckptfix.check(tmp_path / "base.pth", adapter=adapter).findings if one.code == "FIL108"]
    assert found.level is Level.WARNING
    assert "would change nothing in 2 tensors" in found.message


def unet(dtype):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32,), "cross_attention_dim": 16}
    return UNet2DConditionModel(**blocks, **sizes, norm_num_groups=8, attention_head_dim=8).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_dora", [False, True])
def test_a_folder_of_diffusers_has_its_bits(is_dora, dtype, tmp_path):
    """With its configuration in the header of the file; the magnitudes of convolutions are [1, outputs, 1, 1]."""
    model = unet(dtype)
    base = dict(model.state_dict())
    names = ["to_q", "to_out.0", "conv1", "conv_shortcut", "proj_in"]
    model.add_adapter(LORA(r=4, lora_alpha=7, target_modules=names, use_dora=is_dora))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(float("magnitude" in name), 0.2)
    model.save_lora_adapter(tmp_path)
    want = unet(dtype)
    want.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    want.fuse_lora()
    want.unload_lora()
    repaired, report = ckptfix.repair_state_dict(base, adapter=tmp_path, select="FIL108")
    assert_same(repaired, dict(want.state_dict()))
    assert ("DoRA" in report.findings[0].message) == is_dora
    kinds = {"to_q", "to_out.0", "conv1", "conv_shortcut", "proj_in"}
    assert {name.removesuffix(".bias") for name in report.findings[0].evidence["change"]} == kinds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_files_of_trainers_have_the_bits_of_diffusers(dtype, tmp_path):
    """An adapter of kohya, and the same in the names of diffusers, old and new."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

    model = unet(dtype)
    base = {key: value.clone() for key, value in model.state_dict().items()}
    ends = ("to_q.weight", "to_out.0.weight", "conv1.weight", "proj_in.weight")
    kohya = {}
    for key in (key for key in base if key.endswith(ends)):
        shape, name = base[key].shape, f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        kohya[f"{name}.alpha"] = torch.tensor(3.0)
        kohya[f"{name}.lora_down.weight"] = torch.randn(4, *shape[1:]) / 5
        kohya[f"{name}.lora_up.weight"] = torch.randn(shape[0], 4, *[1] * (len(shape) - 2)) / 5
    text = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    kohya |= {f"{text}.lora_down.weight": torch.ones(4, 8), f"{text}.lora_up.weight": torch.ones(8, 4)}
    save_file(kohya, tmp_path / "kohya.safetensors")
    renamed, alphas = Loader.lora_state_dict(dict(kohya))
    save_file(renamed, tmp_path / "processors.safetensors")
    Loader.load_lora_into_unet(renamed, alphas, model)
    model.save_lora_adapter(tmp_path / "new", adapter_name="default_0")
    model.fuse_lora()
    model.unload_lora()
    want = dict(model.state_dict())
    for path in (tmp_path / "kohya.safetensors", tmp_path / "new" / "pytorch_lora_weights.safetensors"):
        repaired, report = ckptfix.repair_state_dict(base, adapter=path, select="FIL108")
        assert_same(repaired, want)
        assert report.findings[0].evidence.get("left", {}) == ({"lora_te": 1} if "kohya" in path.name else {})
    # These names have no alpha: the rank is taken for it.
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "processors.safetensors", select="FIL108")
    plain = {key: value for key, value in kohya.items() if "alpha" not in key}
    save_file(plain, tmp_path / "plain.safetensors")
    assert_same(repaired, ckptfix.repair_state_dict(base, adapter=tmp_path / "plain.safetensors", select="FIL108")[0])


def renamed(state, name, prefix=""):
    """Return a state with the names of the other side of a map that ships, which its own test proves."""
    plain = {key.removeprefix(prefix): value for key, value in state.items()}
    return ckptfix.repair_state_dict(plain, rename_map=shipped(name), values=False)[0]


def with_names(base, name, down, up, alpha=None, only=".weight"):
    """Return an adapter for the matrices of a base that ``only`` selects, with their names passed through ``name``."""
    torch.manual_seed(2)
    found = {}
    for key, value in base.items():
        if key.endswith(".weight") and value.ndim > 1 and re.search(only, key):
            module = name(key.removesuffix(".weight"))
            found[f"{module}.{down}.weight"] = torch.randn(4, *value.shape[1:]) / 4
            found[f"{module}.{up}.weight"] = torch.randn(len(value), 4, *[1] * (value.ndim - 2)) / 4
            found |= {f"{module}.alpha": torch.tensor(alpha)} if alpha else {}
    return found


def merged_into_both(base, map_name, adapter, file):
    """Merge into a base of diffusers, and into the whole file of the authors, which have the same weights after it."""
    save_file(adapter, file)
    repaired, _ = ckptfix.repair_state_dict(base, adapter=file, values=False)
    prefix = "model.diffusion_model."
    whole = {prefix + key: value for key, value in renamed(base, map_name).items()}
    done, _ = ckptfix.repair_state_dict(whole, adapter=file, values=False)
    again = renamed(done, map_name, prefix)
    assert again.keys() == repaired.keys()
    assert_same({key: again[key] for key in repaired}, dict(repaired))
    return dict(repaired)


@pytest.mark.slow
def test_an_adapter_of_sdxl_and_a_base_with_the_names_of_others(tmp_path):
    """Kohya trains the UNet of the authors; the adapter fits diffusers and the single file of the authors."""
    from diffusers import UNet2DConditionModel
    from diffusers.loaders import StableDiffusionXLLoraLoaderMixin as Loader

    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "cross_attention_dim": 24, "attention_head_dim": 8}
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    model = UNet2DConditionModel(
        **blocks,
        **sizes,
        **added,
        norm_num_groups=4,
        use_linear_projection=True,
        projection_class_embeddings_input_dim=32,
    ).half()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    layers = r"\.to_|proj|ff|in_layers|out_layers|emb_layers|\.op|skip|time_embed|label_emb"
    adapter = with_names(
        renamed(base, "sgm-unet_diffusers"),
        lambda module: f"lora_unet_{module.replace('.', '_')}",
        *("lora_down", "lora_up"),
        alpha=3.0,
        only=layers,
    )
    found = merged_into_both(base, "sgm-unet_diffusers", adapter, tmp_path / "kohya.safetensors")
    Loader.load_lora_into_unet(*Loader.lora_state_dict(adapter, unet_config=model.config), model)
    model.fuse_lora()
    model.unload_lora()
    assert_same(found, dict(model.state_dict()))


@pytest.mark.slow
def test_adapters_of_flux_and_a_base_with_the_names_of_others(tmp_path):
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders import FluxLoraLoaderMixin as Loader

    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 3}
    inputs = {"in_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 6, 6)}
    model = FluxTransformer2DModel(**sizes, **inputs).bfloat16()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    original = renamed(base, "flux_diffusers")

    def merged(*names, **options):
        return merged_into_both(base, "flux_diffusers", with_names(*names, **options), tmp_path / "flux.safetensors")

    kohya = merged(original, lambda module: f"lora_unet_{module.replace('.', '_')}", "lora_down", "lora_up")
    assert_same(merged(original, lambda module: f"lora_unet.{module}", "lora_down", "lora_up"), kohya)
    assert_same(merged(original, lambda module: f"diffusion_model.{module}", "lora_A", "lora_B"), kohya)
    attention = r"double.*attn\.(qkv|proj)"
    images = with_names(original, lambda module: f"lora_unet.{module}", "lora_down", "lora_up", only=attention)
    xlabs = {
        re.sub(r".*(double_blocks\.\d+)\.(img|txt)_attn\.(\w+)\.lora_", _of_xlabs, key): value
        for key, value in images.items()
    }
    found = [merged_into_both(base, "flux_diffusers", one, tmp_path / "x.safetensors") for one in (images, xlabs)]
    assert_same(*found)
    adapter = with_names(base, lambda module: f"transformer.{module}", "lora_A", "lora_B")
    found = merged_into_both(base, "flux_diffusers", adapter, tmp_path / "new.safetensors")
    state, alphas = Loader.lora_state_dict(adapter, return_alphas=True)[:2]
    Loader.load_lora_into_transformer(state, alphas, model)
    model.fuse_lora()
    model.unload_lora()
    assert_same(found, dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan_diffusers", "z-image_diffusers"])
def test_adapters_of_wan_and_z_image_have_the_bits_of_diffusers(name, tmp_path):
    """In the names of the authors, whose attention is one matrix in Z-Image, and with underscores for dots."""
    import diffusers
    from diffusers import loaders

    torch.manual_seed(0)
    if name == "wan_diffusers":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "freq_dim": 16}
        model: Any = diffusers.WanTransformer3DModel(**sizes, text_dim=16, in_channels=4, out_channels=4)
        loader: Any = loaders.WanLoraLoaderMixin
    else:
        sizes = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 8}
        model = diffusers.ZImageTransformer2DModel(**sizes, axes_dims=[8, 4, 4], axes_lens=[16, 16, 16])
        loader = loaders.ZImageLoraLoaderMixin
    model.bfloat16()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    original = renamed(base, name)
    forms: list[Any] = [(lambda module: f"lora_unet_{module.replace('.', '_')}", "lora_down", "lora_up", 2.0)]
    if name == "wan_diffusers":
        forms += [(lambda module: f"diffusion_model.{module}", "lora_A", "lora_B", None)]
    for rename, down, up, alpha in forms:
        adapter = with_names(original, rename, down, up, alpha, only=r"(blocks|^layers)\.\d.*(attn|attention|ffn|feed)")
        found = merged_into_both(base, name, adapter, tmp_path / "x.safetensors")
        state = loader.lora_state_dict(dict(adapter))
        loader.load_lora_into_transformer(state, model)
        model.fuse_lora()
        model.unload_lora()
        assert_same(found, dict(model.state_dict()))
        assert sum(bytes_of(found[key]) != bytes_of(base[key]) for key in base) > 10
        model.load_state_dict(base)


def _of_xlabs(match):
    return f"{match[1]}.processor.{match[3]}_lora{1 + (match[2] == 'txt')}."


@pytest.mark.slow
def test_an_adapter_of_hunyuanvideo_with_the_names_of_its_authors(tmp_path):
    """As musubi-tuner and ComfyUI write it; diffusers reads only one of the original width."""
    from diffusers import HunyuanVideoTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "num_single_layers": 1}
    inputs = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "pooled_projection_dim": 8}
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(**sizes, **inputs, num_refiner_layers=1, rope_axes_dim=(2, 4, 6))
    base = {key: value.clone() for key, value in model.state_dict().items()}
    original = renamed(base, "hunyuanvideo_diffusers")
    forms = [
        (lambda module: f"lora_unet_{module.replace('.', '_')}", "lora_down", "lora_up"),
        (lambda module: f"diffusion_model.{module}", "lora_A", "lora_B"),
    ]
    found = [
        merged_into_both(
            base, "hunyuanvideo_diffusers", with_names(original, *form, only="blocks"), tmp_path / "x.safetensors"
        )
        for form in forms
    ]
    assert_same(*found)
    assert sum(bytes_of(found[0][key]) != bytes_of(base[key]) for key in base) == 27


@pytest.mark.slow
def test_an_adapter_of_stable_diffusion_3_and_a_base_with_the_names_of_others(tmp_path):
    """All that kohya trains in a block, the last modulation with its halves exchanged too; most are narrower here."""
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        model = SD3Transformer2DModel(num_layers=24, num_attention_heads=24, caption_projection_dim=1536)
    torch.manual_seed(0)
    last = "transformer_blocks.23.norm1_context.linear.weight"
    base = {
        key: torch.randn(value.shape if key == last else (len(value), *[16, 2, 2][: value.ndim - 1]))
        for key, value in model.state_dict().items()
    }
    original = renamed(base, "sd3-24_diffusers")
    adapter = with_names(
        original,
        lambda module: f"lora_unet_{module.replace('.', '_')}",
        *("lora_down", "lora_up"),
        only=r"joint_blocks\.(0|23)\.",
    )
    found = merged_into_both(base, "sd3-24_diffusers", adapter, tmp_path / "kohya.safetensors")
    changed = {key for key, value in found.items() if bytes_of(value) != bytes_of(base[key])}
    blocks = ("transformer_blocks.0.", "transformer_blocks.23.")
    assert changed == {key for key in base if key.startswith(blocks) and key.endswith(".weight")}


def test_two_text_encoders_have_the_same_names(tmp_path):
    """Each part of an adapter of SDXL is merged where its shapes fit; the single file names one as OpenCLIP."""
    names = ("self_attn.q_proj", "mlp.fc1")

    def part(component, width, layers):
        base = {
            f"text_model.encoder.layers.{n}.{name}.weight": torch.randn(width, width)
            for n in range(layers)
            for name in names
        }
        return with_names(base, lambda module: f"{component}_{module.replace('.', '_')}", "lora_down", "lora_up", 2.0)

    one, two = part("lora_te1", 8, 2), part("lora_te2", 16, 3)
    save_file({**one, **two}, tmp_path / "sdxl.safetensors")
    save_file(two, tmp_path / "two.safetensors")
    for width, layers, left in ((8, 2, "lora_te2"), (16, 3, "lora_te1")):
        keys = [f"text_model.encoder.layers.{n}.{name}.weight" for n in range(layers) for name in names]
        base = {key: torch.randn(width, width) for key in keys}
        repaired, report = ckptfix.repair_state_dict(base, adapter=tmp_path / "sdxl.safetensors", values=False)
        assert report.findings[0].evidence["left"].keys() == {left}
        alone = {key: value for key, value in {**one, **two}.items() if left not in key}
        save_file(alone, tmp_path / "alone.safetensors")
        assert_same(repaired, ckptfix.repair_state_dict(base, adapter=tmp_path / "alone.safetensors", values=False)[0])
    first = {f"conditioner.embedders.0.transformer.text_model.encoder.layers.{n}.{name}.weight": torch.randn(8, 8)
             for n in range(2) for name in names}  # fmt: skip
    second = {"token_embedding.weight": torch.randn(9, 16), "positional_embedding": torch.randn(5, 16)}
    second |= {f"ln_final.{leaf}": torch.randn(16) for leaf in ("weight", "bias")}
    for n in range(3):
        second[f"transformer.resblocks.{n}.attn.in_proj_weight"] = torch.randn(48, 16)
        second[f"transformer.resblocks.{n}.attn.in_proj_bias"] = torch.randn(48)
        second[f"transformer.resblocks.{n}.mlp.c_fc.weight"] = torch.randn(16, 16)
    whole = first | {f"conditioner.embedders.1.model.{key}": value for key, value in second.items()}
    repaired, report = ckptfix.repair_state_dict(whole, adapter=tmp_path / "sdxl.safetensors", values=False)
    assert "left" not in report.findings[0].evidence
    changed = {key for key, value in whole.items() if not torch.equal(value, repaired[key])}
    assert changed == {key for key in whole if key in first or "in_proj_weight" in key or "c_fc.weight" in key}
    fused = "conditioner.embedders.1.model.transformer.resblocks.2.attn.in_proj_weight"
    change = repaired[fused] - whole[fused]
    assert not change[16:].any()
    key = "lora_te2_text_model_encoder_layers_2_self_attn_q_proj"
    torch.testing.assert_close(change[:16], two[f"{key}.lora_up.weight"] @ two[f"{key}.lora_down.weight"] / 2)


@pytest.mark.parametrize(
    ("trained_on", "is_other"),
    [
        pytest.param("meta-llama/Llama-3-8B", True, id="another model"),
        pytest.param("mistralai/Mistral-7B-Instruct", True, id="another training"),
        pytest.param("unsloth/mistral-7b-bnb-4bit", False, id="the same, quantised for the training"),
        pytest.param("some/Mistral-7B-hf", False, id="a mirror"),
        pytest.param("../my_base", False, id="a folder"),
    ],
)
def test_a_base_of_another_name_is_refused_unless_it_is_accepted(trained_on, is_other, tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    changed_config(adapter, base_model_name_or_path=trained_on)
    folder = cached("mistralai/Mistral-7B", tmp_path)
    save_file(net().state_dict(), folder / "model.safetensors")
    given: Any = {"adapter": adapter, "values": False}
    report = ckptfix.check(folder, **given)
    said = f"{adapter} was trained on {trained_on}, and the base is mistralai/Mistral-7B"
    assert [found.message for found in report.findings if found.level is Level.WARNING] == [said] * is_other
    out = tmp_path / "out.safetensors"
    assert ckptfix.repair(folder, output=out, **given).report.exit_code == int(is_other)
    assert out.exists() is not is_other
    out.unlink(missing_ok=True)
    done = ckptfix.repair(folder, output=out, accept="FIL108", **given)
    assert done.report.exit_code == 0
    assert out.exists()


def test_a_configuration_may_name_the_model_from_which_the_base_was_trained(tmp_path):
    """zephyr-7b-beta says Mistral-7B-v0.1 in its config.json, and adapters of it say zephyr-7b-beta."""
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    changed_config(adapter, base_model_name_or_path="HuggingFaceH4/zephyr-7b-beta")
    for folder, warnings in (("zephyr-7b-beta", 0), ("base", 1)):
        base = tmp_path / folder / "model.safetensors"
        base.parent.mkdir()
        save_file(net().state_dict(), base)
        (base.parent / "config.json").write_text(json.dumps({"_name_or_path": "mistralai/Mistral-7B-v0.1"}))
        repaired = ckptfix.repair(base, adapter=adapter, values=False, output=tmp_path / f"{folder}.safetensors")
        found = [found for found in repaired.report.findings if found.level is Level.WARNING]
        assert ["or was trained from it" in each.message for each in found] == [True] * warnings
        assert (tmp_path / f"{folder}.safetensors").exists()


def test_an_adapter_that_is_given_twice_is_refused(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(AdapterError, match="given 2 times; give it once, with the sum of the weights") as caught:
        ckptfix.check(tmp_path / "model.safetensors", adapter=[f"{adapter}=0.5", f"{adapter}=0.25"])
    assert f"{adapter}=0.75" in str(caught.value)


def test_an_adapter_without_one_of_its_matrices_is_an_error(tmp_path):
    file = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter") / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "q.lora_B" not in key}, file)
    report = ckptfix.check(file.parent)
    (error,) = [found for found in report.findings if found.level is Level.ERROR]
    assert "only 1 of its 2 matrices" in error.message
    assert report.exit_code == 1
