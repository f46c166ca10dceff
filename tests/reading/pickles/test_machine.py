from __future__ import annotations

import collections
import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import PickleMachine


def run(data: bytes, position: int = 0) -> tuple[Any, PickleMachine]:
    def no_storage(pid: Any) -> Any:
        raise ValueError("no storages here")

    machine = PickleMachine(data, "some.pkl", InertTable("some.pkl", lambda raw: raw).call, no_storage, position)
    return machine.load(), machine


PLAIN = {
    "constants": [None, True, False],
    "small and large numbers": [0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 63), 1 << 2100],
    "floats": [0.1, float("inf"), -0.0],
    "text": ["", "abc", "ä\u4f60\U0001f600", "x" * 300, "\ud800"],
    "bytes": [b"", b"\xff" * 300, bytearray(b"abc")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "containers": {"a": [1, [2]], 2: {"b": ()}, (1, "x"): None},
    "sets": [{1, 2}, frozenset({3}), set()],
    "many": list(range(3000)),
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "complex": 1 - 2j,
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_data_comes_out_as_pickle_reads_it(value, protocol):
    got, machine = run(pickle.dumps(value, protocol=protocol))
    assert got == pickle.loads(pickle.dumps(value, protocol=protocol))
    assert type(got) is type(value)
    assert machine.protocol == (protocol if protocol > 1 else 0)


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    st.integers(0, 5),
)
def test_any_plain_data_comes_out_as_it_went_in(value, protocol):
    assert run(pickle.dumps(value, protocol=protocol))[0] == value


def test_an_object_that_holds_itself_is_one_object():
    value: list[Any] = []
    value.append({"me": value})
    got, _ = run(pickle.dumps(value))
    assert got[0]["me"] is got


def test_a_class_stays_closed():
    class_pickle = b"\x80\x02cmodels\nNet\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    got, machine = run(class_pickle)
    assert isinstance(got, Opaque)
    assert (str(got.cls), got.args, got.attributes) == ("models.Net", (), {"a": 1})
    assert list(machine.globals) == [("models", "Net")]


def test_a_state_of_two_dicts_is_both_the_dict_and_the_slots():
    assert Opaque(Global("m", "A"), state=({"a": 1}, {"b": 2})).attributes == {"a": 1, "b": 2}


def test_a_function_is_named_and_not_called():
    got, _ = run(b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R.")
    assert isinstance(got, Opaque)
    assert (str(got.cls), got.args) == ("os.system", ("false",))


def test_items_and_pairs_of_an_object_are_kept():
    queue, counts = run(pickle.dumps([collections.deque([1, 2]), collections.defaultdict(list, a=1)], protocol=2))[0]
    assert queue.items == [1, 2]
    assert counts.pairs == {"a": 1}


def test_text_of_python_2_keeps_every_byte():
    assert run(b"U\x03\x00\x80\xff.")[0] == "\x00\x80\xff"
    assert run(b"S'a\\x80\\n'\n.")[0] == "a\x80\n"


def test_pickles_follow_one_another():
    data = pickle.dumps(1, protocol=2) + pickle.dumps("two", protocol=2)
    first, machine = run(data)
    second, machine = run(data, machine.position)
    assert (first, second, machine.position) == (1, "two", len(data))


def test_showing_an_object_does_not_show_what_it_holds():
    shared: Any = ()
    for _ in range(100):
        shared = Opaque(Global("m", "A"), (shared, shared))
    assert repr(shared) == "<m.A>"


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_a_pickle_cut_anywhere_is_refused(value):
    data = pickle.dumps(value, protocol=2)
    for end in range(0, len(data), max(1, len(data) // 50)):
        with pytest.raises(UnreadableError, match=r"some\.pkl"):
            run(data[:end])


@pytest.mark.parametrize("number", [b"L%sL\n.", b"I%s\n.", b"Np%s\n.", b"g%s\n."], ids=["long", "int", "put", "get"])
def test_a_number_of_too_many_digits_is_said_without_the_interpreters_own_words(number):
    with pytest.raises(UnreadableError, match="a number of 5000 digits") as caught:
        run(number % (b"9" * 5000))
    assert "sys." not in str(caught.value)
