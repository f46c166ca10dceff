"""Buffers that are recognised by name: what torch and widely used libraries register in addition to parameters.

The running statistics of BatchNorm are learned. All others can be computed from the model's configuration, so releases
move them in and out of the state_dict: what one release saved, the next does not expect."""

import re
from collections.abc import Iterable, Iterator, Mapping

NUM_BATCHES_TRACKED = "num_batches_tracked"  # the counter of BatchNorm and InstanceNorm; 0-d, int64
COUNTED_SINCE = "0.4.1"  # the release of torch that added `num_batches_tracked`
RUNNING_STATISTICS = frozenset({"running_mean", "running_var", NUM_BATCHES_TRACKED})  # the buffers of a BatchNorm
# The same in TensorFlow and MindSpore.
MOVING_STATISTICS = {"moving_mean": "running_mean", "moving_variance": "running_var", "moving_var": "running_var"}

# Last segments of buffers that come and go between releases, with their origin.
TRANSIENT: Mapping[str, str] = {
    "position_ids": "BERT, CLIP and most of transformers; not saved since 4.31",
    "token_type_ids": "BERT's embeddings in transformers; not saved",
    "relative_position_index": "Swin, BEiT, MaxViT; not saved by timm since 0.8",
    "relative_coords_table": "Swin v2; not saved by timm since 0.8",
    "attn_mask": "Swin's shifted windows, CLIP's text tower",
    "masked_bias": "GPT-2, GPT-Neo, GPT-J in transformers",
    "causal_mask": "decoders that register their mask",
    "inv_freq": "rotary embeddings; LLaMA's is not saved since transformers 4.32, ESM's still is",
    "cos_cached": "rotary embeddings of early LLaMA ports",
    "sin_cached": "rotary embeddings of early LLaMA ports",
    **dict.fromkeys(
        ("freqs_cis", "freqs_cis_real", "freqs_cis_imag", "freqs_cos", "freqs_sin"),
        "rotary embeddings of Llama's authors, SAM 2 and 3; mostly not saved",
    ),
    "_float_tensor": "sinusoidal positions in fairseq",
    "anchor_grid": "YOLOv5 up to 5.0",
    "total_ops": "added by thop.profile",
    "total_params": "added by thop.profile",
    **dict.fromkeys(("tp", "fp", "tn", "fn", "confmat", "correct", "total"), "state of a torchmetrics metric"),
    **dict.fromkeys(("sum_squared_error", "sum_abs_error"), "state of a torchmetrics metric"),
    **dict.fromkeys(("version", "version_tensor", "version_number"), "the version of the model's code, as in fairseq"),
}

# The frequencies of rotary embeddings in the files of Meta's Llama. timm's of this name are learned, but have more
# dimensions.
ROPE = "rope.freqs"

# Modules whose tensors are states of a metric, alone or in a collection, and not what a layer has: `_wer.scores`,
# `val_metrics.AUPRO.fpr_limit`.
_METRICS = frozenset({"metrics", "wer", "cer", "bleu", "rouge", "accuracy", "auroc", "aupro", "miou"})
_OF_LAYERS = re.compile(r"running_|weight|bias|\w+(weight|bias)$|\w*(gamma|beta|embed|token)")

# Names under which decoders of the GPT-2 family registered their causal mask, of shape (1, 1, n, n).
_MASKS = frozenset({"bias", "mask"})


def split_key(key: str) -> tuple[str, str]:
    """Return the module path of a key, with its trailing dot (empty at the top), and its last segment."""
    head, dot, leaf = key.rpartition(".")
    return head + dot, leaf


def modules_of(key: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a key, the outermost first: ``a``, ``a.b`` for ``a.b.weight``."""
    at = key.find(".")
    while at >= 0:
        yield key[:at]
        at = key.find(".", at + 1)


def layers_of(key: str) -> Iterator[tuple[str, str, str]]:
    """Yield the numbered modules that contain a key, the outermost first, as what precedes the number, the number, and
    what follows it: ``blocks``, ``3``, ``fc.weight`` for ``blocks.3.fc.weight``."""
    parts = key.split(".")
    for at in range(1, len(parts) - 1):
        if parts[at].isdecimal():
            yield ".".join(parts[:at]), parts[at], ".".join(parts[at + 1 :])


def is_transient(key: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor with this name and shape comes and goes between releases."""
    leaf = split_key(key)[1]
    if leaf in _MASKS:
        return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3] > 1
    if leaf == "freqs":
        return len(shape) < 2 and is_rope(key)
    if leaf in TRANSIENT or _OF_LAYERS.match(leaf):
        return leaf in TRANSIENT
    return any(part.lower().rpartition("_")[2].rstrip("0123456789") in _METRICS for part in key.split(".")[-3:-1])


def is_rope(key: str) -> bool:
    """Return whether a key is that of the frequencies of rotary embeddings in Meta's Llama."""
    return key == ROPE or key.endswith(f".{ROPE}")


def is_buffer_name(key: str, shape: tuple[int, ...]) -> bool:
    """Return whether the name says that a tensor is a buffer and not a parameter."""
    return split_key(key)[1] in RUNNING_STATISTICS or is_transient(key, shape)


# LeRobot kept the statistics of observations and actions in the model, and now has them in separate files.
_STATISTICS = re.compile(r"(^|\.)(un)?normali[sz]\w*\.([\w.]+[._])?(mean|std|min|max|q\d\d)$")


def has_statistics(keys: Iterable[str]) -> bool:
    """Return whether any key is a statistic with which inputs or outputs are normalised."""
    return any(map(_STATISTICS.search, keys))
