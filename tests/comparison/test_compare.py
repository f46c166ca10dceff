"""Two files, and all differences between them."""

import copy
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.comparison.compare import find_renames
from ckptfix.comparison.difference import difference_lines, difference_to_json
from ckptfix.reading.opening import open_state_dict
from ckptfix.report.style import TextFormat


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


def saved(folder: Path, name: str, content: Any, **options: Any) -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path, **options)
    return path


def screen(difference: ckptfix.Difference, verbose: bool = False) -> str:
    return TextFormat().write(difference_lines(difference, verbose))


@pytest.mark.parametrize(
    ("name", "options"),
    [("other.pth", {}), ("legacy.pth", {"_use_new_zipfile_serialization": False})],
)
def test_noop_another_container(tmp_path: Path, name: str, options: dict[str, Any]):
    content = {"epoch": 3, "nan": float("nan"), "state_dict": model().state_dict()}
    difference = ckptfix.diff(saved(tmp_path, "a.pth", content), saved(tmp_path, name, content, **options))
    assert difference.is_empty
    assert difference.exit_code == 0
    assert difference.equal == 9
    assert screen(difference).endswith("equal bit for bit: 9 tensors\nno difference\n")


def test_noop_every_file_of_the_corpus_and_itself(corpus: Path):
    for path in sorted(corpus.rglob("*.pth"))[:60]:
        try:
            ckptfix.open_checkpoint(path)
        except ckptfix.CkptfixError:
            continue
        difference = ckptfix.diff(path, path)
        assert difference.is_empty, path


def test_safetensors_has_no_metadata_and_no_extras(tmp_path: Path):
    weights = model().state_dict()
    a = saved(tmp_path, "a.pth", {"epoch": 3, "optimizer": {"lr": 0.1, "state": {}}, "state_dict": weights})
    difference = ckptfix.diff(a, saved(tmp_path, "b.safetensors", dict(weights)))
    assert difference.equal == 9
    assert difference.exit_code == 1
    assert dict(difference.extras) == {"epoch": ("3", None), "optimizer": ("dict of 2", None)}
    assert dict(difference.metadata) == {"_metadata": ("6 rows", None)}


def test_renamed_keys_take_their_metadata_along(tmp_path: Path):
    net = model()
    a = saved(tmp_path, "a.pth", nn.DataParallel(net).state_dict())
    difference = ckptfix.diff(a, saved(tmp_path, "b.pth", net.state_dict()))
    assert dict(difference.metadata) == {}
    assert not difference.only_a
    assert not difference.only_b
    assert "  rename 9 keys: module.{…} → {…}\n" in screen(difference)
    assert "equal bit for bit: 9 tensors, 9 of them renamed\n" in screen(difference)


def test_every_kind_of_difference_is_reported(tmp_path: Path):
    before = model().state_dict()
    after = copy.deepcopy(before)
    after["4.weight"][0, 0] += 1.0
    after["0.bias"] = after["0.bias"].half()
    after["1.weight"] = torch.ones(7)
    after["new"] = torch.ones(3)
    after["1.bias"] = after["1.running_mean"]
    after._metadata["1"]["version"] = 1  # type: ignore[attr-defined] # torch hangs it on its OrderedDict
    del after["4.bias"]
    before["extra_state"] = {"rule": 1}
    after["extra_state"] = {"rule": 2}
    a = saved(tmp_path, "a.pth", {"args": {"lr": 0.1}, "state_dict": before})
    b = saved(tmp_path, "b.pth", {"args": {"lr": 0.2}, "state_dict": after})
    difference = ckptfix.diff(a, b)
    told = difference_to_json(difference)
    assert list(told["only_a"]) == ["4.bias"]
    assert list(told["only_b"]) == ["new"]
    assert list(told["shapes"]) == ["1.weight"]
    assert list(told["dtypes"]) == ["0.bias"]
    assert list(told["values"]) == ["0.bias", "4.weight"] or list(told["values"]) == ["0.bias", "1.bias", "4.weight"]
    assert told["values"]["4.weight"]["differing"] == 1
    assert told["values"]["4.weight"]["first"] == 0
    assert told["ties_b"] == [["1.bias", "1.running_mean"]]
    assert told["ties_a"] == []
    assert told["metadata"] == {"1": {"a": "version 2", "b": "version 1"}}
    assert told["extras"] == {"args.lr": {"a": "0.1", "b": "0.2"}}
    assert told["entries"] == {"extra_state.rule": {"a": "1", "b": "2"}}
    words = (
        "only in A",
        "only in B",
        "different shape",
        "different dtype",
        "different values",
        "tied only in B",
        "_metadata",
    )
    for word in words:
        assert f"\n{word}" in screen(difference)


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


def shared(value: object, times: int = 40) -> object:
    """Return a list of 2^40 places, made of a few lists."""
    for _ in range(times):
        value = [value, value]
    return value


def nested(value: object, times: int) -> object:
    for _ in range(times):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([1], {"y": 1}, {"x": ("list", "dict"), "x[0]": ("1", None), "x.y": (None, "1")}),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), {"x": ("float32[2]", "int32[2]")}),
        (torch.float32, torch.float32, {}),
        (torch.float32, torch.float16, {"x": ("the name torch.float32", "the name torch.float16")}),
        (shared(1), shared(1), {}),
        (shared(1), shared(2), {f"x{39 * '[0]'}[{n}]": ("1", "2") for n in (0, 1)}),
        (nested(1, 300), nested(1, 300), {"x" + 199 * "[0]": 2 * ("nested too deep to compare",)}),
        ([HOLDS_ITSELF], [HOLDS_ITSELF], {}),
    ],
    ids=["list and dict", "dtypes", "a name", "names", "shared", "shared and other", "too deep", "itself"],
)
@pytest.mark.parametrize("read_values", [True, False], ids=["values", "names"])
def test_the_rest_of_the_container_is_compared(
    a: object, b: object, told: dict[str, Any], read_values: bool, tmp_path: Path
):
    paths = [saved(tmp_path, f"{n}.pth", {"model": {"w": torch.ones(1)}, "x": x}) for n, x in enumerate((a, b))]
    assert ckptfix.diff(*paths, values=read_values).extras == told


def test_a_long_list_of_differences_is_cut(tmp_path: Path):
    """One screen shows the tensors that differ most."""
    a, b = ({f"w{n}": torch.tensor([1.0, n * step]) for n in range(60)} for step in (1.0, 1.5))
    rest = {f"v{n}.x": torch.ones(n + 1) for n in range(60)}
    difference = ckptfix.diff(saved(tmp_path, "a.pth", a | rest), saved(tmp_path, "b.pth", b))
    shown, whole = screen(difference), screen(difference, verbose=True)
    assert "more, at most 0.333 relative (-v)\n" in shown
    assert (shown.count("more"), whole.count("more")) == (2, 0)


def test_a_state_dict_is_compared_as_its_file_is(tmp_path: Path):
    state, changed = model().state_dict(), model().state_dict()
    assert ckptfix.diff(state, saved(tmp_path, "a.pth", state)).exit_code == 0
    changed["4.bias"] += 1
    other = {"model": changed, "epoch": 1}
    (pair, _) = ckptfix.diff(state, other, other_weights="model").values[0]
    assert pair.key == "4.bias"
    with pytest.raises(ckptfix.UsageError, match="give a path or a state_dict"):
        ckptfix.diff(state, model())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_saved", [True, False], ids=["in files", "in memory"])
def test_what_is_outside_the_state_dicts_is_compared(tmp_path: Path, is_saved: bool):
    sides: list[Any] = [{"model": model().state_dict(), "epoch": epoch} for epoch in (1, 2)]
    if is_saved:
        sides = [saved(tmp_path, f"{epoch}.pth", side) for epoch, side in enumerate(sides)]
    assert ckptfix.diff(*sides).extras == {"epoch": ("1", "2")}
    assert ckptfix.diff(sides[0], sides[0]).is_empty


@pytest.mark.parametrize("is_saved", [True, False], ids=["in files", "in memory"])
def test_weights_selects_one_of_two_sets_by_its_prefix(tmp_path: Path, is_saved: bool):
    state = {
        f"{front}.{key}": tensor for front in ("student", "teacher") for key, tensor in model().state_dict().items()
    }
    sides: list[Any] = [state, state | {"student.4.bias": state["student.4.bias"] + 1}]
    if is_saved:
        sides = [saved(tmp_path, f"{at}.pth", side) for at, side in enumerate(sides)]
    assert ckptfix.diff(*sides, weights="teacher").is_empty
    (pair, _) = ckptfix.diff(*sides, weights="student").values[0]
    assert pair.key == "4.bias"


def test_the_ema_and_the_raw_weights_of_one_container_in_memory():
    container = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "epoch": 1}
    difference = ckptfix.diff(container, container, weights="model", other_weights="ema")
    assert [pair.key for pair, _ in difference.values] == ["w"]
    assert not difference.extras


def test_the_ema_and_the_raw_weights_of_one_file(tmp_path: Path):
    path = saved(tmp_path, "a.pth", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}})
    difference = ckptfix.diff(path, path, weights="model", other_weights="ema")
    assert [pair.key for pair, _ in difference.values] == ["w"]


def test_noop_two_equal_sets_of_weights(tmp_path: Path):
    path = saved(tmp_path, "a.pth", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}})
    assert ckptfix.diff(path, path, weights="model", other_weights="ema").is_empty


def test_a_tensor_that_fails_its_checksum_is_named(tmp_path: Path):
    values = torch.arange(64.0)
    a = saved(tmp_path, "a.pth", {"w": values, "x": values + 100})
    broken = bytearray(a.read_bytes())
    broken[broken.index(values.numpy().tobytes()) + 16] ^= 1
    b = tmp_path / "b.pth"
    b.write_bytes(broken)
    difference = ckptfix.diff(a, b)
    assert (difference.a.damaged, difference.b.damaged) == ((), ("w",))
    assert "   damaged: 1 tensor with wrong bytes (checksum)\n     w\n" in screen(difference)
    assert ckptfix.diff(a, b, values=False).b.damaged == ()


def test_lost_tensors_of_a_salvaged_file_are_named(tmp_path: Path):
    a = saved(tmp_path, "a.pth", {"w": torch.ones(9), "x": torch.ones(4096)})
    b = tmp_path / "b.pth"
    b.write_bytes(a.read_bytes()[:2000])
    difference = ckptfix.diff(a, b, salvage=True)
    assert difference.b.lost == ("x",)
    assert "   damaged: the bytes of 1 tensor are gone\n     x\n" in screen(difference)


def test_a_cast_without_rounding_is_not_called_equal_bit_for_bit(tmp_path: Path):
    a = saved(tmp_path, "a.pth", {"w": torch.ones(2), "x": torch.ones(2)})
    b = saved(tmp_path, "b.pth", {"w": torch.ones(2).half(), "x": torch.ones(2)})
    difference = ckptfix.diff(a, b)
    assert (difference.equal, difference.cast) == (1, 1)
    assert screen(difference).endswith("equal bit for bit: 1 tensor, 1 more of the same values in another dtype\n")


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        pytest.param(0.0, -0.0, "equal numbers with different bits", id="minus zero"),
        pytest.param(0.0, 1.0, "max abs 1, relative 1", id="another number"),
        pytest.param(0.0, float("nan"), "  w  its element, 1 NaN or infinite on one side\n", id="NaN on one side"),
    ],
)
def test_differences_of_values_are_described(tmp_path: Path, a: float, b: float, says: str):
    paths = [saved(tmp_path, f"{n}.pth", {"w": torch.tensor(value)}) for n, value in enumerate((a, b))]
    assert says in screen(ckptfix.diff(*paths))


def test_tensors_of_other_layouts_are_not_compared(tmp_path: Path):
    a = saved(tmp_path, "a.pth", {"w": torch.eye(3)})
    b = saved(tmp_path, "b.pth", {"w": torch.eye(3).to_sparse()})
    shown = screen(ckptfix.diff(a, b))
    assert "values not compared: 1 tensor\n  w  layouts strided and sparse_coo\n" in shown
    assert "different values" not in shown


def test_packed_bits_are_compared_without_numbers(tmp_path: Path):
    packed = [torch.tensor([[code, 0]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for code in (1, 2)]
    paths = [
        saved(tmp_path, f"{n}.pth", {"w": tensor, "v": other})
        for n, (tensor, other) in enumerate(zip(packed, (packed[0], torch.ones(1, 2)), strict=True))
    ]
    shown = screen(ckptfix.diff(*paths, atol=100))
    assert "different values: 1 tensor\n  w  other bits, 1 of 2 elements\n" in shown
    assert "values not compared: 1 tensor\n  v  float4_e2m1fn_x2 and float32\n" in shown


def test_texts_in_a_header_of_safetensors_are_compared(tmp_path: Path):
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for path, texts in zip(paths, ({"steps": "1"}, {"steps": "2"}, {"steps": "1", "format": "pt"}), strict=True):
        save_file({"w": torch.ones(2)}, path, metadata=texts)
    assert ckptfix.diff(paths[0], paths[2]).is_empty
    assert ckptfix.diff(paths[0], paths[1]).extras == {"__metadata__.steps": ("'1'", "'2'")}


def test_optimizer_tensors_are_compared_too(tmp_path: Path):
    weights = {"w": torch.ones(2)}
    paths = [
        saved(tmp_path, f"{n}.pth", {"state_dict": weights, "optimizer": {"state": {0: {"buf": torch.full((2,), n)}}}})
        for n in (1, 2)
    ]
    assert "  optimizer.state.0.buf  int64[2], different values\n" in screen(ckptfix.diff(*paths))


def test_tolerance(tmp_path: Path):
    a = saved(tmp_path, "a.pth", {"w": torch.ones(2)})
    b = saved(tmp_path, "b.pth", {"w": torch.ones(2) + 1e-6})
    assert ckptfix.diff(a, b).exit_code == 1
    close = ckptfix.diff(a, b, atol=1e-5)
    assert (close.exit_code, close.close, close.equal) == (0, 1, 0)
    state = [{"state_dict": {"w": torch.ones(2)}, "moments": torch.ones(2) + far} for far in (0, 1e-6)]
    moments = [saved(tmp_path, f"m{n}.pth", content) for n, content in enumerate(state)]
    assert [ckptfix.diff(*moments, atol=atol).exit_code for atol in (0, 1e-5)] == [1, 0]
    with pytest.raises(ckptfix.UsageError, match="tolerances"):
        ckptfix.diff(a, b, atol=float("nan"))


def test_without_values_names_are_compared(tmp_path: Path):
    a = saved(tmp_path, "a.pth", {"w": torch.ones(2)})
    b = saved(tmp_path, "b.pth", {"w": torch.zeros(2)})
    difference = ckptfix.diff(a, b, values=False)
    assert difference.is_empty
    assert not difference.values_compared
    assert "not compared" in screen(difference)


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path):
    numel = 8 << 20
    a = saved(tmp_path, "a.pth", {"w": torch.ones(numel)})
    b = saved(tmp_path, "b.pth", {"x": torch.ones(numel)})
    c = saved(tmp_path, "c.pth", {"w": torch.zeros(numel)})
    ckptfix.diff(a, a)  # imports are not counted
    for pair in ((a, b), (a, c)):
        tracemalloc.start()
        ckptfix.diff(*pair)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 << 20  # bytes; each tensor has 32 MiB


ONE, TWO = torch.randn(2, 3), torch.randn(2, 3)


def renames(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return dict(find_renames(open_state_dict(a).specs, open_state_dict(b).specs))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"a": ONE}, {"b": TWO}, id="other bytes"),
        pytest.param({"a": ONE}, {"b": ONE.reshape(3, 2).clone()}, id="different shape"),
        pytest.param({"a": ONE}, {"b": ONE.view(torch.int32).clone()}, id="another dtype of the same bytes"),
        pytest.param({"a": ONE}, {"b": ONE.to_sparse()}, id="another layout"),
    ],
)
def test_noop_no_rename(a: dict[str, Any], b: dict[str, Any]):
    assert renames(a, b) == {}


def test_the_same_bytes_are_found_in_any_memory_order():
    assert renames({"a": ONE, "b": TWO}, {"x": TWO.T.contiguous().T, "y": ONE.clone()}) == {"a": "y", "b": "x"}


def test_equal_tensors_are_paired_by_the_end_of_their_names():
    zeros = {"module.b.bias": torch.zeros(2), "module.a.bias": torch.zeros(2), "module.c.beta": torch.zeros(2)}
    others = {"a.bias": torch.zeros(2), "b.bias": torch.zeros(2), "norm.gamma": torch.zeros(2)}
    expected = {"module.b.bias": "b.bias", "module.a.bias": "a.bias", "module.c.beta": "norm.gamma"}
    assert renames(zeros, others) == expected


@pytest.mark.parametrize(("first", "matrix"), [(0, "fc"), (0, "linear"), (1, "linear")])
def test_equal_tensors_are_paired_within_their_layers(first: int, matrix: str):
    """Whose numbers the matrices show, which differ from layer to layer."""
    layers = range(3)
    a = {f"layers.{layer}.{name}.weight": torch.ones(4) for layer in layers for name in ("norm1", "norm2")}
    b = {
        f"layers.{layer + first}.{name}_weight": torch.ones(4) for name in ("qkv.norm", "mlp.norm") for layer in layers
    }
    a |= {f"layers.{layer}.fc.weight": torch.full((4, 4), layer) for layer in layers}
    b |= {f"layers.{layer + first}.{matrix}.weight": torch.full((4, 4), layer) for layer in layers}
    renamed = ckptfix.diff(a, b).renamed
    for layer in layers:
        assert renamed[f"layers.{layer}.norm1.weight"] == f"layers.{layer + first}.qkv.norm_weight"
        assert renamed[f"layers.{layer}.norm2.weight"] == f"layers.{layer + first}.mlp.norm_weight"


def test_equal_tensors_of_which_one_side_has_fewer():
    assert renames({"x.a": ONE, "y.b": ONE.clone()}, {"b": ONE.clone()}) == {"y.b": "b"}


def test_empty_tensors_are_paired():
    assert renames({"a": torch.empty(0)}, {"b": torch.empty(0)}) == {"a": "b"}
