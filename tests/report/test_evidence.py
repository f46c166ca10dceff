from ckptfix.report.evidence import cut, evidence_items


def test_no_evidence():
    assert list(evidence_items({})) == []


def test_values_of_all_kinds():
    evidence = {"share": 1 / 3, "segments": ["a", 2], "of": {"lr": 0.1}, "none": None}
    assert list(evidence_items(evidence)) == ["share 0.3333", "segments [a, 2]", "of {lr 0.1}", "none None"]


def test_cut():
    assert list(evidence_items({"a": "x" * 10}, 5)) == ["a xx…"]
    assert cut("12345", 5) == "12345"
