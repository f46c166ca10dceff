"""Folders of ranks in a zoo, and the files that name the latest of them."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from tests.cli.programs import run_here
from tests.reading.folders.ranks.genuine import unpacked
from tests.zoo import zoos

TAG = "saved/global_step2"


def zoo_of(folder: Path, sample: str = "zero2_w2_bf16_g2") -> Path:
    unpacked(sample, folder / "old")
    (folder / "old/truth.pt").unlink()
    return folder / "old"


def records(folder: Path) -> dict[str, Any]:
    lines = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return {line["source"]: line for line in lines}


def test_universal_checkpoints_are_the_tags_of_their_run_and_not_written_again(tmp_path: Path) -> None:
    """DeepSpeed loads ``saved/TAG/zero`` from ``saved``, which has ``latest_universal``; other formats take its place
    and leave nothing of it, not even folders."""
    old, new = zoo_of(tmp_path), tmp_path / "new"
    shutil.copytree(old / TAG, old / "saved/epoch1")
    named = old / "saved/latest"
    finished = []
    for _ in range(2):
        assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
        line = records(new)[TAG]
        finished.append((line["finished"], line["seconds"]))
    assert finished[0] == finished[1]
    assert line["output"] == TAG
    assert {f"{TAG}/zero/optimizer_state.pt", f"{TAG}/mp_rank_00_model_states.pt"} < {*line["output_parts"]}
    assert line["output_size"] == sum((new / name).stat().st_size for name in line["output_parts"])
    assert records(new)["saved/latest"]["output"] == "saved/latest_universal"
    assert sorted(file.name for file in (new / "saved").iterdir()) == ["epoch1", "global_step2", "latest_universal"]
    assert (new / "saved/latest_universal").read_text() == named.read_text()
    assert zoos.migrate_here(old, new, "--format", "universal", "--verify").returncode == 0
    assert records(new)[TAG]["finished"] == finished[0][0]
    for folder in ("saved", TAG, "saved/epoch1"):
        assert ckptfix.open_checkpoint(new / folder).format == "universal"
    named.write_text("epoch1")
    assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
    assert (records(new)[TAG]["finished"], (new / "saved/latest_universal").read_text()) == (finished[0][0], "epoch1")
    assert zoos.migrate_here(old, new, "--format", "pth").returncode == 0
    assert sorted(file.name for file in (new / "saved").iterdir()) == ["epoch1.pth", "global_step2.pth"]


def test_a_dry_run_names_the_latest_as_it_would_be_written(tmp_path: Path) -> None:
    old, new = zoo_of(tmp_path), tmp_path / "new"
    for form, name in (("universal", "latest_universal"), (None, "latest")):
        words = ("--format", form) if form else ()
        done = zoos.migrate_here(old, new, "--dry-run", "--output-format", "json", *words)
        outputs = {record["source"]: record["output"] for record in json.loads(done.stdout)["records"]}
        assert outputs == {TAG: TAG, "saved/latest": f"saved/{name}"}


def test_what_cannot_be_a_universal_checkpoint_gets_the_command_for_another_format(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    torch.save(zoos.weights(1), old / "a.pth")
    done = zoos.migrate_here(old, new, "--format", "universal")
    (command,) = (line.strip() for line in done.stdout.splitlines() if line.strip().startswith("ckptfix migrate"))
    assert command.endswith("--only a.pth --format pth")
    words = shlex.split(command)[4:]
    assert zoos.migrate_here(old, new, *words).returncode == 0
    assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0  # the decision is kept
    assert torch.load(new / "a.pth").keys() == zoos.weights(1).keys()


def test_one_advice_is_given_once(tmp_path: Path) -> None:
    """A missing layer takes weights with names and perhaps others with it."""
    old, new = zoo_of(tmp_path, "pipeline_pp2"), tmp_path / "new"
    for file in [*old.rglob("*optim_states.pt"), *old.rglob("layer_03*")]:
        file.unlink()
    done = zoos.migrate_here(old, new, "--only", "saved/global_step1", "--salvage")
    assert done.stdout.count("fetch the missing file") == 1


def test_the_command_for_model_states_of_which_the_masters_are_lost_can_be_pasted(tmp_path: Path) -> None:
    old, new = zoo_of(tmp_path), tmp_path / "new"
    next(old.rglob("*rank_1_mp*optim_states.pt")).unlink()
    done = zoos.migrate_here(old, new)
    (command,) = re.findall(r"ckptfix (repair .*) -o model\.pth", done.stdout)
    assert run_here(*shlex.split(command), "-o", "model.pth", cwd=tmp_path).returncode == 0
    assert len(torch.load(tmp_path / "model.pth")["module"]) == 14


def test_ranks_that_are_kept_keep_the_name_of_the_latest(tmp_path: Path) -> None:
    """And a second file that names the latest is not replaced by it."""
    old, new = zoo_of(tmp_path), tmp_path / "new"
    assert zoos.migrate_here(old, new).returncode == 0
    assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
    names = {"global_step2", "latest_universal"}
    assert {file.name for file in (new / "saved").iterdir()} == names
    assert not list(new.rglob("*optim_states.pt"))
    (old / "saved/latest_universal").write_text("own")
    assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
    assert ({file.name for file in (new / "saved").iterdir()}, records(new)["saved/latest"]["output"]) == (names, None)
    assert (new / "saved/latest_universal").read_text() == "own"
    assert zoos.migrate_here(old, new).returncode == 0
    assert (new / "saved/latest").read_text() == (old / "saved/latest").read_text()
    assert not (new / TAG / "zero").exists()


def test_a_folder_of_an_old_manifest_without_its_files_stays(tmp_path: Path) -> None:
    old, new = zoo_of(tmp_path), tmp_path / "new"
    assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
    manifest = new / "manifest.jsonl"
    lines = [{**json.loads(line), "output_parts": []} for line in manifest.read_text().splitlines()]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = zoos.migrate_here(old, new, "--format", "pth")
    assert (done.returncode, records(new)[TAG]["output"]) == (0, f"{TAG}.pth")
    assert ckptfix.open_checkpoint(new / TAG).format == "universal"


POINTERS = {
    "latest": ("zero2_w2_bf16_g2", "global_step2", "global_step2"),
    "latest_universal": ("universal_zero2", "global_step2_universal", "global_step2_universal"),
    "latest_checkpointed_iteration.txt": ("megatron_tp2pp2", "iter_0000001", "1\n"),
}


@pytest.mark.parametrize("pointer", POINTERS)
def test_the_name_of_the_latest_save_is_copied_only_with_its_folder(tmp_path: Path, pointer: str) -> None:
    sample, tag, text = POINTERS[pointer]
    old, new = zoo_of(tmp_path, sample), tmp_path / "new"
    (old / "saved" / pointer).write_text(text)
    file, name = new / "saved" / pointer, f"saved/{pointer}"
    is_copied = sample != "megatron_tp2pp2"  # its files hold objects, so it is rewritten in any case
    for format, stays in ((None, is_copied), ("safetensors", False), ("pth", False), ("universal", is_copied)):
        done = zoos.migrate_here(old, new, *(("--format", format) if format else ()))
        assert done.returncode == (0 if is_copied or format != "universal" else 2)
        is_ours = pointer == "latest" and format == "universal"
        own = "saved/latest_universal" if is_ours else name
        assert ((new / own).is_file(), file.is_file()) == (stays, stays and not is_ours), format
        record = records(new)[name]
        assert (record["output"], record["outcome"]) == (own if stays else None, "other")
        assert [f"names saved/{tag}" in remark for remark in record["remarks"]] == [True] * (not stays)
        assert not stays or (new / own).read_text() == text


def test_a_file_that_names_another_is_copied_if_that_keeps_its_name(tmp_path: Path) -> None:
    """As detectron2 (the name) and mmengine (the path) write it."""
    for folder, text in (("one", "a.pth"), ("two", "/work/two/a.pth"), ("three", "b.pth"), ("four", "no\0name\udcff")):
        (tmp_path / "old" / folder).mkdir(parents=True)
        torch.save(zoos.weights(1), tmp_path / "old" / folder / "a.pth")
        (tmp_path / "old" / folder / "last_checkpoint").write_bytes(text.encode(errors="surrogateescape"))
    for format, kept in (("pth", {"one", "two", "three", "four"}), ("safetensors", {"three", "four"})):
        assert zoos.migrate_here(tmp_path / "old", tmp_path / "new", "--format", format).returncode == 0
        assert {file.parent.name for file in tmp_path.glob("new/*/last_checkpoint")} == kept
