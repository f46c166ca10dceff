"""The common opcodes in one go do what the machine's own steps do: values, account and errors."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from typing import Any

import pytest

from ckptfix.bytes.limits import Bounds
from ckptfix.errors import CkptfixError
from ckptfix.reading.pickles.common_opcodes import COMMON
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.reading.pickles.opcodes import OPCODES
from ckptfix.reading.pickles.stream import Bytes

ROWS = {f"layer{index}.weight": [index, -index, 70000 * index, (index,), (1, 2), (1, 2, 3)] for index in range(300)}
PICKLES = {
    "nothing": pickle.dumps(None, 2),
    "rows, with far places in the memo": pickle.dumps(ROWS, 2),
    "a shared list, recalled from near and far": pickle.dumps([shared := ["x"], ROWS, shared, shared], 2),
    "calls": pickle.dumps([OrderedDict(a=1), {1, 2}, frozenset((3,)), complex(1, 2)], 2),
    "texts that are no UTF-8": pickle.dumps(["\ud800", "é" * 70], 2),
    "a memo that begins at 1, as in Python 2": b"\x80\x02]q\x01(h\x01X\x01\0\0\0aq\x02h\x02e.",
    "a memo that begins far away": b"\x80\x02]r\xe8\x03\0\0(j\xe8\x03\0\0X\x01\0\0\0ar\xe7\x03\0\0j\xe7\x03\0\0e.",
    "a place that is written again": b"\x80\x02K\x01q\0K\x02q\0h\0.",
    "a call of what is no global": b"\x80\x02K\x01)R.",
    "a call with a list": b"\x80\x02ccollections\nOrderedDict\n]R.",
}


def run(data: Bytes, limit: int | None = None) -> tuple[str, int, int, str]:
    """What the machine makes of a pickle: the value, where it stands, what is left of the account, and the error."""
    bounds = Bounds("f.pth", len(data))
    if limit is not None:
        bounds.left = limit
    machine = PickleMachine(data, "f.pth", InertTable("f.pth", lambda nested: nested).call, repr, 0, bounds)
    try:
        return repr(machine.load()), machine.position, bounds.left, ""
    except CkptfixError as error:
        return "", machine.position, bounds.left, f"{type(error).__name__}: {error}"


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a pickle with the machine's own steps alone."""

    def run_slowly(data: bytes, limit: int | None = None) -> tuple[str, int, int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(
                "ckptfix.reading.pickles.machine.HANDLERS", [OPCODES.get(bytes([code])) for code in range(256)]
            )
            return run(data, limit)

    return run_slowly


def test_each_has_its_entry_among_the_opcodes() -> None:
    assert COMMON.keys() <= OPCODES.keys()


@pytest.mark.parametrize("data", PICKLES.values(), ids=PICKLES)
def test_they_do_what_the_steps_do(data: bytes, step_by_step: Any) -> None:
    assert run(data) == step_by_step(data)


@pytest.mark.parametrize("limit", [0, 50, 500, 5000])
def test_the_account_ends_at_the_same_opcode(limit: int, step_by_step: Any) -> None:
    data = PICKLES["rows, with far places in the memo"]
    done = run(data, limit)
    assert done[3].startswith("HostileError")
    assert done == step_by_step(data, limit)


def test_a_pickle_that_is_cut_short_anywhere_ends_alike(step_by_step: Any) -> None:
    for name in ("calls", "a memo that begins far away", "texts that are no UTF-8"):
        data = PICKLES[name]
        for end in range(len(data)):
            assert run(data[:end]) == step_by_step(data[:end]), (name, end)


def test_a_damaged_pickle_ends_alike(step_by_step: Any) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(rng.choice([*PICKLES.values()])[:400])
        data[rng.randrange(len(data))] = rng.randrange(256)
        assert run(bytes(data)) == step_by_step(bytes(data)), bytes(data)
