"""The draft of a whole zoo, read back as the migration reads it."""

import re
import sys

import pytest
import torch

from ckptfix.cli import main
from ckptfix.zoo.drafting import draft_table
from ckptfix.zoo.drafting.writing import WIDTH
from ckptfix.zoo.items.listing import list_zoo
from ckptfix.zoo.places import open_place
from ckptfix.zoo.table import Table, read_table
from tests.zoo.drafting.structures import STRUCTURES


class Payload:
    def __reduce__(self):
        import os

        return os.system, ("true",)


def tensors(shapes, prefix=""):
    """A state_dict of these shapes that takes no room."""
    return {f"{prefix}{key}": torch.zeros(1).expand(shape) for key, shape in shapes.items()}


def drafted(folder) -> str:
    place = open_place(str(folder))
    return draft_table(place, list_zoo(place))


def read(folder, text) -> Table:
    path = folder.parent / f"{folder.name}.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


RESNET = STRUCTURES["tv.resnet18"]
OTHER_HEAD = {**RESNET, "fc.weight": (10, 512), "fc.bias": (10,)}
OURS = {"trunk.weight": (4, 4), "trunk.bias": (4,)}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Files of every kind."""
    folder = tmp_path_factory.mktemp("drafted") / "zoo"
    (folder / "imagenet").mkdir(parents=True)
    (folder / "ours").mkdir()
    torch.save(tensors(RESNET), folder / "imagenet" / "resnet18-19c8e357.pth")
    torch.save({"arch": "resnet18", "state_dict": tensors(RESNET, "module.")}, folder / "imagenet" / "ep1.pth.tar")
    torch.save(tensors(OTHER_HEAD), folder / "flowers.pth")
    for epoch in range(3):
        torch.save(tensors(OURS), folder / f"ours/run-{epoch}.pth")
    torch.save({"model": tensors(OURS), "model_ema": tensors(OURS)}, folder / "ours_ema.pth")
    torch.save(tensors(STRUCTURES["hf.bert-mlm"]), folder / "bert.bin")
    torch.save({"state_dict": tensors(OURS), "x": Payload()}, folder / "evil.pth")
    whole = (folder / "flowers.pth").read_bytes()
    (folder / "cut.pth").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "page.pth").write_text("<!DOCTYPE html><title>404</title>")
    (folder / "notes.txt").write_text("x")
    return folder


def test_the_draft_is_a_table_that_says_of_each_file_what_is_sure(zoo):
    table = read(zoo, drafted(zoo))
    assert table.rest.arguments == {}
    resnet = "torchvision:resnet18"
    assert {item.name: table.treatment_of(item.name).arguments for item in list_zoo(open_place(str(zoo)))} == {
        "bert.bin": {"model": "transformers:BertForMaskedLM"},
        "cut.pth": {},
        "evil.pth": {},
        "flowers.pth": {"model": f"{resnet}[num_classes=10]"},
        "imagenet/ep1.pth.tar": {"model": resnet},
        "imagenet/resnet18-19c8e357.pth": {"model": resnet},
        "notes.txt": {},
        "ours/run-0.pth": {},
        "ours/run-1.pth": {},
        "ours/run-2.pth": {},
        "ours_ema.pth": {},
        "page.pth": {},
    }
    assert table.idle(item.name for item in list_zoo(open_place(str(zoo)))) == []


def test_what_it_tells(zoo):
    text = drafted(zoo)
    said = re.sub(r"\n# {2,}", " ", text)
    for line in (
        f"# 11 checkpoints in {zoo}: 8 read, 3 not; 5 layouts of keys. 1 other file.\n",
        "pip install torchvision transformers\n",
        "# exact: every name and shape is that of torchvision resnet18 (",
        "timm resnet18",
        "# - the keys begin with module., which is removed: imagenet/ep1.pth.tar\n",
        'match = "imagenet/"\n',
        'match = "ours/"\n',
        "in other shapes: fc.weight [10, 512] and not [1000, 512], fc.bias [10] and not [1000]\n",
        "# each file has an averaged set (EMA) beside the raw one: model, model_ema; without this line model is",
        '# weights = "model_ema"\n',
        "# 3. BertForMaskedLM: 1 file",
        '# model = "pkg.mod:factory"',
        "# - which model this is: ours/run-0.pth, ours/run-1.pth, ours/run-2.pth\n",
        "# - evil.pth: is built to run posix.system() when it is loaded ",
        "# - page.pth: a web page",
        "# - cut.pth: is cut short",
    ):
        assert line in said, line
    assert max(map(len, text.splitlines())) <= WIDTH + 10


def test_the_guesses_are_lines_that_can_be_taken(zoo):
    """Without their marks the commented keys are keys, too."""
    text = re.sub(r"(?m)^# (model|model-args|weights|format|smoke|unsafe-fixes) = ", r"\1 = ", drafted(zoo))
    text = re.sub(r"(?m)^#   (\[\[files\]\]|match = |disarm = |salvage = )", r"\1", text)
    table = read(zoo, text)
    assert table.treatment_of("ours_ema.pth").settings["weights"] == "model_ema"
    assert table.treatment_of("ours/run-0.pth").model == "pkg.mod:factory"
    assert table.treatment_of("evil.pth").settings["disarm"] is True
    assert table.treatment_of("cut.pth").settings["salvage"] is True
    assert table.rest.settings["format"] == "safetensors"


def test_it_is_the_same_for_the_same_files(zoo):
    assert drafted(zoo) == drafted(zoo)


def test_on_the_command_line(zoo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ckptfix", "migrate", str(zoo), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    code, said = run("--init")
    assert (code, said.out) == (0, "written: zoo.toml\n")
    assert (tmp_path / "zoo.toml").read_text(encoding="utf-8") == drafted(zoo)
    (tmp_path / "zoo.toml").write_text("# mine")
    code, said = run("--init")
    assert code == 2
    assert "zoo.toml: exists already" in said.err
    assert (tmp_path / "zoo.toml").read_text() == "# mine"
    code, said = run("--init", "--table", "other.toml")
    assert (code, said.out) == (0, "written: other.toml\n")


def test_an_empty_zoo(tmp_path):
    (tmp_path / "zoo").mkdir()
    text = drafted(tmp_path / "zoo")
    assert "0 checkpoints" in text
    assert read(tmp_path / "zoo", text).treatments == ()


@pytest.mark.parametrize(
    "name", ["a\nb.pth", 'quo"te.pth', "back\\slash.pth", "star*[x].pth", "ünï.pth", "tab\t.pth", "\x7f.pth", "#.pth"]
)
def test_odd_names_and_odd_words(tmp_path, name):
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    torch.save({"arch": "x", "state_dict": {f"{name}.w": torch.zeros(2)}}, zoo / name)
    (zoo / f"bad {name}").write_bytes((zoo / name).read_bytes()[:200])
    table = read(zoo, drafted(zoo))
    assert [each.patterns for each in table.treatments] != []
    assert table.treatment_of(name) is table.treatments[0]
    assert table.treatment_of("other") is table.rest


def test_a_name_that_is_no_text(tmp_path):
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    name = "caf\udce9.pth"
    torch.save({"w": torch.zeros(2)}, str(zoo / "x.pth"))
    (zoo / "x.pth").rename(zoo / name)
    table = read(zoo, drafted(zoo))
    assert table.treatment_of(name) is table.treatments[0]
