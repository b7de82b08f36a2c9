"""The pipeline, on checked tensors and a plan:

    q, k, v --layout--> reorder --> pool --> score --> select --> attend --> restore --> out

A backend reorders and pools in `prepare`, and restores in `attend`, so that a fast one does it while it reads and
writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rainfusion import backends, replaying
from rainfusion.autocast import own_precision
from rainfusion.backends import Backend, Keys, QueryShard, Request, dense
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Attended, Call, Inputs
from rainfusion.graphs import keep_if_captured
from rainfusion.layout import TokenLayout
from rainfusion.planning import Plan
from rainfusion.prediction import budgets, error_curves


def attend(
    inputs: Inputs,
    plan: Plan,
    layouts: tuple[TokenLayout, TokenLayout] | None = None,
    shard: QueryShard | None = None,
) -> Attended:
    """`layouts`: of q and k, where a process holds its tokens in an order of its own; `shard`: some of the queries."""
    own_order = layouts is not None or shard is not None
    if not own_order and (repeated := replaying.again(inputs, plan)) is not None:
        return repeated
    with alone_on(inputs.q.device):
        if plan.dense_because is not None:
            return Attended(dense.attend(inputs, plan.call), None, _full_mask(inputs, plan.call))
        request, backend = request_for(inputs, plan, layouts, shard), backends.get(plan.backend)
        if inputs.mask is not None:
            inputs.mask.check_values()
        if inputs.shapes.is_empty:  # also of a process that has none of the tokens
            return _nothing(inputs, plan.call)
        with replaying.recorded(inputs, None if own_order else plan) as finish:
            keys = backend.prepare(request)
            mask = request.mask or predict(request, backend, keys)
            out, lse = backend.attend(request, keys, mask)
            finish(out, lse, mask)
        return Attended(out, lse, _full_mask(inputs, plan.call) if plan.call.keeps_everything else mask)


def predict_mask(inputs: Inputs, plan: Plan) -> BlockMask:
    """The mask that `attend` would use, bit for bit."""
    with alone_on(inputs.q.device):
        if plan.call.keeps_everything or plan.shapes.is_empty:
            return every_block(inputs, plan.call)
        return predict(request_for(inputs, plan), backends.get(plan.backend))


def predict(request: Request, backend: Backend, keys: Keys | None = None) -> BlockMask:
    """pool -> score -> select."""
    method = request.method
    if method.strategy == "dense":
        return _full(request.q, request.k, method.block_size, request.is_causal)
    if method.target_error is None:
        return backend.choose(request, keys)
    scores = backend.scores(request, keys)
    enough = budgets.for_error(error_curves.curves(request, scores), method.target_error)
    return backend.select(request, scores, enough, True)


def block_scores(inputs: Inputs, plan: Plan) -> tuple[Request, Tensor]:
    """By which rf_v2 ranks, fp32 [B, H, NQ, NK], and what they were found from."""
    with alone_on(inputs.q.device):
        request = request_for(inputs, plan)
        return request, backends.get(plan.backend).scores(request, None)


def request_for(
    inputs: Inputs,
    plan: Plan,
    layouts: tuple[TokenLayout, TokenLayout] | None = None,
    shard: QueryShard | None = None,
) -> Request:
    """What a backend is asked."""
    call, where = plan.call, layouts or plan.layouts
    keep_if_captured(inputs.q.device, *where)
    return Request(*inputs, *where, plan.method, call.scale, call.is_causal, plan.budgets, call.return_lse, shard)


def _full_mask(inputs: Inputs, call: Call) -> BlockMask | None:
    """For those who want the mask of a dense call."""
    return every_block(inputs, call) if call.return_mask else None


def every_block(inputs: Inputs, call: Call) -> BlockMask:
    """In blocks of the size that was asked for."""
    return _full(inputs.q, inputs.k, call.method.block_size, call.is_causal)


def _full(q: Tensor, k: Tensor, block_size: int | tuple[int, int], is_causal: bool) -> BlockMask:
    batch, heads, q_len, _ = q.shape
    return BlockMask.full(batch, heads, q_len, k.shape[2], block_size=block_size, is_causal=is_causal, device=q.device)


def _nothing(inputs: Inputs, call: Call) -> Attended:
    """Without queries or without keys there is nothing to attend to."""
    lse = torch.full(inputs.q.shape[:3], -torch.inf, dtype=torch.float32, device=inputs.q.device)
    mask = inputs.mask or every_block(inputs, call)
    return Attended(torch.zeros_like(inputs.q), lse if call.return_lse else None, mask)


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Launches go to this device, and no mode of the caller's takes part: no autocast, and none that replaces torch's
    functions, which would take the attention calls inside for the model's own.
    """
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with own_precision(device), torch._C.DisableTorchFunction(), here:
        yield
