"""Two processes on a CPU: each has half of the tokens, and after Ulysses' exchange half of the heads."""

from pathlib import Path

import two_processes


def test_ulysses_is_sparse_over_the_whole_sequence():
    two_processes.run(Path(__file__).with_name("two_ranks.py"))
