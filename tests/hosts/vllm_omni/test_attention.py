"""vLLM-Omni's attention layer with our backend in it: found, sparse, dense, refused."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import cpu_sdpa
import pytest
import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout, VideoTokenSpan
from vllm_omni.diffusion.attention.backends.rainfusion_attn import RainFusionAttentionImpl
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.config import set_current_diffusion_config
from vllm_omni.diffusion.data import AttentionConfig, AttentionSpec, OmniDiffusionConfig
from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

import rainfusion
from rainfusion.integrations import vllm_omni
from rainfusion.integrations.vllm_omni.backend import RainfusionBackend, RainfusionImpl

GRID, PREFIX = (4, 32, 36), 77
ROWS = PREFIX + 4 * 32 * 36
VIDEO = VideoTokenLayout(prefix_len=PREFIX, latent_grid=GRID, used_len=ROWS)


def config(**options):
    spec = {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.7, **options}}
    return OmniDiffusionConfig(dtype=torch.float32, diffusion_attention_config=AttentionConfig(per_role={"self": spec}))


def layers(number=1, *, chosen=None, **arguments):
    with set_current_diffusion_config(chosen or config()):
        return [
            Attention(
                **{
                    **dict(num_heads=2, head_size=64, causal=False, softmax_scale=0.1, role="self", qkv_layout="BSND"),
                    **dict(prefix=f"blocks.{i}.attn1"),
                    **arguments,
                }
            )
            for i in range(number)
        ]


def tensors(rows=ROWS, heads=2, batch=1, size=64):
    return torch.randn(3, batch, rows, heads, size).unbind()


@contextmanager
def at(step=None, steps=None, chosen=None):
    with set_forward_context(omni_diffusion_config=chosen or config()):
        get_forward_context().denoise_step_idx, get_forward_context().total_denoise_steps = step, steps
        yield


def expected(q, k, v, **options):
    chosen = {"sparsity": 0.7, "precision": "native"}
    method = rainfusion.Method.recommended(**{name: options.pop(name, value) for name, value in chosen.items()})
    where = options or dict(txt_len=PREFIX, latent_shape_q=GRID)
    return rainfusion.sparse_attention(q, k, v, scale=0.1, input_layout="BSND", method=method, **where)


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.1).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# found


def test_the_entry_point_gives_our_class_to_their_layer():
    (layer,) = layers()
    assert layer.attn_backend is RainfusionBackend and type(layer.attention) is RainfusionImpl
    assert layer.attn_backend.get_name() == "RAINFUSION_ATTN"


def test_on_cuda_their_check_refuses_their_class_and_passes_ours():
    class Cuda(OmniPlatform):  # theirs needs a build for GPUs; the check is the same
        _omni_enum = OmniPlatformEnum.CUDA

    member = DiffusionAttentionBackendEnum.RAINFUSION_ATTN
    Cuda.validate_diffusion_attn_backend("rainfusion_attn")
    ours = member.get_path()
    member.clear_override()
    try:
        with pytest.raises(ValueError, match="npu only"):
            Cuda.validate_diffusion_attn_backend("rainfusion_attn")
    finally:
        vllm_omni.register()
    assert member.get_path() == ours


def test_on_an_npu_theirs_stays(monkeypatch):
    from vllm_omni.platforms import current_omni_platform

    member = DiffusionAttentionBackendEnum.RAINFUSION_ATTN
    member.clear_override()
    monkeypatch.setattr(current_omni_platform, "is_npu", lambda: True, raising=False)
    vllm_omni.register()
    assert not member.is_overridden()
    monkeypatch.undo()
    vllm_omni.register()
    assert member.is_overridden()


def test_other_backends_are_as_before():
    with set_current_diffusion_config(
        OmniDiffusionConfig(diffusion_attention_config=AttentionConfig(default="TORCH_SDPA"))
    ):
        layer = Attention(num_heads=2, head_size=64, causal=False, softmax_scale=0.1, qkv_layout="BSND")
    assert layer.attn_backend is cpu_sdpa.CpuSDPABackend


# ---------------------------------------------------------------------------------------------------------------------
# sparse


def test_a_sparse_call_is_the_librarys():
    (layer,), (q, k, v) = layers(), tensors()
    out = layer(q, k, v, AttentionMetadata(video_layout=VIDEO))
    assert torch.equal(out, expected(q, k, v)) and not cpu_sdpa.CALLS
    stats = vllm_omni.stats()
    assert stats.calls == {"blocks.0.attn1": (1, 0)} and 0.2 < stats.mean_density < 0.6
    assert stats.layouts == {f"grid 4x32x36, {PREFIX} tokens before": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_batches(dtype):
    (layer,), (q, k, v) = layers(), (x.to(dtype) for x in tensors(batch=2))
    out = layer(q, k, v, AttentionMetadata(video_layout=VIDEO))
    assert out.dtype == dtype and torch.equal(out, expected(q, k, v))


def test_tensors_that_are_not_contiguous():
    (layer,), packed = layers(), torch.randn(1, ROWS, 2, 3, 64)
    q, k, v = packed.unbind(3)
    out = layer(q, k, v, AttentionMetadata(video_layout=VIDEO))
    assert torch.equal(out, expected(*(x.contiguous() for x in (q, k, v))))


def test_fewer_heads_of_keys():
    (layer,), (q, _, _), (_, k, v) = layers(num_kv_heads=1), tensors(), tensors(heads=1)
    assert torch.equal(layer(q, k, v, AttentionMetadata(video_layout=VIDEO)), expected(q, k, v))


@pytest.mark.parametrize("masked", [False, True])
def test_padding_behind_the_rows_that_are_used(masked):
    (layer,), (q, k, v) = layers(), tensors(ROWS + 50)
    mask = (torch.arange(ROWS + 50)[None] < ROWS) if masked else None
    out = layer(q, k, v, AttentionMetadata(video_layout=VIDEO, attn_mask=mask))
    assert torch.equal(out[:, :ROWS], expected(*(x[:, :ROWS] for x in (q, k, v))))
    assert torch.equal(out[:, ROWS:], q[:, ROWS:])


def test_several_videos_in_one_sequence():
    spans = (VideoTokenSpan(2400, (2, 32, 36), "target"), VideoTokenSpan(PREFIX, (2, 32, 36), "reference"))
    layout = VideoTokenLayout(used_len=ROWS + 60, video_spans=spans)
    (layer,), (q, k, v) = layers(), tensors(ROWS + 60)
    out = layer(q, k, v, AttentionMetadata(video_layout=layout))
    clips = [{"start": start, "latent_shape": (2, 32, 36)} for start in (PREFIX, 2400)]
    assert torch.equal(out, expected(q, k, v, video_spans=clips))


def test_the_first_sparse_call_and_the_end_of_a_run_are_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO")
    (layer,), (q, k, v) = layers(), tensors()
    for step in (0, 1, 0):
        with at(step):
            layer(q, k, v, AttentionMetadata(video_layout=VIDEO))
    ours = [record.getMessage() for record in caplog.records if record.name == "vllm_omni.rainfusion"]
    assert len(ours) == 2 and "sparse attention in blocks.0.attn1: grid 4x32x36" in ours[0]
    assert "2 sparse and 0 dense attention calls" in ours[1] and vllm_omni.stats().sparse_calls == 3
    assert logging.getLogger("vllm_omni.rainfusion").getEffectiveLevel() == logging.INFO
    assert any(logging.getLogger("vllm").handlers)  # which shows them


# ---------------------------------------------------------------------------------------------------------------------
# dense


def test_steps_and_layers_that_stay_dense():
    chosen = config(start_step=1, end_step=1, skip_layers="0")
    both, (q, k, v) = layers(2, chosen=chosen), tensors()
    seen = {}
    for step in range(4):
        with at(step, 4, chosen):
            seen[step] = [layer(q, k, v, AttentionMetadata(video_layout=VIDEO)) for layer in both]
    dense, sparse = sdpa(q, k, v), expected(q, k, v)
    for step, (first, second) in seen.items():
        torch.testing.assert_close(first, dense)
        torch.testing.assert_close(second, sparse if step in (1, 2) else dense)
    first, second = "blocks.0.attn1", "blocks.1.attn1"
    assert [first, second, first, first, first, second] == cpu_sdpa.CALLS
    assert vllm_omni.stats().reasons == {
        "the layer is in skip_layers": 4,
        "the first steps are dense (start_step)": 1,
        "the last steps are dense (end_step)": 1,
    }


def test_a_dense_call_heeds_the_mask():
    (layer,), (q, k, v) = layers(), tensors()
    mask = torch.arange(ROWS)[None] < ROWS - 300
    out = layer(q, k, v, AttentionMetadata(attn_mask=mask))
    torch.testing.assert_close(out, sdpa(q, *(x[:, : ROWS - 300] for x in (k, v))))


# ---------------------------------------------------------------------------------------------------------------------
# the same as theirs


class Theirs:
    """Their own decision, with their own code, where their dense attention cannot be had."""

    def __init__(self, monkeypatch, **arguments):
        module = "vllm_omni.diffusion.attention.backends.rainfusion_attn.FlashAttentionBackend"
        monkeypatch.setattr(f"{module}.get_impl_cls", staticmethod(lambda: lambda **_: None))
        self.impl = RainFusionAttentionImpl(**arguments)

    def decide(self, metadata):
        plan = self.impl._resolve_plan(metadata)
        if plan is None:
            return "dense"
        spans = [(span["start"], *span["latent_shape"]) for span in plan.video_spans or ()]
        return plan.used_len, spans or [(plan.prefix_len, *plan.latent_shape)]


def ours(impl, metadata, monkeypatch):
    """Our decision for the same call: which clips, and how many rows."""
    seen = []
    monkeypatch.setattr(
        impl.layer, "attend", lambda method, scene, q, k, v, dense, *, step, rows: seen.append((scene, rows))
    )
    monkeypatch.setattr("rainfusion.integrations.vllm_omni.rules.check_tensors", lambda *_: None)
    impl.forward(*tensors(8), metadata)
    ((scene, rows),) = seen
    if rows is None:
        return "dense"
    placed = scene.place(rows)
    return rows, [*placed.geometry.clips] if placed.geometry.clips else [(placed.before, *placed.grids[0])]


def spans(*found, used=4400):
    return VideoTokenLayout(used_len=used, video_spans=tuple(VideoTokenSpan(*span) for span in found))


V, HALF, N = (4, 32, 32), (2, 32, 32), 4096
PLAIN = VideoTokenLayout(prefix_len=0, latent_grid=V, used_len=N)
KEYS = torch.ones(1, N, dtype=torch.bool)
CASES = {
    "plain": ({}, {}, {"video_layout": PLAIN}),
    "sparsity 0": ({"sparsity": 0.0}, {}, {"video_layout": PLAIN}),
    "sparsity 1": ({"sparsity": 1.0}, {}, {"video_layout": PLAIN}),
    "no metadata": ({}, {}, None),
    "no layout": ({}, {}, {}),
    "no qkv_layout": ({}, {"qkv_layout": None}, {"video_layout": PLAIN}),
    "small letters": ({}, {"qkv_layout": "bsnd"}, {"video_layout": PLAIN}),
    "prefix": ({}, {}, {"video_layout": VideoTokenLayout(10, V, N + 10)}),
    "no used_len": ({}, {}, {"video_layout": VideoTokenLayout(0, V)}),
    "no used_len, but max_seqlen_q": ({}, {}, {"video_layout": VideoTokenLayout(0, V), "extra": {"max_seqlen_q": N}}),
    "max_seqlen_q of another length": ({}, {}, {"video_layout": PLAIN, "extra": {"max_seqlen_q": N + 1}}),
    "used_len of another length": ({}, {}, {"video_layout": VideoTokenLayout(0, V, N - 1)}),
    "no grid": ({}, {}, {"video_layout": VideoTokenLayout(0, None, N)}),
    "no prefix": ({}, {}, {"video_layout": VideoTokenLayout(None, V, N)}),
    "a row short": ({}, {}, {"video_layout": VideoTokenLayout(500, (1, 1, 4095), 4595)}),
    "just enough rows": ({}, {}, {"video_layout": VideoTokenLayout(500, (1, 1, 4096), 4596)}),
    "skipped layer": ({"skip_layers": [3]}, {}, {"video_layout": PLAIN}),
    "another layer skipped": ({"skip_layers": [2]}, {}, {"video_layout": PLAIN}),
    "no number in the name": ({"skip_layers": [3]}, {"prefix": "attn"}, {"video_layout": PLAIN}),
    "two numbers in the name": ({"skip_layers": [3]}, {"prefix": "blocks.3.attn.1"}, {"video_layout": PLAIN}),
    "mask": ({}, {}, {"video_layout": PLAIN, "attn_mask": KEYS}),
    "mask of floats": ({}, {}, {"video_layout": PLAIN, "attn_mask": KEYS.float()}),
    "mask of pairs": ({}, {}, {"video_layout": PLAIN, "attn_mask": KEYS[None, None]}),
    "mask, no used_len": (
        {}, {}, {"video_layout": VideoTokenLayout(0, V), "attn_mask": KEYS, "extra": {"max_seqlen_q": N}},
    ),
    "full_attn_spans": ({}, {}, {"video_layout": PLAIN, "full_attn_spans": [[(0, 5)]]}),
    "clips": ({}, {}, {"video_layout": spans((10, HALF, "reference"), (2100, HALF, "target"))}),
    "clips, last first": ({}, {}, {"video_layout": spans((2100, HALF, "target"), (0, HALF, "reference"))}),
    "clips, two targets": ({}, {}, {"video_layout": spans((0, HALF, "target"), (2100, HALF, "target"))}),
    "clips, no target": ({}, {}, {"video_layout": spans((0, V, "reference"))}),
    "clips, another role": ({}, {}, {"video_layout": spans((0, HALF, "other"), (2100, HALF, "target"))}),
    "clips that overlap": ({}, {}, {"video_layout": spans((0, HALF, "reference"), (2000, HALF, "target"))}),
    "clips that end behind": ({}, {}, {"video_layout": spans((400, V, "target"))}),
    "clip without a row": ({}, {}, {"video_layout": spans((0, (2, 0, 32), "reference"), (10, V, "target"))}),
    "clips too short": ({}, {}, {"video_layout": spans((0, (1, 32, 32), "reference"), (2100, HALF, "target"))}),
    "clips, no room to fill": (
        {}, {}, {"video_layout": spans((0, (2, 30, 35), "reference"), (2100, HALF, "target"), used=4198)},
    ),
    "clips, room to fill": (
        {}, {}, {"video_layout": spans((0, (2, 30, 35), "reference"), (2100, HALF, "target"), used=4230)},
    ),
    "clips, no used_len": (
        {}, {}, {"video_layout": spans((0, V, "target"), used=None), "extra": {"max_seqlen_q": 4400}},
    ),
    "clips, max_seqlen_q": (
        {}, {}, {"video_layout": spans((0, V, "target")), "extra": {"max_seqlen_q": 4399}},
    ),
}  # fmt: skip
STEPS = [(None, None), (0, None), (2, None), (9, 10), (0, 10), (1, 10), (2, 10), (7, 10), (8, 10), (10, 10), (None, 10)]


def both(monkeypatch, options, arguments):
    common = dict(num_heads=2, head_size=64, softmax_scale=0.1, prefix="blocks.3.attn1", qkv_layout="BSND")
    keywords = {**common, **arguments, "backend_kwargs": {"sparsity": 0.8, **options}}
    return Theirs(monkeypatch, **keywords), RainfusionImpl(**keywords)


@pytest.mark.parametrize("case", CASES)
def test_every_rule_decides_as_theirs(case, monkeypatch):
    options, arguments, metadata = CASES[case]
    metadata = None if metadata is None else AttentionMetadata(**metadata)
    theirs, impl = both(monkeypatch, options, arguments)
    assert ours(impl, metadata, monkeypatch) == theirs.decide(metadata)


@pytest.mark.parametrize("options", [{}, {"start_step": 2}, {"end_step": 2}, {"start_step": 2, "end_step": 2}])
@pytest.mark.parametrize(("step", "steps"), STEPS)
def test_every_step_is_as_theirs(step, steps, options, monkeypatch):
    theirs, impl = both(monkeypatch, options, {})
    metadata = AttentionMetadata(video_layout=PLAIN)
    with at(step, steps):
        assert ours(impl, metadata, monkeypatch) == theirs.decide(metadata)


def test_the_table_has_both_answers(monkeypatch):
    answers = set()
    for options, arguments, metadata in CASES.values():
        theirs, _ = both(monkeypatch, options, arguments)
        answers.add(theirs.decide(None if metadata is None else AttentionMetadata(**metadata)) == "dense")
    assert answers == {True, False}


REFUSED = {
    "causal": dict(causal=True),
    "BNSD": dict(qkv_layout="BNSD"),
    "ring": dict(degrees=dict(ring_degree=2)),
    "all-gather": dict(degrees=dict(allgather_degree=2)),
    "ulysses": dict(degrees=dict(ulysses_degree=2)),
    "nothing": {},
}


@pytest.mark.parametrize("sparsity", [0.0, 0.8])
@pytest.mark.parametrize("case", REFUSED)
def test_layers_are_refused_as_theirs_are(case, sparsity, monkeypatch):
    arguments = dict(REFUSED[case])
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(**arguments.pop("degrees", {})))

    def refusal(make):
        with set_current_diffusion_config(parallel):
            try:
                make()
            except ValueError as error:
                return str(error)

    common = dict(num_heads=2, head_size=64, softmax_scale=0.1, prefix="blocks.3.attn1", qkv_layout="BSND")
    keywords = {**common, **arguments, "backend_kwargs": {"sparsity": sparsity}}
    theirs = refusal(lambda: Theirs(monkeypatch, **keywords))
    found = refusal(lambda: RainfusionImpl(**keywords))
    assert (found is None) == (theirs is None)
    assert (found is None) == (sparsity == 0.0 or case in ("ulysses", "nothing"))
    assert found is None or "RAINFUSION_ATTN" in found


@pytest.mark.parametrize("change", [dict(rows=ROWS - 1), dict(k=ROWS - 1), dict(v=ROWS - 1), dict(size=32)])
def test_tensors_that_do_not_fit_are_an_error(change):
    (layer,), (q, k, v) = layers(), tensors(change.get("rows", ROWS))
    k = k[:, : change.get("k", ROWS), :, : change.get("size", 64)]
    v = v[:, : change.get("v", ROWS)]
    with pytest.raises(ValueError, match=r"needs q, k and v \[B, S, N, D\] of one sequence"):
        layer(q, k, v, AttentionMetadata(video_layout=VIDEO))


# ---------------------------------------------------------------------------------------------------------------------
# precision


@pytest.mark.parametrize(("asked", "found"), [("bf16", "native"), ("fp8", "fp8"), ("mix", "int8")])
def test_precisions_have_names_of_their_own(asked, found):
    spec = AttentionSpec("RAINFUSION_ATTN", block_sparse={"precision": asked, "skip_layers": "1-2"})
    impl = RainfusionImpl(2, 64, 0.1, qkv_layout="BSND", backend_kwargs=spec.backend_kwargs())
    assert impl.options.method().precision == found and impl.options.method().sparsity == 0.8
    assert impl.options.method("fp8").precision == "fp8" and impl.options.method("float").precision == "native"
    assert impl.options.skip_layers == {1, 2}


def test_a_precision_that_this_device_does_not_have_is_an_error():
    (layer,), (q, k, v) = layers(chosen=config(precision="fp8")), tensors()
    with pytest.raises(ValueError, match=r"precision that was asked for.*block_sparse.precision='bf16'"):
        layer(q, k, v, AttentionMetadata(video_layout=VIDEO))
    torch.testing.assert_close(layer(q, k, v, None), sdpa(q, k, v))


def test_the_dtype_of_the_kv_cache_decides_over_the_precision():
    (layer,), (q, k, v) = layers(chosen=config(precision="fp8")), tensors()
    metadata = AttentionMetadata(video_layout=VIDEO, extra={"kv_cache_dtype": "float"})
    assert torch.equal(layer.attention.forward(q, k, v, metadata), expected(q, k, v))
    metadata = AttentionMetadata(video_layout=VIDEO, extra={"kv_cache_dtype": "fp8"})
    with pytest.raises(ValueError, match="precision that was asked for"):
        layers()[0].attention.forward(q, k, v, metadata)
    assert RainfusionImpl.supports_kv_cache_dtype("fp8", "cuda")
    assert not RainfusionImpl.supports_kv_cache_dtype("mxfp4", "cuda")


# ---------------------------------------------------------------------------------------------------------------------
# what their models ask a backend


def test_masks_are_taken_as_the_platforms_own_backend_takes_them(monkeypatch):
    assert RainfusionBackend.supports_attention_mask() and not RainfusionBackend.supports_packed_mask_free()
    monkeypatch.setattr(cpu_sdpa.CpuSDPABackend, "supports_attention_mask", classmethod(lambda *_: False))
    monkeypatch.setattr(cpu_sdpa.CpuSDPABackend, "supports_packed_mask_free", classmethod(lambda _: True))
    assert not RainfusionBackend.supports_attention_mask() and RainfusionBackend.supports_packed_mask_free()
