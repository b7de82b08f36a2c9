"""Samples as pictures: a contact sheet with frames across and clips down, and moving GIFs (Pillow)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP = 2  # pixels between frames


def contact_sheet(clips: Tensor, captions: Sequence[str] = (), *, zoom: int = 2) -> Image:
    """Clips [B, 3, T, H, W] in [0, 1] -> a picture: a row for each clip, its caption above it."""
    from PIL import Image, ImageDraw

    if captions and len(captions) != len(clips):
        raise ValueError(f"captions must be one for each of {len(clips)} clips, got {len(captions)}")
    text = 14 if captions else 0
    frames, height, width = (size * factor for size, factor in zip(clips.shape[2:], (1, zoom, zoom), strict=True))
    line = height + text + _GAP
    sheet = Image.new("RGB", (frames * (width + _GAP) - _GAP, len(clips) * line - _GAP), "white")
    for row, clip in enumerate(clips):
        if captions:
            ImageDraw.Draw(sheet).text((2, row * line + 1), captions[row], fill="black")
        for column, picture in enumerate(_images(clip)):
            sheet.paste(picture.resize((width, height), 0), (column * (width + _GAP), row * line + text))
    return sheet


def write_gif(clip: Tensor, path: str | Path, *, zoom: int = 4, milliseconds: int = 120) -> None:
    """One clip [3, T, H, W] in [0, 1] -> a GIF that repeats."""
    images = [picture.resize((picture.width * zoom, picture.height * zoom), 0) for picture in _images(clip)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=milliseconds, loop=0)


def _images(clip: Tensor) -> list[Image]:
    """[3, T, H, W] in [0, 1] -> T pictures."""
    from PIL import Image

    pixels = clip.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().contiguous()
    size = (clip.shape[3], clip.shape[2])
    return [Image.frombytes("RGB", size, bytes(frame.flatten().tolist())) for frame in pixels]
