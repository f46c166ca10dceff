"""VAL210: indices of sparse tensors that are outside of the shape; torch's own check says which are."""

import warnings

import pytest
import torch
from packaging.version import Version

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
    "coo, not sorted": lambda: _coo([[1, 0], [0, 0]], (2, 2)),
    "coo, twice": lambda: _coo([[1, 1], [0, 0]], (2, 2)),
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

UNSORTED = {
    "csr": lambda: _compressed(torch.sparse_csr_tensor, [0, 2], [1, 0], (1, 2)),
    "csr, twice": lambda: _compressed(torch.sparse_csr_tensor, [0, 2], [1, 1], (1, 2)),
    "csr, rows that go back": lambda: _compressed(torch.sparse_csr_tensor, [0, 2, 1, 2], [0, 1], (3, 2)),
    "bsc": lambda: _compressed(torch.sparse_bsc_tensor, [0, 2], [1, 0], (4, 3), _BLOCKS),
    "coo that claims to be coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[1, 0]]), _VALUES, (2,), is_coalesced=True, check_invariants=False
    ),
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


@pytest.mark.parametrize("name", UNSORTED)
def test_what_torch_refuses_since_2_15_is_a_warning(name, tmp_path):
    torch.save({"w": UNSORTED[name](), "b": torch.ones(2)}, tmp_path / "f.pth")
    if Version(torch.__version__) >= Version("2.15"):
        with pytest.raises(RuntimeError):
            torch.load(tmp_path / "f.pth", weights_only=True)
    (finding,) = ckptfix.check(tmp_path / "f.pth").findings
    assert (finding.code, finding.level, finding.keys) == ("VAL210", Level.WARNING, ("w",))
    for release, is_written in ((None, False), ("2.14", True)):
        report = ckptfix.repair(tmp_path / "f.pth", output=tmp_path / "out.pth", for_torch=release).report
        assert (report.exit_code == 0) is (tmp_path / "out.pth").exists() is is_written
