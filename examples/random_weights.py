"""Tiny pipelines with random weights, made in memory: they show the code path, offline and on a CPU, and paint noise.

A pixel means what it does in the real model: the VAEs shrink by 8 in each direction, and a token is two latents wide.
There are no text encoders; a prompt becomes random numbers, the same for the same prompt.
"""

import zlib

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

TEXT_DIM = 32


def _embeds(prompt, length, device):
    """[1, length, TEXT_DIM]"""
    generator = torch.Generator().manual_seed(zlib.crc32((prompt or "").encode()))
    return torch.randn(1, length, TEXT_DIM, generator=generator).to(device)


def _wan_transformer(in_channels):
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=in_channels, out_channels=16, text_dim=TEXT_DIM,
        ffn_dim=64, num_layers=2,
    )  # fmt: skip
    return model.eval()


def _wan(pipeline, in_channels, **other):
    torch.manual_seed(0)
    transformer = _wan_transformer(in_channels)
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=0)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = pipeline(
        transformer=transformer, vae=vae.eval(), scheduler=scheduler, text_encoder=None, tokenizer=None, **other
    )

    def encode_prompt(prompt, negative_prompt=None, *, device, **_):
        return _embeds(prompt, 64, device), _embeds(negative_prompt, 64, device)

    pipe.encode_prompt = encode_prompt
    return pipe


def wan_t2v():
    return _wan(WanPipeline, in_channels=16)


def wan_t2v_two_experts():
    """As Wan 2.2: one transformer for the noisy steps, another for the rest. In bf16, as fp8 linear layers need it."""
    torch.manual_seed(1)
    pipe = _wan(WanPipeline, in_channels=16, transformer_2=_wan_transformer(16), boundary_ratio=0.875)
    for model in (pipe.transformer, pipe.transformer_2):
        torch.nn.Module.to(model, torch.bfloat16)  # diffusers' own `to` warns of layers that are better in fp32
    return pipe


def wan_i2v():
    """As Wan 2.2: the picture comes as latents (16 channels and a mask of 4), without an image encoder."""
    return _wan(WanImageToVideoPipeline, in_channels=16 + 4 + 16)


def qwen_image_edit():
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=TEXT_DIM, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=0, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    pipe = QwenImageEditPlusPipeline(
        transformer=transformer.eval(), vae=vae.eval(), scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None, tokenizer=None, processor=None,
    )  # fmt: skip

    def encode_prompt(prompt, *, device, **_):
        return _embeds(prompt, 64, device), None  # no padding

    pipe.encode_prompt = encode_prompt
    return pipe


def flux():
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=TEXT_DIM, pooled_projection_dim=TEXT_DIM, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=4, norm_num_groups=1,
        mid_block_add_attention=False, shift_factor=0.0,
    )  # fmt: skip
    pipe = FluxPipeline(
        transformer=transformer.eval(), vae=vae.eval(), scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip

    def encode_prompt(prompt, *, device, **_):
        embeds = _embeds(prompt, 64, device)
        return embeds, embeds.mean(1), torch.zeros(64, 3, device=device)  # tokens, pooled, their positions

    pipe.encode_prompt = encode_prompt
    return pipe
