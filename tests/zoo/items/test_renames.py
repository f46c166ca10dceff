"""Names with a hash get that of the new content, and names without one stay as they are."""

from __future__ import annotations

import hashlib

import pytest

from ckptfix.core.finding import Level
from ckptfix.zoo.items.renames import hash_in_name, name_with_hash, wrong_hash

OLD = "19c8e357" + hashlib.sha256(b"old").hexdigest()[8:]
NEW = hashlib.sha256(b"new").hexdigest()

WITHOUT = [
    "model.pth",
    "resnet50.pth",
    "model-20210618.pth",  # a date
    "model-00010000.pth",  # a step
    "model-deadbeef.pth",  # a word, for all one can tell
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


def test_a_right_hash_is_no_finding():
    assert wrong_hash("resnet50-19c8e357.pth", OLD) is None


def test_a_wrong_hash_is_a_finding():
    found = wrong_hash("resnet50-19c8e357.pth", NEW)
    assert found is not None
    assert (found.code, found.level) == ("FIL107", Level.WARNING)
    assert found.message == f"the name says that the sha256 begins with 19c8e357, and it begins with {NEW[:8]}"
    assert found.evidence == {"in_name": "19c8e357", "sha256": NEW}


def test_only_the_hash_is_replaced():
    # The same digits stand in the folder and in the stem as well.
    assert name_with_hash("19c8e357/19c8e357-b-19c8e357.pth", NEW) == f"19c8e357/19c8e357-b-{NEW[:8]}.pth"
