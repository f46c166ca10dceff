"""The types of adapters of peft that change a matrix by a formula of their own: the names and shapes of their tensors.

The formulas are in `values/adapter_methods.py`, under the same names in lower case."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct


class Method(Struct, frozen=True):
    """What files of one type hold: ``roles`` has the names of a layer's tensors, in the order of the formula, with
    their roles; ``fits`` is called with the numbers of outputs and inputs and the shapes of these tensors."""

    name: str
    roles: Mapping[str, str]
    fits: Callable[..., bool]
    # Settings of the configuration: the factor of the change, and a number that the formula needs besides.
    scale: str = ""
    number: str = ""
    # Whether the inputs may come first in the base, as in Conv1D.
    turns: bool = True
    # Whether it adds something that does not depend on the base, so that it can be weighted and removed again.
    adds: bool = True


def _same(*names: str) -> Mapping[str, str]:
    return {name: name for name in names}


def _of_miss(outputs: int, inputs: int, block: tuple[int, ...]) -> bool:
    if len(block) == 3:  # init_weights="bat"
        count, rank, other = block
        return rank == other and count * rank == outputs and inputs % rank == 0
    return len(block) == 2 and outputs % block[1] == 0 and 0 < block[0] <= inputs


METHODS: Mapping[str, Method] = {
    "ADALORA": Method(
        "AdaLoRA",
        {"lora_A": "A", "lora_B": "B", "lora_E": "E"},
        lambda o, i, one, two, values: (one, two) == ((values[0], i), (o, values[0])) and values[1:] == (1,),
        scale="lora_alpha",
        number="init_r",
    ),
    "VERA": Method(
        "VeRA",
        _same("vera_A", "vera_B", "vera_lambda_b", "vera_lambda_d"),
        lambda o, i, one, two, outputs, ranks: (
            (one[:1], two[1:], outputs) == (ranks, ranks, (o,)) and len(one) == 2 and one[1] >= i and two[0] >= o
        ),
    ),
    "HIRA": Method(
        "HiRA",
        {"hira_A": "A", "hira_B": "B", "hira_embedding_A": "A", "hira_embedding_B": "B"},
        lambda o, i, one, two: (one, two) == ((two[-1], i), (o, one[0])),
        adds=False,
    ),
    "MISS": Method("MiSS", {"miss_block": "block"}, _of_miss, turns=False),
    "BONE": Method("Bone", {"bone_block": "block"}, _of_miss, turns=False),
    "SHIRA": Method(
        "SHiRA",
        _same("shira_weight", "shira_indices"),
        lambda o, i, values, places: len(values) == 1 and places == (2, *values),
        turns=False,
    ),
}
