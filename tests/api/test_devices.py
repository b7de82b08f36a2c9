"""Every device that torch finds here runs `portable` and agrees with the CPU: on a GPU machine this tests the GPU."""

import math

import pytest
import torch

from helpers import oracle
from helpers.accuracy import error
from rainfusion import TokenLayout, block_sparse_attention, predict_mask, sparse_attention
from rainfusion.bench import synthetic

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICES = ["cpu", *([ACCELERATOR.type] if ACCELERATOR else [])]

GRID, TXT = (5, 13, 20), 50
LENGTH = math.prod(GRID) + TXT
CALLS = {
    "rf_v2": dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT),
    "rf_v2 64": dict(sparse_type="rf_v2", sparsity=0.7, block_size=64),
    "ada_bsa": dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.9),
    "causal": dict(sparse_type="ada_bsa", sparsity=0.3, is_causal=True),
    "dense": dict(),
}


def inputs(dtype, device, k_heads=2):
    q, k, v = synthetic.video_qkv(synthetic.video_latent(GRID), 4, 64, txt_len=TXT, dtype=dtype)
    return q.to(device), k[:, :k_heads].contiguous().to(device), v[:, :k_heads].contiguous().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mask_kind", [None, "bool", "float"])
@pytest.mark.parametrize("inner_precise", [0, 1])
def test_outputs_agree_with_float64(device, dtype, name, mask_kind, inner_precise):
    q, k, v = inputs(dtype, device)
    kwargs = CALLS[name]
    attn_mask = None
    if mask_kind:
        attn_mask = torch.rand(1, LENGTH) < 0.7
        if mask_kind == "float":
            attn_mask = torch.randn(1, LENGTH).masked_fill(~attn_mask, -1e4)
        attn_mask = attn_mask.to(device)
    out, lse, mask = sparse_attention(
        q, k, v, attn_mask, **kwargs, inner_precise=inner_precise, return_lse=True, return_mask=True
    )
    plain = sparse_attention(q, k, v, attn_mask, **kwargs, inner_precise=inner_precise)
    layout = [kwargs.get("latent_shape_q"), kwargs.get("txt_len", 0), None, "window", mask.block_size]
    order, _ = oracle.layout(LENGTH, *layout)
    tokens = oracle.expand(mask.to_dense().cpu(), order, order, mask.block_size)
    causal = kwargs.get("is_causal", False)
    args = [x.cpu() for x in (q, k, v)]
    exact, exact_lse = oracle.attention(*args, tokens, None if attn_mask is None else attn_mask.cpu(), causal=causal)
    # rounding the output costs one eps; torch's own kernels and half-precision products round p and the logits too
    eps = torch.finfo(dtype).eps
    allowed = max(4 * eps, 2e-6)
    for result in (out, plain):
        assert error(result.cpu(), exact) <= allowed
    loose = 0.1 if inner_precise and dtype != torch.float32 else 1e-4
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=loose, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_masks_are_those_of_the_cpu(device, name):
    """A device may add fp32 numbers in another order: a row that hangs on the last bit may differ, no more."""
    q, k, _ = inputs(torch.bfloat16, device)
    here = predict_mask(q, k, **CALLS[name])
    there = predict_mask(q.cpu(), k.cpu(), **CALLS[name])
    different = (here.to_dense().cpu() != there.to_dense()).any(-1).float().mean()
    assert different <= 0.01
    assert (here.q_len, here.k_len) == (LENGTH, LENGTH)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_two_runs_are_equal(device, name):
    q, k, v = inputs(torch.bfloat16, device)
    assert torch.equal(sparse_attention(q, k, v, **CALLS[name]), sparse_attention(q, k, v, **CALLS[name]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_work_together(device):
    q, k, v = inputs(torch.float32, device, k_heads=4)
    layout = TokenLayout.build(LENGTH, GRID, TXT).to(device)
    mask = predict_mask(q, k, **CALLS["rf_v2"])
    out = layout.restore(block_sparse_attention(*(layout.reorder(x) for x in (q, k, v)), mask))
    torch.testing.assert_close(out, sparse_attention(q, k, v, **CALLS["rf_v2"]))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_calls_agree(device):
    torch._dynamo.reset()
    q, k, v = inputs(torch.bfloat16, device)

    def call(q, k, v):
        return sparse_attention(q, k, v, **CALLS["rf_v2"])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_empty_and_fully_masked(device):
    q, k, v = inputs(torch.bfloat16, device)
    nothing = torch.zeros(1, LENGTH, dtype=torch.bool, device=device)
    for kwargs in CALLS.values():
        assert (sparse_attention(q, k, v, nothing, **kwargs) == 0).all()
    assert sparse_attention(q[:0], k[:0], v[:0], sparse_type="rf_v2", sparsity=0.5).shape == (0, 4, LENGTH, 64)
