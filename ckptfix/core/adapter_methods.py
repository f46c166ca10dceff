"""The types of adapters of peft that change a matrix by a formula of their own: the names and shapes of their tensors.

The formulas are in `values/adapter_methods.py`, under the same names in lower case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt, prod

from msgspec import Struct


class Method(Struct, frozen=True):
    """What files of one type hold: ``roles`` has the names of a layer's tensors, in the order of the formula, with
    their roles; ``fits`` is called with the numbers of outputs and inputs and the shapes of these tensors."""

    name: str
    roles: Mapping[str, str]
    fits: Callable[..., bool]
    optional: tuple[str, ...] = ()  # roles that a layer may lack
    # Settings of the configuration: the factor of the change, and a number that the formula needs besides. Without the
    # switch, if there is one, the number is 0; with a switch only, it is 1.
    scale: str = ""
    number: str = ""
    switch: str = ""
    allowed: range = range(-(1 << 63), 1 << 63)
    # Settings again: whether the change is bounded, and the bound.
    bounded: tuple[str, str] = ("", "")
    # The number by which the factor is divided, from the shapes of the tensors.
    ranks: Callable[..., int] | None = None
    has_kernels: bool = False  # whether it changes convolutions too, as matrices
    rounds: bool = False  # whether the change is rounded to the dtype of the base before it is added
    # Whether the inputs may come first in the base, as in Conv1D.
    turns: bool = True
    # Whether it adds something that does not depend on the base, so that it can be weighted and removed again.
    adds: bool = True

    @property
    def numbers(self) -> tuple[int, int]:
        """The minimum and maximum number of tensors of a layer."""
        most = len({*self.roles.values()})
        return most - len(self.optional), most


Shape = tuple[int, ...]
_POSITIVE = range(1, 1 << 63)


def _same(*names: str) -> Mapping[str, str]:
    return {name: name for name in names}


def _of_miss(outputs: int, inputs: int, block: Shape) -> bool:
    if len(block) == 3:  # init_weights="bat"
        count, rank, other = block
        return rank == other and count * rank == outputs and inputs % rank == 0
    return len(block) == 2 and outputs % block[1] == 0 and 0 < block[0] <= inputs


def block_size(elements: int) -> int:
    """Return the size of OFT's skew-symmetric matrices, of which only the elements above the diagonal are saved."""
    return (1 + isqrt(1 + 8 * elements)) // 2


def _of_oft(outputs: int, inputs: int, rotation: Shape) -> bool:
    size = block_size(rotation[1]) if len(rotation) == 2 else 0
    is_whole = size > 1 and size * (size - 1) // 2 == rotation[1] and inputs % size == 0
    return is_whole and rotation[0] in (1, inputs // size)


def _of_boft(outputs: int, inputs: int, blocks: Shape, scales: Shape) -> bool:
    if len(blocks) != 4 or (blocks[1] * blocks[2], blocks[3]) != (inputs, blocks[2]) or not blocks[0]:
        return False
    # Each further factor exchanges the halves of twice as many blocks.
    is_split = blocks[0] == 1 or (blocks[2] % 2 == 0 and blocks[1] % 2 ** (blocks[0] - 1) == 0)
    return is_split and scales in ((outputs, 1), (1, outputs))


def _of_gralora(outputs: int, inputs: int, one: Shape, two: Shape, *general: Shape) -> bool:
    if len(one) != len(two) or len(one) != 3 or not one[0] or one[2] % one[0]:
        return False
    is_split = (one[0] * one[1], two[0] * two[2]) == (inputs, outputs) and (one[0], one[2]) == two[:2]
    return is_split and (not general or general == ((general[0][0], inputs), (outputs, general[0][0])))


METHODS: Mapping[str, Method] = {
    "ADALORA": Method(
        "AdaLoRA",
        {"lora_A": "A", "lora_B": "B", "lora_E": "E"},
        lambda o, i, one, two, values: (one, two) == ((values[0], i), (o, values[0])) and values[1:] == (1,),
        has_kernels=True,
        scale="lora_alpha",
        number="init_r",
        allowed=_POSITIVE,
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
        lambda o, i, one, two: (
            len(one) == len(two) > 1 and (two[0], two[1], prod(one[1:]), prod(two[2:])) == (o, one[0], i, 1)
        ),
        has_kernels=True,
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
    "DELORA": Method(
        "DeLoRA",
        {"delora_A": "A", "delora_B": "B", **_same("delora_lambda", "delora_w_norm")},
        lambda o, i, one, two, bound, norms: (
            (one, two, bound, norms) == ((two[-1], i), (o, one[0]), (1,), (i,)) and one[0] > 0
        ),
        rounds=True,
        turns=False,
    ),
    "VBLORA": Method(
        "VB-LoRA",
        _same("vblora_logits_A", "vblora_logits_B", "vblora_vector_bank"),
        lambda o, i, one, two, bank: (
            len(one) == len(two) == 3
            and (one[0], one[1] * bank[-1], two[0] * bank[-1]) == (two[1], i, o)
            and one[2:] == two[2:] == bank[:-1]
        ),
        number="topk",
        allowed=_POSITIVE,
    ),
    "RANDLORA": Method(
        "RandLoRA",
        _same("randlora_A", "randlora_B", "randlora_lambda", "randlora_gamma"),
        lambda o, i, one, two, ranks, sizes: (
            len(one) == len(two) == 3
            and len(ranks) == 2
            and (one[0], two[2], sizes) == (ranks[0], ranks[0], (ranks[1], min(o, i)))
            and (one[1] in (1, ranks[1]) and one[2] >= min(o, i))
            and (two[1] >= ranks[1] and two[0] >= max(o, i))
        ),
        scale="randlora_alpha",
        ranks=lambda one, two, ranks, sizes: ranks[0],
        rounds=True,
    ),
    "C3A": Method(
        "C3A",
        {"c3a_kernel": "kernel"},
        lambda o, i, kernel: len(kernel) == 3 and (kernel[0] * kernel[2], kernel[1] * kernel[2]) == (o, i),
        turns=False,
    ),
    "FOURIERFT": Method(
        "FourierFT",
        {"fourierft_spectrum": "spectrum"},
        lambda o, i, spectrum: len(spectrum) == 1 and spectrum[0] <= o * i,
        scale="scaling",
        number="random_loc_seed",
    ),
    "OFT": Method(
        "OFT",
        {"oft_R": "rotation", "oft_embedding_R": "rotation"},
        _of_oft,
        number="num_cayley_neumann_terms",
        switch="use_cayley_neumann",
        allowed=range(101),  # peft begins with 5
        bounded=("coft", "eps"),
        has_kernels=True,
        turns=False,
        adds=False,
    ),
    "ROAD": Method(
        "RoAd",
        _same("road_theta", "road_alpha"),
        lambda o, i, angles, lengths: len(angles) == 1 and angles == lengths and 2 * angles[0] in (o, 2 * o, 4 * o),
        number="group_size",
        turns=False,
        adds=False,
    ),
    "BOFT": Method(
        "BOFT",
        _same("boft_R", "boft_s"),
        _of_boft,
        has_kernels=True,
        turns=False,
        adds=False,
    ),
    "GRALORA": Method(
        "GraLoRA",
        _same("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general"),
        _of_gralora,
        ("gralora_A_general", "gralora_B_general"),
        scale="alpha",
        ranks=lambda one, two, *general: one[2] + (general[0][0] if general else 0),
    ),
    "HRA": Method(
        "HRA",
        {"hra_u": "u"},
        lambda o, i, u: len(u) == 2 and u[0] == i,
        switch="apply_GS",
        has_kernels=True,
        turns=False,
        adds=False,
    ),
}
