import pytest

from ckptfix.cli.choices import choose
from ckptfix.core.config import Configuration


def chosen(given, configured):
    """What ``choose`` makes of a command with every option."""
    names = ("model", "model_args", "like", "select", "seed", "unsafe_fixes", "quiet", "verbose", "weights", "compare")
    return choose({**dict.fromkeys(names), **given}, Configuration(configured))


@pytest.mark.parametrize(
    ("given", "configured", "expected"),
    [
        pytest.param({}, {}, {}, id="nothing"),
        pytest.param({"select": []}, {}, {}, id="an empty list was not given"),
        pytest.param({}, {"backup": True}, {}, id="a key of another command"),
        pytest.param({}, {"seed": 3}, {"seed": 3}, id="the configuration alone"),
        pytest.param({"seed": 0}, {"seed": 3}, {"seed": 0}, id="the command line wins"),
        pytest.param({"unsafe_fixes": False}, {"unsafe_fixes": True}, {"unsafe_fixes": False}, id="it can say no"),
        pytest.param({"select": ["KEY"]}, {"select": ["BUF"]}, {"select": ["KEY"]}, id="lists are not merged"),
        pytest.param({"like": "a.pth"}, {"model": "m:f", "model_args": {}}, {"like": "a.pth"}, id="another target"),
        pytest.param(
            {"model_args": "[]"},
            {"model": "m:f"},
            {"model": "m:f", "model_args": "[]"},
            id="arguments for the same target",
        ),
        pytest.param({"verbose": True}, {"quiet": True}, {"verbose": True}, id="loud against quiet"),
        pytest.param({}, {"compare": "a.pth"}, {}, id="a comparison is for commands with a model"),
        pytest.param({"compare": "a.pth"}, {}, {"compare": "a.pth"}, id="unless it was asked for"),
        pytest.param({"model": "m:f"}, {"compare": "a.pth"}, {"model": "m:f", "compare": "a.pth"}, id="with a model"),
    ],
)
def test_the_command_line_wins(given, configured, expected):
    assert chosen(given, configured) == expected
