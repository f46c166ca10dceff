"""Ranks written by the installed frameworks, compared with the results of their own tools.

FSDP is that of the installed torch. DeepSpeed and Megatron are the installed ones, or those of the Python that
``CKPTFIX_DEEPSPEED`` and ``CKPTFIX_MEGATRON`` name."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.reading.boxes import row_major_bytes
from tests.checks import bytes_of

GENERATORS = Path(__file__).parent / "generators"
DEEPSPEED, MEGATRON = os.environ.get("CKPTFIX_DEEPSPEED", ""), os.environ.get("CKPTFIX_MEGATRON", "")
FROZEN = {"frozen.weight", "frozen.bias"}


def generate(python: str, script: str, folder: Path, world: int, *cases: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    command = [python, str(GENERATORS / script), str(folder), str(world), str(port), *cases]
    subprocess.run(command, check=True, capture_output=True, timeout=900)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_every_kind_of_fsdp(tmp_path: Path) -> None:
    generate(sys.executable, "fsdp.py", tmp_path, 4)
    kinds = sorted(path.stem for path in tmp_path.glob("*.pt"))
    assert len(kinds) == 6
    for kind in kinds:
        truth = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        got = ckptfix.open_checkpoint(tmp_path / kind).state_dict()
        if kind == "local":  # which has no names: FIT106 takes them from the model
            assert sum(value.numel() for value in got.values()) == sum(value.numel() for value in truth.values())
            continue
        assert got.keys() == truth.keys(), kind
        for key, value in truth.items():
            assert bytes_of(got[key]) == bytes_of(value), (kind, key)
            assert kind == "names" or got[key].shape == value.shape, (kind, key)


@pytest.mark.slow
@pytest.mark.skipif(
    not MEGATRON and find_spec("megatron") is None,
    reason="megatron-core is not installed: name a Python that has it in CKPTFIX_MEGATRON",
)
@pytest.mark.parametrize("grid", ["2-1-1", "4-1-1", "1-2-1", "2-2-1", "1-2-2", "2-2-2"])
def test_every_kind_of_megatron(tmp_path: Path, grid: str) -> None:
    """Six grids of ranks and chunks, GELU and SwiGLU, MHA and GQA, tied and untied: as ranks, and as torch_dist."""
    kinds = product(("gelu", "swiglu"), ("mha", "gqa"), ("tied", "untied"))
    cases = ["-".join((grid, *kind)) for kind in kinds]
    generate(MEGATRON or sys.executable, "mcore.py", tmp_path, 4, *cases)
    for case in cases:
        truth = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        for kind in ("", "-dist"):
            got = ckptfix.open_checkpoint(tmp_path / f"{case}{kind}").state_dict()
            for key, value in truth.items():
                if kind:  # on disk, a norm is a part of the layer that follows it
                    key = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
                    key = key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
                assert (got[key].shape, bytes_of(got[key])) == (value.shape, bytes_of(value)), (case + kind, key)
                del got[key]
            assert not [key for key in got if not key.endswith("_extra_state")], case + kind


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED and find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: name a Python that has it in CKPTFIX_DEEPSPEED",
)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_kind_of_zero(tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 1 to 3, three dtypes, one, two and many groups; ties, frozen parameters and small sub-groups in each."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    generate(DEEPSPEED or sys.executable, "zero.py", tmp_path, world)
    cases = sorted(path.stem for path in tmp_path.glob("*.pt"))
    assert len(cases) == 27
    for case in cases:
        truth = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        checkpoint = ckptfix.open_checkpoint(tmp_path / case)
        root: Any = checkpoint.root
        got, optimizer = checkpoint.state_dict(), root["optimizer"]
        # What ZeRO 1 does not write for frozen parameters is in the model states, and zero_to_fp32 loses it.
        assert got.keys() - truth["weights"].keys() == (FROZEN if case.startswith("1") else set()), case
        for key, value in truth["weights"].items():
            assert (got[key].shape, bytes_of(got[key].to(value.dtype))) == (value.shape, bytes_of(value)), (case, key)
        for place, value in truth.get("moments", {}).items():
            name, _, field = place.rpartition("/")
            if name in optimizer["state"]:  # that tool invents moments of buffers and frozen parameters
                moment = row_major_bytes(optimizer["state"][name][field], case)
                assert bytes(moment) == bytes_of(value), (case, place)


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED and find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: name a Python that has it in CKPTFIX_DEEPSPEED",
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_kind_of_experts(tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 0 to 2, three dtypes, experts over all ranks that there may be: masters and moments of live optimizers."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    kinds = product((0, 1, 2), ("fp32", "bf16", "fp16"), (size for size in (1, 2, 4) if size <= world))
    cases = ["-".join(map(str, (*kind, ("one", "two")[at % 2]))) for at, kind in enumerate(kinds)]
    generate(DEEPSPEED or sys.executable, "moe.py", tmp_path, world, *cases)
    for case in cases:
        truth = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        groups = truth.pop("/groups", None)
        got, state = by_name(tmp_path / case, groups)
        assert got.keys() == {key for key in truth if "/" not in key} | {"cnt"}, case
        moments = {f"{name}/{field}" for name in state for field in state[name] if field != "step"}
        assert moments == {key for key in truth if "/" in key}, case
        for key, value in truth.items():
            name, _, field = key.partition("/")
            same = bytes(row_major_bytes(state[name][field], case)) if field else bytes_of(got[key])
            assert same == bytes_of(value), (case, key)


def by_name(folder: Path, groups: list[list[str]] | None) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return the weights and the optimizer's state in a folder; without ZeRO, ``groups`` names the numbers."""
    checkpoint = ckptfix.open_checkpoint(folder)
    root: Any = checkpoint.root
    outer = root["optimizer"]
    inner = outer.get("optimizer_state_dict", outer)
    state = {name: dict(row) for name, row in inner["state"].items()}
    if groups is not None:
        assert [len(group["params"]) for group in inner["param_groups"]] == [*map(len, groups)], folder
        state = {name: state[number] for number, name in enumerate(chain(*groups))}
        for name, master in zip(chain(*groups), chain(*outer.get("fp32_groups", [])), strict=False):
            state[name]["master"] = master
    return checkpoint.state_dict(), state


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED and find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: name a Python that has it and transformers in CKPTFIX_DEEPSPEED",
)
@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_autotp(tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 0 to 3, five models: the weights and moments that DeepSpeed gathers."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cases = ["0-fp32-llama", "0-bf16-qwen2", "1-bf16-opt", "1-fp32-qwen2", "2-bf16-tied", "2-fp32-neox", "3-bf16-llama"]
    generate(DEEPSPEED or sys.executable, "autotp.py", tmp_path, world, *cases)
    for case in cases:
        truth = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        got = ckptfix.open_checkpoint(tmp_path / case)
        names = [name for name in got.keys() if f"{name}/exp_avg" in truth]  # noqa: SIM118 - a Checkpoint
        weights, state = by_name(tmp_path / case, [names] if case.startswith("0") else None)
        for key, value in truth.items():
            name, _, field = key.partition("/")
            if not field:
                assert bytes_of(weights[key].to(value.dtype)) == bytes_of(value), (case, key)
            elif name in state:  # DeepSpeed's converter invents moments of buffers
                assert bytes(row_major_bytes(state[name][field], case)) == bytes_of(value), (case, key)
        assert {key for key in truth if "/" not in key} == weights.keys(), case
