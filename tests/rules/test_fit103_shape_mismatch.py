"""FIT103: the right name and another shape."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.edits import Drop
from ckptfix.core.finding import Applicability, Blocks, Level
from ckptfix.report.advice import recommended, remedies_text
from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from ckptfix.rules.leftovers import NAME_THE_MODEL
from tests.rules.proposals import propose, repaired


def scalar(shape: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.scale = nn.Parameter(torch.full(shape, 3.0))
    return module


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(nn.Linear(2, 3).state_dict(), None, id="no target"),
        pytest.param(nn.Linear(2, 3).state_dict(), nn.Linear(2, 3), id="the same shapes"),
        pytest.param(nn.Linear(2, 3).state_dict(), nn.LazyLinear(3), id="a lazy parameter takes any shape"),
        pytest.param({"other": torch.zeros(9)}, nn.Linear(2, 3), id="missing and unexpected are other rules' business"),
    ],
)
@pytest.mark.parametrize("drop_mismatched", [False, True])
def test_noop(state, model, drop_mismatched):
    assert propose(shape_mismatch, state, model, drop_mismatched=drop_mismatched) == []


def test_shown_with_both_shapes_and_never_resized():
    (finding,) = propose(shape_mismatch, nn.Linear(2, 10).state_dict(), nn.Linear(2, 3))
    assert finding.level == Level.ERROR
    assert finding.evidence["shapes"]["weight"] == {"file": [10, 2], "target": [3, 2]}
    assert finding.fix is None
    assert finding.remedies == NAME_THE_MODEL


def test_the_price_of_other_values():
    file, model = (nn.Sequential(nn.Linear(9, 9), nn.Linear(9, width)) for width in (3, 2))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    first, donor, *_ = finding.remedies
    assert first.options == (("drop_mismatched", True), ("fill", "target"))
    assert first.untrained == (("1.weight", 18), ("1.bias", 2))
    assert not donor.is_complete


def test_dropped_where_asked_for():
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}
    (finding,) = propose(shape_mismatch, state, nn.Linear(2, 3), drop_mismatched=True)
    assert finding.fix is not None
    assert finding.fix.edits == (Drop("bias"),)
    assert finding.fix.asked
    assert finding.fix.applicability == Applicability.UNSAFE


def test_an_entry_that_is_not_a_tensor():
    (finding,) = propose(shape_mismatch, {"weight": "gone", "bias": torch.zeros(3)}, nn.Linear(2, 3))
    assert finding.evidence["shapes"] == {"weight": {"file": None, "target": [3, 2]}}


@pytest.mark.parametrize(("stored", "wanted"), [((1,), ()), ((), (1,))], ids=["[1] for []", "[] for [1]"])
def test_one_element_is_reshaped(stored, wanted):
    model = scalar(wanted)
    (finding,) = propose(shape_mismatch, scalar(stored).state_dict(), model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(shape_mismatch, scalar(stored).state_dict(), model)
    model.load_state_dict(after, strict=True)
    assert after["scale"].item() == 3.0


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param((4, 3, 1, 1), (4, 3), id="a 1x1 convolution for a linear layer"),
        pytest.param((4, 3), (4, 3, 1, 1), id="a linear layer for a 1x1 convolution"),
        pytest.param((4, 3, 1), (4, 3, 1, 1), id="a convolution over one axis for one over two"),
        pytest.param((3, 4), (1, 3, 4), id="positions without their batch"),
        pytest.param((4,), (4, 1, 1), id="a layer scale"),
    ],
)
def test_axes_of_one_element_are_put_on_and_taken_off(stored, wanted):
    state = {"scale": torch.rand(stored)}
    (finding,) = propose(shape_mismatch, state, scalar(wanted))
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    assert torch.equal(repaired(shape_mismatch, state, scalar(wanted))["scale"], state["scale"].reshape(wanted))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param((4, 1, 3), (4, 3), id="an axis in the middle: which of the others was it"),
        pytest.param((4, 1, 1, 3), (4, 1, 3, 1), id="a kernel that lies for one that stands"),
        pytest.param((4, 1), (1, 4), id="a column for a row"),
        pytest.param((2, 6), (12,), id="the same number of elements"),
    ],
)
def test_other_axes_are_left_unchanged(stored, wanted):
    (finding,) = propose(shape_mismatch, {"scale": torch.rand(stored)}, scalar(wanted))
    assert (finding.level, finding.fix) == (Level.ERROR, None)


def test_strides_that_no_shape_would_keep_are_left_unchanged():
    (finding,) = propose(shape_mismatch, {"scale": torch.rand(3, 4).t()}, scalar((4, 3, 1, 1)))
    assert (finding.level, finding.fix) == (Level.ERROR, None)


def test_a_transpose_is_called_so():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    state = {**model.state_dict(), "0.weight": torch.zeros(2, 3)}
    (finding,) = propose(shape_mismatch, state, model)
    assert finding.message == "1 key whose shape differs from the target's, 1 of them transposed"
    assert remedies_text(finding.remedies).startswith(
        "convert the file"
    )  # its square matrices are transposed too, and fit


def kernels(*shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"weight{number}", nn.Parameter(torch.randn(shape)))
    return module


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (((16, 3, 3, 3, 16), (32, 3, 3, 3, 16), (4, 1, 1, 1, 8)), (1, 2, 3, 4, 0)),
        (((8, 2, 3, 5), (9, 2, 3, 5)), (2, 3, 1, 0)),
        (((4, 3), (5, 4)), (1, 0)),
        (((4, 3, 7),), (2, 0, 1)),
    ],
    ids=["spconv 1 for spconv 2", "HWIO for OIHW", "linear layers transposed", "three sizes"],
)
def test_axes_are_put_in_the_only_order_that_fits(shapes, axes):
    model = kernels(*shapes)
    state = {key: value.permute(axes).contiguous() for key, value in model.state_dict().items()}
    (finding,) = propose(shape_mismatch, state, model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    assert finding.blocks is Blocks.FILLING
    after = repaired(shape_mismatch, state, model, unsafe_fixes=True)
    assert all(torch.equal(after[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ([(3, 3, 3, 16, 16)], [(16, 3, 3, 3, 16)]),
        ([(3, 4), (5, 5)], [(4, 3), (5, 5)]),
        ([(3, 4), (7, 4)], [(4, 3), (5, 4)]),
        ([(4, 1)], [(1, 4)]),
        ([(4, 1, 3)], [(4, 3, 1)]),
        ([(2, 3, 2, 4)], [(2, 2, 3, 4)]),
    ],
    ids=["in or out first", "a square one beside", "a head of another size", "a row", "a kernel", "two equal sides"],
)
def test_several_orders_fit_or_none(stored, wanted):
    state = {key: value.detach() for key, value in kernels(*stored).state_dict().items()}
    findings = propose(shape_mismatch, state, kernels(*wanted))
    assert [finding.fix for finding in findings] == [None]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [((4, 8, 1, 1), (8, 4, 1, 1)), ((4, 4, 3, 3), (3, 3, 4, 4)), ((2, 1, 3), (3, 1, 2))],
    ids=["1x1", "two orders fit", "a kernel"],
)
def test_nothing_is_filled_for_axes_in_another_order(stored, wanted):
    model = kernels(wanted, (6, 6), (7, 7))
    state = {**model.state_dict(), "weight0": torch.ones(stored)}
    (finding,) = propose(shape_mismatch, state, model)
    assert finding.blocks is Blocks.FILLING
    assert not any("fill" in dict(remedy.options) for remedy in finding.remedies)


def test_nothing_is_filled_where_most_matrices_are_transposed():
    """Next to transposed matrices, a head of another size does not make square ones, which fit as they are, right."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    state = {key: value.t() if value.dim() == 2 else value for key, value in model.state_dict().items()}
    state |= {"3.weight": torch.ones(7, 4), "3.bias": torch.ones(7)}
    (finding,) = propose(shape_mismatch, state, model)
    assert finding.blocks is Blocks.FILLING
    assert not any(remedy.options for remedy in finding.remedies)


def test_nothing_is_filled_where_a_missing_layer_has_the_shape():
    """The last layer of a Sequential has another number in a deeper one."""
    head = nn.Linear(4, 5)
    file, model = nn.Sequential(nn.Linear(2, 4), head), nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), head)
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert finding.blocks is Blocks.FILLING
    (remedy,) = finding.remedies
    assert (remedy.options, remedy.text.startswith("1.weight of the file has the shape of the missing 2.weight")) == (
        (),
        True,
    )


@pytest.mark.parametrize("shape", [(), (3,), (1, 1, 3), (0,), (4, 3, 3, 3, 3)], ids=str)
def test_a_tensor_of_any_other_shape_is_reported(shape):
    """A scalar in the place of a weight, or a vector in that of a scalar, has no rows to compare."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))
            self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 3)

    model = Net()
    for key, value in model.state_dict().items():
        if tuple(value.shape) != shape:
            report = ckptfix.check({**model.state_dict(), key: torch.ones(shape)}, model)
            assert key in {found for finding in report.findings for found in finding.keys}
            assert report.exit_code == 1


def test_a_rank_of_tensor_parallelism_gets_no_recipe_for_its_words():
    """Half of the words and half of each layer: padding the words would not repair the rest."""
    layers = {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8), "lm_head": nn.Linear(8, 64, bias=False)}
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(64, 8), **layers})
    rank = {key: value.chunk(2, dim=int(key == "down.weight"))[0] for key, value in model.state_dict().items()}
    rank["down.bias"] = layers["down"].bias.data
    (finding,) = [found for found in ckptfix.check(rank, model).findings if found.code == "FIT103"]
    assert (finding.fix, [remedy.options for remedy in finding.remedies]) == (None, [()])
    assert "1/2 of the rows or columns" in finding.message


@pytest.mark.parametrize(("stored", "wanted", "offers"), [(9, 4, False), (4, 3, False), (3, 4, True), (9, 1, True)])
def test_a_recipe_that_leaves_channels_out_makes_no_command(stored, wanted, offers):
    def net(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.Conv2d(8, 8, 3))

    assert bool(recommended(ckptfix.check(net(stored).state_dict(), net(wanted)))) is offers
