"""Models of one's own: `register_model`."""

import functools

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from helpers import needs_diffusers
from rainfusion.integrations.diffusers import models

needs_diffusers()


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))


class OwnAttention(torch.nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class OwnModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(OwnAttention() for _ in range(3))

    def forward(self, tokens, size):
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return tokens


@pytest.mark.usefixtures("rows")
def test_register_model():
    rainfusion.register_model(
        OwnModel,
        attention=["blocks.*"],
        grid=lambda arguments, config: [arguments["size"]],
        others="after",
        call="sdpa",
    )
    model, tokens = OwnModel().eval(), torch.randn(1, 3 * 16 * 24 + 30, 16)
    with torch.no_grad():
        dense = model(tokens, (3, 16, 24))
        with rainfusion.enabled(model, sparsity=0.5, min_tokens=0) as handle:
            sparse = model(tokens, size=(3, 16, 24))
    assert handle.stats().layouts == {"grid 3x16x24, 30 tokens after": 3}
    assert handle.layers == ["blocks.0", "blocks.1", "blocks.2"]
    assert 0 < (sparse - dense).norm() / dense.norm() < 0.5
    rainfusion.register_model("OwnModel", attention="nothing", grid=lambda *_: [(1, 1, 1)])
    with pytest.raises(ValueError, match="has no modules that match nothing"):
        rainfusion.enable(model)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(attention=[]), TypeError, "attention must be names"),
        (dict(grid=3), TypeError, "grid must be a function"),
        (dict(others=None), TypeError, "others must be"),
        (dict(model=3), TypeError, "model must be a class"),
        (dict(call="x"), ValueError, "call must be one of"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_wrong_rows(kwargs, error, message):
    with pytest.raises(error, match=message):
        rainfusion.register_model(**{**dict(model="X", attention=["a"], grid=lambda *_: [(1, 1, 1)]), **kwargs})


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("found", [(2, 4, 6), None, [(2, 4)], [(2.5, 4, 6)], [(0, 4, 6)]])
def test_a_grid_function_that_returns_something_else(found):
    rainfusion.register_model(OwnModel, attention="blocks.*", grid=lambda *_: found, call="sdpa", unless="nothing")
    model = OwnModel().eval()
    rainfusion.enable(model)
    with torch.no_grad(), pytest.raises(ValueError, match=r"grid function must return \[\(t, h, w\), \.\.\.\], got"):
        model(torch.randn(1, 48, 16), (2, 4, 6))


@pytest.mark.usefixtures("rows")
def test_unless_takes_one_name():
    rainfusion.register_model(OwnModel, attention="blocks.*", grid=lambda *_: [(2, 4, 6)], call="sdpa", unless="size")
    model = OwnModel().eval()
    handle = rainfusion.enable(model, min_tokens=0)
    with torch.no_grad():
        model(torch.randn(1, 48, 16), (2, 4, 6))
    assert list(handle.stats().reasons) == ["no grid: with size the tokens lie in another order"]


@pytest.mark.usefixtures("rows")
def test_a_forward_that_somebody_puts_back_is_scoped_again():
    """A module without a processor has our scope in its `forward`: others wrap it, and put back what they found."""
    rainfusion.register_model(OwnModel, attention=["blocks.*"], grid=lambda given, _: [given["size"]], call="sdpa")
    model, tokens = OwnModel().eval(), torch.randn(1, 2 * 16 * 24, 16)
    attention = model.blocks[0]
    found = attention.forward
    attention.forward = functools.wraps(found)(lambda *args: found(*args))
    handle = rainfusion.enable(model, min_tokens=0)
    with torch.no_grad():
        model(tokens, (2, 16, 24))
        attention.forward = found  # as a cache does that is taken off
        model(tokens, (2, 16, 24))
        outer = attention.forward
        attention.forward = functools.wraps(outer)(lambda *args: outer(*args))
        wrapped = attention.forward
        model(tokens, (2, 16, 24))
    assert attention.forward is wrapped  # it leads to us, and stays
    assert handle.stats().calls["blocks.0"] == (3, 0)
    attention.forward = outer
    rainfusion.disable(model)
    assert attention.forward == found


@pytest.mark.usefixtures("rows")
def test_hooks_of_diffusers_around_a_module_without_a_processor():
    from diffusers.hooks import HookRegistry, ModelHook

    rainfusion.register_model(OwnModel, attention=["blocks.*"], grid=lambda given, _: [given["size"]], call="sdpa")
    model = OwnModel().eval()
    rainfusion.enable(model, min_tokens=0)
    registry = HookRegistry.check_if_exists_or_initialize(model.blocks[0])
    registry.register_hook(ModelHook(), "other")
    rainfusion.disable(model)
    registry.remove_hook("other")
    assert model.blocks[0].forward.__func__ is OwnAttention.forward


@pytest.mark.usefixtures("rows")
def test_behind_is_an_old_word_for_after():
    with pytest.warns(
        DeprecationWarning, match="others='behind' of register_model is deprecated .* use others='after'"
    ):
        rainfusion.register_model(OwnModel, attention="blocks.*", grid=lambda *_: [(2, 4, 6)], others="behind")
    assert models.MODELS["OwnModel"].others == "after"


def test_a_misspelt_place_is_no_argument():
    class Own(torch.nn.Module):
        def forward(self, tokens, text, grid):
            return tokens

    call = dict(attention=["attn"], grid=lambda arguments, config: [(1, 2, 3)])
    with pytest.raises(ValueError, match=r"argument of Own's forward \(tokens, text, grid\), got 'afterr'"):
        rainfusion.register_model(Own, **call, others="afterr")
