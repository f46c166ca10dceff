import ast
import typing
from pathlib import Path

import pytest

from ckptfix.core.finding import FILE
from ckptfix.core.option import CHECK, LOAD, REPAIR, Type
from ckptfix.core.options import (
    BY_NAME,
    OPTIONS,
    command_words,
    flag_text,
    key_text,
    library_settings,
    option_words,
    settings_of,
    texts_of,
)
from ckptfix.core.rename_map import RenameMap
from ckptfix.core.settings import CheckSettings, LoadSettings, RepairSettings, Settings
from ckptfix.errors import Opt, UsageError

FORMS = {
    Type.SWITCH: bool,
    Type.WHOLE: int,
    Type.NUMBER: float,
    Type.NAMES: tuple[str, ...],
    Type.INPUTS: tuple[str, ...],
    Type.FILES: tuple[str, ...],
    Type.PAIRS: tuple[str, ...],
    Type.TEXT: str,
    Type.FILE: str,
}


def test_the_settings_of_the_library_are_those_of_the_table():
    """A setting is declared twice, in the table and for editors, with the same name and type."""
    kinds = {option.name: option.kind for option in OPTIONS if option.is_setting}
    assert CheckSettings.__annotations__.keys() == settings_of(CHECK)
    assert LoadSettings.__annotations__.keys() == settings_of(LOAD)
    assert RepairSettings.__annotations__.keys() == settings_of(REPAIR) == kinds.keys()
    hints = typing.get_type_hints(Settings)
    for name, kind in kinds.items():
        forms = (FORMS[kind], FORMS[kind] | None, RenameMap | FORMS[kind] | None, typing.Any)  # Any: or a model
        assert hints[name] in forms, name


def test_messages_name_options_of_the_table():
    """The library writes an option as an argument: ``drop-mismatched`` is not a valid name."""
    named = {
        call.args[0].value: file.name
        for file in (Path(__file__).parents[2] / "ckptfix").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Opt"
        if isinstance(call.args[0], ast.Constant)
    }
    assert len(named) > 20
    assert {name: file for name, file in named.items() if name not in {option.name for option in OPTIONS}} == {}


def test_a_command_has_each_option_once():
    for command in {command for option in OPTIONS for command in option.commands}:
        named = [option for option in OPTIONS if command in option.commands]
        flags = [flag for option in named for flag in (option.name, option.long, option.no, option.short) if flag]
        assert len(flags) - len(named) <= len(set(flags)) <= len(flags)
        longs = [flag for option in named for flag in (option.long, option.no, option.short) if flag]
        assert len(longs) == len(set(longs)), command


def test_no_choices_are_not_arguments():
    assert library_settings({}) == {}


def test_every_choice_reaches_its_setting():
    arguments = library_settings(
        {
            "model": "m:f",
            "model_args": '{"depth": 18}',
            "select": ["key,BUF101", "VAL"],
            "replace": ["VAL101,layer4.*", "fc.weight"],
            "values": False,
            "fill": "target",
            "seed": 7,
            "input": ["2x3", "mask=2x3:int:0:2"],
            "output_format": "json",
        }
    )
    assert arguments == {
        "model": "m:f",
        "model_args": {"depth": 18},
        "select": ("key", "BUF101", "VAL"),
        "replace": ("VAL101", "layer4.*", "fc.weight"),
        "values": False,
        "fill": "target",
        "seed": 7,
        "input": ("2x3", "mask=2x3:int:0:2"),
    }


@pytest.mark.parametrize("value", ["", [], [""], ", "])
def test_an_empty_list_of_names(value):
    assert texts_of(BY_NAME["ignore"], value) == ()


def test_a_check_takes_no_settings_of_a_forward_test():
    assert library_settings({"device": "cpu", "seed": 1}, CHECK) == {"seed": 1}


@pytest.mark.parametrize(
    ("value", "said"),
    [("{depth: 18}", "invalid JSON"), ("18", "give an object")],
)
def test_invalid_settings_are_refused(value, said):
    with pytest.raises(UsageError, match=said) as error:
        library_settings({"model": "m:f", "model_args": value})
    assert str(error.value).startswith("model_args=")
    assert error.value.worded(flag_text).startswith("--model-args")


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        (Opt("fill"), ("fill=", "--fill", "fill")),
        (Opt("fill", "target"), ("fill='target'", "--fill target", 'fill = "target"')),
        (Opt("values", False), ("values=False", "--no-values", "values = false")),
        (Opt("unsafe_fixes", True), ("unsafe_fixes=True", "--unsafe-fixes", "unsafe-fixes = true")),
        (Opt("temporary"), ("temporary=", "--temp-space", "temp-space")),
    ],
    ids=str,
)
def test_options_in_messages_of_the_library_and_the_command_line(option, texts):
    assert (str(option), flag_text(option), key_text(option)) == texts


def test_a_command_repeats_what_was_given():
    choices = {
        "model": "m:f",
        "model_args": {"depth": 18},
        "input": ["2x3", "4x5"],
        "ignore": ["key,VAL1", "BUF"],
        "values": False,
        "unsafe_fixes": True,
        "drop_mismatched": False,
        "smoke": False,
        "backward": True,
        "compare": "b.pth",
        "seed": 7,
        "output": "-o.pth",
        "jobs": 3,
    }
    words = command_words(REPAIR, "-a.pth", choices)
    assert words[:3] == ("ckptfix", "repair", "./-a.pth")
    assert words[3:] == (
        *("--model", "m:f", "--model-args", '{"depth": 18}', "--no-values", "--ignore", "key,VAL1,BUF"),
        *("--unsafe-fixes", "--keep-mismatched", "--seed", "7", "--no-smoke", "--input", "2x3", "--input", "4x5"),
        *("--backward", "--compare", "b.pth", "--output", "-o.pth"),
    )
    assert option_words({"smoke": False, "only": ["a.pth"]}) == ("--only", "a.pth", "--no-smoke")


def test_a_placeholder_of_any_option_has_a_flag():
    for option in OPTIONS:
        assert not option.is_setting or flag_text(Opt(option.name, FILE)).startswith(option.long), option.name
