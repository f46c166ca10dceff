import pytest

from ckptfix.errors import UsageError
from ckptfix.zoo.items.naming import check_template, output_name, split_suffix


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        pytest.param("a/b/c.pth", None, "a/b/c.pth", id="mirrored"),
        pytest.param("c.bin", "pth", "c.bin", id="a suffix of the same format stays"),
        pytest.param("c", None, "c", id="no suffix"),
        pytest.param("c", "pth", "c.pth", id="the format gives one"),
        pytest.param("a/c.pth", "safetensors", "a/c.safetensors", id="another format"),
        pytest.param("c.safetensors", "pth", "c.pth", id="and back"),
        pytest.param("c.pth.tar", None, "c.pth.tar", id="two suffixes stay"),
        pytest.param("c.pth.tar", "safetensors", "c.safetensors", id="and go together"),
        pytest.param("c.pth.gz", None, "c.pth", id="unpacked"),
        pytest.param("v1.5", "safetensors", "v1.5.safetensors", id="a version is no suffix"),
        pytest.param("resnet50-19c8e357.pth", None, "resnet50-19c8e357.pth", id="a hash is left to others"),
    ],
)
def test_the_tree_is_mirrored(name, form, expected):
    assert output_name(name, form) == expected


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        ("runs/dcp", None, "runs/dcp.pth"),
        ("runs/v1.5", "pth", "runs/v1.5.pth"),
        ("runs/dcp", "safetensors", "runs/dcp.safetensors"),
        ("llama/model.safetensors.index.json", None, "llama/model.safetensors"),
        ("llama/pytorch_model.bin.index.json", "pth", "llama/pytorch_model.bin"),
    ],
)
def test_a_folder_becomes_one_file(name, form, expected):
    assert output_name(name, form, is_folder=True) == expected


def test_a_template():
    assert output_name("a/c.pth", "safetensors", "new/{stem}/{folder}/{name}{suffix}") == "new/c/a/c.pth.safetensors"
    assert output_name("c.pth", None, "{folder}/x{suffix}") == "x.pth"


@pytest.mark.parametrize("name", ["../c.pth", "../../etc/c.pth"])
def test_no_output_outside_of_the_root(name):
    with pytest.raises(UsageError, match="names no file below the destination"):
        output_name(name)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{stm}.pth", "there is no {stm}; did you mean {stem}?"),
        ("{x}.pth", "there is no {x}; there are {folder}, {stem}, {suffix}, {name}"),
        ("{}.pth", "there is no {}"),
        ("{stem.x}", "there is no {stem.x}"),
        ("{stem!r}", "there is no {stem}"),
        ("{stem", "is no template"),
        ("/abs/{stem}", "leads out"),
        ("../{stem}", "leads out"),
    ],
)
def test_a_template_that_cannot_be_meant(template, said):
    with pytest.raises(UsageError) as error:
        check_template(template)
    assert said in str(error.value)
    assert repr(template) in str(error.value)


def test_a_dotfile_has_no_suffix():
    assert split_suffix(".pth") == (".pth", "")
