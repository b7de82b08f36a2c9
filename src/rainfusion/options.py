"""The options of the method: one frozen, checked type for every door, and the values that are recommended.

To add an option: a field of `Method`, with its check and its entry in the docstring, and its use in a stage. The op's
schema, `method=` of `sparse_attention`, `enable`, the lab and the distributed functions follow from the fields. The
flat signature of `sparse_attention` is that of the published function, and need not grow. `MethodOptions` repeats the
names for editors, which cannot read them off a dataclass; a test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from torch import Tensor

from rainfusion import checks

if TYPE_CHECKING:
    from typing_extensions import Unpack

SparseType = Literal["rf_v2", "rf_v3", "ada_bsa"]
Predictor = Literal["mean", "submeans", "spread"]
FirstFrame = Literal["protected", "keys", "free"]
TokenOrder = Literal["window", "mindiesd", "raster"]
Precision = Literal["native", "fp8", "int8"]
InputLayout = Literal["BNSD", "BSND"]
Strategy = Literal["dense", "rf_v2", "ada_bsa"]
Window = tuple[int, int, int]

SPARSE_TYPES: tuple[str | None, ...] = (None, *get_args(SparseType))
PREDICTORS = get_args(Predictor)
FIRST_FRAMES = get_args(FirstFrame)
TOKEN_ORDERS = get_args(TokenOrder)
PRECISIONS = get_args(Precision)
BLOCK_SIZES: tuple[int | tuple[int, int], ...] = (128, 64, (128, 64), (128, 32))
IMAGE_SPARSITY, VIDEO_SPARSITY = 0.6, 0.8
FINE_VIDEO_SPARSITY = 0.85  # with blocks of 32 keys, which lose less
SUBMEANS = 4  # means of a block of queries, with predictor="submeans"
QUERIES_OF_PART, KEYS_OF_PART = 8, 32  # that have a mean, with predictor="spread"


class MethodOptions(TypedDict, total=False):
    """The fields of `Method` as keywords, as in `enable(pipe, sparsity=0.8)`; see there what they are."""

    sparse_type: SparseType | None
    sparsity: float | Sequence[float] | None
    predictor: Predictor
    compensate: bool
    first_frame: FirstFrame
    exact_budget: bool
    target_error: float | None
    token_order: TokenOrder | Sequence[int]
    block_size: int | tuple[int, int]
    precision: Precision
    inner_precise: int
    cdf_threshold: float
    keep_sink: bool
    keep_recent: bool


# of rf_v2, beside its sparsity; `sparse_attention` itself has the values of the published method
RECOMMENDED: MethodOptions = dict(predictor="spread", compensate=True, first_frame="free", block_size=(128, 32))


@dataclass(frozen=True)
class Method:
    """How key blocks are chosen and attended. Without arguments: dense; `recommended` is what `enable` starts from.

    Args:
        sparse_type: None (dense), `"rf_v2"` (also called `"rf_v3"`) or `"ada_bsa"`.
        sparsity: the share of key blocks to skip, 0 to 1. rf_v2 also takes one for each query head. None: by task,
            0.6 for images, 0.8 for video, 0.85 with blocks of 32 keys.
        predictor: rf_v2: `"mean"`, one mean for each block; `"submeans"`, four, between which attention is predicted;
            or `"spread"`, by what is lost if the mean of a block stands for it: one of every 8 queries and of every 32
            keys, and how far keys are from it.
        compensate: blocks that are skipped count through their mean key and mean value, in the softmax and in the LSE;
            with `predictor="spread"` for a little more, where keys are far from their mean.
        first_frame: rf_v2, of a video: `"protected"`, it attends to everything and everything to it; `"keys"`, its
            keys are never dropped; `"free"`, it is like the other frames.
        exact_budget: rf_v2: protected blocks count in `sparsity` too, so that about 1 - sparsity of all is computed
            (never fewer than the protected ones and one more a row).
        target_error: rf_v2: instead of `sparsity`, the error |out - dense| / |dense| to allow in each head; a sample
            of dense rows says how many blocks that takes.
        token_order: rf_v2: `"window"`, a window `(wt, wh, ww)`, `"mindiesd"` or `"raster"`.
        block_size: tokens of a block: 128; 64 with rf_v2; or `(queries, keys)`, `(128, 64)` and `(128, 32)`, with
            which rows of 128 queries choose among finer blocks of keys (rf_v2).
        precision: `"native"`; `"int8"` (q and k), on NVIDIA GPUs from 8.0 on; `"fp8"` (e4m3), from 8.9 on; MI300 too.
        inner_precise: 0 for fp32 softmax and accumulation, 1 for the backend's fastest arithmetic in the same dtype.
        cdf_threshold: ada_bsa: the share of the predicted attention mass to keep, in (0, 1].
        keep_sink: ada_bsa: always keep the first block.
        keep_recent: ada_bsa: always keep the diagonal block (causal) or the last one.

    >>> Method.recommended(sparsity=0.7).predictor
    'spread'
    """

    sparse_type: SparseType | None = None
    sparsity: float | tuple[float, ...] | None = 0.0
    predictor: Predictor = "mean"
    compensate: bool = False
    first_frame: FirstFrame = "protected"
    exact_budget: bool = False
    target_error: float | None = None
    token_order: TokenOrder | Window = "window"
    block_size: int | tuple[int, int] = 128
    precision: Precision = "native"
    inner_precise: int = 0
    cdf_threshold: float = 1.0
    keep_sink: bool = True
    keep_recent: bool = True

    def __post_init__(self) -> None:
        checks.choice("sparse_type", self.sparse_type, SPARSE_TYPES)
        block_size = checked_block_size(self.block_size)
        self._set("sparse_type", "rf_v2" if self.sparse_type == "rf_v3" else self.sparse_type)
        self._set("sparsity", _sparsity(self.sparsity))
        checks.choice("predictor", self.predictor, PREDICTORS)
        checks.flag("compensate", self.compensate)
        checks.choice("first_frame", self.first_frame, FIRST_FRAMES)
        checks.flag("exact_budget", self.exact_budget)
        if self.target_error is not None:
            self._set("target_error", checks.fraction("target_error", self.target_error, zero=False))
        self._set("block_size", block_size)
        self._set("token_order", checked_token_order(self.token_order, sides(block_size)))
        checks.choice("precision", self.precision, PRECISIONS)
        self._set("inner_precise", checks.one_of("inner_precise", self.inner_precise, (0, 1)))
        self._set("cdf_threshold", checks.fraction("cdf_threshold", self.cdf_threshold, zero=False))
        checks.flag("keep_sink", self.keep_sink)
        checks.flag("keep_recent", self.keep_recent)
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the checked form of what was given: the type is frozen

    def _check_together(self) -> None:
        if self.sparse_type == "ada_bsa":
            if self.block_size != 128:
                raise ValueError(f"block_size must be 128 with sparse_type='ada_bsa', got {self.block_size}")
            if isinstance(self.sparsity, tuple):
                raise ValueError("sparsity must be one number with sparse_type='ada_bsa'; rf_v2 takes one a head")
        if self.sparse_type == "rf_v2" and self.target_error is not None and self.sparsity:
            raise ValueError(f"target_error takes the place of sparsity: leave sparsity out, got {self.sparsity}")

    @classmethod
    def recommended(cls, **changes: Unpack[MethodOptions]) -> Method:
        """What gave the best samples for their time (docs/quality.md), with changes: where `enable` starts."""
        base = {"sparse_type": "rf_v2", "sparsity": None, **RECOMMENDED}
        if changes.get("sparse_type") == "ada_bsa":
            base.update(predictor="mean", compensate=False, block_size=128)
        return cls.known(**{**base, **changes})

    @classmethod
    def known(cls, **options: Any) -> Method:
        """`Method(**options)`, which was checked before if the same options came before."""
        options = {name: tuple(value) if type(value) is list else value for name, value in options.items()}
        if isinstance(options.get("sparsity"), Tensor):
            return cls(**options)  # hashable, but its values may change
        # 1, 1.0 and True are equal as keys, and not as options: lru_cache tells them apart, but not inside a tuple
        kinds = tuple(tuple(map(type, value)) for value in options.values() if type(value) is tuple)
        try:
            return _known(kinds, **options)
        except TypeError:  # some value is unhashable or of a wrong type: the constructor says which
            for name in options.keys() - set(OPTION_NAMES):
                raise TypeError(f"{name} is no option; those are {', '.join(OPTION_NAMES)}") from None
            return cls(**options)

    @property
    def strategy(self) -> Strategy:
        return "dense" if self.sparse_type is None else self.sparse_type  # type: ignore[return-value] # no rf_v3

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is skipped where no mask is given, whatever the tensors hold."""
        return self.strategy == "dense" or (
            self.strategy == "rf_v2" and self.target_error is None and not any(self.sparsities)
        )

    @property
    def sparsities(self) -> tuple[float, ...]:
        """One for each head, or one for all."""
        if self.sparsity is None:
            raise ValueError("sparsity is by task, and the task is not known here; see `Method.for_frames`")
        return self.sparsity if isinstance(self.sparsity, tuple) else (self.sparsity,)

    @property
    def mean_sparsity(self) -> float:
        return sum(self.sparsities) / len(self.sparsities)

    @property
    def q_block(self) -> int:
        return sides(self.block_size)[0]

    @property
    def k_block(self) -> int:
        return sides(self.block_size)[1]

    @property
    def q_parts(self) -> int:
        """Means of a block of queries, from which rf_v2 predicts."""
        if self.spreads:
            return self.q_block // QUERIES_OF_PART
        return SUBMEANS if self.predictor == "submeans" else 1

    @property
    def k_parts(self) -> int:
        """Means of a block of keys: submeans have parts of as many tokens as those of the queries."""
        if self.spreads:
            return self.k_block // KEYS_OF_PART
        return max(1, self.q_parts * self.k_block // self.q_block)

    @property
    def spreads(self) -> bool:
        """Whether it is known how far the keys of a block are from their mean, see `prediction.spread`."""
        return self.predictor == "spread"

    def for_frames(self, frames: int) -> Method:
        """With the sparsity of the task where none was given: an image has one frame."""
        if self.sparsity is not None:
            return self
        decided = self.target_error is not None or (self.sparse_type == "ada_bsa" and self.cdf_threshold < 1.0)
        return replace(self, sparsity=0.0 if decided else IMAGE_SPARSITY if frames == 1 else self.video_sparsity)

    @property
    def video_sparsity(self) -> float:
        """That of videos where none was given."""
        return FINE_VIDEO_SPARSITY if self.k_block == 32 else VIDEO_SPARSITY


OPTION_NAMES = tuple(field.name for field in fields(Method))


@lru_cache(maxsize=1024, typed=True)
def _known(kinds: tuple[tuple[type, ...], ...], **options: Any) -> Method:
    return Method(**options)


def sides(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Tokens of a block of queries, and of keys."""
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


def checked_block_size(value: Any) -> int | tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        found: Any = tuple(checks.integer(f"block_size[{i}]", size, minimum=1) for i, size in enumerate(value))
    else:
        found = checks.integer("block_size", value, minimum=0)
    for allowed in BLOCK_SIZES:
        if found == allowed:
            return allowed
    raise ValueError(f"block_size must be {', '.join(map(str, BLOCK_SIZES[:-1]))} or {BLOCK_SIZES[-1]}, got {found}")


def checked_token_order(value: Any, block_sides: tuple[int, int]) -> TokenOrder | Window:
    """A named order, or a window of the caller's own."""
    if isinstance(value, str):
        if value in TOKEN_ORDERS:
            return value  # type: ignore[return-value]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        window = checks.grid("token_order", value)
        sizes = sorted({block_sides[0], 128})
        if math.prod(window) not in sizes:
            raise ValueError(
                f"token_order must be a window (wt, wh, ww) of {' or '.join(map(str, sizes))} tokens, got {window} of "
                f"{math.prod(window)}; (4, 4, 8), (2, 8, 8) and (1, 8, 16) are windows of 128"
            )
        return window
    raise ValueError(
        f"token_order must be {', '.join(map(repr, TOKEN_ORDERS))} or a window (wt, wh, ww), got {value!r}"
    )


def _sparsity(value: Any) -> float | tuple[float, ...] | None:
    """One sparsity, one for each query head, or None."""
    return None if value is None else checks.one_or_several_fractions("sparsity", value)
