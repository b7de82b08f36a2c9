"""Where the picture lies in a model's attention sequence, read from the arguments of its forward.

A rule is a function (arguments by name, the model's config) -> the grids (t, h, w) of the clips in the sequence, one
after the other: what is generated first, then reference images. It raises `NoGrid` with the reason if there is none.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

from torch import Tensor

from rainfusion.checks import Grid
from rainfusion.integrations.scenes import NoGrid

T = TypeVar("T")
Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Sequence[int]]]
PatchKeys = str | tuple[str | None, str | None, str | None]  # of the config: one key for all, or t, h, w (None: 1)


# ---------------------------------------------------------------------------------------------------------------------
# rules


def latent_shape(
    argument: str = "hidden_states", *, axes: tuple[int | None, int, int] = (2, 3, 4), patch: PatchKeys = "patch_size"
) -> Rule:
    """From the shape of the latents: `axes` are those of t, h and w (no t: an image); a last patch may be cut in time.

    `patch`: the config's key of the patch size, an int (of h and w) or a triple; or three keys.
    """

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        latents = _one_of_batch(argument, arguments)
        if latents.dim() <= max(axis for axis in axes if axis is not None):
            raise NoGrid(f"{argument} has {latents.dim()} dimensions")
        sizes = [1 if axis is None else latents.shape[axis] for axis in axes]
        return [_patched(sizes, patches(patch, arguments, config))]

    return rule


def trailing_shape(argument: str = "hidden_states", *, patch: str = "patch_size") -> Rule:
    """From latents `[B, C, (T,) H, W]` of either kind: the config's patch size has as many numbers."""

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        latents = _one_of_batch(argument, arguments)
        sizes = [*(1,) * (5 - latents.dim()), *latents.shape[2:]]
        return [_patched(sizes, patches(patch, arguments, config))]

    return rule


def _one_of_batch(name: str, arguments: Mapping[str, Any]) -> Tensor:
    """A tensor, or the first of a list of them, one a sample, all of one shape."""
    latents = arguments.get(name)
    samples: Sequence[Any] = latents if isinstance(latents, (list, tuple)) else [latents]
    if not samples or not all(isinstance(sample, Tensor) for sample in samples):
        raise NoGrid(f"{name} is {type(latents).__name__}, not a tensor or a list of tensors")
    if any(sample.shape != samples[0].shape for sample in samples):
        raise NoGrid(f"the samples of {name} have different shapes")
    return samples[0]  # type: ignore[no-any-return]


def _patched(sizes: Sequence[int], patch: Grid) -> Grid:
    """A last patch may be cut in time."""
    return math.ceil(sizes[0] / patch[0]), sizes[1] // patch[1], sizes[2] // patch[2]


def numbers(*names: str, patch: PatchKeys = (None, None, None)) -> Rule:
    """From three arguments that say t, h and w."""

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        values = [arguments.get(name) for name in names]
        if not all(isinstance(value, int) for value in values):
            raise NoGrid(f"{', '.join(names)} are not all given as numbers")
        pt, ph, pw = patches(patch, arguments, config)
        t, h, w = (int(value) for value in values)  # type: ignore[arg-type]
        return [(math.ceil(t / pt), math.ceil(h / ph), math.ceil(w / pw))]

    return rule


def image_shapes(argument: str = "img_shapes") -> Rule:
    """From a list of (t, h, w) for each sample, or one such list: the target, then references."""

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        shapes = arguments.get(argument)
        if isinstance(shapes, (list, tuple)) and shapes and isinstance(shapes[0], list):
            if any(list(other) != list(shapes[0]) for other in shapes[1:]):
                raise NoGrid("the samples of the batch have different image shapes")
            shapes = shapes[0]
        if isinstance(shapes, tuple) and len(shapes) == 3 and isinstance(shapes[0], int):
            shapes = [shapes]
        if not isinstance(shapes, (list, tuple)) or not shapes:
            raise NoGrid(f"{argument} is {shapes!r}")
        return [(int(t), int(h), int(w)) for t, h, w in shapes]

    return rule


def image_ids(argument: str = "img_ids", *, columns: tuple[int, int] = (0, 1)) -> Rule:
    """From position ids, one row a token: a new number in the first column begins a picture, in the second one a row.

    bf16 ids are not exact above 256, so that only changes from token to token are looked at. A tensor is read once.
    """
    read_once = _ReadOnce(lambda ids: grids_of_ids(ids, columns))

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        ids = arguments.get(argument)
        if not isinstance(ids, Tensor):
            raise NoGrid(f"{argument} is {type(ids).__name__}, not a tensor")
        grids = read_once(ids)
        if grids is None:
            raise NoGrid(f"{argument} is not made of whole pictures")
        return grids

    return rule


def packed_video(positions: str = "position_ids", indices: str = "video_indices") -> Rule:
    """From the positions (t, h, w) of a packed sequence and the numbers of its visual tokens, the video last of them.

    Conditions may have the same positions as the first frame, but other tokens lie between.
    """
    read_once = _ReadOnce(_video_of_positions)

    def rule(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[Grid]:
        tensors = arguments.get(positions), arguments.get(indices)
        if not all(isinstance(x, Tensor) for x in tensors):
            raise NoGrid(f"{positions} and {indices} are not both tensors")
        grid = read_once(*tensors)  # type: ignore[arg-type]
        if grid is None:
            raise NoGrid(f"{positions} of the last tokens of {indices} are not frames of one size")
        return [grid]

    return rule


def _video_of_positions(positions: Tensor, indices: Tensor) -> Grid | None:
    rows = indices.to("cpu")
    gaps = (rows[1:] - rows[:-1] != 1).nonzero().flatten()
    last_run = rows[int(gaps[-1]) + 1 :] if len(gaps) else rows
    frames = grids_of_ids(positions.to("cpu")[last_run], (0, 1))
    if not frames or any(frame != frames[0] for frame in frames):
        return None
    return len(frames), *frames[0][1:]


class _ReadOnce(Generic[T]):
    """A function of tensors whose values it reads, which waits for the device: asked once for the same tensors."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[int, int | None], ...], tuple[list[weakref.ref[Tensor]], T]] = {}

    def __call__(self, *tensors: Tensor) -> T:
        key = tuple((id(x), None if x.is_inference() else x._version) for x in tensors)
        with self._lock:
            entry = self._known.get(key)
            if entry is None or any(ref() is not tensor for ref, tensor in zip(entry[0], tensors, strict=True)):
                for old in [old for old, (refs, _) in self._known.items() if any(ref() is None for ref in refs)]:
                    del self._known[old]
                entry = self._known[key] = [weakref.ref(tensor) for tensor in tensors], self._function(*tensors)
            return entry[1]


def grids_of_ids(ids: Tensor, columns: tuple[int, int]) -> list[Grid] | None:
    """Pictures (1, h, w), one after the other; None if a picture is not a rectangle."""
    rows = (ids[0] if ids.dim() == 3 else ids)[:, list(columns)].to("cpu")
    changes = rows[1:] != rows[:-1]
    starts = [0, *(changes[:, 0].nonzero().flatten() + 1).tolist(), rows.shape[0]]
    grids: list[Grid] = []
    for first, last in pairwise(starts):
        breaks = changes[first : last - 1, 1].nonzero().flatten()
        width = int(breaks[0]) + 1 if len(breaks) else last - first
        height = (last - first) // width
        if height * width != last - first or (breaks + 1).tolist() != [width * row for row in range(1, height)]:
            return None
        grids.append((1, height, width))
    return grids


def patches(keys: PatchKeys, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Grid:
    """The patch sizes (t, h, w); an argument of that name comes before the config's value."""

    def value(key: str) -> Any:
        given = arguments.get(key)
        return given if given is not None else config.get(key)

    if isinstance(keys, str):
        size = value(keys)
        if isinstance(size, (list, tuple)):
            return _triple(tuple(int(x) for x in size))
        return (1, int(size), int(size))
    return _triple(tuple(1 if key is None else int(value(key) or 1) for key in keys))


def _triple(sizes: tuple[int, ...]) -> Grid:
    t, h, w = (1,) * (3 - len(sizes)) + sizes
    return t, h, w
