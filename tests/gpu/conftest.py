"""Most tests of a GPU run for `hopper` and for `triton`.

What a backend cannot do must be an error that says so (`gpu.attend`); what it may not refuse is in `gpu.must_run`.
"""

import pytest

from helpers.gpu import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param
