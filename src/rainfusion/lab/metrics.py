"""How far clips are apart: each metric takes a, b [B, 3, T, H, W] in [0, 1] and gives one number a clip, [B]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5  # the side of SSIM's windows and the width of their Gaussian, in pixels
STEADY_MEAN, STEADY_VARIANCE = 0.01**2, 0.03**2


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """-10 log10(mean (a - b)^2), in dB; inf for equal clips."""
    return -10 * _mean((a - b).square()).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """mean over windows of (2 ma mb + c1) (2 cov + c2) / ((ma^2 + mb^2 + c1) (va + vb + c2)).

    Means, variances and covariances are of Gaussian windows that lie inside a frame, in each channel.
    """
    mean_a, mean_b = _blur(a), _blur(b)
    variances = _blur(a * a) - mean_a.square() + _blur(b * b) - mean_b.square()
    covariance = _blur(a * b) - mean_a * mean_b
    alike = (2 * mean_a * mean_b + STEADY_MEAN) * (2 * covariance + STEADY_VARIANCE)
    size = (mean_a.square() + mean_b.square() + STEADY_MEAN) * (variances + STEADY_VARIANCE)
    return (alike / size).flatten(1).mean(1)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """a . b / (|a| |b|) of all pixels of a clip; by the difference of unit vectors, exact where they are near."""
    a, b = (F.normalize(x.flatten(1), dim=1) for x in (a, b))
    return (_sum_of_squares(a) + _sum_of_squares(b) - _sum_of_squares(a - b)) / 2


def temporal_error(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(mean (da - db)^2), d being the difference of a frame to the one before; 0 for an image."""
    if a.shape[2] < 2:
        return a.new_zeros(len(a))
    return _mean((a.diff(dim=2) - b.diff(dim=2)).square()).sqrt()


METRICS = dict(psnr=psnr, ssim=ssim, cosine=cosine, temporal=temporal_error)


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(1)


def _blur(x: Tensor) -> Tensor:
    """[B, C, T, H, W] -> Gaussian means of windows, [B, C, T, H', W']. A small frame has a smaller window."""
    size = min(WINDOW, *(n - (n + 1) % 2 for n in x.shape[3:]))  # the largest odd size that fits
    place = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
    weights = torch.exp(-place.square() / (2 * SIGMA**2))
    weights = weights / weights.sum()
    rows, columns = (_windows(weights, n) for n in x.shape[3:])
    return rows @ x @ columns.T


def _windows(weights: Tensor, count: int) -> Tensor:
    """A matrix that takes so many numbers to the weighted means of all windows, [count - size + 1, count]."""
    starts = torch.arange(count - len(weights) + 1, device=weights.device)[:, None]
    places = starts + torch.arange(len(weights), device=weights.device)
    return weights.new_zeros(len(starts), count).scatter_(1, places, weights.expand_as(places))
