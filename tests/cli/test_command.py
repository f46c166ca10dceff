import pytest

from tests.cli.programs import run_here


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("check", "check [OPTIONS] PATH..."),
        ("repair", "repair [OPTIONS] PATH"),
        ("inspect", "inspect [OPTIONS] PATH"),
        ("rule", "rule [OPTIONS] [CODE]"),
        ("explain", "explain [OPTIONS] [TEXT]..."),
    ],
)
def test_the_usage_line_has_no_braces(command, usage, tmp_path):
    assert run_here(command, "--help", cwd=tmp_path).stdout.splitlines()[0].endswith(f"ckptfix {usage}")
