import pickle

import pytest
import torch

from ckptfix.zoo.drafting.survey import Layout, layout_of, plain_names, survey
from ckptfix.zoo.items.listing import list_zoo
from ckptfix.zoo.places import open_place

STATE = {"conv.weight": torch.zeros(2, 3), "bn.running_mean": torch.zeros(2), "bn.num_batches_tracked": torch.tensor(0)}


def seen(folder):
    place = open_place(str(folder))
    return {sight.name: sight for sight in survey(place, list_zoo(place))}


def shapes_of(layout: Layout | None):
    assert layout is not None
    return layout.shapes


def test_one_file(tmp_path):
    torch.save(STATE, tmp_path / "a.pth")
    sight = seen(tmp_path)["a.pth"]
    assert shapes_of(sight.layout) == {"conv.weight": (2, 3), "bn.running_mean": (2,)}
    assert (sight.prefix, sight.dtypes, sight.weights, sight.candidates) == ("", ("float32",), ".", ())
    assert (sight.whole_model, sight.is_damaged, sight.counters) == ("", False, True)
    assert (sight.fault, sight.is_hostile) == ("", False)


@pytest.mark.parametrize(
    ("keys", "names", "prefix"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], ""),
        (["module.a.w", "module.b.w"], ["a.w", "b.w"], "module."),
        (["_orig_mod.a.w", "b.w"], ["a.w", "b.w"], "_orig_mod"),
        (["model.a.w", "model.b.w"], ["a.w", "b.w"], "model."),
        (["module.net.model.a.w", "module.net.model.b.w"], ["a.w", "b.w"], "module.net.model."),
        (["model.a.w", "loss.w"], ["model.a.w", "loss.w"], ""),
        (["encoder.a.w", "encoder.b.w"], ["a.w", "b.w"], "encoder."),
        (["layer1.a.w", "layer1.b.w"], ["layer1.a.w", "layer1.b.w"], ""),
        (["model"], ["model"], ""),
        (["a.w", "module.a.w"], ["a.w", "module.a.w"], ""),
        (
            ["x.LayerNorm.gamma", "x.LayerNorm.beta", "y.gamma"],
            ["x.LayerNorm.weight", "x.LayerNorm.bias", "y.gamma"],
            "",
        ),
        (["f.denselayer1.norm.1.weight"], ["f.denselayer1.norm1.weight"], ""),
    ],
)
def test_names_as_the_model_has_them(keys, names, prefix):
    shapes, taken = plain_names(dict.fromkeys(keys, (1,)))
    assert (list(shapes), taken) == (names, prefix)


def test_layouts_of_wrapped_and_plain_files_are_one(tmp_path):
    torch.save(STATE, tmp_path / "a.pth")
    torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in STATE.items()}}, tmp_path / "b.pth")
    old = {key: value for key, value in STATE.items() if "num_batches" not in key}
    torch.save(old, tmp_path / "c.pth")
    found = seen(tmp_path)
    assert found["a.pth"].layout is found["b.pth"].layout is found["c.pth"].layout
    assert (found["b.pth"].prefix, found["b.pth"].weights) == ("module.", "state_dict")
    assert not found["c.pth"].counters


def test_the_names_alone_tell_of_another_head():
    one, other = layout_of({"a": (1,), "fc": (10,)}), layout_of({"a": (1,), "fc": (7,)})
    assert one.digest != other.digest
    assert one.names == other.names
    assert one.numel == 11


def test_several_state_dicts(tmp_path):
    torch.save({"model": STATE, "ema": dict(STATE)}, tmp_path / "a.pth")
    sight = seen(tmp_path)["a.pth"]
    assert (sight.weights, sight.candidates) == ("model", ("model", "ema"))


def test_the_class_of_a_whole_model(tmp_path):
    torch.save(torch.nn.DataParallel(torch.nn.LSTM(2, 3)), tmp_path / "a.pth")
    assert seen(tmp_path)["a.pth"].whole_model == "torch.nn.modules.rnn.LSTM"


class Payload:
    def __reduce__(self):
        import os

        return os.system, ("true",)


def test_what_cannot_be_read_says_why(tmp_path):
    torch.save(STATE, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) * 4 // 5])
    torch.save({"state_dict": STATE, "x": Payload()}, tmp_path / "evil.pth")
    found = seen(tmp_path)
    cut, evil = found["cut.pth"], found["evil.pth"]
    assert cut.layout is None
    assert "is cut short" in cut.fault
    assert not cut.fault.startswith("cut.pth")
    assert (cut.is_hostile, 0 < cut.whole <= 3) == (False, True)
    assert (evil.layout, evil.is_hostile, evil.whole) == (None, True, 3)
    assert "system()" in evil.fault
    assert str(tmp_path) not in cut.fault + evil.fault


def test_other_files_are_passed_by(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps([1]))
    assert "notes.txt" not in seen(tmp_path)


def test_a_place_far_away(tmp_path, memory):
    torch.save(STATE, tmp_path / "a.pth")
    place = open_place(memory)
    place.put(tmp_path / "a.pth", "x/a.pth")
    (sight,) = survey(place, list_zoo(place))
    assert shapes_of(sight.layout) == {"conv.weight": (2, 3), "bn.running_mean": (2,)}
