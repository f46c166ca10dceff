import json

import pytest

from ckptfix.report.page.embedding import Budget, data_element, digest, script_json
from tests.report.page.reading import Page
from tests.report.page.samples import HOSTILE


def test_harmless_data_is_plain_json():
    assert script_json({"a": [1, 2.5, None, True, "x"]}) == '{"a":[1,2.5,null,true,"x"]}'


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_and_ends_nothing(text):
    written = script_json({text: [text]})
    assert written.isascii()
    assert not set(written) & set("<>&")
    assert json.loads(written) == {text: [text]}
    assert Page(data_element("x", written)).data == {"x": {text: [text]}}


def test_numbers_that_are_no_json_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_a_budget_is_spent_once():
    budget = Budget(5)
    assert [budget.take("abc"), budget.take("abc"), budget.take("ab"), budget.take("a")] == [True, False, True, False]


def test_digests_tell_texts_apart():
    assert digest("a") == digest("a") != digest("b")
