"""The value rules on genuine files: broken tensors are reported, and healthy files have no findings."""

import json
from pathlib import Path

from ckptfix.core.finding import Level
from ckptfix.errors import CkptfixError
from ckptfix.reading.opening import open_file
from ckptfix.rules.val101_non_finite import non_finite
from ckptfix.rules.val103_running_stats import running_stats
from ckptfix.rules.val201_decayed import decayed
from ckptfix.rules.val202_all_zero import all_zero
from tests.rules.proposals import loud, propose

BROKEN = {"report_nonfinite": (non_finite, running_stats), "report_decayed": (decayed, all_zero)}
DAMAGED = {"salvage_partial", "load_ok_or_salvage", "report_crc", "refuse_malicious", "refuse_resource", "diagnose"}


def rows(corpus: Path) -> list[dict]:
    lines = (corpus / "manifest.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "|" not in row["container"]]


def test_defects_of_the_corpus_are_named(corpus):
    for row in rows(corpus):
        if row["expect"] not in BROKEN:
            continue
        checkpoint = open_file(str(corpus / row["path"]), row["container"] or None)
        found = {
            key for rule in BROKEN[row["expect"]] for finding in loud(propose(rule, checkpoint)) for key in finding.keys
        }
        expected = {key for key in row["bad_keys"] if key in checkpoint.specs}
        assert found >= expected > set(), row["path"]


def test_noop_healthy_files_of_the_corpus(corpus):
    seen = 0
    for row in rows(corpus):
        if row["expect"] in BROKEN or row["expect"] in DAMAGED:
            continue
        try:
            checkpoint = open_file(str(corpus / row["path"]), row["container"] or None)
        except CkptfixError:
            continue  # a form that is not read yet is not the business of these rules
        seen += 1
        for rule in (non_finite, running_stats, decayed, all_zero):
            loudest = max((finding.level for finding in propose(rule, checkpoint)), default=Level.NOTE)
            assert loudest is Level.NOTE, (row["path"], rule.__name__)
    assert seen > 100
