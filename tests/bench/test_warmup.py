"""`rainfusion warmup` and `rainfusion.warmup`, as far as a CPU goes. What they compile: tests/backends, tests/gpu."""

import pytest
import torch
from commands import refused, run

import rainfusion
from rainfusion import Method


def test_without_a_gpu_there_is_nothing_to_compile(capsys):
    status, out, err = run(capsys, "warmup --device cpu --head-dim 64 128 --masks none bool float")
    assert status == 0 and err == ""
    *lines, last = out.splitlines()
    assert len(lines) == 6
    assert lines[1] == (
        "rf_v2, float32, head dim 64, precision native, blocks of (128, 32), predictor spread, compensated, "
        "a key mask of bools: 'portable', nothing to compile"
    )
    assert last == "ready: these backends are made of torch's operations, and calls compile nothing"


def test_the_command_has_the_options_of_the_calls(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("rainfusion.warming.warmup", lambda method, **named: asked.append((method, named)) or [])
    line = (
        "--block-size 128 32 --predictor spread --no-compensate --exact-budget --by-head --dtype bf16 --no-grid --lse"
    )
    assert run(capsys, f"warmup --device cpu --precision fp8 {line}")[0] == 0
    [(method, named)] = asked
    assert (method.block_size, method.predictor, method.compensate) == ((128, 32), "spread", False)
    assert (method.precision, method.exact_budget, len(method.sparsities)) == ("fp8", True, 2)
    assert (named["dtype"], named["grid"], named["return_lse"]) == (torch.bfloat16, False, True)
    assert run(capsys, "warmup --device cpu --sparse-type ada_bsa --cdf-threshold 0.9")[0] == 0
    assert (asked[1][0].sparse_type, asked[1][0].compensate, asked[1][0].cdf_threshold) == ("ada_bsa", False, 0.9)


def test_wrong_options_are_refused_in_words(capsys):
    assert "masks must be one of 'none', 'bool', 'float', got 'some'" in refused(capsys, "warmup --masks some")
    assert "--head-dim must be at least 1, got 0" in refused(capsys, "warmup --head-dim 128 0")
    assert "block_size must be" in refused(capsys, "warmup --block-size 100")
    assert "--cdf-threshold must be in (0, 1], got 2.0" in refused(capsys, "warmup --cdf-threshold 2")
    assert "precision='fp8' cannot run this call" in refused(capsys, "warmup --device cpu --precision fp8")
    assert "backend must be one of" in refused(capsys, "warmup --backend magic")


def test_the_function_says_what_is_ready():
    ready = rainfusion.warmup(head_dim=64, dtype=torch.float32, device="cpu", masks=["none", "bool", "none"])
    assert [(one.backend, one.compiles, one.seconds) for one in ready] == [("portable", False, 0.0)] * 2
    assert ready[0].words.endswith("no key mask") and ready[1].words.endswith("a key mask of bools")


def test_the_function_makes_small_calls():
    """In Triton's interpreter, where kernels run without being compiled; small calls are not run dense instead."""
    if torch.cuda.is_available():
        pytest.skip("there kernels are compiled, see tests/gpu")
    options = dict(head_dim=16, dtype=torch.float32, device="cpu", backend="triton")
    [ready] = rainfusion.warmup(Method(sparse_type="rf_v2", sparsity=[0.9, 0.5, 0.7]), **options)
    assert (ready.backend, ready.compiles) == ("triton", True) and ready.seconds > 0.0


def test_the_function_refuses_what_it_cannot_prepare():
    with pytest.raises(ValueError, match="method skips nothing"):
        rainfusion.warmup(Method(), device="cpu")
    with pytest.raises(TypeError, match=r"method must be a rainfusion\.Method, got 'rf_v2'"):
        rainfusion.warmup("rf_v2", device="cpu")
    with pytest.raises(TypeError, match=r"masks must be a sequence of names, such as \['none', 'bool'\], got 'bool'"):
        rainfusion.warmup(device="cpu", masks="bool")
    with pytest.raises(ValueError, match="precision='int8' cannot run this call"):
        rainfusion.warmup(Method.recommended(precision="int8"), device="cpu")
