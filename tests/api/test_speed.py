"""On a CPU, sparse attention is faster than dense. Ratios in one run; machines are noisy, so the best of a few."""

import pytest
import torch

from rainfusion.bench import attention as bench
from rainfusion.bench.shapes import SHAPES


@pytest.fixture(autouse=True)
def plain_memory():
    torch.use_deterministic_algorithms(False)  # filling fresh memory costs time


@pytest.mark.slow
def test_a_fifth_of_the_blocks_takes_a_third_of_the_time():
    """1x4x8192x128 fp32, nothing protected, sparsity 0.8, the whole call against scaled_dot_product_attention."""
    best = max(bench.measure(SHAPES["tokens-8k"], repeats=5).speedup for _ in range(3))
    assert best >= 3.0


@pytest.mark.slow
def test_video_with_its_first_frame_protected_is_faster():
    best = max(bench.measure(SHAPES["wan-480p-17f"], repeats=3).speedup for _ in range(3))
    assert best >= 1.1
