"""Small random models of ComfyUI's own classes, with latents, text and the number of their self-attention layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import comfy.model_patcher
import comfy.supported_models as supported
import torch
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

TEXT = 64  # width of text embeddings
CPU = torch.device("cpu")


def known(parameters: type, config: dict[str, Any]) -> dict[str, Any]:
    """Versions differ in the parameters of a model; `image_model` is for the choice of its class."""
    names = {field.name for field in fields(parameters)} | {"image_model"}
    return {name: value for name, value in config.items() if name in names}


def patcher(kind: Any, **config: Any) -> Any:
    """A MODEL whose weights are small random numbers."""
    settings = kind({**config, "dtype": torch.float32})
    settings.set_inference_dtype(torch.float32, None)
    torch.manual_seed(0)
    model = settings.get_model({}, "", device=CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return comfy.model_patcher.ModelPatcher(model, load_device=CPU, offload_device=CPU)


@dataclass(frozen=True)
class Tiny:
    """A model, what it is sampled with, and what has to be found."""

    make: Callable[[], Any]
    latent: tuple[int, ...]
    grid: tuple[int, int, int]
    layers: int
    pooled: int | None = None  # width of the pooled text
    guided: bool = True  # with and without the prompt
    text: int = 7
    conditions: dict[str, Any] = field(default_factory=dict)

    def conditioning(self, seed: int = 1) -> list[Any]:
        torch.manual_seed(seed)
        more = dict(self.conditions)
        if self.pooled:
            more["pooled_output"] = torch.randn(1, self.pooled)
        return [[torch.randn(1, self.text, TEXT), more]]


def wan(**changes: Any) -> Any:
    config = dict(
        image_model="wan2.1", model_type="t2v", dim=128, num_heads=2, ffn_dim=128, num_layers=2, text_dim=TEXT,
        freq_dim=32, in_dim=16, out_dim=16, patch_size=(1, 2, 2),
    )  # fmt: skip
    return patcher(changes.pop("kind", supported.WAN21_T2V), **{**config, **changes})


def vace() -> Any:
    return wan(kind=supported.WAN21_Vace, model_type="vace", vace_layers=1, vace_in_dim=96)


def flux() -> Any:
    config = dict(
        image_model="flux", guidance_embed=True, in_channels=16, out_channels=16, vec_in_dim=32,
        context_in_dim=TEXT, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=1, depth_single_blocks=2,
        axes_dim=[16, 24, 24], theta=10000, patch_size=2, qkv_bias=True, txt_ids_dims=[],
    )  # fmt: skip
    return patcher(supported.Flux, **known(FluxParams, config))


def qwen() -> Any:
    return patcher(
        supported.QwenImage, image_model="qwen_image", in_channels=64, out_channels=16, num_layers=2,
        attention_head_dim=64, num_attention_heads=2, joint_attention_dim=TEXT, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip


def hunyuan() -> Any:
    config = dict(
        image_model="hunyuan_video", in_channels=16, out_channels=16, patch_size=[1, 2, 2],
        vec_in_dim=32, context_in_dim=TEXT, hidden_size=128, mlp_ratio=2.0, num_heads=2, depth=1,
        depth_single_blocks=2, axes_dim=[16, 24, 24], theta=256, qkv_bias=True, guidance_embed=True, byt5=False,
        use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False, meanflow=False,
    )  # fmt: skip
    return patcher(supported.HunyuanVideo, **known(HunyuanVideoParams, config))


def z_image() -> Any:
    return patcher(
        supported.ZImage if hasattr(supported, "ZImage") else supported.Lumina2, image_model="lumina2", patch_size=2,
        in_channels=16, dim=256, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, axes_dims=[16, 24, 24],
        axes_lens=[1536, 512, 512], cap_feat_dim=TEXT, qk_norm=True, rope_theta=256.0, ffn_dim_multiplier=2.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
    )  # fmt: skip


def ltx() -> Any:
    return patcher(
        supported.LTXV, image_model="ltxv", in_channels=128, cross_attention_dim=128, attention_head_dim=64,
        num_attention_heads=2, caption_channels=TEXT, num_layers=2,
    )  # fmt: skip


VIDEO = (1, 16, 5, 32, 48)  # 5 x 16 x 24 = 1920 tokens
MODELS: dict[str, Tiny] = {
    "wan": Tiny(wan, VIDEO, (5, 16, 24), 2),
    "flux": Tiny(flux, (1, 16, 64, 96), (1, 32, 48), 3, pooled=32, guided=False),
    "qwen": Tiny(qwen, (1, 16, 1, 64, 96), (1, 32, 48), 2),
    "hunyuan": Tiny(hunyuan, VIDEO, (5, 16, 24), 3, pooled=32, guided=False),
    "z_image": Tiny(z_image, (1, 16, 62, 94), (1, 31, 47), 3),
    "ltx": Tiny(
        ltx, (1, 128, 5, 16, 24), (5, 16, 24), 2, conditions={"attention_mask": torch.ones(1, 7, dtype=torch.long)}
    ),
}
