"""Calls that are launched again: with kernels of this file's own, which work on memory by its address.

What of it needs Triton's launcher is in tests/gpu/test_gpu_replaying.py.
"""

import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from rainfusion import BlockMask, replaying
from rainfusion.calls import Inputs
from rainfusion.replaying import launch

watched = replaying._watched


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(replaying, "_known", {})
    monkeypatch.setattr(replaying, "_may_repeat", lambda inputs, plan: True)
    monkeypatch.setattr(replaying, "_watched", lambda: False)


class Kernel:
    """to[i] = a[i] * factor + b[i], as Triton launches one: tensors first, then with addresses alone."""

    arg_names = ("a", "b", "to", "factor", "N")
    function, packed_metadata = 7, "packed"

    def __init__(self):
        self.runs = []

    def __getitem__(self, grid):
        def first(a, b, to, factor, N):
            self._compute(*(x if isinstance(x, int) else _base(x) for x in (a, b, to)), factor, N)
            return self

        return first

    def run(self, programs, y, z, stream, function, packed, metadata, enter, leave, a, b, to, factor, N):
        assert (y, z, stream, function, packed, metadata, enter, leave) == (1, 1, 0, 7, "packed", None, None, None)
        self.runs.append(programs)
        self._compute(*(_base(x) if hasattr(x, "base") else x for x in (a, b, to)), factor, N)

    @staticmethod
    def _compute(a, b, to, factor, N):
        a, b, to = (ctypes.cast(at, ctypes.POINTER(ctypes.c_float)) for at in (a, b, to))
        for i in range(N):
            to[i] = a[i] * factor + b[i]


def _base(x):
    return x.base.data_ptr() if hasattr(x, "base") else x.data_ptr()


class Plan:
    """As much of one as recordings ask for."""

    def __init__(self, return_mask=False, kind=None, budgets=()):
        self.call = SimpleNamespace(return_mask=return_mask, return_lse=False)
        self.kind, self.budgets = self if kind is None else kind, budgets


def tensors(*shape):
    return Inputs(*(torch.randn(*shape) for _ in range(3)))


CONSTANT = torch.full((64,), 0.25)


def call(inputs, kernel, more=None):
    """((q * 2 + k) * 3 + v) + 0.25, in three launches, with a mean of nothing between; sometimes `more`."""
    q, k, v = inputs[:3]
    between, out = torch.empty(2, q.numel()), torch.empty_like(q)
    launch(kernel, 5, q, k, between[1], factor=2.0, N=q.numel())
    if more is not None:
        more(between)
    box = SimpleNamespace(base=between[1], block_shape=[1], shape=[2], strides=[1], padding="zero")
    launch(kernel, 6, box, v, between, factor=3.0, N=q.numel())
    launch(kernel, 7, between, CONSTANT, out, factor=1.0, N=q.numel())
    return out, None


def expected(inputs):
    q, k, v = inputs[:3]
    return (q * 2 + k) * 3 + v + 0.25


def attended(inputs, plan, kernel, more=None):
    found = replaying._known.get(replaying._key(inputs, plan))
    if isinstance(found, replaying.Recording):
        return found.run(inputs, None)[0]
    with replaying.recorded(inputs, plan) as finish:
        out, lse = call(inputs, kernel, more)
        finish(out, lse, None)
    return out


@pytest.mark.parametrize("shape", [(1, 2, 4, 8), (2, 1, 32, 1)])
def test_from_the_third_on_a_call_is_launched_again(shape):
    kernel, plan = Kernel(), Plan()
    for i in range(5):
        inputs = tensors(*shape)
        torch.testing.assert_close(attended(inputs, plan, kernel), expected(inputs))
        assert kernel.runs == [5, 6, 7] * max(0, i - 1)


def test_results_of_a_call_are_its_own():
    kernel, plan = Kernel(), Plan()
    calls = [tensors(1, 1, 4, 4) for _ in range(5)]
    results = [attended(inputs, plan, kernel) for inputs in calls]
    for inputs, result in zip(calls, results, strict=True):
        torch.testing.assert_close(result, expected(inputs))


@pytest.mark.parametrize("what", ["stride", "plan", "alias"])
def test_what_lies_otherwise_is_another_call(what):
    kernel, plan = Kernel(), Plan()
    for _ in range(3):
        attended(tensors(1, 1, 4, 4), plan, kernel)
    assert kernel.runs == [5, 6, 7]
    inputs = tensors(1, 1, 4, 4)
    if what == "stride":
        inputs = inputs._replace(q=torch.randn(1, 1, 4, 8)[..., :4])
    elif what == "alias":  # q and k in one place: which of the two a pointer means cannot be told
        inputs = inputs._replace(k=inputs.q)
    attended(inputs, Plan() if what == "plan" else plan, kernel)
    assert kernel.runs == [5, 6, 7]


def test_one_tensor_as_q_and_k_is_repeated_as_such():
    kernel, plan = Kernel(), Plan()
    for _ in range(4):
        inputs = tensors(1, 1, 4, 4)
        inputs = inputs._replace(k=inputs.q)
        torch.testing.assert_close(attended(inputs, plan, kernel), expected(inputs))
    assert kernel.runs == [5, 6, 7] * 2


@pytest.mark.parametrize(
    "more", [lambda x: x.add_(0.0), lambda x: x + 1, lambda x: x[0].fill_(0.0), lambda x: x.sum().item()]
)
def test_operations_of_torch_are_not_repeated_so_neither_is_the_call(more):
    kernel, plan = Kernel(), Plan()
    for _ in range(4):
        inputs = tensors(1, 1, 4, 4)
        torch.testing.assert_close(attended(inputs, plan, kernel, more), expected(inputs))
    assert kernel.runs == []


def test_another_budget_is_the_same_call_with_another_number():
    """A schedule has one for every step."""
    kernel, kind = Kernel(), object()
    for i, budget in enumerate((5, 4, 3, 2)):
        inputs, plan = tensors(1, 1, 4, 4), Plan(kind=kind, budgets=(budget,))
        found = replaying._known.get(replaying._key(inputs, plan))
        assert isinstance(found, replaying.Recording) == (i > 1)
        if i > 1:
            (out,) = found.run(inputs, None, budget)
        else:
            with replaying.recorded(inputs, plan) as finish:
                out = torch.empty_like(inputs.q)
                launch(kernel, 5, inputs.q, inputs.k, out, budget, budget="factor", N=16)
                finish(out, None, None)
        torch.testing.assert_close(out, inputs.q * budget + inputs.k)
    assert kernel.runs == [5, 5]


def test_memory_that_is_zero_at_first_is_zero_every_time():
    """A counter, which a kernel counts up."""
    kernel, plan = Kernel(), Plan()
    for _ in range(5):
        inputs = tensors(1, 1, 4, 4)
        found = replaying._known.get(replaying._key(inputs, plan))
        if isinstance(found, replaying.Recording):
            (out,) = found.run(inputs, None)
        else:
            with replaying.recorded(inputs, plan) as finish:
                between, counter, out = torch.empty(100), torch.zeros(16), torch.empty_like(inputs.q)
                launch(kernel, 1, inputs.q, counter, between, factor=1.0, N=16)
                launch(kernel, 2, between, counter, counter, factor=1.0, N=16)
                launch(kernel, 3, counter, inputs.k, out, factor=1.0, N=16)
                finish(out, None, None)
        torch.testing.assert_close(out, inputs.q + inputs.k)
    assert kernel.runs == [1, 2, 3] * 3


def test_views_are():
    kernel, plan = Kernel(), Plan()
    for _ in range(4):
        attended(tensors(1, 1, 4, 4), plan, kernel, lambda x: x[1].view(4, 4).transpose(0, 1).unflatten(0, (2, 2)))
    assert kernel.runs == [5, 6, 7] * 2


def test_a_part_of_an_input_that_lies_elsewhere_is_not_taken_for_a_constant():
    kernel, plan = Kernel(), Plan()
    for _ in range(4):
        inputs = tensors(1, 1, 4, 4)
        with replaying.recorded(inputs, plan) as finish:
            out = torch.empty(8)
            launch(kernel, 1, inputs.q[0, 0, 2:], inputs.k, out, factor=1.0, N=8)
            finish(out, None, None)
    assert not any(isinstance(found, replaying.Recording) for found in replaying._known.values())


def fail(plan):
    with pytest.raises(RuntimeError, match="out of"), replaying.recorded(tensors(1, 1, 4, 4), plan):
        raise RuntimeError("out of memory")


def test_a_call_that_fails_is_tried_once_more():
    kernel, plan = Kernel(), Plan()
    fail(plan)
    fail(plan)
    for _ in range(2):
        attended(tensors(1, 1, 4, 4), plan, kernel)
    assert kernel.runs == [5, 6, 7]


def test_and_not_again():
    kernel, plan = Kernel(), Plan()
    for _ in range(3):
        fail(plan)
    assert list(replaying._known.values()) == ["never"]
    for _ in range(3):
        attended(tensors(1, 1, 4, 4), plan, kernel)
    assert kernel.runs == []


def test_a_mask_is_a_result_of_its_own():
    """Its list may lie where scores were, as another type."""
    kernel, plan, found = Kernel(), Plan(return_mask=True), []
    for _ in range(4):
        inputs = tensors(1, 1, 4, 4)
        ready = replaying._known.get(replaying._key(inputs, plan))
        if isinstance(ready, replaying.Recording):
            out, counts, indices = ready.run(inputs, None)
        else:
            with replaying.recorded(inputs, plan) as finish:
                scores, counts, out = torch.empty(16), torch.empty(16), torch.empty_like(inputs.q)
                launch(kernel, 1, inputs.q, inputs.k, scores, factor=1.0, N=16)
                launch(kernel, 2, scores, inputs.v, counts, factor=1.0, N=16)
                launch(kernel, 3, counts, inputs.v, out, factor=1.0, N=16)
                indices = scores.view(torch.int32)
                finish(out, None, SimpleNamespace(counts=counts, indices=indices))
        found.append((inputs, out, counts, indices))
    assert kernel.runs == [1, 2, 3] * 2
    for (q, k, v, *_), out, counts, indices in found:
        torch.testing.assert_close(indices.view(torch.float32), (q + k).flatten())
        torch.testing.assert_close(counts, (q + k + v).flatten())
        torch.testing.assert_close(out, q + k + 2 * v)


def given_mask(shape=(1, 1, 2, 8)):
    """Its numbers have the bits of floats, which is what the kernel here reads."""
    lists = (torch.randn(size).view(torch.int32) for size in (shape[:3], shape))
    return BlockMask(*lists)


@pytest.mark.parametrize("return_mask", [False, True])
def test_a_given_mask_comes_as_q_does_and_goes_back_to_who_gave_it(return_mask):
    kernel, plan = Kernel(), Plan(return_mask)
    for i in range(5):
        inputs = tensors(1, 1, 4, 4)._replace(mask=given_mask())
        counts, indices = inputs.mask.counts, inputs.mask.indices
        found = replaying._known.get(replaying._key(inputs, plan))
        assert isinstance(found, replaying.Recording) == (i > 1)
        if isinstance(found, replaying.Recording):
            result = replaying._attended(found.run(inputs, None), plan, inputs.mask)
            assert result.mask is inputs.mask
            out = result.out
        else:
            with replaying.recorded(inputs, plan) as finish:
                between, out = torch.empty(16), torch.empty_like(inputs.q)
                launch(kernel, 1, inputs.q, indices, between, factor=1.0, N=16)
                launch(kernel, 2, counts, between, between, factor=1.0, N=2)
                launch(kernel, 3, between, inputs.k, out, factor=1.0, N=16)
                finish(out, None, inputs.mask)
        expected = inputs.q + indices.view(torch.float32).view_as(inputs.q) + inputs.k
        expected.view(-1)[:2] += counts.view(torch.float32).view(-1)
        torch.testing.assert_close(out, expected)
    assert kernel.runs == [1, 2, 3] * 3
    assert not found._kept


@pytest.mark.parametrize("what", ["stride", "dtype", "alias"])
def test_a_mask_that_lies_otherwise_is_another_call(what):
    inputs = tensors(1, 1, 4, 4)._replace(mask=given_mask((1, 1, 2, 1)))
    counts, indices = inputs.mask.counts, inputs.mask.indices
    if what == "stride":
        other = BlockMask(counts, torch.zeros(1, 1, 2, 2, dtype=torch.int32)[..., :1])
    elif what == "dtype":
        other = BlockMask(counts, indices.to(torch.int16))
    else:
        other = BlockMask(indices[..., 0], indices)
    plan = Plan()
    assert replaying._key(inputs, plan) == replaying._key(inputs._replace(mask=given_mask((1, 1, 2, 1))), plan)
    assert replaying._key(inputs, plan) != replaying._key(inputs._replace(mask=other), plan)
    assert replaying._key(inputs, plan) != replaying._key(inputs._replace(mask=None), plan)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("return_mask", [False, True])
def test_results_come_back_as_they_were_told(return_lse, return_mask, monkeypatch):
    plan = Plan(return_mask)
    plan.call.return_lse, plan.method = return_lse, SimpleNamespace(block_size=(128, 32))
    inputs = tensors(1, 1, 4, 4)
    told = []
    monkeypatch.setattr(replaying._Recorder, "recording", lambda self, results: told.append(results))
    for _ in range(2):
        with replaying.recorded(inputs, plan) as finish:
            out, lse = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4) if return_lse else None
            mask = BlockMask(
                torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int16), (128, 32)
            )
            finish(out, lse, mask)
    (results,) = told
    found = replaying._attended(results, plan)
    assert found.out is out
    assert found.lse is lse
    assert (found.mask is not None) == return_mask
    if return_mask:
        assert (found.mask.counts is mask.counts, found.mask.indices is mask.indices) == (True, True)
        assert found.mask.block_size == (128, 32)


def test_nothing_of_a_call_is_kept_but_what_others_read():
    kernel, plan = Kernel(), Plan()
    attended(tensors(1, 1, 4, 4), plan, kernel)
    inputs = tensors(1, 1, 4, 4)
    gone = [weakref.ref(x) for x in inputs[:3]]
    out = attended(inputs, plan, kernel, lambda between: gone.append(weakref.ref(between)))
    gone.append(weakref.ref(out))
    del inputs, out
    gc.collect()
    (recording,) = replaying._known.values()
    assert recording._kept[0] is CONSTANT
    assert len(recording._kept) == 1
    assert not any(reference() for reference in gone)


def test_threads_that_record_at_once_leave_no_mode_behind():
    from torch.utils import _python_dispatch

    kernel, plans = Kernel(), [Plan(), Plan()]
    for plan in plans:
        attended(tensors(1, 1, 4, 4), plan, kernel)
    steps = [threading.Barrier(2) for _ in range(2)]

    def work(plan):
        inputs = tensors(1, 1, 4, 4)
        with replaying.recorded(inputs, plan) as finish:
            steps[0].wait()
            finish(*call(inputs, kernel), None)
            steps[1].wait()

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(found, replaying.Recording) for found in replaying._known.values()) == 2
    assert not _python_dispatch._is_in_torch_dispatch_mode


def test_large_calls_are_not(monkeypatch):
    monkeypatch.setattr(replaying, "MOST_BYTES", 100)
    kernel, plan = Kernel(), Plan()
    for _ in range(4):
        attended(tensors(1, 1, 4, 4), plan, kernel)  # 128 bytes between
    assert kernel.runs == []


def test_who_watches_launches_sees_them():
    knobs = pytest.importorskip("triton").knobs
    assert not watched()
    knobs.runtime.launch_enter_hook.add(print)
    try:
        assert watched()
    finally:
        knobs.runtime.launch_enter_hook.remove(print)


def test_so_many_are_known():
    kernel = Kernel()
    for _ in range(replaying.MOST_RECORDINGS + 10):
        attended(tensors(1, 1, 1, 1), Plan(), kernel)
    assert len(replaying._known) == replaying.MOST_RECORDINGS
