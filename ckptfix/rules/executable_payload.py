"""FIL901 executable-payload: the pickle names functions that no checkpoint needs.

## What it finds
Globals such as `os.system`, `builtins.eval`, `runpy`, `subprocess`, `torch.load` in a pickle of the file, however they
are spelled; and further pickles in the archive that torch.load never reads, where a scanner or another reader might.

## Why it matters
A pickle runs what it names. Loading such a file with `weights_only=False`, with an old torch (CVE-2025-32434) or with
plain `pickle` hands the machine over. ckptfix reads it without running anything, so that looking is safe.

## Fix safety
There is no fix, and `repair` writes nothing: a file that was built as an attack is not a damaged checkpoint. Get it
from somewhere else. Where the weights are all that you have, `--disarm` writes the tensors of the state_dict alone, and
nothing of what stands beside them; that they are what they should be is for you to judge.

## Example
`posix.system('touch …')` in `data.pkl`.

## Sources
https://github.com/mmaitre314/picklescan and https://github.com/trailofbits/fickling, whose lists this one follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptfix.finding import Applicability, Context, Disarm, Finding, Fix, Level, Rule, rule

REMEDY = "do not load this file with anything; get it from a source that you trust"


@rule("FIL901", "executable-payload")
def executable_payload(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name what the file would run."""
    fix = None
    if context.settings.disarm and context.checkpoint.specs:
        armed = [remark for remark in context.checkpoint.remarks if remark.kind in ("payload", "hidden-pickle")]
        names = ", ".join(remark.detail if remark.kind == "payload" else remark.where for remark in armed)
        fix = Fix((Disarm(names),), Applicability.UNSAFE, asked=True)
    remedy = REMEDY if not context.checkpoint.specs else f"{REMEDY}; --disarm writes its tensors alone"
    payload = [remark.detail for remark in context.checkpoint.remarks if remark.kind == "payload"]
    if payload:
        yield rule.finding(
            Level.ERROR,
            f"the file is built to run code when it is loaded: it names {', '.join(payload)}",
            evidence={"globals": payload},
            fix=fix,
            remedy=remedy,
        )
    hidden = [remark.where for remark in context.checkpoint.remarks if remark.kind == "hidden-pickle"]
    if hidden:
        yield rule.finding(
            Level.WARNING,
            f"the archive holds further pickles that torch.load never reads: {', '.join(hidden[:4])}",
            evidence={"members": hidden},
            fix=fix and replace(fix, edits=() if payload else fix.edits),
            remedy=remedy,
        )
