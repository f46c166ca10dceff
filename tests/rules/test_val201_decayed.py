import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.reading.opening import open_file
from ckptfix.rules.val201_decayed import DecayEvidence, decayed
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import loud, propose


class Net(nn.Module):
    """Three blocks of which the forward pass may leave the last one out of the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc, self.spare = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


UNUSED = ("conv3", "bn3", "spare")


def trained(steps: int, momentum: float = 0.9) -> tuple[Net, torch.optim.SGD]:
    """The net after training in which the unused layers got gradients of zero, as under DistributedDataParallel."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    inputs, targets = torch.randn(16, 3, 7, 7), torch.randint(0, 16, (16,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        for name in UNUSED:
            for parameter in net.get_submodule(name).parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return net, optimizer


@pytest.fixture(scope="module")
def training() -> tuple[Net, torch.optim.SGD]:
    return trained(1500)


def scaled(factor: float, layer: str = "conv3") -> dict[str, torch.Tensor]:
    """The state_dict of a fresh net of which one layer has shrunk."""
    state = Net().state_dict()
    return {key: value * factor if key == f"{layer}.weight" else value for key, value in state.items()}


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(decayed, build(name).state_dict()) == [], name
        assert propose(decayed, build(name).state_dict(), build(name)) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(scaled(1e-2), id="light-decay-cannot-be-told"),
        pytest.param({**scaled(1), "conv3.weight": torch.zeros(8, 8, 3, 3)}, id="exact-zeros-are-for-another-rule"),
        pytest.param({**scaled(1), "gamma": torch.full((96,), 1e-9)}, id="vector"),
        pytest.param({**scaled(1), "gamma": torch.full((1, 96, 1, 1), 1e-9)}, id="vector-in-disguise"),
        pytest.param({**scaled(1), "grn.weight": torch.full((1, 1, 1, 96), 1e-9)}, id="scale-of-the-last-axis"),
        pytest.param({**scaled(1), "w": torch.full((7, 9), 1e-9)}, id="too-small-to-say"),
        pytest.param({**scaled(1), "bn3.running_mean": torch.full((8, 8), 1e-9)}, id="buffer"),
        pytest.param({**scaled(1), "attn_mask": torch.full((8, 8), 1e-9)}, id="mask"),
        pytest.param({**scaled(1), "w": torch.eye(64) * 1e-9}, id="mostly-exact-zeros"),
        pytest.param({**scaled(1), "conv.weight_v": torch.full((8, 8), 1e-9)}, id="weight-norm-direction"),
        pytest.param(
            {**scaled(1), "fc.parametrizations.weight.original": torch.full((8, 8), 1e-9)}, id="spectral-norm"
        ),
        pytest.param({**scaled(1), "q.lora_B.weight": torch.full((64, 8), 1e-6)}, id="adapter-after-few-steps"),
        pytest.param({**scaled(1), "steps": torch.ones(8, 8, dtype=torch.int64)}, id="integers"),
        pytest.param(
            {key: value * 1e-4 for key, value in Net().state_dict().items()}, id="a-file-of-small-differences"
        ),
        pytest.param({}, id="nothing"),
    ],
)
def test_noop_small_weights_without_decay(state):
    assert propose(decayed, state) == []


def test_noop_a_layer_that_the_model_initialises_small():
    model = Net()
    nn.init.normal_(model.spare.weight, std=1e-5)  # the flow layer of VoxelMorph, for one
    (finding,) = propose(decayed, model.state_dict())
    assert finding.keys == ("spare.weight",)
    assert propose(decayed, model.state_dict(), model) == []
    nn.init.zeros_(model.spare.weight)
    assert propose(decayed, scaled(1e-5, "spare"), model) == [], "it starts at zero and has left it"


def test_a_kernel_is_scale_invariant_before_a_norm_that_was_updated():
    state = scaled(1e-5)
    assert [finding.keys for finding in propose(decayed, state)] == [("conv3.weight",)], "the norm saw no batch"
    state["bn3.num_batches_tracked"], state["bn3.running_var"] = torch.tensor(900), torch.full((8,), 1e-4)
    assert propose(decayed, state) == []
    state["bn3.running_var"] = torch.full((8,), 1e-9)
    assert [finding.keys for finding in propose(decayed, state)] == [("conv3.weight",)], "eps is all that is left"


@pytest.mark.parametrize(("scale", "level"), [(1e-5, Level.WARNING), (1e-30, Level.ERROR)])
def test_a_norm_whose_variance_the_kernel_cannot_explain(scale, level):
    state = scaled(scale)
    state["bn3.num_batches_tracked"], state["bn3.running_var"] = torch.tensor(900), torch.full((8,), 0.3)
    (finding,) = propose(decayed, state)
    assert (finding.level, finding.keys) == (level, ("conv3.weight",))


@pytest.mark.parametrize("shapes", [[(1000, 16)], [(16, 64)] * 8])
@pytest.mark.parametrize(("scale", "is_quiet"), [(1e-5, True), (1.3e-5, False), (1e-7, False)])
def test_a_matrix_initialised_with_a_power_of_ten(shapes, scale, is_quiet):
    drawn = {f"flows.{index}.weight": torch.randn(shape) * scale for index, shape in enumerate(shapes)}
    is_quiet |= len(drawn) > 1 and scale == 1e-7
    assert (propose(decayed, Net().state_dict() | drawn) == []) is is_quiet


@pytest.mark.parametrize(("bound", "is_quiet"), [(1e-4, True), (1.3e-4, False), (1e-12, False)])
def test_a_uniform_matrix_within_a_power_of_ten(bound, is_quiet):
    state = Net().state_dict() | {"spare.weight": torch.empty(256, 8).uniform_(-bound, bound)}
    assert [finding.keys for finding in propose(decayed, state)] == ([] if is_quiet else [("spare.weight",)])


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("key", ["head.weight", "spare.weight"])
def test_a_last_layer_that_a_few_steps_moved_from_zero(classes, key):
    torch.manual_seed(0)
    errors, inputs = torch.randn(classes, 8), torch.relu(torch.randn(8, 256))
    gradients = (errors - errors.mean(0)) @ inputs  # softmax gives each class what it takes from the others
    grown = gradients * 2e-6 / gradients.square().mean().sqrt()
    shrunk = torch.randn(classes, 256) * 2e-6
    for weight, level in ((grown, Level.NOTE), (shrunk, Level.WARNING), (grown * 1e-4, Level.ERROR)):
        (finding,) = propose(decayed, Net().state_dict() | {key: weight})
        assert finding.level is (Level.WARNING if (key, level) == ("spare.weight", Level.NOTE) else level)


@pytest.mark.parametrize(("scale", "is_quiet"), [(1e-4, True), (1e-9, False)])
def test_a_table_starts_small_whatever_its_name(scale, is_quiet):
    state = Net().state_dict() | {"grid.weight": torch.randn(5000, 2) * scale}
    assert [finding.keys for finding in propose(decayed, state)] == ([] if is_quiet else [("grid.weight",)])


def test_norm_and_bias_that_shrank_too_are_listed():
    state = scaled(1e-9)
    state["bn3.weight"], state["bn3.bias"] = torch.full((8,), 1e-9), torch.zeros(8)
    state["spare.weight"], state["spare.bias"] = state["spare.weight"] * 1e-8, state["spare.bias"] * 1e-8
    (finding,) = propose(decayed, state)
    assert set(finding.keys) == {"conv3.weight", "bn3.weight", "bn3.bias", "spare.weight", "spare.bias"}
    assert finding.level is Level.ERROR
    assert finding.message == "2 weight matrices have decayed to 1e-09 of the expected scale"


@pytest.mark.parametrize(
    ("share", "level"), [(1e-4, Level.WARNING), (1e-5, Level.WARNING), (1e-7, Level.ERROR), (1e-36, Level.ERROR)]
)
@pytest.mark.parametrize("model", [None, Net()], ids=["by-fan-in", "by-the-model"])
def test_the_level_depends_on_what_is_left(share, level, model):
    (finding,) = propose(decayed, scaled(share), model)
    figures = finding.evidence["tensors"]["conv3.weight"]
    assert finding.level is level
    assert figures["rms"] == pytest.approx(figures["expected_rms"] * share, rel=0.1)
    assert figures["expected_from"] == ("fan-in" if model is None else "the model's initialisation")
    assert finding.fix is None


def test_subnormal_remains_are_found_although_some_are_zero():
    state = scaled(1)
    state["conv3.weight"] = state["conv3.weight"].sign() * 5.7e-44
    state["conv3.weight"].view(-1)[::3] = 0
    (finding,) = propose(decayed, state)
    assert finding.keys == ("conv3.weight",)


def test_the_only_layer_of_its_kind_is_compared_with_the_others():
    state = {"conv.weight": torch.randn(8, 8, 3, 3) * 1e-8, "fc.weight": torch.randn(8, 8)}
    assert [finding.keys for finding in propose(decayed, state)] == [("conv.weight",)]


def test_a_file_of_decayed_weights_alone():
    state = {f"{index}.weight": torch.randn(16, 16) * 1e-12 for index in range(3)}
    assert [finding.keys for finding in propose(decayed, state)] == [tuple(state)]


def test_a_layer_without_gradients_decays_in_training(training):
    net, optimizer = training
    state = net.state_dict()
    assert 0 < state["conv3.weight"].norm() < 1e-6 * Net().state_dict()["conv3.weight"].norm()
    (finding,) = propose(decayed, state, root={"state_dict": state, "optimizer": optimizer.state_dict()})
    assert set(finding.keys) >= {"conv3.weight", "bn3.weight", "spare.weight"}
    assert not any(key.startswith(("conv1", "conv2", "bn1", "bn2", "fc")) for key in finding.keys)
    assert finding.evidence["optimizer"] == {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    assert "weight_decay 0.01" in finding.message
    assert finding.evidence["tensors"]["conv3.weight"]["batches_seen_by_its_norm"] == 0


def test_light_decay_is_not_reported():
    net, _ = trained(200, momentum=0.0)
    shrunk = (net.conv3.weight.norm() / Net().conv3.weight.norm()).item()
    assert 0.5 < shrunk < 0.9
    assert propose(decayed, net.state_dict()) == []


def test_a_last_layer_may_start_at_a_thousandth():
    state = {**scaled(1), "head.weight": torch.randn(64, 64) * 2e-5}
    assert propose(decayed, state) == []
    renamed = {"mlp.weight" if key == "head.weight" else key: value for key, value in state.items()}
    assert [finding.keys for finding in propose(decayed, renamed)] == [("mlp.weight",)]


def test_many_matrices_of_one_round_scale_were_initialised_so():
    tiny = {f"{index}.weight": torch.randn(64, 64 + 32 * index) * 1e-10 for index in range(9)}
    healthy = {f"fc{index}.weight": torch.randn(64, 64) * 0.1 for index in range(9)}
    assert propose(decayed, {**tiny, **healthy}) == []
    decays = {key: value * 3 for key, value in tiny.items()}
    assert [finding.keys for finding in propose(decayed, {**decays, **healthy})] == [tuple(decays)]


def test_noop_a_few_large_weights():
    state = {**scaled(1), "fc2.weight": torch.randn(256, 256) * 1e-7}
    state["fc2.weight"][3, 3] = 0.01
    assert propose(decayed, state) == []


def test_replaced_on_request():
    model, before = Net(), scaled(1e-5)
    after = {**before, "conv3.weight": model.state_dict()["conv3.weight"]}
    check_repaired(before, after, "VAL201", model, replace="VAL201", fill="target")


@pytest.mark.parametrize("key", ["grid.params", "mixer.dynamic_alpha", "cell.igate_kernels"])
def test_a_weight_that_is_not_a_layers_may_have_started_tiny(key):
    state = {**nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).state_dict(), key: 1e-6 * torch.randn(64, 64)}
    assert not [finding for finding in propose(decayed, state) if finding.level > Level.NOTE]


@pytest.mark.parametrize("scale", [1e-4, 1 / 8192], ids=["N(0, 1e-4)", "one over the rows"])
def test_noop_a_table_that_starts_tiny(scale):
    tables = {f"embed{n}.weight": torch.randn(1000, 16) for n in range(3)}
    assert propose(decayed, {**tables, "quantize.embedding.weight": scale * torch.randn(8192, 16)}) == []


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_weight_that_grew_by_its_moments_is_a_note(tmp_path, kind):
    """It started at 1e-9, gradients arrive, and decay has not begun to act."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    nn.init.normal_(model.get_parameter("2.weight"), std=1e-9)
    optimizer = kind(model.parameters(), lr=1e-9, weight_decay=0.01)
    for _ in range(3):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pth")
    (finding,) = propose(decayed, open_file(str(tmp_path / "model.pth")))
    assert (finding.level, finding.keys) == (Level.NOTE, ("2.weight",))


@pytest.mark.parametrize(
    "layer", [nn.Linear(64, 1), nn.Linear(1, 64), nn.Conv2d(64, 64, 1, groups=64), nn.Conv1d(64, 64, 1, groups=64)]
)
def test_the_weight_of_a_layer_with_one_output_or_one_input(layer):
    """A critic, a regression, a binary head, as other frameworks store them too; a kernel of one number a channel."""
    state = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], layer).state_dict()
    state["4.weight"] *= 1e-9
    (finding,) = propose(decayed, state)
    assert (finding.level, finding.keys) == (Level.ERROR, ("4.weight",))


class Started(nn.Module):
    """A net whose last layer starts at zero, under a name that does not say so."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.decoder = nn.Linear(64, outputs)
        nn.init.zeros_(self.decoder.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(self.layers(x).relu())
        return logits


@pytest.mark.parametrize("outputs", [1, 10])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 5e-4}], ids=str)
def test_noop_a_last_layer_that_a_few_steps_moved_away_from_zero(outputs, options, tmp_path):
    """The optimizer says so: it has no decay, or moments that are of gradients."""
    net = Started(outputs)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5, **options)
    for _ in range(3):
        optimizer.zero_grad()
        logits, labels = net(torch.randn(32, 64)), torch.randint(0, 10, (32,))
        loss = nn.functional.cross_entropy(logits, labels) if outputs > 1 else (logits - 1).square().mean()
        loss.backward()
        optimizer.step()
    assert 0 < net.decoder.weight.square().mean().sqrt() < 1e-4 / 8
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f")
    (finding,) = propose(decayed, open_file(str(tmp_path / "f")))
    assert (finding.level, finding.keys) == (Level.NOTE, ("decoder.weight",))
    shrunk = net.state_dict() | {"decoder.weight": 1e-5 * nn.Linear(64, outputs).weight.detach()}
    assert [each.keys for each in loud(propose(decayed, shrunk))] == [("decoder.weight",)], "a random start, shrunk"


@pytest.mark.parametrize(
    ("observed", "predicted", "agrees"),
    [
        (1e-6, None, None),
        (1e-6, 1e-6, True),
        (1e-6, 1e-4, True),
        (1e-6, 0.5, False),
        (1e-9, 0.0, True),
        (0.3, 0.0, False),
    ],
)
def test_a_prediction_agrees_if_the_logarithms_agree(observed, predicted, agrees):
    assert DecayEvidence(observed, predicted).agrees is agrees


@pytest.mark.parametrize(
    ("corroboration", "words"),
    [
        (DecayEvidence(1e-6), ""),
        (DecayEvidence(1e-6, weight_decay=0.0), ", though the optimizer in this file had no weight_decay"),
        (
            DecayEvidence(1e-6, terms="weight_decay 0.1", weight_decay=0.1),
            "; the optimizer in this file had weight_decay 0.1",
        ),
        (
            DecayEvidence(1e-6, 2e-6, True, None, "weight_decay 0.1 at lr 0.1 over 9 steps", 0.1),
            "; no gradient arrived; weight_decay 0.1 at lr 0.1 over 9 steps predicts 2e-06 of the start, which agrees",
        ),
        (
            DecayEvidence(1e-6, 0.9, None, 0.999, "weight_decay 0.1", 0.1),
            "; only decay moved it, because its momentum is parallel to it; weight_decay 0.1 predicts 0.9 of the "
            "start, "
            "which disagrees",
        ),
        (
            DecayEvidence(1e-6, None, False, None, "weight_decay 0.1", 0.1),
            "; though gradients arrived; the optimizer in this file had weight_decay 0.1",
        ),
    ],
)
def test_evidence_in_the_message(corroboration, words):
    assert corroboration.in_words == words


def test_the_optimizer_explains_the_decay(training, tmp_path):
    net, optimizer = training
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1500}, tmp_path / "t.pth")
    (finding,) = loud(propose(decayed, open_file(str(tmp_path / "t.pth"))))
    assert "weight_decay 0.01 at lr 0.1 over 1500 steps predicts" in finding.message
    assert finding.message.endswith("which agrees")
    figures = finding.evidence["tensors"]["conv3.weight"]
    assert figures["cosine_of_momentum"] == pytest.approx(1.0)
    assert figures["prediction_agrees"] is True
    assert 1 < figures["peak_to_rms"] < 6


def save(path, *, steps, gradient=0.0, optimizer=True):
    """What AdamW leaves of the unused layers, 5 % less at each step; their gradients are so large."""
    net = Net()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        for name, parameter in net.named_parameters():
            size = gradient if name.startswith(UNUSED) else 1.0
            parameter.grad = size * torch.randn_like(parameter)
        adamw.step()
    torch.save({"model": net.state_dict()} | ({"optimizer": adamw.state_dict()} if optimizer else {}), path)
    return open_file(str(path))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"steps": 5}, id="more-than-half-is-left"),
        pytest.param({"steps": 40, "gradient": 1e-3}, id="gradients-arrived"),
        pytest.param({"steps": 80, "optimizer": False}, id="no-optimizer-to-ask"),
    ],
)
def test_noop(tmp_path, settings):
    assert propose(decayed, save(tmp_path / "t.pth", **settings)) == []


@pytest.mark.parametrize("forget", [(), ("decoupled_weight_decay",)], ids=["torch 2.7", "older"])
def test_l2_decay_of_adam_does_not_lower_the_level(tmp_path, forget):
    net = Net()
    adam = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(400):
        for name, parameter in net.named_parameters():
            parameter.grad = (0.0 if name.startswith(UNUSED) else 1.0) * torch.randn_like(parameter)
        adam.step()
    saved = adam.state_dict()
    groups = [{name: value for name, value in group.items() if name not in forget} for group in saved["param_groups"]]
    torch.save({"model": net.state_dict(), "optimizer": saved | {"param_groups": groups}}, tmp_path / "t.pth")
    (finding,) = propose(decayed, open_file(str(tmp_path / "t.pth")))
    assert finding.level > Level.NOTE
    assert {"conv3.weight", "spare.weight"} <= set(finding.keys)
    assert "no gradient arrived" in finding.message


@pytest.mark.parametrize(("steps", "level"), [(40, "NOTE"), (80, "WARNING")])
def test_layers_without_gradients_are_recognised(tmp_path, steps, level):
    (finding,) = propose(decayed, save(tmp_path / "t.pth", steps=steps))
    assert (finding.level.name, set(finding.keys)) == (level, {"conv3.weight", "spare.weight"})
    assert finding.evidence["tensors"]["spare.weight"]["prediction_agrees"] is True


def test_light_decay_is_replaced_on_request(tmp_path):
    save(tmp_path / "t.pth", steps=80)
    before = torch.load(tmp_path / "t.pth")["model"]
    torch.save(Net().state_dict(), tmp_path / "donor.pth")
    donor = str(tmp_path / "donor.pth")
    repaired = ckptfix.repair(
        tmp_path / "t.pth", output=tmp_path / "out.pth", replace="VAL201", fill=donor, select="VAL201"
    )
    assert {key for key, value in repaired.state_dict().items() if not value.equal(before[key])} == {
        "conv3.weight",
        "spare.weight",
    }
