from typing import Any

from ckptfix.report.page.entries import COLUMNS, Entries
from tests.report.page.samples import NAN, PREFIX, VERSIONS, record, repaired, undecided, unreadable


def row(line):
    return dict(zip(COLUMNS, Entries().row(line), strict=True))


def test_a_file_of_nothing():
    """An error leaves only the name of a file."""
    line = {"source": "a.pth", "outcome": "failed", "error": "gone"}
    assert {name: value for name, value in row(line).items() if value} == {
        "name": "a.pth",
        "outcome": "failed",
        "error": "gone",
    }
    assert Entries().details(0, line) == {"error": "gone"}


def test_the_row_of_a_repaired_file():
    assert row(repaired("a.pth")) == {
        "name": "a.pth",
        "outcome": "repaired",
        "codes": ["KEY102 wrapper-prefix"],
        "format": "torch-zip",
        "tensors": 4,
        "numel": 64,
        "size": 46830571,
        "share": 1.0,
        "smoke": "passed",
        "seconds": 1.25,
        "output": "a.safetensors",
        "error": None,
    }


def test_a_rule_counts_once_for_a_file():
    assert row(record("a.pth", findings=[NAN, PREFIX, NAN]))["codes"] == ["VAL101 non-finite", "KEY102 wrapper-prefix"]


def test_a_long_error_is_cut_in_the_row_alone():
    line = {**unreadable("a.pth"), "error": "a.pth: " + "x" * 1000}
    assert row(line)["error"] == "x" * 159 + "…"
    assert len(Entries().details(0, line)["error"]) == 1007


def test_the_account_of_a_repaired_file():
    details = Entries().details(0, repaired("a.pth"))
    assert details["edits"] == ["rename 4 keys: module.{…} → {…}"]
    assert details["renames"][0] == ["module.layers.0.weight", "layers.0.weight"]
    assert details["findings"][0]["keys"] == ["module.layers.{0…3}.weight  (4)"]
    assert details["findings"][0]["evidence"] == ["prefix module", "share 1"]
    assert details["coverage"]["share"] == 1.0
    assert details["smoke"]["checks"] == ["training mode: finite"]
    assert details["versions"] == VERSIONS
    assert "error" not in details


def test_the_account_of_an_undecided_file():
    details = Entries().details(0, undecided("a.pth"))
    assert details["command"] == "ckptfix repair a.pth --replace VAL101 --fill twin"
    assert details["findings"][1]["remedy"] == "--replace VAL101 --fill twin takes these keys from the file's EMA set"
    assert "fixed" not in details["findings"][1]


def test_no_file_is_accepted_or_loses_weights_along_with_others():
    """Only the page of a file has the ways that need a value from the user, and those that cost weights."""
    ways = [
        {"options": {"fill": "FILE"}, "text": "", "command": None},
        {"options": {}, "text": "", "command": "accept"},
    ]
    priced = [{"options": {"fill": "target"}, "text": "", "command": "fill", "price": "`fc` becomes untrained"}]
    damaged = [{"options": {"salvage": True}, "text": "", "command": "ckptfix repair d.pth --salvage", "price": ""}]
    entries = Entries()
    for line in (record("a.pth", command="repair"), record("b.pth", command="accept", decisions=ways)):
        entries.row(line)
    for line in (record("c.pth", decisions=priced), record("d.pth", decisions=damaged)):
        entries.row(line)
    assert entries.commands == {"a.pth": "repair"}


def test_a_decision_with_a_value_of_the_users_names_its_options():
    ways: list[dict[str, Any]] = [
        {"options": {"replace": ["VAL101"], "fill": "FILE"}, "text": "takes them from another copy", "command": None},
        {"options": {}, "text": "train it again", "command": None},
        {"options": {"accept": ["VAL101"]}, "text": "keeps it", "command": "ckptfix migrate a --accept VAL101"},
    ]
    shown = Entries().details(0, record("a.pth", decisions=ways))["decisions"]
    texts = ["--fill FILE --replace VAL101: takes them from another copy", "train it again", "keeps it"]
    assert [(way["text"], way["command"]) for way in shown] == [
        *zip(texts, (None, None, ways[2]["command"]), strict=True)
    ]


def test_what_files_have_in_common_is_written_once():
    entries = Entries()
    first, second = entries.details(0, repaired("a.pth")), entries.details(1, repaired("b.pth"))
    assert "same" not in first
    assert second["same"].keys() >= {"findings", "renames", "coverage", "smoke", "versions"}
    assert set(second["same"].values()) == {0}
    assert second.keys().isdisjoint(second["same"])


def test_what_differs_is_not_taken_from_another_file():
    entries = Entries()
    entries.details(0, repaired("a.pth"))
    other = entries.details(1, repaired("b.pth", findings=[{**PREFIX, "message": "another"}]))
    assert other["findings"][0]["message"] == "another"


def test_long_lists_end_but_their_sum_stays():
    details = Entries(lists_limit=10).details(0, repaired("a.pth"))
    assert "renames" not in details
    assert details["edits"] == ["rename 4 keys: module.{…} → {…}"]


def test_edits_of_another_version_are_counted():
    details = Entries().details(
        0, record("a.pth", edits=[{"edit": "rotate", "key": "k"}, {"edit": "rotate", "key": "l"}])
    )
    assert details["edits"] == ["rotate (2)"]


def test_figures_that_are_not_json_numbers():
    line = record("a.pth", findings=[{**NAN, "evidence": {"rms": float("nan")}}])
    assert Entries().details(0, line)["findings"][0]["evidence"] == ["rms NaN"]
