"""`rainfusion inspect`: the token order of a call and the block mask of each head, as text and as pictures."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rainfusion
from rainfusion.bench import pictures, synthetic
from rainfusion.bench.inputs import SparseType
from rainfusion.layout import TokenLayout

MASK, ORDER = FILES = ("mask.png", "order.png")


def load_tensors(path: Path) -> tuple[Tensor, Tensor]:
    """Reads q and k of a call that was saved with `torch.save({"q": q, "k": k}, path)`."""
    wrong = f"--tensors must name a file written by torch.save({{'q': q, 'k': k}}, ...), got {path}"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(wrong) from error
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), Tensor) for name in ("q", "k")):
        raise ValueError(wrong)
    return saved["q"], saved["k"]


def run(
    latent_shape: Sequence[int],
    *,
    txt_len: int,
    token_order: str | Sequence[int],
    block_size: int,
    sparse_type: SparseType,
    sparsity: float,
    cdf_threshold: float,
    heads: int,
    head_dim: int,
    tensors: Path | None,
    input_layout: str,
    out: Path | None,
) -> int:
    """Prints the order of a grid's tokens and the masks of two heads, and draws all of them into the folder `out`."""
    seq_len = txt_len + math.prod(latent_shape)
    layout = TokenLayout.build(seq_len, latent_shape, txt_len, None, token_order, block_size)
    if tensors is None:
        latent = synthetic.video_latent(latent_shape)
        q, k, _ = synthetic.video_qkv(latent, heads, head_dim, txt_len=txt_len)
    else:
        q, k = load_tensors(tensors)
        q, k = (x.transpose(1, 2) if input_layout == "BSND" else x for x in (q, k))
    kwargs: dict[str, Any] = dict(sparse_type=sparse_type, sparsity=sparsity, cdf_threshold=cdf_threshold)
    if sparse_type == "rf_v2":
        kwargs.update(latent_shape_q=latent_shape, txt_len=txt_len, token_order=token_order, block_size=block_size)
    with torch.inference_mode():
        mask = rainfusion.predict_mask(q, k, **kwargs)

    grid = "x".join(map(str, latent_shape))
    order = token_order if isinstance(token_order, str) else "x".join(map(str, token_order))
    order_title = f"token order '{order}': {grid} tokens in {layout.num_blocks} blocks of {block_size}"
    mask_title = f"{sparse_type}, sparsity {sparsity}: density {mask.density():.3f}"
    if sparse_type == "rf_v2":
        print(f"{order_title}; one letter a block, a dot in protected blocks\n")
        print(pictures.order_text(layout, latent_shape, txt_len))
    print(f"\n{mask_title}; rows are query blocks, columns key blocks")
    for head in range(min(mask.indices.shape[1], 2)):
        print(f"\nhead {head}")
        print(pictures.mask_text(mask, head=head))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figures = {MASK: pictures.mask_figure(mask, heads=range(mask.indices.shape[1]), title=mask_title)}
        if sparse_type == "rf_v2":
            figures[ORDER] = pictures.order_figure(layout, latent_shape, txt_len, order_title)
        for name, figure in figures.items():
            figure.savefig(out / name)
        print(f"\nwrote {', '.join(str(out / name) for name in figures)}")
    return 0
