"""Text to image with Flux.1 and sparse attention.

    python examples/flux.py                         # tiny random weights: seconds on a CPU, and noise
    python examples/flux.py --model black-forest-labs/FLUX.1-dev --height 2048 --width 2048 \\
        --start-step 0.2 --compare --prompt "a cat on a mountain of books" --out cat.png
"""

import torch
from diffusers import FluxPipeline

import common
import rainfusion
import random_weights


def main(argv=None):
    args = common.parse(
        argv,
        __doc__,
        prompt="a cat on a mountain of books, oil painting",
        real=common.Size(height=1024, width=1024, frames=None, steps=28),
        tiny=common.Size(height=512, width=512, frames=None, steps=3),
    )
    if args.model:
        # FLUX.1-dev is behind a licence: accept it on the hub, and log in, before the first download
        pipe = FluxPipeline.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
    else:
        pipe = random_weights.flux().to(args.device)
    if args.compile:
        common.compile_blocks(pipe)

    handle = None
    if not args.dense:
        # This is all: from here on attention over text and picture is sparse. The text is never skipped.
        handle = rainfusion.enable(
            pipe,
            sparsity=args.sparsity,
            precision=args.precision,
            start_step=args.start_step,
            skip_layers=args.skip_layers,
            min_tokens=args.min_tokens,
        )

    def sample(steps):
        return pipe(
            prompt=args.prompt,
            height=args.height,
            width=args.width,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(args.seed),
        ).images

    images = common.run(sample, handle, args)
    common.write(images, args)


if __name__ == "__main__":
    main()
