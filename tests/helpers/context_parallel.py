"""One of several processes that run a model together under diffusers' context parallelism: is it as if there were one?

python tests/helpers/context_parallel.py RANK WORLD STORE    # prints a line for each case, `ok` or what is wrong
"""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # where `helpers` is

import rainfusion
from helpers import needs_diffusers, tiny_models

diffusers = needs_diffusers()


def ltx():
    """With a mask of the text diffusers' own cross-attention fails under Ulysses, also without rainfusion."""
    model, inputs, expected = tiny_models.ALL["ltx"]()
    return model, {**inputs, "encoder_attention_mask": None}, expected


MODELS = {
    "wan": lambda: tiny_models.ALL["wan"](t=4, h=16, w=24, num_attention_heads=4),
    "flux": lambda: tiny_models.ALL["flux"](h=16, w=24, text=64, num_attention_heads=4),
    "flux2": lambda: tiny_models.ALL["flux2"](heads=4),
    "qwen": tiny_models.ALL["qwen"],
    "ltx": ltx,
    "minimax_h3": tiny_models.ALL["minimax_h3_references"],
}
DEGREES = {
    2: (
        dict(ulysses_degree=2), dict(ring_degree=2), dict(ulysses_degree=2, ulysses_anything=True),
        dict(ring_degree=2, ring_anything=True),
    ),
    4: (dict(ulysses_degree=4), dict(ring_degree=4), dict(ulysses_degree=2, ring_degree=2)),
}  # fmt: skip
SETTINGS = dict(min_tokens=0, sparsity=0.6, block_size=64)
# On a CPU diffusers has no ring for their other attention, which is not ours.
NO_RING = ("ltx", "minimax_h3")
TWO_HEADS = ("ltx", "minimax_h3", "qwen")
ROUNDING = {"minimax_h3": 1e-6, "flux2": 1e-6}  # their linear layers round a small shard differently, dense or not


def possible(name, degrees):
    """Whether diffusers itself can do it here."""
    if name in NO_RING and "ring_degree" in degrees:
        return False
    return name not in TWO_HEADS or degrees.get("ulysses_degree", 1) <= 2


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def check(name, degrees):
    """-> None, or what is wrong."""
    model, inputs, expected = MODELS[name]()
    alone = rainfusion.enable(model, **SETTINGS)
    single = forward(model, inputs)
    assert alone.stats().sparse_calls == expected.calls
    model, inputs, expected = MODELS[name]()
    config = diffusers.ContextParallelConfig(**degrees)
    if name in ("flux", "qwen"):  # either order will do
        handle = rainfusion.enable(model, **SETTINGS)
        model.enable_parallelism(config=config)
    else:
        model.enable_parallelism(config=config)
        handle = rainfusion.enable(model, **SETTINGS)
    together = forward(model, inputs)
    stats = handle.stats()
    if (stats.sparse_calls, stats.dense_calls) != (expected.calls, 0):
        return f"{stats.sparse_calls} sparse calls, dense: {stats.reasons}"
    if stats.layouts != alone.stats().layouts:
        return f"found {stats.layouts} instead of {alone.stats().layouts}"
    difference = float((single - together).abs().max() / single.abs().max())
    if not difference <= ROUNDING.get(name, 0.0):
        return f"differs by {difference:.1e}"
    rainfusion.disable(model)
    return None


def main(rank, world, store):
    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(minutes=20)
    )
    for name in MODELS:
        for degrees in DEGREES[world]:
            if not possible(name, degrees):
                continue
            try:
                wrong = check(name, degrees)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            print(f"{name} {degrees}: {wrong or 'ok'}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
