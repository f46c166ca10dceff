"""A whole migration: every outcome, and the same tree however often it is killed."""

import argparse
import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.bytes.transfers import ForbiddenError
from ckptfix.errors import UsageError
from ckptfix.zoo.job import Others
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import Migration, migrate
from ckptfix.zoo.places import LocalPlace, open_place
from ckptfix.zoo.zoo_toml import plain_table
from tests.zoo import zoos


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoos.build(tmp_path_factory.mktemp("zoos") / "zoo", Path(__file__).parents[2] / "sample_checkpoints")


@pytest.fixture(scope="module")
def whole(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo, migrated without any trouble."""
    goal = tmp_path_factory.mktemp("whole") / "new"
    with migrate(str(zoo), str(goal), jobs=2):
        pass
    return goal


def run(zoo: Path, goal: Path, **options: Any) -> Migration:
    with migrate(str(zoo), str(goal), engine=zoos.Grouped, **options) as migration:
        return migration


def test_every_file_ends_as_one_thing(zoo, whole):
    found = zoos.outcomes(whole)
    assert set(found.values()) == {each.value for each in set(Outcome) - {Outcome.FAILED, Outcome.ACCEPTED}}
    assert found["fine/model1.pth"] == found["shards/model.safetensors.index.json"] == "already fine"
    assert found["old/deep/run1.pth"] == found["old/packed.pth.gz"] == "repaired"
    assert found["broken/nan.pth"] == found["old/net-0badf00d.pth"] == "needs a decision"
    assert found["broken/empty.pth"] == found["broken/page.pth"] == found["broken/cut.pth"] == "unreadable"
    assert found["README.md"] == "other"
    shards = {f"shards/model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    every = {path.relative_to(zoo).as_posix() for path in zoo.rglob("*") if path.is_file()}
    assert found.keys() == every - shards


def test_what_is_fine_is_copied_and_what_is_repaired_loads(zoo, whole):
    for record in map(json.loads, (whole / "manifest.jsonl").read_text().splitlines()):
        if record["outcome"] == "already fine":
            for name in record["output_parts"] or [record["source"]]:
                assert (whole / name).read_bytes() == (zoo / name).read_bytes()
        elif record["outcome"] == "repaired" and not record["output"].endswith(".safetensors"):
            torch.load(whole / record["output"], weights_only=True)
    loaded = torch.load(whole / "old/deep/run2.pth", weights_only=True)
    assert list(loaded["state_dict"]) == list(zoos.weights(2))
    assert loaded["epoch"] == 2


def test_names_follow_the_content(whole):
    renames = json.loads((whole / "renames.json").read_text())
    assert renames["old/packed.pth.gz"] == "old/packed.pth"
    assert renames["manifest.jsonl"] == "manifest.old.jsonl"  # the migration has a file of that name itself
    for old, new in renames.items():
        assert (whole / new).is_file(), old
        if "-" in old:
            digest = hashlib.sha256((whole / new).read_bytes()).hexdigest()
            assert new == f"{old[: old.index('-') + 1]}{digest[:8]}.pth"


def test_the_books_are_sorted_and_prove_the_files(zoo, whole):
    lines = [json.loads(line) for line in (whole / "manifest.jsonl").read_text().splitlines()]
    assert [line["source"] for line in lines] == sorted(line["source"] for line in lines)
    sha256 = hashlib.sha256
    for line in lines:
        if line["sha256"] is not None and line["source"] != "shards/model.safetensors.index.json":
            assert line["sha256"] == sha256((zoo / line["source"]).read_bytes()).hexdigest()
        if line["output_sha256"] is not None and not line["output_parts"]:
            written = (whole / line["output"]).read_bytes()
            assert (line["output_sha256"], line["output_size"]) == (sha256(written).hexdigest(), len(written))


def test_a_second_run_does_nothing(zoo, whole, tmp_path):
    before = zoos.tree(whole)
    stamps = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    migration = run(zoo, whole)
    assert migration.summary.earlier_files == migration.summary.files == migration.summary.done_files
    assert zoos.tree(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == stamps


POINTS = {
    "in the listing": ("ckptfix.zoo.migrating", "list_zoo", 1),
    "before the first line": ("ckptfix.zoo.manifest.Journal", "append", 1),
    "between weights and manifest": ("ckptfix.zoo.manifest.Journal", "append", 4),
    "later": ("ckptfix.zoo.manifest.Journal", "append", 9),
    "at the first rename": ("ckptfix.zoo.committing", "put_in_place", 1),
    "at a later rename": ("ckptfix.zoo.committing", "put_in_place", 14),
    "at a flush": ("ckptfix.zoo.committing", "flush_file_system", 2),
    "when the manifest is sorted": ("ckptfix.zoo.manifest.Journal", "tidy", 1),
    "between the books": ("ckptfix.zoo.manifest.Journal", "tidy", 2),
    "at the renames": ("ckptfix.zoo.workspace", "atomic_file", 1),
}

KILLED = """
import importlib, os, signal
place, name, count = {point!r}
module, _, owner = place.rpartition(".")
try:
    holder = importlib.import_module(place)
except ModuleNotFoundError:
    holder = getattr(importlib.import_module(module), owner)
there, calls = getattr(holder, name), []
def dying(*args, **kwargs):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return there(*args, **kwargs)
setattr(holder, name, dying)
if name == "append":
    # A group for each job: how many come together otherwise is a matter of the machine's speed.
    importlib.import_module("ckptfix.zoo.committing")._MOST = 1
from ckptfix.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_killed_anywhere_and_run_again_the_tree_is_the_same(point, zoo, whole, tmp_path):
    goal = tmp_path / "new"
    killed = zoos.migrate(zoo, goal, "--jobs", 2, script=KILLED.format(point=point))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run(zoo, goal).summary.exit_code == 2
    assert _same_place(zoos.tree(goal), goal) == _same_place(zoos.tree(whole), whole)


def _same_place(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    lines = json.loads(json.dumps(tree["manifest.jsonl"]).replace(str(folder), "NEW"))
    return {**tree, "manifest.jsonl": lines}


def test_a_torn_line_and_a_lost_output_are_made_again(zoo, whole, tmp_path):
    goal = tmp_path / "new"
    run(zoo, goal)
    (goal / "old/deep/run1.pth").unlink()
    manifest = goal / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    migration = run(zoo, goal)
    assert migration.summary.files - migration.summary.earlier_files == 2
    assert _same_place(zoos.tree(goal), goal) == _same_place(zoos.tree(whole), whole)


def test_verify_finds_what_size_and_time_do_not_tell(zoo, whole, tmp_path):
    goal = tmp_path / "new"
    run(zoo, goal)
    damaged = goal / "old/deep/run1.pth"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    assert run(zoo, goal).summary.earlier_files == run(zoo, whole).summary.files
    verified = run(zoo, goal, verify=True)
    assert verified.summary.earlier_files == verified.summary.files - 1
    assert _same_place(zoos.tree(goal), goal) == _same_place(zoos.tree(whole), whole)


def test_verify_leaves_in_peace_what_cannot_be_read(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/nowhere.pth").symlink_to("gone.pth")
    (tmp_path / "old/empty.pth").touch()
    assert run(tmp_path / "old", tmp_path / "new").summary.outcomes == {Outcome.UNREADABLE: 2}
    again = run(tmp_path / "old", tmp_path / "new", verify=True).summary
    assert (again.outcomes, again.earlier_files) == ({Outcome.UNREADABLE: 2}, 2)


def test_what_could_not_be_opened_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    torch.save(zoos.weights(1), tmp_path / "old/weights")

    def refusing(self: LocalPlace, name: str, count: int) -> bytes:
        raise ForbiddenError(f"{name}: cannot be read: Permission denied; get the right to it")

    with monkeypatch.context() as closed:
        closed.setattr(LocalPlace, "head", refusing)
        first = run(tmp_path / "old", tmp_path / "new").summary
    assert (first.outcomes, first.earlier_files) == ({Outcome.UNREADABLE: 1}, 0)
    second = run(tmp_path / "old", tmp_path / "new").summary
    assert (second.outcomes, second.earlier_files) == ({Outcome.FINE: 1}, 0)


def test_other_settings_and_other_sources_are_done_again(zoo, tmp_path):
    old, goal = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    torch.save(zoos.weights(1), old / "a.pth")
    torch.save(zoos.weights(2), old / "b.pth")
    run(old, goal)
    torch.save(zoos.weights(3), old / "b.pth")
    assert run(old, goal).summary.earlier_files == 1
    assert run(old, goal, table=plain_table({"format": "safetensors"})).summary.earlier_files == 0
    assert sorted(
        path.name for path in goal.iterdir() if "." in path.name and path.suffix in (".pth", ".safetensors")
    ) == [
        "a.safetensors",
        "b.safetensors",
    ]


def test_a_dry_run_tells_all_and_leaves_nothing(zoo, whole, tmp_path):
    goal = tmp_path / "new"
    with migrate(str(zoo), str(goal), engine=zoos.Alone, dry_run=True) as migration:
        told = {line["source"]: line["outcome"] for line in migration.records()}
    assert told == zoos.outcomes(whole)
    assert list(tmp_path.iterdir()) == []


def test_others_may_be_left(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/notes.txt").write_text("n")
    run(tmp_path / "old", tmp_path / "new", others=Others.SKIP)
    assert not (tmp_path / "new/notes.txt").exists()
    assert zoos.outcomes(tmp_path / "new") == {"notes.txt": "other"}


def test_two_sources_of_one_name_need_a_decision_and_neither_wins(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("a.pth", "a.pt", "b.pth"):
        torch.save(zoos.weights(1), old / name)
    migration = run(old, tmp_path / "new", table=plain_table({"format": "safetensors"}))
    assert migration.summary.outcomes == {Outcome.DECISION: 2, Outcome.REPAIRED: 1}
    assert migration.summary.exit_code == 1
    assert sorted(path.name for path in (tmp_path / "new").glob("*.safetensors")) == ["b.safetensors"]


def test_what_cannot_be_read_is_not_cured_by_the_output_of_another_source(tmp_path):
    """Shards of two sets without an index, next to a file with their folder's name."""
    (tmp_path / "zoo/sets").mkdir(parents=True)
    for stem in ("a", "b"):
        torch.save({"w": torch.ones(3)}, tmp_path / f"zoo/sets/{stem}-00001-of-00002.pth")
        torch.save({"v": torch.ones(3)}, tmp_path / f"zoo/sets/{stem}-00002-of-00002.pth")
    torch.save({"w": torch.ones(3)}, tmp_path / "zoo/sets.pth")
    run(tmp_path / "zoo", tmp_path / "new")
    before = zoos.outcomes(tmp_path / "new")
    assert before == {"sets": "unreadable", "sets.pth": "already fine"}
    run(tmp_path / "zoo", tmp_path / "new")
    assert zoos.outcomes(tmp_path / "new") == before


def test_a_checkpoint_that_is_named_like_a_book_gets_another_name(tmp_path):
    (tmp_path / "zoo").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "zoo/manifest.jsonl")
    run(tmp_path / "zoo", tmp_path / "new")
    assert zoos.outcomes(tmp_path / "new") == {"manifest.jsonl": "already fine"}
    assert torch.load(tmp_path / "new/manifest.old.jsonl")["w"].tolist() == [1, 1, 1]


def test_the_output_that_two_copies_have_in_common_stays_when_one_of_them_changes(tmp_path):
    (tmp_path / "zoo").mkdir()
    torch.save({"module.w": torch.ones(3)}, tmp_path / "zoo/net.pth")
    raw = (tmp_path / "zoo/net.pth").read_bytes()
    (tmp_path / "zoo/net.pth").unlink()
    first, second = f"net-{hashlib.sha256(raw).hexdigest()[:8]}.pth", "net-deadbe3f.pth"
    for name in (first, second):
        (tmp_path / "zoo" / name).write_bytes(raw)
    run(tmp_path / "zoo", tmp_path / "new")
    old = {line["source"]: line["output"] for line in lines_of(tmp_path / "new")}
    assert old[first] == old[second]
    torch.save({"module.w": torch.zeros(4)}, tmp_path / "zoo" / first)
    run(tmp_path / "zoo", tmp_path / "new")
    new = {line["source"]: line["output"] for line in lines_of(tmp_path / "new")}
    assert new[second] == old[second] != new[first]
    assert all((tmp_path / "new" / output).is_file() for output in new.values())


def lines_of(goal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (goal / "manifest.jsonl").read_text().splitlines()]


def test_a_decision_about_one_file_is_kept(zoo, tmp_path):
    goal, name = tmp_path / "new", "broken/nan.pth"
    run(zoo, goal)
    table = plain_table()
    decided = run(zoo, goal, table=table, decided=plain_table({"ignore": ["VAL101"]}), listed=[name])
    assert decided.summary.outcomes == {Outcome.FINE: 1}
    again = run(zoo, goal)
    assert again.summary.earlier_files == again.summary.files
    line = next(line for line in map(json.loads, (goal / "manifest.jsonl").open()) if line["source"] == name)
    assert (line["outcome"], line["decision"]) == ("already fine", {"ignore": ["VAL101"]})


def test_a_file_that_was_put_there_by_hand_is_kept(zoo, tmp_path):
    goal, name = tmp_path / "new", "broken/evil.pth"
    run(zoo, goal)
    torch.save(zoos.weights(5), goal / name)
    mine = (goal / name).read_bytes()
    assert run(zoo, goal).summary.outcomes[Outcome.REPAIRED]
    assert (goal / name).read_bytes() == mine
    assert zoos.outcomes(goal)[name] == "repaired"


@pytest.mark.parametrize(("source", "goal"), [("zoo", "zoo"), ("zoo", "zoo/new"), ("zoo/old", "zoo")])
def test_a_destination_in_the_source_or_around_it_is_refused(source, goal, tmp_path):
    (tmp_path / "zoo/old").mkdir(parents=True)
    with pytest.raises(UsageError):
        run(tmp_path / source, tmp_path / goal)


def test_a_pattern_that_nothing_matches_is_refused_and_makes_nothing(zoo, tmp_path):
    with pytest.raises(UsageError, match=r"matches \*\*/\*\.nope"):
        run(zoo, tmp_path / "new", patterns=("**/*.nope",))
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_else_in_it_is_refused(zoo, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"mine\.txt"):
        run(zoo, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_link_in_the_destination_is_not_followed_to_a_source(tmp_path):
    old, goal = tmp_path / "old", tmp_path / "new"
    (old / "sub").mkdir(parents=True)
    torch.save(zoos.weights(1, "module."), old / "sub/a.pth")
    before = (old / "sub/a.pth").read_bytes()
    goal.mkdir()
    (goal / "manifest.jsonl").touch()
    (goal / "sub").symlink_to(old / "sub")
    assert run(old, goal).summary.outcomes == {Outcome.FAILED: 1}
    assert (old / "sub/a.pth").read_bytes() == before


def test_from_memory_to_memory(memory, zoo, whole, tmp_path):
    """Without a local folder, the books are sent to the destination, and fetched from it again."""
    old, new, back = open_place(f"{memory}/old"), open_place(f"{memory}/new"), tmp_path / "back"
    for path in sorted(zoo.rglob("*")):
        if path.is_file():
            old.put(path, path.relative_to(zoo).as_posix())
    with migrate(old.name, new.name, engine=zoos.Alone) as migration:
        assert migration.summary.earlier_files == 0
    for entry in new.walk():
        (back / entry.name).parent.mkdir(parents=True, exist_ok=True)
        new.fetch(entry.name, back / entry.name)
    mine, local = zoos.tree(back), zoos.tree(whole)
    for books in ("manifest.jsonl", "weights.jsonl"):
        del mine[books], local[books]
    assert mine == local
    with migrate(old.name, new.name, engine=zoos.Alone) as migration:
        assert migration.summary.earlier_files == migration.summary.files
    assert zoos.outcomes(back) == zoos.outcomes(whole)


@pytest.mark.slow
def test_from_s3_to_s3_in_processes(bucket, zoo, whole, tmp_path):
    _, url = bucket
    old, new, back = open_place(f"{url}/old"), open_place(f"{url}/new"), tmp_path / "back"
    for path in (*zoo.glob("fine/*.pth"), *zoo.glob("old/deep/*.pth")):
        old.put(path, path.relative_to(zoo).as_posix())
    with migrate(old.name, new.name, jobs=2) as migration:
        assert migration.summary.outcomes == {Outcome.FINE: 4, Outcome.REPAIRED: 4}
    for entry in new.walk():
        (back / entry.name).parent.mkdir(parents=True, exist_ok=True)
        new.fetch(entry.name, back / entry.name)
    written = {name: content for name, content in zoos.tree(back).items() if name.endswith(".pth")}
    assert written == {name: content for name, content in zoos.tree(whole).items() if name in written}
    assert len(written) == 8


def test_a_name_that_is_not_there_is_refused_and_makes_nothing(zoo, tmp_path):
    with pytest.raises(UsageError, match=r"has no gone\.pth"):
        run(zoo, tmp_path / "new", listed=["gone.pth"])
    assert not (tmp_path / "new").exists()


def test_an_optimizer_next_to_a_model_follows_it(tmp_path):
    """What the Hugging Face Trainer and accelerate save is one checkpoint, in each folder of a run."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    reference = tmp_path / "reference.pth"
    torch.save(model.state_dict(), reference)
    for run_folder, extra in (("fine", {}), ("one", {"extra": torch.ones(3, 3)}), ("two", {"extra": torch.ones(3, 3)})):
        folder = tmp_path / "old" / "runs" / run_folder
        folder.mkdir(parents=True)
        state_dict = {**model.state_dict(), **extra}
        optimizer = torch.optim.AdamW(torch.nn.Parameter(tensor.clone()) for tensor in state_dict.values())
        sum((tensor**2).sum() for tensor in optimizer.param_groups[0]["params"]).backward()
        optimizer.step()
        torch.save(state_dict, folder / "pytorch_model.bin")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        torch.save({"base_lrs": [1.0], "last_epoch": 3, "_step_count": 4}, folder / "scheduler.pt")
    table = plain_table({"like": str(reference), "unsafe_fixes": True})

    run(tmp_path / "old", tmp_path / "new", table=table)

    assert set(zoos.outcomes(tmp_path / "new").items()) == {
        ("runs/fine/pytorch_model.bin", "already fine"),
        ("runs/one/pytorch_model.bin", "repaired"),
        ("runs/two/pytorch_model.bin", "repaired"),
    }
    for run_folder in ("fine", "one", "two"):
        folder = tmp_path / "new" / "runs" / run_folder
        assert torch.load(folder / "optimizer.pt")["param_groups"][0]["params"] == [0, 1, 2, 3]
        assert torch.load(folder / "scheduler.pt") == {"base_lrs": [1.0], "last_epoch": 3, "_step_count": 4}
        torch.optim.AdamW(model.parameters()).load_state_dict(torch.load(folder / "optimizer.pt"))
    assert run(tmp_path / "old", tmp_path / "new", table=table, verify=True).summary.earlier_files == 3


@pytest.mark.parametrize("name", ["optimizer.pt", "lr_scheduler", "recipe_state.pt"])
def test_what_a_trainer_saves_without_weights_is_not_a_checkpoint_unless_it_is_damaged(tmp_path, name):
    for folder in ("whole", "torn", "armed"):
        (tmp_path / "old" / folder).mkdir(parents=True)
        torch.save({"last_epoch": 3, "_step_count": 4}, tmp_path / "old" / folder / name)
    whole = (tmp_path / "old" / "whole" / name).read_bytes()
    (tmp_path / "old" / "torn" / name).write_bytes(whole[: len(whole) // 2])
    torch.save(zoos.Payload(), tmp_path / "old" / "armed" / name)

    run(tmp_path / "old", tmp_path / "new")

    outcomes = {f"whole/{name}": "other", f"torn/{name}": "unreadable", f"armed/{name}": "unreadable"}
    assert zoos.outcomes(tmp_path / "new") == outcomes
    assert [path.read_bytes() for path in (tmp_path / "new").rglob(name)] == [whole]


@pytest.mark.parametrize("model", ["model.safetensors", "pytorch_model.bin", "adapter_model.safetensors"])
def test_all_that_a_trainer_saved_goes_with_its_model(tmp_path, model):
    """Also what holds no weights: the arguments and the random states. Code in any of it holds the whole back."""
    for run_folder in ("fine", "armed"):
        folder = tmp_path / "old" / run_folder
        folder.mkdir(parents=True)
        (save_file if model.endswith("safetensors") else torch.save)({"a.weight": torch.ones(2, 3)}, folder / model)
        torch.save({"python": 1}, folder / "rng_state.pth")
        torch.save(argparse.Namespace(lr=0.1), folder / "training_args.bin")
        torch.save({"last_epoch": 3, "_step_count": 4}, folder / "scheduler.pt")
    torch.save(zoos.Payload(), tmp_path / "old" / "armed" / "rng_state.pth")

    run(tmp_path / "old", tmp_path / "new")

    outcomes = {f"armed/{model}": "needs a decision", f"fine/{model}": "already fine"}
    assert zoos.outcomes(tmp_path / "new") == outcomes
    assert not (tmp_path / "new" / "armed").exists()
    for path in (tmp_path / "old" / "fine").iterdir():
        assert (tmp_path / "new" / "fine" / path.name).read_bytes() == path.read_bytes()

    run(tmp_path / "old", tmp_path / "new", table=plain_table({"disarm": True}))
    assert [path.name for path in (tmp_path / "new" / "armed").iterdir()] == [model]
    assert len(list((tmp_path / "new" / "fine").iterdir())) == 4
