import json

import pytest
import torch

from tests.cli.programs import run


def keys_of(path):
    return list(torch.load(path, weights_only=True))


def test_a_clean_file_is_not_copied(folder):
    done = run("repair", "good.pth", cwd=folder)
    assert done.returncode == 0
    assert not (folder / "good.fixed.pth").exists()
    assert "written: nothing, as there is nothing to repair\n" in done.stdout


def test_repair_beside_the_source(folder):
    before = (folder / "wrapped.pth").read_bytes()
    done = run("repair", "wrapped.pth", cwd=folder)
    assert done.returncode == 0
    assert keys_of(folder / "wrapped.fixed.pth") == ["weight", "bias"]
    assert (folder / "wrapped.pth").read_bytes() == before
    assert "  rename 2 keys: module.{…} → {…}\n" in done.stdout
    assert done.stdout.endswith("written: wrapped.fixed.pth\nleft: nothing\n")
    assert done.stderr == ""


def test_output_and_format(folder):
    assert run("repair", "wrapped.pth", "-o", "new.safetensors", cwd=folder).returncode == 0
    assert (folder / "new.safetensors").read_bytes()[8:9] == b"{"


def test_in_place_with_backup(folder):
    before = (folder / "wrapped.pth").read_bytes()
    assert run("repair", "wrapped.pth", "--in-place", "--backup", cwd=folder).returncode == 0
    assert keys_of(folder / "wrapped.pth") == ["weight", "bias"]
    assert (folder / "wrapped.pth.bak").read_bytes() == before


def test_dry_run_writes_nothing_but_the_plan(folder):
    names = sorted(path.name for path in folder.iterdir())
    done = run("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    assert "written: nothing (dry run)\n" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "plan.json"])
    assert json.loads((folder / "plan.json").read_text())["steps"][0]["rule"] == "KEY102"


def test_a_saved_plan_is_applied(folder):
    run("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    done = run("repair", "wrapped.pth", "--apply", "plan.json", "-o", "new.pth", cwd=folder)
    assert done.returncode == 0
    assert keys_of(folder / "new.pth") == ["weight", "bias"]


def test_forward_test_and_coverage(folder):
    done = run("repair", "wrapped.pth", "--model", "zoo:tiny", "--device", "cpu", "--input", "4x3", cwd=folder)
    assert done.returncode == 0
    assert "coverage: 100 % of 8 parameters (by number of elements) came from the file; buffers none\n" in done.stdout
    assert "forward test: passed on cpu" in done.stdout
    assert "float32[4, 3] → float32[4, 2]" in done.stdout


def test_the_forward_test_can_be_left_out(folder):
    assert "forward test" not in run("repair", "wrapped.pth", "--model", "zoo:tiny", "--no-smoke", cwd=folder).stdout


def test_a_result_that_does_not_fit_is_not_written(folder):
    words = ("wrapped.pth", "--model", "zoo:tiny", "--model-args", '{"width": 5}', "--no-smoke")
    done = run("repair", *words, cwd=folder)
    assert done.returncode == 1
    assert "written: nothing\n" in done.stdout
    assert not (folder / "wrapped.fixed.pth").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "a.pth", "--in-place"], "--output and --in-place exclude each other"),
        (["--backup"], "--backup goes with --in-place"),
        (["--plan", "a", "--apply", "b"], "--plan and --apply exclude each other"),
        (["--apply", "nowhere.json"], "wrapped.pth: nowhere.json: No such file or directory"),
        (["--apply", "zoo.py"], "zoo.py: this is no plan of ckptfix"),
        (["--device", "abacus", "--model", "zoo:tiny"], "--device"),
        (["-q", "-v"], "--quiet and --verbose exclude each other"),
    ],
)
def test_usage(folder, words, said):
    names = sorted(path.name for path in folder.iterdir())
    done = run("repair", "wrapped.pth", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == names


def test_json(folder):
    data = json.loads(run("repair", "wrapped.pth", "--output-format", "json", cwd=folder).stdout)
    (entry,) = data["reports"]
    assert (entry["exit_code"], entry["output"], len(entry["edits"])) == (0, "wrapped.fixed.pth", 2)


def test_quiet_says_nothing_of_a_success(folder):
    done = run("repair", "wrapped.pth", "-q", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
