"""An unknown text is told the nearest message, and nonsense is told none."""

from __future__ import annotations

import pytest

from ckptfix.explain import explain, nearest
from ckptfix.explain.records import RECORDS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!!! 123 ???",
        "asdf qwer zxcv",
        "hello world, how are you today",
        "ZeroDivisionError: division by zero",
        "KeyError: 'colour'",
        "AttributeError: 'Trainer' object has no attribute 'colour'",
        "RuntimeError: the kettle is empty",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded",
        "The quick brown fox jumps over the lazy dog and loads the model into memory on the device",
        "error: subprocess-exited-with-error",
    ],
)
def test_nothing_is_near(text: str):
    assert nearest(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ValueError: Expected more than 1 vlaue per chanel when trainig", "batchnorm-one-value"),
        ("Atempting to deserialise object on a CUDA devise but torch.cuda.is_availble() is False", "device-tag"),
        ("loaded optimizer state has parameter group with size that does not match the group", "optimizer-groups"),
        (
            "ValueError: numpy array given has negative stride, tensors with negative stride unsupported",
            "negative-strides",
        ),
    ],
)
def test_the_nearest(text: str, name: str):
    assert explain(text) is None
    close = nearest(text)
    assert close is not None
    assert close[0].name == name
    assert 0.5 <= close[1] <= 1


@pytest.mark.parametrize(
    "record", [record for record in RECORDS if len(record.example.split()) > 3], ids=lambda r: r.name
)
def test_a_known_message_is_nearest_to_itself(record):
    close = nearest(record.example)
    if close is not None:  # two or three words are too little to go by
        assert close[1] == pytest.approx(1, abs=0.05)
