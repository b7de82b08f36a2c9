"""After the first call with some options Triton compiles nothing more, whatever the sizes of later calls are.

What it compiles is counted by its own hook, which also hears of kernels that it finds in its cache on disk.
"""

import contextlib
import math
from unittest import mock

import pytest
import torch

import rainfusion
from helpers import gpu
from helpers.gpu import BF16, FP32
from rainfusion import Method

pytestmark = gpu.ON_GPU

RF_V2 = dict(sparse_type="rf_v2", sparsity=0.5)
BETTER = dict(RF_V2, predictor="submeans", compensate=True, first_frame="free")
CALLS = {
    "rf_v2": RF_V2,
    "enable": BETTER,
    "enable, fp8": dict(BETTER, precision="fp8"),
    "enable, int8": dict(BETTER, precision="int8"),
    "finer keys": dict(BETTER, predictor="spread", block_size=(128, 32)),
    "finer keys, fp8": dict(BETTER, block_size=(128, 32), precision="fp8"),
    "finer keys, int8": dict(BETTER, predictor="spread", block_size=(128, 32), precision="int8"),
    "exact": dict(RF_V2, exact_budget=True),
    "ada_bsa": dict(sparse_type="ada_bsa", sparsity=0.3, cdf_threshold=0.9),
}
# batch, query heads, key heads, grid, text tokens, how they lie in memory
SIZES = [
    (1, 2, 2, (3, 8, 16), 0, "BNSD"),
    (1, 1, 1, (1, 1, 1), 0, "BNSD"),
    (1, 1, 1, (1, 8, 8), 0, "BNSD"),
    (2, 3, 3, (5, 7, 9), 3, "BNSD"),
    (3, 16, 4, (4, 16, 32), 16, "BSND"),
    (1, 4, 4, (9, 40, 48), 77, "packed"),
    (2, 2, 1, (3, 8, 16), 20, "shifted"),
    (2, 2, 2, (3, 8, 16), 20, "channels apart"),
    (2, 4, 4, (3, 8, 16), 20, "expanded"),
    (1, 1, 1, (21, 90, 80), 1, "BNSD"),  # more than a thousand blocks
]


@contextlib.contextmanager
def compiled():
    """The kernels that are compiled in the meantime, with what Triton knows of their arguments."""
    from triton import knobs

    found = []

    def note(*, repr, **_):
        found.append(repr)

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield found


def tensors(size, dim, dtype):
    batch, q_heads, k_heads, grid, txt_len, kind = size
    length = math.prod(grid) + txt_len
    return [laid_out(kind, gpu.randn(batch, heads, length, dim, dtype=dtype)) for heads in (q_heads, k_heads, k_heads)]


def laid_out(kind, x):
    """The same numbers as x, laid out otherwise."""
    if kind == "BSND":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "packed":
        return torch.cat([x, x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., x.shape[3] : -x.shape[3]]
    if kind == "shifted":
        return torch.nn.functional.pad(x, (1, 0))[..., 1:]
    if kind == "channels apart":
        return x.mT.contiguous().mT
    if kind == "expanded":
        return x[:1, :1].expand(x.shape)
    assert kind == "BNSD"
    return x


def call(backend, name, size, masked, dim=128, dtype=BF16):
    """-> whether the backend runs it."""
    q, k, v = tensors(size, dim, dtype)
    grid, txt_len = size[3:5]
    keep = gpu.key_mask("bool", len(k), k.shape[2]) if masked else None
    options = CALLS[name]
    if options["sparse_type"] == "rf_v2":
        options = dict(options, latent_shape_q=grid, latent_shape_k=grid, txt_len=txt_len)
    return gpu.attend(backend, q, k, v, keep, **options) is not None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_other_sizes_compile_nothing(backend, name, masked):
    if not call(backend, name, SIZES[0], masked):
        return  # refused, with its reason
    for size in SIZES[1:]:
        with compiled() as found:
            assert call(backend, name, size, masked)
        assert found == [], size


@pytest.mark.parametrize(
    ("name", "dim", "dtype"),
    [("enable", 64, FP32), ("enable", 72, BF16), ("enable", 20, BF16), ("enable, int8", 72, BF16),
     ("enable, int8", 20, BF16), ("enable, fp8", 20, BF16)],
)  # fmt: skip
def test_other_sizes_compile_nothing_with_other_rows(name, dim, dtype):
    """Of fp32, and of rows that are no multiple of 16 bytes."""
    if not call("triton", name, SIZES[0], False, dim, dtype):
        return  # refused, with its reason
    for size in SIZES[1:-1]:
        with compiled() as found:
            assert call("triton", name, size, False, dim, dtype)
        assert found == [], size


def test_the_hook_hears_of_kernels():
    """A head dim that no other test has."""
    with compiled() as found:
        assert call("triton", "rf_v2", SIZES[0], False, dim=56)
    assert any("attention_kernel" in kernel for kernel in found)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
def test_after_warmup_calls_compile_nothing(precision):
    """Another head dim than those of other tests, so that nothing was compiled before."""
    name, dim = {"native": ("enable", 104), "fp8": ("enable, fp8", 112), "int8": ("enable, int8", 112)}[precision]
    if precision != "native" and not gpu.has_eight_bits(precision):
        return
    with compiled() as found:
        ready = rainfusion.warmup(Method(**CALLS[name]), head_dim=dim, masks=["none", "bool"])
    assert found and all(one.compiles and one.backend in gpu.BACKENDS for one in ready)
    assert all(one.seconds > 0.0 for one in ready)
    for masked in (False, True):
        for size in SIZES[:5]:
            with compiled() as found:
                assert call(ready[0].backend, name, size, masked, dim)
            assert found == [], size
