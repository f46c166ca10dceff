import pickle

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Level
from ckptfix.errors import HostileError, UnreadableError, WriteError
from ckptfix.reading.opening import open_file
from tests.attacks.crafted import STORAGE, legacy, name, number, sizes, state_dict, storage, tensor, text
from tests.reading.files import opened, saved
from tests.reading.state_dicts import same

WEIGHTS = {"w": torch.arange(16.0), "b": torch.zeros(3), "h": torch.ones(5, dtype=torch.bfloat16)}


def old(value, folder):
    return saved(value, folder, _use_new_zipfile_serialization=False)


def test_storages_are_in_the_order_of_the_list_of_keys(tmp_path):
    checkpoint = opened(old(WEIGHTS, tmp_path))
    assert checkpoint.format == "torch-legacy"
    same(dict(checkpoint.state_dict()), WEIGHTS)


def test_a_plain_pickle_is_named(tmp_path):
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(WEIGHTS))
    checkpoint = opened(path)
    assert checkpoint.format == "pickle"
    assert Kind.PLAIN_PICKLE in {remark.kind for remark in checkpoint.remarks}


@pytest.mark.parametrize("end", [1, 10, 0.3, 0.6, 0.9, -1])
def test_a_file_cut_anywhere_is_refused(end, tmp_path):
    path = old(WEIGHTS, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * end) if isinstance(end, float) else end])
    with pytest.raises(UnreadableError, match=str(path)):
        opened(path)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_zeros_that_begin_in_the_pickles_are_named(share, tmp_path):
    path = old({f"layers.{index}.weight": torch.ones(1) for index in range(40)}, tmp_path)
    content = path.read_bytes()
    filled = int(len(content) * share)
    path.write_bytes(content[:filled] + bytes(len(content) - filled))
    with pytest.raises(UnreadableError, match=r"is zeros from byte \d+ of \d+ on.*starting in its object"):
        opened(path)


def test_a_damaged_pickle_is_not_an_unfilled_one_where_the_file_ends_in_zeros(tmp_path):
    path = old({"w": torch.zeros(64)}, tmp_path)
    path.write_bytes(
        path.read_bytes().replace(
            b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M", b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02\xff"
        )
    )
    with pytest.raises(UnreadableError, match="is not a pickle opcode"):
        opened(path)


def test_a_view_of_a_storage_counts_from_its_own_beginning(tmp_path):
    """torch 0.1 to 0.3 wrote tensors of one buffer as views (key, offset, size) of its storage."""
    view = b"(" + text("view") + number(4) + number(8) + b"t"
    pid = b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + number(16) + view + b"tQ"
    path = tmp_path / "views.pth"
    path.write_bytes(
        legacy(state_dict(v=tensor(sizes(8), sizes(1), base=pid), u=tensor(sizes(7), sizes(1), 1, base=pid)))
    )
    checkpoint = opened(path)
    assert bytes(checkpoint.read("v").numpy()) == STORAGE[16:48]
    assert bytes(checkpoint.read("u").numpy()) == STORAGE[20:48]


def test_the_source_of_a_module_is_passed_over(tmp_path):
    """torch ≤ 1.5 kept the source text of every module's class in a persistent id."""
    pid = b"(" + text("module") + name("models.Net") + text("models.py") + text("class Net: ...") + b"tQ"
    path = tmp_path / "module.pth"
    path.write_bytes(legacy(state_dict(x=pid)))
    assert str(opened(path).entries["x"]) == "models.Net"


def test_a_storage_declared_twice_with_two_sizes_is_refused(tmp_path):
    path = tmp_path / "twice.pth"
    path.write_bytes(legacy(state_dict(x=tensor(base=storage(17)))))
    with pytest.raises(HostileError, match="declared with two sizes"):
        opened(path)


LAYERS = {f"layer.{index}.weight": torch.randn(13, 17) for index in range(6)}


@pytest.mark.parametrize("count", [1, 8, 512])
@pytest.mark.parametrize("kind", ["lost", "doubled"])
def test_lost_or_repeated_bytes_lose_their_storage_and_later_ones(kind, count, tmp_path):
    path = old(LAYERS, tmp_path)
    content = path.read_bytes()
    order = sorted(LAYERS, key=lambda key: content.index(LAYERS[key].numpy().tobytes()))  # that of their addresses
    place = content.index(LAYERS[order[2]].numpy().tobytes()) + 200
    path.write_bytes(content[:place] + content[place + count if kind == "lost" else place - count :])
    with pytest.raises(UnreadableError, match="is damaged before byte"):
        opened(path)
    checkpoint = open_file(str(path), salvage=True)
    assert set(checkpoint.lost) == set(order[2:])
    for key in checkpoint.specs:
        assert checkpoint.read(key).numpy().tobytes() == LAYERS[key].numpy().tobytes()


def test_bytes_after_the_last_storage_make_it_doubtful(tmp_path):
    path = old({"w": torch.randn(64)}, tmp_path)
    path.write_bytes(path.read_bytes() + b"\n")
    (note,) = ckptfix.check(path, select=("FIL203",)).findings
    assert (note.level, note.keys) == (Level.NOTE, ("w",))
    path.write_bytes(path.read_bytes()[:-1] + bytes(8))
    (note,) = ckptfix.check(path, select=("FIL203",)).findings
    assert (note.level, note.keys) == (Level.NOTE, ())


def test_views_in_a_storage_that_is_cut_are_doubtful(tmp_path):
    flat = torch.randn(400)
    path = old({"a": flat[:100], "b": flat[100:]}, tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    report = ckptfix.check(path, salvage=True, values=False, select=("FIL203",))
    (doubt,) = [finding for finding in report.findings if "may differ from what was saved" in finding.message]
    assert doubt.keys == ("a",)


@pytest.mark.filterwarnings("ignore")
def test_views_of_a_whole_model_are_doubtful_too(tmp_path):
    model = torch.nn.Module()
    flat = torch.randn(400)
    model.a, model.b = torch.nn.Parameter(flat[:100]), torch.nn.Parameter(flat[100:])
    path = old(model, tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    report = ckptfix.check(path, salvage=True, values=False, select=("FIL203",))
    assert ("a",) in [
        finding.keys for finding in report.findings if "may differ from what was saved" in finding.message
    ]


def test_a_storage_class_that_torch_does_not_know_is_reported(tmp_path):
    path = old(WEIGHTS, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"ctorch\nFloatStorage", b"ctorkh\nFloatStorage"))
    assert "torkh.FloatStorage" in ckptfix.check(path, select=("FIL102",)).findings[0].message


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.arange(12.0).reshape(4, 3).t(), id="transposed"),
        pytest.param(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.arange(12.0).reshape(4, 3)[:, ::2], id="every other column"),
        pytest.param(torch.ones(1).expand(4, 3), id="expanded"),
        pytest.param(torch.arange(9.0).unfold(0, 3, 1), id="windows"),
        pytest.param(torch.arange(3.0).expand(4, 3), id="a row for all"),
        pytest.param(torch.ones(4, 1, 3).transpose(0, 1), id="a dimension of one"),
    ],
)
def test_noop_strides_that_writers_produce(value, tmp_path):
    checkpoint = opened(old({"w": value}, tmp_path))
    assert (checkpoint.damage, checkpoint.remarks) == ((), ())
    same(dict(checkpoint.state_dict()), {"w": value})


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bit", range(4))
def test_a_flipped_bit_in_a_stride_is_reported(bit, place, tmp_path):
    path = old({"w": torch.randn(4, 3, 5), "other": torch.zeros(3)}, tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"K\x0fK\x05K\x01\x87") + 1 + 2 * place] ^= 1 << bit
    path.write_bytes(data)
    stride = (15, 5, 1)[place]
    if stride ^ 1 << bit > stride:  # past the end of the storage
        with pytest.raises(HostileError):
            opened(path)
    else:
        (finding,) = ckptfix.check(path, select=("FIL203",)).findings
        assert (finding.level, finding.keys) == (Level.WARNING, ("w",))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
@pytest.mark.parametrize("beside", [{}, {"m": torch.empty(3, device="meta")}], ids=["", "beside the meta device"])
def test_dtypes_that_torch_cannot_load_from_the_legacy_format_are_reported(dtype, beside, tmp_path):
    values = {"w": torch.ones(4), "h": torch.ones(8).to(dtype)}
    path = old({**values, **beside}, tmp_path)
    with pytest.raises(AttributeError):
        torch.load(path)
    found = {finding.code: finding.level for finding in ckptfix.check(path).findings}
    assert found == {"FIL102": Level.WARNING, **({"FIL105": Level.ERROR} if beside else {})}
    if beside:
        with pytest.raises(WriteError, match="a tensor on the meta device has no values to write"):
            ckptfix.repair(path, output=tmp_path / "out.pth")
        return
    ckptfix.repair(path, output=tmp_path / "out.pth")
    same(dict(torch.load(tmp_path / "out.pth")), values)
    assert ckptfix.check(tmp_path / "out.pth").exit_code == 0


def test_the_same_dtypes_are_sound_in_a_zip(tmp_path):
    path = saved({"h": torch.ones(8).to(torch.float8_e4m3fn), "m": torch.empty(3, device="meta")}, tmp_path)
    torch.load(path)
    (finding,) = ckptfix.check(path).findings
    assert finding.keys == ("m",), "it has no values"


@pytest.mark.parametrize("trained", [number(2), text("yes"), b"N"], ids=["two", "text", "None"])
def test_a_tensor_that_torch_refuses_for_its_requires_grad_is_malformed(trained, tmp_path):
    (tmp_path / "f.pth").write_bytes(legacy(state_dict(odd=tensor(hooks=trained + b"}"))))
    with pytest.raises(UnreadableError, match="requires_grad"):
        open_file(str(tmp_path / "f.pth"))
