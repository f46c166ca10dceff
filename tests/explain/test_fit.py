"""What the keys in a message show."""

import pytest

from ckptfix.explain import explain
from ckptfix.explain.fit import read_fit
from ckptfix.explain.text import messages
from tests.explain.test_mismatch import FVCORE

MODULES = ("conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "head.0")


def quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def text(missing: list[str] | None = None, unexpected: list[str] | None = None, *errors: str) -> str:
    """The message of torch 2.13."""
    parts = []
    if missing:
        parts.append(f"Missing key(s) in state_dict: {quoted(missing)}. ")
    if unexpected:
        parts.append(f"Unexpected key(s) in state_dict: {quoted(unexpected)}. ")
    return "RuntimeError: Error(s) in loading state_dict for Net:\n\t" + "\n\t".join([*parts, *errors])


def under(prefix: str = "", leaf: str = "weight") -> list[str]:
    return [f"{prefix}{module}.{leaf}" for module in MODULES]


def causes(message: str) -> str:
    (read,) = messages(message)
    return " ".join(sentence for sentence, _ in read_fit(read)[0])


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(text(["a.weight"], ["module.fc.weight"]), id="another layer under the prefix"),
        pytest.param(text(under(), ["head.weight"]), id="one that only sounds alike"),
        pytest.param(
            text(unexpected=under("module.")).replace("for Net", "for DataParallel"),
            id="nothing is missing: the model has the prefix too",
        ),
        pytest.param(text(["fc.weight"]), id="no unexpected key at all"),
    ],
)
def test_no_prefix_where_there_is_none(message: str):
    told = causes(message)
    assert "DataParallel" not in told
    assert "prefix" not in told


def cut(keys: list[str], characters: int) -> list[str]:
    return [key[characters:] for key in keys]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(text(under("model."), cut(under("model."), 6)), id="whole segments: a prefix"),
        pytest.param(text(under(), [*cut(under(), 7), "other.weight"]), id="one key is another"),
        pytest.param(text(["conv1.weight"], ["onv1.weight"]), id="a single key may be a misprint"),
        pytest.param(
            text(["fc_norm.weight", "fc_norm.bias", "head.weight"], ["norm.weight", "norm.bias"]), id="the norm of MAE"
        ),
    ],
)
def test_no_characters_cut_off_where_the_names_say_something_else(message: str):
    assert "without their first" not in causes(message)


@pytest.mark.parametrize("characters", [7, 12])
def test_characters_that_the_program_cuts_off_each_name(characters: int):
    names = [*under(), *under(leaf="running_mean")]
    counters = under(leaf="num_batches_tracked")  # torch supplies these itself, so that none is missing
    message = text(names, sorted(set(cut([*names, *counters], characters))))
    assert f"without their first {characters} characters" in causes(message)
    (read,) = messages(message)
    assert not [advice.command for advice in read_fit(read)[1] if advice.command.startswith("ckptfix repair")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (text(under(), under("module.")), "5 keys with the wrapper prefix `module.`: the file was saved from"),
        (text(["fc.weight"], ["module.fc.weight"]), "1 key with the wrapper prefix `module.`"),
        (text(under(), [*under("module."), "module.old.weight"]), "6 keys with the wrapper prefix"),
        (text(unexpected=under("module.")), "prefix `module.`: the file was saved from"),
        (text(unexpected=under("module.")), "If the whole message lists no missing key, the model has this prefix too"),
        ('Unexpected key(s) in state_dict: "module.…"', "1 key with the wrapper prefix `module.`"),
        (text(unexpected=under("module.")).rstrip(". ") + ", ...", "prefix `module.`: the file was saved from"),
        (text(under(), under("_orig_mod.")), "`_orig_mod` of torch.compile"),
        (text(under(), under("_orig_mod.module.")), "with the wrapper prefix `module.`"),
        (text(under("module."), under()), "the model is wrapped (`module` of DataParallel"),
        (text(under("_orig_mod."), under()), "the model is wrapped (`_orig_mod` of torch.compile)"),
        ('Missing key(s) in state_dict: "a.weight", "b.weight", ...', "cut short in this text"),
        (text(under(), under("model.")), "5 keys under a different prefix"),
        (text(under("backbone."), under()), "5 keys under a different prefix"),
        (text(under(leaf="parametrizations.weight.original0"), under(leaf="weight_g")), "weight_norm"),
        (text(under(leaf="num_batches_tracked")), "5 BatchNorm modules without num_batches_tracked, as saved before"),
        (text(unexpected=under(leaf="num_batches_tracked")), "5 unexpected counters: these modules have no"),
        (text(["embeddings.position_ids"]), "1 buffer missing, which the model computes"),
        (text(unexpected=["embeddings.position_ids"]), "1 buffer unexpected: this model computes"),
        (text(unexpected=["a._fsdp_wrapped_module._flat_param"]), "flat parameter of FSDP"),
        (text(["fc.weight"]), "1 key that the file does not have"),
        (text(["blocks.0.0.attn.weight"], ["blocks.0.attn.weight"]), "differ only in the numbers of the layers"),
        (text(["enc_q.pre.weight", "enc_q.pre.bias"]), "2 keys of a part that only training uses"),
        (text(unexpected=["decoder.attn._extra_state"]), "1 key of what modules keep beside their weights"),
        (text(["mlp.experts.weight1"], ["mlp.experts.local_experts.0.linear_fc1.weight"]), "The layout differs"),
        (text(["head.weight", "fc_norm.weight"], ["norm.weight", "decoder_pos_embed"]), "Only the head differs"),
        (
            text(["layers.0.mlp.experts.gate_up_proj"], ["layers.0.mlp.experts.0.gate_proj.weight"]),
            "`layers.0.mlp.experts.gate_up_proj` in the model and `layers.0.mlp.experts.0.gate_proj.weight` in the"
            " file",
        ),
        (text(["h.0.attn.query.weight"], ["h.0.attn.qkv.weight"]), "The layout differs: `h.0.attn.query.weight`"),
        (text(under(), [f"other{n}.kernel" for n in range(5)]), "The other names do not match"),
        (text(under(), ["epoch", "state_dict", "optimizer"]), "the weights are in it under 'state_dict'"),
        (text([], ["epoch", "state_dict", "optimizer"]), "the weights are in it under 'state_dict'"),
        (text(["a.weight", "b.weight"], ["teacher"]), "the weights are in it under 'teacher'"),
        ("ValueError: Missing key in checkpoint: generator.linear.weight", "1 key that the file does not have"),
        (
            "weights of the model checkpoint were not used when initializing T5: ['a.bias']",
            "1 key that the model has no place",
        ),
    ],
)
def test_what_the_keys_say(message: str, words: str):
    assert words in causes(message)


OLD = [
    pytest.param(
        "KeyError: 'unexpected key \"module.conv1.weight\" in state_dict'", "1 key with the wrapper prefix", id="0.3"
    ),
    pytest.param(
        "KeyError: 'unexpected key \"module.bn1.num_batches_tracked\" in state_dict'",
        "1 unexpected counter: these modules have no num_batches_tracked",
        id="0.3, a counter: all keys before it did fit",
    ),
    pytest.param(
        "_IncompatibleKeys(missing_keys=['a.w', 'b.w'], unexpected_keys=['module.a.w', 'module.b.w'])",
        "2 keys with the wrapper prefix",
        id="what load_state_dict returns",
    ),
    pytest.param(
        "unexpected key in source state_dict: module.a.weight, module.b.weight\n\n"
        "missing keys in source state_dict: a.weight, b.weight\n",
        "2 keys with the wrapper prefix",
        id="mmcv",
    ),
]


@pytest.mark.parametrize(("message", "words"), OLD)
def test_other_wordings(message: str, words: str):
    assert words in causes(message)


def test_as_many_missing_as_unexpected_keys_point_to_a_map():
    (read,) = messages(text(under(), [f"{name}.kernel" for name in ("a", "b.0", "b.1", "c.0", "d")]))
    assert "ckptfix map {FILE} {MODEL}" in [advice.command for advice in read_fit(read)[1]]
    (read,) = messages(text(under(), [f"{name}.kernel" for name in ("a", "b.0", "b.1", "c.0")]))
    assert "ckptfix map {FILE} {MODEL}" not in [advice.command for advice in read_fit(read)[1]]


def test_the_advice_for_a_prefix_alone_needs_no_model():
    (message,) = messages(text(under(), under("module.module.")))
    advice = read_fit(message)[1]
    assert [each.command for each in advice if each.command] == ["ckptfix repair {FILE}"]
    assert [each.code for each in advice if each.code] == [
        'torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "module.module.")'
    ]


def test_thousands_of_keys():
    keys = [f"layers.{n}.weight" for n in range(3000)]
    assert "3000 keys with the wrapper prefix" in causes(text(keys, [f"module.{key}" for key in keys]))


def test_what_a_policy_normalises_with_is_not_a_key_to_be_ignored():
    (message,) = messages(text(unexpected=["normalize_inputs.buffer_observation_state.mean"]))
    assert any("strict=False drops keys that are needed" in one.text for one in read_fit(message)[1])


def test_scales_of_codes_are_not_keys_to_be_ignored():
    """All keys of the model are in the file, but their values are not weights."""
    (message,) = messages(text(unexpected=["scaled_fp8", *under(leaf="scale_weight")]))
    causes, advice = read_fit(message)
    assert causes[0][0].startswith("5 keys of quantised weights")
    assert [one.text for one in advice if "strict=False" in one.text] == [
        "strict=False does not help: it loads the codes as if they were the weights."
    ]


def test_a_prefix_in_the_lists_of_fvcore():
    unused = "The checkpoint state_dict contains keys that are not used by the model:\n"
    names = [f"module.{line}" for line in FVCORE.splitlines()[1:]]
    found = explain(f"{FVCORE}WARNING:fvcore.common.checkpoint:{unused}" + "\n".join(names))
    assert found is not None
    assert found.name == "unused-checkpoint-keys"
    assert "7 keys with the wrapper prefix `module.`" in found.causes[1][0]
    assert found.advice[0].command == "ckptfix repair FILE"


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        (text(["report.tp", "report.fn"]), True),
        (text(["embeddings.position_ids"], ["embeddings.token_ids"]), False),
        (text(["report.tp", "fc.weight"]), False),
    ],
)
def test_only_computed_buffers_may_stay_as_the_model_made_them(message: str, is_right: bool):
    (read,) = messages(message)
    said = " ".join(advice.text for advice in read_fit(read)[1])
    assert ("strict=False loads everything that the file has" in said) is is_right
    assert ("strict=False does not help" in said) is (not is_right and "fc.weight" in message)


def test_weights_without_elements_are_in_the_files_of_the_ranks():
    said = (
        "size mismatch for a.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current"
    )
    (message,) = messages(
        f"RuntimeError: Error(s) in loading state_dict for Net:\n\t{said} model is torch.Size([4, 2])."
    )
    commands = [each.command for each in read_fit(message)[1] if each.command]
    assert commands[0] == "ckptfix repair {FOLDER} -o model.pth"  # ZeRO's files say the shapes
    assert not any("--fill" in command or "--adapt" in command for command in commands)


def test_ranks_of_fsdp_are_put_together():
    (flat,) = messages(text(["pos_embed"], ["_flat_param"]))
    assert [advice.command for advice in read_fit(flat)[1] if advice.command] == [
        "ckptfix repair {FOLDER} --model {MODEL} -o model.pth"
    ]


def advice(message: str) -> str:
    (read,) = messages(message)
    return "\n".join(f"{each.command}{each.code} | {each.text}" for each in read_fit(read)[1])


def sized(key: str, stored: str, wanted: str) -> str:
    return (
        f"size mismatch for {key}: copying a param with shape torch.Size([{stored}]) from checkpoint, the shape in"
        f" current model is torch.Size([{wanted}])."
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(
            text(None, None, sized("proj.weight", "320, 320", "320, 320, 1, 1")), "still raises for shapes", id="shapes"
        ),
        pytest.param(
            text(["_fsdp_wrapped_module.fc.weight"], ["fc.weight"]), "StateDictType.FULL_STATE_DICT", id="model in FSDP"
        ),
        pytest.param(text(["_flat_param"], ["fc.weight"]), "StateDictType.FULL_STATE_DICT", id="flat model in FSDP"),
        pytest.param(
            text(None, None, sized("wte.weight", "0", "5, 8")),
            "ckptfix repair {FOLDER} --model",
            id="nothing in the file",
        ),
    ],
)
def test_what_is_advised(message: str, words: str):
    assert words in advice(message)


def test_a_model_in_fsdp_is_not_loaded_through_its_module():
    assert "model.module" not in advice(text(["_fsdp_wrapped_module.fc.weight"], ["fc.weight"]))


def test_a_shortened_list_of_keys_says_nothing_about_the_missing_ones():
    assert "Every key of the model is in the file" not in advice(
        text(unexpected=["head.weight"]).rstrip(". ") + ", ..."
    )


LORA = ["base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (text(under(), LORA), "holds an adapter (2 keys)"),
        (text(["q_proj.base_layer.weight", "q_proj.lora_A.default.weight"], LORA), "holds an adapter (2 keys)"),
        (text(["q_proj.base_layer.weight", "q_proj.lora_A.default.weight"], ["q_proj.weight"]), "the file has none"),
        (text(["q_proj.lora_A.default.weight"]), "the file has none"),
        (text(["q_proj.weight"], ["q_proj.base_layer.weight", *LORA]), "saved with its adapter inside"),
        (text(under(), ["q_proj.base_layer.weight", *LORA, "other.weight"]), "saved with its adapter inside"),
        (text(under(), ["state", "param_groups"]), "got the state of an optimizer"),
        (text(under(), ["explora_tion.weight"]), "5 keys that the file does not have"),
        (text(["q_proj.lora_A.default.weight"], LORA[:1]), "1 key that the model has no place for"),
        (text(["base.weight"], ["other.weight", *LORA]), "3 keys that the model has no place for"),
    ],
)
def test_an_adapter_on_one_side(message: str, words: str):
    assert words in causes(message)
