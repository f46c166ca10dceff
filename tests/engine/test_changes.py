"""Tensors that are assembled from parts of others."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

import ckptfix
from ckptfix.core.edits import BLOCKS, Adapt, Assemble, Dequantise, Drop, Fold, Rename, Zero
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.errors import PlanError
from ckptfix.reading import boxes


def rows(start: int, stop: int, columns: int = 3) -> tuple[tuple[int, int], ...]:
    return ((start, stop), (0, columns))


def state() -> dict[str, torch.Tensor]:
    return {
        "first": torch.zeros(2),
        "qkv": torch.arange(18.0).reshape(6, 3),
        "w.0": torch.arange(6.0).reshape(2, 3) + 50,
        "w.1": torch.arange(6.0).reshape(2, 3) + 70,
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }


SPLIT = tuple(
    Assemble(name, "float32", (2, 3), (Part("qkv", rows(start, start + 2), rows(0, 2)),))
    for name, start in (("q", 0), ("k", 2), ("v", 4))
)
STACK = Assemble(
    "w", "float32", (2, 2, 3), tuple(Part(f"w.{at}", rows(0, 2), ((at, at + 1), (0, 2), (0, 3))) for at in (0, 1))
)
TURN = Assemble("straight", "float32", (2, 3), (Part("turned", ((0, 3), (0, 2)), rows(0, 2), axes=(1, 0)),))
# Rotary embeddings: the halves of a head become pairs.
ROPE = Assemble("rope", "float32", (6, 3), (Part("qkv", rows(0, 6), rows(0, 6), view=(2, 3, 3), axes=(1, 0, 2)),))


def carry_out(*edits, source=None, **more):
    return ckptfix.repair(source or state(), plan=Plan((Step("KEY106", edits),)), **more)


def test_split_stacked_and_transposed():
    before = state()
    done = carry_out(*SPLIT, STACK, TURN).state_dict()
    assert list(done) == ["first", "q", "k", "v", "w", "straight"]
    assert torch.equal(torch.cat([done["q"], done["k"], done["v"]]), before["qkv"])
    assert torch.equal(done["w"], torch.stack([before["w.0"], before["w.1"]]))
    assert torch.equal(done["straight"], before["turned"].t())


def test_a_reshaped_view_is_assembled():
    wanted = state()["qkv"].view(2, 3, 3).transpose(0, 1).reshape(6, 3)
    assert torch.equal(carry_out(ROPE).state_dict()["rope"], wanted)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_an_assembled_tensor_is_written_and_undone(tmp_path, suffix):
    source, there, back = tmp_path / "a.pth", tmp_path / f"b{suffix}", tmp_path / "c.pth"
    torch.save(state(), source)
    plan = Plan((Step("KEY106", (*SPLIT, STACK, TURN)),))
    assert ckptfix.repair(source, output=there, plan=Plan.from_json(plan.to_json()), force=True).report.output
    ckptfix.repair(there, output=back, plan=plan.inverse(), force=True)
    again = torch.load(back)
    assert again.keys() == state().keys()
    assert all(torch.equal(again[key], value) for key, value in state().items())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_large_tensors_are_put_together_panel_by_panel(tmp_path, monkeypatch, suffix, dtype):
    """Use panels and slabs of a few rows, so that a small tensor has many."""
    if (suffix, dtype) == (".safetensors", torch.complex128):
        dtype = torch.complex64
    monkeypatch.setattr(boxes, "PANEL", 300)
    monkeypatch.setattr(boxes, "SLAB", 200)
    numbers = torch.randint(0, 200, (3, 35, 24)).to(dtype)
    before = {"a": numbers[0], "b": numbers[1], "c": numbers[2], "cube": torch.randint(0, 200, (5, 6, 40)).to(dtype)}
    torch.save(before, tmp_path / "a.pth")
    rules = (
        MapRule("{a,b}", "ab", ("concat dim 1", "(x d t) i -> i (x t d) with d=5 t=7")),
        MapRule("c", "c.{l,r}", ("a b -> b a", "split 1:3")),
        MapRule("cube", "{e}.cube", ("a b c -> c b a", "unstack")),
    )
    repaired = ckptfix.repair(
        tmp_path / "a.pth", output=tmp_path / f"b{suffix}", rename_map=RenameMap(rules), values=False, force=True
    )
    done = load_file(tmp_path / "b.safetensors") if suffix == ".safetensors" else torch.load(tmp_path / "b.pth")
    both = torch.cat([before["a"], before["b"]], 1)
    assert torch.equal(done["ab"], both.view(1, 5, 7, 48).permute(3, 0, 2, 1).reshape(48, 35))
    assert torch.equal(torch.cat([done["c.l"], done["c.r"]]), before["c"].t())
    assert torch.equal(torch.stack([done[f"{at}.cube"] for at in range(40)]), before["cube"].permute(2, 1, 0))
    ckptfix.repair(
        tmp_path / f"b{suffix}", output=tmp_path / "c.pth", plan=repaired.plan.inverse(), values=False, force=True
    )
    again = torch.load(tmp_path / "c.pth")
    assert all(torch.equal(again[key], value) for key, value in before.items())


def test_ties_survive_an_assembly():
    tied = torch.arange(6.0).reshape(2, 3)
    parts = [Assemble(f"{name}.t", "float32", (3, 2), (Part(name, rows(0, 2), ((0, 3), (0, 2)), axes=(1, 0)),))
             for name in "ab"]  # fmt: skip
    done = carry_out(*parts, source={"a": tied, "b": tied}).state_dict()
    assert done["a.t"].data_ptr() == done["b.t"].data_ptr()


def test_a_lazily_conjugated_tensor_is_split_as_the_numbers_that_it_stands_for():
    qkv = torch.randn(6, 3, dtype=torch.complex64).conj()
    done = carry_out(*(replace(part, dtype="complex64") for part in SPLIT), source={"qkv": qkv}).state_dict()
    assert torch.equal(torch.cat([done[key] for key in "qkv"]), qkv)


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        pytest.param(SPLIT[:2], "12 of the 18 elements", id="a part is lost"),
        pytest.param([*SPLIT, SPLIT[0]], "twice", id="one key twice"),
        pytest.param([*SPLIT, Drop("qkv")], "both changes and drops", id="used and dropped"),
        pytest.param([*SPLIT, Rename("qkv", "x")], "both changes and drops", id="used and renamed"),
        pytest.param([*SPLIT, Rename("first", "q")], "two sources", id="two sources"),
        pytest.param([Assemble("x", "float16", (6, 3), (Part("qkv", rows(0, 6), rows(0, 6)),))], "float32", id="dtype"),
        pytest.param([Assemble("x", "float32", (2,), (Part("no", ((0, 2),), ((0, 2),)),))], "no, which", id="no key"),
        pytest.param([Assemble("x", "float32", (2,), (Part("first", ((0, 2), (0, 1)), ((0, 2),)),))], "outside",
                     id="another number of axes"),
        pytest.param([Zero("first", "int8", "subnormal")], "numbers of first cannot be set to zero", id="zeros"),
        pytest.param([Dequantise("qkv", "float32", "float16", "first", BLOCKS)], "first does not have the scales",
                     id="other scales"),
        pytest.param([Dequantise("qkv", "float32", "float16", "no", BLOCKS)], "no does not have the scales",
                     id="no scales"),
        pytest.param([Adapt("x", "no", "depth", "float32", (2,), (2,))], "no is not a tensor to adapt", id="no source"),
        pytest.param([Fold("qkv", "float32", (6, 3), "pruning", ("no",))], "has no no to merge", id="no part"),
    ],
)  # fmt: skip
def test_refused(edits, problem):
    with pytest.raises(PlanError, match=problem):
        carry_out(*edits)
