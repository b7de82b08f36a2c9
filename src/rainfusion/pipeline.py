"""The pipeline, on checked tensors and a plan:

    q, k, v --layout--> reorder --> pool --> score --> select --> attend --> restore --> out

A backend reorders and pools in `prepare`, and restores in `attend`, so that a fast one does it while it reads and
writes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rainfusion import backends
from rainfusion.autocast import own_precision
from rainfusion.backends import Backend, Keys, QueryShard, Request, dense
from rainfusion.blockmask import BlockMask
from rainfusion.calls import Attended, Inputs
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
    with own_precision(inputs.q.device), _on_device(inputs.q):
        if plan.dense_because is not None:
            return Attended(dense.attend(inputs, plan.call), None, _full_mask(inputs, plan))
        request, backend = request_for(inputs, plan, layouts, shard), backends.get(plan.backend)
        if inputs.mask is not None:
            inputs.mask.check_values()
        if 0 in inputs.q.shape or 0 in inputs.k.shape:
            return _nothing(request, plan)
        keys = backend.prepare(request)
        mask = request.mask or predict(request, backend, keys)
        out, lse = backend.attend(request, keys, mask)
        return Attended(out, lse, _full_mask(inputs, plan) if plan.call.keeps_everything else mask)


def predict_mask(inputs: Inputs, plan: Plan) -> BlockMask:
    """The mask that `attend` would use, bit for bit."""
    with own_precision(inputs.q.device), _on_device(inputs.q):
        if plan.call.keeps_everything or plan.shapes.is_empty:
            return _every_block(inputs, plan)
        return predict(request_for(inputs, plan), backends.get(plan.backend))


def predict(request: Request, backend: Backend, keys: Keys | None = None) -> BlockMask:
    """pool -> score -> select."""
    method = request.method
    if method.strategy == "dense":
        shapes = (*request.q.shape[:3], request.k.shape[2])
        causal = request.is_causal
        return BlockMask.full(*shapes, block_size=method.block_size, is_causal=causal, device=request.q.device)
    scores = backend.scores(request, keys)
    if method.target_error is None:
        return backend.select(request, scores, request.budgets, method.exact_budget)
    number = budgets.for_error(error_curves.curves(request, scores), method.target_error)
    return backend.select(request, scores, number, True)


def block_scores(inputs: Inputs, plan: Plan) -> tuple[Request, Tensor]:
    """By which rf_v2 ranks, fp32 [B, H, NQ, NK], and what they were found from."""
    with own_precision(inputs.q.device), _on_device(inputs.q):
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
    return Request(*inputs, *where, plan.method, call.scale, call.is_causal, plan.budgets, call.return_lse, shard)


def _full_mask(inputs: Inputs, plan: Plan) -> BlockMask | None:
    """For those who want the mask of a dense call."""
    return _every_block(inputs, plan) if plan.call.return_mask else None


def _every_block(inputs: Inputs, plan: Plan) -> BlockMask:
    """In blocks of the size that was asked for."""
    batch, heads, q_len, _ = inputs.q.shape
    size, causal = plan.call.method.block_size, plan.call.is_causal
    return BlockMask.full(
        batch, heads, q_len, inputs.k.shape[2], block_size=size, is_causal=causal, device=inputs.q.device
    )


def _nothing(request: Request, plan: Plan) -> Attended:
    """Without queries or without keys there is nothing to attend to."""
    lse = torch.full(request.q.shape[:3], -torch.inf, dtype=torch.float32, device=request.q.device)
    mask = request.mask or _every_block(Inputs(*request[:6]), plan)
    return Attended(torch.zeros_like(request.q), lse if request.return_lse else None, mask)


def _on_device(q: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make it q's."""
    return torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext()
