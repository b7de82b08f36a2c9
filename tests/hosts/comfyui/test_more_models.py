"""More of ComfyUI's own transformers, small and random, called as a sampler calls them: where their tokens lie."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import comfy.model_patcher
import comfy.ops
import pytest
import torch

from rainfusion.integrations import comfyui
from rainfusion.integrations.comfyui import private_names

TEXT = 64  # width of text embeddings
OPERATIONS = {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def find(module: str, name: str) -> Any:
    """A class of ComfyUI's models; skips the test if this version has no such class."""
    try:
        return getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this ComfyUI has no {name}")


def needs(name: str, places: Any) -> None:
    """Skips the test if this version's model has no such argument."""
    if name not in places:
        pytest.skip(f"this ComfyUI's model has no {name}")


def ready(transformer: Any) -> Any:
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return transformer.eval()


def known(parameters: type, config: dict[str, Any]) -> dict[str, Any]:
    """Versions differ in the parameters of a model."""
    names = {field.name for field in fields(parameters)}
    return {name: value for name, value in config.items() if name in names}


def wan(name: str = "WanModel", module: str = "wan.model", **changes: Any) -> Any:
    config = dict(
        dim=128, num_heads=2, ffn_dim=128, num_layers=2, text_dim=TEXT, freq_dim=32, in_dim=16, out_dim=16,
        patch_size=(1, 2, 2),
    )  # fmt: skip
    return ready(find(module, name)(**{**config, **changes}, **OPERATIONS))


def wan_from_sound(skip: bool = True) -> Any:
    model = wan("WanModel_S2V", audio_inject_layers=[0])
    if skip and not hands_its_calls_on(model):
        pytest.skip("this ComfyUI's WanModel_S2V leaves out transformer_options: it stays dense")
    return model


def hands_its_calls_on(transformer: Any) -> bool:
    """Whether the blocks get what travels with a forward, so that attention calls can be answered by a node."""
    return "context=context, transformer_options=" in inspect.getsource(type(transformer).forward_orig)


def hunyuan(**changes: Any) -> Any:
    config = dict(
        in_channels=16, out_channels=16, patch_size=[1, 2, 2], vec_in_dim=32, context_in_dim=TEXT, hidden_size=128,
        mlp_ratio=2.0, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[16, 24, 24], theta=256, qkv_bias=True,
        guidance_embed=False, byt5=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
        meanflow=False,
    )  # fmt: skip
    parameters = find("hunyuan_video.model", "HunyuanVideoParams")
    for name in changes:
        needs(name, {field.name for field in fields(parameters)})
    model = find("hunyuan_video.model", "HunyuanVideo")
    return ready(model(**known(parameters, {**config, **changes}), **OPERATIONS))


def ltx_with_sound() -> Any:
    model = find("lightricks.av_model", "LTXAVModel")
    return ready(
        model(
            cross_attention_dim=128, attention_head_dim=64, num_attention_heads=2, caption_channels=TEXT, num_layers=2,
            audio_cross_attention_dim=64, audio_attention_head_dim=32, audio_num_attention_heads=2, **OPERATIONS,
        )
    )  # fmt: skip


def flux(**changes: Any) -> Any:
    config = dict(
        guidance_embed=False, in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=TEXT, hidden_size=128,
        mlp_ratio=2.0, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[16, 24, 24], theta=10000, patch_size=2,
        qkv_bias=True, txt_ids_dims=[],
    )  # fmt: skip
    parameters = find("flux.model", "FluxParams")
    return ready(find("flux.model", "Flux")(**known(parameters, {**config, **changes}), **OPERATIONS))


def flux_2() -> Any:
    needs("global_modulation", {field.name for field in fields(find("flux.model", "FluxParams"))})
    return flux(
        global_modulation=True, mlp_silu_act=True, ops_bias=False, qkv_bias=False, patch_size=1, vec_in_dim=None,
        axes_dim=[16, 16, 16, 16], txt_ids_dims=[3], default_ref_method="index", ref_index_scale=10.0,
    )  # fmt: skip


CHROMA = dict(
    in_channels=64, out_channels=64, context_in_dim=TEXT, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=1,
    depth_single_blocks=1, axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=128,
    hidden_dim=64, n_layers=1, txt_ids_dims=[], vec_in_dim=None,
)  # fmt: skip


def chroma() -> Any:
    parameters = find("chroma.model", "ChromaParams")
    return ready(find("chroma.model", "Chroma")(**known(parameters, CHROMA), **OPERATIONS))


def chroma_radiance() -> Any:
    parameters = find("chroma_radiance.model", "ChromaRadianceParams")
    config = dict(
        CHROMA, in_channels=3, out_channels=3, patch_size=16, nerf_hidden_size=16, nerf_mlp_ratio=2, nerf_depth=1,
        nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32,
        use_x0=False,
    )  # fmt: skip
    return ready(find("chroma_radiance.model", "ChromaRadiance")(**known(parameters, config), **OPERATIONS))


def qwen(**changes: Any) -> Any:
    model = find("qwen_image.model", "QwenImageTransformer2DModel")
    for name in changes:
        needs(name, inspect.signature(model).parameters)
    config = dict(
        in_channels=64, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=TEXT, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return ready(model(**config, **changes, **OPERATIONS))


def lumina(name: str = "NextDiT", takes: str = "x", **changes: Any) -> Any:
    model = find("lumina.model", name)
    needs(takes, inspect.signature(model._forward).parameters)
    config = dict(
        patch_size=2, in_channels=16, dim=256, n_layers=1, n_refiner_layers=1, n_heads=4, n_kv_heads=4,
        axes_dims=[16, 24, 24], axes_lens=[1536, 512, 512], cap_feat_dim=TEXT, qk_norm=True, ffn_dim_multiplier=2.0,
    )  # fmt: skip
    return ready(model(**{**config, **changes}, **OPERATIONS))


Z_IMAGE = dict(z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32)


def cosmos(name: str = "MiniTrainDIT", module: str = "cosmos.predict2", **changes: Any) -> Any:
    config = dict(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=128, num_blocks=2, num_heads=2, crossattn_emb_channels=TEXT,
        pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=16,
    )  # fmt: skip
    return ready(find(module, name)(**{**config, **changes}, **OPERATIONS))


def anima() -> Any:
    find("anima.model", "Anima")
    module = importlib.import_module("comfy.ldm.anima.model")
    with pytest.MonkeyPatch.context() as patched:  # its language model is large, and has no part in self-attention
        patched.setattr(module, "LLMAdapter", lambda **how: torch.nn.Identity())
        return cosmos("Anima", "anima.model")


def kandinsky() -> Any:
    model = find("kandinsky5.model", "Kandinsky5")
    return ready(
        model(
            in_text_dim=TEXT, in_text_dim2=32, time_dim=64, model_dim=128, ff_dim=128, visual_embed_dim=64,
            num_text_blocks=1, num_visual_blocks=2, **OPERATIONS,
        )
    )  # fmt: skip


def hidream() -> Any:
    model = find("hidream.model", "HiDreamImageTransformer2DModel")
    return ready(
        model(
            patch_size=2, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64,
            num_attention_heads=2, caption_channels=[TEXT, TEXT], text_emb_dim=TEXT, axes_dims_rope=(32, 16, 16),
            llama_layers=[0, 1], **OPERATIONS,
        )
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# what they are called with


class Part(NamedTuple):
    """An argument with latents, and where the transformer puts them."""

    name: str = "x"  # or "ref_latents.0", for the first of a list
    clip: int = 0
    frame: int = 0  # its first one in the clip
    column: int = 0


@dataclass(frozen=True)
class Kind:
    """A transformer, the arguments of its forward, and what has to be found."""

    make: Callable[[], Any]
    given: dict[str, Any]  # shapes, and what is no shape
    words: str  # the grids of the clips, as the report says them
    others: int = 0  # tokens that are no clip's
    parts: tuple[Part, ...] = (Part(),)
    patch: tuple[int, int, int] = (1, 2, 2)
    time: str = "timestep"

    def arguments(self) -> dict[str, Any]:
        """Of the forward: random tensors."""
        torch.manual_seed(1)
        return {self.time: torch.tensor([0.5]), **{name: filled(shape) for name, shape in self.given.items()}}


def filled(shape: Any) -> Any:
    if isinstance(shape, list):
        return [filled(one) for one in shape]
    return torch.randn(shape) if isinstance(shape, tuple) else shape


VIDEO = (1, 16, 3, 32, 48)
FIRST = (1, 16, 1, 32, 48)
IMAGE = (1, 16, 64, 96)
WORDS = (1, 7, TEXT)
GRID = "3x16x24"

WAN = dict(x=VIDEO, context=WORDS)
HUNYUAN = dict(x=VIDEO, context=WORDS, y=(1, 32))
QWEN = dict(x=(1, 16, 1, 64, 96), context=WORDS)
HIDREAM = dict(y=(1, TEXT), context=WORDS, encoder_hidden_states_llama3=(1, 2, 5, TEXT))
REFERENCE = Part("reference_latent", 1)

KINDS: dict[str, Kind] = {
    "wan, two at once, sizes that are no whole patches": Kind(
        wan, dict(x=(2, 16, 3, 31, 47), context=(2, 7, TEXT), timestep=torch.tensor([0.5, 0.5])), GRID
    ),
    "wan fun control": Kind(
        lambda: wan(in_dim_ref_conv=16), dict(WAN, reference_latent=(1, 16, 32, 48)), f"1x16x24 and {GRID}",
        parts=(Part("reference_latent"), Part("x", 1)),
    ),
    "wan from an image": Kind(
        lambda: wan(model_type="i2v", in_dim=36), dict(WAN, x=(1, 36, 3, 32, 48), clip_fea=(1, 257, 1280)), GRID
    ),
    "wan 2.2 5B": Kind(
        lambda: wan(in_dim=48, out_dim=48),
        dict(x=(1, 48, 3, 32, 48), context=WORDS, timestep=torch.tensor([[0.0, 0.5, 0.5]])), GRID,
    ),
    "wan with frames behind it": Kind(
        wan, dict(WAN, time_dim_concat=(1, 16, 2, 32, 48)), "5x16x24", parts=(Part(), Part("time_dim_concat", 0, 3))
    ),
    "wan from sound": Kind(
        wan_from_sound,
        dict(WAN, reference_latent=FIRST, control_video=VIDEO, audio_embed=(1, 25, 1024, 12)), f"{GRID} and 1x16x24",
        parts=(Part(), REFERENCE),
    ),
    "wan from sound, continued": Kind(
        wan_from_sound,
        dict(WAN, reference_latent=FIRST, reference_motion=(1, 16, 19, 32, 48)), f"{GRID} and 1x16x24", others=576,
        parts=(Part(), REFERENCE),
    ),
    "wan humo": Kind(
        lambda: wan("HumoWanModel"), dict(WAN, reference_latent=FIRST), f"{GRID} and 1x16x24",
        parts=(Part(), REFERENCE),
    ),
    "wan scail": Kind(
        lambda: wan("SCAILWanModel", in_dim=20, out_dim=20),
        dict(
            x=(1, 20, 3, 32, 48), context=WORDS, pose_latents=(1, 20, 3, 16, 24), reference_latent=(1, 20, 1, 32, 48),
            clip_fea=(1, 257, 1280),
        ),
        "4x16x24 and 3x8x12", parts=(Part("reference_latent"), Part("x", 0, 1), Part("pose_latents", 1)),
    ),
    "wan animate": Kind(
        lambda: wan("AnimateWanModel", "wan.model_animate", in_dim=36),
        dict(WAN, x=(1, 36, 3, 32, 48), clip_fea=(1, 257, 1280), pose_latents=(1, 16, 2, 32, 48)), GRID,
        parts=(Part(), Part("pose_latents", 0, 1)),
    ),
    "wan with a camera": Kind(
        lambda: wan("CameraWanModel", in_dim=32),
        dict(WAN, x=(1, 32, 3, 32, 48), clip_fea=(1, 257, 1280), camera_conditions=(1, 24, 3, 256, 384)), GRID,
    ),
    "hunyuan video 1.5": Kind(
        lambda: hunyuan(
            byt5=True, use_cond_type_embedding=True, vision_in_dim=48, vec_in_dim=None, patch_size=[1, 1, 1]
        ),
        dict(x=(1, 16, 3, 16, 24), context=WORDS, txt_byt5=(1, 5, 1472), clip_fea=(1, 9, 48)), GRID, others=21,
        patch=(1, 1, 1),
    ),
    "hunyuan video with a reference": Kind(
        hunyuan, dict(HUNYUAN, ref_latent=FIRST), f"1x16x24 and {GRID}", others=7,
        parts=(Part("ref_latent"), Part("x", 1)),
    ),
    "hunyuan video from an image": Kind(
        hunyuan, dict(HUNYUAN, guiding_frame_index=torch.tensor([0])), GRID, others=7
    ),
    "hunyuan video with padded text": Kind(
        hunyuan, dict(HUNYUAN, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0]])), GRID, others=7
    ),
    "hunyuan image": Kind(
        lambda: hunyuan(byt5=True, patch_size=[1, 1], axes_dim=[32, 32], vec_in_dim=None),
        dict(x=(1, 16, 32, 48), context=WORDS, txt_byt5=(1, 5, 1472)), "1x32x48", others=12, patch=(1, 1, 1),
    ),
    "ltx 2, with sound": Kind(
        ltx_with_sound,
        dict(x=[(1, 128, 3, 16, 24), (1, 8, 20, 16)], context=(1, 7, 2 * TEXT), attention_mask=None), GRID,
        parts=(Part("x.0"),), patch=(1, 1, 1),
    ),
    "flux with odd sizes": Kind(
        flux, dict(x=(2, 16, 63, 95), context=(2, 7, TEXT), y=(2, 32), ref_latents=[(2, 16, 31, 33)]),
        "1x32x48 and 1x16x17", others=7, parts=(Part(), Part("ref_latents.0", 1)),
    ),
    "flux 2": Kind(
        flux_2, dict(x=(1, 16, 32, 48), context=WORDS, ref_latents=[(1, 16, 16, 24), (1, 16, 20, 10)]),
        "1x32x48 and 1x16x24 and 1x20x10", others=7, patch=(1, 1, 1),
        parts=(Part(), Part("ref_latents.0", 1), Part("ref_latents.1", 2)),
    ),
    "chroma": Kind(chroma, dict(x=IMAGE, context=WORDS, guidance=torch.tensor([0.0])), "1x32x48", others=7),
    "chroma, given a reference that it does not use": Kind(
        chroma, dict(x=IMAGE, context=WORDS, guidance=torch.tensor([0.0]), ref_latents=[(1, 16, 32, 48)]), "1x32x48",
        others=7,
    ),
    "chroma radiance": Kind(
        chroma_radiance, dict(x=(1, 3, 512, 768), context=WORDS, guidance=torch.tensor([0.0])), "1x32x48", others=7,
        patch=(1, 16, 16),
    ),
    "qwen edit": Kind(
        qwen, dict(QWEN, x=(1, 16, 1, 63, 96), ref_latents=[(1, 16, 1, 32, 48), (1, 16, 1, 31, 32)]),
        "1x32x48 and 1x16x24 and 1x16x16", others=7,
        parts=(Part(), Part("ref_latents.0", 1), Part("ref_latents.1", 2)),
    ),
    "qwen with padded text": Kind(
        qwen, dict(QWEN, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0]])),
        "1x32x48", others=7,
    ),
    "qwen in layers": Kind(
        lambda: qwen(use_additional_t_cond=True),
        dict(x=VIDEO, context=WORDS, ref_latents=[FIRST], additional_t_cond=torch.tensor([0])),
        f"{GRID} and 1x16x24", others=7, parts=(Part(), Part("ref_latents.0", 1)),
    ),
    "lumina 2": Kind(
        lumina, dict(x=(1, 16, 63, 95), context=WORDS, num_tokens=7), "1x32x48", others=7, time="timesteps"
    ),
    "z-image with references": Kind(
        lambda: lumina(takes="ref_latents", **Z_IMAGE),
        dict(x=(1, 16, 62, 94), context=WORDS, num_tokens=7, ref_latents=[(1, 16, 32, 46), (1, 16, 20, 20)]),
        "1x16x23 and 1x10x10 and 1x31x47", others=96 + 16 + 28 + 15, time="timesteps",
        parts=(Part("ref_latents.0"), Part("ref_latents.1", 1), Part("x", 2)),
    ),
    "z-image with references that are described": Kind(
        lambda: lumina(takes="siglip_feats", siglip_feat_dim=24, **Z_IMAGE),
        dict(
            x=(1, 16, 62, 94), context=WORDS, num_tokens=7, ref_latents=[(1, 16, 32, 46)], siglip_feats=[(1, 4, 5, 24)],
            ref_contexts=[(1, 9, TEXT), (1, 40, TEXT)],
        ),
        "1x16x23 and 1x31x47", others=32 + 32 + 64 + 32 + 32 + 16 + 15, time="timesteps",
        parts=(Part("ref_latents.0"), Part("x", 1)),
    ),
    "z-image of pixels": Kind(
        lambda: lumina(
            "NextDiTPixelSpace", in_channels=3, patch_size=16, decoder_hidden_size=32, decoder_num_res_blocks=1,
            decoder_in_channels=3 * 16 * 16, **Z_IMAGE,
        ),
        dict(x=(1, 3, 496, 752), context=WORDS, num_tokens=7), "1x31x47", others=32 + 15, time="timesteps",
        patch=(1, 16, 16),
    ),
    "cosmos 1": Kind(
        lambda: cosmos(
            "GeneralDIT", "cosmos.model", block_x_format="THWBD", affline_emb_norm=True, use_cross_attn_mask=False,
            extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable",
        ),
        dict(x=VIDEO, context=WORDS), GRID, time="timesteps",
    ),
    "cosmos predict 2": Kind(cosmos, dict(x=VIDEO, context=WORDS), GRID, time="timesteps"),
    "anima": Kind(anima, dict(x=(1, 16, 1, 64, 96), context=WORDS), "1x32x48", time="timesteps"),
    "kandinsky 5": Kind(kandinsky, dict(x=(1, 16, 3, 31, 48), context=WORDS, y=(1, 32)), GRID),
    "kandinsky 5, an image": Kind(kandinsky, dict(x=(1, 16, 64, 96), context=WORDS, y=(1, 32)), "1x32x48"),
    "hidream": Kind(hidream, dict(HIDREAM, x=(1, 16, 63, 96)), "1x32x48", others=17, time="t"),
    "hidream edit": Kind(
        hidream, dict(HIDREAM, x=(1, 16, 32, 48), image_cond=(1, 16, 32, 48)), "1x16x48", others=17, time="t",
        parts=(Part(), Part("image_cond", column=24)),
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# the tests


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request):
    kind = KINDS[request.param]
    return kind, patcher(kind.make())


def patcher(transformer):
    holder = torch.nn.Module()
    holder.diffusion_model = transformer
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(holder, load_device=device, offload_device=device)


def forward(model, arguments, **options):
    """As a sampler calls the transformer of this model."""
    with torch.no_grad():
        return model.model.diffusion_model(**arguments, transformer_options={"wrappers": model.wrappers, **options})


def equal(ours, theirs):
    """Tensors, or lists of them."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_sparsity_0_is_bit_equal_to_no_node(kind):
    kind, model = kind
    same = comfyui.apply(model, sparsity=0.0, min_tokens=0)
    assert equal(forward(same, kind.arguments()), forward(model, kind.arguments()))
    assert comfyui.stats(same).reasons == {"sparsity is 0": 2}


def test_every_self_attention_layer_of_the_picture_is_sparse(kind):
    kind, model = kind
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    forward(fast, kind.arguments())
    stats = comfyui.stats(fast)
    assert set(stats.calls.values()) == {(1, 0)} and len(stats.calls) == 2, str(stats)
    assert {words.split(", ")[0] for words in stats.layouts} == {f"grid {kind.words}"}, str(stats)
    others = [sum(int(part.split()[0]) for part in words.split(", ")[1:]) for words in stats.layouts]
    assert max(others) == kind.others, str(stats)


def test_tokens_of_every_clip_lie_where_the_scene_says(kind):
    """Measured: one patch is changed, and the token that changes most is where it should be."""
    kind, model = kind
    before = queries(model, kind.arguments())
    assert len(before) == 2
    for part in kind.parts:
        arguments = kind.arguments()
        cell = change(arguments, part.name, kind.patch)
        after = queries(model, arguments)
        for layer, (q, placed) in before.items():
            earlier = sum(math.prod(grid) for grid in placed.grids[: part.clip]) + sum(placed.gaps[: part.clip])
            _, h, w = placed.grids[part.clip]
            row = (part.frame + cell[0]) * h + cell[1]
            token = placed.before + earlier + row * w + part.column + cell[2]
            moved = (after[layer][0] - q).square().sum((0, 1, 3))
            assert moved.argmax() == token, f"{part.name} in layer {layer}: {placed}"


def change(arguments, name, patch):
    """One patch of an argument; where it is."""
    name, _, number = name.partition(".")
    latents = arguments[name][int(number)] if number else arguments[name]
    video = latents if latents.dim() == 5 else latents.unsqueeze(2)
    sizes = (math.ceil(size / cells) for size, cells in zip(video.shape[2:], patch, strict=True))
    t, h, w = cell = [size * quarters // 4 for size, quarters in zip(sizes, (3, 1, 3), strict=True)]
    video[:, :, t * patch[0] :][:, :, : patch[0], h * patch[1] :][..., : patch[1], w * patch[2] :][..., : patch[2]] += (
        50
    )
    return cell


def queries(model, arguments):
    """layer -> its queries, and where the clips lie in them."""
    found = {}
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    decider = private_names.attached(fast).__self__.decider
    attempt = decider.attempt

    def record(layer, q, *args, **kwargs):
        found[layer] = q.clone(), decider.scene_for(layer).place(q.shape[2])
        return attempt(layer, q, *args, **kwargs)

    decider.attempt = record
    forward(fast, arguments)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# what is not where the arguments of the forward say


def test_a_patch_that_adds_tokens_makes_it_dense():
    """Style projectors put more tokens before the text; nothing says how many."""
    kind, model = KINDS["flux 2"], patcher(flux_2())
    seen = []

    def more_text(tokens):
        seen.append(tokens)
        for name in ("txt", "txt_ids"):
            tokens[name] = torch.cat([tokens[name][:, :5], tokens[name]], dim=1)
        return tokens

    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    patches = {"post_input": [more_text]}
    out = forward(fast, kind.arguments(), patches=patches)
    if not seen:
        pytest.skip("this ComfyUI's Flux has no post_input patches")
    assert torch.equal(out, forward(model, kind.arguments(), patches=patches))
    assert comfyui.stats(fast).reasons == {f"2132 tokens do not hold a grid of {kind.words} where this model has it": 2}


def ltx():
    model = find("lightricks.model", "LTXVModel")
    config = dict(cross_attention_dim=128, attention_head_dim=64, num_attention_heads=2, caption_channels=TEXT)
    return ready(model(**config, num_layers=2, **OPERATIONS))


@pytest.mark.parametrize("left_out", [0, 100])
def test_a_guide_of_ltx_is_the_last_frame_and_dense_if_parts_of_it_are_left_out(left_out):
    model = patcher(ltx())
    needs("denoise_mask", inspect.signature(model.model.diffusion_model._forward).parameters)
    mask = torch.ones(1, 1, 4, 16, 24)
    mask.view(-1)[4 * 384 - left_out :] = -1.0
    torch.manual_seed(1)
    arguments = dict(
        x=torch.randn(1, 128, 4, 16, 24), timestep=torch.full((1, 4 * 384, 1), 0.5), context=torch.randn(WORDS),
        attention_mask=None, keyframe_idxs=torch.ones(1, 3, 384, 2), denoise_mask=mask,
    )  # fmt: skip
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    out = forward(fast, arguments)
    stats = comfyui.stats(fast)
    if left_out:
        assert torch.equal(out, forward(model, arguments))
        assert stats.reasons == {"1436 tokens do not hold a grid of 4x16x24 where this model has it": 2}
    else:
        assert stats.layouts == {"grid 4x16x24": 2}, str(stats)


def test_a_model_that_leaves_out_transformer_options_is_dense_and_says_so():
    model = patcher(wan_from_sound(skip=False))
    if hands_its_calls_on(model.model.diffusion_model):
        pytest.skip("this ComfyUI hands them on")
    kind = KINDS["wan from sound"]
    fast = comfyui.apply(model, sparsity=0.7, min_tokens=0)
    assert torch.equal(forward(fast, kind.arguments()), forward(model, kind.arguments()))
    (reason,) = comfyui.stats(fast).reasons
    assert "leaves out transformer_options" in reason and comfyui.stats(fast).sparse_calls == 0


def test_a_window_of_frames_is_a_clip_of_its_own(sample):
    """Context windows cut the video into parts that overlap; the transformer sees one at a time."""
    import tiny
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode

    row = tiny.MODELS["wan"]
    fast = comfyui.apply(row.make(), sparsity=0.7, min_tokens=0)
    windows = dict(context_length=3, context_overlap=1, context_schedule="standard_static", context_stride=1, dim=2)
    optional = (
        {"freenoise": False} if "freenoise" in inspect.signature(ContextWindowsManualNode.execute).parameters else {}
    )
    (windowed,) = ContextWindowsManualNode.execute(
        fast, **windows, closed_loop=False, fuse_method="pyramid", **optional
    ).result
    sample(windowed, row, steps=1)
    stats = comfyui.stats(windowed)
    assert stats.dense_calls == 0 and set(stats.layouts) == {"grid 3x16x24"}, str(stats)
