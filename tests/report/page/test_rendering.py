import base64
import hashlib
import re

import pytest

from ckptfix.errors import UsageError, WriteError
from ckptfix.report import page as rendering
from ckptfix.report.page import MARK, page_file
from tests.report.page.reading import Page, page_text
from tests.report.page.samples import HOSTILE, record, repaired, undecided, weights, zoo


def hostile_zoo():
    records = [repaired(name, target=name, remarks=[name], command=name, error=name) for name in HOSTILE]
    for line, name in zip(records, HOSTILE, strict=True):
        finding = {"code": name, "name": name, "level": "error", "message": name, "keys": [name]}
        line["findings"] = [
            {**finding, "evidence": {name: name}, "fixed": False, "remedies": [{"options": {}, "text": name}]}
        ]
        line["edits"] = [{"edit": "rename", "key": name, "to": name + "."}]
    lines = [weights(name, flagged={0: [name]}) for name in HOSTILE]
    for line in lines:
        line["layers"][0] |= {"key": line["source"], "dtype": line["source"]}
    return records, lines


def test_a_page_of_nothing():
    page = Page(page_text("nothing", []))
    assert page.rows() == []
    assert page.data.keys() == {"run"}


def test_all_that_was_given_is_in_it():
    records, lines = zoo()
    text = page_text("old → new", records, lines, facts={"Jobs": 8}, renames={"a": "b"})
    page = Page(text)
    assert [row["name"] for row in page.rows()] == [line["source"] for line in records]
    assert [row["outcome"] for row in page.rows()] == [line["outcome"] for line in records]
    assert {name for name in page.data if name.startswith("weights-")} == {f"weights-{number}" for number in range(8)}
    run = page.data["run"]
    assert (run["title"], run["facts"], run["renames"]) == ("old → new", [["Jobs", "8"]], {"a": "b"})
    assert run["left_out"] == 0
    assert page.details(1)["findings"][0]["code"] == "KEY102"


def test_its_beginning_says_what_it_is():
    assert MARK in page_text("x" * 5000, [])[:1000]


def test_weights_come_in_any_order_and_those_of_unknown_files_are_ignored():
    records = [record("a.pth"), record("b.pth")]
    page = Page(page_text("t", iter(records), iter([weights("b.pth"), weights("stranger.pth"), weights("a.pth")])))
    assert {"weights-0", "weights-1"} <= page.data.keys()
    assert "weights-2" not in page.data


def test_hostile_names_stay_data():
    """The page of hostile names has the same elements as a page of harmless ones, and shows every name correctly."""
    records, lines = hostile_zoo()
    harmless = [repaired(f"{number}.pth") for number in range(len(HOSTILE))]
    plain = Page(page_text("t", harmless, [weights(line["source"]) for line in harmless]))
    for title in HOSTILE:
        text = page_text(title, records, lines, facts={title: title}, renames={title: title})
        text.encode("utf-8")
        page = Page(text)
        assert page.visible_tags() == plain.visible_tags()
        assert page.scripts == plain.scripts
        assert [row["name"] for row in page.rows()] == list(HOSTILE)
        assert page.data["run"]["facts"] == [[title, title]]
        for number, name in enumerate(HOSTILE):
            details = page.details(number)
            assert details["command"] == details["findings"][0]["message"] == name
            assert details["renames"] == [[name, name + "."]]
            assert page.data[f"weights-{number}"]["flagged"] == {"0": [name]}


def test_the_title_is_text():
    page = Page(page_text(HOSTILE[0], []))
    assert page.texts.count(HOSTILE[0]) == 2  # in <title> and <h1>


def test_signs_that_no_one_sees_are_shown_in_the_title():
    assert "turned\\u202egnp.exe" in Page(page_text("turned\u202egnp.exe", [])).texts


def test_nothing_is_asked_of_a_network():
    page = Page(page_text("t", *zoo()))
    assert not [attributes for _, attributes in page.tags if attributes.keys() & {"src", "srcset", "action", "data"}]
    assert {str(attributes["href"])[0] for attributes in page.contents("a")} == {"#"}
    assert page.contents("link") == page.contents("base") == page.contents("iframe") == []


def test_the_policy_knows_the_scripts_and_no_others():
    page = Page(page_text("t", *zoo()))
    policy = next(meta["content"] for meta in page.contents("meta") if meta.get("http-equiv"))
    assert policy is not None
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts]
    assert re.findall(r"'(sha256-[^']+)'", policy) == hashes
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_many_files_come_in_chunks():
    page = Page(page_text("t", (record(f"{number}.pth") for number in range(1203))))
    assert [row["name"] for row in page.rows()] == [f"{number}.pth" for number in range(1203)]
    assert [len(page.data[f"rows-{chunk}"]) for chunk in range(3)] == [500, 500, 203]


def test_weights_beyond_the_limit_are_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(rendering, "PAGE_LIMIT", 0)
    monkeypatch.setattr(rendering, "LEAST_FOR_WEIGHTS", 3000)
    records = [record(f"{number}.pth") for number in range(30)] + [undecided("nan.pth")]
    lines = [weights(f"{number}.pth", seed=number) for number in range(30)]
    page = Page(page_text("t", records, [*lines, weights("nan.pth", flagged={1: ["VAL101"]})]))
    present = sum(name.startswith("weights-") for name in page.data)
    assert page.data["run"]["left_out"] == 31 - present > 0
    assert "weights-30" in page.data


@pytest.mark.slow
def test_the_size_of_a_page_is_bounded():
    """400 files of 400 tensors, no two of one structure: 160,000 layers."""
    lines = (weights(f"{number}.pth", 400, seed=number) for number in range(400))
    own = ({**line, "layers": [{**x, "key": f"{line['source']}.{x['key']}"} for x in line["layers"]]} for line in lines)
    assert len(page_text("t", (repaired(f"{number}.pth") for number in range(400)), own)) < 15_000_000


def save_page(file, text="page"):
    with page_file(file).writing() as out:
        out.write(page_text(text, []))


def test_a_free_place(tmp_path):
    file = tmp_path / "out.html"
    page_file(file).refuse()
    save_page(file)
    assert "<title>page</title>" in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_page_is_replaced(tmp_path):
    file = tmp_path / "out.html"
    save_page(file, "first")
    save_page(file, "second")
    assert "<title>second</title>" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"PK\x03\x04 a checkpoint", b"<html>somebody's page</html>"])
def test_nothing_else_is(tmp_path, content):
    file = tmp_path / "model.pth"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is not a ckptfix report"):
        page_file(file).refuse()
    with pytest.raises(UsageError):
        save_page(file)
    assert file.read_bytes() == content


def test_a_folder_is_not_a_place(tmp_path):
    with pytest.raises(UsageError, match="is not a ckptfix report"):
        page_file(tmp_path).refuse()
    with pytest.raises(UsageError, match="does not exist"):
        page_file(tmp_path / "nowhere" / "out.html").refuse()


def test_an_error_leaves_the_old_page(tmp_path):
    file = tmp_path / "out.html"
    save_page(file, "first")

    def fail():
        with page_file(file).writing() as out:
            out.write("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        fail()
    assert "<title>first</title>" in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_link_keeps_pointing(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.html"
    link.symlink_to(tmp_path / "real" / "page.html")
    save_page(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "page.html").is_file()
