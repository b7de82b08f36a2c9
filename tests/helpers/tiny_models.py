"""Tiny diffusers models with random weights, one function a family: they run offline on a CPU in milliseconds.

A function returns (model, keyword arguments of its forward, `Expected`) and gives the same three each time. `ALL` names
the families; `DENSE` names forwards of the same classes that must not be made sparse, though their numbers may fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from helpers import needs_diffusers

diffusers = needs_diffusers()

randn = torch.randn


@dataclass(frozen=True)
class Expected:
    """What the self-attention of one forward looks like.

    `prefix` and `suffix` count the tokens before and after the grid's: one value for each kind of call, in the order of
    the first calls (Mochi: one a sample, SD3: `attn` and `attn2`, Z-Image: refiner and layers).
    """

    grid: tuple[int, int, int]
    prefix: tuple[int, ...] = (0,)
    suffix: tuple[int, ...] = (0,)
    calls: int = 2


Tiny = tuple[torch.nn.Module, dict[str, Any], Expected]
ALL: dict[str, Callable[..., Tiny]] = {}
DENSE: dict[str, Callable[..., Tiny]] = {}


def seeded(function: Callable[..., Tiny]) -> Callable[..., Tiny]:
    """Give a function random numbers of its own."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Tiny:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return function(*args, **options)

    return call


def family(function: Callable[..., Tiny]) -> Callable[..., Tiny]:
    ALL[function.__name__] = seeded(function)
    return ALL[function.__name__]


def dense(function: Callable[..., Tiny]) -> Callable[..., Tiny]:
    DENSE[function.__name__] = seeded(function)
    return DENSE[function.__name__]


def build(name: str, **config: Any) -> torch.nn.Module:
    """A model whose matrices are all random: several are made as zeros (gates) or not initialised at all (routers)."""
    model = getattr(diffusers, name)(**config).eval()
    for key, parameter in model.named_parameters():
        router = key.endswith("gate.weight")
        if router or (parameter.ndim > 1 and not parameter.any()):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def image_ids(h: int, w: int, image: int = 0, axes: int = 3) -> torch.Tensor:
    """Flux position ids of one image: (number of the image, row, column, 0 ...)."""
    ids = torch.zeros(h, w, axes)
    ids[..., 0] = image
    ids[..., 1] = torch.arange(h)[:, None]
    ids[..., 2] = torch.arange(w)
    return ids.flatten(0, 1)


# Wan and its relatives

WAN = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    rope_max_seq_len=32,
)


@family
def wan(t: int = 4, h: int = 8, w: int = 12, batch: int = 1, **config: Any) -> Tiny:
    model = build("WanTransformer3DModel", **{**WAN, **config})
    inputs = dict(
        hidden_states=randn(batch, 4, t, h, w),
        timestep=torch.full((batch,), 500),
        encoder_hidden_states=randn(batch, 12, 16),
    )
    return model, inputs, Expected((t, h // 2, w // 2), calls=model.config.num_layers)


@family
def wan_i2v() -> Tiny:
    """Wan 2.1 with an image: its cross-attention wants exactly 512 text tokens."""
    model = build("WanTransformer3DModel", **{**WAN, "in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 24})
    inputs = dict(
        hidden_states=randn(1, 12, 3, 8, 12),
        timestep=torch.tensor([500]),
        encoder_hidden_states=randn(1, 512, 16),
        encoder_hidden_states_image=randn(1, 7, 16),
    )
    return model, inputs, Expected((3, 4, 6))


@family
def wan_ti2v() -> Tiny:
    """Wan 2.2 5B: a timestep for each token."""
    model = build("WanTransformer3DModel", **WAN)
    inputs = dict(
        hidden_states=randn(1, 4, 3, 8, 12),
        timestep=torch.full((1, 3 * 4 * 6), 500),
        encoder_hidden_states=randn(1, 12, 16),
    )
    return model, inputs, Expected((3, 4, 6))


@family
def wan_vace() -> Tiny:
    model = build("WanVACETransformer3DModel", **WAN, vace_layers=[0], vace_in_channels=6)
    inputs = dict(
        hidden_states=randn(1, 4, 3, 8, 12),
        timestep=torch.tensor([500]),
        encoder_hidden_states=randn(1, 12, 16),
        control_hidden_states=randn(1, 6, 3, 8, 12),
    )
    return model, inputs, Expected((3, 4, 6), calls=3)


@family
def wan_animate() -> Tiny:
    """The reference frame comes first and counts in t."""
    config = dict(
        in_channels=12,
        latent_channels=4,
        image_dim=16,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 4, "8": 4},
        motion_encoder_size=8,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    model = build("WanAnimateTransformer3DModel", **{**WAN, **config})
    inputs = dict(
        hidden_states=randn(1, 12, 4, 8, 12),
        timestep=torch.tensor([500]),
        encoder_hidden_states=randn(1, 512, 16),
        encoder_hidden_states_image=randn(1, 7, 16),
        pose_hidden_states=randn(1, 4, 3, 8, 12),
        face_pixel_values=randn(1, 3, 9, 8, 8),
    )
    return model, inputs, Expected((4, 4, 6))


@family
def wan_animate_2() -> Tiny:
    """The pass over the reference: the other one insists on the flex backend with a BlockMask."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    model = build(
        "WanAnimate2Transformer3DModel",
        text_len=12,
        in_dim=8,
        dim=24,
        ffn_dim=32,
        freq_dim=16,
        text_dim=16,
        out_dim=4,
        num_heads=2,
        num_layers=2,
        use_img_emb=False,
    )
    inputs = dict(
        hidden_states=[randn(4, 3, 8, 12)],
        timestep=torch.tensor([500]),
        encoder_hidden_states=[randn(9, 16)],
        condition_latents=[randn(4, 3, 8, 12)],
        kv_cache=WanAnimate2KVCache(2),
        kv_cache_mode="extract",
        seq_len=3 * 4 * 6,
        offset_grid_sizes=torch.tensor([[3, 4, 6]]),
    )
    return model, inputs, Expected((3, 4, 6))


@family
def skyreels_v2(frames_per_block: int = 1) -> Tiny:
    model = build("SkyReelsV2Transformer3DModel", **WAN, num_frame_per_block=frames_per_block)
    inputs = dict(
        hidden_states=randn(1, 4, 4, 8, 12),
        timestep=torch.tensor([500]),
        encoder_hidden_states=randn(1, 12, 16),
    )
    return model, inputs, Expected((4, 4, 6))


@family
def skyreels_v2_causal() -> Tiny:
    """Frames in groups of two, and a causal mask of (1, 1, S, S)."""
    return skyreels_v2(frames_per_block=2)


# HunyuanVideo, HunyuanImage


@family
def hunyuan() -> Tiny:
    model = build(
        "HunyuanVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    mask = torch.ones(2, 12)
    mask[1, 9:] = 0
    inputs = dict(
        hidden_states=randn(2, 4, 3, 8, 12),
        timestep=torch.full((2,), 500.0),
        encoder_hidden_states=randn(2, 12, 16),
        pooled_projections=randn(2, 8),
        encoder_attention_mask=mask,
        guidance=torch.full((2,), 6000.0),
    )
    return model, inputs, Expected((3, 4, 6), suffix=(12,))


@family
def hunyuan15(image: bool = False) -> Tiny:
    """Text to video: image embeddings of zeros still take three tokens, masked ones."""
    model = build(
        "HunyuanVideo15Transformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="i2v" if image else "t2v",
    )
    embeds = randn(2, 3, 12) if image else torch.zeros(2, 3, 12)
    inputs = dict(
        hidden_states=randn(2, 4, 3, 4, 6),
        timestep=torch.ones(2),
        encoder_hidden_states=randn(2, 6, 16),
        encoder_hidden_states_2=randn(2, 4, 8),
        encoder_attention_mask=torch.tensor([[1.0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]),
        encoder_attention_mask_2=torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]),
        image_embeds=embeds,
    )
    return model, inputs, Expected((3, 4, 6), suffix=(3 + 4 + 6,))


@family
def hunyuan15_i2v() -> Tiny:
    """Image to video: the image's tokens are seen, and come first after the video."""
    return hunyuan15(image=True)


def _hunyuan_image(shape: tuple[int, ...], patch: tuple[int, ...], axes: tuple[int, ...]) -> Tiny:
    model = build(
        "HunyuanImageTransformer2DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=sum(axes),
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=patch,
        text_embed_dim=16,
        text_embed_2_dim=8,
        rope_axes_dim=axes,
    )
    inputs = dict(
        hidden_states=randn(2, 4, *shape),
        timestep=torch.ones(2),
        encoder_hidden_states=randn(2, 6, 16),
        encoder_hidden_states_2=randn(2, 4, 8),
        encoder_attention_mask=torch.tensor([[1.0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]),
        encoder_attention_mask_2=torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]),
    )
    grid = (1, *(size // p for size, p in zip(shape, patch, strict=True)))
    return model, inputs, Expected(grid[-3:], suffix=(6 + 4,))


@family
def hunyuan_image() -> Tiny:
    return _hunyuan_image((8, 12), (2, 2), (4, 4))


@family
def hunyuan_image_3d() -> Tiny:
    """The refiner's kind: three sizes in the patch, latents with frames."""
    return _hunyuan_image((3, 8, 12), (1, 2, 2), (4, 2, 2))


# Other video models

COGVIDEOX = dict(
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=2,
    text_embed_dim=8,
    num_layers=2,
    sample_width=12,
    sample_height=8,
    sample_frames=9,
    patch_size=2,
    temporal_compression_ratio=4,
    max_text_seq_length=8,
)


@family
def cogvideox() -> Tiny:
    model = build("CogVideoXTransformer3DModel", **COGVIDEOX)
    inputs = dict(
        hidden_states=randn(2, 3, 4, 8, 12),
        encoder_hidden_states=randn(2, 8, 8),
        timestep=torch.full((2,), 500),
    )
    return model, inputs, Expected((3, 4, 6), prefix=(8,))


@family
def cogvideox15() -> Tiny:
    """Two frames a patch. An odd number of frames is refused by the model's own patching."""
    model = build(
        "CogVideoXTransformer3DModel",
        **COGVIDEOX,
        patch_size_t=2,
        use_rotary_positional_embeddings=True,
        patch_bias=False,
    )
    angle = randn(3 * 4 * 6, 8)
    inputs = dict(
        hidden_states=randn(2, 6, 4, 8, 12),
        encoder_hidden_states=randn(2, 8, 8),
        timestep=torch.full((2,), 500),
        image_rotary_emb=(angle.cos(), angle.sin()),
    )
    return model, inputs, Expected((3, 4, 6), prefix=(8,))


@family
def ltx() -> Tiny:
    model = build(
        "LTXVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=16,
    )
    inputs = dict(
        hidden_states=randn(2, 72, 4),
        encoder_hidden_states=randn(2, 16, 16),
        timestep=torch.full((2,), 500),
        encoder_attention_mask=torch.ones(2, 16, dtype=torch.bool),
        num_frames=3,
        height=4,
        width=6,
    )
    return model, inputs, Expected((3, 4, 6))


@family
def ltx2() -> Tiny:
    """Video with sound: eight audio tokens in a stream of their own."""
    model = build(
        "LTX2VideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=16,
        rope_double_precision=False,
    )
    inputs = dict(
        hidden_states=randn(2, 72, 4),
        audio_hidden_states=randn(2, 8, 4),
        encoder_hidden_states=randn(2, 16, 16),
        audio_encoder_hidden_states=randn(2, 16, 16),
        timestep=torch.full((2,), 500.0),
        encoder_attention_mask=torch.ones(2, 16),
        audio_encoder_attention_mask=torch.ones(2, 16),
        num_frames=3,
        height=4,
        width=6,
        audio_num_frames=8,
    )
    return model, inputs, Expected((3, 4, 6))


@family
def ltx2_keyframes() -> Tiny:
    """Keyframes and references are appended to the video's tokens, and only the coordinates tell of them."""
    model, inputs, _ = ltx2()
    video = model.rope.prepare_video_coords(2, 3, 4, 6, device=torch.device("cpu"))
    extra = model.rope.prepare_video_coords(2, 1, 4, 6, device=torch.device("cpu"))
    inputs["hidden_states"] = randn(2, 72 + 24, 4)
    inputs["video_coords"] = torch.cat([video, extra], dim=2)
    return model, inputs, Expected((3, 4, 6), suffix=(24,))


@family
def mochi() -> Tiny:
    """One call a sample, without the padding of its text."""
    model = build(
        "MochiTransformer3DModel",
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    inputs = dict(
        hidden_states=randn(2, 4, 3, 8, 12),
        encoder_hidden_states=randn(2, 16, 16),
        timestep=torch.full((2,), 500),
        encoder_attention_mask=mask,
    )
    return model, inputs, Expected((3, 4, 6), prefix=(0, 0), suffix=(16, 10), calls=4)


@family
def cosmos() -> Tiny:
    model = build(
        "CosmosTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,  # with it the model needs torchvision
        extra_pos_embed_type="learnable",
    )
    inputs = dict(
        hidden_states=randn(1, 4, 3, 8, 12),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=randn(1, 12, 16),
        fps=30,
    )
    return model, inputs, Expected((3, 4, 6))


@family
def kandinsky5() -> Tiny:
    """Channels come last, and the rotation of q and k rounds to bfloat16."""
    model = build(
        "Kandinsky5Transformer3DModel",
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
    )
    inputs = dict(
        hidden_states=randn(1, 3, 8, 12, 4),
        encoder_hidden_states=randn(1, 12, 16),
        timestep=torch.tensor([500.0]),
        pooled_projections=randn(1, 8),
        visual_rope_pos=(torch.arange(3), torch.arange(4), torch.arange(6)),
        text_rope_pos=torch.arange(12),
    )
    return model, inputs, Expected((3, 4, 6))


@family
def kandinsky6() -> Tiny:
    """Video with sound, and a reference frame at the end that counts in t."""
    model = build(
        "Kandinsky6Transformer3DModel",
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
        in_audio_dim=4,
        out_audio_dim=4,
        text_token_padding=True,
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
    )
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 9:] = False
    inputs = dict(
        hidden_states=randn(1, 4, 8, 12, 2 * 4 + 1),
        encoder_hidden_states=randn(1, 12, 16),
        pooled_projections=randn(1, 8),
        timestep=torch.tensor([500.0]),
        audio_hidden_states=randn(1, 10, 4),
        visual_rope_pos=(torch.tensor([0, 1, 2, 0]), torch.arange(4), torch.arange(6)),
        encoder_attention_mask=mask,
    )
    return model, inputs, Expected((4, 4, 6))


def _spread(size: int, area: int) -> torch.Tensor:
    """MiniMax-H3's coordinates of an axis: centred, scaled by the picture's area, not whole numbers."""
    ratio = size / math.sqrt(area)
    start = (1 - ratio) / 2
    return 32 * (start + torch.arange(size, dtype=torch.float64) * ratio / size)


def _frames(times: list[float], h: int, w: int) -> torch.Tensor:
    """MiniMax-H3's position ids of the frames of one picture or video."""
    grids = torch.meshgrid(
        torch.tensor(times, dtype=torch.float64),
        _spread(h, h * w),
        _spread(w, h * w),
        indexing="ij",
    )
    return torch.stack(grids, dim=-1).reshape(-1, 3)


def _minimax_h3(text: int, condition: torch.Tensor, times: list[float], h: int, w: int) -> Tiny:
    """A packed sequence: text, condition, audio, video."""
    model = build(
        "MiniMaxH3Transformer3DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=4,
        text_dim=16,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    audio = torch.zeros(6, 3, dtype=torch.float64)
    audio[:, 0] = times[0] + torch.arange(3).repeat(2)
    audio[:, 2] = _spread(w, h * w)[[0, -1]].repeat_interleave(3)
    words = torch.zeros(text, 3, dtype=torch.float64)
    words[:, 0] = torch.arange(text)
    video = _frames(times, h, w)
    parts = [words, condition, audio, video]
    tags = torch.cat([torch.full((len(part),), tag) for part, tag in zip(parts, (1, 0, 2, 0), strict=True)])
    rows = torch.arange(len(tags)).split([len(part) for part in parts])
    noise = torch.zeros(len(tags), dtype=torch.long)
    noise[rows[1]] = 1
    inputs = dict(
        hidden_states=randn(1, len(condition) + len(video), 4 * 2 * 2),
        audio_hidden_states=randn(1, len(audio), 4),
        encoder_hidden_states=randn(1, text, 16),
        timestep=torch.tensor([0.5, 0.0]),
        timestep_indices=noise,
        token_tags=tags,
        position_ids=torch.cat(parts),
        video_indices=torch.cat([rows[1], rows[3]]),
        audio_indices=rows[2],
        text_indices=rows[0],
    )
    return model, inputs, Expected((len(times), h, w), prefix=(len(tags) - len(video),))


@family
def minimax_h3() -> Tiny:
    """A keyframe stands before the audio, at the same time and on the same rows and columns as the first frame."""
    start = 5.0
    return _minimax_h3(5, _frames([start], 4, 6), [start, start + 5 / 3, start + 25 / 3], 4, 6)


@family
def minimax_h3_references() -> Tiny:
    """A reference image of another size."""
    start = 6.0
    return _minimax_h3(5, _frames([5.0], 5, 3), [start, start + 5 / 3, start + 25 / 3], 4, 6)


# Image models

FLUX = dict(
    patch_size=1,
    in_channels=4,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
)


@family
def flux(h: int = 4, w: int = 6, text: int = 48, **config: Any) -> Tiny:
    options = {**FLUX, "axes_dims_rope": (4, 4, 8), "pooled_projection_dim": 32, **config}
    model = build("FluxTransformer2DModel", **options)
    inputs = dict(
        hidden_states=randn(1, h * w, 4),
        encoder_hidden_states=randn(1, text, 32),
        pooled_projections=randn(1, 32),
        img_ids=image_ids(h, w),
        txt_ids=torch.zeros(text, 3),
        timestep=torch.tensor([1.0]),
    )
    return model, inputs, Expected((1, h, w), prefix=(text,))


@family
def flux_kontext() -> Tiny:
    """A reference image of another size follows the picture."""
    model, inputs, _ = flux()
    inputs["hidden_states"] = randn(1, 24 + 20, 4)
    inputs["img_ids"] = torch.cat([image_ids(4, 6), image_ids(5, 4, image=1)])
    return model, inputs, Expected((1, 4, 6), prefix=(48,), suffix=(20,))


@family
def chroma() -> Tiny:
    """A mask of (B, 1, S, S), in floats that are added, as the pipeline makes it."""
    model = build(
        "ChromaTransformer2DModel",
        **FLUX,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    mask = torch.ones(1, 12 + 24)
    mask[:, 9:12] = 0
    inputs = dict(
        hidden_states=randn(1, 24, 4),
        encoder_hidden_states=randn(1, 12, 32),
        img_ids=image_ids(4, 6),
        txt_ids=torch.zeros(12, 3),
        timestep=torch.tensor([1.0]),
        attention_mask=mask,
    )
    return model, inputs, Expected((1, 4, 6), prefix=(12,))


@family
def flux2(heads: int = 2) -> Tiny:
    config = {**FLUX, "num_attention_heads": heads, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16}
    model = build("Flux2Transformer2DModel", **config)
    words = torch.zeros(12, 4)
    words[:, 3] = torch.arange(12)
    inputs = dict(
        hidden_states=randn(1, 24, 4),
        encoder_hidden_states=randn(1, 12, 32),
        img_ids=image_ids(4, 6, axes=4)[None],
        txt_ids=words[None],
        timestep=torch.tensor([1.0]),
        guidance=torch.tensor([4.0]),
    )
    return model, inputs, Expected((1, 4, 6), prefix=(12,))


@family
def flux2_references() -> Tiny:
    """Two reference images follow the picture; the first is as large as the picture."""
    model, inputs, _ = flux2()
    ids = [image_ids(4, 6, 0, 4), image_ids(4, 6, 10, 4), image_ids(5, 3, 20, 4)]
    inputs["hidden_states"] = randn(1, 24 + 24 + 15, 4)
    inputs["img_ids"] = torch.cat(ids)[None]
    return model, inputs, Expected((1, 4, 6), prefix=(12,), suffix=(24 + 15,))


QWEN = dict(
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=16,
    axes_dims_rope=(8, 4, 4),
)


@family
def qwen() -> Tiny:
    model = build("QwenImageTransformer2DModel", **QWEN)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = dict(
        hidden_states=randn(2, 24, 16),
        encoder_hidden_states=randn(2, 8, 16),
        encoder_hidden_states_mask=mask,
        timestep=torch.ones(2),
        img_shapes=[[(1, 4, 6)], [(1, 4, 6)]],
    )
    return model, inputs, Expected((1, 4, 6), prefix=(8,))


@family
def qwen_edit() -> Tiny:
    """Two reference images follow the picture."""
    model = build("QwenImageTransformer2DModel", **QWEN)
    inputs = dict(
        hidden_states=randn(1, 24 + 20 + 15, 16),
        encoder_hidden_states=randn(1, 8, 16),
        encoder_hidden_states_mask=None,
        timestep=torch.ones(1),
        img_shapes=[[(1, 4, 6), (1, 5, 4), (1, 3, 5)]],
    )
    return model, inputs, Expected((1, 4, 6), prefix=(8,), suffix=(20 + 15,))


@family
def sd3() -> Tiny:
    """Three blocks, the first of them with a second attention over the image alone."""
    model = build(
        "SD3Transformer2DModel",
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = dict(
        hidden_states=randn(2, 4, 8, 12),
        encoder_hidden_states=randn(2, 15, 32),
        pooled_projections=randn(2, 64),
        timestep=torch.full((2,), 500),
    )
    return model, inputs, Expected((1, 4, 6), prefix=(0, 0), suffix=(15, 0), calls=4)


def _hidream(h: int, w: int, padding: int) -> Tiny:
    model = build(
        "HiDreamImageTransformer2DModel",
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[16, 12],
        text_emb_dim=8,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    inputs = dict(
        hidden_states=randn(2, 4, 2 * h, 2 * w),
        timesteps=torch.full((2,), 500),
        encoder_hidden_states_t5=randn(2, 5, 16),
        encoder_hidden_states_llama3=randn(2, 2, 7, 12),
        pooled_embeds=randn(2, 8),
    )
    return model, inputs, Expected((1, h, w), suffix=(padding + 5 + 7 + 7,))


@family
def hidream() -> Tiny:
    """A square picture has no padding."""
    return _hidream(4, 4, padding=0)


@family
def hidream_wide() -> Tiny:
    """Any other is padded to the largest number of tokens, 64 here, before the text."""
    return _hidream(4, 6, padding=64 - 24)


Z_IMAGE = dict(
    in_channels=4,
    dim=32,
    n_layers=2,
    n_refiner_layers=1,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=16,
    axes_dims=[8, 4, 4],
    axes_lens=[128, 32, 32],
)


def _z_image(texts: list[int]) -> Tiny:
    """Picture and text are each padded to a multiple of 32; the refiner sees the picture alone."""
    model = build("ZImageTransformer2DModel", **Z_IMAGE)
    inputs = dict(
        x=[randn(4, 1, 8, 12) for _ in texts],
        t=torch.full((len(texts),), 0.5),
        cap_feats=[randn(length, 16) for length in texts],
    )
    padding = 32 - 24
    text = 32 * math.ceil(max(texts) / 32)
    return model, inputs, Expected((1, 4, 6), prefix=(0, 0), suffix=(padding, padding + text), calls=3)


@family
def z_image() -> Tiny:
    return _z_image([20])


@family
def z_image_batch() -> Tiny:
    """Texts of different lengths: a mask of (B, 1, 1, S) in the layers."""
    return _z_image([20, 40])


# Forwards that must stay dense: the grid does not lie in the sequence in one piece, row by row. There is no prefix to
# expect, and no suffix.


@dense
def kandinsky5_nabla() -> Tiny:
    """Tokens in tiles of 8 x 8, a BlockMask, the flex backend: S is t * h * w, and yet the rows are not in order."""
    model, inputs, _ = kandinsky5()
    for block in model.visual_transformer_blocks:
        block.self_attention.processor._attention_backend = "flex"
    inputs["hidden_states"] = randn(1, 2, 16, 32, 4)
    inputs["visual_rope_pos"] = (torch.arange(2), torch.arange(8), torch.arange(16))
    inputs["sparse_params"] = dict(sta_mask=torch.eye(4, dtype=torch.bool)[None, None], P=0.8, to_fractal=True)
    return model, inputs, Expected((2, 8, 16), (), ())


@dense
def flux2_kv() -> Tiny:
    """References before the picture, q shorter than k in one call, and in the other the references alone.

    Of the 39 tokens of that call 12 + 24 could pass for the text and the first image of `img_ids`.
    """
    from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor

    model, inputs, _ = flux2_references()
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    inputs["hidden_states"] = inputs["hidden_states"].roll(-24, dims=1)
    inputs["img_ids"] = inputs["img_ids"].roll(-24, dims=1)
    inputs["kv_cache_mode"] = "extract"
    inputs["num_ref_tokens"] = 24 + 15
    return model, inputs, Expected((1, 4, 6), (), (), calls=4)


@dense
def ltx_condition() -> Tiny:
    """Only coordinates, no sizes; the tokens of a condition come first."""
    model, inputs, _ = ltx()
    for name in ("num_frames", "height", "width"):
        del inputs[name]
    inputs["hidden_states"] = randn(2, 24 + 72, 4)
    grids = [torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij") for sizes in ((1, 4, 6), (3, 4, 6))]
    coords = torch.cat([torch.stack(grid).flatten(1) for grid in grids], dim=1)
    inputs["video_coords"] = coords.float().expand(2, -1, -1)
    return model, inputs, Expected((3, 4, 6), (), ())


@dense
def z_image_omni() -> Tiny:
    """Lists of lists: texts, then images each with its padding and the picture last, then features of images."""
    model = build("ZImageTransformer2DModel", **Z_IMAGE, siglip_feat_dim=8)
    inputs = dict(
        x=[[randn(4, 1, 6, 4), randn(4, 1, 8, 12)]],
        t=torch.tensor([0.5]),
        cap_feats=[[randn(5, 16), randn(5, 16), randn(5, 16)]],
        siglip_feats=[[randn(2, 2, 8), None]],
        image_noise_mask=[[0, 1]],
    )
    return model, inputs, Expected((1, 4, 6), (), (), calls=3)
