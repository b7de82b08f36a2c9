"""Predictors: how much each key block matters to each query block, without computing the attention.

`mean_scores`, `part_mass` and `part_errors` are rf_v2's, on means of blocks and of parts of them, the last on how far
keys are from them, too; `antidiagonal_mass` is ada_bsa's, on strided samples of the logits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rainfusion.prediction import spread
from rainfusion.slabs import head_slabs

STRIDE = 8  # tokens in a group of ada_bsa
BLOCK = 128  # its block size
_GROUPS = BLOCK // STRIDE  # groups in a block

_CHUNK_BYTES = 64 * 2**20  # of fp32 logits held at a time


def mean_scores(q_means: Tensor, k_means: Tensor, scale: float, live: Tensor | None = None) -> Tensor:
    """score[i, j] = scale * mean_q[i] . mean_k[j], in fp32; -inf where block j has no key left.

    [B, Hq, NQ, D], [B, Hk, NK, D], live bool [B, NK] or None -> [B, Hq, NQ, NK]
    """
    k_means = k_means.repeat_interleave(q_means.shape[1] // max(1, k_means.shape[1]), dim=1)
    scores = q_means.new_empty((*q_means.shape[:3], k_means.shape[2]))
    # one product per batch element, so that an element's scores do not depend on its neighbours, to the last bit
    for b in range(len(scores)):
        torch.bmm(q_means[b], k_means[b].mT, out=scores[b])
    scores.mul_(scale)
    return scores if live is None else scores.masked_fill_(~live[:, None, None, :], -torch.inf)


def part_mass(
    q_means: Tensor, k_means: Tensor, scale: float, q_live: Tensor, k_live: Tensor, q_parts: int, k_parts: int
) -> Tensor:
    """mass[i, j] = sum over the parts a of block i, b of block j of softmax_b(scale * mean_q[a] . mean_k[b]), in fp32.

    A part that stands out counts, where the mean of the whole block would hide it, and each part of the queries counts
    as much as another; -inf where block j has no key left.
    [B, Hq, NQ * q_parts, D], [B, Hk, NK * k_parts, D], live bool [NQ * q_parts], [B, NK * k_parts] -> [B, Hq, NQ, NK]
    """
    batch, heads, rows, _ = q_means.shape
    shared = heads // max(1, k_means.shape[1])
    columns = k_means.shape[2]
    mass = q_means.new_empty((batch, heads, rows // q_parts, columns // k_parts))
    for b in range(batch):
        for h in range(heads):
            logits = _shown((q_means[b, h] @ k_means[b, h // shared].mT).mul_(scale))
            probs = logits.masked_fill_(~k_live[b], -torch.inf).softmax(-1).nan_to_num_(nan=0.0)
            probs = probs.masked_fill_(~q_live[:, None], 0.0)
            mass[b, h] = probs.unflatten(1, (-1, k_parts)).sum(2).unflatten(0, (-1, q_parts)).sum(1)
        mass[b].masked_fill_(~k_live[b].unflatten(0, (-1, k_parts)).any(1), -torch.inf)
    return mass


def part_errors(
    q_means: Tensor,
    k_means: Tensor,
    wide: spread.Wide | None,
    spreads: Tensor,
    scale: float,
    q_live: Tensor,
    k_live: Tensor,
    q_parts: int,
    k_parts: int,
) -> Tensor:
    """error[i, j] = spreads[j]^2 * |share[a, j] over the parts a of block i|, in fp32: for what mean j leaves behind.

        share[a, j] = sum over the parts b of block j of exp(scale * mean_q[a] . mean_k[b]) / norm[a]
        norm[a] = sum over w of numbers[w] * exp(scale * mean_q[a] . wide[w])

    Means of more keys leave out what stands out among them: beside a block that has nearly all of the attention, and is
    kept anyway, the others have shares as if it were not there. Only if part a gives a part of keys `spread.MOST` or
    more, norm[a] is the sum over all parts of keys: fp32 holds 16 squares of sums of four that are less. The power of
    the spread is what served best.

    Without `wide`, for calls in which no mean stands for its block, norm[a] is the sum over all parts of keys, and the
    power of the spread 1: there all of a block is lost, of which its spread says less.
    Shapes as in `part_mass`; spreads [B, Hk, NK]; -inf where block j has no key left.
    """
    batch, heads, rows, _ = q_means.shape
    shared = heads // max(1, k_means.shape[1])
    columns = k_means.shape[2]
    errors = q_means.new_empty((batch, heads, rows // q_parts, columns // k_parts))
    for b in range(batch):
        for h in range(heads):
            queries, k_head = q_means[b, h], h // shared
            logits = _shown((queries @ k_means[b, k_head].mT).mul_(scale)).masked_fill_(~k_live[b], -torch.inf)
            if wide is None:
                top, log_sum = _log_sum(logits.clone(), q_live)
            else:
                top, log_sum = _wide_log_sum(queries, wide, b, k_head, scale, q_live)
                above = logits.amax(1, keepdim=True) - (top + log_sum) >= math.log(spread.MOST)
                if above.any():
                    own = _log_sum(logits.clone(), q_live)
                    top, log_sum = torch.where(above, own[0], top), torch.where(above, own[1], log_sum)
            shares = logits.sub_(top).sub_(log_sum).exp_().unflatten(1, (-1, k_parts)).sum(2)
            found = shares.square_().unflatten(0, (-1, q_parts)).sum(1).sqrt_().mul_(spreads[b, k_head])
            errors[b, h] = found if wide is None else found.mul_(spreads[b, k_head])
        errors[b].masked_fill_(~k_live[b].unflatten(0, (-1, k_parts)).any(1), -torch.inf)
    return errors


def _wide_log_sum(
    queries: Tensor, wide: spread.Wide, b: int, k_head: int, scale: float, live: Tensor
) -> tuple[Tensor, Tensor]:
    """`_log_sum` over all parts of keys of a head, estimated from wide means."""
    logits = _shown((queries @ wide.means[b, k_head].mT).mul_(scale))
    top, log_sum = _log_sum(logits.add_((wide.numbers[b].float() / spread.TOGETHER).log()), live)
    return top, log_sum + math.log(spread.TOGETHER)


def _log_sum(logits: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Rows' maxima and the logarithms of sums of exp(logits - maxima), [R, 1]: +inf for rows with nothing, or not live.

    logits [R, N] are lost.
    """
    top = logits.amax(1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    log_sum = logits.sub_(top).exp_().sum(1, keepdim=True).log_()
    return top, log_sum.masked_fill_((log_sum == -torch.inf) | ~live[:, None], torch.inf)


def _shown(logits: Tensor) -> Tensor:
    """A NaN or +inf takes the row's whole mass: its block is then kept, and shows in the output as with dense."""
    largest = torch.finfo(torch.float32).max
    return logits.nan_to_num_(nan=largest, posinf=largest, neginf=-torch.inf)


def antidiagonal_mass(q: Tensor, k: Tensor, scale: float, keep: Tensor | None, is_causal: bool) -> Tensor:
    """mass[i, j] = sum over the 16x16 groups of a block pair of softmax_b(mean logit of 8 antidiagonal pairs).

    S[a, b] = scale / 8 * sum_i q[8a + 7 - i] . k[8b + i]: one product of the tokens of group a, backwards, with those
    of group b. q [B, Hq, Sq, D], k [B, Hk, Sk, D], keep bool [B, Sk] or None -> fp32 [B, Hq, NQ, NK].
    """
    batch, q_heads, q_len, head_dim = q.shape
    k_heads, k_len = k.shape[1], k.shape[2]
    rows, columns = -(-q_len // BLOCK), -(-k_len // BLOCK)
    shared = q_heads // max(1, k_heads)  # query heads that share a key head
    mass = q.new_empty((batch, q_heads, rows, columns), dtype=torch.float32)
    live = live_groups(keep, batch, k_len, columns, k.device)  # [B, columns * 16]
    rows_at_once = max(1, _CHUNK_BYTES // (4 * shared * _GROUPS * max(1, columns * _GROUPS)))
    for b in range(batch):
        for slab in head_slabs(k_heads, columns * BLOCK * head_dim * 4, _CHUNK_BYTES):
            keys = _grouped(k[b, slab], None if keep is None else keep[b])  # [h, columns * 16, 8D]
            for head, key in enumerate(keys, start=slab.start):
                queries = q[b, head * shared : (head + 1) * shared]  # [shared, Sq, D]
                for first in range(0, rows, rows_at_once):
                    last = min(first + rows_at_once, rows)
                    part = _grouped(queries[:, first * BLOCK : last * BLOCK]).unflatten(2, (STRIDE, head_dim))
                    part = part.flip(2).flatten(2)  # the 8 tokens of a group backwards
                    logits = (part.flatten(0, 1) @ key.mT).unflatten(0, part.shape[:2]).mul_(scale / STRIDE)
                    probs = _group_softmax(logits, live[b], first * _GROUPS, q_len, is_causal)
                    sums = probs.unflatten(2, (columns, _GROUPS)).sum(3).unflatten(1, (last - first, _GROUPS)).sum(2)
                    mass[b, head * shared : (head + 1) * shared, first:last] = sums
    return mass


def _group_softmax(logits: Tensor, live: Tensor, first_group: int, q_len: int, is_causal: bool) -> Tensor:
    """[h, groups of q, groups of k] -> probabilities; rows of padding, and rows that see no key, are zero."""
    logits = _shown(logits).masked_fill_(~live, -torch.inf)
    group = torch.arange(first_group, first_group + logits.shape[1], device=logits.device)
    if is_causal:
        future = torch.arange(logits.shape[2], device=logits.device) > group[:, None]
        logits.masked_fill_(future, -torch.inf)
    probs = logits.softmax(-1).nan_to_num_(nan=0.0)
    return probs.masked_fill_((group * STRIDE >= q_len)[:, None], 0.0)


def _grouped(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """[h, S, D] -> fp32 [h, groups, 8D], zero-padded to whole blocks; keys that were removed count as padding."""
    if keep is not None:
        x = x.masked_fill(~keep.unsqueeze(-1), 0.0)
    padding = -x.shape[1] % BLOCK
    x = F.pad(x.float(), (0, 0, 0, padding)) if padding else x.float()
    return x.reshape(x.shape[0], -1, STRIDE * x.shape[2])


def live_groups(keep: Tensor | None, batch: int, k_len: int, columns: int, device: torch.device) -> Tensor:
    """bool [B, columns * 16]: groups with a real key in them."""
    if keep is None:
        keep = torch.ones(batch, k_len, dtype=torch.bool, device=device)
    groups: Tensor = F.pad(keep, (0, columns * BLOCK - k_len)).unflatten(1, (columns * _GROUPS, STRIDE))
    return groups.any(2)
