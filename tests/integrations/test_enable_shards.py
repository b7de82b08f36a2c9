"""Shards of a sequence in one process: how they are cut, and that one shard is the whole. Two processes have a test of
their own, tests/distributed/test_context_parallel.py."""

from types import SimpleNamespace

import pytest
import torch

from rainfusion.integrations.decider import Decider, Dense
from rainfusion.integrations.diffusers import shards
from rainfusion.integrations.diffusers.models import MODELS
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.settings import Settings

WAN, FLUX, HUNYUAN = (
    MODELS[name] for name in ("WanTransformer3DModel", "FluxTransformer2DModel", "HunyuanVideoTransformer3DModel")
)


def config(ulysses=1, ring=1):
    return SimpleNamespace(
        ulysses_degree=ulysses, ring_degree=ring, ulysses_anything=False, ring_anything=False, _ring_mesh=None
    )


def test_text_and_picture_are_cut_on_their_own():
    scene = Scene(((1, 3, 3),), before=5)
    streams = shards._expected(scene, FLUX.streams_apart, 2)
    assert streams.sizes == (3 + 5, 2 + 4) and streams.length == 14
    # shards: text 0 1 2, picture 0 1 2 3 4 | text 3 4, picture 5 6 7 8
    assert streams.order.tolist() == [0, 1, 2, 8, 9, 3, 4, 5, 6, 7, 10, 11, 12, 13]
    assert shards._expected(scene, True, 2) is streams  # found once


def test_a_sequence_of_clips_alone_is_cut_as_one():
    scene = Scene(((3, 3, 3),), alone=True)
    assert shards._expected(scene, False, 2) == ((14, 13), None)
    assert shards._streams(9, scene, WAN, config(ring=3)) == ((9, 9, 9), None)
    with pytest.raises(Dense, match=r"shards of \[10, 10, 10\] tokens are not \[9, 9, 9\]"):
        shards._streams(10, scene, WAN, config(ring=3))
    assert shards._streams(10, Scene(((3, 3, 3),)), HUNYUAN, config(ulysses=3)) == ((10, 10, 10), None)


def test_one_shard_is_the_whole():
    settings = Settings.check(None, dict(sparsity=0.5), min_tokens=0)
    scene = Scene(((2, 16, 24),), alone=True)
    one, other = Decider(settings, ["a"]), Decider(settings, ["a"])
    q, k, v = torch.randn(3, 2, 2, 768, 16).unbind()
    one.begin(scene)
    other.begin(scene)
    out = shards.attend(one, 0, WAN, q, k, v, None, None, config())
    torch.testing.assert_close(out, other.attend(0, q, k, v, None, pytest.fail))
    assert one.stats().sparse_calls == 1 and one.stats().layouts == other.stats().layouts


def test_what_shards_cannot_do_is_dense():
    scene, tensors = Scene(((2, 16, 24),), alone=True), torch.randn(3, 1, 3, 384, 16).unbind()
    cases = [
        (dict(sparsity=0.5), config(ulysses=2), "3 heads cannot be shared out to 2 processes"),
        (dict(target_error=0.1), config(ring=2), "target_error needs all queries"),
    ]
    for changes, parallel, reason in cases:
        decider = Decider(Settings.check(None, changes, min_tokens=0), ["a"])
        decider.begin(scene)
        with pytest.raises(Dense, match=reason):
            shards.attend(decider, 0, WAN, *tensors, None, None, parallel)
    decider = Decider(Settings.check(min_tokens=0), ["a"], observer=pytest.fail)
    decider.begin(scene)
    with pytest.raises(Dense, match="calibration needs the whole sequence"):
        shards.attend(decider, 0, WAN, *tensors, None, None, config(ring=2))
