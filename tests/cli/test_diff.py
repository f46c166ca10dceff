"""``ckptfix diff`` on the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.programs import run, run_here


def test_no_difference(folder: Path):
    done = run_here("diff", "good.pth", "good.pth", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "A  good.pth: torch-zip, 2 tensors, 8 elements\n"
        "B  good.pth: torch-zip, 2 tensors, 8 elements\n"
        "equal bit for bit: 2 tensors\n"
        "no difference\n"
    )


def test_quiet_without_a_difference_prints_nothing(folder: Path):
    assert run_here("diff", "good.pth", "good.pth", "-q", cwd=folder).stdout == ""


def test_a_difference_has_exit_code_1(folder: Path):
    done = run("diff", "wrapped.pth", "good.pth", cwd=folder)
    assert done.returncode == 1
    assert "  rename 2 keys: module.{…} → {…}\n" in done.stdout


def test_json(folder: Path):
    done = run_here("diff", "wrapped.pth", "good.pth", "--output-format", "json", cwd=folder)
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"]) == (1, 1)
    assert told["renamed"] == {"module.weight": "weight", "module.bias": "bias"}


def test_an_error_names_the_file_that_it_is_about_and_no_other(folder: Path):
    assert run_here("diff", "good.pth", "torn.pth", cwd=folder).stderr.startswith("ckptfix: error: torn.pth: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(("good.pth", "gone.pth"), "gone.pth", id="no such file"),
        pytest.param(("good.pth", "torn.pth"), "torn.pth", id="a damaged one"),
        pytest.param(("good.pth", "good.pth", "--atol", "-1"), "give finite numbers", id="a tolerance below zero"),
        pytest.param(("good.pth",), "Missing argument 'B'", id="one file"),
    ],
)
def test_errors_have_exit_code_2(folder: Path, words: tuple[str, ...], says: str):
    done = run_here("diff", *words, cwd=folder)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
