"""Attention calls of real models, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One attention call, as a model makes it."""

    name: str
    heads: int
    head_dim: int
    latent_shape: tuple[int, int, int] | None  # None stands for tokens without a grid
    txt_len: int
    sparsity: float
    note: str
    tokens: int = 0  # the length of a sequence without a grid
    small: bool = False  # whether it takes only seconds on a CPU
    batch: int = 1

    @property
    def seq_len(self) -> int:
        """All tokens of the sequence, text included."""
        return self.txt_len + math.prod(self.latent_shape) if self.latent_shape else self.tokens


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("wan-720p", 40, 128, (21, 45, 80), 0, 0.8, "Wan2.1/2.2-14B, 1280x720, 81 frames"),
        Shape("wan-480p", 12, 128, (21, 30, 52), 0, 0.8, "Wan2.1-1.3B, 832x480, 81 frames"),
        Shape("hunyuanvideo-720p", 24, 128, (33, 45, 80), 256, 0.8, "HunyuanVideo, 1280x720, 129 frames, text"),
        Shape("cogvideox-480p", 48, 64, (13, 30, 45), 226, 0.8, "CogVideoX-5B, 720x480, 49 frames, text"),
        Shape("qwen-image-1024", 24, 128, (1, 64, 64), 256, 0.6, "Qwen-Image, 1024x1024, text"),
        Shape("qwen-image-2048", 24, 128, (1, 128, 128), 256, 0.6, "Qwen-Image, 2048x2048, text"),
        Shape("flux-1024", 24, 128, (1, 64, 64), 512, 0.6, "Flux, 1024x1024, text"),
        Shape("flux-2048", 24, 128, (1, 128, 128), 512, 0.6, "Flux, 2048x2048, text"),
        Shape("image-4096", 24, 128, (1, 64, 64), 0, 0.6, "an image of 4096 tokens, batch of 2", batch=2),
        Shape("tokens-8k", 4, 128, None, 0, 0.8, "8192 tokens, 4 heads, nothing protected", 8192, small=True),
        Shape("wan-480p-17f", 4, 128, (5, 30, 52), 0, 0.8, "Wan at 832x480, 17 frames, 4 heads", small=True),
        Shape("flux-1024-4h", 4, 128, (1, 64, 64), 512, 0.6, "Flux, 1024x1024, text, 4 heads", small=True),
        Shape("qwen-image-512", 4, 128, (1, 32, 32), 64, 0.6, "Qwen-Image, 512x512, text, 4 heads", small=True),
    )
}

# The sweep over tokens has images, not videos: a protected first frame would change the density on the way.
_SWEEP_GRIDS = (
    (32, 64),
    (64, 64),
    (64, 128),
    (128, 128),
    (128, 256),
    (256, 256),
    (256, 400),
    (384, 400),
)
SWEEP_SPARSITIES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
SWEEP_PREFIX = "grid-"


def token_sweep(heads: int = 12, head_dim: int = 128, sparsity: float = 0.8) -> list[Shape]:
    """Images of 2,048 to 153,600 tokens, to measure speed against length."""
    return [
        Shape(f"{SWEEP_PREFIX}{h * w}", heads, head_dim, (1, h, w), 0, sparsity, "of the token sweep")
        for h, w in _SWEEP_GRIDS
    ]
