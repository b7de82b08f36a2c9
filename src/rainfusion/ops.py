"""The pipeline as custom ops: `torch.compile` sees one opaque node, and `meta` tensors have shapes.

An op knows tensors and plain values only, so that a `BlockMask` crosses as counts and indices, and a `Call` as its
fields, those of `Method` and `Geometry` among them: the schema is made from their types. Where nobody looks on, the
pipeline is called as it is: crossing costs as much as all the rest of the front end.
"""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

from rainfusion import pipeline, planning
from rainfusion.backends import dense
from rainfusion.blockmask import BlockMask, index_dtype, unchecked
from rainfusion.calls import Attended, Call, Inputs
from rainfusion.geometry import Geometry, TokenOrderKey
from rainfusion.options import Method, sides
from rainfusion.planning import Plan


def attend(inputs: Inputs, call: Call, plan: Plan | None = None) -> Attended:
    """Runs a call; `plan`, if the caller has it already."""
    if _is_plain(inputs):
        plan = plan or planning.plan(call, inputs.shapes)
        out, lse, mask = pipeline.attend(inputs, plan)
        if inputs.mask is not None or mask is None or not call.return_mask:
            return Attended(out, lse, inputs.mask)
        lengths = inputs.q.shape[2], inputs.k.shape[2]
        known = unchecked(mask.counts, mask.indices, call.method.block_size, *lengths, plan.orders)
        return Attended(out, lse, known)
    if planning.runs_dense(call, inputs.shapes):
        out, used = dense.attend(inputs, call), None
        if call.return_mask:
            full = pipeline.every_block(inputs, call)
            used = _labelled(full.counts, full.indices, inputs, call, _orders(inputs, call))
        return Attended(out, None, used)
    given = (None, None) if inputs.mask is None else (inputs.mask.counts, inputs.mask.indices)
    out, lse, counts, indices = _attend(*inputs[:5], *given, *_encoded(call))
    wanted = call.return_mask and inputs.mask is None
    mask = _labelled(counts, indices, inputs, call, _orders(inputs, call)) if wanted else inputs.mask
    return Attended(out, lse if call.return_lse else None, mask)


def predict_mask(inputs: Inputs, call: Call) -> BlockMask:
    if _is_plain(inputs):
        plan = planning.plan(call, inputs.shapes)
        found = pipeline.predict_mask(inputs, plan)
        return _labelled(found.counts, found.indices, inputs, call, plan.orders)
    counts, indices = _predict_mask(inputs.q, inputs.k, inputs.keep, *_encoded(call))
    return _labelled(counts, indices, inputs, call, _orders(inputs, call))


def _is_plain(inputs: Inputs) -> bool:
    """Ordinary tensors, and no compiler, transform or mode that wants to see an op."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return False
    return type(inputs.q) is Tensor and type(inputs.k) is Tensor and type(inputs.v) is Tensor and not inputs.q.is_meta


Orders = tuple[TokenOrderKey, TokenOrderKey] | None


def _labelled(counts: Tensor, indices: Tensor, inputs: Inputs, call: Call, orders: Orders) -> BlockMask:
    """A mask that knows what it was made for."""
    return BlockMask(counts, indices, call.method.block_size, inputs.q.shape[2], inputs.k.shape[2], orders)


def _orders(inputs: Inputs, call: Call) -> Orders:
    """`Plan.orders`, where a compiler traces and there is no plan yet."""
    return planning.orders(call, *call.geometry.specs(call.method, inputs.q.shape[2], inputs.k.shape[2]))


# ---------------------------------------------------------------------------------------------------------------------
# a Call as the arguments of an op


class _Field(NamedTuple):
    """One argument of the op: how its value crosses."""

    name: str
    kind: str  # in the schema's language
    one_or_several: bool = False  # a number, or a tuple of them: crosses as a list
    nested: bool = False  # a tuple of tuples: crosses flat
    text_or_tuple: bool = False  # a name, or a tuple of ints: crosses as text

    def encode(self, value: Any) -> Any:
        if value is None:
            return None
        if self.text_or_tuple:
            return value if isinstance(value, str) else "x".join(map(str, value))
        if self.nested:
            return [number for part in value for number in part]
        if self.one_or_several:
            return list(value) if isinstance(value, tuple) else [value]
        return list(value) if self.kind.endswith(("[]", "[]?")) else value

    def decode(self, value: Any) -> Any:
        if value is None:
            return None
        if self.text_or_tuple:
            return tuple(map(int, value.split("x"))) if value[0].isdigit() else value
        if self.nested:
            return tuple(tuple(value[i : i + 4]) for i in range(0, len(value), 4))
        if self.one_or_several:
            return value[0] if len(value) == 1 else tuple(value)
        return tuple(value) if self.kind.endswith(("[]", "[]?")) else value


_PLAIN = {float: "float", bool: "bool", int: "SymInt", str: "str"}


def _field(name: str, hint: Any) -> _Field:
    """From a type such as `float | tuple[float, ...] | None`."""
    options = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    optional = "?" if NoneType in options else ""
    options = [option for option in options if option is not NoneType]
    tuples = [option for option in options if get_origin(option) is tuple]
    plain = [option for option in options if get_origin(option) is not tuple]
    scalars = [type(get_args(option)[0]) if get_origin(option) is Literal else option for option in plain]
    if tuples and str in scalars:
        return _Field(name, f"str{optional}", text_or_tuple=True)
    if tuples:
        inner = get_args(tuples[0])[0]
        nested = get_origin(inner) is tuple
        inner = get_args(inner)[0] if nested else inner
        return _Field(name, f"{_PLAIN[inner]}[]{optional}", one_or_several=bool(scalars), nested=nested)
    return _Field(name, f"{_PLAIN[scalars[0]]}{optional}")


def _fields(kind: type, names: tuple[str, ...]) -> list[_Field]:
    hints = get_type_hints(kind)
    return [_field(name, hints[name]) for name in names]


_METHOD = _fields(Method, tuple(field.name for field in fields(Method)))
_GEOMETRY = _fields(Geometry, Geometry._fields)
_OTHERS = _fields(Call, Call._fields[2:])
_ARGUMENTS = ", ".join(f"{field.kind} {field.name}" for field in (*_METHOD, *_GEOMETRY, *_OTHERS))


def _encoded(call: Call) -> list[Any]:
    values = [field.encode(getattr(call.method, field.name)) for field in _METHOD]
    values += [field.encode(value) for field, value in zip(_GEOMETRY, call.geometry, strict=True)]
    return [*values, *call[2:]]


def _decoded(values: tuple[Any, ...]) -> Call:
    method = {field.name: field.decode(value) for field, value in zip(_METHOD, values, strict=False)}
    places = values[len(_METHOD) : len(_METHOD) + len(_GEOMETRY)]
    geometry = Geometry(*(field.decode(value) for field, value in zip(_GEOMETRY, places, strict=True)))
    return Call(Method.known(**method), geometry, *values[len(_METHOD) + len(_GEOMETRY) :])


# ---------------------------------------------------------------------------------------------------------------------
# the ops


@torch.library.custom_op(
    "rainfusion::sparse_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? bias, Tensor? counts, Tensor? indices, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    indices: Tensor | None,
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> out, lse, counts, indices; empty tensors for what was not asked for."""
    call = _decoded(values)
    given = None if counts is None or indices is None else BlockMask(counts, indices, call.method.block_size)
    inputs = Inputs(q, k, v, keep, bias, given)
    out, lse, mask = pipeline.attend(inputs, planning.plan(call, inputs.shapes))
    lse = q.new_empty(0, dtype=torch.float32) if lse is None else lse
    if call.return_mask and mask is not None and given is None:
        return _strided_like(q, out), lse, mask.counts, mask.indices
    return _strided_like(q, out), lse, q.new_empty(0, dtype=torch.int32), q.new_empty(0, dtype=torch.int32)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Any, keep: Any, bias: Any, counts: Any, indices: Any, *values: Any
) -> tuple[Tensor, ...]:
    call = _decoded(values)
    lse = q.new_empty(q.shape[:3] if call.return_lse else (0,), dtype=torch.float32)
    if call.return_mask and counts is None:
        return torch.empty_like(q), lse, *_fake_mask(q, k, call.method)
    return torch.empty_like(q), lse, *(q.new_empty(0, dtype=torch.int32) for _ in range(2))


@torch.library.custom_op(
    "rainfusion::predict_mask",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? keep, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _predict_mask(q: Tensor, k: Tensor, keep: Tensor | None, *values: Any) -> tuple[Tensor, Tensor]:
    """-> counts, indices."""
    inputs = Inputs(q, k, k, keep)
    mask = pipeline.predict_mask(inputs, planning.plan(_decoded(values), inputs.shapes))
    return mask.counts, mask.indices


@_predict_mask.register_fake
def _(q: Tensor, k: Tensor, keep: Any, *values: Any) -> tuple[Tensor, Tensor]:
    return _fake_mask(q, k, _decoded(values).method)


def _fake_mask(q: Tensor, k: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """counts and indices without contents."""
    q_block, k_block = sides(method.block_size)
    shape = (q.shape[0], q.shape[1], -(-q.shape[2] // q_block))
    columns = -(-k.shape[2] // k_block)
    dtype = index_dtype(method.block_size, columns)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty((*shape, columns), dtype=dtype)


def _strided_like(q: Tensor, out: Tensor) -> Tensor:
    """`out` in the strides that this op always has: compilers rely on them."""
    if out.stride() == torch.empty_like(q, device="meta").stride():
        return out
    return torch.empty_like(q).copy_(out)
