"""Every family of models: found grids, calls as one would write them, masks, what stays dense."""

import threading

import pytest
import torch

import rainfusion
from helpers import tiny_models
from helpers.enabling import attention_dispatch, forward, snapshot, wide_wan
from rainfusion.integrations import decider
from rainfusion.integrations.diffusers import models


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_every_family_is_sparse_where_its_picture_is(name, placed):
    model, inputs, expected = tiny_models.ALL[name]()
    before, dense = snapshot(model), forward(model, inputs)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8, block_size=128)
    sparse = forward(model, inputs)
    stats = handle.stats()
    if name in ("chroma", "skyreels_v2_causal"):  # their masks are of pairs
        assert stats.sparse_calls == 0 and stats.dense_calls == expected.calls
        assert list(stats.reasons) == ["the model gave a mask for pairs of tokens, not for keys"]
        assert torch.equal(sparse, dense)
    else:
        assert (stats.sparse_calls, stats.dense_calls, stats.reasons) == (expected.calls, 0, {})
        found = {
            (clips.grids[0], clips.before, clips.after + sum(t * h * w for t, h, w in clips.grids[1:]))
            for clips in placed
        }
        assert found == {(expected.grid, *ends) for ends in zip(expected.prefix, expected.suffix, strict=True)}
        # one block, or two: nothing to skip, and so the same result as dense attention but for rounding
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-4)
    rainfusion.disable(model)
    assert snapshot(model) == before
    assert torch.equal(forward(model, inputs), dense)


@pytest.mark.parametrize("name", tiny_models.DENSE)
def test_tokens_in_another_order_stay_dense(name):
    model, inputs, expected = tiny_models.DENSE[name]()
    dense = forward(model, inputs)
    handle = rainfusion.enable(model, min_tokens=0, sparsity=0.8)
    assert torch.equal(forward(model, inputs), dense)
    stats = handle.stats()
    assert stats.sparse_calls == 0 and stats.dense_calls == expected.calls
    (reason,) = stats.reasons
    assert reason.startswith("no grid: ")


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_sparsity_0_is_dense_to_the_last_bit(name):
    model, inputs, _ = tiny_models.ALL[name]()
    dense = forward(model, inputs)
    rainfusion.enable(model, min_tokens=0, sparsity=0.0)
    assert torch.equal(forward(model, inputs), dense)


def test_a_call_is_the_sparse_attention_that_one_would_write(monkeypatch):
    model, inputs, expected = wide_wan()
    handle = rainfusion.enable(model, sparsity=0.6, min_tokens=0)
    sparse = forward(model, inputs)
    density = handle.stats().density
    rainfusion.disable(model)
    masks = []

    def by_hand(query, key, value, **_):
        if query.shape[1] != key.shape[1]:
            return attention_dispatch.dispatch_attention_fn(query, key, value)
        out, mask = rainfusion.sparse_attention(
            query,
            key,
            value,
            input_layout="BSND",
            sparse_type="rf_v2",
            sparsity=0.6,
            first_frame="free",
            predictor="spread",
            compensate=True,
            block_size=(128, 32),
            latent_shape_q=list(expected.grid),
            return_mask=True,
        )
        masks.append(mask)
        return out

    monkeypatch.setattr("diffusers.models.transformers.transformer_wan.dispatch_attention_fn", by_hand)
    assert torch.equal(forward(model, inputs), sparse)
    assert list(density.values()) == pytest.approx([mask.density() for mask in masks])
    assert all(0.4 < share < 0.8 for share in density.values())


def test_key_masks_are_honoured():
    """Padding text must not change a token, whatever it holds."""
    model, inputs, _ = tiny_models.ALL["hunyuan"]()
    rainfusion.enable(model, min_tokens=0)
    first = forward(model, inputs)
    inputs["encoder_hidden_states"][1, 9:] = 7.0
    second = forward(model, inputs)
    assert torch.equal(first[1], second[1])
    inputs["encoder_attention_mask"][1, 9:] = 1
    assert not torch.equal(forward(model, inputs)[1], second[1])


def test_padding_queries_give_zero():
    """HunyuanVideo 1.5 masks pairs: its padding sees nothing, and dense attention says 0 for it."""
    keys = torch.tensor([[True, True, False, False]])
    pairs = (keys[:, None, :] & keys[:, :, None])[:, None]
    x = torch.zeros(1, 2, 4, 8)
    assert torch.equal(decider.plain_key_mask(pairs, x, x, True), keys)
    with pytest.raises(decider.Dense, match="pairs of tokens"):
        decider.plain_key_mask(pairs, x, x, False)
    model, inputs, _ = tiny_models.ALL["hunyuan15"]()
    outs = []
    original = decider.run
    rainfusion.enable(model, min_tokens=0)
    module = model.transformer_blocks[0].attn
    module.register_forward_hook(lambda _, args, out: outs.append(out))
    assert forward(model, inputs).isfinite().all() and decider.run is original
    assert all(part.isfinite().all() for part in outs[0])


def test_short_sequences_stay_dense():
    model, inputs, _ = wide_wan()
    for kwargs, sparse in ((dict(), 0), (dict(min_tokens=1537), 0), (dict(min_tokens=1536), 2)):
        with rainfusion.enabled(model, **kwargs) as handle:
            forward(model, inputs)
        stats = handle.stats()
        assert stats.sparse_calls == sparse
        assert all("min_tokens" in reason for reason in stats.reasons)


def test_ada_bsa():
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    with rainfusion.enabled(model, sparse_type="ada_bsa", cdf_threshold=0.5, min_tokens=0) as handle:
        sparse = forward(model, inputs)
    assert handle.stats().sparse_calls == 2 and handle.stats().mean_density < 0.9
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5


def test_predictor_and_compensation_reach_the_call():
    """Which is better is a question of the data: here it is noise."""
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    errors = []
    given = [dict(predictor="mean"), dict(compensate=False), dict(first_frame="protected"), dict(sparse_type="ada_bsa")]
    for kwargs in (dict(), *given, dict(sparse_type="ada_bsa", compensate=True)):
        with rainfusion.enabled(model, min_tokens=0, sparsity=0.8, **kwargs) as handle:
            errors.append(float((forward(model, inputs) - dense).norm()))
        assert handle.stats().dense_calls == 0
    assert len(set(errors)) == 6
    assert errors[0] == float((_enabled(model, inputs, predictor="spread", compensate=True) - dense).norm())
    assert errors[4] == float((_enabled(model, inputs, sparse_type="ada_bsa", compensate=False) - dense).norm())


def _enabled(model, inputs, **kwargs):
    with rainfusion.enabled(model, **{"min_tokens": 0, "sparsity": 0.8, **kwargs}):
        return forward(model, inputs)


def test_gradients_stay_possible():
    model, inputs, _ = wide_wan()
    handle = rainfusion.enable(model, min_tokens=0)
    model(**inputs, return_dict=False)[0].sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad is not None
    assert any("gradients" in reason for reason in handle.stats().reasons)


def test_on_unsupported_error():
    model, inputs, _ = tiny_models.ALL["chroma"]()
    rainfusion.enable(model, min_tokens=0, on_unsupported="error")
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn cannot be sparse: the model gave a mask"):
        forward(model, inputs)
    rainfusion.disable(model)
    forward(model, inputs)


def test_a_precision_that_cannot_run_here_is_said():
    model, inputs, _ = wide_wan()
    dense = forward(model, inputs)
    with pytest.warns(UserWarning, match="attention will be dense, for lack of kernels: .*fp8"):
        rainfusion.enable(model, precision="fp8")
    rainfusion.disable(model)
    with rainfusion.enabled(model, min_tokens=0, precision="fp8") as handle:
        assert torch.equal(forward(model, inputs), dense)
    (reason,) = handle.stats().reasons
    assert "precision='fp8' cannot run this call" in reason


def test_ids_are_read_in_any_thread():
    rule = models.MODELS["FluxTransformer2DModel"].grid
    failures = []

    def read():
        try:
            for _ in range(300):
                ids = tiny_models.image_ids(4, 6)
                assert rule({"img_ids": ids}, {}) == [(1, 4, 6)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_ids_that_are_no_rectangle_or_change():

    rule = models.MODELS["FluxTransformer2DModel"].grid
    ids = torch.cat([tiny_models.image_ids(4, 6), tiny_models.image_ids(4, 3)])
    with pytest.raises(rainfusion.NoGrid, match="whole pictures"):
        rule({"img_ids": ids}, {})
    ids = tiny_models.image_ids(4, 6)
    assert rule({"img_ids": ids}, {}) == [(1, 4, 6)]
    ids.copy_(tiny_models.image_ids(6, 4))
    assert rule({"img_ids": ids}, {}) == [(1, 6, 4)]


def test_a_method_and_changes_to_it():
    model, inputs, _ = wide_wan()
    method = rainfusion.Method.recommended(sparsity=0.5, predictor="mean")
    with rainfusion.enabled(model, method, min_tokens=0) as handle:
        one = forward(model, inputs)
    assert handle.settings.method == method
    with rainfusion.enabled(model, method, min_tokens=0, predictor="spread", compensate=None) as handle:
        other = forward(model, inputs)
    assert handle.settings.method == rainfusion.Method.recommended(sparsity=0.5)
    assert torch.equal(one, _enabled(model, inputs, sparsity=0.5, predictor="mean"))
    assert torch.equal(other, _enabled(model, inputs, sparsity=0.5)) and not torch.equal(one, other)
