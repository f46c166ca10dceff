"""Models that pass the forward test, or fail it in one particular way each. Every public name here is a factory."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Images (N, 3, H, W) to {"logits": (N, 2)}."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(self.bn(self.conv(x)).mean(dim=(2, 3)))}


class Chatty(Net):
    """Prints text that looks like an answer, in the factory and in forward."""

    def __init__(self) -> None:
        super().__init__()
        print('{"outcome": "from the factory"}')  # noqa: T201  to print is the point

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        print('{"outcome": "from forward"}')  # noqa: T201  to print is the point
        return super().forward(x)


class Aborts(Net):
    """Kills its process with a signal."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        print("last words")  # noqa: T201  to print is the point
        os.abort()


class Hangs(Net):
    """Never returns, and starts a process, whose id it writes to the file $PID_FILE."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
            Path(os.environ["PID_FILE"]).write_text(str(process.pid))
            while True:
                time.sleep(1)


class Lingers(Net):
    """Leaves a thread and a process running, whose id it writes to the file $PID_FILE."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        threading.Thread(target=time.sleep, args=(600,)).start()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["PID_FILE"]).write_text(str(process.pid))
        return super().forward(x)


class Refuses(Net):
    """Raises for every input."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        raise ValueError("I never run")


class Leaves(Net):
    """Exits its process with status 0."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        sys.exit(0)


class Guards(Net):
    """Raises if a stored number is not its initial one."""

    def __init__(self) -> None:
        super().__init__()
        self.index = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.index.item() != 0:
            raise ValueError("the index is corrupt")
        return super().forward(x)


class GuardsLazily(Guards):
    """The same with a lazy layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(2)


class GuardsOnce(Guards):
    """The same, and cannot be built twice."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("BUILT"):
            raise RuntimeError("there is a model already")
        os.environ["BUILT"] = "1"


class GuardsThenAborts(Guards):
    """The same, and kills its process with a signal if the number is right."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        super().forward(x)
        os.abort()


class Unfinished(Net):
    """Use a name that does not exist, for any input."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return undefined_name  # type: ignore[name-defined, no-any-return]  # noqa: F821  it is the point


class Checks(Net):
    """Raises if its output has NaN."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = super().forward(x)
        if output["logits"].isnan().any():
            raise ValueError("NaN logits")
        return output


class Tower(nn.Module):
    """Tokens and weights, by name, to (N, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor, *, scale: Tensor) -> Tensor:
        output: Tensor = self.embed(tokens).sum(-1) * scale
        return output


class Tied(nn.Module):
    """Tokens to logits, the output matrix tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.embed(tokens))
        return output


class Hider(Net):
    """Hides a parameter from its state_dict, so that a strict load never misses it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.ones(3))
        self.register_state_dict_post_hook(lambda module, state, prefix, local: state.__delitem__(f"{prefix}hidden"))
        self.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.remove("hidden"))


guards = Guards()


def half() -> nn.Module:
    """Return the model in float16."""
    return Net().half()


def quits() -> nn.Module:
    """Exit instead of building."""
    sys.exit("no licence")


def broken(width: int = 3) -> nn.Module:
    """Raise instead of building."""
    raise KeyError(f"no layer of width {width}")
