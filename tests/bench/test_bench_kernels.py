"""benchmarks/kernels.py: the words of a case, its mask, and who gets into the table.

Our kernel runs on the GPU where there is one, else under Triton's interpreter (see conftest.py).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from helpers import benchmarks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = "1x1x300x16@0.5+20"
OURS = ("--device", DEVICE, "--backend", "triton", "--precision", "native", "--no-others")
THEIRS = ("--device", "cpu", "--backend", "hopper", "--precision", "native")
ONCE = ("--repeats", "1", "--seconds", "0.01")


@pytest.fixture
def kernels():
    return benchmarks.load("kernels")


@pytest.fixture
def with_triton():
    pytest.importorskip("triton", reason="kernels need Triton")


def rows(out):
    """The words of each line of the table, which is the end of what is printed."""
    lines = out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("case "))
    assert lines[start].split() == ["case", "what", "ms", "lower", "quartile", "TFLOP/s", "error"]
    return [line.split() for line in lines[start + 2 :]]


def baseline(name, attend, **properties):
    kind = dict(dense=True, exact=True, why_not=lambda q: None) | properties
    return SimpleNamespace(name=name, prepare=lambda settings: [lambda: attend(*settings[0][:3])], **kind)


def scaled(factor):
    return lambda q, k, v: factor * F.scaled_dot_product_attention(q, k, v)


def test_help_has_examples(kernels, capsys):
    with pytest.raises(SystemExit, match="0"):
        kernels.main(["--help"])
    assert "  python benchmarks/kernels.py 1x12x32760x128@0.2 --backend hopper" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("2x24x4096x128@0.4", (2, 24, 4096, 128, 0.4, 0)),
        ("2x24x4608x128@0.4+512", (2, 24, 4608, 128, 0.4, 512)),
        ("1x1x1x8@1", (1, 1, 1, 8, 1.0, 0)),
    ],
)
def test_words_of_a_case(kernels, words, expected):
    case = kernels.Case.parse(words)
    assert case == expected and str(case) == words


def test_default_cases_are_cases(kernels):
    assert [str(case) for case in kernels._parser().parse_args([]).cases] == list(kernels.CASES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("wan-720p", "'wan-720p' is no case: batch x heads x tokens x head dim @ density, as in 2x24x4096x128@0.4"),
        ("2x24x4096x128", "is no case"),
        ("24x4096x128@0.4", "is no case"),
        ("2x24x4096x128@0.4+", "is no case"),
        ("0x24x4096x128@0.4", "sizes must be at least 1"),
        ("2x24x4096x128@0", "the density in (0, 1]"),
        ("2x24x4096x128@20", "the density in (0, 1]"),
        ("2x24x4096x128@0.4+4097", "text at most all tokens"),
        ("1x1x128x16@0.5 --repeats 0", "--repeats must be at least 1, got 0"),
        ("1x1x128x16@0.5 --seconds 0", "--seconds must be above 0, got 0"),
        ("1x1x128x16@0.5 --device nowhere", "--device must be a torch device of this machine, got 'nowhere'"),
    ],
)
def test_what_is_wrong_is_said_first(kernels, words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        kernels.main([CASE, *words.split()])
    out, err = capsys.readouterr()
    assert message in err and not out


def test_masks_are_random_and_as_dense_as_asked_for(kernels):
    mask = kernels.Case(2, 4, 128 * 49 + 1, 16, 0.3, 0).mask(torch.device("cpu"))
    assert mask.indices.shape == (2, 4, 50, 50)
    assert mask.density() == pytest.approx(0.3, abs=0.02)
    assert mask.counts.max() < 50 and mask.to_dense().sum(2).max() < 50  # none of them as text has it
    assert not torch.equal(mask.counts[0, 0], mask.counts[0, 1])


@pytest.mark.parametrize(("tokens", "text", "first"), [(1280, 256, 8), (1280, 1, 9), (1200, 48, 9), (1200, 49, 8)])
def test_blocks_with_text_see_all_and_are_seen_by_all(kernels, tokens, text, first):
    """Also where the last block is not whole, and text begins within another."""
    dense = kernels.Case(1, 3, tokens, 16, 0.2, text).mask(torch.device("cpu")).to_dense()
    assert dense[..., first:].all() and dense[..., first:, :].all()
    assert not dense[..., :first, :first].all((2, 3)).any()
    assert dense[..., :first, :first].float().mean() < 0.5


@pytest.mark.usefixtures("with_triton")
def test_a_small_run(kernels, capsys):
    """Of the kernel alone and of the whole call; the table is last."""
    assert kernels.main([CASE, "1x2x130x16@1", *OURS, *ONCE]) == 0
    out = capsys.readouterr().out
    assert f"--- {CASE}\ntriton native kernel: error 0.00" in out
    found = rows(out)
    assert [(row[0], " ".join(row[1:4])) for row in found] == [
        (case, f"triton native {stage}") for case in (CASE, "1x2x130x16@1") for stage in ("kernel", "call")
    ]
    for *_, ms, low, _, error in found:
        assert float(ms) >= float(low) > 0 and float(error) < 0.005
    assert ("bfloat16" if DEVICE == "cuda" else "float16") in out


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(
    ("factor", "said"), [(1.1, "ArithmeticError: the error is 0.1"), (None, "RuntimeError: an illegal instruction")]
)
def test_a_wrong_result_has_no_row_and_the_others_still_run(kernels, factor, said, capsys, monkeypatch):
    right = kernels.sparse_attention

    def call(*args, **kwargs):
        if factor is None:
            raise RuntimeError("an illegal instruction\nand where it was")
        return right(*args, **kwargs) * factor

    monkeypatch.setattr(kernels, "sparse_attention", call)
    assert kernels.main([CASE, *OURS, *ONCE]) == 1
    out = capsys.readouterr().out
    assert f"triton native call: failed: {said}" in out
    assert [row[1:4] for row in rows(out)] == [["triton", "native", "kernel"]]


def test_what_cannot_run_is_said(kernels, capsys):
    assert kernels.main([CASE, *THEIRS, "--no-others", *ONCE]) == 1
    out = capsys.readouterr().out
    assert "hopper native: backend='hopper' with precision='native' cannot run this call: 'hopper' needs an NV" in out
    assert out.endswith("\nnothing could be timed\n")


def test_others_run_beside_ours(kernels, capsys):
    assert kernels.main([CASE, *THEIRS, *ONCE]) == 0
    out = capsys.readouterr().out
    assert "FlexAttention: needs a CUDA device, got cpu tensors" in out
    assert "FlashAttention-4 blocks: needs a CUDA device, got cpu tensors" in out
    assert [row[1] for row in rows(out)] == ["torch"]


def test_others_are_checked_as_exactly_as_they_compute(kernels, capsys, monkeypatch):
    """And what fails of them is said, but does not fail the run."""
    theirs = (
        baseline("right", scaled(1.0)),
        baseline("wrong", scaled(1.05)),
        baseline("eight-bits", scaled(1.05), exact=False),
        baseline("worse-bits", scaled(1.07), exact=False),
        baseline("all-blocks", scaled(1.0), dense=False),  # where some of them are asked for
    )
    monkeypatch.setattr(kernels.baselines, "DENSE", theirs)
    monkeypatch.setattr(kernels.baselines, "SLOW_TO_COMPILE", (baseline("absent", None, why_not=lambda q: "not here"),))
    assert kernels.main([CASE, *THEIRS, *ONCE]) == 0
    out = capsys.readouterr().out
    assert [row[1] for row in rows(out)] == ["right", "eight-bits"]
    for name in ("wrong", "worse-bits", "all-blocks"):
        assert f"\n{name}: failed: ArithmeticError: " in out
    assert "\nabsent: not here\n" in out


def test_a_case_that_fails_in_turns_leaves_the_others(kernels, capsys, monkeypatch):
    take_turns, cases = kernels.timing.take_turns, []

    def fail_first(*args, **kwargs):
        cases.append(args)
        if len(cases) == 1:
            raise RuntimeError("an illegal memory access")
        return take_turns(*args, **kwargs)

    monkeypatch.setattr(kernels.timing, "take_turns", fail_first)
    assert kernels.main([CASE, "1x1x200x16@0.5", *THEIRS, *ONCE]) == 1
    out = capsys.readouterr().out
    assert f"\n{CASE}: failed: RuntimeError: an illegal memory access\n" in out
    assert [row[:2] for row in rows(out)] == [["1x1x200x16@0.5", "torch"]]
