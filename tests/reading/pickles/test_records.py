"""The record of a tensor in one go is what its opcodes make of it: values, calls, memo, account and errors."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ckptfix import open_checkpoint
from ckptfix.bytes.limits import Bounds
from ckptfix.core.spec import Storage
from ckptfix.errors import CkptfixError
from ckptfix.reading.pickles import common_opcodes, records
from ckptfix.reading.pickles.claims import TypedStorage
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.writing.torch_files import write_zip

KEPT = torch.arange(600.0)
SHAPES = ((), (0,), (7,), (1, 3), (2, 300), (70000,), (2, 3, 4), (2, 1, 3, 5), (1, 2, 1, 2, 1, 2))


def state_dict() -> dict[str, Any]:
    """Tensors of every rank and of numbers of every width, the first in a short memo and the last in a long one."""
    made: dict[str, Any] = {}
    for turn in range(8):
        for shape in SHAPES:
            made[f"{turn}.{shape}"] = torch.zeros(shape)
        made[f"{turn}.parameter"] = nn.Parameter(torch.ones(3, 4))
        made[f"{turn}.tie"] = made[f"{turn}.parameter"]
        made[f"{turn}.grad"] = torch.ones(3, 4, requires_grad=True)
        made[f"{turn}.view"] = KEPT[turn * 40 :: 2]
        made[f"{turn}.transposed"] = torch.zeros(300, 2).t()
        made[f"{turn}.count"] = torch.tensor(turn)
        made[f"{turn}.conjugate"] = torch.zeros(2, dtype=torch.complex64).conj()
        made[f"{turn}.unsigned"] = torch.zeros(2, dtype=torch.uint16)
    return made


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The pickle of the same tensors as torch writes it, now and formerly, and as ckptfix does."""
    path, old, new = tmp_path_factory.mktemp("records") / "f.pth", io.BytesIO(), io.BytesIO()
    torch.save(state_dict(), path)
    torch.save(state_dict(), old, _use_new_zipfile_serialization=False)
    write_zip(open_checkpoint(path), new)
    old.seek(0)
    for _ in range(3):
        pickle.load(old)  # what stands in front of the object
    return {
        "zip": zipfile.ZipFile(path).read("f/data.pkl"),
        "legacy": old.read(),
        "written": zipfile.ZipFile(new).read("archive/data.pkl"),
    }


@dataclass
class Placeless:
    """Bytes that nobody reads."""

    nbytes: int = 1 << 20

    def read(self, start: int, stop: int) -> memoryview:
        raise NotImplementedError


class Storages:
    """Gives a storage to every persistent id, and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, pid: Any) -> TypedStorage:
        self.asked.append(pid)
        return TypedStorage(Storage(str(pid[2]), Placeless(), str(pid[3])), "float32")


def run(data: bytes, limit: int | None = None) -> list[Any]:
    """All that a pickle leaves behind; of one that fails, what it had kept by then is gone anyway."""
    bounds, storages = Bounds("f.pth", len(data)), Storages()
    if limit is not None:
        bounds.left = limit
    table = InertTable("f.pth", lambda nested: nested)
    machine = PickleMachine(data, "f.pth", table.call, storages, 0, bounds)
    try:
        end = repr(machine.load())
    except CkptfixError as error:
        return [f"{type(error).__name__}: {error}", machine.position, repr(storages.asked), table.called]
    return [end, machine.position, bounds.left, repr(storages.asked), repr(machine.memo.row), table.called]


@pytest.fixture
def by_opcodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a pickle by its opcodes alone."""

    def run_slowly(data: bytes, limit: int | None = None) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(common_opcodes, "run_records", lambda machine: False)
            return run(data, limit)

    return run_slowly


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each record whether it is taken in one go, while the test runs pickles."""
    counts: list[bool] = []

    def counted(*args: Any) -> bool:
        counts.append(take(*args))
        return counts[-1]

    take = records.take_record
    monkeypatch.setattr(records, "take_record", counted)
    return counts


FORMS = ("zip", "legacy", "written")


@pytest.mark.parametrize("form", FORMS)
def test_it_is_what_its_opcodes_make_of_it(form: str, pickles: dict[str, bytes], by_opcodes: Any) -> None:
    assert run(pickles[form]) == by_opcodes(pickles[form])


@pytest.mark.parametrize("form", FORMS)
def test_most_are_taken(form: str, pickles: dict[str, bytes], taken: list[bool]) -> None:
    run(pickles[form])
    assert sum(taken) > 0.6 * len(state_dict()) > 60


@pytest.mark.parametrize("form", FORMS)
def test_one_behind_another_they_are_taken_together(
    form: str, pickles: dict[str, bytes], taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[bool] = []

    def noted(machine: PickleMachine) -> bool:
        runs.append(records.run_records(machine))
        return runs[-1]

    monkeypatch.setattr(common_opcodes, "run_records", noted)
    run(pickles[form])
    assert sum(taken) > 2 * sum(runs) > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_is_damaged_ends_alike(form: str, pickles: dict[str, bytes], by_opcodes: Any) -> None:
    rng, whole = random.Random(form), pickles[form]
    for _ in range(120):
        data = bytearray(whole)
        place = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[place] = rng.choice((*b"(tRQq)hX\x85\x86\x87KMJrj\x88\x89N", rng.randrange(256)))
        elif rng.random() < 0.5:
            del data[place : place + rng.randrange(1, 8)]
        else:
            data[place:place] = rng.choice((b"K\1", b"(", b"t", b"N", b"0", b"h\0", b"\x85"))
        assert run(bytes(data)) == by_opcodes(bytes(data)), (form, place)


def test_a_record_that_is_cut_short_ends_alike(pickles: dict[str, bytes], by_opcodes: Any) -> None:
    whole = pickles["zip"]
    for end in range(len(whole) // 2, len(whole) // 2 + 150):
        assert run(whole[:end]) == by_opcodes(whole[:end])


@pytest.mark.parametrize("limit", [0, 1000, 20_000, 60_000])
def test_the_account_ends_within_the_same_record(limit: int, pickles: dict[str, bytes], by_opcodes: Any) -> None:
    at_once, slowly = run(pickles["zip"], limit), by_opcodes(pickles["zip"], limit)
    assert at_once[0] == slowly[0]
    assert at_once[0].startswith("HostileError")
    assert abs(at_once[1] - slowly[1]) < 150


def test_what_is_named_before_it_is_kept_is_left_to_the_opcodes(pickles: dict[str, bytes], by_opcodes: Any) -> None:
    """A memo that was written to out of order keeps the rest elsewhere."""
    data = pickles["zip"].replace(b"\x80\x02", b"\x80\x02K\x01r\xff\xff\0\x000", 1)
    assert run(data) == by_opcodes(data)
