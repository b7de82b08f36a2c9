"""A sequence in shards gets what one process with all of it gets, bit for bit.

Real processes, over gloo: starting them takes seconds, so one start runs every case, and each test reads its own.
"""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rainfusion
from helpers.gpu import ON_GPU
from helpers.planned import planned
from rainfusion import pipeline, planning
from rainfusion.backends import crossover
from rainfusion.calls import Inputs
from rainfusion.distributed import _deal, attend_sharded, ring_attention, ulysses_attention
from rainfusion.geometry import layout_spec
from rainfusion.layout import TokenLayout, cached_layout

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.timeout(1800),  # the first test of a start waits for all of its cases
]

PAGE = Path(__file__).parents[2] / "docs" / "several_gpus.md"
SECONDS = 1500  # for all cases of a start: then it hangs

VIDEO = dict(sparse_type="rf_v2", sparsity=0.7, latent_shape_q=[4, 14, 20])  # 1120 tokens, 9 blocks
CLIPS = [dict(start=30, latent_shape=[3, 12, 16]), dict(start=700, latent_shape=[1, 20, 20])]


class Case(NamedTuple):
    kwargs: dict
    tokens: int = 1120
    heads: int = 4
    k_heads: int = 4
    batch: int = 1
    dtype: torch.dtype = torch.float32
    input_layout: str = "BNSD"
    mask: str = ""  # "bool" or "bias"
    text: int = 0  # joint models: each shard is a part of the text, then a part of the rest
    cuts: tuple = ()  # shares of the shards; () as torch.tensor_split has them
    tells_sizes: bool = True
    inference_mode: bool = False
    dense: bool = False  # torch's own attention
    close_call: bool = False  # only rounding decides which blocks are best


CASES = {
    "a video": Case(VIDEO),
    "a video, BSND": Case(VIDEO, input_layout="BSND", batch=2),
    "text in front": Case(dict(VIDEO, txt_len=77), tokens=1197),
    "clips": Case(dict(sparse_type="rf_v2", sparsity=0.7, video_spans=CLIPS), tokens=1150),
    "no grid": Case(dict(sparse_type="rf_v2", sparsity=0.7, txt_len=100)),
    "mindiesd's order": Case(dict(VIDEO, token_order="mindiesd")),
    "blocks of 64": Case(dict(VIDEO, block_size=64)),
    "two grids": Case(dict(VIDEO, latent_shape_k=[2, 28, 20])),
    "text interleaved": Case(dict(VIDEO, txt_len=77), tokens=1197, text=77),
    "text interleaved, BSND": Case(dict(VIDEO, txt_len=77), tokens=1197, text=77, input_layout="BSND", batch=2),
    "text interleaved, masked": Case(dict(VIDEO, txt_len=77), tokens=1197, text=77, mask="bias", batch=2),
    "uneven shards": Case(VIDEO, cuts=(5, 1, 0, 2), tells_sizes=False),
    "uneven shards, told": Case(VIDEO, cuts=(1, 6, 0, 1)),
    "fewer blocks than processes": Case(dict(VIDEO, latent_shape_q=[2, 5, 9]), tokens=90, cuts=(1, 2, 3, 4)),
    "grouped heads": Case(VIDEO, heads=12, batch=2),
    "key mask": Case(VIDEO, mask="bool", batch=2),
    "key bias": Case(VIDEO, mask="bias", input_layout="BSND"),
    "bfloat16": Case(VIDEO, dtype=torch.bfloat16),
    "float16": Case(VIDEO, dtype=torch.float16, mask="bool"),
    "float64": Case(VIDEO, dtype=torch.float64),
    "inference mode": Case(dict(VIDEO, txt_len=77), tokens=1197, text=77, inference_mode=True, tells_sizes=False),
    "a close call": Case(dict(sparse_type="rf_v2", sparsity=0.5), tokens=640, close_call=True),
    "a scale": Case(dict(VIDEO, scale=0.5)),
    "submeans": Case(dict(VIDEO, predictor="submeans"), cuts=(2, 1, 3, 1)),
    "spread": Case(dict(VIDEO, predictor="spread", compensate=True), cuts=(2, 1, 3, 1)),
    "budgets by head": Case(dict(VIDEO, sparsity=[0.2, 0.9, 0.5, 0.7, 0.8, 0.3, 0.6, 0.4]), heads=8),
    "exact budget": Case(dict(VIDEO, txt_len=77, exact_budget=True), tokens=1197, text=77),
    "first frame's keys": Case(dict(VIDEO, first_frame="keys"), cuts=(2, 1, 3, 1)),
    "compensated": Case(dict(VIDEO, txt_len=77, predictor="submeans", compensate=True), tokens=1197, text=77),
    "reference": Case(dict(VIDEO, backend="reference")),
    "triton's kernels": Case(dict(VIDEO, backend="triton", latent_shape_q=[1, 16, 22], txt_len=32), tokens=384),
    "ada_bsa": Case(dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.9)),
    "ada_bsa, tail": Case(dict(sparse_type="ada_bsa", sparsity=0.7), tokens=1003, cuts=(2, 3, 1, 5), mask="bool"),
    "ada_bsa, interleaved": Case(dict(sparse_type="ada_bsa", sparsity=0.7), text=50, heads=8),
    "dense": Case({}, dense=True),
    "dense, masked and interleaved": Case({}, text=50, mask="bool", batch=2, dense=True),
    "dense, bfloat16": Case(dict(VIDEO, sparsity=0.0), dtype=torch.bfloat16, dense=True),
    "dense, portable": Case(dict(backend="portable"), text=50, mask="bias"),
}
CAUSAL = {  # Ulysses only
    "causal": Case(dict(is_causal=True), text=50, dense=True),
    "causal ada_bsa": Case(dict(sparse_type="ada_bsa", sparsity=0.5, is_causal=True), text=50, cuts=(3, 1, 2, 2)),
}


def inputs(case):
    """q, k, v and the key mask of the whole sequence, in the model's order."""
    generator = torch.Generator().manual_seed(len(case.kwargs) + case.tokens)

    def tensor(heads):
        x = torch.randn(case.batch, heads, case.tokens, 32, generator=generator)
        scenes = torch.randn(case.batch, heads, case.tokens // 40 + 1, 32, generator=generator)
        x += 2 * scenes.repeat_interleave(40, 2)[:, :, : case.tokens]  # neighbours are alike: there is much to choose
        return (x if case.input_layout == "BNSD" else x.transpose(1, 2).contiguous()).to(case.dtype)

    q, k, v = (tensor(heads) for heads in (case.heads, case.k_heads, case.k_heads))
    if case.close_call:  # every key block has the same numbers in another order, and queries sum them up
        channels = torch.stack([torch.randperm(32, generator=generator) for _ in range(case.tokens // 128)])
        q = torch.ones_like(q)
        k = torch.randn(32, generator=generator)[channels].repeat_interleave(128, 0).expand(k.shape)
    keep = torch.rand(case.batch, case.tokens, generator=generator) > 0.3
    bias = torch.randn(case.batch, case.tokens, generator=generator).masked_fill(~keep, -torch.inf)
    return q, k, v, {"": None, "bool": keep, "bias": bias}[case.mask]


def shards(case, processes):
    """-> sizes, order."""
    cuts = case.cuts[:processes] or (1,) * processes

    def split(tokens):
        ends = [round(tokens * sum(cuts[: i + 1]) / sum(cuts)) for i in range(processes)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    text, rest = split(case.text), split(case.tokens - case.text)
    sizes = [a + b for a, b in zip(text, rest, strict=True)]
    if not case.text:
        return sizes, None
    places = torch.arange(case.tokens).split([n for pair in zip(text, rest, strict=True) for n in pair])
    return sizes, torch.cat([*places[0::2], *places[1::2]])


def differences(case, ways, rank, processes):
    """Between this process's results and its part of one process's: 0.0 only if every bit is the same."""
    q, k, v, mask = inputs(case)
    whole = rainfusion.sparse_attention(q, k, v, mask, input_layout=case.input_layout, **case.kwargs)
    sizes, order = shards(case, processes)
    along = 2 if case.input_layout == "BNSD" else 1
    together = torch.arange(case.tokens) if order is None else order.argsort()
    q, k, v, expected = (x.index_select(along, together).split(sizes, along)[rank] for x in (q, k, v, whole))
    with torch.inference_mode(case.inference_mode):
        known = dict(
            input_layout=case.input_layout,
            sizes=sizes if case.tells_sizes else None,
            order=None if order is None else order.clone(),
        )
        found = {way: attend(q, k, v, mask, **known, **case.kwargs) for way, attend in ways.items()}
    return {way: difference(out, expected) for way, out in found.items()}


def difference(out, expected):
    assert out.shape == expected.shape and out.dtype == expected.dtype and out.is_contiguous()
    if torch.equal(out, expected):
        return 0.0
    return (out.double() - expected.double()).abs().max().item() or float("nan")


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors():
    """What two processes or more are told."""
    q = torch.zeros(1, 4, 10, 8)
    three = torch.zeros(1, 3, 10, 8)
    count = dist.get_world_size()
    alone, others = dist.new_group([0]), dist.new_group(list(range(1, count)))
    elsewhere = others if dist.get_rank() == 0 else alone
    return {
        "heads": message(ulysses_attention, three, three, three),
        "key heads": message(ulysses_attention, q, q[:, :1], q[:, :1]),
        "sizes": message(ring_attention, q, q, q, sizes=[11] * count),
        "group": message(ring_attention, q, q, q, group=elsewhere),
        "order": message(ulysses_attention, q, q, q, sizes=[10] * count, order=torch.zeros(10 * count).long()),
    }


def asked_about():
    """Shapes of q for which the crossover is asked whether dense attention is faster."""
    asked = []
    q = torch.zeros(1, 4, 10, 8)
    planning.plan.cache_clear()
    ask, crossover.why_dense = crossover.why_dense, lambda backend, method, shapes, specs: asked.append(list(shapes.q))
    for attend in (ulysses_attention, ring_attention):
        attend(q, q, q, sparse_type="rf_v2", sparsity=0.5)
    crossover.why_dense = ask
    return asked


def process(rank, processes, folder):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # a read before a write shows
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    ways = {"ulysses": ulysses_attention, "ring": ring_attention}
    if processes == 4:
        ulysses = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        ring = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

        def both(q, k, v, mask, *, input_layout, sizes, order, **kwargs):
            return attend_sharded(
                q, k, v, mask, ulysses_group=ulysses, ring_group=ring, sizes=sizes, order=order, **kwargs,
                input_layout=input_layout,
            )  # fmt: skip

        ways["mesh"] = both
    found = {name: differences(case, ways, rank, processes) for name, case in runnable(CASES).items()}
    found |= {name: differences(c, {"ulysses": ulysses_attention}, rank, processes) for name, c in CAUSAL.items()}
    found["errors"], found["asked"] = errors(), asked_about()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def runnable(cases):
    try:
        import triton  # noqa: F401
    except ImportError:
        return {name: case for name, case in cases.items() if case.kwargs.get("backend") != "triton"}
    return cases


def start(processes, folder):
    """-> what each process found."""
    context = mp.spawn(process, (processes, str(folder)), nprocs=processes, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, f"the processes did not end within {SECONDS} seconds"
    finally:
        for child in context.processes:
            child.kill()
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return start(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    return start(4, tmp_path_factory.mktemp("four"))


def check(found, way, name):
    case = {**CASES, **CAUSAL}[name]
    if name not in found[0]:
        pytest.skip("Triton is not installed")
    worst = [of_process[name][way] for of_process in found]
    if way != "ulysses" and case.dense:  # torch's own attention, of some of the queries
        limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[case.dtype]
        assert all(0.0 <= each <= limit for each in worst)
    else:
        assert worst == [0.0] * len(found)


@pytest.mark.parametrize("name", [*CASES, *CAUSAL])
def test_ulysses_gives_the_bits_of_one_process(two_processes, name):
    check(two_processes, "ulysses", name)


@pytest.mark.parametrize("name", CASES)
def test_ring_gives_the_bits_of_one_process(two_processes, name):
    check(two_processes, "ring", name)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ulysses", "ring", "mesh"])
@pytest.mark.parametrize("name", CASES)
def test_four_processes_give_the_bits_of_one(four_processes, way, name):
    check(four_processes, way, name)


SPARSE = [name for name, case in CASES.items() if not case.dense and "dense" not in name and case.tokens >= 128]


@pytest.mark.parametrize("name", SPARSE)
def test_the_sparse_cases_skip_blocks(name):
    case = CASES[name]
    q, k, _, mask = inputs(case)
    kwargs = {key: value for key, value in case.kwargs.items() if key != "backend"}
    found = rainfusion.predict_mask(q, k, mask, input_layout=case.input_layout, **kwargs)
    assert found.density() < 0.9


def test_what_is_faster_is_decided_for_the_whole_sequence_with_all_heads(two_processes):
    assert all(of_process["asked"] == [[1, 4, 20, 8]] for of_process in two_processes)  # once for both ways


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("heads", "ValueError: q's heads must be divisible by the number of processes for Ulysses, got 3 heads and 2"),
        ("key heads", "ValueError: k's heads must be divisible by the number of processes for Ulysses, got 1 heads"),
        ("sizes", "must be the number of tokens of this process, 10, got 11"),
        ("group", "TypeError: group must be a torch.distributed.ProcessGroup that holds this process"),
        ("order", "ValueError: order must hold each of 0..19 once"),
    ],
)
def test_errors_of_two_processes(two_processes, what, expected):
    assert all(expected in of_process["errors"][what] for of_process in two_processes)


# ---------------------------------------------------------------------------------------------------------------------
# in this process alone


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


BOTH = pytest.mark.parametrize("attend", [ulysses_attention, ring_attention])


@BOTH
def test_it_says_that_there_is_no_process_group(attend):
    q = torch.zeros(1, 2, 10, 8)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        attend(q, q, q)


@BOTH
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(latent_shape=[1, 2, 5]), TypeError, "latent_shape is no option; those are sparse_type,"),
        (dict(return_lse=True), ValueError, "return_lse must be left out"),
        (dict(return_mask=True), ValueError, "return_mask must be left out"),
        (dict(mask=None), ValueError, "mask must be left out"),
        (dict(sizes=[5, 5]), ValueError, r"sizes must have a number for each of the 1 processes, got \[5, 5\]"),
        (dict(sizes=[9]), ValueError, r"sizes\[0\] must be the number of tokens of this process, 10, got 9"),
        (dict(sizes=10), TypeError, "sizes must be a list of ints, got 10"),
        (dict(sizes=[10.0]), TypeError, r"sizes\[0\] must be an int"),
        (dict(order=[0, 1]), TypeError, r"order must be a torch\.Tensor or None, got list"),
        (dict(order=torch.arange(9)), ValueError, r"order must be int64 of shape \[10\]"),
        (dict(order=torch.arange(10).int()), ValueError, r"order must be int64 of shape \[10\].*int32"),
        (dict(order=torch.full((10,), 3)), ValueError, r"order must hold each of 0\.\.9 once"),
        (dict(group="all"), TypeError, "group must be a torch.distributed.ProcessGroup.*'all'"),
        (dict(sparsity=2.0), ValueError, r"sparsity must be in \[0, 1\]"),
        (dict(head_num=3), ValueError, "head_num must be q's number of heads, 2"),
        (dict(sparse_type="rf_v2", latent_shape_q=[1, 2, 6]), ValueError, "latent_shape_q must fill the sequence"),
        (dict(backend="hopper"), ValueError, "cannot run this call"),
        (dict(attn_mask=torch.ones(1, 9)), ValueError, r"attn_mask must be a key mask of shape .* = \[1, 10\]"),
    ],
)
def test_wrong_arguments(group_of_one, attend, kwargs, error, match):
    q = torch.zeros(1, 2, 10, 8)
    with pytest.raises(error, match=match):
        attend(q, q, q, **kwargs)


@BOTH
def test_shards_of_q_and_k_have_one_length(group_of_one, attend):
    q, k = torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 12, 8)
    with pytest.raises(ValueError, match=r"shards of one sequence \(self-attention\), got 10 and 12 tokens"):
        attend(q, k, k)


@BOTH
def test_it_is_for_inference(group_of_one, attend):
    q = torch.zeros(1, 2, 10, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"q requires grad.*inference"):
        attend(q, q, q)
    with torch.no_grad():
        assert not attend(q, q, q).requires_grad


def test_ring_is_not_causal(group_of_one):
    q = torch.zeros(1, 2, 10, 8)
    with pytest.raises(ValueError, match=r"is_causal must be False in ring attention.*use ulysses_attention"):
        ring_attention(q, q, q, is_causal=True)


def test_an_order_that_was_written_to_is_read_again(group_of_one):
    q, k, v = torch.randn(3, 1, 2, 384, 16).unbind()
    kwargs = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[1, 16, 24])
    order = torch.arange(384)
    for change in (order, order.flip(0)):
        order.copy_(change.clone())
        expected = rainfusion.sparse_attention(*(x[:, :, order] for x in (q, k, v)), **kwargs)[:, :, order.argsort()]
        for attend in (ulysses_attention, ring_attention):
            assert torch.equal(attend(q, k, v, order=order, **kwargs), expected)


@BOTH
def test_dense_where_that_is_faster(group_of_one, attend, monkeypatch):
    monkeypatch.setattr(crossover, "why_dense", lambda *_: "it is faster")
    q, k, v = torch.randn(3, 1, 2, 384, 16).unbind()
    out = attend(q, k, v, sizes=[384], sparse_type="rf_v2", sparsity=0.9, latent_shape_q=[1, 16, 24])
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


@BOTH
def test_a_compiled_model_runs_it_as_it_is(group_of_one, attend):
    q, k, v = torch.randn(3, 1, 2, 384, 16).unbind()

    def model(q, order):
        kwargs = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[1, 16, 24])
        return 1 + attend(2 * q, k, v, sizes=[384], order=order, **kwargs)

    order = torch.randperm(384)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: our caches are traced
        assert torch.equal(compiled(q, order), model(q, order))


@BOTH
def test_autocast_does_not_reach_inside(group_of_one, attend):
    q, k, v = torch.randn(3, 1, 2, 384, 16).unbind()
    kwargs = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[1, 16, 24])
    expected = rainfusion.sparse_attention(q, k, v, **kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v, **kwargs), expected)


def test_every_process_has_as_much_to_do():
    """21 x 30 x 40 tokens of video behind 226 of text, in shards for 8: protected rows attend to everything."""
    layout = TokenLayout.build(25426, latent_shape=[21, 30, 40], txt_len=226)
    sizes = tuple(len(part) for part in torch.arange(25426).tensor_split(8))
    spec = layout_spec(25426, [21, 30, 40], 226, None, "window", 128, "protected")
    deals = [_deal(spec, None, sizes, rank, torch.device("cpu")) for rank in range(8)]
    heavy = [int(deal.layout.protected.sum()) for deal in deals]
    assert sum(heavy) == int(layout.protected.sum()) and max(heavy) - min(heavy) <= 1
    blocks = [len(deal.shard.blocks) for deal in deals]
    assert sum(blocks) == layout.num_blocks and max(blocks) - min(blocks) <= 1


def test_what_is_dealt_out_comes_as_blocks():
    """Rows are numbered, sent by hand, and put into blocks: each block is one of the whole layout."""
    sizes = (300, 0, 84, 500)
    spec = layout_spec(884, [4, 12, 18], 20, None, "window", 128, "protected")
    cpu = torch.device("cpu")
    layout = cached_layout(spec, cpu)
    held = torch.arange(884).split(sizes)
    deals = [_deal(spec, None, sizes, rank, cpu) for rank in range(4)]
    sent = [rows[deal.send].split(deal.to) for rows, deal in zip(held, deals, strict=True)]
    for rank, deal in enumerate(deals):
        came = torch.cat([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == deal.come
        expected = [layout.order[128 * block : 128 * block + 128] for block in deal.shard.blocks.tolist()]
        assert torch.equal(deal.layout.reorder(came[:, None])[:, 0], torch.cat([came[:0], *expected]))
        assert torch.equal(torch.cat(sent[rank])[deal.back], held[rank])


# ---------------------------------------------------------------------------------------------------------------------
# on a GPU: one is not enough for several NCCL processes


def dealt(q, k, v, processes, **kwargs):
    """rf_v2 as `ring_attention` computes it, one process after the other."""
    _, plan = planned(q, k, v, **kwargs)
    spec = plan.q_spec
    sizes = tuple(len(part) for part in torch.arange(q.shape[2]).tensor_split(processes))
    deals = [_deal(spec, None, sizes, rank, q.device) for rank in range(processes)]
    sent = [rows[:, :, deal.send].split(deal.to, 2) for rows, deal in zip(q.split(sizes, 2), deals, strict=True)]
    results = []
    for rank, deal in enumerate(deals):
        rows = torch.cat([parts[rank] for parts in sent], 2)
        layouts = deal.layout, cached_layout(spec, q.device)
        out = pipeline.attend(Inputs(rows, k, v), plan, layouts, deal.shard).out
        results.append(out.split(deal.come, 2))
    back = [torch.cat([parts[rank] for parts in results], 2)[:, :, deal.back] for rank, deal in enumerate(deals)]
    return torch.cat(back, 2)


@pytest.mark.parametrize("processes", [1, 3, 8])
@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("portable", "native"),
        *(
            pytest.param(backend, precision, marks=ON_GPU)
            for backend, precision in [
                ("triton", "native"),
                ("hopper", "native"),
                ("hopper", "fp8"),
                ("hopper", "int8"),
            ]
        ),
    ],
)
def test_dealt_blocks_give_the_bits_of_one_process(backend, precision, processes):
    device = "cpu" if backend == "portable" else "cuda"
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v = torch.randn(3, 1, 2, 1350, 64, device=device, dtype=torch.bfloat16).unbind()
    kwargs = dict(sparse_type="rf_v2", sparsity=0.6, latent_shape_q=[5, 13, 20], txt_len=50)
    kwargs.update(backend=backend, precision=precision)
    assert torch.equal(dealt(q, k, v, processes, **kwargs), rainfusion.sparse_attention(q, k, v, **kwargs))


@pytest.fixture
def nccl_group_of_one():
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@BOTH
@pytest.mark.parametrize(
    "kwargs", [VIDEO, dict(sparse_type="ada_bsa", sparsity=0.5), {}], ids=["rf_v2", "ada", "dense"]
)
def test_a_second_call_never_waits_on_the_host(nccl_group_of_one, attend, kwargs):
    q, k, v = torch.randn(3, 1, 4, 1120, 64, device="cuda", dtype=torch.bfloat16).unbind()
    order = torch.randperm(1120, device="cuda")
    backend = dict(backend="triton") if kwargs else {}
    sorted_back = order.argsort()
    expected = rainfusion.sparse_attention(*(x[:, :, order] for x in (q, k, v)), **backend, **kwargs)[:, :, sorted_back]
    call = dict(sizes=[1120], order=order, **backend, **kwargs)
    attend(q, k, v, **call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(q, k, v, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0 if kwargs else 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# the page


def examples():
    """Those for plain torch.distributed."""
    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    return [block for block in blocks if "rainfusion.distributed" in block]


@pytest.mark.parametrize("number", range(len(examples())))
def test_the_examples_of_the_page_run_alone(number):
    names = {}
    exec(examples()[number], names)
    assert names["out"].shape == names["q"].shape and names["out"].isfinite().all()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_script_of_the_page_runs_in_two_processes(tmp_path):
    script = tmp_path / "attend.py"
    script.write_text(examples()[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2: torch.Size([1, 8, 1760, 64])") == 2
