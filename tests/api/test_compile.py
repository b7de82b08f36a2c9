"""torch.compile(fullgraph=True), meta tensors, and the modes that a caller may be in."""

import shutil
import threading

import pytest
import torch

from rainfusion import BlockMask, Method, block_sparse_attention, ops, planning, predict_mask, sparse_attention
from rainfusion.calls import Call
from rainfusion.geometry import Geometry

pytestmark = pytest.mark.timeout(1800)  # compilers take their time

LENGTH = 4 * 10 * 16 + 20
VIDEO = dict(sparse_type="rf_v2", sparsity=0.6, latent_shape_q=[4, 10, 16], txt_len=20)
SPANS = [{"start": 10, "latent_shape": [1, 20, 20]}, {"start": 410, "latent_shape": [2, 10, 12]}]

CALLS = {
    "rf_v2": lambda q, k, v, keep, mask: sparse_attention(q * 1.0, k, v, **VIDEO).sin(),
    "all results": lambda q, k, v, keep, mask: sparse_attention(q, k, v, **VIDEO, return_lse=True, return_mask=True),
    "given mask": lambda q, k, v, keep, mask: sparse_attention(q, k, v, mask=mask, **VIDEO),
    "predict_mask": lambda q, k, v, keep, mask: predict_mask(q, k, keep, **VIDEO),
    "bool key mask": lambda q, k, v, keep, mask: sparse_attention(q, k, v, keep, **VIDEO),
    "float key mask": lambda q, k, v, keep, mask: sparse_attention(q, k, v, keep.float() * 1e5 - 1e5, **VIDEO),
    "ada_bsa": lambda q, k, v, keep, mask: sparse_attention(
        q, k, v, keep, sparse_type="ada_bsa", sparsity=0.5, is_causal=True
    ),
    "dense": lambda q, k, v, keep, mask: sparse_attention(q, k, v, keep, return_mask=True),
    "spans": lambda q, k, v, keep, mask: sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=0.6, video_spans=SPANS, token_order=(2, 8, 8)
    ),
    "block_sparse": lambda q, k, v, keep, mask: block_sparse_attention(q, k, v, mask, return_lse=True),
    "BSND": lambda q, k, v, keep, mask: sparse_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND", **VIDEO
    ),
}


def flat(result):
    if isinstance(result, BlockMask):
        return [result.counts, result.indices]
    return [x for part in result for x in flat(part)] if isinstance(result, tuple) else [result]


def arguments():
    q, k, v = torch.randn(3, 2, 2, LENGTH, 16).unbind()
    return q, k, v, torch.rand(2, LENGTH) < 0.8, predict_mask(q, k, **VIDEO)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_and_the_same_numbers(name, dynamic):
    torch._dynamo.reset()
    args = arguments()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for ours, plain in zip(flat(compiled(*args)), flat(CALLS[name](*args)), strict=True):
        assert torch.equal(ours, plain)
        assert ours.stride() == plain.stride()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_runs_it():
    torch._dynamo.reset()
    args = arguments()
    compiled = torch.compile(CALLS["rf_v2"], fullgraph=True)
    torch.testing.assert_close(compiled(*args), CALLS["rf_v2"](*args))


def test_a_new_step_does_not_compile_again():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS["rf_v2"], fullgraph=True, backend=counter)
    for _ in range(3):
        compiled(*arguments())
    assert counter.frame_count == 1


def test_a_bad_argument_is_still_an_error_under_compile():
    torch._dynamo.reset()
    q = torch.randn(1, 1, 10, 4)
    compiled = torch.compile(lambda q: sparse_attention(q, q, q, sparsity=2.0), backend="eager")
    with pytest.raises(ValueError, match="sparsity"):
        compiled(q)


@pytest.mark.parametrize("kwargs", [{}, VIDEO, dict(sparse_type="ada_bsa"), dict(backend="portable")])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_meta_tensors_give_shapes(kwargs, layout):
    shape = (2, 4, LENGTH, 16) if layout == "BNSD" else (2, LENGTH, 4, 16)
    q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    out, lse, mask = sparse_attention(q, q, q, input_layout=layout, **kwargs, return_lse=True, return_mask=True)
    assert (out.shape, out.dtype, out.device.type) == (shape, torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, LENGTH), torch.float32)
    assert (mask.counts.shape, mask.indices.shape) == ((2, 4, 6), (2, 4, 6, 6))
    assert sparse_attention(q, q, q, input_layout=layout, **kwargs).shape == shape


def test_the_ops_keep_torchs_rules():
    q, k, v, keep, mask = arguments()
    inputs = planning.check(q, k, v, keep, input_layout="BNSD")
    options = dict(sparse_type="rf_v2", sparsity=0.5, txt_len=20, latent_shape_q=(4, 10, 16), backend="portable")
    everything = planning.ask_flat(inputs, **options, return_lse=True, return_mask=True)
    torch.library.opcheck(torch.ops.rainfusion.predict_mask.default, (q, k, keep, *ops._encoded(everything)))
    op = torch.ops.rainfusion.sparse_attention.default
    torch.library.opcheck(op, (q, k, v, keep, None, None, None, *ops._encoded(everything)))
    given = planning.ask_flat(inputs._replace(keep=None, mask=mask), **options)
    torch.library.opcheck(op, (q, k, v, None, None, mask.counts, mask.indices, *ops._encoded(given)))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(sparsity=(0.1, 0.2), block_size=(128, 64), token_order=(2, 8, 8)),
        dict(sparsity=0.0, target_error=0.5, first_frame="keys", predictor="submeans"),
    ],
    ids=str,
)
@pytest.mark.parametrize("geometry", [Geometry(), Geometry(3, (1, 2, 3), None), Geometry(clips=((0, 1, 2, 3),) * 2)])
def test_a_call_crosses_the_boundary_as_it_is(kwargs, geometry):
    method = Method(sparse_type="rf_v2", **{"sparsity": 0.5, **kwargs})
    call = Call(method, geometry, 0.5, False, "auto", True, False, True, False)
    assert ops._decoded(tuple(ops._encoded(call))) == call


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_first_call_do_not_stick(mode):
    """A layout cached under inference mode, or under another default device, serves later calls."""
    q, k, v = torch.randn(3, 1, 2, 5 * 7 * 9, 16).unbind()
    kwargs = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[5, 7, 9])
    with mode(), torch.device("meta"):
        first = sparse_attention(q, k, v, **kwargs)
    assert torch.equal(first, sparse_attention(q, k, v, **kwargs))


def test_the_default_dtype_does_not_matter():
    q, k, v = torch.randn(3, 1, 2, 700, 16).unbind()
    calls = [dict(sparse_type=name, sparsity=0.5, cdf_threshold=0.9) for name in ("rf_v2", "ada_bsa")]
    expected = [sparse_attention(q, k, v, **kwargs) for kwargs in calls]
    torch.set_default_dtype(torch.float64)
    try:
        results = [sparse_attention(q, k, v, **kwargs) for kwargs in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_threads_do_not_meet():
    q, k, v = torch.randn(3, 1, 2, 6 * 11 * 13, 16).unbind()
    calls = [dict(sparse_type="rf_v2", sparsity=s, latent_shape_q=[6, 11, 13], block_size=size)
             for s in (0.3, 0.6, 0.9) for size in (64, 128)]  # fmt: skip
    expected = [sparse_attention(q, k, v, **kwargs) for kwargs in calls]
    wrong = []

    def work():
        for kwargs, answer in zip(calls, expected, strict=True):
            if not torch.equal(sparse_attention(q, k, v, **kwargs), answer):
                wrong.append(kwargs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
