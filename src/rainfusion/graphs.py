"""CUDA graphs: a captured call reads what it was given, for as long as the graph is replayed."""

from __future__ import annotations

import torch

_READ: dict[int, object] = {}  # what captured calls read, by identity; never given up


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_if_captured(device: torch.device, *read: object) -> None:
    """Things that caches hold may be dropped from them, and their memory used again: not while a graph reads it."""
    if is_capturing(device):
        _READ.update((id(thing), thing) for thing in read)


def refuse_if_capturing(device: torch.device, what: str) -> None:
    """For what has to be made before a graph is captured."""
    if is_capturing(device):
        raise RuntimeError(
            f"a CUDA graph is being captured, and this is the first call with these {what}: make the same call once "
            "before capturing, so that all it reads is ready"
        )
