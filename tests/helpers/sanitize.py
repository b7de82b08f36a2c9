"""A few small calls through every kernel, for NVIDIA's checkers; each prints what it ran.

    compute-sanitizer --tool memcheck python3 tests/helpers/sanitize.py      # also racecheck, synccheck and initcheck
    python3 tests/helpers/sanitize.py hopper                                 # one backend alone

Every tensor is an allocation of its own, so that a step outside one is a step outside memory.
"""

import os
import sys
import time

import torch

from rainfusion import BlockMask, predict_mask, sparse_attention

GRID, TXT = (3, 8, 9), 20
LENGTH = 3 * 8 * 9 + TXT  # 236: a ragged last block
VIDEO = dict(latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.5)
ADA_BSA = dict(sparse_type="ada_bsa", sparsity=0.3, cdf_threshold=0.8)

# name -> length of q, of k, head dim, key mask, arguments
CALLS = {
    "video with text": (LENGTH, LENGTH, 128, None, dict(RF_V2, **VIDEO, return_lse=True)),
    "no grid": (LENGTH, 400, 128, None, RF_V2),
    "key mask": (LENGTH, LENGTH, 128, "bool", dict(RF_V2, **VIDEO)),
    "bias": (LENGTH, LENGTH, 64, "float", dict(RF_V2, return_lse=True)),
    "every key removed": (LENGTH, LENGTH, 128, "none", dict(RF_V2, **VIDEO, return_lse=True)),
    "one key": (1, 1, 128, None, RF_V2),
    "one more than a block": (129, 257, 64, None, RF_V2),
    "blocks of 64": (LENGTH, LENGTH, 128, None, dict(RF_V2, **VIDEO, block_size=64)),
    "ada_bsa": (LENGTH, 400, 128, None, ADA_BSA),
    "ada_bsa, causal, key mask": (LENGTH, LENGTH, 64, "bool", dict(ADA_BSA, is_causal=True)),
    "dense": (LENGTH, 400, 128, None, dict(return_lse=True)),
    "submeans, compensated": (LENGTH, LENGTH, 128, None, dict(RF_V2, **VIDEO, predictor="submeans", compensate=True)),
    "compensated, key mask": (LENGTH, LENGTH, 64, "bool", dict(RF_V2, compensate=True, return_lse=True)),
    "compensated, many blocks": (200, 128 * 130 + 7, 128, None, dict(RF_V2, compensate=True, return_lse=True)),
    "budgets by head": (LENGTH, LENGTH, 128, None, dict(RF_V2, **VIDEO) | dict(sparsity=[0.9, 0.5, 0.3, 0.7])),
    "target error": (LENGTH, LENGTH, 128, None, dict(VIDEO, sparse_type="rf_v2", target_error=0.3)),
    "head dim 40": (LENGTH, LENGTH, 40, None, dict(RF_V2, **VIDEO)),
}
DTYPES = {"native": (torch.bfloat16, torch.float32), "fp8": (torch.bfloat16,), "int8": (torch.float16,)}


def key_mask(kind, length):
    if kind is None:
        return None
    keep = torch.rand(2, length, device="cuda") < (0.0 if kind == "none" else 0.6)
    return torch.randn(2, length, device="cuda").masked_fill(~keep, -1e4) if kind == "float" else keep


def attend(label, q, k, v, attn_mask=None, **kwargs):
    """One call, waited for, so that a fault is reported under its own name. A refusal is printed too."""
    start = time.perf_counter()
    try:
        sparse_attention(q, k, v, attn_mask, **kwargs)
    except ValueError as error:
        print(f"refused  {label}: {error}", flush=True)
        return 0
    torch.cuda.synchronize()
    print(f"ran      {label} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 1


def main(names):
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    torch.manual_seed(0)
    ran = 0
    for backend in names or ("hopper", "triton"):
        for precision, dtypes in DTYPES.items():
            for dtype in dtypes:
                for name, (q_len, k_len, dim, kind, kwargs) in CALLS.items():
                    q = torch.randn(2, 4, q_len, dim, dtype=dtype, device="cuda")
                    k, v = (torch.randn(2, 2, k_len, dim, dtype=dtype, device="cuda") for _ in range(2))
                    label = f"{backend} {precision} {str(dtype).removeprefix('torch.')}: {name}"
                    kwargs = dict(kwargs, backend=backend, precision=precision)
                    ran += attend(label, q, k, v, key_mask(kind, k_len), **kwargs)
                if precision == "native" and dtype == torch.bfloat16:
                    q, k, v = torch.randn(3, 2, 4, LENGTH, 128, dtype=dtype, device="cuda").unbind()
                    # a row without a block, and one with the ragged block alone
                    dense = torch.tensor([[0, 0], [0, 1]], dtype=torch.bool, device="cuda").expand(2, 4, 2, 2)
                    kwargs = dict(mask=BlockMask.from_dense(dense), return_lse=True, backend=backend)
                    ran += attend(f"{backend} given mask", q, k, v, **kwargs)
                    ran += attend(f"{backend} BSND", *(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND",
                                  **RF_V2, **VIDEO, backend=backend)  # fmt: skip
                    odd = [torch.nn.functional.pad(x, (3, 5, 2, 7))[:, :, 2:-7, 3:-5] for x in (q, k, v)]
                    ran += attend(f"{backend} odd strides", *odd, **RF_V2, **VIDEO, backend=backend)
    q = torch.randn(1, 2, LENGTH, 128, dtype=torch.bfloat16, device="cuda")
    predict_mask(q, q, **RF_V2, **VIDEO)
    torch.cuda.synchronize()
    print(f"{ran} calls", flush=True)
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
