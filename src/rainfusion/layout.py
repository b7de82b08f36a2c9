"""Token layouts: the order in which rf_v2 cuts a sequence into blocks, and which blocks it never drops.

A permutation is data. Whatever the grid, the text or the clips are, a layout is three small tensors: `order`,
`inverse` and `protected`; every stage after this one only reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from rainfusion.checks import Grid
from rainfusion.geometry import IMAGE_WINDOW, VIDEO_WINDOW, Clip, LayoutSpec, VideoSpan, layout_spec
from rainfusion.graphs import refuse_if_capturing
from rainfusion.options import TokenOrder

_TILE = 8  # edge of the tiles of token_order="mindiesd"
_WHOLE, _PART = 128, 16  # tokens of a block of queries, and of the smallest part of it that is compact
_NO_CLIP = -1  # label of a token that belongs to no clip: text, first frames, context


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """`reordered[i] = tokens[order[i]]`, cut into blocks of `block_size` tokens.

    order      int64 [S]  the token of the caller that comes i-th
    inverse    int64 [S]  where the caller's token went: `order[inverse] == arange(S)`
    protected  bool  [N]  blocks that are never dropped, N = ceil(S / block_size)

    Example: 3 frames of 8x8 tokens after 10 text tokens. Frames 1 and 2 come first, in windows; then frame 0; then
    the text. The 128 tokens of frames 1 and 2 fill block 0; the other 74 are protected.

    >>> layout = TokenLayout.build(202, latent_shape=[3, 8, 8], txt_len=10)
    >>> layout.protected.tolist()
    [False, True]
    >>> layout.order[128].item(), layout.order[192].item()   # the first token of frame 0, of the text
    (10, 0)
    """

    seq_len: int
    block_size: int
    order: Tensor
    inverse: Tensor
    protected: Tensor
    is_identity: bool  # nothing is asked to move: known from the options, so that kernels do not depend on the grid
    protected_first: Tensor = field(init=False, repr=False)  # int32 [N]: the blocks, heavy rows first, for kernels
    num_protected: int = field(init=False)

    def __post_init__(self) -> None:
        if self.order.shape != (self.seq_len,) or self.inverse.shape != (self.seq_len,):
            raise ValueError(
                f"order and inverse must have shape ({self.seq_len},), got {tuple(self.order.shape)} and "
                f"{tuple(self.inverse.shape)}; TokenLayout.build makes both"
            )
        if self.protected.shape != (self.num_blocks,):
            raise ValueError(f"protected must have shape ({self.num_blocks},), got {tuple(self.protected.shape)}")
        rows = self.protected.to(torch.uint8).argsort(descending=True, stable=True).to(torch.int32)
        object.__setattr__(self, "protected_first", rows)
        object.__setattr__(self, "num_protected", -1 if self.protected.is_meta else int(self.protected.sum()))

    @classmethod
    def build(
        cls,
        seq_len: int,
        latent_shape: Sequence[int] | None = None,
        txt_len: int = 0,
        video_spans: Sequence[VideoSpan] | None = None,
        token_order: TokenOrder | Sequence[int] = "window",
        block_size: int = 128,
        first_frame: Literal["protected", "free"] = "protected",
    ) -> TokenLayout:
        """The layout of one sequence, as `sparse_attention` has it for q or for k; on the CPU, `.to(device)` moves it.

        Args:
            seq_len: tokens of the sequence.
            latent_shape: the grid `[t, h, w]` of the tokens after the text; None keeps the caller's order.
            txt_len: so many tokens in front are text, which is protected.
            video_spans: several clips instead of one grid, `[{"start": 0, "latent_shape": [t, h, w]}, ...]`.
            token_order: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
            block_size: tokens of a block, 128 or 64; of the keys alone, with a pair, that of the keys.
            first_frame: whether that of a video is `"protected"` or `"free"`. A call with `first_frame="keys"` has a
                free one on the side of q and a protected one on that of k.

        Returns:
            the layout: `reorder` and `restore` apply it.
        """
        return _build(layout_spec(seq_len, latent_shape, txt_len, video_spans, token_order, block_size, first_frame))

    @property
    def num_blocks(self) -> int:
        return -(-self.seq_len // self.block_size)

    def reorder(self, x: Tensor) -> Tensor:
        """[..., S, D] in the caller's order -> [..., S, D] in this order."""
        self._check_length(x)
        return x if self.is_identity else x.index_select(-2, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """[..., S, D] in this order -> [..., S, D] in the caller's order."""
        self._check_length(x)
        return x if self.is_identity else x.index_select(-2, self.inverse)

    def _check_length(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[-2] != self.seq_len:
            raise ValueError(f"x must be [..., {self.seq_len}, D] for this layout, got shape {list(x.shape)}")

    def to(self, device: torch.device | str) -> TokenLayout:
        moved = {name: getattr(self, name).to(device) for name in ("order", "inverse", "protected")}
        layout = replace(self, **moved)
        # copied, not computed there: a copy is done when it returns, for every stream
        object.__setattr__(layout, "protected_first", self.protected_first.to(device))
        return layout

    def __repr__(self) -> str:
        kind = "the caller's order" if self.is_identity else "reordered"
        protected = "?" if self.protected.is_meta else self.num_protected
        return (
            f"TokenLayout({self.seq_len} tokens, {self.num_blocks} blocks of {self.block_size}, {kind}, "
            f"{protected} protected)"
        )


@lru_cache(maxsize=256)
def cached_layout(spec: LayoutSpec, device: torch.device) -> TokenLayout:
    """The same layout serves every layer and step, so it is built once per device. Never write into it."""
    refuse_if_capturing(device, "lengths and latent shapes")
    with torch.inference_mode(False):  # cached tensors must be ordinary ones, whatever mode the first caller is in
        return _build(spec).to(device)


def _build(spec: LayoutSpec) -> TokenLayout:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # not the caller's default device
        order, protected = _order_and_protected(spec)
        tokens = torch.arange(spec.seq_len)
        inverse = torch.empty_like(order)
        inverse[order] = tokens
    stays = not spec.clips or spec.token_order == "raster"
    return TokenLayout(spec.seq_len, spec.block_size, order, inverse, protected, stays)


def _order_and_protected(spec: LayoutSpec) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(spec.seq_len)
    if spec.latent_shape is None and spec.video_spans is None:
        # no grid: nothing moves, and blocks that hold text stay
        return tokens, _any_per_block(tokens < spec.txt_len, spec.block_size)

    if spec.token_order == "mindiesd" and spec.latent_shape is not None:
        return _mindiesd_order(spec), _mindiesd_protected(spec)

    clips = spec.clips
    labels = torch.full((spec.seq_len,), _NO_CLIP)
    for number, clip in enumerate(clips):
        labels[_body(clip, spec.first_frame)] = number
    if spec.token_order == "raster":
        return tokens, _protected_by_label(labels, spec.block_size)
    order = _packed_order(spec, clips, labels)
    if spec.token_order != "mindiesd":
        order = _compact_parts(order, labels, clips)
    return order, _protected_by_label(labels[order], spec.block_size)


def _body(clip: Clip, first_frame: bool) -> slice:
    """The tokens of a clip that may be dropped: all, or all but the first frame of a video."""
    start, t, h, w = clip
    return slice(start + (h * w if first_frame and t > 1 else 0), start + t * h * w)


def _packed_order(spec: LayoutSpec, clips: tuple[Clip, ...], labels: Tensor) -> Tensor:
    """Each clip's body in windows, then the first frames, then all that is in no clip."""
    bodies, first_frames = [], []
    outside = labels == _NO_CLIP
    for start, t, h, w in clips:
        if t == 1:
            bodies.append(start + _image_order(spec, h, w))
        else:
            bodies.append(start + h * w + _later_frames_order(spec, t - 1, h, w))
            first_frames.append(start + _first_frame_order(spec, h, w))
            outside[start : start + h * w] = False
    return torch.cat([*bodies, *first_frames, outside.nonzero().flatten()])


def _image_order(spec: LayoutSpec, h: int, w: int) -> Tensor:
    if spec.token_order == "mindiesd":
        return _first_frame_order(spec, h, w)
    return _window_key(1, h, w, spec.window or IMAGE_WINDOW).argsort()


def _first_frame_order(spec: LayoutSpec, h: int, w: int) -> Tensor:
    """Raster where it is protected whole, else an image's windows. The reference tiles it where the tiles fit."""
    if spec.token_order == "mindiesd":
        return _tile_key(h, w).argsort() if h % _TILE == 0 and w % _TILE == 0 else torch.arange(h * w)
    return torch.arange(h * w) if spec.first_frame else _window_key(1, h, w, IMAGE_WINDOW).argsort()


def _later_frames_order(spec: LayoutSpec, t: int, h: int, w: int) -> Tensor:
    if spec.token_order == "mindiesd":
        return (torch.arange(t)[:, None] * (h * w) + _tile_key(h, w).argsort()).flatten()
    return _window_key(t, h, w, spec.window or VIDEO_WINDOW).argsort()


def _window_key(t: int, h: int, w: int, window: Grid) -> Tensor:
    """Sort by (band, w, t % wt, h % wh), w running backwards in odd bands.

    A band is wt frames by wh rows at full width, walked column by column and back along the next one, like a plough.
    So consecutive tokens are neighbours whatever the remainders of t, h and w are, with no padding; only where the
    last band of wt frames meets the first of the next does a block have two parts.
    """
    wt, wh, _ = window
    frame, row, column = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
    band = (frame // wt) * -(-h // wh) + row // wh
    along = torch.where(band % 2 == 0, column, w - 1 - column)
    return (((band * w + along) * wt + frame % wt) * wh + row % wh).flatten()


def _compact_parts(order: Tensor, labels: Tensor, clips: tuple[Clip, ...]) -> Tensor:
    """Tokens sorted inside of their blocks of 128, so that halves of a block, and halves of these, are compact.

    A 2x8x8 window is then made of parts of 2x4x4 tokens: means of parts predict better, and finer blocks of keys choose
    better, than with the strips that the plough leaves. Each half is the nearer one along its longest side. Blocks that
    are not full, or not of one clip alone, stay as they are.
    """
    whole = len(order) // _WHOLE * _WHOLE
    blocks = order[:whole].view(-1, _WHOLE)
    of_blocks = labels[blocks]
    pure = (of_blocks[:, :1] == of_blocks).all(1) & (of_blocks[:, 0] != _NO_CLIP)
    places = torch.zeros((len(order), 3), dtype=torch.int64)
    for start, t, h, w in clips:
        tokens = torch.arange(t * h * w)
        places[start : start + t * h * w] = torch.stack([tokens // (h * w), tokens // w % h, tokens % w], 1)
    parts = blocks[pure]
    while parts.shape[1] > _PART:
        where = places[parts]  # [parts, tokens, 3]
        longest = (where.amax(1) - where.amin(1)).argmax(1)
        along = where.gather(2, longest[:, None, None].expand(-1, parts.shape[1], 1)).squeeze(2)
        parts = parts.gather(1, along.argsort(dim=1, stable=True)).view(-1, parts.shape[1] // 2)
    sorted_blocks = blocks.clone()
    sorted_blocks[pure] = parts.view(-1, _WHOLE)
    return torch.cat([sorted_blocks.flatten(), order[whole:]])


def _tile_key(h: int, w: int) -> Tensor:
    """Full 8x8 tiles row by row, then the bottom h%8 rows at full width, then the right w%8 columns of tiled rows."""
    tiled_h, tiled_w = h - h % _TILE, w - w % _TILE
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    tile = (y // _TILE) * (tiled_w // _TILE) + x // _TILE
    in_tiles = tile * _TILE * _TILE + (y % _TILE) * _TILE + x % _TILE
    bottom = tiled_h * tiled_w + (y - tiled_h) * w + x
    right = tiled_h * tiled_w + (h - tiled_h) * w + y * (w - tiled_w) + (x - tiled_w)
    key = torch.where(y >= tiled_h, bottom, torch.where(x >= tiled_w, right, in_tiles))
    return key.flatten()


def _mindiesd_order(spec: LayoutSpec) -> Tensor:
    """Frame by frame, the first one in its place, then the text."""
    assert spec.latent_shape is not None
    t, h, w = spec.latent_shape
    frames = torch.cat([_first_frame_order(spec, h, w), h * w + _later_frames_order(spec, t - 1, h, w)])
    return torch.cat([spec.txt_len + frames, torch.arange(spec.txt_len)])


def _mindiesd_protected(spec: LayoutSpec) -> Tensor:
    """Exactly the first ceil(hw / block) blocks, of a video, and the last ceil(txt / block), as the reference does."""
    assert spec.latent_shape is not None
    t, h, w = spec.latent_shape
    blocks = torch.arange(-(-spec.seq_len // spec.block_size))
    first = -(-h * w // spec.block_size) if spec.first_frame and t > 1 else 0
    last = -(-spec.txt_len // spec.block_size)
    return (blocks < first) | (blocks >= len(blocks) - last)


def _protected_by_label(labels: Tensor, block_size: int) -> Tensor:
    """A block is protected if it holds a token of no clip, or tokens of two clips."""
    changes = torch.zeros_like(labels, dtype=torch.bool)
    changes[1:] = labels[1:] != labels[:-1]
    changes[::block_size] = False  # between two blocks nothing is mixed
    return _any_per_block((labels == _NO_CLIP) | changes, block_size)


def _any_per_block(flags: Tensor, block_size: int) -> Tensor:
    """bool [S] -> bool [ceil(S / block_size)]."""
    padding = -len(flags) % block_size
    return torch.nn.functional.pad(flags, (0, padding)).view(-1, block_size).any(-1)
