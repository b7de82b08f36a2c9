"""The transformers of ComfyUI that are known: one row each, by the name of the class, or of one it derives from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rainfusion.checks import Grid
from rainfusion.integrations.scenes import NoGrid, Scene

Arguments = Mapping[str, Any]  # of the transformer's forward, by name
Rule = Callable[[Arguments, Any], Scene]  # and the transformer -> where the picture lies; raises NoGrid


class Model(NamedTuple):
    """What has to be known of a transformer in order to make its self-attention sparse."""

    attention: tuple[str, ...]  # modules with one self-attention call each; * is one part of a name
    scene: Rule


# ---------------------------------------------------------------------------------------------------------------------
# rules


def _tensor(name: str, given: Arguments) -> Tensor:
    found = given.get(name)
    if isinstance(found, (list, tuple)) and found:  # video and sound
        found = found[0]
    if not isinstance(found, Tensor):
        raise NoGrid(f"{name} is {type(found).__name__}, not a tensor")
    return found


def _grid(latents: Tensor, patch: Any) -> Grid:
    """[B, C, (T,) H, W] in patches; ComfyUI pads up to whole ones."""
    sizes = [*(1,) * (5 - latents.dim()), *latents.shape[2:]]
    parts = list(patch) if isinstance(patch, (tuple, list)) else [patch, patch]
    t, h, w = (math.ceil(size / part) for size, part in zip(sizes, [*(1,) * (3 - len(parts)), *parts], strict=True))
    return t, h, w


def _all_of(name: str, given: Arguments) -> list[Tensor]:
    """A list of latents, or none."""
    found = given.get(name)
    if found is None:
        return []
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    if not all(isinstance(latents, Tensor) for latents in found):
        raise NoGrid(f"{name} is not made of tensors")
    return found


def alone(given: Arguments, transformer: Any) -> Scene:
    """Nothing but the picture."""
    return Scene((_grid(_tensor("x", given), getattr(transformer, "patch_size", 1)),), alone=True)


def wan(given: Arguments, transformer: Any) -> Scene:
    """A reference image where the model has an entry for it, the video with more frames behind it, other clips."""
    has_entry = getattr(transformer, "ref_conv", None) is not None
    front = _grids("reference_latent", given, transformer) if has_entry else []
    return Scene((*front, _video(given, transformer), *_grids("context_latents", given, transformer)), alone=True)


def wan_with_reference_behind(given: Arguments, transformer: Any) -> Scene:
    """The video, the reference image, and, of a video that it continues, packed frames of several sizes."""
    clips = (_video(given, transformer), *_grids("reference_latent", given, transformer))
    return Scene(clips, alone=given.get("reference_motion") is None)


def wan_with_pose(given: Arguments, transformer: Any) -> Scene:
    """A reference image as the first frame, the video, a video of poses."""
    t, h, w = _video(given, transformer)
    first = sum(grid[0] for grid in _grids("reference_latent", given, transformer))
    return Scene(((first + t, h, w), *_grids("pose_latents", given, transformer)), alone=True)


def _video(given: Arguments, transformer: Any) -> Grid:
    """Of Wan, with the frames that are put behind it in time."""
    t, h, w = _grid(_tensor("x", given), transformer.patch_size)
    return t + sum(grid[0] for grid in _grids("time_dim_concat", given, transformer)), h, w


def _grids(name: str, given: Arguments, transformer: Any) -> list[Grid]:
    return [_grid(latents, transformer.patch_size) for latents in _all_of(name, given)]


def text_first(given: Arguments, transformer: Any) -> Scene:
    """Text, the picture."""
    picture = _grid(_tensor("x", given), transformer.patch_size)
    return Scene((picture,), _tensor("context", given).shape[1], after=0)


def text_first_references_last(given: Arguments, transformer: Any) -> Scene:
    """Text, the picture, reference images."""
    scene = text_first(given, transformer)
    return scene._replace(grids=(*scene.grids, *_grids("ref_latents", given, transformer)))


def hunyuan_video(given: Arguments, transformer: Any) -> Scene:
    """A reference image, the video, and text of several kinds: in front of them, in older versions behind."""
    clips = (*_grids("ref_latent", given, transformer), _grid(_tensor("x", given), transformer.patch_size))
    text = _tensor("context", given).shape[1]
    if getattr(transformer, "byt5_in", None) is not None:
        text += sum(tokens.shape[1] for tokens in _all_of("txt_byt5", given))
    text += sum(tokens.shape[1] for tokens in _all_of("clip_fea", given))
    text_is_last = getattr(transformer.double_blocks[0], "flipped_img_txt", False)
    return Scene(clips, 0, after=text) if text_is_last else Scene(clips, text, after=0)


def lumina(given: Arguments, transformer: Any) -> Scene:
    """Text (which the refiner of the picture does not see), reference images, the picture; each padded."""
    multiple = getattr(transformer, "pad_tokens_multiple", None) or 1
    grids = (*_grids("ref_latents", given, transformer), _grid(_tensor("x", given), transformer.patch_size))
    *gaps, after = (-math.prod(grid) % multiple for grid in grids)
    return Scene(grids, None, gaps=tuple(gaps) if any(gaps) else (), after=after)


def text_last(given: Arguments, transformer: Any) -> Scene:
    """The picture, with the one that it was made from at its right, then text."""
    picture, patch = _tensor("x", given), transformer.patch_size
    width = picture.shape[-1] + sum(other.shape[-1] for other in _all_of("image_cond", given))
    return Scene(((1, math.ceil(picture.shape[-2] / patch), math.ceil(width / patch)),))


def cosmos(given: Arguments, transformer: Any) -> Scene:
    """Nothing but the video, in patches of a size for time and one for space."""
    patch = (transformer.patch_temporal, transformer.patch_spatial, transformer.patch_spatial)
    return Scene((_grid(_tensor("x", given), patch),), alone=True)


# ---------------------------------------------------------------------------------------------------------------------
# the rows

_WAN = ("blocks.*.self_attn", "vace_blocks.*.self_attn")
_TWO_STACKS = ("double_blocks.*", "single_blocks.*")

MODELS: dict[str, Model] = {
    # video
    "WanModel": Model(_WAN, wan),  # 2.1, 2.2, VACE, Camera, Animate
    "WanModel_S2V": Model(_WAN, wan_with_reference_behind),
    "HumoWanModel": Model(_WAN, wan_with_reference_behind),
    "SCAILWanModel": Model(_WAN, wan_with_pose),
    "HunyuanVideo": Model(_TWO_STACKS, hunyuan_video),  # 1, 1.5, HunyuanImage 2.1
    "LTXVModel": Model(("transformer_blocks.*.attn1",), alone),  # and LTX-2
    "GeneralDIT": Model(("blocks.*.blocks.0.block.attn",), cosmos),  # Cosmos 1
    "MiniTrainDIT": Model(("blocks.*.self_attn",), cosmos),  # Cosmos-Predict2, Anima
    "Kandinsky5": Model(("visual_transformer_blocks.*.self_attention",), alone),
    # images
    "Flux": Model(_TWO_STACKS, text_first_references_last),  # 1, 2, Kontext
    "Chroma": Model(_TWO_STACKS, text_first),  # it is given references, and does not use them
    "QwenImageTransformer2DModel": Model(  # and -Edit, -Layered
        ("transformer_blocks.*.attn",), text_first_references_last
    ),
    "NextDiT": Model(("noise_refiner.*.attention", "layers.*.attention"), lumina),  # Lumina 2, Z-Image
    "HiDreamImageTransformer2DModel": Model(
        ("double_stream_blocks.*.block.attn1", "single_stream_blocks.*.block.attn1"), text_last
    ),
}


def find(transformer: Any) -> Model:
    """The row of this transformer's class, or of the nearest class that it derives from."""
    for kind in type(transformer).__mro__:
        if kind.__name__ in MODELS:
            return MODELS[kind.__name__]
    name = type(transformer).__name__
    raise ValueError(
        f"{name} is not a model of ComfyUI that rainfusion knows (it knows {', '.join(sorted(MODELS))}, and what "
        "derives from them): bypass the node, or add a row if you know how its self-attention sees the picture:\n\n"
        f'    rainfusion.integrations.comfyui.register_model("{name}", attention=["blocks.*.self_attn"],\n'
        "        scene=lambda arguments, transformer: Scene(((t, h, w),)))  # from the forward's arguments\n"
    )


def register_model(model: str | type, *, attention: Sequence[str], scene: Rule) -> None:
    """Makes a transformer of ComfyUI known to `apply`, or replaces what is known of it.

    Args:
        model: its class, or the name of it.
        attention: names of modules as in `named_modules()` in whose forward one self-attention call is made, with *
            for one part of a name.
        scene: a function (the forward's arguments by name, the transformer) -> `Scene`; it raises `NoGrid` with the
            reason where there is none.
    """
    if not isinstance(model, (str, type)):
        raise TypeError(f"model must be a class or the name of one, got {type(model).__name__}")
    globs = (attention,) if isinstance(attention, str) else tuple(attention)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"attention must be names of modules, such as ['blocks.*.self_attn'], got {attention!r}")
    if not callable(scene):
        raise TypeError(f"scene must be a function (arguments, transformer) -> Scene, got {scene!r}")
    MODELS[model if isinstance(model, str) else model.__name__] = Model(globs, scene)
