"""Pictures of a token order and of block masks: as text for a terminal, and as figures (matplotlib).

from rainfusion.tools import pictures
pictures.mask_figure(mask).savefig("mask.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_SHADES = " ░▒▓█"  # kept blocks in a cell: none, up to a quarter, a half, three quarters, more
_MAX_FRAMES = 6


def block_of_tokens(layout: TokenLayout) -> Tensor:
    """int64 [S]: the block that each token of the caller falls into."""
    return layout.inverse.cpu() // layout.block_size


def shown_frames(frames: int, most: int = _MAX_FRAMES) -> list[int]:
    """At most `most` frames: the first few, where windows begin, and the last."""
    return list(range(frames)) if frames <= most else [*range(most - 1), frames - 1]


def order_text(layout: TokenLayout, latent_shape: Sequence[int], txt_len: int = 0, *, width: int = 100) -> str:
    """Frames as maps: tokens of one block have one letter; a dot is a token in a protected block."""
    t, h, w = latent_shape
    blocks = block_of_tokens(layout)[txt_len : txt_len + t * h * w].view(t, h, w)
    protected = layout.protected.tolist()
    cut = f" (the first {width} of {w} columns)" if width < w else ""
    parts = []
    for first, last in _runs_of_equal_frames(blocks):
        name = f"frame {first}" if first == last else f"frames {first} to {last}"
        rows = blocks[first, :, :width].tolist()
        lines = ["".join("." if protected[b] else _LETTERS[b % len(_LETTERS)] for b in row) for row in rows]
        parts.append("\n".join([name + cut, *lines]))
    return "\n\n".join(parts)


def _runs_of_equal_frames(blocks: Tensor) -> list[tuple[int, int]]:
    """[t, h, w] -> (first, last) of each run of frames that are cut alike."""
    starts = [f for f in range(len(blocks)) if f == 0 or not torch.equal(blocks[f], blocks[f - 1])]
    return list(zip(starts, [s - 1 for s in starts[1:]] + [len(blocks) - 1], strict=True))


def mask_text(mask: BlockMask, batch: int = 0, head: int = 0, *, size: int = 48) -> str:
    """One head's mask: rows are query blocks, columns key blocks, darker where more of them are kept."""
    dense = mask.to_dense()[batch, head].float().cpu()
    rows, columns = (min(n, size) for n in dense.shape)
    cells = torch.nn.functional.adaptive_avg_pool2d(dense[None, None], (rows, columns))[0, 0]
    lines = ["".join(_SHADES[_shade(kept)] for kept in row) for row in cells.tolist()]
    edge = "+" + "-" * columns + "+"
    return "\n".join([edge, *(f"|{line}|" for line in lines), edge])


def _shade(kept: float) -> int:
    return 0 if kept == 0 else min(len(_SHADES) - 1, 1 + int(kept * (len(_SHADES) - 1)))


def order_figure(layout: TokenLayout, latent_shape: Sequence[int], txt_len: int = 0, title: str = "") -> Figure:
    """Frames side by side, a colour for each block; tokens in protected blocks are grey."""
    from matplotlib.figure import Figure

    t, h, w = latent_shape
    colours = _block_colours(layout)[block_of_tokens(layout)]  # [S, 3]
    frames = shown_frames(t)
    columns = min(3, len(frames))
    rows = -(-len(frames) // columns)
    figure = Figure(figsize=(3.4 * columns, 0.7 + 3.4 * rows * h / w), layout="constrained", dpi=110)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel, axis in enumerate(axes.flat):
        axis.set_axis_off()
        if panel < len(frames):
            frame = frames[panel]
            start = txt_len + frame * h * w
            axis.imshow(colours[start : start + h * w].view(h, w, 3).numpy(), interpolation="nearest")
            axis.set_title(f"frame {frame}", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _block_colours(layout: TokenLayout) -> Tensor:
    """fp32 [N, 3]: hues a golden angle apart, so that neighbours differ; grey for protected blocks."""
    from matplotlib.colors import hsv_to_rgb

    numbers = torch.arange(layout.num_blocks, dtype=torch.float64)
    hsv = torch.stack([numbers * 0.618034 % 1, 0.45 + 0.4 * (numbers % 2), 0.75 + 0.2 * (numbers % 3 / 2)], -1)
    colours = torch.from_numpy(hsv_to_rgb(hsv.numpy())).float()
    colours[layout.protected.cpu()] = 0.62
    return colours


def mask_figure(mask: BlockMask, batch: int = 0, heads: Sequence[int] | None = None, title: str = "") -> Figure:
    """One panel a head: dark where a query block (row) keeps a key block (column)."""
    from matplotlib.figure import Figure

    dense = mask.to_dense()[batch].float().cpu()
    heads = list(range(min(4, dense.shape[0]))) if heads is None else list(heads)
    columns = min(4, len(heads))
    rows = -(-len(heads) // columns)
    figure = Figure(figsize=(3.2 * columns, 0.8 + 3.2 * rows), layout="constrained", dpi=110)
    for panel, axis in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        if panel >= len(heads):
            axis.set_axis_off()
            continue
        head = heads[panel]
        _draw_mask(axis, dense[head])
        axis.set_title(f"head {head}: density {dense[head].mean():.2f}", fontsize=9)
        if panel % columns == 0:
            axis.set_ylabel("query block", fontsize=8)
        if panel // columns == rows - 1:
            axis.set_xlabel("key block", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_mask(axis: Any, dense: Tensor) -> None:
    axis.imshow(dense.numpy(), cmap="Blues", vmin=0.0, vmax=1.25, interpolation="nearest", aspect="auto")
    axis.tick_params(labelsize=7)


def output_figure(panels: dict[str, Tensor], title: str = "") -> Figure:
    """Named pictures side by side: [h, w, 3] in 0..1 each."""
    from matplotlib.figure import Figure

    h, w, _ = next(iter(panels.values())).shape
    figure = Figure(figsize=(3.2 * len(panels), 0.8 + 3.2 * h / w), layout="constrained", dpi=110)
    for axis, (name, picture) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        axis.imshow(picture.clamp(0, 1).numpy(), interpolation="nearest")
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()
    if title:
        figure.suptitle(title, fontsize=10)
    return figure
