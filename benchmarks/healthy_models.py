"""Models without defects, built from tables of names and of sizes that are small enough for a laptop.

Needs timm, transformers, peft and diffusers. Nothing is downloaded: every model has random weights.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TIMM = """
resnet18 resnet50d resnetv2_50 resnet26t seresnet18 skresnet18 res2net50_14w_8s densenet121 vgg11_bn inception_v3
xception41 dla34 hrnet_w18_small regnety_002 repvgg_a0 mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small
efficientnet_b0 tf_efficientnet_lite0 ghostnet_050 mnasnet_050 lcnet_050 tinynet_e mobileone_s0 ese_vovnet19b_dw
selecsls42b convnext_atto convnextv2_atto nfnet_l0 nf_resnet26 vit_tiny_patch16_224 deit3_small_patch16_224
beitv2_base_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
maxvit_nano_rw_256 coatnet_nano_rw_224 poolformer_s12 mixer_s32_224 gmlp_s16_224 resmlp_12_224 edgenext_xx_small
efficientformer_l1 levit_128s pvt_v2_b0 twins_svt_small davit_tiny fastvit_t8 crossvit_tiny_240 convit_tiny
visformer_tiny sequencer2d_s volo_d1_224 focalnet_tiny_srf hiera_tiny_224 eva02_tiny_patch14_224 tiny_vit_5m_224
vit_relpos_small_patch16_224 mambaout_femto starnet_s1 mobilevit_xxs botnet26t_256 lambda_resnet26t halonet26t
""".split()

TRANSFORMERS = """
bert roberta distilbert albert electra deberta-v2 mpnet xlnet fnet big_bird longformer canine esm modernbert
gpt2 gpt_neo gptj gpt_neox opt bloom llama mistral mixtral qwen2 qwen3 gemma gemma2 phi phi3 falcon mpt stablelm olmo
mamba mamba2 rwkv t5 mt5 bart pegasus marian blenderbot prophetnet m2m_100 switch_transformers
vit deit beit swin swinv2 convnext convnextv2 dinov2 segformer mobilevit resnet regnet vit_mae levit cvt poolformer
efficientnet focalnet pvt timesformer videomae dpt glpn
clip siglip blip chinese_clip groupvit layoutlm layoutlmv3 lxmert visual_bert
whisper wav2vec2 hubert wavlm unispeech data2vec-audio audio-spectrogram-transformer clap speecht5 sew vits encodec
univnet deformable_detr mask2former sam oneformer decision_transformer time_series_transformer informer autoformer
patchtst perceiver
""".split()

SMALL = {
    "vocab_size": 1000,
    "pad_token_id": 0,
    "hidden_size": 128,
    "d_model": 128,
    "n_embd": 128,
    "dim": 128,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts": 4,
}
"""Small sizes for configurations of transformers, used if the field exists and the model can still be built."""


LARGEST = 250_000_000
"""Parameters from which on a model has to be made smaller."""

WITHOUT = {
    "gpt_neo": ("num_layers", "num_hidden_layers"),
    "falcon": ("head_dim",),
    "mamba2": ("head_dim", "num_heads", "hidden_size"),
    "prophetnet": ("num_hidden_layers", "hidden_size", "num_attention_heads"),
}
"""Fields that a configuration rejects."""


@dataclass(frozen=True)
class Healthy:
    """A model: its family, its name, and functions for it and its inputs, which are None if it is not trained."""

    family: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], dict[str, Any]] | None = None


def healthy_models() -> Iterator[Healthy]:
    """Yield every healthy model of the tables."""
    mend_torchvision()
    for name in TIMM:
        yield Healthy("timm", name, lambda name=name: timm_model(name), image)
    for name in TRANSFORMERS:
        yield Healthy("transformers", name, lambda name=name: transformers_model(name), tokens)
    for name, build in {**_ADAPTERS, **_DIFFUSERS, **_QUANTISED}.items():
        yield Healthy(name.partition("-")[0], name, build)


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def image(model: nn.Module) -> dict[str, Any]:
    size = model.pretrained_cfg["input_size"]  # type: ignore[index,union-attr]
    for side in (96, size[-1]):
        try:
            with torch.no_grad():
                model(image := torch.randn(2, 3, side, side))
        except (RuntimeError, AssertionError, ValueError):  # the model has a fixed image size
            continue
        return {"x": image}
    raise ValueError("it takes no image of its own size")


def transformers_model(name: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModel

    kind = CONFIG_MAPPING[name]
    layers = {key: value for key, value in SMALL.items() if "layer" in key or key == "vocab_size"}
    for small, is_nested in ((SMALL, False), (layers, False), ({}, False), (SMALL, True), (layers, True)):
        try:
            config = kind(**_fields(kind, small, WITHOUT.get(name, ()), is_nested))
            if _numel(config) < LARGEST:
                torch.manual_seed(0)
                return AutoModel.from_config(config)
        except Exception:  # noqa: BLE001 - each model rejects a size in its own way; the next one is tried
            continue
    raise ValueError(f"{name} cannot be built small enough")


def _fields(kind: Any, small: dict[str, Any], without: tuple[str, ...], is_nested: bool) -> dict[str, Any]:
    """Return the fields of a configuration to make small, with ``is_nested`` also those of the model's parts."""
    default = kind()
    fields = {key: value for key, value in small.items() if hasattr(default, key) and key not in without}
    for part in kind.sub_configs if is_nested else ():
        config = getattr(default, part, None)
        if config is not None:
            fields[part] = {**config.to_dict(), **_fields(type(config), small, (), True)}
    return fields


def _numel(config: Any) -> int:
    from transformers import AutoModel

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())


def tokens(model: nn.Module) -> dict[str, Any]:
    names = type(model).forward.__code__.co_varnames
    found: dict[str, Any] = {}
    if "pixel_values" in names:
        size = getattr(model.config, "image_size", 224)
        size = size if isinstance(size, int) else 224
        found["pixel_values"] = torch.randn(2, 3, size, size)
    if "input_ids" in names:
        found["input_ids"] = torch.randint(1, 900, (2, 16))
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(1, 900, (2, 16))
    if "input_values" in names and not found:
        found["input_values"] = torch.randn(2, 16000)
    return found


def _adapter(kind: str, name: str = "gpt2") -> nn.Module:
    import peft

    base = transformers_model(name)
    targets = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj"]}[name]
    options = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=name == "gpt2"),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True),
        "rslora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_rslora=True),
        "adalora": lambda: peft.AdaLoraConfig(r=4, target_modules=targets, total_step=10),
        "loha": lambda: peft.LoHaConfig(r=4, target_modules=targets),
        "lokr": lambda: peft.LoKrConfig(r=4, target_modules=targets),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=[]),
        "oft": lambda: peft.OFTConfig(target_modules=targets, oft_block_size=8, r=0),
        "vera": lambda: peft.VeraConfig(r=4, target_modules=targets),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=8, task_type="FEATURE_EXTRACTION"),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=8, task_type="FEATURE_EXTRACTION"),
    }[kind]()
    return peft.get_peft_model(base, options)


class _AdapterOnly(nn.Module):
    """What peft saves: the adapter without its base model."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        import peft

        state = peft.get_peft_model_state_dict(_adapter(kind, name))
        self.saved = {key: value.detach().clone() for key, value in state.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override] # a plain dict
        return dict(self.saved)


_ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"peft-{kind}-llama": lambda kind=kind: _adapter(kind, "llama")
        for kind in ("lora", "dora", "rslora", "adalora", "loha", "lokr", "ia3", "oft", "vera", "prefix", "prompt")
    },
    "peft-lora-gpt2": lambda: _adapter("lora", "gpt2"),
    **{
        f"peft-saved-{kind}": lambda kind=kind: _AdapterOnly(kind, "llama")
        for kind in ("lora", "dora", "adalora", "loha", "lokr", "ia3", "vera")
    },
}


def _unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=32, cross_attention_dim=32, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def diffuser(name: str, **options: Any) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**options)
    return model


def _controlnet() -> nn.Module:
    import diffusers

    return diffusers.ControlNetModel.from_unet(_unet(), conditioning_embedding_out_channels=(16, 32))


_DIFFUSERS: dict[str, Callable[[], nn.Module]] = {
    "diffusers-unet": _unet,
    "diffusers-controlnet": _controlnet,
    "diffusers-vae": lambda: diffuser("AutoencoderKL", block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    "diffusers-dit": lambda: diffuser("DiTTransformer2DModel", num_layers=2, attention_head_dim=16,
        num_attention_heads=4),
    "diffusers-pixart": lambda: diffuser("PixArtTransformer2DModel", num_layers=2, attention_head_dim=16,
        num_attention_heads=4, cross_attention_dim=64, caption_channels=32),
    "diffusers-flux": lambda: diffuser("FluxTransformer2DModel", num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
        in_channels=16, axes_dims_rope=(4, 4, 8)),
    "diffusers-sd3": lambda: diffuser("SD3Transformer2DModel", num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64),
    "diffusers-sd3-controlnet": lambda: diffuser("SD3ControlNetModel", num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64),
    "diffusers-motion-adapter": lambda: diffuser("MotionAdapter", block_out_channels=(32, 64),
        motion_layers_per_block=1, motion_norm_num_groups=8, motion_num_attention_heads=4),
    "diffusers-t2i-adapter": lambda: diffuser("T2IAdapter", channels=[32, 64], num_res_blocks=1),
    "diffusers-unet1d": lambda: diffuser("UNet1DModel"),
}  # fmt: skip


def _small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 64), nn.Linear(64, 10)
    )


def _dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(_small_net(), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call] # untyped


def _observed() -> nn.Module:
    model = nn.Sequential(torch.ao.quantization.QuantStub(), *_small_net(), torch.ao.quantization.DeQuantStub())
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment] # untyped
    return torch.ao.quantization.prepare_qat(model.train())  # type: ignore[no-untyped-call] # untyped


_QUANTISED: dict[str, Callable[[], nn.Module]] = {
    "quantised-dynamic": _dynamic,
    "quantised-qat-fresh": _observed,
}


def mend_torchvision() -> None:
    """Define the operators that a torchvision built for another torch lacks, so that it imports; none is called."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(20):
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            name = re.search(r"torchvision::(\w+)", str(error))
            if name is None:
                raise
            library.define(f"{name[1]}(Tensor a) -> Tensor")
            _kept.append(library)
            for module in [module for module in sys.modules if module.startswith("torchvision")]:
                del sys.modules[module]


_kept: list[torch.library.Library] = []
warnings.simplefilter("ignore")
