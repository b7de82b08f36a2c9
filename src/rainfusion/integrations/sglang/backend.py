"""The classes that SGLang loads by name when `rain_fusion_attn` is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rainfusion.checks import Grid
from rainfusion.integrations.sglang import ENGINE, private_names, rules
from rainfusion.options import Method

AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder = private_names.base_classes()


class RainfusionBackend(AttentionBackend):  # type: ignore[misc, valid-type] # a base that type checkers do not see
    """Sparse calls are rainfusion's, dense ones those of the platform's own backend."""

    accept_output_buffer = True

    @staticmethod
    def get_enum() -> Any:
        return private_names.enum()

    @staticmethod
    def get_impl_cls() -> type:
        return RainfusionImpl

    @staticmethod
    def get_metadata_cls() -> type:
        return RainfusionMetadata

    @staticmethod
    def get_builder_cls() -> type:
        return RainfusionMetadataBuilder


@dataclass
class RainfusionMetadata(AttentionMetadata):  # type: ignore[misc, valid-type]
    """Of one step, for all layers."""

    options: rules.Options
    grid: Grid | None
    # FlashAttention, which may serve cross-attention in the same forward, looks for these and fills them in
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


class RainfusionMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc, valid-type]
    """Made and called once a step."""

    def build(
        self,
        current_timestep: int,
        skip_first_steps: int,
        sparsity: float,
        raw_latent_shape: Any,
        patch_size: Any,
        **others: Any,
    ) -> RainfusionMetadata:
        options = rules.Options(sparsity, skip_first_steps)
        return RainfusionMetadata(current_timestep, options, rules.grid_of(raw_latent_shape, patch_size))


class RainfusionImpl(AttentionImpl):  # type: ignore[misc, valid-type]
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool,
        softmax_scale: float,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **others: Any,
    ) -> None:
        ENGINE.warn(private_names.HOST.untested())
        self.causal = causal
        self.layer = ENGINE.layer(prefix.removesuffix(".impl"), softmax_scale)
        self.dense = private_names.dense(
            head_size,
            num_heads=num_heads,
            causal=causal,
            softmax_scale=softmax_scale,
            num_kv_heads=num_kv_heads,
            prefix=prefix,
            **others,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        """Compiled models end a graph before it and begin another after it."""
        facts = rules.Facts(options=None, causal=self.causal)
        if isinstance(attn_metadata, RainfusionMetadata):
            facts = rules.Facts(attn_metadata.options, attn_metadata.current_timestep, attn_metadata.grid, self.causal)
        return self.layer.attend(
            Method.recommended() if facts.options is None else facts.options.method,
            rules.place(facts),
            query,
            key,
            value,
            lambda: self.dense.forward(query, key, value, None),  # others' metadata are of other fields
            step=facts.step,
        )
