"""Two sets of weights in one state_dict, each under a prefix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfix
from ckptfix.reading.opening import open_state_dict
from ckptfix.reading.weights.prefixed_sets import copied_under, is_follower, keys_of_set, narrowed, sets_of, with_pick

NET = ("conv.weight", "bn.weight", "bn.bias", "fc.weight")


def under(*prefixes, keys=NET):
    return [prefix + key for prefix in prefixes for key in keys]


def specs(keys, shapes=lambda key: (len(key.rpartition(".")[2]),)):
    return open_state_dict({key: torch.ones(shapes(key)) for key in keys}).specs


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(under(""), id="one network"),
        pytest.param(under("encoder.", "decoder."), id="of equal layers, and neither follows the other"),
        pytest.param(under("block.", "block.block."), id="a module in one of the same name"),
        pytest.param([*under("body.", keys=NET), "target.weight", "target.bias"], id="a head called target"),
        pytest.param([*under("student."), "teacher.fc.weight"], id="the teacher is another network"),
        pytest.param(under("a.", "b.", "c.", "m.student.", "m.teacher."), id="a part of a larger model"),
        pytest.param(under("source_encoder.", "target_encoder."), id="two domains"),
        pytest.param(under("query_proj.", "key_proj."), id="parts of attention"),
        pytest.param(under("branch_s.", "branch_m.", "branch_l."), id="three sizes"),
        pytest.param(under("average_branch.", "max_branch."), id="two ways of pooling"),
        pytest.param(under("target.model.", "online.head."), id="the same in another part of the follower"),
        pytest.param(under("to_q.", "to_k.", keys=("weight", "bias")), id="single layers"),
    ],
)
def test_one_set(keys):
    assert sets_of(specs(dict.fromkeys(keys))) == ()


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (under("teacher.", "student."), ("student", "teacher")),
        ([*under("encoder_q.", "encoder_k."), "queue"], ("encoder_q", "encoder_k")),
        (under("module.online_encoder.", "module.target_encoder."), ("module.online_encoder", "module.target_encoder")),
        (under("", "ema_model."), ("plain", "ema_model")),
        (under("model.", "model_ema."), ("model", "model_ema")),
        (under("actor.", "critic.", "critic_target."), ("critic", "critic_target")),
        (under("context_encoder.", "target_encoder."), ("context_encoder", "target_encoder")),
        ([*under("online_model.", "ema_model."), "initted", "step"], ("online_model", "ema_model")),
        (under("visual_encoder.", "visual_encoder_m."), ("visual_encoder", "visual_encoder_m")),
        (
            [*under("net.model.", "net_ema.ema_model."), "net.vae.weight", "net_ema.step"],
            ("net.model", "net_ema.ema_model"),
        ),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_two_sets(keys, names):
    assert sets_of(specs(keys)) == names
    for name in names:
        assert list(keys_of_set(keys, name).values()) == list(NET)


def test_two_networks_of_other_shapes_are_not_sets_of_one():
    keys = under("student.", "teacher.")
    assert sets_of(specs(keys, lambda key: (2,) if key.startswith("student") else (3,))) == ()
    keys = under("", "teacher.")
    assert sets_of(specs(keys, lambda key: (2,) if key.startswith("teacher") else (3,))) == ()


def test_what_stands_in_front_of_all_need_not_be_named():
    keys = [*under("module.model.student.", "module.model.teacher."), "module.step"]
    assert keys_of_set(keys, "teacher") == {f"module.model.teacher.{key}": key for key in NET}
    assert keys_of_set(keys, "module.model.teacher") == keys_of_set(keys, "teacher.")


SEGMENT = st.text("abc", min_size=1, max_size=2)
PATH = st.lists(SEGMENT, min_size=1, max_size=3).map(".".join)


@settings(max_examples=40, deadline=None)
@given(st.sets(PATH, min_size=1), st.sets(SEGMENT, min_size=2, max_size=3))
def test_each_set_has_its_own_keys_and_no_other(names, prefixes):
    """For any names inside, even those of prefixes, the sets partition the keys."""
    keys = [f"{prefix}.{name}" for prefix in prefixes for name in names]
    picked = {prefix: keys_of_set(keys, prefix) for prefix in prefixes}
    assert all(sorted(of_set.values()) == sorted(names) for of_set in picked.values())
    assert sorted(key for of_set in picked.values() for key in of_set) == sorted(keys)


@pytest.mark.parametrize("name", ["eacher", "fc", "weight", "student.conv.weight", "plain", ""])
def test_no_set_of_the_name(name):
    assert keys_of_set(under("student.", "teacher."), name) == {}


def test_a_wrapper_is_not_a_set():
    keys = under("module.", "ema.")
    assert sets_of(specs(keys)) == ("plain", "ema")
    assert keys_of_set(keys, "plain") == {f"module.{key}": f"module.{key}" for key in NET}, "KEY102 strips it"
    assert keys_of_set(keys, "ema") == {f"ema.{key}": key for key in NET}


def test_copies():
    assert copied_under(under("", "module.")) == ("module.",)
    assert copied_under(under("block.", "block.block.")) == ()
    assert copied_under([*under(""), "module.fc.weight"]) == ()


@pytest.mark.parametrize(("name", "follows"), [("ema", 1), ("module.teacher", 1), ("encoder_k", 1), ("schema", 0)])
def test_names_that_follow(name, follows):
    assert is_follower(name) == bool(follows)


def test_a_narrowed_checkpoint_keeps_bytes_and_versions():
    models = torch.nn.ModuleDict({"student": torch.nn.BatchNorm1d(2), "teacher": torch.nn.BatchNorm1d(2)})
    state = models.state_dict()
    state["teacher.running_mean"].fill_(float("nan"))
    taken = narrowed(with_pick(open_state_dict(state), "teacher"))
    assert list(taken.entries) == list(torch.nn.BatchNorm1d(2).state_dict())
    assert taken.read("running_mean").data_ptr() == state["teacher.running_mean"].data_ptr()
    assert (taken.metadata or {})[""]["version"] == 2


def test_a_file_is_opened_at_the_set(tmp_path):
    torch.save(
        {"net": {key: torch.tensor([float(i)]) for i, key in enumerate(under("q.", "k."))}, "n": 1}, tmp_path / "f"
    )
    for name in ("k", "net.k", "k."):
        opened = ckptfix.open_checkpoint(tmp_path / "f", weights=name)
        assert (opened.keys(), opened.container, opened.picked) == (list(NET), ("net",), None)
        assert opened.read("conv.weight") == 4
    with pytest.raises(ckptfix.UsageError, match="no weights under 'ema'"):
        ckptfix.open_checkpoint(tmp_path / "f", weights="ema")


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map(".".join), min_size=1, unique=True))
def test_copies_are_what_most_keys_have_a_twin_in(keys):
    """By the definition, for every prefix of up to three segments."""
    prefixes = {
        ".".join(key.split(".")[:depth]) + "." for key in keys for depth in (1, 2, 3) if key.count(".") >= depth
    }
    copies = set()
    for prefix in prefixes:
        inside = [key for key in keys if key.startswith(prefix)]
        twins = [key for key in inside if key.removeprefix(prefix) in keys]
        if 2 * len(twins) > max(len(inside), len(keys) - len(inside)):
            copies.add(prefix)
    assert set(copied_under(keys)) == copies


NAMES = ("out.0.weight", "out.0.bias", "in.weight")
MANGLED = {
    "LitEma": (
        {f"model.{name}": f"model_ema.{name.replace('.', '')}" for name in NAMES},
        ["model_ema.decay", "model_ema.num_updates"],
        ("model", "model_ema"),
    ),
    "LitEma of the whole module": (
        {name: f"model_ema.{name.replace('.', '')}" for name in NAMES},
        ["model_ema.decay", "model_ema.num_updates"],
        ("plain", "model_ema"),
    ),
    "mmcv": ({name: f"ema_{name.replace('.', '_')}" for name in NAMES}, [], ("plain", "ema")),
}


@pytest.mark.parametrize(("names", "counters", "sets"), MANGLED.values(), ids=MANGLED)
def test_an_average_whose_names_lost_their_dots_is_found_and_taken(names, counters, sets):
    state = {key: torch.full((2, index + 1), 1.0) for index, key in enumerate(names)}
    state |= {names[key]: torch.full((2, index + 1), 2.0) for index, key in enumerate(names)}
    state |= {key: torch.tensor(1) for key in counters}
    checkpoint = open_state_dict(state)
    assert sets_of(checkpoint.specs) == sets
    for name, value in zip(sets, (1.0, 2.0), strict=True):
        taken = narrowed(with_pick(checkpoint, name))
        assert set(taken.keys()) == set(NAMES)
        assert all((taken.read(key) == value).all() for key in NAMES)


@pytest.mark.parametrize(("name", "value"), [("model", 1.0), ("model_ema", 2.0)])
def test_the_other_parts_stay_next_to_an_average_and_its_network(name, value):
    """Stable Diffusion has its autoencoder and its text encoder next to both."""
    names, counters, _ = MANGLED["LitEma"]
    state = {key: torch.full((1,), 1.0) for key in names} | {names[key]: torch.full((1,), 2.0) for key in names}
    state |= {key: torch.ones(1) for key in counters}
    parts = {f"{part}.fc.weight": torch.full((1,), 3.0) for part in ("first_stage_model", "cond_stage_model")}
    checkpoint = open_state_dict({**state, **parts, "model.steps": torch.ones(1)})
    taken = narrowed(with_pick(checkpoint, name))
    assert set(taken.keys()) == {*names, *parts, "model.steps"}
    assert [taken.read(key).item() for key in (*names, *parts)] == [value] * len(names) + [3.0] * len(parts)
    assert narrowed(with_pick(checkpoint, "cond_stage_model")).keys() == ["fc.weight"]


def test_names_that_only_begin_like_an_average_are_not_one():
    assert (
        sets_of(open_state_dict({"ema_rate": torch.ones(1), "ema_b": torch.ones(2), "a.b": torch.ones(2)}).specs) == ()
    )


@pytest.mark.parametrize(("names", "counters", "sets"), MANGLED.values(), ids=MANGLED)
def test_what_is_not_averaged_comes_with_the_average(names, counters, sets):
    """Neither LitEma nor mmcv averages buffers, which are half of the tensors of a network with norms."""
    front = "model." if sets[0] == "model" else ""
    buffers = [f"{front}out.{at}.{leaf}" for at in (0, 1) for leaf in ("running_mean", "num_batches_tracked")]
    state = {key: torch.ones(1) for key in (*names, *buffers, *names.values(), *counters)}
    checkpoint = open_state_dict(state)
    assert sets_of(checkpoint.specs) == sets
    for name in sets:
        taken = narrowed(with_pick(checkpoint, name))
        assert set(taken.keys()) == {*NAMES, *(key.removeprefix(front) for key in buffers)}
