"""The libraries' own converters as data: files in the layout of transformers 4 for models of release 5, and files of a
model's authors for timm, diffusers and open_clip."""

import importlib
import logging
import os
import re
import sys
from functools import reduce
from math import prod
from threading import Thread

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.models.auto import modeling_auto

import ckptfix
from ckptfix.core.parts import check_bijection, inverse
from ckptfix.maps.elements import Elements
from ckptfix.modules.converting import Traced, _silent, converter_of

A_FEW = ("mixtral", "qwen3_vl_moe", "kimi_k25", "Dinov2Model", "mistral_large4_text", "jamba", "inkling2_text",
         "ernie4_5_vl_moe")  # fmt: skip
"""Stacked experts, transposed ones, two thirds permuted for RoPE, split, renamed, interleaved, experts of two kinds."""

SMALL = {
    4: "num_attention_heads num_heads n_head encoder_attention_heads decoder_attention_heads num_experts"
    " num_local_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers num_layers depth n_layer n_layers encoder_layers decoder_layers num_encoder_layers"
    " num_decoder_layers num_key_value_heads num_experts_per_tok moe_topk",
    1: "n_group topk_group",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size",
    16: "q_lora_rank kv_lora_rank",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size embed_dim d_model n_embd dim out_hidden_size image_size",
    64: "intermediate_size ffn_hidden_size encoder_ffn_dim decoder_ffn_dim max_position_embeddings",
    96: "vocab_size",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}

OWN: dict[str, dict[str, object]] = {
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {
        "text_config.moe_intermediate_size": [24, 8],
        "text_config.rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "gradium_phonon_tts": {"num_key_value_heads": 4},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax_m3_vl": {"merged_hidden_size": 64, "projector_hidden_size": 32, "text_config.dense_intermediate_size": 48},
    "nemo_speechlm": {
        "audio_config.asr_config.num_key_value_heads": 4, "word_timestamp_config.num_key_value_heads": 4,
        "audio_config.diarization_config.audio_config.num_key_value_heads": 4,
    },
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 24, "talker_config.spatial_merge_size": 2,
    },
}  # fmt: skip
"""What a type needs beside the sizes that all have."""

ELSEWHERE = {
    "UnlimitedOcrVisionEncoder": "models.unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrVisionEncoder",
    "qwen3_omni_moe_text": "models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
}
"""Types whose class follows from no name."""


def small(config):
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            small(value)
        elif type(value) is int and (name in SIZES or name.endswith("token_id")):
            setattr(config, name, SIZES.get(name, 1))
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(config, name, value[:2])
    return config


def converted_types():
    mapping = importlib.import_module("transformers.conversion_mapping")._build_checkpoint_conversion_mapping()
    return [name for name, steps in mapping.items() if any(isinstance(step, WeightConverter) for step in steps)]


def class_of(name):
    if name in ELSEWHERE:
        path, _, last = ELSEWHERE[name].rpartition(".")
        made = getattr(importlib.import_module(f"transformers.{path}"), last)
        return made.config_class, made
    if hasattr(transformers, name):
        return getattr(transformers, name).config_class, getattr(transformers, name)
    config = CONFIG_MAPPING[name]
    for task in ("FOR_IMAGE_TEXT_TO_TEXT", "FOR_CAUSAL_LM", "FOR_OBJECT_DETECTION", "FOR_MASKED_LM"):
        classes = getattr(modeling_auto, f"MODEL_{task}_MAPPING")
        if config in classes:
            return config, classes[config]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    base = config.__name__.removesuffix("Config")
    return config, next(
        getattr(module, base + end)
        for end in ("ForConditionalGeneration", "ForCausalLM", "Model", "TextModel", "VisionModel")
        if hasattr(module, base + end)
    )


def built(name):
    """Return the class of a type and a tiny configuration of it; None if the general sizes do not fit the type."""
    try:
        config, made = class_of(name)
        shape = small(config())
        for path, value in OWN.get(name, {}).items():
            *outer, last = path.split(".")
            setattr(reduce(getattr, outer, shape), last, value)
        with torch.device("meta"):
            model = made._from_config(shape)
        old = revert_weight_conversion(model, dict(model.state_dict()))
        made.from_pretrained(None, config=shape, state_dict={k: torch.zeros(v.shape) for k, v in old.items()})
    except (Exception, SystemExit):  # noqa: BLE001  a configuration that these sizes contradict raises what it wants
        return None
    return (made, shape) if sum(map(torch.Tensor.numel, model.parameters())) < 150e6 else None


def valued(model):
    """Return a state_dict with a different value in every element, ties kept."""
    made, state = {}, {}
    for key, value in model.state_dict(keep_vars=True).items():
        at = value.data_ptr(), tuple(value.shape)
        if at not in made or not value.numel():
            made[at] = torch.randn_like(value) if value.is_floating_point() else value.detach().clone()
        state[key] = made[at].detach()
    return state


def differing(ours, theirs):
    return [key for key in theirs if key not in ours or not torch.equal(ours[key], theirs[key].to(ours[key].dtype))]


def there_and_back(name, tmp_path):
    made, config = built(name)
    model = made._from_config(config).float()
    new = valued(model)
    old = revert_weight_conversion(model, dict(new))
    theirs = made.from_pretrained(None, config=config, state_dict=dict(old)).state_dict()
    ours, report = ckptfix.repair_state_dict(dict(old), made._from_config(config), values=False)
    assert not differing(ours, theirs)
    assert report.exit_code == 0
    torch.save(old, tmp_path / "old.pth")
    rename_map = ckptfix.infer_map(model, tmp_path / "old.pth")
    back, _ = ckptfix.repair_state_dict(dict(new), like=tmp_path / "old.pth", rename_map=rename_map, values=False)
    return [key for key in differing(back, old) if key not in rename_map.missing], rename_map.missing


@pytest.mark.slow
@pytest.mark.parametrize("name", A_FEW)
def test_files_of_release_4_load_as_transformers_loads_them_and_go_back(name, tmp_path):
    wrong, missing = there_and_back(name, tmp_path)
    assert not wrong
    assert not missing


@pytest.mark.skipif(not os.environ.get("CKPTFIX_THOROUGH"), reason="minutes: set CKPTFIX_THOROUGH=1")
def test_all_types_with_a_converter(tmp_path):
    names = [name for name in converted_types() if built(name)]
    assert len(names) >= 79  # the 80th needs scipy
    assert {name: wrong for name in names if (wrong := there_and_back(name, tmp_path)[0])} == {}


def tiny():
    return MixtralForCausalLM._from_config(
        MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=3, vocab_size=64,
        )
    )  # fmt: skip


def test_a_file_of_the_model_itself_is_left_unchanged():
    model = tiny()
    state, report = ckptfix.repair_state_dict(model.state_dict(), model, values=False)
    assert not report.findings
    assert list(state) == list(model.state_dict())


def test_a_file_of_release_4_inside_of_a_module_of_the_user():
    model = torch.nn.ModuleDict({"backbone": tiny(), "head": torch.nn.Linear(4, 4)})
    new = valued(model)
    inner = {key.removeprefix("backbone."): value for key, value in new.items() if key.startswith("backbone.")}
    old = {f"backbone.{key}": value for key, value in revert_weight_conversion(model["backbone"], inner).items()}
    old |= {key: value for key, value in new.items() if key.startswith("head.")}
    ours, report = ckptfix.repair_state_dict(old, model, values=False)
    assert report.exit_code == 0
    assert not differing(ours, new)


def test_a_missing_expert_is_not_filled():
    model = tiny()
    old = revert_weight_conversion(model, valued(model))
    del old["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    ours, report = ckptfix.repair_state_dict(old, model, values=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in ours
    assert report.exit_code == 1


def test_the_files_of_another_library_are_ignored():
    convert = converter_of(tiny())
    assert convert is not None
    assert not convert({"blocks.0.attn.qkv.weight": (96, 32), "blocks.0.norm.weight": (32,)})
    assert converter_of(torch.nn.Linear(2, 2)) is None


def sd3():
    """Stable Diffusion 3 with its authors' names; one block is the text's last."""
    from diffusers import SD3Transformer2DModel
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers as convert

    linear = {"t_embedder.mlp.0": (16, 256), "t_embedder.mlp.2": (16, 16), "y_embedder.mlp.0": (16, 24),
              "y_embedder.mlp.2": (16, 16), "context_embedder": (16, 20), "final_layer.linear": (16, 16),
              "final_layer.adaLN_modulation.1": (32, 16)}  # fmt: skip
    for block, rows in (("0.x", 6), ("0.context", 6), ("1.x", 6), ("1.context", 2)):
        front = f"joint_blocks.{block}_block"
        linear |= {f"{front}.attn.qkv": (48, 16), f"{front}.adaLN_modulation.1": (rows * 16, 16)}
        rest = {"attn.proj": (16, 16), "mlp.fc1": (64, 16), "mlp.fc2": (16, 64)} if rows == 6 else {}
        linear |= {f"{front}.{name}": shape for name, shape in rest.items()}
    state = {f"{name}.weight": torch.randn(shape) for name, shape in linear.items()}
    state |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in linear.items()}
    state |= {"pos_embed": torch.randn(1, 16, 16), "x_embedder.proj.weight": torch.randn(16, 4, 2, 2)}
    state["x_embedder.proj.bias"] = torch.randn(16)
    sizes = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 20, "pos_embed_max_size": 4,
             "caption_projection_dim": 16, "pooled_projection_dim": 24, "out_channels": 4}  # fmt: skip
    model = SD3Transformer2DModel(8, 2, 4, num_layers=2, **sizes)
    return model, {f"model.diffusion_model.{key}": value for key, value in state.items()}, convert(dict(state))


def convnext_v2():
    """ConvNeXt V2 with the names of its authors, and the normalisation of responses with four axes."""
    from timm.models.convnext import ConvNeXt, checkpoint_filter_fn

    model = ConvNeXt(depths=(1, 2, 1, 1), dims=(8, 16, 8, 8), num_classes=5, use_grn=True, ls_init_value=None)
    state = {}
    for key, value in model.state_dict().items():
        old = re.sub(r"stages\.(\d+)\.downsample\.", r"downsample_layers.\1.", key).replace(".blocks.", ".")
        for ours, theirs in (("stem.", "downsample_layers.0."), ("mlp.grn.bias", "grn.beta"), ("conv_dw", "dwconv"),
                             ("mlp.grn.weight", "grn.gamma"), ("mlp.fc", "pwconv"), ("head.norm", "norm"),
                             ("head.fc", "head")):  # fmt: skip
            old = old.replace(ours, theirs)
        state[old] = torch.randn_like(value).reshape((1, 1, 1, -1) if "grn" in old else value.shape)
    return model, state, checkpoint_filter_fn(dict(state), model)


def clip():
    """CLIP as OpenAI has it, for the class of open_clip with a tower of its own for the text."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP, convert_to_custom_text_state_dict

    vision = CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=20, width=16, heads=2, layers=2)
    state = valued(CLIP(12, vision, text))
    return CustomTextCLIP(12, vision, text), state, convert_to_custom_text_state_dict(dict(state))


@pytest.mark.slow
@pytest.mark.parametrize("files", [sd3, convnext_v2, clip], ids=["diffusers", "timm", "open_clip"])
def test_files_of_the_authors_load_as_their_library_converts_them_and_go_back(files, tmp_path):
    model, state, theirs = files()
    ours, report = ckptfix.repair_state_dict(state, model, values=False)
    assert report.exit_code == 0
    assert not differing(ours, theirs)
    assert set(ours) == set(model.state_dict())
    convert = converter_of(model)
    assert convert is not None
    found = convert({key: tuple(value.shape) for key, value in state.items()})
    assert {key for key in found if found[key][0].source == key} != set(ours)
    torch.save(state, tmp_path / "theirs.pth")
    rename_map = ckptfix.infer_map(model, tmp_path / "theirs.pth")
    back, _ = ckptfix.repair_state_dict(ours, like=tmp_path / "theirs.pth", rename_map=rename_map, values=False)
    assert not differing(back, state)
    assert not convert({"backbone.weight": (3, 3)}).keys() - {"backbone.weight"}


TRACED = {
    "split, permuted": lambda w: torch.cat(
        [*w["a"].chunk(3)[:2], w["a"].chunk(3)[2].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6)]
    ),
    "stacked, transposed": lambda w: torch.stack([w["a"], w["b"]]).transpose(1, 2).contiguous(),
    "every second row": lambda w: w["a"].reshape(12, 2, 6).transpose(0, 1).reshape(24, 6)[:12],
    "unbound": lambda w: torch.cat(torch.unbind(w["a"].view(4, 6, 6), 0)[::-1], 1),
    "flattened": lambda w: w["a"].t().reshape(-1)[6:30],
    "squeezed": lambda w: w["c"][None].squeeze(0).permute(2, 0, 1).flatten(1),
}


@pytest.mark.parametrize("moved", TRACED.values(), ids=TRACED)
def test_traced_elements_are_those_of_the_tensors(moved):
    shapes = {"a": (24, 6), "b": (24, 6), "c": (3, 4, 5)}
    numbers = {key: torch.arange(prod(shape)).view(shape) + 1000 * at for at, (key, shape) in enumerate(shapes.items())}
    wanted = moved(numbers)
    traced = moved({key: Traced(Elements.of(key, shape)) for key, shape in shapes.items()})
    made = torch.full(wanted.shape, -1)
    for part in traced.parts(shapes):
        values = numbers[part.source][tuple(slice(*bounds) for bounds in part.box)]
        if part.axes:
            values = values.reshape(part.view or values.shape).permute(part.axes)
        place = tuple(slice(*bounds) for bounds in part.place)
        made[place] = values.reshape(made[place].shape)
    assert torch.equal(made, wanted)


def test_only_the_calling_thread_is_silenced(capsys, caplog):
    def report() -> None:
        sys.stdout.write("printed\n")
        logging.getLogger("timm").warning("logged")

    with _silent():
        report()
        other = Thread(target=report)
        other.start()
        other.join()
    assert capsys.readouterr().out == "printed\n"
    assert caplog.messages == ["logged"]


def test_computed_tensors_are_not_traced():
    tensor = Traced(Elements.of("w", (4, 6)))
    assert not isinstance(tensor * 2, Traced)
    missing = torch.zeros(4, 6, device="meta")
    for joined in (torch.cat([tensor, missing]), torch.stack([tensor, missing], 1), torch.stack([missing, tensor])):
        assert isinstance(joined, Traced)
        assert joined.numel() == 48
        assert joined.parts({"w": (4, 6)}) == ()
    with pytest.raises(NotImplementedError):
        tensor.zero_()


def test_the_map_is_a_bijection_and_so_is_its_inverse():
    model = tiny()
    shapes = {key: tuple(value.shape) for key, value in revert_weight_conversion(model, model.state_dict()).items()}
    target = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    convert = converter_of(model)
    assert convert is not None
    parts = convert(shapes)
    check_bijection(parts, shapes, target)
    check_bijection(inverse(parts), target, shapes)


def test_a_tied_file_for_an_untied_model_and_a_key_that_no_one_has():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 60, "n_positions": 16}
    tied, untied = GPT2LMHeadModel(GPT2Config(**sizes)), GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **sizes))
    state = {key: value for key, value in tied.state_dict().items() if key != "lm_head.weight"}
    assert ckptfix.repair_state_dict(state, untied)[1].exit_code == 1
    ours, report = ckptfix.repair_state_dict(state, untied, source_model=tied)
    assert report.exit_code == 0
    assert torch.equal(ours["lm_head.weight"], state["transformer.wte.weight"])
    del state["transformer.h.0.ln_1.weight"]
    missing = ckptfix.repair_state_dict(state, tied, source_model=tied)[1]
    assert [finding.code for finding in missing.findings if finding.code.startswith("FIT")] == ["FIT105", "FIT101"]
