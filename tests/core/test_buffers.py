"""Buffers that are known by name."""

from __future__ import annotations

import pytest

from ckptfix.core.buffers import is_buffer_name, is_transient, split_key


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        pytest.param("attn.bias", (64,), id="an ordinary bias is a parameter"),
        pytest.param("attn.bias", (1, 1, 1, 1), id="one element is no causal mask"),
        pytest.param("rel.bias", (1, 8, 16, 16), id="a bias per head is learned"),
        pytest.param("mask", (16, 16), id="a pruning mask is not worked out from the configuration"),
        pytest.param("position_ids_embedding.weight", (512, 8), id="the name only begins alike"),
        pytest.param("my_inv_freq", (8,), id="the name only ends alike"),
    ],
)
def test_not_transient(key, shape):
    assert not is_transient(key, shape)
    assert not is_buffer_name(key, shape)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        pytest.param("h.0.attn.bias", (1, 1, 1024, 1024), id="causal mask of GPT-2"),
        pytest.param("embeddings.position_ids", (1, 512), id="position ids"),
        pytest.param("position_ids", (1, 512), id="at the top level"),
    ],
)
def test_transient(key, shape):
    assert is_transient(key, shape)


def test_split_key():
    assert split_key("a.b.weight") == ("a.b.", "weight")
    assert split_key("weight") == ("", "weight")
