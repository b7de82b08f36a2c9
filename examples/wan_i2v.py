"""Image to video with Wan 2.1 or 2.2 and sparse attention.

    python examples/wan_i2v.py                      # tiny random weights: seconds on a CPU, and noise
    python examples/wan_i2v.py --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --image cat.png --height 720 --width 1280 \\
        --start-step 0.2 --compare --prompt "the cat turns its head" --out cat.mp4
"""

import torch
from diffusers import WanImageToVideoPipeline

import common
import rainfusion
import random_weights


def main(argv=None):
    args = common.parse(
        argv,
        __doc__,
        prompt="the camera moves slowly forward",
        real=common.Size(height=480, width=832, frames=81, steps=40),
        tiny=common.Size(height=192, width=256, frames=9, steps=3),
        image=True,
    )
    image = common.picture(args)
    if args.model:
        # the VAE in float32, as in diffusers' own example
        dtype = {"default": torch.bfloat16, "vae": torch.float32}
        pipe = WanImageToVideoPipeline.from_pretrained(args.model, dtype=dtype).to(args.device)
    else:
        pipe = random_weights.wan_i2v().to(args.device)
    if args.compile:
        common.compile_blocks(pipe)

    handle = None
    if not args.dense:
        # This is all: from here on the self-attention of the pipeline is sparse, in both of Wan 2.2's transformers.
        # The keys of the first frame, which is the given picture, are never skipped.
        handle = rainfusion.enable(
            pipe,
            first_frame="keys",
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
            height=args.height,
            width=args.width,
            num_frames=args.frames,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(args.seed),
            output_type="pil",
        ).frames[0]

    frames = common.run(sample, handle, args)
    common.write(frames, args)


if __name__ == "__main__":
    main()
