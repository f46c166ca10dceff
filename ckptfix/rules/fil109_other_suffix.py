"""FIL109 other-suffix: the file has the suffix of another format than its own.

## What it finds
A safetensors file whose name ends in `.pth`, `.pt`, `.ckpt`, `.bin` or `.pkl`, a torch file whose name ends in
`.safetensors`, and a file with one of these names (or `.pth.tar`) that is compressed or an archive: gzip, bzip2, xz, an
ordinary zip or a tar. Names with any other suffix, or with none, say nothing about the format.

## Why it matters
ckptfix looks at the content, but many programs choose the reader by the suffix. `torch.load` refuses a safetensors file
with `invalid load key`, and safetensors a torch file with `HeaderTooLarge`, as if it were damaged. Neither unpacks
anything.

## Fix safety
Safe: every tensor stays bit for bit. The file is written in the format that its name promises, uncompressed. Data that
safetensors cannot hold, such as an optimizer, stays with the weights in a `.pth`. Or rename the file, if only its name
is wrong.

## Example
    FIL109 the file is a torch file under the name of a safetensors file, which safetensors refuses (HeaderTooLarge)

## Sources
https://huggingface.co/docs/safetensors: the format begins with the length of its header."""

from collections.abc import Iterator

from ckptfix.core.edits import Rewrite
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Finding, Fix, Level
from ckptfix.rules.rule import Context, Rule

_KINDS = ("a torch file", "a safetensors file")


def other_suffix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Write a file again whose suffix is that of another format."""
    for fact in context.checkpoint.remarked(Kind.OTHER_SUFFIX)[:1]:  # shards are alike
        reader, form = fact.data["reader"], fact.data["packed"]
        is_named_safetensors = reader == "safetensors"
        kind, name = _KINDS[not is_named_safetensors], _KINDS[is_named_safetensors]
        cause = f"is packed with {form}" if form else f"is {kind} under the name of {name}"
        how = " (HeaderTooLarge)" * (is_named_safetensors and not form)
        yield rule.finding(
            Level.WARNING, f"the file {cause}, which {reader} refuses{how}", fix=Fix.safe((Rewrite(cause),))
        )
