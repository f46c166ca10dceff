"""FIL901 executable-payload: the pickle names functions that no checkpoint needs.

## What it finds
Globals such as `os.system`, `builtins.eval`, `runpy`, `subprocess`, `torch.load` in a pickle of the file, however they
are spelled: no checkpoint even names these. It also looks at what is *called*. A healthy pickle calls only classes and
the few functions that pickle, torch and numpy use to write values. A call of any other function of the standard library
or a common package (`pathlib.Path.write_text`), or of the result of a call (`functools.partial()`), is an attack. More
pickles in the archive that torch.load never reads, but a scanner or another reader might, are a warning. A trainer's
files next to a model (`optimizer.pt`, `rng_state.pth`, `training_args.bin`) are checked too: resuming loads them.

The code that a `torch.fx.GraphModule` stores as text is a warning if it is what torch.fx writes: calls of submodules
and tensor operations. Code that does more is an error like the rest.

## Why it matters
A pickle runs what it names. Loading such a file with `weights_only=False`, with an old torch (CVE-2025-32434) or with
plain `pickle` gives its author control of the machine. ckptfix reads it without running anything.

## Fix safety
A torch.fx graph becomes its state_dict, without the code, which is safe. Otherwise there is no fix, and `repair` writes
nothing: a file built as an attack is not a damaged checkpoint. Get it from somewhere else. If you have no other copy of
the weights, `--disarm` writes only the tensors of the state_dict; judge for yourself whether they are right.

## Example
`posix.system('touch …')` in `data.pkl`.

## Sources
https://github.com/mmaitre314/picklescan and https://github.com/trailofbits/fickling, whose lists this one follows."""

from collections.abc import Iterator

from msgspec.structs import replace

from ckptfix.core.edits import Disarm, Plain
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, advise
from ckptfix.reading.pickles.payload import GRAPH_CODE, PICKLE
from ckptfix.rules.rule import Context, Rule

REMEDIES = (
    *advise("do not load this file; get it from a source that you trust"),
    Remedy.of("writes only its tensors", disarm=True),
)


def executable_payload(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report what loading the file would run."""
    fix = None
    if context.settings.disarm and context.checkpoint.specs:
        armed = context.checkpoint.remarked(Kind.PAYLOAD, Kind.HIDDEN_PICKLE)
        left_out = [remark.data["name"] if remark.kind is Kind.PAYLOAD else remark.place for remark in armed]
        fix = Fix.requested((Disarm(", ".join(left_out)),))
    remedies = REMEDIES if context.checkpoint.specs else REMEDIES[:1]
    payload = [fact for fact in context.checkpoint.remarked(Kind.PAYLOAD) if fact.place == PICKLE]
    if payload:
        names = [fact.data["name"] for fact in payload]
        yield rule.finding(
            Level.ERROR,
            f"the file is built to run code when it is loaded: it names {', '.join(names)}",
            evidence={"globals": names},
            fix=fix,
            remedies=remedies,
            blocks=Blocks.WRITING | Blocks.LOADING,
        )
    if beside := [fact for fact in context.checkpoint.remarked(Kind.PAYLOAD) if fact.place != PICKLE]:
        names = [*dict.fromkeys(fact.data["name"] for fact in beside)]
        files = [*dict.fromkeys(fact.place for fact in beside)]
        yield rule.finding(
            Level.ERROR,
            f"resuming training from it would run code: {', '.join(files)} names {', '.join(names)}",
            evidence={"globals": names, "files": files},
            fix=fix and replace(fix, edits=() if payload else fix.edits),
            remedies=remedies,
            blocks=Blocks.WRITING,  # loading the weights reads none of these files
        )
    if stored := context.checkpoint.remarked(Kind.STORED_CODE):
        edits = tuple(Plain(remark.place, GRAPH_CODE, "nothing") for remark in stored)
        yield rule.finding(
            Level.WARNING,
            "the file holds Python code as text, and torch.load with weights_only=False runs it: a torch.fx graph "
            "whose code only calls tensor operations",
            evidence={"globals": [remark.data["name"] for remark in stored]},
            fix=Fix.safe(edits) if fix is None else replace(fix, edits=() if payload or beside else fix.edits),
            remedies=advise("repair the file and load its state_dict into the model's own class"),
            blocks=Blocks.WRITING | Blocks.LOADING,
        )
    hidden = [fact.place for fact in context.checkpoint.remarked(Kind.HIDDEN_PICKLE)]
    if hidden:
        yield rule.finding(
            Level.WARNING,
            f"the archive holds more pickles, which torch.load never reads: {', '.join(hidden[:4])}",
            evidence={"members": hidden},
            fix=fix and replace(fix, edits=() if payload or beside or stored else fix.edits),
            remedies=remedies,
            blocks=Blocks.WRITING | Blocks.LOADING,
        )
