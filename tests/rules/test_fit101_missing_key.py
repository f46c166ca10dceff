"""FIT101: what the file does not have, and where else it may come from."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.edits import Fill, Tie
from ckptfix.core.finding import Applicability, Level
from ckptfix.core.target import target_from_checkpoint
from ckptfix.reading.opening import open_state_dict
from ckptfix.report.advice import remedies_text
from ckptfix.rules.fit101_missing_key import missing_key
from tests.rules.proposals import propose, repaired


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


D = 4


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


def test_filled_only_on_request():
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
    assert finding.message.endswith("filled from the model's initialisation")  # the values that it has, without a seed
    assert finding.fix.asked
    assert finding.fix.applicability == Applicability.UNSAFE
    after = repaired(missing_key, backbone(), model, fill="target")
    assert torch.equal(after["1.weight"], model.state_dict()["1.weight"])
    model.load_state_dict(after, strict=True)


def test_a_donor_fills_what_fits():
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


def test_a_donor_with_the_twin_of_a_tied_key():
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


def test_buffers_are_not_a_share_of_the_parameters():
    state = {key: value for key, value in nn.BatchNorm1d(2).state_dict().items() if key in {"weight", "bias"}}
    (finding,) = propose(missing_key, state, nn.BatchNorm1d(2))
    assert finding.message == "3 keys missing, none of them a parameter"


def test_no_repair_if_every_parameter_is_filled():
    (finding,) = propose(missing_key, {"other.weight": torch.ones(1)}, classifier(), fill="target")
    assert finding.fix is None
    assert "name the model that the file belongs to" in remedies_text(finding.remedies)
    (finding,) = propose(missing_key, {}, classifier(), fill="target")
    assert finding.fix is not None


@pytest.mark.parametrize("place", ["", "nets."])
def test_keys_in_the_set_of_another_module_are_not_filled(place: str, tmp_path):
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


def test_separate_sets_of_parts_of_the_model_are_joined(tmp_path):
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
def test_noop_for_a_set_that_is_not_a_part_of_the_model(generator: dict[str, torch.Tensor], tmp_path):
    model, container = _with_generator(generator=generator)
    torch.save(container, tmp_path / "file.pt")
    report = ckptfix.check(tmp_path / "file.pt", model)
    assert {finding.code for finding in report.left} == {"FIL101", "FIT101"}
    assert not any(finding.fix for finding in report.findings)
