"""Wan 2.2 with all that makes it faster: fp8 linear layers, compiled blocks, a step cache, sparse attention.

    python examples/fastest_wan.py                  # tiny random weights: seconds on a CPU, and noise
    python examples/fastest_wan.py --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --height 720 --width 1280 --frames 81 \\
        --linear fp8 --cache first-block --precision fp8 --each --out cat.mp4

Each stage can be left out. Their order is not free: docs/fastest_wan.md says why. --each samples after every stage.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import time
from pathlib import Path

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, WanPipeline

import common
import rainfusion
import random_weights

THRESHOLDS = {"first-block": 0.05, "mag": 0.06}  # diffusers' own


def main(argv=None):
    args = parse(argv)
    if args.model:
        # the VAE in float32, as in diffusers' own example
        dtype = {"default": torch.bfloat16, "vae": torch.float32}
        pipe = WanPipeline.from_pretrained(args.model, dtype=dtype).to(args.device)
    else:
        pipe = random_weights.wan_t2v_two_experts().to(args.device)

    def sample(steps):
        return pipe(
            prompt=args.prompt,
            height=args.height,
            width=args.width,
            num_frames=args.frames,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(args.seed),
            output_type="pil",
        ).frames[0]

    # Wanted or not, what it is called, how it is switched on: from first to last.
    stages = [
        (True, "baseline", lambda: None),
        (args.linear != "native", f"{args.linear} linear layers", lambda: quantise_linear_layers(pipe, args.linear)),
        (args.compile, "compiled blocks", lambda: compile_blocks(pipe)),
        (args.cache != "none", f"{args.cache} cache", lambda: cache_steps(pipe, sample, args)),
        (args.sparse, "sparse attention", lambda: enable_sparse_attention(pipe, args)),
    ]
    stages = [(name, switch_on) for wanted, name, switch_on in stages if wanted]

    blocks = count_blocks(pipe)
    rows = []  # stage, seconds, frames
    for name, switch_on in stages:
        handle = switch_on()  # None but for sparse attention, which is the last
        if args.each or name == stages[-1][0]:
            done = [name] if args.each else [name for name, _ in stages[1:]] or ["baseline"]
            print(f"sampling: {', '.join(done)}")
            if args.each or args.compile:
                sample(warm_up_steps(pipe, args))
            blocks.clear()
            if handle is not None:
                handle.reset()  # of what it counts
            start = time.perf_counter()
            frames = sample(args.steps)  # PIL: the device has finished
            rows.append((name, time.perf_counter() - start, frames))

    if args.each:
        print(table(rows))
    else:
        print(f"{rows[-1][1]:.2f} s for the whole pipeline")
    if handle is not None:
        stats = handle.stats()
        for line in stats.summary.splitlines():
            print(f"  {line}")
        if args.cache != "none":
            computed = stats.sparse_calls + stats.dense_calls
            print(f"  {sum(blocks) - computed} of {sum(blocks)} attention calls were left to the cache")
    common.write(rows[-1][2], args)


# ---------------------------------------------------------------------------------------------------------------------
# the stages


def quantise_linear_layers(pipe, linear):
    """Weights once, activations as they come, with a scale for each row. What is not in a block stays as it is."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    if linear == "fp8":
        config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    else:
        config = Int8DynamicActivationInt8WeightConfig(granularity=PerRow())
    for model in transformers(pipe):
        quantize_(model.blocks, config)


def compile_blocks(pipe):
    """The `forward` of each, and one graph for all of them. A cache then wraps what is compiled, and stays outside.

    `model.compile_repeated_blocks()` compiles the cache along with the block: a full graph fails, and without one
    MagCache leaves nothing compiled.
    """
    for model in transformers(pipe):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)


def cache_steps(pipe, sample, args):
    """Steps that change little take the result of the blocks from the step before."""
    if args.cache == "first-block":
        for model in transformers(pipe):
            model.enable_cache(FirstBlockCacheConfig(threshold=args.cache_threshold))
        return
    shares = steps_of_transformers(pipe, args.steps)
    for (model, steps), ratios in zip(shares, magnitudes(shares, sample, args), strict=True):
        model.enable_cache(MagCacheConfig(threshold=args.cache_threshold, num_inference_steps=steps, mag_ratios=ratios))


def enable_sparse_attention(pipe, args):
    return rainfusion.enable(
        pipe,
        quality=args.quality,
        precision=args.precision or "native",
        start_step=args.start_step,
        skip_layers=args.skip_layers,
        min_tokens=args.min_tokens,
    )


# ---------------------------------------------------------------------------------------------------------------------
# what they need


def transformers(pipe):
    """Wan 2.2 has one for the noisy steps and one for the others, Wan 2.1 one for all."""
    return [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]


def steps_of_transformers(pipe, steps):
    """-> (transformer, how many of the steps it has), without those that have none."""
    models = transformers(pipe)
    pipe.scheduler.set_timesteps(steps)
    timesteps = pipe.scheduler.timesteps
    if len(models) == 1:
        return [(models[0], len(timesteps))]
    boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
    noisy = int((timesteps >= boundary).sum())
    return [(model, count) for model, count in zip(models, (noisy, len(timesteps) - noisy), strict=True) if count]


def warm_up_steps(pipe, args):
    """The fewest steps that run each transformer and, where a number of dense steps comes first, sparse attention."""
    busy = len(steps_of_transformers(pipe, args.steps))
    fewest = min(args.steps, 2 + (args.start_step if isinstance(args.start_step, int) else 0))
    return next(n for n in range(fewest, args.steps + 1) if len(steps_of_transformers(pipe, n)) >= busy)


def magnitudes(shares, sample, args):
    """MagCache's ratios, a list for each transformer: from --mag-ratios, or measured in one run without a cache."""
    if args.mag_ratios and args.mag_ratios.exists():
        ratios = json.loads(args.mag_ratios.read_text())
        if len(ratios) != len(shares):
            raise SystemExit(f"{args.mag_ratios} is of {len(ratios)} transformers, and {len(shares)} have steps")
        return ratios
    print(f"measuring the ratios of MagCache: {args.steps} steps")
    for model, steps in shares:
        model.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=steps))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # diffusers prints them, and keeps them nowhere
        sample(args.steps)
    for model, _ in shares:
        model.disable_cache()
    found = [json.loads(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0")]
    # for each transformer with the prompt and, if there is guidance, without it: diffusers takes one list for both
    each = len(found) // len(shares)
    ratios = [torch.tensor(found[i : i + each]).mean(0).tolist() for i in range(0, len(found), each)]
    if args.mag_ratios:
        args.mag_ratios.write_text(json.dumps(ratios) + "\n")
    return ratios


def count_blocks(pipe):
    """-> a list that grows with each forward of a transformer, by how many blocks it has."""
    blocks = []
    for model in transformers(pipe):
        model.register_forward_pre_hook(lambda model, inputs: blocks.append(len(model.blocks)))
    return blocks


def table(rows):
    """Seconds of the whole pipeline, and what each stage adds; all are compared with the first."""
    _, base_seconds, base_frames = rows[0]
    cells = [("stage", "seconds", "speed-up", "PSNR")]
    for name, seconds, frames in rows:
        first = frames is base_frames
        quality = "" if first else f"{common.psnr(base_frames, frames):.1f} dB"
        cells.append((name if first else f"+ {name}", f"{seconds:.2f}", f"{base_seconds / seconds:.2f}x", quality))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "| " + " | ".join("-" * n for n in widths) + " |", *lines[1:]])


# ---------------------------------------------------------------------------------------------------------------------
# options


def parse(argv):
    real = common.Size(height=720, width=1280, frames=81, steps=40)
    tiny = common.Size(height=192, width=256, frames=9, steps=8)
    prompt = "a cat walks through tall grass, sunlight from behind"
    parser = common.options(__doc__, prompt=prompt, real=real, tiny=tiny)
    parser.add_argument("--each", action="store_true", help="sample after each stage: seconds, speed-up, PSNR")
    stack = parser.add_argument_group("the stages")
    stack.add_argument(
        "--linear",
        choices=["native", "fp8", "int8"],
        help="linear layers (default: fp8 where the GPU has it, or native)",
    )
    stack.add_argument("--compile", action=argparse.BooleanOptionalAction, help="blocks (default: with --model)")
    stack.add_argument("--cache", choices=["none", *THRESHOLDS], default="first-block", help="default: %(default)s")
    stack.add_argument(
        "--cache-threshold", type=float, help="higher: more steps are skipped (default: diffusers', 0.05 and mag 0.06)"
    )
    stack.add_argument("--mag-ratios", type=Path, help="file to keep the ratios of --cache mag in, read if it is there")
    stack.add_argument("--no-sparse", dest="sparse", action="store_false", help="leave rainfusion out")
    sparse = parser.add_argument_group("sparse attention")
    sparse.add_argument("--quality", choices=["high", "balanced", "fast"], help="default: balanced")
    sparse.add_argument("--precision", choices=["native", "int8", "fp8"], help="of attention (default: native)")
    common.which_calls(sparse)
    args = common.checked(parser, argv, real=real, tiny=tiny)

    if args.linear is None:
        args.linear = "fp8" if has_fp8(args.device) else "native"
    if args.compile is None:
        args.compile = bool(args.model)
    if args.linear != "native" and importlib.util.find_spec("torchao") is None:
        parser.error(f"--linear {args.linear} needs `pip install torchao`; --linear native needs nothing")
    if args.linear == "fp8" and not has_fp8(args.device):
        parser.error(
            f"--linear fp8 needs a GPU of compute capability 8.9 or later, got {args.device}; int8 runs anywhere"
        )
    if args.cache == "none" and args.cache_threshold is not None:
        parser.error("--cache-threshold needs a cache, got --cache none")
    if args.cache != "mag" and args.mag_ratios:
        parser.error(f"--mag-ratios needs --cache mag, got {args.cache}")
    if args.cache_threshold is None:
        args.cache_threshold = THRESHOLDS.get(args.cache)
    if not args.sparse and (args.quality or args.precision):
        parser.error("--quality and --precision are of sparse attention, which --no-sparse leaves out")
    return args


def has_fp8(device):
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


if __name__ == "__main__":
    main()
