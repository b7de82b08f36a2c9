"""One attention call of a model: is it sparse, and if so, with which arguments?"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainfusion import backends, checks, ops
from rainfusion.backends import crossover
from rainfusion.checks import Options
from rainfusion.integrations.diffusers.grids import Placed, Scene, in_words
from rainfusion.integrations.settings import MIN_TOKENS, Settings


class Unsupported(str):
    """A reason for dense attention that `on_unsupported="error"` raises."""


class AsAsked(str):
    """A reason for dense attention that the user gave: nothing to warn of."""


class Plan(NamedTuple):
    """How to run a sparse call of one shape."""

    options: Options
    runner: str
    placed: Placed


class Sparse(NamedTuple):
    out: Tensor  # [B, N, S, D]
    kept: Tensor  # blocks that were computed
    blocks: int  # of so many


def plan(
    q: Tensor, k: Tensor, v: Tensor, scene: Scene, scale: float | None, settings: Settings, layer: str
) -> Plan | str:
    """q, k, v [B, N, S, D] of a layer -> how to run them, or why dense attention it is. No values are looked at."""
    placed = placed_for(scene, q.shape[2], k.shape[2])
    if isinstance(placed, str):
        return placed
    kwargs = call_arguments(settings, placed, layer)
    reason = why_short(q.shape[2], settings)
    if reason is not None:
        return reason
    if settings.profile is not None and len(kwargs["sparsity"]) != q.shape[1]:
        raise ValueError(f"the profile has {len(kwargs['sparsity'])} heads for {layer}, which has {q.shape[1]}")
    try:
        options = checks.options(q, k, predicts=True, scale=scale, **kwargs)
        if options.strategy == "dense":
            return AsAsked("sparsity is 0")
        runner = backends.choose(settings.backend, q, k, v, None, options)
    except (ValueError, TypeError) as error:
        return Unsupported(error)
    if settings.min_tokens is None and crossover.why_dense(runner, q, k, options):
        return "dense attention is expected to be faster (set min_tokens to decide yourself)"
    return Plan(options, runner, placed)


def why_short(tokens: int, settings: Settings) -> str | None:
    least = MIN_TOKENS if settings.min_tokens is None else settings.min_tokens
    return f"fewer than {least} tokens (min_tokens)" if tokens < least else None


def placed_for(scene: Scene, q_len: int, k_len: int) -> Placed | str:
    if q_len != k_len:
        return Unsupported("q and k have different lengths: not self-attention")
    placed = scene.place(q_len)
    if placed is None:
        grids = in_words(scene.grids)
        return Unsupported(f"{q_len} tokens do not hold a grid of {grids} where this model has it")
    return placed


def call_arguments(settings: Settings, placed: Placed, layer: str) -> dict[str, Any]:
    """For `rainfusion.sparse_attention`."""
    kwargs = settings.call_arguments(placed.grids[0][0], layer)
    if settings.sparse_type != "ada_bsa":
        kwargs.update(placed.arguments())
    return kwargs


def run(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, how: Plan) -> Sparse:
    keep, bias = checks.key_mask(key_mask, q, k)
    out, _, mask = ops.sparse_attention(q, k, v, keep, bias, None, how.options, how.runner, False, False, True)
    assert mask is not None
    return Sparse(out, mask.counts.sum(), mask.counts.numel() * mask.num_k_blocks)


def key_mask(attn_mask: Any, batch: int, k_len: int, pairs_are_keys: bool) -> Tensor | str | None:
    """The key mask [B, Sk] in a mask of any form that says no more than that; else why not.

    `pairs_are_keys`: the model writes a key mask as [B, 1, S, S], valid queries times valid keys, first query valid.
    """
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):  # a BlockMask of FlexAttention
        return Unsupported(f"the model gave a {type(attn_mask).__name__} of its own")
    mask: Tensor = attn_mask
    shape = list(mask.shape)
    if mask.dim() == 4 and shape[1] == 1 and shape[3] == k_len and (shape[2] == 1 or pairs_are_keys):
        mask = mask[:, 0, 0]
    elif mask.dim() == 3 and shape[1] == 1:
        mask = mask[:, 0]
    if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != k_len:
        return Unsupported("the model gave a mask for pairs of tokens, not for keys")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        mask = mask.bool()
    return mask.expand(batch, k_len)
