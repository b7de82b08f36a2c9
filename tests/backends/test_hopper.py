"""`hopper` without a GPU: its kernel emulated, from its own source, and the passes before it interpreted.

The tests of a GPU hold it to the same bounds at larger sizes (tests/gpu).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import gpu
from helpers.fuzz import examples
from helpers.interpreter import with_exact_e4m3
from helpers.planned import request
from rainfusion import BlockMask, sparse_attention
from rainfusion.backends import hopper

pytest.importorskip("triton", reason="kernels need Triton")

from helpers.hopper_emulator import SOURCE, emulated, exact_sums, sums_of_14_bits

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="passes before the kernel would be compiled, not interpreted"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore:Conversion of an array:DeprecationWarning"),
]

VIDEO, TXT = (4, 5, 15), 20
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.5)
ON_GRID = dict(RF_V2, latent_shape_q=VIDEO, latent_shape_k=VIDEO, txt_len=TXT)
STAND_INS = dict(predictor="spread", compensate=True, first_frame="free")
# name: arguments, tokens of q, tokens of k
CALLS = {
    "dense": (dict(mask="all"), 150, 300),
    "no grid": (RF_V2, 300, 300),
    "video": (ON_GRID, 320, 320),
    "64 keys": (dict(ON_GRID, block_size=(128, 64)), 320, 320),
    "32 keys": (dict(ON_GRID, block_size=(128, 32)), 320, 320),
    "stand-ins": (dict(ON_GRID, **STAND_INS), 320, 320),
    "stand-ins, 64 keys": (dict(ON_GRID, **STAND_INS, block_size=(128, 64)), 320, 320),
    "stand-ins, 32 keys": (dict(ON_GRID, **STAND_INS, block_size=(128, 32)), 320, 320),
    "one token": (RF_V2, 1, 1),
    "cross": (dict(RF_V2, block_size=(128, 64)), 129, 513),
    "negative scale": (dict(RF_V2, scale=-0.07), 200, 300),
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch, one_thread):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    with_exact_e4m3(monkeypatch)


def inputs(q_len, k_len, dim=128, dtype=gpu.FP16, batch=1, heads=2, k_heads=1):
    return gpu.qkv(q_len, k_len, batch=batch, heads=heads, k_heads=k_heads, dim=dim, dtype=dtype)


def arguments(name, q_heads=2, batch=1):
    kwargs, q_len, k_len = CALLS[name]
    kwargs = dict(kwargs)
    if kwargs.get("mask") == "all":
        rows, columns = -(-q_len // 128), -(-k_len // 128)
        kwargs["mask"] = BlockMask.from_dense(torch.ones(batch, q_heads, rows, columns, dtype=torch.bool))
    return kwargs, q_len, k_len


def check(precision, q, k, v, attn_mask=None, few=False, **kwargs):
    """Against the reference over the same mask. few: keys, of whose rounding there is no mean."""
    result = gpu.attend("hopper", q, k, v, attn_mask, **kwargs, precision=precision, return_lse=True, return_mask=True)
    kwargs.pop("mask", None)
    if precision == "native":
        gpu.compare(result, q, k, v, attn_mask, **kwargs)
    else:
        # with a bias a few keys decide, and so does their rounding
        within = 0.2 if few or (attn_mask is not None and attn_mask.dtype != torch.bool) else 0.05
        most = gpu.MOST[precision] * (3 if few else 1)
        gpu.compare_quantised(result, q, k, v, attn_mask, most, within, **kwargs)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [None, "bool", "float", "nothing left"])
def test_the_kernel_attends(precision, name, kind):
    kwargs, q_len, k_len = arguments(name)
    with emulated() as kernel:
        check(precision, *inputs(q_len, k_len), gpu.key_mask(kind, 1, k_len), **kwargs)
    assert kernel.launched == 1


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize(("dim", "kind"), [(64, None), (64, "float"), (48, None), (112, "bool")])
@pytest.mark.parametrize("name", ["cross", "stand-ins", "stand-ins, 32 keys"])
def test_other_head_dims(precision, dim, kind, name):
    kwargs, q_len, k_len = arguments(name)
    with emulated():
        check(precision, *inputs(q_len, k_len, dim), gpu.key_mask(kind, 1, k_len), **kwargs)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize(("dtype", "heads", "k_heads"), [(gpu.BF16, 2, 2), (gpu.FP16, 4, 2)], ids=str)
@pytest.mark.parametrize("block_size", [128, (128, 64), (128, 32)])
def test_other_types_batches_and_heads(precision, dtype, heads, k_heads, block_size):
    """Given blocks, rows without any among them: the interpreter has no products of bf16, and so no choice."""
    q, k, v = inputs(200, 420, dtype=dtype, batch=2, heads=heads, k_heads=k_heads)
    mask = some_lists(q, 420, block_size)
    with emulated():
        check(precision, q, k, v, few=True, mask=mask, block_size=block_size)


def some_lists(q, k_len, block_size, density=0.4, seed=0):
    """Of any length: rows without a block, rows with the last alone."""
    q_size, k_size = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    dense = gpu.uniform(*q.shape[:2], -(-q.shape[2] // q_size), -(-k_len // k_size), seed=seed) < density
    dense[:, 0, 0] = False
    dense[:, -1, -1] = False
    dense[:, -1, -1, -1] = True
    return BlockMask.from_dense(dense, block_size)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize("block_size", [128, (128, 32)])
def test_rows_of_one_program_do_not_touch_each_other(precision, block_size):
    """One program takes all rows, or many take one each: the same bits, whoever is ahead."""
    q, k, v = inputs(600, 600)
    kwargs = dict(mask=some_lists(q, 600, block_size), block_size=block_size, precision=precision)
    found = []
    for seed, programs in ((0, 1), (1, 1), (2, 4), (3, 20)):
        with emulated(seed, programs):
            found.append(sparse_attention(q, k, v, **kwargs, backend="hopper"))
    assert all(gpu.same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize("programs", [1, 5, 40])
def test_the_counter_of_rows_is_0_before_and_after(precision, programs):
    """A pass writes it, and the last program of a call: keys may be attended to again."""
    q, k, v = inputs(320, 320)
    with emulated(programs=programs):
        asked = request(q, k, v, **ON_GRID, precision=precision, backend="hopper")
        keys = hopper.prepare(asked)
        mask = hopper.choose(asked, keys)
        found = []
        for _ in range(2):
            assert int(keys.turns) == 0
            found.append(hopper.attend(asked, keys, mask)[0])
    assert int(keys.turns) == 0 and found[0].isfinite().all() and gpu.same(*found)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize("block_size", [128, (128, 64), (128, 32)])
def test_what_lies_around_the_inputs_does_not_matter(precision, block_size):
    q, k, v = inputs(200, 330)
    kwargs = dict(mask=some_lists(q, 330, block_size), block_size=block_size, precision=precision, backend="hopper")
    with emulated():
        plain = sparse_attention(q, k, v, **kwargs)
        inside = sparse_attention(*(gpu.island(x) for x in (q, k, v)), **kwargs)
    assert plain.isfinite().all() and gpu.same(plain, inside)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
def test_what_is_not_finite_shows_where_it_is_attended_to(precision):
    q, k, v = inputs(300, 300, k_heads=2)
    mask = BlockMask.from_dense(
        torch.tensor([[True, True, False], [False, True, True], [False, True, False]])[None, None].expand(1, 2, 3, 3)
    )
    kwargs = dict(mask=mask, precision=precision, backend="hopper")
    with emulated():
        clean = sparse_attention(q, k, v, **kwargs)
        k[0, 0, 5, 3] = float("nan")
        v[0, 1, 290, 7] = float("nan")
        q[0, 1, 140, 0] = float("inf")
        spoilt = sparse_attention(q, k, v, **kwargs)
    assert (
        spoilt[0, 0, :128].isnan().all() and spoilt[0, 1, 128:256, 7].isnan().all() and spoilt[0, 1, 140].isnan().all()
    )
    others = [(spoilt[0, 0, 128:], clean[0, 0, 128:]), (spoilt[0, 1, :128], clean[0, 1, :128])]
    if precision == "native":
        assert all(gpu.same(*pair) for pair in others)
    else:  # means that smooth keys and values leave out what is not finite
        assert all((ours - theirs).abs().max() <= 0.2 for ours, theirs in others)


@pytest.mark.parametrize(("precision", "dim", "most"), [("fp8", 128, 0.003), ("int8", 64, 0.003), ("int8", 128, 0.1)])
def test_long_rows_lose_little_where_registers_add_up_tiles(precision, dim, most):
    """Values near each other are alike, as in a video. int8 with 128 channels has no registers for it."""
    q, k, v = inputs(128, 128 * 100, dim, heads=1)
    v = v * 0.1 + torch.linspace(-1, 1, v.shape[2])[:, None].half()
    mask = BlockMask.from_dense(torch.arange(100)[None, None, None].expand(1, 1, 1, 100) >= 30)
    exact = sparse_attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    errors = []
    for sums in (exact_sums, sums_of_14_bits):
        with emulated(sums=sums):
            out = sparse_attention(q, k, v, mask=mask, precision=precision, backend="hopper")
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    assert errors[0] <= 0.003 and errors[1] <= most, errors


@settings(max_examples=examples(30))
@given(data=st.data())
def test_any_call(data):
    pick = lambda *among: data.draw(st.sampled_from(among))  # noqa: E731
    precision, block_size, dim = pick(*gpu.PRECISIONS), pick(128, (128, 64), (128, 32)), pick(16, 64, 80, 128)
    k_heads, shared, batch = pick(1, 2), pick(1, 3), pick(1, 2)
    q_len, k_len = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 520))
    kind, seed = pick(None, "bool", "float", "blocks"), data.draw(st.integers(0, 99))
    kwargs = dict(scale=pick(None, -0.1))
    q, k, v = inputs(q_len, k_len, dim, batch=batch, heads=shared * k_heads, k_heads=k_heads)
    if pick(True, False):
        kwargs.update(mask=some_lists(q, k_len, block_size, pick(0.1, 0.5, 1.0), seed), block_size=block_size)
    else:
        kwargs.update(RF_V2, block_size=block_size, compensate=pick(True, False), predictor=pick("mean", "spread"))
    with emulated(seed, pick(1, 2, 5)):
        check(precision, q, k, v, gpu.key_mask(kind, batch, k_len, seed), few=True, **kwargs)


@pytest.mark.parametrize("precision", gpu.PRECISIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_block_pass_by(precision, seed):
    """Many of them in turn: the producer has nothing to wait for but that consumers know of the rows."""
    mostly_empty(precision, seed)


def mostly_empty(precision, seed=0, source=None):
    q, k, v = inputs(1280, 300)
    dense = torch.zeros(1, 2, 10, 3, dtype=torch.bool)
    dense[:, :, 0] = True
    with emulated(seed, programs=1, source=source):
        check(precision, q, k, v, mask=BlockMask.from_dense(dense))


# ---------------------------------------------------------------------------------------------------------------------
# that the emulation finds what is wrong


def long_rows(precision, seed, source=None):
    with emulated(seed, source=source):
        check(precision, *inputs(300, 1200), **RF_V2)


def finer_keys(precision, seed, source=None):
    kwargs, q_len, k_len = arguments("stand-ins, 32 keys")
    with emulated(seed, source=source):
        check(precision, *inputs(q_len, k_len), **kwargs)


def counted(precision, seed, source=None):
    q, k, v = inputs(320, 320)
    with emulated(seed, programs=4, source=source):
        asked = request(q, k, v, **ON_GRID, precision=precision, backend="hopper")
        keys = hopper.prepare(asked)
        hopper.attend(asked, keys, hopper.choose(asked, keys))
    assert int(keys.turns) == 0


WAIT_FOR_FREE = "mbarrier.wait(empty.index(stage), phase ^ 1)\n            mbarrier.expect"
# name: call, precision, what stands in the kernel, and what instead
FAULTS = {
    "values are not waited for": (long_rows, "native", "mbarrier.wait(v_full.index(v_stage), v_phase)", "pass"),
    "keys are not waited for": (
        long_rows,
        "native",
        "mbarrier.wait(k_full.index(stage), phase)\n            # ---- the others",
        "# ---- the others",
    ),
    "a stage is given back while values are read": (
        long_rows,
        "native",
        "sums = warpgroup_mma_wait(0, deps=[acc_token])\n                    else",
        "mbarrier.arrive(empty.index(v_stage), count=1)\n"
        "                        mbarrier.wait(k_full.index(stage), phase ^ 1)\n"
        "                        sums = warpgroup_mma_wait(0, deps=[acc_token])\n                    else",
    ),
    "the producer does not wait": (long_rows, "native", WAIT_FOR_FREE, "mbarrier.expect"),
    "nor does it for finer keys": (
        finer_keys,
        "fp8",
        "mbarrier.wait(empty.index(stage), phase ^ 1)\n            _copy_tile(k_desc",
        "_copy_tile(k_desc",
    ),
    "one arrival too few": (
        long_rows,
        "native",
        "mbarrier.init(empty.index(i), count=2)",
        "mbarrier.init(empty.index(i), count=3)",
    ),
    "queries are read before they came": (
        long_rows,
        "native",
        "async_copy.wait_group(0)\n        gl.thread_barrier()",
        "gl.thread_barrier()",
    ),
    "copies of queries are no group": (long_rows, "native", "async_copy.commit_group()", "pass"),
    "rows past the end": (long_rows, "native", "mask=m_out)", "mask=o_d[None, :] < D_REAL)"),
    "a wrong phase": (long_rows, "native", "gl.where(wraps, phase ^ 1, phase)", "phase"),
    "logits are taken before they are there": (
        long_rows,
        "fp8",
        "warpgroup_mma_wait(2 if QUANT != 0 else 1, deps=[s_token])",
        "warpgroup_mma_wait(3 if QUANT != 0 else 1, deps=[s_token])",
    ),
    "no fence behind queries": (
        long_rows,
        "fp8",
        "            fence_async_shared()\n            b_q",
        "            b_q",
    ),
    "rows are told before the last were heard": (
        mostly_empty,
        "native",
        "mbarrier.wait(heard.index(slot), slot_phase ^ 1)",
        "pass",
    ),
    "the counter is made 0 too early": (
        counted,
        "native",
        "mask=turn == gl.num_programs(0) + TURNS - 1)",
        "mask=gl.program_id(0) == gl.num_programs(0) - 1)",
    ),
    "the counter is not made 0": (counted, "int8", "gl.store(turns, 0", "gl.store(turns, 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault):
    call, precision, before, after = FAULTS[fault]
    source = SOURCE.read_text()
    assert before in source, "the kernel has changed: change this fault as well"
    call(precision, 0)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):  # noqa: PT012
        for seed in range(12):  # whether a fault shows is a matter of who is ahead
            call(precision, seed, source.replace(before, after))
