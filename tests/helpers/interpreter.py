"""Triton's interpreter, where it has to be helped."""

import numpy as np
import torch

E4M3 = torch.float8_e4m3fn


def with_exact_e4m3(monkeypatch):
    """Numbers become e4m3 as they do on a GPU: the nearest one, the largest where there is none as large, NaN as NaN.

    The interpreter itself forgets the carry when a mantissa rounds up to 2, cuts off near zero, and has no NaN.
    """
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def convert(data, source, target, rounding):
        if target.name == "fp8e4nv":
            most = torch.finfo(E4M3).max
            wide = torch.from_numpy(np.asarray(data, dtype=np.float32)).clamp(-most, most)
            return wide.to(E4M3).view(torch.uint8).numpy()
        if source.name == "fp8e4nv":
            wide = torch.from_numpy(np.ascontiguousarray(data)).view(E4M3).float().numpy()
            return wide.astype({"fp16": np.float16, "fp32": np.float32}[target.name])
        return own(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
