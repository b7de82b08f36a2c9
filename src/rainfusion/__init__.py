"""rainfusion: block-sparse attention for video and image Diffusion Transformers, on every torch device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rainfusion.api import block_sparse_attention, explain, predict_mask, sparse_attention
from rainfusion.blockmask import BlockMask
from rainfusion.integrations.diffusers import Handle, calibrate, disable, enable, enabled, register_model
from rainfusion.integrations.scenes import NoGrid
from rainfusion.integrations.stats import Stats
from rainfusion.layout import TokenLayout
from rainfusion.options import Method
from rainfusion.profiles import Profile
from rainfusion.warming import warmup

__version__ = "0.2.0"

__all__ = [
    "BlockMask",
    "Handle",
    "Method",
    "NoGrid",
    "Profile",
    "Stats",
    "TokenLayout",
    "block_sparse_attention",
    "calibrate",
    "disable",
    "enable",
    "enabled",
    "explain",
    "predict_mask",
    "register_model",
    "sparse_attention",
    "warmup",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """`rainfusion.plugin` was there without being imported: an old name, which warns when it is used."""
        if name == "plugin":
            from importlib import import_module

            return import_module("rainfusion.plugin")
        raise AttributeError(f"module 'rainfusion' has no attribute {name!r}")
