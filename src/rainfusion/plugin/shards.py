"""Attention calls of a model that is spread over several processes by diffusers' context parallelism."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion.distributed import attend_sharded
from rainfusion.plugin import calls
from rainfusion.plugin.grids import Placed, Scene
from rainfusion.plugin.models import Model
from rainfusion.plugin.settings import Settings


class Sharded(NamedTuple):
    out: Tensor
    placed: Placed


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    parallel: Any,
    scene: Scene,
    row: Model,
    settings: Settings,
) -> Sharded | str:
    """q, k, v [B, N, S / ranks, D]: this rank's tokens -> its results, or why dense attention it is."""
    config = parallel.context_parallel_config
    ranks = config.ring_degree * config.ulysses_degree
    parts = _parts(q.shape[2], ranks, scene, row, config)
    if isinstance(parts, str):
        return parts
    length = sum(map(sum, parts))
    placed = calls.placed_for(scene, length, length)
    if isinstance(placed, str):
        return placed
    reason = calls.why_short(length, settings)
    if reason is not None:
        return reason
    if q.shape[1] % config.ulysses_degree or k.shape[1] % config.ulysses_degree:
        return calls.Unsupported(f"{q.shape[1]} heads cannot be shared out to {config.ulysses_degree} processes")
    kwargs = calls.call_arguments(settings, placed)
    if kwargs["sparsity"] == 0.0 and settings.sparse_type != "ada_bsa":
        return calls.AsAsked("sparsity is 0")
    group = config._flattened_mesh.get_group()
    sizes = [sum(part[rank] for part in parts) for rank in range(ranks)]
    order = _order(tuple(map(tuple, parts))) if len(parts) > 1 else None
    keys = _whole_key_mask(attn_mask, q, sizes, order, group)
    if isinstance(keys, str):
        return keys
    out = attend_sharded(
        q, k, v, keys,
        ulysses_group=config._ulysses_mesh.get_group() if config.ulysses_degree > 1 else None,
        ring_group=config._ring_mesh.get_group() if config.ring_degree > 1 else None,
        sizes=sizes, order=order, input_layout="BNSD",
        attend_kwargs=dict(kwargs, scale=scale, backend=settings.backend),
    )  # fmt: skip
    return Sharded(out, placed)


def _parts(local: int, ranks: int, scene: Scene, row: Model, config: Any) -> list[list[int]] | str:
    """Tokens of each rank, a list for every stream that is split on its own: text, then the rest; or one of all."""
    group = config._flattened_mesh.get_group()
    if not row.streams_apart and not scene.alone and (config.ulysses_anything or config.ring_anything):
        sizes: list[Any] = [None] * ranks
        dist.all_gather_object(sizes, local, group=group)  # waits for the others: the length is known to none
        return [sizes]
    if not row.streams_apart:
        parts = [_split(scene.tokens if scene.alone else local * ranks, ranks)]
    else:
        assert scene.before is not None
        parts = [_split(scene.before, ranks), _split(scene.tokens, ranks)]
    rank = dist.get_rank(group)
    if sum(part[rank] for part in parts) != local:
        return calls.Unsupported(f"this rank's {local} tokens are not its share of the sequence")
    return parts


def _split(length: int, ranks: int) -> list[int]:
    """As torch.tensor_split does."""
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


@lru_cache(maxsize=64)
def _order(parts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Where each token of the sequence lies in the shards put one behind the other (text 0, image 0, text 1, ...)."""
    places: list[list[Tensor]] = [[] for _ in parts]
    start = 0
    for rank in range(len(parts[0])):
        for stream, part in enumerate(parts):
            places[stream].append(torch.arange(start, start + part[rank]))
            start += part[rank]
    return torch.cat([place for stream in places for place in stream])


def _whole_key_mask(
    attn_mask: Tensor | None, q: Tensor, sizes: list[int], order: Tensor | None, group: Any
) -> Tensor | str | None:
    """This rank's key mask -> that of the whole sequence, in the model's order."""
    if attn_mask is None:
        return None
    length = sum(sizes)
    if attn_mask.shape[-1] == length and length != q.shape[2]:
        return calls.key_mask(attn_mask, q.shape[0], q.shape[2], length, False)
    keys = calls.key_mask(attn_mask, q.shape[0], q.shape[2], q.shape[2], False)
    if keys is None or isinstance(keys, str):
        return keys
    longest = max(sizes)
    local = keys.new_zeros((keys.shape[0], longest))
    local[:, : keys.shape[1]] = keys
    gathered = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(gathered, local, group=group)
    whole = torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], 1)
    return whole if order is None else whole.index_select(1, order.to(whole.device))
