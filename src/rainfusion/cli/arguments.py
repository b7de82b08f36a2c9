"""What the commands share: devices, data types, numbers in their range, and options that do not go together."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from rainfusion import checks

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # what each command adds its parser to

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
WEIGHTS = "of a lab model (default: those in the repository, found in a clone installed with pip install -e)"
MOST_SEED = 2**32 - 1  # training multiplies it, and torch's generators take 64 bits


def device(name: str | None) -> torch.device:
    """The device that --device names; without a name the accelerator of this machine, or else the CPU."""
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.empty(1, device=name).item()  # a tensor on "meta" has no value to read
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be a torch device of this machine, got {name!r}: {reason}") from error
    return torch.device(name)


def dtype(name: str | None, where: torch.device) -> torch.dtype:
    """The data type that --dtype names; without a name fp32 on a CPU and bf16 elsewhere."""
    if name is not None:
        return DTYPES[name]
    return torch.float32 if where.type == "cpu" else torch.bfloat16


def numbers(text: str) -> tuple[float, ...]:
    """The type of an option that takes one number, or several with commas: `0.8,0.85`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or several with commas, got {text!r}") from None


def option(name: str) -> str:
    """The word on the command line for an attribute of the parsed arguments: `head_dim` -> `--head-dim`."""
    return "SHAPE" if name == "names" else f"--{name.replace('_', '-')}"


def check_counts(args: argparse.Namespace, *names: str, minimum: int = 1) -> None:
    """Raises ValueError for an option that was given a number below the minimum."""
    for name in names:
        if getattr(args, name) is not None:
            checks.integer(option(name), getattr(args, name), minimum=minimum)


def check_finite(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for an option that was given nan or inf."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{option(name)} must be a finite number, got {value}")


def check_seed(args: argparse.Namespace) -> None:
    """Raises ValueError for a seed that a generator would not take."""
    if not 0 <= args.seed <= MOST_SEED:
        raise ValueError(f"--seed must be in [0, {MOST_SEED}], got {args.seed}")


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser, names: Sequence[str], reason: str) -> None:
    """Raises ValueError with the reason if one of these options was given a value of its own."""
    for name in names:
        value = getattr(args, name)
        if value != parser.get_default(name) and value != []:
            raise ValueError(f"{option(name)} {reason}")
