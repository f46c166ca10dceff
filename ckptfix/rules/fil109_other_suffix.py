"""FIL109 other-suffix: the file has the suffix of another format than its own.

## What it finds
A safetensors file whose name ends in `.pth`, `.pt`, `.ckpt`, `.bin` or `.pkl`, a torch file whose name ends in
`.safetensors`, and a file with one of these names (or `.pth.tar`) that is compressed or an archive: gzip, bzip2, xz, an
ordinary zip or a tar. Names with any other suffix, or with none, say nothing about the format.

## Why it matters
ckptfix looks at the content; many programs choose the reader by the suffix. `torch.load` refuses a safetensors file
with `invalid load key`, and safetensors a torch file with `HeaderTooLarge`, as if either were damaged. Neither unpacks
anything.

## Fix safety
There is no fix: a repair writes another file. Rename this one, or write it in the format that the name promises, with
`--format`. What a repair of a packed file writes is not packed.

## Example
    FIL109 a torch file under the name of a safetensors file, which safetensors refuses (HeaderTooLarge)

## Sources
https://huggingface.co/docs/safetensors: the format begins with the length of its header."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.facts import Kind
from ckptfix.core.finding import Finding, Level
from ckptfix.rules.rule import Context, Rule

_OF_TORCH = (".pth", ".pt", ".ckpt", ".bin", ".pkl")
_SAFETENSORS = ".safetensors"


def other_suffix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Note a file under the suffix of the other format."""
    checkpoint = context.checkpoint
    path = checkpoint.path.lower()
    for fact in checkpoint.remarked(Kind.PACKED_FILE):
        file = path.partition("!")[0]  # what follows is the name in an archive
        if file.endswith((*_OF_TORCH, ".pth.tar", _SAFETENSORS)):
            reader = "safetensors" if file.endswith(_SAFETENSORS) else "torch.load"
            yield rule.finding(
                Level.NOTE,
                f"the file is packed with {fact.data['form']}, which {reader} refuses: unpack it, or write "
                "it anew with ckptfix repair",
            )
            return
    if checkpoint.format == _SAFETENSORS[1:] and path.endswith(_OF_TORCH):
        yield rule.finding(
            Level.NOTE,
            "a safetensors file under the name of a torch file, which torch.load refuses: rename it, or load it with "
            "safetensors.torch.load_file",
        )
    elif checkpoint.format.startswith("torch") and path.endswith(_SAFETENSORS):
        yield rule.finding(
            Level.NOTE,
            "a torch file under the name of a safetensors file, which safetensors refuses (HeaderTooLarge): rename it, "
            "or write it with --format safetensors",
        )
