"""Several processes, one sequence: each holds a shard of the tokens and gets the attention of its own queries.

    Ulysses  shards --all-to-all--> all tokens, a share of the heads --> attend --all-to-all--> shards
    ring     k, v --all-gather--> all tokens; q --all-to-all--> whole blocks --> attend --all-to-all--> shards

A mask is predicted from all keys, and rf_v2's blocks of queries are blocks of the reordered sequence, not of a shard.
So Ulysses brings every token together, and ring brings the keys together and deals out the blocks of queries. Tensors
that travel are [rows, B, H, D], a row for each token, and travel as bytes, a type that every backend of
torch.distributed has.

Where the shards follow each other in another order than the model's, nothing is sorted for rf_v2: the layout says
which token comes where, so the shards' order goes into the layout.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion import checks, pipeline, planning
from rainfusion.backends import QueryShard
from rainfusion.calls import Call, Inputs, Shapes
from rainfusion.geometry import LayoutSpec, plain_spec
from rainfusion.layout import TokenLayout, cached_layout
from rainfusion.options import InputLayout
from rainfusion.planning import CallOptions, Plan

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup as Group
    from typing_extensions import Unpack

__all__ = ["ring_attention", "ulysses_attention"]

_REFUSED = ("mask", "return_lse", "return_mask")


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Group | None = None,
    input_layout: InputLayout = "BNSD",
    sizes: Sequence[int] | None = None,
    order: Tensor | None = None,
    **options: Unpack[CallOptions],
) -> Tensor:
    """`sparse_attention` of a sequence in shards, each process attending with a share of the heads. Inference only.

    Args:
        q: queries of this process's tokens, all heads: `[B, N, S of this shard, D]`, or with `input_layout="BSND"`
            `[B, S of this shard, N, D]`. The numbers of heads must be divisible by the number of processes.
        k: keys of the same tokens.
        v: values of the same tokens.
        attn_mask: key mask `[B, S]` of the whole sequence, the same in every process.
        group: the processes, by default all.
        input_layout: `"BNSD"` or `"BSND"`.
        sizes: the tokens of every process, by rank; they may differ. None asks the others, for which the host waits.
        order: int64 `[S]`, if the shards put together by rank are not in the model's order of tokens:
            `together.index_select(sequence, order)` is. On a GPU the host waits for its values when it first sees
            them: pass the same tensor again, or one on the CPU.
        options: the keywords of `sparse_attention`, said of the whole sequence in the model's order; all but `mask`,
            `return_lse` and `return_mask`.

    Returns:
        The attention of this process's queries, contiguous, in q's shape and layout: bit for bit what one process
        with the whole sequence gets.
    """
    return _attend_flat(q, k, v, attn_mask, _Mesh(_known(group), None), sizes, order, input_layout, options)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Group | None = None,
    input_layout: InputLayout = "BNSD",
    sizes: Sequence[int] | None = None,
    order: Tensor | None = None,
    **options: Unpack[CallOptions],
) -> Tensor:
    """`sparse_attention` of a sequence in shards, each process attending with a share of the queries. Inference only.

    Keys and values are gathered, so every process needs the memory for all of them.

    Args:
        q: queries of this process's tokens, as for `ulysses_attention`; any number of heads goes.
        k: keys of the same tokens.
        v: values of the same tokens.
        attn_mask: key mask `[B, S]` of the whole sequence, the same in every process.
        group: the processes, by default all.
        input_layout: `"BNSD"` or `"BSND"`.
        sizes: the tokens of every process, by rank, as for `ulysses_attention`.
        order: where the shards put together are not in the model's order, as for `ulysses_attention`.
        options: the keywords of `sparse_attention` but `mask`, `return_lse` and `return_mask`; `is_causal` must be
            False.

    Returns:
        The attention of this process's queries, contiguous, in q's shape and layout. The blocks are those that one
        process with the whole sequence chooses, and are attended with the same arithmetic; where torch's dense
        attention runs (`sparse_type=None`, `sparsity=0`), it may round a part of the queries differently.
    """
    return _attend_flat(q, k, v, attn_mask, _Mesh(None, _known(group)), sizes, order, input_layout, options)


def _attend_flat(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    mesh: _Mesh,
    sizes: Sequence[int] | None,
    order: Tensor | None,
    input_layout: str,
    options: CallOptions,
) -> Tensor:
    """`attend_sharded` with the keywords of `sparse_attention`."""
    for name in _REFUSED:
        if name in options:
            raise ValueError(f"{name} must be left out: a process has a part of the sequence's mask and LSE only")
    return attend_sharded(
        q,
        k,
        v,
        attn_mask,
        ulysses_group=mesh.ulysses,
        ring_group=mesh.ring,
        sizes=sizes,
        order=order,
        input_layout=input_layout,
        **options,
    )


def attend_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    ulysses_group: Group | None,
    ring_group: Group | None,
    sizes: Sequence[int] | None,
    order: Tensor | None,
    input_layout: str,
    head_num: int | None = None,
    call: Call | None = None,
    **options: Any,
) -> Tensor:
    """Both at once: the sequence is in shards over a mesh (ring, Ulysses), rank = ring index * Ulysses size + index.

    Ulysses comes first: a process then has the tokens of its ring index and a share of the heads. None leaves one out.
    `call`: what is asked for of the whole sequence; without it, `options` are those of `planning.ask_flat`.
    """
    if torch.compiler.is_compiling():  # a graph cannot hold what is kept between calls: it ends here, and begins after
        return torch.compiler.disable(attend_sharded)(  # type: ignore[no-any-return]
            q, k, v, attn_mask, ulysses_group=ulysses_group, ring_group=ring_group, sizes=sizes, order=order,
            input_layout=input_layout, head_num=head_num, call=call, **options,
        )  # fmt: skip
    mesh = _Mesh(ulysses_group, ring_group)
    q, k, v = checks.tensors(input_layout, head_num, q=q, k=k, v=v)
    _check_shards(q, k, mesh.ulysses_size)
    lengths = _lengths(sizes, q, mesh)
    # the shapes of the whole sequence, without its values
    all_q, all_k, all_v = (x.new_empty(()).expand(*x.shape[:2], sum(lengths), x.shape[3]) for x in (q, k, v))
    whole = Inputs(all_q, all_k, all_v, *checks.key_mask(attn_mask, all_q, all_k))
    call = planning.ask_flat(whole, **options) if call is None else call
    places = mesh.ulysses_size, mesh.ulysses_rank, mesh.ring_rank, ring_group is not None
    plan = _plan(call, whole.shapes, tuple(lengths), _checked_order(order, sum(lengths)), *places)

    rows = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [B, H, S, D] -> [S, B, H, D]
    q, k, v = (_split_heads(x, plan.mine, ulysses_group) for x in rows)
    out = _attend_dealt(q, k, v, whole, plan, ring_group) if ring_group else _attend_all(q, k, v, whole, plan)
    out = _join_heads(out, plan.mine, mesh.ulysses_rank, ulysses_group)
    return out.permute((1, 0, 2, 3) if input_layout == "BSND" else (1, 2, 0, 3)).contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# what was asked for


class _Mesh(NamedTuple):
    """The processes that share a sequence."""

    ulysses: Group | None
    ring: Group | None

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else dist.get_world_size(self.ulysses)

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses is None else dist.get_rank(self.ulysses)

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else dist.get_rank(self.ring)


class _ShardPlan(NamedTuple):
    """How one process takes part in a call that is decided from the whole sequence and all heads."""

    plan: Plan  # with the budgets of this process's heads
    chunks: list[int]  # tokens by ring index
    mine: list[int]  # tokens of this chunk, by Ulysses index
    q_order: _Arrangement
    k_order: _Arrangement
    deal: _Deal | None  # of queries, in ring attention

    @property
    def reorders(self) -> bool:
        return self.plan.method.strategy == "rf_v2" and self.plan.dense_because is None


class _Arrangement(NamedTuple):
    """Where the tokens of the shards, put together by rank, belong."""

    layout: TokenLayout  # shards put together -> blocks
    to_shards: Tensor | None  # int64 [S]: model's order -> shards put together; None where it is the same

    def key_mask(self, mask: Tensor | None) -> Tensor | None:
        """[B, S] in the model's order -> in the shards'."""
        return mask if mask is None or self.to_shards is None else mask.index_select(1, self.to_shards)


def _known(group: Group | None) -> Group:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group yet: call torch.distributed.init_process_group first, in each of "
            "the processes"
        )
    whole = dist.group.WORLD if group is None else group
    if not isinstance(whole, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup that holds this process, got {group!r}")
    return whole


def _check_shards(q: Tensor, k: Tensor, ulysses_size: int) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must be shards of one sequence (self-attention), got {q.shape[2]} and {k.shape[2]} tokens"
        )
    for name, heads in (("q", q.shape[1]), ("k", k.shape[1])):
        if heads % ulysses_size:
            raise ValueError(
                f"{name}'s heads must be divisible by the number of processes for Ulysses, got {heads} heads and "
                f"{ulysses_size} processes; ring_attention takes any number"
            )


def _lengths(sizes: Sequence[int] | None, q: Tensor, mesh: _Mesh) -> list[int]:
    """The tokens of every shard, by rank."""
    length, rank = q.shape[2], mesh.ring_rank * mesh.ulysses_size + mesh.ulysses_rank
    if sizes is None:
        known = torch.tensor([[length]], device=q.device)
        for group in (mesh.ulysses, mesh.ring):
            known = known if group is None else _gather(known, [len(known)] * dist.get_world_size(group), group)
        return [int(size) for size in known.flatten().tolist()]
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(f"sizes must be a list of ints, got {sizes!r} ({type(sizes).__name__})")
    checked = [checks.integer(f"sizes[{i}]", size, minimum=0) for i, size in enumerate(sizes)]
    if len(checked) != mesh.ulysses_size * mesh.ring_size:
        raise ValueError(
            f"sizes must have a number for each of the {mesh.ulysses_size * mesh.ring_size} processes, got {checked}"
        )
    if checked[rank] != length:
        raise ValueError(
            f"sizes[{rank}] must be the number of tokens of this process, {length}, got {checked[rank]}; is "
            "input_layout right?"
        )
    return checked


@lru_cache(maxsize=1024)
def _plan(
    call: Call,
    shapes: Shapes,
    lengths: tuple[int, ...],
    order: bytes | None,
    ulysses_size: int,
    ulysses_rank: int,
    ring_rank: int,
    is_ring: bool,
) -> _ShardPlan:
    """Made once for a layer's shapes: calls of other layers and steps derive nothing."""
    if call.is_causal and is_ring:
        raise ValueError("is_causal must be False in ring attention, which deals out queries; use ulysses_attention")
    if call.method.target_error is not None:
        raise ValueError("target_error must be left out: budgets follow from queries that other processes have")
    plan = planning.plan(call, shapes)
    if len(plan.budgets) > 1:
        heads = shapes.q[1] // ulysses_size
        plan = replace(plan, budgets=plan.budgets[ulysses_rank * heads : (ulysses_rank + 1) * heads])
    q_spec, k_spec = plan.q_spec, plan.k_spec
    if plan.dense_because is not None:
        q_spec, k_spec = plain_spec(shapes.q_len, q_spec.block_size), plain_spec(shapes.k_len, k_spec.block_size)
    chunks = [sum(lengths[i : i + ulysses_size]) for i in range(0, len(lengths), ulysses_size)]
    return _ShardPlan(
        plan,
        chunks,
        mine=list(lengths[ring_rank * ulysses_size : (ring_rank + 1) * ulysses_size]),
        q_order=_arrangement(q_spec, order, shapes.device),
        k_order=_arrangement(k_spec, order, shapes.device),
        deal=_deal(q_spec, order, tuple(chunks), ring_rank, shapes.device) if is_ring else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# orders


class _Unchanged:
    """A tensor as a key of a cache: the same object, not written to since."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unchanged) and self.tensor is other.tensor and self.version == other.version


def _values(order: Tensor) -> bytes:
    on_cpu = order.cpu().contiguous()
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes)


@lru_cache(maxsize=16)
def _known_values(order: _Unchanged) -> bytes:
    return _values(order.tensor)


def _checked_order(order: Any, length: int) -> bytes | None:
    """Its values, as a key of caches: read once, as far as it can be known that they are the same."""
    if order is None:
        return None
    if not isinstance(order, Tensor):
        raise TypeError(f"order must be a torch.Tensor or None, got {type(order).__name__}")
    if order.dtype != torch.int64 or order.shape != (length,):
        raise ValueError(
            f"order must be int64 of shape [{length}], a place for every token of all shards, got {order.dtype} of "
            f"shape {list(order.shape)}"
        )
    return _values(order) if order.is_inference() else _known_values(_Unchanged(order))


@lru_cache(maxsize=256)
def _arrangement(spec: LayoutSpec, order: bytes | None, device: torch.device) -> _Arrangement:
    """The layout of the model's order, seen from the shards'."""
    if order is None:
        return _Arrangement(cached_layout(spec, device), None)
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        layout = cached_layout(spec, torch.device("cpu"))
        shards = torch.frombuffer(bytearray(order), dtype=torch.int64)
        if not torch.equal(shards.sort().values, torch.arange(len(shards))):
            raise ValueError(f"order must hold each of 0..{len(shards) - 1} once, got other values")
        composed = shards[layout.order]
        found = _layout(composed, layout.protected, layout.block_size)
        return _Arrangement(found.to(device), _inverse(shards).to(device))


def _layout(order: Tensor, protected: Tensor, block_size: int) -> TokenLayout:
    return TokenLayout(len(order), block_size, order, _inverse(order), protected, False)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


class _Deal(NamedTuple):
    """How the queries travel from those who hold them to those who attend to them, and back."""

    send: Tensor  # int64 [rows here]: the rows held here, by who attends to them
    to: list[int]  # how many for each
    come: list[int]  # how many come from each
    layout: TokenLayout  # of the rows that come, as they come
    shard: QueryShard
    back: Tensor  # int64 [rows here]: where each row's result is among those that come back


@lru_cache(maxsize=256)
def _deal(spec: LayoutSpec, order: bytes | None, sizes: tuple[int, ...], rank: int, device: torch.device) -> _Deal:
    """Whole blocks of queries for each process, protected ones (which attend to everything) as evenly as the others.

    Blocks 0 1 2 3 4 with 3 and 4 protected, for two processes: the first takes 3, 0, 2, the other 4, 1.
    """
    cpu = torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), cpu:
        layout = _arrangement(spec, order, cpu).layout
        attender = torch.empty(layout.num_blocks, dtype=torch.int64)  # of each block
        attender[layout.protected_first.long()] = torch.arange(layout.num_blocks) % len(sizes)
        attends = attender.repeat_interleave(layout.block_size)[: layout.seq_len]  # by place in the blocks
        holds = torch.bucketize(layout.order, torch.tensor(list(accumulate(sizes))), right=True)

        held = (holds == rank).nonzero().flatten()
        held = held[attends[held].argsort(stable=True)]
        send = layout.order[held] - sum(sizes[:rank])
        attended = (attends == rank).nonzero().flatten()
        arrival = holds[attended].argsort(stable=True)  # by who sends, then by place: as the others send
        blocks = (attender == rank).nonzero().flatten()
        rows = _layout(_inverse(arrival), layout.protected[blocks], layout.block_size)
        return _Deal(
            send=send.to(device),
            to=torch.bincount(attends[held], minlength=len(sizes)).tolist(),
            come=torch.bincount(holds[attended], minlength=len(sizes)).tolist(),
            layout=rows.to(device),
            shard=QueryShard(blocks.to(device), layout.num_blocks),
            back=_inverse(send).to(device),
        )


# ---------------------------------------------------------------------------------------------------------------------
# attention: [rows, B, H, D] -> [rows of q, B, H, D]


def _attend_all(q: Tensor, k: Tensor, v: Tensor, whole: Inputs, plan: _ShardPlan) -> Tensor:
    """All queries and keys are here, in the shards' order."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, H, S, D]
    if plan.reorders:
        out = _attend_blocks(q, k, v, whole, plan, plan.q_order.layout)
    else:
        sort = plan.q_order.layout
        out = sort.restore(_attend_sorted(sort.reorder(q), sort.reorder(k), sort.reorder(v), whole, plan.plan))
    return out.permute(2, 0, 1, 3)


def _attend_dealt(q: Tensor, k: Tensor, v: Tensor, whole: Inputs, plan: _ShardPlan, group: Group) -> Tensor:
    """Keys are gathered, queries dealt out in whole blocks; in dense attention they stay where they are."""
    deal = plan.deal
    assert deal is not None
    k, v = (_gather(x, plan.chunks, group).permute(1, 2, 0, 3) for x in (k, v))
    if not plan.reorders:
        k, v = (plan.k_order.layout.reorder(x) for x in (k, v))
    if plan.plan.dense_because is not None:
        return _attend_sorted(q.permute(1, 2, 0, 3), k, v, whole, plan.plan).permute(2, 0, 1, 3)
    q = _exchange(q.index_select(0, deal.send), deal.to, deal.come, group).permute(1, 2, 0, 3)
    if plan.reorders:
        out = _attend_blocks(q, k, v, whole, plan, deal.layout, deal.shard)
    else:
        out = deal.layout.restore(_attend_sorted(deal.layout.reorder(q), k, v, whole, plan.plan))
    return _exchange(out.permute(2, 0, 1, 3), deal.come, deal.to, group).index_select(0, deal.back)


def _attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Inputs,
    plan: _ShardPlan,
    q_layout: TokenLayout,
    shard: QueryShard | None = None,
) -> Tensor:
    """rf_v2, [B, H, S, D]: k and v in the shards' order, q in that of `q_layout`."""
    keep, bias = plan.k_order.key_mask(whole.keep), plan.k_order.key_mask(whole.bias)
    return pipeline.attend(Inputs(q, k, v, keep, bias), plan.plan, (q_layout, plan.k_order.layout), shard).out


def _attend_sorted(q: Tensor, k: Tensor, v: Tensor, whole: Inputs, plan: Plan) -> Tensor:
    """All the others, [B, H, S, D]: k and v in the model's order, q's blocks too."""
    q_spec, k_spec = plain_spec(q.shape[2], plan.method.q_block), plain_spec(k.shape[2], plan.method.k_block)
    layouts = cached_layout(q_spec, q.device), cached_layout(k_spec, k.device)
    return pipeline.attend(Inputs(q, k, v, whole.keep, whole.bias), plan, layouts).out


# ---------------------------------------------------------------------------------------------------------------------
# collectives


def _split_heads(rows: Tensor, sizes: list[int], group: Group | None) -> Tensor:
    """[rows of a shard, B, H, D] -> [rows of all shards, B, H / processes, D]."""
    if group is None:
        return rows
    parts = rows.unflatten(2, (len(sizes), rows.shape[2] // len(sizes))).permute(2, 0, 1, 3, 4)
    return _exchange(parts.flatten(0, 1), [len(rows)] * len(sizes), sizes, group)


def _join_heads(rows: Tensor, sizes: list[int], rank: int, group: Group | None) -> Tensor:
    """[rows of all shards, B, H / processes, D] -> [rows of a shard, B, H, D]."""
    if group is None:
        return rows
    parts = _exchange(rows, sizes, [sizes[rank]] * len(sizes), group)
    by_process: Tensor = parts.unflatten(0, (len(sizes), sizes[rank]))
    return by_process.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(rows: Tensor, send: list[int], come: list[int], group: Group) -> Tensor:
    """All-to-all, `send` rows to each and `come` from each: [sum(send), ...] -> [sum(come), ...]."""
    came = rows.new_empty((sum(come), *rows.shape[1:]))
    dist.all_to_all_single(_as_bytes(came), _as_bytes(rows.contiguous()), come, send, group=group)
    return came


def _gather(rows: Tensor, sizes: list[int], group: Group) -> Tensor:
    """[rows of a shard, ...] -> [rows of all shards, ...]. Shards travel in one length: the shorter ones are padded."""
    longest = max(sizes)
    if len(rows) == longest:
        padded = rows.contiguous()
    else:
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
    came = rows.new_empty((len(sizes) * longest, *rows.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    gather(_as_bytes(came), _as_bytes(padded), group=group)
    if min(sizes) == longest:
        return came
    return torch.cat([part[:size] for part, size in zip(came.split(longest), sizes, strict=True)])


def _as_bytes(rows: Tensor) -> Tensor:
    """uint8 [rows, bytes of a row], the same memory."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
