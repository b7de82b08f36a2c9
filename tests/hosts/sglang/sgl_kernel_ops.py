"""Two operators of SGLang's kernels for CPUs, of which there is no wheel, in plain torch: its Wan calls them."""

import torch
import torch.nn.functional as F

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _norm(x, weight, bias, scale, shift, kind, eps):
    wide, shape = x.float(), x.shape[-1:]
    out = F.layer_norm(wide, shape, weight, bias, eps) if kind == "layer" else F.rms_norm(wide, shape, weight, eps)
    return (out * (1 + scale) + shift).to(x.dtype)


def _add_and_norm(residual, x, gate, weight, bias, scale, shift, kind, eps):
    total = residual + (x if gate is None else x * gate)
    return _norm(total, weight, bias, scale, shift, kind, eps), total.clone()


_ARGUMENTS = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind, float eps"
_RESULTS = {
    "fused_norm_scale_shift_cpu": (_norm, f"(Tensor x, {_ARGUMENTS}) -> Tensor"),
    "fused_scale_residual_norm_scale_shift_cpu": (
        _add_and_norm,
        f"(Tensor residual, Tensor x, Tensor? gate, {_ARGUMENTS}) -> (Tensor, Tensor)",
    ),
}
for _name, (_function, _schema) in _RESULTS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
