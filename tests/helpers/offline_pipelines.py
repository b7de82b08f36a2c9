"""Whole diffusers pipelines with random weights, made in memory: they run offline on a CPU in tenths of a second."""

import torch

from helpers import needs_diffusers

WORDS = "a cat dance monkey negative bad quality painting of squirrel eating burger the dog runs"


def _tokenizer(length=64):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "<s>": 3}
    vocabulary.update({word: 4 + i for i, word in enumerate(WORDS.split())})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>",
        model_max_length=length,
    )  # fmt: skip


def _t5():
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=1000, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)).eval()


def _quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan(experts=1, layers=2, channels=16):
    needs_diffusers("transformers", "tokenizers")
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    transformers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=16,
            text_dim=32, freq_dim=256, ffn_dim=32, num_layers=layers, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        ).eval()
        for _ in range(experts)
    ]  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return _quiet(
        WanPipeline(
            transformer=transformers[0], transformer_2=transformers[1] if experts == 2 else None, vae=vae,
            scheduler=scheduler, text_encoder=_t5(), tokenizer=_tokenizer(),
            boundary_ratio=0.875 if experts == 2 else None,
        )
    )  # fmt: skip


def wan_from_image():
    """Beside what `wan` takes, an `image`, in channels of its own."""
    parts = wan(channels=36).components
    from diffusers import WanImageToVideoPipeline

    kept = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
    return _quiet(WanImageToVideoPipeline(**{name: parts[name] for name in kept}))


def wan_two_experts():
    return wan(experts=2)


def flux():
    needs_diffusers("transformers", "tokenizers")
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    clip = CLIPTextModel(
        CLIPTextConfig(
            bos_token_id=0, eos_token_id=1, hidden_size=32, intermediate_size=37, num_attention_heads=4,
            num_hidden_layers=2, pad_token_id=0, vocab_size=1000, projection_dim=32,
        )
    ).eval()  # fmt: skip
    vae = AutoencoderKL(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(4,), layers_per_block=1, latent_channels=1,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035,
    ).eval()  # fmt: skip
    return _quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(), text_encoder=clip, tokenizer=_tokenizer(77),
            text_encoder_2=_t5(), tokenizer_2=_tokenizer(), transformer=transformer, vae=vae,
        )
    )  # fmt: skip


def qwen():
    needs_diffusers()
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler()
    return _quiet(
        QwenImagePipeline(transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=None, tokenizer=None)
    )


def cogvideox():
    """Its scheduler has no step index."""
    needs_diffusers("transformers", "tokenizers")
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    torch.manual_seed(0)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=32, num_layers=2, sample_width=6, sample_height=4, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=16,
    ).eval()  # fmt: skip
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=4,
    ).eval()  # fmt: skip
    return _quiet(
        CogVideoXPipeline(
            tokenizer=_tokenizer(), text_encoder=_t5(), vae=vae, transformer=transformer,
            scheduler=CogVideoXDDIMScheduler(),
        )
    )  # fmt: skip


_VIDEO = dict(
    prompt="dance monkey", negative_prompt="bad", num_inference_steps=4, guidance_scale=6.0, height=32, width=48,
    num_frames=9, max_sequence_length=16, output_type="pt",
)  # fmt: skip


def _qwen_inputs():
    generator = torch.Generator().manual_seed(1)
    positive, negative = (torch.randn(1, length, 16, generator=generator) for length in (7, 5))
    return dict(
        prompt_embeds=positive, prompt_embeds_mask=torch.ones(1, 7).long(), negative_prompt_embeds=negative,
        negative_prompt_embeds_mask=torch.ones(1, 5).long(), true_cfg_scale=4.0, num_inference_steps=4, height=32,
        width=48, output_type="pt",
    )  # fmt: skip


_FLUX = dict(
    prompt="a painting of a squirrel", num_inference_steps=4, guidance_scale=5.0, height=16, width=24,
    max_sequence_length=48, output_type="pt",
)  # fmt: skip


def from_image_inputs():
    """Of `wan_from_image`. Text is encoded: it would ask for a package that cleans it."""
    generator = torch.Generator().manual_seed(1)
    positive, negative = (torch.randn(1, 16, 32, generator=generator) for _ in range(2))
    image = torch.rand(1, 3, _VIDEO["height"], _VIDEO["width"], generator=generator)
    own = dict(prompt=None, negative_prompt=None, prompt_embeds=positive, negative_prompt_embeds=negative, image=image)
    return {**_VIDEO, **own}


# name -> how to make it, its inputs, forwards a step
PIPELINES = {
    "wan": (wan, _VIDEO, 2),
    "wan_two_experts": (wan_two_experts, _VIDEO, 2),
    "flux": (flux, _FLUX, 1),
    "qwen": (qwen, _qwen_inputs(), 2),
    "cogvideox": (cogvideox, _VIDEO, 1),
}


def sample(pipe, inputs, **other):
    return pipe(**{**inputs, **other}, generator=torch.Generator().manual_seed(0))[0]
