"""``ckptfix migrate`` as a user runs it."""

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.zoo import zoos

STOPPED = """
import os, signal
from ckptfix.zoo import committing
from ckptfix.zoo.manifest import Journal
committing._MOST = 1  # every job is a group of its own, however fast the machine is
append, calls = Journal.append, []
def stopping(*args):
    append(*args)
    calls.append(1)
    if len(calls) == 2:  # the first group is written down, and most of the zoo is still to come
        os.kill(os.getpid(), signal.{signal})
Journal.append = stopping
from ckptfix.cli import main
main()
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoos.build(tmp_path_factory.mktemp("zoos") / "zoo", Path(__file__).parents[2] / "sample_checkpoints")


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save(zoos.weights(1), folder / "fine.pth")
    torch.save(zoos.weights(2, "module."), folder / "prefixed.pth")
    return folder


def test_a_healthy_zoo_ends_with_0_and_a_table(healthy, tmp_path):
    done = zoos.migrate(healthy, tmp_path / "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"repaired +1 .*\n.*already fine +1 ", done.stdout)
    assert re.search(r"done: 2 files", done.stdout)
    again = zoos.migrate_here(healthy, tmp_path / "new")
    assert "done: 0 files in 0 s, 2 by an earlier run" in again.stdout


def test_json_has_every_record(healthy, tmp_path):
    done = zoos.migrate_here(healthy, tmp_path / "new", "--output-format", "json")
    document = json.loads(done.stdout)
    assert document["outcomes"]["repaired"] == document["outcomes"]["already fine"] == 1
    assert [record["source"] for record in document["records"]] == ["fine.pth", "prefixed.pth"]


def test_a_dry_run_writes_nothing(healthy, tmp_path):
    done = zoos.migrate_here(healthy, tmp_path / "new", "--dry-run")
    assert re.search(r"to be repaired +1 ", done.stdout)
    assert "nothing was written; run the same command without --dry-run" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_the_command_of_a_decision_carries_it_out(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    nan = zoos.weights(1)
    nan["layers.0.bias"][0] = float("inf")
    torch.save(nan, old / "nan weights.pth")
    done = zoos.migrate_here(old, new)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("    ckptfix migrate"))
    words = shlex.split(line)
    assert words[:2] == ["ckptfix", "migrate"]
    assert zoos.migrate_here(*words[2:]).returncode == 0
    assert zoos.migrate_here(old, new).returncode == 0
    assert zoos.outcomes(new) == {"nan weights.pth": "repaired"}


def test_files_with_one_decision_get_one_command(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("ema/a.pth", "ema/b.pth", "mixed/c.pth", "mixed/fine.pth"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(zoos.weights(1) | ({} if "fine" in name else {"w": torch.tensor([1.0, float("nan")])}), old / name)
    done = zoos.migrate_here(old, new)
    assert "  ema, mixed/c.pth (3 files): VAL101" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("    ckptfix migrate")]
    only = ["--only", "ema", "--only", "mixed/c.pth"]
    assert [shlex.split(line)[4:] for line in lines] == [[*only, "--zero-non-finite"], [*only, "--accept", "VAL101"]]
    assert zoos.migrate_here(*shlex.split(lines[1])[2:]).returncode == 0
    assert set(zoos.outcomes(new).values()) == {"accepted", "already fine"}
    assert zoos.migrate_here(old, new).returncode == 0


def test_a_printed_command_can_be_pasted_whatever_the_names_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-old").mkdir()
    names = ["-x.pth", "two\nlines.pth", "--only", "it's \\ odd.pth"]
    for name in names:
        torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "-old" / name)
    done = zoos.migrate_here("--", "-old", "-new")
    assert done.returncode == 1, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("    ckptfix migrate")]
    assert len(printed) == 2
    for line, outcome in zip(printed, ("repaired", "accepted"), strict=True):
        # The shell prints the words that it would pass to the program.
        pasted = f"ckptfix() {{ printf '%s\\0' \"$@\"; }}\n{line}"
        words = subprocess.run(["bash", "-c", pasted], check=True, capture_output=True, encoding="utf-8").stdout
        assert words.startswith("migrate\0")
        assert zoos.migrate_here(*words.split("\0")[1:-1]).returncode == 0
        assert zoos.outcomes(tmp_path / "-new") == dict.fromkeys(names, outcome)


def test_the_flags_of_the_migration_are_in_the_command_of_a_decision(tmp_path):
    (tmp_path / "old").mkdir()
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "old" / "nan.pth")
    done = zoos.migrate_here(tmp_path / "old", tmp_path / "new", "--format", "safetensors")
    line = next(line for line in done.stdout.splitlines() if line.startswith("    ckptfix migrate"))
    assert shlex.split(line)[4:] == ["--format", "safetensors", "--only", "nan.pth", "--zero-non-finite"]
    assert zoos.migrate_here(*shlex.split(line)[2:]).returncode == 0
    assert zoos.migrate_here(tmp_path / "old", tmp_path / "new", "--format", "safetensors").returncode == 0
    assert sorted(path.name for path in (tmp_path / "new").glob("nan.*")) == ["nan.safetensors"]


def test_a_draft_under_another_name_says_how_to_use_it(healthy, tmp_path):
    done = zoos.migrate_here(healthy, "--init", "--table", tmp_path / "my zoo.toml")
    assert shlex.split(done.stderr.partition("run: ")[2])[2:] == [
        str(healthy),
        "NEW_ZOO",
        "--table",
        str(tmp_path / "my zoo.toml"),
    ]


def test_options_that_lose_data_need_only(healthy, tmp_path):
    done = zoos.migrate_here(healthy, tmp_path / "new", "--salvage")
    assert done.returncode == 2
    assert "--only" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_a_stop_says_how_to_continue_and_leaves_nothing_half_done(sent, zoo, tmp_path):
    goal = tmp_path / "new"
    done = zoos.migrate(zoo, goal, "--jobs", 2, script=STOPPED.format(signal=sent))
    assert done.returncode == 128 + getattr(signal, sent), done.stderr
    assert re.search(r"\d+ of 3\d files are done, .* run the same command to continue", done.stderr)
    assert [path.name for path in goal.rglob("*") if "tmp" in path.name] == []
    written = {path.relative_to(goal).as_posix() for path in goal.rglob("*") if path.is_file()}
    lines = [json.loads(line) for line in (goal / "manifest.jsonl").read_text().splitlines()]
    told = {name for line in lines for name in line["output_parts"] or [line["output"]] if name is not None}
    assert written - {"manifest.jsonl", "weights.jsonl"} == told
    assert lines
    assert zoos.migrate_here(zoo, goal).returncode == 2
    assert len(zoos.outcomes(goal)) > len(lines)


@pytest.mark.slow
def test_the_report_is_written_too(healthy, tmp_path):
    done = zoos.migrate_here(healthy, tmp_path / "new", "--report", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "prefixed.pth" in (tmp_path / "report.html").read_text()


def test_an_invalid_model_line_is_one_error_and_writes_nothing(healthy, tmp_path):
    table = tmp_path / "zoo.toml"
    table.write_text('[[files]]\nmatch = "*.pth"\nmodel = "tests.zoo.factories:linera"\n')
    done = zoos.migrate_here(healthy, tmp_path / "new", "--table", table)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert (done.returncode, len(errors)) == (2, 1)
    assert "did you mean linear?" in errors[0]
    assert not (tmp_path / "new").exists()


def test_two_sources_of_one_output_need_a_decision(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    for name in ("a.pth", "a.pt", "b.pth", "b.pt"):
        torch.save(zoos.weights(1), old / name)
    done = zoos.migrate_here(old, new, "--format", "safetensors")
    assert done.returncode == 1
    assert "a.pt, a.pth (2 files): another source would also be written as a.safetensors" in done.stdout
    assert 'in zoo.toml, exclude = ["a.pt"] leaves it out' in done.stdout
    table = tmp_path / "zoo.toml"
    table.write_text('exclude = ["a.pt"]\n[[files]]\nmatch = "b.pt"\noutput = "{folder}/{name}{suffix}"\n')
    done = zoos.migrate_here(old, new, "--format", "safetensors", "--table", table)
    assert (done.returncode, "needs a decision:" in done.stdout) == (0, False)  # a.pt is not part of this run
    assert {path.name for path in new.glob("*.safetensors")} == {"a.safetensors", "b.safetensors", "b.pt.safetensors"}


def test_no_command_is_printed_that_another_finding_stops(tmp_path):
    (tmp_path / "old").mkdir()
    nan = {"weight": torch.ones(2, 2)}
    nan["weight"][0, 0] = float("nan")
    torch.save({"other": nan["weight"]}, tmp_path / "old/stopped.pth")
    torch.save(nan | {"extra": torch.ones(1)}, tmp_path / "old/both.pth")
    model = ("--model", "tests.zoo.factories:linear", "--no-smoke")
    done = zoos.migrate_here(tmp_path / "old", tmp_path / "new", *model)
    lines = [line for line in done.stdout.splitlines() if line.startswith("    ")]
    commands = [shlex.split(line) for line in lines if line.startswith("    ckptfix migrate")]
    assert [words[words.index("--only") + 1] for words in commands] == ["both.pth"]
    stopped = done.stdout[done.stdout.index("stopped.pth") :].splitlines()
    assert stopped[1] == "    name the model that the file belongs to: the file lacks most parameters of this one"
    zoos.migrate_here(*commands[0][2:])
    assert zoos.outcomes(tmp_path / "new") == {"both.pth": "repaired", "stopped.pth": "needs a decision"}
