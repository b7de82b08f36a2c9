"""A node with a small random model, its text and its latent, and one that keeps a result: for graphs in tests."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
import tiny

KEPT: dict[str, torch.Tensor] = {}


class TinyModel:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": (list(tiny.MODELS),)}}

    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "make"
    CATEGORY = "tests"

    def make(self, name: str) -> tuple[Any, ...]:
        row = tiny.MODELS[name]
        return row.make(), row.conditioning(1), row.conditioning(2), {"samples": torch.zeros(row.latent)}


class Keep:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": ("LATENT",), "name": ("STRING", {"default": "latent"})}}

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    CATEGORY = "tests"

    def keep(self, latent: dict[str, Any], name: str) -> dict[str, Any]:
        KEPT[name] = latent["samples"].clone()
        return {}


NODE_CLASS_MAPPINGS = {"TinyModel": TinyModel, "Keep": Keep}
