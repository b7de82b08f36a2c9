"""Where text, grids and clips lie in the sequences of q and k, as plain checked numbers.

`Geometry` is what a caller says (`txt_len`, `latent_shape_*`, `video_spans`). With a `Method` and two lengths it makes
a `LayoutSpec` for each side, which is all that `layout` needs in order to build the order of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from rainfusion import checks
from rainfusion.checks import Grid
from rainfusion.options import BLOCK_SIZES, Method, checked_token_order, sides

# Only wt and wh shape the order (see `layout`); the third number makes the product a block of 128. Of the windows for
# video, (2, 8, 8) gave the best samples with blocks of 128; with finer ones they are nearly alike (docs/quality.md).
VIDEO_WINDOW = (2, 8, 8)
IMAGE_WINDOW = (1, 8, 16)

Clip = tuple[int, int, int, int]  # start, t, h, w


class VideoSpan(TypedDict):
    """One clip of `video_spans`: tokens start ... start + t*h*w - 1."""

    start: int
    latent_shape: Sequence[int]


class LayoutSpec(NamedTuple):
    """The layout of one sequence as plain numbers, hashable for the cache."""

    seq_len: int
    latent_shape: Grid | None
    txt_len: int
    video_spans: tuple[Clip, ...] | None
    token_order: str  # "window", "mindiesd" or "raster"
    window: Grid | None  # None: the default for a video or an image
    block_size: int
    first_frame: bool = True  # whether that of a video is protected

    @property
    def clips(self) -> tuple[Clip, ...]:
        if self.video_spans is not None:
            return self.video_spans
        return () if self.latent_shape is None else ((self.txt_len, *self.latent_shape),)

    @property
    def order(self) -> TokenOrderKey:
        """What decides the order of the tokens, and nothing else: never equal where two orders differ."""
        clips = self.clips
        if not clips or self.token_order == "raster":
            return TokenOrderKey(self.seq_len, (), "raster")
        if self.token_order == "mindiesd":
            packed = "" if self.latent_shape is not None else ", clips packed"
            return TokenOrderKey(self.seq_len, clips, f"mindiesd{packed}")
        video = any(t > 1 for _, t, _, _ in clips)
        image = any(t == 1 for _, t, _, _ in clips)
        _, image_rows, _ = self.window or IMAGE_WINDOW  # of an image they are all that shapes it
        frames, rows, _ = self.window or VIDEO_WINDOW
        windows = [f"{frames}x{rows}"] * video + [f"1x{image_rows}"] * image
        words = " and ".join(dict.fromkeys(windows))
        first = ("" if self.first_frame else ", first frame in windows too") if video else ""
        return TokenOrderKey(self.seq_len, clips, f"windows of {words}{first}")


class TokenOrderKey(NamedTuple):
    """The order of a sequence: which a `BlockMask` was made for, and whether a call has the same."""

    seq_len: int
    clips: tuple[Clip, ...]
    words: str

    def __str__(self) -> str:
        grids = " and ".join(f"{t}x{h}x{w} at {start}" for start, t, h, w in self.clips)
        return f"{grids}, {self.words}" if grids else "the caller's order"


class Geometry(NamedTuple):
    """The layout arguments of a call, checked."""

    txt_len: int = 0
    latent_q: Grid | None = None
    latent_k: Grid | None = None
    clips: tuple[Clip, ...] | None = None

    @classmethod
    def check(cls, txt_len: Any, latent_shape_q: Any, latent_shape_k: Any, video_spans: Any) -> Geometry:
        return cls(
            checks.integer("txt_len", txt_len, minimum=0),
            None if latent_shape_q is None else checks.grid("latent_shape_q", latent_shape_q),
            None if latent_shape_k is None else checks.grid("latent_shape_k", latent_shape_k),
            None if video_spans is None else spans(video_spans),
        )

    @property
    def frames(self) -> int:
        """The frames of the longest clip: 1 for images, and where nothing is said."""
        known = [grid[0] for grid in (self.latent_q, self.latent_k) if grid is not None]
        return max([1, *known, *(t for _, t, _, _ in self.clips or ())])

    def fitted(self, q_len: int, k_len: int) -> Geometry:
        """Checked against the lengths; where they are equal, one grid serves both sides."""
        if self.clips is not None and q_len != k_len:
            raise ValueError(f"video_spans needs q and k of one length, got {q_len} and {k_len}")
        for name, length, grid in (("latent_shape_q", q_len, self.latent_q), ("latent_shape_k", k_len, self.latent_k)):
            check_fit(length, grid, self.txt_len, self.clips, name)
        if q_len != k_len:
            return self
        return self._replace(latent_q=self.latent_q or self.latent_k, latent_k=self.latent_k or self.latent_q)

    def specs(self, method: Method, q_len: int, k_len: int) -> tuple[LayoutSpec, LayoutSpec]:
        """The layouts of q and of k. Only rf_v2 reorders and protects."""
        q_block, k_block = sides(method.block_size)
        if method.strategy != "rf_v2":
            return plain_spec(q_len, q_block), plain_spec(k_len, k_block)
        window = method.token_order if isinstance(method.token_order, tuple) else None
        order = "window" if isinstance(method.token_order, tuple) else method.token_order
        rows, columns = method.first_frame == "protected", method.first_frame != "free"
        return (
            LayoutSpec(q_len, self.latent_q, self.txt_len, self.clips, order, window, q_block, rows),
            LayoutSpec(k_len, self.latent_k, self.txt_len, self.clips, order, window, k_block, columns),
        )


def plain_spec(seq_len: int, block_size: int) -> LayoutSpec:
    """Tokens in the caller's order, none protected."""
    return LayoutSpec(seq_len, None, 0, None, "raster", None, block_size)


def layout_spec(
    seq_len: Any, latent_shape: Any, txt_len: Any, video_spans: Any, token_order: Any, block_size: Any, first_frame: Any
) -> LayoutSpec:
    """The layout of one sequence, from unchecked arguments."""
    size = checks.one_of("block_size", block_size, sorted({size for pair in map(sides, BLOCK_SIZES) for size in pair}))
    order = checked_token_order(token_order, (size, size))
    spec = LayoutSpec(
        seq_len=checks.integer("seq_len", seq_len, minimum=0),
        latent_shape=None if latent_shape is None else checks.grid("latent_shape", latent_shape),
        txt_len=checks.integer("txt_len", txt_len, minimum=0),
        video_spans=None if video_spans is None else spans(video_spans),
        token_order="window" if isinstance(order, tuple) else order,
        window=order if isinstance(order, tuple) else None,
        block_size=size,
        first_frame=checks.choice("first_frame", first_frame, ("protected", "free")) == "protected",
    )
    check_fit(spec.seq_len, spec.latent_shape, spec.txt_len, spec.video_spans, "latent_shape")
    return spec


def spans(value: Any) -> tuple[Clip, ...]:
    """Clips as (start, t, h, w): at least one, in order, none touching another's tokens."""
    shape = '[{"start": int, "latent_shape": [t, h, w]}, ...]'
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"video_spans must be a list {shape}, got {value!r} ({type(value).__name__})")
    if len(value) == 0:
        raise ValueError(f"video_spans must hold at least one clip {shape}, got an empty list; None means no clips")
    clips: list[Clip] = []
    end = 0
    for i, span in enumerate(value):
        if not isinstance(span, Mapping):
            raise TypeError(f"video_spans[{i}] must be a dict with start and latent_shape, got {span!r}")
        if set(span) != {"start", "latent_shape"}:
            keys = sorted(map(str, span))
            raise ValueError(f"video_spans[{i}] must have the keys start and latent_shape, got {keys}")
        start = checks.integer(f"video_spans[{i}]['start']", span["start"], minimum=0)
        t, h, w = checks.grid(f"video_spans[{i}]['latent_shape']", span["latent_shape"])
        if start < end:
            raise ValueError(
                f"video_spans must be in order and disjoint: clip {i} starts at {start}, but the one before it ends "
                f"at {end}"
            )
        end = start + t * h * w
        clips.append((start, t, h, w))
    return tuple(clips)


def check_fit(seq_len: int, shape: Grid | None, txt_len: int, clips: tuple[Clip, ...] | None, name: str) -> None:
    """Grid, text and clips must fill the sequence, or lie within it. `name`: of the latent shape, for the message."""
    if clips is not None:
        if shape is not None or txt_len != 0:
            raise ValueError(
                f"video_spans excludes txt_len and {name}: text and other context are simply the tokens outside the "
                f"clips; got txt_len={txt_len}, {name}={shape}"
            )
        start, t, h, w = clips[-1]
        if start + t * h * w > seq_len:
            raise ValueError(
                f"video_spans must lie inside the sequence of {seq_len} tokens, but clip {len(clips) - 1} ends at "
                f"{start} + {t}*{h}*{w} = {start + t * h * w}"
            )
    if txt_len > seq_len:
        raise ValueError(f"txt_len must be at most the sequence length {seq_len}, got {txt_len}")
    if shape is not None and txt_len + math.prod(shape) != seq_len:
        t, h, w = shape
        raise ValueError(
            f"{name} must fill the sequence: txt_len + t*h*w = {txt_len} + {t}*{h}*{w} = {txt_len + t * h * w}, but "
            f"the sequence has {seq_len} tokens. [t, h, w] counts tokens after patching; text after the video goes "
            "through video_spans; and is input_layout right?"
        )
