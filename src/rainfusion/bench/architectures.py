"""The diffusers transformers that `rainfusion bench --model` times: each as its repository configures it, with random
weights that are made on the device, and the call that its pipeline makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

_STRIDE = 16  # pixels that a token covers in each direction: an 8x VAE and patches of 2, or a 16x VAE
_FRAME_STRIDE = 4  # frames that a latent frame covers, after the first, which stands alone


class Size(NamedTuple):
    """Pixels and frames of a clip, or of an image where there is one frame."""

    height: int
    width: int
    frames: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens in time, height and width: 720 x 1280 pixels and 81 frames give (21, 45, 80)."""
        return (self.frames - 1) // _FRAME_STRIDE + 1, self.height // _STRIDE, self.width // _STRIDE

    def __str__(self) -> str:
        return "x".join(map(str, self if self.frames > 1 else self[:2]))


Config = Mapping[str, Any]
Inputs = Callable[[Config, Size, torch.device, torch.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A transformer as its repository configures it, and the call that its pipeline makes."""

    name: str
    class_name: str  # the name of its class in diffusers
    config: Config
    stacks: tuple[str, ...]  # the entries of the config that count blocks
    billions: float  # how many billions of parameters it has
    inputs: Inputs
    size: Size
    text_tokens: int  # text tokens that take part in self-attention
    forwards: int  # forwards in a denoising step: two with classifier-free guidance
    steps: int  # denoising steps of a whole run, as its repository has it
    sparsity: float
    note: str = ""

    def config_of(self, layers: int | None) -> dict[str, Any]:
        """The configuration with at most `layers` blocks of each kind; None keeps all of them."""
        fewer = {} if layers is None else {key: min(layers, self.config[key]) for key in self.stacks}
        return {**self.config, **fewer}

    def layers(self, layers: int | None = None) -> int:
        """How many blocks there are, with at most `layers` of each kind."""
        return sum(self.config_of(layers)[key] for key in self.stacks)

    def tokens(self, size: Size) -> int:
        """The length of self-attention, text included."""
        return self.text_tokens + math.prod(size.grid)

    def check(self, size: Size, layers: int | None) -> None:
        """Raises ValueError, in the words of the command line, for a size or a number of layers it cannot have."""
        for name, pixels in (("--height", size.height), ("--width", size.width)):
            if pixels < _STRIDE or pixels % _STRIDE:
                near = max(_STRIDE, round(pixels / _STRIDE) * _STRIDE)
                raise ValueError(f"{name} must be a multiple of {_STRIDE}, got {pixels}; try {near}")
        if self.size.frames == 1 and size.frames != 1:
            raise ValueError(f"--frames must be 1 for {self.name}, which makes images, got {size.frames}")
        if size.frames < 1 or (size.frames - 1) % _FRAME_STRIDE:
            near = max(0, round((size.frames - 1) / _FRAME_STRIDE)) * _FRAME_STRIDE + 1
            raise ValueError(
                f"--frames must be 1 more than a multiple of {_FRAME_STRIDE}, got {size.frames}; try {near}"
            )
        most = max(self.config[key] for key in self.stacks)
        if layers is not None and not 1 <= layers <= most:
            raise ValueError(f"--layers must be in [1, {most}] for {self.name}, got {layers}")


def _wan_inputs(config: Config, size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The call of Wan. Its text of 512 tokens, padded with zeros, is only used by cross-attention."""
    like: Any = dict(device=device, dtype=dtype)
    t, h, w = size.grid
    _, patch_h, patch_w = config["patch_size"]
    return dict(
        hidden_states=torch.randn(1, config["in_channels"], t, patch_h * h, patch_w * w, **like),
        timestep=torch.full((1,), 500, device=device),
        encoder_hidden_states=torch.randn(1, 512, config["text_dim"], **like),
    )


def _qwen_inputs(config: Config, size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The call of Qwen-Image. A single prompt has no padding, so that the pipeline passes no mask."""
    like: Any = dict(device=device, dtype=dtype)
    return dict(
        hidden_states=torch.randn(1, math.prod(size.grid), config["in_channels"], **like),
        timestep=torch.full((1,), 0.5, **like),
        encoder_hidden_states=torch.randn(1, 256, config["joint_attention_dim"], **like),
        encoder_hidden_states_mask=None,
        img_shapes=[[size.grid]],
    )


def _flux_inputs(config: Config, size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The call of FLUX.1-dev, with the places of its tokens."""
    like: Any = dict(device=device, dtype=dtype)
    _, h, w = size.grid
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    img_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)  # [h * w, 3]
    return dict(
        hidden_states=torch.randn(1, h * w, config["in_channels"], **like),
        timestep=torch.full((1,), 0.5, **like),
        guidance=torch.full((1,), 3.5, device=device, dtype=torch.float32),
        encoder_hidden_states=torch.randn(1, 512, config["joint_attention_dim"], **like),
        pooled_projections=torch.randn(1, config["pooled_projection_dim"], **like),
        txt_ids=torch.zeros(512, 3, **like),
        img_ids=img_ids.to(**like),
    )


def _hunyuan15_inputs(config: Config, size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The call of HunyuanVideo 1.5 for a video from text alone.

    Of 1000 prompt tokens a quarter is used; those of glyphs to draw and of an image are all padding.
    """
    like: Any = dict(device=device, dtype=dtype)
    latents = config["out_channels"]
    video = torch.randn(1, config["in_channels"], *size.grid, **like)
    video[:, latents:] = 0  # these channels are for a given first frame and its mask, and there is none
    prompt_mask = torch.zeros(1, 1000, **like)
    prompt_mask[:, :256] = 1
    return dict(
        hidden_states=video,
        timestep=torch.full((1,), 500.0, **like),
        encoder_hidden_states=torch.randn(1, 1000, config["text_embed_dim"], **like),
        encoder_attention_mask=prompt_mask,
        encoder_hidden_states_2=torch.zeros(1, 256, config["text_embed_2_dim"], **like),
        encoder_attention_mask_2=torch.zeros(1, 256, **like),
        image_embeds=torch.zeros(1, 729, config["image_embed_dim"], **like),
    )


_WAN = dict(
    patch_size=(1, 2, 2),
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    eps=1e-6,
    image_dim=None,
    added_kv_proj_dim=None,
    rope_max_seq_len=1024,
)

MODELS = {
    model.name: model
    for model in (
        Model(
            name="wan2.2-a14b",
            class_name="WanTransformer3DModel",
            config=dict(_WAN, num_attention_heads=40, ffn_dim=13824, num_layers=40),
            stacks=("num_layers",),
            billions=14.3,
            inputs=_wan_inputs,
            size=Size(720, 1280, 81),
            text_tokens=0,
            forwards=2,
            steps=40,
            sparsity=0.8,
            note="one of its two experts: a forward runs one",
        ),
        Model(
            name="wan2.1-1.3b",
            class_name="WanTransformer3DModel",
            config=dict(_WAN, num_attention_heads=12, ffn_dim=8960, num_layers=30),
            stacks=("num_layers",),
            billions=1.4,
            inputs=_wan_inputs,
            size=Size(480, 832, 81),
            text_tokens=0,
            forwards=2,
            steps=50,
            sparsity=0.8,
        ),
        Model(
            name="hunyuanvideo-1.5",
            class_name="HunyuanVideo15Transformer3DModel",
            config=dict(
                in_channels=65,
                out_channels=32,
                num_attention_heads=16,
                attention_head_dim=128,
                num_layers=54,
                num_refiner_layers=2,
                mlp_ratio=4.0,
                patch_size=1,
                patch_size_t=1,
                qk_norm="rms_norm",
                text_embed_dim=3584,
                text_embed_2_dim=1472,
                image_embed_dim=1152,
                rope_theta=256.0,
                rope_axes_dim=(16, 56, 56),
                target_size=960,
                task_type="t2v",
            ),
            stacks=("num_layers",),
            billions=8.3,
            inputs=_hunyuan15_inputs,
            size=Size(720, 1280, 121),
            text_tokens=1985,
            forwards=2,
            steps=50,
            sparsity=0.8,
            note="each layer makes a mask of tokens x tokens, which dense attention reads",
        ),
        Model(
            name="qwen-image",
            class_name="QwenImageTransformer2DModel",
            config=dict(
                patch_size=2,
                in_channels=64,
                out_channels=16,
                num_layers=60,
                attention_head_dim=128,
                num_attention_heads=24,
                joint_attention_dim=3584,
                guidance_embeds=False,
                axes_dims_rope=(16, 56, 56),
            ),
            stacks=("num_layers",),
            billions=20.4,
            inputs=_qwen_inputs,
            size=Size(1024, 1024, 1),
            text_tokens=256,
            forwards=2,
            steps=50,
            sparsity=0.6,
        ),
        Model(
            name="flux",
            class_name="FluxTransformer2DModel",
            config=dict(
                patch_size=1,
                in_channels=64,
                out_channels=None,
                num_layers=19,
                num_single_layers=38,
                attention_head_dim=128,
                num_attention_heads=24,
                joint_attention_dim=4096,
                pooled_projection_dim=768,
                guidance_embeds=True,
                axes_dims_rope=(16, 56, 56),
            ),
            stacks=("num_layers", "num_single_layers"),
            billions=11.9,
            inputs=_flux_inputs,
            size=Size(1024, 1024, 1),
            text_tokens=512,
            forwards=1,
            steps=28,
            sparsity=0.6,
            note="FLUX.1-dev, whose guidance is an input",
        ),
    )
}

# ---------------------------------------------------------------------------------------------------------------------
# random weights


def build(
    model: Model, layers: int | None, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, float]:
    """Returns the transformer, and how many billions of parameters it has. They never exist but on the device."""
    with _parameters_on_meta():
        transformer: nn.Module = getattr(import_module("diffusers"), model.class_name)(**model.config_of(layers))
    _fill(transformer, device, dtype, seed)
    transformer.to(device)  # moves the buffers: tables of RoPE, which are made as ever and keep their dtype
    return transformer.eval(), sum(parameter.numel() for parameter in transformer.parameters()) / 1e9


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as a module has them, before anyone fills it; other tensors stay real."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.detach().to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill(transformer: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Norms are the identity, biases zero, and every product keeps the size of its input."""
    kept = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())  # diffusers loads these in fp32
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in transformer.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            in_fp32 = kept.intersection([*path.split("."), name])
            weight = torch.empty(parameter.shape, device=device, dtype=torch.float32 if in_fp32 else dtype)
            if weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            else:
                weight.fill_(1.0 if name == "weight" else 0.0)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
