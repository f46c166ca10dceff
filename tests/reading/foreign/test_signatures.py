"""Archives are named by their content, and possible checkpoints in them are left to the user."""

from pathlib import Path

import pytest

import ckptfix
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.reading.foreign.signatures import BUNDLES, PARTS, name_bundle
from tests.reading.archives.test_wrapped import saved, tarred, zipped


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([], id="nothing"),
        pytest.param(["model.pth", "README.md"], id="a checkpoint"),
        pytest.param(["my_saved_model.pb"], id="the end of another name"),
        pytest.param(["saved_model.pb/notes"], id="a folder of the name"),
        pytest.param(["a.npy", "b.txt"], id="arrays and more"),
        pytest.param([".metadata"], id="one file of two"),
    ],
)
def test_noop_not_a_bundle(names: list[str]) -> None:
    assert name_bundle(names, BUNDLES) is None
    assert name_bundle(names, PARTS) is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["w.npy", "layer/b.npy"], "NumPy arrays"),
        (["metadata.json", "config.json", "model.weights.h5"], "a Keras model; load it with Keras"),
        (["export/saved_model.pb", "export/variables/variables.index"], "a SavedModel of TensorFlow"),
        (["p/__init__.py", "p-1.dist-info/WHEEL"], "a Python package"),
        (["AndroidManifest.xml", "classes.dex", "META-INF/MANIFEST.MF"], "an Android app"),
        (["[Content_Types].xml", "word/document.xml"], "an Office document"),
        (["repo-main/README.md", "repo-main/train.py"], "source code; name the file that holds the weights"),
    ],
)
def test_an_archive_of_something_else_is_named(tmp_path: Path, names: list[str], said: str) -> None:
    path = tmp_path / "archive"
    for packed in (zipped(dict.fromkeys(names, b"text\n")), tarred(dict.fromkeys(names, b"text\n"))):
        path.write_bytes(packed)
        with pytest.raises(CkptfixError, match=f"an archive without a PyTorch checkpoint: {said}"):
            ckptfix.open_checkpoint(path)


PICKLE = b"\x80\x02}q\0."


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"ckpt/.metadata": PICKLE, "ckpt/__0_0.distcp": saved()}, "torch.distributed.checkpoint; unpack it and name"),
        ({"net/data.pkl": PICKLE, "net/data/0": bytes(8), "net/version": b"3\n"}, "folder that has data.pkl"),
        ({"m/archive_format": b"pt2", "m/models/model.json": b"{}", "m/data/sample_inputs/m.pt": saved()}, "torch.exp"),
        ({"m/archive_format": b"pt2", "m/data/aotinductor/m/a.so": b"\x7fELF", "m/data/w.pt": saved()}, "AOTInductor"),
        (
            {"mp_rank_00_model_states.pt": saved(), "zero_pp_rank_0_mp_rank_00_optim_states.pt": saved()},
            "DeepSpeed.*name the folder",
        ),
    ],
)
def test_an_archive_of_a_folder_of_torch_is_not_to_be_picked_from(
    tmp_path: Path, members: dict[str, bytes], said: str
) -> None:
    path = tmp_path / "archive.tar"
    path.write_bytes(tarred(members))
    with pytest.raises(CkptfixError, match=f"an archive that holds .*{said}"):
        ckptfix.open_checkpoint(path)
    path.write_bytes(tarred({**members, "model.pth": saved()}))
    with pytest.raises(UsageError, match=r"pick one: .*member='model\.pth'"):
        ckptfix.open_checkpoint(path)
    assert len(ckptfix.open_checkpoint(path, member="model.pth").specs) == 2


def test_an_archive_of_ranks_is_to_be_unpacked(tmp_path: Path) -> None:
    members = {f"./mp_rank_{rank:02d}/model_weights.ckpt": saved() for rank in (0, 1)}
    (tmp_path / "model.nemo").write_bytes(tarred(members))
    with pytest.raises(UsageError, match=r"unpack it and name the folder; it holds \./mp_rank_00"):
        ckptfix.open_checkpoint(tmp_path / "model.nemo")


def test_an_archive_of_shards_is_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "archive.tar"
    path.write_bytes(tarred({f"model-0000{number}-of-00002.bin": saved() for number in (1, 2)}))
    with pytest.raises(UsageError, match="unpack it and name the folder"):
        ckptfix.open_checkpoint(path)
