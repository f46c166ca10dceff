from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from ckptfix.errors import WriteError
from ckptfix.formats import output, safetensors_write, torch_write
from ckptfix.formats.output import output_format, temporary_beside, verify, writer_for
from tests.formats.files import opened, saved, write
from tests.formats.state_dicts import KINDS, STRIDED, ordered


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith("views of") or kind == "views of float32"]
)
def test_what_the_writers_write_is_found_equal(kind, form, tmp_path):
    if kind in ("two dtypes of one storage", "conjugated and negated views"):
        from ckptfix.live import open_state_dict

        checkpoint = open_state_dict(ordered(KINDS[kind]()))
    else:
        checkpoint = opened(saved(ordered(KINDS[kind]()), tmp_path))
    try:
        path = write(checkpoint, form, tmp_path)
    except WriteError as error:
        assert "cannot hold" in str(error)  # noqa: PT017 - only some of the kinds have a form in each format
        return
    verify(path, checkpoint, path)


def changed(kind: str) -> dict[str, torch.Tensor]:
    weight = torch.arange(4.0)
    return {
        "as it was": {"a": weight, "b": weight, "c": torch.zeros(2)},
        "a value": {"a": weight + 1, "b": weight, "c": torch.zeros(2)},
        "a sign of zero": {"a": weight, "b": weight, "c": -torch.zeros(2)},
        "a name": {"a": weight, "b": weight, "d": torch.zeros(2)},
        "the order": {"b": weight, "a": weight, "c": torch.zeros(2)},
        "a shape": {"a": weight, "b": weight, "c": torch.zeros(2, 1)},
        "a dtype": {"a": weight, "b": weight, "c": torch.zeros(2, dtype=torch.int32)},
        "a tie": {"a": weight, "b": weight.clone(), "c": torch.zeros(2)},
        "requires_grad": {"a": weight, "b": weight, "c": torch.zeros(2, requires_grad=True)},
        "a tensor too few": {"a": weight, "b": weight},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "a value",
        "a sign of zero",
        "a name",
        "the order",
        "a shape",
        "a dtype",
        "a tie",
        "requires_grad",
        "a tensor too few",
    ],
)
def test_any_difference_is_found(kind, tmp_path):
    expected = opened(saved(changed("as it was"), tmp_path))
    verify(saved(changed("as it was"), tmp_path, "same.pth"), expected, tmp_path / "out")
    with pytest.raises(WriteError, match="differs from the plan"):
        verify(saved(changed(kind), tmp_path, "other.pth"), expected, tmp_path / "out")


def test_another_quantiser_is_found(tmp_path):
    def quantised(scale: float) -> dict[str, torch.Tensor]:
        return {"q": torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.int8), scale, 0)}

    with pytest.raises(WriteError, match="the quantiser of q"):
        verify(saved(quantised(0.5), tmp_path, "a.pth"), opened(saved(quantised(0.25), tmp_path)), tmp_path)


@pytest.mark.parametrize("name", ["float32", "float64", "uint8", "bfloat16"])
def test_tensors_of_many_blocks_are_compared_block_by_block(name, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.formats.sources.BLOCK", 64)
    monkeypatch.setattr("ckptfix.formats.copying.BLOCK", 64)
    tensor = (torch.arange(40 * 30) % 251).to(STRIDED[name]).reshape(40, 30)
    checkpoint = opened(saved({"t": tensor.t(), "part": tensor[:, 1::2], "plain": tensor}, tmp_path))
    for form in ("zip", "legacy", "safetensors"):
        verify(write(checkpoint, form, tmp_path, f"{name}-{form}"), checkpoint, tmp_path)


def test_a_file_that_does_not_open_is_not_delivered(tmp_path):
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(WriteError, match="does not open again"):
        verify(tmp_path / "bad", opened(saved({"w": torch.ones(1)}, tmp_path)), tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("form", "release", "writer"),
    [
        ("safetensors", None, safetensors_write.write),
        ("pth", None, torch_write.write_zip),
        ("pth", "1.6", torch_write.write_zip),
        ("pth", "1.5.1", torch_write.write_legacy),
        ("pth", "0.4", torch_write.write_legacy),
    ],
)
def test_the_container_is_one_that_the_release_reads(form, release, writer):
    assert writer_for(form, release) is writer


def test_the_format_is_that_of_the_source_unless_asked(tmp_path):
    checkpoint = opened(saved({"w": torch.ones(1)}, tmp_path))
    assert output_format(checkpoint, None) == "pth"
    assert output_format(checkpoint, "safetensors") == "safetensors"
    assert output_format(opened(write(checkpoint, "safetensors", tmp_path)), None) == "safetensors"


def test_a_temporary_file_is_gone_at_the_end_however_it_ends(tmp_path):
    like = tmp_path / "like"
    like.touch(0o640)
    like.chmod(0o640)

    def fail() -> None:
        with temporary_beside(tmp_path / "out.pth", like) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o640
            assert temporary.parent == tmp_path
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


def test_without_a_model_the_permissions_are_those_of_any_new_file(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with temporary_beside(tmp_path / "out.pth", Path("/nowhere")) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert output.SAFETENSORS == "safetensors"
