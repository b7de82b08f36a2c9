"""`benchmarks/waits.py`: in which order rows of blocks are taken, and what that costs."""

import pytest
import torch

from helpers.benchmarks import load
from rainfusion.backends.hopper import heads_side_by_side

waits = load("waits")


@pytest.mark.parametrize(
    ("heads", "rows", "programs"), [(1, 1, 132), (48, 32, 132), (24, 36, 132), (5, 4, 3), (2, 600, 7)]
)
def test_rows_are_taken_as_the_kernel_takes_them(heads, rows, programs):
    """Each once; the first of each program as they stand, the last heads side by side."""
    emulator = pytest.importorskip("helpers.hopper_emulator", reason="kernels need Triton")
    together = heads_side_by_side(heads, rows, programs)
    next_turn = emulator.Kernel(0, emulator.exact_sums, emulator.SOURCE.read_text()).names["_next_turn"]
    number = emulator.as_value
    turns = [
        int(next_turn(number(i), number(rows), number(heads * rows), number(together))) for i in range(heads * rows + 3)
    ]
    assert turns[-3:] == [heads * rows + i for i in range(3)]  # past the end
    assert turns[: min(programs, heads * rows)] == list(range(min(programs, heads * rows)))
    assert turns[:-3] == waits.taken(torch.arange(heads * rows).view(heads, rows), together).tolist()
    assert sorted(turns[:-3]) == list(range(heads * rows))


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        waits.main(["--help"])
    assert "  python benchmarks/waits.py --programs" in capsys.readouterr().out


def test_it_prints_a_line_for_each_call(capsys):
    waits.main(["--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == waits.HEADER and len(lines) == 2 + len(waits.CALLS)


def test_heads_are_side_by_side_where_their_rows_are_few():
    assert heads_side_by_side(40, 591, 132) == 1
    assert heads_side_by_side(48, 32, 132) == 13
    assert heads_side_by_side(1, 32, 132) == 1


def test_heavy_rows_do_not_begin_last():
    work = torch.tensor([[9, 1, 1], [9, 1, 1], [9, 1, 1]])
    assert waits.taken(work, 2).tolist() == [9, 1, 1, 9, 9, 1, 1, 1, 1]
    assert waits.waits(waits.taken(work, 1), 3) > waits.waits(waits.taken(work, 2), 3)


def test_one_row_for_each_program_waits_for_nothing():
    assert waits.waits(torch.full((8,), 5), 4) == pytest.approx(0.0)


@pytest.mark.parametrize("call", waits.CALLS, ids=lambda call: call.name)
def test_side_by_side_costs_nothing_worth_a_word(call):
    """On an H200, and less than the point that it costs, it gains where text is protected."""
    rows = -(-call.tokens // 128)
    found = [
        waits.waits(waits.taken(waits.tiles(call, 0), number), 132)
        for number in (1, heads_side_by_side(call.heads, rows, 132))
    ]
    assert found[1] <= found[0] + 0.005
    assert not call.txt_len or found[1] < found[0] - 0.01
