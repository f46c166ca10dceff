"""Four small nets, trained briefly on random data, with layers under ``spare`` that do not reach the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]
"""A function from parameters to their optimizer."""

CLASSES = 10


class Net(nn.Module):
    """The common base of the four: spare layers, and data for the net."""

    spare: nn.ModuleDict

    def data(self) -> torch.Tensor:
        """A batch of 16 inputs."""
        raise NotImplementedError


class ConvNet(Net):
    """Residual blocks of convolutions and batch norms."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(4)
        )
        self.hidden, self.head = nn.Linear(width, 64), nn.Linear(64, CLASSES)
        self.spare = nn.ModuleDict(
            {
                "hidden": nn.Linear(width, 64),
                "conv": nn.Conv2d(width, width, 3, bias=False),
                "bn": nn.BatchNorm2d(width),
            }
        )

    def data(self) -> torch.Tensor:
        return torch.randn(16, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(torch.relu(self.hidden(x.mean((2, 3)))))
        return logits


class Transformer(Net):
    """An encoder with learned positions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(200, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.hidden, self.head = nn.Linear(width, 64), nn.Linear(64, CLASSES)
        self.spare = nn.ModuleDict({"hidden": nn.Linear(width, 64), "block": nn.TransformerEncoderLayer(width, 4, 96)})

    def data(self) -> torch.Tensor:
        return torch.randint(0, 200, (16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(torch.relu(self.hidden(x.mean(1))))
        return logits


class Recurrent(Net):
    """An LSTM of two layers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(200, width), nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.hidden, self.head = nn.Linear(width, 64), nn.Linear(64, CLASSES)
        self.spare = nn.ModuleDict({"hidden": nn.Linear(width, 64), "cell": nn.LSTM(width, width)})

    def data(self) -> torch.Tensor:
        return torch.randint(0, 200, (16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.hidden(self.cell(self.embedding(x))[0][:, -1])))
        return logits


class Perceptron(Net):
    """Linear layers with batch norms between them."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.bn = nn.Linear(20, width), nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2))
        self.hidden, self.head = nn.Linear(width, 64), nn.Linear(64, CLASSES)
        self.spare = nn.ModuleDict({"hidden": nn.Linear(width, 64), "other": nn.Linear(width, width)})

    def data(self) -> torch.Tensor:
        return torch.randn(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = torch.relu(block(x))
        logits: torch.Tensor = self.head(torch.relu(self.hidden(x)))
        return logits


ARCHITECTURES: tuple[type[Net], ...] = (ConvNet, Transformer, Recurrent, Perceptron)

WITH_NORMS: tuple[type[Net], ...] = (ConvNet, Perceptron)
"""The nets with running statistics."""


def fresh(kind: type[Net], seed: int) -> Net:
    torch.manual_seed(seed)
    return kind()


def trained(kind: type[Net], seed: int, make: Make, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    """Return a net after so many steps on one batch, and its optimizer. The spare layers get gradients of zero, as
    under DistributedDataParallel."""
    net = fresh(kind, seed)
    optimizer = make(net.parameters())
    inputs, labels = net.data(), torch.randint(0, CLASSES, (16,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        _give_no_gradient(net)
        optimizer.step()
    return net, optimizer


def train_spare_layers(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train only the spare layers, for which the other layers make no difference, at a hundredth of the cost."""
    for parameter in net.parameters():
        parameter.grad = None
    for _ in range(steps):
        _give_no_gradient(net)
        optimizer.step()


def _give_no_gradient(net: Net) -> None:
    for parameter in net.spare.parameters():
        parameter.grad = torch.zeros_like(parameter)
