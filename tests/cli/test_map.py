"""``ckptfix map`` on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.maps.library import names, shipped
from tests.cli.programs import run_here
from tests.cli.test_schemas import assert_valid

MODELS = """\
import torch


def block(width, **modules):
    return torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in modules.items()})


def ours(width=8, depth=2):
    sizes = {"qkv": (width, 3 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [block(width, **sizes) for _ in range(depth)]
    return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(layers)})


def theirs(width=8, depth=2):
    three = {name: (width, width) for name in ("query", "key", "value")}
    layers = [block(width, **three, fc1=(width, 4 * width), fc2=(4 * width, width)) for _ in range(depth)]
    return torch.nn.ModuleDict({"layer": torch.nn.ModuleList(layers)})


class Two(torch.nn.Module):
    def __init__(self, first, second, act):
        super().__init__()
        self.names, self.act = (first, second), act
        for name in self.names:
            self.add_module(name, torch.nn.Linear(6, 6))

    def forward(self, x):
        first, second = map(self.get_submodule, self.names)
        return second(self.act(first(x)))


def walking():
    return Two("go", "rest", torch.relu)


def running():
    return Two("fast", "slow", torch.relu)


def resting():
    return Two("fast", "slow", torch.sigmoid)


def large():
    return theirs(16, 5)
"""
GPT = {"attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32)}
WANTED = """\
blocks.{n}.qkv.{weight,bias} → layer.{n}.{query,key,value}.{weight,bias}, split 3  (likely)
blocks.{n}.up.{weight,bias} → layer.{n}.fc1.{weight,bias}
blocks.{n}.down.{weight,bias} → layer.{n}.fc2.{weight,bias}
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(MODELS, made)
    torch.manual_seed(0)
    torch.save({f"module.{key}": value for key, value in made["ours"]().state_dict().items()}, "ours.pth")
    torch.save(made["ours"](16, 5).state_dict(), "large.pth")
    save_file(made["theirs"]().state_dict(), "theirs.safetensors")
    return tmp_path


@pytest.mark.parametrize("a", ["ours.pth", "nets:ours"])
@pytest.mark.parametrize("b", ["theirs.safetensors", "nets:theirs"])
def test_a_map_between_two_files_or_models(a: str, b: str, zoo: Path):
    done = run_here("map", a, b, cwd=zoo)
    assert (done.returncode, done.stdout) == (0, WANTED)
    assert "--rename-map" in done.stderr


def test_a_map_applies_to_a_model_of_another_size(zoo: Path):
    written = run_here("map", "ours.pth", "theirs.safetensors", "--output-format", "json", cwd=zoo).stdout
    assert_valid(json.loads(written), "map")
    (zoo / "map.json").write_text(written)
    done = run_here("repair", "large.pth", "--rename-map", "map.json", "--model", "nets:large", "--no-smoke", cwd=zoo)
    assert done.returncode == 0, done.stdout
    assert "assemble 10 keys: blocks.{n}.qkv.{…} → layer.{n}.query.{…} (split)" in done.stdout
    before, after = torch.load("large.pth"), torch.load("large.fixed.pth")
    assert torch.equal(after["layer.4.key.weight"], before["blocks.4.qkv.weight"][16:32])


def test_the_function_gives_the_bytes_that_a_repair_gives(zoo: Path):
    code = run_here("map", "ours.pth", "theirs.safetensors", "--output-format", "python", cwd=zoo).stdout
    assert "ckptfix" not in code.replace("Made by ckptfix map", "")
    names: dict[str, Any] = {}
    exec(code, names)
    (zoo / "map.json").write_text(
        run_here("map", "nets:ours", "nets:theirs", "--output-format", "json", cwd=zoo).stdout
    )
    run_here("repair", "large.pth", "--rename-map", "map.json", cwd=zoo)
    pasted, repaired = names["convert"](torch.load("large.pth")), torch.load("large.fixed.pth")
    assert pasted.keys() == repaired.keys()
    assert all(torch.equal(value, repaired[key]) for key, value in pasted.items())


def test_the_shipped_maps_conform_to_the_schema():
    for name in names():
        assert_valid(json.loads(shipped(name).json_text()), "map")


def test_a_shipped_map_outranks_what_is_inferred(zoo: Path):
    """nanoGPT to GPT-2: no shape shows that a square matrix is transposed."""
    torch.save({f"transformer.h.0.{key}.weight": torch.ones(shape) for key, shape in GPT.items()}, "nano.pth")
    save_file(
        {f"transformer.h.0.{key}.weight": torch.ones(shape[::-1]) for key, shape in GPT.items()}, "gpt.safetensors"
    )
    done = run_here("map", "nano.pth", "gpt.safetensors", cwd=zoo)
    layers = "{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}"
    assert done.stdout == f"transformer.h.{{n}}.{layers}.weight → transformer.h.{{n}}.{layers}.weight, transpose\n"
    assert "--rename-map nanogpt_transformers" in done.stderr


def test_keys_without_a_source_have_exit_code_1(zoo: Path):
    state = torch.load("ours.pth")
    torch.save({key: value for key, value in state.items() if "up" not in key} | {"x": torch.ones(7, 5)}, "part.pth")
    done = run_here("map", "part.pth", "nets:theirs", cwd=zoo)
    assert done.returncode == 1
    assert "no source for 4 keys of the target: layer.{0,1}.fc1.{weight,bias}" in done.stdout
    assert "nothing in the target takes 1 key of the source: x" in done.stdout


def test_without_a_rule_there_is_nothing_to_apply(zoo: Path):
    """Both have the same layers in different wrappers, or the extra layers of one are like none of the other's."""
    done = run_here("map", "ours.pth", "nets:ours", cwd=zoo)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "ckptfix: no map is needed: both have the same layers\n"
    ours = torch.load("large.pth")
    torch.save({key: value for key, value in ours.items() if "blocks.0" in key} | {"x": torch.ones(7, 5)}, "part.pth")
    done = run_here("map", "part.pth", "large.pth", cwd=zoo)
    assert done.returncode == 1
    assert "no source for" in done.stdout
    assert done.stderr == ""


def test_two_models_prove_their_map(zoo: Path):
    done = run_here("map", "nets:walking", "nets:running", "--prove", "--timeout", "200", cwd=zoo)
    assert done.returncode == 0, done.stdout
    assert "go.{weight,bias} → fast.{weight,bias}  (verified)" in done.stdout
    assert "verified: the outputs of both models are equal" in done.stdout
    done = run_here("map", "nets:walking", "nets:resting", "--prove", "--input", "3x6", cwd=zoo)
    assert done.returncode == 1
    assert "they do not compute the same" in done.stdout
    assert "(verified)" not in done.stdout
    assert "to apply it" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ours.pth", "nets:theirs", "--prove"), "--prove runs both sides: give two models"),
        (("nets:ours", "nets:theirs", "--prove", "--timeout", "0"), "--timeout 0"),
        (("nets:ours", "nets:theirs", "--timeout", "9"), "--timeout has no meaning without a model; add --prove"),
        (("gone.pth", "theirs.safetensors"), "gone.pth"),
        (("ours.pth", "nets:gone"), "has no gone"),
        (("ours.pth", "ours.pth", "--output-format", "yaml"), "yaml"),
    ],
)
def test_errors_have_exit_code_2(words, says, zoo: Path):
    done = run_here("map", *words, cwd=zoo)
    assert done.returncode == 2
    assert says in done.stderr
