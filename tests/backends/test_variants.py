"""After the first call with some options no other size waits for a compiler. No GPU is needed to find out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rainfusion import backends
from rainfusion.backends import triton as triton_backend
from rainfusion.options import PRECISIONS
from rainfusion.planning import planned

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "helpers" / "variants.py"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")


def run(*arguments):
    """Another process, because this one may have Triton's interpreter on."""
    environment = dict(os.environ, TRITON_INTERPRET="0")
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


@ON_LINUX
@pytest.mark.parametrize(
    "options", [f"{backend} {precision}" for backend in ("triton", "hopper") for precision in PRECISIONS]
)
def test_the_first_call_compiles_everything(options):
    """Lengths, grids, text, batches, heads and strides of all kinds launch the same variants of the same kernels."""
    done = run(SCRIPT, "--options", options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keep_best_kernel: 1 variants, 0 of them for some sizes only" in done.stdout
    assert "attention_kernel: 1 variants, 0 of them for some sizes only" in done.stdout


# prints for each size of key blocks how many passes sum keys, how many do it for a mask alone, and their warps
SUMS = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from helpers import targets
from rainfusion.backends import hopper, triton
for size in (128, (128, 64), (128, 32)):
    options = dict(sparse_type="rf_v2", sparsity=0.5, predictor="spread", compensate=True, block_size=size)
    found = []
    with targets.recorded(targets.TARGETS["sm_90"], found.append):
        for backend in (hopper, triton):
            for precision in ("native", "fp8", "int8"):
                targets.run(targets.Call(torch.bfloat16, 128, dict(options, precision=precision)), backend)
    spreads = [launch for launch in found if "None" not in launch.known.get("spreads", "None")]
    sums = [launch for launch in spreads if launch.kernel.__name__ in ("gather_kernel", "statistics_kernel")]
    alone = [launch for launch in spreads if launch.kernel.__name__ == "pool_kernel"]
    print(size, len(sums), len(alone), {launch.options["num_warps"] for launch in sums + alone})
"""


@ON_LINUX
def test_keys_are_summed_alike_in_every_pass():
    """By as many warps, and so in one order: masks are those of a call, bit for bit, and of every precision."""
    done = run("-c", SUMS, TESTS)
    assert done.stdout.splitlines() == ["128 6 6 {4}", "(128, 64) 6 6 {4}", "(128, 32) 6 6 {1}"], done.stderr


@ON_LINUX
def test_a_kernel_that_is_compiled_again_is_found():
    """One whose sizes are compiled in, as Triton does by itself."""
    known = "[setattr(x, 'do_not_specialize', False) for x in blocks.pool_kernel.params]"
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); from helpers import variants; "
        f"from rainfusion.backends.triton.kernels import blocks; {known}; "
        "sys.argv += ['--options', 'triton native fp32']; sys.exit(variants.main())"
    )
    done = run("-c", code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "    N: 'i32 []', 'constexpr 1', " in done.stdout
    assert "    warmup does not compile pool_kernel" in done.stdout
    assert done.stdout.endswith(" kernels wait for a compiler again\n")


def test_rows_that_kernels_read_at_once_are_not_copied():
    x = torch.zeros(2, 3, 5, 24, dtype=torch.bfloat16)
    packed = torch.zeros(2, 5, 3, 72, dtype=torch.bfloat16)[..., 24:48].transpose(1, 2)
    for usual in (x, x.transpose(1, 2), packed, x[:1, :1].expand(4, 4, -1, -1), x[..., :16]):
        assert triton_backend.row_unit(usual) == 8
        assert triton_backend.whole_rows(usual) is usual
        assert [8 * stride for stride in triton_backend.row_strides(usual)] == list(usual.stride()[:3])
    odd = x[..., :23]
    assert triton_backend.whole_rows(odd) is odd and triton_backend.row_strides(odd) == list(odd.stride()[:3])
    assert triton_backend.row_unit(odd.float()) == 1 and triton_backend.row_unit(x.float()) == 4


def test_other_rows_are_copied():
    x = torch.randn(2, 3, 24, 16).to(torch.bfloat16)
    for other in (x.mT, x[..., 1:9], torch.zeros(2, 3, 5, 25, dtype=torch.bfloat16)[..., :24], x[..., 1:10]):
        copy = triton_backend.whole_rows(other)
        assert copy is not other and copy.is_contiguous() and torch.equal(copy, other)


def test_a_row_that_is_too_long_to_rank_is_refused():
    q = torch.empty(1, 1, 1, 8, device="meta")
    for number, refused in ((2**21, False), (2**21 + 1, True)):
        k = torch.empty(1, 1, number, 8, device="meta")
        inputs, plan = planned(q, k, k, sparse_type="rf_v2", sparsity=0.5, backend="portable")
        reason = triton_backend.too_long(plan.call, inputs.shapes)
        assert reason == ("chooses blocks of up to 2097152 keys, got 2097153" if refused else None)
        assert backends.why_not("portable", plan.call, inputs.shapes) is None
