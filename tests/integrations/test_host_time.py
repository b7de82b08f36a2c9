"""What a sparse call of a model costs the host beside its launches: counted, and not timed.

Kernels are left out here, as `replaying` leaves out what comes before them: everything that still happens does so at
every call of every layer.
"""

import threading
from collections import Counter

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import rainfusion
from helpers import needs_diffusers
from rainfusion import BlockMask, Method, checks, ops, pipeline, planning
from rainfusion.calls import Attended
from rainfusion.integrations import stats
from rainfusion.integrations.decider import Decider
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.settings import Settings

GRID, LENGTH = (4, 16, 24), 4 * 16 * 24
TEXT = 40


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def derived(monkeypatch):
    """Counts what is derived: checks, plans, methods, layouts, masks. No kernel runs; an out and counts come back."""
    counted = Counter()

    def counts(owner, name):
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counted[name] += 1
            return original(*args, **kwargs)

        counting.cache_clear = getattr(original, "cache_clear", None)
        monkeypatch.setattr(owner, name, counting)

    for owner, name in ((planning, "plan"), (planning, "ask"), (planning, "check"), (checks, "tensors")):
        counts(owner, name)
    counts(Method, "__post_init__")
    counts(BlockMask, "__post_init__")
    counts(planning, "cached_layout")

    made = {}

    def attend(inputs, plan):
        if plan not in made:
            rows, columns = LENGTH // 128 + 1, LENGTH // 32 + 2
            shape = (*inputs.q.shape[:2], rows)
            one = torch.ones(shape, dtype=torch.int32)
            mask = BlockMask(one, torch.zeros(*shape, columns, dtype=torch.int16), (128, 32))
            made[plan] = Attended(torch.zeros_like(inputs.q), None, mask)
            counted.clear()
        return made[plan]

    monkeypatch.setattr(pipeline, "attend", attend)
    monkeypatch.setattr(ops, "_is_plain", lambda inputs: True)  # also where operations are counted
    return counted


def decider(schedule="constant", **options):
    return Decider(Settings.check(None, {"sparsity": 0.5, **options}, min_tokens=0, schedule=schedule), ["a", "b"])


def qkv(length):
    return torch.randn(3, 1, 2, length, 16).unbind()


def call(one, scene, tensors, forwards=16):
    for step in range(forwards):
        one.begin(scene, step=step % 2, steps=2)
        for layer in (0, 1):
            one.attend(layer, *tensors, None, pytest.fail)


def test_a_call_that_was_seen_derives_nothing_and_computes_nothing(derived):
    one, scene, tensors = decider(), Scene((GRID,)), qkv(LENGTH)
    call(one, scene, tensors, 1)
    derived.clear()
    with Operations() as operations:
        call(one, scene, tensors)
    assert not derived
    assert not operations.seen
    assert one.stats().sparse_calls == 34


def test_nor_do_the_steps_of_a_schedule(derived):
    one, scene, tensors = decider(schedule="falling"), Scene((GRID,)), qkv(LENGTH)
    call(one, scene, tensors, 2)
    derived.clear()
    with Operations() as operations:
        call(one, scene, tensors)
    assert not derived
    assert not operations.seen
    steps = one.stats().steps
    assert steps[0] > 0.7 > 0.3 > steps[1]


def test_blocks_that_the_data_decides_are_summed_for_many_calls_at_once(derived):
    one, scene, tensors = decider(), Scene((GRID,), before=TEXT), qkv(LENGTH + TEXT)
    call(one, scene, tensors, 16)
    derived.clear()
    with Operations() as operations:
        call(one, scene, tensors, 32)
    assert not derived
    assert operations.seen.pop("aten::view") == 64
    assert set(operations.seen.values()) == {4}  # two sums of each layer
    kept = 2 * (LENGTH // 128 + 1)
    blocks = 2 * (LENGTH // 128 + 1) * (LENGTH // 32 + 2)
    assert one.stats().density == {name: pytest.approx(kept / blocks) for name in "ab"}


def test_masks_are_not_asked_for_where_the_blocks_are_known_beforehand():
    tensors, plans = qkv(LENGTH), []
    one = decider()
    one.begin(Scene((GRID,)))
    one.observer = lambda layer, inputs, plan: plans.append(plan)
    one.attend(0, *tensors, None, lambda: tensors[0])
    assert [plan.call.return_mask for plan in plans] == [False]


def test_counts_are_those_of_the_masks():
    """Whether they are known beforehand, or summed later."""
    for text, exact in ((0, False), (TEXT, True), (TEXT, False)):
        one, tensors = decider(exact_budget=exact), qkv(LENGTH + text)
        for _ in range(3):
            one.begin(Scene((GRID,), before=text))
            one.attend(0, *tensors, None, pytest.fail)
        method = Method.recommended(sparsity=0.5, exact_budget=exact)
        mask = rainfusion.predict_mask(*tensors[:2], txt_len=text, latent_shape_q=GRID, method=method)
        assert one.stats().density["a"] == pytest.approx(mask.density(), abs=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.requires_grad_(), k, v),
        lambda q, k, v: (q, k.double(), v),
        lambda q, k, v: (q, k, v[:, :, :-1]),
        lambda q, k, v: (q, k, v.to("meta")),
        lambda q, k, v: (q, k, v.to_sparse()),
    ],
)
def test_tensors_of_another_kind_are_not_taken_for_those_that_were_seen(change):
    one = decider()
    one.begin(Scene((GRID,)))
    for _ in range(2):
        one.attend(0, *qkv(LENGTH), None, pytest.fail)
    one.attend(0, *change(*qkv(LENGTH)), None, lambda: torch.zeros(1))
    assert (one.stats().sparse_calls, one.stats().dense_calls) == (2, 1)


def test_a_scale_that_is_refused_is_not_taken_for_one_that_is_equal():
    """True is no number, 1.0 is one, and Python has them as equal."""
    for first, second in ((True, 1.0), (1.0, True)):
        one = decider()
        for scale in (first, second, first):
            one.begin(Scene((GRID,)))
            one.attend(0, *qkv(LENGTH), None, lambda: torch.zeros(1), scale=scale)
        dense = sum(scale is True for scale in (first, second, first))
        assert (one.stats().sparse_calls, one.stats().dense_calls) == (3 - dense, dense)


def test_a_view_with_the_other_sign_is_what_it_shows():
    q, k, v = qkv(LENGTH)
    one = decider()
    results = []
    for tensors in ((q, k, v), (-q, k, v), (torch._neg_view(q), k, v)):
        one.begin(Scene((GRID,)))
        results.append(one.attend(0, *tensors, None, pytest.fail))
    assert torch.equal(results[2], results[1])
    assert not torch.equal(results[2], results[0])


def counts(value, rows=8):
    return torch.full((1, 2, rows), value, dtype=torch.int32)


def test_counts_of_several_devices_are_summed_each_on_its_own(monkeypatch):
    """A model that is split: the steps of a schedule have calls of all of its layers."""
    monkeypatch.setattr(stats, "_stream", lambda device: 7)
    monkeypatch.setattr(stats, "is_capturing", lambda device: False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tally = stats.Tally(2)
        for _ in range(40):
            for layer in (0, 1):
                tally.sparse(layer, "a grid", torch.ones(1, 2, 8, dtype=torch.int32, device=f"cuda:{layer}"), 16, 0)
        whole = stats.Tally.side_by_side([tally, tally])
    found = whole.steps[0].counted
    assert {str(device) for device, _ in found} == {"cuda:0", "cuda:1"}
    assert all(counted.found.device == device for (device, _), counted in found.items())


def test_a_stream_sums_its_own_counts(monkeypatch):
    current = [1]
    monkeypatch.setattr(stats, "_stream", lambda device: current[0])
    entry = stats.LayerTally()
    for call in range(60):
        current[0] = 1 + call % 2
        entry.sparse(counts(current[0]), 16 * 2)
    assert {stream: int(counted.found) for (_, stream), counted in entry.counted.items()} == {1: 16 * 16, 2: 16 * 32}
    assert entry.density() == pytest.approx(60 * 16 * 1.5 / (60 * 32))


def test_tallies_of_many_runs_stay_small(monkeypatch):
    """Also where another stream adds them up, which waits for the device first."""
    current, waited = [1], []
    monkeypatch.setattr(stats, "_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    past = stats.LayerTally()
    for _ in range(100):
        current[0], run = 1, stats.LayerTally()
        for _ in range(20):
            run.sparse(counts(1), 32)
        current[0] = 2
        past.add(run)
    assert len(past.counted[torch.device("cpu"), 1].waiting) < 40
    assert waited
    assert past.density() == 0.5
    assert past.sparse_calls == 2000


def test_what_a_graph_sums_is_read_from_the_graph(monkeypatch):
    """A replay makes it anew, and it reads nothing that is given up."""
    entry = stats.LayerTally()
    for _ in range(20):
        entry.sparse(counts(1), 32)
    monkeypatch.setattr(stats, "is_capturing", lambda device: True)
    for _ in range(20):
        entry.sparse(counts(1), 32)
    sums = entry.counted[torch.device("cpu"), -1].waiting
    assert len(sums) == 20
    for one in sums:
        one.fill_(32)  # as a replay with other data does
    assert entry.density() == pytest.approx((20 * 16 + 20 * 32) / (40 * 32))


def test_counts_may_be_read_while_a_model_runs():
    """By another thread, as often as it likes: nothing is lost, and what it reads is of one moment."""
    tally, done, wrong, reads = stats.Tally(1), threading.Event(), [], []

    def read():
        while not done.is_set():
            found = stats.Stats.of({"": (["a"], tally)})
            wrong.extend(share for share in (found.density["a"], *found.steps.values()) if share not in (None, 1.0))
            reads.append(len(found.steps))

    reader = threading.Thread(target=read)
    reader.start()
    every = counts(2)
    for call in range(20000):
        tally.sparse(0, f"grid {call // 40}", every, 32, step=call // 40)
    assert reader.is_alive()  # nothing that changes meanwhile stops it
    done.set()
    reader.join()
    assert reads and not wrong
    assert {tally.layers[0].density(), *(entry.density() for entry in tally.steps.values())} == {1.0}


def test_a_layer_of_diffusers_moves_axes_and_no_more(derived):
    """[B, S, N, D] to [B, N, S, D] and back: four views."""
    needs_diffusers()
    from helpers.enabling import forward, wide_wan
    from rainfusion.integrations.diffusers import scope

    model, inputs, _ = wide_wan()
    with rainfusion.enabled(model, sparsity=0.5, min_tokens=0) as handle:
        forward(model, inputs)
        before, seen = handle.stats().sparse_calls, Counter()
        from_dispatch = scope._from_dispatch

        def watched(*args):
            with Operations() as operations:
                out = from_dispatch(*args)
            seen.update(operations.seen)
            return out

        derived.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scope, "_from_dispatch", watched)
            forward(model, inputs)
        calls = handle.stats().sparse_calls - before
    assert calls > 0
    assert not derived
    assert seen == {"aten::transpose.int": 4 * calls}
