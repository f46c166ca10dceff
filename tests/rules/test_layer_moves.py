"""What a map moves: nothing takes the place of a layer that stays."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability
from ckptfix.rules.key106_renamed_layers import renamed_layers
from tests.rules.proposals import propose
from tests.rules.test_key106_renamed_layers import FUSED, transformer, within


def test_ambiguous_layers_do_not_prevent_other_moves():
    """The keys are sorted, as in safetensors, so that nothing says which of two heads is which."""
    trunk = {f"trunk.{at}.weight": torch.full((6, 6), float(at)) for at in range(3)}
    trunk |= {f"trunk.{at}.bias": torch.zeros(6) for at in range(3)}
    state = dict(sorted({**trunk, "head_a.weight": torch.ones(1, 6), "head_b.weight": torch.zeros(1, 6)}.items()))
    heads = {name: nn.Linear(6, 1, bias=False) for name in ("valence", "arousal")}
    model = within(backbone=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), **heads)
    done, report = ckptfix.repair_state_dict(state, model, rename_layers=True)
    assert torch.equal(done["backbone.2.weight"], trunk["trunk.2.weight"])
    assert not any(f"{name}.weight" in done for name in heads)
    assert any(finding.keys == tuple(f"{name}.weight" for name in heads) for finding in report.findings)
    again, _ = ckptfix.repair_state_dict(done, model, rename_layers=True)
    assert list(again) == list(done)


@pytest.mark.parametrize("is_back", [False, True])
def test_the_same_name_for_different_layers(is_back):
    """SAM's heads have ``layers.0`` to ``layers.2``, and in transformers ``layers.0`` is the second of them."""

    def model(first: str, second: str, last: str) -> Any:
        torch.manual_seed(0)
        heads = {
            f"{at}.{name}": nn.Linear(8, size) for at in "01" for name, size in ((first, 8), (second, 8), (last, 3))
        }
        tree = nn.Module()
        for path, layer in heads.items():
            *front, end = path.split(".")
            inner = tree
            for name in front:
                inner.add_module(name, getattr(inner, name, nn.Module()))
                inner = getattr(inner, name)
            inner.add_module(end, layer)
        return within(body=transformer(*FUSED), heads=tree)

    sides = ("layers.0", "layers.1", "layers.2"), ("proj_in", "layers.0", "proj_out")
    ours, theirs = sides[::-1] if is_back else sides
    state = {key: torch.randn_like(value) for key, value in model(*ours).state_dict().items()}
    (finding,) = propose(renamed_layers, state, model(*theirs))
    assert "4 of their names belong to other layers in the file" in finding.message
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    done, report = ckptfix.repair_state_dict(state, model(*theirs), rename_layers=True)
    assert report.exit_code == 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(done[f"heads.1.{other}.weight"], state[f"heads.1.{one}.weight"])
    assert torch.equal(done["body.head.weight"], state["body.head.weight"])


@pytest.mark.parametrize("is_back", [False, True])
def test_a_layer_that_keeps_its_name_while_another_of_its_list_may_have_left(is_back, tmp_path):
    """Sorted, nothing says whether ``proj_in`` is ``layers.0``: ``layers.0`` may be the second of them on one side."""
    body = {f"body.{key}": value for key, value in transformer(*FUSED).state_dict().items()}

    def heads(*names: str) -> dict[str, torch.Tensor]:
        sizes = dict(zip(names, (8, 8, 3), strict=True))
        layers = {f"heads.{at}.{name}.weight": torch.randn(sizes[name], 8) for at in "01" for name in names}
        return dict(sorted((body | layers).items()))

    sides = heads("layers.0", "layers.1", "layers.2"), heads("proj_in", "layers.0", "proj_out")
    ours, theirs = sides[::-1] if is_back else sides
    torch.save(theirs, tmp_path / "reference.pth")
    report = ckptfix.check(ours, like=tmp_path / "reference.pth", values=False, rename_layers=True)
    (doubt,) = (each for each in report.findings if each.code == "KEY106" and each.fix is None)
    for at in "01":
        fitting = {key for key, value in ours.items() if key.startswith(f"heads.{at}.") and len(value) == 8}
        wanted = {key for key, value in theirs.items() if key.startswith(f"heads.{at}.") and len(value) == 8}
        assert {key for key in doubt.keys if key.startswith(f"heads.{at}.")} == wanted
        assert all(set(doubt.evidence["alternatives"][key]) == fitting for key in wanted)
