"""Models that really fail on a GPU. Every public class is a factory."""

import torch
from torch import Tensor, nn

from tests.smoke.models import Net


class TooManyWords(nn.Module):
    """Looks up a word beyond its vocabulary: on CUDA an assertion of the kernel, reported at a later line."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.words(tokens + 100)
        output: Tensor = self.head(found)
        return output.relu()


class Greedy(Net):
    """Takes a quarter of the GPU's free memory for each sample except the first, so that a batch of 8 does not fit."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        free, _ = torch.cuda.mem_get_info(x.device)
        held = [torch.empty(free // 4, dtype=torch.uint8, device=x.device) for _ in range(x.shape[0] - 1)]
        del held
        return super().forward(x)


class Capped(Net):
    """Is limited to a small share of the GPU, which its second sample exceeds."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.set_per_process_memory_fraction(0.05)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = torch.cuda.get_device_properties(x.device).total_memory
        for _ in range(x.shape[0] - 1):
            torch.empty(total // 10, dtype=torch.uint8, device=x.device)
        return super().forward(x)


class Overflows(nn.Module):
    """Finite in float32, and beyond 65504 in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16).half(), nn.Linear(16, 16).half()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


class OnTheCpu(Net):
    """Makes a tensor on the CPU and adds it to one on the GPU."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] + torch.ones(2, 2)}


class Draws(Net):
    """Adds random numbers, which each device draws in its own way."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {"logits": logits + torch.randn_like(logits)}
