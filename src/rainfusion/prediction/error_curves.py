"""What skipping blocks costs, from a sample: a few queries of each head attend densely, block by block.

    dense_i = sum_j values[i, j] / sum_j weights[i, j]              j: key blocks, in the order of their scores
    out_i   = the same over the first n of them                     and, with `compensate`, stand-ins for the others
    squared_error[n] = sum_i |out_i - dense_i|^2

One pass gives the error of a head for every budget at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.backends.protocol import Request
from rainfusion.graphs import keep_if_captured
from rainfusion.layout import TokenLayout
from rainfusion.prediction import compensation, spread
from rainfusion.prediction.pooling import block_means
from rainfusion.slabs import head_slabs

SAMPLES = 64  # queries of a head
_GOLDEN = (5**0.5 - 1) / 2
_SLAB_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


class Curves(NamedTuple):
    """Of every head, over its sampled queries. Protected key blocks are counted first."""

    squared_error: Tensor  # fp32 [B, H, NK]: with the first 1, 2, ... NK blocks
    squared_norm: Tensor  # fp32 [B, H]: of the dense output
    protected: int  # key blocks


class _Parts(NamedTuple):
    """What each key block adds to the outputs: sums over its keys."""

    weights: Tensor  # [h, R, NK]: of exp(logit - base)
    values: Tensor  # [h, R, NK, D]: of exp(logit - base) v


def curves(request: Request, scores: Tensor) -> Curves:
    """scores fp32 [B, H, NQ, NK]; queries from rows that may be sparse. Nothing is read back to the host."""
    q, k, v, keep, bias = request[:5]
    q_layout, k_layout = request.q_layout, request.k_layout
    tokens, rows = _sample(q_layout, q.device)
    keep_if_captured(q.device, tokens, rows)
    batch, heads, _, head_dim = q.shape
    columns, shared = k_layout.num_blocks, request.gqa_ratio
    squared_error = q.new_zeros((batch, heads, columns), dtype=torch.float32)
    squared_norm = q.new_ones((batch, heads), dtype=torch.float32)
    if len(rows) == 0:
        return Curves(squared_error, squared_norm, k_layout.num_protected)
    means, spreads, power = None, None, None
    if request.method.compensate and request.method.spreads:
        spreads, power = spread.of_keys(k, k_layout, keep), spread.power(q, q_layout)
    if request.method.compensate:
        weights = compensation.log_weights(k_layout, keep, bias, batch, k.device)
        means = block_means(k, k_layout, keep), block_means(v, k_layout, keep), weights
    size = len(tokens) * columns * (4 * head_dim + 3 * k_layout.block_size) * 4
    for b in range(batch):
        removed = None if keep is None else ~keep[b]
        for slab in head_slabs(heads, size, _SLAB_BYTES.get(q.device.type, _SLAB_BYTES["cpu"])):
            of_keys = torch.arange(slab.start, slab.stop, device=q.device) // shared
            queries = q[b, slab].index_select(1, tokens).float() * request.scale  # [h, R, D]
            logits = queries @ k[b, of_keys].float().mT  # [h, R, Sk]
            logits = logits if bias is None else logits + bias[b].float()
            logits = logits if removed is None else logits.masked_fill(removed, -torch.inf)
            values = v[b, of_keys].float()
            values = values if removed is None else values.masked_fill(removed[:, None], 0.0)
            base = logits.amax(-1, keepdim=True)
            base = base.masked_fill(base == -torch.inf, 0.0)
            exact = _exact_parts(logits - base, values, k_layout)
            stand_in = None
            if means is not None:
                k_means, v_means, weights = means
                found = (queries @ k_means[b, of_keys].mT + weights[b] - base).exp()  # [h, R, NK]
                if spreads is not None and power is not None:
                    of_rows = power[b, slab].index_select(1, rows).unsqueeze(2)
                    found = found * spread.gain(of_rows, spreads[b, of_keys].unsqueeze(1), request.scale)
                stand_in = _Parts(found, found.unsqueeze(-1) * v_means[b, of_keys].unsqueeze(1))
            ranked = scores[b, slab].index_select(1, rows).masked_fill(k_layout.protected, torch.inf)
            order = ranked.argsort(dim=-1, descending=True, stable=True)
            squared_error[b, slab], squared_norm[b, slab] = _squares(exact, stand_in, order)
    return Curves(squared_error, squared_norm, k_layout.num_protected)


@lru_cache(maxsize=64)
def _sample(layout: TokenLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [R]: query tokens in the caller's order, spread evenly over those of free rows, and their rows."""
    with torch.inference_mode(False), torch.device("cpu"):
        places = torch.arange(layout.seq_len)
        places = places[~layout.protected.cpu()[places // layout.block_size]]
        number = min(SAMPLES, len(places))
        turn = torch.arange(number, dtype=torch.float64)
        within = turn * _GOLDEN % 1  # every part of a block has its turn
        places = places[((turn + within) * len(places) / max(1, number)).long()]
        return layout.order.cpu()[places].to(device), (places // layout.block_size).to(device)


def _exact_parts(logits: Tensor, values: Tensor, layout: TokenLayout) -> _Parts:
    """[h, R, Sk], [h, Sk, D] in the caller's order"""
    padding = layout.num_blocks * layout.block_size - layout.seq_len
    probs = logits.exp() if layout.is_identity else logits.exp().index_select(2, layout.order)
    probs = F.pad(probs, (0, padding)).unflatten(2, (-1, layout.block_size))  # [h, R, NK, block]
    values = F.pad(layout.reorder(values), (0, 0, 0, padding)).unflatten(1, (-1, layout.block_size))
    return _Parts(probs.sum(-1), (probs.transpose(1, 2) @ values).transpose(1, 2))


def _squares(exact: _Parts, stand_in: _Parts | None, order: Tensor) -> tuple[Tensor, Tensor]:
    """-> |out - dense|^2 with the first n blocks of `order` [h, R, NK], and |dense|^2: [h, NK], [h]."""
    kept = _running(exact, order)
    dense = kept.values[:, :, -1:] / kept.weights[:, :, -1:, None]
    if stand_in is not None:
        taken = _running(stand_in, order)
        kept = _Parts(
            kept.weights + taken.weights[:, :, -1:] - taken.weights,
            kept.values + taken.values[:, :, -1:] - taken.values,
        )
    out = kept.values / kept.weights.unsqueeze(-1)
    out = out.masked_fill((kept.weights == 0).unsqueeze(-1), 0.0)  # all of these blocks are far below the largest logit
    return (out - dense).square().sum((1, 3)), dense.square().sum((1, 3, 2))


def _running(parts: _Parts, order: Tensor) -> _Parts:
    """Sums over the first 1, 2, ... blocks of `order`."""
    values = parts.values.gather(2, order.unsqueeze(-1).expand_as(parts.values))
    return _Parts(parts.weights.gather(2, order).cumsum(2), values.cumsum(2))
