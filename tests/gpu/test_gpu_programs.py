"""What a program relies on: equal runs, streams, threads, CUDA graphs, no waiting, `torch.compile`, several GPUs."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import gpu
from helpers.gpu import ADA_BSA, BF16, CALL, FP32, LENGTH, RF_V2, USUAL, VIDEO, same
from rainfusion import BlockMask, block_sparse_attention, predict_mask, sparse_attention

pytestmark = gpu.ON_GPU

# what a program may call again and again, by name
CALLS = {
    "video": CALL,
    "fp8": dict(CALL, precision="fp8", return_lse=True),
    "int8": dict(CALL, precision="int8", return_lse=True),
    "all results": dict(CALL, return_lse=True, return_mask=True),
    "compensated": dict(USUAL, return_lse=True),
    "compensated, fp8": dict(USUAL, precision="fp8"),
    "by head": dict(CALL, sparsity=[0.9, 0.3, 0.6, 0.5]),
    "by error": dict(VIDEO, sparse_type="rf_v2", target_error=0.3),
    "ada_bsa": dict(sparse_type="ada_bsa", **ADA_BSA[1], return_lse=True),
    "causal": dict(sparse_type="ada_bsa", **ADA_BSA[2], return_lse=True),
    "dense": dict(return_lse=True),
}
FEW_CALLS = ["video", "fp8", "int8"]


def repeatable(backend, name, seed=0, attn_mask=None, **tensors):
    """-> inputs, a function of them, and what it gave the first time; None where the backend refuses."""
    inputs = gpu.qkv(seed=seed, **tensors)
    first = gpu.attend(backend, *inputs, attn_mask, **CALLS[name])
    if first is None:
        return None

    def call(q, k, v, attn_mask=attn_mask):
        return sparse_attention(q, k, v, attn_mask, backend=backend, **CALLS[name])

    return inputs, call, first


@pytest.mark.parametrize("name", CALLS)
def test_a_hundred_runs_are_equal(backend, name):
    ready = repeatable(backend, name)
    if ready is None:
        return
    inputs, call, first = ready
    assert all(same(call(*inputs), first) for _ in range(100))


@pytest.mark.parametrize("name", FEW_CALLS)
def test_other_work_on_the_device_changes_nothing(backend, name):
    ready = repeatable(backend, name, heads=8)
    if ready is None:
        return
    inputs, call, first = ready
    side = torch.cuda.Stream()
    a = gpu.randn(4096, 4096)
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with gpu.at_ease(), torch.cuda.stream(side):
            for _ in range(3):
                a = (a @ a).clamp(-1, 1)
        results.append(call(*inputs))
    torch.cuda.synchronize()
    assert all(same(result, first) for result in results)


@pytest.mark.parametrize("name", FEW_CALLS)
def test_two_streams_at_once(backend, name):
    ready = [repeatable(backend, name, seed, heads=8) for seed in (1, 2)]
    if ready[0] is None:
        return
    streams = [torch.cuda.Stream() for _ in ready]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(30):
        for stream, (inputs, call, _), mine in zip(streams, ready, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(call(*inputs))
    torch.cuda.synchronize()
    for (_, _, first), mine in zip(ready, results, strict=True):
        assert all(same(result, first) for result in mine)


def test_a_layout_is_ready_on_every_stream(backend):
    """The first call with a layout builds it; the next one may come on another stream at once."""
    grid = (5, 13, 17)
    q, k, v = gpu.qkv(math.prod(grid))
    kwargs = dict(RF_V2, latent_shape_q=grid)
    if gpu.attend(backend, q, k, v, **kwargs) is None:
        return
    from rainfusion.layout import cached_layout

    results = []
    for _ in range(5):
        cached_layout.cache_clear()
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                results.append(sparse_attention(q, k, v, **kwargs, backend=backend))
    torch.cuda.synchronize()
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("name", FEW_CALLS)
def test_two_threads(backend, name):
    ready = [repeatable(backend, name, seed) for seed in range(4)]
    if ready[0] is None:
        return

    def work(number):
        inputs, call, first = ready[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [call(*inputs) for _ in range(25)]
            torch.cuda.current_stream().synchronize()
            return all(same(result, first) for result in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [None, "float"])
def test_a_cuda_graph_replays_it_on_new_inputs(backend, name, kind):
    ready = repeatable(backend, name, attn_mask=gpu.key_mask(kind, 2, LENGTH))
    if ready is None:
        return
    inputs, call, _ = ready
    held = [x.clone() for x in inputs]
    held_mask = gpu.key_mask(kind, 2, LENGTH)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*held, held_mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*held, held_mask)
    for seed in (5, 6):
        fresh, fresh_mask = gpu.qkv(seed=seed), gpu.key_mask(kind, 2, LENGTH, seed)
        for old, new in zip(held, fresh, strict=True):
            old.copy_(new)
        if kind:
            held_mask.copy_(fresh_mask)
        graph.replay()
        assert same(result, call(*fresh, fresh_mask))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_the_host_never_waits(backend, name, kind):
    ready = repeatable(backend, name, attn_mask=gpu.key_mask(kind, 2, LENGTH))
    if ready is None:
        return
    inputs, call, first = ready
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = call(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(result, first)


def test_the_host_never_waits_for_a_given_mask(backend):
    q, k, v = gpu.qkv()
    mask = BlockMask.from_dense(gpu.random_mask(q, k))
    first = gpu.attend(backend, q, k, v, mask=mask, return_lse=True)
    if first is None:
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [
            sparse_attention(q, k, v, mask=mask, return_lse=True, backend=backend),
            block_sparse_attention(q, k, v, mask, return_lse=True, backend=backend),
            predict_mask(q, k, **CALL, backend=backend),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(results[0], first)
    assert same(results[1], first)


def test_the_sync_detector_works():
    x = torch.ones(1, device=gpu.DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["all results", "fp8", "int8", "ada_bsa"])
def test_compiled_in_one_graph(backend, compiler, name):
    ready = repeatable(backend, name)
    if ready is None:
        return
    inputs, call, first = ready
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: call(q, k, v), fullgraph=True, backend=compiler)
    for _ in range(2):
        assert same(compiled(*inputs), first)


@pytest.mark.parametrize("name", ["video", "ada_bsa"])
def test_autocast_changes_nothing(backend, name):
    ready = repeatable(backend, name, dtype=FP32)
    if ready is None:
        return
    inputs, call, first = ready
    with torch.autocast("cuda", BF16):
        assert same(call(*inputs), first)


def test_every_gpu_is_served_whichever_is_current(backend):
    ready = repeatable(backend, "all results")
    if ready is None:
        return
    inputs, call, first = ready
    current = torch.cuda.current_device()
    for number in range(torch.cuda.device_count()):
        result = call(*(x.to(f"cuda:{number}") for x in inputs))
        assert result[0].device.index == number
        assert torch.cuda.current_device() == current
        if torch.cuda.get_device_name(number) == torch.cuda.get_device_name(current):
            moved = tuple(x.to(first[0].device) for x in result)
            assert same(moved, first)
