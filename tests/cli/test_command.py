import pytest

from tests.cli.programs import run


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("check", "Usage: ckptfix check [OPTIONS] PATH..."),
        ("repair", "Usage: ckptfix repair [OPTIONS] PATH"),
        ("inspect", "Usage: ckptfix inspect [OPTIONS] PATH"),
        ("rule", "Usage: ckptfix rule [OPTIONS] [CODE]"),
    ],
)
def test_the_usage_line_has_no_braces(command, usage, tmp_path):
    assert run(command, "--help", cwd=tmp_path).stdout.splitlines()[0] == usage
