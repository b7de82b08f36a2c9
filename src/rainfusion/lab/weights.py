"""The trained model that comes with the package, in bf16 with its configuration: loaded without a network, and checked.

Files in safetensors format: `pip install "rainfusion[lab]"`. `python -m rainfusion.lab.training --export` writes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rainfusion.lab.model import Config, DiT

PACKAGED = Path(__file__).with_name("weights.safetensors")
SHA256 = "1cb2a3be385e78bab41d1dbb366d8479d3d8c35c3ead90cd55b4b4f65102e4bf"  # of that file; `--export` prints it


def load(path: str | Path | None = None, *, sha256: str | None = None, device: torch.device | str = "cpu") -> DiT:
    """A model ready to sample, fp32 on the device; the packaged one by default, checked against `SHA256`."""
    file = PACKAGED if path is None else Path(path)
    check(file, SHA256 if path is None else sha256)
    from safetensors.torch import load_file

    model = DiT(Config(**json.loads(about(file)["config"])))
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    return model.requires_grad_(False).eval().to(device)


def about(path: str | Path = PACKAGED) -> dict[str, str]:
    """What a file says of itself: config, recipe (JSON), step, loss, command, torch."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def save(path: str | Path, config: Config, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Tensors in bf16, with the configuration and notes beside them."""
    from safetensors.torch import save_file

    half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(half, path, {**notes, "config": json.dumps(dataclasses.asdict(config))})


def check(file: Path, sha256: str | None) -> None:
    """Raises unless the file is there and, where a hash is given, has it."""
    if not file.is_file():
        raise FileNotFoundError(
            f"no weights at {file}: train them with `python -m rainfusion.lab.training --seconds 540 --out lab.pt "
            f"--resume --export {file.name}`, or pass the path of a file you have"
        )
    if sha256 is not None and digest(file) != sha256:
        raise ValueError(f"{file} must have the SHA-256 {sha256 or '(none is known yet)'}, got {digest(file)}")


def digest(file: str | Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
