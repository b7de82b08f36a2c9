"""How far a result is from the exact one, and what the last bit of a dtype is worth."""

import torch

# half a unit in the last place of 1.0: what one rounding may move
EPS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, torch.float64: 2**-53}


def error(x, exact):
    """Relative L2 distance, for `exact` in float64."""
    return (x.double() - exact).norm() / exact.norm()
