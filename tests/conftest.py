"""Fresh memory is filled with NaN (floats) or huge numbers (ints), so that a read before a write shows.

Without a GPU the Triton kernels run under Triton's interpreter, which has to be known before Triton is imported.
"""

import os

import hypothesis
import pytest
import torch

from helpers import fuzz
from rainfusion import planning
from rainfusion.backends import crossover

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("rainfusion", deadline=None, derandomize=fuzz.FACTOR == 1, print_blob=True)
hypothesis.settings.load_profile("rainfusion")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch fills what `torch.empty` returns only in deterministic mode."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread():
    """Tiny models are slower with several, and much slower where others want the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_calls_stay_sparse(request, monkeypatch):
    """Dense attention is faster for calls as small as those of most tests, and `auto` would take it.

    Tests marked `crossover` have the library as it is.
    """
    if "crossover" not in request.keywords and not torch.cuda.is_available():
        monkeypatch.setattr(crossover, "why_dense", lambda *_: None)
        planning.plan.cache_clear()
    yield
    planning.plan.cache_clear()
