"""What the tests of a GPU share: calls, inputs, float64 attention on the device, and how much error is allowed."""

import contextlib
import math
from functools import lru_cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import oracle
from rainfusion import BlockMask, backends, planning, sparse_attention

DEVICE = "cuda"
BACKENDS = ["hopper", "triton"]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
QUANTISED = ["fp8", "int8"]
PRECISIONS = ["native", *QUANTISED]
ON_GPU = [  # the marks of a test for `pytest -m gpu`
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1800),  # the first call compiles
]

# ragged: neither these lengths nor their numbers of blocks are multiples of 16
GRID, TXT, LENGTH = (5, 13, 20), 50, 1350
IMAGE, IMAGE_TXT = (1, 27, 37), 31  # 1030 tokens
SPANS = [{"start": 10, "latent_shape": [1, 20, 20]}, {"start": 450, "latent_shape": [4, 10, 20]}]
VIDEO = dict(latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
# name -> tokens, and the arguments that lay them out
LAYOUTS = {
    "none": (LENGTH, {}),
    "text alone": (LENGTH, dict(txt_len=TXT)),
    "video": (LENGTH, VIDEO),
    "image": (1030, dict(latent_shape_q=IMAGE, txt_len=IMAGE_TXT)),
    "spans": (LENGTH, dict(video_spans=SPANS)),
    "spans by hand": (LENGTH, dict(video_spans=SPANS, token_order=(2, 8, 8))),
    "raster": (LENGTH, dict(VIDEO, token_order="raster")),
    "mindiesd": (LENGTH, dict(VIDEO, token_order="mindiesd")),
    "own window": (LENGTH, dict(VIDEO, token_order=(8, 4, 4))),
}
TOKEN = LENGTH // 4  # one somewhere

RF_V2 = dict(sparse_type="rf_v2", sparsity=0.6)
CALL = dict(RF_V2, **VIDEO)  # with the defaults of `sparse_attention`
# with those of `rainfusion.enable`
USUAL = dict(CALL, predictor="spread", compensate=True, first_frame="free", block_size=(128, 32))
SUBMEANS = {
    "plain": dict(RF_V2, predictor="submeans"),
    "video": dict(CALL, predictor="submeans"),
    "blocks of 64": dict(CALL, predictor="submeans", block_size=64),
}
ADA_BSA = [
    dict(sparsity=0.5),
    dict(sparsity=0.0, cdf_threshold=0.9, keep_sink=False, keep_recent=False),
    dict(sparsity=0.3, is_causal=True),
    dict(sparsity=0.2, cdf_threshold=0.8, is_causal=True, keep_sink=False),
]

# Relative L2 error on normal random data. The same rounding done in fp32 gives 0.047 to 0.054 and 0.033 to 0.039;
# `hopper` takes powers of two by the bits of e4m3, which makes 0.056 of 0.053.
MOST = {"fp8": 0.06, "int8": 0.042}


def hopper():
    return DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def has_eight_bits(precision):
    """Whether `triton` has kernels for it on this NVIDIA GPU."""
    return precision == "int8" or torch.cuda.get_device_capability() >= (8, 9)


def must_run(backend, dtype, head_dim, precision="native", block_size=128, is_causal=False):
    """What a backend may not refuse: `triton` anything native, and half precision in the eight bits that the GPU has.

    On a Hopper, most half precision for `hopper`.
    """
    if backend == "triton":
        return precision == "native" or (dtype in (FP16, BF16) and head_dim <= 256 and has_eight_bits(precision))
    suits = head_dim <= 128 and head_dim % (8 if precision == "native" else 16) == 0
    blocks = block_size in (128, (128, 64), (128, 32))
    return hopper() and dtype in (FP16, BF16) and suits and blocks and not is_causal


@contextlib.contextmanager
def at_ease():
    """Without the poisoned memory of the tests, and with cuBLAS as it comes: for references."""
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.use_deterministic_algorithms(strict)


# --- inputs ----------------------------------------------------------------------------------------------------------


def randn(*shape, dtype=BF16, seed=0):
    """Drawn in that dtype, on the device: the largest have 2e9 elements."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def qkv(q_len=LENGTH, k_len=None, *, batch=2, heads=4, k_heads=2, dim=128, dtype=BF16, seed=0):
    k_shape = (batch, k_heads, q_len if k_len is None else k_len, dim)
    shapes = ((batch, heads, q_len, dim), k_shape, k_shape)
    return [randn(*shape, dtype=dtype, seed=3 * seed + i) for i, shape in enumerate(shapes)]


def integers(*shape, dtype=BF16, seed=0):
    """-2 ... 2: sums and means over blocks of a power of two tokens are exact in every order of adding."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).to(dtype)


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def key_mask(kind, batch, k_len, seed=0):
    """None, or a mask of that kind; biases are eighths, which every dtype holds exactly."""
    if kind is None:
        return None
    keep = uniform(batch, k_len, seed=seed) < 0.7
    if kind == "blocks":
        keep[:, k_len // 8 : 5 * k_len // 8] = False
        keep[-1, k_len // 2 :] = False
    elif kind == "nothing left":
        keep[0] = False
    elif kind != "bool":
        bias = (8 * randn(batch, k_len, dtype=FP32, seed=seed)).round() / 8
        bias = bias.masked_fill(~keep, -1e4 if kind == "float" else -math.inf)
        return bias if kind == "float" else bias.to(BF16)[:, None, None, :]
    return keep


KEY_MASKS = ["bool", "float", "bf16 [B, 1, 1, Sk]", "blocks", "nothing left"]


def random_mask(q, k, block_size=128, density=0.4, seed=0):
    """bool [B, H, NQ, NK], some rows without a block, some with the last one only."""
    rows, columns = (-(-x.shape[2] // block_size) for x in (q, k))
    dense = uniform(q.shape[0], q.shape[1], rows, columns, seed=seed) < density
    dense[..., 0] |= ~dense.any(-1)
    dense[:, 0, rows // 2] = False
    dense[:, -1, rows // 3] = False
    dense[:, -1, rows // 3, -1] = True
    dense[:, 0, -1] = True
    return dense


def island(x, rows=128, columns=16):
    """x in the middle of a larger tensor that is NaN everywhere else."""
    batch, heads, length, dim = x.shape
    sea = torch.full((batch, heads + 2, length + 2 * rows, dim + 2 * columns), math.nan, dtype=x.dtype, device=x.device)
    inside = sea[:, 1:-1, rows : rows + length, columns : columns + dim]
    inside.copy_(x)
    return inside


# --- what should come out --------------------------------------------------------------------------------------------


def same(a, b):
    """Bit for bit, NaN equal to NaN."""
    if isinstance(a, BlockMask):
        return torch.equal(a.counts, b.counts) and torch.equal(a.indices, b.indices)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.nan_to_num(0.125), b.nan_to_num(0.125)) and torch.equal(a.isnan(), b.isnan())


def _spans_key(spans):
    return None if spans is None else tuple((span["start"], tuple(span["latent_shape"])) for span in spans)


@lru_cache(maxsize=256)
def _layout(seq_len, latent_shape, txt_len, spans, token_order, block_size, first_frame):
    spans = spans and [{"start": start, "latent_shape": shape} for start, shape in spans]
    return oracle.layout(seq_len, latent_shape, txt_len, spans, token_order, block_size, first_frame)


def layouts(q_len, k_len, kwargs):
    """(order, protected) of q and of k: int64 [S], bool [N]."""
    size = kwargs.get("block_size", 128)
    latent_q, latent_k = kwargs.get("latent_shape_q"), kwargs.get("latent_shape_k")
    if q_len == k_len:
        latent_q, latent_k = latent_q or latent_k, latent_k or latent_q
    first = kwargs.get("first_frame", "protected")
    result = []
    for length, latent, first_frame in ((q_len, latent_q, first == "protected"), (k_len, latent_k, first != "free")):
        latent = latent and tuple(latent)
        spans, order = _spans_key(kwargs.get("video_spans")), kwargs.get("token_order", "window")
        order, protected = _layout(length, latent, kwargs.get("txt_len", 0), spans, order, size, first_frame)
        result.append((torch.tensor(order, device=DEVICE), torch.tensor(protected, device=DEVICE)))
    return result


def token_mask(dense, q_len, k_len, kwargs):
    """A block mask [B, H, NQ, NK] in block order -> bool [B, H, Sq, Sk] in the caller's order."""
    size = kwargs.get("block_size", 128)
    q_block, k_block = (
        torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=DEVICE) // size)
        for order, _ in layouts(q_len, k_len, kwargs)
    )
    return dense[:, :, q_block][..., k_block]


def torchs_attention(q, k, v, tokens, attn_mask=None, scale=None, causal=False):
    """SDPA in the inputs' dtype over the same tokens, 0 where none is left."""
    keep, bias = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
    tokens = tokens & keep[:, None, None, :]
    if causal:
        tokens = tokens.tril()
    alive = tokens.any(-1, keepdim=True)
    bias = bias[:, None, None, :].to(q.dtype).expand(tokens.shape).masked_fill(~tokens & alive, -math.inf)
    shared = q.shape[1] // k.shape[1]
    removed = ~keep[:, None, :, None]
    k, v = (x.masked_fill(removed, 0.0).repeat_interleave(shared, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.contiguous() * math.copysign(1.0, scale) * (scale != 0.0)  # its kernels want scale > 0
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.contiguous(), scale=abs(scale) or 1.0)
    return out.masked_fill(~alive, 0.0)


def logit_size(q, k, scale=None, attn_mask=None):
    """A bound for the logits, and so for what fp32 may lose in them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    size = abs(scale) * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).nan_to_num(0.0).max())
    _, bias = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
    return size + float(bias.masked_fill(bias <= oracle.REMOVED, 0.0).abs().max())


def distances(x, exact):
    """Relative L2 distance over everything, and in the worst row that is not 0."""
    gap = x.double() - exact
    norms = exact.norm(dim=-1)
    alive = norms > 0
    return float(gap.norm() / exact.norm().clamp(min=1e-300)), float((gap.norm(dim=-1)[alive] / norms[alive]).max())


def assert_close_to_exact(out, exact, torchs, size, unit=2**-23, eps=None):
    """As a whole and in every row: 1.5x what torch's attention loses in this dtype, and the last bits.

    Those are 2 eps of the dtype for p and the output, and `unit` for the logits: their rounding in fp32.
    """
    if not exact.any():
        assert not out.any()
        return
    slack = 2 * (torch.finfo(out.dtype).eps if eps is None else eps) + unit * size
    for ours, theirs, where in zip(
        distances(out, exact), distances(torchs, exact), ("whole", "worst row"), strict=True
    ):
        assert ours <= 1.5 * theirs + slack, f"{where}: error {ours:.3g}, torch's {theirs:.3g}, slack {slack:.3g}"


def assert_lse(lse, exact, atol):
    assert lse.dtype == torch.float32 and lse.shape == exact.shape
    assert torch.equal(lse.isneginf(), exact.isneginf()), "-inf in the wrong rows"
    gap = (lse.double() - exact).masked_fill(exact.isneginf(), 0.0).abs().max()
    assert gap <= atol, f"lse is off by {gap:.3g}, allowed {atol:.3g}"


# --- calls -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def overheard():
    """[(backend, why it cannot, or None), ...]: what is asked in the meantime."""
    said = []
    ask = backends.why_not

    def listen(name, *args, **named):
        said.append((name, ask(name, *args, **named)))
        return said[-1][1]

    planning.plan.cache_clear()  # a plan that was made before asks nobody
    with mock.patch.object(backends, "why_not", listen):
        yield said


def attend(backend, q, k, v, attn_mask=None, **kwargs):
    """`sparse_attention` by that backend; None where it says that it cannot, in an error with that sentence."""
    result = refused = None
    with overheard() as said:
        try:
            result = sparse_attention(q, k, v, attn_mask, backend=backend, **kwargs)
        except ValueError as error:
            refused = str(error)
            if not said or said[-1][1] is None:
                raise  # not the backend's word
    if refused is None:
        assert said == [(backend, None)]
    else:
        rest = {name: kwargs[name] for name in ("precision", "block_size", "is_causal") if name in kwargs}
        assert f"{backend!r} {said[-1][1]}" in refused
        assert not must_run(backend, q.dtype, q.shape[3], **rest), refused
    return result


def chosen_backend(q, k, v, **kwargs):
    """The backend that `auto` takes, and its result."""
    with overheard() as said:
        result = sparse_attention(q, k, v, **kwargs)
    name, reason = said[-1]
    assert reason is None
    return name, result


def check(backend, q, k, v, attn_mask=None, lse=True, **kwargs):
    """One call against float64 over the mask that it used. -> its results, or None where it was refused."""
    result = attend(backend, q, k, v, attn_mask, return_lse=lse, return_mask=True, **kwargs)
    if result is None:
        return None
    out, mask = result[0], result[-1]
    assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
    if kwargs.get("input_layout") == "BSND":
        out, q, k, v = (x.transpose(1, 2) for x in (out, q, k, v))
    with at_ease():
        tokens = token_mask(mask.to_dense(), q.shape[2], k.shape[2], kwargs)
        rest = attn_mask, kwargs.get("scale"), kwargs.get("is_causal", False)
        exact, exact_lse = oracle.attention(q, k, v, tokens, *rest)
        size = logit_size(q, k, kwargs.get("scale"), attn_mask)
        unit, eps = 2**-23, None
        if kwargs.get("inner_precise") == 1 and q.dtype == FP32:
            unit, eps = 2**-11, 2**-10  # tf32
        assert out.isfinite().all()
        assert (out[exact_lse.isneginf()] == 0).all(), "rows without a key must be 0"
        assert_close_to_exact(out, exact, torchs_attention(q, k, v, tokens, *rest), size, unit, eps)
        if lse:
            assert_lse(result[1], exact_lse, 4 * unit * (4 + size))
    return result


def check_quantised(backend, precision, q, k, v, attn_mask=None, *, most, lse_within=0.05, **kwargs):
    """As `check`, for an error of at most `most`; `lse_within` None: neither single rows nor the LSE are bounded."""
    result = attend(backend, q, k, v, attn_mask, precision=precision, return_lse=True, return_mask=True, **kwargs)
    if result is None:
        return
    out, lse, mask = result
    assert out.isfinite().all()
    with at_ease():
        tokens = token_mask(mask.to_dense(), q.shape[2], k.shape[2], kwargs)
        rest = attn_mask, kwargs.get("scale"), kwargs.get("is_causal", False)
        exact, exact_lse = oracle.attention(q, k, v, tokens, *rest)
        assert (out[exact_lse.isneginf()] == 0).all()
        if not exact.any():
            assert not out.any()
            return
        whole, worst = distances(out, exact)
        assert whole <= most, f"error {whole:.3g}, allowed {most}"
        if lse_within:
            assert worst <= 4 * most, f"error of the worst row {worst:.3g}"
            assert_lse(lse, exact_lse, lse_within)


def check_rows(q, k, v, out, mask, kwargs, picks):
    """The same for a few rows of blocks (b, h, row) of a call that is too large for a matrix of all logits."""
    (q_order, _), (k_order, _) = layouts(q.shape[2], k.shape[2], kwargs)
    size, shared = mask.block_size, q.shape[1] // k.shape[1]
    with at_ease():
        for b, h, row in picks:
            queries = q_order[row * size : (row + 1) * size]
            blocks = mask.indices[b, h, row, : int(mask.counts[b, h, row])].long()
            positions = (blocks[:, None] * size + torch.arange(size)).flatten()
            keys = k_order[positions[positions < k.shape[2]]]
            part = [x[None, None] for x in (q[b, h, queries], k[b, h // shared, keys], v[b, h // shared, keys])]
            tokens = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool)
            exact, _ = oracle.attention(*part, tokens)
            ours = out[b, h, queries][None, None]
            assert_close_to_exact(ours, exact, torchs_attention(*part, tokens), logit_size(*part[:2]))


def reference(q, k, v, attn_mask, mask, **kwargs):
    """out and LSE in float64 on the CPU."""
    there = [x.double().cpu() for x in (q, k, v)]
    mask_there = None if attn_mask is None else attn_mask.cpu()
    kwargs = dict(kwargs, mask=mask.to("cpu"), return_lse=True, backend="reference")
    return sparse_attention(*there, mask_there, **kwargs)


def compare(result, q, k, v, attn_mask, **kwargs):
    """With the reference over the same mask, within twice what rounding inputs and output costs."""
    out, lse, mask = result
    exact, exact_lse = reference(q, k, v, attn_mask, mask, **kwargs)
    most = max(8 * torch.finfo(q.dtype).eps, 2e-5)
    assert (out.double().cpu() - exact).abs().max() <= most * exact.abs().max()
    seen = exact_lse > -math.inf
    assert (out.cpu()[~seen] == 0).all() and lse.cpu()[~seen].isneginf().all()
    if seen.any():
        assert (lse.cpu() - exact_lse)[seen].abs().max() <= most * max(1.0, exact_lse[seen].abs().max())


def compare_quantised(result, q, k, v, attn_mask, most, lse_within, **kwargs):
    """With the reference over the same mask: the errors of 128 keys, as a whole and in the worst row."""
    out, lse, mask = result
    exact, exact_lse = reference(q, k, v, attn_mask, mask, **kwargs)
    assert out.isfinite().all()
    assert (out.cpu()[exact_lse.isneginf()] == 0).all()
    if exact.any():
        whole, worst = distances(out.cpu(), exact)
        assert whole <= most, f"error {whole:.3g}, allowed {most}"
        assert worst <= 4 * most, f"error of the worst row {worst:.3g}"
    assert_lse(lse.cpu(), exact_lse.double(), lse_within)


# --- masks -----------------------------------------------------------------------------------------------------------


def block_means(x, order, block_size, keep=None):
    """float64 [B, H, N, D], and bool [B, N]: blocks with a token left."""
    keep = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if keep is None else keep
    x = x.double().masked_fill(~keep[:, None, :, None], 0.0)[:, :, order]
    padding = -len(order) % block_size
    sums = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block_size)).sum(3)
    number = F.pad(keep[:, order].double(), (0, padding)).unflatten(1, (-1, block_size)).sum(2)
    return sums / number.clamp(min=1)[:, None, :, None], number > 0


def rf_v2(q, k, attn_mask, kwargs):
    """The mask by its definition in float64, bool [B, H, NQ, NK]; and the rows that fp32 may rank otherwise."""
    size, scale = kwargs.get("block_size", 128), kwargs.get("scale") or q.shape[-1] ** -0.5
    (q_order, q_protected), (k_order, k_protected) = layouts(q.shape[2], k.shape[2], kwargs)
    with at_ease():
        keep, _ = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
        q_means, _ = block_means(q, q_order, size)
        k_means, live = block_means(k, k_order, size, keep)
        k_means = k_means.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q_means @ k_means.mT * scale).masked_fill(~live[:, None, None, :], -math.inf)
        # a mean and a product of D terms, each rounded a few times
        noise = 64 * 2**-24 * abs(scale) * (q_means.abs() @ k_means.abs().mT).amax(-1)
        columns = scores.shape[-1]
        number = max(1, oracle.budget(columns, kwargs["sparsity"]))
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(-1, order, (torch.arange(columns) < number).expand(scores.shape))
        decisive = torch.full_like(noise, math.inf)
        if number < columns:
            decisive = (ranked[..., number - 1] - ranked[..., number]).nan_to_num(nan=math.inf)  # -inf - -inf: no keys
        return chosen | q_protected[:, None] | k_protected, decisive <= noise


def ada_bsa_mass(q, k, attn_mask, causal):
    """float64 [B, H, NQ, NK]."""
    with at_ease():
        keep, _ = oracle.kept_keys(attn_mask, k.shape[0], k.shape[2])
        shared = q.shape[1] // k.shape[1]
        k = k.double().masked_fill(~keep[:, None, :, None], 0.0).repeat_interleave(shared, 1)
        keep = F.pad(keep, (0, -keep.shape[1] % 128)).unflatten(1, (-1, 8)).any(2)[:, None, None, :]
        real = (torch.arange(-(-q.shape[2] // 128) * 16) * 8 < q.shape[2])[:, None]

        def groups(x):
            return F.pad(x, (0, 0, 0, -x.shape[2] % 128)).unflatten(2, (-1, 8))

        logits = groups(q.double()).flip(3).flatten(3) @ groups(k).flatten(3).mT * q.shape[-1] ** -0.5 / 8
        logits = logits.masked_fill(~keep, -math.inf)
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        probs = logits.softmax(-1).nan_to_num(0.0) * real
        return probs.unflatten(3, (-1, 16)).sum(4).unflatten(2, (-1, 16)).sum(3)


def assert_ada_bsa(dense, mass, *, sparsity, cdf_threshold=1.0, keep_sink=True, keep_recent=True, is_causal=False):
    """`dense` is what the definition gives for `mass`, give or take a difference of 1e-5 of a row's mass."""
    with at_ease():
        rows, columns = dense.shape[2:]
        visible = torch.ones(rows, columns, dtype=torch.bool)
        visible = visible.tril() if is_causal else visible
        forced = torch.zeros_like(visible)
        forced[:, 0] = keep_sink
        if keep_recent and is_causal:
            forced |= torch.eye(rows, dtype=torch.bool)
        elif keep_recent:
            forced[:, -1] = True
        others = visible & ~forced
        assert not (dense & ~visible).any() and (dense | ~forced).all()
        slack = 1e-5 * mass.sum(-1)
        kept, dropped = dense & others, ~dense & others
        worst_kept = mass.masked_fill(~kept, math.inf).amin(-1)
        best_dropped = mass.masked_fill(~dropped, -math.inf).amax(-1)
        assert (worst_kept >= best_dropped - slack).all(), "a better block was dropped"
        number, available = kept.sum(-1), others.sum(-1)
        cap = torch.tensor([oracle.budget(row + 1 if is_causal else columns, sparsity) for row in range(rows)])
        most = cap.clamp(min=1).minimum(available)
        assert (number <= most).all()
        reached = mass.masked_fill(~kept, 0.0).sum(-1)
        enough = cdf_threshold * mass.masked_fill(~others, 0.0).sum(-1)
        assert ((number == most) | (reached >= enough - slack)).all(), "too few blocks"
        if cdf_threshold < 1.0:
            assert ((number <= 1) | (reached - worst_kept < enough + slack)).all(), "too many blocks"
        else:
            assert (number == most).all()
