"""KEY105 renamed-by-release: names that a release changed, that peft adds, or that another framework gives to norms.

## What it finds
Keys that a known change of a module renamed, in either direction:

| rewrite | old | new |
|---|---|---|
| `weight_norm` (torch 2.0) | `weight_g`, `weight_v` | `parametrizations.weight.original0`, `….original1` |
| `spectral_norm` (torch 1.9) | `weight_orig` | `parametrizations.weight.original` |
| | `weight_u`, `weight_v` | `parametrizations.weight.0._u`, `….0._v` |
| DenseNet (torchvision 0.2) | `denselayer1.norm.1.weight` | `denselayer1.norm1.weight` |
| LayerNorm (BERT of TensorFlow) | `gamma`, `beta` | `weight`, `bias` |
| BatchNorm (TensorFlow, MindSpore) | `moving_mean`, `moving_variance` or `moving_var` | `running_mean`, `running_var` |
| BatchNorm (Paddle; JAX) | `_mean`, `_variance`; `mean`, `var` or `variance` | `running_mean`, `running_var` |
| peft, an adapter's file | `lora_A.weight`, `ia3_l` | `lora_A.default.weight`, `ia3_l.default` |
| peft, the layer under an adapter | `q_proj.weight` | `base_model.model.….q_proj.base_layer.weight` |

`weight` means any tensor name, such as `weight_hh_l0` of an LSTM. The last row works only in this direction: a layer
with an adapter is not what it was without one.

## Why it matters
The tensors are the same, but a strict load reports each as missing under the new name and unexpected under the old one.

## Fix safety
Safe: only names change. A key is renamed only if the target lacks it and wants the new name with the same shape, and
the file does not already have that name. Without a target nothing is renamed: `gamma` may well be a layer scale.

## Example
    ckptfix repair vocoder.pth --model hifigan:generator
    # conv_post.weight_g → conv_post.parametrizations.weight.original0

## Sources
- https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrizations.py
- https://github.com/pytorch/vision/pull/474
- https://github.com/huggingface/peft/blob/main/src/peft/utils/save_and_load.py
- https://github.com/huggingface/transformers/issues/29554 (a blanket rename of `gamma` broke ConvNeXt)"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from msgspec import Struct

from ckptfix.core.buffers import MOVING_STATISTICS
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Rename
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.core.target import Target
from ckptfix.rules.rule import Context, Rule

_FIELDS = {
    "module": r"(?:.+\.)?",
    "tensor": r"[^.]+",
    "n": r"\d+",
    "part": "norm|conv",
    "index": "[12]",
    "leaf": r"[^.]+",
    "adapter": r"(?:lora|ia3|hada|lokr|vera|oft|boft)_[^.]+",
}


_STATISTICS = {
    **MOVING_STATISTICS,
    **dict.fromkeys(("_mean", "mean"), "running_mean"),  # Paddle, JAX
    **dict.fromkeys(("_variance", "variance", "var"), "running_var"),
}


class ReleaseRename(Struct, frozen=True):
    """The rename of a tensor by a release: the old and the new name, with fields of ``_FIELDS`` in braces."""

    what: str
    old: str
    new: str
    both_ways: bool = True

    def names(self, key: str) -> Iterator[str]:
        """Yield the key's names on the other side, whichever side it is from."""
        for before, after in ((self.old, self.new), (self.new, self.old))[: 1 + self.both_ways]:
            if match := re.fullmatch(_pattern(before), key):
                yield after.format(**match.groupdict())


@cache
def _pattern(template: str) -> str:
    return re.sub(r"\\{(\w+)\\}", lambda field: f"(?P<{field[1]}>{_FIELDS[field[1]]})", re.escape(template))


REWRITES = (
    ReleaseRename("weight_norm", "{module}{tensor}_g", "{module}parametrizations.{tensor}.original0"),
    ReleaseRename("weight_norm", "{module}{tensor}_v", "{module}parametrizations.{tensor}.original1"),
    ReleaseRename("spectral_norm", "{module}{tensor}_orig", "{module}parametrizations.{tensor}.original"),
    ReleaseRename("spectral_norm", "{module}{tensor}_u", "{module}parametrizations.{tensor}.0._u"),
    ReleaseRename("spectral_norm", "{module}{tensor}_v", "{module}parametrizations.{tensor}.0._v"),
    ReleaseRename(
        "DenseNet", "{module}denselayer{n}.{part}.{index}.{leaf}", "{module}denselayer{n}.{part}{index}.{leaf}"
    ),
    ReleaseRename("LayerNorm", "{module}gamma", "{module}weight"),
    ReleaseRename("LayerNorm", "{module}beta", "{module}bias"),
    *(ReleaseRename("BatchNorm", f"{{module}}{old}", f"{{module}}{new}") for old, new in _STATISTICS.items()),
    ReleaseRename("peft", "{module}{adapter}.weight", "{module}{adapter}.default.weight"),
    ReleaseRename("peft", "{module}{adapter}", "{module}{adapter}.default"),
    ReleaseRename("peft", "{module}{adapter}", "{module}{adapter}.default.weight"),
    ReleaseRename("peft", "{module}{leaf}", "{module}base_layer.{leaf}", both_ways=False),
    ReleaseRename(
        "peft", "base_model.{module}{leaf}", "base_model.{module}modules_to_save.default.{leaf}", both_ways=False
    ),
    ReleaseRename("peft", "{module}{leaf}", "base_model.model.{module}base_layer.{leaf}", both_ways=False),
)


def renamed_by_release(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Rename the keys that the target wants under the name of another release."""
    found = list(_renames(context.checkpoint, target))
    arrivals = Counter(rename.to for rename, _ in found)
    found = [(rename, what) for rename, what in found if arrivals[rename.to] == 1]
    if not found:
        return
    rewritten = Counter(what for _, what in found)
    yield rule.finding(
        Level.ERROR,
        f"{counted(len(found), 'key')} with names from another release ({', '.join(rewritten)})",
        keys=[rename.key for rename, _ in found],
        evidence={"rewrites": dict(rewritten)},
        fix=Fix.safe(rename for rename, _ in found),
    )


def _renames(checkpoint: Checkpoint, target: Target) -> Iterator[tuple[Rename, str]]:
    """Yield every rename that the target confirms, with its rewrite; at most one per key."""
    for key, spec in checkpoint.specs.items():
        if key in target.slots or key in target.entries:
            continue
        for rewrite in REWRITES:
            name = next(
                (n for n in rewrite.names(key) if n not in checkpoint.entries and target.accepts(n, spec.shape)), None
            )
            if name is not None:
                yield Rename(key, name), rewrite.what
                break
