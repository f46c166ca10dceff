"""The draft of a whole zoo, read back as the migration reads it."""

import random
import re
import sys

import pytest
import torch

from ckptfix.cli import main
from ckptfix.zoo.drafting import (
    WIDTH,
    Confidence,
    comment,
    draft_table,
    find_architecture,
    name_in,
    named_models,
    quoted,
    texts,
)
from ckptfix.zoo.items import list_zoo
from ckptfix.zoo.places import open_place
from ckptfix.zoo.zoo_toml import Table, read_table
from tests.zoo.structures import STRUCTURES


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
        "with other shapes: fc.weight [10, 512] instead of [1000, 512], fc.bias [10] instead of [1000]\n",
        "# each file has an averaged set (EMA) along with the raw one: model, model_ema; without this line model is",
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
    assert "zoo.toml: already exists" in said.err
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


def test_a_name_that_is_not_text(tmp_path):
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    name = "caf\udce9.pth"
    torch.save({"w": torch.zeros(2)}, str(zoo / "x.pth"))
    (zoo / "x.pth").rename(zoo / name)
    table = read(zoo, drafted(zoo))
    assert table.treatment_of(name) is table.treatments[0]


SMALL = {"trunk.0.weight": (32, 16), "trunk.0.bias": (32,), "head.weight": (10, 32), "head.bias": (10,)}


def architecture(shapes, classes=(), names=("x.pth",)):
    return find_architecture(shapes, classes, names)


def with_classes(name, classes, head):
    return {
        key: (classes, *shape[1:]) if key.startswith(f"{head}.") else shape for key, shape in STRUCTURES[name].items()
    }


def test_nothing_is_claimed_of_a_net_that_no_one_knows():
    found = architecture(SMALL)
    assert (found.confidence, found.model, found.title) == (Confidence.UNKNOWN, None, "unknown")
    assert architecture({}).confidence is Confidence.UNKNOWN


VIT = {key: shape for key, shape in STRUCTURES["tv.vit_b_16"].items() if not key.startswith("heads.")}
TRUNK = {key: shape for key, shape in STRUCTURES["timm.vit_small_patch16_224"].items() if not key.startswith("head.")}


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        (STRUCTURES["tv.resnet50"], "torchvision:resnet50"),
        (with_classes("tv.resnet50", 7, "fc"), "torchvision:resnet50[num_classes=7]"),
        (with_classes("tv.vit_b_16", 5, "heads.head"), "torchvision:vit_b_16[num_classes=5]"),
        (with_classes("timm.seresnet50", 3, "fc"), "timm:seresnet50[num_classes=3]"),
        (TRUNK, "timm:vit_small_patch16_224[num_classes=0]"),
        (VIT, "known:torchvision/vit_b_16[num_classes=0]"),
        ({**STRUCTURES["tv.resnet50"], "conv1.weight": (64, 1, 7, 7)}, "known:torchvision/resnet50[in_chans=1]"),
        (STRUCTURES["hf.gpt2"], "transformers:GPT2LMHeadModel"),
    ],
    ids=[
        "resnet50",
        "another head",
        "torchvision's vit",
        "timm's",
        "without a head",
        "a head that only torchvision would add",
        "channels that torchvision does not choose",
        "transformers",
    ],
)
def test_the_line_of_an_exact_structure(shapes, line):
    """The model where the library builds it, else the structure."""
    found = architecture(shapes, names=["vit_small_patch16_224.pth"])
    assert (found.confidence, found.model or found.like) == (Confidence.EXACT, line)
    assert (found.model is None) == line.startswith("known:")


def test_of_models_that_are_built_alike_the_one_that_the_files_name():
    shapes = STRUCTURES["timm.vit_small_patch16_224"]
    name = "deit_small_patch16_224"
    assert architecture(shapes, names=[f"runs/{name}-best.pth"]).title == name


def test_names_of_files_are_for_or_against():
    found = architecture(STRUCTURES["tv.resnet50"], names=["resnet50_a.pth", "resnet50_b.pth", "resnet18_best.pth"])
    assert found.title == "resnet50"
    assert found.evidence[-2:] == ("the name says resnet50 (2 files)", "BUT the name says resnet18 (1 file)")


def test_only_the_name_of_a_file_is_a_guess():
    found = architecture(SMALL, names=["swin_tiny_patch4_window7_224_ep3.pth"])
    assert (found.confidence, found.model) == (Confidence.GUESS, "timm:swin_tiny_patch4_window7_224")
    assert "names and shapes do not match timm's" in found.evidence[0]


def test_the_class_of_a_whole_model_is_its_factory():
    found = architecture(SMALL, ["lab.nets.Net"])
    assert (found.confidence, found.model) == (Confidence.GUESS, "lab.nets:Net")
    assert architecture(SMALL, ["__main__.Net"]).model == "your_script:Net"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("hf.bert-mlm", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.bert-large-cls", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.roberta-base", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.distilbert", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.gpt2", "GPT-2 or a relative"),
        ("hf.llama-tiny", "LLaMA, Qwen2, Mistral or a relative, of transformers"),
        ("hf.qwen2", "LLaMA, Qwen2, Mistral or a relative, of transformers"),
        ("hf.t5", "T5 of transformers"),
        ("hf.neox", "GPT-NeoX, such as Pythia"),
        ("hf.clip", "CLIP or SigLIP of transformers"),
        ("tv.fasterrcnn_resnet50_fpn", "detector of torchvision"),
        ("tv.resnext50_32x4d", "ResNet"),
        ("tv.densenet121", "DenseNet"),
        ("tv.vgg16_bn", "VGG, AlexNet or another plain convolutional network"),
        ("timm.swin_tiny_patch4_window7_224", "Swin Transformer"),
        ("timm.convnext_tiny", "ConvNeXt"),
        ("timm.vit_small_patch16_224", "Vision Transformer, as timm names it"),
    ],
)
def test_a_family_is_a_guess_by_a_telling_name(name, title):
    found = architecture({**STRUCTURES[name], "extra": (1,)})
    assert (found.confidence, found.title, found.model) == (Confidence.GUESS, title, None)
    assert found.evidence[0].startswith("by the name ")


@pytest.mark.parametrize("name", STRUCTURES)
def test_shapes_that_no_model_has_break_nothing(name):
    """Names as of a known model, and shapes of any number of dimensions and any size."""
    chance = random.Random(name)
    for _ in range(8):
        shapes = {
            key: tuple(chance.choice((0, 1, 2, 3, 2**40)) for _ in range(chance.randrange(5)))
            for key in STRUCTURES[name]
            if chance.random() < 0.9
        }
        assert architecture(shapes).confidence is not Confidence.EXACT


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("resnet50_19c8e357_pth", "resnet50"),
        ("my_resnet50_pth", "resnet50"),
        ("myresnet50_pth", None),
        ("resnet500_pth", None),
        ("vit_base_patch16_224_in21k_pth", "vit_base_patch16_224"),
    ],
)
def test_a_name_of_a_model_in_a_name_of_a_file(stem, name):
    assert name_in(stem) == name


def test_names_of_both_libraries():
    names = named_models()
    assert (names["resnet50"], names["vit_base_patch16_224"]) == ("torchvision", "timm")


if sys.version_info >= (3, 11):
    import tomllib
else:
    # Installed with Python 3.10 only, so mypy may or may not see it.
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ODD = ['a"b', "a\\b", "a\nb\tc\rd", "\x00\x1b\x7f", "ü漢🦓", "\u2028\u200b\xad", "#", "'''", '"""', ""]


@pytest.mark.parametrize("text", ODD)
def test_a_text_comes_back(text):
    assert tomllib.loads(f"a = {quoted(text)}") == {"a": text}


def test_bytes_that_are_not_text_become_any_character():
    assert quoted("a\udcffb") == '"a?b"'


@pytest.mark.parametrize("text", [*ODD, "word " * 100, "x" * 500, "a\udcff"])
def test_a_remark_is_a_remark_whatever_it_says(text):
    lines = list(comment(text))
    assert all(line.startswith("#") for line in lines)
    assert tomllib.loads("\n".join(lines)) == {}


def test_a_long_remark_is_wrapped():
    lines = list(comment("word " * 100, "# - "))
    assert max(map(len, lines)) <= WIDTH
    assert [line[:6] for line in lines[:2]] == ["# - wo", "#     "]


@pytest.mark.parametrize("given", [["a"], ["a", "b"], [f"name{number}" for number in range(40)]])
def test_texts_come_back(given):
    text = "\n".join(texts("match", given))
    assert tomllib.loads(text) == {"match": given[0] if len(given) == 1 else given}
    assert max(map(len, text.splitlines())) <= WIDTH
