"""FIL108 unmerged-adapter: weights that an adapter has still to change.

## What it finds

With `--adapter`, the tensors of the file that the adapter changes, and by how much. Without it, a model that was saved
with an adapter inside of it: its layers have names like `q_proj.base_layer.weight`, and beside them are `lora_A` and
`lora_B`. And a file that is an adapter and nothing else: of what type and rank it is, and which layers it changes.

## Why it matters

The weights of the file are those from before the fine-tuning. A strict load fails over the names, and one that is not
strict gives the base model, without a word. An adapter alone is not a model.

## Fix safety

`--adapter` asks for the merge, which changes stored values. The result has the same bits as that of peft's
`merge_and_unload()`, without the model and its memory. The names, ranks and shapes of all layers are compared before
anything is written. Without `--adapter` nothing is merged: the factor of the matrices' product is not in the file but
in `adapter_config.json`.

## Example

    ckptfix repair model.safetensors --adapter my_lora
    ckptfix repair whole.pth --adapter my_lora/adapter_config.json

## Sources

- https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
- https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2402.09353 (DoRA)
- https://arxiv.org/abs/2205.05638 (IA3)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ckptfix.core.edits import MergeAdapter
from ckptfix.core.finding import Applicability, Blocks, Finding, Fix, Level, Placeholder, Remedy, counted
from ckptfix.reading.adapters import CONFIG, Adapter, adapter_in, open_adapter
from ckptfix.rules.merging import edits_within, find_merge, merge_edits
from ckptfix.rules.rule import Context, Rule, rule
from ckptfix.values.merging import is_merged


@rule("FIL108", "unmerged-adapter")
def unmerged_adapter(rule: Rule, context: Context) -> Iterator[Finding]:
    """Merge what ``--adapter`` names; else report an adapter in the file."""
    checkpoint, settings = context.checkpoint, context.settings
    if settings.adapter:
        if not is_merged(checkpoint):
            yield _merge(rule, context)
        return
    adapter = adapter_in(checkpoint)
    if not adapter.layers:
        return
    kind = _kind(adapter)
    if any("base_layer" in key.split(".") for key in checkpoint.entries):
        yield rule.finding(
            Level.WARNING,
            f"holds {kind} inside of its base, and was never merged",
            keys=tuple(key for layer in adapter.layers for key in layer.keys.values()),
            remedies=(Remedy((("adapter", _config_of(checkpoint.path)),), "merges it"),),
            blocks=Blocks.FILLING,
        )


def _merge(rule: Rule, context: Context) -> Finding:
    checkpoint, settings = context.checkpoint, context.settings
    adapters = [open_adapter(text, checkpoint) for text in settings.adapter]
    if len(adapters) == 1 and not adapters[0].path:
        edits = tuple(edits_within(checkpoint, adapters[0]))
        left: dict[str, int] = {}
    else:
        merge = find_merge(checkpoint, adapters, settings.unmerge)
        edits, left = tuple(merge_edits(checkpoint, merge, settings.unmerge)), merge.left
    changed = tuple(edit.key for edit in edits if isinstance(edit, MergeAdapter))
    names = " and ".join(f"{_kind(adapter)}{f' ({adapter.path})' * bool(adapter.path)}" for adapter in adapters)
    verb = "is taken off" if settings.unmerge else "changes"
    return rule.finding(
        Level.NOTE,
        f"{names} {verb} {counted(len(changed), 'tensor')}",
        keys=changed,
        evidence={"left": left} if left else {},
        fix=Fix(edits, Applicability.UNSAFE, asked=True),
    )


def _kind(adapter: Adapter) -> str:
    """Return what an adapter is, in words: its type, and its ranks."""
    roles = {role for layer in adapter.layers for role in layer.keys}
    if "scale" in roles:
        return "an IA3 adapter"
    ranks = Counter(one.shape[0] for layer in adapter.layers if (one := adapter.spec(layer, "A")) is not None)
    common = ", ".join(str(rank) for rank, _ in ranks.most_common(3))
    return f"a {'DoRA' if 'magnitude' in roles else 'LoRA'} adapter of rank {common}"


def _config_of(path: str) -> object:
    file = Path(path).parent / CONFIG
    return (str(file),) if file.is_file() else Placeholder(CONFIG)
