"""The models that the sample checkpoints belong to: real architectures, a few thousand parameters each.

Every public function here is a factory for `ckptfix --model sample_checkpoints.models:NAME`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, with torchvision's names."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.downsample(x))


class TinyResNet(nn.Module):
    """ResNet with one block in each of layer1 … layer4. Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, classes: int = 10, *, bottleneck: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, stride=1))
        self.layer2 = nn.Sequential(BasicBlock(8, 8, stride=2))
        self.layer3 = nn.Sequential(BasicBlock(8, 16, stride=2))
        self.layer4 = nn.Sequential(BasicBlock(16, 16, stride=2))
        self.bottleneck = nn.BatchNorm1d(16) if bottleneck else nn.Identity()
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.bottleneck(x.mean(dim=(2, 3))))
        return logits


class Attention(nn.Module):
    """Multi-head self-attention over (N, tokens, width), optionally causal."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, with timm's names."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TinyViT(nn.Module):
    """Vision transformer for 32x32 images in 8x8 patches. Images (N, 3, 32, 32) to logits (N, classes)."""

    def __init__(self, classes: int = 10, width: int = 16, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


class TinyLM(nn.Module):
    """Causal language model, decoder tied to embedding. Token ids (N, T ≤ 32), int64, to logits (N, T, vocabulary)."""

    def __init__(self, vocabulary: int = 128, width: int = 32, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(32, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.decoder(self.norm(self.blocks(x)))
        return logits


class AuxiliaryMLP(nn.Module):
    """Classifier with an auxiliary head, which only training uses. Features (N, 16) to logits (N, classes)."""

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)
        self.aux_head = nn.Linear(width, classes)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.head(hidden), self.aux_head(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)[0]


class LabNet(nn.Module):
    """The kind of small network that a laboratory pickles whole. Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def resnet_tiny(classes: int = 10) -> TinyResNet:
    """Input: float images, for example 2x3x32x32."""
    return TinyResNet(classes)


def resnet_bottleneck(classes: int = 10) -> TinyResNet:
    """`resnet_tiny` with a BatchNorm1d before `fc`, as in re-identification. Input: for example 2x3x32x32."""
    return TinyResNet(classes, bottleneck=True)


def vit_tiny(classes: int = 10) -> TinyViT:
    """Input: float images, 2x3x32x32."""
    return TinyViT(classes)


def tied_lm() -> TinyLM:
    """`decoder.weight` is `embedding.weight`. Input: int64 token ids from 0 to 127, at most 32 per row."""
    return TinyLM()


def mlp_with_aux_head() -> AuxiliaryMLP:
    """Input: float features, for example 2x16."""
    return AuxiliaryMLP()


def lab_net() -> LabNet:
    """Input: float images, for example 2x3x32x32."""
    return LabNet()
