"""Meaningless settings are refused before anything is read."""

import math
from pathlib import Path

import numpy as np
import pytest

from ckptfix.core.option import LISTS
from ckptfix.core.options import OPTIONS
from ckptfix.core.settings import Settings
from ckptfix.engine.validation import LONGEST_TIMEOUT, checked_settings, parsed_settings
from ckptfix.errors import UsageError


def test_no_settings_are_the_defaults():
    assert checked_settings({}) == Settings()


def test_one_code_or_path_need_not_be_a_list(tmp_path):
    settings = checked_settings(
        {"select": "KEY", "ignore": ["VAL101"], "replace": "VAL", "fill": tmp_path / "other.pth"}
    )
    assert (settings.select, settings.ignore, settings.replace) == (("KEY",), ("VAL101",), ("VAL",))
    assert settings.fill == str(tmp_path / "other.pth")


def test_one_text_may_hold_several_codes_or_none():
    """Every code starts with an empty text: ``ignore=""`` skipped all rules, and the file looked clean."""
    settings = checked_settings({"select": "KEY, buf101", "ignore": "", "accept": [""]})
    assert (settings.select, settings.ignore, settings.accept) == (("KEY", "BUF101"), (), ())


def test_each_list_of_the_table_takes_a_text_a_path_a_sequence_and_a_table(tmp_path):
    """`input=Path("batch.npy")` is not a list of strings, and only `adapt` took a table."""
    names = [option.name for option in OPTIONS if option.is_setting and option.kind in LISTS]
    texts = {"adapt": "head=classes.txt", "rename": "a=b"} | dict.fromkeys(("select", "ignore", "accept"), "VAL101")
    (tmp_path / "classes.txt").touch()
    for name in names:
        text = texts.get(name, "x").replace("classes", str(tmp_path / "classes"))
        key, equals, value = text.partition("=")
        forms = [text, Path(text), [text], iter([Path(text)]), *([{key: value}] if equals else [])]
        for form in forms:
            settings = checked_settings({name: form, "fill": "x"}, model="m")
            assert getattr(settings, name) == (text,), (name, form)


def test_none_is_the_default_of_settings_without_another(tmp_path):
    """numpy's numbers are accepted as numbers, and paths as text."""
    unset = dict.fromkeys(("weights", "fill", "rename_map", "source_model", "smoke", "shard_size"))
    assert checked_settings({**unset, "seed": np.int64(0), "timeout": np.float64(300)}) == Settings()
    assert parsed_settings({"compare": tmp_path, "shard_size": 5_000_000}).compare == str(tmp_path)


def test_a_code_to_replace_may_be_in_lower_case_and_a_key_stays():
    assert checked_settings({"replace": "val101, fc1.weight,emb1", "fill": "twin"}).replace == (
        "VAL101",
        "fc1.weight",
        "emb1",
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps", "xpu:0"])
def test_names_of_devices(device):
    checked_settings({"device": device})


@pytest.mark.parametrize("seconds", [0.001, LONGEST_TIMEOUT])
def test_a_timeout_that_clocks_can_wait_for(seconds):
    checked_settings({"timeout": seconds})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param({"strict": True}, r"repair\(\) has no setting 'strict'", id="unknown"),
        pytest.param({"filll": "x"}, "no setting 'filll'; did you mean 'fill'\\?", id="a slip"),
        pytest.param({"select": ("XYZ",)}, "select='XYZ': no rule code begins", id="no code"),
        pytest.param({"ignore": "EY101"}, "ignore='EY101': .* did you mean KEY101", id="the end of a code"),
        pytest.param({"select": 101}, "select=101: give a string", id="a number for a code"),
        pytest.param({"select": ["KEY", 1]}, "give a string, or a list of strings", id="a number among codes"),
        pytest.param({"fill": "targt"}, "no such file; did you mean target\\?", id="a slip in a word"),
        pytest.param({"replace": "VAL999", "fill": "twin"}, "replace='VAL999': no rule code begins", id="no such rule"),
        pytest.param({"device": "gpu"}, "device='gpu': not a device; give auto, cpu", id="no device"),
        pytest.param({"device": "cuda:"}, "not a device", id="a device without its number"),
        pytest.param({"fill": 3}, "fill=3: give", id="fill with a number"),
        pytest.param({"unsafe_fixes": "false"}, "unsafe_fixes='false': give a boolean", id="a text is true for Python"),
        pytest.param({"values": None}, "values=: give a boolean", id="None is false for Python"),
        pytest.param({"timeout": "5"}, "timeout='5': give a number", id="a text for a number"),
        pytest.param({"seed": True}, "seed=True: give an integer", id="a boolean for an integer"),
        pytest.param({"weights": 0}, "weights=0: give a string", id="a number for a text"),
        pytest.param({"replace": ("VAL",)}, "add fill='twin', ", id="replace without fill"),
        pytest.param({"dtype": "float16", "values": False}, "omit values=False", id="cast unseen"),
        pytest.param(
            {"drop_optimizer": True, "keep_optimizer": True},
            "keep_optimizer=True exclude each other",
            id="drop and keep",
        ),
        pytest.param(
            {"format": "universal", "shard_size": "1GB"},
            "shard_size= and format='universal' exclude each other",
            id="shards of parameters",
        ),
        pytest.param({"format": "h5"}, "give pth, safetensors or universal", id="format"),
        pytest.param({"for_torch": "new"}, "new", id="version"),
        pytest.param({"shard_size": "many"}, "many", id="size"),
        *(
            pytest.param({"timeout": seconds}, f"timeout={seconds}: give seconds", id=f"timeout of {seconds}")
            for seconds in (0, -1, math.nan, math.inf, LONGEST_TIMEOUT + 1)
        ),
    ],
)
def test_invalid_settings_are_reported_in_one_line(given, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        checked_settings(given)
    assert "\n" not in str(caught.value)
