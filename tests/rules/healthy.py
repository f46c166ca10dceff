"""Freshly initialised models with many kinds of layers and initialisations, none of which is a defect."""

from collections.abc import Callable

import torch
from torch import nn


class LayerScale(nn.Module):
    """The scale of CaiT and ConvNeXt, which starts at 1e-6; timm also has it as ``(1, C, 1, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-6 * torch.ones(96))
        self.gamma_2d = nn.Parameter(1e-6 * torch.ones(1, 96, 1, 1))
        self.fc = nn.Linear(96, 96)


def filled(layer: nn.Module, fill: Callable[[torch.Tensor], object]) -> nn.Module:
    """Initialise the weight of a layer, and return the layer."""
    weight = layer.get_parameter("weight")
    fill(weight)
    return layer


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)),
    "wide-fan-in": lambda: nn.Sequential(nn.Linear(25088, 64), nn.Linear(64, 64)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(64, 64, 3, groups=64), nn.BatchNorm2d(64), nn.Conv2d(64, 128, 1)),
    "squeeze-excite": lambda: nn.Sequential(nn.Conv2d(512, 8, 1), nn.ReLU(), nn.Conv2d(8, 512, 1), nn.Sigmoid()),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(64, 32, 4), nn.Conv3d(8, 8, 3), nn.Conv1d(8, 16, 5)),
    "group-norm": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3)),
    "layer-norm-2d": lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm((8, 16))),
    "instance-norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)),
    "embedding": lambda: nn.Sequential(nn.Embedding(1000, 64, padding_idx=0), nn.Linear(64, 64)),
    "embedding-std-0.02": lambda: nn.Sequential(
        filled(nn.Embedding(1000, 768), lambda weight: nn.init.normal_(weight, std=0.02)),
        filled(nn.Linear(768, 768), lambda weight: nn.init.trunc_normal_(weight, std=0.02)),
    ),
    "xavier-gain-0.01": lambda: nn.Sequential(
        nn.Linear(256, 256),
        filled(nn.Linear(256, 256), lambda weight: nn.init.xavier_uniform_(weight, gain=0.01)),
        nn.Linear(256, 256),
    ),
    "box-head-std-0.001": lambda: nn.Sequential(
        nn.Linear(1024, 1024), filled(nn.Linear(1024, 320), lambda weight: nn.init.normal_(weight, std=0.001))
    ),
    "orthogonal-gain-0.01": lambda: nn.Sequential(
        nn.Linear(64, 64), filled(nn.Linear(64, 6), lambda weight: nn.init.orthogonal_(weight, gain=0.01))
    ),
    "kaiming-fan-out": lambda: nn.Sequential(
        filled(nn.Conv2d(3, 512, 7), lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"))
    ),
    "identity": lambda: nn.Sequential(nn.Linear(32, 32), filled(nn.Linear(32, 32), nn.init.eye_)),
    "dirac": lambda: nn.Sequential(nn.Conv2d(32, 32, 3), filled(nn.Conv2d(32, 32, 3), nn.init.dirac_)),
    "layer-scale": LayerScale,
    "attention": lambda: nn.MultiheadAttention(64, 4, kdim=32, vdim=32, add_bias_kv=True),
    "transformer": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "lstm": lambda: nn.LSTM(32, 64, 2, bidirectional=True, proj_size=16),
    "gru": lambda: nn.GRU(32, 64),
    "bilinear": lambda: nn.Bilinear(16, 16, 8),
    "prelu": lambda: nn.Sequential(nn.Linear(16, 16), nn.PReLU(16)),
    "half": lambda: nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 8)).half(),
    "bfloat16": lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Linear(64, 8)).bfloat16(),
    "zero-init-gamma": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 3), filled(nn.BatchNorm2d(8), nn.init.zeros_), nn.Conv2d(8, 8, 3)
    ),
}


def build(name: str) -> nn.Module:
    """Return a healthy model by name, with the same values at every call."""
    torch.manual_seed(0)
    return HEALTHY[name]()
