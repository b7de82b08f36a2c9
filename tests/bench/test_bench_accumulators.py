"""benchmarks/accumulators.py: what sums of 14 bits lose."""

import pytest
import torch

from helpers import benchmarks


@pytest.fixture(scope="module")
def accumulators():
    return benchmarks.load("accumulators")


def test_help_has_an_example(accumulators, capsys):
    with pytest.raises(SystemExit):
        accumulators.main(["--help"])
    assert "  python benchmarks/accumulators.py --keys" in capsys.readouterr().out


def test_sums_that_fit_are_exact_and_others_are_cut_off(accumulators):
    few, ones = torch.ones(1, 64, dtype=torch.float64), torch.ones(64, 1, dtype=torch.float64)
    assert accumulators.added(few, ones).item() == 64
    long, small = torch.full((1, 64), 1.0, dtype=torch.float64), torch.full((64, 1), 2.0**-13)
    long[0, 0], small[0, 0] = 1.0, 1.0
    small[1:] *= 0.75  # of the last bit beside 1
    assert accumulators.added(long, small.double()).item() == 1.0
    assert accumulators.by_tiles(few.repeat(1, 4), ones.repeat(4, 1)).item() == 256


def test_what_the_sums_of_rows_lose(accumulators, capsys):
    """Values with a mean lose most, and nothing without it; those of a video, as tiles are summed by themselves."""
    accumulators.main(["--keys", "4096", "--rows", "2", "--shapes", "wan-480p-17f", "--blocks", "3"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == accumulators.HEADER
    found = {name: list(map(float, numbers)) for name, *numbers in (line[2:-2].split(" | ") for line in lines)}
    normal, one, three, video = found.values()
    assert list(found)[3] == "synthetic video, wan-480p-17f"
    for exact, cut, by_tiles, smoothed, cut_smoothed in (one, three):
        assert cut > 0.03 > 10 * max(exact, by_tiles, smoothed, cut_smoothed)
    assert max(normal) < 1.25 * min(normal)
    exact, cut, by_tiles, *_ = video
    assert by_tiles < 1.05 * exact < cut
