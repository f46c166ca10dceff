"""What the program imports before its first answer: a list, since a clock says something else on every machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.values.scan import kernel
from tests.cli.programs import environment
from tests.reading.folders.ranks.test_fsdp import dtensor

PROGRAM = """
import sys
from ckptfix.cli import main
try:
    main()
except SystemExit:
    pass
sys.stderr.write("\\n".join(sys.modules))
"""

STARTING = """
ckptfix ckptfix.cli ckptfix.cli.console ckptfix.cli.program ckptfix.core ckptfix.core.config
ckptfix.core.progress ckptfix.errors ckptfix.report ckptfix.report.style
""".split()
"""What every command begins with."""

SLOW = (
    "typer pydantic rich torch numpy safetensors packaging importlib.metadata asyncio email http logging tempfile "
    "tarfile csv html multiprocessing concurrent tomllib unittest"
).split()
"""Modules that take long, or bring many others with them, and that no look at names needs."""

OTHER_WORK = (
    "ckptfix.comparison ckptfix.explain ckptfix.smoke ckptfix.values ckptfix.zoo ckptfix.reading.tensors "
    "ckptfix.engine.delivery ckptfix.engine.applying ckptfix.engine.optimizers "
    "ckptfix.modules.factory ckptfix.smoke.recalibration ckptfix.core.target ckptfix.writing.output "
    "ckptfix.reading.folders.folders ckptfix.reading.folders.ranks.fsdp "
    "ckptfix.reading.torch_files.torchscript "
    "ckptfix.reading.torch_files.torch_tar ckptfix.reading.torch_files.torch_legacy ckptfix.reading.foreign.files "
    "ckptfix.reading.archives.wrapped ckptfix.reading.folders.sharded "
    "ckptfix.writing.safetensors ckptfix.writing.torch_files ckptfix.cli.repair "
    "ckptfix.cli.explain "
).split()
"""What a check of the names in one file has nothing to do with."""


def imported(*words: str, cwd: Path) -> set[str]:
    """The modules that a run of the program has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=cwd, env=environment(), capture_output=True, encoding="utf-8"
    )
    return set(done.stderr.split())


def within(modules: set[str], names: list[str]) -> list[str]:
    """The modules with one of these names, or inside one."""
    return sorted(module for module in modules if any(f"{module}.".startswith(f"{name}.") for name in names))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state_dict = {"conv.weight": torch.ones(2, 2), "bn.running_mean": torch.ones(2), "bn.running_var": torch.ones(2)}
    state_dict |= {"bn.weight": torch.ones(2), "bn.bias": torch.ones(2), "bn.num_batches_tracked": torch.tensor(7)}
    torch.save(state_dict, tmp_path / "a.pth")
    save_file(state_dict, tmp_path / "a.safetensors")
    return tmp_path


def test_the_version_imports_no_command(tmp_path: Path):
    modules = imported("--version", cwd=tmp_path)
    assert within(modules, ["ckptfix"]) == STARTING
    assert within(modules, SLOW) == []


@pytest.mark.parametrize("words", [["--help"], ["check", "--help"]], ids=" ".join)
def test_help_imports_only_the_commands(words: list[str], tmp_path: Path):
    modules = imported(*words, cwd=tmp_path)
    assert within(modules, SLOW) == []
    assert (
        within(modules, ["ckptfix.reading.opening", "ckptfix.rules", "ckptfix.core.checkpoint", *OTHER_WORK[:8]]) == []
    )


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
@pytest.mark.parametrize("words", [["check", "--no-values"], ["inspect"]], ids=" ".join)
def test_a_check_of_names_imports_one_reader(words: list[str], name: str, folder: Path):
    modules = imported(*words, name, cwd=folder)
    of_archives = ["shutil", "zipfile"] if name.endswith("safetensors") else []
    assert within(modules, [*SLOW, "locale", *of_archives]) == []
    assert within(modules, OTHER_WORK) == []
    safetensors, torch_zip = "ckptfix.reading.safetensors", "ckptfix.reading.torch_files.torch_zip"
    assert modules & {safetensors, torch_zip} == {safetensors if name.endswith("safetensors") else torch_zip}


@pytest.mark.skipif(kernel() is None, reason="without the compiled kernel, numpy looks at the numbers")
@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
def test_ordinary_values_are_checked_without_numpy(name: str, folder: Path):
    modules = imported("check", name, cwd=folder)
    assert "ckptfix.values.scan" in modules
    assert within(modules, ["numpy", "statistics", "torch"]) == []


def test_no_matching_of_names_for_an_optimizer_that_fits(tmp_path: Path):
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model.module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pth")
    modules = imported("check", "--no-values", "a.pth", cwd=tmp_path)
    assert "ckptfix.rules.opt101_stale_optimizer" in modules
    assert within(modules, [*SLOW, "hashlib", "ckptfix.maps.inference", "ckptfix.maps.folding"]) == []


def test_rules_that_do_not_apply_are_not_imported(folder: Path):
    modules = imported("check", "--no-values", "a.safetensors", cwd=folder)
    assert "ckptfix.rules.key102_wrapper_prefix" in modules
    assert not modules & {
        f"ckptfix.rules.{name}"
        for name in ("fit101_missing_key", "val201_decayed", "fil201_storage_damage", "fit105_tie")
    }


def test_option_values_are_validated(folder: Path):
    """A number is a number, and a choice is one of the few."""
    for words in (["--seed", "many"], ["--output-format", "prose"]):
        done = subprocess.run(
            [sys.executable, "-m", "ckptfix", "check", *words, "a.pth"],
            cwd=folder,
            env=environment(),
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 2, words
        assert words[0] in done.stderr


def test_a_repair_loads_no_openssl(folder: Path):
    modules = imported("repair", "a.pth", "-o", "repaired.pth", cwd=folder)
    assert (folder / "repaired.pth").exists()
    assert within(modules, ["_hashlib", "secrets", "random"]) == []


def test_ranks_load_no_openssl(tmp_path: Path):
    for rank in range(2):
        torch.save({"w": dtensor(rank, torch.arange(4.0))}, tmp_path / f"rank_{rank}.pt")
    modules = imported("check", "--no-values", str(tmp_path), cwd=tmp_path)
    assert "ckptfix.reading.folders.ranks.fsdp" in modules
    assert within(modules, [*SLOW, "_hashlib"]) == []


@pytest.mark.skipif(kernel() is None, reason="the kernel adds the products")
def test_merging_a_file_of_kohya_needs_no_torch(tmp_path: Path):
    save_file({"down.0.to_q.weight": torch.rand(32, 16)}, tmp_path / "base.safetensors")
    layer = "lora_unet_down_0_to_q"
    matrices = {f"{layer}.lora_down.weight": torch.rand(4, 16), f"{layer}.lora_up.weight": torch.rand(32, 4)}
    save_file({**matrices, f"{layer}.alpha": torch.tensor(2.0)}, tmp_path / "lora.safetensors")
    merging = "repair base.safetensors --adapter lora.safetensors -o merged.safetensors"
    for command in ("check lora.safetensors", "check base.safetensors --adapter lora.safetensors", merging):
        assert within(imported(*command.split(), cwd=tmp_path), ["torch"]) == []
    assert (tmp_path / "merged.safetensors").exists()
