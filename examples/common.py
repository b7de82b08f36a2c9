"""What the examples share: their options, the clock, the comparison with dense attention, and writing the result."""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.utils import export_to_gif, export_to_video, is_opencv_available
from diffusers.utils.import_utils import is_imageio_available
from PIL import Image, ImageOps


@dataclass(frozen=True)
class Size:
    """None: the pipeline decides."""

    height: int | None
    width: int | None
    frames: int | None  # None: an image
    steps: int


def parse(argv, description, *, prompt, real, tiny, image=False):
    """The options of an example with sparse attention alone."""
    parser = options(description, prompt=prompt, real=real, tiny=tiny, image=image)
    sparse = parser.add_argument_group("sparse attention")
    sparse.add_argument("--sparsity", type=float, help="share of blocks to skip (default: video 0.85, images 0.6)")
    sparse.add_argument("--precision", choices=["native", "int8", "fp8"], default="native", help="default: %(default)s")
    which_calls(sparse)
    which = sparse.add_mutually_exclusive_group()
    which.add_argument("--dense", action="store_true", help="leave rainfusion out")
    which.add_argument("--compare", action="store_true", help="both ways: speed-up, and PSNR between the two")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    return checked(parser, argv, real=real, tiny=tiny)


def options(description, *, prompt, real, tiny, image=False):
    """-> a parser with the options of all examples. Sizes are `real` with a checkpoint, and `tiny` without."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id of a checkpoint (default: tiny random weights, offline)")
    parser.add_argument("--prompt", default=prompt, help="default: %(default)s")
    if image:
        parser.add_argument("--image", type=Path, help="the picture to start from (default: a gradient)")
    for name in _sizes(real):
        first, second = getattr(real, name) or "the picture's", getattr(tiny, name)
        parser.add_argument(f"--{name}", type=int, help=f"default: {first}, with random weights {second}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    endings = _endings(real)
    parser.add_argument(
        "--out", type=Path, default=Path(f"out{endings[0]}"), help=f"{' or '.join(endings)} (default: %(default)s)"
    )
    return parser


def which_calls(group):
    """The options that say which attention calls stay dense."""
    group.add_argument("--start-step", type=_steps, default=0, help="dense steps first: a number, or a share like 0.2")
    group.add_argument("--skip-layers", default="", help='layers that stay dense, such as "0-3,38"')
    group.add_argument("--min-tokens", type=int, help="shorter sequences stay dense (default: as measured; tiny: 0)")


def checked(parser, argv, *, real, tiny):
    """-> what was asked for, with the sizes filled in. What would fail at the end fails before the work."""
    args = parser.parse_args(argv)
    for name in _sizes(real):
        if getattr(args, name) is None:
            setattr(args, name, getattr(real if args.model else tiny, name))
    if args.min_tokens is None and not args.model:
        args.min_tokens = 0
    if args.out.suffix not in _endings(real):
        parser.error(f"--out must end in {' or '.join(_endings(real))}, got {args.out}")
    if args.out.suffix == ".mp4" and not (is_imageio_available() or is_opencv_available()):
        parser.error("--out as mp4 needs `pip install imageio imageio-ffmpeg`; .gif needs nothing")
    image = getattr(args, "image", None)
    if image and not image.is_file():
        parser.error(f"--image: there is no file {image}")
    return args


def _sizes(real):
    return ("height", "width", "steps") if real.frames is None else ("height", "width", "frames", "steps")


def _endings(real):
    return (".png", ".jpg") if real.frames is None else (".gif", ".mp4")


def _steps(text):
    return float(text) if "." in text else int(text)


def picture(args):
    """--image cut to the asked size, or a gradient of that size (1024 x 1024 where none is asked for)."""
    if args.image:
        image = Image.open(args.image).convert("RGB")
        return ImageOps.fit(image, (args.width, args.height)) if args.width and args.height else image
    size = args.width or 1024, args.height or 1024
    bands = [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L").rotate(90)]
    return Image.merge("RGB", [band.resize(size) for band in bands])


def compile_blocks(pipe):
    """Before or after `rainfusion.enable`: both work."""
    for model in (pipe.transformer, getattr(pipe, "transformer_2", None)):  # Wan 2.2 has two
        if model is not None:
            model.compile_repeated_blocks(fullgraph=True)


def run(sample, handle, args):
    """Runs `sample(steps)`, prints seconds and what rainfusion did; with --compare once more without it.

    `handle`: what `rainfusion.enable` returned; None: dense.
    """
    pictures, seconds = _timed(sample, args, handle)
    if handle is None:
        print(f"dense attention: {seconds:.2f} s for the whole pipeline")
        return pictures
    stats = handle.stats()
    print(f"{'sparse' if stats.sparse_calls else 'dense'} attention: {seconds:.2f} s for the whole pipeline")
    for line in stats.summary.splitlines():
        print(f"  {line}")
    if args.compare and stats.sparse_calls == 0:
        print("nothing to compare: no call was sparse")
    elif args.compare:
        handle.disable()
        others, dense_seconds = _timed(sample, args)
        print(f"dense attention: {dense_seconds:.2f} s for the whole pipeline")
        print(f"speed-up {dense_seconds / seconds:.2f}x, PSNR {psnr(pictures, others):.1f} dB")
    return pictures


def _timed(sample, args, handle=None):
    """-> pictures, seconds. What is to be compared, or compiles, has a first run that does not count."""
    if args.compare or args.compile:
        warm_up = min(args.steps, 2 + (args.start_step if isinstance(args.start_step, int) else 0))
        print(f"warming up: {warm_up} of {args.steps} steps")
        sample(warm_up)
        if handle is not None:
            handle.reset()  # of what it counts
    start = time.perf_counter()
    pictures = sample(args.steps)  # PIL: the device has finished
    return pictures, time.perf_counter() - start


def psnr(one, other):
    """10 log10(255^2 / mean((one - other)^2)) over all pictures, in dB; infinite where they are equal."""
    error = np.mean([(np.asarray(a, float) - np.asarray(b, float)) ** 2 for a, b in zip(one, other, strict=True)])
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def write(pictures, args, fps=16):
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.suffix == ".gif":
        export_to_gif(pictures, str(args.out), fps=fps)
    elif args.out.suffix == ".mp4":
        export_to_video(pictures, str(args.out), fps=fps)
    else:
        pictures[0].save(args.out)
    print(f"wrote {args.out}" + ("" if args.model else ": noise, for the weights are random (--model takes real ones)"))
