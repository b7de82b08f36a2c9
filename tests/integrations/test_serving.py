"""What serving engines share: layers that decide and count, and an engine that sums up. No engine is needed."""

import gc
import logging

import pytest
import torch
import torch.nn.functional as F

import rainfusion
from rainfusion import Method
from rainfusion.integrations.decider import Dense
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.serving import Engine

GRID = (4, 16, 24)
LENGTH = 4 * 16 * 24
METHOD = Method.recommended(sparsity=0.5)


@pytest.fixture
def engine():
    return Engine("Example", logger="example.rainfusion", native="precision='bf16'")


def qkv(length=LENGTH, heads=2, batch=1):
    """[B, S, N, D]"""
    return torch.randn(3, batch, length, heads, 16).unbind()


def dense(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def expected(q, k, v, method=METHOD, **options):
    return rainfusion.sparse_attention(q, k, v, input_layout="BSND", method=method, **options)


def messages(caplog, level="INFO"):
    return [record.getMessage() for record in caplog.records if record.levelname == level]


# ---------------------------------------------------------------------------------------------------------------------
# a call


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_call_is_sparse_attention_on_the_scene(engine, batch, key_heads):
    (q, _, _), (_, k, v) = qkv(LENGTH + 30, batch=batch), qkv(LENGTH + 30, key_heads, batch)
    out = engine.layer("blocks.0").attend(METHOD, Scene((GRID,), before=30), q, k, v, pytest.fail)
    assert torch.equal(out, expected(q, k, v, txt_len=30, latent_shape_q=GRID))


def test_the_scale_of_the_layer_is_that_of_the_logits(engine):
    q, k, v = qkv()
    out = engine.layer("blocks.0", scale=0.7).attend(METHOD, Scene((GRID,)), q, k, v, pytest.fail)
    assert torch.equal(out, expected(q, k, v, scale=0.7, latent_shape_q=GRID))


def test_padding_is_not_seen_and_comes_back_as_it_was(engine):
    q, k, v = qkv(LENGTH + 20)
    k[:, LENGTH:], v[:, LENGTH:] = float("nan"), float("nan")
    out = engine.layer("blocks.0").attend(METHOD, Scene((GRID,)), q, k, v, pytest.fail, rows=LENGTH)
    used = (x[:, :LENGTH].contiguous() for x in (q, k, v))
    assert torch.equal(out[:, :LENGTH], expected(*used, latent_shape_q=GRID))
    assert torch.equal(out[:, LENGTH:], q[:, LENGTH:]) and out.data_ptr() != q.data_ptr()


def test_tensors_in_any_strides(engine):
    packed = torch.randn(1, LENGTH, 2, 3, 16)
    out = engine.layer("blocks.0").attend(METHOD, Scene((GRID,)), *packed.unbind(3), pytest.fail)
    assert torch.equal(out, expected(*(x.contiguous() for x in packed.unbind(3)), latent_shape_q=GRID))


def test_a_short_sequence_is_sparse_since_the_user_asked_for_it(engine):
    layer, (q, k, v) = engine.layer("blocks.0"), qkv(2 * 8 * 16)
    layer.attend(METHOD, Scene(((2, 8, 16),)), q, k, v, pytest.fail)
    assert engine.stats().sparse_calls == 1


def test_a_reason_is_counted_and_dense_attention_answers(engine, caplog):
    layer, (q, k, v) = engine.layer("blocks.0"), qkv()
    for _ in range(2):
        out = layer.attend(METHOD, Dense.unsupported("no video"), q, k, v, lambda: dense(q, k, v))
        assert torch.equal(out, dense(q, k, v))
    assert engine.stats().reasons == {"no video": 2} and engine.stats().calls == {"blocks.0": (0, 2)}
    assert messages(caplog, "WARNING") == ["dense attention in blocks.0: no video"]


def test_a_reason_is_said_once_for_all_layers_and_methods(engine, caplog):
    for number, sparsity in enumerate((0.5, 0.5, 0.6)):
        layer = engine.layer(f"blocks.{number}")
        layer.attend(Method.recommended(sparsity=sparsity), Dense.unsupported("no video"), *qkv(), lambda: None)
    assert len(messages(caplog, "WARNING")) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q[:, :-1], k[:, :-1], v[:, :-1]), "do not hold a grid"),
        (lambda q, k, v: (q, k[:, :-1], v[:, :-1]), "q and k have different lengths"),
        (lambda q, k, v: (q, k, v.double()), "dtype"),
        (lambda q, k, v: (q[0], k[0], v[0]), r"[B, S, N, D]"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "got int32"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "gradients"),
    ],
)
def test_what_sparse_attention_cannot_do_is_dense_and_counted(engine, change, reason):
    layer = engine.layer("blocks.0")
    out = layer.attend(METHOD, Scene((GRID,)), *change(*qkv()), lambda: "dense")
    assert out == "dense"
    (found,) = engine.stats().reasons
    assert reason in found


def test_sparsity_0_is_dense(engine):
    layer = engine.layer("a")
    out = layer.attend(Method.recommended(sparsity=0.0), Scene((GRID,)), *qkv(), lambda: "dense")
    assert out == "dense" and engine.stats().reasons == {"sparsity is 0": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="some devices have the precision")
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_precision_without_kernels_is_an_error_that_says_what_to_ask_for(engine, precision):
    method, layer = Method.recommended(sparsity=0.5, precision=precision), engine.layer("blocks.3")
    with pytest.raises(ValueError, match=rf"blocks\.3.*precision='{precision}'.*Ask for precision='bf16' instead"):
        layer.attend(method, Scene((GRID,)), *qkv(), pytest.fail)
    # what no precision can do is dense, as ever
    assert layer.attend(method, Scene(((9, 99, 9),)), *qkv(), lambda: "dense") == "dense"


def test_a_reason_holds_on_to_no_tensor(engine):
    import weakref

    layer, (q, k, v) = engine.layer("blocks.0"), qkv(LENGTH + 1)
    gc.disable()
    try:
        layer.attend(METHOD, Scene((GRID,), alone=True), q, k, v, lambda: None)
        seen = weakref.ref(q)
        del q, k, v
        assert seen() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# all layers


def test_counts_of_all_layers_in_the_order_in_which_they_were_made(engine):
    layers = [engine.layer(name) for name in ("b", "a", "b", "")]
    for layer in layers[:3]:
        layer.attend(METHOD, Scene((GRID,)), *qkv(), pytest.fail)
    stats = engine.stats()
    assert list(stats.calls) == ["b", "a", "b (2)", "attention"]
    assert stats.calls["b (2)"] == (1, 0) and stats.calls["attention"] == (0, 0)
    assert stats.layouts == {"grid 4x16x24": 3} and 0.3 < stats.density["a"] < 0.9
    del layer, layers
    gc.collect()
    assert engine.stats().calls == {}


def test_one_layer_with_several_methods_counts_in_one_place(engine):
    layer = engine.layer("blocks.0")
    for sparsity in (0.5, 0.8, 0.5):
        layer.attend(Method.recommended(sparsity=sparsity), Scene((GRID,)), *qkv(), pytest.fail)
    assert engine.stats().calls == {"blocks.0": (3, 0)}


def test_the_first_sparse_call_is_said_once(engine, caplog):
    caplog.set_level("INFO")
    for name in ("blocks.0", "blocks.1"):
        engine.layer(name).attend(METHOD, Scene((GRID,), before=4), *qkv(LENGTH + 4, batch=2), pytest.fail, step=0)
    (line,) = messages(caplog)
    assert line.startswith("rainfusion: sparse attention in blocks.0: grid 4x16x24, 4 tokens before; 2 x 2 heads of 16")
    assert line.endswith("sparsity 0.5, precision native, backend portable") and "torch.float32" in line


def test_the_end_of_a_run_is_said_with_what_it_did(engine, caplog):
    first, second = engine.layer("blocks.0"), engine.layer("blocks.1")
    why = Dense.asked("the first steps are dense")
    caplog.set_level("INFO")
    for run in range(3):
        for step in (0, 0, 1, 2):  # two calls of a step: with a prompt, and without
            for layer in (first, second):
                layer.attend(METHOD, Scene((GRID,)) if step else why, *qkv(), lambda: None, step=step)
        assert len(messages(caplog)) == 1 + run
    summary = messages(caplog)[1]
    assert summary.startswith("rainfusion in Example: 4 sparse and 4 dense attention calls")
    assert "dense: 4 calls: the first steps are dense" in summary
    assert messages(caplog)[2] == summary
    assert engine.stats().sparse_calls == 12 and engine.stats().dense_calls == 12
    assert engine.stats().reasons == {"the first steps are dense": 12}


def test_of_several_processes_the_first_one_speaks(engine, caplog, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer = engine.layer("blocks.0")
    caplog.set_level("INFO")
    for rank, lines in ((1, 0), (0, 2)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for step in (0, 1, 0):
            layer.attend(METHOD, Scene((GRID,)), *qkv(), pytest.fail, step=step)
        assert len(messages(caplog)) == lines and engine.stats().sparse_calls == 3
        engine.reset()


def test_steps_of_several_requests_in_turn_do_not_flood_the_log(engine, caplog):
    layer = engine.layer("blocks.0")
    caplog.set_level("INFO")
    for step in (0, 1, 2, 0, 3, 1, 4, 2, 5, 3):
        layer.attend(METHOD, Dense.asked("dense"), *qkv(8), lambda: None, step=step)
    assert len(messages(caplog)) == 1


def test_without_steps_nothing_ends(engine, caplog):
    layer = engine.layer("blocks.0")
    caplog.set_level("INFO")
    for _ in range(3):
        layer.attend(METHOD, Dense.asked("dense"), *qkv(8), lambda: None)
    assert messages(caplog) == [] and engine.stats().dense_calls == 3


def test_the_end_of_the_process_is_said(tmp_path):
    import subprocess
    import sys

    code = """
import logging, torch
from rainfusion import Method
from rainfusion.integrations.decider import Dense
from rainfusion.integrations.serving import Engine
logging.basicConfig(level="INFO", format="%(message)s")
layer = Engine("Example", logger="example.rainfusion").layer("blocks.0")
x = torch.randn(1, 8, 2, 16)
layer.attend(Method.recommended(), Dense.asked("so it is"), x, x, x, lambda: x)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr == ("rainfusion in Example: 0 sparse and 1 dense attention calls\ndense: 1 call: so it is\n")


def test_reset_begins_again(engine, caplog):
    layer = engine.layer("blocks.0")
    caplog.set_level("INFO")
    for _ in range(2):
        layer.attend(METHOD, Scene((GRID,)), *qkv(), pytest.fail, step=1)
        engine.reset()
        assert engine.stats().calls == {"blocks.0": (0, 0)}
    layer.attend(METHOD, Scene((GRID,)), *qkv(), pytest.fail, step=0)
    assert engine.stats().sparse_calls == 1 and len(messages(caplog)) == 3


def test_a_warning_is_said_once(engine, caplog):
    engine.warn("an old version")
    engine.warn("an old version")
    assert messages(caplog, "WARNING") == ["an old version"]
    assert [record.name for record in caplog.records] == ["example.rainfusion"]


def test_engines_have_nothing_in_common(engine):
    other = Engine("Other", logger="other")
    engine.layer("a").attend(METHOD, Scene((GRID,)), *qkv(), pytest.fail)
    assert other.stats().calls == {} and logging.getLogger("other").handlers == []


def test_compiled_models_end_their_graphs_before_a_layer(engine):
    """As the engines' classes have it: `torch.compiler.disable` around the call."""
    layer, (q, k, v) = engine.layer("blocks.0"), qkv()

    @torch.compiler.disable
    def attend(q, k, v):
        return layer.attend(METHOD, Scene((GRID,)), q, k, v, pytest.fail)

    block = torch.compile(lambda q, k, v: attend(q * 2, k, v) + 1, backend="eager")
    assert torch.equal(block(q, k, v), expected(q * 2, k, v, latent_shape_q=GRID) + 1)
    assert engine.stats().sparse_calls == 1
