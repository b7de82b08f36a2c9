"""Options stand in one place, and every door has them."""

import dataclasses
import inspect
from typing import get_type_hints

import pytest
import torch

from helpers.inputs import qkv
from rainfusion import Method, explain, predict_mask, sparse_attention
from rainfusion.options import OPTION_NAMES, MethodOptions


def test_editors_know_the_fields():
    assert tuple(get_type_hints(MethodOptions)) == OPTION_NAMES


def test_the_ops_have_the_fields():
    for name in ("sparse_attention", "predict_mask"):
        schema = getattr(torch.ops.rainfusion, name).default._schema
        arguments = [argument.name for argument in schema.arguments]
        assert [argument for argument in arguments if argument in OPTION_NAMES] == list(OPTION_NAMES)


def test_the_flat_signature_has_the_defaults_of_the_fields():
    """It is that of the published function: an option that came later may be a field of `Method` alone."""
    defaults = {field.name: field.default for field in dataclasses.fields(Method)}
    parameters = inspect.signature(sparse_attention).parameters
    flat = {name: parameters[name].default for name in defaults if name in parameters}
    assert flat.items() <= defaults.items() and len(flat) >= 14


def test_every_field_is_documented():
    assert all(f"        {name}: " in Method.__doc__ for name in OPTION_NAMES)


def test_a_method_is_checked_frozen_and_plain():
    method = Method(sparse_type="rf_v3", sparsity=[0.5, 0.7], token_order=[2, 8, 8], block_size=[128, 64])
    assert method.sparse_type == "rf_v2" and method.sparsity == (0.5, 0.7)
    assert method.token_order == (2, 8, 8) and method.block_size == (128, 64)
    assert hash(method) == hash(dataclasses.replace(method))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.sparsity = 0.1
    with pytest.raises(ValueError, match="predictor must be one of 'mean', 'submeans', 'spread', got 'median'"):
        dataclasses.replace(method, predictor="median")


def test_recommended_values_and_their_changes():
    method = Method.recommended()
    assert (method.sparse_type, method.predictor, method.first_frame) == ("rf_v2", "spread", "free")
    assert method.compensate and method.sparsity is None and method.block_size == (128, 32)
    assert (method.for_frames(1).sparsity, method.for_frames(2).sparsity) == (0.6, 0.85)
    assert [Method.recommended(block_size=size).for_frames(2).sparsity for size in (128, (128, 64))] == [0.8, 0.8]
    adaptive = Method.recommended(sparse_type="ada_bsa")
    assert not adaptive.compensate and adaptive.block_size == 128
    assert Method.recommended(sparsity=0.3).for_frames(5).sparsity == 0.3
    assert Method.recommended(target_error=0.1).for_frames(5).sparsity == 0.0


def test_a_method_is_the_same_as_its_options():
    q, k, v = qkv(1, 2, 700, 16)
    method = Method.recommended(sparsity=0.6)
    names = inspect.signature(sparse_attention).parameters.keys() & set(OPTION_NAMES)
    options = {name: getattr(method, name) for name in names}
    grid = dict(latent_shape_q=[7, 10, 10], backend="portable")
    assert torch.equal(sparse_attention(q, k, v, method=method, **grid), sparse_attention(q, k, v, **options, **grid))
    mask = predict_mask(q, k, method=method, **grid)
    options.pop("target_error")
    assert torch.equal(mask.indices, predict_mask(q, k, **options, **grid).indices)
    assert explain(q, k, v, method=method, **grid).startswith("runs with 'portable'")


def test_sparsity_by_task():
    q, k, _ = qkv(1, 1, 1280, 16)
    method = dataclasses.replace(Method.recommended(), compensate=False, block_size=128)
    video = predict_mask(q, k, method=method, latent_shape_q=[5, 16, 16])
    image = predict_mask(q, k, method=method, latent_shape_q=[1, 32, 40])
    assert (video.counts.unique().tolist(), image.counts.unique().tolist()) == ([2], [4])


def test_a_method_and_options_are_one_too_many():
    q, k, v = qkv(1, 2, 200, 16)
    with pytest.raises(ValueError, match=r"leave sparsity out, got 0\.5"):
        sparse_attention(q, k, v, method=Method.recommended(), sparsity=0.5)
    with pytest.raises(TypeError, match=r"method must be a rainfusion.Method, got 'rf_v2' \(str\)"):
        sparse_attention(q, k, v, method="rf_v2")


def test_a_tensor_of_sparsities_is_read_at_every_call():
    q, k, _ = qkv(1, 2, 1280, 16)
    shares = torch.tensor([0.5, 0.5])
    before = predict_mask(q, k, sparse_type="rf_v2", sparsity=shares)
    shares.fill_(0.9)
    after = predict_mask(q, k, sparse_type="rf_v2", sparsity=shares)
    assert (before.counts == 5).all() and (after.counts == 1).all()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("sparsity", 1, True),
        ("sparsity", [1.0, 0.0], [True, False]),
        ("token_order", (2, 8, 8), (2.0, 8, 8)),
        ("block_size", (128, 64), (128.0, 64)),
    ],
)
def test_what_equals_a_right_value_is_refused_also_after_it(name, right, wrong):
    q, k, v = qkv(1, 2, 200, 16)
    call = dict(sparse_type="rf_v2", sparsity=0.5)
    sparse_attention(q, k, v, **{**call, name: right})
    with pytest.raises(TypeError, match=rf"{name}.* must be an? (number|int), got"):
        sparse_attention(q, k, v, **{**call, name: wrong})
