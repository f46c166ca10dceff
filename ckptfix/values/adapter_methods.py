"""What adapters of further types change, with peft's operations in their order.

For some types this is the product of two matrices, which are made from the adapter's tensors once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptfix.core.adapter_methods import block_size
from ckptfix.core.lazy import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]  # [rank, inputs] and [outputs, rank]


def _vera(
    size: tuple[int, int], number: int, one: torch.Tensor, two: torch.Tensor, outputs: torch.Tensor, ranks: torch.Tensor
) -> Pair:
    return ranks[:, None] * one[:, : size[1]], outputs[:, None] * two[: size[0]]


def _vblora(size: tuple[int, int], topk: int, one: torch.Tensor, two: torch.Tensor, bank: torch.Tensor) -> Pair:
    def vectors(logits: torch.Tensor) -> torch.Tensor:
        best, which = logits.topk(topk, dim=-1)
        return (torch.softmax(best, dim=-1)[..., None] * bank[which]).sum(-2)

    return vectors(one).flatten(1), vectors(two).transpose(1, 2).reshape(-1, two.shape[1])


def _randlora(
    size: tuple[int, int], number: int, one: torch.Tensor, two: torch.Tensor, ranks: torch.Tensor, sizes: torch.Tensor
) -> Pair:
    """Return the matrices of the transposed product, which is what peft computes."""
    count = ranks.shape[1]
    small = (ranks[:, :, None] * one[:, :count, : min(size)] * sizes[None]).flatten(0, 1)
    large = two[: max(size), :count].flatten(1)
    pair = (large.T, small.T) if min(size) == size[1] else (small, large)
    return pair


# The two matrices of a change, by the form of a delta; called with the numbers of outputs and inputs, the number from
# the configuration, and the adapter's tensors.
PAIRS: Mapping[str, Callable[..., Pair]] = {
    "adalora": lambda size, number, one, two, values: (one * values, two),
    "vera": _vera,
    "hira": lambda size, number, one, two: (one, two),
    "vblora": _vblora,
    "randlora": _randlora,
}


def _delora(
    size: tuple[int, int], number: int, one: torch.Tensor, two: torch.Tensor, bound: torch.Tensor, norms: torch.Tensor
) -> torch.Tensor:
    least = torch.clamp(one.norm(dim=1), min=1e-4) * torch.clamp(two.norm(dim=0), min=1e-4)
    change: torch.Tensor = two @ torch.diag_embed(bound / len(one) / least) @ one * norms[None]
    return change


def _c3a(size: tuple[int, int], number: int, kernel: torch.Tensor) -> torch.Tensor:
    count, block = kernel.shape[1:]
    units = torch.eye(count * block).reshape(-1, count, block)
    found = torch.einsum("...nb,mnb->...mb", torch.fft.ifft(units), torch.fft.fft(kernel.float()))
    change: torch.Tensor = torch.fft.fft(found).real.flatten(1).T
    return change


def _fourierft(size: tuple[int, int], seed: int, spectrum: torch.Tensor) -> torch.Tensor:
    dense = torch.zeros(size)
    places = torch.randperm(dense.numel(), generator=torch.Generator().manual_seed(seed))[: len(spectrum)]
    dense.view(-1)[places] = spectrum.float()
    change: torch.Tensor = torch.fft.ifft2(dense).real
    return change


def _gralora(
    size: tuple[int, int], number: int, one: torch.Tensor, two: torch.Tensor, *general: torch.Tensor
) -> torch.Tensor:
    """Each block of inputs has the ranks of each block of outputs at a place of its own."""
    count, width, rank = one.shape
    spread = torch.zeros(count, width, count, count, rank // count)
    for block in range(count):
        spread[block, :, :, block] = one[block].reshape(width, count, -1)
    change: torch.Tensor = torch.einsum("ikr,kro->iko", spread.reshape(size[1], count, rank), two).reshape(size[::-1]).T
    return change + general[1] @ general[0] if general else change


# The whole change, in the same way.
WHOLE: Mapping[str, Callable[..., torch.Tensor]] = {
    "delora": _delora,
    "c3a": _c3a,
    "fourierft": _fourierft,
    "gralora": _gralora,
}


def _cayley(skew: torch.Tensor) -> torch.Tensor:
    one = torch.eye(skew.shape[1]).expand_as(skew)
    found: torch.Tensor = torch.linalg.solve(one + skew, one - skew, left=False)
    return found


def _boft(size: tuple[int, int], number: int, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the product of block matrices, the further ones with another order of rows and columns."""
    factors: list[torch.Tensor] = [
        torch.block_diag(*_cayley((own - own.transpose(1, 2)) / 2))  # type: ignore[no-untyped-call]  # torch has no types here
        for own in blocks
    ]
    whole = factors[0]
    for at, factor in enumerate(factors[1:], 1):
        # In each group of 2 ** at blocks, the first halves of the blocks come before the second ones.
        order = torch.arange(size[1]).reshape(-1, 2**at, 2, blocks.shape[2] // 2).transpose(1, 2).flatten()
        whole = factor[order][:, order] @ whole
    return whole


def _skew(above: torch.Tensor) -> torch.Tensor:
    """Return the skew-symmetric matrices with the elements ``above`` [matrices, elements] above their diagonal."""
    size = block_size(above.shape[1])
    half = torch.zeros(len(above), size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    half[:, rows, columns] = above
    return half - half.transpose(1, 2)


def bounded(above: torch.Tensor, bound: float) -> torch.Tensor:
    """Return OFT's elements scaled down to at most the norm ``bound`` for all matrices together (``coft``)."""
    norms = torch.norm(_skew(above), dim=(1, 2))[:, None]
    most = bound / torch.sqrt(torch.tensor(len(above)))
    return torch.where(norms <= most, above, most * (above / norms))


def _oft(size: tuple[int, int], terms: int, above: torch.Tensor) -> torch.Tensor:
    """Return the rotation by Cayley's transform, or with the first terms of its series."""
    block, skew = block_size(above.shape[1]), _skew(above)
    one = torch.eye(block).repeat(len(above), 1, 1)
    if not terms:
        found = _cayley(skew)
    else:
        found, power = one, one
        terms = max(terms, 4) if terms > 2 else terms  # in peft, three terms are four
        for at in range(1, terms):
            power = skew if at == 1 else torch.bmm(power, skew)
            found.add_(power, alpha=1.0 if at == terms - 1 > 1 else 2.0)
    whole: torch.Tensor = torch.block_diag(*(found[at % len(found)] for at in range(size[1] // block)))  # type: ignore[no-untyped-call]  # torch has no types here
    return whole


def _hra(size: tuple[int, int], is_orthogonal: int, vectors: torch.Tensor) -> torch.Tensor:
    """Return the product of reflections."""
    one = torch.eye(size[1])
    if not is_orthogonal:
        vectors = vectors / vectors.norm(dim=0)
    columns = [column.view(-1, 1) for column in vectors.unbind(1)]  # with other strides, the last bits may differ
    if is_orthogonal:
        found: list[torch.Tensor] = []
        for vector in columns:
            for other in found:
                vector = vector - (other.T @ vector) * other
            found.append(vector / vector.norm())
        both = torch.cat(found, dim=1)
        return one - 2 * both @ both.T
    for vector in columns:
        one = one - 2 * one @ vector @ vector.T
    return one


def _road(size: tuple[int, int], group: int, angles: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the rotation of pairs of outputs, half a group apart, by one angle for a pair, for an output or for each
    of an output's two factors."""
    outputs, half = size[0], group // 2
    if group < 2 or group % 2 or outputs % group:
        raise ValueError(f"group_size {group} does not divide {outputs} outputs")
    if 2 * len(angles) == outputs:
        angles, lengths = (each.reshape(-1, half).repeat_interleave(2, dim=0).flatten() for each in (angles, lengths))
    if len(angles) == outputs:
        angles, lengths = (each.reshape(-1, 1, group).repeat(1, 2, 1) for each in (angles, lengths))
    angles, lengths = (each.reshape(-1, 2, group) for each in (angles, lengths))
    own, other = (lengths[:, 0] * angles[:, 0].cos()).flatten(), (lengths[:, 1] * angles[:, 1].sin()).flatten()
    rows = torch.arange(outputs)
    is_first = rows % group < half
    found = torch.diag(own)
    found[rows, torch.where(is_first, rows + half, rows - half)] = torch.where(is_first, -other, other)
    return found


# What a matrix is multiplied by, in the same way.
TURNS: Mapping[str, Callable[..., torch.Tensor]] = {"oft": _oft, "boft": _boft, "hra": _hra, "road": _road}


def of_miss(block: torch.Tensor, first: int, last: int, inputs: int) -> torch.Tensor:
    """Return the change of some rows by MiSS or Bone, which repeat a block [rank, outputs] along the inputs."""
    rows = block.T[torch.arange(first, last) % block.shape[1]]
    return rows.repeat(1, -(-inputs // len(block)))[:, :inputs]


def of_bat(weight: torch.Tensor, blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the change of some rows, beginning with row ``first``, by their own blocks [rank, rank]
    (``init_weights="bat"`` of MiSS and Bone)."""
    rank, inputs = blocks.shape[1], weight.shape[1]
    parts = weight.to(blocks.dtype).reshape(-1, rank, inputs // rank, rank).permute(2, 0, 1, 3)
    own = blocks[first // rank : first // rank + parts.shape[1]]
    return (parts @ own + own).permute(1, 2, 0, 3).reshape(weight.shape)


def of_shira(
    values: torch.Tensor, places: torch.Tensor, first: int, last: int, outputs: int, inputs: int
) -> torch.Tensor:
    """Return the change of some rows by SHiRA, which changes single elements: -0 is no change for any other."""
    rows, columns = places.long()
    if len(places.T) and (places.min() < 0 or columns.max() >= inputs or rows.max() >= outputs):
        raise ValueError(f"shira_indices are not of a matrix [{outputs}, {inputs}]")
    own = (rows >= first) & (rows < last)
    change = torch.full((last - first, inputs), -0.0, dtype=values.dtype)
    change[rows[own] - first, columns[own]] = values[own]
    return change
