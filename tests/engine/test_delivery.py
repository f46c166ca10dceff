"""Whatever goes wrong during the write, the source is unchanged and no partial file is left."""

import errno
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.engine import verification
from ckptfix.errors import CkptfixError, UnreadableError, UsageError, WriteError
from ckptfix.writing import output
from tests.reading.state_dicts import same

ROOT = Path(__file__).resolve().parents[2]
WRAPPED = {"module.fc.weight": torch.arange(6.0).reshape(2, 3), "module.fc.bias": torch.zeros(2)}
BARE = {key.removeprefix("module."): tensor for key, tensor in WRAPPED.items()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file with a wrapper prefix, which every repair removes."""
    folder = tmp_path / "here"
    folder.mkdir()
    path = folder / "model.pth"
    torch.save(WRAPPED, path)
    return path


def test_the_source_is_not_touched_by_a_repair_next_to_it(source):
    before, changed = digest(source), source.stat().st_mtime_ns
    report = ckptfix.repair(source, beside=True).report
    assert report.output == str(source.with_name("model.fixed.pth"))
    assert (digest(source), source.stat().st_mtime_ns) == (before, changed)
    assert names(source.parent) == ["model.fixed.pth", "model.pth"]
    same(dict(torch.load(report.output, weights_only=True)), BARE)


def test_nothing_is_written_without_an_output(source):
    ckptfix.repair(source)
    ckptfix.repair(source, beside=True, dry_run=True)
    assert names(source.parent) == ["model.pth"]


def test_in_place_replaces_the_file(source):
    ckptfix.repair(source, in_place=True)
    assert names(source.parent) == ["model.pth"]
    same(dict(torch.load(source, weights_only=True)), BARE)


def test_a_backup_keeps_the_old_file(source):
    before = digest(source)
    ckptfix.repair(source, in_place=True, backup=True)
    assert names(source.parent) == ["model.pth", "model.pth.bak"]
    assert digest(source.with_name("model.pth.bak")) == before


def test_an_existing_backup_is_not_overwritten(source):
    before, kept = digest(source), source.with_name("model.pth.bak")
    kept.write_bytes(b"mine")
    with pytest.raises(WriteError, match="a backup already exists"):
        ckptfix.repair(source, in_place=True, backup=True)
    assert (digest(source), kept.read_bytes(), names(source.parent)) == (
        before,
        b"mine",
        ["model.pth", "model.pth.bak"],
    )


def test_a_link_keeps_pointing_at_the_file_that_is_replaced(source, tmp_path):
    link = tmp_path / "link.pth"
    link.symlink_to(source)
    ckptfix.repair(link, in_place=True)
    assert link.is_symlink()
    assert not source.is_symlink()
    same(dict(torch.load(source, weights_only=True)), BARE)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
@pytest.mark.parametrize("how", [{"beside": True}, {"in_place": True}], ids=["beside", "in place"])
def test_the_permissions_are_those_of_the_source(how, mode, source):
    source.chmod(mode)
    written = ckptfix.repair(source, **how).report.output
    assert written is not None
    assert stat.S_IMODE(Path(written).stat().st_mode) == mode


@pytest.mark.parametrize("alias", ["the path", "a link", "a hard link", "a way round"])
def test_the_source_is_refused_as_output(alias, source, tmp_path):
    goal = tmp_path / "alias.pth"
    if alias == "a link":
        goal.symlink_to(source)
    elif alias == "a hard link":
        goal.hardlink_to(source)
    else:
        goal = source if alias == "the path" else source.parent / ".." / "here" / "model.pth"
    before = digest(source)
    with pytest.raises(UsageError, match="is the source itself"):
        ckptfix.repair(source, output=goal)
    assert digest(source) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "{folder}", "format": "pth"}, "is a folder"),
        ({"output": "{folder}/a.pth", "in_place": True}, "exclude each other"),
        ({"beside": True, "backup": True}, "backup= needs in_place=; otherwise"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message, source):
    given: dict[str, Any] = {
        name: value.format(folder=source.parent) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    with pytest.raises(UsageError, match=message):
        ckptfix.repair(source, **given)
    assert names(source.parent) == ["model.pth"]


def test_a_missing_folder_is_named(source):
    with pytest.raises(WriteError, match=r"the folder .*nowhere does not exist"):
        ckptfix.repair(source, output=source.parent / "nowhere" / "out.pth")


def test_a_read_only_folder_is_named(source, monkeypatch):
    # Root may write anywhere, so the test simulates the refusal.
    real = os.open

    def refuse(path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(WriteError, match="Permission denied; choose another place"):
        ckptfix.repair(source, beside=True)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(UnreadableError, match=r"gone\.pth: cannot be opened: No such file"):
        ckptfix.repair(tmp_path / "gone.pth", beside=True)


def test_a_source_deleted_during_the_repair_is_still_written(source, tmp_path):
    state_dict = ckptfix.repair(source, output=tmp_path / "out.pth").checkpoint
    source.unlink()
    same(dict(state_dict.state_dict()), BARE)


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("after", [0, 8, 150])
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(after, name, source, tmp_path, monkeypatch):
    before, real, room = digest(source), os.write, after

    def fill(descriptor: int, block: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= (count := real(descriptor, block[:room]))
        return count

    monkeypatch.setattr("os.write", fill)
    goal = tmp_path / name
    with pytest.raises(WriteError, match="No space left on device") as caught:
        ckptfix.repair(source, output=goal)
    assert str(goal) in str(caught.value)
    assert (digest(source), names(tmp_path)) == (before, ["here"])


def test_a_failed_flush_after_the_rename_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "model.pth"
    torch.save({"module.w": torch.ones(3)}, path)
    flush = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        flush(descriptor)

    monkeypatch.setattr("os.fsync", refuse_folders)
    with pytest.raises(WriteError, match="is written and in place, but the disk does not confirm its name"):
        ckptfix.repair(path, in_place=True)
    assert list(torch.load(path)) == ["w"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.pth"]


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_disk_that_is_full_only_later_ends_in_one_line_and_leaves_nothing(step, name, source, tmp_path, monkeypatch):
    """Data copied by the kernel has no blocks yet: the disk may be full when the file is flushed."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        for call in ("copy_file_range", "write"):
            monkeypatch.setattr(f"os.{call}", refuse)
        monkeypatch.setattr("ckptfix.bytes.copying.SMALL", 0)
    else:
        monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(WriteError, match="cannot be written: No space left on device; nothing was left over"):
        ckptfix.repair(source, output=tmp_path / name)
    assert names(tmp_path) == ["here"]


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
def test_a_source_that_is_cut_meanwhile_ends_in_one_line_and_leaves_nothing(name, source, tmp_path, monkeypatch):
    large = source.with_name("large.pth")
    torch.save({"module.w": torch.randn(1 << 18)}, large)
    real = output.writer_for

    def cutting(form: str, for_torch: str | None):
        def write(checkpoint, file):
            os.truncate(large, 1 << 17)
            real(form, for_torch)(checkpoint, file)

        return write

    monkeypatch.setattr("ckptfix.engine.delivery.writer_for", cutting)
    with pytest.raises(UnreadableError, match=r"large\.pth: the file ends inside a storage"):
        ckptfix.repair(large, output=tmp_path / name, values=False)
    assert names(tmp_path) == ["here"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_writing_ends_in_one_line_and_leaves_nothing(number, source, tmp_path):
    script = (
        "import os, sys\n"
        "from ckptfix.cli import main\n"
        "from ckptfix.writing import output\n"
        "def hang(checkpoint, file):\n"
        f"    file.write(b'half'); file.flush(); os.kill(os.getpid(), {int(number)}); raise AssertionError\n"
        "output.torch_write.write_zip = hang\n"
        f"sys.argv = ['ckptfix', 'repair', {str(source)!r}, '-o', {str(tmp_path / 'out.pth')!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no unfinished file is left" in done.stderr
    assert names(tmp_path) == ["here"]


def test_a_file_size_limit_ends_in_one_line_and_leaves_nothing(source, tmp_path):
    large = source.with_name("large.pth")
    torch.save({"module.w": torch.zeros(1 << 20)}, large)
    script = (
        "import resource, ckptfix\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"try: ckptfix.repair({str(large)!r}, output={str(tmp_path / 'out.pth')!r})\n"
        "except ckptfix.CkptfixError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "out.pth: cannot be written: File too large" in done.stdout
    assert done.stderr == ""
    assert names(tmp_path) == ["here"]


@pytest.mark.parametrize("step", ["write_to", "verify", "deliver_file"])
def test_an_interrupt_leaves_nothing(step, source, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = digest(source)
    monkeypatch.setattr(f"ckptfix.engine.delivery.{step}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ckptfix.repair(source, beside=True)
    assert (digest(source), names(source.parent)) == (before, ["model.pth"])


@pytest.mark.parametrize("change", ["renamed over", "written to", "removed"])
@pytest.mark.parametrize("backup", [False, True])
def test_a_source_changed_during_the_repair_is_not_replaced(change, backup, source, monkeypatch):
    newer, real = source.with_name("newer"), verification.verify
    newer.write_bytes(source.read_bytes() + b"newer")

    def verify(*given) -> None:
        real(*given)
        if change == "renamed over":
            newer.replace(source)
        elif change == "written to":
            source.write_bytes(newer.read_bytes())
        else:
            source.unlink()

    monkeypatch.setattr("ckptfix.engine.delivery.verify", verify)
    with pytest.raises(WriteError, match=r"model\.pth: was replaced or deleted since it was read; run"):
        ckptfix.repair(source, in_place=True, backup=backup)
    newer.unlink(missing_ok=True)
    assert names(source.parent) == ([] if change == "removed" else ["model.pth"])
    assert change == "removed" or source.read_bytes().endswith(b"newer")


def test_an_output_created_during_the_repair_is_not_replaced(source, monkeypatch):
    """The file is from another run, whose user does not know about this one."""
    real, output = verification.verify, source.with_name("out.pth")

    def meanwhile(*given) -> None:
        real(*given)
        output.write_bytes(b"the other's")

    monkeypatch.setattr("ckptfix.engine.delivery.verify", meanwhile)
    with pytest.raises(UsageError, match="already exists"):
        ckptfix.repair(source, output=output)
    assert output.read_bytes() == b"the other's"
    ckptfix.repair(source, output=output, force=True)
    assert output.read_bytes() != b"the other's"


def test_a_wrong_byte_in_the_copy_is_not_delivered(source, monkeypatch):
    real, weight, found = os.write, torch.arange(6.0).numpy().tobytes(), []

    def damage(descriptor: int, block: memoryview) -> int:
        start, count = os.lseek(descriptor, 0, os.SEEK_CUR), real(descriptor, block)
        place = bytes(block).find(weight)
        if place >= 0:
            found.append(os.pwrite(descriptor, bytes([block[place + 2] ^ 1]), start + place + 2))
        return count

    monkeypatch.setattr("os.write", damage)
    with pytest.raises(WriteError, match=r"differs from the plan: the bytes of fc\.weight"):
        ckptfix.repair(source, beside=True)
    assert found
    assert names(source.parent) == ["model.pth"]


@pytest.mark.parametrize(
    ("call", "name"), [("copy_file_range", "out.pth"), ("write", "out.pth"), ("write", "out.safetensors")]
)
def test_a_wrong_byte_in_the_copy_of_a_large_tensor_is_found(call, name, source, tmp_path, monkeypatch):
    torch.save({"module.w": torch.randn(1 << 18), "module.b": torch.randn(1 << 18)}, source)
    real, turns = getattr(os, call), [3]

    def damage(first: int, second: Any, *rest: int) -> int:
        moved: int = real(first, second, *rest)
        goal = second if rest else first
        turns[0] -= 1
        if not turns[0]:
            place = os.lseek(goal, 0, os.SEEK_CUR) - 5
            os.pwrite(goal, bytes([os.pread(goal, 1, place)[0] ^ 1]), place)
        return moved

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if call == "write":
        monkeypatch.setattr("os.copy_file_range", refuse)
    monkeypatch.setattr(f"os.{call}", damage)
    with pytest.raises(WriteError, match=r"differs from the plan: the bytes of (w|b);"):
        ckptfix.repair(source, output=tmp_path / name, values=False)
    assert turns[0] <= 0
    assert names(tmp_path) == ["here"]


def test_an_old_output_is_kept_until_the_new_one_is_complete(source, tmp_path, monkeypatch):
    goal = tmp_path / "out.pth"
    goal.write_bytes(b"old")
    monkeypatch.setattr(verification, "_difference", lambda written, expected: "a test")
    with pytest.raises(WriteError):
        ckptfix.repair(source, output=goal, force=True)
    assert goal.read_bytes() == b"old"
    monkeypatch.undo()
    with pytest.raises(UsageError, match="already exists; replace it with force=True"):
        ckptfix.repair(source, output=goal)
    assert goal.read_bytes() == b"old"
    ckptfix.repair(source, output=goal, force=True)
    same(dict(torch.load(goal, weights_only=True)), BARE)


def test_the_longest_name_that_the_file_system_takes_is_written(source, tmp_path):
    goal = tmp_path / ("x" * 251 + ".pth")
    assert ckptfix.repair(source, output=goal).report.output == str(goal)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        pytest.param("x" * 248 + ".pth", {"in_place": True, "backup": True}, "has 256 bytes", id="the backup"),
        pytest.param("a.pth", {"output": "x" * 240 + ".pth", "shard_size": "1GB"}, "bytes, and this", id="shards"),
        pytest.param("a.pth", {"output": "-"}, "cannot go to stdout", id="stdout"),
        pytest.param("a.pth", {"output": os.devnull}, "is a device", id="a device"),
        pytest.param("a.pth", {"output": os.devnull, "force": True}, "is a device", id="a device by force"),
        pytest.param("a.pth", {"output": "null"}, "null: is a device", id="a link to a device"),
        pytest.param("a.pth", {"output": "a.pth.txt"}, "already exists", id="another file"),
        pytest.param("a.pth", {"beside": True}, r"a\.fixed\.pth: already exists", id="an older result"),
    ],
)
def test_an_unusable_output_is_reported_before_any_work(name, how: dict[str, Any], said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(WRAPPED, name)
    Path("null").symlink_to(os.devnull)
    for other in ("a.pth.txt", "a.fixed.pth", "a.pth.bak"):
        Path(other).write_text("other")
    monkeypatch.setattr("ckptfix.repairing.diagnose", lambda *_: pytest.fail("the work has begun"))
    with pytest.raises(CkptfixError, match=said):
        ckptfix.repair(name, **how)
    assert not Path(os.devnull).is_file()


def test_an_older_backup_is_kept(source):
    before, backup = source.read_bytes(), source.with_name("model.pth.bak")
    backup.write_text("other")
    with pytest.raises(CkptfixError, match="a backup already exists"):
        ckptfix.repair(source, in_place=True, backup=True)
    assert (source.read_bytes(), backup.read_text()) == (before, "other")


def test_a_dry_run_ignores_existing_outputs(source):
    source.with_name("model.fixed.pth").write_text("other")
    assert ckptfix.repair(source, beside=True, dry_run=True).is_changed


def test_a_link_as_output_keeps_pointing_at_its_file(source, tmp_path):
    goal, link = tmp_path / "real.pth", tmp_path / "link.pth"
    link.symlink_to(goal)
    ckptfix.repair(source, output=link)
    assert link.is_symlink()
    same(dict(torch.load(goal, weights_only=True)), BARE)


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_the_old_state_or_the_whole_new_file(tmp_path):
    source, goal = tmp_path / "source.pth", tmp_path / "out.pth"
    tensors = {f"module.{index}.weight": torch.randn(1 << 20) for index in range(12)}
    torch.save(tensors, source)
    before = digest(source)
    script = (
        "import os, sys, ckptfix.engine.delivery\n"
        "deliver = ckptfix.engine.delivery.deliver_file\n"
        "def killed(*_): os.kill(os.getpid(), 9)\n"
        "ckptfix.engine.delivery.deliver_file = killed if sys.argv[1] == 'before' else deliver\n"
        f"print('go', flush=True); ckptfix.repair({str(source)!r}, output={str(goal)!r}, values=False)"
    )
    rng, absent, whole = random.Random(7), 0, 0
    # One is killed before its last step, one runs to the end, and the others are killed at any point.
    for moment, delay in [("before", None), ("never", None), *(("any", rng.uniform(0.0, 0.5)) for _ in range(6))]:
        goal.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, "-c", script, moment], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            child.wait(delay)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert digest(source) == before
        if goal.exists():
            loaded = torch.load(goal, weights_only=True)
            same(dict(loaded), {key.removeprefix("module."): tensor for key, tensor in tensors.items()})
            whole += 1
        else:
            absent += 1
        for left in tmp_path.glob(".out.pth.*.ckptfix-tmp"):
            left.unlink()
    assert absent
    assert whole


@pytest.mark.parametrize("role", ["like", "fill", "adapt", "adapter"])
def test_a_file_that_is_only_read_is_never_the_output(tmp_path, role):
    """Not even with ``force``, whichever option names it."""
    for name in ("model.pth", "other.pth"):
        torch.save({"module.weight": torch.ones(2)}, tmp_path / name)
    before = (tmp_path / "other.pth").read_bytes()
    text = f"{'head=' if role == 'adapt' else ''}{tmp_path / 'other.pth'}"
    settings = {"like": tmp_path / ("other.pth" if role in ("like", "fill") else "model.pth"), role: text}
    with pytest.raises(ckptfix.UsageError, match=rf"is the file of ({role}|like)="):
        ckptfix.repair(tmp_path / "model.pth", output=tmp_path / "other.pth", force=True, **settings)
    assert (tmp_path / "other.pth").read_bytes() == before
