"""Which tensors an adapter changes: by names, shapes and configuration, or an error that says what does not fit."""

from __future__ import annotations

import pytest
import torch

import ckptfix
from ckptfix.errors import AdapterError
from tests.checks import assert_same
from tests.rules.adapters import LINEAR, LORA, changed_config, merged_by_peft, net, trained


def test_a_base_with_other_prefixes(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR, modules_to_save=["head"]), tmp_path / "adapter")
    want = merged_by_peft([adapter])
    for prefix in ("model.", "base.model."):
        longer = {f"{prefix}{key}": value for key, value in net().state_dict().items()}
        repaired, _ = ckptfix.repair_state_dict(longer, adapter=adapter, select="FIL108")
        assert_same(repaired, {f"{prefix}{key}": value for key, value in want.items()})
    two = {f"{prefix}{key}": value for prefix in ("a.", "b.") for key, value in net().state_dict().items()}
    with pytest.raises(AdapterError, match=r"may be those below a\. or b\."):
        ckptfix.repair_state_dict(two, adapter=adapter)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        pytest.param({"r": 8}, "of rank 8, which do not fit", id="another rank"),
        pytest.param({"peft_type": "LOHA"}, "an adapter of the type LOHA", id="LoHa"),
        pytest.param({"init_lora_weights": "pissa_niter_4"}, "changes the base too", id="PiSSA"),
        pytest.param({"layer_replication": [[0, 2]]}, "layer_replication", id="replicated layers"),
        pytest.param({"alora_invocation_tokens": [1]}, "aLoRA", id="aLoRA"),
        pytest.param({"alpha_pattern": {"(a*)*b": 1}}, "has the pattern", id="a pattern that takes for ever"),
    ],
)
def test_what_the_matrices_alone_do_not_say_is_refused(config, says, tmp_path):
    adapter = changed_config(trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter"), **config)
    with pytest.raises(AdapterError, match=says) as caught:
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda base: base.pop("q.weight"), "1 of its 2 layers are not there, such as q", id="name"),
        pytest.param(lambda base: base.update({"q.weight": torch.ones(33, 31)}), "do not fit q.weight", id="shape"),
        pytest.param(lambda base: base.update({"q.weight": torch.ones(33, 32).char()}), "quantised", id="int8"),
        pytest.param(lambda base: base.update({"q.qweight": base.pop("q.weight")}), "it has qweight", id="GPTQ"),
    ],
)
def test_another_base_is_refused(change, says, tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    base = dict(net().state_dict())
    change(base)
    with pytest.raises(AdapterError, match=says):
        ckptfix.repair_state_dict(base, adapter=adapter)
