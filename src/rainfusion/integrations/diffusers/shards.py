"""Attention calls of a model that is spread over several processes by diffusers' context parallelism."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion.distributed import attend_sharded
from rainfusion.integrations import decider as calls
from rainfusion.integrations.diffusers.grids import Placed, Scene
from rainfusion.integrations.diffusers.models import Model
from rainfusion.integrations.settings import Settings


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
    layer: str,
) -> Sharded | str:
    """q, k, v [B, N, S / ranks, D]: this rank's tokens -> its results, or why dense attention it is."""
    config = parallel.context_parallel_config
    ranks = config.ring_degree * config.ulysses_degree
    parts = _parts(q.shape[2], ranks, scene, row, config)
    if isinstance(parts, str):
        return parts
    length = sum(map(sum, parts))
    all_q, all_k, all_v = (x.new_empty(()).expand(*x.shape[:2], length, x.shape[3]) for x in (q, k, v))  # no values
    how = calls.plan(all_q, all_k, all_v, scene, scale, settings, layer)
    if isinstance(how, str):
        return how
    if how.options.target_error:
        return calls.Unsupported("target_error needs all queries, and other processes have some of them")
    if q.shape[1] % config.ulysses_degree or k.shape[1] % config.ulysses_degree:
        return calls.Unsupported(f"{q.shape[1]} heads cannot be shared out to {config.ulysses_degree} processes")
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
        attend_kwargs=dict(calls.call_arguments(settings, how.placed, layer), scale=scale, backend=how.runner),
    )  # fmt: skip
    return Sharded(out, how.placed)


def _parts(local: int, ranks: int, scene: Scene, row: Model, config: Any) -> list[list[int]] | str:
    """Tokens of each rank, a list for every stream that is split on its own: text, then the rest; or one of all.

    All ranks come to the same answer, since they must all take part in what follows, or none.
    """
    if row.streams_apart:
        assert scene.before is not None
        parts = [_split(scene.before, ranks), _split(scene.tokens, ranks)]
    else:
        parts = [_split(scene.tokens if scene.alone else local * ranks, ranks)]
    expected = [sum(part[rank] for part in parts) for rank in range(ranks)]
    sizes: list[Any] = [local] * ranks
    if config.ulysses_anything or config.ring_anything:  # they may differ, and only the others know; the host waits
        dist.all_gather_object(sizes, local, group=config._flattened_mesh.get_group())
    if not row.streams_apart and not scene.alone:
        return [sizes]
    if sizes != expected:
        return calls.Unsupported(f"shards of {sizes} tokens are not {expected}, as this model's would be")
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
        return calls.key_mask(attn_mask, q.shape[0], length, False)
    keys = calls.key_mask(attn_mask, q.shape[0], q.shape[2], False)
    if keys is None or isinstance(keys, str):
        return keys
    longest = max(sizes)
    local = keys.new_zeros((keys.shape[0], longest))
    local[:, : keys.shape[1]] = keys
    gathered = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(gathered, local, group=group)
    whole = torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], 1)
    return whole if order is None else whole.index_select(1, order.to(whole.device))
