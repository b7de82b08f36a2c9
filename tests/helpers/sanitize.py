"""A few small calls through every kernel, for NVIDIA's checkers; each prints what it ran.

    compute-sanitizer --tool memcheck python3 tests/helpers/sanitize.py      # also racecheck, synccheck and initcheck
    python3 tests/helpers/sanitize.py hopper                                 # one backend alone
    python3 tests/helpers/sanitize.py hopper --precision fp8 --part 2/4      # a quarter of its calls in fp8

Every tensor is an allocation of its own, so that a step outside one is a step outside memory. Repeated
calls are launched from their record from the third on (`rainfusion.replaying`).
"""

import argparse
import itertools
import os
import sys
import time

import torch

from rainfusion import BlockMask, predict_mask, sparse_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID, TXT = (3, 8, 9), 20
LENGTH = 3 * 8 * 9 + TXT  # 236: a ragged last block
VIDEO = dict(latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.5)
FINE = dict(RF_V2, block_size=(128, 32), predictor="spread", compensate=True, first_frame="free")  # as `enable` has it
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
    "finer keys": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO)),
    "finer keys, LSE, other lengths": (LENGTH, 407, 64, None, dict(FINE, return_lse=True)),
    "finer keys, key mask": (LENGTH, LENGTH, 128, "bool", dict(FINE, **VIDEO, return_lse=True)),
    "finer keys, bias": (LENGTH, LENGTH, 64, "float", dict(FINE, **VIDEO)),
    "finer keys, every key removed": (LENGTH, LENGTH, 128, "none", dict(FINE, **VIDEO, return_lse=True)),
    "finer keys, many blocks": (200, 32 * 130 + 7, 128, None, dict(FINE, return_lse=True)),
    "finer keys, one key": (1, 1, 128, None, FINE),
    "finer keys, not compensated": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO, compensate=False)),
    "finer keys, submeans": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO, predictor="submeans")),
    "finer keys, budgets by head": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO, sparsity=[0.9, 0.5, 0.3, 0.7])),
    "64 keys a block": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO, block_size=(128, 64))),
    "128 keys a block, spread": (LENGTH, LENGTH, 128, None, dict(FINE, **VIDEO, block_size=128)),
}
REPEATED = ("video with text", "submeans, compensated", "finer keys", "finer keys, LSE, other lengths")
TIMES = 4  # that such a call is made: known, recorded, launched from its record twice
DTYPES = {"native": (torch.bfloat16, torch.float32), "fp8": (torch.bfloat16,), "int8": (torch.float16,)}


def key_mask(kind, length):
    if kind is None:
        return None
    keep = torch.rand(2, length, device=DEVICE) < (0.0 if kind == "none" else 0.6)
    return torch.randn(2, length, device=DEVICE).masked_fill(~keep, -1e4) if kind == "float" else keep


def attend(label, q, k, v, attn_mask=None, **kwargs):
    """One call, waited for, so that a fault is reported under its own name. A refusal is printed too."""
    start = time.perf_counter()
    try:
        sparse_attention(q, k, v, attn_mask, **kwargs)
    except ValueError as error:
        print(f"refused  {label}: {error}", flush=True)
        return 0
    wait()
    print(f"ran      {label} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 1


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def named_calls(backend, precision, dtype, name):
    """One of `CALLS`, or the same several times with new tensors: -> how many ran."""
    q_len, k_len, dim, kind, kwargs = CALLS[name]
    ran = 0
    for number in range(TIMES if name in REPEATED else 1):
        q = torch.randn(2, 4, q_len, dim, dtype=dtype, device=DEVICE)
        k, v = (torch.randn(2, 2, k_len, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        label = f"{backend} {precision} {str(dtype).removeprefix('torch.')}: {name}" + (
            f", again {number}" * (number > 0)
        )
        ran += attend(label, q, k, v, key_mask(kind, k_len), **kwargs, backend=backend, precision=precision)
    return ran


def other_calls(backend, dtype):
    """A mask of the caller's, and tensors that lie in memory in other ways."""
    q, k, v = torch.randn(3, 2, 4, LENGTH, 128, dtype=dtype, device=DEVICE).unbind()
    # a row without a block, and one with the ragged block alone
    dense = torch.tensor([[0, 0], [0, 1]], dtype=torch.bool, device=DEVICE).expand(2, 4, 2, 2)
    ran = attend(f"{backend} given mask", q, k, v, mask=BlockMask.from_dense(dense), return_lse=True, backend=backend)
    for name, options in (("", RF_V2), ("finer keys, ", FINE)):
        for _ in range(TIMES):
            ran += attend(f"{backend} {name}BSND", *(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND",
                          **options, **VIDEO, backend=backend)  # fmt: skip
        odd = [torch.nn.functional.pad(x, (3, 5, 2, 7))[:, :, 2:-7, 3:-5] for x in (q, k, v)]
        ran += attend(f"{backend} {name}odd strides", *odd, **options, **VIDEO, backend=backend)
    predict_mask(q, k, **RF_V2, **VIDEO, backend=backend)
    wait()
    return ran


def jobs(names, precisions):
    """What to do, in pieces that can be shared out."""
    for backend, precision in itertools.product(names, precisions):
        for dtype in DTYPES[precision]:
            for name in CALLS:
                yield named_calls, backend, precision, dtype, name
            if precision == "native" and dtype == torch.bfloat16:
                yield other_calls, backend, dtype


def main(argv):
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["hopper", "triton"])
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th piece, from the I-th on")
    args = parser.parse_args(argv)
    first, parts = map(int, args.part.split("/"))
    torch.manual_seed(0)
    ran = 0
    for work, *rest in itertools.islice(jobs(args.backends, args.precision), first - 1, None, parts):
        ran += work(*rest)
    print(f"{ran} calls", flush=True)
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
