import errno
import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ckptfix.errors import WriteError
from ckptfix.writing import output
from ckptfix.writing import safetensors as safetensors_write
from ckptfix.writing import torch_files as torch_write
from ckptfix.writing.atomic import temporary_beside
from ckptfix.writing.output import output_format, writer_for
from tests.reading.files import opened, saved, write


@pytest.mark.parametrize(
    ("form", "release", "writer"),
    [
        ("safetensors", None, safetensors_write.write),
        ("pth", None, torch_write.write_zip),
        ("pth", "1.6", torch_write.write_zip),
        ("pth", "1.5.1", torch_write.write_legacy),
        ("pth", "0.4", torch_write.write_legacy),
    ],
)
def test_the_container_depends_on_the_torch_release(form, release, writer):
    assert writer_for(form, release) is writer


def test_the_format_is_that_of_the_source_unless_asked(tmp_path):
    checkpoint = opened(saved({"w": torch.ones(1)}, tmp_path))
    assert output_format(checkpoint, None) == "pth"
    assert output_format(checkpoint, "safetensors") == "safetensors"
    assert output_format(opened(write(checkpoint, "safetensors", tmp_path)), None) == "safetensors"


def test_a_read_only_source_does_not_prevent_writing(tmp_path, monkeypatch):
    like = tmp_path / "like"
    like.touch()
    like.chmod(0o440)
    real, modes = os.open, []

    def noted(path, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            modes.append(stat.S_IMODE(Path(path).stat().st_mode))
        return real(path, flags, *mode)

    with temporary_beside(tmp_path / "out.pth", like) as temporary:
        monkeypatch.setattr("os.open", noted)
        output.write_to(temporary, opened(saved({"w": torch.ones(1)}, tmp_path)), torch_write.write_zip, temporary)
        assert modes == [0o640]  # the superuser, as whom tests may run, is never refused
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o440


@pytest.mark.parametrize("is_full", [False, True])
def test_flushing_runs_while_the_file_is_read_back(is_full, tmp_path, monkeypatch):
    takes_up, done = threading.Event(), []

    def flush(path: Path) -> None:
        assert takes_up.wait(60)
        done.append(path)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "flush_file", flush)
    source = opened(saved({"w": torch.ones(100_000)}, tmp_path))
    written = output.write_to(tmp_path / "new", source, torch_write.write_zip, tmp_path / "out")
    with output.flushing([written], tmp_path / "out", is_wanted=False):
        pass
    refused = pytest.raises(WriteError, match="out: cannot be written: No space left on device; nothing was left over")
    with refused if is_full else nullcontext(), output.flushing([written], tmp_path / "out"):
        assert not done
        takes_up.set()
    assert done == [tmp_path / "new"]
