"""q, k and v with the structure that attention in a video DiT has: near tokens and tokens that look alike attend.

Random normal tensors have none, and no predictor can be judged on them. Here a smooth moving picture gives each token
a content vector, its place in the grid a position vector, and each head mixes the two in its own proportion: some heads
look around them in space and time, others look for what is similar, wherever it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_SHARPNESS = 14.0  # the logit of a token with itself


def video_latent(latent_shape: Sequence[int], channels: int = 16, seed: int = 0) -> Tensor:
    """A smooth moving texture with a few moving objects in it: fp32 [t, h, w, channels], unit variance or so."""
    t, h, w = latent_shape
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(t, dtype=torch.float32)[:, None, None]
    y = torch.arange(h, dtype=torch.float32)[None, :, None] / max(h, w)
    x = torch.arange(w, dtype=torch.float32)[None, None, :] / max(h, w)
    waves = 24
    frequency = 2.5 * torch.randn(waves, 2, generator=generator)  # in cycles over the picture
    drift = 0.05 * torch.randn(waves, generator=generator)  # in cycles a frame
    phase = 2 * math.pi * (frequency[:, 0] * y[..., None] + frequency[:, 1] * x[..., None] + drift * time[..., None])
    mixing = torch.randn(2 * waves, channels, generator=generator) / math.sqrt(2 * waves)
    latent = torch.cat([phase.cos(), phase.sin()], -1) @ mixing * math.sqrt(2)
    for _ in range(4):
        centre, speed = torch.rand(2, generator=generator), 0.03 * torch.randn(2, generator=generator)
        radius = 0.08 + 0.1 * torch.rand(1, generator=generator)
        distance = (y - centre[0] - speed[0] * time) ** 2 + (x - centre[1] * w / max(h, w) - speed[1] * time) ** 2
        inside = torch.sigmoid((radius - distance.sqrt()) * 80)[..., None]
        latent = latent * (1 - inside) + 2.0 * torch.randn(channels, generator=generator) * inside
    return latent


def video_qkv(
    latent: Tensor,
    heads: int,
    head_dim: int,
    *,
    txt_len: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, heads, txt_len + t*h*w, head_dim] for a latent [t, h, w, channels]."""
    t, h, w, channels = latent.shape
    generator = torch.Generator().manual_seed(seed + 1)
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in (t, h, w)), indexing="ij")
    position = torch.stack(grid, -1).view(-1, 3) * torch.tensor([2.0, 1.0, 1.0])
    content = latent.reshape(-1, channels)
    half = max(1, head_dim // 2)
    gain = math.sqrt(_SHARPNESS * math.sqrt(head_dim))  # q . k / sqrt(D) = sharpness where features agree
    out: list[list[Tensor]] = [[], [], []]
    for head in range(heads):
        share = (head + 1) / (heads + 1)  # the share of position in this head; the rest is content
        place = _fourier_features(position, half, (3.0, 6.0, 12.0)[head % 3], generator)
        look = _fourier_features(content, head_dim - half or 1, 2.0, generator)
        features = torch.cat([math.sqrt(share) * place, math.sqrt(1 - share) * look], -1)[:, :head_dim] * gain
        values = content @ torch.randn(channels, head_dim, generator=generator) / math.sqrt(channels)
        for which, tokens in enumerate((features, features, values)):
            noise = 0.1 * torch.randn(tokens.shape, generator=generator)
            text = torch.randn(txt_len, head_dim, generator=generator)
            out[which].append(torch.cat([text, tokens + noise]).to(dtype))
    q, k, v = (torch.stack(part).unsqueeze(0).to(device) for part in out)
    return q, k, v


def _fourier_features(points: Tensor, features: int, width: float, generator: torch.Generator) -> Tensor:
    """Points [n, d] -> features [n, features] whose inner products are about exp(-|difference|^2 / (2 width^2))."""
    directions = torch.randn(points.shape[1], features, generator=generator) / width
    offsets = 2 * math.pi * torch.rand(features, generator=generator)
    return math.sqrt(2 / features) * (points @ directions + offsets).cos()


def tokens_qkv(
    tokens: int, heads: int, head_dim: int, *, seed: int = 0, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, heads, tokens, head_dim] of a sequence without a grid, made as a picture one token high."""
    latent = video_latent((1, 1, tokens), seed=seed)
    return video_qkv(latent, heads, head_dim, seed=seed, dtype=dtype, device=device)
