"""What an adapted model answers, on pictures that torch's own dependencies ship."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, interpolate

import ckptfix

SIDE, PIECE = 48, 24


def pictures() -> torch.Tensor:
    """The plots that sympy and networkx compare theirs with, in grey: torch needs both packages."""
    import numpy as np
    from PIL import Image

    folders = [(find_spec("sympy"), "plotting/tests"), (find_spec("networkx"), "drawing/tests/baseline")]
    files = [
        file
        for spec, below in folders
        if spec is not None and spec.origin is not None
        for file in sorted((Path(spec.origin).parent / below).glob("*.png"))
    ]
    assert len(files) >= 4
    images = [Image.open(file).convert("L").resize((128, 128)) for file in files]
    return torch.stack([torch.from_numpy(np.asarray(image, dtype="float32") / 255 - 0.5) for image in images])


def scenes(images: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece of a picture in one of four corners, and which: only the positions of the patches say so."""
    corners = torch.randint(4, (number,))
    found = torch.zeros(number, 1, SIDE, SIDE)
    for scene, corner in zip(found, corners.tolist(), strict=True):
        x, y = torch.randint(images.shape[1] - PIECE, (2,)).tolist()
        top, left = (corner // 2) * PIECE, (corner % 2) * PIECE
        picture = images[int(torch.randint(len(images), ()))]
        scene[0, top : top + PIECE, left : left + PIECE] = picture[y : y + PIECE, x : x + PIECE]
    return found, corners


def transformer(side: int) -> Any:
    from timm.models import VisionTransformer

    return VisionTransformer(side, 8, 1, 4, embed_dim=32, depth=1, num_heads=2)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])


@pytest.mark.slow
def test_an_adapted_transformer_gives_similar_outputs():
    torch.manual_seed(0)
    images, small = pictures(), transformer(SIDE)
    optimizer = torch.optim.AdamW(small.parameters(), 2e-3)
    for _ in range(150):
        batch, corners = scenes(images, 64)
        loss = cross_entropy(small(batch), corners)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch, corners = scenes(images, 256)
    larger = interpolate(batch, scale_factor=2.0, mode="bilinear")
    small.eval()
    found = {}
    with torch.no_grad():
        before = small(batch)
        for recipe in ("timm", "plain", "torchvision"):
            large = transformer(2 * SIDE).eval()
            state, report = ckptfix.repair_state_dict(small.state_dict(), large, adapt={"pos_embed": recipe})
            assert report.exit_code == 0
            large.load_state_dict(state, strict=True)
            found[recipe] = correlation(before, large(larger))
        by_chance = []
        for _ in range(5):
            large.pos_embed.copy_(torch.randn_like(large.pos_embed) * small.pos_embed.std())
            by_chance.append(correlation(before, large(larger)))
    assert float((before.argmax(1) == corners).float().mean()) > 0.9
    assert min(found.values()) > 0.8
    assert max(by_chance) < 0.5
