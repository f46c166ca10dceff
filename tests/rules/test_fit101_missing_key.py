"""FIT101: what the file does not have, and where else it may come from."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import ckptfix
from ckptfix.core.edits import Fill, Tie
from ckptfix.core.finding import Applicability, Level
from ckptfix.core.target import target_from_checkpoint
from ckptfix.reading.opening import open_state_dict
from ckptfix.report.advice import Presentation, next_command, remedies_text
from ckptfix.rules.fit101_missing_key import missing_key
from ckptfix.rules.leftovers import other_layout
from tests.rules.proposals import context, propose, repaired


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False))


def backbone() -> dict[str, torch.Tensor]:
    return {"0.weight": torch.ones(10, 6)}


@pytest.mark.parametrize(
    ("state", "model", "settings"),
    [
        pytest.param({}, None, {}, id="no target"),
        pytest.param(classifier().state_dict(), classifier(), {"fill": "target"}, id="nothing is missing"),
        pytest.param(
            {"0.weight": torch.ones(1), "1.weight": torch.ones(1)}, classifier(), {"fill": "target"}, id="other shapes"
        ),
        pytest.param(
            {"embed.weight": torch.ones(5, 4), "mix.weight": torch.ones(4, 4)},
            Language(),
            {},
            id="its twin is in the file",
        ),
        pytest.param(
            {key: value for key, value in nn.BatchNorm1d(2).state_dict().items() if key != "num_batches_tracked"},
            nn.BatchNorm1d(2),
            {"for_torch": "0.4.0"},
            id="the counter that an old torch does not know",
        ),
    ],
)
def test_noop(state, model, settings):
    assert propose(missing_key, state, model, **settings) == []


def test_nothing_is_filled_unasked():
    (finding,) = propose(missing_key, backbone(), classifier())
    assert finding.level == Level.ERROR
    assert finding.keys == ("1.weight",)
    assert finding.message == "1 key missing, 40 % of the target's parameters"
    assert finding.evidence == {"parameters": 40, "of": 100}
    assert finding.fix is None
    assert "--fill target" in remedies_text(finding.remedies)


def test_a_head_that_may_be_tied_to_the_embedding_in_the_model_of_the_file():
    model = Language()
    model.head.weight = nn.Parameter(torch.ones(5, 4))
    words = {"embed.weight": torch.ones(5, 4)}
    rest = {"mix.weight": torch.ones(4, 4)}
    (finding,) = propose(missing_key, words | rest, model)
    assert "if embed.weight is tied to it in the file's model" in remedies_text(finding.remedies)
    for other in (words, words | rest | {"more.weight": torch.ones(5, 4)}):  # more is missing, or more fits
        (finding,) = propose(missing_key, other, model)
        assert "tied" not in remedies_text(finding.remedies)


def test_filled_from_the_model():
    model = classifier()
    (finding,) = propose(missing_key, backbone(), model, fill="target")
    assert finding.fix is not None
    assert finding.fix.edits == (Fill("1.weight", "float32", (4, 10), "target"),)
    assert finding.fix.asked
    assert finding.fix.applicability == Applicability.UNSAFE
    after = repaired(missing_key, backbone(), model, fill="target")
    assert torch.equal(after["1.weight"], model.state_dict()["1.weight"])
    model.load_state_dict(after, strict=True)


def test_a_donor_gives_what_fits_and_the_rest_stays_missing():
    donor = {"0.weight": torch.zeros(10, 6), "1.weight": torch.full((4, 10), 2.0)}
    model = nn.Sequential(*classifier(), nn.Linear(4, 3, bias=False))
    filled, unfilled = propose(missing_key, backbone(), model, donor=donor, fill="donor.pth")
    assert filled.fix is not None
    assert filled.fix.edits == (Fill("1.weight", "float32", (4, 10), "donor", "1.weight"),)
    assert (unfilled.keys, unfilled.fix) == (("2.weight",), None)
    after = repaired(missing_key, backbone(), model, donor=donor, fill="donor.pth")
    assert torch.equal(after["0.weight"], backbone()["0.weight"])
    assert torch.equal(after["1.weight"], donor["1.weight"])


@pytest.mark.parametrize(
    "donor",
    [
        pytest.param({"1.weight": torch.zeros(5, 10)}, id="another shape"),
        pytest.param({"head.weight": torch.zeros(4, 10)}, id="another name"),
        pytest.param({"1.weight": torch.zeros(4, 10, device="meta")}, id="no values"),
    ],
)
def test_a_donor_that_does_not_fit(donor):
    (finding,) = propose(missing_key, backbone(), classifier(), donor=donor, fill="donor.pth")
    assert finding.fix is None
    assert "donor.pth does not have them" in remedies_text(finding.remedies)


def test_a_donor_may_hold_the_twin():
    donor = {"head.weight": torch.ones(5, 4)}
    (finding,) = propose(missing_key, {"mix.weight": torch.ones(4, 4)}, Language(), donor=donor, fill="donor.pth")
    assert finding.fix is not None
    assert finding.fix.edits == (
        Fill("embed.weight", "float32", (5, 4), "donor", "head.weight"),
        Tie("head.weight", "embed.weight"),
    )


def test_tied_keys_are_filled_as_one_and_count_once():
    model = Language()
    (finding,) = propose(missing_key, {"mix.weight": torch.ones(4, 4)}, model, fill="target")
    assert finding.evidence == {"parameters": 20, "of": 36}
    assert finding.fix is not None
    assert finding.fix.edits[1] == Tie("head.weight", "embed.weight")
    model.load_state_dict(repaired(missing_key, {"mix.weight": torch.ones(4, 4)}, model, fill="target"), strict=True)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        pytest.param(
            target_from_checkpoint(open_state_dict(classifier().state_dict())), "--fill FILE", id="a reference file"
        ),
        pytest.param(
            nn.Sequential(nn.Linear(6, 10, bias=False), nn.LazyLinear(3)),
            "in the target's shape",
            id="a lazy parameter",
        ),
        pytest.param(classifier().to("meta"), "--fill FILE", id="a model on the meta device"),
    ],
)
def test_a_target_without_values(model, says):
    (finding,) = propose(missing_key, backbone(), model, fill="target")
    assert finding.fix is None
    assert says in remedies_text(finding.remedies)


def test_buffers_are_no_share_of_the_parameters():
    state = {key: value for key, value in nn.BatchNorm1d(2).state_dict().items() if key in {"weight", "bias"}}
    (finding,) = propose(missing_key, state, nn.BatchNorm1d(2))
    assert finding.message == "3 keys missing, none of them a parameter"


def test_a_model_of_fillings_alone_is_no_repair():
    (finding,) = propose(missing_key, {"other.weight": torch.ones(1)}, classifier(), fill="target")
    assert finding.fix is None
    assert "name the model that the file belongs to" in remedies_text(finding.remedies)
    (finding,) = propose(missing_key, {}, classifier(), fill="target")
    assert finding.fix is not None


D = 4


def stack(**modules: tuple[int, int]) -> nn.ModuleDict:
    """Two layers of Linear modules of these sizes."""
    layers = [nn.ModuleDict({name: nn.Linear(*size) for name, size in modules.items()}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": nn.LayerNorm(D)})


def said(state: dict[str, torch.Tensor], model: nn.Module) -> str:
    found = context(state, model)
    assert found.target is not None
    return other_layout(found, found.target)


FUSED = stack(qkv=(D, 3 * D), out=(D, D))


def activations(**names: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(nn.ModuleDict({"conv": nn.Linear(D, D), **deepcopy(names)}) for _ in range(2)))


@pytest.mark.parametrize("size", [1, D])
def test_vectors_under_other_modules_are_not_made_untrained(size):
    """MONAI's UNet moved its PReLU from `act` to `adn.A`."""
    new, old = activations(adn=nn.ModuleDict({"A": nn.PReLU(size)})), activations(act=nn.PReLU(size))
    assert "0.adn.A.weight has the shape and the numbers of 0.act.weight; if it is the same tensor" in said(
        new.state_dict(), old
    )
    (finding,) = propose(missing_key, new.state_dict(), old)
    assert "fill" not in [name for remedy in finding.remedies for name, _ in remedy.options]


def test_what_is_missing_for_good_is_not_called_renamed():
    old, state = activations(act=nn.PReLU(D)), activations().state_dict()
    assert said(state, old) == ""
    assert said({**state, "0.norm.bias": torch.ones(D), "1.norm.bias": torch.ones(D)}, old) == ""


SPLIT = stack(q=(D, D), k=(D, D), v=(D, D), out=(D, D))


@pytest.mark.parametrize(
    ("file", "model"),
    [
        pytest.param(FUSED, FUSED, id="all in place"),
        pytest.param(stack(out=(D, D), head=(D, 7)), stack(out=(D, D), head=(D, 9)), id="another number of classes"),
        pytest.param(stack(out=(D, D), aux=(D, 7)), stack(out=(D, D)), id="nothing is missing"),
        pytest.param(stack(out=(D, D)), stack(out=(D, D), head=(D, 7)), id="nothing is left over"),
        pytest.param(stack(a=(D, 7)), stack(a=(D, 7), b=(D, D)), id="more layers"),
        pytest.param(stack(out=(D, D), aux=(D, 7)), stack(out=(D, D), head=(D, 9)), id="an auxiliary head"),
    ],
)
def test_silence(file, model):
    assert said(file.state_dict(), model) == ""


def test_layers_of_another_version():
    """As of RWKV 4 and 5, where each layer has a weight that the other version does not have."""

    def version(**own: tuple[int, int]) -> nn.ModuleDict:
        layers = [nn.ModuleDict({name: nn.Linear(*size) for name, size in own.items()}) for _ in range(4)]
        return nn.ModuleDict({"blocks": nn.ModuleList(layers)})

    state, model = version(key=(D, D), first=(D, 1)).state_dict(), version(key=(D, D), faaaa=(D, 3))
    assert "version of the model" in said(state, model)
    report = ckptfix.check(state, model)
    assert next_command(report, Presentation()) == ""


def test_other_names_in_the_same_module():
    """The annotated Transformer calls the vectors of its norms so."""
    state = stack(out=(D, D)).state_dict()
    renamed = {key.replace("norm.weight", "norm.a_2").replace("norm.bias", "norm.b_2"): state[key] for key in state}
    assert "norm.a_2 or norm.b_2 has the shape of norm.weight" in said(renamed, stack(out=(D, D)))
    assert said({**state, "norm.scale": torch.ones(D)}, stack(out=(D, D))) == ""


@pytest.mark.parametrize(("file", "model"), [(FUSED, SPLIT), (SPLIT, FUSED)], ids=["fused", "split"])
def test_fused_and_split_projections(file, model):
    text = said(file.state_dict(), model)
    assert text.startswith("2 modules may have the missing weights in another layout")
    assert "layers.0.{" in text
    assert "qkv.weight" in text
    report = ckptfix.check(file.state_dict(), model, values=False)
    assert report.exit_code == 1
    flags = [text for finding in report.findings if (text := remedies_text(finding.remedies)).startswith("--")]
    assert all(text.startswith("--rename-layers") for text in flags)


def test_matrices_of_one_shape_under_other_names():
    text = said(stack(query=(D, D), key=(D, D), value=(D, D)).state_dict(), stack(q=(D, D), k=(D, D), v=(D, D)))
    assert "the leftover keys have the shapes of the missing ones:" in text
    assert "(embed_out.weight of lm_head.weight)" in said(
        {"norm.weight": torch.ones(D), "embed_out.weight": torch.ones(9, D)},
        nn.ModuleDict({"norm": nn.LayerNorm(D, bias=False), "lm_head": nn.Linear(D, 9, bias=False)}),
    )


@pytest.mark.parametrize("wrap", ["", "base_model.model."])
def test_an_adapter_that_was_not_merged(wrap):
    state = {f"{wrap}0.base_layer.weight": torch.ones(D, D), f"{wrap}0.lora_A.default.weight": torch.ones(2, D)}
    text = said(state, nn.Sequential(nn.Linear(D, D, bias=False)))
    assert text.startswith("1 weight of the file with an unmerged adapter")


def test_layers_that_are_counted_from_one():
    state = {f"layers.{at}.weight": torch.ones(D, D) for at in (1, 2)}
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(2)])})
    text = said(state, model)
    assert text.startswith("check the numbers first: layers.2.weight is left over and layers.0.weight missing")


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (weight_norm, "weight_norm"),
        (parametrizations.weight_norm, "weight_norm"),
        (spectral_norm, "spectral_norm"),
        (partial(prune.l1_unstructured, name="weight", amount=0.5), "pruning"),
        (parametrizations.spectral_norm, "spectral_norm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_norm_of_weights_on_one_side(norm, name):
    plain, normed = nn.Sequential(nn.Conv1d(2, 3, 3)), nn.Sequential(norm(nn.Conv1d(2, 3, 3)))
    assert said(normed.state_dict(), plain).startswith(f"the file has 1 weight as {name} splits it:")
    assert said(plain.state_dict(), normed).startswith(f"the model has {name} applied to 1 weight")


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_a_singular_vector_is_not_made_up_beside_the_stored_one(norm):
    model = nn.Sequential(norm(nn.Linear(D, D)))
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_v")}
    result = ckptfix.repair(state, model, fill="target")
    assert not result.report.edits
    assert result.report.left[0].remedies[0].text.startswith("do not fill them")


@pytest.mark.parametrize("form", ["0.weight._packed", "0.weight_packed", "0.parametrizations.weight.original"])
def test_a_tensor_under_a_longer_name_is_not_filled_nor_dropped(form: str):
    """Whatever packed it: its weights are in the file."""
    state = {form: torch.zeros(D, D, dtype=torch.int8), "0.bias": torch.zeros(D), "1.weight": torch.ones(D, D)}
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D, bias=False))
    report = ckptfix.check(state, model)
    assert not any(remedy.options for finding in report.findings for remedy in finding.remedies)
    assert "0.weight" not in said({"0.scale": torch.ones(D, D, 2), "0.bias": torch.zeros(D)}, model)


def test_a_layer_that_was_given_up_is_not_looked_for_among_those_left_over():
    """Of --drop-mismatched and --fill target: the unexpected layer has the shape of the new one by accident."""
    old = nn.ModuleDict({"body": nn.Linear(D, D), "neck": nn.Linear(D, D), "head": nn.Linear(D, 3)})
    new = nn.ModuleDict({"body": nn.Linear(D, D), "head": nn.Linear(D, D)})
    settings: dict[str, Any] = {"fill": "target", "drop_mismatched": True, "unsafe_fixes": True}
    state_dict, report = ckptfix.repair_state_dict(old.state_dict(), new, allow_untrained=True, **settings)
    assert list(state_dict) == list(new.state_dict())
    assert [finding.code for finding in report.fixed] == ["FIT103", "FIT102", "FIT101"]


@pytest.mark.parametrize("place", ["", "nets."])
def test_what_is_in_the_set_of_another_module_is_not_filled(place: str, tmp_path):
    model = nn.ModuleDict({"encoder": nn.Linear(D, D), "decoder": nn.Linear(D, 3)})
    sets = {name: module.state_dict() for name, module in model.items()}
    torch.save({"nets": sets} if place else sets, tmp_path / "file.pth")
    report = ckptfix.check(tmp_path / "file.pth", model)
    (missing,) = (finding for finding in report.left if finding.code == "FIT101")
    assert f"in separate sets ({place}decoder)" in missing.remedies[0].text
    assert "run:" not in str(report)


def _with_generator(**sets: dict[str, torch.Tensor]) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose last layer has a set of weights of its own, as OpenNMT and Annotated Transformer save it."""
    model = nn.ModuleDict({"encoder": nn.Linear(D, D), "generator": nn.Sequential(nn.Linear(D, 3))})
    state = model.state_dict()
    rest = {key: value for key, value in state.items() if key.startswith("encoder.")}
    return model, {"model": rest, "generator": model["generator"].state_dict(), "vocab": {"a": 1}, **sets}


def test_a_part_of_the_model_in_a_set_of_its_own_is_joined(tmp_path):
    model, container = _with_generator()
    torch.save(container, tmp_path / "file.pt")
    result = ckptfix.repair(tmp_path / "file.pt", model, output=tmp_path / "out.pt")
    assert [finding.code for finding in result.report.fixed] == ["FIT101"]
    assert not result.report.left
    assert result.report.coverage
    assert result.report.coverage.share == 1
    written = torch.load(tmp_path / "out.pt")
    model.load_state_dict(written["model"])
    assert torch.equal(written["model"]["generator.0.weight"], container["generator"]["0.weight"])
    assert written["generator"].keys() == {"0.weight", "0.bias"}
    assert not ckptfix.check(tmp_path / "out.pt", model).findings


@pytest.mark.parametrize(
    "generator",
    [
        pytest.param({"0.weight": torch.ones(3, D), "0.bias": torch.ones(3), "1.weight": torch.ones(3)}, id="more"),
        pytest.param({"0.weight": torch.ones(4, D), "0.bias": torch.ones(4)}, id="another-shape"),
        pytest.param({"proj.weight": torch.ones(3, D), "proj.bias": torch.ones(3)}, id="other-names"),
    ],
)
def test_noop_for_a_set_that_is_no_part_of_the_model(generator: dict[str, torch.Tensor], tmp_path):
    model, container = _with_generator(generator=generator)
    torch.save(container, tmp_path / "file.pt")
    report = ckptfix.check(tmp_path / "file.pt", model)
    assert {finding.code for finding in report.left} == {"FIL101", "FIT101"}
    assert not any(finding.fix for finding in report.findings)


def test_tied_tensors_that_are_left_over_count_once():
    """As PyG's GATConv had `lin_src` and `lin_dst`, which are `lin` in later releases."""
    weight, scale = torch.ones(D, D), torch.ones(9)
    state = {"conv.lin_src.weight": weight, "conv.lin_dst.weight": weight, "conv.scale": scale}
    model = nn.Module()
    model.conv = nn.ParameterDict({"scale": scale.clone()})
    model.conv.lin = nn.Linear(D, D, bias=False)
    assert "(conv.lin_src.weight of conv.lin.weight)" in said(state, model)
