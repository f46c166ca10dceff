"""BUF104: buffers that one release saves and the next does not."""

from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.core.target import target_from_checkpoint, target_from_module
from ckptfix.errors import TargetError
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.buf104_transient_buffer import transient_buffer
from tests.checks import bytes_of
from tests.rules.proposals import propose, repaired

IDS = torch.arange(8)[None]


class Embeddings(nn.Module):
    """An embedding and a buffer with a given name."""

    def __init__(self, name: str | None = None, value: torch.Tensor = IDS, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if name is not None:
            self.register_buffer(name, value.clone(), persistent=persistent)


def state_of(name: str, value: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    return Embeddings(name, value).state_dict()


def before_0_4(module: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Its state_dict as torch 0.3 wrote it: no counters, no metadata."""
    return OrderedDict((key, value) for key, value in module.state_dict().items() if "num_batches" not in key)


TRACKING, PLAIN = nn.InstanceNorm1d(3, track_running_stats=True), nn.InstanceNorm1d(3)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(state_of("position_ids"), None, id="no target"),
        pytest.param(state_of("position_ids"), Embeddings("position_ids"), id="both have it"),
        pytest.param(
            state_of("inv_freq", torch.rand(8)), Embeddings("inv_freq", torch.zeros(8)), id="ESM wants the stored one"
        ),
        pytest.param(state_of("scale", torch.rand(8)), Embeddings(), id="an unknown name"),
        pytest.param(state_of("bias", torch.rand(8)), Embeddings(), id="an ordinary bias"),
        pytest.param(
            Embeddings().state_dict(), Embeddings("scale", torch.rand(8)), id="a missing one of an unknown name"
        ),
        pytest.param(
            Embeddings().state_dict(),
            target_from_checkpoint(open_state_dict(state_of("position_ids"))),
            id="a file has no initial values to fill from",
        ),
        pytest.param(before_0_4(TRACKING), TRACKING, id="InstanceNorm that does track"),
        pytest.param(TRACKING.state_dict(), PLAIN, id="a newer InstanceNorm used its statistics"),
        pytest.param(
            before_0_4(nn.BatchNorm1d(3)), nn.BatchNorm1d(3, track_running_stats=False), id="a BatchNorm used them"
        ),
    ],
)
def test_noop(state, model):
    assert propose(transient_buffer, state, model) == []


def test_a_parameter_of_a_known_name_is_kept():
    state = {"weight": torch.ones(3), "position_ids": nn.Parameter(torch.ones(8))}
    assert propose(transient_buffer, state, Embeddings()) == []


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(state_of("position_ids"), Embeddings("position_ids", persistent=False), id="no longer saved"),
        pytest.param(state_of("position_ids"), Embeddings(), id="gone, and known by name"),
        pytest.param(
            state_of("scratch"), Embeddings("scratch", persistent=False), id="any name that the target has unsaved"
        ),
        pytest.param(state_of("bias", torch.ones(1, 1, 4, 4).tril()), Embeddings(), id="the causal mask of GPT-2"),
        pytest.param(state_of("total_ops", torch.zeros(1)), Embeddings(), id="left behind by a profiler"),
    ],
)
def test_dropped(state, model):
    (finding,) = propose(transient_buffer, state, model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(transient_buffer, state, model)
    model.load_state_dict(after, strict=True)
    assert torch.equal(after["weight"], state["weight"])


FREQUENCIES = 10_000 ** -(torch.arange(8) / 8)


@pytest.mark.parametrize(
    ("name", "stored", "own"),
    [
        pytest.param("inv_freq", FREQUENCIES, FREQUENCIES, id="the same"),
        pytest.param("inv_freq", FREQUENCIES.half(), FREQUENCIES, id="saved in half precision"),
        pytest.param("inv_freq", FREQUENCIES * (1 + 1e-7), FREQUENCIES, id="worked out on another device"),
        pytest.param("sin_cached", torch.ones(16), torch.zeros(8), id="another length"),
        pytest.param("masked_bias", torch.tensor(-1e9), torch.tensor(-1e4), id="a mask's value"),
        pytest.param("attn_mask", torch.ones(8), torch.zeros(8), id="a mask of floats"),
        pytest.param("window_mask", torch.ones(8), torch.zeros(8), id="a mask of an unknown name"),
        pytest.param("position_ids", torch.arange(8), torch.zeros(8, dtype=torch.int64), id="indices"),
        pytest.param("total", torch.tensor(99.0), torch.tensor(0.0), id="the state of a metric"),
    ],
)
def test_dropped_as_the_model_has_its_own(name, stored, own):
    model = Embeddings(name, own, persistent=False)
    (finding,) = propose(transient_buffer, state_of(name, stored), model)
    assert finding.fix is not None
    assert (finding.level, finding.fix.applicability) == (Level.ERROR, Applicability.SAFE)


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(2 * FREQUENCIES, id="another scaling"),
        pytest.param((500_000 ** -(torch.arange(8) / 8)).half(), id="another base, in half precision"),
        pytest.param(torch.full((8,), float("nan")), id="no numbers"),
    ],
)
def test_values_that_differ_from_the_model_are_dropped_only_on_request(stored):
    model = Embeddings("inv_freq", FREQUENCIES, persistent=False)
    state = {**state_of("inv_freq", stored), "position_ids": IDS}
    different, plain = propose(transient_buffer, state, model)
    assert (different.keys, plain.keys) == (("inv_freq",), ("position_ids",))
    assert different.fix is not None
    assert (different.level, different.fix.applicability) == (Level.WARNING, Applicability.UNSAFE)
    after, _ = ckptfix.repair_state_dict(state, model, select=("BUF104",))
    assert list(after) == ["weight", "inv_freq"]
    model.load_state_dict(repaired(transient_buffer, state, model), strict=True)


class Rotary(nn.Module):
    """A model with the frequencies of rotary embeddings as in transformers."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.model = nn.Module()
        self.model.rotary_emb = Embeddings("inv_freq", frequencies, persistent=False)
        del self.model.rotary_emb.weight


LIKE = target_from_checkpoint(open_state_dict(Embeddings().state_dict()))
POWERS = 500000 ** (-torch.arange(0, 64, 2) / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", ["rope.freqs", "model.rope.freqs"])
@pytest.mark.parametrize("target", [Rotary(POWERS), LIKE, Embeddings()], ids=["transformers", "file", "other model"])
def test_metas_frequencies_are_dropped_if_the_model_computes_them(target, key, dtype):
    (finding,) = propose(transient_buffer, {**Embeddings().state_dict(), key: POWERS.to(dtype)}, target)
    assert finding.keys == (key,)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        pytest.param(POWERS, Rotary(10000 ** (-torch.arange(0, 64, 2) / 64)), id="the model has another base"),
        pytest.param(torch.linspace(1, 0.001, 32), LIKE, id="not powers of a number"),
        pytest.param(-POWERS, LIKE, id="negative"),
        pytest.param(torch.full((32,), float("nan")), LIKE, id="no numbers"),
    ],
)
def test_other_frequencies_are_dropped_only_on_request(stored, target):
    (finding,) = propose(transient_buffer, {**Embeddings().state_dict(), "rope.freqs": stored}, target)
    assert finding.fix is not None
    assert (finding.level, finding.fix.applicability) == (Level.WARNING, Applicability.UNSAFE)


def test_learned_frequencies_of_several_layers_are_kept():
    """timm's EVA has parameters with this name."""
    assert not propose(transient_buffer, {**Embeddings().state_dict(), "rope.freqs": torch.rand(2, 3, 8)}, LIKE)


def test_with_no_values_a_buffer_is_dropped_without_a_comparison():
    model = Embeddings("inv_freq", FREQUENCIES, persistent=False)
    _, report = ckptfix.repair_state_dict(state_of("inv_freq", IDS[0].float()), model, values=False)
    assert [finding.code for finding in report.fixed] == ["BUF104"]


@pytest.mark.parametrize("initial", ["none", "failing"])
def test_no_values_to_compare_with(initial):
    def fail() -> Mapping[str, torch.Tensor]:
        raise TargetError("built on the meta device only")

    target = target_from_module(Embeddings("inv_freq", FREQUENCIES, persistent=False))
    target = replace(target, initial=fail if initial == "failing" else None)
    (finding,) = propose(transient_buffer, state_of("inv_freq", 2 * FREQUENCIES), target)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE


def test_filled_from_the_model():
    model = Embeddings("position_ids")
    after = repaired(transient_buffer, Embeddings().state_dict(), model)
    model.load_state_dict(after, strict=True)
    assert torch.equal(after["position_ids"], IDS)


def test_rotary_frequencies_are_filled_in_any_form():
    for name, value in (("freqs_cis", torch.randn(4, 2, dtype=torch.complex64)), ("freqs_cos", torch.rand(4, 2))):
        state = repaired(transient_buffer, Embeddings().state_dict(), Embeddings(name, value))
        assert torch.equal(state[name], value)


def test_replaced_if_the_model_has_another_size():
    """A file for longer texts, or other windows: buffers computed from a size are the model's."""
    model = Embeddings("position_ids")
    state = state_of("position_ids", torch.arange(2 * IDS.numel()).unsqueeze(0))
    (finding,) = propose(transient_buffer, state, model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(transient_buffer, state, model)
    model.load_state_dict(after, strict=True)
    assert torch.equal(after["position_ids"], IDS)


def test_statistics_of_an_old_instance_norm():
    model = nn.Sequential(PLAIN)
    state = before_0_4(nn.Sequential(TRACKING))
    with pytest.raises(RuntimeError, match="Unexpected running stats"):
        model.load_state_dict(state)
    (finding,) = propose(transient_buffer, state, model)
    assert finding.keys == ("0.running_mean", "0.running_var")
    model.load_state_dict(repaired(transient_buffer, state, model), strict=True)


@pytest.mark.filterwarnings("error")
def test_a_damaged_buffer_is_not_compared(tmp_path):
    """Its values are not those that were saved, and Python says nothing of that to whoever runs the command line."""
    path = tmp_path / "model.pth"
    torch.save(state_of("inv_freq", FREQUENCIES), path)
    data = path.read_bytes()
    place = data.index(bytes_of(FREQUENCIES)) + 3
    path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
    report = ckptfix.check(path, Embeddings("inv_freq", FREQUENCIES, persistent=False))
    found = [(finding.code, finding.level) for finding in report.findings if finding.code != "FIT102"]
    assert found == [("FIL201", Level.ERROR), ("BUF104", Level.ERROR)]
