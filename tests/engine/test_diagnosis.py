"""The rules in order: each sees the checkpoint after the fixes of earlier rules."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckptfix.engine.diagnosis
from ckptfix.core.edits import Drop, Rename
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import Applicability, Finding, Fix, Level
from ckptfix.core.settings import Settings
from ckptfix.core.target import target_from_module
from ckptfix.engine.diagnosis import diagnose, is_enabled
from ckptfix.errors import InternalError
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.rule import Context, Rule

CHECKPOINT = open_state_dict({"module._orig_mod.weight": torch.ones(2, 2)})


def listed(code, name, propose):
    """Return a listed rule without a module."""
    made = Rule(code, name)
    made.__dict__["_module"] = SimpleNamespace(**{name: lambda rule, context: propose(context)})
    return made


def test_noop_a_healthy_file():
    diagnosis = diagnose(open_state_dict(nn.Linear(2, 2).state_dict()), None, Settings())
    assert (diagnosis.findings, diagnosis.fixed, bool(diagnosis.plan)) == ((), (), False)


def test_each_rule_sees_the_result_of_the_last_one():
    diagnosis = diagnose(CHECKPOINT, None, Settings())
    assert [finding.code for finding in diagnosis.fixed] == ["KEY101", "KEY102"]
    assert diagnosis.plan.edits == (
        Rename("module._orig_mod.weight", "module.weight"),
        Rename("module.weight", "weight"),
    )
    assert diagnosis.result.keys() == ["weight"]
    assert CHECKPOINT.keys() == ["module._orig_mod.weight"]


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        pytest.param({"select": ("KEY102",)}, ["KEY102"], id="one code"),
        pytest.param({"select": ("KEY",), "ignore": ("KEY102",)}, ["KEY101"], id="a family less one"),
        pytest.param({"select": ("VAL",)}, [], id="a family that has nothing to say"),
        pytest.param({"ignore": ("KEY",)}, [], id="ignored"),
    ],
)
def test_select_and_ignore(settings, codes):
    assert [finding.code for finding in diagnose(CHECKPOINT, None, Settings(**settings)).findings] == codes


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("unsafe_fixes", [False, True])
@pytest.mark.parametrize("applicability", Applicability)
def test_which_fixes_are_enabled(applicability, unsafe_fixes, asked):
    enabled = is_enabled(Fix((), applicability, asked), Settings(unsafe_fixes=unsafe_fixes))
    expected = {
        Applicability.SAFE: True,
        Applicability.UNSAFE: unsafe_fixes or asked,
        Applicability.DISPLAY_ONLY: False,
    }
    assert enabled is expected[applicability]


def test_values_are_read_only_if_a_rule_needs_them():
    state = {"weight": torch.full((4,), float("nan"))}
    assert [finding.code for finding in diagnose(open_state_dict(state), None, Settings()).findings] == ["VAL101"]
    assert diagnose(open_state_dict(state), None, Settings(values=False)).findings == ()


def test_filled_keys_are_known():
    target = target_from_module(nn.Linear(2, 2))
    diagnosis = diagnose(open_state_dict({"weight": torch.ones(2, 2)}), target, Settings(fill="target"))
    assert list(diagnosis.filled) == ["bias"]


def test_a_fix_that_repeats_is_an_internal_error(monkeypatch):
    def propose(context: Context) -> Iterator[Finding]:
        (key,) = context.checkpoint.entries
        yield Finding(
            "TST101", "restless", Level.ERROR, "again", fix=Fix((Rename(key, key + "x"),), Applicability.SAFE)
        )

    monkeypatch.setattr(ckptfix.engine.diagnosis, "RULES", (listed("TST101", "restless", propose),))
    with pytest.raises(InternalError, match="TST101 proposes another fix after all fixes"):
        diagnose(CHECKPOINT, None, Settings())


def test_a_rule_that_undoes_another_is_an_internal_error(monkeypatch):
    """All rules together have to be stable: a rule that restores what another one removes is found."""

    def take(context: Context) -> Iterator[Finding]:
        for key in context.checkpoint.entries:
            if key.startswith("x"):
                edits = (Rename(key, key[1:]),)
                yield Finding("TST101", "take", Level.ERROR, "take", fix=Fix(edits, Applicability.SAFE))

    def bring(context: Context) -> Iterator[Finding]:
        for key in context.checkpoint.entries:
            if not key.startswith("x"):
                edits = (Rename(key, f"x{key}"),)
                yield Finding("TST102", "bring", Level.ERROR, "bring", fix=Fix(edits, Applicability.SAFE))

    rules = (listed("TST101", "take", take), listed("TST102", "bring", bring))
    monkeypatch.setattr(ckptfix.engine.diagnosis, "RULES", rules)
    with pytest.raises(InternalError, match="TST101"):
        diagnose(CHECKPOINT, None, Settings())


def test_a_fix_that_is_not_allowed_stays_a_finding(monkeypatch):
    def propose(context: Context) -> Iterator[Finding]:
        edits = tuple(Drop(key) for key in context.checkpoint.entries)
        if edits:
            yield Finding("TST101", "drop", Level.ERROR, "drop", fix=Fix(edits, Applicability.UNSAFE))

    monkeypatch.setattr(ckptfix.engine.diagnosis, "RULES", (listed("TST101", "drop", propose),))
    kept, dropped = (diagnose(CHECKPOINT, None, Settings(unsafe_fixes=unsafe)) for unsafe in (False, True))
    assert (len(kept.findings), kept.fixed, len(kept.result.entries)) == (1, (), 1)
    assert (len(dropped.fixed), len(dropped.result.entries)) == (1, 0)


def doubtful(state: dict[str, torch.Tensor]):
    checkpoint = open_state_dict(state)
    return replace(checkpoint, remarks=(Fact.of(Kind.DOUBTFUL_NAMES, cause=Fact(Kind.MEMBER_CHECKSUM, "data.pkl")),))


NORM = {key: value for key, value in nn.BatchNorm1d(2).state_dict().items() if key != "num_batches_tracked"}


@pytest.mark.parametrize("unsafe_fixes", [False, True])
def test_doubtful_names_are_not_filled_unless_asked(unsafe_fixes):
    assert [finding.code for finding in diagnose(open_state_dict(NORM), None, Settings()).fixed] == ["BUF101"]
    diagnosis = diagnose(doubtful(NORM), None, Settings(unsafe_fixes=unsafe_fixes, values=False))
    assert [finding.code for finding in diagnosis.findings] == ["FIL203", "BUF101"]
    assert [finding.code for finding in diagnosis.fixed] == (["BUF101"] if unsafe_fixes else [])


def test_a_rename_of_doubtful_names_keeps_every_tensor():
    diagnosis = diagnose(doubtful({"module.weight": torch.ones(2, 2)}), None, Settings())
    assert [finding.code for finding in diagnosis.fixed] == ["KEY102"]
