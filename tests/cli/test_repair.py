import json

import pytest
import torch

from tests.cli.programs import run, run_here

FAILING = """

class Failing(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, batch):
        raise ValueError("never")


class larger(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.more = torch.nn.Linear(30, 30)
"""


def keys_of(path):
    return list(torch.load(path, weights_only=True))


def test_a_clean_file_is_not_copied(folder):
    done = run_here("repair", "good.pth", cwd=folder)
    assert done.returncode == 0
    assert not (folder / "good.fixed.pth").exists()
    assert "written: nothing, because there is nothing to repair; -o FILE writes it anyway\n" in done.stdout


def test_repair_beside_the_source(folder):
    before = (folder / "wrapped.pth").read_bytes()
    done = run("repair", "wrapped.pth", cwd=folder)
    assert done.returncode == 0
    assert keys_of(folder / "wrapped.fixed.pth") == ["weight", "bias"]
    assert (folder / "wrapped.pth").read_bytes() == before
    assert "  rename 2 keys: module.{…} → {…}\n" in done.stdout
    code = "torch.load('wrapped.fixed.pth', weights_only=True)"
    assert done.stdout.endswith(f"written: wrapped.fixed.pth\nnothing left to do\nload it with: {code}\n")
    assert done.stderr == ""


def test_output_and_format(folder):
    assert run_here("repair", "wrapped.pth", "-o", "new.safetensors", cwd=folder).returncode == 0
    assert (folder / "new.safetensors").read_bytes()[8:9] == b"{"


def test_in_place_with_backup(folder):
    before = (folder / "wrapped.pth").read_bytes()
    assert run_here("repair", "wrapped.pth", "--in-place", "--backup", cwd=folder).returncode == 0
    assert keys_of(folder / "wrapped.pth") == ["weight", "bias"]
    assert (folder / "wrapped.pth.bak").read_bytes() == before


def test_dry_run_writes_nothing_but_the_plan(folder):
    names = sorted(path.name for path in folder.iterdir())
    done = run_here("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    assert "written: nothing (dry run)\n" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "plan.json"])
    assert json.loads((folder / "plan.json").read_text())["steps"][0]["rule"] == "KEY102"


FORMS = ("full", "concise", "github", "json", "junit", "sarif")


@pytest.mark.parametrize(
    ("reason", "form"),
    [
        *(("a strict load fails", form) for form in FORMS),
        *(("most is untrained", form) for form in FORMS),
        *(("the forward test fails", form) for form in ("full", "json")),  # each starts a process with torch
    ],
)
def test_findings_are_not_fixed_if_nothing_is_written(reason, form, folder):
    """A repair that must not write has fixed nothing, even if it had something to do."""
    torch.save({"module.weight": torch.zeros(2, 3)}, folder / "part.pth")
    (folder / "zoo.py").write_text((folder / "zoo.py").read_text() + FAILING)
    words = {
        "a strict load fails": ("part.pth", "--model", "zoo:tiny"),
        "the forward test fails": ("wrapped.pth", "--model", "zoo:Failing", "--input", "4x3"),
        "most is untrained": ("part.pth", "--model", "zoo:larger", "--fill", "target"),
    }[reason]
    done = run_here("repair", *words, "--output-format", form, cwd=folder)
    assert (done.returncode, [*folder.glob("*.fixed.*")]) == (1, [])
    assert "KEY102" in done.stdout
    assert not any(word in done.stdout for word in ("[fixed]", "done:", '"fixed": true', " came from the file"))
    assert ("[would be fixed]" in done.stdout) == (form in ("full", "concise"))


@pytest.mark.parametrize("form", ["full", "concise", "github", "junit", "sarif"])
def test_a_dry_run_fixes_nothing(form, folder):
    done = run_here("repair", "wrapped.pth", "--dry-run", "--output-format", form, cwd=folder)
    assert "KEY102" in done.stdout
    assert "[fixed]" not in done.stdout
    assert ("<failure" in done.stdout) == (form == "junit")


def test_a_saved_plan_is_applied(folder):
    run_here("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    done = run_here("repair", "wrapped.pth", "--apply", "plan.json", "-o", "new.pth", cwd=folder)
    assert done.returncode == 0
    assert keys_of(folder / "new.pth") == ["weight", "bias"]


def test_forward_test_and_coverage(folder):
    words = ("--device", "cpu", "--input", "4x3", "--compare", "source")
    done = run_here("repair", "wrapped.pth", "--model", "zoo:tiny", *words, cwd=folder)
    assert done.returncode == 0
    assert "  outputs against wrapped.pth after safe repairs: bit-equal\n" in done.stdout
    assert "coverage: 100 % of 8 parameters (by number of elements) came from the file; buffers none\n" in done.stdout
    assert "forward test: passed on cpu" in done.stdout
    assert "float32[4, 3] → float32[4, 2]" in done.stdout


def test_the_forward_test_can_be_left_out(folder):
    assert (
        "forward test" not in run_here("repair", "wrapped.pth", "--model", "zoo:tiny", "--no-smoke", cwd=folder).stdout
    )


def test_a_result_that_does_not_fit_is_not_written(folder):
    words = ("wrapped.pth", "--model", "zoo:tiny", "--model-args", '{"width": 5}', "--no-smoke")
    done = run_here("repair", *words, cwd=folder)
    assert done.returncode == 1
    assert "written: nothing\n" in done.stdout
    assert not (folder / "wrapped.fixed.pth").exists()
    assert "[would be fixed]" in done.stdout
    assert "\nwould do:\n" in done.stdout
    assert " would come from the file" in done.stdout
    checked = run_here("check", *words[:-1], cwd=folder).stdout
    assert "run:" not in checked, "a repair without a remedy would write nothing either"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "a.pth", "--in-place"], "--output and --in-place exclude each other"),
        (["--backup"], "--backup needs --in-place"),
        (["--plan", "a", "--apply", "b"], "--plan and --apply exclude each other"),
        (["--apply", "nowhere.json"], "error: nowhere.json: cannot read the plan: No such file or directory"),
        (["--apply", "zoo.py"], "zoo.py: not a ckptfix plan"),
        (["--device", "abacus", "--model", "zoo:tiny"], "--device"),
        (["-q", "-v"], "--quiet and --verbose exclude each other"),
    ],
)
def test_usage(folder, words, said):
    names = sorted(path.name for path in folder.iterdir())
    done = run_here("repair", "wrapped.pth", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == names


def test_json(folder):
    data = json.loads(run_here("repair", "wrapped.pth", "--output-format", "json", cwd=folder).stdout)
    (entry,) = data["reports"]
    assert (entry["exit_code"], entry["output"], len(entry["edits"])) == (0, "wrapped.fixed.pth", 2)


def test_quiet_prints_nothing_after_a_success(folder):
    done = run_here("repair", "wrapped.pth", "-q", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["written", "dry run"])
@pytest.mark.parametrize("plan", ["good.pth", "link.pth", "out.pth"])
def test_a_plan_never_replaces_a_checkpoint(folder, plan, options):
    (folder / "link.pth").symlink_to("good.pth")
    (folder / "out.pth").write_bytes(b"something of the user's")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = run_here("repair", "good.pth", "-o", "out.pth", "--plan", plan, *options, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("ckptfix: error: ")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_plan_replaces_an_older_plan(folder):
    for _ in range(2):
        assert run_here("repair", "good.pth", "--dry-run", "--plan", "plan.json", cwd=folder).returncode == 0
    assert json.loads((folder / "plan.json").read_bytes())["ckptfix-plan"] == 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--plan", "new", "-o", "new"], id="the output, which is not there yet"),
        pytest.param(["--plan", "good.pth", "--like", "good.pth"], id="the reference"),
        pytest.param(["--plan", "link.pth", "--fill", "good.pth", "--salvage"], id="a link to the donor"),
        pytest.param(["--plan", "zoo.py"], id="any other file"),
        pytest.param(["--plan", "nowhere/plan.json"], id="a folder that is not there"),
        pytest.param(["-o", "plan.json", "--apply", "plan.json"], id="the output is the plan"),
        pytest.param(["-o", "link.pth", "--like", "good.pth"], id="the output is the reference"),
        pytest.param(["--timeout", "-1", "--model", "zoo:tiny"], id="no time"),
        pytest.param(["--timeout", "nan", "--model", "zoo:tiny"], id="no number"),
        pytest.param(["--input", "2x3"], id="an input without a model"),
        pytest.param(["--device", "cpu"], id="a device without a model"),
        pytest.param(["--compare", "good.pth"], id="a comparison without a model"),
        pytest.param(["--compare", "absent.pth", "--model", "zoo:broken"], id="a comparison with what is not there"),
        pytest.param(["--compare", "source", "--model", "zoo:tiny", "--no-smoke"], id="a comparison without a test"),
        pytest.param(["-o", "link.pth", "--compare", "good.pth", "--model", "zoo:tiny"], id="the output is compared"),
        pytest.param(["--smoke"], id="a forward test without a model"),
        pytest.param(["--fill", "target"], id="a fill without a target"),
    ],
)
def test_invalid_options_are_refused_before_any_work(folder, words):
    (folder / "link.pth").symlink_to("good.pth")
    run_here("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = run_here("repair", "wrapped.pth", *words, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_the_first_line_names_the_changes_of_a_saved_plan(folder):
    run_here("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    done = run_here("repair", "wrapped.pth", "--apply", "plan.json", "-o", "new.pth", cwd=folder)
    assert done.stdout.startswith("wrapped.pth: repaired (2 keys renamed) → new.pth; ")


@pytest.mark.parametrize("options", [[], ["--apply", "plan.json"]])
def test_exchanged_keys_are_counted_separately(tmp_path, options):
    torch.save({"a.weight": torch.ones(2, 2), "b.weight": torch.randn(2, 2)}, tmp_path / "swap.pth")
    renames = ["--rename", "a.weight=b.weight", "--rename", "b.weight=a.weight"]
    run_here("repair", "swap.pth", *renames, "-n", "--plan", "plan.json", cwd=tmp_path)
    done = run_here("repair", "swap.pth", *(options or renames), "-o", "new.pth", cwd=tmp_path)
    assert "repaired (2 keys renamed)" in done.stdout


def test_a_result_that_does_not_load_needs_repair(folder):
    done = run_here("repair", "wrapped.pth", "--model", "zoo:tiny", "--select", "VAL", cwd=folder)
    assert done.returncode == 1
    assert "written: nothing\n" in done.stdout
    assert "nothing to repair" not in done.stdout


def test_no_forward_test_for_another_torch_release(folder):
    (folder / "norm.py").write_text(
        "import torch\n\n\ndef norm():\n    return torch.nn.Sequential(torch.nn.BatchNorm1d(2))\n"
    )
    torch.save(torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict(), folder / "norm.pth")
    done = run_here("repair", "norm.pth", "--model", "norm:norm", "--for-torch", "0.4.0", "-o", "old.pth", cwd=folder)
    assert "forward test: no verdict: the result is for torch 0.4.0, not for this release\n" in done.stdout
    assert (done.returncode, (folder / "old.pth").exists()) == (0, True)
