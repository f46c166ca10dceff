"""Tensors with an adapter merged into them, computed when they are read, some rows at a time, with peft's operations in
their order: the result has the same bits as ``merge_and_unload()``.

The compiled kernel adds products of two matrices: with torch instead, a merge of 0.9 GB takes 5.0 s of processor time
rather than 1.9, and 290 MB of memory rather than 52. Everything else is computed by torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.sources import located
from ckptfix.bytes.threads import AHEAD, THREADS, side_by_side
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Delta, MergeAdapter
from ckptfix.core.lazy import np, torch
from ckptfix.core.spec import TensorSpec, computed
from ckptfix.reading.boxes import is_range, row_major, row_major_bytes
from ckptfix.reading.tensors import bytes_of, one_thread, torch_dtype
from ckptfix.values.adapter_methods import PAIRS, TURNS, WHOLE, bounded, of_bat, of_miss, of_shira
from ckptfix.values.casting import computing
from ckptfix.values.decode import Array, encoding
from ckptfix.values.scan import KINDS, kernel, strips

# Bytes of a block in float32. With a quarter of it, a merge of 4 GB takes 4.7 s of user time instead of 3.7, because of
# the Python code between blocks; with more, torch works in memory rather than in the processor's cache.
BLOCK = 1 << 21
MOST = 1 << 25  # bytes in float32 of the columns that are in memory at a time
FEWEST = 16  # least rows of a block: a product of fewer rows may be summed in another order than that of all rows
HIGHEST = 128  # highest rank of the kernel's products: MKL sums those of rank 256 in another order
# Blocks to reuse: page faults in fresh memory take as long as all products of a small rank.
_BUFFERS: deque[Any] = deque(maxlen=AHEAD + THREADS)
Factors = Sequence[TensorSpec]


def merged_spec(spec: TensorSpec, edit: MergeAdapter, factors: Sequence[Factors], path: str) -> TensorSpec:
    """Return the spec of a tensor with the deltas of ``edit`` merged into it; ``factors`` has each delta's matrices."""
    used = (storage for each in factors for factor in each for storage in factor.storages)
    source = MergedBytes(spec, edit, factors, path)
    return computed(spec, edit.key, source, (*spec.storages, *used), shape=source.spec.shape)


def is_merged(checkpoint: Checkpoint) -> bool:
    """Return whether any tensor of a checkpoint has an adapter merged into it."""
    storages = [storage for spec in checkpoint.specs.values() for storage in spec.storages]
    while storages:
        storage = storages.pop()
        if isinstance(storage.source, MergedBytes):
            return True
        storages += storage.parts if isinstance(storage.parts, tuple) else ()  # others are parts of files
    return False


def sampled_change(spec: TensorSpec, edit: MergeAdapter, factors: Sequence[Factors], path: str) -> tuple[float, float]:
    """Return the sums of squares of the change and of the original, from the first rows and some in the middle."""
    source, stored = MergedBytes(spec, edit, factors, path), encoding(spec.dtype)
    assert stored is not None, "the weights of a merge are floats"
    change, whole = 0.0, 0.0
    for first in sorted({0, source.shape[0] // 2 // FEWEST * FEWEST}):
        place = (first * source.row, min(first + FEWEST, source.shape[0]) * source.row)
        before, after = (
            stored.decode(np.frombuffer(rows, stored.unit)).astype(np.float64)
            for rows in (_stored(source.stored, path, *place), source.read(*place))
        )
        with np.errstate(invalid="ignore", over="ignore"):  # non-finite values give a non-finite result
            change, whole = change + float(np.square(after - before).sum()), whole + float(np.square(before).sum())
    return change, whole


class MergedBytes:
    """The bytes of a tensor in row-major order with an adapter merged into it, or removed again."""

    def __init__(self, spec: TensorSpec, edit: MergeAdapter, factors: Sequence[Factors], path: str) -> None:
        # A tensor that an adapter holds in full replaces the base's, with all that was merged into it.
        first = max((at for at, delta in enumerate(edit.deltas) if delta.form == "whole"), default=-1) + 1
        self.stored = factors[first - 1][0] if first else spec
        spec = replace(spec, shape=self.stored.shape)
        self.spec, self.edit, self.path = spec, edit, path
        self.deltas, self.factors = edit.deltas[first:], factors[first:]
        self.nbytes = spec.nbytes
        # The rows of stacked experts are concatenated.
        self.shape = spec.shape if len(spec.shape) > 1 else (*spec.shape, 1)[-2:] if spec.shape else (1, 1)
        if len(spec.shape) == 3 and any(delta.form == "experts" or delta.within for delta in self.deltas):
            self.shape = (self.shape[0] * self.shape[1], *self.shape[2:])
        self.row = math.prod(self.shape[1:]) * spec.itemsize
        self.height = max(FEWEST, BLOCK // max(math.prod(self.shape[1:]) * 4, 1) // FEWEST * FEWEST)
        for delta, (factor, *_) in zip(self.deltas, self.factors, strict=True):
            if delta.form == "bat":  # changes blocks of rows
                self.height = math.lcm(self.height, factor.shape[1])
        # Called with the number and the bytes of each block that was computed.
        self.watch: Callable[[int, memoryview], None] | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the merged tensor."""
        whole = bytearray()
        for piece in self.pieces(start, stop):
            whole += piece
        return memoryview(whole)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield these bytes in pieces, computed in parallel; each is valid until the next one."""

        def piece(number: int) -> memoryview:
            first, last = self.bounds(number)
            block = self._by_torch(first, last) if products is None else self._by_kernel(products, first, last)
            if self.watch is not None:
                self.watch(number, block)
            return block[max(start - first * self.row, 0) : stop - first * self.row]

        if start < stop:
            products = _products(self)
            # Rows that are too few for a block belong to the last one.
            ends = (min(row // self.height, self.blocks - 1) for row in (start // self.row, (stop - 1) // self.row))
            what = f"{self.edit.key} has another shape than the adapter is for"
            with one_thread() if products is None else nullcontext(), computing(self.path, what):
                if products is None:
                    _layers(self)  # computed once, before several threads would each compute the norms
                for block in side_by_side(piece, range(next(ends), next(ends) + 1)):
                    yield block
                    if products is not None:
                        _BUFFERS.append(block.obj)

    def _by_torch(self, first: int, last: int) -> memoryview:
        return bytes_of(self.merged(first, last).contiguous().flatten().view(torch.uint8))

    def _by_kernel(self, products: Sequence[tuple[Array, Array]], first: int, last: int) -> memoryview:
        rows, library = _stored(self.stored, self.path, first * self.row, last * self.row), kernel()
        assert library is not None, "there are products only for a kernel"
        width = self.row // self.spec.itemsize
        for delta, (two, one) in zip(self.deltas, products, strict=True):
            start, stop = delta.within or (0, self.shape[0])
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                changed, factor = rows[(begin - first) * self.row :], two[begin - start : end - start]
                library.merge(self.spec.dtype, changed, factor, one, width, delta.scaling, delta.rounds)
        return rows

    @property
    def blocks(self) -> int:
        """The number of blocks of rows."""
        whole, rest = divmod(self.shape[0], self.height)
        return max(whole + (rest >= FEWEST), 1)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first row of a block, and one past its last."""
        first = number * self.height
        return first, self.shape[0] if number == self.blocks - 1 else first + self.height

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The first element of each block, and one past its last."""
        width = self.row // self.spec.itemsize
        return [(first * width, last * width) for first, last in map(self.bounds, range(self.blocks))]

    def weight(self, first: int, last: int) -> torch.Tensor:
        """Return rows of the tensor as stored in the file."""
        row = self.row // self.spec.itemsize * self.stored.itemsize
        rows = _numbers(self.stored, self.path, first * row, last * row)
        return rows.view(last - first, *self.shape[1:]).to(torch_dtype(self.spec.dtype))

    def merged(self, first: int, last: int) -> torch.Tensor:
        """Return rows of the tensor after the merge."""
        weight, layers = self.weight(first, last), _layers(self)
        for layer in reversed(layers) if self.edit.undo else layers:
            start, stop = layer.delta.within or (0, self.shape[0])
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                change = layer.take_off if self.edit.undo else layer.add
                rows = weight[begin - first : end - first]
                changed = change(rows, begin - start, end - start)
                if changed is not rows:
                    rows.copy_(changed)
        return weight


@lru_cache(maxsize=2)
def _products(source: MergedBytes) -> list[tuple[Array, Array]] | None:
    """Return the two matrices of each delta for the kernel; None if it cannot add all of them."""
    library, dtype = kernel(), source.spec.dtype
    height, width = source.shape[0], source.row // source.spec.itemsize
    if library is None or dtype not in KINDS or source.stored.dtype != dtype or min(height, width) < FEWEST:
        return None
    found: list[tuple[Array, Array]] = []
    for delta, factors in zip(source.deltas, source.factors, strict=True):
        is_plain = delta.form == "linear" and len(factors) == 2 and delta.expert[1:2] in ((), (1,))
        known = KINDS if not delta.is_narrow or dtype == "float32" else (dtype,)
        is_exact = all(factor.dtype in known and factor.shape for factor in factors) and factors[0].shape[0] <= HIGHEST
        if source.edit.undo or not is_plain or not is_exact or not library.merges:
            return None
        one, two = (matrix(factor, source.path) for factor in factors)
        if delta.transposed:
            one, two = two.T, one.T
        if delta.expert:
            two = two[delta.expert[2] : delta.expert[3]]
        start, stop = delta.within or (0, height)
        if (len(two), len(one), *one.shape[1:]) != (stop - start, two.shape[1], width):
            return None  # the kernel checks no shapes; torch raises
        found.append((np.ascontiguousarray(two), strips(one)))
    return found


def matrix(spec: TensorSpec, path: str) -> Array:
    """Return a float tensor as a matrix of its rows, in float32 or float64."""
    stored = encoding(spec.dtype)
    assert stored is not None, "the dtypes were compared"
    numbers = stored.decode(np.frombuffer(row_major_bytes(spec, path), stored.unit))
    return numbers.reshape(spec.shape[0], -1)


@lru_cache(maxsize=2)
def _layers(source: MergedBytes) -> list[_LayerFactors]:
    return [
        _LayerFactors(
            source, delta, [_factor(factor, source.path, source.spec.dtype, delta.is_narrow) for factor in factors]
        )
        for delta, factors in zip(source.deltas, source.factors, strict=True)
    ]


@lru_cache(maxsize=4)  # many consecutive tensors share the matrices of stacked experts
def _factor(spec: TensorSpec, path: str, base: str, is_narrow: bool) -> torch.Tensor:
    """Return a factor in the precision in which peft computes with a loaded adapter."""
    values, dtype = _numbers(spec, path, 0, spec.nbytes).view(spec.shape), torch_dtype(base)
    if is_narrow:
        values = values.to(dtype)
    return values.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _numbers(spec: TensorSpec, path: str, start: int, stop: int) -> torch.Tensor:
    return torch.frombuffer(_stored(spec, path, start, stop), dtype=torch_dtype(spec.dtype))


def _stored(spec: TensorSpec, path: str, start: int, stop: int) -> memoryview:
    """Return bytes of a tensor in the file, in a writable buffer."""
    place = located(spec.storage.source) if spec.storage is not None and is_range(spec) else None
    if place is None:
        return memoryview(bytearray(row_major(spec, path).read(start, stop)))
    try:
        found = memoryview(_BUFFERS.pop())[: stop - start]
    except IndexError:
        found = memoryview(b"")
    if found.nbytes < stop - start:
        found = np.empty(stop - start, np.uint8).data  # a bytearray would first be zeroed
    place.file.fill(found, place.offset + spec.extent[0] + start)
    return found


class _LayerFactors:
    """A layer of an adapter with its factors, for the tensor that it changes."""

    def __init__(self, source: MergedBytes, delta: Delta, factors: list[torch.Tensor]) -> None:
        if delta.expert:
            (one, two), (number, experts, begin, end) = factors, delta.expert
            one = one.view(experts, -1, one.shape[1])[number]
            two = two if two.shape[1] == len(one) else two.view(two.shape[0], -1, experts)[:, :, number]
            factors = [one, two[begin:end]]
        if delta.has_magnitude:
            *factors, self.magnitude = factors
        if delta.form == "kronecker":
            named = list(zip(delta.factors, factors, strict=False))  # without the magnitude
            ones, twos = ([factor for key, factor in named if f"lokr_{end}" in key] for end in ("w1", "w2"))
            cores = [factor for key, factor in named if "lokr_t2" in key]
            two = _around(cores[0], *twos) if cores else twos[0] if len(twos) == 1 else twos[0] @ twos[1]
            factors = [ones[0] if len(ones) == 1 else ones[0] @ ones[1], two]
        if delta.bound:
            factors = [bounded(factors[0], delta.bound)]
        size = (source.shape[0], math.prod(source.shape[1:]))
        is_turned = delta.transposed and delta.form not in TURNS
        size = size[::-1] if is_turned else size
        if pair := PAIRS.get(delta.form):
            factors = [*pair(size, delta.number, *factors)]
        elif whole := WHOLE.get(delta.form) or TURNS.get(delta.form):
            made = whole(size, delta.number, *factors)
            if not made.isfinite().all():
                raise ValueError(f"{delta.factors[0]} gives NaN or infinity")
            if delta.form == "road":  # each row needs others
                rows = source.weight(0, source.shape[0])
                made = made.to(rows.dtype) @ (rows if rows.shape[1] > 1 else rows.flatten())
            factors = [made.T if is_turned else made, *factors[1:]]
        if delta.form == "c3a":
            factors = [factors[0].to(torch_dtype(source.spec.dtype)) / size[1]]
        self.source, self.delta, self.factors = source, delta, factors
        self._norms = self._norms_of_columns() if delta.has_magnitude and self._is_by_columns else None

    def add(self, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return these rows of the tensor with the layer merged into them."""
        form, dtype = self.delta.form, weight.dtype
        if form == "rows":
            for row, values in zip(self.delta.rows, self.factors[0], strict=True):
                if first <= row < last:
                    weight[row - first] = values.to(dtype)
            return weight
        if form == "scale":
            return (weight * self._scales(weight, first, last)).to(dtype)
        if self.delta.has_magnitude:
            return (self._ratio(first, last) * (weight + self.change(first, last, dtype))).to(dtype)
        if form == "road":
            return self.factors[0][first:last].view(weight.shape)
        if form in TURNS:
            rows = weight.flatten(1).to(self.factors[0].dtype)
            is_last = form == "hra" or self.delta.transposed  # the rows of OFT's embeddings are multiplied, too
            rows = rows @ self.factors[0] if is_last else (self.factors[0] @ rows.T).T
            rows = rows * self.factors[1].reshape(-1, 1)[first:last] if form == "boft" else rows
            return rows.to(dtype).view(weight.shape)
        if form == "bat":
            weight += of_bat(weight, self.factors[0], first).mul_(self.delta.scaling)
            return weight
        if form == "hira":
            return weight + self.source.weight(first, last) * self.change(first, last, dtype).to(dtype)
        weight += self.change(first, last, dtype)
        return weight

    def take_off(self, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return these rows without the layer, up to the rounding of the stored sum."""
        dtype = weight.dtype
        if self.delta.form == "scale":
            return (weight / self._scales(weight, first, last)).to(dtype)
        weight -= self.change(first, last, dtype).to(dtype)
        return weight

    def change(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the change of these rows."""
        change = self._product(first, last).mul_(self.delta.scaling)
        if self.delta.form == "adalora":
            change /= torch.tensor(self.delta.number, dtype=change.dtype) + 1e-5
        if change.shape != (last - first, *self.source.shape[1:]):  # torch would broadcast a smaller one
            raise ValueError(f"{list(change.shape)} for {last - first} rows of {list(self.source.shape)}")
        return change.to(dtype) if self.delta.rounds else change

    def _product(self, first: int, last: int) -> torch.Tensor:
        form, one = self.delta.form, self.factors[0]
        if form == "bias" or form in WHOLE:
            return one[first:last].reshape(last - first, *self.source.shape[1:]).clone()
        if form in ("miss", "bone"):
            return of_miss(one, first, last, self.source.shape[1])
        two = self.factors[1]
        if form == "shira":
            return of_shira(one, two, first, last, *self.source.shape)
        if form == "hadamard":
            parts = [(self.factors[at], self.factors[at + 1], *self.factors[4 + at // 2 :][:1]) for at in (0, 2)]
            products = (
                torch.einsum("ij...,jr,ip->pr...", part[2], part[1], part[0][:, first:last])
                if len(part) == 3
                else _rows(part[0].flatten(1), part[1].flatten(1), first, last, False)
                for part in parts
            )
            return torch.mul(*products).view(last - first, *self.source.shape[1:])
        if form == "tucker":
            return _around(self.factors[2], two.flatten(1).T[:, first:last], one.flatten(1))
        if form == "kronecker":
            blocks = _blocks(first, last, len(two))
            rows = [torch.kron(one[at : at + 1], two[begin:end].flatten(1)) for at, begin, end in blocks]
            return torch.cat(rows).view(last - first, *self.source.shape[1:])
        if form == "experts":
            return torch.cat(list(self._of_experts(first, last)))
        if form == "conv" or (form == "hira" and one.shape[2:] not in ((), (1, 1))):
            convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[one.ndim - 3]
            return convolve(one.transpose(0, 1), two[first:last]).transpose(0, 1)
        is_turned = self.delta.transposed != (form == "randlora")
        product = _rows(two.flatten(1), one.flatten(1), first, last, is_turned)
        return product.view(last - first, *self.source.shape[1:])

    def _of_experts(self, first: int, last: int) -> Iterator[torch.Tensor]:
        one, two = self.factors
        experts, height = self.source.spec.shape[0], self.source.spec.shape[1]
        ones = one.reshape(experts, -1, one.shape[-1])
        twos = two.reshape(two.shape[0], -1, experts)
        for expert, begin, end in _blocks(first, last, height):
            yield _rows(twos[:, :, expert], ones[expert], begin, end, self.delta.transposed)

    def _scales(self, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
        scales = self.factors[0]
        if weight.shape[1:] == (1,):
            return scales.reshape(-1, 1)[first:last]
        if self.delta.transposed:
            scales = scales.transpose(0, 1)
        return scales[first:last] if scales.shape[0] > 1 else scales

    def _ratio(self, first: int, last: int) -> torch.Tensor:
        """Return DoRA's magnitude divided by the norm of each output, of the file's tensor with this layer merged."""
        if self._norms is not None:
            return (self.magnitude.flatten() / self._norms).view(1, -1, *(1,) * (len(self.source.shape) - 2))
        whole = self._whole(first, last)
        norms: torch.Tensor = torch.linalg.vector_norm(whole, dim=tuple(range(1, whole.ndim)))
        ratio = self.magnitude.flatten()[first:last] / norms
        if self.delta.is_narrow and not self.delta.has_dora_scale:
            ratio = ratio.to(torch_dtype(self.source.spec.dtype))
        return ratio.view(-1, *(1,) * (whole.ndim - 1))

    @property
    def _is_by_columns(self) -> bool:
        """Whether DoRA's outputs are columns: LyCORIS may have a magnitude per input, [1, inputs, 1, 1], while peft has
        [1, outputs, 1, 1]."""
        is_for_inputs = self.delta.has_dora_scale and self.magnitude.shape[0] == 1 < self.source.shape[0]
        return self.delta.transposed or is_for_inputs

    def _whole(self, first: int, last: int) -> torch.Tensor:
        weight = self.source.weight(first, last)
        return weight + self.change(first, last, weight.dtype)

    def _norms_of_columns(self) -> torch.Tensor:
        """Return the norms over all rows with the same bits as torch.

        torch sums the squares of a matrix's columns row by row, so a matrix is read once. It sums those of a kernel in
        another order, so a kernel is read some columns at a time."""
        source = self.source
        blocks = [source.bounds(number) for number in range(source.blocks)]
        columns = source.shape[1]
        if len(source.shape) == 2 and columns > 1:
            sums: Any = 0.0
            for block in blocks:
                rows = self._whole(*block)
                for row in rows.to(torch.promote_types(rows.dtype, torch.float32)).numpy():
                    sums = sums + row * row
            return torch.from_numpy(np.sqrt(sums)).to(rows.dtype)
        width, found = max(MOST * columns // (source.spec.numel * 4), 1), []
        for left in range(0, columns, width):
            strip = torch.cat([self._whole(*block)[:, left : left + width] for block in blocks])
            found.append(torch.linalg.vector_norm(strip.transpose(0, 1).flatten(1), dim=1))
        return torch.cat(found)


def _around(core: torch.Tensor, two: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Return the kernel of a convolution from a core with the kernel's size and two matrices."""
    return torch.einsum("ij...,ip,jr->pr...", core, two, one)


def _blocks(first: int, last: int, height: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each block of ``height`` rows that the rows touch, with the first and last row inside it."""
    for number in range(first // height, -(-last // height)):
        yield number, max(first - number * height, 0), min(last - number * height, height)


def _rows(two: torch.Tensor, one: torch.Tensor, first: int, last: int, transposed: bool) -> torch.Tensor:
    """Return rows of a product, or of its transpose, with the same bits as in the whole product."""
    begin = max(0, min(first, last - FEWEST))
    end = max(last, begin + FEWEST)
    product = (two @ one[:, begin:end]).T if transposed else two[begin:end] @ one
    return product[first - begin : last - begin]
