"""What tests share. A test file imports from here, never from another test file.

    inputs             random q, k and v on the CPU
    oracle             layouts, masks and attention from their definitions, in float64
    accuracy           the error of a result, and what a dtype rounds away
    gpu                the same for the tests of a GPU, computed on it, and the calls that they make
    planned            a call as the library plans it, for tests of single stages
    fuzz               how many random examples to try
    hopper_emulator    runs the kernel of Hopper GPUs on a CPU, from its source
    memory             what a call allocates at its peak, in a process of its own
    tiny_models        diffusers' transformers with random weights, one a family
    offline_pipelines  whole diffusers pipelines with random weights

and programs, which tests start and people may:

    targets            compiles the kernels for GPUs that are not here
    variants           counts for how many sizes kernels would be compiled again
    repeats            compares what is launched from a record with what is launched anew
    sanitize           small calls through every kernel, for compute-sanitizer
    context_parallel   one of several processes that run a model together
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def needs_diffusers(*others):
    """-> diffusers. Without it, or one of `others`, the test is skipped; at the top of a file, all of its tests are."""
    for name in others:
        pytest.importorskip(name)
    return pytest.importorskip("diffusers", minversion="0.42.1")  # as in pyproject.toml
