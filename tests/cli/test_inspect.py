import json

import pytest

from tests.cli.programs import run, run_here


def test_full(folder):
    done = run("inspect", "good.pth", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "good.pth: torch-zip, 2 tensors, 8 elements\n"
        "written by: torch 2.7 or later, or ckptfix\n"
        "state_dict: the file itself\n"
    )
    assert done.stdout.endswith("keys:\n  weight  float32[2, 3]\n  bias  float32[2]\n")


def test_concise(folder):
    assert run_here("inspect", "good.pth", "--output-format", "concise", cwd=folder).stdout == (
        "weight float32[2, 3]\nbias float32[2]\n"
    )


@pytest.mark.parametrize(
    ("words", "source"),
    [
        pytest.param(["inspect", "torn.pth"], "torn.pth", id="unreadable"),
        pytest.param(["inspect", "none.pth"], "none.pth", id="missing"),
        pytest.param(["inspect", "good.pth", "--weights", "ema"], "good.pth", id="without such weights"),
        pytest.param(["diff", "good.pth", "torn.pth"], None, id="one of two"),
    ],
)
def test_an_error_is_data_in_json(folder, words, source):
    done = run_here(*words, "--output-format", "json", cwd=folder)
    data = json.loads(done.stdout)
    assert (data["source"], data["exit_code"], done.returncode) == (source, 2, 2)
    assert done.stderr == f"ckptfix: error: {data['error']}\n"


def test_json(folder):
    data = json.loads(run_here("inspect", "good.pth", "--output-format", "json", cwd=folder).stdout)
    assert data["keys"]["weight"] == {"dtype": "float32", "shape": [2, 3]}
    assert data["file_size"] == (folder / "good.pth").stat().st_size


def test_unreadable(folder):
    done = run_here("inspect", "torn.pth", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ckptfix: error: torn.pth: ")
    assert done.stderr.count("\n") == 1


def test_github_is_not_a_format_of_it(folder):
    (folder / "ckptfix.toml").write_text('output-format = "github"\n')
    done = run_here("inspect", "good.pth", cwd=folder)
    assert done.returncode == 2
    assert "inspect has no output format github" in done.stderr
