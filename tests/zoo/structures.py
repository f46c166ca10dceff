"""Names and shapes of real models from ``structures.txt``, which has a line for all keys of one pattern and shape."""

from itertools import product
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]


def read_structures() -> dict[str, Shapes]:
    """Return the models by library and name."""
    models: dict[str, Shapes] = {}
    name, count = "", 0
    for line in Path(__file__).with_name("structures.txt").read_text(encoding="utf-8").splitlines():
        first, last = line.split()
        if line.startswith(" "):
            shape = () if last == "-" else tuple(map(int, last.split("x")))
            parts = [slot.split("|") for slot in first.split(".")]
            models[name] |= {".".join(key): shape for key in product(*parts)}
        else:
            name, count = first, int(last)
            models[name] = {}
    assert len(models[name]) == count
    return models


STRUCTURES = read_structures()
