"""The error of native precision, over dtypes, layouts, shapes, masks, scales and strides."""

import math
import random

import pytest
import torch

from helpers import fuzz, gpu
from helpers.gpu import ADA_BSA, BF16, CALL, FP16, FP32, LAYOUTS, LENGTH, RF_V2, VIDEO, same
from rainfusion import BlockMask

pytestmark = gpu.ON_GPU


@pytest.mark.parametrize(
    ("dtype", "dim"), [(BF16, 64), (BF16, 128), (BF16, 256), (FP16, 72), (FP16, 128), (FP32, 128)], ids=str
)
def test_a_video_with_text_in_every_dtype(backend, dtype, dim):
    gpu.check(backend, *gpu.qkv(dim=dim, dtype=dtype), **CALL)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*((BF16, dim) for dim in (32, 40, 80, 96, 192)), (FP16, 64),
     *((FP32, dim) for dim in (32, 64, 256))], ids=str,
)  # fmt: skip
def test_head_dims_with_a_given_mask(backend, dtype, dim):
    q, k, v = gpu.qkv(1030, LENGTH, dim=dim, dtype=dtype)
    gpu.check(backend, q, k, v, mask=BlockMask.from_dense(gpu.random_mask(q, k)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    length, layout = LAYOUTS[name]
    gpu.check(backend, *gpu.qkv(length), **RF_V2, **layout)


@pytest.mark.parametrize(
    ("q_len", "k_len"),
    [(1, 1), (63, 1000), (128, 128), (129, 4200), (1000, 64), (4200, 127), (4200, 4200)],
)
def test_lengths(backend, q_len, k_len):
    gpu.check(backend, *gpu.qkv(q_len, k_len, batch=1), **RF_V2)


def test_each_side_has_its_own_grid(backend):
    q, k, v = gpu.qkv(1030 + 20, LENGTH)
    for layout in (
        dict(latent_shape_q=(5, 10, 21), latent_shape_k=gpu.GRID, txt_len=0),
        dict(latent_shape_q=(1, 25, 40), latent_shape_k=gpu.GRID, txt_len=gpu.TXT),
        dict(latent_shape_k=gpu.GRID, txt_len=gpu.TXT),
    ):
        tokens = layout["txt_len"] + 1300
        gpu.check(backend, q, k[:, :, :tokens], v[:, :, :tokens], **RF_V2, **layout)


@pytest.mark.parametrize("k_heads", [8, 4, 2])
@pytest.mark.parametrize("layout", [{}, VIDEO], ids=["none", "video"])
def test_heads_that_share_keys(backend, k_heads, layout):
    gpu.check(backend, *gpu.qkv(heads=8, k_heads=k_heads), **RF_V2, **layout)


@pytest.mark.parametrize("kind", gpu.KEY_MASKS)
@pytest.mark.parametrize("name", ["none", "video", "mindiesd"])
def test_key_masks(backend, kind, name):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1])


@pytest.mark.parametrize("kind", [None, "float"])
@pytest.mark.parametrize("name", ["none", "video"])
def test_key_masks_in_fp32(backend, kind, name):
    gpu.check(backend, *gpu.qkv(dtype=FP32), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1])


@pytest.mark.parametrize(
    ("name", "kind"), [("none", "blocks"), ("video", None), ("video", "bool"), ("spans", "float"), ("mindiesd", None)]
)
def test_blocks_of_64(backend, name, kind):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), **RF_V2, **LAYOUTS[name][1], block_size=64)


@pytest.mark.parametrize("sparsity", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("name", ["none", "video"])
def test_sparsities(backend, sparsity, name):
    gpu.check(backend, *gpu.qkv(), sparse_type="rf_v2", sparsity=sparsity, **LAYOUTS[name][1])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("scale", [-0.3, -2.0, 0.0, 1e-3, 4.0, 100.0])
def test_scales(backend, dtype, scale):
    gpu.check(backend, *gpu.qkv(dtype=dtype), **RF_V2, scale=scale)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 100.0])
def test_scales_with_a_key_mask(backend, scale):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask("bool", 2, LENGTH), **CALL, scale=scale)


@pytest.mark.parametrize("kwargs", ADA_BSA, ids=str)
@pytest.mark.parametrize("kind", [None, "float", "blocks"])
def test_ada_bsa(backend, kwargs, kind):
    q, k, v = gpu.qkv()
    gpu.check(backend, q * 2, k, v, gpu.key_mask(kind, 2, LENGTH), sparse_type="ada_bsa", **kwargs)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_ada_bsa_in_other_dtypes(backend, dtype):
    gpu.check(backend, *gpu.qkv(dtype=dtype), sparse_type="ada_bsa", sparsity=0.5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, "float"])
def test_dense(backend, is_causal, kind):
    gpu.check(backend, *gpu.qkv(), gpu.key_mask(kind, 2, LENGTH), is_causal=is_causal)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_fastest_arithmetic(backend, dtype):
    gpu.check(backend, *gpu.qkv(dtype=dtype), **CALL, inner_precise=1)


def test_calls_without_lse(backend):
    gpu.check(backend, *gpu.qkv(), lse=False, **CALL)


def strided(kind, x):
    """The same numbers as x, laid out otherwise."""
    if kind == "every second column":
        return torch.stack([x, x.flip(2)], -1)[..., 0]
    if kind == "tokens side by side":
        return x.mT.contiguous().mT
    if kind == "slice at an odd address":
        return torch.nn.functional.pad(x, (3, 5, 2, 7))[:, :, 2:-7, 3:-5]
    if kind == "part of a fused qkv":  # [B, S, 3, N, D] -> [B, N, S, D]
        return torch.stack([x, x.flip(2), x.flip(3)], 1).permute(0, 3, 1, 2, 4).contiguous()[:, :, 0].transpose(1, 2)
    assert kind == "one head for all"
    return x[:1, :1].expand(x.shape)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("every second column", "video"), ("tokens side by side", "none"), ("slice at an odd address", "none"),
     ("slice at an odd address", "video"), ("part of a fused qkv", "none"), ("part of a fused qkv", "video"),
     ("one head for all", "none"), ("one head for all", "video")],
)  # fmt: skip
def test_strides(backend, kind, name):
    gpu.check(backend, *(strided(kind, x) for x in gpu.qkv()), **RF_V2, **LAYOUTS[name][1])


def test_bsnd_is_the_same_to_the_last_bit(backend):
    q, k, v = gpu.qkv()
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    result = gpu.check(backend, *swapped, **CALL, input_layout="BSND")
    plain = gpu.attend(backend, q, k, v, **CALL, return_lse=True, return_mask=True)
    assert (result is None) == (plain is None)
    if result is not None:
        assert result[0].is_contiguous()
        assert same((result[0].transpose(1, 2).contiguous(), *result[1:]), plain)


def random_call(seed):
    """Lengths stay within the classes that kernels are compiled for (see `gpu.LENGTH`)."""
    draw = random.Random(seed)
    block_size = draw.choice([128, 128, 64])

    def fits(n):
        return n % 16 and 1152 < n <= 1920 and -(-n // 128) % 16 and -(-n // 64) % 16

    def grid(total):
        """[t, h, w] of a size that fits, and the text before it."""
        while True:
            t, h = draw.choice([1, 2, 3, 5, 7, 9]), draw.randint(2, 30)
            txt = draw.choice([0, 1, 50, 128, 300])
            w = (total - txt) // (t * h)
            if w >= 1 and fits(txt + t * h * w):
                return (t, h, w), txt

    kwargs = dict(sparse_type="rf_v2", sparsity=draw.choice([0.1, 0.5, 0.7, 0.9, 1.0]), block_size=block_size)
    kind = draw.choice(["none", "grid", "grid", "grids", "spans", "ada_bsa"])
    q_len, k_len = (draw.choice([1153, 1200 + 30, LENGTH, 1501, 1777]) for _ in range(2))
    if kind in ("grid", "grids"):
        latent_q, txt = grid(draw.randint(1200, 1900))
        q_len = k_len = math.prod(latent_q) + txt
        kwargs.update(latent_shape_q=latent_q, txt_len=txt, token_order=draw.choice(["window", "mindiesd", "raster"]))
        if kind == "grids":
            k_len = draw.choice([n for n in (1153, 1350, 1501) if n != q_len])
    elif kind == "spans":
        q_len = k_len = LENGTH
        kwargs.update(video_spans=gpu.SPANS, token_order=draw.choice(["window", "raster", "mindiesd"]))
    elif kind == "none":
        kwargs.update(txt_len=draw.choice([0, 129]))
    else:
        kwargs = dict(sparse_type="ada_bsa", sparsity=draw.choice([0.2, 0.7, 1.0]))
    heads, k_heads = draw.choice([(4, 2), (8, 2)])
    tensors = dict(batch=draw.choice([1, 2]), heads=heads, k_heads=k_heads, seed=seed)
    tensors["dtype"] = draw.choice([BF16, BF16, FP32]) if block_size == 128 and kind != "ada_bsa" else BF16
    layout = draw.choice(["BNSD", "BSND"])
    return q_len, k_len, tensors, draw.choice([None, None, *gpu.KEY_MASKS]), layout, kwargs


@pytest.mark.parametrize("seed", range(fuzz.examples(40)))
def test_random_calls(backend, seed):
    q_len, k_len, tensors, kind, layout, kwargs = random_call(seed)
    inputs = gpu.qkv(q_len, k_len, **tensors)
    before = [x.clone() for x in inputs]
    attn_mask = gpu.key_mask(kind, len(inputs[0]), k_len, seed)
    if layout == "BSND":
        inputs = [x.transpose(1, 2) for x in inputs]
    gpu.check(backend, *inputs, attn_mask, **kwargs, input_layout=layout)
    if layout == "BSND":
        inputs = [x.transpose(1, 2) for x in inputs]
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was modified"
