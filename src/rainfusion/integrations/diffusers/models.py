"""The models that are known: one row each, found by the name of the transformer's class, or of one it derives from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rainfusion import checks
from rainfusion.deprecation import warn_deprecated
from rainfusion.integrations.diffusers.grids import (
    Rule,
    image_ids,
    image_shapes,
    latent_shape,
    numbers,
    packed_video,
    trailing_shape,
)
from rainfusion.integrations.scenes import NoGrid, Scene

CALLS = ("dispatch", "active", "sdpa")


@dataclass(frozen=True)
class Model:
    """What has to be known of a transformer in order to make its self-attention sparse."""

    attention: tuple[str, ...]  # names of the self-attention modules; * is one part of a name
    grid: Rule  # the forward's arguments -> the grids of the clips, see `grids`
    # where tokens that are no clip lie: "none", "before", "after", or the name of the argument with those before
    others: str = "none"
    # how attention is called: through diffusers' "dispatch", through the process's "active" backend, or torch's "sdpa"
    call: str = "dispatch"
    pairs_are_keys: bool = False  # a mask [B, 1, S, S] is a key mask, valid queries times valid keys
    streams_apart: bool = False  # context parallelism splits text and picture each on its own
    unless: tuple[str, ...] = ()  # arguments that, if given, put tokens in another order

    def scene(self, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Scene:
        for name in self.unless:
            if arguments.get(name) is not None:
                raise NoGrid(f"with {name} the tokens lie in another order")
        found = self.grid(arguments, config)
        try:
            grids = tuple(checks.grid("grid", tuple(sizes)) for sizes in found)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the model's grid function must return [(t, h, w), ...], got {found!r}: {error}"
            ) from error
        if not grids:
            raise NoGrid("the list of clips is empty")
        return Scene(grids, self._before(arguments), self.others == "none")

    def _before(self, arguments: Mapping[str, Any]) -> int | None:
        if self.others == "before":
            return None
        if self.others in ("none", "after"):
            return 0
        text = arguments.get(self.others)
        if not isinstance(text, Tensor):
            raise NoGrid(f"{self.others} is {type(text).__name__}, not a tensor")
        return text.shape[1]


_PATCHES = ("patch_size_t", "patch_size", "patch_size")
_IMAGE = (None, 2, 3)  # axes of [B, C, H, W]
_BOTH_STACKS = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
_CHANNELS_LAST = (1, 2, 3)  # axes of [B, T, H, W, C], and of a sample [C, T, H, W]

_WAN = Model(("blocks.*.attn1",), latent_shape())
_FLUX = Model(_BOTH_STACKS, image_ids(), "encoder_hidden_states", streams_apart=True)

MODELS: dict[str, Model] = {
    # video
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": Model(("blocks.*.attn1", "vace_blocks.*.attn1"), latent_shape()),
    "WanAnimateTransformer3DModel": _WAN,
    "WanAnimate2Transformer3DModel": Model(("blocks.*.self_attn",), latent_shape(axes=_CHANNELS_LAST)),
    "SkyReelsV2Transformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": Model(_BOTH_STACKS, latent_shape(patch=_PATCHES), "after"),
    "HunyuanVideo15Transformer3DModel": Model(
        ("transformer_blocks.*.attn",), latent_shape(patch=_PATCHES), "after", pairs_are_keys=True
    ),
    "CogVideoXTransformer3DModel": Model(
        ("transformer_blocks.*.attn1",),
        latent_shape(axes=(1, 3, 4), patch=_PATCHES),
        "encoder_hidden_states",  # "before" would fit half a sequence, too, where the text is the longer part
        call="sdpa",
    ),
    "LTXVideoTransformer3DModel": Model(
        ("transformer_blocks.*.attn1",), numbers("num_frames", "height", "width")
    ),
    "LTX2VideoTransformer3DModel": Model(
        ("transformer_blocks.*.attn1",), numbers("num_frames", "height", "width", patch=_PATCHES), "after"
    ),
    "MochiTransformer3DModel": Model(
        ("transformer_blocks.*.attn1",), latent_shape(patch=(None, "patch_size", "patch_size")), "after", call="sdpa"
    ),
    "CosmosTransformer3DModel": Model(("transformer_blocks.*.attn1",), latent_shape(), call="active"),
    "Kandinsky5Transformer3DModel": Model(
        ("visual_transformer_blocks.*.self_attention",), latent_shape(axes=_CHANNELS_LAST), unless=("sparse_params",)
    ),
    "Kandinsky6Transformer3DModel": Model(
        ("visual_transformer_blocks.*.video_dec_block.self_attention",), latent_shape(axes=_CHANNELS_LAST)
    ),
    "MiniMaxH3Transformer3DModel": Model(("transformer_blocks.*.attn",), packed_video(), "before"),
    # images
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": replace(_FLUX, unless=("kv_cache_mode",)),
    "QwenImageTransformer2DModel": Model(
        ("transformer_blocks.*.attn",), image_shapes(), "encoder_hidden_states", streams_apart=True
    ),
    "SD3Transformer2DModel": Model(
        ("transformer_blocks.*.attn", "transformer_blocks.*.attn2"), latent_shape(axes=_IMAGE), "after", call="sdpa"
    ),
    "HiDreamImageTransformer2DModel": Model(
        ("double_stream_blocks.*.block.attn1", "single_stream_blocks.*.block.attn1"),
        latent_shape(axes=_IMAGE), "after", call="sdpa",
    ),
    "ZImageTransformer2DModel": Model(
        ("noise_refiner.*.attention", "layers.*.attention"),
        latent_shape("x", axes=_CHANNELS_LAST, patch=("f_patch_size", "patch_size", "patch_size")), "after",
    ),
    "HunyuanImageTransformer2DModel": Model(_BOTH_STACKS, trailing_shape(), "after"),
}  # fmt: skip


def known(model: Any) -> Model | None:
    """The row of this transformer's class, or of the nearest class that it derives from."""
    return next((MODELS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in MODELS), None)


def find(model: Any) -> Model:
    row = known(model)
    if row is not None:
        return row
    name = type(model).__name__
    raise ValueError(
        f"{name} is not a model that rainfusion knows (it knows {', '.join(sorted(MODELS))}). If you know how its "
        "self-attention sees the picture, add a row:\n\n"
        f'    rainfusion.register_model("{name}", attention=["transformer_blocks.*.attn1"],  # names of the modules\n'
        "        grid=lambda arguments, config: [(t, h, w)],  # from the forward's arguments, after patching\n"
        '        others="none")  # or "before", "after": where tokens that are not of the grid lie\n\n'
        "docs/adding_a_model.md has the details"
    )


def register_model(
    model: str | type,
    *,
    attention: Sequence[str],
    grid: Rule,
    others: str = "none",
    call: str = "dispatch",
    pairs_are_keys: bool = False,
    streams_apart: bool = False,
    unless: Sequence[str] = (),
) -> None:
    """Makes a transformer known to `enable`, or replaces what is known of it.

    Args:
        model: its class, or the name of it.
        attention: names of its self-attention modules as in `named_modules()`, with * for one part of a name.
        grid: a function (the forward's arguments by name, the model's config) -> `[(t, h, w), ...]`, the clips in the
            order in which they lie in the sequence, without gaps. `rainfusion.integrations.diffusers.grids`
            has the usual ones.
        others: where tokens lie that belong to no clip (text, padding): `"none"`, `"before"`, `"after"`, or the name
            of the forward's argument `[B, L, ...]` whose L tokens lie before, while the rest lies after.
        call: how attention is called: `"dispatch"` (diffusers' `dispatch_attention_fn` with the processor's backend),
            `"active"` (the same without it) or `"sdpa"` (torch's function).
        pairs_are_keys: the model hands over a key mask as `[B, 1, S, S]`.
        streams_apart: with context parallelism, text and picture are split each on its own.
        unless: arguments of the forward that, if given, put the tokens in another order, so that it stays dense.
    """
    if not isinstance(model, (str, type)):
        raise TypeError(f"model must be a class or the name of one, got {type(model).__name__}")
    name = model if isinstance(model, str) else model.__name__
    globs = (attention,) if isinstance(attention, str) else tuple(attention)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"attention must be names of modules, such as ['blocks.*.attn1'], got {attention!r}")
    if not callable(grid):
        raise TypeError(f"grid must be a function (arguments, config) -> [(t, h, w), ...], got {grid!r}")
    if others == "behind":
        warn_deprecated("others='behind' of register_model", "others='after'")
        others = "after"
    if not isinstance(others, str):
        raise TypeError(f"others must be 'none', 'before', 'after' or the name of an argument, got {others!r}")
    if isinstance(model, type) and others not in ("none", "before", "after"):
        _check_argument(model, others)
    checks.choice("call", call, CALLS)
    MODELS[name] = Model(
        attention=globs,
        grid=grid,
        others=others,
        call=call,
        pairs_are_keys=checks.flag("pairs_are_keys", pairs_are_keys),
        streams_apart=checks.flag("streams_apart", streams_apart),
        unless=(unless,) if isinstance(unless, str) else tuple(unless),
    )


def _check_argument(model: type, name: str) -> None:
    """A word that is misspelt is not taken for the name of an argument."""
    parameters = inspect.signature(getattr(model, "forward", model)).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if name not in parameters and not takes_any:
        known = ", ".join(other for other in parameters if other != "self")
        raise ValueError(
            f"others must be 'none', 'before', 'after' or the name of an argument of {model.__name__}'s forward "
            f"({known}), got {name!r}"
        )
