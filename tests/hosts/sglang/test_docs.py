"""The command in docs/sglang.md is one that SGLang takes."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

PAGE = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()


def test_the_command_gives_our_options(server_args, stage):
    (command,) = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
    words = shlex.split(command)
    assert words[words.index("--attention-backend") + 1] == server_args.attention_backend
    config = server_args._parse_attention_backend_config(words[words.index("--attention-backend-config") + 1])
    arguments = SimpleNamespace(attention_backend_config=config, pipeline_config=server_args.pipeline_config)
    options = stage(0, (1, 16, 3, 32, 48), arguments).options
    assert (options.sparsity, options.skip_first_steps) == (0.8, 5)


def test_the_defaults_of_the_table_are_theirs(server_args, stage):
    arguments = SimpleNamespace(attention_backend_config={}, pipeline_config=server_args.pipeline_config)
    options = stage(0, (1, 16, 3, 32, 48), arguments).options
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    assert listed == {name: str(value) for name, value in vars(options).items()}
