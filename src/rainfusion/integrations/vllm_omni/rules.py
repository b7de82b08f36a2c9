"""What vLLM-Omni's users ask for, and when a call is dense: plain values in, a scene or the reason out. No host inside.

The options, the refusals and the rules are those of vLLM-Omni's own RainFusion backend, in the same order, so that a
setting means the same on Ascend NPUs and here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rainfusion import checks
from rainfusion.checks import Grid
from rainfusion.integrations.decider import Dense
from rainfusion.integrations.scenes import Scene
from rainfusion.options import Method, Precision

LAYOUT = "BSND"  # [B, S, N, D]
BLOCK = 128
FEWEST_ROWS = 32 * BLOCK  # of video; below, dense attention is as fast
PRECISIONS: dict[str, Precision] = {"bf16": "native", "float": "native", "fp8": "fp8", "mix": "int8"}
ROLES = ("reference", "target")


@dataclass(frozen=True)
class Options:
    """What the user asked for, `block_sparse` of an attention role; see docs/vllm_omni.md.

    Args:
        sparsity: the share of key blocks to skip. 0 is dense attention.
        start_step: so many steps at the start stay dense.
        end_step: so many steps at the end stay dense.
        precision: `"bf16"`, the tensors' own dtype; `"fp8"`; `"mix"`, q and k in int8 and v in fp8.
        skip_layers: the numbers of layers that stay dense.
    """

    sparsity: float = 0.0
    start_step: int = 0
    end_step: int = 0
    precision: str = "bf16"
    skip_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """From vLLM-Omni's keywords for a backend, which it has checked; those of other backends are left aside."""
        given = given or {}
        return cls(
            sparsity=checks.fraction("block_sparse.sparsity", given.get("sparsity", 0.0), zero=True),
            start_step=checks.integer("block_sparse.start_step", given.get("start_step", 0), minimum=0),
            end_step=checks.integer("block_sparse.end_step", given.get("end_step", 0), minimum=0),
            precision=checked_precision("block_sparse.precision", given.get("precision", "bf16")),
            skip_layers=frozenset(given.get("skip_layers") or ()),
        )

    def method(self, kv_cache_dtype: str | None = None) -> Method:
        """The recommended one, with what was asked for. `kv_cache_dtype`: of one call, in place of `precision`."""
        asked = self.precision
        if kv_cache_dtype is not None:
            asked = checked_precision("diffusion_kv_cache_dtype", kv_cache_dtype)
        return Method.recommended(sparsity=self.sparsity, precision=PRECISIONS[asked])


def checked_precision(name: str, value: Any) -> str:
    return checks.choice(name, value, tuple(PRECISIONS))  # type: ignore[no-any-return]


def check_layer(options: Options, *, causal: bool, qkv_layout: str | None, ring: int, allgather: int) -> None:
    """Refuses a layer that can never be sparse as it was set up."""
    if options.sparsity == 0.0:
        return
    if allgather > 1:
        raise ValueError(
            f"RAINFUSION_ATTN needs all keys on every rank, got allgather_degree={allgather}: use ulysses_degree"
        )
    if ring > 1:
        raise ValueError(
            f"RAINFUSION_ATTN ranks blocks among all keys, and with ring_degree={ring} a rank has a part of them: use "
            "ulysses_degree"
        )
    if causal:
        raise ValueError("RAINFUSION_ATTN has no causal attention: choose FLASH_ATTN or TORCH_SDPA for this role")
    if qkv_layout is not None and qkv_layout.upper() != LAYOUT:
        raise ValueError(
            f"RAINFUSION_ATTN takes tensors with qkv_layout={LAYOUT!r}, and this layer has {qkv_layout!r}: choose "
            "FLASH_ATTN or TORCH_SDPA for this role"
        )


def layer_number(prefix: str) -> int | None:
    """The one number in a layer's name; None, if there is none or more than one.

    >>> layer_number("blocks.3.attn1")
    3
    """
    numbers = [int(part) for part in prefix.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# a call


class Span(NamedTuple):
    """One clip of several in a sequence."""

    start: int
    grid: Grid
    role: str


class Layout(NamedTuple):
    """Where a model says that its video lies: behind a prefix, or in spans."""

    prefix: int | None = None
    grid: Grid | None = None
    used: int | None = None  # rows that are not padding
    spans: Sequence[Span] = ()


class Facts(NamedTuple):
    """What vLLM-Omni says of a call."""

    layer: int | None = None  # its number
    step: int | None = None
    steps: int | None = None
    qkv_layout: str | None = LAYOUT
    has_metadata: bool = True
    layout: Layout | None = None
    special: str | None = None  # what a mask or spans ask for that sparse attention cannot do, in words
    packed_rows: int | None = None  # of the first document in a packed sequence, where the model says so


class Place(NamedTuple):
    """Where the clips lie, and how many rows are used; the others are padding."""

    scene: Scene
    rows: int


def mask_in_words(dimensions: int, is_bool: bool, used_is_known: bool) -> str | None:
    """A mask of keys [B, S] hides padding, which is known by its length; any other is more than that."""
    if dimensions == 2 and is_bool and used_is_known:
        return None
    return f"a mask of {dimensions} dimensions, not one [B, S] of bools behind a known length"


def place(options: Options, facts: Facts) -> Place | Dense:
    """Where the video lies in a call that may be sparse; else the reason why it is dense."""
    try:
        return _place(options, facts)
    except Dense as why:
        return why.again()


def _place(options: Options, facts: Facts) -> Place:
    _check_step(options, facts)
    if facts.qkv_layout is None:
        raise Dense.unsupported(f"the layer does not say its qkv_layout, which must be {LAYOUT!r}")
    if not facts.has_metadata:
        raise Dense.asked("the model says nothing of the call, as in cross-attention")
    if facts.layout is None:
        raise Dense.unsupported("the model does not say where its video lies (no video_layout)")
    if facts.special is not None:
        raise Dense.unsupported(facts.special)
    rows = facts.layout.used if facts.packed_rows is None else facts.packed_rows
    if rows is None:
        raise Dense.unsupported("how many rows are used is not known (neither used_len nor max_seqlen_q)")
    return _place_clips(facts.layout, rows) if facts.layout.spans else _place_tail(facts.layout, rows)


def _check_step(options: Options, facts: Facts) -> None:
    """What the user wants dense, whatever the call holds."""
    if options.sparsity == 0.0:
        raise Dense.asked("sparsity is 0")
    if facts.layer is not None and facts.layer in options.skip_layers:
        raise Dense.asked("the layer is in skip_layers")
    step, steps, start, end = facts.step, facts.steps, options.start_step, options.end_step
    if (start or end) and step is None:
        raise Dense.unsupported("which step it is is not known, and start_step or end_step depends on it")
    if end and steps is None:
        raise Dense.unsupported("how many steps there are is not known, and end_step depends on it")
    if step is not None and step < start:
        raise Dense.asked("the first steps are dense (start_step)")
    if step is not None and end and steps is not None and step >= steps - end:
        raise Dense.asked("the last steps are dense (end_step)")


def _place_tail(layout: Layout, rows: int) -> Place:
    """A prefix, and then one video up to the last row that is used."""
    if layout.prefix is None or layout.grid is None:
        raise Dense.unsupported("the model's video_layout has neither a grid behind a prefix nor spans")
    video = math.prod(layout.grid)
    if layout.prefix + video != rows:
        raise Dense.unsupported(
            f"a prefix of {layout.prefix} and a grid of {'x'.join(map(str, layout.grid))} do not fill {rows} rows"
        )
    _check_rows(video)
    return Place(Scene((layout.grid,), before=layout.prefix), rows)


def _place_clips(layout: Layout, rows: int) -> Place:
    """Several videos anywhere among the rows that are used: one that is made, and those that it refers to."""
    if layout.used != rows:
        raise Dense.unsupported(f"used_len={layout.used} of the video_layout is not max_seqlen_q={rows}")
    spans = sorted(layout.spans, key=lambda span: span.start)
    end = 0
    for span in spans:
        length = math.prod(span.grid)
        if min(span.grid) < 1 or len(span.grid) != 3 or span.start < end or span.start + length > rows:
            raise Dense.unsupported(f"a span of {span.grid} at {span.start} does not fit between {end} and {rows}")
        if span.role not in ROLES:
            raise Dense.unsupported(f"a span with role {span.role!r}, which is none of {', '.join(map(repr, ROLES))}")
        end = span.start + length
    targets = sum(span.role == "target" for span in spans)
    if targets != 1:
        raise Dense.unsupported(f"{targets} spans with role 'target', and there must be one")
    lengths = [math.prod(span.grid) for span in spans]
    _check_rows(sum(lengths))
    filling, others = sum(-length % BLOCK for length in lengths[:-1]), rows - sum(lengths)
    if filling > others:
        raise Dense.unsupported(
            f"{others} rows beside the spans, and {filling} are needed to fill the last block of each but the last"
        )
    return Place(Scene.of_clips([(span.start, *span.grid) for span in spans]), rows)


def _check_rows(video: int) -> None:
    if video < FEWEST_ROWS:
        raise Dense.expected(f"fewer than {FEWEST_ROWS} video rows")


def check_tensors(q: Sequence[int], k: Sequence[int], v: Sequence[int], rows: int) -> None:
    """Shapes of a call that is to be sparse: one sequence in all three, and no fewer rows than are used."""
    if len(q) != 4 or len(k) != 4 or list(k) != list(v) or (q[0], q[1], q[3]) != (k[0], k[1], k[3]) or rows > q[1]:
        raise ValueError(
            f"RAINFUSION_ATTN needs q, k and v [B, S, N, D] of one sequence with at least the {rows} rows that the "
            f"model's video_layout uses, got {list(q)}, {list(k)} and {list(v)}"
        )
