"""Which tensors an adapter changes: by names, shapes and configuration, or an error that says what does not fit."""

import errno
import functools
import hashlib
import json
import re
from collections import Counter

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptfix
from ckptfix.core.adapter_methods import METHODS
from ckptfix.core.finding import Level
from ckptfix.errors import AdapterError, PlanError, WriteError
from ckptfix.values import merged_tensors
from ckptfix.values.merged_tensors import _factor
from ckptfix.values.tally import COUNTS
from ckptfix.writing.atomic import unwritten
from tests.checks import assert_same
from tests.rules.adapters import DTYPES, LINEAR, LORA, cached, changed_config, language, merged_by_peft, net, trained


@pytest.mark.parametrize(
    ("config", "says"),
    [
        pytest.param({"r": 8}, "of rank 4, and the r or rank_pattern of adapter_config.json says 8", id="another rank"),
        pytest.param({"peft_type": "LILY"}, "an adapter of the type LILY", id="Lily"),
        pytest.param({"peft_type": "LOHA"}, "says the type LOHA, and it has matrices of LORA", id="LoHa"),
        pytest.param({"init_lora_weights": "pissa_niter_4"}, "changes the base too", id="PiSSA"),
        pytest.param({"layer_replication": [[0, 2]]}, "layer_replication", id="replicated layers"),
        pytest.param({"alora_invocation_tokens": [1]}, "aLoRA", id="aLoRA"),
        pytest.param({"use_dora": True}, "has no magnitude vector", id="DoRA without magnitudes"),
        pytest.param({"lora_bias": True}, "has no bias vector", id="lost biases"),
        pytest.param({"trainable_token_indices": [3]}, "has no rows of tokens", id="lost tokens"),
        pytest.param({"modules_to_save": ["head"]}, r"the adapter has no head\.", id="a lost head"),
        pytest.param({"r": 0}, "has the rank 0 according to r", id="no rank"),
        pytest.param({"lora_alpha": "8"}, "instead of a number", id="a text for a number"),
        pytest.param({"lora_alpha": None}, "the lora_alpha of .* instead of a number", id="null for a number"),
        pytest.param({"rank_pattern": ["q"]}, "does not map layers", id="a list for a map"),
        pytest.param({"alpha_pattern": {"q(": 1}}, "correct it", id="no pattern"),
        pytest.param({"alpha_pattern": {"(a*)*b": 1}}, "has the pattern", id="a pattern that takes for ever"),
    ],
)
def test_what_the_matrices_alone_do_not_say_is_refused(config, says, tmp_path):
    adapter = changed_config(trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter"), **config)
    with pytest.raises(AdapterError, match=says) as caught:
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    assert "\n" not in str(caught.value)
    report = ckptfix.check(adapter)
    errors = [re.search(says, found.message) for found in report.findings if found.level is Level.ERROR]
    # What only the merge refuses is not a defect of the adapter.
    if config.keys() & {"peft_type", "layer_replication", "alora_invocation_tokens", "modules_to_save"}:
        assert errors == []
    else:
        assert len(errors) == 1
        assert errors[0]
        assert report.exit_code == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused(value, tmp_path):
    """One number of it would be a row or a column of the base."""
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    factors["base_model.model.q.lora_B.weight"][3, 2] = value
    save_file(factors, file)
    with pytest.raises(AdapterError, match=r"1 tensor of the adapter has NaN or infinity, such as .*q\.lora_B"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, values=False)
    assert not repaired["q.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("key", "dtype", "says"),
    [
        ("q.lora_A.weight", torch.int8, r"q\.lora_A\.weight is stored as int8, but changes of weights are floats"),
        ("q.lora_B.weight", torch.complex64, r"q\.lora_B\.weight is stored as complex64"),
        ("head.weight", torch.int32, r"has head\.weight as int32 and the base as float32"),
    ],
)
def test_an_adapter_of_another_dtype_is_refused(key, dtype, says, tmp_path):
    """Half of a complex number, or whole numbers, would be merged silently; smaller floats are as peft casts them."""
    adapter = trained(LORA(r=4, target_modules=LINEAR, modules_to_save=["head"]), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors, name = load_file(file), f"base_model.model.{key}"
    for other in (torch.float16, torch.float8_e4m3fn):
        save_file({**tensors, name: tensors[name].to(other)}, file)
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, values=False)
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    with pytest.raises(AdapterError, match=says):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


def test_square_experts_and_attention_are_refused(tmp_path):
    def make(dtype=torch.float32):
        model = net(dtype)
        model.attention = nn.MultiheadAttention(32, 4)
        model.experts = nn.Module()
        model.experts.proj = nn.Parameter(torch.randn(4, 32, 32))
        return model

    base = make().state_dict()
    adapter = trained(LORA(r=2, target_modules=["attention"]), tmp_path / "attention", make=make)
    with pytest.raises(AdapterError, match=r"an nn\.MultiheadAttention"):
        ckptfix.repair_state_dict(base, adapter=adapter)
    adapter = trained(LORA(r=2, target_modules=["q"], target_parameters=["experts.proj"]), tmp_path / "e", make=make)
    with pytest.raises(AdapterError, match=r"do not fit experts\.proj"):
        ckptfix.repair_state_dict(base, adapter=adapter)


def mixtral(dtype=torch.float32):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=3)).to(dtype)


def qwen(dtype=torch.float32):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts)).to(dtype)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [mixtral, qwen])
def test_experts_of_transformers_4_and_5(make, dtype, tmp_path, monkeypatch):
    """The file has the experts as release 4 had them, the model as release 5 has them, and so may an adapter."""
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    make(dtype).save_pretrained(tmp_path / "base")
    stored, model = load_file(tmp_path / "base" / "model.safetensors"), make(dtype).state_dict()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {r".*\.gate_up_proj": 5}}
    config = LORA(r=4, target_modules=["q_proj"], target_parameters=names, **patterns)
    new = trained(config, tmp_path / "new", dtype, make)
    old = tmp_path / "old"
    kinds = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "q_proj", "gate"}
    LORA(r=4, lora_alpha=7, target_modules=list(kinds), task_type="CAUSAL_LM").save_pretrained(old)
    torch.manual_seed(2)
    factors = {}
    for key, value in stored.items():
        module = key.removesuffix(".weight")
        if module.rpartition(".")[2] in kinds:
            for side, shape in (("A", (4, value.shape[1])), ("B", (value.shape[0], 4))):
                factors[f"base_model.model.{module}.lora_{side}.weight"] = (torch.randn(shape) / 5).to(dtype)
    save_file(factors, old / "adapter_model.safetensors")
    for adapter in (new, old):
        merged = peft.PeftModel.from_pretrained(make(dtype), adapter).merge_and_unload()
        assert_same(ckptfix.repair_state_dict(model, adapter=adapter, select="FIL108")[0], merged.state_dict())
        merged.save_pretrained(tmp_path / "merged")
        repaired, _ = ckptfix.repair_state_dict(stored, adapter=adapter, select="FIL108")
        if adapter == new or dtype == torch.float32:  # an old adapter on its own base is rounded once less
            assert_same(repaired, load_file(tmp_path / "merged" / "model.safetensors"))


def test_matrices_of_all_experts_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.bytes.threads.processors", lambda: 1)
    mixtral().save_pretrained(tmp_path / "base")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = trained(LORA(r=4, target_modules=[], target_parameters=names), tmp_path / "new", make=mixtral)
    _factor.cache_clear()
    ckptfix.repair(tmp_path / "base", adapter=adapter, output=tmp_path / "out.safetensors", values=False)
    assert _factor.cache_info().misses == 4


def test_experts_that_are_not_all_there_are_refused(tmp_path):
    mixtral().save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = trained(LORA(r=4, target_modules=[], target_parameters=names), tmp_path / "new", make=mixtral)
    part = {key: value for key, value in stored.items() if ".experts.0." not in key}
    with pytest.raises(AdapterError, match="lacks 2 of the adapter's 2 layers"):
        ckptfix.repair_state_dict(part, adapter=adapter)
    factors = {f"model.layers.0.mlp.experts.1.up_proj.lora_{side}.weight": torch.ones(3, 3) for side in "AB"}
    save_file(factors, tmp_path / "new" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="do not fit"):
        ckptfix.repair_state_dict(mixtral().state_dict(), adapter=changed_config(adapter, r=3, target_parameters=None))


def test_two_adapters_in_one_file_are_refused(tmp_path):
    base = net().state_dict()
    tensors = {f"q.lora_{side}.{name}.weight": torch.ones(2, 2) for side in "AB" for name in ("one", "two")}
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(AdapterError, match=r"holds 2 adapters \(one, two\)"):
        ckptfix.repair_state_dict(base, adapter=tmp_path / "two.safetensors")
    findings = ckptfix.check(tmp_path / "two.safetensors", select="FIL108").findings
    assert "holds 2 adapters (one, two)" in findings[-1].message


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "SomeForConditionalGeneration", "LlamaModel"])
def test_a_head_that_only_the_configuration_has_tied_keeps_the_old_values(name, tmp_path):
    config = LORA(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    adapter = trained(config, tmp_path / "adapter", make=language)
    base = {key: value for key, value in language().state_dict().items() if key != "lm_head.weight"}
    save_file(base, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "tie_word_embeddings": True}))
    out = tmp_path / "out.safetensors"
    if "Conditional" in name:
        with pytest.raises(AdapterError, match="would keep the old values"):
            ckptfix.repair(tmp_path / "model.safetensors", adapter=adapter, output=out)
        return
    ckptfix.repair(tmp_path / "model.safetensors", adapter=adapter, output=out)
    want = merged_by_peft([adapter], make=language)
    if name == "LlamaModel":
        del want["lm_head.weight"]
    assert_same(dict(sorted(load_file(out).items())), dict(sorted(want.items())))


@pytest.mark.parametrize("config", [peft.MissConfig, peft.ShiraConfig])
def test_a_head_with_a_name_of_its_own_that_is_only_tied(config, tmp_path):
    """Like Whisper's proj_out, by the shapes of a type that has no inputs in its tensors."""

    def make(dtype=torch.float32):
        model = language()
        model.proj_out = model.lm_head
        del model.lm_head
        return model

    adapter = trained(config(r=2, target_modules=["q_proj", "proj_out"]), tmp_path / "adapter", make=make)
    base = {key: value for key, value in make().state_dict().items() if key != "proj_out.weight"}
    with pytest.raises(AdapterError, match=r"changes proj_out, which .* has only as the embedding that it is tied to"):
        ckptfix.repair_state_dict(base, adapter=adapter)


def with_words(number, *, is_tied=True):
    def make(dtype=torch.float32):
        model = language()
        torch.manual_seed(3)
        embedding = nn.Embedding(number, 8)
        embedding.weight.data[:20] = model.model.embed_tokens.weight.data[:number]
        model.model.embed_tokens, model.lm_head = embedding, nn.Linear(8, number, bias=False)
        model.lm_head.weight.data[:20] = embedding.weight.data[:20]
        if is_tied:
            model.lm_head.weight = embedding.weight
        return model.to(dtype)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [24, 17])
def test_a_vocabulary_of_another_size_is_taken_whole(words, dtype, tmp_path):
    """As peft does it with a base whose embedding was resized before; the head is stored, tied, or left out."""
    make = with_words(words, is_tied=False)
    names = ["embed_tokens", "lm_head"]
    adapter = trained(LORA(r=4, target_modules=["q_proj"], modules_to_save=names), tmp_path / "one", dtype, make)
    want = merged_by_peft([adapter], dtype, make)
    base = language(dtype).state_dict()
    repaired, report = ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")
    assert_same(repaired, want)
    assert f"the vocabulary of 20 becomes one of {words}" in report.findings[0].message
    del base["lm_head.weight"]
    assert_same(ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")[0], want)
    with pytest.raises(AdapterError, match="cannot be restored"):
        ckptfix.repair_state_dict(base, adapter=adapter, unmerge=True)

    make = with_words(words)  # what peft saves of a model whose embedding was resized, and here has a layer, too
    adapter = trained(LORA(r=4, target_modules=["q_proj", "embed_tokens"]), tmp_path / "two", dtype, make)
    file, whole = adapter / "adapter_model.safetensors", make(dtype).lm_head.weight.detach()
    names = ["model.embed_tokens.base_layer", "lm_head"]
    save_file({**load_file(file), **{f"base_model.model.{name}.weight": whole.clone() for name in names}}, file)
    base, want = language(dtype).state_dict(), merged_by_peft([adapter], dtype, make)
    repaired, _ = ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")
    assert_same(repaired, want)
    assert repaired["lm_head.weight"].data_ptr() == repaired["model.embed_tokens.weight"].data_ptr()


def test_a_vocabulary_that_only_one_side_has_is_refused(tmp_path):
    make = with_words(24, is_tied=False)
    config = LORA(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    adapter = trained(config, tmp_path / "adapter", make=make)
    base = with_words(20, is_tied=False)().state_dict()
    with pytest.raises(AdapterError, match=r"vocabulary of 24, and lm_head\.weight of the base has 20: give the base"):
        ckptfix.repair_state_dict(base, adapter=adapter)
    save_file({key: value for key, value in base.items() if "head" not in key}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(AdapterError, match=r"for a vocabulary of 24, but not lm_head\.weight.* ties to it"):
        ckptfix.repair(tmp_path / "model.safetensors", adapter=adapter, output=tmp_path / "out.safetensors")


def test_a_zero_of_ia3_cannot_be_taken_off(tmp_path):
    adapter = trained(peft.IA3Config(target_modules=["q"], feedforward_modules=[]), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0] = 0
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="multiplied by a zero"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, unmerge=True)


@pytest.mark.parametrize(("option", "role"), [("use_dora", "magnitude"), ("lora_bias", "bias")])
def test_vectors_that_the_configuration_denies_are_refused(option, role, tmp_path):
    """peft ignores them, and so merges another change than the one that was trained."""
    adapter = trained(LORA(r=4, target_modules=["q"], **{option: True}), tmp_path / "adapter")
    with pytest.raises(AdapterError, match=f"q has a {role} vector, and .* says that {option} is off"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=changed_config(adapter, **{option: False}))


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_module_that_was_saved_in_a_wrapper(wrapper, tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q"], modules_to_save=["head"]), tmp_path / "adapter")
    file, want = adapter / "adapter_model.safetensors", merged_by_peft([adapter])
    wrapped = {key.replace("model.model.", f"model.model.{wrapper}."): value for key, value in load_file(file).items()}
    save_file({key.replace("head.", f"head.{wrapper}."): value for key, value in wrapped.items()}, file)
    assert_same(ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, select="FIL108")[0], want)


def test_an_alpha_that_only_some_layers_have_was_lost(tmp_path):
    tensors = {"lora_unet_q.alpha": torch.tensor(2.0)}
    for name, out in (("q", 33), ("head", 5)):
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.ones(2, 32)
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.ones(out, 2)
    save_file(tensors, tmp_path / "kohya.safetensors")
    with pytest.raises(AdapterError, match="1 of 2 layers have lost their alpha, such as head"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=tmp_path / "kohya.safetensors")
    report = ckptfix.check(tmp_path / "kohya.safetensors")
    assert "1 of 2 layers have lost their alpha" in report.findings[-1].message
    assert report.exit_code == 1


def test_what_was_saved_without_gathering_is_refused(tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file({key: torch.empty(0) for key in load_file(file)}, file)
    says = "as ZeRO-3 and FSDP save parameters that were not gathered"
    assert says in ckptfix.check(adapter).findings[-1].message
    with pytest.raises(AdapterError, match=says):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


MERGED = ("LORA", "LOHA", "LOKR", "IA3", "TRAINABLE_TOKENS", "LN_TUNING", *METHODS)


def test_every_other_type_of_peft_is_refused_by_its_name(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    others = [str(kind.value) for kind in peft.PeftType if kind.value not in MERGED]
    assert len(others) > 20
    for kind in others:
        with pytest.raises(AdapterError, match=rf"of the type {kind}[;,]") as caught:
            ckptfix.repair_state_dict(net().state_dict(), adapter=changed_config(adapter, peft_type=kind))
        says = str(caught.value)
        assert ("changes no weights" in says) == ("PROMPT" in kind or kind in PROMPTS), kind
        assert ("changes with the input" in says) == (kind in DYNAMIC), kind
        can_merge = hasattr(PEFT_TYPE_TO_TUNER_MAPPING[peft.PeftType(kind)], "merge_and_unload")
        assert ("merge_and_unload()" in says) == (can_merge and kind not in DYNAMIC), kind


# peft raises NotImplementedError for them, or merges the experts of X-LoRA one by one.
DYNAMIC = ("LILY", "POLY", "SHADOW", "XLORA")
PROMPTS = ("P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")


def test_what_other_trainers_have_is_refused_by_its_name(tmp_path):
    tensors = {f"lora_unet_q.{key}": torch.ones(4, 4) for key in ("lora_down.weight", "lora_up.weight", "oft_blocks")}
    save_file(tensors, tmp_path / "trained.safetensors")
    with pytest.raises(AdapterError, match="an adapter of the type OFT or BOFT of LyCORIS,"):
        ckptfix.repair_state_dict({"q.weight": torch.ones(4, 4)}, adapter=tmp_path / "trained.safetensors")


_NEMO = "model.layers.0.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"


def test_tensors_of_another_type_or_shape_are_refused(tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q"]), tmp_path / "lora")
    for kind, says in (("ADALORA", "q has only 2 of its 3 matrices"), ("VERA", "q has matrices of two types")):
        with pytest.raises(AdapterError, match=says):
            ckptfix.repair_state_dict(net().state_dict(), adapter=changed_config(adapter, peft_type=kind))
        assert says in ckptfix.check(adapter).findings[-1].message
    adapter = trained(peft.VeraConfig(target_modules=["q"], save_projection=False), tmp_path / "vera")
    with pytest.raises(AdapterError, match="saved without its random matrices"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    adapter = trained(peft.MissConfig(r=4, target_modules=["c_attn"]), tmp_path / "miss", make=with_linear)
    with pytest.raises(AdapterError, match=r"do not fit .*c_attn\.weight \[32, 96\] of the base as MiSS"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


@pytest.mark.parametrize("place", [(0, 32), (33, 0), (0, -1)])
def test_elements_of_shira_outside_the_matrix_are_refused(place, tmp_path):
    adapter = trained(peft.ShiraConfig(r=2, target_modules=["q"]), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.q.shira_indices"][:, 0] = torch.tensor(place)
    save_file(tensors, file)
    with pytest.raises(PlanError, match=r"shira_indices are not of a matrix \[33, 32\]"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


def test_hira_multiplies_the_base_and_not_what_another_adapter_made_of_it(tmp_path):
    paths = [
        trained(kind(r=r, target_modules=["q"]), tmp_path / str(r))
        for r, kind in ((2, peft.HiraConfig), (3, peft.HiraConfig), (4, LORA))
    ]
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=paths[:2], select="FIL108")
    torch.testing.assert_close(dict(repaired), merged_by_peft(paths[:2]))
    with pytest.raises(AdapterError, match=r"one of them multiplies it \(HiRA, RoAd\); merge them one after the other"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=paths[1:])


@pytest.mark.parametrize(("option", "value"), [("topk", 0), ("topk", 1.5), ("topk", None)])
def test_a_number_that_no_training_has_is_refused(option, value, tmp_path):
    made = peft.VBLoRAConfig(r=4, vector_length=16, num_vectors=9, target_modules=["fc"])
    adapter = changed_config(trained(made, tmp_path / "adapter"), **{option: value})
    with pytest.raises(AdapterError, match=f"{option}.* (in|of) adapter_config.json"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


def test_a_reflection_along_nothing_is_not_written_as_nan(tmp_path):
    adapter = trained(peft.HRAConfig(r=4, target_modules=["q"]), tmp_path / "adapter")
    save_file({"base_model.model.q.hra_u": torch.zeros(32, 4)}, adapter / "adapter_model.safetensors")
    with pytest.raises(PlanError, match="hra_u gives NaN or infinity"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


def test_what_oft_needs_besides_its_matrices(tmp_path):
    adapter = trained(peft.OFTConfig(oft_block_size=8, target_modules=["q"]), tmp_path / "oft")
    with pytest.raises(AdapterError, match="multiplies and takes no weight"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=f"{adapter}=0.5")
    with pytest.raises(AdapterError, match="is float64, in which peft does not compute OFT"):
        ckptfix.repair_state_dict(net().double().state_dict(), adapter=adapter)
    changed_config(adapter, num_cayley_neumann_terms=100000)
    with pytest.raises(AdapterError, match=r"num_cayley_neumann_terms in .*json is 100000"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    changed_config(adapter, num_cayley_neumann_terms=5)
    with pytest.raises(AdapterError, match=r"its eps in adapter_config\.json is 0"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=changed_config(adapter, coft=True, eps=0))
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config["coft"], config["peft_version"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=r"the series of peft before 0\.18"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    blocks = {"base_model.model.q.oft_r": torch.zeros(4, 8, 8), "base_model.model.q.oft_s": torch.ones(33, 1)}
    save_file(blocks, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"an adapter of the type OFT of peft before 0\.16"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    assert "OFT of peft before 0.16" in ckptfix.check(adapter).findings[0].message


def with_linear(dtype=torch.float32):
    model = net(dtype)
    model.block[0].attn.c_attn = nn.Linear(32, 96)
    return model


# Tensors by which adapters are known that peft saved, and nothing else.
BARE = {
    "ADAPTION_PROMPT": ["base_model.model.0.adaption_gate", "base_model.model.0.adaption_prompt"],
    "MISS": ["base_model.model.fc.miss_block"],
    "BONE": ["base_model.model.fc.bone_block"],
    "POLY": ["base_model.model.fc.poly_lora_A", "base_model.model.fc.poly_router.module_logits"],
    "ROAD": ["base_model.model.fc.road_theta", "base_model.model.fc.road_alpha"],
    "OSF": ["base_model.model.fc.osf_svd_params.U_low"],
    "FROD": ["base_model.frod_V.q_proj", "base_model.model.q_proj.frod_lambda_l"],
    "PVERA": ["base_model.pvera_A", "base_model.model.q.pvera_lambda_b"],
    "SHADOW": ["base_model.shadow_backbone.default.norm.weight", "base_model.model.q.shadow_up.default.weight"],
    "TINYLORA": ["base_model.tinylora_v.2", "base_model.model.q.tinylora_A"],
    "UNILORA": ["base_model.unilora_theta_d"],
    "XLORA": ["base_model.model.internal_xlora_classifier.layers.0.weight"],
    "prompt or prefix tuning": ["prompt_embeddings", "prefix_task_cols"],
}


def test_an_adapter_without_its_configuration_is_refused_by_its_type(tmp_path):
    for kind, keys in BARE.items():
        save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / "bare.safetensors")
        with pytest.raises(AdapterError, match=rf"of the type {kind}[;,]"):
            ckptfix.repair_state_dict(net().state_dict(), adapter=tmp_path / "bare.safetensors")


@pytest.mark.parametrize("make", [peft.LoKrConfig, peft.LoHaConfig, LORA])
def test_a_factor_that_only_the_configuration_has_is_not_guessed(make, tmp_path):
    adapter = trained(make(r=4, target_modules=["q"]), tmp_path / "adapter")
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="lora_alpha, which scales the change, is neither"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


@pytest.mark.parametrize(
    ("names", "base"),
    [
        pytest.param("transformer.h.0.attn.proj.lora_{}", "transformer.h.0.attn.proj", id="loralib-or-LitGPT"),
        pytest.param("transformer.h.0.attn.proj.lora_{}", "h.0.attn.proj", id="without-the-prefix"),
        pytest.param("layers.0.wq.lora_{}", "layers.0.wq", id="loralib"),
        pytest.param("unet.mid.q.lora_{}", "mid.q", id="loralib-in-a-pipeline"),
        pytest.param("fc.parametrizations.weight.0.lora_{}", "fc", id="minLoRA"),
        pytest.param("transformer.h.0.attn.proj.lora_{}.weight", "h.0.attn.proj", id="GPT-2-without-the-name-of-peft"),
        pytest.param("transformer.blocks.0.Wqkv.lora_{}.weight", "transformer.blocks.0.Wqkv", id="own-prefix"),
        pytest.param("transformer.blocks.0.q.lora_{}.default.weight", "blocks.0.q", id="inject_adapter_in_model"),
        pytest.param("blocks.0.q.lora_{}.default.weight", "blocks.0.q", id="DiffSynth-Studio"),
    ],
)
def test_a_scale_of_one_is_not_assumed(names, base, tmp_path):
    """loralib's own default is lora_alpha = 1, so a scale of one would be wrong by a factor of the rank."""
    one, two, file = torch.randn(4, 8), torch.randn(8, 4), tmp_path / "lora.safetensors"
    save_file({names.format("A"): one, names.format("B"): two}, file)
    with pytest.raises(AdapterError, match=r'or write one .*: \{"r": 4, "lora_alpha": ALPHA\}'):
        ckptfix.repair_state_dict({f"{base}.weight": torch.zeros(8, 8)}, adapter=file)
    is_unknown = "a merge needs its lora_alpha" in ckptfix.check(file).findings[0].message
    assert is_unknown is ("Wqkv" not in names)  # only its base shows that this one is not from diffusers
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 2}')
    repaired, _ = ckptfix.repair_state_dict({f"{base}.weight": torch.zeros(8, 8)}, adapter=file)
    torch.testing.assert_close(repaired[f"{base}.weight"], two @ one / 2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("trained", ["query value", "query key value", "key", "query key", "key value"])
def test_a_folder_of_litgpt(groups, trained, tmp_path):
    """Each trained part of the fused layer has its own rows of both matrices. LitGPT saves the merged model beside."""
    sizes = {"query": 4 * 3, "key": groups * 3, "value": groups * 3}
    own = {name: (torch.randn(2, 12), torch.randn(sizes[name], 2)) for name in trained.split()}
    ones, twos = (torch.cat(each) for each in zip(*own.values(), strict=True))
    tensors = {"transformer.h.0.attn.qkv.lora_A": ones, "transformer.h.0.attn.qkv.lora_B": twos}
    tensors |= {"lm_head.lora_A": torch.randn(2, 12), "lm_head.lora_B": torch.randn(20, 2)}
    torch.save({"model": tensors}, tmp_path / "lit_model.pth.lora")
    base = {
        "transformer.h.0.attn.qkv.weight": torch.randn(sum(sizes.values()), 12),
        "lm_head.weight": torch.randn(20, 12),
    }
    torch.save(base, tmp_path / "lit_model.pth")
    with pytest.raises(AdapterError, match="lora_alpha, which scales the change, is neither"):
        ckptfix.repair_state_dict(base, adapter=tmp_path)
    switches = "".join(f"lora_{name}: {str(name in own).lower()}\n" for name in sizes)
    (tmp_path / "hyperparameters.yaml").write_text(f"checkpoint_dir: base\nlora_alpha: 3\nlora_r: 2\n{switches}")
    with pytest.raises(AdapterError, match=r"a matrix for each part of a fused layer|do not fit"):
        ckptfix.repair_state_dict(base, adapter=tmp_path)
    (tmp_path / "model_config.yaml").write_text(f"head_size: 3\nn_head: 4\nn_query_groups: {groups}\nname: pythia\n")
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path, select="FIL108")
    changes = [
        own[name][1] @ own[name][0] * 1.5 if name in own else torch.zeros(size, 12) for name, size in sizes.items()
    ]
    want = base["transformer.h.0.attn.qkv.weight"] + torch.cat(changes)
    torch.testing.assert_close(repaired["transformer.h.0.attn.qkv.weight"], want)
    head = base["lm_head.weight"] + tensors["lm_head.lora_B"] @ tensors["lm_head.lora_A"] * 1.5
    torch.testing.assert_close(repaired["lm_head.weight"], head)


def test_a_fused_layer_of_litgpt_is_not_called_another_base(tmp_path):
    tensors = {
        "transformer.h.0.attn.qkv.lora_A": torch.ones(8, 16),
        "transformer.h.0.attn.qkv.lora_B": torch.ones(32, 4),
    }
    save_file(tensors, tmp_path / "lit.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    with pytest.raises(
        AdapterError, match="a matrix for each part of a fused layer, as in loralib and LitGPT; merge it"
    ):
        ckptfix.repair_state_dict(
            {"transformer.h.0.attn.qkv.weight": torch.ones(48, 16)}, adapter=tmp_path / "lit.safetensors"
        )


@pytest.mark.parametrize(
    ("keys", "config", "kind"),
    [
        pytest.param(["scalar"], None, "", id="a model's scalar"),
        pytest.param(["base_model.model.fc.weight", "base_model.scalar"], None, "", id="a model's prefix"),
        pytest.param(["fc.weight", "fc.vera_lambda_b"], {"peft_type": "VERA"}, "", id="base and adapter"),
        pytest.param(["fc.weight", "fc.adapter.linear_in.weight"], None, "", id="adapters in a model"),
        pytest.param([_NEMO.format("in"), _NEMO.format("out")], None, "LoRA of NeMo", id="NeMo"),
        pytest.param(["linear_qkv.adapter.linear_in.weight"], None, "LoRA of NeMo", id="NeMo 2"),
        pytest.param(["base_model.model.fc.boft_R"], None, "BOFT", id="BOFT"),
        pytest.param(["lora_unet_fc.oft_blocks", "lora_unet_fc.alpha"], None, "OFT or BOFT of LyCORIS", id="LyCORIS"),
        pytest.param(["lycoris_fc.a1.weight", "lycoris_fc.b2.weight"], None, "GLoRA", id="GLoRA"),
        pytest.param(["lora_unet_fc.lambda_layer", "lora_unet_fc.alpha"], None, "T-LoRA", id="T-LoRA"),
        pytest.param(["lora_unet_fc.on_input"], None, "IA3 of LyCORIS", id="IA3 of LyCORIS"),
        pytest.param(["fc.a1.weight", "fc.b2.weight"], None, "", id="a model's a1"),
        pytest.param(["base_model.model.fc.randlora_A"], None, "RANDLORA", id="RandLora"),
        pytest.param(["base_model.model.fc.vblora_logits_A"], None, "VBLORA", id="VB-LoRA"),
        pytest.param([f"base_model.model.fc.lora_{name}" for name in "ABE"], None, "ADALORA", id="AdaLoRA"),
        pytest.param(["base_model.model.fc.new_matrix"], {"peft_type": "NEW"}, "NEW", id="a type that is unknown"),
        pytest.param(["base_model.model.fc.new_matrix"], {"swift_type": "ADAPTER"}, "ADAPTER", id="a type of ms-swift"),
        pytest.param(["model.road_head.weight", "hra_u"], None, "", id="a model's road"),
        *(pytest.param(keys, None, kind, id=f"{kind} without its configuration") for kind, keys in BARE.items()),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_named(keys, config, kind, tmp_path):
    save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / "adapter_model.safetensors")
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = ckptfix.check(tmp_path / "adapter_model.safetensors", select="FIL108", values=False).findings
    assert [each.message.split(", not a model")[0] for each in found] == [f"an adapter of the type {kind}"] * bool(kind)


_HYPERNETWORK = [{f"linear.{at}.{name}": torch.ones(2, 2) for at in (0, 1) for name in ("weight", "bias")}] * 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param({"emb_params": torch.ones(2, 8)}, "a textual inversion embedding", id="web UI"),
        pytest.param({"string_to_param": {"*": torch.ones(2, 8)}}, "a textual inversion embedding", id="web UI, .pt"),
        pytest.param({"<cat>": torch.ones(8)}, "a textual inversion embedding", id="diffusers"),
        pytest.param({"clip_l": torch.ones(2, 8), "clip_g": torch.ones(2, 9)}, "a textual inversion", id="SDXL"),
        pytest.param({768: _HYPERNETWORK, "name": "style"}, "a hypernetwork", id="hypernetwork"),
        pytest.param({"lora_controlnet": torch.ones(0), "a.up": torch.ones(2, 2)}, "a Control-LoRA", id="Control-LoRA"),
        pytest.param({"l.0.output.adapters.x.adapter_down.0.weight": torch.ones(2, 2)}, "an adapter of AdapterHub"),
        pytest.param({"l.0.query.loras.x.lora_A": torch.ones(2, 2)}, "an adapter of AdapterHub", id="its LoRA"),
        pytest.param({"ip_adapter.1.to_k_ip.weight": torch.ones(2, 2)}, "an IP-Adapter", id="IP-Adapter"),
        pytest.param({"clip_l": torch.ones(8), "fc.weight": torch.ones(2, 2)}, "", id="a model's parameter"),
        pytest.param({"linear.0.weight": torch.ones(2, 2)}, "", id="a model of linear layers"),
    ],
)
def test_what_is_loaded_along_with_a_model_is_named(data, says, tmp_path):
    torch.save(data, tmp_path / "it.pt")
    found = ckptfix.check(tmp_path / "it.pt", select="FIL108", values=False).findings
    assert [each.message.startswith(says) for each in found] == [True] * bool(says)
    if says:
        with pytest.raises(AdapterError, match=f"{says}.*, which .* and is not merged; load it along with the model"):
            ckptfix.repair_state_dict(net().state_dict(), adapter=tmp_path / "it.pt")


PAIR = {"lora_down.weight": (1, 8), "lora_up.weight": (8, 1)}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        pytest.param(
            {"dora_scale": (1, 7)}, r"dora_scale \[1, 7\] has no norm for each of 8 outputs", id="other norms"
        ),
        pytest.param({"hada_w1_a": (8, 2)}, "has only 1 of its 4 matrices", id="LoHa in part"),
        pytest.param({"lokr_w1": (2, 2)}, "has only 1 of its 3 matrices", id="LoKr in part"),
        pytest.param({"lokr_w1": (2, 2), "lokr_w2": (3, 4)}, r"which do not fit q\.weight", id="LoKr of others"),
        pytest.param({"hada_t1": (2, 2), "lora_down.weight": (2, 8)}, "of two types", id="a core of another type"),
        pytest.param({"lora_mid.weight": (2, 2), **PAIR}, r"which do not fit q\.weight", id="a core of no kernel"),
        pytest.param({"diff": (8, 4)}, r"but the base has q\.weight \[8, 8\]", id="a difference of others"),
        pytest.param(
            {"lora_down.weight": (2, 8, 3, 3), "lora_up.weight": (8, 2)}, "saves convolutions of DyLoRA", id="DyLoRA"
        ),
        pytest.param({"diff_b": (8,)}, r"but the base has no q\.bias", id="no bias"),
        pytest.param({"lokr_w1": (2, 2), "lokr_w2": (4, 4), "lora_down.weight": (2, 8)}, "of two types", id="mixed"),
    ],
)
def test_what_does_not_fit_or_is_of_two_types_is_refused(parts, says, tmp_path):
    parts = parts if "dora_scale" not in parts else {**parts, "lora_down.weight": (2, 8), "lora_up.weight": (8, 2)}
    save_file({f"lora_unet_q.{key}": torch.ones(shape) for key, shape in parts.items()}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=says):
        ckptfix.repair_state_dict({"q.weight": torch.ones(8, 8)}, adapter=tmp_path / "x.safetensors")


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("is_bin", [False, True])
def test_a_folder_with_other_weights_beside_the_adapter(other, is_bin, tmp_path):
    """trl saves the value head there, torchtune the merged model."""
    adapter = trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter")
    want = merged_by_peft([adapter])
    weights = adapter / "adapter_model.safetensors"
    if is_bin:
        torch.save(load_file(weights), adapter / "adapter_model.bin")
        weights.unlink()
    (torch.save if other.endswith("bin") else save_file)({"v_head.weight": torch.ones(1, 4)}, adapter / other)
    repaired, report = ckptfix.repair_state_dict(net().state_dict(), adapter=f"{adapter}", select="FIL108")
    assert_same(repaired, want)
    assert f"({adapter}/adapter_model." in report.findings[0].message


@pytest.mark.parametrize("weight", ["abc", "nan", ""])
def test_a_weight_of_an_adapter_that_is_not_a_number_is_named(weight, tmp_path):
    save_file({f"lora_unet_q.{key}": torch.ones(shape) for key, shape in PAIR.items()}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=r"the weight of an adapter has to be a finite number, for example 0\.5"):
        ckptfix.repair_state_dict({"q.weight": torch.ones(8, 8)}, adapter=f"{tmp_path / 'x.safetensors'}={weight}")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_an_alpha_that_is_not_finite_is_refused(alpha, tmp_path):
    tensors = {f"lora_unet_q.{key}": torch.ones(shape) for key, shape in PAIR.items()}
    save_file({**tensors, "lora_unet_q.alpha": torch.tensor(alpha)}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=rf"lora_unet_q\.alpha is {alpha}; fetch the adapter again"):
        ckptfix.repair_state_dict({"q.weight": torch.ones(8, 8)}, adapter=tmp_path / "x.safetensors", values=False)


FACTORS = {
    "LoRA": {"lora_down.weight": (4, 1), "lora_up.weight": (1, 4)},
    "LoHa": {f"hada_w{side}_{end}": (1, 4) if end == "a" else (4, 1) for side in "12" for end in "ab"},
    "LoKr": {"lokr_w1": (1, 1), "lokr_w2": (1, 1)},
    "a difference": {"diff": (1, 1)},
}


def of_component(component, kind, width):
    """Return what an adapter has for the one layer ``q`` of a component, whose shapes are ``width`` where it is 1."""
    torch.manual_seed(width)
    scale = 2 if kind == "LoKr" else width
    shapes = {leaf: [scale if size == 1 else size for size in shape] for leaf, shape in FACTORS[kind].items()}
    if kind == "LoKr":
        shapes["lokr_w2"] = [width // 2, width // 2]
    return {f"{component}_q.{leaf}": torch.randn(shape) for leaf, shape in shapes.items()}


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("kind", FACTORS)
def test_of_components_with_the_same_names_that_of_the_same_shapes_is_merged(kind, width, tmp_path):
    one, two = of_component("lora_te1", kind, 8), of_component("lora_te2", kind, 12)
    save_file(one | two, tmp_path / "both.safetensors")
    save_file(one if width == 8 else two, tmp_path / "own.safetensors")
    base = {"q.weight": torch.randn(width, width)}
    merged = [
        ckptfix.repair_state_dict(base, adapter=tmp_path / f"{name}.safetensors", values=False)[0]
        for name in ("both", "own")
    ]
    assert_same(*merged)
    assert not torch.equal(merged[0]["q.weight"], base["q.weight"])


@pytest.mark.parametrize(
    ("one", "two"), [("text_encoder", "text_encoder_2"), ("transformer", "transformer_2")], ids=["SDXL", "Wan 2.2"]
)
def test_of_components_with_the_same_shapes_that_of_the_folder_is_merged(one, two, tmp_path):
    parts = {name: {f"{name}.q.lora_{end}.weight": torch.randn(8, 8) for end in "AB"} for name in (one, two)}
    parts |= {"both": parts[one] | parts[two]}
    for name, tensors in parts.items():
        file, config = tmp_path / f"{name}.safetensors", {f"{each}.lora_alpha": 8 for each in (one, two)}
        save_file(tensors, file, {"lora_adapter_metadata": json.dumps(config)})
    base = {"q.weight": torch.randn(8, 8)}
    for name in (one, two):
        place = tmp_path / "pipeline" / name / "model.safetensors"
        place.parent.mkdir(parents=True)
        save_file(base, place)
        for adapter in (name, "both"):
            ckptfix.repair(place, adapter=tmp_path / f"{adapter}.safetensors", output=place.parent / adapter)
        assert_same(load_file(place.parent / "both"), load_file(place.parent / name))
    with pytest.raises(AdapterError, match=rf"for {one} and {two} all fit .* for example {two}, or save"):
        ckptfix.repair_state_dict(base, adapter=tmp_path / "both.safetensors", values=False)


def open_clip_text(width):
    from open_clip.transformer import TextTransformer

    return TextTransformer(context_length=7, vocab_size=9, width=width, heads=2, layers=2, output_dim=width)


@pytest.mark.parametrize("dots", [False, True])
def test_the_two_text_encoders_of_sdxl_in_one_file(dots, tmp_path):
    """The first has the names of transformers, and the second those of open_clip; the adapter has the same for both."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_position_embeddings": 7, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = CLIPTextModel(CLIPTextConfig(**sizes, hidden_size=8, intermediate_size=32)).state_dict()
    one = {f"conditioner.embedders.0.transformer.text_model.{key.removeprefix('text_model.')}": own[key] for key in own}
    two = {f"conditioner.embedders.1.model.{key}": value for key, value in open_clip_text(12).state_dict().items()}
    base = {**one, **two, "model.diffusion_model.out.weight": torch.zeros(3)}
    tensors: dict[str, torch.Tensor] = {}
    want = {key: value.clone() for key, value in base.items()}
    for number, width in enumerate((8, 12)):
        for layer in range(2):
            module = f"text_model.encoder.layers.{layer}.self_attn.q_proj"
            name = (
                f"text_encoder{'_2' * number}.{module}" if dots else f"lora_te{number + 1}_{module.replace('.', '_')}"
            )
            down, up = torch.randn(2, width), torch.randn(width, 2)
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            places = [
                f"conditioner.embedders.0.transformer.{module}.weight",
                f"conditioner.embedders.1.model.transformer.resblocks.{layer}.attn.in_proj_weight",
            ]
            want[places[number]][:width] += up @ down
    save_file(tensors, tmp_path / "trained.safetensors")
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "trained.safetensors", select="FIL108")
    assert_same(repaired, want)


def test_the_text_encoder_of_another_pipeline_is_not_merged_alone(tmp_path):
    """SDXL and Flux have the same one."""
    pairs = {"lora_unet_double_blocks_0_img_attn_qkv": 8, "lora_te1_text_model_q": 4}
    tensors = {
        f"{name}.{end}.weight": torch.ones(size, size)
        for name, size in pairs.items()
        for end in ("lora_down", "lora_up")
    }
    save_file(tensors, tmp_path / "flux.safetensors")
    base = {"conditioner.embedders.0.transformer.text_model.q.weight": torch.ones(4, 4)}
    _, report = ckptfix.repair_state_dict(base, adapter=tmp_path / "flux.safetensors", values=False)
    assert "1 layer for lora_unet is left out" in report.findings[0].message
    base["model.diffusion_model.input_blocks.0.weight"] = torch.ones(8, 8)
    with pytest.raises(AdapterError, match="lacks 1 of the adapter's 1 layers, such as double_blocks_0_img_attn_qkv"):
        ckptfix.repair_state_dict(base, adapter=tmp_path / "flux.safetensors", values=False)


@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_"])
def test_what_lycoris_saves_is_what_it_adds_in_training(prefix, tmp_path):
    """LoKr with two whole matrices has the scale one; differences are added to weights, norms and biases."""
    base = {"q.weight": torch.randn(6, 8), "norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}
    base |= {"k.weight": torch.randn(4, 8), "v.weight": torch.randn(4, 8), "v.bias": torch.zeros(4)}
    base["line.weight"] = torch.randn(6, 4, 3)
    parts = {
        **{"line.lokr_w1": (3, 2), "line.lokr_w2": (2, 2, 3), "line.alpha": ()},
        "q.alpha": (),
        "q.lokr_w1": (3, 2),
        "q.lokr_w2": (2, 4),
        "k.alpha": (),
        "norm.w_norm": (8,),
        "norm.b_norm": (8,),
    }
    parts |= {f"k.hada_w{at}_{end}": shape for at in (1, 2) for end, shape in (("a", (4, 2)), ("b", (2, 8)))}
    parts |= {"v.diff": (4, 8), "v.diff_b": (4,)}
    own = {key: torch.randn(shape) for key, shape in parts.items()}
    save_file({f"{prefix}{key}": value for key, value in own.items()}, tmp_path / "x.safetensors")
    got, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "x.safetensors", values=False)
    hadamard = (own["k.hada_w1_a"] @ own["k.hada_w1_b"]) * (own["k.hada_w2_a"] @ own["k.hada_w2_b"])
    torch.testing.assert_close(got["k.weight"], base["k.weight"] + hadamard * own["k.alpha"] / 2)
    want = {
        "q.weight": torch.kron(own["q.lokr_w1"], own["q.lokr_w2"]),
        "line.weight": torch.kron(own["line.lokr_w1"].unsqueeze(2), own["line.lokr_w2"]),
        **{"norm.weight": own["norm.w_norm"], "norm.bias": own["norm.b_norm"]},
        **{"v.weight": own["v.diff"], "v.bias": own["v.diff_b"]},
    }
    for key, change in want.items():
        assert torch.equal(got[key], base[key] + change), key


@pytest.mark.parametrize("most", [0, merged_tensors.MOST])
@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_dora_by_inputs(kernel, most, tmp_path, monkeypatch):
    """The norms are of columns, as in LyCORIS without ``wd_on_out``."""
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    monkeypatch.setattr("ckptfix.values.merged_tensors.MOST", most)
    base, ones = torch.randn(40, 6, *kernel), (1,) * len(kernel)
    down, up, norms = torch.randn(2, 6, *kernel), torch.randn(40, 2, *ones), torch.rand(1, 6, *ones)
    names = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": norms, "alpha": torch.tensor(2.0)}
    save_file({f"lora_unet_q.{name}": value for name, value in names.items()}, tmp_path / "x.safetensors")
    got, _ = ckptfix.repair_state_dict({"q.weight": base}, adapter=tmp_path / "x.safetensors", select="FIL108")
    whole = base + (up.flatten(1) @ down.flatten(1)).view_as(base)
    columns = whole.transpose(0, 1).flatten(1).norm(dim=1).view(1, 6, *ones)
    torch.testing.assert_close(got["q.weight"], whole * norms / columns)
    with pytest.raises(AdapterError, match=r"weigh that differently; omit =0\.5"):
        ckptfix.repair_state_dict({"q.weight": base}, adapter=f"{tmp_path}/x.safetensors=0.5")


_TWO = {"hada_w1_a": (40, 2), "hada_w1_b": (2, 54), "hada_w2_a": (40, 2), "hada_w2_b": (2, 54)}
_THREE = {"lora_down.weight": (2, 6, 1, 1), "lora_up.weight": (40, 2, 1, 1), "lora_mid.weight": (2, 2, 3, 3)}


@pytest.mark.parametrize("norms", [(40, 1, 1, 1), (1, 6, 1, 1)])
@pytest.mark.parametrize("parts", [_TWO, _THREE, {"lokr_w1": (4, 2), "lokr_w2": (10, 3, 3, 3)}])
def test_dora_of_other_products_of_lycoris(parts, norms, tmp_path, monkeypatch):
    """A weight with the same product and no norms is what the norms are of."""
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    base, file = {"q.weight": torch.randn(40, 6, 3, 3)}, tmp_path / "x.safetensors"
    own = {name: torch.randn(shape) for name, shape in {**parts, "alpha": ()}.items()}

    def merged(unmerge=False, **more):
        save_file({f"lora_unet_q.{name}": value for name, value in {**own, **more}.items()}, file)
        return ckptfix.repair_state_dict(base, adapter=file, select="FIL108", unmerge=unmerge)[0]["q.weight"]

    whole, scale = merged(), torch.rand(norms)
    axis = norms.index(max(norms))
    length = whole.transpose(0, axis).flatten(1).norm(dim=1).view(norms)
    torch.testing.assert_close(merged(dora_scale=scale), whole * scale / length)
    with pytest.raises(AdapterError, match="has no norm for each of 40 outputs"):
        merged(dora_scale=torch.rand(1, 7, 1, 1))
    with pytest.raises(AdapterError, match="the norms of DoRA"):
        merged(dora_scale=scale, unmerge=True)


def test_the_norms_of_a_table_take_one_pass(tmp_path, monkeypatch):
    """Those of its columns are over all rows; two threads wanted them at once, of some columns at a time."""
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    monkeypatch.setattr("ckptfix.values.merged_tensors.MOST", 0)
    read: list[int] = []
    weight = merged_tensors.MergedBytes.weight

    def counted(source, first, last):
        read.extend(range(first, last))
        return weight(source, first, last)

    monkeypatch.setattr(merged_tensors.MergedBytes, "weight", counted)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True, "target_modules": ["embed"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    one, two, norms = torch.randn(2, 96), torch.randn(200, 2), torch.rand(200)
    factors = {"lora_embedding_A": one, "lora_embedding_B": two, "lora_magnitude_vector": norms}
    tensors = {f"base_model.model.embed.{name}": value for name, value in factors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    base = torch.randn(96, 200)
    got, _ = ckptfix.repair_state_dict({"embed.weight": base}, adapter=tmp_path, select="FIL108")
    whole = base + (two @ one).T
    torch.testing.assert_close(got["embed.weight"], whole * norms / whole.norm(dim=0))
    # For the norms and the sums, and those of the report's figures, with rows that a short last block has again.
    assert max(Counter(read).values()) <= 4


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "dora_scale"])
def test_the_norms_of_a_square_convolution(name, tmp_path):
    """peft has norms of outputs as [1, outputs, 1, 1], and LyCORIS norms of inputs in the same shape."""
    base, norms = torch.randn(20, 20, 3, 3), torch.rand(1, 20, 1, 1)
    one, two = torch.randn(2, 20, 3, 3), torch.randn(20, 2, 1, 1)
    factors = {"lora_A.weight": one, "lora_B.weight": two, name: norms}
    save_file({f"unet.q.{key}": value for key, value in factors.items()}, tmp_path / "pytorch_lora_weights.safetensors")
    got, _ = ckptfix.repair_state_dict({"q.weight": base}, adapter=tmp_path, select="FIL108")
    whole = base + (two.flatten(1) @ one.flatten(1)).view_as(base)
    axis = int(name == "dora_scale")
    lengths = whole.transpose(0, axis).flatten(1).norm(dim=1)
    shape = [20 if at == axis else 1 for at in range(4)]
    torch.testing.assert_close(got["q.weight"], whole * (norms.flatten() / lengths).view(shape))


PIXEL = {"lora_down.weight": (4, 8, 1, 1), "lora_up.weight": (24, 4, 1, 1)}
FOUR = {"hada_w1_a": (24, 4, 1, 1), "hada_w1_b": (4, 8, 3, 3), "hada_w2_a": (24, 4, 1, 1), "hada_w2_b": (4, 8, 3, 3)}


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        pytest.param((24, 8), PIXEL, id="of a convolution, for a linear layer"),
        pytest.param((24, 8, 1, 1), {key: shape[:2] for key, shape in PIXEL.items()}, id="of a linear layer"),
        pytest.param((24, 8, 3, 3), FOUR, id="LoHa of OneTrainer"),
    ],
)
def test_matrices_with_other_axes_than_the_tensor(shape, parts, tmp_path):
    torch.manual_seed(0)
    tensors = {f"lora_unet_q.{key}": torch.randn(shape) for key, shape in parts.items()}
    save_file(tensors, tmp_path / "trained.safetensors")
    flat = {key.partition(".")[2]: value.flatten(1) for key, value in tensors.items()}
    products = [flat[one] @ flat[other] for one, other in (("lora_up.weight", "lora_down.weight"),) if one in flat]
    products += [flat[f"hada_w{end}_a"] @ flat[f"hada_w{end}_b"] for end in "12" if "hada_w1_a" in flat]
    before = torch.randn(shape)
    repaired, _ = ckptfix.repair_state_dict({"q.weight": before}, adapter=tmp_path / "trained.safetensors")
    change = functools.reduce(torch.mul, products).view(shape)
    assert torch.equal(repaired["q.weight"], before + change)


def test_a_bias_next_to_the_second_matrix_is_added_and_one_next_to_the_first_is_refused(tmp_path):
    base = {"q.weight": torch.zeros(24, 8), "q.bias": torch.ones(24)}
    tensors = {f"lora_unet_q.{key}": torch.ones(shape[:2]) for key, shape in PIXEL.items()}
    path = tmp_path / "trained.safetensors"
    save_file({**tensors, "lora_unet_q.lora_up.bias": torch.ones(24)}, path)
    repaired, _ = ckptfix.repair_state_dict(base, adapter=path)
    assert torch.equal(repaired["q.bias"], torch.full((24,), 2.0))
    for other in ("lora_down.bias", "magnitude", "lora.down.weight"):
        save_file({**tensors, f"lora_unet_q.{other}": torch.ones(4)}, path)
        with pytest.raises(AdapterError, match=r"has lora_unet_q\.\S+, which ckptfix does not know"):
            ckptfix.repair_state_dict(base, adapter=path)


def test_embeddings_of_prompts_in_the_file_of_onetrainer_are_left_out(tmp_path):
    tensors = {f"lora_unet_q.{key}": torch.ones(shape[:2]) for key, shape in PIXEL.items()}
    save_file({**tensors, "bundle_emb.token.clip_l": torch.ones(2, 8)}, tmp_path / "trained.safetensors")
    base = {"q.weight": torch.zeros(24, 8)}
    repaired, report = ckptfix.repair_state_dict(base, adapter=tmp_path / "trained.safetensors")
    assert torch.equal(repaired["q.weight"], torch.full((24, 8), 4.0))
    assert "1 layer for prompts (bundle_emb) is left out" in report.findings[0].message


@pytest.mark.parametrize("component", ["transformer", "diffusion_model"])
def test_a_difference_next_to_matrices_in_the_names_of_diffusers(component, tmp_path):
    tensors = {f"{component}.q.{key}": torch.ones(shape[:2]) for key, shape in PIXEL.items()}
    save_file({**tensors, f"{component}.norm.diff": torch.ones(8)}, tmp_path / "trained.safetensors")
    base = {"q.weight": torch.zeros(24, 8), "norm.weight": torch.ones(8)}
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "trained.safetensors")
    assert torch.equal(repaired["norm.weight"], torch.full((8,), 2.0))


def test_a_convolution_in_three_parts(tmp_path):
    """kohya and LyCORIS apply them in sequence in training: 1x1, the kernel, and 1x1."""
    base, rows = torch.randn(33, 5, 3, 3), torch.randn(1, 5, 7, 7)
    down, mid, up = torch.randn(4, 5, 1, 1), torch.randn(4, 4, 3, 3), torch.randn(33, 4, 1, 1)
    names = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(2.0)}
    save_file({f"lora_unet_q.{name}": value for name, value in names.items()}, tmp_path / "x.safetensors")
    got, _ = ckptfix.repair_state_dict({"q.weight": base}, adapter=tmp_path / "x.safetensors", select="FIL108")
    conv = torch.nn.functional.conv2d
    want = conv(rows, base) + conv(conv(conv(rows, down), mid), up) * 0.5
    torch.testing.assert_close(conv(rows, got["q.weight"]), want, rtol=1e-4, atol=1e-4)


def test_a_parameter_named_as_a_difference_is_not_an_adapter():
    assert ckptfix.check({"net.diff": torch.ones(4, 4), "transformer.diff.weight": torch.ones(4, 4)}).findings == ()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_and_torch_merge_alike(dtype, tmp_path, monkeypatch):
    """Several blocks of rows, two adapters, both orientations; with a rank above the kernel's, torch merges."""
    make = functools.partial(net, dtype)
    base = make().state_dict() | {"q.weight": torch.randn(5000, 32, dtype=dtype)}
    adapters = []
    for number, rank in enumerate((4, 16, 192)):
        config = LORA(r=rank, target_modules=["q", "block.0.attn.c_attn", "embed"], use_rslora=True)
        folder = trained(config, tmp_path / str(number), dtype)
        weights = load_file(folder / "adapter_model.safetensors")
        weights["base_model.model.q.lora_B.weight"] = torch.randn(5000, rank)
        save_file(weights, folder / "adapter_model.safetensors")
        adapters.append(f"{folder}=0.7")
    for some in (adapters[:1], adapters[:2], adapters[2:]):
        ways = []
        for products in (merged_tensors._products, lambda source: None):
            monkeypatch.setattr(merged_tensors, "_products", products)
            ways.append(ckptfix.repair_state_dict(base, adapter=some, select="FIL108")[0])
        assert_same(*ways)
        assert not torch.equal(ways[0]["q.weight"], base["q.weight"])


def test_a_square_conv1d_of_which_nothing_else_says_so_is_refused(tmp_path):
    """``q`` is a Linear, and the last layer of which peft notes what it is."""
    adapter = trained(LORA(r=4, target_modules=["c_proj", "q"]), tmp_path / "adapter")
    base = {key: value for key, value in net().state_dict().items() if "c_attn" not in key}
    changed_config(adapter, fan_in_fan_out=False)
    with pytest.raises(AdapterError, match=r"the square block\.0\.attn\.c_proj may be a Conv1D"):
        ckptfix.repair_state_dict(base, adapter=adapter)


def test_a_head_that_is_tied_to_its_embedding(tmp_path):
    """One tensor takes the change of both, as in peft, which is reported; a file that lacks the head is refused."""
    adapter = trained(LORA(r=4, target_modules=["lm_head"]), tmp_path / "adapter", make=language)
    base = language().state_dict()
    repaired, report = ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter], make=language))
    (finding,) = report.findings
    assert finding.level is Level.WARNING
    assert "embed_tokens.weight changes too, because it is tied" in finding.message
    del base["lm_head.weight"]
    with pytest.raises(AdapterError, match="has only as the embedding that it is tied to"):
        ckptfix.repair_state_dict(base, adapter=adapter)
    file = changed_config(adapter, target_modules=["proj_out"]) / "adapter_model.safetensors"  # as Whisper calls it
    save_file({key.replace("lm_head", "proj_out"): value for key, value in load_file(file).items()}, file)
    with pytest.raises(AdapterError, match=r"changes proj_out, which .* has only as the embedding that it is tied to"):
        ckptfix.repair_state_dict(base, adapter=adapter)


def test_biases_of_a_module_that_was_replaced_are_left_out(tmp_path):
    config = LORA(r=4, target_modules=["q"], modules_to_save=["head"], bias="all")
    adapter = trained(config, tmp_path / "adapter")
    assert any(".original_module." in key for key in load_file(adapter / "adapter_model.safetensors"))
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter]))


@pytest.mark.parametrize(
    ("key", "config", "is_turned"),
    [
        pytest.param("{}.lora_{}", {"lora_parameters": {"rank": 4, "scale": 2.0}}, True, id="mlx-lm"),
        pytest.param("{}.lora_{}", {"lora_parameters": {"rank": 4, "alpha": 8, "scale": 1}}, True, id="mlx-lm, old"),
        pytest.param("{}.lora_{}.weight", {"r": 4, "lora_alpha": 8}, False, id="torchtune"),
        pytest.param(
            "model._checkpoint_wrapped_module.{}.lora_{}.weight", {"r": 4, "lora_alpha": 8}, False, id="wrapped"
        ),
    ],
)
def test_matrices_of_other_trainers(key, config, is_turned, tmp_path):
    base = {"q.weight": torch.randn(8, 8), "up.weight": torch.randn(12, 8)}
    one, twos = torch.randn(4, 8), {"q": torch.randn(8, 4), "up": torch.randn(12, 4)}
    tensors = {key.format(name, "a"): one.T.contiguous() if is_turned else one.clone() for name in twos}
    tensors |= {key.format(name, "b"): two.T.contiguous() if is_turned else two for name, two in twos.items()}
    save_file(tensors, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path, select="FIL108")
    for name, two in twos.items():
        torch.testing.assert_close(repaired[f"{name}.weight"], base[f"{name}.weight"] + 2 * (two @ one))


def test_a_trainer_notes_the_base_in_the_header(tmp_path):
    tensors = {"lora_unet_q.lora_down.weight": torch.ones(2, 4), "lora_unet_q.lora_up.weight": torch.ones(6, 2)}
    save_file(tensors, tmp_path / "style.safetensors", {"ss_sd_model_name": "dream_v8.safetensors"})
    (finding,) = ckptfix.check(tmp_path / "style.safetensors", select="FIL108").findings
    assert "trained on dream_v8.safetensors" in finding.message


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        pytest.param({"ss_sd_model_hash": ""}, ", trained on dream_v8.safetensors)", id="none"),
        pytest.param({"ss_sd_model_hash": "None"}, ", trained on dream_v8.safetensors)", id="not-a-hash"),
        pytest.param({}, ", trained on this very file)", id="the-same"),
        pytest.param({"ss_sd_model_hash": "0123abcd"}, ", trained on another file, dream_v8.safetensors: ", id="other"),
    ],
)
def test_the_hash_of_a_trainer_proves_the_base(noted, said, tmp_path):
    save_file({"q.weight": torch.randn(600, 500)}, tmp_path / "base.safetensors")
    with (tmp_path / "base.safetensors").open("rb") as file:  # as kohya's `model_hash` does
        file.seek(0x100000)
        own = hashlib.sha256(file.read(0x10000)).hexdigest()[:8]
    tensors = {"lora_unet_q.lora_down.weight": torch.ones(2, 500), "lora_unet_q.lora_up.weight": torch.ones(600, 2)}
    notes = {"ss_sd_model_name": "dream_v8.safetensors", "ss_sd_model_hash": own, **noted}
    save_file(tensors, tmp_path / "style.safetensors", notes)
    asked = {"adapter": tmp_path / "style.safetensors", "select": "FIL108"}
    (finding,) = ckptfix.check(tmp_path / "base.safetensors", **asked).findings
    assert said in finding.message


def llama(folder=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=True))
    if folder is not None:
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(peft.TrainableTokensConfig(token_indices=[5, 0]), id="tokens"),
        pytest.param(LORA(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 0]), id="tokens beside LoRA"),
        pytest.param(peft.LNTuningConfig(target_modules=["embed_tokens"]), id="a copy"),
    ],
)
def test_what_replaces_values_of_a_tied_embedding(config, tmp_path, monkeypatch):
    """New rows change the embedding and the head that is tied to it; a copy of one of them leaves the other."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    llama(tmp_path / "base")
    adapter = trained(config, tmp_path / "adapter", make=lambda _: llama())
    want = dict(merged_by_peft([adapter], make=lambda _: llama()))
    ckptfix.repair(tmp_path / "base", adapter=adapter, output=tmp_path / "merged.safetensors")
    repaired = load_file(tmp_path / "merged.safetensors")
    repaired.setdefault("lm_head.weight", repaired["model.embed_tokens.weight"])
    assert_same({key: repaired[key] for key in want}, want)
    whole = peft.PeftModel.from_pretrained(llama(), adapter).state_dict()
    for base, path in ((llama().state_dict(), adapter), (whole, adapter / "adapter_config.json")):
        repaired, _ = ckptfix.repair_state_dict(base, adapter=path, select="FIL108")
        assert_same({key: repaired[key] for key in want}, want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_indices": [3, 50]}, "has a row for token 50, and the base only 50 tokens; give the base with the"),
        ({"token_indices": [3]}, "has 2 new rows, and adapter_config.json has no token indices for them; use the"),
        ({"token_indices": None}, "has 2 new rows, and adapter_config.json"),
    ],
)
def test_rows_of_tokens_that_the_base_lacks_are_refused(changes, says, tmp_path):
    config = peft.TrainableTokensConfig(target_modules=["embed"], token_indices=[3, 7])
    adapter = changed_config(trained(config, tmp_path / "adapter"), **changes)
    with pytest.raises(AdapterError, match=re.escape(says)):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)


def test_new_rows_take_no_weight_and_are_given_once(tmp_path):
    one, two = (
        trained(peft.TrainableTokensConfig(target_modules=["embed"], token_indices=rows), tmp_path / str(rows))
        for rows in ([3, 7], [7, 9])
    )
    with pytest.raises(AdapterError, match=r"has rows of embed\.weight whole, so no weight applies; omit =0\.5"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=f"{one}=0.5")
    with pytest.raises(
        AdapterError, match=r"has a new row for token 7 of embed\.weight, which .* changes too; merge one"
    ):
        ckptfix.repair_state_dict(net().state_dict(), adapter=[one, two])


def test_a_module_that_two_adapters_change_is_not_taken_whole_from_one(tmp_path):
    whole = trained(LORA(r=2, target_modules=["q"], modules_to_save=["head"]), tmp_path / "whole")
    again = trained(LORA(r=4, target_modules=["q"], modules_to_save=["head"]), tmp_path / "again")
    product = trained(LORA(r=4, target_modules=["q", "head"]), tmp_path / "product")
    for pair in ([whole, again], [product, whole]):
        with pytest.raises(AdapterError, match=r"has head\.(weight|bias) whole, which .* changes too; merge one"):
            ckptfix.repair_state_dict(net().state_dict(), adapter=pair)
    merged, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=whole)
    both, _ = ckptfix.repair_state_dict(merged, adapter=product)
    assert_same(ckptfix.repair_state_dict(net().state_dict(), adapter=[whole, product])[0], both)


@pytest.mark.parametrize("more", [{"trainable_token_indices": {"embed_tokens": [0, 5]}}, {"r": 2}])
def test_a_head_of_its_own_takes_nothing_of_what_it_was_tied_to(more, tmp_path):
    modules = ["embed_tokens"] if "r" in more else ["q_proj"]
    config = LORA(**{"r": 4, **more}, target_modules=modules, modules_to_save=["lm_head"])
    adapter = trained(config, tmp_path / "adapter", make=language)
    repaired, _ = ckptfix.repair_state_dict(language().state_dict(), adapter=adapter, select="FIL108")
    assert_same(repaired, merged_by_peft([adapter], make=language))


@pytest.fixture
def adapted(tmp_path, monkeypatch):
    """The file of a base and an adapter of it, merged in many blocks; the output has a folder of its own."""
    monkeypatch.setattr("ckptfix.values.merged_tensors.BLOCK", 1)
    save_file(net().state_dict(), tmp_path / "base.safetensors")
    (tmp_path / "out").mkdir()
    adapter = trained(LORA(r=4, target_modules=[*LINEAR, "conv"]), tmp_path / "adapter")
    return tmp_path / "base.safetensors", adapter, tmp_path / "out"


@pytest.mark.parametrize("settings", [{}, {"format": "pth"}, {"shard_size": 4000}], ids=["one file", "pth", "shards"])
def test_what_is_merged_is_judged_while_it_is_written(settings, adapted, monkeypatch):
    base, adapter, folder = adapted
    made: Counter[tuple[str, int]] = Counter()

    def counted(plain):
        def work_out(self, *given):
            made[self.edit.key, given[-2]] += 1
            return plain(self, *given)

        return work_out

    for name in ("_by_torch", "_by_kernel"):
        monkeypatch.setattr(merged_tensors.MergedBytes, name, counted(getattr(merged_tensors.MergedBytes, name)))
    written = ckptfix.repair(base, adapter=adapter, output=folder / "m.safetensors", **settings).report
    # Once for the sample that says how far a tensor is changed, which is all of such small ones, and once in all.
    assert made == dict.fromkeys([(f"{key}.weight", row) for key in (*LINEAR, "conv") for row in (0, 16)], 2)
    got, merged = ckptfix.open_checkpoint(str(written.output)).state_dict(), merged_by_peft([adapter])
    assert_same({key: got[key] for key in merged}, dict(merged))
    lazy = ckptfix.repair(base, adapter=adapter).report
    assert written.figures.keys() == lazy.figures.keys() == net().state_dict().keys()
    for key, figures in written.figures.items():
        assert figures.sample == lazy.figures[key].sample
        for name in (*COUNTS, "minimum", "maximum", "has_faint_rows"):
            assert getattr(figures, name) == getattr(lazy.figures[key], name), name
        assert (figures.mean, figures.rms) == pytest.approx((lazy.figures[key].mean, lazy.figures[key].rms))


def test_what_the_values_of_a_merge_change_is_written_anew(adapted):
    base, adapter, folder = adapted
    whole = net().state_dict()
    save_file({**whole, "norm.weight": torch.full((32,), torch.nan)}, base)
    save_file(whole, donor := base.with_name("donor.safetensors"))
    settings = {"fill": donor, "replace": "VAL101", "adapter": adapter}
    repaired = ckptfix.repair(base, output=folder / "m.safetensors", **settings)
    assert [finding.code for finding in repaired.report.fixed] == ["FIL108", "VAL101"]
    assert [file.name for file in folder.iterdir()] == ["m.safetensors"]
    got, merged = load_file(folder / "m.safetensors"), merged_by_peft([adapter])
    assert_same({key: got[key] for key in merged}, dict(merged))


def test_a_merge_that_is_refused_is_not_written(adapted, monkeypatch):
    base, adapter, folder = adapted
    monkeypatch.setattr("ckptfix.engine.delivery.write_to", lambda *_: pytest.fail("a draft was written"))
    save_file({**net().state_dict(), "more.weight": torch.ones(2, 2)}, like := base.with_name("like.safetensors"))
    report = ckptfix.repair(base, like=like, adapter=adapter, output=folder / "m.safetensors").report
    assert report.is_refused
    changed_config(adapter, base_model_name_or_path="some/base")
    base = base.rename(cached("some/other", base.parent) / base.name)
    assert ckptfix.repair(base, adapter=adapter, output=folder / "m.safetensors").report.is_refused
    assert list(folder.iterdir()) == []
    dry = ckptfix.repair(base, adapter=adapter, output=folder / "m.safetensors", dry_run=True).report
    assert dry.edits
    assert list(folder.iterdir()) == []


def test_a_merge_on_a_full_disk_ends_in_one_line(adapted, monkeypatch):
    base, adapter, folder = adapted

    def write(temporary, checkpoint, write, output):
        raise unwritten(output, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr("ckptfix.engine.delivery.write_to", write)
    with pytest.raises(WriteError, match="No space left"):
        ckptfix.repair(base, adapter=adapter, output=folder / "m.safetensors")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("saved", "base", "other"),
    [
        pytest.param("lm_head.weight", "embed_out.weight", "embed_out.weight", id="a head of release 4"),
        pytest.param("blocks.0.k.weight", "blocks.0.key.weight", r"blocks\.0", id="a part of a layer"),
        pytest.param("score.weight", "classifier.weight", "", id="a new head"),
        pytest.param("lm_head.weight", "embed_tokens.weight", "", id="a head that was tied"),
    ],
)
def test_a_module_that_the_base_has_by_another_name_is_not_added_next_to_it(saved, base, other, tmp_path):
    """Written next to the old one, it would be left out by a load."""
    tensors = {f"q.lora_{side}.weight": torch.ones(8, 8) for side in "AB"} | {saved: torch.randn(8, 8)}
    save_file(
        {f"base_model.model.{key}": value for key, value in tensors.items()}, tmp_path / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "modules_to_save": [saved.removesuffix(".weight")]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    state = {"q.weight": torch.randn(8, 8), base: torch.randn(8, 8)}
    if other:
        with pytest.raises(AdapterError, match=f"{saved} whole, but .* has {other} instead; rename its layers"):
            ckptfix.repair_state_dict(state, adapter=tmp_path)
    else:
        repaired, _ = ckptfix.repair_state_dict(state, adapter=tmp_path, select="FIL108")
        assert_same({key: repaired[key] for key in (base, saved)}, {base: state[base], saved: tensors[saved]})


@pytest.mark.parametrize("name", ["wte", "embed_tokens"])
def test_a_head_is_tied_to_a_new_embedding_only_if_peft_has_tied_it(name, tmp_path):
    """With ``ensure_weight_tying``, peft also saves the head if it ties the embeddings, which depends on their name."""
    import transformers

    small = {"bos_token_id": 1, "eos_token_id": 1, "vocab_size": 20}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    llama = transformers.LlamaConfig(**sizes, **small, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, **small))
        if name == "wte"
        else transformers.LlamaForCausalLM(llama)
    )
    model.save_pretrained(tmp_path / "base")
    config = LORA(r=2, target_modules="all-linear", modules_to_save=[name], ensure_weight_tying=True)
    adapter = trained(config, tmp_path / "adapter", make=lambda dtype: type(model).from_pretrained(tmp_path / "base"))
    whole = peft.PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), adapter).merge_and_unload()
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    ckptfix.repair(tmp_path / "base", adapter=adapter, output=merged / "model.safetensors")
    assert_same(dict(type(model).from_pretrained(merged).state_dict()), dict(whole.state_dict()))


def test_a_layer_that_transformers_loads_as_float32_is_merged_as_it_is_stored(tmp_path):
    from transformers import T5Config, T5EncoderModel

    def make(dtype=torch.float16):
        torch.manual_seed(0)
        return T5EncoderModel(config).to(dtype)

    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, vocab_size=9, **ids)
    make().save_pretrained(tmp_path / "base")
    adapter = trained(LORA(r=2, target_modules=["wo", "q"]), tmp_path / "adapter", torch.float16, make)
    model = T5EncoderModel.from_pretrained(tmp_path / "base", dtype=torch.float16)
    want = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert want[name].dtype == torch.float32
    stored = make().state_dict()
    repaired, report = ckptfix.repair_state_dict(stored, adapter=adapter, select="FIL108")
    assert "1 of them (wo of T5) stay float16; peft merges them in float32" in report.findings[0].message
    assert_same({key: repaired[key] for key in want if key != name}, {key: want[key] for key in want if key != name})
    # Rounded twice, once by each library: the change, and the sum.
    torch.testing.assert_close(repaired[name].float(), want[name], rtol=2**-11, atol=2**-11)
    wide, _ = ckptfix.repair_state_dict({**stored, name: stored[name].float()}, adapter=adapter, select="FIL108")
    assert_same({name: wide[name]}, {name: want[name]})
