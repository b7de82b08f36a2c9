"""Token orders and protected blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.fuzz import examples
from rainfusion import TokenLayout

ORDERS = ["window", "raster", "mindiesd", (4, 4, 8), (8, 4, 4), (2, 8, 8), (1, 8, 16), (1, 1, 128)]

sides = st.integers(1, 21)
grids = st.tuples(st.integers(1, 9), sides, sides)


def assert_same(layout, expected):
    order, protected = expected
    assert layout.order.tolist() == order
    assert layout.protected.tolist() == protected
    assert layout.order[layout.inverse].tolist() == list(range(layout.seq_len))
    assert not layout.is_identity or order == list(range(len(order)))


@settings(max_examples=examples(150))
@given(grid=grids, txt=st.integers(0, 300), order=st.sampled_from(ORDERS), size=st.sampled_from([64, 128]))
def test_orders_agree_with_the_definition(grid, txt, order, size):
    seq_len = txt + math.prod(grid)
    args = dict(latent_shape=grid, txt_len=txt, token_order=order, block_size=size)
    assert_same(TokenLayout.build(seq_len, **args), oracle.layout(seq_len, **args))


@st.composite
def clip_sequences(draw):
    spans, position = [], 0
    for _ in range(draw(st.integers(1, 4))):
        position += draw(st.sampled_from([0, 0, 1, 5, 64, 128, 200]))
        grid = (draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 12)))
        spans.append({"start": position, "latent_shape": list(grid)})
        position += math.prod(grid)
    return position + draw(st.sampled_from([0, 1, 77, 128])), spans


@settings(max_examples=examples(150))
@given(clips=clip_sequences(), order=st.sampled_from(ORDERS), size=st.sampled_from([64, 128]))
def test_clips_agree_with_the_definition(clips, order, size):
    seq_len, spans = clips
    args = dict(video_spans=spans, token_order=order, block_size=size)
    assert_same(TokenLayout.build(seq_len, **args), oracle.layout(seq_len, **args))


@given(seq_len=st.integers(0, 600), data=st.data())
def test_without_a_grid_nothing_moves_and_text_is_protected_in_front(seq_len, data):
    txt = data.draw(st.integers(0, seq_len))
    layout = TokenLayout.build(seq_len, txt_len=txt)
    assert layout.is_identity
    assert layout.protected.tolist() == [i * 128 < txt for i in range(math.ceil(seq_len / 128))]


def test_one_clip_behind_text_is_the_same_as_latent_shape_and_txt_len():
    by_shape = TokenLayout.build(1000 + 60, latent_shape=[10, 10, 10], txt_len=60)
    by_span = TokenLayout.build(1060, video_spans=[{"start": 60, "latent_shape": [10, 10, 10]}])
    assert torch.equal(by_shape.order, by_span.order)
    assert torch.equal(by_shape.protected, by_span.protected)


def test_a_whole_window_is_one_block():
    """17 frames of 16x32: after the first frame every block is 2 frames by 8 rows by 8 columns."""
    layout = TokenLayout.build(17 * 16 * 32, latent_shape=[17, 16, 32])
    for block in layout.order[: 16 * 16 * 32].view(-1, 128):
        t, y, x = block // 512, block // 32 % 16, block % 32
        assert (t.unique().numel(), y.unique().numel(), x.unique().numel()) == (2, 8, 8)


@pytest.mark.parametrize("grid", [(21, 45, 80), (21, 30, 52), (13, 37, 61)])
def test_blocks_stay_compact_on_real_grids(grid):
    """Whatever the remainders are, a block spans few frames, rows and columns (raster order spans the whole width)."""
    t, h, w = grid
    layout = TokenLayout.build(t * h * w, latent_shape=grid)
    blocks = layout.order[: (t - 1) * h * w // 128 * 128].view(-1, 128)
    spread = [(x.amax(1) - x.amin(1) + 1).float() for x in (blocks // (h * w), blocks // w % h, blocks % w)]
    assert spread[0].amax() <= 8
    assert (spread[0] * spread[1] * spread[2]).median() <= 4 * 4 * 9 * 1.5


def test_first_frame_and_text_are_last_and_protected():
    layout = TokenLayout.build(2560 + 100, latent_shape=[5, 16, 32], txt_len=100)
    assert layout.order[2048:2560].tolist() == list(range(100, 612))
    assert layout.order[2560:].tolist() == list(range(100))
    assert layout.protected.tolist() == [False] * 16 + [True] * 5


def test_an_image_has_no_first_frame_to_protect():
    assert not TokenLayout.build(4096, latent_shape=[1, 64, 64]).protected.any()
    assert not TokenLayout.build(4096, latent_shape=[1, 64, 64], token_order="mindiesd").protected.any()


def test_mindiesd_protects_exact_numbers_of_blocks_even_where_text_straddles():
    layout = TokenLayout.build(3 * 200 + 100, latent_shape=[3, 10, 20], txt_len=100, token_order="mindiesd")
    # 700 tokens are 6 blocks; the text lies in blocks 4 and 5, but ceil(100 / 128) = 1 is protected
    assert layout.protected.tolist() == [True, True, False, False, False, True]


def test_restoring_the_order_is_exact():
    layout = TokenLayout.build(7 * 11 * 13 + 9, latent_shape=[7, 11, 13], txt_len=9)
    x = torch.randn(2, 3, layout.seq_len, 5)
    assert torch.equal(layout.restore(layout.reorder(x)), x)
    assert torch.equal(layout.reorder(layout.restore(x)), x)


def test_a_layout_is_ordinary_whatever_mode_it_is_built_in():
    with torch.inference_mode(), torch.device("meta"):
        layout = TokenLayout.build(60, latent_shape=[3, 4, 5])
    assert layout.order.device.type == "cpu"
    assert not layout.order.is_inference()


def test_repr_says_what_it_is():
    assert repr(TokenLayout.build(1024, latent_shape=[2, 16, 32])) == (
        "TokenLayout(1024 tokens, 8 blocks of 128, reordered, 4 protected)"
    )


def test_parts_of_a_window_are_compact():
    order = TokenLayout.build(5 * 16 * 24, latent_shape=[5, 16, 24], block_size=32).order[: 4 * 16 * 24]
    place = torch.stack([order // (16 * 24), order // 24 % 16, order % 24], 1)
    for size, sides in ((128, [2, 8, 8]), (64, [2, 4, 8]), (32, [2, 4, 4]), (16, [2, 2, 4])):
        parts = place.view(-1, size, 3)
        assert (parts.amax(1) - parts.amin(1) + 1 == torch.tensor(sides)).all()
