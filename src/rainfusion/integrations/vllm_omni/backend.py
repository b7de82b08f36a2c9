"""The classes that vLLM-Omni loads by name when `RAINFUSION_ATTN` is chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rainfusion.integrations.decider import Dense
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.vllm_omni import ENGINE, private_names, rules

AttentionBackend, AttentionImpl = private_names.base_classes()


class RainfusionBackend(AttentionBackend):  # type: ignore[misc, valid-type] # a base that type checkers do not see
    """Sparse calls are rainfusion's, dense ones those of the platform's own backend, and so is what masks it takes."""

    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return private_names.NAME

    @staticmethod
    def get_impl_cls() -> type:
        return RainfusionImpl

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # all

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return bool(private_names.dense_backend().supports_attention_mask(None))

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return bool(private_names.dense_backend().supports_packed_mask_free())


class RainfusionImpl(AttentionImpl):  # type: ignore[misc, valid-type]
    """One attention layer."""

    # vLLM-Omni asks before a model is made; on other devices the first sparse call says what is missing
    _supported_kv_cache_dtypes = {"cuda": {"fp8"}}  # noqa: RUF012

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        role: str = "self",
        **others: Any,
    ) -> None:
        self.options = rules.Options.of(backend_kwargs)
        ring, allgather = private_names.degrees()
        rules.check_layer(self.options, causal=causal, qkv_layout=qkv_layout, ring=ring, allgather=allgather)
        ENGINE.warn(private_names.HOST.untested())
        self.qkv_layout, self.number = qkv_layout, rules.layer_number(prefix)
        self.layer = ENGINE.layer(prefix, softmax_scale)
        self.dense = private_names.dense(
            role,
            num_heads=num_heads,
            head_size=head_size,
            softmax_scale=softmax_scale,
            causal=causal,
            num_kv_heads=num_kv_heads,
            prefix=prefix,
            qkv_layout=qkv_layout,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        """On every platform. Compiled blocks end before it and begin again after it."""
        facts = private_names.facts(self.number, self.qkv_layout, attn_metadata)
        found = rules.place(self.options, facts)
        scene: Scene | Dense
        if isinstance(found, Dense):
            scene, rows = found, None
        else:
            scene, rows = found
            rules.check_tensors(query.shape, key.shape, value.shape, rows)
        return self.layer.attend(
            self.options.method(private_names.kv_cache_dtype(attn_metadata)),
            scene,
            query,
            key,
            value,
            lambda: self.dense.forward(query, key, value, attn_metadata),
            step=facts.step,
            rows=rows,
        )
