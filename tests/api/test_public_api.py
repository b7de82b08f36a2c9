"""The public surface, pinned."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

import rainfusion
from helpers import ROOT
from helpers.gpu import USUAL
from rainfusion import distributed
from rainfusion.options import RECOMMENDED


def test_public_names():
    assert sorted(rainfusion.__all__) == [
        "BlockMask",
        "Handle",
        "Method",
        "NoGrid",
        "Profile",
        "Stats",
        "TokenLayout",
        "block_sparse_attention",
        "calibrate",
        "disable",
        "enable",
        "enabled",
        "explain",
        "predict_mask",
        "register_model",
        "sparse_attention",
        "warmup",
    ]
    assert all(hasattr(rainfusion, name) for name in rainfusion.__all__)


def test_signature_of_sparse_attention():
    parameters = inspect.signature(rainfusion.sparse_attention).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "q", "k", "v", "attn_mask", "scale", "is_causal", "head_num", "input_layout", "inner_precise", "sparse_type",
        "txt_len", "block_size", "latent_shape_q", "latent_shape_k", "keep_sink", "keep_recent", "cdf_threshold",
        "sparsity",
    ]  # fmt: skip
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert defaults == dict(
        attn_mask=None, scale=None, is_causal=False, head_num=None, input_layout="BNSD", inner_precise=0,
        sparse_type=None, txt_len=0, block_size=128, latent_shape_q=None, latent_shape_k=None, keep_sink=True,
        keep_recent=True, cdf_threshold=1.0, sparsity=0.0, video_spans=None, precision="native", token_order="window",
        predictor="mean", compensate=False, first_frame="protected", exact_budget=False, target_error=None,
        method=None, mask=None, backend="auto", return_lse=False, return_mask=False,
    )  # fmt: skip


def test_predict_mask_takes_the_same_arguments():
    attention = inspect.signature(rainfusion.sparse_attention).parameters
    prediction = inspect.signature(rainfusion.predict_mask).parameters
    assert set(attention) - set(prediction) == {"v", "mask", "target_error", "return_lse", "return_mask"}
    assert all(prediction[name] == attention[name] for name in prediction)


def test_the_usual_call_of_the_gpu_tests_has_the_defaults_of_enable():
    assert {name: USUAL[name] for name in RECOMMENDED} == RECOMMENDED


FUNCTIONS = [
    *(getattr(rainfusion, name) for name in rainfusion.__all__ if inspect.isfunction(getattr(rainfusion, name))),
    rainfusion.TokenLayout.build,
    distributed.ulysses_attention,
    distributed.ring_attention,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_parameter_has_an_entry_of_its_own(function):
    names = inspect.signature(function).parameters
    assert all(f"        {name}: " in function.__doc__ or len(names) == 1 for name in names)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_nothing_public_returns_anything_at_all(function):
    returned = inspect.signature(function).return_annotation
    assert returned not in (inspect.Signature.empty, "Any", Any)


def test_importing_is_cheap_and_needs_torch_only():
    """No optional package, no device query, no environment read of our own at import."""
    code = (
        "import sys, torch; before = set(sys.modules); import rainfusion; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'matplotlib', 'tqdm', 'triton', 'diffusers', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_stands_in_the_changelog():
    assert f"## {rainfusion.__version__}" in (ROOT / "CHANGELOG.md").read_text()
