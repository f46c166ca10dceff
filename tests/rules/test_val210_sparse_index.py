"""VAL210: indices of sparse tensors that are outside of the shape; torch's own check says which are."""

import warnings

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.rules.val210_sparse_index import sparse_index
from tests.rules.proposals import propose

warnings.filterwarnings("ignore", message="Sparse CSR")

_VALUES = torch.tensor([1.0, 2.0])


def _coo(indices, shape, values=_VALUES):
    return torch.sparse_coo_tensor(torch.tensor(indices, dtype=torch.int64), values, shape, check_invariants=False)


def _compressed(make, compressed, plain, shape, values=_VALUES):
    return make(torch.tensor(compressed), torch.tensor(plain), values, shape, check_invariants=False)


_BLOCKS = torch.ones(2, 2, 3)

SOUND = {
    "coo": lambda: _coo([[0, 1], [2, 9]], (3, 10)),
    "hybrid coo": lambda: _coo([[0, 2]], (3, 5), torch.ones(2, 5)),
    "no values": lambda: _coo([[], []], (3, 10), torch.tensor([])),
    "csr": lambda: _compressed(torch.sparse_csr_tensor, [0, 1, 2], [0, 1], (2, 2)),
    "csr of int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), _VALUES, (2, 2)
    ),
    "batched csr": lambda: torch.ones(2, 3, 4).to_sparse_csr(),
    "csc": lambda: _compressed(torch.sparse_csc_tensor, [0, 1, 2], [0, 4], (5, 2)),
    "bsr": lambda: _compressed(torch.sparse_bsr_tensor, [0, 1, 2], [0, 1], (4, 6), _BLOCKS),
    "bsc": lambda: _compressed(torch.sparse_bsc_tensor, [0, 1, 2], [0, 1], (4, 6), _BLOCKS),
}

OUTSIDE = {
    "coo": lambda: _coo([[0, 1], [2, 99]], (3, 10)),
    "coo, the first axis": lambda: _coo([[0, 3], [2, 9]], (3, 10)),
    "coo, negative": lambda: _coo([[0, -1], [2, 9]], (3, 10)),
    "csr, a column": lambda: _compressed(torch.sparse_csr_tensor, [0, 1, 2], [0, 2], (2, 2)),
    "csr, the rows": lambda: _compressed(torch.sparse_csr_tensor, [0, 1, 9], [0, 1], (2, 2)),
    "csc, a row": lambda: _compressed(torch.sparse_csc_tensor, [0, 1, 2], [0, 5], (5, 2)),
    "bsr, a block": lambda: _compressed(torch.sparse_bsr_tensor, [0, 1, 2], [0, 2], (4, 6), _BLOCKS),
    "bsc, a block": lambda: _compressed(torch.sparse_bsc_tensor, [0, 1, 2], [0, 2], (4, 6), _BLOCKS),
}


@pytest.mark.parametrize("name", SOUND)
def test_noop(name):
    assert propose(sparse_index, {"w": SOUND[name](), "b": torch.ones(2)}) == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_outside_of_the_shape_is_an_error_and_nothing_is_written(name, tmp_path):
    tensor = OUTSIDE[name]()
    (finding,) = propose(sparse_index, {"w": tensor, "b": torch.ones(2)})
    assert (finding.level, finding.keys) == (Level.ERROR, ("w",))
    torch.save({"w": tensor, "b": torch.ones(2)}, tmp_path / "f.pth")
    report = ckptfix.repair(tmp_path / "f.pth", output=tmp_path / "out.pth").report
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
