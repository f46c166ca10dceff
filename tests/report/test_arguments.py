import pytest

from ckptfix.core.settings import Settings, SmokeSettings
from ckptfix.errors import UsageError
from ckptfix.report.arguments import library_arguments, repair_command


def test_no_choices_are_no_arguments():
    assert library_arguments({}) == {}


def test_every_choice_reaches_its_setting():
    arguments = library_arguments(
        {
            "model": "m:f",
            "model_args": '{"depth": 18}',
            "select": ["key,BUF101", "VAL"],
            "ignore": ["KEY104"],
            "no_values": True,
            "unsafe_fixes": True,
            "weights": "ema",
            "for_torch": "0.4.0",
            "fill": "target",
            "drop_mismatched": True,
            "replace": ["VAL101,layer4.*", "fc.weight"],
            "reset_running_stats": True,
            "zero_non_finite": True,
            "flush_subnormals": True,
            "dtype": "fp16",
            "seed": 7,
            "format": "safetensors",
            "smoke": False,
            "input": ["2x3", "mask=2x3:int:0:2"],
            "device": "cpu",
            "timeout": 10.0,
            "train_mode": True,
            "backward": True,
            "compare": "source",
            "output_format": "json",
        }
    )
    assert arguments.pop("model") == "m:f"
    assert arguments.pop("model_args") == {"depth": 18}
    assert Settings(**arguments) == Settings(
        weights="ema",
        select=("KEY", "BUF101", "VAL"),
        ignore=("KEY104",),
        unsafe_fixes=True,
        fill="target",
        drop_mismatched=True,
        replace=("VAL101", "layer4.*", "fc.weight"),
        reset_running_stats=True,
        zero_non_finite=True,
        flush_subnormals=True,
        dtype="fp16",
        for_torch="0.4.0",
        values=False,
        seed=7,
        format="safetensors",
        smoke=False,
        smoke_settings=SmokeSettings(("2x3", "mask=2x3:int:0:2"), "cpu", 10.0, 7, True, True, "source"),
    )


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"model": "m:f", "like": "a.pth"}, "--model and --like exclude each other"),
        ({"model": "m:f", "model_args": "{depth: 18}"}, "--model-args {depth: 18}: this is no valid JSON"),
        ({"model": "m:f", "model_args": "18"}, "--model-args 18: give an object"),
        ({"select": ["KEY1,FOO"]}, "--select FOO: no rule has a code that begins so"),
        ({"ignore": ["K EY"]}, "--ignore EY: no rule"),
    ],
)
def test_what_has_no_meaning(choices, said):
    with pytest.raises(UsageError) as error:
        library_arguments(choices)
    assert str(error.value).startswith(said)


def test_the_command_of_the_advice_repeats_what_was_given():
    choices = {
        "model": "m:f",
        "model_args": {"depth": 18},
        "input": ["2x3", "4x5"],
        "no_values": False,
        "unsafe_fixes": True,
        "smoke": False,
        "backward": True,
        "compare": "b.pth",
        "seed": 7,
        "output_format": "json",
    }
    assert repair_command("a.pth", choices) == (
        *("ckptfix", "repair", "a.pth", "--model", "m:f", "--model-args", '{"depth": 18}'),
        *("--compare", "b.pth", "--seed", "7"),
        *("--input", "2x3", "--input", "4x5", "--unsafe-fixes", "--backward", "--no-smoke"),
    )
