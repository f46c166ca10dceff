"""Names with a hash get that of the new content, and names without one stay as they are."""

import glob
import hashlib
import re

import pytest

from ckptfix.core.finding import Level
from ckptfix.errors import UsageError
from ckptfix.zoo.naming import (
    check_template,
    compile_patterns,
    hash_in_name,
    name_with_hash,
    output_name,
    split_suffix,
    wrong_hash,
)


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
        pytest.param("ppo.zip", None, "ppo.pth", id="unpacked, and a suffix for what is in it"),
        pytest.param("c.tar.gz", None, "c.pth", id="unpacked twice"),
        pytest.param("c.tgz", None, "c.pth", id="unpacked twice by one suffix"),
        pytest.param("c.pth.tar.gz", None, "c.pth.tar", id="the suffix of what was no archive stays"),
        pytest.param("c.gz", "safetensors", "c.safetensors", id="of the format"),
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
        (".", None, "model.pth"),
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
    with pytest.raises(UsageError, match="does not give a file in the destination"):
        output_name(name)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{stm}.pth", "there is no {stm}; did you mean {stem}?"),
        ("{x}.pth", "there is no {x}; the fields are {folder}, {stem}, {suffix}, {name}"),
        ("{}.pth", "there is no {}"),
        ("{stem.x}", "there is no {stem.x}"),
        ("{stem!r}", "there is no {stem}"),
        ("{stem", "is not a template"),
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


OLD = "19c8e357" + hashlib.sha256(b"old").hexdigest()[8:]
NEW = hashlib.sha256(b"new").hexdigest()

WITHOUT = [
    "model.pth",
    "resnet50.pth",
    "model-20210618.pth",  # a date
    "model-00010000.pth",  # a step
    "model-deadbeef.pth",  # possibly a word
    "model-19c8e35.pth",  # 7 digits
    "model-19c8e357x.pth",
    "model-19C8E357.pth",
    "model_19c8e357.pth",  # as runs of a tracker are called
    "19c8e357/model.pth",
    "net-19c8e357/model.pth",
    "run-3858f62230ac3c915f300c664312c63f.pth",  # md5, or a uuid
    "run-da39a3ee5e6b4b0d3255bfef95601890afd80709.pth",  # sha1: a commit
]
WITH = {
    "resnet50-19c8e357.pth": "19c8e357",
    "zoo/a-b/resnet50-19c8e357.pth": "19c8e357",
    "tf_efficientnet_b0_ns-c0e6a31c.pth.tar": "c0e6a31c",
    "faster_rcnn_20200130-047c8118.pth": "047c8118",
    "net-19c8e3570a1b.safetensors": "19c8e3570a1b",
    f"net-{NEW}.bin": NEW,
    "alexnet-owt-7be5be79": "7be5be79",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_names_without_a_hash_stay(name: str):
    assert hash_in_name(name) is None
    assert name_with_hash(name, NEW) == name
    assert wrong_hash(name, OLD) is None


@pytest.mark.parametrize("name", WITH)
def test_names_with_a_hash_get_the_new_one_in_the_same_length(name: str):
    assert hash_in_name(name) == WITH[name]
    assert name_with_hash(name, NEW) == name.replace(WITH[name], NEW[: len(WITH[name])])


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("model_{}.pth", OLD[:8]),
        ("model.{}.pth", OLD[:10]),
        ("{}.pth", OLD),
        ("blobs/{}", OLD),
        ("net-{}.pth", "12345678"),
        ("run-{}.pth", OLD[:40]),
    ],
)
def test_the_content_proves_a_hash_wherever_it_stands(name: str, digest: str):
    content = digest + OLD[len(digest) :]
    old = name.format(digest)
    assert hash_in_name(old, content) == digest
    assert hash_in_name(old, NEW) is None or digest == OLD
    assert name_with_hash(old, NEW, content) == name.format(NEW[: len(digest)])
    assert wrong_hash(old, content) is None


def test_a_right_hash_is_not_reported():
    assert wrong_hash("resnet50-19c8e357.pth", OLD) is None


def test_a_wrong_hash_is_a_finding():
    found = wrong_hash("resnet50-19c8e357.pth", NEW)
    assert found is not None
    assert (found.code, found.level) == ("FIL107", Level.WARNING)
    assert found.message == f"the name says that the sha256 begins with 19c8e357, but it begins with {NEW[:8]}"
    assert found.evidence == {"in_name": "19c8e357", "sha256": NEW}


def test_only_the_hash_is_replaced():
    # The same digits are in the folder and in the stem as well.
    assert name_with_hash("19c8e357/19c8e357-b-19c8e357.pth", NEW) == f"19c8e357/19c8e357-b-{NEW[:8]}.pth"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        pytest.param("*.pth", "a.pth", True, id="at the top"),
        pytest.param("*.pth", "a/b/c.pth", True, id="without a slash: at any depth"),
        pytest.param("*.pth", "a.pth.bak", False, id="the whole name"),
        pytest.param("a.pth", "aXpth", False, id="a dot is a dot"),
        pytest.param("*.PTH", "a.pth", False, id="case counts"),
        pytest.param("a/*.pth", "a/b.pth", True, id="with a slash: from the root"),
        pytest.param("a/*.pth", "x/a/b.pth", False, id="and from nowhere else"),
        pytest.param("a/*.pth", "a/b/c.pth", False, id="a star stays in its folder"),
        pytest.param("a/**/*.pth", "a/b/c/d.pth", True, id="two stars do not"),
        pytest.param("a/**/*.pth", "a/d.pth", True, id="and may be no folder"),
        pytest.param("**/a.pth", "a.pth", True, id="from anywhere"),
        pytest.param("/a.pth", "a.pth", True, id="a slash in front: the root"),
        pytest.param("/a.pth", "x/a.pth", False, id="and no other folder"),
        pytest.param("./a.pth", "a.pth", True, id="the root as shells write it"),
        pytest.param("old/", "old/a/b.pth", True, id="all of a folder"),
        pytest.param("old/", "x/old/b.pth", True, id="of any folder so called"),
        pytest.param("x/old/", "y/x/old/b.pth", False, id="but not with a slash"),
        pytest.param("old/", "older/b.pth", False, id="and of no other folder"),
        pytest.param("a?.pth", "ab.pth", True, id="one character"),
        pytest.param("a?b", "a/b", False, id="which is no slash"),
        pytest.param("a[0-9].pth", "a5.pth", True, id="a range"),
        pytest.param("a[!0-9].pth", "a5.pth", False, id="all but a range"),
        pytest.param("a[!0-9]b", "a/b", False, id="nor is that a slash"),
        pytest.param("a[^]b", "a^b", True, id="a hat is itself"),
        pytest.param("[a", "[a", True, id="a bracket that is never closed"),
        pytest.param("a\nb*", "a\nb\nc", True, id="names may hold line feeds"),
    ],
)
def test_what_a_pattern_means(pattern, name, expected):
    assert (compile_patterns([pattern]).fullmatch(name) is not None) == expected


def test_no_pattern_means_nothing():
    assert compile_patterns([]).fullmatch("") is None


def test_any_of_several():
    expression = compile_patterns(["*.pth", "b/"])
    assert expression.fullmatch("x/a.pth")
    assert expression.fullmatch("b/c")
    assert not expression.fullmatch("c")


@pytest.mark.parametrize("name", ["a.pth", "a*b?.pth", "a[1].pth", "[!x]", "a]b", "**", "a\\b"])
def test_a_literal_means_its_name_alone(name):
    expression = compile_patterns([glob.escape(name)])
    assert expression.fullmatch(name)
    assert not expression.fullmatch(name + "x")
    assert not expression.fullmatch(re.sub(r"[*?]", "x", name) if re.search(r"[*?]", name) else "other")


def test_one_of_several_saves_is_named_without_its_first_rank():
    assert output_name("a/model_0001.rank_0.pth", is_folder=True) == "a/model_0001.pth"
    assert output_name("a/lora_rank4.ckpt", is_folder=True) == "a/lora_rank4.ckpt"
