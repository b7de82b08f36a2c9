"""The decider alone, with a host that is not diffusers: what is sparse, what is dense and why, what is counted."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from rainfusion.integrations.decider import Decider
from rainfusion.integrations.scenes import NoGrid, Scene
from rainfusion.integrations.settings import Settings

GRID = (4, 16, 24)
LENGTH = 4 * 16 * 24
LAYERS = ("blocks.0", "blocks.1")


def decider(prefix="", **settings):
    names = ("start_step", "end_step", "skip_layers", "min_tokens", "on_unsupported", "profile", "backend", "schedule")
    chosen = {name: settings.pop(name) for name in names if name in settings}
    return Decider(Settings.check(None, settings, **{"min_tokens": 0, **chosen}), LAYERS, prefix)


def qkv(length=LENGTH, heads=2, batch=1):
    return torch.randn(3, batch, heads, length, 16).unbind()


class Calls:
    """A host's dense attention, which remembers that it was called."""

    def __init__(self, q, k, v):
        self.tensors, self.count = (q, k, v), 0

    def __call__(self):
        self.count += 1
        return F.scaled_dot_product_attention(*self.tensors)


def test_a_call_is_sparse_attention_on_the_scene():
    one, (q, k, v) = decider(sparsity=0.5), qkv(LENGTH + 30)
    one.begin(Scene((GRID,), before=30))
    out = one.attend(1, q, k, v, None, pytest.fail)
    method = rainfusion.Method.recommended(sparsity=0.5)
    expected = rainfusion.sparse_attention(q, k, v, txt_len=30, latent_shape_q=GRID, method=method)
    assert torch.equal(out, expected)
    stats = one.stats()
    assert (stats.sparse_calls, stats.dense_calls) == (1, 0)
    assert stats.calls == {"blocks.0": (0, 0), "blocks.1": (1, 0)}
    assert stats.layouts == {"grid 4x16x24, 30 tokens before": 1} and 0.4 < stats.density["blocks.1"] < 0.8


def test_a_shape_is_planned_once(monkeypatch):
    from rainfusion import planning

    asked = []
    monkeypatch.setattr(
        planning, "ask", lambda *args, ask=planning.ask, **kwargs: asked.append(1) or ask(*args, **kwargs)
    )
    one = decider(sparsity=0.5)
    for _ in range(3):
        one.begin(Scene((GRID,)))
        for layer in (0, 1):
            one.attend(layer, *qkv(), None, pytest.fail)
    assert len(asked) == 1
    one.attend(0, *qkv(batch=2), None, pytest.fail)
    one.attend(0, *qkv(), torch.ones(1, LENGTH, dtype=torch.bool), pytest.fail)
    one.attend(0, *qkv(), None, pytest.fail, scale=0.3)
    assert len(asked) == 4 and one.stats().sparse_calls == 9


def test_tokens_around_the_clips_and_key_masks():
    one, (q, k, v) = decider(sparsity=0.5), qkv(LENGTH + 40)
    one.begin(Scene((GRID,), before=10))
    keys = torch.ones(1, 1, 1, LENGTH + 40, dtype=torch.bool)
    keys[..., -9:] = False
    out = one.attend(0, q, k, v, keys, pytest.fail)
    v[:, :, -9:] = 7.0
    assert torch.equal(one.attend(0, q, k, v, keys, pytest.fail), out)
    assert one.stats().layouts == {"grid 4x16x24, 10 tokens before, 30 tokens after": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q, k, v[..., :8]), "v must have k's shape"),
        (lambda q, k, v: (q, k, v.expand(2, -1, -1, -1)), "v must have k's shape"),
        (lambda q, k, v: (q, k.repeat(1, 3, 1, 1)[:, :3], v.repeat(1, 3, 1, 1)[:, :3]), "q's heads must be a multiple"),
        (lambda q, k, v: (q, k.bfloat16(), v), "k must have q's dtype float32, got bfloat16"),
        (lambda q, k, v: (q[0], k[0], v[0]), "q must have 4 dimensions"),
        (lambda q, k, v: (q, k[:, :, :-1], v[:, :, :-1]), "q and k have different lengths"),
        (lambda q, k, v: (q[:, :, :-1], k[:, :, :-1], v[:, :, :-1]), "1535 tokens do not hold a grid of 4x16x24"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "gradients are wanted"),
    ],
)
def test_tensors_that_do_not_fit_are_dense_and_counted(change, reason):
    tensors, result = change(*qkv()), torch.zeros(1)
    one, strict = decider(), decider(on_unsupported="error")
    one.begin(Scene((GRID,), alone=True))
    strict.begin(Scene((GRID,), alone=True))
    assert one.attend(0, *tensors, None, lambda: result) is result
    ((found, count),) = one.stats().reasons.items()
    assert reason in found and count == 1 and one.stats().sparse_calls == 0
    with pytest.raises(ValueError, match=r"attention of blocks\.0 cannot be sparse: "):
        strict.attend(0, *tensors, None, lambda: result)


def test_masks_that_are_not_of_the_call_s_keys_are_dense():
    one = decider()
    one.begin(Scene((GRID,)))
    tensors = qkv()
    dense = Calls(*tensors)
    one.attend(0, *tensors, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), dense)
    one.attend(0, *tensors, object(), dense)
    one.attend(0, *tensors, torch.ones(1, 1, 1, 2 * LENGTH, dtype=torch.bool), dense)
    one.attend(0, *tensors, torch.ones(1, 1, 2 * LENGTH, dtype=torch.bool), dense)
    assert dense.count == 4
    assert one.stats().reasons == {
        "the model gave a mask for pairs of tokens, not for keys": 1,
        f"the model gave a mask for {2 * LENGTH} keys, and the call has {LENGTH}": 2,
        "the model gave a object of its own as a mask": 1,
    }


def test_what_the_user_wants_dense():
    one = decider(start_step=1, end_step=0.25, skip_layers=1)
    dense = Calls(*qkv())
    for step in range(4):
        one.begin(Scene((GRID,)), step=step, steps=4)
        for layer in (0, 1):
            one.attend(layer, *dense.tensors, None, dense)
    assert one.stats().sparse_calls == 2
    assert one.stats().reasons == {
        "the layer is in skip_layers": 4,
        "the first steps are dense (start_step)": 1,
        "the last steps are dense (end_step)": 1,
    }


def test_an_unknown_step_is_said():
    one = decider(start_step=1)
    dense = Calls(*qkv())
    one.begin(Scene((GRID,)))
    one.attend(0, *dense.tensors, None, dense)
    assert "which step it is is not known" in next(iter(one.stats().reasons))
    assert one.needs_step and not decider(schedule="constant").needs_step


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        (dict(), None),
        (dict(training=True), "the model is in training mode"),
        (dict(scene=NoGrid("no latents")), "no grid: no latents"),
    ],
)
def test_a_forward_that_cannot_be_sparse(kwargs, reason):
    one = decider(sparsity=0.5)
    dense = Calls(*qkv())
    one.begin(**{"scene": Scene((GRID,)), **kwargs})
    one.attend(0, *dense.tensors, None, dense)
    assert dense.count == (reason is not None)
    assert all(found.startswith(reason) for found in one.stats().reasons)


def test_sparsity_0_is_the_hosts_own_attention():
    one = decider(sparsity=0.0)
    dense = Calls(*qkv())
    one.begin(Scene((GRID,)))
    one.attend(0, *dense.tensors, None, dense)
    assert dense.count == 1 and one.stats().reasons == {"sparsity is 0": 1}


def test_special_wishes_are_dense():
    one = decider()
    dense = Calls(*qkv())
    one.begin(Scene((GRID,)))
    one.attend(0, *dense.tensors, None, dense, special="dropout is wanted")
    assert one.stats().reasons == {"dropout is wanted": 1}


def test_short_sequences_and_the_crossover():
    one = decider(min_tokens=None)
    dense = Calls(*qkv())
    one.begin(Scene((GRID,)))
    one.attend(0, *dense.tensors, None, dense)
    assert one.stats().reasons == {"fewer than 2048 tokens (min_tokens)": 1}


def test_layers_that_were_entered_and_did_not_arrive():
    one = decider(skip_layers="1")
    one.begin(Scene((GRID,)))
    one.enter(0)
    one.enter(1)
    one.end(lambda layer: f"layer {layer} has a way of its own")
    assert one.stats().reasons == {"layer 0 has a way of its own": 1, "the layer is in skip_layers": 1}
    one.begin(Scene((GRID,)))
    one.enter(0)
    one.attend(0, *qkv(), None, pytest.fail)
    one.end(pytest.fail)
    assert one.stats().sparse_calls == 1


def test_a_reason_is_said_once_and_holds_no_tensor(caplog):
    import gc
    import weakref

    one = decider()
    one.begin(Scene(((1, 2, 3),), alone=True))
    alive = []
    for _ in range(3):
        q, k, v = qkv()
        alive.append(weakref.ref(q))
        one.attend(0, q, k, v, None, lambda: torch.zeros(1))
        del q, k, v
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert len(caplog.records) == 1 and "do not hold a grid of 1x2x3" in caplog.text


def test_profiles_are_by_layer_with_the_models_name():
    profile = rainfusion.Profile({f"expert.{name}": (0.2 + 0.5 * i, 0.2) for i, name in enumerate(LAYERS)}, 0.3, {})
    one = decider("expert", profile=profile)
    one.begin(Scene((GRID,)))
    for layer in (0, 1):
        one.attend(layer, *qkv(), None, pytest.fail)
    density = one.stats().density
    assert density["expert.blocks.0"] > density["expert.blocks.1"]
    with pytest.raises(ValueError, match=r"has no layer 'blocks\.0'"):
        decider(profile=profile)


def test_one_call_is_not_calls():
    one = decider(skip_layers=1)
    one.begin(Scene((GRID,)))
    one.attend(0, *qkv(), None, pytest.fail)
    one.attend(1, *qkv(), None, lambda: torch.zeros(1))
    assert "dense: 1 call: the layer" in str(one.stats()) and "sparse: 1 call: grid" in str(one.stats())
    one.reset()
    assert one.stats().sparse_calls == one.stats().dense_calls == 0


def test_layers_are_checked_without_counting_them_out():
    with pytest.raises(ValueError, match=r"0 to 1; got 2, 3, 4, 5, 6, 7, 8, 9 and 1999999\d+ more") as error:
        decider(skip_layers="0-200000000000")
    assert len(str(error.value)) < 250
    with pytest.raises(ValueError, match="skip_layers as text must be") as error:
        decider(skip_layers="1," + "x" * 10**6)
    assert len(str(error.value)) < 250


def test_no_host_is_imported():
    program = """
        import sys, torch
        import rainfusion
        from rainfusion.integrations.decider import Decider
        from rainfusion.integrations.scenes import Scene
        from rainfusion.integrations.settings import Settings
        decider = Decider(Settings.check(min_tokens=0), ["a"])
        decider.begin(Scene(((2, 16, 16),)))
        decider.attend(0, *torch.randn(3, 1, 1, 512, 16).unbind(), None, None)
        assert decider.stats().sparse_calls == 1
        hosts = [name for name in sys.modules if name.split(".")[0] in ("diffusers", "transformers")]
        assert not hosts, hosts
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_clips_with_tokens_between_them():
    scene = Scene.of_clips([(5, 1, 16, 24), (5 + 384 + 7, 2, 16, 24)])
    placed = scene.place(5 + 384 + 7 + 768 + 9)
    assert str(placed) == "grid 1x16x24 and 2x16x24, 5 tokens before, 7 tokens between, 9 tokens after"
    assert placed.geometry.clips == ((5, 1, 16, 24), (396, 2, 16, 24))
    assert scene.place(5 + 384 + 7 + 767) is None
    one, tensors = decider(sparsity=0.5), qkv(1173)
    one.begin(scene)
    out = one.attend(0, *tensors, None, pytest.fail)
    spans = [dict(start=5, latent_shape=(1, 16, 24)), dict(start=396, latent_shape=(2, 16, 24))]
    method = rainfusion.Method.recommended(sparsity=0.5)
    assert torch.equal(out, rainfusion.sparse_attention(*tensors, video_spans=spans, method=method))
    touching = Scene.of_clips([(0, 1, 2, 3), (6, 1, 2, 3)])
    assert touching == Scene(((1, 2, 3), (1, 2, 3))) and touching.place(12).geometry.clips[1][0] == 6
