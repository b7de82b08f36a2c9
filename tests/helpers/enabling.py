"""What the tests of `rainfusion.enable` share: forwards, what enabling could leave behind, a model of many blocks."""

import torch

from helpers import needs_diffusers, tiny_models

needs_diffusers()

from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0  # noqa: E402
from diffusers.models.transformers.transformer_wan import WanAttnProcessor  # noqa: E402

__all__ = [
    "CogVideoXAttnProcessor2_0",
    "WanAttnProcessor",
    "attention_dispatch",
    "blocks_of",
    "forward",
    "snapshot",
    "wide_wan",
]


def forward(model, inputs):
    with torch.no_grad():
        out = model(**inputs, return_dict=False)[0]
    return out[0] if isinstance(out, (list, tuple)) else out


def snapshot(model):
    """Everything that enabling could leave behind."""
    state = {}
    for name, module in model.named_modules():
        hooks = [len(getattr(module, table)) for table in vars(module) if "hooks" in table]
        processor = getattr(module, "processor", None)
        processor = None if processor is None else (id(processor), type(processor), dict(vars(processor)))
        state[name] = sorted(vars(module)), hooks, processor, module.__dict__.get("forward")
    return state


def wide_wan(**kwargs):
    """1,536 tokens: twelve blocks."""
    return tiny_models.ALL["wan"](t=4, h=32, w=48, **kwargs)


def blocks_of(model):
    """All transformer blocks, whatever their stacks are called."""
    stacks = ("blocks", "transformer_blocks", "single_transformer_blocks")
    return [block for stack in stacks for block in getattr(model, stack, ())]
