"""Samples as pictures: a contact sheet with frames across and clips down, and GIFs of one clip or several (Pillow)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP = 2  # pixels between frames
_FONT = 14  # height of the captions in pixels


def some_frames(clips: Tensor, number: int) -> Tensor:
    """Clips [B, 3, T, H, W] -> at most so many of their frames, evenly from the first to the last."""
    count = clips.shape[2]
    if count <= number:
        return clips
    return clips[:, :, torch.linspace(0, count - 1, number).round().long()]


def contact_sheet(clips: Tensor, captions: Sequence[str] = (), *, zoom: int = 2, frames: int = 9) -> Image:
    """Clips [B, 3, T, H, W] in [0, 1] -> a picture: a row for each clip, its caption above it.

    Of longer clips it shows so many frames, evenly from the first to the last.
    """
    from PIL import Image, ImageDraw

    if captions and len(captions) != len(clips):
        raise ValueError(f"captions must be one for each of {len(clips)} clips, got {len(captions)}")
    clips = some_frames(clips, frames)
    text = 14 if captions else 0
    across, height, width = (size * factor for size, factor in zip(clips.shape[2:], (1, zoom, zoom), strict=True))
    line = height + text + _GAP
    sheet = Image.new("RGB", (across * (width + _GAP) - _GAP, len(clips) * line - _GAP), "white")
    for row, clip in enumerate(clips):
        if captions:
            ImageDraw.Draw(sheet).text((2, row * line + 1), captions[row], fill="black")
        for column, picture in enumerate(_images(clip)):
            sheet.paste(picture.resize((width, height), 0), (column * (width + _GAP), row * line + text))
    return sheet


def write_gif(clip: Tensor, path: str | Path, *, zoom: int = 4, milliseconds: int = 120) -> None:
    """One clip [3, T, H, W] in [0, 1] -> a GIF that repeats."""
    _save_gif([_zoomed(picture, zoom) for picture in _images(clip)], path, milliseconds)


def write_side_by_side(
    clips: Tensor, captions: Sequence[str], path: str | Path, *, title: str = "", zoom: int = 4, milliseconds: int = 180
) -> None:
    """Clips [B, 3, T, H, W] in [0, 1] -> a GIF of all of them, a caption above each and the title below."""
    from PIL import Image, ImageDraw, ImageFont

    if len(captions) != len(clips):
        raise ValueError(f"captions must be one for each of {len(clips)} clips, got {len(captions)}")
    font, line = ImageFont.load_default(_FONT), _FONT + 6
    height, width = (zoom * size for size in clips.shape[3:])
    whole = len(clips) * (width + _GAP) - _GAP
    lines = _wrap(title, whole - 8, font.getlength)
    images = []
    for pictures in zip(*map(_images, clips), strict=True):
        image = Image.new("RGB", (whole, height + (1 + len(lines)) * line + 4), "white")
        draw = ImageDraw.Draw(image)
        for column, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            draw.text((column * (width + _GAP) + 4, 2), caption, fill="black", font=font)
            image.paste(_zoomed(picture, zoom), (column * (width + _GAP), line))
        for row, text in enumerate(lines, 1):
            draw.text((4, height + row * line + 2), text, fill="black", font=font)
        images.append(image)
    _save_gif(images, path, milliseconds)


def _wrap(text: str, width: float, length: Callable[[str], float]) -> list[str]:
    """Breaks a text into lines that are at most `width` long, unless one word is longer."""
    lines: list[str] = []
    for word in text.split():
        if lines and length(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _zoomed(picture: Image, zoom: int) -> Image:
    return picture.resize((picture.width * zoom, picture.height * zoom), 0)


def _save_gif(images: Sequence[Image], path: str | Path, milliseconds: int) -> None:
    """Writes a GIF that repeats after a pause."""
    durations = [milliseconds] * (len(images) - 1) + [4 * milliseconds]
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0)


def _images(clip: Tensor) -> list[Image]:
    """A clip [3, T, H, W] in [0, 1] -> its frames as T pictures."""
    from PIL import Image

    pixels = clip.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().contiguous()
    size = (clip.shape[3], clip.shape[2])
    return [Image.frombytes("RGB", size, bytes(frame.flatten().tolist())) for frame in pixels]
