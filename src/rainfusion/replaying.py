"""Small calls again, without asking anew how: the same kernels, launched with other pointers.

An image's attention takes 0.3 ms on a fast GPU, and Python takes longer than that to derive sizes, allocate, and let
Triton bind the arguments of six to ten kernels. All of it is the same for the next call of a plan whose tensors lie in
memory alike. So the second such call is recorded: which kernels were launched with what, which memory was allocated in
between. From the third on they are launched with the new pointers, in one piece of memory for all that lies between.
Plans that differ in how many blocks a row keeps share a record: the number is an argument of one kernel, and a schedule
has another one at every step.

Recorded is only what is known to be the same again: `launch` tells of kernels, and a dispatch mode watches every
operation of torch. One that does more than allocate, or look at memory in another way, and the call is not repeated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from rainfusion.blockmask import BlockMask, unchecked
from rainfusion.calls import Attended, Inputs, Shapes
from rainfusion.graphs import is_capturing
from rainfusion.options import Method

if TYPE_CHECKING:
    from rainfusion.planning import Plan

TESTED_TRITON = ("3.6.0",)  # launchers of others take other arguments
MOST_BYTES = 256 * 2**20  # between q, k, v and out: calls that need more take longer on the device than in Python
MOST_RECORDINGS = 256
_ALIGNED = 512  # as torch's allocator does
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_ZEROS = {"aten::zeros"}
_SEEN_ONCE, _FAILED_ONCE, _NEVER = "seen once", "failed once", "never"

_known: dict[Any, Recording | str] = {}  # by kind of plan and how tensors lie in memory
_local = threading.local()  # .recorder: of the call that this thread records
_lock = threading.Lock()


class _Place(NamedTuple):
    """A pointer, or the plan's budget: `bases[base] + offset`."""

    base: int
    offset: int


class _Box(NamedTuple):
    """What tells the copy engine where and how to read."""

    place: _Place
    shape: list[int]
    strides: list[int]
    padding: str


class _Launch(NamedTuple):
    run: Callable[..., None]  # Triton's launcher
    programs: int
    function: int
    packed: Any
    arguments: Callable[[list[Any]], tuple[Any, ...]]  # picks them out of a call's values


class _Pointer:
    """What a launcher wants of a tensor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Descriptor(NamedTuple):
    """What a launcher wants of a descriptor for the copy engine."""

    base: _Pointer
    shape: list[int]
    strides: list[int]
    padding: str


class _Result(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Recording:
    """What a call launched. The values of its arguments are places, boxes and constants, each of them once.

    Bases of places: what comes (`_given`), its results, the memory between, and the budget.
    """

    def __init__(
        self,
        launches: list[_Launch],
        values: tuple[list[_Place], list[_Box], list[Any]],
        results: list[_Result],
        size: int,
        zeros: int,
        kept: list[Tensor],
    ) -> None:
        self._launches, self._results, self._size = launches, results, size
        self._zeros = zeros  # bytes at the start of the memory between that are 0 at first
        self._places, self._boxes, self._constants = values
        self._kept = kept  # layouts and other tensors that every such call reads

    def run(self, inputs: Inputs, device: int | None, budget: int = 0) -> list[Tensor]:
        """`budget`: the key blocks that a row keeps, if that is one number."""
        on = inputs.q.device
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=on) for shape, strides, dtype in self._results
        ]
        between = torch.empty(self._size, dtype=torch.uint8, device=on)
        if self._zeros:
            between[: self._zeros].zero_()
        bases = [x.data_ptr() for x in (*_given(inputs), *results, between)]
        bases.append(budget)
        values: list[Any] = [bases[base] + offset for base, offset in self._places]
        for (base, offset), shape, strides, padding in self._boxes:
            values.append(_Descriptor(_Pointer(bases[base] + offset), shape, strides, padding))
        values += self._constants
        stream = 0 if device is None else torch._C._cuda_getCurrentRawStream(device)
        for run, programs, function, packed, arguments in self._launches:
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments(values))
        return results


def _given(inputs: Inputs) -> tuple[Tensor, ...]:
    """What comes with a call: q, k, v, and the lists of a given mask."""
    mask = inputs.mask
    return inputs[:3] if mask is None else (*inputs[:3], mask.counts, mask.indices)


def launch(kernel: Any, programs: int, *args: Any, budget: Any = None, **options: Any) -> None:
    """`kernel[(programs,)](*args, **options)`, told to the recorder of this thread if there is one.

    Arguments by position, `tl.constexpr` and warps by name. `budget`: the name of the argument that is the plan's one
    budget, or None; the kernel must not be compiled for its value.
    """
    compiled = kernel[(programs,)](*args, **options)
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.launched(kernel, compiled, programs, args, options, budget)


def again(inputs: Inputs, plan: Plan) -> Attended | None:
    """The result of a call that is a repetition; None if it is not, or not known yet."""
    device = inputs.q.device.index
    if not _known or device is None or device != torch.cuda.current_device() or is_capturing(inputs.q.device):
        return None
    found = _known.get(_key(inputs, plan))
    if not isinstance(found, Recording) or _watched():
        return None
    return _attended(found.run(inputs, device, plan.budgets[0] if plan.budgets else 0), plan, inputs.mask)


def _attended(results: list[Tensor], plan: Plan, mask: BlockMask | None = None) -> Attended:
    """From what `finish` was told, in its order; the mask is that which was given, if one was."""
    out, *others = results
    lse = others.pop(0) if plan.call.return_lse else None
    if others:
        mask = unchecked(others[0], others[1], plan.method.block_size)
    return Attended(out, lse, mask)


@contextmanager
def recorded(inputs: Inputs, plan: Plan | None) -> Iterator[Callable[[Tensor, Tensor | None, BlockMask], None]]:
    """Records what is run inside, if it is time to, and there is a plan. What is given is to be told the results."""
    key = _key(inputs, plan) if plan is not None and _may_repeat(inputs, plan) else None
    seen = None if key is None else _seen(key)
    if plan is None or seen not in (_SEEN_ONCE, _FAILED_ONCE):
        yield lambda out, lse, mask: None
        return
    wants_mask, recorder = plan.call.return_mask and inputs.mask is None, _Recorder(inputs)
    _local.recorder = recorder
    found: Recording | None = None

    def finish(out: Tensor, lse: Tensor | None, mask: BlockMask) -> None:
        nonlocal found
        results = [out, lse, *((mask.counts, mask.indices) if wants_mask else ())]
        found = recorder.recording([x for x in results if x is not None])

    try:
        with recorder:
            yield finish
    finally:
        _local.recorder = None
        with _lock:
            # what made it fail may pass: a cache that was filled, memory that was short
            _known[key] = found or (_FAILED_ONCE if seen == _SEEN_ONCE else _NEVER)


def _seen(key: Any) -> Recording | str | None:
    """What is known of such a call. Notes that there was one."""
    with _lock:
        seen = _known.get(key)
        if seen is None:
            while len(_known) >= MOST_RECORDINGS:
                del _known[next(iter(_known))]
            _known[key] = _SEEN_ONCE
        return seen


def could_repeat(method: Method, shapes: Shapes, given_mask: bool = False) -> bool:
    """Whether calls of kernels that Triton launches can be repeated, as far as this tells."""
    if shapes.device.type != "cuda" or torch.version.hip is not None or shapes.has_key_mask or shapes.is_empty:
        return False
    if not given_mask and (method.strategy != "rf_v2" or method.target_error is not None):
        return False
    if 2 * math.prod(shapes.k) * shapes.dtype.itemsize > MOST_BYTES:  # k and v in order are most of it
        return False
    from rainfusion.backends.triton import triton_version

    return triton_version() in TESTED_TRITON


def _may_repeat(inputs: Inputs, plan: Plan) -> bool:
    if plan.backend not in ("hopper", "triton") or not could_repeat(plan.method, plan.shapes, plan.call.given_mask):
        return False
    return not is_capturing(inputs.q.device) and not _watched()


def _watched() -> bool:
    """Whether somebody, a profiler for example, wants to see launches as Triton makes them."""
    from triton import knobs

    asked = knobs.runtime
    enter, leave = asked.launch_enter_hook, asked.launch_exit_hook
    hooked = (enter is not None and getattr(enter, "calls", True)) or (
        leave is not None and getattr(leave, "calls", True)
    )
    return bool(asked.debug or hooked)


def _key(inputs: Inputs, plan: Plan) -> Any:
    """All that launches depend on: the kind of plan; where tensors lie apart, together, and at multiples of what."""
    given = _given(inputs)
    at = [x.data_ptr() for x in given]
    lie = [(x.stride(), x.dtype, address % 16) for x, address in zip(given, at, strict=True)]
    return plan.kind, tuple(lie), tuple(map(at.index, at))


class _Recorder(TorchDispatchMode):
    """Sees the operations and launches of a call.

    It enters by itself: the base class notes in variables of the whole process that there is a mode, and several
    threads may record at a time.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = [x.data_ptr() for x in _given(inputs)]
        self._of_inputs = {x.untyped_storage().data_ptr() for x in _given(inputs)}
        self._allocated: dict[int, Tensor] = {}  # by the address of its memory; kept, so that none is used twice
        self._zeros: set[int] = set()  # of these, the ones that are 0 at first
        self._told: list[tuple[Any, Any, int, tuple[Any, ...], dict[str, Any], str | None]] = []
        self._other: str | None = None  # what cannot be repeated
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation that is seen imports the compiler

    def __enter__(self) -> _Recorder:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if isinstance(result, Tensor) and name in _ALLOCATIONS | _ZEROS:
            self._keep(result)
            if name in _ZEROS:
                self._zeros.add(result.untyped_storage().data_ptr())
        elif not self._is_view(func, args, result):
            self._other = func.name()
        return result

    def _keep(self, x: Tensor) -> None:
        self._bytes += x.untyped_storage().nbytes()
        if self._bytes > 2 * MOST_BYTES:  # with results
            self._other = "too much memory"
            self._allocated.clear()
        if self._other is None:
            self._allocated[x.untyped_storage().data_ptr()] = x

    @staticmethod
    def _is_view(func: Any, args: Any, result: Any) -> bool:
        if func._schema.is_mutable or not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor)):
            return False
        return args[0].untyped_storage().data_ptr() == result.untyped_storage().data_ptr()

    def launched(
        self, kernel: Any, compiled: Any, programs: int, args: tuple[Any, ...], options: Any, budget: str | None
    ) -> None:
        if not hasattr(compiled, "packed_metadata"):  # of an interpreter
            self._other = "a kernel that was not compiled"
        self._told.append((kernel, compiled, programs, args, options, budget))

    def recording(self, results: list[Tensor]) -> Recording | None:
        """None if the call did what cannot be repeated."""
        at_results = [x.untyped_storage().data_ptr() for x in results]
        sizes = {at: x.untyped_storage().nbytes() for at, x in self._allocated.items() if at not in at_results}
        whole = all(at in self._allocated and x.data_ptr() == at for at, x in zip(at_results, results, strict=True))
        if self._other or not whole or sum(sizes.values()) > MOST_BYTES or not self._zeros <= sizes.keys():
            return None
        offsets, size, zeros = {}, 0, 0
        for at in sorted(sizes, key=lambda at: at not in self._zeros):
            offsets[at] = size
            size += -(-sizes[at] // _ALIGNED) * _ALIGNED
            zeros = size if at in self._zeros else zeros
        first = len(self._inputs)  # of the bases after what came
        kept: list[Tensor] = []
        places: dict[_Place, int] = {}
        boxes: list[_Box] = []
        constants: list[Any] = []

        def place(x: Tensor) -> _Place | None:
            """None: it is where it was."""
            memory = x.untyped_storage().data_ptr()
            if x.data_ptr() in self._inputs:
                return _Place(self._inputs.index(x.data_ptr()), 0)
            if memory in at_results:
                return _Place(first + at_results.index(memory), x.data_ptr() - memory)
            if memory in offsets:
                return _Place(first + len(results), offsets[memory] + x.data_ptr() - memory)
            if memory in self._of_inputs:
                self._other = "a part of the inputs"
            kept.append(x)
            return None

        def value(x: Any, is_budget: bool) -> tuple[str, int]:
            """In which list it is, and where there."""
            found = _Place(first + len(results) + 1, 0) if is_budget else None
            if isinstance(x, Tensor):
                found, x = place(x), x.data_ptr()
            elif hasattr(x, "block_shape"):  # a descriptor
                at = place(x.base)
                if at is not None:
                    boxes.append(_Box(at, list(x.shape), list(x.strides), x.padding))
                    return "boxes", len(boxes) - 1
            if found is not None:
                return "places", places.setdefault(found, len(places))
            constants.append(x)
            return "constants", len(constants) - 1

        picked = []
        for kernel, _, _, args, options, budget in self._told:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            picked.append([value(named[name], name == budget) for name in kernel.arg_names])
        starts = {"places": 0, "boxes": len(places), "constants": len(places) + len(boxes)}
        launches = [
            _Launch(
                compiled.run, programs, compiled.function, compiled.packed_metadata,
                itemgetter(*(starts[table] + at for table, at in found)),
            )
            for (_, compiled, programs, *_), found in zip(self._told, picked, strict=True)
        ]  # fmt: skip
        forms = [_Result(tuple(x.shape), x.stride(), x.dtype) for x in results]
        if self._other:
            return None
        return Recording(launches, (list(places), boxes, constants), forms, size, zeros, kept)
