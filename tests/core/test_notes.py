import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.notes import encode_container, restore_container
from tests.reading.files import opened, saved, write

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("ckptfix"), inner)
    ),
    max_leaves=12,
)


@given(plain, plain)
def test_a_container_comes_back_from_json(before, after):
    checkpoint = Checkpoint("f", "test", {"w": None}, container=("model", "sd"))
    root = {"before": before, "model": {"sd": None, "x": after}, 5: "last"}
    note, lost = encode_container(checkpoint, root)
    state_dict: OrderedDict[str, object] = OrderedDict()
    assert restore_container(state_dict, json.loads(json.dumps(note))) == {
        "before": before,
        "model": {"sd": state_dict, "x": after},
        5: "last",
    }
    assert lost == []


def test_values_that_json_cannot_hold_are_named(tmp_path):
    loop: list[object] = []
    loop.append(loop)
    value = {
        "state_dict": {"w": torch.ones(1)},
        "optimizer": {"m": torch.ones(2)},
        "epoch": 1,
        "loop": loop,
        "half": "\ud800",
    }
    checkpoint = opened(saved(value, tmp_path))
    from ckptfix.writing.safetensors import lost_extras

    assert lost_extras(checkpoint) == ["optimizer", "loop", "half"]
    again = opened(write(checkpoint, "safetensors", tmp_path))
    assert list(again.root) == ["state_dict", "epoch"]  # type: ignore[call-overload]  # the root is a dict


def test_what_follows_a_lost_item_of_a_list_keeps_its_place(tmp_path):
    """ParSNIP's files are a list of settings, which contain arrays, and a state_dict."""
    value = [{"bands": torch.ones(2)}, OrderedDict(w=torch.ones(1), v=torch.ones(1)), 5]
    again = opened(write(opened(saved(value, tmp_path)), "safetensors", tmp_path))
    assert (again.container, list(again.specs)) == ((1,), ["w", "v"])
    root: Any = again.root
    assert (len(root), root[0], root[2]) == (3, None, 5)


@pytest.mark.parametrize("depth", [30, 60])
def test_repeated_values_are_written_a_limited_number_of_times(depth, tmp_path):
    shared: object = ()
    for _ in range(depth):
        shared = (shared, shared)
    path = write(opened(saved({"state_dict": {"w": torch.ones(1)}, "x": shared}, tmp_path)), "safetensors", tmp_path)
    assert path.stat().st_size < 10_000


def test_the_order_of_the_keys_comes_back(tmp_path):
    weight = torch.ones(2)
    value = OrderedDict([("z", weight), ("count", 3), ("a", weight), ("m", torch.zeros(1))])
    assert list(opened(write(opened(saved(value, tmp_path)), "safetensors", tmp_path)).entries) == [
        "z",
        "count",
        "a",
        "m",
    ]
