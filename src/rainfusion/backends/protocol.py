"""What a backend is: four stages of one call, and a predicate that says in words why it cannot run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from rainfusion.blockmask import BlockMask
from rainfusion.calls import Call, Shapes
from rainfusion.layout import TokenLayout
from rainfusion.options import Method


class QueryShard(NamedTuple):
    """q holds some blocks of a longer sequence, ascending; the others are attended elsewhere."""

    blocks: Tensor  # int64 [NQ]: which
    of: int  # blocks in all

    def in_place(self, means: Tensor, parts: int) -> Tensor:
        """[B, H, NQ * parts, D] -> [B, H, of * parts, D].

        A product rounds a row as before only in its place among as many rows.
        """
        whole = means.new_zeros((*means.shape[:2], self.of, parts, means.shape[3]))
        return whole.index_copy_(2, self.blocks, means.unflatten(2, (-1, parts))).flatten(2, 3)


class Request(NamedTuple):
    """One call for a backend. Tensors are [B, H, S, D] in the caller's order, never empty."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None  # bool [B, Sk], True where the key takes part
    bias: Tensor | None  # [B, Sk], added to the logits
    mask: BlockMask | None  # instead of a prediction
    q_layout: TokenLayout
    k_layout: TokenLayout
    method: Method
    scale: float
    is_causal: bool
    budgets: tuple[int, ...]  # rf_v2: key blocks that a row keeps, for each head or for all
    return_lse: bool
    shard: QueryShard | None = None

    @property
    def predicts(self) -> bool:
        """Whether blocks have to be chosen: no mask is given, and not all are kept."""
        return self.mask is None and self.method.strategy != "dense"

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]


class Scales(NamedTuple):
    """What turns quantised keys and values back, all fp32."""

    k: Tensor  # [B, Hk, blocks], or [B, Hk, 1] for finer ones
    v: Tensor | None  # [B, Hk, 2, D]: of channels, and their means, which were subtracted; None: of values as they came
    k_mean: Tensor  # [B, Hk, D], which was subtracted from every key


class Keys(NamedTuple):
    """Keys and values as a backend's attention wants them, and what was found on the way."""

    k: Tensor  # [B, Hk, at least Sk, D]
    v: Tensor
    means: Tensor | None = None  # [B, Hk, NK * parts, D], if a prediction needs them
    bias: Tensor | None = None  # fp32 [B, NK * block] in units of log2, -inf where a key does not count
    length: int = 0  # Sk
    weights: Tensor | None = None  # fp32 or fp16 [B or 1, whole blocks of means] of stand-ins: log2 of their keys
    scales: Scales | None = None  # if quantised
    spreads: Tensor | None = None  # fp32 [B, Hk, NK], with predictor="spread"
    turns: Tensor | None = None  # int32 [1], 0 but while a kernel counts what its programs take: one at a time


class Speed(NamedTuple):
    """How fast a backend is, against torch's dense attention on the same machine; see `crossover`."""

    dense_rate: float  # flops a second of torch's attention
    dense_start: float  # seconds of it before the first flop
    sparse_rate: float  # flops a second on kept blocks
    bandwidth: float  # bytes a second of the passes before the kernel
    start: float  # seconds of launches, on the device
    host: float = 0.0  # seconds until a call has launched all of it
    host_of_option: float = 0.0  # more of them for submeans, for compensation and for a key mask, each
    host_again: float = 0.0  # seconds of a call that is repeated, see `replaying`


class Backend(Protocol):
    """`pipeline` calls the stages in their order; `predict_mask` those in the middle."""

    @property
    def SPEEDS(self) -> Mapping[str, Mapping[str, Speed]]:
        """By type of device and precision; where there is none, nothing was measured."""
        ...

    @property
    def READS_BACK(self) -> bool:
        """Whether it waits for values from the device, so that no CUDA graph can hold it."""
        ...

    def why_not(self, call: Call, shapes: Shapes) -> str | None:
        """Why this backend cannot run the call, or None if it can: read after the backend's name."""
        ...

    def prepare(self, request: Request) -> Keys:
        """Keys and values in the order, form and precision that `attend` wants; pooled, if there is a prediction."""
        ...

    def choose(self, request: Request, keys: Keys | None) -> BlockMask:
        """`select` of `scores`, with the budgets of the request; in parts where all scores would take too much."""
        ...

    def scores(self, request: Request, keys: Keys | None) -> Tensor:
        """How much each key block matters to each query block, fp32 [B, H, NQ, NK]. Without keys: from k itself."""
        ...

    def select(self, request: Request, scores: Tensor, budgets: tuple[int, ...] | Tensor, free_only: bool) -> BlockMask:
        """The blocks that each row keeps. May write into `scores`.

        budgets: of rf_v2, for each head or for all; or int32 [B, H]. free_only: of the columns that are not protected.
        """
        ...

    def attend(self, request: Request, keys: Keys, mask: BlockMask) -> tuple[Tensor, Tensor | None]:
        """Attention over the kept blocks -> out like q, and LSE fp32 [B, H, Sq] if asked for, in the caller's order."""
        ...
