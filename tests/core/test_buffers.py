"""Buffers that are recognised by name."""

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
        pytest.param("wer.weight", (8, 8), id="a layer that is named like a metric"),
        pytest.param("wer.lstm.weight_ih_l0", (8, 8), id="a layer in a module that is named like a metric"),
        pytest.param("accuracy.norm.running_std", (8,), id="statistics of such a layer"),
        pytest.param("wer.pos_embed", (8, 8), id="positions of such a module"),
        pytest.param("wer.layers.0.scale", (8,), id="what is deeper in such a module"),
        pytest.param("metric.factor", (8, 8), id="a metric that is learned"),
        pytest.param("conversion.scale", (8,), id="a word that ends like a version"),
        pytest.param("racer.scores", (8,), id="a word that contains the name of a metric"),
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
        pytest.param("_wer.scores", (), id="word error rate in NeMo"),
        pytest.param("pl_accuracy.correct", (), id="accuracy in Lightning"),
        pytest.param("pixel_metrics.AUPRO.fpr_limit", (), id="a metric of a collection, as in anomalib"),
        pytest.param("metrics.0.task_weights", (1, 1), id="a list of metrics, as in chemprop"),
        pytest.param("model.train_accuracy.state", (), id="a metric of one stage"),
        pytest.param("decoder.version", (1,), id="version in fairseq"),
    ],
)
def test_transient(key, shape):
    assert is_transient(key, shape)


def test_split_key():
    assert split_key("a.b.weight") == ("a.b.", "weight")
    assert split_key("weight") == ("", "weight")
