"""SGLang's attention layer with our backend in it: found, sparse, dense, refused."""

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.multimodal_gen.runtime.layers.attention import LocalAttention, USPAttention
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionMetadata
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPABackend, SDPAImpl
from sglang.multimodal_gen.runtime.layers.attention.selector import get_attn_backend
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, cpu, cuda, current_platform
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

import rainfusion
from rainfusion.integrations import sglang
from rainfusion.integrations.sglang import private_names
from rainfusion.integrations.sglang.backend import RainfusionBackend, RainfusionImpl, RainfusionMetadata

GRID = (4, 32, 36)
LENGTH = 4 * 32 * 36
LATENTS = (1, 16, 4, 64, 72)
OURS = AttentionBackendEnum.RAIN_FUSION_ATTN


def layer(kind=USPAttention, name="blocks.0.attn1", heads=2, **arguments):
    return kind(**{"num_heads": heads, "head_size": 64, "causal": False, "prefix": name, **arguments})


def tensors(length=LENGTH, heads=2, batch=1):
    return torch.randn(3, batch, length, heads, 64).unbind()


def attend(one, tensors, metadata, step=0):
    with set_forward_context(current_timestep=step, attn_metadata=metadata):
        return one(*tensors)


def expected(q, k, v, sparsity=0.7, grid=GRID):
    method = rainfusion.Method.recommended(sparsity=sparsity)
    return rainfusion.sparse_attention(q, k, v, input_layout="BSND", latent_shape_q=grid, method=method)


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# found


def test_the_entry_point_gives_our_class_to_their_layer(server_args):
    assert server_args.attention_backend == "rain_fusion_attn"
    one = layer()
    assert one.backend is OURS and type(one.attn_impl) is RainfusionImpl and type(one.attn_impl.dense) is SDPAImpl


def test_other_choices_are_as_before(server_args):
    for asked in (None, AttentionBackendEnum.TORCH_SDPA):
        path = current_platform.get_attn_backend_cls_str(asked, 64, torch.float32)
        assert path.endswith("sdpa.SDPABackend")
    assert get_attn_backend(64, torch.float32, is_cross_attention=True) is SDPABackend  # cross-attention stays dense


@pytest.mark.parametrize("kind", [cuda.NvmlCudaPlatform, cuda.NonNvmlCudaPlatform, cuda.CudaPlatform])
def test_on_cuda_the_hook_is_on_the_class_that_has_the_method(kind, monkeypatch):
    assert private_names._owner(kind) is cuda.CudaPlatformBase
    target = "sglang.multimodal_gen.runtime.platforms.cuda.CudaPlatformBase.get_attn_backend_cls_str"
    with pytest.raises(ValueError, match="Invalid attention backend"):
        kind().get_attn_backend_cls_str(OURS, 64, torch.bfloat16)
    monkeypatch.setattr("sglang.multimodal_gen.runtime.platforms._current_platform", kind())
    monkeypatch.setattr(
        cuda.CudaPlatformBase, "get_attn_backend_cls_str", vars(cuda.CudaPlatformBase)[target.rsplit(".")[-1]]
    )
    monkeypatch.setattr(HookRegistry, "_hooks", {target: []})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    sglang.register()
    HookRegistry.apply_hooks()
    assert set(HookRegistry._patched) == {target}
    for platform in (kind, kind()):
        path = platform.get_attn_backend_cls_str(OURS, 64, torch.bfloat16)
        assert path == "rainfusion.integrations.sglang.backend.RainfusionBackend"
        assert platform.get_attn_backend_cls_str(selected_backend=OURS, head_size=64, dtype=torch.bfloat16) == path
        other = platform.get_attn_backend_cls_str(AttentionBackendEnum.TORCH_SDPA, 64, torch.bfloat16)
        assert other.endswith("sdpa.SDPABackend")


def test_every_platform_but_ascends_has_the_method_in_a_class_of_its_own():
    from sglang.multimodal_gen.runtime.platforms import mps, rocm, xpu

    for kind in (rocm.RocmPlatform, xpu.XpuPlatform, mps.MpsPlatform, cpu.CpuPlatform):
        assert private_names._owner(kind) is kind


def test_on_an_npu_nothing_is_hooked(monkeypatch):
    monkeypatch.setattr(cpu.CpuPlatform, "is_npu", lambda self: True)
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    sglang.register()
    assert HookRegistry._hooks == {}


# ---------------------------------------------------------------------------------------------------------------------
# sparse


def test_a_sparse_call_is_the_librarys(stage):
    one, (q, k, v) = layer(), tensors()
    assert torch.equal(attend(one, (q, k, v), stage(1, LATENTS)), expected(q, k, v))
    stats = sglang.stats()
    assert stats.calls == {"blocks.0.attn1": (1, 0)} and stats.layouts == {"grid 4x32x36": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_batches_in_which_each_sample_has_its_own_mask(stage, dtype):
    one, (q, k, v) = layer(), (x.to(dtype) for x in tensors(batch=2))
    out = attend(one, (q, k, v), stage(1, LATENTS))
    assert torch.equal(out, expected(q, k, v))
    alone = attend(one, [x[1:] for x in (q, k, v)], stage(1, LATENTS))
    torch.testing.assert_close(out[1:], alone)


def test_grids_that_are_no_multiples_of_eight_come_back_in_their_order(stage):
    """As those of Wan at 480p. A token that attends to itself alone gets its own value."""
    one, (q, _, v) = layer(), tensors(3 * 30 * 52)
    q = 30 * torch.nn.functional.normalize(q, dim=-1)
    out = attend(one, (q, q, v), stage(1, (1, 16, 3, 60, 104)))
    assert torch.equal(out, expected(q, q, v, grid=(3, 30, 52)))
    assert (out - v).abs().amax(dim=(2, 3)).lt(1e-3).double().mean() > 0.9


def test_fewer_heads_of_keys(stage):
    one, (q, _, _), (_, k, v) = layer(num_kv_heads=1), tensors(), tensors(heads=1)
    assert torch.equal(attend(one, (q, k, v), stage(1, LATENTS)), expected(q, k, v))


def test_a_layer_without_sequence_parallelism(stage):
    one, (q, k, v) = layer(LocalAttention, heads=2), tensors()
    assert one.backend is OURS
    assert torch.equal(attend(one, (q, k, v), stage(1, LATENTS)), expected(q, k, v))


def test_the_first_sparse_call_and_the_end_of_a_run_are_in_the_log(stage, caplog):
    caplog.set_level("INFO")
    one, given = layer(), tensors()
    for step in (0, 1, 0):
        attend(one, given, stage(step, LATENTS))
    ours = [record.getMessage() for record in caplog.records if record.name == "sglang.rainfusion"]
    assert len(ours) == 2 and "sparse attention in blocks.0.attn1: grid 4x32x36" in ours[0]
    assert "1 sparse and 1 dense attention calls" in ours[1]
    assert logging.getLogger("sglang.rainfusion").propagate  # their logging has its handlers on the root


# ---------------------------------------------------------------------------------------------------------------------
# dense


def test_the_first_steps_are_dense(stage):
    both, (q, k, v) = [layer(), layer(name="blocks.1.attn1")], tensors()
    dense, sparse = sdpa(q, k, v), expected(q, k, v)
    for step in range(4):
        for one in both:
            out = attend(one, (q, k, v), stage(step, LATENTS))
            torch.testing.assert_close(out, sparse if step else dense)
    stats = sglang.stats()
    assert stats.calls == {"blocks.0.attn1": (3, 1), "blocks.1.attn1": (3, 1)}
    assert stats.reasons == {"the first steps are dense (skip_first_steps)": 2}


def test_their_defaults_stay_theirs(stage, server_args):
    arguments = SimpleNamespace(attention_backend_config={}, pipeline_config=server_args.pipeline_config)
    metadata = stage(9, LATENTS, arguments)
    assert (metadata.options.sparsity, metadata.options.skip_first_steps) == (0.2, 10)
    attend(layer(), tensors(), metadata)


@pytest.mark.parametrize(
    ("length", "latents", "words"),
    [
        (LENGTH + 10, LATENTS, "do not hold a grid of 4x32x36"),
        (LENGTH - 1, LATENTS, "do not hold a grid of 4x32x36"),
        (256, (1, 256, 64), "do not hold a grid of 1x128x32"),
        (256, None, "no grid"),
    ],
)
def test_sequences_that_are_not_the_grid_are_dense_and_counted(stage, length, latents, words):
    one, given = layer(), tensors(length)
    torch.testing.assert_close(attend(one, given, stage(1, latents)), sdpa(*given))
    (reason,) = sglang.stats().reasons
    assert words in reason


def test_causal_attention_is_dense_and_causal(stage):
    one, (q, k, v) = layer(causal=True), tensors()
    out = attend(one, (q, k, v), stage(1, LATENTS))
    torch.testing.assert_close(out[:, 0], v[:, 0])  # the first token sees itself alone
    assert sglang.stats().reasons == {"causal attention": 1}


@pytest.mark.parametrize("metadata", [None, AttentionMetadata(current_timestep=3)])
def test_metadata_of_others_or_none_are_dense_and_counted(server_args, metadata):
    one, given = layer(), tensors(256)
    torch.testing.assert_close(attend(one, given, metadata), sdpa(*given))
    assert sglang.stats().reasons == {"the pipeline's stage says nothing of the grid and the step": 1}


def test_flash_attention_beside_us_finds_what_it_reads_in_our_metadata(stage, monkeypatch):
    """On GPUs it serves cross-attention, in the same forward, with the same metadata."""
    from sglang.multimodal_gen.runtime.layers.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda q, k, v, **options: sdpa(q, k, v))
    monkeypatch.setattr(flash_attn, "fa_ver", 3)
    impl = object.__new__(flash_attn.FlashAttentionImpl)
    vars(impl).update(softmax_scale=0.125, causal=False)
    monkeypatch.setattr(impl, "_request_skip_softmax_threshold", lambda: (False, None), raising=False)
    q, k, v = tensors(40)
    assert torch.equal(impl.forward(q, k[:, :16], v[:, :16], stage(1, LATENTS)), sdpa(q, k[:, :16], v[:, :16]))


# ---------------------------------------------------------------------------------------------------------------------
# refused


@pytest.mark.parametrize("change", [{"sparsity": 1.0}, {"sparsity": -0.1}, {"skip_first_steps": -1}])
def test_options_are_refused_as_theirs_are(change, monkeypatch):
    import sys
    from types import ModuleType

    given = {"current_timestep": 0, "skip_first_steps": 1, "sparsity": 0.5, "raw_latent_shape": LATENTS}
    monkeypatch.setitem(sys.modules, "attentions", ModuleType("attentions"))  # of Ascend, which theirs imports
    from sglang.multimodal_gen.runtime.layers.attention.backends import rain_fusion_attn

    for builder in (RainfusionBackend.get_builder_cls()(), rain_fusion_attn.RainFusionAttentionMetadataBuilder()):
        builder.build(**given, patch_size=(1, 2, 2))
        with pytest.raises(ValueError, match=r"must be|should be"):
            builder.build(**{**given, **change}, patch_size=(1, 2, 2))


@pytest.mark.parametrize("latents", [LATENTS, (1, 16, 5, 65, 73), [3, 30, 52], torch.Size((1, 16, 1, 64, 64))])
def test_the_grid_is_that_of_theirs(latents, monkeypatch):
    import sys
    from types import ModuleType

    monkeypatch.setitem(sys.modules, "attentions", ModuleType("attentions"))
    from sglang.multimodal_gen.runtime.layers.attention.backends import rain_fusion_attn

    given = dict(current_timestep=4, skip_first_steps=1, sparsity=0.5, raw_latent_shape=latents, patch_size=(1, 2, 2))
    theirs = rain_fusion_attn.RainFusionAttentionMetadataBuilder().build(**given)
    ours = RainfusionBackend.get_builder_cls()().build(**given)
    assert isinstance(ours, RainfusionMetadata) and ours.current_timestep == theirs.current_timestep
    assert list(ours.grid) == theirs.latent_shape


def test_ring_attention_and_packed_sequences_are_not_offered():
    assert not RainfusionBackend.supports_ring_rotation() and not RainfusionBackend.supports_packed_varlen()
