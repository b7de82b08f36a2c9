"""Rectified flow: from noise at time 1 to a clip at time 0 in Euler steps, with classifier-free guidance.

x <- x + (t' - t) v,    v = v_empty + guidance (v_prompt - v_empty)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rainfusion.lab.data import EMPTY
from rainfusion.lab.model import Attention, DiT, Place, dense

SHIFT = 3.0  # moves times towards the noise
STEPS = 24


def times(steps: int, shift: float = SHIFT) -> Tensor:
    """Times from 1 to 0, [steps + 1]; with a shift above 1 more of them are near the noise."""
    even = torch.linspace(1, 0, steps + 1)
    return shift * even / (1 + (shift - 1) * even)


def noise(count: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise [B, *shape], drawn on the CPU: the same on every device, and for a clip whatever else is in its batch."""
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(count)]
    return torch.stack(drawn)


@torch.no_grad()
def sample(
    model: DiT,
    prompts: Tensor,
    *,
    attention: Attention = dense,
    steps: int = STEPS,
    guidance: float = 2.5,
    seed: int = 0,
    frames: int | None = None,
    size: int | None = None,
    shift: float = SHIFT,
    image: Tensor | None = None,
) -> Tensor:
    """Prompts [B, text] -> clips [B, 3, T, H, W] in [0, 1], fp32.

    Args:
        attention: what every layer calls, with the number of the step in `Place`.
        guidance: how far beyond the prompt's own velocity, away from that of no prompt; 1 runs the prompt alone.
        seed: of the noise of the first clip; the next has the next.
        frames, size: of the clips, the model's own by default; one frame is an image.
        shift: of the times, above 1 for more steps near the noise.
        image: [B, 3, size, size] in [0, 1], what the clips begin with; `lab.images` draws some. None: text alone.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not math.isfinite(guidance):
        raise ValueError(f"guidance must be a finite number, got {guidance}")
    frames, size = model.config.clip_size(frames, size)
    device = model.patches.weight.device
    x = noise(len(prompts), (3, frames, size, size), seed).to(device)
    prompts, schedule = prompts.to(device), times(steps, shift).tolist()
    if image is not None:
        wanted = (len(prompts), 3, size, size)
        if image.shape != wanted:
            raise ValueError(f"image must be one picture for each prompt, {list(wanted)}, got {list(image.shape)}")
        image = 2 * image.to(device) - 1

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        return attention(q, k, v, place._replace(steps=steps))

    for step in range(steps):
        now, then = schedule[step : step + 2]
        x = x + (then - now) * _velocity(model, x, now, prompts, image, attend, step, guidance)
    return (x / 2 + 0.5).clamp(0, 1)


def _velocity(
    model: DiT,
    x: Tensor,
    time: float,
    prompts: Tensor,
    image: Tensor | None,
    attention: Attention,
    step: int,
    guidance: float,
) -> Tensor:
    """The velocity of clips, both branches of guidance in one batch; in bf16 on GPUs."""
    guided = guidance != 1.0
    if guided:
        x, prompts = torch.cat([x, x]), torch.cat([prompts, torch.full_like(prompts, EMPTY)])
        image = None if image is None else torch.cat([image, image])
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type != "cpu"):
        v: Tensor = model(x, x.new_full((len(x),), time), prompts, attention, step, image).float()
    if not guided:
        return v
    with_prompt, without = v.chunk(2)
    return without + guidance * (with_prompt - without)
