import json
import subprocess
import sys

import pytest
import torch

from tests.cli.programs import command, environment, run, run_here

PREFIX = (
    'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias".\n\t'
    'Unexpected key(s) in state_dict: "module.weight", "module.bias".\n'
)
MAGIC = "RuntimeError: Invalid magic number; corrupt file?"


def piped(text, cwd, *words):
    """Run ``ckptfix explain`` with bytes on stdin."""
    return subprocess.run(
        command("explain", *words), cwd=cwd, env=environment(), input=text, capture_output=True, timeout=300
    )


def test_unknown_text(tmp_path):
    done = run_here("explain", "ValueError: the kettle is empty", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("not recognised: ")
    assert "nearest" not in done.stdout


def test_unknown_text_near_a_known_one(tmp_path):
    done = run_here("explain", "zip archive reading failed, no central directory found", cwd=tmp_path)
    assert done.returncode == 1
    assert "The nearest one that it knows is damaged-archive" in done.stdout


def test_full(tmp_path):
    done = run("explain", MAGIC, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"foreign-pickle: {MAGIC}\n\nwhat it means:\n  The file is a pickle")
    assert "  run: ckptfix inspect FILE\n" in done.stdout
    assert "(FILE is your checkpoint)" in done.stdout


def test_words_without_quotes(tmp_path):
    done = run_here("explain", "RuntimeError:", "Torch", "not", "compiled", "with", "CUDA", "enabled", cwd=tmp_path)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "no-cuda-build")


@pytest.mark.parametrize("words", [(), ("-",)])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_stdin(tmp_path, words, encoding):
    done = piped(f"[rank0]: {MAGIC}\n".encode(encoding), tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"foreign-pickle")


@pytest.mark.parametrize(
    ("root", "place"), [(lambda sd: sd, ""), (lambda sd: {"net": sd}, "['net']"), (lambda sd: [{"g": sd}], "[0]['g']")]
)
@pytest.mark.parametrize("said", ["KeyError: 'params'", "AttributeError: 'dict' object has no attribute 'eval'"])
def test_the_code_finds_the_weights_of_this_very_file(tmp_path, root, place, said):
    torch.save(root(torch.nn.Linear(3, 2).state_dict()), tmp_path / "file.pth")
    done = run_here("explain", said, "--file", "file.pth", cwd=tmp_path)
    assert f'torch.load("file.pth", map_location="cpu"){place}' in done.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_log_file(tmp_path, encoding):
    (tmp_path / "err.log").write_text(f"[rank0]: {MAGIC}\n", encoding)
    done = run_here("explain", "err.log", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("foreign-pickle")


def test_stdin_of_no_encoding_at_all(tmp_path):
    assert piped(b"\xff\x80 " + MAGIC.encode(), tmp_path).returncode == 0


def test_json(tmp_path):
    data = json.loads(run_here("explain", PREFIX, "--output-format", "json", cwd=tmp_path).stdout)
    assert (data["version"], data["recognised"], data["name"]) == (1, True, "does-not-fit")
    assert "All 2 unexpected keys begin with `module.`" in data["causes"][1]["text"]
    assert data["advice"][0]["command"] == "ckptfix repair FILE"
    assert data["nearest"] is None


def test_json_of_an_unknown_text(tmp_path):
    done = run_here(
        "explain", "zip archive reading failed, no central directory found", "--output-format", "json", cwd=tmp_path
    )
    data = json.loads(done.stdout)
    assert (done.returncode, data["recognised"], data["nearest"]["name"]) == (1, False, "damaged-archive")


def test_concise(tmp_path):
    lines = run_here("explain", MAGIC, "--output-format", "concise", cwd=tmp_path).stdout.splitlines()
    assert all(line.startswith("foreign-pickle: ") for line in lines)
    assert "foreign-pickle: run: ckptfix inspect FILE" in lines


def test_with_the_file_and_the_model(folder):
    done = run_here("explain", PREFIX, "--file", "wrapped.pth", "--model", "zoo:tiny", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "this file: wrapped.pth has what the message tells of:\n  KEY102 wrapper-prefix error" in done.stdout
    assert done.stdout.endswith("  run: ckptfix repair wrapped.pth --model zoo:tiny\n")


def test_with_a_file_that_cannot_be_read(folder):
    done = run_here("explain", "failed finding central directory", "--file", "torn.pth", cwd=folder)
    assert done.returncode == 0
    assert "this file: it cannot be read as it is: torn.pth: " in done.stdout


def test_a_text_from_the_file_name_cannot_steer_the_terminal(tmp_path):
    done = run_here("explain", "FileNotFoundError: No such file or directory: 'a\x1b]0;x\x07.pth'", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("",), "no text to explain"),
        (("good.pth",), "good.pth is not a text file; to examine a checkpoint, run `ckptfix check good.pth`"),
        ((MAGIC, "--file", "nowhere.pth"), "there is no such file"),
        ((MAGIC, "--file", "good.pth", "--model", "zoo:tiny", "--like", "good.pth"), "exclude each other"),
    ],
)
def test_usage(folder, words, complaint):
    done = run_here("explain", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_configured_model_is_named_and_not_run(folder):
    (folder / "ckptfix.toml").write_text('model = "zoo:broken"\n')
    done = run_here(
        "explain", "size mismatch for fc.weight: copying a param with shape [1] from checkpoint,", cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ckptfix check FILE --model zoo:broken" in done.stdout


def test_it_imports_nothing_slow(tmp_path):
    program = (
        "import sys, atexit\n"
        "slow = {'torch', 'numpy', 'rich', 'safetensors'}\n"
        "atexit.register(lambda: sys.stderr.write(str(sorted(slow & {*sys.modules}))))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", PREFIX],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "[]")


def test_help_does_not_load_the_records(tmp_path):
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write(str([n for n in sys.modules if n.startswith('ckptfix.explain')])))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stderr == "[]"
