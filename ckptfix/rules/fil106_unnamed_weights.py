"""FIL106 unnamed-weights: tensors of a module without a name in its state_dict.

## What it finds
In a whole model and in TorchScript: tensors in plain attributes, neither parameter nor buffer
(`self.anchors = torch.…`, `stride` of YOLO's head, lists and dicts of tensors, modules in a plain list). In TorchScript
also constants of the code, which `torch.jit.freeze` and `optimize_for_inference` make from the weights, and
`torch.jit.trace` from intermediate tensors.

Not reported are non-persistent buffers, tensors that share a parameter's storage (`_flat_weights` of an LSTM) or that a
hook computes from one (`weight` of weight_norm, spectral_norm and pruning), caches, gradients, metrics and optimizers.

## Why it matters
`state_dict()` skips them, so the output lacks them. The code that loads it has to create them again, which the model's
own code may or may not do.

## Fix safety
There is no fix: a key that no module has would fail every strict load. A warning if these tensors hold more numbers
than the state_dict, else a note.

## Example
A detector whose backbone was frozen: 53 tensors of 23.5 M elements are constants, and the state_dict has the head.

## Sources
https://pytorch.org/docs/stable/generated/torch.jit.freeze.html,
https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/docs/serialization.md,
https://pytorch.org/docs/stable/notes/modules.html#module-state (what a state_dict holds)"""

from collections.abc import Iterator

from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.rules.rule import Context, Rule

_FROZEN = "the weights were frozen into constants of the code, which have no names, so the state_dict lacks them"
_CONSTANTS = "constants of the code have no names, so the state_dict lacks them"


def unnamed_weights(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors of a module that its state_dict leaves out."""
    remarked = context.checkpoint.remarked
    for remark in remarked(Kind.FROZEN):
        said, remedies = f"{_FROZEN}: {clause(remark)}", advise("use the file from before freezing")
        yield rule.finding(Level.WARNING, said, remedies=remedies)
    for remark in remarked(Kind.CONSTANTS):
        yield rule.finding(Level.NOTE, f"{_CONSTANTS}: {clause(remark)}")
    attributes = tuple(remark.place for remark in remarked(Kind.TENSOR_ATTRIBUTE))
    if attributes:
        said = f"{counted(len(attributes), 'attribute')} with tensors, neither parameter nor buffer, left out"
        outweighing = [clause(remark) for remark in remarked(Kind.MOST_IN_ATTRIBUTES)]
        yield rule.finding(
            Level.WARNING if outweighing else Level.NOTE,
            ": ".join([said, *outweighing]),
            keys=attributes,
            remedies=advise("register them as buffers or modules, and save the model again") if outweighing else (),
        )
