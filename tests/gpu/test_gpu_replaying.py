"""Small calls again, on a GPU: the same bits as when everything is derived anew, whatever else goes on."""

import threading
import time

import pytest
import torch

from helpers import gpu
from rainfusion import BlockMask, Method, block_sparse_attention, replaying, sparse_attention
from rainfusion.integrations.decider import Decider
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.settings import Settings

pytestmark = gpu.ON_GPU
GRID, TEXT, HEADS, HEAD_DIM = [3, 12, 16], 20, 4, 128
LENGTH = 3 * 12 * 16 + TEXT
METHODS = {
    "published": Method(sparse_type="rf_v2", sparsity=0.6),
    "enable": Method.recommended(sparsity=0.6),
    "fp8": Method.recommended(sparsity=0.6, precision="fp8"),
    "int8": Method.recommended(sparsity=0.6, precision="int8"),
    "by head": Method.recommended(sparsity=(0.9, 0.5, 0.6, 0.7)),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(replaying, "_known", {})


def tensors(seed, together=False):
    torch.manual_seed(seed)
    if together:  # as a model's one projection gives them
        packed = torch.randn(2, LENGTH, HEADS, 3 * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        return [x.transpose(1, 2) for x in packed.split(HEAD_DIM, 3)]
    return [torch.randn(2, HEADS, LENGTH, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def attend(qkv, name="enable", backend="hopper", **more):
    return sparse_attention(*qkv, method=METHODS[name], latent_shape_q=GRID, txt_len=TEXT, backend=backend, **more)


def anew(qkv, *args, **more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "_known", {})
        patch.setattr(replaying, "_may_repeat", lambda inputs, plan: False)
        return attend(qkv, *args, **more)


def recordings():
    return [found for found in replaying._known.values() if isinstance(found, replaying.Recording)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_the_same_bits(backend, name, together):
    if torch.cuda.get_device_capability() != (9, 0) and backend == "hopper":
        pytest.skip("needs a Hopper GPU")
    kept = []
    for seed in range(5):
        qkv = tensors(seed, together)
        kept.append((qkv, attend(qkv, name, backend)))
        assert len(recordings()) == (seed > 0)
    for qkv, out in kept:  # after all of them: none was written over
        expected = anew(qkv, name, backend)
        assert torch.equal(out, expected)
        assert out.stride() == expected.stride()


@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_one_recording_serves_every_sparsity(backend, precision):
    """A schedule has another one at every step."""
    if torch.cuda.get_device_capability() != (9, 0) and (backend == "hopper" or precision == "fp8"):
        pytest.skip("needs a Hopper GPU")
    for seed, sparsity in enumerate((0.9, 0.8, 0.7, 0.6, 0.3, 0.99, 0.9)):
        method = Method.recommended(sparsity=sparsity, precision=precision)
        options = dict(method=method, latent_shape_q=GRID, txt_len=TEXT, backend=backend, return_mask=True)
        qkv = tensors(seed)
        out, mask = sparse_attention(*qkv, **options)
        assert len(recordings()) == (seed > 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replaying, "_known", {})
            patch.setattr(replaying, "_may_repeat", lambda inputs, plan: False)
            expected, same = sparse_attention(*qkv, **options)
        assert torch.equal(out, expected)
        assert torch.equal(mask.counts, same.counts)
        assert torch.equal(mask.indices, same.indices)


def test_steps_of_a_model_are_repeated():
    """What `enable` asks for, with a schedule: the same bits and the same counts as when everything is derived anew."""

    def run(steps):
        settings = Settings.check(None, {"sparsity": 0.6}, min_tokens=0, schedule="falling")
        decider, found = Decider(settings, ["a"]), []
        for step in range(steps):
            decider.begin(Scene((tuple(GRID),), before=TEXT), step=step, steps=steps)
            found.append(decider.attend(0, *tensors(step), None, pytest.fail))
        return found, decider.stats()

    outs, stats = run(6)
    assert len(recordings()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "_known", {})
        patch.setattr(replaying, "_may_repeat", lambda inputs, plan: False)
        expected, same = run(6)
    assert all(torch.equal(out, other) for out, other in zip(outs, expected, strict=True))
    assert stats == same


@pytest.mark.parametrize("name", ["published", "enable", "fp8", "int8"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_masks_that_are_given(backend, name):
    """As it is done where the blocks of one step are used in the next: another mask in other memory every time."""
    if torch.cuda.get_device_capability() != (9, 0) and (backend == "hopper" or name == "fp8"):
        pytest.skip("needs a Hopper GPU")
    for seed in range(5):
        qkv = tensors(seed)
        _, mask = anew(tensors(seed + 1), name, backend, return_mask=True)
        out, same = attend(qkv, name, backend, mask=mask, return_mask=True)
        assert same is mask
        assert len(recordings()) == (seed > 0)
        assert torch.equal(out, anew(qkv, name, backend, mask=mask))


def test_block_sparse_attention():
    torch.manual_seed(0)
    for seed in range(5):
        qkv = tensors(seed)
        blocks = torch.rand(2, HEADS, -(-LENGTH // 128), -(-LENGTH // 128), device="cuda") < 0.5
        mask = BlockMask.from_dense(blocks)
        out, lse = block_sparse_attention(*qkv, mask, return_lse=True)
        assert len(recordings()) == (seed > 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replaying, "_known", {})
            expected, same = block_sparse_attention(*qkv, mask, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, same)


def test_one_recording_serves_a_mask_whatever_the_sparsity():
    """It is not read: the blocks of one step are used in the next, which a schedule gives another one."""
    _, mask = attend(tensors(9), return_mask=True)
    replaying._known.clear()
    for seed, sparsity in enumerate((0.9, 0.8, 0.7, 0.6)):
        method = Method.recommended(sparsity=sparsity)
        qkv = tensors(seed)
        out = sparse_attention(*qkv, method=method, mask=mask, latent_shape_q=GRID, txt_len=TEXT, backend="hopper")
        assert len(recordings()) == (seed > 0)
        assert torch.equal(out, anew(qkv, mask=mask))


def test_with_lse():
    for seed in range(4):
        qkv = tensors(seed)
        for ours, expected in zip(attend(qkv, return_lse=True), anew(qkv, return_lse=True), strict=True):
            assert torch.equal(ours, expected)
    assert len(recordings()) == 1


def test_q_k_and_v_in_one_place():
    for seed in range(4):
        x = tensors(seed)[0]
        assert torch.equal(attend([x, x, x]), anew([x, x, x]))
    qkv = tensors(9)
    assert torch.equal(attend(qkv), anew(qkv))


def test_on_other_streams_and_threads():
    for seed in range(3):
        attend(tensors(seed))
    assert len(recordings()) == 1
    wrong = []

    def work(number):
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            for i in range(20):
                qkv = tensors_here(100 * number + i)
                out, expected = attend(qkv), attend([x.clone() for x in qkv], return_lse=True)[0]
                if not torch.equal(out, expected):
                    wrong.append((number, i))

    def tensors_here(seed):
        source = torch.Generator("cuda").manual_seed(seed)
        shape = (2, HEADS, LENGTH, HEAD_DIM)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=source) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_captured_in_a_graph_afterwards():
    qkv = tensors(0)
    for _ in range(3):
        attend(qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(qkv)
    for seed in (5, 6):
        fresh = tensors(seed)
        for x, y in zip(qkv, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, anew(fresh))
        assert torch.equal(attend(fresh), anew(fresh))


def test_compiled():
    compiled = torch.compile(lambda q, k, v: attend([q, k, v]) * 2)
    for seed in range(4):
        qkv = tensors(seed)
        assert torch.equal(compiled(*qkv), anew(qkv) * 2)


def test_a_mask_is_a_result_of_its_own():
    for seed in range(4):
        qkv = tensors(seed)
        (out, mask), (expected, same) = attend(qkv, return_mask=True), anew(qkv, return_mask=True)
        assert torch.equal(out, expected)
        assert torch.equal(mask.counts, same.counts)
        assert torch.equal(mask.indices, same.indices)
    assert len(recordings()) == 1


def test_nothing_is_kept_but_what_was_asked_for():
    qkv = tensors(0)
    attend(qkv)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        attend(qkv)
    out = attend(qkv)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before == out.numel() * out.element_size()


def test_takes_less_of_the_host():
    qkv = tensors(0)

    def seconds(call):
        call(qkv)
        torch.cuda.synchronize()
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            call(qkv)
            times.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        return sorted(times)[len(times) // 2]

    slow = seconds(anew)
    for _ in range(3):
        attend(qkv)
    assert seconds(attend) < slow / 2
