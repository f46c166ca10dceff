"""The maps that ship: each is applied to a model of one library, and the model of the other gives the same outputs.

All weights are random, or an exchange of two layers would not be seen."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.maps.library import WITHIN, aliases, fitting, look_up, names, shipped
from ckptfix.repairing import repair_state_dict

State = dict[str, torch.Tensor]
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NORMS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.double().eval().parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
        elif name.endswith("running_mean"):
            buffer.normal_()
    return model


def moved(state: State, name: str) -> State:
    return repair_state_dict(state, rename_map=shipped(name), values=False)[0]


def output(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(*inputs)
    value: torch.Tensor = getattr(found, "logits", found)
    return value


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if one[key].shape != other[key].shape or not torch.equal(one[key], other[key])] == []


def timm_vit() -> Any:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10)


def torchvision_vit() -> Any:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 3, 4, 48, 192, num_classes=10)


def transformers_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10))


def timm_convnext() -> Any:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(2, 2, 3, 2), dims=(16, 32, 48, 64), num_classes=10)


def torchvision_convnext() -> Any:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    sizes = ((16, 32, 2), (32, 48, 2), (48, 64, 3), (64, None, 2))
    return ConvNeXt([CNBlockConfig(*each) for each in sizes], num_classes=10)


def transformers_convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"depths": [2, 2, 3, 2], "hidden_sizes": [16, 32, 48, 64]}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, num_labels=10))


def timm_swin() -> Any:
    from timm.models.swin_transformer import SwinTransformer

    sizes: dict[str, Any] = {"depths": (2, 2, 3, 2), "num_heads": (2, 2, 4, 4), "window_size": 1, "embed_dim": 24}
    return SwinTransformer(img_size=32, patch_size=4, num_classes=10, **sizes)


def torchvision_swin() -> Any:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 24, [2, 2, 3, 2], [2, 2, 4, 4], [1, 1], num_classes=10)


def transformers_swin() -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"depths": [2, 2, 3, 2], "num_heads": [2, 2, 4, 4], "window_size": 1, "embed_dim": 24}
    return SwinForImageClassification(SwinConfig(image_size=32, patch_size=4, num_labels=10, **sizes))


def torchvision_resnet() -> Any:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 1, 1, 2], num_classes=10)


def transformers_resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"depths": [2, 1, 1, 2], "hidden_sizes": [64, 128, 256, 512]}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=10))


IMAGE_MODELS = [
    ("timm-vit_transformers", timm_vit, transformers_vit),
    ("torchvision-vit_timm", torchvision_vit, timm_vit),
    ("torchvision-vit_transformers", torchvision_vit, transformers_vit),
    ("timm-convnext_transformers", timm_convnext, transformers_convnext),
    ("torchvision-convnext_timm", torchvision_convnext, timm_convnext),
    ("torchvision-convnext_transformers", torchvision_convnext, transformers_convnext),
    ("torchvision-swin_timm", torchvision_swin, timm_swin),
    ("torchvision-swin_transformers", torchvision_swin, transformers_swin),
    ("timm-swin_transformers", timm_swin, transformers_swin),
    ("torchvision-resnet_transformers", torchvision_resnet, transformers_resnet),
]
PROVED = {name for name, _, _ in IMAGE_MODELS}
"""The maps that a test of this module proves; the tests below add theirs."""


def proves(*maps: str) -> Callable[[Any], Any]:
    PROVED.update(maps)
    return lambda test: test


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ours", "theirs"), IMAGE_MODELS, ids=[each[0] for each in IMAGE_MODELS])
def test_models_of_images(name: str, ours: Callable[[], nn.Module], theirs: Callable[[], nn.Module]):
    source, target = randomised(ours()), theirs().double().eval()
    state = {key: value for key, value in source.state_dict().items() if "relative_position_index" not in key}
    # The rule finds the map by itself, and it is certain.
    done, report = repair_state_dict(state, target, values=False)
    assert report.exit_code == 0
    assert [finding.evidence["shipped"] for finding in report.fixed if "shipped" in finding.evidence] == [[name]]
    assert_equal(done, moved(state, name))
    target.load_state_dict(done, strict="swin" not in name)
    wanted = output(source, IMAGES)
    assert (output(target, IMAGES) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert_equal(moved(done, name), state)


@pytest.mark.slow
def test_a_shipped_map_fits_a_model_without_a_head_and_layers_without_a_bias():
    from timm.models.vision_transformer import VisionTransformer
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, qkv_bias=False)
    source = randomised(VisionTransformer(32, 8, embed_dim=48, depth=2, num_heads=4, num_classes=0, qkv_bias=False))
    target = ViTModel(config, add_pooling_layer=False).double().eval()
    options: Any
    for options in ({}, {"rename_map": "timm-vit_transformers"}):
        done, report = repair_state_dict(source.state_dict(), target, values=False, **options)
        assert report.exit_code == 0
        target.load_state_dict(done)
        with torch.no_grad():
            wanted = source.forward_features(IMAGES)
            assert (target(IMAGES).last_hidden_state - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert_equal(repair_state_dict(done, source, values=False, **options)[0], source.state_dict())


@pytest.mark.slow
@proves("dinov2_transformers")
@pytest.mark.parametrize("kind", ["", "swiglu", "registers"])
def test_dinov2(kind: str):
    """timm uses the authors' names, except for the fused layers and the registers."""
    from timm.layers import SwiGLUPacked
    from timm.models.vision_transformer import VisionTransformer
    from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    own: dict[str, Any] = {
        "": {},
        "swiglu": {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 256 / 48},
        "registers": {"reg_tokens": 4, "no_embed_class": True},
    }[kind]
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    target: Any = Dinov2Model(Dinov2Config(**sizes, use_swiglu_ffn=kind == "swiglu"))
    if kind == "registers":
        target = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**sizes))
    source = randomised(
        VisionTransformer(32, 8, embed_dim=48, depth=2, num_heads=4, num_classes=0, init_values=1, **own)
    )
    state = {"mask_token": torch.zeros(1, 48).double(), **source.state_dict()}
    if kind == "registers":  # here the authors add a position to the class token
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat([torch.zeros(1, 1, 48), state["pos_embed"]], 1)
    elif kind:
        names = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
        state = {re.sub(r"mlp\.fc\d", lambda found: names[found[0]], key): value for key, value in state.items()}
    done, report = repair_state_dict(state, target, values=False)
    assert report.exit_code == 0
    target.double().eval().load_state_dict(done)
    with torch.no_grad():
        wanted = source.forward_features(IMAGES)
        assert (target(IMAGES).last_hidden_state - wanted).abs().max() < 1e-9 * wanted.abs().max()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    back = fitting(shipped("dinov2_transformers"), {key: tuple(value.shape) for key, value in done.items()}, shapes)
    assert_equal(repair_state_dict(done, rename_map=back, values=False)[0], state)


@pytest.mark.slow
@proves("timm-vit_transformers-4")
def test_what_transformers_saves_has_the_names_of_its_version_4(tmp_path: Path):
    from safetensors.torch import load_file

    source, target = randomised(transformers_vit()), timm_vit().double().eval()
    source.save_pretrained(tmp_path)
    target.load_state_dict(moved(load_file(tmp_path / "model.safetensors"), "timm-vit_transformers-4"))
    assert (output(target, IMAGES) - output(source, IMAGES)).abs().max() < 1e-5


@pytest.mark.slow
@proves("open-clip_transformers")
def test_clip():
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    from transformers import CLIPConfig, CLIPModel

    vision = CLIPVisionCfg(layers=4, width=48, head_width=16, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=20, vocab_size=99, width=32, heads=2, layers=3)
    source: Any = randomised(CLIP(24, vision, text, quick_gelu=True))
    theirs = {
        "vision_config": {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
                          "image_size": 32, "patch_size": 8},
        "text_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
                        "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 98, "bos_token_id": 97},
    }  # fmt: skip
    target = CLIPModel(CLIPConfig(**theirs, projection_dim=24)).double().eval()
    target.load_state_dict(moved(source.state_dict(), "open-clip_transformers"))
    words = torch.randint(1, 90, (2, 20))
    words[:, -1] = 98
    with torch.no_grad():
        for wanted, found in (
            (source.encode_image(IMAGES), target.get_image_features(IMAGES)),
            (source.encode_text(words), target.get_text_features(words)),
        ):
            assert (getattr(found, "pooler_output", found) - wanted).abs().max() < 1e-9


@pytest.mark.slow
@proves("open-clip-text_transformers", "open-clip-text_transformers-4")
def test_the_text_tower_of_stable_diffusion_2():
    """The complete file names it ``cond_stage_model.model``, and diffusers omits the last layer."""
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    vision = CLIPVisionCfg(layers=1, width=48, head_width=16, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=20, vocab_size=99, width=32, heads=2, layers=3)
    source: Any = randomised(CLIP(24, vision, text))
    tower = {key: value for key, value in source.state_dict().items() if not key.startswith(("visual.", "logit_"))}
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "hidden_act": "gelu",
             "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 98, "bos_token_id": 97}  # fmt: skip
    projected: Any = CLIPTextModelWithProjection(CLIPTextConfig(**sizes, num_hidden_layers=3, projection_dim=24))
    projected.double().eval().load_state_dict(moved(tower, "open-clip-text_transformers-4"))
    words = torch.randint(1, 90, (2, 20))
    words[:, -1] = 98
    with torch.no_grad():
        assert (projected(words).text_embeds - source.encode_text(words)).abs().max() < 1e-9

    whole = {f"cond_stage_model.model.{key}": value for key, value in tower.items()}
    model: Any = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=2)).double().eval()
    done, report = repair_state_dict(whole, model, values=False, rename_layers=True)
    assert [finding.evidence["shipped"] for finding in report.fixed if "shipped" in finding.evidence] == [
        ["open-clip-text_transformers"]
    ]
    theirs = convert_open_clip_checkpoint(model, whole)
    assert_equal(
        {key: done[key] for key in model.state_dict()},
        {key: theirs[f"text_model.{key}"] for key in model.state_dict()},
    )


@pytest.mark.slow
@proves("torch-encoder_bert")
def test_an_encoder_of_torch_and_bert():
    from transformers import BertConfig, BertModel

    layer = nn.TransformerEncoderLayer(48, 4, 192, activation="gelu", batch_first=True, layer_norm_eps=1e-12)
    source = randomised(nn.TransformerEncoder(layer, 3))
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
    target = BertModel(BertConfig(**sizes)).double().eval().encoder
    target.load_state_dict(moved(source.state_dict(), "torch-encoder_bert"))
    inputs = torch.randn(2, 5, 48, dtype=torch.float64)
    with torch.no_grad():
        assert (source(inputs) - target(inputs)[0]).abs().max() < 1e-9


@pytest.mark.slow
@proves("ldm-vae_diffusers", "ldm-unet_diffusers", "sgm-unet_diffusers")
@pytest.mark.parametrize("name", ["ldm-vae_diffusers", "ldm-unet_diffusers", "sgm-unet_diffusers"])
def test_stable_diffusion(name: str, tmp_path: Path):
    """In reverse from diffusers' names; diffusers' own function has to restore them."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from diffusers.loaders import single_file_utils as theirs

    sizes: dict[str, Any] = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 2}
    if "vae" in name:
        blocks: dict[str, Any] = {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        }
        model: Any = AutoencoderKL(**blocks, **sizes)
        convert, prefix = theirs.convert_ldm_vae_checkpoint, ""
    elif "sgm" in name:  # SDXL
        blocks = {
            "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 2),
            "up_block_types": (*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"),
        }
        added: dict[str, Any] = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
        sizes |= {"block_out_channels": (8, 8, 16), "transformer_layers_per_block": (1, 1, 2)}
        sizes |= {"cross_attention_dim": 8, "attention_head_dim": 4, "use_linear_projection": True}
        model = UNet2DConditionModel(**blocks, **sizes, **added, projection_class_embeddings_input_dim=32)
        convert, prefix = theirs.convert_ldm_unet_checkpoint, "model.diffusion_model."
    else:
        model = UNet2DConditionModel(cross_attention_dim=8, attention_head_dim=4, sample_size=8, **sizes)
        convert, prefix = theirs.convert_ldm_unet_checkpoint, "model.diffusion_model."
    state = randomised(model).state_dict()
    original = moved(state, name)
    assert_equal(convert({prefix + key: value for key, value in original.items()}, dict(model.config)), state)
    assert_equal(moved(original, name), state)
    # A complete file has more than the model: nothing is applied unless diffusers itself says how.
    (front,) = WITHIN[name]
    whole = {front + key: value for key, value in original.items()} | {"cond_stage_model.w": torch.ones(3, 3)}
    torch.save(state, like := tmp_path / "like.pth")
    done, report = repair_state_dict(whole, like=like, values=False)
    assert report.exit_code == 1
    wanted: Any
    for wanted in ({"like": like, "rename_layers": True}, {"model": model}, {"like": like, "rename_map": name}):
        done, report = repair_state_dict(whole, values=False, **wanted)
        if "rename_layers" in wanted:
            found = [finding.evidence["shipped"] for finding in report.fixed if "shipped" in finding.evidence]
            assert found == [[name]]
        del done["cond_stage_model.w"]
        assert_equal(done, state)


@pytest.mark.slow
@proves("mmpretrain-swin_timm")
def test_swin_of_mmpretrain_has_the_patches_of_a_channel_next_to_each_other():
    """Its ``PatchMerging`` unfolds an image, while timm's concatenates four slices of it."""
    source = randomised(timm_swin())
    head = {key: value for key, value in source.state_dict().items() if key.startswith("head.")}
    original = moved(
        {key: source.state_dict()[key] for key in source.state_dict() if key not in head}, "mmpretrain-swin_timm"
    )
    image = torch.randn(2, 24, 4, 4, dtype=torch.float64)
    patches = nn.functional.unfold(image, 2, stride=2).transpose(1, 2)
    merged = {key.rpartition("downsample.")[2]: value for key, value in original.items() if "stages.0.down" in key}
    normed = nn.functional.layer_norm(patches, (96,), merged["norm.weight"], merged["norm.bias"])
    wanted = output(source.layers[1].downsample, image.permute(0, 2, 3, 1)).flatten(1, 2)
    assert torch.allclose(normed @ merged["reduction.weight"].T, wanted)
    for file in ({f"backbone.{key}": value for key, value in original.items()} | head, original | head):
        done, report = repair_state_dict(file, source, values=False)
        assert report.exit_code == 0
        assert_equal(done, source.state_dict())


@pytest.mark.slow
@proves("flux_diffusers", "hunyuanvideo_diffusers")
@pytest.mark.parametrize("name", ["flux_diffusers", "hunyuanvideo_diffusers"])
def test_diffusion_transformers(name: str):
    """Diffusers' own function, which supports only one width, gives the same; the halves of one layer are swapped."""
    from accelerate import init_empty_weights
    from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel
    from diffusers.loaders import single_file_utils as theirs

    with init_empty_weights():
        if name == "flux_diffusers":
            model: Any = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
            convert: Any = theirs.convert_flux_transformer_checkpoint_to_diffusers
        else:
            model = HunyuanVideoTransformer3DModel(num_layers=2, num_single_layers=2, num_refiner_layers=2)
            convert = theirs.convert_hunyuan_video_transformer_to_diffusers
    state = {key: torch.randn(len(value), *[2] * (value.ndim - 1)) for key, value in model.state_dict().items()}
    original = moved(state, name)
    assert_equal(convert(dict(original)), state)
    assert_equal(moved(original, name), state)
    half = len(state["norm_out.linear.bias"]) // 2
    assert torch.equal(original["final_layer.adaLN_modulation.1.bias"][:half], state["norm_out.linear.bias"][half:])


@pytest.mark.slow
@proves("wan_diffusers", "z-image_diffusers")
@pytest.mark.parametrize("name", ["wan_diffusers", "z-image_diffusers"])
def test_wan_and_z_image(name: str, tmp_path: Path):
    """Diffusers' own functions give the same, for the transformer and for the complete file."""
    import diffusers
    from diffusers.loaders import single_file_utils as theirs

    if name == "wan_diffusers":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 8, "num_layers": 2, "freq_dim": 8}
        images = {"image_dim": 8, "added_kv_proj_dim": 24, "text_dim": 8, "in_channels": 4, "out_channels": 4}
        model: Any = diffusers.WanTransformer3DModel(**sizes, **images)
        convert: Any = theirs.convert_wan_transformer_to_diffusers
    else:
        sizes = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 8}
        model = diffusers.ZImageTransformer2DModel(**sizes, axes_dims=[8, 4, 4], axes_lens=[16, 16, 16])
        convert = theirs.convert_z_image_transformer_checkpoint_to_diffusers
    state = randomised(model).state_dict()
    original = moved(state, name)
    assert original.keys() != state.keys()
    assert_equal(convert(dict(original)), state)
    assert_equal(moved(original, name), state)
    whole = {f"model.diffusion_model.{key}": value for key, value in original.items()}
    torch.save(state, tmp_path / "like.pth")
    done, _ = repair_state_dict(whole, like=tmp_path / "like.pth", values=False, rename_map=name)
    assert_equal(done, state)


@pytest.mark.slow
@proves("sd3-24_diffusers", "sd3-38_diffusers")
@pytest.mark.parametrize(("depth", "heads"), [(24, 24), (38, 38)])
def test_stable_diffusion_3(depth: int, heads: int):
    """Diffusers' own function makes the same: the halves of the last modulation of texts are exchanged, which shows in
    no name, so that there is a map for each depth."""
    from diffusers import SD3Transformer2DModel
    from diffusers.loaders import single_file_utils as theirs

    with torch.device("meta"):  # of which nothing is drawn
        double = {"dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm"} if depth == 24 else {}
        model: Any = SD3Transformer2DModel(
            num_layers=depth, num_attention_heads=heads, caption_projection_dim=64 * heads, **double
        )
    last = f"transformer_blocks.{depth - 1}.norm1_context.linear.weight"
    state = {
        key: torch.randn(
            value.shape if key in (last, "context_embedder.weight") else (len(value), *[2] * (value.ndim - 1))
        )
        for key, value in model.state_dict().items()
    }
    original = moved(state, f"sd3-{depth}_diffusers")
    assert_equal(theirs.convert_sd3_transformer_checkpoint_to_diffusers(dict(original)), state)
    assert_equal(moved(original, f"sd3-{depth}_diffusers"), state)
    for one, other in ((state, original), (original, state)):  # and the map of the other depth says nothing
        found = sorted(name for name, _ in aliases({key: value.shape for key, value in one.items()}))
        assert found == sorted(key for key in other if not key.startswith("context_embedder."))


@pytest.mark.slow
@proves("nanogpt_transformers")
def test_nanogpt():
    """nanoGPT has GPT-2's names, with ``nn.Linear`` instead of ``Conv1D``: square matrices are transposed too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    target = randomised(GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=99, n_positions=32)))
    state = target.state_dict()
    linear = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    nano = {key: value.t() if key.endswith(linear) else value for key, value in state.items()}
    done, report = repair_state_dict(nano, target, values=False)
    assert report.exit_code == 0
    assert_equal(done, state)


def rotated(x: torch.Tensor, angle: float) -> torch.Tensor:
    """Meta's form: neighbours make a complex number."""
    pairs = torch.view_as_complex(x.reshape(-1, 2))
    turns = torch.polar(torch.ones(len(pairs)).double(), angle / torch.arange(1, len(pairs) + 1).double())
    return torch.view_as_real(pairs * turns).reshape(-1)


def rotated_by_halves(x: torch.Tensor, angle: float) -> torch.Tensor:
    """The form of transformers: the halves of a head are the two parts."""
    half = len(x) // 2
    turns = angle / torch.arange(1, half + 1).double()
    cos, sin = torch.cat([turns.cos()] * 2), torch.cat([turns.sin()] * 2)
    return x * cos + torch.cat([-x[half:], x[:half]]) * sin


def llama(size: int, heads: int = 2, width: int = 256) -> State:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "wq": (heads * size, width),
        "wk": (size, width),
        "wv": (size, width),
        "wo": (width, heads * size),
    }
    layer = {f"attention.{name}.weight": shape for name, shape in shapes.items()}
    layer |= {"feed_forward.w1.weight": (96, width), "feed_forward.w3.weight": (96, width)}
    layer |= {"feed_forward.w2.weight": (width, 96), "attention_norm.weight": (width,), "ffn_norm.weight": (width,)}
    whole = {"tok_embeddings.weight": (99, width), "norm.weight": (width,), "output.weight": (99, width)}
    whole |= {f"layers.{at}.{key}": shape for at in range(2) for key, shape in layer.items()}
    return {key: torch.randn(shape, dtype=torch.float64) for key, shape in whole.items()}


def torchtune(state: State) -> State:
    """The same with the names of torchtune, which rotates as Meta does."""
    names = {"attention_norm.weight": "sa_norm.scale", "ffn_norm.weight": "mlp_norm.scale", "norm.weight": "norm.scale"}
    names |= {"attention.wo": "attn.output_proj", "feed_forward": "mlp"}
    names |= {f"attention.w{kind}": f"attn.{kind}_proj" for kind in "qkv"}
    for ours, theirs in names.items():
        state = {key.replace(ours, theirs): value for key, value in state.items()}
    return state


@proves("meta-llama-64_transformers", "meta-llama-128_transformers")
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
def test_llama_permutes_the_rows_of_query_and_key(size: int):
    state = llama(size)
    done = moved(state, f"meta-llama-{size}_transformers")
    x = torch.randn(256, dtype=torch.float64)
    for name, theirs in (("wq", "q_proj"), ("wk", "k_proj")):
        ours = (state[f"layers.1.attention.{name}.weight"] @ x)[-size:]
        found = (done[f"model.layers.1.self_attn.{theirs}.weight"] @ x)[-size:]
        pairs = rotated(ours, 0.7).reshape(-1, 2)
        assert torch.allclose(rotated_by_halves(found, 0.7), torch.cat([pairs[:, 0], pairs[:, 1]]))
    assert torch.equal(done["model.layers.1.mlp.up_proj.weight"], state["layers.1.feed_forward.w3.weight"])


@proves("torchtune-64_transformers", "torchtune-128_transformers")
@pytest.mark.parametrize("size", [64, 80, 128])
def test_torchtune_has_the_rows_of_metas_llama(size: int):
    state = llama(size)
    done = moved(torchtune(state), f"torchtune-{size}_transformers")
    assert_equal(done, moved(state, f"meta-llama-{size}_transformers"))


@pytest.mark.parametrize("is_back", [False, True], ids=["forth", "back"])
def test_unexplained_rows_of_torchtune_are_ambiguous(tmp_path: Path, is_back: bool):
    """Its Qwen2 has biases, and does not rotate as its Llama does."""
    state = torchtune(llama(64))
    target = moved(state, "torchtune-64_transformers")
    for side in (state, target):
        side |= {key[:-6] + "bias": value[:, 0] for key, value in side.items() if key.endswith(("q_proj.weight",))}
    source, target = (target, state) if is_back else (state, target)
    torch.save({key: torch.zeros_like(value) for key, value in target.items()}, tmp_path / "like.pth")
    done, report = repair_state_dict(source, like=tmp_path / "like.pth", rename_layers=True, values=False)
    assert report.exit_code == 1
    assert {key for key in target if "q_proj" in key or "k_proj" in key}.isdisjoint(done)
    assert {key for key in target if "v_proj" in key} <= done.keys()
    (left,) = (finding for finding in report.remaining if finding.code == "KEY106")
    assert "order the rows of a head differently" in left.message


def test_maps_that_depend_on_the_size_of_a_head(tmp_path: Path):
    state = llama(128)
    target = moved(state, "meta-llama-128_transformers")
    torch.save({key: torch.zeros_like(value) for key, value in target.items()}, tmp_path / "like.pth")
    done, report = repair_state_dict({**state, "rope.freqs": torch.ones(64)}, like=tmp_path / "like.pth", values=False)
    assert report.exit_code == 0
    assert_equal(done, target)
    done, report = repair_state_dict(state, like=tmp_path / "like.pth", rename_layers=True, values=False)
    assert report.exit_code == 1
    assert not any("q_proj" in key or "k_proj" in key for key in done)
    options = [option for finding in report.findings for remedy in finding.remedies for option in remedy.options]
    maps = [value for name, value in options if name == "rename_map"]
    assert maps == ["meta-llama-128_transformers", "meta-llama-64_transformers"]
    done, report = repair_state_dict(state, like=tmp_path / "like.pth", rename_map=str(maps[0]), values=False)
    assert report.exit_code == 0
    assert_equal(done, target)


def remedies(report: ckptfix.Report) -> dict[str, object]:
    options = [option for finding in report.findings for remedy in finding.remedies for option in remedy.options]
    return dict(options)


@pytest.mark.parametrize("is_back", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("params.json", {"dim": 256, "n_heads": 2, "head_dim": 80}),
        ("params.json", {"dim": 160, "n_heads": 2}),
        ("config.json", {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 80}),
    ],
    ids=["head_dim", "n_heads", "transformers"],
)
def test_a_configuration_says_the_size_of_a_head(tmp_path: Path, name: str, sizes: dict[str, int], is_back: bool):
    state = llama(80)
    sides = [state, moved(state, "meta-llama-80_transformers")]
    ours, theirs = reversed(sides) if is_back else sides
    for folder, side in (("ours", ours), ("theirs", {key: torch.zeros_like(value) for key, value in theirs.items()})):
        (tmp_path / folder).mkdir()
        torch.save(side, tmp_path / folder / "model.pth")
    files = (tmp_path / "ours" / "model.pth", tmp_path / "theirs" / "model.pth")
    unknown = ckptfix.check(files[0], like=files[1], values=False)
    assert str(remedies(unknown)["rename_map"]) == "meta-llama-N_transformers"
    for folder in ("ours", "theirs"):
        (tmp_path / folder / name).write_text(json.dumps(sizes))
        done = ckptfix.repair(files[0], like=files[1], output=tmp_path / f"{folder}.pth", values=False)
        assert done.report.exit_code == 0
        assert_equal(torch.load(tmp_path / f"{folder}.pth", weights_only=True), theirs)
        (tmp_path / folder / name).unlink()


def test_two_sizes_of_a_head_are_a_contradiction(tmp_path: Path):
    state = llama(128)
    torch.save(moved(state, "meta-llama-128_transformers"), tmp_path / "like.pth")
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    done, report = repair_state_dict({**state, "rope.freqs": torch.ones(64)}, like=tmp_path / "like.pth", values=False)
    assert report.exit_code == 1
    assert not any("q_proj" in key or "k_proj" in key for key in done)


@pytest.mark.parametrize(
    "name", ["meta-llama-81_transformers", "meta-llama-N_transformers", "meta-llama-HEAD_transformers"]
)
def test_there_is_no_map_for_such_a_head(name: str):
    with pytest.raises(ckptfix.UsageError, match="did you mean the map"):
        ckptfix.check({"a": torch.ones(1)}, rename_map=name)


@pytest.mark.slow
def test_the_target_says_the_size_of_a_llamas_head(tmp_path: Path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    for size in (64, 128):
        config = MistralConfig(**sizes, head_dim=size, intermediate_size=96, vocab_size=99)
        state, model = llama(size), MistralForCausalLM(config).double()
        done, report = repair_state_dict(state, model, values=False)
        assert report.exit_code == 0
        assert_equal(done, moved(state, f"meta-llama-{size}_transformers"))
        torch.save(state, tmp_path / "meta.pth")
        assert ckptfix.infer_map(tmp_path / "meta.pth", model).name == f"meta-llama-{size}_transformers"


class Dense(nn.Module):
    """A dense block of ESRGAN as in both of its releases; ``wrap`` places a convolution."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        for at in range(1, 6):
            self.add_module(f"conv{at}", wrap(nn.Conv2d(4 + (at - 1) * 2, 2 if at < 5 else 4, 3, padding=1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for at in range(1, 5):
            seen.append(nn.functional.leaky_relu(self.get_submodule(f"conv{at}")(torch.cat(seen, 1)), 0.2))
        out: torch.Tensor = self.get_submodule("conv5")(torch.cat(seen, 1)) * 0.2 + x
        return out


class Residual(nn.Module):
    def __init__(self, name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        for at in range(1, 4):
            self.add_module(f"{name}{at}", Dense(wrap))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for block in self.children():
            out = block(out)
        return out * 0.2 + x


class Shortcut(nn.Module):
    def __init__(self, sub: nn.Module) -> None:
        super().__init__()
        self.sub = sub

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.sub(x)
        return out


def conv(inputs: int = 4, outputs: int = 4) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def old_esrgan() -> nn.Module:
    body = nn.Sequential(*(Residual("RDB", nn.Sequential) for _ in range(2)), conv())
    up = [module for _ in range(2) for module in (nn.Upsample(scale_factor=2), conv(), nn.LeakyReLU(0.2))]
    parts = [conv(3), Shortcut(body), *up, conv(), nn.LeakyReLU(0.2), conv(4, 3)]
    return nn.ModuleDict({"model": nn.Sequential(*parts)})


class Esrgan(nn.Module):
    def __init__(self, blocks: str, block: str, trunk: str, ends: tuple[str, ...]) -> None:
        super().__init__()
        self.order = (blocks, trunk, *ends)
        self.conv_first = conv(3)
        self.add_module(blocks, nn.Sequential(*(Residual(block, lambda module: module) for _ in range(2))))
        self.add_module(trunk, conv())
        for name in ends:
            self.add_module(name, conv(4, 3 if name == "conv_last" else 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body, trunk, *ups, hr, last = (self.get_submodule(name) for name in self.order)
        x = self.conv_first(x)
        x = x + trunk(body(x))
        for up in ups:
            x = nn.functional.leaky_relu(up(nn.functional.interpolate(x, scale_factor=2)), 0.2)
        out: torch.Tensor = last(nn.functional.leaky_relu(hr(x), 0.2))
        return out


@proves("esrgan-old_esrgan", "esrgan-old_basicsr")
@pytest.mark.parametrize(
    ("name", "names_of_new"),
    [
        ("esrgan-old_esrgan", ("RRDB_trunk", "RDB", "trunk_conv", ("upconv1", "upconv2", "HRconv", "conv_last"))),
        ("esrgan-old_basicsr", ("body", "rdb", "conv_body", ("conv_up1", "conv_up2", "conv_hr", "conv_last"))),
    ],
)
def test_esrgan(name: str, names_of_new: Any):
    source, target = randomised(old_esrgan()), Esrgan(*names_of_new).double()
    done, report = repair_state_dict(source.state_dict(), target, values=False)
    assert report.exit_code == 0
    assert_equal(done, moved(source.state_dict(), name))
    target.load_state_dict(done)
    small = IMAGES[:, :, :4, :4]
    assert (output(source["model"], small) - output(target, small)).abs().max() < 1e-9


@proves("dinov2-chunked_dinov2", "timm-swin-0.6_timm")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("dinov2-chunked_dinov2", "blocks.1.3.attn.qkv.weight", "blocks.3.attn.qkv.weight"),
        ("timm-swin-0.6_timm", "layers.0.downsample.norm.weight", "layers.1.downsample.norm.weight"),
    ],
)
def test_the_names_of_two_releases(name: str, old: str, new: str):
    """As dinov2's ``chunk_blocks`` and timm's ``checkpoint_filter_fn`` have it."""
    others = {"blocks.0.0.norm1.weight": "blocks.0.norm1.weight"} if "dino" in name else {
        "layers.0.downsample.reduction.weight": "layers.1.downsample.reduction.weight",
        "layers.0.downsample.norm.bias": "layers.1.downsample.norm.bias",
        "head.weight": "head.fc.weight", "head.bias": "head.fc.bias",
    }  # fmt: skip
    state = {key: torch.randn(3) for key in (old, *others)}
    done = moved(state, name)
    assert {key: done[to].tolist() for key, to in {old: new, **others}.items()} == {
        k: v.tolist() for k, v in state.items()
    }
    back = look_up(dict.fromkeys(done, (3,)), dict.fromkeys(state, (3,)))
    assert back is not None
    assert back.matches[old].parts[0].source == new
    others_too = {f"model.backbone.{key}": (3,) for key in state} | {"head.last_layer.weight": (3,)}
    below = look_up(others_too, dict.fromkeys(done, (3,)))
    assert below is not None
    assert (below.matches[new].parts[0].source, below.unused) == (f"model.backbone.{old}", ["head.last_layer.weight"])


@pytest.mark.slow
@proves("openai-whisper_transformers")
def test_whisper_has_the_names_of_openai():
    """The names are those of ``whisper/model.py``; with it, the outputs of both were equal to 5e-7."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 9, "num_mel_bins": 8,
             "max_source_positions": 20, "max_target_positions": 16, "pad_token_id": 0}  # fmt: skip
    target = WhisperForConditionalGeneration(WhisperConfig(**sizes))
    state = {key: value for key, value in target.state_dict().items() if key != "proj_out.weight"}
    original = moved(state, "openai-whisper_transformers")
    attention = {"query.weight", "query.bias", "key.weight", "value.weight", "value.bias", "out.weight", "out.bias"}
    ends = {"mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias", "attn_ln.weight", "attn_ln.bias",
            "mlp_ln.weight", "mlp_ln.bias", *(f"attn.{each}" for each in attention)}  # fmt: skip
    cross = {"cross_attn_ln.weight", "cross_attn_ln.bias", *(f"cross_attn.{each}" for each in attention)}
    wanted = {f"encoder.blocks.{at}.{each}" for at in range(2) for each in ends}
    wanted |= {f"decoder.blocks.{at}.{each}" for at in range(2) for each in ends | cross}
    wanted |= {f"encoder.{name}.{end}" for name in ("conv1", "conv2", "ln_post") for end in ("weight", "bias")}
    wanted |= {"encoder.positional_embedding", "decoder.positional_embedding", "decoder.token_embedding.weight"}
    assert original.keys() == wanted | {"decoder.ln.weight", "decoder.ln.bias"}
    assert torch.equal(
        original["decoder.blocks.1.cross_attn.key.weight"], state["model.decoder.layers.1.encoder_attn.k_proj.weight"]
    )
    done, report = repair_state_dict(original, target, values=False)
    assert report.exit_code == 0
    assert torch.equal(done["proj_out.weight"], state["model.decoder.embed_tokens.weight"])


class ByExpert(nn.Module):
    """The experts of gpt-oss with a ``nn.Linear`` for each, as Unsloth quantises them."""

    def __init__(self, experts: Any, router: Any) -> None:
        super().__init__()
        self.gate, self.top = experts._apply_gate, router.top_k
        sizes = [(experts.hidden_size, 2 * experts.intermediate_size), (experts.intermediate_size, experts.hidden_size)]
        ups, downs = ([nn.Linear(*size) for _ in range(experts.num_experts)] for size in sizes)
        self.experts = nn.ModuleDict({"gate_up_projs": nn.ModuleList(ups), "down_projs": nn.ModuleList(downs)})
        self.router = nn.ModuleDict({"linear": nn.Linear(experts.hidden_size, experts.num_experts)})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        best, chosen = self.router["linear"](x).topk(self.top, dim=-1)
        shares = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(-1, chosen, best.softmax(-1))
        experts: Any = zip(*self.experts.values(), strict=True)
        made = torch.stack([down(self.gate(up(x))) for up, down in experts], -2)
        return (made * shares[..., None]).sum(-2), None


@pytest.mark.slow
@proves("unsloth-gpt-oss_transformers")
def test_gpt_oss_with_a_layer_for_each_expert():
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 50, "pad_token_id": 0, "layer_types": ["full_attention"] * 2}  # fmt: skip
    source, target = (GptOssForCausalLM(GptOssConfig(**sizes)) for _ in range(2))
    target.set_experts_implementation("eager")  # grouped products are not in float64
    for layer in source.model.layers:
        layer.mlp = ByExpert(layer.mlp.experts, layer.mlp.router)
    randomised(source)
    done, report = repair_state_dict(source.state_dict(), target.double().eval(), values=False)
    assert report.exit_code == 0
    target.load_state_dict(done)
    words = torch.arange(1, 40).reshape(1, -1)
    assert (output(target, words) - output(source, words)).abs().max() < 1e-9 * output(source, words).abs().max()
    assert_equal(moved(done, "unsloth-gpt-oss_transformers"), source.state_dict())


def test_each_map_is_proved():
    assert set(names()) == PROVED


def test_a_name_in_a_configuration_file_is_found_though_it_became_a_path(tmp_path: Path):
    state = {"blocks.0.1.weight": torch.ones(6, 2)}
    done, _ = repair_state_dict(state, rename_map=tmp_path / "dinov2-chunked_dinov2", values=False)
    assert list(done) == ["blocks.1.weight"]


def test_a_shipped_map_is_found_by_its_name():
    with pytest.raises(ckptfix.UsageError, match="did you mean the map timm-vit_transformers"):
        ckptfix.check({"a": torch.ones(1)}, rename_map="timm-vit-transformers")


@pytest.mark.parametrize(
    "states", [({}, {}), ({"a.b.c": (3,)}, {"b.d": (3,)}), ({"norm.weight": (3,)}, {"vit.layernorm.weight": (3,)})]
)
def test_a_part_of_a_model_is_not_a_reason_for_a_shipped_map(states):
    assert look_up(*states) is None
