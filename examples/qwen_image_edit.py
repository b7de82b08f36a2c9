"""Image editing with Qwen-Image-Edit and sparse attention.

    python examples/qwen_image_edit.py              # tiny random weights: seconds on a CPU, and noise
    python examples/qwen_image_edit.py --model Qwen/Qwen-Image-Edit-2509 --image cat.png \\
        --start-step 0.2 --compare --prompt "make it snow" --out snow.png
"""

import torch
from diffusers import DiffusionPipeline

import common
import rainfusion
import random_weights


def main(argv=None):
    args = common.parse(
        argv,
        __doc__,
        prompt="turn the picture into a watercolour",
        real=common.Size(height=None, width=None, frames=None, steps=40),
        tiny=common.Size(height=512, width=512, frames=None, steps=3),
        image=True,
    )
    image = common.picture(args)
    if args.model:
        # the checkpoint says which of the two pipelines it needs: Edit (one picture) or EditPlus (one or several)
        pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
    else:
        pipe = random_weights.qwen_image_edit().to(args.device)
    if args.compile:
        common.compile_blocks(pipe)

    handle = None
    if not args.dense:
        # This is all: from here on attention over text, picture and reference is sparse. The text is never skipped.
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
            image=image,
            prompt=args.prompt,
            negative_prompt=" ",  # without one there is no guidance
            height=args.height,
            width=args.width,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(args.seed),
        ).images

    images = common.run(sample, handle, args)
    common.write(images, args)


if __name__ == "__main__":
    main()
