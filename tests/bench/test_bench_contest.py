"""One attention call against everything else that can compute it: who runs, who is right, and who is left out."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from commands import refused, run
from made_up import TINY

import rainfusion
from rainfusion import BlockMask
from rainfusion.bench import baselines, contest, results


def test_work_is_counted_on_the_kept_blocks():
    q = torch.empty(2, 3, 300, 64)
    assert contest.dense_tflop(q, torch.empty(2, 3, 500, 64)) == pytest.approx(4 * 2 * 3 * 300 * 500 * 64 / 1e12)
    mask = BlockMask.from_dense(torch.tensor([[[[1, 0, 1], [0, 1, 0]]]], dtype=torch.bool))
    assert contest.kept_tflop(mask, 64) == pytest.approx(4 * 64 * 128 * 128 * 3 / 1e12)


def test_baselines_say_why_they_do_not_run_on_a_cpu():
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16)
    everyone = (*baselines.DENSE, *baselines.SPARSE, *baselines.SLOW_TO_COMPILE)
    reasons = {baseline.name: baseline.why_not(q) for baseline in everyone}
    assert reasons.pop("torch") is None
    assert ", ".join(reasons) == (
        "cuDNN, FlashAttention, FlashAttention-3, SageAttention, SpargeAttn, FlexAttention, FlashAttention-4, "
        "FlashAttention-4 blocks"
    )
    assert set(reasons.values()) == {"needs a CUDA device, got cpu tensors"}


def test_a_library_that_cannot_be_imported_is_a_reason_and_no_exception(tmp_path, monkeypatch):
    (tmp_path / "half_built.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    (tmp_path / "renamed.py").write_text("attention = print")
    (tmp_path / "half_installed").mkdir()
    (tmp_path / "half_installed/__init__.py").write_text("import what_it_depends_on")
    monkeypatch.syspath_prepend(tmp_path)
    assert baselines._not_importable("not_there_at_all", "f") == "not_there_at_all is not installed"
    assert baselines._not_importable("not_there_at_all.part", "f") == "not_there_at_all.part is not installed"
    assert "OSError: undefined symbol" in baselines._not_importable("half_built", "f")
    assert "OSError: undefined symbol" in baselines._not_importable("half_built.part", "f")
    assert "No module named 'what_it_depends_on'" in baselines._not_importable("half_installed.part", "f")
    assert baselines._not_importable("renamed", "attend") == "renamed has no attend"
    assert baselines._not_importable("renamed", "attention") is None


def test_flex_attention_gets_our_blocks():
    dense = torch.rand(1, 2, 3, 4) < 0.5
    theirs = baselines.flex_block_mask(BlockMask.from_dense(dense), 300, 500)
    assert torch.equal(theirs.to_dense().bool(), dense)
    assert theirs.seq_lengths == (300, 500)
    assert theirs.full_kv_num_blocks.sum() == dense.sum() and theirs.kv_num_blocks.sum() == 0


class TheirLists(NamedTuple):
    """As FlashAttention-4 names them."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


def their_attention(q, k, v, block_sparse_tensors=None):
    """On tensors [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if block_sparse_tensors is not None:
        lists = block_sparse_tensors
        assert lists.block_size == (128, 128) and lists.mask_block_cnt.sum() == 0
        mask = BlockMask(lists.full_block_cnt, lists.full_block_idx)
    out = rainfusion.sparse_attention(q, k, v, mask=mask, backend="reference")
    return out.transpose(1, 2), None


def test_flash_attention_4_gets_our_blocks(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=their_attention))
    lists = SimpleNamespace(BlockSparseTensorsTorch=TheirLists)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", lists)
    q, k, v = torch.randn(3, 1, 2, 420, 64).unbind()
    grid = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[3, 10, 14])
    expected, mask = rainfusion.sparse_attention(q, k, v, **grid, backend="reference", return_mask=True)
    layout = rainfusion.TokenLayout.build(420, (3, 10, 14))
    setting = baselines.Setting(q, k, v, mask, layout)
    (sparse,), (dense,) = (
        baseline.prepare([setting]) for baseline in (baselines.FlashAttention4Blocks(), baselines.FlashAttention4())
    )
    torch.testing.assert_close(layout.restore(sparse()), expected)
    torch.testing.assert_close(dense(), torch.nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
def test_a_contest_on_a_cpu(sparse_type):
    outcome = contest.measure(
        TINY, sparse_type=sparse_type, dtype=torch.float32, device="cpu", batch=2, repeats=2, seconds=0.05
    )
    dense, ours = outcome.rows
    assert (dense.contender, dense.sparse_type, dense.speedup, dense.density) == ("torch", "dense", 1.0, 1.0)
    assert (ours.contender, ours.sparse_type, ours.sparsity) == ("portable call", sparse_type, 0.5)
    assert ours.speedup == pytest.approx(dense.ms / ours.ms) and ours.speedup_cudnn is None
    assert ours.right and ours.error_to_float64 <= ours.allowed_error
    assert (ours.batch, ours.heads, ours.tokens, ours.head_dim) == (2, 2, 404, 16)
    blocks = ours.density * 2 * 2 * 4 * 4
    assert ours.tflops * ours.ms / 1000 == pytest.approx(4 * 16 * 128**2 * blocks / 1e12)
    assert "cuDNN" in outcome.left_out and "portable kernel" in outcome.left_out
    assert not outcome.broken


def test_the_kernel_alone_is_timed_beside_the_whole_call():
    """Under Triton's interpreter, which must be on before Triton is imported."""
    script = (
        "import json, torch\n"
        "from dataclasses import asdict\n"
        "from rainfusion.bench import contest\n"
        "from rainfusion.bench.shapes import Shape\n"
        "shape = Shape('tiny', 1, 16, (3, 8, 16), 0, 0.5, '')\n"
        "options = dict(dtype=torch.float32, device='cpu', backend='triton', repeats=1, seconds=0.1)\n"
        "outcome = contest.measure(shape, **options)\n"
        "print(json.dumps([outcome.broken, *(asdict(row) for row in outcome.rows)]))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    broken, *rows = json.loads(done.stdout)
    assert broken == {}
    kernel, call = (row for row in rows if row["contender"].startswith("triton "))
    assert (kernel["contender"], call["contender"]) == ("triton kernel", "triton call")
    assert kernel["right"] and call["right"]
    assert call["around_percent"] == pytest.approx(100 * (call["ms"] / kernel["ms"] - 1))


def test_a_wrong_or_broken_contender_fails_the_run(capsys, monkeypatch, tmp_path):
    right = rainfusion.sparse_attention

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return result if isinstance(result, tuple) else result * 1.01

    def broken(*args, **kwargs):
        raise RuntimeError("an illegal instruction")

    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--device", "cpu")
    monkeypatch.setattr(rainfusion, "sparse_attention", wrong)
    status, out, _ = run(capsys, *words, "--csv", str(tmp_path / "r.csv"))
    assert status == 1
    assert "WRONG" in out.splitlines()[-1]
    assert [row.speedup for row in results.read(tmp_path / "r.csv")] == [1.0, None]
    monkeypatch.setattr(rainfusion, "sparse_attention", broken)
    status, out, _ = run(capsys, *words, "--csv", str(tmp_path / "r.csv"))
    assert status == 1
    assert "BROKEN: portable call in native: RuntimeError: an illegal instruction" in out


def test_precisions_that_are_not_there_are_left_out(capsys, tmp_path):
    words = ("bench", "qwen-image-512", "--repeats", "1", "--heads", "1", "--device", "cpu")
    csv = ("--csv", str(tmp_path / "r.csv"))
    status, out, _ = run(capsys, *words, *csv, "--precision", "native", "fp8")
    assert status == 0
    assert "left out: ours in fp8: " in out
    assert "precision='fp8'" in refused(capsys, *words, *csv, "--precision", "fp8")
    assert "precision='fp8'" in refused(capsys, *words, "--precision", "fp8")
