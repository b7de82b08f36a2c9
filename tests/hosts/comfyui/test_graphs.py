"""Graphs through ComfyUI's executor, with the node folder in place."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from rainfusion.integrations import comfyui
from rainfusion.qualities import QUALITIES

ROOT = Path(__file__).resolve().parents[3]
MODELS = ("wan", "flux", "qwen", "hunyuan", "z_image")
CALLS = {"wan": 4, "flux": 6, "qwen": 4, "hunyuan": 6, "z_image": 6}


def graph(name, keep, sparse=None, more=None):
    """A model, the nodes in between, a sampler, what keeps the result, and the report."""
    link = ["1", 0]
    nodes = {"1": {"class_type": "TinyModel", "inputs": {"name": name}}}
    if sparse is not None:
        inputs = {"model": link, "sparsity": 0.7, "dense_start": 0.0, "dense_end": 0.0, "min_tokens": 1, **sparse}
        nodes["2"] = {"class_type": "RainFusionSparseAttention", "inputs": inputs}
        link = ["2", 0]
    for number, (kind, inputs) in (more or {}).items():
        nodes[number] = {"class_type": kind, "inputs": {"model": link, **inputs}}
        link = [number, 0]
    guided = 1.0 if name in ("flux", "hunyuan") else 3.0
    nodes["3"] = {
        "class_type": "KSampler",
        "inputs": {
            "model": link, "seed": 1, "steps": 2, "cfg": guided, "sampler_name": "euler", "scheduler": "simple",
            "positive": ["1", 1], "negative": ["1", 2], "latent_image": ["1", 3], "denoise": 1.0,
        },
    }  # fmt: skip
    nodes["4"] = {"class_type": "Keep", "inputs": {"latent": ["3", 0], "name": keep}}
    if sparse is not None:
        nodes["5"] = {"class_type": "RainFusionReport", "inputs": {"model": link, "after": ["3", 0]}}
    return nodes


@pytest.mark.parametrize("name", MODELS)
def test_sparse_against_dense(graphs, name):
    graphs.run(graph(name, "dense"))
    shown = graphs.run(graph(name, "sparse", {}))
    (report,) = shown["5"]["text"]
    assert report.startswith(f"{CALLS[name]} sparse and 0 dense attention calls"), report
    dense, sparse = graphs.kept["dense"], graphs.kept["sparse"]
    assert 0 < (sparse - dense).abs().max() < 0.01 * dense.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_where_all_is_dense_the_result_is_bit_equal(graphs, name):
    graphs.run(graph(name, "dense"))
    shown = graphs.run(graph(name, "all dense", {"dense_start": 1.0}))
    (report,) = shown["5"]["text"]
    assert torch.equal(graphs.kept["all dense"], graphs.kept["dense"])
    assert f"dense: {CALLS[name]} calls: the start of the schedule is dense" in report


def test_sparsity_0_of_apply_is_bit_equal_in_a_graph(graphs):
    class Zero:
        INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
        RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "go", "tests"

        def go(self, model):
            return (comfyui.apply(model, sparsity=0.0, min_tokens=0),)

    graphs.nodes.NODE_CLASS_MAPPINGS["Zero"] = Zero
    graphs.run(graph("wan", "dense"))
    graphs.run(graph("wan", "zero", more={"6": ("Zero", {})}))
    assert torch.equal(graphs.kept["zero"], graphs.kept["dense"])


def test_sparsity_0_of_the_node_is_by_task(graphs):
    shown = graphs.run(graph("wan", "by task", {"sparsity": 0.0}))
    graphs.run(graph("wan", "0.85", {"sparsity": 0.85}))
    assert shown["5"]["text"][0].startswith("4 sparse") and torch.equal(graphs.kept["by task"], graphs.kept["0.85"])


def test_two_of_them_and_another_override(graphs):
    """Of two RainFusion nodes the later holds; somebody else's override, set without a look, is the dense path."""
    seen = []

    class Other:
        INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
        RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "go", "tests"

        def go(self, model):
            model = model.clone()
            model.model_options["transformer_options"]["optimized_attention_override"] = self.attend
            return (model,)

        @staticmethod
        def attend(func, *args, **kwargs):
            seen.append(args[0].shape)
            return func(*args, **kwargs)

    graphs.nodes.NODE_CLASS_MAPPINGS["Other"] = Other
    again = ("RainFusionSparseAttention", dict(sparsity=0.7, dense_start=0.0, dense_end=0.0, min_tokens=1))
    graphs.run(graph("wan", "once", {"sparsity": 0.7}))
    shown = graphs.run(graph("wan", "twice", {"sparsity": 0.3}, {"6": again, "7": ("Other", {})}))
    assert torch.equal(graphs.kept["twice"], graphs.kept["once"])
    assert shown["5"]["text"][0].startswith("4 sparse and 0 dense")
    assert len(seen) == 4, "cross-attention, two layers of two steps"


def test_a_word_decides_and_custom_leaves_it_to_the_slider(graphs):
    def blocks(**inputs):
        return graphs.run(graph("wan", "word", inputs))["5"]["text"][0].splitlines()[0]

    sparsity = QUALITIES["fast"].video
    assert blocks(quality="fast", sparsity=0.3) == blocks(sparsity=sparsity)
    assert blocks(quality="custom", sparsity=0.3) == blocks(sparsity=0.3) != blocks(sparsity=sparsity)


def test_reasons_are_counted(graphs):
    shown = graphs.run(graph("wan", "short", {"min_tokens": 100_000}))
    assert "dense: 4 calls: fewer than 100000 tokens (min_tokens)" in shown["5"]["text"][0]


def test_a_report_behind_a_bypassed_node_says_so(graphs):
    nodes = graph("wan", "bypassed", {})
    del nodes["2"]
    nodes["3"]["inputs"]["model"] = nodes["5"]["inputs"]["model"] = ["1", 0]
    shown = graphs.run(nodes)
    assert "not on this model, or bypassed" in shown["5"]["text"][0] and "bypassed" in graphs.kept


def test_a_bad_layer_is_an_error_in_words(graphs):
    with pytest.raises(AssertionError, match="skip_layers must be layers of WanModel, which has 2"):
        graphs.run(graph("wan", "bad", {"skip_layers": "7"}))


@pytest.mark.parametrize("folder", [comfyui.FOLDER, ROOT], ids=["the folder", "a clone"])
def test_comfyui_loads_it(graphs, folder):
    assert asyncio.run(graphs.nodes.load_custom_node(str(folder)))
    for name in ("RainFusionSparseAttention", "RainFusionReport"):
        kind = graphs.nodes.NODE_CLASS_MAPPINGS[name]
        assert kind.GET_SCHEMA().display_name == graphs.nodes.NODE_DISPLAY_NAME_MAPPINGS[name]
        pages = [Path(path) / "docs" / f"{name}.md" for path in graphs.nodes.EXTENSION_WEB_DIRS.values()]
        assert any(page.is_file() for page in pages)
    inputs = graphs.nodes.NODE_CLASS_MAPPINGS["RainFusionSparseAttention"].INPUT_TYPES()
    assert list(inputs["required"]) == ["model", "sparsity", "dense_start", "dense_end"]
    advanced = ["skip_layers", "precision", "method", "min_tokens", "schedule"]
    assert list(inputs["optional"]) == [*advanced, "quality"]  # new ones last: saved values are in this order
    for several in inputs.values():
        assert all(options["tooltip"] for _, options in several.values())
    assert [name for name, (_, options) in inputs["optional"].items() if options.get("advanced")] == advanced


# nodes of ComfyUI that its server loads, and this test does not
BESIDE = {
    "CreateVideo", "SaveVideo", "PreviewAny", "ModelSamplingSD3", "ModelSamplingAuraFlow", "EmptyHunyuanLatentVideo",
    "EmptySD3LatentImage",
}  # fmt: skip
WIDGETS = ("INT", "FLOAT", "STRING", "COMBO")


@pytest.mark.parametrize("path", sorted((comfyui.FOLDER / "example_workflows").glob("*.json")), ids=lambda p: p.stem)
def test_the_workflows_fit_this_version(graphs, path):
    """Every node has as many values as its widgets, and inputs that it knows."""
    for node in json.loads(path.read_text())["nodes"]:
        if node["type"] in BESIDE:
            continue
        inputs = graphs.nodes.NODE_CLASS_MAPPINGS[node["type"]].INPUT_TYPES()
        kinds = {name: spec[0] for part in ("required", "optional") for name, spec in inputs.get(part, {}).items()}
        widgets = [name for name, kind in kinds.items() if isinstance(kind, list) or kind in WIDGETS]
        seeds = sum(name in ("seed", "noise_seed") for name in widgets)  # each has a second widget
        assert {slot["name"] for slot in node["inputs"]} <= set(kinds)
        assert len(node.get("widgets_values", [])) == len(widgets) + seeds, node["type"]
