"""The entries of ``_metadata`` follow the keys."""

import pytest

from ckptfix.core.metadata import rename_metadata, rename_rows


def rows(*paths: str) -> dict[str, dict[str, int]]:
    """Return a row for each path, identified by its version; a path may be written ``path=version``."""
    return {path.partition("=")[0]: {"version": int(path.partition("=")[2] or 1)} for path in paths}


@pytest.mark.parametrize(
    ("before", "renames", "after"),
    [
        pytest.param(rows("", "a=2"), {"a.w": "a.w"}, rows("", "a=2"), id="nothing is renamed"),
        pytest.param({}, {"m.w": "w"}, {}, id="no rows"),
        pytest.param(rows("=7", "module=3", "module.a=2"), {"module.a.w": "a.w"}, rows("=3", "a=2"), id="prefix off"),
        pytest.param(rows("=3", "a=2"), {"a.w": "module.a.w"}, rows("", "module=3", "module.a=2"), id="prefix on"),
        pytest.param(rows("a=2"), {"a.w": "m.a.w"}, rows("m.a=2"), id="metadata without a root gets no new rows"),
        pytest.param(
            rows("=7", "m", "m.n=3", "m.n.a=2"),
            {"m.n.a.w": "a.w"},
            rows("=3", "a=2"),
            id="two segments off, no row is left",
        ),
        pytest.param(
            rows("", "m", "m.n", "m.n.a=2", "m.loss=4"),
            {"m.n.a.w": "a.w"},
            rows("", "a=2"),
            id="what idles in a lost wrapper",
        ),
        pytest.param(
            rows("", "a", "a._x=2", "a._x.b=3"), {"a._x.b.w": "a.b.w"}, rows("", "a=2", "a.b=3"), id="in the middle"
        ),
        pytest.param(
            rows("", "a=2", "a.relu=5"), {"a.w": "b.w"}, rows("", "b=2", "b.relu=5"), id="idle rows move along"
        ),
        pytest.param(
            rows("", "a=2", "b=3"),
            {"a.w": "b.w", "b.w": "a.w"},
            rows("", "b=2", "a=3"),
            id="two modules swap their names",
        ),
        pytest.param(
            rows("", "a=2"), {"a.w": "a.w", "a.v": "b.v"}, rows("", "a=2"), id="a module that keeps a key stays"
        ),
        pytest.param(rows("=2"), {"gamma": "weight"}, rows("=2"), id="only the last segment"),
        pytest.param(
            rows("", "c=2", "c.parametrizations", "c.parametrizations.weight"),
            {"c.parametrizations.weight.original0": "c.weight_g"},
            rows("", "c=2"),
            id="a module that nothing is left of",
        ),
        pytest.param(
            rows("=2"), {"w": "_orig_mod.module.w"}, rows("", "_orig_mod", "_orig_mod.module=2"), id="two segments on"
        ),
    ],
)
def test_rename_metadata(before, renames, after):
    assert rename_metadata(before, renames) == after


def test_order_is_that_of_torch():
    assert list(rename_metadata(rows("", "a", "a.b"), {"a.b.w": "m.a.b.w"}) or ()) == ["", "m", "m.a", "m.a.b"]


def test_noop_no_metadata():
    assert rename_metadata(None, {"a.w": "b.w"}) is None
    assert rename_rows(None, {}) is None


def test_rename_rows():
    before = rows("", "a", "a._x=2", "a._x.b=3")
    assert rename_rows(before, {"a._x": "a", "a._x.b": "a.b"}) == rows("", "a=2", "a.b=3")
    assert rename_rows(rows("", "a=2"), {"a": "a._x"}) == rows("", "a", "a._x=2")
    with pytest.raises(KeyError, match="nowhere"):
        rename_rows(before, {"nowhere": "b"})
