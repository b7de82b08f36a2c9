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
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion import api, backends, checks, pipeline
from rainfusion.autocast import own_precision
from rainfusion.backends import crossover, dense
from rainfusion.checks import LayoutSpec, Options
from rainfusion.layout import TokenLayout, cached_layout

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup as Group

__all__ = ["ring_attention", "ulysses_attention"]

_OWN = ("q", "k", "v", "attn_mask", "input_layout")  # arguments of sparse_attention that are named here too
_REFUSED = ("mask", "return_lse", "return_mask")


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Group | None = None,
    input_layout: str = "BNSD",
    sizes: Sequence[int] | None = None,
    order: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`sparse_attention` of a sequence in shards, each process attending with a share of the heads. Inference only.

    Args:
        q, k, v: this process's tokens, all heads: `[B, N, S of this shard, D]`, or with `input_layout="BSND"`
            `[B, S of this shard, N, D]`. The numbers of heads must be divisible by the number of processes.
        attn_mask: key mask `[B, S]` of the whole sequence, the same in every process.
        group: the processes, by default all.
        sizes: the tokens of every process, by rank; they may differ. None asks the others, for which the host waits.
        order: int64 `[S]`, if the shards put together by rank are not in the model's order of tokens:
            `together.index_select(sequence, order)` is. On a GPU the host waits for its values when it first sees
            them: pass the same tensor again, or one on the CPU.
        kwargs: the keywords of `sparse_attention`, said of the whole sequence in the model's order; all but `mask`,
            `return_lse` and `return_mask`.

    Returns:
        The attention of this process's queries, contiguous, in q's shape and layout: bit for bit what one process
        with the whole sequence gets.
    """
    return attend_sharded(
        q, k, v, attn_mask, ulysses_group=_known(group), ring_group=None, sizes=sizes, order=order,
        attend_kwargs=kwargs, input_layout=input_layout,
    )  # fmt: skip


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Group | None = None,
    input_layout: str = "BNSD",
    sizes: Sequence[int] | None = None,
    order: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`sparse_attention` of a sequence in shards, each process attending with a share of the queries. Inference only.

    The arguments are those of `ulysses_attention`; any number of heads goes, and `is_causal` must be False. Keys and
    values are gathered, so every process needs the memory for all of them.

    Returns:
        The attention of this process's queries, contiguous, in q's shape and layout. The blocks are those that one
        process with the whole sequence chooses, and are attended with the same arithmetic; where torch's dense
        attention runs (`sparse_type=None`, `sparsity=0`), it may round a part of the queries differently.
    """
    return attend_sharded(
        q, k, v, attn_mask, ulysses_group=None, ring_group=_known(group), sizes=sizes, order=order,
        attend_kwargs=kwargs, input_layout=input_layout,
    )  # fmt: skip


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
    attend_kwargs: Mapping[str, Any],
    input_layout: str,
) -> Tensor:
    """Both at once: the sequence is in shards over a mesh (ring, Ulysses), rank = ring index * Ulysses size + index.

    Ulysses comes first: a process then has the tokens of its ring index and a share of the heads. None leaves one out.
    """
    if torch.compiler.is_compiling():  # a graph cannot hold what is kept between calls: it ends here, and begins after
        return torch.compiler.disable(attend_sharded)(  # type: ignore[no-any-return]
            q, k, v, attn_mask, ulysses_group=ulysses_group, ring_group=ring_group, sizes=sizes, order=order,
            attend_kwargs=attend_kwargs, input_layout=input_layout,
        )  # fmt: skip
    mesh = _Mesh(ulysses_group, ring_group)
    _check_keywords(attend_kwargs)
    q, k, v = checks.tensors(input_layout, attend_kwargs.get("head_num"), q=q, k=k, v=v)
    _check_shards(q, k, mesh.ulysses_size)
    lengths = _lengths(sizes, q, mesh)
    call = _call(q, k, v, attn_mask, sum(lengths), order, attend_kwargs)
    if call.options.is_causal and ring_group is not None:
        raise ValueError("is_causal must be False in ring attention, which deals out queries; use ulysses_attention")

    if call.options.target_error:
        raise ValueError("target_error must be left out: budgets follow from queries that other processes have")
    call = call.of_heads(q.shape[1] // mesh.ulysses_size, mesh.ulysses_rank)

    per_chunk = mesh.ulysses_size
    chunks = [sum(lengths[i : i + per_chunk]) for i in range(0, len(lengths), per_chunk)]  # by ring index
    mine = lengths[mesh.ring_rank * per_chunk : (mesh.ring_rank + 1) * per_chunk]  # of this chunk, by Ulysses index
    q_order, k_order = (_arrangement(spec, call.order, q.device) for spec in (call.q_spec, call.k_spec))

    rows = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [B, H, S, D] -> [S, B, H, D]
    q, k, v = (_split_heads(x, mine, ulysses_group) for x in rows)
    if ring_group is None:
        out = _attend_all(q, k, v, call, q_order, k_order)
    else:
        deal = _deal(call.q_spec, call.order, tuple(chunks), mesh.ring_rank, q.device)
        out = _attend_dealt(q, k, v, call, deal, k_order, chunks, ring_group)
    out = _join_heads(out, mine, mesh.ulysses_rank, ulysses_group)
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


class _Call(NamedTuple):
    """One call, checked, as one process with the whole sequence would make it."""

    options: Options
    runner: str
    is_dense: bool  # torch's own attention runs
    keep: Tensor | None  # bool [B, S] in the model's order, True where the key takes part
    bias: Tensor | None  # [B, S] likewise
    order: bytes | None
    q_spec: LayoutSpec
    k_spec: LayoutSpec

    def of_heads(self, number: int, rank: int) -> _Call:
        """For a process that attends with a share of the heads."""
        own = self.options.head_sparsity[rank * number : (rank + 1) * number]
        return self._replace(options=self.options._replace(head_sparsity=own))

    @property
    def reorders(self) -> bool:
        return self.options.strategy == "rf_v2" and not self.is_dense


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


@lru_cache(maxsize=1)
def _keywords() -> frozenset[str]:
    return frozenset(inspect.signature(api.sparse_attention).parameters) - {*_OWN, *_REFUSED}


def _check_keywords(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in _REFUSED:
            raise ValueError(f"{name} must be left out: a process has a part of the sequence's mask and LSE only")
        if name not in _keywords():
            raise TypeError(f"{name} is no keyword of sparse_attention; those are {', '.join(sorted(_keywords()))}")


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


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    length: int,
    order: Tensor | None,
    kwargs: Mapping[str, Any],
) -> _Call:
    """Checks everything, and decides what runs, from the whole sequence and all heads."""
    q, k, v = (x.new_empty(()).expand(*x.shape[:2], length, x.shape[3]) for x in (q, k, v))  # shapes, not values
    names = kwargs.keys() - {"head_num", "backend"}
    options = checks.options(q, k, predicts=True, **{name: kwargs[name] for name in names})
    if options.strategy == "dense":
        options = options._replace(block_size=128)
    backend = kwargs.get("backend", "auto")
    runner = backends.choose(backend, q, k, v, None, options)
    keep, bias = checks.key_mask(attn_mask, q, k)
    wants_dense = options.strategy == "dense" or crossover.why_dense(runner, q, k, options) is not None
    is_dense = backend == "auto" and wants_dense and dense.why_not(q, keep, bias, options) is None
    specs = (options.without_layout() if is_dense else options).layout_specs(length, length)
    return _Call(options, runner, is_dense, keep, bias, _checked_order(order, length), *specs)


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
    is_identity = torch.equal(order, torch.arange(len(order)))
    return TokenLayout(len(order), block_size, order, _inverse(order), protected, is_identity)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


class _Deal(NamedTuple):
    """How the queries travel from those who hold them to those who attend to them, and back."""

    send: Tensor  # int64 [rows here]: the rows held here, by who attends to them
    to: list[int]  # how many for each
    come: list[int]  # how many come from each
    layout: TokenLayout  # of the rows that come, as they come
    share: pipeline.Share
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
            share=pipeline.Share(blocks.to(device), layout.num_blocks),
            back=_inverse(send).to(device),
        )


# ---------------------------------------------------------------------------------------------------------------------
# attention: [rows, B, H, D] -> [rows of q, B, H, D]


def _attend_all(q: Tensor, k: Tensor, v: Tensor, call: _Call, q_order: _Arrangement, k_order: _Arrangement) -> Tensor:
    """All queries and keys are here, in the shards' order."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, H, S, D]
    if call.reorders:
        out = _attend_blocks(q, k, v, call, q_order.layout, k_order)
    else:
        sort = q_order.layout
        out = sort.restore(_attend_sorted(sort.reorder(q), sort.reorder(k), sort.reorder(v), call))
    return out.permute(2, 0, 1, 3)


def _attend_dealt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: _Call,
    deal: _Deal,
    k_order: _Arrangement,
    sizes: list[int],
    group: Group,
) -> Tensor:
    """Keys are gathered, queries dealt out in whole blocks; in dense attention they stay where they are."""
    k, v = (_gather(x, sizes, group).permute(1, 2, 0, 3) for x in (k, v))
    if not call.reorders:
        k, v = (k_order.layout.reorder(x) for x in (k, v))
    if call.is_dense:
        return _attend_sorted(q.permute(1, 2, 0, 3), k, v, call).permute(2, 0, 1, 3)
    q = _exchange(q.index_select(0, deal.send), deal.to, deal.come, group).permute(1, 2, 0, 3)
    if call.reorders:
        out = _attend_blocks(q, k, v, call, deal.layout, k_order, deal.share)
    else:
        out = deal.layout.restore(_attend_sorted(deal.layout.reorder(q), k, v, call))
    return _exchange(out.permute(2, 0, 1, 3), deal.come, deal.to, group).index_select(0, deal.back)


def _attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: _Call,
    q_layout: TokenLayout,
    k_order: _Arrangement,
    share: pipeline.Share | None = None,
) -> Tensor:
    """rf_v2, [B, H, S, D]: k and v in the shards' order, q in that of `q_layout`."""
    keep, bias = k_order.key_mask(call.keep), k_order.key_mask(call.bias)
    with own_precision(q.device):
        return pipeline.attend_in(
            q_layout, k_order.layout, q, k, v, keep, bias, None, call.options, call.runner, False, share
        )[0]


def _attend_sorted(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """All the others, [B, H, S, D]: k and v in the model's order, q's blocks too."""
    if call.is_dense:
        return dense.attend(q, k, v, call.keep, call.bias, call.options)
    with own_precision(q.device):
        return pipeline.attend(q, k, v, call.keep, call.bias, None, call.options, call.runner, False, False)[0]


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
