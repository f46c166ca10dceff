"""Every command that ckptfix prints works when it is pasted. ``tests.printed`` parses those of all other tests."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

import ckptfix
from ckptfix.cli.program import exit_code
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.core.option import REPAIR
from ckptfix.report.advice import Presentation
from ckptfix.report.display import text_lines
from ckptfix.report.terminal import full_lines
from sample_checkpoints.build import SAMPLES
from tests.printed import parse

MODELS = {
    "head_missing.pth": "resnet_tiny",
    "nan_running_var.pth": "resnet_bottleneck",
    "decayed_aux_head.pth": "mlp_with_aux_head",
}


def printed(text: str) -> list[list[str]]:
    """Return the commands of a report as lists of words."""
    return [shlex.split(command) for command in re.findall(r"^ *(?:run|or): (ckptfix .*)$", text, re.MULTILINE)]


def run_all(capsys: pytest.CaptureFixture[str], *words: str) -> set[int]:
    """Run a command, then the commands that it prints, and so on until none is new."""
    codes: set[int] = set()
    todo, done = [["ckptfix", *words]], set()
    while todo:
        command = todo.pop()
        if tuple(command) in done:
            continue
        done.add(tuple(command))
        parse(command)
        codes.add(exit_code(command[1:]))
        todo += printed(capsys.readouterr().out)
    assert len(done) < 20
    return codes


@pytest.mark.parametrize(
    ("name", "model"), [*((name, "") for name in SAMPLES), *MODELS.items()], ids=lambda value: value or "alone"
)
def test_the_commands_of_the_samples(samples, tmp_path, monkeypatch, capsys, name, model):
    shutil.copy(samples / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    target = ["--model", f"sample_checkpoints.models:{model}"] if model else []
    assert run_all(capsys, "check", name, *target) <= {0, 1}


def a_quantised_entry(folder: Path) -> list[str]:
    torch.save({"w": torch.ones(2), "bn._extra_state": {"scale": torch.ones(1)}}, folder / "es.pth")
    return ["repair", "es.pth", "-o", "es.safetensors"]


def sets_with_blanks(folder: Path) -> list[str]:
    state = {"fc.weight": torch.ones(3, 3), "fc.bias": torch.ones(3)}
    torch.save({"net A": state, "net B": state}, folder / "sp.pth")
    return ["repair", "sp.pth"]


def another_head(folder: Path) -> list[str]:
    for file, classes in (("old.pth", 5), ("new.pth", 3)):
        torch.save(torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, classes)).state_dict(), folder / file)
    return ["check", "old.pth", "--like", "new.pth"]


def a_broken_twin(folder: Path) -> list[str]:
    nan = {"w": torch.full((3, 3), float("nan"))}
    torch.save({"state_dict": nan, "state_dict_ema": {"w": torch.ones(3, 3)}}, folder / "ema.pth")
    return ["repair", "ema.pth"]


def an_option_for_a_name(folder: Path) -> list[str]:
    save_file({"module.w": torch.ones(3)}, folder / "-x y.safetensors")
    return ["check", "./-x y.safetensors"]


@pytest.mark.parametrize(
    "make", [a_quantised_entry, sets_with_blanks, another_head, a_broken_twin, an_option_for_a_name]
)
def test_the_commands_of_odd_files(tmp_path, monkeypatch, capsys, make):
    monkeypatch.chdir(tmp_path)
    assert run_all(capsys, *make(tmp_path)) <= {0, 1}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="its default name"),
        pytest.param(["-o", "out.safetensors"], id="a named file"),
        pytest.param(["--shard-size", "1KB"], id="several files"),
        pytest.param(["-o", "out.pth", "--shard-size", "1KB"], id="several named files"),
        pytest.param(["--in-place"], id="in place"),
        pytest.param(["--in-place", "--backup"], id="in place, with a backup"),
    ],
)
def test_what_a_repair_leaves_is_repaired_over_what_it_has_written(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    state = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).state_dict()
    state["1.running_var"][2] = float("nan")
    torch.save({f"module.{key}": value for key, value in state.items()}, "bn.pth")
    before = Path("bn.pth").read_bytes()
    assert exit_code(["repair", "bn.pth", *options]) == 1  # renamed; the NaN remains
    (command,) = printed(capsys.readouterr().out)
    assert exit_code(command[1:]) == 0
    assert "--backup" not in options or Path("bn.pth.bak").read_bytes() == before


def test_a_written_file_is_compared_and_not_repaired_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state = {"module.fc1.weight": torch.randn(512, 784), "module.fc1.bias": torch.randn(512)}
    torch.save(state, "net.pth")
    report = ckptfix.repair("net.pth", beside=True).report
    like = Likeness(fit=Fit.EXACT, names=("torchvision/resnet18",), versions={})
    lines = text_lines(full_lines(replace(report, likeness=like), Presentation(REPAIR)))
    (line,) = (line for line in lines if "compare: " in line)
    assert line.endswith("ckptfix check net.fixed.pth --like known:torchvision/resnet18")
    assert exit_code(shlex.split(line.partition("ckptfix ")[2])) == 1  # it is another model


@pytest.mark.parametrize("options", [[], ["--for-torch", "1.4.0"], ["--format", "safetensors"], ["-o", "copy.pth"]])
def test_a_dry_run_prints_the_command_that_writes_a_file_without_defects(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2, 2)}, "a.pth")
    assert exit_code(["repair", "a.pth", "--dry-run", *options]) == 0
    commands = printed(capsys.readouterr().out)
    assert len(commands) == bool(options)
    for command in commands:
        assert exit_code(command[1:]) == 0
        assert len(list(tmp_path.iterdir())) == 2


def test_an_old_torch_is_not_given_weights_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"module.w": torch.ones(2, 2)}, "old.pth")
    for release, expected in (("1.4", "torch.load('out.pth')"), ("1.13", "torch.load('out.pth', weights_only=True)")):
        exit_code(["repair", "old.pth", "--for-torch", release, "-o", "out.pth", "--force"])
        assert capsys.readouterr().out.splitlines()[-1] == f"load it with: {expected}"


def test_salvage_is_not_advised_once_it_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"big.weight": torch.arange(1000.0) + 0.5, "b.weight": torch.randn(8, 8)}, "bad.pth")
    data = bytearray(Path("bad.pth").read_bytes())
    data[data.index((torch.arange(1000.0) + 0.5).numpy().tobytes()) + 401] ^= 4
    Path("bad.pth").write_bytes(data)
    assert exit_code(["repair", "bad.pth", "--salvage"]) == 1
    text = capsys.readouterr().out
    assert "fetch the file again; or --salvage --fill FILE takes them from another copy" in text
    assert "--salvage leaves" not in text


def test_a_twin_that_was_not_found_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    nan = {"critic1.w": torch.randn(3, 3), "critic2.w": torch.ones(3, 3)}
    nan["critic1.w"][0, 0] = float("nan")
    torch.save(nan, "flat.pth")
    assert exit_code(["repair", "flat.pth", "--replace", "VAL101", "--fill", "twin"]) == 1
    assert printed(capsys.readouterr().out) == [["ckptfix", "repair", "flat.pth", "--zero-non-finite"]]


def test_another_set_is_offered_without_the_repairs_of_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(a_broken_twin(tmp_path)) == 1
    first, other = printed(capsys.readouterr().out)
    assert {"--fill", "--replace"} <= set(first)
    assert other == ["ckptfix", "repair", "ema.pth", "--weights", "state_dict_ema"]


def test_the_command_for_a_foreseen_optimizer_brings_it_in_step(tmp_path, monkeypatch, capsys):
    """The head is still the old one when the optimizer is checked. With ``--like`` there is nothing to fill it with,
    and a command that only repairs the optimizer would do nothing."""
    monkeypatch.chdir(tmp_path)
    code = "from torch import nn\n\ndef make(size=3):\n    return nn.Sequential(nn.Linear(30, 4), nn.Linear(4, size))\n"
    Path("wider_head.py").write_text(code)
    model, wider = (torch.nn.Sequential(torch.nn.Linear(30, 4), torch.nn.Linear(4, size)) for size in (2, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pth")
    torch.save(wider.state_dict(), "like.pth")
    assert exit_code(["check", "run.pth", "--like", "like.pth"]) == 1
    text = capsys.readouterr().out
    assert "OPT101 stale-optimizer: --unsafe-fixes updates it to match" in text
    assert printed(text) == []
    assert exit_code(["check", "run.pth", "--model", "wider_head:make"]) == 1
    (command, *_) = printed(capsys.readouterr().out)
    assert "--unsafe-fixes" in command
    assert exit_code([*command[1:], "-o", "out.pth"]) == 1  # its head is random
    made = torch.load("out.pth", weights_only=True)
    again = torch.optim.AdamW(wider.parameters())
    again.load_state_dict(made["optimizer"])
    assert [len(again.state[parameter]) for parameter in wider.parameters()] == [3, 3, 0, 0]
