"""Which tensors of a base the layers of an adapter change: by their names, or an error that says what to do."""

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix
from ckptfix.errors import AdapterError
from ckptfix.rules.adapter_names import _is_target
from tests.checks import assert_same
from tests.rules.adapters import LINEAR, LORA, changed_config, language, merged_by_peft, net, trained


def test_a_base_with_other_prefixes(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR, modules_to_save=["head"]), tmp_path / "adapter")
    want = merged_by_peft([adapter])
    for prefix in ("model.", "base.model."):
        longer = {f"{prefix}{key}": value for key, value in net().state_dict().items()}
        repaired, _ = ckptfix.repair_state_dict(longer, adapter=adapter, select="FIL108")
        assert_same(repaired, {f"{prefix}{key}": value for key, value in want.items()})
    two = {f"{prefix}{key}": value for prefix in ("a.", "b.") for key, value in net().state_dict().items()}
    with pytest.raises(AdapterError, match=r"may belong under a\. or b\."):
        ckptfix.repair_state_dict(two, adapter=adapter)


@pytest.mark.parametrize("value", [1.5, True, "q", {"q": 1}, [None], [[]]], ids=repr)
@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "modules_to_save"])
def test_lists_of_modules_that_are_none_decide_nothing(name, value, tmp_path):
    saved = trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter")
    want = merged_by_peft([saved])
    repaired, _ = ckptfix.repair_state_dict(net().state_dict(), adapter=changed_config(saved, **{name: value}))
    assert_same(repaired, want)


@pytest.mark.parametrize(("layers", "is_one"), [(0, True), ([0, 1], True), ([1], False), ([[0]], False), ([{}], False)])
def test_layers_of_a_configuration_are_numbers(layers, is_one):
    assert _is_target({"target_modules": ["q"], "layers_to_transform": layers}, "model.layers.0.q") is is_one


@pytest.mark.parametrize(
    "value", [10**400, float("nan"), float("inf"), "4", None, True], ids=lambda value: f"{value}"[:9]
)
@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_a_number_that_is_none_is_refused(name, value, tmp_path):
    saved = changed_config(trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter"), **{name: value})
    with pytest.raises(AdapterError, match=f"the {name} of adapter_config.json has"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda base: base.pop("q.weight"), "lacks 1 of the adapter's 2 layers, such as q", id="name"),
        pytest.param(lambda base: base.update({"q.weight": torch.ones(33, 31)}), "do not fit q.weight", id="shape"),
        pytest.param(lambda base: base.update({"q.weight": torch.ones(33, 32).char()}), "quantised", id="int8"),
        pytest.param(lambda base: base.update({"head.weight": torch.ones(5, 32).char()}), "quantised", id="head"),
        pytest.param(lambda base: base.update({"q.qweight": base.pop("q.weight")}), "it has qweight", id="GPTQ"),
        pytest.param(lambda base: base.update({"q.W_q": base.pop("q.weight")}), "it has W_q", id="HQQ"),
        pytest.param(lambda base: base.update({"q.weight._data": base.pop("q.weight")}), "it has weight", id="Quanto"),
        *(
            pytest.param(lambda base, one=one: base.update({f"q.{one}": torch.ones(33)}), f"q.{one} shows", id=one)
            for one in ("weight_scale", "weight_scale_inv", "scale_weight", "SCB", "weight.absmax", "qweight")
        ),
    ],
)
def test_another_base_is_refused(change, says, tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR, modules_to_save=["head"]), tmp_path / "adapter")
    base = dict(net().state_dict())
    change(base)
    with pytest.raises(AdapterError, match=says):
        ckptfix.repair_state_dict(base, adapter=adapter)


@pytest.mark.parametrize(
    ("beside", "is_named"),
    [("SCB", True), ("weight_scale", True), ("weight.absmax", True), ("W_q", False)],
)
def test_a_base_whose_formula_is_known_can_become_floats_first(beside, is_named, tmp_path):
    """FSDP's codes of four bits have a dtype of floats; their shape does not mean another model."""
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    codes = torch.ones(528, 1).bfloat16() if beside == "weight.absmax" else torch.ones(33, 32).char()
    base = {**net().state_dict(), "q.weight": codes, f"q.{beside}": torch.ones(33)}
    with pytest.raises(AdapterError, match="is quantised, as q") as refused:
        ckptfix.repair_state_dict(base, adapter=adapter)
    assert ("dtype='bfloat16' unsafe_fixes=True" in str(refused.value)) is is_named


def test_scales_of_activations_are_not_a_reason_to_refuse(tmp_path):
    adapter = trained(LORA(r=4, target_modules=LINEAR), tmp_path / "adapter")
    base = {**net().state_dict(), "q.input_scale": torch.ones(1), "embed.weight_scale": torch.ones(50)}
    repaired, _ = ckptfix.repair_state_dict(base, adapter=adapter, select="FIL108")
    assert_same(repaired, {**base, **merged_by_peft([adapter])})


@pytest.mark.parametrize(
    ("module", "key", "is_meant"),
    [
        ("model.layers.0.q", "layers.0.q", True),
        ("model.language_model.layers.0.q", "language_model.model.layers.0.q", True),
        ("bert.encoder.0.q", "encoder.0.q", True),
        ("encoder.layers.0.q", "decoder.layers.0.q", False),
        ("layers.0.q", "layers.0.q_proj", False),
        ("layers.0.q", "xlayers.0.q", False),
    ],
)
def test_names_of_other_releases(module, key, is_meant, tmp_path):
    one, two, weight = torch.randn(2, 4), torch.randn(6, 2), torch.randn(6, 4)
    tensors = {f"base_model.model.{module}.lora_A.weight": one, f"base_model.model.{module}.lora_B.weight": two}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    state = {f"{key}.weight": weight}
    if is_meant:
        repaired, _ = ckptfix.repair_state_dict(state, adapter=tmp_path, select="FIL108")
        assert_same(repaired, {f"{key}.weight": weight + two @ one})
    else:
        with pytest.raises(AdapterError, match="lacks 1 of the adapter's 1 layers"):
            ckptfix.repair_state_dict(state, adapter=tmp_path)


def test_layers_of_two_towers_are_not_those_of_one(tmp_path):
    modules = ("encoder.0.q", "decoder.0.q")
    tensors = {f"{module}.lora_{side}.weight": torch.ones(2, 2) for module in modules for side in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    with pytest.raises(AdapterError, match="lacks 2 of the adapter's 2 layers"):
        ckptfix.repair_state_dict({"0.q.weight": torch.ones(2, 2)}, adapter=tmp_path)


def test_of_several_components_the_largest_names_the_layers_that_are_not_there(tmp_path):
    modules = ("text_encoder.q", "unet.q.0", "unet.v.0")
    tensors = {f"{module}.lora_{side}.weight": torch.ones(2, 2) for module in modules for side in "AB"}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=r"lacks 2 of the adapter's 2 layers, such as q\.0"):
        ckptfix.repair_state_dict({"k.weight": torch.ones(2, 2)}, adapter=tmp_path / "x.safetensors")


def test_names_with_underscores_for_dots(tmp_path):
    """A kohya file without alpha scales by one; two modules with equal names in this form are refused."""
    base = {"a.b_c.weight": torch.randn(6, 4), "a.d.weight": torch.randn(6, 4)}
    one, two = torch.randn(2, 4), torch.randn(6, 2)
    save_file(
        {"lora_unet_a_b_c.lora_down.weight": one, "lora_unet_a_b_c.lora_up.weight": two}, tmp_path / "k.safetensors"
    )
    repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "k.safetensors", select="FIL108")
    assert_same(repaired, {"a.b_c.weight": base["a.b_c.weight"] + two @ one, "a.d.weight": base["a.d.weight"]})
    base["a_b.c.weight"] = torch.randn(6, 4)
    with pytest.raises(AdapterError, match=r"may be a\.b_c\.weight or a_b\.c\.weight"):
        ckptfix.repair_state_dict(base, adapter=tmp_path / "k.safetensors")
    diffusion = {"model.diffusion_model.input_blocks.4.1.to_q.weight": torch.ones(4, 4)}
    with pytest.raises(AdapterError, match="its layers are named as in diffusers"):
        ckptfix.repair_state_dict(diffusion, adapter=tmp_path / "k.safetensors")


def test_the_text_encoder_of_kohya_in_names_of_transformers_5(tmp_path):
    name, one, two = "lora_te1_text_model_encoder_layers_0_q_proj", torch.randn(2, 4), torch.randn(6, 2)
    save_file({f"{name}.lora_down.weight": one, f"{name}.lora_up.weight": two}, tmp_path / "k.safetensors")
    for key in ("encoder.layers.0.q_proj.weight", "text_model.encoder.layers.0.q_proj.weight"):
        base = {key: torch.randn(6, 4)}
        repaired, _ = ckptfix.repair_state_dict(base, adapter=tmp_path / "k.safetensors", select="FIL108")
        assert_same(repaired, {key: base[key] + two @ one})


@pytest.mark.parametrize("only", [None, [0]])
def test_an_adapter_with_fewer_layers_than_its_configuration_names_is_refused(only, tmp_path):
    adapter = trained(
        LORA(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=only), tmp_path / "adapter", make=language
    )
    base = language().state_dict()
    # A tower that has a prefix in the base, and a layer that transformers leaves out.
    base = {f"text.{key}": value for key, value in base.items()} | {"vision.layers.0.q_proj.weight": torch.ones(8, 8)}
    base |= {f"text.model.layers.2.{name}.weight": torch.ones(8, 8) for name in ("eh_proj", "mlp.q_proj", "q_proj")}
    ckptfix.repair_state_dict(base, adapter=adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "1.q_proj" not in key}, file)
    if only:
        ckptfix.repair_state_dict(base, adapter=adapter)
        return
    with pytest.raises(AdapterError, match=r"names q_proj in 2 layers and the adapter has 1 of them, not .*1\.q_proj"):
        ckptfix.repair_state_dict(base, adapter=adapter)
    changed_config(adapter, target_modules=r".*\.(q|v)_proj")
    ckptfix.repair_state_dict(base, adapter=adapter)


def test_an_adapter_without_any_layer_of_a_kind_that_its_configuration_names_is_refused(tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q_proj", "v_proj"]), tmp_path / "adapter", make=language)
    base = language().state_dict()
    experts = {f"model.layers.0.mlp.experts.{number}.up_proj.weight": torch.ones(8, 8) for number in range(2)}
    file = adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "v_proj" not in key}, file)
    with pytest.raises(AdapterError, match="names v_proj, which the base has in 2 layers but the adapter lacks"):
        ckptfix.repair_state_dict(base, adapter=adapter)
    # Targets that the base lacks, and experts that were no modules when it was trained, are not lost.
    changed_config(adapter, target_modules=["q_proj", "k_proj", "up_proj"])
    base = {key: value for key, value in base.items() if "k_proj" not in key} | experts
    ckptfix.repair_state_dict(base, adapter=adapter)


@pytest.mark.parametrize("only", [[0], [1]])
def test_the_number_of_a_layer_is_that_of_its_first_list_or_of_its_last(only, tmp_path):
    """peft takes the last one in older releases: `decoder.block.0.layer.1.q` of T5 is of block 0 or of layer 1."""

    def make(dtype=torch.float32):
        torch.manual_seed(0)
        model, model.decoder = nn.Module(), nn.Module()
        blocks = [nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)}) for _ in range(2)]) for _ in range(2)]
        model.decoder.block = nn.ModuleList(nn.ModuleDict({"layer": layers}) for layers in blocks)
        return model.to(dtype)

    adapter = trained(LORA(r=4, target_modules=["q"], layers_to_transform=only), tmp_path / "adapter", make=make)
    repaired, _ = ckptfix.repair_state_dict(make().state_dict(), adapter=adapter)
    assert_same(repaired, merged_by_peft([adapter], make=make))


def test_what_to_do_about_a_base_that_lacks_layers(tmp_path):
    adapter = trained(LORA(r=4, target_modules=["q"]), tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(net(), adapter).state_dict()
    with pytest.raises(AdapterError, match="contains an unmerged adapter and its base") as caught:
        ckptfix.repair_state_dict(whole, adapter=adapter)
    assert str(adapter / "adapter_config.json") in str(caught.value)
    with pytest.raises(AdapterError, match=r"is an adapter and not a model; give the base that .*adapter was trained"):
        ckptfix.repair(adapter, adapter=adapter, output=tmp_path / "out.safetensors")
    with pytest.raises(AdapterError, match="state_dict: holds no layers of an adapter"):
        ckptfix.repair_state_dict(net().state_dict(), adapter=adapter / "adapter_config.json")
    base = tmp_path / "base.safetensors"
    save_file({"head.weight": torch.ones(5, 32)}, base)
    changed_config(adapter, base_model_name_or_path=str(base))
    with pytest.raises(AdapterError, match="whose file lacks 1 of the adapter's 1 layers"):
        ckptfix.repair(base, adapter=adapter, output=tmp_path / "out.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')  # which release 5 loads from the names of release 4
    with pytest.raises(AdapterError, match="lacks, 1 of 1, such as q; ") as caught:
        ckptfix.repair(base, adapter=adapter, output=tmp_path / "out.safetensors")
    assert f"transformers:{tmp_path}" in str(caught.value)


def test_the_model_renames_the_layers_of_its_file_first(tmp_path):
    """transformers 5 writes ViT's old names, and adapters have the new ones."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

    def make(dtype=torch.float32):
        torch.manual_seed(0)
        return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).to(dtype)

    make().save_pretrained(tmp_path / "vit")
    adapter = trained(
        LORA(r=4, target_modules=["q_proj", "fc1"], modules_to_save=["classifier"]), tmp_path / "lora", make=make
    )
    with pytest.raises(AdapterError, match="have its layers renamed for your transformers"):
        ckptfix.repair(tmp_path / "vit", adapter=adapter, output=tmp_path / "merged.safetensors")
    ckptfix.repair(tmp_path / "vit", make(), adapter=adapter, output=tmp_path / "merged.safetensors")
    merged, want = load_file(tmp_path / "merged.safetensors"), merged_by_peft([adapter], make=make)
    assert_same(dict(sorted(merged.items())), dict(sorted(want.items())))
