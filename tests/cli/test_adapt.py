"""``--adapt`` as users give it: the printed command, the repair, the plan, a zoo."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.programs import run_here

MODELS = """
import torch
from torch import nn

class Patches(nn.Module):
    def __init__(self, side, channels):
        super().__init__()
        self.grid_size = (side, side)
        self.proj = nn.Conv2d(channels, 8, 4, stride=4)

class Transformer(nn.Module):
    def __init__(self, side=12, channels=3, classes=5):
        super().__init__()
        self.patch_embed = Patches(side, channels)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + side * side, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, images):
        patches = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls_token.expand(len(images), 1, 8), patches), 1) + self.pos_embed
        return self.head(tokens.mean(1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(MODELS)
    scope: dict[str, type[nn.Module]] = {}
    exec(compile(MODELS, "nets.py", "exec"), scope)
    torch.save(scope["Transformer"](6).state_dict(), tmp_path / "old.pth")
    return tmp_path


FACTORY = ("--model", "nets:Transformer", "--input", "1x3x48x48")
UNTESTED = (*FACTORY[:2], "--no-smoke")


def test_the_printed_command_repairs(folder):
    checked = run_here("check", "old.pth", *FACTORY[:2], cwd=folder)
    assert checked.returncode == 1
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("  run: ")]
    words = shlex.split(line.removeprefix("  run: "))
    assert words[-2:] == ["--adapt", "pos_embed=timm"]
    done = run_here(*words[1:], *FACTORY[2:], cwd=folder)
    assert done.returncode == 0
    assert (
        "  adapt 1 key (1.16 k elements) by pos_embed=timm, 6x6 → 12x12: pos_embed  [1, 37, 8] → [1, 145, 8]"
        in done.stdout
    )
    assert "from the file (1.16 k elements adapted by pos_embed=timm)" in done.stdout
    assert "untrained" not in done.stdout
    assert "forward test: passed" in done.stdout
    before, after = (torch.load(folder / name, weights_only=True) for name in ("old.pth", "old.fixed.pth"))
    assert torch.equal(after["pos_embed"][:, :1], before["pos_embed"][:, :1])


def test_the_plan_gives_the_same_file(folder):
    words = ("repair", "old.pth", *UNTESTED, "--adapt", "pos_embed=plain")
    run_here(*words, "--dry-run", "--plan", "plan.json", cwd=folder)
    assert not (folder / "old.fixed.pth").exists()
    (step,) = json.loads((folder / "plan.json").read_text())["steps"]
    assert [(edit["edit"], edit["recipe"], edit["grids"]) for edit in step["edits"]] == [
        ("adapt", "pos_embed=plain", [6, 6, 12, 12])
    ]
    assert run_here(*words, "-o", "direct.pth", cwd=folder).returncode == 0
    assert (
        run_here("repair", "old.pth", *UNTESTED, "--apply", "plan.json", "-o", "saved.pth", cwd=folder).returncode == 0
    )
    assert (folder / "direct.pth").read_bytes() == (folder / "saved.pth").read_bytes()


def test_json(folder):
    done = run_here("repair", "old.pth", *UNTESTED, "--adapt", "pos_embed=timm", "--output-format", "json", cwd=folder)
    (report,) = json.loads(done.stdout)["reports"]
    assert report["exit_code"] == 0
    assert report["coverage"]["adapted"] == {"pos_embed=timm": 1160}
    assert report["coverage"]["share"] == 1.0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "pos_embed=tim",
            "--adapt pos_embed=tim: pos_embed has no recipe 'tim'; did you mean timm? give timm or plain",
        ),
        ("pos_embed=linear", "give --adapt pos_embed=timm"),
        ("pos_embed=timm:3x3", "the file's 37 positions are not those of a grid of 3x3 and 1 token, but of one of 6x6"),
        ("pos_embed=timm:3x3", "give the file's and the model's grids: --adapt pos_embed=timm:6x6:12x12"),
        ("head=classes.txt", "--adapt head=classes.txt: there is no file classes.txt; check the path"),
        ("head=pad:mean", "there is no file pad:mean; give head=MAP.txt or vocab=pad:mean"),
        (
            "vocab=cut",
            "--adapt vocab=cut fits nothing here: 1 key whose shape differs from the target's: a grid of 6x6",
        ),
        ("vocab=cut", "such as pos_embed; give --adapt pos_embed=timm"),
        ("pos_embed@visual.*=timm", "fits nothing here: 1 key whose shape differs"),
        ("window_bias=swin", "give --adapt pos_embed=timm"),
        ("head=old.pth", "give --adapt pos_embed=timm"),
        ("depth=0", "--adapt depth=0 fits nothing here: 1 key whose shape differs"),
    ],
)
def test_what_is_refused_in_one_line(folder, option, said):
    done = run_here("repair", "old.pth", *FACTORY, "--adapt", option, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "old.fixed.pth").exists()


def test_a_recipe_needs_something_to_fit(folder):
    done = run_here("repair", "old.pth", "--adapt", "pos_embed=timm", cwd=folder)
    assert done.returncode == 2
    assert "--adapt pos_embed=timm makes tensors fit a model or reference; add --model or --like" in done.stderr


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (
            '{"side": 6, "classes": 4}',
            (),
            "2 keys whose shape differs from the target's, such as head.weight; give --adapt head=MAP.txt",
        ),
        ('{"side": 12}', ("--drop-mismatched", "--fill", "target"), "such as pos_embed; give --adapt pos_embed=timm"),
    ],
    ids=["a head", "a table that would be dropped"],
)
def test_a_recipe_for_something_else_is_refused(model, options, said, folder):
    words = ("repair", "old.pth", *UNTESTED, "--model-args", model, *options, "--adapt", "vocab=cut")
    done = run_here(*words, cwd=folder)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert said in done.stderr
    assert not (folder / "old.fixed.pth").exists()


def test_a_recipe_for_other_files_of_a_group_stops_nothing(folder):
    """The head is dropped as requested, and the grid of this file is the model's."""
    words = ("--model-args", '{"side": 6, "classes": 4}', "--drop-mismatched", "--fill", "target", "--allow-untrained")
    done = run_here("repair", "old.pth", *UNTESTED, *words, "--adapt", "pos_embed=timm", cwd=folder)
    assert (folder / "old.fixed.pth").exists(), done.stdout + done.stderr
    assert "pos_embed=timm fits no key: no tensor of this kind has another shape" in done.stdout


def test_a_recipe_that_nothing_needs_changes_nothing(folder):
    words = ("check", "old.pth", "--model", "nets:Transformer", "--model-args", '{"side": 6}')
    done = run_here(*words, "--adapt", "pos_embed=timm", "--adapt", "depth=0", cwd=folder)
    assert done.returncode == 0
    assert "  pos_embed=timm fits no key: no tensor of this kind has another shape" in done.stdout
    assert "  depth=0 fits no layers" in done.stdout


def test_a_configuration_file(folder):
    (folder / "ckptfix.toml").write_text('adapt = { pos_embed = "timm" }\n')
    assert run_here("repair", "old.pth", *FACTORY[:2], "--no-smoke", cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_zoo(folder):
    (folder / "zoo").mkdir()
    (folder / "old.pth").rename(folder / "zoo" / "old.pth")
    (folder / "zoo.toml").write_text(
        '[[files]]\nmatch = "*.pth"\nmodel = "nets:Transformer"\nno-smoke = true\nadapt = { pos_embed = "timm" }\n'
    )
    done = run_here("migrate", "zoo", "new", "--jobs", "1", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.load(folder / "new" / "old.pth", weights_only=True)["pos_embed"].shape == (1, 145, 8)
    (manifest,) = (folder / "new").glob("*manifest*.jsonl")
    (record,) = map(json.loads, manifest.read_text().splitlines())
    assert [edit["recipe"] for edit in record["edits"]] == ["pos_embed=timm"]
    assert record["coverage"]["adapted"] == {"pos_embed=timm": 1160}


@pytest.mark.slow
def test_a_file_of_a_zoo_that_needs_another_recipe_gets_its_commands(folder):
    (folder / "zoo").mkdir()
    (folder / "old.pth").rename(folder / "zoo" / "old.pth")
    recipes = '{ vocab = "cut", "depth@*" = "0" }'
    (folder / "zoo.toml").write_text(
        f'[[files]]\nmatch = "*.pth"\nmodel = "nets:Transformer"\nno-smoke = true\nadapt = {recipes}\n'
    )
    assert run_here("migrate", "zoo", "new", "--jobs", "1", cwd=folder).returncode == 1
    (manifest,) = (folder / "new").glob("*manifest*.jsonl")
    (record,) = map(json.loads, manifest.read_text().splitlines())
    assert (record["outcome"], record["error"]) == ("needs a decision", None)
    assert "pos_embed=timm" in record["command"]
