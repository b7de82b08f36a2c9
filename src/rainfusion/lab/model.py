"""A plain DiT over text and patches, small enough to keep and deep enough to need its attention.

    x = [text, patches of the first frame, patches of four frames each]     [B, S, dim]
    q, k, v = heads(modulate(norm(x)))                             [B, N, S, 64], q and k normed, then rotated
    x = x + gate * out(attention(q, k, v, Place(...)))
    x = x + gate * mlp(modulate(norm(x)))

Time is cut as the VAEs of video models cut it: the first frame is alone in its tokens, later tokens have four frames.
An image to begin with is added to the tokens of the first frame, which is noise like the others.
Attention is whatever the caller passes in. It is never compiled with the rest, and is told where it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rainfusion.api import sparse_attention
from rainfusion.lab.data import SHAPES, TEXT_TOKENS, VOCABULARY
from rainfusion.options import Method, MethodOptions
from rainfusion.profiles import Profile
from rainfusion.qualities import QualityName, checked_quality
from rainfusion.schedules import Schedule, ScheduleSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

HEAD_DIM = 64
ROTARY_PAIRS = (8, 12, 12)  # how many of the 32 pairs of a head turn with t, h and w
ROTARY_BASE = 100.0  # the slowest pair turns by a third of a radian over 32 tokens
TIME_WAVES = 128

Grid = tuple[int, int, int]


class Place(NamedTuple):
    """Where in a sample an attention call is."""

    layer: int
    step: int
    grid: Grid  # (t, h, w) of the tokens after the text
    text: int  # how many text tokens come before the grid
    steps: int = 1  # of the sample
    from_image: bool = False  # whether the clip begins with a given image


Attention = Callable[[Tensor, Tensor, Tensor, Place], Tensor]  # q, k, v [B, N, S, D] -> [B, N, S, D]
Rotation = tuple[Tensor, Tensor]  # cos and sin, [S, D / 2]


def dense(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
    """Full attention by torch."""
    return F.scaled_dot_product_attention(q, k, v)


def schedule_at(schedule: Schedule, place: Place) -> Schedule:
    """Auto is constant in images and from an image, as in `enable`."""
    return Schedule() if schedule.is_auto and (place.from_image or place.grid[0] == 1) else schedule


def sparse(  # type: ignore[misc] # sparsity is among the options, too: by name it is the same
    sparsity: float = 0.0,
    *,
    profile: Profile | None = None,
    schedule: ScheduleSource = "auto",
    backend: str = "auto",
    quality: QualityName | None = None,
    **options: Unpack[MethodOptions],
) -> Attention:
    """An attention that calls `rainfusion.sparse_attention` as any model would.

    Args:
        sparsity: the share of blocks to skip.
        profile: budgets by layer and head instead of one sparsity; its layers are "0", "1", ...
        schedule: how the blocks are shared out among the steps, see `enable`; `sparsity` is the mean.
        backend: as for `sparse_attention`.
        quality: a word instead of a sparsity, see `enable`.
        options: the fields of `Method`; those left out are as `enable` has them.
    """
    if profile is not None and sparsity:
        raise ValueError(f"profile takes the place of sparsity: leave sparsity out, got {sparsity}")
    share = None if quality is not None and not sparsity else sparsity  # a word has the sparsity of the task
    method, shape = Method.recommended(**{"sparsity": share, **options}), Schedule.of(schedule)
    word = None if quality is None else checked_quality(quality, method, profile)
    if shape.is_auto and profile is not None:  # whose budgets are taken as they were measured, as in `enable`
        shape = Schedule()
    elif shape.is_auto and word is not None:
        shape = Schedule.of(word.schedule)

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        first, chosen = 0, method
        if profile is not None:
            chosen = replace(method, **profile.arguments(str(place.layer)))
        elif word is not None:
            first, chosen = word.dense_steps(place.steps), replace(method, sparsity=word.sparsity(place.grid[0]))
        if place.step < first:
            return dense(q, k, v, place)
        chosen = schedule_at(shape, place).method_at(chosen, place.step - first, place.steps - first)
        grid = None if method.sparse_type is None else place.grid
        return sparse_attention(q, k, v, method=chosen, txt_len=place.text, latent_shape_q=grid, backend=backend)

    return attend


def arguments_at(place: Place) -> dict[str, Any]:
    """Keywords of `sparse_attention` that say where the text and the grid of a call are."""
    return dict(sparse_type="rf_v2", txt_len=place.text, latent_shape_q=place.grid)


@dataclass(frozen=True)
class Config:
    """Sizes of a model and of the clips that it is for."""

    frames: int = 81
    size: int = 72  # height and width in pixels
    patch: int = 3  # height and width of a patch in pixels
    together: int = 4  # frames that share their tokens, but for the first, which is alone
    dim: int = 256
    depth: int = 8
    mlp: int = 1024
    text: int = TEXT_TOKENS
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        if self.dim % HEAD_DIM:
            raise ValueError(f"dim must be a multiple of {HEAD_DIM}, got {self.dim}")
        if self.size % self.patch:
            raise ValueError(f"size must be a multiple of patch {self.patch}, got {self.size}")
        if self.frames < 1 or (self.frames - 1) % self.together:
            raise ValueError(f"frames must be 1 and a multiple of together {self.together}, got {self.frames}")

    def clip_size(
        self, frames: int | None, size: int | None, *, names: tuple[str, str] = ("frames", "size")
    ) -> tuple[int, int]:
        """Frames and pixels of a clip to sample; None stands for the model's own.

        Raises ValueError where patches do not cover such a clip; `names` are those of the arguments, for the message.
        """
        frames, size = self.frames if frames is None else frames, self.size if size is None else size
        if frames < 1:
            raise ValueError(f"{names[0]} must be at least 1, got {frames}")
        if (frames - 1) % self.together:
            before = frames - (frames - 1) % self.together
            raise ValueError(
                f"{names[0]} must be 1 and a multiple of {self.together}, since later tokens have so many frames, "
                f"got {frames}; try {before} or {before + self.together}"
            )
        if size < 1 or size % self.patch:
            below, above = size // self.patch * self.patch, (size // self.patch + 1) * self.patch
            near = f"{below} or {above}" if below > 0 else str(max(above, self.patch))
            raise ValueError(
                f"{names[1]} must be a multiple of {self.patch}, the side of this model's patches, got {size}; try "
                f"{near}"
            )
        return frames, size

    @property
    def heads(self) -> int:
        """How many attention heads a layer has."""
        return self.dim // HEAD_DIM

    @property
    def channels(self) -> int:
        """How many numbers a patch of one frame has."""
        return 3 * self.patch**2

    def grid(self, frames: int, size: int) -> Grid:
        """The tokens of a clip, (t, h, w)."""
        return 1 + (frames - 1) // self.together, size // self.patch, size // self.patch


class Block(nn.Module):
    """The weights of a layer; `enter` and `leave` are what it does before and after attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.offset = nn.Parameter(torch.zeros(6, dim))  # added to the modulation that all layers share
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_gain = nn.Parameter(torch.ones(HEAD_DIM))
        self.k_gain = nn.Parameter(torch.ones(HEAD_DIM))
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, config.mlp), nn.GELU("tanh"), nn.Linear(config.mlp, dim))


def enter(block: Block, x: Tensor, modulation: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, dim], modulation [B, 6, dim] -> q, k, v [B, N, S, D]."""
    shift, scale = (modulation + block.offset)[:, :2].unbind(1)
    q, k, v = block.qkv(modulate(x, shift, scale)).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    q = rotate(_unit(q) * block.q_gain, rotation)
    k = rotate(_unit(k) * block.k_gain, rotation)
    return q.to(v.dtype), k.to(v.dtype), v


def leave(block: Block, x: Tensor, out: Tensor, modulation: Tensor) -> Tensor:
    """x [B, S, dim] and what attention gave [B, N, S, D] -> the next x."""
    gate, shift, scale, mlp_gate = (modulation + block.offset)[:, 2:].unbind(1)
    x = x + gate[:, None] * block.out(out.transpose(1, 2).flatten(2))
    moved: Tensor = block.mlp(modulate(x, shift, scale))
    return x + mlp_gate[:, None] * moved


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x) (1 + scale) + shift, with shift and scale [B, dim]."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


def _unit(x: Tensor) -> Tensor:
    """x / rms(x), in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Pairs (i, i + D/2) of x [..., S, D] turned by their token's angles."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def angles(positions: Tensor) -> Tensor:
    """Positions (t, h, w) [S, 3] -> angles [S, 32]."""
    speeds = [
        ROTARY_BASE ** -(torch.arange(pairs, dtype=torch.float32, device=positions.device) / pairs)
        for pairs in ROTARY_PAIRS
    ]
    return torch.cat([positions[:, axis, None] * speed for axis, speed in enumerate(speeds)], -1)


def grid_positions(grid: Grid, size: int) -> Tensor:
    """(t, h, w) of a grid's tokens [S, 3]. A coarser grid spans the same `size` x `size` positions."""
    t, h, w = grid
    rows, columns = ((torch.arange(n) + 0.5) * (size / h) - 0.5 for n in (h, w))
    return torch.stack(torch.meshgrid(torch.arange(t).float(), rows, columns, indexing="ij"), -1).flatten(0, 2)


@lru_cache(maxsize=16)
def grid_rotation(grid: Grid, size: int, text: int, device: torch.device) -> Rotation:
    """The rotation of text, which is not turned, and of a grid after it."""
    with torch.inference_mode(False), torch.no_grad():
        turns = torch.cat([torch.zeros(text, HEAD_DIM // 2), angles(grid_positions(grid, size))])
        return turns.cos().to(device), turns.sin().to(device)


class DiT(nn.Module):
    """Velocity of a clip at a time between data (0) and noise (1), given a prompt."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.first = nn.Linear(config.channels, dim)
        self.image = nn.Linear(config.channels, dim)  # its bias says that there is one
        self.patches = nn.Linear(config.together * config.channels, dim)
        self.places = nn.Linear(HEAD_DIM, dim, bias=False)  # prompts name places, and without this they are learnt late
        self.words = nn.Embedding(config.vocabulary, dim)
        self.slots = nn.Parameter(0.3 * torch.randn(config.text, dim))
        nn.init.normal_(self.words.weight, std=0.3)
        self.time = nn.Sequential(nn.Linear(2 * TIME_WAVES, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.modulation = nn.Linear(dim, 6 * dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.last = nn.Linear(dim, 2 * dim)
        self.first_pixels = nn.Linear(dim, config.channels)
        self.pixels = nn.Linear(dim, config.together * config.channels)
        for layer in (self.modulation, self.last, self.first_pixels, self.pixels):  # every layer starts as the identity
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self._enter, self._leave = enter, leave

    def compile_layers(self) -> None:
        """Compiles what is around attention: once for each shape, not for each layer."""
        self._enter = torch.compile(enter, dynamic=False)
        self._leave = torch.compile(leave, dynamic=False)

    def forward(
        self,
        clips: Tensor,
        time: Tensor,
        prompts: Tensor,
        attention: Attention = dense,
        step: int = 0,
        image: Tensor | None = None,
    ) -> Tensor:
        """clips [B, 3, T, H, W], time [B], prompts [B, text], image [B, 3, H, W] -> velocity [B, 3, T, H, W]."""
        config = self.config
        first, patches, grid = to_patches(clips, config.patch, config.together)
        rotation = grid_rotation(grid, config.size // config.patch, config.text, clips.device)
        places = self.places(torch.cat(rotation, -1)[config.text :])  # [t*h*w, dim]
        begin = self.first(first)
        if image is not None:
            begin = begin + self.image(to_patches(image[:, :, None], config.patch, config.together)[0])
        x = torch.cat([begin, self.patches(patches)], 1) + places
        x = torch.cat([self.read(prompts), x], 1)
        condition = self.time(time_waves(time))
        modulation = self.modulation(condition).unflatten(-1, (6, -1))
        for layer, block in enumerate(cast("Iterable[Block]", self.blocks)):
            q, k, v = self._enter(block, x, modulation, rotation)
            out = attention(q, k, v, Place(layer, step, grid, config.text, from_image=image is not None))
            x = self._leave(block, x, out, modulation)
        x = modulate(x[:, config.text :], *self.last(condition).chunk(2, -1))
        ahead = grid[1] * grid[2]
        return from_patches(self.first_pixels(x[:, :ahead]), self.pixels(x[:, ahead:]), grid, config.patch)

    def read(self, prompts: Tensor) -> Tensor:
        """Prompts [B, text] -> tokens [B, text, dim]. A word knows the others of its shape, as after a text encoder."""
        words: Tensor = self.words(prompts)
        of_shapes = words[:, 1:].unflatten(1, (SHAPES, -1))
        around = of_shapes.sum(2, keepdim=True).expand_as(of_shapes).flatten(1, 2)
        return torch.cat([words[:, :1], words[:, 1:] + around], 1) + self.slots


def time_waves(time: Tensor) -> Tensor:
    """Times [B] -> waves [B, 256]: from a fraction of a wave to 250 of them between 0 and 1."""
    speeds = torch.logspace(0, math.log10(500 * math.pi), TIME_WAVES, device=time.device)
    phase = time[:, None] * speeds
    return torch.cat([phase.cos(), phase.sin()], -1)


def to_patches(clips: Tensor, patch: int, together: int) -> tuple[Tensor, Tensor, Grid]:
    """Clips [B, 3, T, H, W] -> patches of the first frame [B, h*w, 3 * patch^2], those of the others, which have
    `together` frames each [B, (t-1)*h*w, 3 * together * patch^2], and the grid (t, h, w) of both."""
    first, others = _cut(clips[:, :, :1], patch, 1), _cut(clips[:, :, 1:], patch, together)
    grid = (1 + others.shape[1], *first.shape[2:4])
    return first.flatten(4).flatten(1, 3), others.flatten(4).flatten(1, 3), cast(Grid, grid)


def _cut(clips: Tensor, patch: int, together: int) -> Tensor:
    """[B, 3, T, H, W] -> [B, t, h, w, 3, together, patch, patch]"""
    _, _, frames, height, width = clips.shape
    x = clips.unflatten(4, (width // patch, patch)).unflatten(3, (height // patch, patch))
    cut: Tensor = x.unflatten(2, (frames // together, together)).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return cut


def from_patches(first: Tensor, others: Tensor, grid: Grid, patch: int) -> Tensor:
    """What `to_patches` was given: clips [B, 3, T, H, W]."""
    t, h, w = grid
    return torch.cat([_join(first, (1, h, w), patch), _join(others, (t - 1, h, w), patch)], 2)


def _join(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """[B, t*h*w, 3 * together * patch^2] -> [B, 3, T, H, W]"""
    together = patches.shape[2] // (3 * patch**2)
    x = patches.unflatten(2, (3, together, patch, patch)).unflatten(1, grid)
    joined: Tensor = x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)
    return joined
