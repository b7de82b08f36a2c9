"""`rainfusion demo`: dense and sparse attention on a synthetic video, side by side, on this machine."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rainfusion
from rainfusion.layout import TokenLayout
from rainfusion.tools import pictures, synthetic
from rainfusion.tools.table import table

LATENT_SHAPE = (13, 24, 32)
HEADS, HEAD_DIM = 4, 128
SPARSITIES = (0.6, 0.8, 0.9)
SPARSE_TYPES = ("rf_v2", "ada_bsa")


@torch.inference_mode()
def run(out: Path, repeats: int = 3) -> int:
    from tqdm import tqdm

    tokens = math.prod(LATENT_SHAPE)
    grid = "x".join(map(str, LATENT_SHAPE))
    print(f"A synthetic video of {grid} = {tokens} tokens, {HEADS} heads of {HEAD_DIM}, fp32, on this CPU")
    print(f"with {torch.get_num_threads()} threads; torch {torch.__version__}, rainfusion {rainfusion.__version__}.\n")
    latent = synthetic.video_latent(LATENT_SHAPE)
    q, k, v = synthetic.video_qkv(latent, HEADS, HEAD_DIM)
    jobs: list[tuple[str, float]] = [(kind, sparsity) for kind in SPARSE_TYPES for sparsity in SPARSITIES]
    dense_time, dense = _best_time(lambda: F.scaled_dot_product_attention(q, k, v), repeats)
    rows = [("dense", "-", "1.000", f"{1000 * dense_time:.0f} ms", "1.00x", "0", "1")]
    masks, outputs = {}, {}
    for kind, sparsity in tqdm(jobs, desc="demo", unit="call", file=sys.stderr):
        kwargs: dict[str, Any] = dict(sparse_type=kind, sparsity=sparsity)
        if kind == "rf_v2":
            kwargs.update(latent_shape_q=LATENT_SHAPE, latent_shape_k=LATENT_SHAPE)
        seconds, result = _best_time(lambda kwargs=kwargs: rainfusion.sparse_attention(q, k, v, **kwargs), repeats)
        mask = rainfusion.predict_mask(q, k, **kwargs)
        masks[kind, sparsity], outputs[kind, sparsity] = mask, result
        error = float((result - dense).norm() / dense.norm())
        cosine = float(F.cosine_similarity(result.double().flatten(), dense.double().flatten(), dim=0))
        rows.append(
            (kind, f"{sparsity:.1f}", f"{mask.density():.3f}", f"{1000 * seconds:.0f} ms",
             f"{dense_time / seconds:.2f}x", f"{error:.4f}", f"{cosine:.5f}")
        )  # fmt: skip
    print(table(("method", "sparsity", "density", "time", "speed-up", "error", "cosine"), rows))
    print(f"\ndensity: blocks computed, the protected first frame ({1 / LATENT_SHAPE[0]:.0%} of the tokens) included;")
    print("error: relative L2 distance to dense attention.\n")
    for path in _draw(out, dense, outputs, masks):
        print(f"wrote {path}")
    return 0


def _best_time(call: Any, repeats: int) -> tuple[float, Tensor]:
    call()  # warms up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def _draw(
    out: Path, dense: Tensor, outputs: dict[tuple[str, float], Tensor], masks: dict[tuple[str, float], Any]
) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    layout = TokenLayout.build(math.prod(LATENT_SHAPE), LATENT_SHAPE)
    title = f"rf_v2: {'x'.join(map(str, LATENT_SHAPE))} tokens in blocks of 128; the first frame is protected"
    figures = {"order.png": pictures.order_figure(layout, LATENT_SHAPE, title=title)}
    for kind in SPARSE_TYPES:
        mask = masks[kind, 0.8]
        title = f"{kind} at sparsity 0.8: the blocks that each head keeps, density {mask.density():.2f}"
        figures[f"mask_{kind}.png"] = pictures.mask_figure(mask, title=title)
    frame = LATENT_SHAPE[0] // 2
    panels = {"dense": _picture(dense, dense, frame)}
    for sparsity in SPARSITIES:
        panels[f"rf_v2 at {sparsity}"] = _picture(outputs["rf_v2", sparsity], dense, frame)
    difference = (_picture(outputs["rf_v2", 0.8], dense, frame) - panels["dense"]).abs() * 10
    panels["10 x difference at 0.8"] = difference
    figures["output.png"] = pictures.output_figure(panels, f"head 1's output, frame {frame}, three channels as colours")
    for name, figure in figures.items():
        figure.savefig(out / name)
    return [out / name for name in figures]


def _picture(output: Tensor, scale_of: Tensor, frame: int, head: int = 1) -> Tensor:
    """Three channels of one frame of [1, H, S, D] as colours, [h, w, 3] in 0..1."""
    t, h, w = LATENT_SHAPE
    frames = output[0, head].view(t, h, w, -1)[frame, ..., :3]
    every = scale_of[0, head, :, :3]
    low, high = every.quantile(0.01, dim=0), every.quantile(0.99, dim=0)
    return (frames - low) / (high - low)
