from hypothesis import given
from hypothesis import strategies as st

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.spec import Regions, Storage, TensorSpec, ties

STORAGE = Storage("0", MemoryBytes(bytes(1000)))


def view(start: int, size: int, dtype: str = "uint8", storage: Storage = STORAGE) -> TensorSpec:
    return TensorSpec(dtype, (size,), (1,), storage, start)


def spans(*views: TensorSpec) -> list[tuple[int, int]]:
    return [(region.start, region.stop) for region in Regions(views)]


def test_no_tensors_have_no_regions():
    assert spans() == []
    assert spans(TensorSpec("float32", (3,), (1,))) == []


def test_the_whole_storage_is_one_region():
    (region,) = Regions([view(0, 1000)])
    assert region.is_whole


def test_overlapping_views_share_a_region():
    assert spans(view(0, 10), view(10, 10)) == [(0, 10), (10, 20)]
    assert spans(view(5, 10), view(0, 10)) == [(0, 15)]
    assert spans(view(0, 100), view(20, 10), view(50, 10)) == [(0, 100)]
    assert spans(view(990, 10)) == [(990, 1000)]


def test_storages_have_regions_of_their_own():
    other = Storage("1", MemoryBytes(bytes(10)))
    assert spans(view(0, 10), view(0, 10, storage=other)) == [(0, 10), (0, 10)]


def test_a_region_begins_where_its_widest_dtype_is_aligned():
    assert spans(view(5, 20), view(1, 2, "float64")) == [(0, 25)]
    assert spans(view(34, 16), view(50, 8), view(7, 1, "float64")) == [(32, 64)]


def test_an_empty_tensor_has_a_region():
    regions = Regions([view(0, 10), view(10, 0), view(500, 0)])
    assert regions.of(view(500, 0))[0].nbytes == 0


views = st.builds(
    lambda dtype, start, shape, strides: TensorSpec(dtype, tuple(shape), tuple(strides[: len(shape)]), STORAGE, start),
    st.sampled_from(["uint8", "float16", "float32", "float64"]),
    st.integers(0, 30),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.integers(0, 7), min_size=3, max_size=3),
)


def test_ties_are_in_the_order_of_their_first_keys():
    other = Storage("1", MemoryBytes(bytes(1000)))
    specs = {"a": view(0, 9), "b": view(0, 9, storage=other), "c": view(9, 9), "d": view(0, 9, storage=other)}
    assert ties({**specs, "e": view(9, 9), "f": view(0, 9)}) == (("a", "f"), ("b", "d"), ("c", "e"))


def test_tensors_without_a_storage_are_not_tied():
    meta = TensorSpec("float32", (3,), (1,))
    sparse = TensorSpec("float32", (3,), layout="sparse_coo", parts={"indices": view(0, 3), "values": view(3, 3)})
    assert ties({"a": meta, "b": meta, "c": sparse, "d": sparse, "e": view(0, 0), "f": view(0, 0)}) == ()


@given(st.lists(views, min_size=1, max_size=8))
def test_every_tensor_lies_in_its_region_at_the_same_bytes(specs):
    regions = Regions(specs)
    for spec in specs:
        region, offset = regions.of(spec)
        begin, end = spec.extent
        assert (region.start + offset * spec.itemsize) == begin
        assert region.start <= begin
        assert end <= region.stop or begin == end
    for one in specs:
        for other in specs:
            if one.numel and other.numel and one.extent[0] < other.extent[1] and other.extent[0] < one.extent[1]:
                assert regions.of(one)[0] is regions.of(other)[0]
