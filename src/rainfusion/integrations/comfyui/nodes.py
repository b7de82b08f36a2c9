"""RainFusion's nodes. Only ComfyUI imports this: its API of nodes is needed here."""

from __future__ import annotations

from typing import Any

from rainfusion.integrations import comfyui
from rainfusion.integrations.comfyui.private_names import node_api
from rainfusion.options import PRECISIONS
from rainfusion.qualities import QUALITIES

api = node_api()
io = api.io

_CATEGORY = "model/patch"
_CUSTOM = "custom"  # no word: the sparsity of the slider


def _advanced(widget: Any) -> Any:
    """Behind a fold, where the version has one; older ones have no argument for it."""
    widget.extra_dict = {**(widget.extra_dict or {}), "advanced": True}
    return widget


class SparseAttention(io.ComfyNode):  # type: ignore[name-defined, misc]
    """`comfyui.apply` in a graph."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="RainFusionSparseAttention",
            display_name="RainFusion Sparse Attention",
            category=_CATEGORY,
            description="Makes video and image models faster: attention skips the blocks that matter least.",
            inputs=[
                io.Model.Input("model", tooltip="Wan, HunyuanVideo, LTX, Qwen-Image, Flux, Z-Image and others."),
                io.Float.Input(
                    "sparsity",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="The share of blocks to skip. More is faster and less exact. 0: by task, 0.85 for video "
                    "and 0.6 for images. To compare with full attention, bypass the node.",
                ),
                io.Float.Input(
                    "dense_start",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="This share of the schedule has full attention at its start, where the picture is laid "
                    "out. 0.1 to 0.25 keeps closer to the original picture, and costs that much of the gain.",
                ),
                io.Float.Input(
                    "dense_end",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="This share of the schedule has full attention at its end.",
                ),
                _advanced(
                    io.String.Input(
                        "skip_layers",
                        default="",
                        optional=True,
                        tooltip="Layers that keep full attention, such as 0-3,38. The report lists them in order.",
                    )
                ),
                _advanced(
                    io.Combo.Input(
                        "precision",
                        options=list(PRECISIONS),
                        default="native",
                        optional=True,
                        tooltip="fp8 and int8 are faster still on Hopper GPUs (H100, H200). RTX 40 and later "
                        "have both, RTX 30 has int8: nobody has timed them there.",
                    )
                ),
                _advanced(
                    io.Combo.Input(
                        "method",
                        options=list(comfyui.METHODS),
                        default="recommended",
                        optional=True,
                        tooltip="recommended: the best pictures for their time. published: RainFusion2.0 as it was "
                        "published. adaptive: as many blocks as each head needs.",
                    )
                ),
                _advanced(
                    io.Int.Input(
                        "min_tokens",
                        default=0,
                        min=0,
                        max=1_000_000,
                        optional=True,
                        tooltip="Shorter sequences keep full attention. 0: whatever is faster.",
                    )
                ),
                _advanced(
                    io.Combo.Input(
                        "schedule",
                        options=list(comfyui.SCHEDULES),
                        default="auto",
                        optional=True,
                        tooltip="falling: the same number of blocks, more of them early, which comes nearer to the "
                        "original video in the same time, if that is made from text. falling gently: for models of few "
                        "steps. auto: one of them by the number of steps for a video from text, constant for an image "
                        "and for a video from an image.",
                    )
                ),
                io.Combo.Input(  # the last one: saved workflows have their values in this order
                    "quality",
                    options=[_CUSTOM, *QUALITIES],
                    default=_CUSTOM,
                    optional=True,
                    tooltip="A word instead of sparsity, which is not read then. high: nearer to the original picture. "
                    "balanced: 0.85 for video and 0.6 for images. fast: faster. custom: sparsity decides.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with sparse attention; the one that came in stays as it is.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        sparsity: float,
        dense_start: float,
        dense_end: float,
        skip_layers: str = "",
        precision: Any = "native",
        method: Any = "recommended",
        min_tokens: int = 0,
        schedule: str = "auto",
        quality: Any = _CUSTOM,
    ) -> Any:
        return io.NodeOutput(
            comfyui.apply(
                model,
                quality=None if quality == _CUSTOM else quality,
                sparsity=(sparsity or None) if quality == _CUSTOM else None,
                dense_start=dense_start,
                dense_end=dense_end,
                skip_layers=skip_layers,
                precision=precision,
                method=method,
                min_tokens=min_tokens or None,
                schedule=comfyui.SCHEDULES[schedule],
            )
        )


class Report(io.ComfyNode):  # type: ignore[name-defined, misc]
    """`comfyui.stats` in a graph, as text."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="RainFusionReport",
            display_name="RainFusion Report",
            category=_CATEGORY,
            description="What RainFusion Sparse Attention did: which calls were sparse, with which grid and how "
            "much of it was computed, and which had full attention, and why.",
            inputs=[
                io.Model.Input("model", tooltip="From RainFusion Sparse Attention, as the sampler gets it."),
                io.AnyType.Input(
                    "after", tooltip="The sampler's result, or anything made of it: the report waits for it."
                ),
            ],
            outputs=[
                io.String.Output("report", tooltip="A summary and a table of the layers."),
                io.AnyType.Output("passed_on", tooltip="What came in as `after`."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, after: Any) -> Any:
        text = comfyui.report(model)
        return io.NodeOutput(text, after, ui=api.ui.PreviewText(text))


class Extension(api.ComfyExtension):  # type: ignore[name-defined, misc]
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[Any]:
        return [SparseAttention, Report]


async def comfy_entrypoint() -> Extension:
    """ComfyUI calls it."""
    return Extension()


# for versions, and for other programs, that look for these instead
NODE_CLASS_MAPPINGS = {"RainFusionSparseAttention": SparseAttention, "RainFusionReport": Report}
NODE_DISPLAY_NAME_MAPPINGS = {
    "RainFusionSparseAttention": "RainFusion Sparse Attention",
    "RainFusionReport": "RainFusion Report",
}
