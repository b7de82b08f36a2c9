"""The caller's autocast ends at our door: scores and softmax are fp32, and the output has q's dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def own_precision(device: torch.device) -> AbstractContextManager[None]:
    # compilers cannot trace the question, nor do they run where the answer is no
    if device.type != "meta" and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
