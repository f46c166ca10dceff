import json
import struct

from ckptfix.core.finding import Level
from ckptfix.core.spec import TensorStatistics
from ckptfix.report.page.data import weights_to_json
from ckptfix.rules import RULES
from tests.report.samples import report

SAMPLE = struct.pack("<4f", -2.0, 0.0, 0.1, 1.5)
FIGURES = {
    "a": TensorStatistics(6, zeros=1, minimum=-2.0, maximum=1.5, rms=0.5, sample=SAMPLE),
    "b": TensorStatistics(4, nan=2, pos_inf=1),
}
LAYOUT = {"a": ("float32", (2, 3)), "b": ("float16", (4,))}


def finding(code, *keys):
    return next(rule for rule in RULES if rule.code == code).finding(Level.ERROR, "m", keys)


def test_nothing_read_nothing_said():
    assert weights_to_json(report()) == {"version": 1, "source": "resnet.pth", "layers": []}


def test_a_line():
    line = weights_to_json(report(finding("VAL101", "b"), figures=FIGURES, layout=LAYOUT))
    assert json.loads(json.dumps(line, allow_nan=False))["layers"] == [
        {
            "key": "a",
            "dtype": "float32",
            "shape": [2, 3],
            "numel": 6,
            "rms": 0.5,
            "minimum": -2.0,
            "maximum": 1.5,
            "zeros": 1,
            "nonfinite": 0,
            "histogram": "i00000000z00000i",
            "flagged": [],
        },
        {
            "key": "b",
            "dtype": "float16",
            "shape": [4],
            "numel": 4,
            "rms": 0.0,
            "minimum": 0.0,
            "maximum": 0.0,
            "zeros": 0,
            "nonfinite": 3,
            "histogram": "",
            "flagged": ["VAL101"],
        },
    ]


def test_only_rules_about_values_flag():
    """A wrapper prefix renames every key and says nothing about the weights."""
    made = report(finding("KEY102", "a", "b"), finding("FIT103", "a"), finding("RUN102", "a"), figures=FIGURES)
    assert [layer["flagged"] for layer in weights_to_json(made)["layers"]] == [["RUN102"], []]


def test_a_code_flags_once():
    made = report(finding("VAL201", "a"), finding("VAL201", "a"), finding("FIL202", "a"), figures=FIGURES)
    assert weights_to_json(made)["layers"][0]["flagged"] == ["VAL201", "FIL202"]
