"""One thread, diffusers' active backend put back, and a look at sparse calls."""

import sys

import pytest

from rainfusion.integrations import decider


@pytest.fixture(autouse=True)
def everything_in_one_thread(one_thread):
    pass


@pytest.fixture(autouse=True)
def native_backend():
    """`set_attention_backend` of a model sets that of the process, too."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    active = dispatch and dispatch._AttentionBackendRegistry._active_backend
    yield
    if dispatch:
        dispatch._AttentionBackendRegistry.set_active_backend(active)


@pytest.fixture
def placed(monkeypatch):
    """Where each sparse call had its clips."""
    seen = []
    run = decider.run

    def recorded(tally, layer, inputs, way, step=None):
        seen.append(way.placed)
        return run(tally, layer, inputs, way, step)

    monkeypatch.setattr(decider, "run", recorded)
    return seen
