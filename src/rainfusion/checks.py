"""What callers may pass: every argument is checked here, before any work, and brought into one plain form.

An error names the argument, what came and what is allowed. A check that concerns one argument stands alone; what
must fit together (grid and length, mask and tensors) follows below it.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from rainfusion.blockmask import BlockMask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUT_LAYOUTS = ("BNSD", "BSND")
SPARSE_TYPES = (None, "rf_v2", "ada_bsa", "rf_v3")
BLOCK_SIZES = (64, 128)
TOKEN_ORDERS = ("window", "mindiesd", "raster")
PRECISIONS = ("native", "fp8", "int8")
PREDICTORS = {"mean": 1, "submeans": 4}  # rf_v2: name -> means of a block
FIRST_FRAMES = ("protected", "keys", "free")
# of rf_v2: the best samples for their time, see docs/quality.md. `sparse_attention` itself has those of the published
# method
RECOMMENDED: dict[str, Any] = dict(predictor="submeans", compensate=True, first_frame="free")

REMOVED_AT = -1e4  # an additive key bias of this or less removes the key
REMOVED_AT_BF16 = -9984.0  # what -1e4 is in a bf16 mask


Grid = tuple[int, int, int]  # t, h, w
Clip = tuple[int, int, int, int]  # start, t, h, w


class VideoSpan(TypedDict):
    """One clip of `video_spans`: tokens start ... start + t*h*w - 1."""

    start: int
    latent_shape: Sequence[int]


class LayoutSpec(NamedTuple):
    """A token layout as plain numbers: what `TokenLayout.build` was asked for, checked, and hashable for the cache."""

    seq_len: int
    latent_shape: Grid | None
    txt_len: int
    video_spans: tuple[Clip, ...] | None
    token_order: str
    window: Grid | None  # None: the default for a video or an image
    block_size: int
    first_frame: bool = True  # whether that of a video is protected


class Options(NamedTuple):
    """The checked arguments of one call that are not tensors, in types that a custom op's schema knows."""

    scale: float
    is_causal: bool
    inner_precise: int
    precision: str
    strategy: str  # "dense", "rf_v2" or "ada_bsa"
    predictor: str  # of rf_v2
    compensate: bool  # skipped blocks count through their means
    sparsity: float  # the mean of the heads, where each has its own
    head_sparsity: list[float]  # empty: one for all
    target_error: float  # rf_v2: budgets follow from it; 0: from the sparsity
    exact_budget: bool  # rf_v2: protected blocks count in the sparsity
    first_frame: str  # rf_v2
    cdf_threshold: float
    keep_sink: bool
    keep_recent: bool
    block_size: int
    txt_len: int
    latent_q: list[int]  # empty: none
    latent_k: list[int]
    video_spans: list[int]  # start, t, h, w, start, t, h, w, ...
    token_order: str
    window: list[int]

    @property
    def parts(self) -> int:
        """Means of a block, from which rf_v2 predicts."""
        return PREDICTORS[self.predictor]

    def without_layout(self) -> Options:
        """Tokens stay as they are, none protected."""
        return self._replace(txt_len=0, latent_q=[], latent_k=[], video_spans=[], token_order="raster", window=[])

    def layout_specs(self, q_len: int, k_len: int) -> tuple[LayoutSpec, LayoutSpec]:
        """The layouts of q and of k."""
        flat = self.video_spans
        clips = tuple((flat[i], flat[i + 1], flat[i + 2], flat[i + 3]) for i in range(0, len(flat), 4))

        def spec(seq_len: int, latent: list[int], first_frame: bool) -> LayoutSpec:
            return LayoutSpec(
                seq_len, _triple(latent), self.txt_len, clips or None, self.token_order, _triple(self.window),
                self.block_size, first_frame,
            )  # fmt: skip

        rows, columns = self.first_frame == "protected", self.first_frame != "free"
        return spec(q_len, self.latent_q, rows), spec(k_len, self.latent_k, columns)


def _triple(sizes: list[int]) -> Grid | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes else None


# ---------------------------------------------------------------------------------------------------------------------
# one argument


def integer(name: str, value: Any, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            if isinstance(value, (bool, Tensor)):
                raise TypeError
            value = operator.index(value)  # a NumPy integer, say
        except TypeError:
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})") from None
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value  # type: ignore[no-any-return]


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got an int of {value.bit_length()} bits") from None  # type: ignore[union-attr]


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def choice(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    # isinstance first: comparing an array with == would not give a bool
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Sequence[int]) -> int:
    chosen = integer(name, value, minimum=0)
    if chosen not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {chosen}")
    return chosen


def fraction(name: str, value: Any, *, zero: bool) -> float:
    share = number(name, value)
    if not isinstance(value, (int, float)):  # of a NumPy fp32, whose 0.7 is a little less
        share = round(share, 7)
    if not (0.0 <= share <= 1.0) or (share == 0.0 and not zero):  # the first test is False for NaN
        raise ValueError(f"{name} must be in {'[' if zero else '('}0, 1], got {share}")
    return share


def sparsities(value: Any, heads: int) -> list[float]:
    """One sparsity, or one for each query head."""
    if isinstance(value, numbers.Real):
        return [fraction("sparsity", value, zero=True)]
    if not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError("sparsity must be a list of floats or a tensor on the CPU, got one on a device")
        value = [round(share, 7) if isinstance(share, float) else share for share in value.tolist()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return [fraction("sparsity", value, zero=True)]
    if len(value) != heads:
        raise ValueError(f"sparsity must be a number, or one for each of q's {heads} heads, got {len(value)} of them")
    return [fraction(f"sparsity[{head}]", share, zero=True) for head, share in enumerate(value)]


def checked_scale(value: Any, head_dim: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_dim)  # as torch computes it, to the last bit
    scale = number("scale", value)
    if not abs(scale) < math.inf:  # math.isfinite would not compile for a symbolic scale
        raise ValueError(f"scale must be finite, got {scale}; None means head_dim ** -0.5 = {head_dim**-0.5:.4g}")
    return scale


def grid(name: str, value: Any) -> Grid:
    """A latent shape [t, h, w]."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list or tuple [t, h, w], got {value!r} ({type(value).__name__})")
    if len(value) != 3:
        raise ValueError(f"{name} must have three numbers [t, h, w], got {list(value)}")
    t, h, w = (integer(f"{name}[{i}]", size, minimum=1) for i, size in enumerate(value))
    return t, h, w


def spans(value: Any) -> tuple[Clip, ...]:
    """Clips as (start, t, h, w): at least one, in order, none touching another's tokens."""
    shape = '[{"start": int, "latent_shape": [t, h, w]}, ...]'
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"video_spans must be a list {shape}, got {value!r} ({type(value).__name__})")
    if len(value) == 0:
        raise ValueError(f"video_spans must hold at least one clip {shape}, got an empty list; None means no clips")
    clips: list[Clip] = []
    end = 0
    for i, span in enumerate(value):
        if not isinstance(span, Mapping):
            raise TypeError(f"video_spans[{i}] must be a dict with start and latent_shape, got {span!r}")
        if set(span) != {"start", "latent_shape"}:
            keys = sorted(map(str, span))
            raise ValueError(f"video_spans[{i}] must have the keys start and latent_shape, got {keys}")
        start = integer(f"video_spans[{i}]['start']", span["start"], minimum=0)
        t, h, w = grid(f"video_spans[{i}]['latent_shape']", span["latent_shape"])
        if start < end:
            raise ValueError(
                f"video_spans must be in order and disjoint: clip {i} starts at {start}, but the one before it ends "
                f"at {end}"
            )
        end = start + t * h * w
        clips.append((start, t, h, w))
    return tuple(clips)


def order_and_window(value: Any, block_size: int) -> tuple[str, Grid | None]:
    """A named token order, or a window of the caller's own."""
    if isinstance(value, str):
        if value in TOKEN_ORDERS:
            return value, None
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        window = grid("token_order", value)
        sizes = sorted({block_size, 128})
        if math.prod(window) not in sizes:
            raise ValueError(
                f"token_order must be a window (wt, wh, ww) of {' or '.join(map(str, sizes))} tokens, got {window} of "
                f"{math.prod(window)}; (4, 4, 8), (2, 8, 8) and (1, 8, 16) are windows of 128"
            )
        return "window", window
    raise ValueError(
        f"token_order must be {', '.join(map(repr, TOKEN_ORDERS))} or a window (wt, wh, ww), got {value!r}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# what must fit together


def tensors(input_layout: Any, head_num: Any, **named: Any) -> list[Tensor]:
    """q, k and, where there is one, v as [B, H, S, D] views."""
    choice("input_layout", input_layout, INPUT_LAYOUTS)
    for name, x in named.items():
        _check_dense(name, x)
        if x.dim() != 4:
            letters = ", ".join(input_layout)
            raise ValueError(f"{name} must have 4 dimensions [{letters}], got {x.dim()}: shape {list(x.shape)}")
    q = named["q"]
    for name, x in named.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {_dtype(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {_dtype(q)}, got {_dtype(x)}; convert with .to(q.dtype)")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}; move it with .to(q.device)")
    views = {name: x.transpose(1, 2) if input_layout == "BSND" else x for name, x in named.items()}
    _check_shapes(**views)
    heads = views["q"].shape[1]
    if head_num is not None and integer("head_num", head_num, minimum=0) != heads:
        raise ValueError(
            f"head_num must be q's number of heads, {heads} in input_layout={input_layout!r}, got {head_num}; if "
            f"{head_num} is right, the other input_layout may be meant"
        )
    return list(views.values())


def _check_dense(name: str, x: Any) -> None:
    """A plain tensor without a gradient to come."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but sparse attention is for inference and has no backward: call it under "
            f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Batch, heads and head dim of [B, H, S, D] views."""
    q_heads, k_heads = q.shape[1], k.shape[1]
    wrong = None
    if v is not None and v.shape != k.shape:
        wrong = f"v must have k's shape, got {list(v.shape)}"
    elif k.shape[0] != q.shape[0]:
        wrong = f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}"
    elif k.shape[3] != q.shape[3]:
        wrong = f"k must have q's head dim {q.shape[3]}, got {k.shape[3]}"
    elif q.shape[3] == 0:
        wrong = "q must have a head dim of at least 1, got 0"
    elif q_heads != k_heads and (k_heads == 0 or q_heads % k_heads != 0):
        wrong = f"q's heads must be a multiple of k's heads, got {q_heads} and {k_heads}"
    if wrong is not None:
        raise ValueError(f"{wrong}; as [B, N, S, D] q is {list(q.shape)} and k is {list(k.shape)}")


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def key_mask(attn_mask: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`attn_mask` -> (keep, bias): bool [B, Sk], True where the key takes part; the mask's float [B, Sk], or None."""
    if attn_mask is None:
        return None, None
    _check_dense("attn_mask", attn_mask)
    batch, k_len = k.shape[0], k.shape[2]
    if attn_mask.shape != (batch, k_len) and attn_mask.shape != (batch, 1, 1, k_len):
        raise ValueError(
            f"attn_mask must be a key mask of shape [B, Sk] = [{batch}, {k_len}] or [{batch}, 1, 1, {k_len}], got "
            f"{list(attn_mask.shape)}. One mask for all: attn_mask.expand({batch}, -1); a mask per query is not "
            "supported, use torch's scaled_dot_product_attention"
        )
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {attn_mask.device}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        hint = "; use attn_mask.bool() if 1 means attend" if not attn_mask.is_floating_point() else ""
        raise TypeError(f"attn_mask must be bool (True = attend) or an additive float, got {_dtype(attn_mask)}{hint}")
    attn_mask = attn_mask.reshape(batch, k_len)
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    # NaN is not removed: it shows in the output, as it would in dense attention
    keep = ~(attn_mask <= (REMOVED_AT_BF16 if attn_mask.dtype == torch.bfloat16 else REMOVED_AT))
    return keep, attn_mask.masked_fill(~keep, 0.0)


def layout_spec(
    seq_len: Any, latent_shape: Any, txt_len: Any, video_spans: Any, token_order: Any, block_size: Any
) -> LayoutSpec:
    """The checked layout of one sequence."""
    block_size = one_of("block_size", block_size, BLOCK_SIZES)
    order, window = order_and_window(token_order, block_size)
    spec = LayoutSpec(
        seq_len=integer("seq_len", seq_len, minimum=0),
        latent_shape=None if latent_shape is None else grid("latent_shape", latent_shape),
        txt_len=integer("txt_len", txt_len, minimum=0),
        video_spans=None if video_spans is None else spans(video_spans),
        token_order=order,
        window=window,
        block_size=block_size,
    )
    check_fit(spec, "latent_shape")
    return spec


def check_fit(spec: LayoutSpec, name: str) -> None:
    """Grid, text and clips must fill the sequence, or lie within it. `name`: of the latent shape, for the message."""
    seq_len, shape, txt_len, clips = spec[:4]
    if clips is not None:
        if shape is not None or txt_len != 0:
            raise ValueError(
                f"video_spans excludes txt_len and {name}: text and other context are simply the tokens outside the "
                f"clips; got txt_len={txt_len}, {name}={shape}"
            )
        start, t, h, w = clips[-1]
        if start + t * h * w > seq_len:
            raise ValueError(
                f"video_spans must lie inside the sequence of {seq_len} tokens, but clip {len(clips) - 1} ends at "
                f"{start} + {t}*{h}*{w} = {start + t * h * w}"
            )
    if txt_len > seq_len:
        raise ValueError(f"txt_len must be at most the sequence length {seq_len}, got {txt_len}")
    if shape is not None and txt_len + math.prod(shape) != seq_len:
        t, h, w = shape
        raise ValueError(
            f"{name} must fill the sequence: txt_len + t*h*w = {txt_len} + {t}*{h}*{w} = {txt_len + t * h * w}, but "
            f"the sequence has {seq_len} tokens. [t, h, w] counts tokens after patching; text behind the video goes "
            "through video_spans; and is input_layout right?"
        )


def block_mask(mask: Any, q: Tensor, k: Tensor, block_size: int | None) -> None:
    """A `BlockMask` must describe these tensors (`block_size=None`: whatever the mask has)."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a rainfusion.BlockMask, got {type(mask).__name__}; see BlockMask.from_dense")
    if block_size is not None and mask.block_size != block_size:
        raise ValueError(
            f"mask must have blocks of block_size={block_size} tokens, got blocks of {mask.block_size}; pass "
            f"block_size={mask.block_size} to use it"
        )
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    size = mask.block_size
    expected = (batch, heads, -(-q_len // size), -(-k_len // size))
    if tuple(mask.indices.shape) != expected:
        raise ValueError(
            f"mask must be [B, H, NQ, NK] = {list(expected)} for {q_len} queries and {k_len} keys in blocks of "
            f"{size}, got {list(mask.indices.shape)}; predict it again for this call"
        )
    for side, known, length in (("q", mask.q_len, q_len), ("k", mask.k_len, k_len)):
        if known is not None and known != length:
            raise ValueError(f"mask was made for {side} of {known} tokens, got {length}; predict it again")
    if mask.indices.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.indices.device}; use mask.to(q.device)")


def options(
    q: Tensor,
    k: Tensor,
    *,
    predicts: bool,
    scale: Any = None,
    is_causal: Any = False,
    inner_precise: Any = 0,
    precision: Any = "native",
    sparse_type: Any = None,
    txt_len: Any = 0,
    block_size: Any = 128,
    latent_shape_q: Any = None,
    latent_shape_k: Any = None,
    keep_sink: Any = True,
    keep_recent: Any = True,
    cdf_threshold: Any = 1.0,
    sparsity: Any = 0.0,
    video_spans: Any = None,
    token_order: Any = "window",
    predictor: Any = "mean",
    compensate: Any = False,
    first_frame: Any = "protected",
    exact_budget: Any = False,
    target_error: Any = None,
) -> Options:
    """Everything that is not a tensor, checked. What another strategy would read is checked too, then left out.

    `predicts`: the call has no mask of its own, so that rf_v2 at sparsity 0 is plain dense attention.
    """
    choice("sparse_type", sparse_type, SPARSE_TYPES)
    strategy = {None: "dense", "rf_v3": "rf_v2"}.get(sparse_type, sparse_type)
    block_size = one_of("block_size", block_size, BLOCK_SIZES)
    order, window = order_and_window(token_order, block_size)
    clips = () if video_spans is None else spans(video_spans)
    shares = sparsities(sparsity, q.shape[1])
    checked = Options(
        scale=checked_scale(scale, q.shape[3]),
        is_causal=flag("is_causal", is_causal),
        inner_precise=one_of("inner_precise", inner_precise, (0, 1)),
        precision=choice("precision", precision, PRECISIONS),
        strategy=strategy,
        predictor=choice("predictor", predictor, tuple(PREDICTORS)),
        compensate=flag("compensate", compensate),
        sparsity=sum(shares) / len(shares) if shares else 0.0,
        head_sparsity=shares if len(set(shares)) > 1 else [],
        target_error=0.0 if target_error is None else fraction("target_error", target_error, zero=False),
        exact_budget=flag("exact_budget", exact_budget),
        first_frame=choice("first_frame", first_frame, FIRST_FRAMES),
        cdf_threshold=fraction("cdf_threshold", cdf_threshold, zero=False),
        keep_sink=flag("keep_sink", keep_sink),
        keep_recent=flag("keep_recent", keep_recent),
        block_size=block_size,
        txt_len=integer("txt_len", txt_len, minimum=0),
        latent_q=[] if latent_shape_q is None else list(grid("latent_shape_q", latent_shape_q)),
        latent_k=[] if latent_shape_k is None else list(grid("latent_shape_k", latent_shape_k)),
        video_spans=[size for clip in clips for size in clip],
        token_order=order,
        window=list(window or ()),
    )
    q_len, k_len = q.shape[2], k.shape[2]
    if is_causal and strategy == "rf_v2":
        raise ValueError(
            f"is_causal must be False with sparse_type={sparse_type!r}, which reorders tokens; use "
            "sparse_type='ada_bsa' or None for causal attention"
        )
    if is_causal and q_len != k_len:
        raise ValueError(f"is_causal needs q and k of one length, got {q_len} and {k_len}")
    if is_causal and compensate:
        raise ValueError("compensate must be False with is_causal: the mean of a block would show what comes later")
    if block_size != 128 and strategy == "ada_bsa":
        raise ValueError(f"block_size must be 128 with sparse_type='ada_bsa', got {block_size}")
    if checked.head_sparsity and strategy == "ada_bsa":
        raise ValueError("sparsity must be one number with sparse_type='ada_bsa'; rf_v2 takes one for each head")
    if strategy != "rf_v2":
        return checked.without_layout()
    if checked.target_error and checked.sparsity:
        raise ValueError(f"target_error takes the place of sparsity: leave sparsity at 0, got {sparsity}")

    if clips and q_len != k_len:
        raise ValueError(f"video_spans needs q and k of one length, got {q_len} and {k_len}")
    for name, spec in zip(("latent_shape_q", "latent_shape_k"), checked.layout_specs(q_len, k_len), strict=True):
        check_fit(spec, name)
    if predicts and checked.sparsity == 0.0 and not checked.target_error:
        return checked.without_layout()._replace(strategy="dense")
    if q_len == k_len:  # one grid serves both sides
        latent_q, latent_k = checked.latent_q, checked.latent_k
        return checked._replace(latent_q=latent_q or latent_k, latent_k=latent_k or latent_q)
    return checked
