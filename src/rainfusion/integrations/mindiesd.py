"""`mindiesd.sparse_attention` on every torch device: code written for MindIE-SD 3.1 runs as it is.

`install` puts modules named `mindiesd` where Python looks for imports, `uninstall` takes them away again:

>>> import rainfusion.integrations.mindiesd
>>> rainfusion.integrations.mindiesd.install()
>>> from mindiesd import sparse_attention  # somebody else's code
>>> rainfusion.integrations.mindiesd.uninstall()

A real MindIE-SD is never shadowed. Importing this module changes nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from rainfusion import __version__, api, backends, checks, planning
from rainfusion.geometry import Geometry, VideoSpan
from rainfusion.options import InputLayout, Method, Precision, SparseType

__all__ = ["install", "sparse_attention", "uninstall"]

REFERENCE_VERSION = "3.1"  # of the MindIE-SD whose signature this is
# fp8 is the nearest to mxfp4, and finer
PRECISIONS: dict[str, Precision] = {"bf16": "native", "mix": "int8", "fp8": "fp8", "mxfp4": "fp8"}
QUANTISED_TYPES = ("rf_v2", "rf_v3")  # the reference reads `precision` with no other

# where code finds sparse_attention, parents first
PATHS = (
    "mindiesd",
    "mindiesd.layers",
    "mindiesd.layers.flash_attn",
    "mindiesd.layers.flash_attn.sparse_flash_attn",
)

_warned = False


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = False,
    head_num: int = 1,
    input_layout: InputLayout = "BNSD",
    inner_precise: int = 0,
    sparse_type: SparseType | None = None,
    txt_len: int = 0,
    block_size: int = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    video_spans: Sequence[VideoSpan] | None = None,
    keep_sink: bool | None = True,
    keep_recent: bool | None = True,
    cdf_threshold: float = 1.0,
    sparsity: float = 0.0,
    precision: str = "bf16",
    mxfp4_dst_type_max: float = 0.0,
    mxfp4_scale_alg: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """`rainfusion.sparse_attention` with the arguments of MindIE-SD 3.1, in its order and with its defaults.

    Args:
        head_num: q's heads, checked unless it is 1: that is the default, and says nothing.
        inner_precise: 0 to 4. Odd is `inner_precise=1` here, even is 0.
        precision: with rf_v2 and rf_v3. `"bf16"` is the tensors' own dtype, `"mix"` int8, `"fp8"` and `"mxfp4"` fp8.
            Where no kernel can do that, `"bf16"` runs instead, and one warning a process says why.
        is_causal: None is False.
        keep_sink: None is False.
        keep_recent: None is False.
        mxfp4_dst_type_max: without effect.
        mxfp4_scale_alg: without effect.
        kwargs: without effect.

    The others are those of `rainfusion.sparse_attention`, which checks them.
    """
    return api.sparse_attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        scale=scale,
        is_causal=bool(is_causal),
        head_num=None if head_num == 1 else head_num,
        input_layout=input_layout,
        inner_precise=checks.one_of("inner_precise", inner_precise, range(5)) & 1,
        sparse_type=sparse_type,
        txt_len=txt_len,
        block_size=block_size,
        latent_shape_q=latent_shape_q,
        latent_shape_k=latent_shape_k,
        video_spans=video_spans,
        keep_sink=bool(keep_sink),
        keep_recent=bool(keep_recent),
        cdf_threshold=cdf_threshold,
        sparsity=sparsity,
        precision=_precision(precision, sparse_type, block_size, input_layout, q, k, v),
    )


def install() -> None:
    """Makes `import mindiesd` find this module's `sparse_attention`. Installing twice changes nothing more.

    Raises:
        RuntimeError: there is another `mindiesd`, installed or already imported.
    """
    if _is_ours("mindiesd"):
        return
    found = _other_mindiesd()
    if found is not None:
        raise RuntimeError(
            f"rainfusion does not shadow another mindiesd, and there is one: {found}. Use that, or uninstall it "
            "first, or import sparse_attention from rainfusion.integrations.mindiesd instead"
        )
    modules = {path: _module(path) for path in PATHS}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(modules[parent], name, module)
    sys.modules.update(modules)


def uninstall() -> None:
    """Takes away what `install` put there, and nothing else."""
    for path in PATHS:
        if _is_ours(path):
            del sys.modules[path]


def _precision(
    precision: Any, sparse_type: Any, block_size: Any, input_layout: Any, q: Tensor, k: Tensor, v: Tensor
) -> Precision:
    """rainfusion's name for a precision, "native" where no backend has kernels for it."""
    own = PRECISIONS[checks.choice("precision", precision, tuple(PRECISIONS))]
    if own == "native" or sparse_type not in QUANTISED_TYPES:
        return "native"
    inputs = planning.check(q, k, v, input_layout=input_layout)
    method = Method(sparse_type=sparse_type, sparsity=0.5, block_size=block_size, precision=own)
    call = planning.ask(inputs, method, Geometry())  # what kernels there are does not depend on grids and shares
    name, reasons = backends.find(call, inputs.shapes)
    if name is None:
        _warn_once(f"precision={precision!r} runs as 'bf16' here, for lack of {own} kernels: {'; '.join(reasons)}")
    return "native" if name is None else own


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"mindiesd.sparse_attention of rainfusion: {message}", stacklevel=4)


_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined] # compilers call it, and do not trace it


# ---------------------------------------------------------------------------------------------------------------------
# modules


def _is_ours(path: str) -> bool:
    """By its file, which is this one: that holds after a reload, too."""
    return getattr(sys.modules.get(path), "__file__", None) == __file__


def _other_mindiesd() -> str | None:
    """Where a mindiesd that is not ours lies, or None if there is none."""
    for path in PATHS:
        if path in sys.modules:
            return f"{path} is imported, from {getattr(sys.modules[path], '__file__', None) or 'an unknown place'}"
    spec = importlib.util.find_spec("mindiesd")
    if spec is None:
        return None
    return f"mindiesd can be imported from {spec.origin or list(spec.submodule_search_locations or [])}"


def _module(path: str) -> ModuleType:
    """A module with `sparse_attention` in it, that says whose it is."""
    module = ModuleType(path, "rainfusion's stand-in for a module of MindIE-SD: `sparse_attention`, nothing else.")
    spec = ModuleSpec(path, None, origin=__file__, is_package=path != PATHS[-1])
    spec.has_location = True  # so that "cannot import name" tells where from
    vars(module).update(
        __spec__=spec,
        __file__=__file__,
        __package__=spec.parent,
        __all__=["sparse_attention"],
        __version__=f"{REFERENCE_VERSION}+rainfusion.{__version__}",
        __getattr__=_refusal(path),
        sparse_attention=sparse_attention,
    )
    if spec.submodule_search_locations is not None:
        vars(module)["__path__"] = spec.submodule_search_locations  # none: submodules are only those installed
    return module


def _refusal(path: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module."""

    def __getattr__(name: str) -> Any:
        raise AttributeError(
            f"{path!r} has no {name!r}: it is rainfusion's stand-in for MindIE-SD, which offers sparse_attention only"
        )

    return __getattr__
