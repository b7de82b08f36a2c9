"""Runs a program twice at once, as `PROGRAM RANK PORT`: two processes that find each other at the port."""

import socket
import subprocess
import sys


def run(program):
    """Both must succeed, and say "the same"."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    commands = [[sys.executable, str(program), str(rank), port] for rank in (0, 1)]
    ranks = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for line in commands]
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=900)
            assert rank.returncode == 0 and "the same" in said, said
    finally:
        for rank in ranks:
            rank.kill()
