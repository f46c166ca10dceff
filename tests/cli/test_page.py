import json

from tests.cli.programs import run, run_here
from tests.report.page.reading import Page


def page_of(file):
    return Page(file.read_text(encoding="utf-8"))


def test_without_the_flag_no_page(folder):
    before = sorted(path.name for path in folder.iterdir())
    run_here("check", "good.pth", cwd=folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_one_file(folder):
    done = run("check", "good.pth", "--report", "out.html", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "ckptfix: report: out.html\n")
    page = page_of(folder / "out.html")
    assert page.data["run"]["title"] == "good.pth"
    [row] = page.rows()
    assert (row["name"], row["outcome"], row["format"], row["tensors"]) == ("good.pth", "already fine", "torch-zip", 2)
    assert row["size"] == (folder / "good.pth").stat().st_size
    assert (page.data["layout-0"]["key"], page.data["layout-0"]["shape"]) == (["weight", "bias"], ["2x3", "2"])
    assert all(rms > 0 for rms in page.data["weights-0"]["rms"])
    facts = dict(page.data["run"]["facts"])
    assert facts["Command"].endswith("check good.pth --report out.html")
    assert {"Made", "ckptfix", "torch", "Python", "Platform"} < facts.keys()


def test_several_files_and_one_that_is_torn(folder):
    done = run_here("check", "good.pth", "torn.pth", "wrapped.pth", "--report", "out.html", "-q", cwd=folder)
    assert done.returncode == 2
    page = page_of(folder / "out.html")
    assert page.data["run"]["title"] == "3 checkpoints"
    assert [(row["name"], row["outcome"]) for row in page.rows()] == [
        ("good.pth", "already fine"),
        ("torn.pth", "unreadable"),
        ("wrapped.pth", "can be repaired"),
    ]
    assert "torn.pth" in page.details(1)["error"]
    assert page.details(2)["command"] == "ckptfix repair wrapped.pth"
    # The figures are under the new names of the keys.
    assert page.data["layout-0"]["key"] == ["weight", "bias"]
    assert page.data["weights-2"]["layout"] == 0


def test_without_values_no_weights(folder):
    run_here("check", "good.pth", "--no-values", "--report", "out.html", cwd=folder)
    assert not [name for name in page_of(folder / "out.html").data if name.startswith("weights")]


def test_stdout_is_as_ever(folder):
    words = ("check", "wrapped.pth", "--output-format", "json")
    with_page, without = run_here(*words, "--report", "out.html", cwd=folder), run_here(*words, cwd=folder)
    assert (with_page.stdout, with_page.returncode) == (without.stdout, 1)
    assert json.loads(with_page.stdout)["reports"][0]["source"] == "wrapped.pth"


def test_a_repair(folder):
    done = run_here("repair", "wrapped.pth", "--model", "zoo:tiny", "-o", "new.pth", "--report", "out.html", cwd=folder)
    assert done.returncode == 0
    page = page_of(folder / "out.html")
    [row] = page.rows()
    assert (row["outcome"], row["output"], row["share"], row["smoke"]) == ("repaired", "new.pth", 1.0, "passed")
    assert page.details(0)["renames"] == [["module.weight", "weight"], ["module.bias", "bias"]]


def test_a_checkpoint_is_not_replaced_by_a_page(folder):
    before = (folder / "good.pth").read_bytes()
    done = run_here("check", "wrapped.pth", "--report", "good.pth", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ckptfix: error: good.pth: already exists and is not a ckptfix report")
    assert (folder / "good.pth").read_bytes() == before


def test_the_output_and_the_page_are_two_files(folder):
    done = run_here("repair", "wrapped.pth", "-o", "new.pth", "--report", "./new.pth", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is also the file of --output" in done.stderr
    assert not (folder / "new.pth").exists()


def test_a_page_is_made_anew(folder):
    run_here("check", "good.pth", "--report", "out.html", cwd=folder)
    assert run_here("check", "wrapped.pth", "--report", "out.html", cwd=folder).returncode == 1
    assert page_of(folder / "out.html").rows()[0]["name"] == "wrapped.pth"
