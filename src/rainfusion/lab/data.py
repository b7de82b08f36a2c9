"""Clips that a program draws, and the prompts that they follow: made on the device, batch by batch, from a seed.

Three striped shapes move and turn over a textured background that pans; later shapes are in front of earlier ones.
What a shape is and does is in the prompt; its exact size, place, angle and stripes are left to chance, as is the
background's texture. Lengths are shares of the height, y points down and (0, 0) is the centre of the picture.

A prompt has 16 tokens: the background's motion, then kind, colour, motion, start and turn of each shape.

>>> prompt = encode("left", ("star", "red", "right", "left", "still"), ("disc", "blue", "still", "top", "clockwise"),
...                 ("ring", "white", "up", "bottom right", "still"))
>>> prompt.shape
torch.Size([16])
>>> print(describe(prompt))
background left; red star, from left, right; blue disc, from top, still, clockwise; white ring, from bottom right, up
>>> parse(describe(prompt)).equal(prompt)
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIRECTIONS = ("up left", "up", "up right", "left", "still", "right", "down left", "down", "down right")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
KINDS = ("disc", "ring", "triangle", "square", "star")
COLOURS = {
    "red": (0.8, -0.75, -0.75),
    "orange": (0.85, 0.1, -0.8),
    "yellow": (0.8, 0.75, -0.7),
    "green": (-0.7, 0.65, -0.65),
    "cyan": (-0.7, 0.65, 0.75),
    "blue": (-0.65, -0.5, 0.85),
    "pink": (0.8, -0.4, 0.6),
    "white": (0.8, 0.8, 0.8),
}
TURNS = ("anticlockwise", "still", "clockwise")

SHAPES = 3
WORDS = dict(pan=DIRECTIONS, kind=KINDS, colour=tuple(COLOURS), motion=DIRECTIONS, start=PLACES, turn=TURNS)
OF_A_SHAPE = ("kind", "colour", "motion", "start", "turn")
FIELDS = ("pan", *SHAPES * OF_A_SHAPE)  # what each token of a prompt says
TEXT_TOKENS = len(FIELDS)
EMPTY = 0  # the token that says nothing
VOCABULARY = 1 + sum(len(words) for words in WORDS.values())

PAN = 1 / 160  # how far the background moves in a frame: half a picture in 81
SPEED = 1 / 150  # how far a shape moves in a frame: from one side to the other in 81
TURN = math.radians(2)  # how far a shape turns in a frame
SPACING = 0.27  # the distance between neighbouring places
OUTLINE = 0.022
EDGE = 1.5  # pixels over which an edge fades
# Corners of each kind, and how far the middle between two of them is from the centre, with corners at a distance of 1;
# disc and ring have none, and what stands for them is ignored.
CORNERS = (3, 3, 3, 4, 5)
WAISTS = (0.5, 0.5, 0.5, math.cos(math.pi / 4), 0.45)
RADII = (1.0, 1.05, 1.3, 1.2, 1.3)  # corners are further out than rims, for areas that look alike


def encode(pan: str, *shapes: Sequence[str]) -> Tensor:
    """Words -> one prompt, int64 [16]. Each shape is (kind, colour, motion, start, turn), from back to front."""
    if len(shapes) != SHAPES or any(len(shape) != len(OF_A_SHAPE) for shape in shapes):
        raise ValueError(f"shapes must be {SHAPES} times ({', '.join(OF_A_SHAPE)}), got {shapes}")
    words = (pan, *(word for shape in shapes for word in shape))
    return torch.tensor([_token(field, word) for field, word in zip(FIELDS, words, strict=True)])


def _token(field: str, word: str) -> int:
    if word not in WORDS[field]:
        raise ValueError(f"{field} must be one of {', '.join(WORDS[field])}, got {word!r}")
    return _first_token(field) + WORDS[field].index(word)


def _first_token(field: str) -> int:
    names = list(WORDS)
    return 1 + sum(len(WORDS[name]) for name in names[: names.index(field)])


def describe(prompt: Tensor) -> str:
    """One prompt, int64 [16], in words."""
    pan, *rest = (
        WORDS[field][token - _first_token(field)] for field, token in zip(FIELDS, prompt.tolist(), strict=True)
    )
    parts = [f"background {pan}"]
    for i in range(0, len(rest), len(OF_A_SHAPE)):
        kind, colour, motion, start, turn = rest[i : i + len(OF_A_SHAPE)]
        parts.append(f"{colour} {kind}, from {start}, {motion}" + (f", {turn}" if turn != "still" else ""))
    return "; ".join(parts)


def parse(text: str) -> Tensor:
    """What `describe` says -> the prompt, int64 [16]."""
    background, *shapes = (part.strip() for part in text.split(";"))
    name, _, pan = background.partition(" ")
    if name != "background":
        raise ValueError(f"a prompt must begin with 'background' and its motion, got {background!r}")
    return encode(pan.strip(), *map(_parse_shape, shapes))


def _parse_shape(text: str) -> tuple[str, ...]:
    look, *rest = (part.strip() for part in text.split(","))
    colour, _, kind = look.partition(" ")
    if len(rest) not in (2, 3) or not rest[0].startswith("from "):
        raise ValueError(f"a shape must be 'COLOUR KIND, from PLACE, MOTION' and perhaps ', TURN', got {text!r}")
    turn = rest[2] if len(rest) == 3 else "still"
    return kind.strip(), colour, rest[1], rest[0].removeprefix("from ").strip(), turn


def random_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Random prompts, int64 [B, 16] on the generator's device.

    Shapes start in different places and never move away from the centre, so that they meet.
    """
    device = generator.device
    chosen = {name: _random_indices(count, name, generator) for name in OF_A_SHAPE}
    start = torch.rand(count, len(PLACES), generator=generator, device=device).topk(SHAPES).indices
    motion = _grid_vector(chosen["motion"])
    motion = torch.where(motion * _grid_vector(start) > 0, -motion, motion)
    chosen |= dict(start=start, motion=((motion + 1) * motion.new_tensor([3, 1])).sum(-1))
    pan = _random_indices(count, "pan", generator)[:, :1] + _first_token("pan")
    shapes = torch.stack([chosen[name] + _first_token(name) for name in OF_A_SHAPE], -1)  # [B, shapes, 5]
    return torch.cat([pan, shapes.flatten(1)], 1)


def _random_indices(count: int, field: str, generator: torch.Generator) -> Tensor:
    return torch.randint(len(WORDS[field]), (count, SHAPES), generator=generator, device=generator.device)


def _grid_vector(index: Tensor) -> Tensor:
    """Index of a direction or a place [...] -> (y, x) in -1, 0, 1: [..., 2]."""
    return torch.stack([index // 3 - 1, index % 3 - 1], -1)


def render(prompts: Tensor, frames: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Prompts [B, 16] -> clips [B, 3, T, H, W] in [-1, 1]; one frame is an image, the first of its clip."""
    device = generator.device
    indices = prompts.to(device) - torch.tensor([_first_token(field) for field in FIELDS], device=device)
    pan, shapes = indices[:, 0], indices[:, 1:].unflatten(1, (SHAPES, len(OF_A_SHAPE)))
    place = _pixels(frames, height, width, device)  # [T, H, W, 2]
    picture = _background(pan, place, generator)
    colours, cover = _shapes(shapes, place, 1 / height, generator)
    for i in range(SHAPES):  # shapes are painted from back to front
        picture = torch.lerp(picture, colours[:, i], cover[:, i])
    return picture.clamp(-1, 1)


def images(prompts: Tensor, size: int, seed: int = 0) -> Tensor:
    """Prompts [B, 16] -> pictures to begin with, [B, 3, size, size] in [0, 1] on the CPU.

    Each has a seed of its own, the next the next: it is the same whatever else is in its batch.
    """
    drawn = [
        render(prompt[None].cpu(), 1, size, size, torch.Generator().manual_seed(seed + i))[0, :, 0]
        for i, prompt in enumerate(prompts)
    ]
    return torch.stack(drawn) / 2 + 0.5


def batch(count: int, frames: int, height: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clips [B, 3, T, H, W] and their prompts [B, 16]."""
    prompts = random_prompts(count, generator)
    return render(prompts, frames, height, width, generator), prompts


def _pixels(frames: int, height: int, width: int, device: torch.device) -> Tensor:
    """(y, x) of the pixels' centres: [T, H, W, 2]."""
    y = (torch.arange(height, device=device) + 0.5) / height - 0.5
    x = (torch.arange(width, device=device) + 0.5 - width / 2) / height
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).expand(frames, -1, -1, -1)


def _background(pan: Tensor, place: Tensor, generator: torch.Generator) -> Tensor:
    """Plane waves in muted colours, which move together: [B, 3, T, H, W]."""
    waves, device, count = 6, generator.device, len(pan)
    cycles = torch.linspace(0.8, 4.5, waves, device=device)  # cycles over a picture: few enough for 24 pixels
    angle = 2 * math.pi * torch.rand(2, count, waves, generator=generator, device=device)
    direction = torch.stack([angle[0].sin(), angle[0].cos()], -1) * cycles[:, None]  # [B, waves, 2]
    time = torch.arange(len(place), device=device)[:, None, None, None]
    seen = place - PAN * time * _grid_vector(pan)[:, None, None, None, :]  # [B, T, H, W, 2]
    direction = direction[:, :, None, None, None]
    phase = 2 * math.pi * (seen[:, None] * direction).sum(-1) + angle[1][:, :, None, None, None]
    base = 0.7 * torch.rand(count, 3, generator=generator, device=device) - 0.45
    tint = torch.randn(count, 4, waves, generator=generator, device=device) / cycles.sqrt()
    tint = 0.13 * tint[:, :3] + 0.15 * tint[:, 3:]  # some of each wave is grey
    return torch.einsum("bkthw,bck->bcthw", phase.cos(), tint) + base[:, :, None, None, None]


def _shapes(shapes: Tensor, place: Tensor, pixel: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices [B, shapes, 5] -> colours [B, shapes, 3, T, H, W] and how much of a pixel each covers (1 channel)."""
    kind, colour, motion, start, turn = shapes.unbind(-1)
    chance = torch.rand(5, *kind.shape, generator=generator, device=kind.device)
    time = torch.arange(len(place), device=kind.device)[:, None]
    centre = SPACING * _grid_vector(start) + 0.1 * (chance[:2].movedim(0, -1) - 0.5)
    path = centre[:, :, None] + SPEED * time * _grid_vector(motion)[:, :, None]  # [B, shapes, T, 2]
    angle = 2 * math.pi * chance[2][..., None] + TURN * time[:, 0] * (turn - 1)[..., None]  # [B, shapes, T]
    local = _turn(place - path[:, :, :, None, None], angle[..., None, None])  # [B, shapes, T, H, W, 2]
    radius = (0.15 + 0.04 * chance[3]) * kind.new_tensor(RADII, dtype=torch.float32)[kind]
    distance = _distance(kind, radius, local)
    return _paint(colour, chance[4], local, distance, pixel), _inside(distance, pixel)[:, :, None]


def _turn(place: Tensor, angle: Tensor) -> Tensor:
    """Places [..., 2] as seen by a shape that has turned clockwise by angle [...]."""
    y, x = place.unbind(-1)
    sin, cos = angle.sin(), angle.cos()
    return torch.stack([y * cos - x * sin, x * cos + y * sin], -1)


def _distance(kind: Tensor, radius: Tensor, local: Tensor) -> Tensor:
    """How far outside the shape's edge places [..., 2] are, negative inside: [B, shapes, T, H, W]."""
    kind, radius = kind[:, :, None, None, None], radius[:, :, None, None, None]
    far = local.square().sum(-1).sqrt()
    disc, ring = far - radius, (far - 0.72 * radius).abs() - 0.28 * radius
    half = math.pi / torch.tensor(CORNERS, device=kind.device)[kind]  # the angle from a corner to the middle of an edge
    waist = torch.tensor(WAISTS, device=kind.device)[kind]
    bearing = torch.atan2(local[..., 1], local[..., 0])
    bearing = (torch.remainder(bearing + half, 2 * half) - half).abs()  # all edges are folded onto one
    along, across = waist * half.sin(), 1 - waist * half.cos()  # the normal of the edge from the corner to the waist
    edge = (along * (far * bearing.cos() - radius) + across * far * bearing.sin()) / torch.hypot(along, across)
    return torch.where(kind == 0, disc, torch.where(kind == 1, ring, edge))


def _inside(distance: Tensor, pixel: float) -> Tensor:
    """The share of a pixel that is inside an edge, 0 to 1."""
    return (0.5 - distance / (EDGE * pixel)).clamp(0, 1)


def _paint(colour: Tensor, phase: Tensor, local: Tensor, distance: Tensor, pixel: float) -> Tensor:
    """Striped colours with a dark outline: [B, shapes, 3, T, H, W]."""
    palette = torch.tensor(list(COLOURS.values()), device=colour.device)
    plain = palette[colour][..., None, None, None]  # [B, shapes, 3, 1, 1, 1]
    stripes = torch.sin(2 * math.pi * (local[..., 0] / 0.13 + phase[:, :, None, None, None]))[:, :, None]
    inner = _inside(distance + OUTLINE, pixel)[:, :, None]
    return torch.lerp(0.35 * plain - 0.6, plain + 0.28 * stripes, inner)
