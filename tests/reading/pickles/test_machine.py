import collections
import io
import pickle
import random
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.bytes.files import Buffer
from ckptfix.bytes.limits import SLOT, Bounds
from ckptfix.bytes.sources import Content
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import CkptfixError, UnreadableError
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import FAR, Memo, PickleMachine


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


ROWS = {f"layer{index}.weight": [index, -index, 70000 * index, (index,), (1, 2), (1, 2, 3)] for index in range(300)}
PICKLES = {
    "nothing": pickle.dumps(None, 2),
    "rows, with far places in the memo": pickle.dumps(ROWS, 2),
    "a shared list, recalled from near and far": pickle.dumps([shared := ["x"], ROWS, shared, shared], 2),
    "calls": pickle.dumps([OrderedDict(a=1), {1, 2}, frozenset((3,)), complex(1, 2)], 2),
    "texts that are no UTF-8": pickle.dumps(["\ud800", "é" * 70], 2),
    "a memo that begins at 1, as in Python 2": b"\x80\x02]q\x01(h\x01X\x01\0\0\0aq\x02h\x02e.",
    "a memo that begins far away": b"\x80\x02]r\xe8\x03\0\0(j\xe8\x03\0\0X\x01\0\0\0ar\xe7\x03\0\0j\xe7\x03\0\0e.",
    "a place that is written again": b"\x80\x02K\x01q\0K\x02q\0h\0.",
    "a call of what is no global": b"\x80\x02K\x01)R.",
    "a call with a list": b"\x80\x02ccollections\nOrderedDict\n]R.",
    **{f"protocol {protocol}": pickle.dumps(["a\nb", 1.5, -1, None, ROWS], protocol) for protocol in range(6)},
}


def torch_pickle() -> bytes:
    """The pickle of tensors of every rank, with numbers of every width."""
    shapes = ((), (0,), (7,), (1, 3), (2, 300), (70000,), (2, 3, 4), (2, 1, 3, 5))
    file = io.BytesIO()
    torch.save({f"{turn}.{shape}": torch.zeros(shape) for turn in range(8) for shape in shapes}, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter a file with one byte in memory at a time, so that no opcode takes the fast path."""
    monkeypatch.setattr("ckptfix.reading.pickles.stream._WINDOW", 1)


def outcome(data: Buffer, limit: int | None = None) -> tuple[str, int | None, int, str]:
    """Return the value of a pickle, where it ends, what is left of the limits, and the error."""
    bounds = Bounds("f.pth", len(data))
    if limit is not None:
        bounds.left = limit
    machine = PickleMachine(data, "f.pth", InertTable("f.pth", lambda nested: nested).call, repr, 0, bounds)
    try:
        return repr(machine.load()), machine.position, bounds.left, ""
    except CkptfixError as error:
        return "", None, bounds.left if limit is None else 0, f"{type(error).__name__}: {error}"


def in_parts(data: bytes) -> Content:
    return Content("f.pth", b"in front" + data + b"behind").window(8, 8 + len(data))


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("data", [*PICKLES.values(), torch_pickle()], ids=[*PICKLES, "tensors"])
def test_inlined_opcodes_equal_their_handlers(data: bytes) -> None:
    for whole in (data, data[:-1], data[: len(data) // 2], data[:-1] + b"\xff"):
        assert outcome(in_parts(whole)) == outcome(whole)


@pytest.mark.usefixtures("one_by_one")
def test_inlined_opcodes_end_alike_in_a_damaged_pickle() -> None:
    rng = random.Random(0)
    pickles = [*PICKLES.values(), torch_pickle()[:400]]
    for _ in range(1500):
        data = bytearray(rng.choice(pickles)[:400])
        data[rng.randrange(len(data))] = rng.choice((*b"(tRQq)hX\x85\x86\x87KMJrj\x88\x89N", rng.randrange(256)))
        assert outcome(in_parts(bytes(data))) == outcome(bytes(data)), bytes(data)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("limit", [0, 50, 500, 5000])
def test_inlined_opcodes_have_the_same_limits(limit: int) -> None:
    data = PICKLES["rows, with far places in the memo"]
    assert outcome(data, limit)[3].startswith("HostileError")
    assert outcome(in_parts(data), limit) == outcome(data, limit)


LEAKS = {
    "a call without arguments": b"\x80\x02R.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "an empty stack": b"0.",
    "a rebuild function without a tensor": b"\x80\x02ctorch._utils\n_rebuild_parameter\n)R.",
    "a rebuild function with too much": b"\x80\x02ctorch._utils\n_rebuild_tensor\n(NNNNNNNtR.",
    "items of a number": b"\x80\x02K\x01(K\x01K\x02u.",
    "a value that was never kept": b"\x80\x02h\x05.",
    "pairs without a value": b"\x80\x02}(K\x01u.",
    "a set of lists": b"\x80\x04\x8f(]\x90.",
}


@pytest.mark.parametrize("data", LEAKS.values(), ids=LEAKS)
def test_messages_are_about_the_pickle_and_not_python(data: bytes) -> None:
    error = outcome(data)[3]
    assert error == "" or "pickle" in error
    assert not any(word in error for word in ("pop from", "positional", "takes ", "index out", "unhashable", "zip()"))


@pytest.mark.parametrize("first", [0, 1])
def test_consecutive_memo_numbers_are_a_list(first):
    memo = Memo()
    for index in range(first, 1000):
        assert memo.keep(index, index) == SLOT
        assert memo.keep(index, index) == 0
    assert [memo.recall(index) for index in range(first, 1000)] == list(range(first, 1000))


def test_a_large_memo_number_is_stored_apart():
    memo = Memo()
    assert memo.keep(1 << 32, "far") == FAR
    assert memo.keep(1 << 32, "again") == 0
    assert memo.recall(1 << 32) == "again"


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers())))
def test_the_memo_is_a_dict(kept):
    memo, model = Memo(), {}
    for index, value in kept:
        memo.keep(index, value)
        model[index] = value
        assert len(memo) == len(model)
    for index in range(-3, 14):
        if index in model:
            assert memo.recall(index) == model[index]
        else:
            with pytest.raises(KeyError):
                memo.recall(index)


@pytest.mark.parametrize("protocol", range(6))
def test_a_long_pickle_keeps_only_memo_entries_that_are_used(protocol):
    rows = [[float(number), [number]] for number in range(10_000)]
    value = [rows, rows[::-1000], "g12345\nj\x39\x30"]
    got, machine = run(pickle.dumps(value, protocol=protocol))
    assert got == value
    assert all(any(again is row for row in got[0]) for again in got[1])
    kept = [one for one in machine.memo.row if type(one) is list]
    assert len(machine.memo) > 20_000
    assert len(kept) < (20_000 if protocol == 0 else 10_000)


def test_numbers_in_other_spellings_keep_their_value():
    data = pickle.dumps([[number] for number in range(20_000)], protocol=2)
    with pytest.raises(UnreadableError, match="a value is missing"):
        run(data[:-1] + b"0g+19000\n.")


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_data_is_read_as_by_pickle(value):
    for protocol in range(6):
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
def test_any_plain_data_is_read(value, protocol):
    assert run(pickle.dumps(value, protocol=protocol))[0] == value


def test_an_object_that_holds_itself_is_one_object():
    value: list[Any] = []
    value.append({"me": value})
    got, _ = run(pickle.dumps(value))
    assert got[0]["me"] is got


def test_classes_are_not_called():
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
def test_a_number_of_too_many_digits_is_reported_without_the_interpreters_own_words(number):
    with pytest.raises(UnreadableError, match="a number of 5000 digits") as caught:
        run(number % (b"9" * 5000))
    assert "sys." not in str(caught.value)
