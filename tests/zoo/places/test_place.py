"""A destination need not be there yet."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ckptfix.bytes.transfers import AbsentError, ForbiddenError, PlaceError, explained, failures, final_kind
from ckptfix.zoo.places import open_place, walk_if_there
from ckptfix.zoo.places.local import LocalPlace


def test_what_is_there_is_walked(tmp_path: Path):
    (tmp_path / "model.pth").touch()
    assert [entry.name for entry in walk_if_there(open_place(str(tmp_path)))] == ["model.pth"]


def test_what_is_absent_is_empty(tmp_path: Path, memory: str):
    for place in (open_place(str(tmp_path / "new")), open_place(memory)):
        with pytest.raises(AbsentError):
            list(place.walk())
        assert list(walk_if_there(place)) == []


def test_what_is_forbidden_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(self: LocalPlace) -> None:
        raise ForbiddenError("no right")

    monkeypatch.setattr(LocalPlace, "walk", refusing)
    with pytest.raises(ForbiddenError):
        list(walk_if_there(open_place(str(tmp_path))))


def error_with(**attributes: object) -> Exception:
    error = Exception("said by the server")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def carriers(status: int) -> dict[str, Exception]:
    return {
        "botocore": error_with(response={"ResponseMetadata": {"HTTPStatusCode": status}}),
        "requests": error_with(response=SimpleNamespace(status_code=status)),
        "aiohttp": error_with(status=status),
        "gcsfs": error_with(code=status),
    }


@pytest.mark.parametrize("backend", sorted(carriers(0)))
def test_the_status_decides(backend: str):
    passing = [status for status in range(400, 600) if final_kind(carriers(status)[backend]) is None]
    assert passing == [408, 409, 412, 423, 425, 429, *range(500, 600)]
    kinds = {
        status: type(explained(carriers(status)[backend], "s3://zoo/a", "read")) for status in (401, 403, 404, 418)
    }
    assert kinds == {401: ForbiddenError, 403: ForbiddenError, 404: AbsentError, 418: PlaceError}


def test_what_was_imported_is_known(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("gcsfs.retry")
    module.HttpError = type("HttpError", (Exception,), {})  # type: ignore[attr-defined]  # made here
    assert module.HttpError not in failures()
    monkeypatch.setitem(sys.modules, "gcsfs.retry", module)
    assert module.HttpError in failures()


def test_lacking_credentials_are_no_passing_trouble():
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    assert final_kind(error) is not None
    assert str(explained(error, "s3://zoo", "listed")) == (
        "s3://zoo: cannot be listed: Unable to locate credentials; get the permission, or the credentials"
    )


def test_an_error_without_words_is_named():
    assert str(explained(TimeoutError(), "s3://zoo/a", "read")) == "s3://zoo/a: cannot be read: TimeoutError"
