"""The checkpoint of ``--compare``: what the same model gives with its weights on the same input.

Names are repaired first, as far as that is safe, so that a file from before a repair can be compared with the one from
after it. A reference that does not load, or does not run, is said and fails nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import SOURCE, Settings
from ckptfix.core.smoke_result import Comparison
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import target_from_module
from ckptfix.errors import CkptfixError
from ckptfix.smoke.agreement import compare_outputs
from ckptfix.smoke.forward import Pass, forward
from ckptfix.smoke.outcome import Outcome
from ckptfix.smoke.outputs import dtype_name
from ckptfix.smoke.proof import NotLoadedError, load_strictly

if TYPE_CHECKING:
    from torch import nn

_NAMES = Settings(select=("KEY", "BUF", "FIT105", "FIL102"), values=False)


@dataclass(frozen=True)
class Reference:
    """A checkpoint file, what it is called in the report, and how it is opened."""

    file: str
    label: str
    weights: str | None = None
    member: str | None = None
    salvage: bool = False

    @classmethod
    def of(cls, settings: Settings, source: str) -> Reference | None:
        """The reference that was asked for, None without one; ``source`` is the file that is repaired."""
        asked = settings.smoke_settings.compare
        if asked == SOURCE:
            return cls(source, source, settings.weights, settings.member, settings.salvage)
        return None if asked is None else cls(asked, asked)

    def open(self) -> Checkpoint:
        """The checkpoint as it is. Raises ``UnreadableError`` where the file holds none."""
        from ckptfix.reading.opening import open_file

        return open_file(self.file, self.weights, salvage=self.salvage, member=self.member)


def compare_with_reference(
    reference: Reference, tested: Checkpoint, build: Callable[[], nn.Module], run: Pass, base: Outcome
) -> Comparison:
    """The outputs of a pass with the weights of the file ``tested`` against those that the weights of the reference
    give in a new model of ``build``.
    """
    label = reference.label
    try:
        model = build()
        stored = reference.open()
        theirs = _with_safe_names(stored, model)
        load_strictly(model, theirs.state_dict())
    except NotLoadedError as error:
        among = f", {error.keys[0]} among them" if error.keys else ""
        return Comparison(label, unlike=f"{error}{among}")
    except CkptfixError as error:
        return Comparison(label, unlike=f"{error}")
    if theirs.keys() != stored.keys():
        label += " after safe repairs"
    subject, _ = run.setting.prepare(model)
    other = forward(subject, run.arguments, base)
    if other.outcome.failure is not None:
        failure = other.outcome.failure
        return Comparison(label, unlike=f"with its weights the model failed ({failure.error})")
    seen = compare_outputs(run.outputs, other.outputs, label, dtype_name(subject.dtype))
    if seen.identical or seen.unlike:
        return seen
    differing = sum(_differ(spec, theirs.specs.get(key)) for key, spec in tested.specs.items())
    return replace(seen, differing=differing, tensors=len(tested.specs))


def _with_safe_names(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    from ckptfix.engine.diagnosis import diagnose  # all rules come with it, which few forward tests need

    return diagnose(checkpoint, target_from_module(model), _NAMES).result


def _differ(left: TensorSpec, right: TensorSpec | None) -> bool:
    """Whether two stored tensors differ in a bit, or in their form."""
    from ckptfix.reading.tensors import row_major_bytes

    if right is None or (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return True
    pairs = zip_longest(left.strided_parts(), right.strided_parts())
    return any(a is None or b is None or row_major_bytes(a, "") != row_major_bytes(b, "") for a, b in pairs)
