"""What a call launches from its record, against what it launches when everything is derived anew. No GPU is needed.

    python tests/helpers/repeats.py

`backends.hopper` and `backends.triton` run on CPU tensors as if an H200 were there, see `targets.py`; what they launch
is noted, and nothing computed. A call is recorded; one with other tensors is run from the record, and derived anew: the
same kernels, in the same order, with arguments that are the same but for where results and the memory between lie. A
line for each kind of call; the exit status is 1 if one differs.
"""

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where helpers are, also for a program

from helpers.planned import planned
from helpers.targets import TARGETS
from rainfusion import BlockMask, Method, pipeline, replaying
from rainfusion.backends import hopper, triton

GRID, TEXT, HEADS, HEAD_DIM = [3, 12, 16], 20, 4, 128
LENGTH = 3 * 12 * 16 + TEXT
RF_V2 = dict(latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TEXT)
KINDS: dict[str, dict[str, Any]] = {
    "published": dict(RF_V2, method=Method(sparse_type="rf_v2", sparsity=0.6)),
    "enable": dict(RF_V2, method=Method.recommended(sparsity=0.6)),
    "submeans": dict(RF_V2, method=Method.recommended(sparsity=0.6, block_size=128, predictor="submeans")),
    "by head": dict(RF_V2, method=Method.recommended(sparsity=(0.9, 0.5, 0.6, 0.7))),
    "a mask": dict(RF_V2, method=Method(sparse_type="rf_v2", sparsity=0.6), masked=True),
    "a mask of finer keys": dict(RF_V2, method=Method.recommended(sparsity=0.6), masked=True),
    "a mask alone": dict(method=Method(), masked=True),
    "a causal mask": dict(method=Method(), masked=True, is_causal=True),
}


class Launch(NamedTuple):
    kernel: str
    programs: int
    arguments: list[Any]  # in the kernel's order


class Compiled:
    """As much of a compiled kernel as a recording asks for; it notes what it is launched with."""

    function, packed_metadata = 1, "packed"

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def run(self, programs: int, y: int, z: int, stream: int, function: int, packed: Any, *more: Any) -> None:
        assert (y, z, function, packed, more[:3]) == (1, 1, 1, "packed", (None,) * 3)
        self.launches.append(Launch(self.kernel.__name__, programs, list(more[3:])))


@contextmanager
def noted():
    """-> the launches in the meantime."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        launches.append(Launch(kernel.__name__, grid[0], [named[name] for name in kernel.arg_names]))
        return Compiled(kernel, launches)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(triton, "_capability", return_value=TARGETS["sm_90"].capability))
        patches.enter_context(mock.patch.object(triton, "_exact_products", return_value="tf32x3"))
        patches.enter_context(mock.patch.object(replaying, "_may_repeat", return_value=True))
        yield launches


def asked(kind: dict[str, Any], seed: int, return_lse: bool) -> tuple[Any, Any]:
    """Tensors of their own, and the plan."""
    torch.manual_seed(seed)
    options = dict(kind)
    q, k, v = (torch.randn(2, HEADS, LENGTH, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
    mask, method = None, options["method"]
    if options.pop("masked", False):
        rows, columns = -(-LENGTH // method.q_block), -(-LENGTH // method.k_block)
        mask = BlockMask.from_dense(torch.rand(2, HEADS, rows, columns) < 0.5, method.block_size)
    # for a backend that runs here; the one that is looked at is asked the same
    return planned(q, k, v, mask=mask, return_lse=return_lse, return_mask=mask is None, **options)


def run(inputs: Any, plan: Any, backend: Any, precision: str) -> list[Any]:
    """The backend's part of a call -> its results, as a recording has them."""
    request = pipeline.request_for(inputs, plan)
    request = request._replace(method=request.method.__class__(**{**vars(request.method), "precision": precision}))
    with replaying.recorded(inputs, plan) as finish:
        keys = backend.prepare(request)
        mask = request.mask or pipeline.predict(request, backend, keys)
        out, lse = backend.attend(request, keys, mask)
        finish(out, lse, mask)
    results = [out, lse, *((mask.counts, mask.indices) if inputs.mask is None else ())]
    return [x for x in results if x is not None]


class Differs(Exception):
    """What is launched from a record is not what is launched anew."""


class Places:
    """Which address of the one call is which of the other: known of what came and of results, learnt of the rest."""

    def __init__(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        self._known = {a.data_ptr(): b.data_ptr() for a, b in zip(ours, theirs, strict=True)}

    def check(self, ours: torch.Tensor, theirs: int) -> None:
        memory, offset = ours.untyped_storage().data_ptr(), ours.data_ptr() - ours.untyped_storage().data_ptr()
        if ours.data_ptr() in self._known:
            memory, offset = ours.data_ptr(), 0
        if self._known.setdefault(memory, theirs - offset) != theirs - offset:
            raise Differs(f"a tensor of {list(ours.shape)} lies elsewhere")

    def distinct(self) -> bool:
        return len(set(self._known.values())) == len(self._known)


def compare(anew: list[Launch], again: list[Launch], places: Places) -> None:
    if [launch[:2] for launch in anew] != [launch[:2] for launch in again]:
        raise Differs(f"other kernels: {[launch[:2] for launch in anew]} and {[launch[:2] for launch in again]}")
    for one, other in zip(anew, again, strict=True):
        for ours, theirs in zip(one.arguments, other.arguments, strict=True):
            if isinstance(ours, torch.Tensor):
                places.check(ours, theirs if isinstance(theirs, int) else theirs.data_ptr())
            elif hasattr(ours, "block_shape"):
                places.check(ours.base, theirs.base.data_ptr())
                if (list(ours.shape), list(ours.strides)) != (theirs.shape, theirs.strides):
                    raise Differs(f"a descriptor of {one.kernel}")
            elif ours != theirs:
                raise Differs(f"an argument of {one.kernel} is {theirs} and should be {ours}")
    if not places.distinct():
        raise Differs("two tensors lie in one place")


def check(kind: dict[str, Any], backend: Any, precision: str, return_lse: bool) -> int:
    """-> how many launches a call is."""
    replaying._known.clear()
    with noted() as launches:
        for seed in range(2):
            run(*asked(kind, seed, return_lse), backend, precision)
        inputs, plan = asked(kind, 2, return_lse)
        found = replaying._known[replaying._key(inputs, plan)]
        if not isinstance(found, replaying.Recording):
            raise Differs("not recorded")
        launches.clear()
        again_results = found.run(inputs, None, plan.budgets[0] if plan.budgets else 0)
        again = list(launches)
        replaying._known.clear()
        launches.clear()
        anew_results = run(inputs, plan, backend, precision)
        given = list(replaying._given(inputs))
        forms = [[(x.shape, x.stride(), x.dtype) for x in results] for results in (anew_results, again_results)]
        if forms[0] != forms[1]:
            raise Differs(f"other results: {forms}")
        compare(launches, again, Places([*given, *anew_results], [*given, *again_results]))
        return len(again)


def main() -> int:
    failures = 0
    for backend in (hopper, triton):
        for name, kind in KINDS.items():
            if backend is hopper and kind.get("is_causal"):
                continue
            for precision in ("native", "fp8", "int8"):
                for return_lse in (False, True):
                    said = f"{backend.__name__.rpartition('.')[2]}, {name}, {precision}{', lse' * return_lse}"
                    try:
                        print(f"{said}: {check(kind, backend, precision, return_lse)} launches, the same", flush=True)
                    except Differs as error:
                        failures += 1
                        print(f"{said}: FAILED: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
