import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfix import __version__
from ckptfix.cli.program import COMMANDS, choose
from ckptfix.core.config import Configuration
from ckptfix.core.options import options_of
from ckptfix.errors import UsageError
from tests.cli.programs import ROOT, command, environment, run, run_here

FULL = Path("/dev/full")
SLOW = ("torch", "numpy", "rich", "safetensors")


def test_version(tmp_path):
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ckptfix {__version__}\n", "")


def test_version_with_verbose_has_what_a_bug_report_needs(tmp_path):
    done = run("--version", "-v", cwd=tmp_path)
    assert done.returncode == 0
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:]] == [
        "torch",
        "Kernel",
        "Known models",
        "Python",
        "Platform",
    ]


def test_the_version_is_that_of_the_package():
    assert re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) == [__version__]


@pytest.mark.parametrize(
    "words", [["--help"], ["check", "-h"], ["repair", "-h"], ["inspect", "-h"], ["rule", "-h"], ["explain", "-h"]]
)
def test_help(tmp_path, words):
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    assert "\x1b" not in done.stdout


def test_help_says_that_the_model_is_code(tmp_path):
    assert "which runs your code" in " ".join(run("check", "--help", cwd=tmp_path).stdout.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["check", "--help"],
        ["rule", "--all"],
        ["inspect", "good.pth"],
        ["check", "wrapped.pth", "--like", "good.pth", "--no-values"],
    ],
    ids=" ".join,
)
def test_work_on_names_imports_nothing_slow(folder, words):
    program = (
        "import sys, atexit\n"
        f"atexit.register(lambda: sys.stderr.write('imported ' + str([n for n in {SLOW} if n in sys.modules])))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, env=environment(), capture_output=True, encoding="utf-8"
    )
    assert done.stderr == "imported []"


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
def test_a_closed_pipe_is_quiet(tmp_path):
    torch.save({f"k{'x' * n}.w": torch.zeros(1) for n in range(2000)}, tmp_path / "many.pth")
    program = subprocess.Popen(
        command("inspect", "many.pth", "--output-format", "concise"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.readline().startswith(b"k.w ")
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait(60) == 141


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
def test_a_full_disk_of_stdout_is_not_blamed_on_the_file(tmp_path):
    torch.save({"module.w": torch.zeros(1)}, tmp_path / "a.pth")
    with FULL.open("w") as full:
        done = subprocess.run(
            command("check", "a.pth"), cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE
        )
    told = "cannot write the report to stdout: No space left on device; redirect it elsewhere"
    assert (done.returncode, done.stderr.decode()) == (2, f"ckptfix: error: a.pth: {told}\n")


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
@pytest.mark.parametrize(("words", "code"), [(["good.pth"], 0), (["wrapped.pth"], 1), (["absent.pth"], 2), (["-x"], 2)])
def test_a_full_disk_of_stderr_changes_no_exit_code(words, code, folder):
    with FULL.open("w") as full:
        done = subprocess.run(
            command("check", "--no-values", "-v", *words),
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=full,
        )
    assert done.returncode == code


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
@pytest.mark.parametrize(
    ("words", "limits"),
    [
        pytest.param(["good.pth"], (90_000, 110_000, 130_000, 150_000, 200_000), id="alone"),
        pytest.param(["good.pth", "--model", "torch.nn:Identity"], (450_000, 550_000), id="with torch"),
    ],
)
def test_too_little_memory_is_not_called_a_bug(words, limits, folder):
    for kilobytes in limits:
        done = subprocess.run(
            ["sh", "-c", f"ulimit -v {kilobytes}; {' '.join(map(str, command('check', *words)))}"],
            cwd=folder,
            env=environment(),
            capture_output=True,
        )
        assert done.returncode != 1, kilobytes
        assert b"bug of ckptfix" not in done.stderr


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "torchvision"), None))
from ckptfix.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["--version", "-v"], 0, id="version"),
        pytest.param(["check", "wrapped.pth"], 1, id="check"),
        pytest.param(["check", "wrapped.pth", "--like", "good.pth"], 1, id="a reference"),
        pytest.param(["check", "good.pth", "--output-format", "json"], 0, id="json"),
        pytest.param(["repair", "wrapped.pth", "-o", "new.safetensors"], 0, id="repair"),
        pytest.param(["repair", "good.pth", "--fill", "good.pth", "--like", "good.pth"], 0, id="a donor"),
        pytest.param(["inspect", "good.pth"], 0, id="inspect"),
        pytest.param(["diff", "good.pth", "good.pth"], 0, id="diff"),
        pytest.param(["rule", "--all"], 0, id="rule"),
        pytest.param(["explain", "RuntimeError: size mismatch for fc.weight"], None, id="explain"),
        pytest.param(["check", "wrapped.pth", "--report", "page.html"], 1, id="a page"),
        pytest.param(["migrate", ".", "new", "--dry-run", "--jobs", "1"], None, id="migrate"),
    ],
)
def test_work_without_torch(words, code, folder):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert "torch, which cannot be imported" not in done.stderr
    assert "bug of ckptfix" not in done.stderr + done.stdout
    if code is not None:
        assert done.returncode == code


@pytest.mark.parametrize("words", [["--model", "zoo:tiny"], ["--dtype", "float16"]], ids=" ".join)
def test_a_missing_torch_is_named(words, folder):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "repair", "good.pth", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "this needs torch, which cannot be imported" in done.stderr
    assert "bug" not in done.stderr


def checking(body: str) -> list[str]:
    """Return the command of a program that does this when it checks ``a.pth``, and then waits."""
    program = "import os, sys, time, ckptfix\nfrom ckptfix.cli import main\n\n"
    program += f"def check(path, **arguments):\n    {body}\n    time.sleep(60)\n\nckptfix.check = check\nmain()\n"
    return [sys.executable, "-c", program, "check", "a.pth"]


def assert_a_signal_ends_it(words, number, name, folder):
    """Send the signal to the program once it is ready."""
    program = subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stderr.readline() == b"ready\n"
    program.send_signal(number)
    line = f"ckptfix: error: a.pth: stopped ({name}): no unfinished file is left, and no source was changed\n"
    assert program.stderr.read().decode() == line
    assert program.stdout.read() == b""
    assert program.wait(60) == 128 + number


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Interrupt"), (signal.SIGTERM, "Terminated"), (signal.SIGHUP, "Hangup")]
)
def test_a_signal_ends_it_with_one_line(number, name, tmp_path):
    assert_a_signal_ends_it(checking("print('ready', file=sys.stderr, flush=True)"), number, name, tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Interrupt"), (signal.SIGTERM, "Terminated"), (signal.SIGHUP, "Hangup")]
)
def test_a_signal_before_the_command_is_reported(number, name, tmp_path):
    program = (
        "import os\nfrom ckptfix.cli import main, program\n"
        f"program._command = lambda name: (os.kill(os.getpid(), {int(number)}), len(name))\nmain()\n"
    )
    words = [sys.executable, "-c", program, "check", "a.pth"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, encoding="utf-8")
    line = f"ckptfix: error: stopped ({name}): no unfinished file is left, and no source was changed\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", line)


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
def test_a_signal_ends_the_users_code(tmp_path):
    # Output of a factory is written to stderr.
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef model():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pth")
    assert_a_signal_ends_it(command("check", "a.pth", "--model", "slow:model"), signal.SIGTERM, "Terminated", tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_finaliser_is_not_lost(number, tmp_path):
    held = f"type('Held', (), {{'__del__': lambda self: (os.kill(os.getpid(), {int(number)}), time.sleep(0))}})()"
    done = subprocess.run(checking(held), cwd=tmp_path, env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 128 + number
    (line,) = done.stderr.splitlines()
    assert line.startswith("ckptfix: error: a.pth: stopped (")


@pytest.mark.skipif(os.name != "posix", reason="the shell of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_to_a_closed_stream_is_dropped(closed, tmp_path):
    torch.save({"module.w": torch.ones(3)}, tmp_path / "a.pth")
    words = " ".join(map(str, command("repair", "a.pth", "-o", "b.pth")))
    done = subprocess.run(["sh", "-c", f"{words} {closed}"], cwd=tmp_path, env=environment(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert torch.load(tmp_path / "b.pth")["w"].tolist() == [1, 1, 1]
    assert done.stdout == b"" or ">&-" not in closed.replace("2>&-", "")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("check", "check [OPTIONS] PATH..."),
        ("repair", "repair [OPTIONS] PATH"),
        ("migrate", "migrate [OPTIONS] SRC [DST]"),
        ("rule", "rule [OPTIONS] [CODE]"),
        ("explain", "explain [OPTIONS] [TEXT]..."),
    ],
)
def test_the_usage_line(command, usage, tmp_path):
    assert run_here(command, "--help", cwd=tmp_path).stdout.splitlines()[0].endswith(f"ckptfix {usage}")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_every_option_once(command, tmp_path):
    shown = run_here(command, "--help", cwd=tmp_path).stdout
    for option in options_of(command):
        assert len(re.findall(rf"^  (?:-\w, )?{option.long}(?![\w-])", shown, re.MULTILINE)) == 1, option.name
    assert len(re.findall(r"^  -h, --help  ", shown, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("line", "suggested"),
    [
        ("ckptfix rule KEY10", "KEY101"),
        ("ckptfix check --select VAL1", "VAL101"),
        ("ckptfix check --ignore KEY101,VAL1", "KEY101,VAL101"),
        ("ckptfix repair --fill t", "target"),
        ("ckptfix repair --dtype b", "bfloat16"),
        ("ckptfix repair --output-format j", "json"),
        ("ckptfix repair --drop", "--drop-mismatched"),
        ("ckptfix repair --adapt p", "pos_embed=timm"),
        ("ckptfix repair --replace VAL10", "VAL101"),
        ("ckptfix repair --device c", "cuda"),
        ("ckptfix check --like k", "known:"),
        ("ckptfix check --like known:timm/resnet5", "known:timm/resnet50"),
    ],
)
def test_a_shell_completes_codes_and_values(line, suggested, tmp_path):
    words = line.replace(" ", "\n")
    asked = {"_CKPTFIX_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(line.count(" "))}
    lines = run(cwd=tmp_path, **asked).stdout.splitlines()
    assert f"plain,{suggested}" in lines
    assert not any(each.startswith("file,") for each in lines[1:])  # with it, bash discards what it got before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek", "a.pth"], "there is no command chek; did you mean check? (see ckptfix --help)"),
        (["repair", "a.pth", "b.pth"], "repair takes one file; for many: ckptfix migrate SRC DST"),
        (["check", "a.pth", "--fil", "x"], "--fill"),
        (["check", "a.pth", "--no-smoke"], "--no-smoke is an option of repair, migrate, not of check"),
        (["inspect", "a.pth", "--jobs", "2"], "--jobs is an option of check, migrate, not of inspect"),
        (["check", "a.pth", "--no-such"], "No such option '--no-such'"),
        (["check", "a.pth", "--output-format", "xml"], "'xml' is not one of 'full', 'concise', 'json', 'github'"),
        (["check", "a.pth", "--seed", "many"], "'many' is not a valid integer"),
        (["check", "a.pth", "--model-args", "{}"], "--model-args has no meaning without a model"),
    ],
)
def test_an_invalid_command_line_gets_advice(words, said, tmp_path):
    done = run_here(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Value error" not in done.stderr


def test_no_command_line_at_all_prints_the_help_once(tmp_path):
    done = run_here(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == run_here("--help", cwd=tmp_path).stdout


def chosen(given, configured):
    return choose("repair", given, Configuration(configured))


@pytest.mark.parametrize(
    ("given", "configured", "expected"),
    [
        pytest.param({}, {}, {}, id="nothing"),
        pytest.param({}, {"jobs": 3}, {}, id="a key of another command"),
        pytest.param({}, {"seed": 3}, {"seed": 3}, id="only the configuration"),
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
        pytest.param({"model": "m:f"}, {"compare": "a.pth"}, {"model": "m:f", "compare": "a.pth"}, id="with a model"),
        pytest.param(
            {}, {"fill": "a.pth", "adapt": ["timm"]}, {}, id="a donor and recipes are for files with a target"
        ),
        pytest.param(
            {"salvage": True}, {"fill": "a.pth"}, {"salvage": True, "fill": "a.pth"}, id="a donor for a torn file"
        ),
        pytest.param({"salvage": True}, {"fill": "target"}, {"salvage": True}, id="no target to fill it from"),
    ],
)
def test_the_command_line_overrides_the_configuration(given, configured, expected):
    assert chosen(given, configured) == expected


@pytest.mark.parametrize("given", [{"compare": "a.pth"}, {"model_args": "{}"}, {"quiet": True, "verbose": True}])
def test_options_without_effect_are_refused(given):
    with pytest.raises(UsageError):
        chosen(given, {})
