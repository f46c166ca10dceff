"""The rules, in the order in which they run. Each sees the checkpoint after the edits of those before it.

A module that begins with a code is the rule of that code; the others hold what rules share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module

from msgspec import Struct

from ckptfix.core.finding import Finding
from ckptfix.core.objects import has_optimizer
from ckptfix.core.settings import Settings
from ckptfix.rules.rule import Context, Rule


class Needs(Enum):
    """What a rule cannot say anything without."""

    NAMES = "names"
    TARGET = "target"
    VALUES = "values"
    OPTIMIZER = "optimizer"
    MAP = "map of names"
    FORWARD_TEST = "forward test"

    def are_met(self, context: Context) -> bool:
        """Return whether it is there. The forward test comes after the rules, and makes its findings itself."""
        if self is Needs.TARGET:
            return context.target is not None
        if self is Needs.VALUES:
            return context.settings.values
        if self is Needs.OPTIMIZER:
            return has_optimizer(context.checkpoint.root) or has_optimizer(context.checkpoint.beside)
        if self is Needs.MAP:
            return context.settings.rename_map is not None
        return self is Needs.NAMES


class RuleEntry(Struct, frozen=True, dict=True):
    """A rule in `RULES`. Its module is imported when it has something to look at, or when its manual is read: half of
    the rules need values, and most of the rest of these a target."""

    code: str
    name: str
    needs: Needs = Needs.NAMES
    wanted_by: str | None = None  # the setting that asks for what this rule does, even if `select` leaves the rule out

    # A pattern of which the rule cannot say anything if it is found in no key, unless the rule is wanted.
    keys: str = ""

    def is_wanted(self, settings: Settings) -> bool:
        """Return whether the rule's fixes are asked for, whichever rules were selected."""
        return self.wanted_by is not None and bool(getattr(settings, self.wanted_by))

    @cached_property
    def rule(self) -> Rule:
        """The rule itself: KEY106 is ``renamed_layers`` in the module ``key106_renamed_layers``."""
        name = self.name.replace("-", "_")
        rule: Rule = getattr(import_module(f"{__name__}.{self.code.lower()}_{name}"), name)
        return rule

    @property
    def family(self) -> str:
        """The first letters of the code, which its kind of defect has."""
        return self.code[:3]

    @property
    def manual(self) -> str:
        """The manual of the rule."""
        return self.rule.manual

    def propose(self, context: Context) -> Iterator[Finding]:
        """Return the findings of the rule."""
        is_heard = self.needs.are_met(context)
        if is_heard and self.keys and not self.is_wanted(context.settings):
            is_heard = any(map(re.compile(self.keys).search, context.checkpoint.entries))
        return self.rule.propose(context) if is_heard else iter(())


# Every rule, once. What names say comes before what shapes say, and both before what values say.
RULES: tuple[RuleEntry, ...] = (
    RuleEntry("FIL901", "executable-payload"),
    RuleEntry("FIL203", "damaged-file"),
    RuleEntry("FIL201", "storage-damage", Needs.VALUES, wanted_by="salvage"),
    RuleEntry("FIL202", "zero-run", Needs.VALUES),
    RuleEntry("FIL204", "copied-block", Needs.VALUES),
    RuleEntry("FIL101", "several-state-dicts", wanted_by="weights"),
    RuleEntry("FIL105", "shard-of-weights"),
    RuleEntry("FIL109", "other-suffix"),
    RuleEntry("FIL110", "paddle-weights"),
    RuleEntry("FIL102", "not-weights-only"),
    RuleEntry("FIL103", "device-tag"),
    RuleEntry("FIL104", "lost-extras"),
    RuleEntry("FIL106", "unnamed-weights"),
    RuleEntry("FIL107", "wrong-name-hash"),
    RuleEntry("KEY101", "wrapper-segment"),
    RuleEntry("KEY102", "wrapper-prefix"),
    RuleEntry("KEY107", "renamed-by-map", Needs.MAP, wanted_by="rename_map"),
    RuleEntry("KEY103", "missing-wrapper-prefix", Needs.TARGET),
    RuleEntry("KEY104", "foreign-prefix", Needs.TARGET),
    RuleEntry("KEY105", "renamed-by-release", Needs.TARGET),
    RuleEntry("KEY106", "renamed-layers", Needs.TARGET),
    RuleEntry("FIT109", "reparametrised-weight", Needs.TARGET),
    RuleEntry(
        "FIL108",
        "unmerged-adapter",
        wanted_by="adapter",
        keys=r"lora|ia3|base_layer|base_model\.model\.|hada_|lokr_|oft_|vera_|token_adapter|adapter\.linear_",
    ),
    RuleEntry("BUF101", "missing-num-batches-tracked"),
    RuleEntry("BUF102", "unexpected-num-batches-tracked"),
    RuleEntry("BUF103", "malformed-num-batches-tracked"),
    RuleEntry("BUF104", "transient-buffer", Needs.TARGET),
    RuleEntry("FIT106", "flat-parameters", Needs.TARGET),
    RuleEntry("FIT107", "quantised-weights", keys=r"SCB|[qQ]_?weight|W_q|weight_packed|scale|absmax|_blocks|trellis"),
    RuleEntry("FIT108", "layer-count", Needs.TARGET, wanted_by="adapt"),
    RuleEntry("FIT103", "shape-mismatch", Needs.TARGET, wanted_by="adapt"),
    RuleEntry("FIT105", "tie", Needs.TARGET),
    RuleEntry("FIT102", "unexpected-key", Needs.TARGET),
    RuleEntry("FIT101", "missing-key", Needs.TARGET),
    RuleEntry("FIT104", "dtype-mismatch", Needs.TARGET),
    RuleEntry("VAL101", "non-finite", Needs.VALUES),
    RuleEntry("VAL103", "running-stats", Needs.VALUES),
    RuleEntry("VAL201", "decayed", Needs.VALUES),
    RuleEntry("VAL202", "all-zero", Needs.VALUES),
    RuleEntry("VAL203", "subnormal", Needs.VALUES),
    RuleEntry("VAL204", "dead-channels", Needs.VALUES),
    RuleEntry("VAL205", "constant", Needs.VALUES),
    RuleEntry("VAL206", "outlier-scale", Needs.VALUES),
    RuleEntry("VAL207", "huge-value", Needs.VALUES),
    RuleEntry("VAL208", "misread-dtype", Needs.VALUES),
    RuleEntry("VAL209", "same-matrix", Needs.VALUES),
    RuleEntry("VAL210", "sparse-index", Needs.VALUES),
    RuleEntry("VAL301", "twins-disagree", Needs.VALUES),
    RuleEntry("VAL102", "half-overflow", Needs.VALUES),
    RuleEntry("OPT101", "stale-optimizer", Needs.OPTIMIZER, wanted_by="drop_optimizer"),
    RuleEntry("OPT102", "unreadable-optimizer-state", Needs.OPTIMIZER),
    RuleEntry("OPT103", "non-finite-moments", Needs.OPTIMIZER),
    RuleEntry("OPT104", "optimizer-of-another-model", Needs.OPTIMIZER),
    RuleEntry("OPT105", "optimizer-positions", Needs.OPTIMIZER, wanted_by="optimizer_positions"),
    RuleEntry("RUN101", "forward-fails", Needs.FORWARD_TEST),
    RuleEntry("RUN102", "forward-non-finite", Needs.FORWARD_TEST),
    RuleEntry("RUN103", "forward-in-training", Needs.FORWARD_TEST),
    RuleEntry("RUN104", "forward-devices-differ", Needs.FORWARD_TEST),
    RuleEntry("RUN105", "forward-odd-input", Needs.FORWARD_TEST),
    RuleEntry("RUN106", "forward-incomparable", Needs.FORWARD_TEST),
)

OF_MISFITS = "FIT"  # the family of what a target has otherwise, or not at all
FITTING = ("KEY", "BUF", OF_MISFITS)  # the families of rules that make the keys of a checkpoint those of a target
VALUES = ("VAL",)  # the rules about values
OF_ATTACKS = "FIL901"  # the rule about files that are built to run code
OF_OPTIMIZERS = "OPT"  # the family of what an optimizer needs

# Rules, or the beginnings of their codes, that give the keys of a checkpoint the names that a target has.
FOR_NAMES = ("KEY", "FIL102")
FOR_LOADING = (*FOR_NAMES, "BUF", "FIT105")  # the rules that make a checkpoint load without inventing a value
