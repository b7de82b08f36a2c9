"""Pictures of a token order, of block masks and of measurements: as text for a terminal, and as figures (matplotlib).

from rainfusion.bench import pictures
pictures.mask_figure(mask).savefig("mask.png")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rainfusion.bench.results import Row, newest
from rainfusion.bench.shapes import SHAPES, SWEEP_PREFIX
from rainfusion.blockmask import BlockMask
from rainfusion.layout import TokenLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_SHADES = " ░▒▓█"  # the share of kept blocks in a cell: none, then up to a quarter, a half, three quarters, and more
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
    """Blocks of tokens [t, h, w] -> the first and last of each run of frames that are cut alike."""
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


# ---------------------------------------------------------------------------------------------------------------------
# measurements

_INK = "#333333"
_COLOURS = ("#1764ab", "#d1495b", "#2e8b57", "#8e5ea2", "#c77d00", "#5b6770")
_LEAST_POINTS = 3  # a line has so many, or is not drawn
Panel = Literal["sparsity", "tokens", "shapes"]
SPEEDUP_PANELS: tuple[Panel, ...] = ("sparsity", "tokens", "shapes")


def speedup_figure(rows: Sequence[Row], panels: Sequence[Panel] | None = None) -> Figure:
    """Speed-up of the whole call over the best dense baseline: against sparsity, against tokens, and by shape.

    `panels`: some of SPEEDUP_PANELS; by default those that the rows have points for. Of several devices the one that
    was measured last is drawn, of several versions each point's newest.
    """
    from matplotlib.figure import Figure

    rows = [row for row in newest(rows) if row.speedup is not None]
    if rows:
        device = max(rows, key=lambda row: row.measured).gpu
        rows = [row for row in rows if row.gpu == device]
    draw: dict[Panel, Callable[[Any, list[list[Row]]], None]] = {
        "sparsity": _draw_sparsity,
        "tokens": _draw_tokens,
        "shapes": _draw_shapes,
    }
    points: dict[Panel, list[list[Row]]] = {
        "sparsity": _sparsity_lines(rows),
        "tokens": _token_lines(rows),
        "shapes": _shape_bars(rows),
    }
    chosen = [name for name in panels or SPEEDUP_PANELS if points[name]]
    if not chosen:
        wanted = " or ".join(panels or SPEEDUP_PANELS)
        raise ValueError(f"there is nothing to draw against {wanted}: no rows with a speed-up of a whole call")
    figure = Figure(figsize=(6.4 * len(chosen), 4.6), layout="constrained", dpi=130)
    for name, axis in zip(chosen, figure.subplots(1, len(chosen), squeeze=False).flat, strict=True):
        draw[name](axis, points[name])
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9, colors=_INK)
    figure.suptitle(f"rainfusion {rows[-1].rainfusion} on {device}, torch {rows[-1].torch}", fontsize=11, color=_INK)
    return figure


def _calls(rows: Sequence[Row], stage: str = "call") -> list[Row]:
    return [row for row in rows if row.contender.endswith(f" {stage}")]


def _label(row: Row, *more: str) -> str:
    precision = row.dtype if row.precision == "native" else row.precision
    return ", ".join([f"{row.contender.rpartition(' ')[0]} {precision}", *more])


def _lines(rows: Sequence[Row], same: Sequence[str], along: str) -> list[list[Row]]:
    """Lines of rows that agree in `same`, in the order of `along`; those of too few points are left out."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(getattr(row, name) for name in same), []).append(row)
    ordered = [sorted(line, key=lambda row: float(getattr(row, along))) for line in lines.values()]
    return [line for line in ordered if len({getattr(row, along) for row in line}) >= _LEAST_POINTS]


def _sparsity_lines(rows: Sequence[Row]) -> list[list[Row]]:
    same = ("shape", "batch", "heads", "tokens", "head_dim", "dtype", "precision", "sparse_type", "contender")
    return _lines(_calls(rows), same, "sparsity")


def _token_lines(rows: Sequence[Row]) -> list[list[Row]]:
    same = ("batch", "heads", "head_dim", "dtype", "precision", "sparse_type", "sparsity", "contender")
    swept = [row for row in rows if row.shape.startswith(SWEEP_PREFIX)]
    return _lines([*_calls(swept), *_calls(swept, "graph")], same, "tokens")


def _shape_bars(rows: Sequence[Row]) -> list[list[Row]]:
    """Each shape's calls, at its own sparsity, or at the one that was measured last."""
    shapes: dict[str, list[Row]] = {}
    for row in _calls([row for row in rows if not row.shape.startswith(SWEEP_PREFIX)]):
        shapes.setdefault(row.shape, []).append(row)
    bars = []
    for name, calls in shapes.items():
        sparsity = SHAPES[name].sparsity if name in SHAPES else None
        if sparsity not in [row.sparsity for row in calls]:
            sparsity = max(calls, key=lambda row: row.measured).sparsity
        bars.append([row for row in calls if row.sparsity == sparsity])
    return bars


def _draw_sparsity(axis: Any, lines: list[list[Row]]) -> None:
    several = len({line[0].shape for line in lines}) > 1
    ideal: set[tuple[float, ...]] = set()
    for number, line in enumerate(lines):
        density = tuple(round(row.density, 4) for row in line)
        if density not in ideal:  # the ideal is drawn once for each shape
            style = dict(color="#888888", linestyle="--", linewidth=1.2, zorder=1)
            label = None if ideal else "ideal: 1 / density"
            axis.plot([row.sparsity for row in line], [1 / row.density for row in line], label=label, **style)
            ideal.add(density)
        _draw_line(axis, line, "sparsity", number, _label(line[0], *([line[0].shape] if several else [])))
    first = lines[0][0]
    where = "" if several else f": {first.shape}, {first.batch}x{first.heads}x{first.tokens}x{first.head_dim}"
    _finish(axis, "against sparsity" + where, "sparsity: share of blocks to skip")


def _draw_tokens(axis: Any, lines: list[list[Row]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    colours: dict[str, int] = {}
    for line in lines:
        graph = line[0].contender.endswith(" graph")
        name = _label(line[0])
        number = colours.setdefault(name, len(colours))
        _draw_line(axis, line, "tokens", number, f"{name}, CUDA graph" if graph else name, ":" if graph else "-")
    tokens = sorted({row.tokens for line in lines for row in line})
    ideal = max(1 / row.density for line in lines for row in line)
    axis.axhline(ideal, color="#888888", linestyle="--", linewidth=1.2, zorder=1, label="ideal: 1 / density")
    axis.set_xscale("log")
    axis.set_xticks(tokens)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:.0f}k"))
    first = lines[0][0]
    _finish(
        axis,
        f"against length: {first.heads} heads of {first.head_dim}, sparsity {first.sparsity:g}",
        "tokens",
        "lower right",
    )


def _draw_line(axis: Any, line: list[Row], along: str, number: int, label: str, style: str = "-") -> None:
    axis.plot(
        [getattr(row, along) for row in line],
        [row.speedup for row in line],
        style,
        marker="o",
        markersize=4,
        linewidth=1.8,
        color=_COLOURS[number % len(_COLOURS)],
        label=label,
        zorder=3,
    )


def _draw_shapes(axis: Any, bars: list[list[Row]]) -> None:
    names = list(dict.fromkeys(_label(row) for group in bars for row in group))
    height = 0.8 / len(names)
    for place, group in enumerate(bars):
        for row in group:
            number = names.index(_label(row))
            y = place + (number - (len(names) - 1) / 2) * height
            axis.barh(y, row.speedup, 0.92 * height, color=_COLOURS[number % len(_COLOURS)], zorder=3)
            axis.text((row.speedup or 0) + 0.05, y, f"{row.speedup:.2f}x", va="center", fontsize=8, color=_INK)
    for number, name in enumerate(names):
        axis.plot([], [], "s", color=_COLOURS[number % len(_COLOURS)], label=name)
    axis.set_yticks(range(len(bars)), [f"{group[0].shape}\nat {group[0].sparsity:g}" for group in bars])
    axis.invert_yaxis()
    axis.axvline(1.0, color=_INK, linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(row.speedup or 0 for group in bars for row in group))
    axis.set_xlabel("speed-up over the best dense kernel", fontsize=9, color=_INK)
    axis.set_title("by shape", fontsize=10, color=_INK)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _finish(axis: Any, title: str, xlabel: str, legend: str = "upper left") -> None:
    axis.axhline(1.0, color=_INK, linewidth=0.8, zorder=1)
    axis.set_yscale("log", base=2)
    low, high = axis.get_ylim()
    steps = [step for step in (0.125, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24) if low <= step <= high]
    axis.set_yticks(steps, [f"{step:g}x" for step in steps])
    axis.minorticks_off()
    axis.set_xlabel(xlabel, fontsize=9, color=_INK)
    axis.set_ylabel("speed-up over the best dense kernel", fontsize=9, color=_INK)
    axis.set_title(title, fontsize=10, color=_INK)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, loc=legend)
