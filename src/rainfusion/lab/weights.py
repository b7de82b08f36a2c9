"""Weights of lab models, in bf16 with their configuration: loaded without a network, and checked.

The trained model is `weights/lab.safetensors` in the repository, and no part of an installed package, most of which it
would be. It is found in a clone that was installed with `pip install -e`; anywhere else its path must be given.

Files are in safetensors format, which `pip install "rainfusion[lab]"` brings. They are written by
`python -m rainfusion.lab.training --export`.
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

REPOSITORY = "https://github.com/rainfusion/rainfusion"
NAME = "weights/lab.safetensors"  # the trained model, in the repository
CLONE = Path(__file__).parents[3]  # the repository, where this file is run from a clone of it
SHA256 = "7a9ad2135530dfd2c0bf395d0a9d83765a788c5aeb5b1b65d4e9940beec823f8"  # of that file; `--export` prints it


def load(path: str | Path | None = None, *, sha256: str | None = None, device: torch.device | str = "cpu") -> DiT:
    """A model ready to sample, fp32 on the device.

    Args:
        path: a file of weights. None: the trained model of the repository, checked against `SHA256`.
        sha256: what the file's SHA-256 must be; None checks nothing.
        device: where the model goes.
    """
    file = find(path)
    check(file, SHA256 if path is None else sha256)
    return _read(file).requires_grad_(False).eval().to(device)


def find(path: str | Path | None = None) -> Path:
    """The file at a path, or without one the trained model. FileNotFoundError says what to do where there is none."""
    if path is None:
        if not (CLONE / NAME).is_file():
            raise FileNotFoundError(
                f"the lab's weights are not part of the installed package: clone {REPOSITORY}, then install the clone "
                f"with `pip install -e .`, or pass its file {NAME}: --weights FILE on the command line, "
                "lab.load(path) in Python"
            )
        return CLONE / NAME
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no weights at {path}: pass the path of a file you have, such as {NAME} in a clone of {REPOSITORY}, or "
            "train them with `python -m rainfusion.lab.training --seconds 540 --out lab.pt --resume "
            f"--export {Path(path).name}`"
        )
    return Path(path)


def about(path: str | Path | None = None) -> dict[str, str]:
    """What a file says of itself: config, recipe (JSON), step, loss, command, torch."""
    from safetensors import SafetensorError, safe_open

    file = find(path)
    try:
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} must be a safetensors file of a lab model, got another: {error}") from error


def save(path: str | Path, config: Config, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Tensors in bf16, with the configuration and notes beside them."""
    from safetensors.torch import save_file

    half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(half, path, {**notes, "config": json.dumps(dataclasses.asdict(config))})


def check(file: Path, sha256: str | None) -> None:
    """Raises ValueError unless the file has this hash, where one is given."""
    if sha256 is not None and digest(file) != sha256:
        raise ValueError(f"{file} must have the SHA-256 {sha256}, got {digest(file)}; fetch it anew from {REPOSITORY}")


def digest(file: str | Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _read(file: Path) -> DiT:
    from safetensors.torch import load_file

    notes = about(file)
    try:
        model = DiT(Config(**json.loads(notes["config"])))
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # no configuration, or tensors that do not fit it
        reason = str(error).splitlines()[0]
        raise ValueError(f"{file} must hold a lab model with its configuration, got another: {reason}") from error
    return model
