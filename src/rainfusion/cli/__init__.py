"""The command `rainfusion`. Each of its commands has a module here: it adds its options, checks them and runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

import torch

from rainfusion import __version__
from rainfusion.cli import bench, calibrate, demo, inspect, quality, warmup

COMMANDS = (bench, inspect, demo, quality, calibrate, warmup)
_PACKAGES = {"PIL": "pillow"}  # module -> the package to install for it, where their names differ


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0 is success, 1 a result that was found wrong or too little memory, 2 a wrong argument, and 130 an interrupt from
    the keyboard.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    missing = [_PACKAGES.get(name, name) for name in args.needs(args) if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(2, f"rainfusion {args.command} needs {' and '.join(missing)}: pip install {' '.join(missing)}\n")
    try:
        return int(args.run(args))
    except BrokenPipeError:  # the reader of `rainfusion inspect | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        parser.exit(2, f"rainfusion {args.command}: {error}\n")
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "Python has no more"
        parser.exit(1, f"rainfusion {args.command}: out of memory; choose a smaller size or fewer heads: {reason}\n")
    except KeyboardInterrupt:
        print(f"\nrainfusion {args.command}: interrupted; {args.interrupted(args)}", file=sys.stderr, flush=True)
        return 130


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `rainfusion`, with the parsers of all commands."""
    parser = argparse.ArgumentParser(prog="rainfusion", description="Block-sparse attention for video and image DiTs.")
    parser.add_argument("--version", action="version", version=f"rainfusion {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
