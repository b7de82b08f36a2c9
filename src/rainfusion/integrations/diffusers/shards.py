"""Attention calls of a model that is spread over several processes by diffusers' context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion.integrations.decider import Decider, Dense, checked, plain_key_mask
from rainfusion.integrations.diffusers.models import Model
from rainfusion.integrations.scenes import Scene


class Streams(NamedTuple):
    """How a sequence is cut: the tokens of each rank, and where they lie in the model's order."""

    sizes: tuple[int, ...]  # tokens of each rank
    order: Tensor | None  # where each token of the sequence lies in the shards; None: they follow each other

    @property
    def length(self) -> int:
        return sum(self.sizes)


def attend(
    decider: Decider,
    layer: int,
    row: Model,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any,
    scale: float | None,
    config: Any,
    special: str | None = None,
) -> Tensor:
    """q, k, v [B, N, S / ranks, D] of this rank -> its results, counted; or the reason why they are dense.

    `config`: diffusers' ContextParallelConfig. All ranks come to the same answer, since they must all take part in
    what follows, or none.
    """
    from rainfusion.distributed import attend_sharded  # torch may have been built without torch.distributed

    scene = decider.scene_for(layer, special)
    if decider.observer is not None:
        raise Dense.unsupported("calibration needs the whole sequence in one process")
    streams = _streams(q.shape[2], scene, row, config)
    keys = _whole_key_mask(attn_mask, q, k, streams, config)
    all_q, all_k, all_v = _whole((q, k, v), streams.length)
    way = decider.way(layer, scene, checked(all_q, all_k, all_v, keys), scale)
    if way.call.method.target_error:
        raise Dense.unsupported("target_error needs all queries, and other processes have some of them")
    if q.shape[1] % config.ulysses_degree or k.shape[1] % config.ulysses_degree:
        raise Dense.unsupported(f"{q.shape[1]} heads cannot be shared out to {config.ulysses_degree} processes")
    out: Tensor = attend_sharded(
        q,
        k,
        v,
        keys,
        ulysses_group=config._ulysses_mesh.get_group() if config.ulysses_degree > 1 else None,
        ring_group=config._ring_mesh.get_group() if config.ring_degree > 1 else None,
        sizes=streams.sizes,
        order=streams.order,
        call=way.call,
        input_layout="BNSD",
    )
    decider.tally.sparse(layer, way.words)
    return out


def _whole(shards: Sequence[Tensor], length: int) -> list[Tensor]:
    """Tensors of the shapes that the whole sequence has, without values."""
    if len({x.shape[2] for x in shards}) > 1:
        raise Dense.unsupported(f"q, k and v have the shapes {[list(x.shape) for x in shards]}: not self-attention")
    return [x.new_empty(()).expand(*x.shape[:2], length, x.shape[3]) for x in shards]


def _streams(local: int, scene: Scene, row: Model, config: Any) -> Streams:
    """How all ranks hold this sequence, of which this one holds `local` tokens."""
    ranks = config.ring_degree * config.ulysses_degree
    sizes = [local] * ranks
    if config.ulysses_anything or config.ring_anything:  # they may differ, and only the others know; the host waits
        dist.all_gather_object(sizes, local, group=config._flattened_mesh.get_group())
    if not row.streams_apart and not scene.alone:
        return Streams(tuple(sizes), None)
    expected = _expected(scene, row.streams_apart, ranks)
    if tuple(sizes) != expected.sizes:
        wanted = list(expected.sizes)
        raise Dense.unsupported(f"shards of {sizes} tokens are not {wanted}, as this model's would be")
    return expected


@lru_cache(maxsize=64)
def _expected(scene: Scene, apart: bool, ranks: int) -> Streams:
    """Text and picture are each split on their own, or the sequence as one."""
    if not apart:
        return Streams(tuple(_split(scene.tokens, ranks)), None)
    assert scene.before is not None
    parts = [_split(scene.before, ranks), _split(scene.tokens, ranks)]
    return Streams(tuple(map(sum, zip(*parts, strict=True))), _order(parts))


def _split(length: int, ranks: int) -> list[int]:
    """As torch.tensor_split does."""
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


def _order(parts: list[list[int]]) -> Tensor:
    """Where each token of the sequence lies in the shards, one after the other: text 0, image 0, text 1, ..."""
    places: list[list[Tensor]] = [[] for _ in parts]
    start = 0
    with torch.inference_mode(False), torch.device("cpu"):
        for rank in range(len(parts[0])):
            for stream, part in enumerate(parts):
                places[stream].append(torch.arange(start, start + part[rank]))
                start += part[rank]
        return torch.cat([place for stream in places for place in stream])


def _whole_key_mask(attn_mask: Any, q: Tensor, k: Tensor, streams: Streams, config: Any) -> Tensor | None:
    """This rank's key mask -> that of the whole sequence, in the model's order."""
    if attn_mask is None:
        return None
    if isinstance(attn_mask, Tensor) and attn_mask.shape[-1] == streams.length != q.shape[2]:
        all_q, all_k = _whole((q, k), streams.length)
        return plain_key_mask(attn_mask, all_q, all_k)
    keys = plain_key_mask(attn_mask, q, k)
    assert keys is not None
    local = keys.new_zeros((keys.shape[0], max(streams.sizes)))
    local[:, : keys.shape[1]] = keys
    gathered = [torch.empty_like(local) for _ in streams.sizes]
    dist.all_gather(gathered, local, group=config._flattened_mesh.get_group())
    found = torch.cat([part[:, :size] for part, size in zip(gathered, streams.sizes, strict=True)], 1)
    return found if streams.order is None else found.index_select(1, streams.order.to(found.device))
