"""Temporary errors are retried, and no others."""

import asyncio
import errno

import pytest

from ckptfix.bytes import transfers
from ckptfix.bytes.transfers import (
    AbsentError,
    ForbiddenError,
    NoSpaceError,
    Patience,
    PlaceError,
    TransferError,
    persistently,
)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(transfers, "BATCH_PATIENCE", Patience(attempts=4, first=1.0, longest=3.0))
    monkeypatch.setattr("time.sleep", made.append)
    return made


class Flaky:
    """An action that fails as planned, and then returns ``done``."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_noop_a_success_is_not_repeated(pauses: list[float]):
    action = Flaky()
    assert persistently(action, "s3://zoo/a", "fetched") == "done"
    assert (action.calls, pauses) == (1, [])


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError(),
        asyncio.TimeoutError(),
        OSError(errno.EBUSY, "slow down"),
        OSError("no number"),
        EOFError(),
        TransferError("5 of 9 bytes came"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_passing_errors_are_tried_again(error: Exception, pauses: list[float]):
    action = Flaky(error, error)
    assert persistently(action, "s3://zoo/a", "fetched") == "done"
    assert (action.calls, len(pauses)) == (3, 2)


def test_pauses_grow_to_a_limit_with_jitter(pauses: list[float]):
    for _ in range(50):
        persistently(Flaky(*[TimeoutError()] * 3), "s3://zoo/a", "fetched")
    for first, expected in enumerate((1.0, 2.0, 3.0)):
        of_one_kind = pauses[first::3]
        assert all(expected * 0.5 <= pause <= expected * 1.5 for pause in of_one_kind)
        assert len(set(of_one_kind)) > 1


def test_the_last_error_is_reported():
    action = Flaky(*[OSError(errno.EBUSY, "slow down")] * 9)
    with pytest.raises(
        TransferError, match=r"^s3://zoo/a: cannot be fetched: slow down \(4 tries\); run it again later$"
    ):
        persistently(action, "s3://zoo/a", "fetched")
    assert action.calls == 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("no such key"), AbsentError),
        (PermissionError("Access Denied"), ForbiddenError),
        (OSError(errno.ENOSPC, "full"), NoSpaceError),
        (OSError(errno.ENAMETOOLONG, "too long"), PlaceError),
        (NotImplementedError(), PlaceError),
        (UnicodeEncodeError("utf-8", "\udce9", 0, 1, "surrogates not allowed"), PlaceError),
        (ForbiddenError("said before"), ForbiddenError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_lasting_errors_are_not_tried_again(error: Exception, kind: type[PlaceError], pauses: list[float]):
    action = Flaky(error)
    with pytest.raises(kind) as caught:
        persistently(action, "s3://zoo/a", "fetched")
    assert type(caught.value) is kind
    assert (action.calls, pauses) == (1, [])


def test_bugs_are_not_caught(pauses: list[float]):
    with pytest.raises(ZeroDivisionError):
        persistently(Flaky(ZeroDivisionError()), "s3://zoo/a", "fetched")
    assert pauses == []
