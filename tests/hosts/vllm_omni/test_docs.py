"""The command in docs/vllm_omni.md is one that vLLM-Omni takes."""

import json
import re
import shlex
from pathlib import Path

from vllm_omni.diffusion.data import parse_attention_config

PAGE = (Path(__file__).parents[3] / "docs" / "vllm_omni.md").read_text()


def test_the_command_gives_our_options():
    (command,) = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
    words = shlex.split(command)
    given = json.loads(words[words.index("--diffusion-attention-config") + 1])
    spec, _ = parse_attention_config(given).resolve_with_source(role="self")
    assert spec.backend == "RAINFUSION_ATTN"
    assert spec.backend_kwargs() == {
        "sparsity": 0.8, "start_step": 5, "end_step": 0, "precision": "bf16",
    }  # fmt: skip
    assert parse_attention_config(given).resolve_with_source(role="cross") == (None, None)


def test_its_options_are_those_of_the_table():
    from dataclasses import fields

    from vllm_omni.diffusion.data import BlockSparseSpec

    table = PAGE[PAGE.index("## Options") : PAGE.index("## What stays dense")]
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    found = {field.name: field.default for field in fields(BlockSparseSpec) if field.repr}
    assert set(listed) == set(found)
    shown = {name: "none" if value is None else str(value) for name, value in found.items()}
    assert {name: value.strip('`"') for name, value in listed.items()} == shown
