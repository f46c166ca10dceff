"""Healthy models that no threshold was chosen on, with other architectures than ``healthy_models``.

They show how the rules do on models that they were not made for. A false alarm found here is fixed in the rule and
noted in judgement.md; the model stays in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.healthy_models import Healthy, diffuser, image, mend_torchvision, timm_model, tokens, transformers_model

TIMM = """
coat_lite_tiny convmixer_768_32 cpubone_nano csatv2 darknet17 cs3darknet_s cspnext_tiny dpn48b efficientformerv2_s0
efficientvim_m1 efficientvit_b0 efficientvit_m0 fasternet_t0 gcvit_xxtiny hardcorenas_a hgnetv2_b0 sam2_hiera_tiny
iformer_t inception_next_atto inception_v4 lcnetv2_small lowformer_b0 mvitv2_tiny nest_tiny pit_ti_224 rdnet_tiny
repghostnet_050 repvit_m0_9 resnest14d rexnet_100 legacy_seresnet18 shvit_s1 swiftformer_xs swinv2_cr_tiny_224
tnt_s_patch16_224 tresnet_m vit_tiny_r_s16_p8_224 xception vitamin_small_224 nextvit_small mixnet_s fbnetc_100
mobilevitv2_050 caformer_s18 convformer_s18 ese_vovnet39b_evos resnetv2_50d_gn ghostnetv3_050 mobilenetv5_300m
test_nfnet regnetx_002 eca_halonext26ts
""".split()

TRANSFORMERS = """
align altclip apertus arcee bamba beam bert-generation bigbird_pegasus biogpt bit bitnet blenderbot-small bridgetower
bros camembert clipseg clvp codegen cohere cohere2 conditional_detr convbert cpmant ctrl dab-detr dac data2vec-text
data2vec-vision dbrx deberta deepseek_v2 deepseek_v3 detr dinat dinov2_with_registers dinov3_vit dinov3_convnext
donut-swin dpr ernie exaone4 falcon_mamba fastspeech2_conformer flaubert flava fsmt funnel gemma3_text git glm4
gpt_bigcode gpt_oss granite granitemoe hiera ibert idefics3 ijepa imagegpt jamba jetmoe kosmos-2 led lfm2 lilt
llama4_text llava longt5 luke lw_detr markuplm maskformer mbart megatron-bert mgp-str mimi minimax mllama mobilebert
mobilenet_v1 mobilenet_v2 mobilevitv2 moonshine mra musicgen mvp nemotron nllb-moe nystromformer olmo2 olmoe openai-gpt
owlvit owlv2 paligemma patchtsmixer pegasus_x persimmon phimoe pixtral plbart pop2piano pvt_v2 qwen2_audio qwen2_moe
qwen2_vl qwen3_moe qwen3_next recurrent_gemma reformer rembert roformer rt_detr sam2 seamless_m4t seggpt sew-d siglip2
smollm3 speech_to_text splinter squeezebert starcoder2 superpoint swiftformer swin2sr table-transformer tapas timesfm
tvp udop umt5 unispeech-sat vilt vit_msn vitdet vivit vitpose wav2vec2-bert wav2vec2-conformer xclip xglm xlm
xlm-roberta xlstm xmod yolos yoso zamba zamba2 zoedepth
""".split()


def held_out_models() -> Iterator[Healthy]:
    """Yield every model of the tables."""
    mend_torchvision()
    for name in TIMM:
        yield Healthy("timm", name, lambda name=name: timm_model(name), image)
    for name in TRANSFORMERS:
        yield Healthy("transformers", name, lambda name=name: transformers_model(name), tokens)
    for kind in _METHODS:
        yield Healthy("peft", f"peft-{kind}-opt", lambda kind=kind: _adapted(kind))
        yield Healthy("peft", f"peft-saved-{kind}", lambda kind=kind: _Saved(_adapted(kind)))
    for name, (kind, options) in _DIFFUSERS.items():
        yield Healthy("diffusers", name, lambda kind=kind, options=options: diffuser(kind, **options))
    for name, build in _PLAIN.items():
        yield Healthy("torch", name, build, _plain_inputs(name))


_METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 8, "init_lora_weights": "gaussian"},
    "LoraConfig-pissa": {"r": 8, "init_lora_weights": "pissa"},
    "LoraConfig-olora": {"r": 8, "init_lora_weights": "olora"},
    "LoraConfig-bias": {"r": 8, "lora_bias": True, "modules_to_save": ["fc1"]},
    "IA3Config": {"target_modules": ["k_proj", "fc2"], "feedforward_modules": ["fc2"]},
    "BOFTConfig": {"boft_block_size": 4},
    "HRAConfig": {"r": 8},
    "FourierFTConfig": {"n_frequency": 50},
    "LNTuningConfig": {"target_modules": None},
    "VBLoRAConfig": {"r": 4, "num_vectors": 64, "vector_length": 32, "topk": 2},
    "MissConfig": {"r": 8},
    "RandLoraConfig": {"r": 8},
    "RoadConfig": {},
    "ShiraConfig": {"r": 8},
    "DeloraConfig": {"r": 8},
    "GraloraConfig": {"r": 8},
    "WaveFTConfig": {"n_frequency": 50},
    "PromptEncoderConfig": {"num_virtual_tokens": 8, "task_type": "CAUSAL_LM", "encoder_hidden_size": 64},
    "TrainableTokensConfig": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
    "OSFConfig": {},
}
"""Methods of peft and their options, for a base model that the other table does not use."""


def _adapted(kind: str) -> nn.Module:
    import peft

    options = {"target_modules": ["q_proj", "v_proj"], **_METHODS[kind]}
    if kind in ("LNTuningConfig", "PromptEncoderConfig"):
        del options["target_modules"]
    if kind == "LNTuningConfig":
        options = {"target_modules": ["self_attn_layer_norm", "final_layer_norm"]}
    base = transformers_model("opt")
    return peft.get_peft_model(base, getattr(peft, kind.partition("-")[0])(**options))


class _Saved(nn.Module):
    """What peft saves: the adapter without its base model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        import peft

        self.saved = {key: value.detach().clone() for key, value in peft.get_peft_model_state_dict(model).items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override] # a plain dict
        return dict(self.saved)


_SMALL: dict[str, Any] = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}

_DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet2d": ("UNet2DModel", {"block_out_channels": (32, 64, 64, 64), "norm_num_groups": 8}),
    "unet2d-class": ("UNet2DModel", {"block_out_channels": (32, 64, 64, 64), "num_class_embeds": 10}),
    "unet3d": ("UNet3DConditionModel", {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32}),
    "unet-motion": ("UNetMotionModel", {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32}),
    "unet-spatio-temporal": (
        "UNetSpatioTemporalConditionModel",
        {"block_out_channels": (32, 64, 64, 64), "num_attention_heads": (2, 4, 4, 4), "cross_attention_dim": 32},
    ),
    "vq": ("VQModel", {"block_out_channels": (32,)}),
    "vae-tiny": ("AutoencoderTiny", {}),
    "vae-temporal": ("AutoencoderKLTemporalDecoder", {"block_out_channels": (32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 2}),
    "vae-oobleck": ("AutoencoderOobleck", {"encoder_hidden_size": 16, "decoder_channels": 16,
        "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}),
    "vae-dc": ("AutoencoderDC", {"encoder_block_out_channels": (32, 64), "decoder_block_out_channels": (32, 64),
        "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1), "encoder_block_types": "ResBlock",
        "decoder_block_types": "ResBlock", "encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}),
    "vae-wan": ("AutoencoderKLWan", {"base_dim": 16}),
    "controlnet-union": ("ControlNetUnionModel", {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32,
        "conditioning_embedding_out_channels": (16, 32)}),
    "controlnet-sparse": ("SparseControlNetModel", {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32}),
    "controlnet-flux": ("FluxControlNetModel", {**_SMALL, "num_single_layers": 1, "joint_attention_dim": 32,
        "pooled_projection_dim": 32, "in_channels": 16, "axes_dims_rope": (4, 4, 8)}),
    "auraflow": ("AuraFlowTransformer2DModel", {"num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 64,
        "pos_embed_max_size": 64}),
    "cogvideox": ("CogVideoXTransformer3DModel", {**_SMALL, "text_embed_dim": 32}),
    "cogview3": ("CogView3PlusTransformer2DModel", {**_SMALL, "text_embed_dim": 32, "pos_embed_max_size": 32}),
    "hunyuan-dit": ("HunyuanDiT2DModel", {**_SMALL, "hidden_size": 64, "cross_attention_dim": 32,
        "cross_attention_dim_t5": 32, "pooled_projection_dim": 32}),
    "latte": ("LatteTransformer3DModel", {**_SMALL, "in_channels": 4, "sample_size": 16, "patch_size": 2,
        "caption_channels": 32, "cross_attention_dim": 64}),
    "lumina2": ("Lumina2Transformer2DModel", {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4,
        "num_kv_heads": 2, "axes_dim_rope": (4, 6, 6), "cap_feat_dim": 32}),
    "mochi": ("MochiTransformer3DModel", {**_SMALL, "pooled_projection_dim": 32, "text_embed_dim": 32}),
    "sana": ("SanaTransformer2DModel", {**_SMALL, "caption_channels": 32, "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 16, "cross_attention_dim": 64}),
    "stable-audio": ("StableAudioDiTModel", {**_SMALL, "num_key_value_attention_heads": 2, "cross_attention_dim": 32,
        "cross_attention_input_dim": 32, "global_states_input_dim": 32}),
    "wan": ("WanTransformer3DModel", {**_SMALL, "text_dim": 32, "ffn_dim": 128, "freq_dim": 32}),
    "ltx-video": ("LTXVideoTransformer3DModel", {**_SMALL, "cross_attention_dim": 64, "caption_channels": 32}),
    "qwen-image": ("QwenImageTransformer2DModel", {**_SMALL, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}),
    "uvit": ("UVit2DModel", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "block_out_channels": 64, "intermediate_size": 128, "cond_embed_dim": 32, "encoder_hidden_size": 32}),
}  # fmt: skip


class _Recurrent(nn.Module):
    """A recurrent layer under a linear one, like many taggers and forecasters."""

    def __init__(self, cell: str = "LSTM") -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32, padding_idx=0)
        self.cell = getattr(nn, cell)(32, 64, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(128, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.cell(self.embedding(x))[0][:, -1])
        return logits


def _normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model[2] = norm(model[2])
    return model


_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "lstm": _Recurrent,
    "gru": lambda: _Recurrent("GRU"),
    "rnn": lambda: _Recurrent("RNN"),
    "mlp-weight-norm": lambda: _normed(nn.utils.parametrizations.weight_norm),
    "mlp-spectral-norm": lambda: _normed(nn.utils.parametrizations.spectral_norm),
    "mlp-orthogonal": lambda: _normed(nn.utils.parametrizations.orthogonal),
    "mlp-batch-norm": lambda: nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
    "torch-transformer": lambda: nn.Transformer(64, 4, 2, 2, 128, batch_first=True),
}


def _plain_inputs(name: str) -> Callable[[nn.Module], dict[str, Any]] | None:
    if name in ("lstm", "gru", "rnn"):
        return lambda _: {"x": torch.randint(1, 200, (4, 12))}
    if name == "torch-transformer":
        return lambda _: {"src": torch.randn(4, 6, 64), "tgt": torch.randn(4, 6, 64)}
    return lambda _: {"input": torch.randn(8, 40)}
