"""The first layer of each stage of a pipeline, with stages missing."""

from typing import Any

import pytest

from ckptfix.reading.folders.ranks.stages import stage_offsets


@pytest.mark.parametrize(
    ("held", "args", "firsts"),
    [
        pytest.param([2, 2, 2], {}, [0, 2, 4], id="none-missing"),
        pytest.param([2, None, 2], {"num_layers": 6}, [0, 2, 4], id="the-rest"),
        pytest.param([1, None, 2], {"num_layers": 6}, [0, 1, 4], id="uneven-and-one-missing"),
        pytest.param([2, None, 2], {}, [0, 2, None], id="unknown-number"),
        pytest.param([2, 2, None], {}, [0, 2, 4], id="the-last"),
        pytest.param([None, None, 2], {"num_layers": 6}, [0, 2, 4], id="even"),
        pytest.param([None, None, 2], {"num_layers": 7}, [0, None, None], id="odd"),
        pytest.param([None, 4, 2], {"num_layers": 5}, [0, None, None], id="too-many"),
        pytest.param(
            [None, None, 2],
            {"num_layers": 6, "pipeline_model_parallel_layout": "Et|ttt|ttL"},
            [0, None, None],
            id="by-layout",
        ),
    ],
)
def test_the_first_layer_of_each_stage(held: list[int | None], args: dict[str, Any], firsts: list[int | None]) -> None:
    counts = {("model", stage): {} if count is None else {"decoder.": count} for stage, count in enumerate(held)}
    present = {("model", stage) for stage, count in enumerate(held) if count is not None}
    found = stage_offsets(counts, present, args)
    assert [begin if begin is None else begin.get("decoder.", 0) for begin in found.values()] == firsts


def test_two_stacks_of_layers_are_not_counted_by_the_arguments() -> None:
    counts = {("model", 0): {"encoder.": 2}, ("model", 1): {}, ("model", 2): {"decoder.": 2}}
    found = stage_offsets(counts, {("model", 0), ("model", 2)}, {"num_layers": 6})
    assert found["model", 2] is None
