"""For any shapes, dtypes, number of ranks and bucket size: every element is owned exactly once, slices are equal and
hold whole chunks, a bucket has one dtype and its parameters in reverse order, the chunk table says what the segments
say, and padding stays small. Boxes tile a range of a tensor, and are few."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zero1_cuda.checkpoint.dcp_tensors import boxes
from zero1_cuda.ops import CHUNK
from zero1_cuda.params.layout import MIB, Layout, ParamSpec, default_bucket_cap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

numels = st.one_of(st.integers(0, 9), st.sampled_from([127, 128, 129, 1023, 1024, 1025]), st.integers(0, 20_000))
specs = st.lists(st.builds(ParamSpec, numels, st.sampled_from(DTYPES)), min_size=1, max_size=12)
worlds = st.one_of(st.sampled_from([1, 2, 3, 4, 7, 8, 1023, 1024]), st.integers(1, 1024))
caps = st.one_of(st.none(), st.integers(1, 100_000))
layouts = st.builds(Layout, specs, worlds, caps)
few_ranks = st.builds(Layout, specs, st.integers(1, 9), caps)


@given(layouts)
@example(Layout([ParamSpec(0, torch.float32)], 1024, 1))
def test_every_element_is_owned_once(layout):
    owned = [[] for _ in layout.specs]
    for rank in range(layout.world_size):
        at = 0
        for segment in layout.segments(rank):
            bucket = layout.buckets[segment.bucket]
            owned[segment.param].append((segment.lo, segment.hi))
            assert segment.param in bucket.params
            # one place, said in four ways
            inside = segment.shard_begin - bucket.shard_begin
            assert 0 <= inside <= inside + segment.hi - segment.lo <= bucket.slice_numel
            assert segment.slice_begin == bucket.slice_begin + inside
            assert segment.flat_begin == bucket.begin + rank * bucket.slice_numel + inside
            assert segment.flat_begin == layout.begin_of[segment.param] + segment.lo
            # whole chunks, in order, none shared
            assert segment.lo % CHUNK == segment.shard_begin % CHUNK == segment.flat_begin % CHUNK == 0
            assert segment.shard_begin >= at
            at = segment.shard_begin + -(-(segment.hi - segment.lo) // CHUNK) * CHUNK
        assert at <= layout.shard_numel
    for spec, ranges in zip(layout.specs, owned, strict=True):
        edges = [0]
        for lo, hi in sorted(ranges):
            assert lo == edges[-1]
            assert hi > lo
            edges.append(hi)
        assert edges[-1] == spec.numel


@given(specs, worlds, caps)
def test_buckets(specs, world, cap):
    layout = Layout(specs, world, cap)
    seen = []
    flat = dict.fromkeys(layout.flat_numel, 0)
    slices = dict.fromkeys(layout.flat_numel, 0)
    shard = 0
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert {layout.specs[i].dtype for i in bucket.params} == {bucket.dtype}
        assert list(bucket.params) == sorted(bucket.params, reverse=True)
        assert bucket.slice_numel % CHUNK == 0
        begins = (bucket.begin, bucket.slice_begin, bucket.shard_begin)
        assert begins == (flat[bucket.dtype], slices[bucket.dtype], shard)
        flat[bucket.dtype] += layout.world_size * bucket.slice_numel
        slices[bucket.dtype] += bucket.slice_numel
        shard += bucket.slice_numel
        end = 0
        for i, begin in zip(bucket.params, bucket.begins, strict=True):
            assert begin % CHUNK == 0
            assert begin >= end
            assert layout.bucket_of[i] == index
            assert layout.begin_of[i] == bucket.begin + begin
            end = begin + layout.specs[i].numel
        assert end <= layout.world_size * bucket.slice_numel
        used = sum(-(-layout.specs[i].numel // CHUNK) * CHUNK * bucket.dtype.itemsize for i in bucket.params)
        limit = cap or default_bucket_cap(sum(s.numel * s.dtype.itemsize for s in layout.specs), layout.world_size)
        assert used <= limit or len([i for i in bucket.params if layout.specs[i].numel]) == 1
        seen += bucket.params
    assert sorted(seen) == list(range(len(layout.specs)))
    assert (layout.flat_numel, layout.slices_numel, layout.shard_numel) == (flat, slices, shard)
    for dtype in flat:  # over all buckets of a dtype, the last registered comes first
        of_dtype = [i for i in seen if layout.specs[i].dtype == dtype]
        assert of_dtype == sorted(of_dtype, reverse=True)


@given(few_ranks)
def test_chunk_table_says_what_the_segments_say(layout):
    for rank in range(layout.world_size):
        segments = list(layout.segments(rank))
        want = [-1] * (layout.shard_numel // CHUNK)
        for s, segment in enumerate(segments):
            for at in range(segment.shard_begin, segment.shard_begin + segment.hi - segment.lo, CHUNK):
                assert want[at // CHUNK] == -1
                want[at // CHUNK] = s
        table = layout.chunk_segments(segments)
        assert table.dtype == torch.int32
        assert table.tolist() == want


@given(layouts)
def test_padding_is_bounded(layout):
    for dtype, padding in layout.padding.items():
        members = [s for s in layout.specs if s.dtype == dtype]
        buckets = [b for b in layout.buckets if b.dtype == dtype]
        assert layout.flat_numel[dtype] == sum(s.numel for s in members) + padding
        most = (CHUNK - 1) * len(members) + (layout.world_size * CHUNK - 1) * len(buckets)
        assert 0 <= padding <= most


def gpt(layers, width, vocabulary):
    """numels of a GPT's parameters, in registration order."""
    block = [width, width, 3 * width**2, 3 * width, width**2, width, width, width, 4 * width**2, 4 * width]
    return [vocabulary * width, 1024 * width, *[*block, 4 * width**2, width] * layers, width, width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model", "world"),
    [((12, 768, 50257), 1), ((12, 768, 50257), 64), ((48, 1600, 50257), 1024), ((36, 4096, 50304), 1024)],
)
def test_default_bucket_cap_keeps_padding_below_half_a_percent(model, world, dtype):
    sizes = gpt(*model)
    layout = Layout([ParamSpec(n, dtype) for n in sizes], world)
    assert len(layout.buckets) >= 4
    assert sum(layout.padding.values()) < 0.005 * sum(sizes)


def test_default_bucket_cap():
    assert default_bucket_cap(100 * 2**30, 8) == 25 * MIB
    assert default_bucket_cap(100 * 2**30, 1024) == 512 * MIB  # a slice of half a MiB
    assert default_bucket_cap(40 * MIB, 8) == 10 * MIB  # four buckets
    assert default_bucket_cap(1000, 2) == MIB
    assert default_bucket_cap(1000, 8) == 4 * MIB


def test_a_parameter_is_never_split_over_buckets():
    layout = Layout([ParamSpec(1000, torch.bfloat16)] * 5, 4, bucket_cap_bytes=2 * 2 * 1024)
    assert [b.params for b in layout.buckets] == [(4, 3), (2, 1), (0,)]
    assert [b.slice_numel for b in layout.buckets] == [512, 512, 256]
    alone = Layout([ParamSpec(10**6, torch.float32), ParamSpec(1, torch.float32)], 2, bucket_cap_bytes=1)
    assert [b.params for b in alone.buckets] == [(1,), (0,)]


# -- boxes ------------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 6), max_size=5)


@given(shapes, st.data())
def test_boxes_tile_the_range(shape, data):
    numel = math.prod(shape)
    lo = data.draw(st.integers(0, numel))
    hi = data.draw(st.integers(lo, numel))
    found = boxes(shape, lo, hi)
    if not numel:
        assert found == [((0,) * len(shape), tuple(shape))]
        return
    index = torch.arange(numel).view(shape)
    order = []
    for offsets, sizes in found:
        box = index[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert tuple(box.shape) == tuple(sizes)
        order += box.reshape(-1).tolist()
    assert order == list(range(lo, hi))
    assert len(found) <= max(1, 2 * len(shape) - 1)
