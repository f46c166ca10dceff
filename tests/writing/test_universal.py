"""Folders from which DeepSpeed resumes, made of its ranks: what they hold is what ``ds_to_universal.py`` makes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import UsageError, WriteError
from ckptfix.reading.folders.ranks.names import LATEST_UNIVERSAL
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked
from tests.reading.folders.ranks.test_zero import write_zero


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_masters_and_moments_equal_those_of_deepspeed(tmp_path: Path) -> None:
    theirs, _ = unpacked("universal_zero2", tmp_path / "theirs")
    ckptfix.repair(theirs, output=tmp_path / "ours", format="universal")
    assert (tmp_path / "ours" / "latest_universal").read_text() == "global_step2_universal"
    ours, theirs = tmp_path / "ours" / "global_step2_universal", theirs / "global_step2_universal"
    written = sorted(path.relative_to(ours / "zero").as_posix() for path in (ours / "zero").glob("*/*.pt"))
    trained = [path.parent for path in (theirs / "zero").glob("*/exp_avg.pt")]
    kinds = ("exp_avg", "exp_avg_sq", "fp32", "step")
    assert written == sorted(f"{folder.name}/{kind}.pt" for folder in trained for kind in kinds)
    for folder in trained:
        for kind in kinds[:3]:
            one, other = load(ours / "zero" / folder.name / f"{kind}.pt"), load(folder / f"{kind}.pt")
            assert one["cat_dim"] == other["cat_dim"] == 0
            assert bytes_of(one["param"]) == bytes_of(other["param"])
        assert load(ours / "zero" / folder.name / "step.pt") == load(folder / "step.pt")
    groups = load(ours / "zero" / "optimizer_state.pt")["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["params"] for group in groups] == [[0], [1]]


def test_both_names_of_the_model_states_hold_buffers_and_names_and_no_trained_weight(tmp_path: Path) -> None:
    source, _ = unpacked("zero3_w2_fp32_g1", tmp_path)
    ckptfix.repair(source, output=tmp_path / "ours", format="universal")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = load(tmp_path / "ours" / "global_step2" / name)
        assert states["module"]["cnt"] == 5
        assert states["module"]["frozen.weight"].shape == (5, 7)
        assert states["module"]["l1.weight"].shape == states["module"]["head.weight"].shape == (0,)
        assert list(states["param_shapes"][0].items())[1] == ("l1.weight", (11, 7))
        assert states["shared_params"] == {"head.weight": "emb.weight"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("zero2_w2_bf16_g2", torch.bfloat16),
        ("zero3_w3_bf16_g2", torch.bfloat16),
        ("zero2_w5_fp16_g9", torch.float16),
        ("zero2_w3_fp32_g1", torch.float32),
    ],
)
def test_the_model_states_have_the_dtypes_of_the_training(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """As DeepSpeed's own have; also after a second conversion."""
    source, _ = unpacked(name, tmp_path)
    expected = ckptfix.open_checkpoint(source).state_dict()
    for number in range(2):
        output = tmp_path / f"ours{number}"
        ckptfix.repair(source, output=output, format="universal")
        module = load(output / "global_step2" / "mp_rank_00_model_states.pt")["module"]
        assert {module[key].dtype for key in module if not module[key].numel()} == {dtype}
        assert module["scale"].dtype == expected["scale"].dtype
        note = "the weights are the fp32 masters of training in " + str(dtype).removeprefix("torch.")
        messages = [finding.message for finding in ckptfix.check(output).findings]
        assert (note in messages) is (dtype != torch.float32)
        source = output


@pytest.mark.parametrize("prefix", ["_forward_module.", "module.", "_orig_mod."])
def test_the_run_finds_its_parameters_under_the_names_of_its_wrappers(tmp_path: Path, prefix: str) -> None:
    """DeepSpeed's engine looks for the names in ``param_shapes``, which are those of its own model."""
    tensors = {f"{prefix}{name}": torch.rand(3, 5) for name in ("emb.weight", "l1.weight")}
    (tmp_path / "source").mkdir()
    write_zero(tmp_path / "source", tensors, world=2)
    ckptfix.repair(tmp_path / "source", output=tmp_path / "ours", format="universal")
    (written,) = (tmp_path / "ours").glob("*/zero")
    assert {folder.name for folder in written.iterdir() if folder.is_dir()} == tensors.keys()
    assert load(written.parent / "mp_rank_00_model_states.pt")["module"].keys() == tensors.keys()
    ckptfix.repair(tmp_path / "ours", output=tmp_path / "whole.pth")
    assert load(tmp_path / "whole.pth")["module"].keys() == {"emb.weight", "l1.weight"}


@pytest.mark.parametrize("name", ["zero1_w3_bf16_g2", "zero2_w3_fp32_g1", "zero3_w3_bf16_g2", "universal_zero3"])
def test_it_opens_with_the_weights_of_its_source(tmp_path: Path, name: str) -> None:
    source, _ = unpacked(name, tmp_path)
    ckptfix.repair(source, output=tmp_path / "ours", format="universal")
    before, after = (
        ckptfix.open_checkpoint(source).state_dict(),
        ckptfix.open_checkpoint(tmp_path / "ours").state_dict(),
    )
    assert list(before) == list(after)
    assert all(bytes_of(before[key]) == bytes_of(after[key]) for key in before)


def test_an_optimizer_without_names_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {}}, "param_groups": []}}, tmp_path / "a.pth")
    with pytest.raises(WriteError, match="needs one optimizer with its state keyed by parameter name"):
        ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "out", format="universal")
    assert not (tmp_path / "out").exists()


def by_name(tmp_path: Path, name: str, dtype: torch.dtype) -> Path:
    state = {name: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(7.0)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [name]}]}
    torch.save({"model": {name: torch.ones(2, dtype=dtype)}, "optim": optimizer}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_a_plain_file_with_names_becomes_one(tmp_path: Path) -> None:
    output = ckptfix.repair(by_name(tmp_path, "w", torch.float32), beside=True, format="universal").report.output
    assert output == str(tmp_path / "a.universal")
    assert torch.equal(ckptfix.open_checkpoint(output).state_dict()["w"], torch.ones(2))
    assert (tmp_path / "a.universal" / LATEST_UNIVERSAL).read_text() == "global_step7"


def test_flat_keys_become_groups_of_parameters_with_the_same_options(tmp_path: Path) -> None:
    """As torchtitan saves them, with the options of each parameter. DeepSpeed 0.19.8 resumes from the result."""
    options, moments = {"a.weight": 0.1, "a.bias": 0.0, "b.weight": 0.1}, ("exp_avg", "exp_avg_sq")
    optimizer: dict[str, Any] = {f"state.{name}.{what}": torch.rand(2) for name in options for what in moments}
    optimizer |= {f"state.{name}.step": torch.tensor(7.0) for name in options}
    optimizer |= {f"param_groups.{name}.weight_decay": decay for name, decay in options.items()}
    torch.save({"model": {name: torch.ones(2) for name in options}, "optimizer": optimizer}, tmp_path / "a.pth")
    ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "out", format="universal")
    made: Any = ckptfix.open_checkpoint(tmp_path / "out").root
    assert made["optimizer"]["param_groups"] == [
        {"weight_decay": 0.1, "params": ["a.weight", "b.weight"]},
        {"weight_decay": 0.0, "params": ["a.bias"]},
    ]
    ckptfix.repair(tmp_path / "out", output=tmp_path / "whole.pth")
    state = torch.load(tmp_path / "whole.pth")["optimizer"]["state"]
    assert all(torch.equal(state[name]["exp_avg"], optimizer[f"state.{name}.exp_avg"]) for name in options)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("w", torch.float16, "w would be float16; write it with"),
        ("../w", torch.float32, "cannot be folder names"),
        ("a/w", torch.float32, "cannot be folder names"),
    ],
)
def test_data_without_a_place_in_the_format_is_refused(
    tmp_path: Path, name: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(WriteError, match=message):
        ckptfix.repair(by_name(tmp_path, name, dtype), output=tmp_path / "out", format="universal")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pth"]


def test_an_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="folders are never replaced"):
        ckptfix.repair(by_name(tmp_path, "w", torch.float32), output=tmp_path / "out", format="universal", force=True)


@pytest.mark.parametrize("tag", ["pytorch_model", "checkpoint"])
def test_the_tag_is_that_of_the_source(tmp_path: Path, tag: str) -> None:
    """accelerate and Lightning load no other; a folder without ``latest`` next to it is of no run."""
    folder, _ = unpacked("zero2_w2_bf16_g2", tmp_path)
    (folder / "global_step2").rename(folder / tag)
    for output, (named, expected) in enumerate(((tag, tag), ("another", tag), ("", "global_step2"))):
        (folder / "latest").write_text(named)
        ours = tmp_path / str(output)
        ckptfix.repair(folder / tag, output=ours, format="universal")
        assert (ours / LATEST_UNIVERSAL).read_text() == expected
        assert (ours / expected / "zero").is_dir()
