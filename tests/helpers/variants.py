"""Count the variants of each kernel that calls of many sizes make Triton compile. No GPU is needed to find out.

The backends run on small CPU tensors as if a GPU were there, and what they launch goes as far as Triton's own key of a
compiled kernel: types, constants, what is known of each argument, and options. After the first call with some options a
new key would be a wait for the compiler, and so would be one that `rainfusion.warmup` had left out. A line for each
kernel of each set of options; the exit status is 1 if one has variants for some sizes only, with the arguments that
make the difference.

    python tests/helpers/variants.py
    python tests/helpers/variants.py --kernel keep_best
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where helpers are, also for a program

from helpers.targets import TARGETS, Call, Launch, Size, recorded, run

TARGET = TARGETS["sm_90"]

# the first is a common one, the others differ from it in every way that a caller may
SIZES = (
    Size((3, 8, 16), 20),
    Size((3, 8, 16), 0),
    Size((1, 8, 8), 0),  # a single block, of tokens that stay in their order
    Size((1, 1, 1), 0),
    Size((1, 16, 16), 0),  # blocks fill up
    Size((2, 16, 16), 1),
    Size((5, 7, 9), 3),
    Size((4, 16, 32), 0, heads=1),
    Size((4, 16, 32), 16, heads=3),
    Size((4, 16, 32), 77, batch=2, heads=16),
    Size((3, 8, 16), 20, batch=3, heads=5),
    Size((3, 8, 16), 20, batch=2, shared=2),
    Size((3, 8, 16), 20, heads=1, shared=16),
    Size((9, 40, 48), 256, heads=2),  # more than a hundred blocks
    Size((21, 90, 80), 0, heads=1),  # more than a thousand
    Size((3, 8, 16), 20, kind="BSND"),
    Size((3, 8, 15), 1, batch=2, kind="BSND"),
    Size((3, 8, 16), 20, batch=2, kind="packed"),
    Size((3, 8, 16), 20, batch=2, kind="expanded"),
    Size((3, 8, 16), 20, kind="shifted"),
    Size((3, 8, 16), 20, batch=2, kind="channels apart"),
)


MORE_HEADS = tuple(size for size in SIZES if size.heads * size.shared > 1)  # one a head is one for all with one head
SHORT = tuple(size for size in SIZES if size.length < 10000)  # a sample of dense rows is computed here


class Options(NamedTuple):
    """For which kernels are compiled once."""

    name: str
    backend: str
    call: Call
    sizes: tuple[Size, ...] = SIZES


def sets_of_options() -> Iterator[Options]:
    video, bf16 = dict(sparse_type="rf_v2", sparsity=0.5), torch.bfloat16
    ada_bsa = dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.9)
    better = {
        "": {},
        " compensate": dict(compensate=True),
        " submeans": dict(predictor="submeans"),
        " submeans compensate": dict(predictor="submeans", compensate=True),
        " spread": dict(predictor="spread"),
        " spread compensate": dict(predictor="spread", compensate=True),
    }
    for backend in ("triton", "hopper"):
        for precision in ("native", "fp8", "int8"):
            for block_size in (128, (128, 32)):
                for name, options in better.items():
                    for masked in (False, True):
                        here = dict(video, **options, block_size=block_size, precision=precision)
                        words = f"{backend} {precision} {block_size}{name}{' masked' if masked else ''}"
                        yield Options(words, backend, Call(bf16, 128, here, masked))
            name, here = f"{backend} {precision}", dict(video, precision=precision)
            yield Options(f"{name} exact", backend, Call(bf16, 128, dict(here, exact_budget=True)))
            yield Options(f"{name} free", backend, Call(bf16, 128, dict(here, first_frame="free")))
            yield Options(f"{name} no grid", backend, Call(bf16, 128, dict(here, grid=False)))
            for block_size in (128, (128, 32)):
                spread = dict(here, grid=False, predictor="spread", block_size=block_size)
                yield Options(f"{name} {block_size} spread no grid", backend, Call(bf16, 128, spread))
            yield Options(f"{name} by head", backend, Call(bf16, 128, dict(here, sparsity="by head")), MORE_HEADS)
            finer = dict(here, block_size=(128, 32))
            by_head = dict(finer, sparsity="by head")
            yield Options(f"{name} (128, 32) by head", backend, Call(bf16, 128, by_head), MORE_HEADS)
            error = dict(sparse_type="rf_v2", precision=precision, target_error=0.1)
            yield Options(f"{name} by error", backend, Call(bf16, 128, error), SHORT)
            yield Options(f"{name} lse", backend, Call(bf16, 128, here, return_lse=True))
            yield Options(f"{name} head dim 80", backend, Call(bf16, 80, here))
            yield Options(f"{name} ada_bsa", backend, Call(bf16, 128, dict(ada_bsa, precision=precision)))
            yield Options(f"{name} ada_bsa masked", backend, Call(bf16, 128, dict(ada_bsa, precision=precision), True))
            yield Options(f"{name} given", backend, Call(bf16, 128, dict(precision=precision), given=True))
            yield Options(f"{name} dense", backend, Call(bf16, 128, dict(precision=precision)))
            if backend == "hopper":
                continue
            yield Options(f"{name} blocks of 64", backend, Call(bf16, 64, dict(here, block_size=64, compensate=True)))
            yield Options(f"{name} head dim 256", backend, Call(bf16, 256, dict(here, compensate=True)), SHORT)
            # rows at any address
            yield Options(f"{name} head dim 18", backend, Call(bf16, 18, dict(here, compensate=True)))
            finer = dict(finer, predictor="spread", compensate=True)
            yield Options(f"{name} head dim 18 (128, 32)", backend, Call(bf16, 18, finer, True))
            causal = dict(ada_bsa, is_causal=True, precision=precision)
            yield Options(f"{name} causal", backend, Call(bf16, 128, causal))
    yield Options("triton native fp32", "triton", Call(torch.float32, 64, video))
    spread = dict(video, predictor="spread", compensate=True)
    yield Options("triton native fp32 spread", "triton", Call(torch.float32, 64, spread))


def variants(options: Options) -> dict[str, tuple[Launch, list[Size]]]:
    """What is compiled for calls of all sizes, and for which of them."""
    from rainfusion import backends

    found: dict[str, tuple[Launch, list[Size]]] = {}
    for size in options.sizes:
        here: dict[str, Launch] = {}
        with recorded(TARGET, lambda launch, here=here: here.setdefault(launch.key, launch)):
            run(options.call, backends.get(options.backend), size)
        for key, launch in here.items():
            found.setdefault(key, (launch, []))[1].append(size)
    return found


def left_by_warmup(options: Options) -> list[Launch]:
    """What `rainfusion.warmup` with these options does not compile, although calls need it."""
    import rainfusion
    from rainfusion import backends

    needed: dict[str, Launch] = {}
    made: dict[str, Launch] = {}
    call = options.call
    with recorded(TARGET, lambda launch: needed.setdefault(launch.key, launch)):
        run(call, backends.get(options.backend), mask_alone=False)
    method = {name: value for name, value in call.options.items() if name not in ("grid", "is_causal")}
    if method.get("sparsity") == "by head":
        method["sparsity"] = [0.9, 0.5]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(backends, "why_not", return_value=None))
        patches.enter_context(recorded(TARGET, lambda launch: made.setdefault(launch.key, launch)))
        rainfusion.warmup(
            rainfusion.Method(**method),
            head_dim=call.head_dim,
            dtype=call.dtype,
            device="cpu",
            masks=["bool" if call.masked else "none"],
            grid=call.options.get("grid", True),
            return_lse=call.return_lse,
            backend=options.backend,
        )
    return [launch for key, launch in needed.items() if key not in made]


def differences(launches: list[Launch]) -> list[str]:
    """Which arguments variants of one kernel differ in, and what is known of them."""
    known = [launch.known for launch in launches]
    values = {name: list(dict.fromkeys(one.get(name, "") for one in known)) for name in known[0]}
    return [f"{name}: {', '.join(map(repr, several))}" for name, several in values.items() if len(several) > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--options", default="", help="only sets of options whose name contains this")
    chosen = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    several = 0
    for options in sets_of_options():
        if chosen.options not in options.name:
            continue
        found = variants(options)
        for name in sorted({launch.kernel.__name__ for launch, _ in found.values()}):
            if chosen.kernel not in name:
                continue
            own = [(launch, where) for launch, where in found.values() if launch.kernel.__name__ == name]
            # whichever size comes first, a later one would wait for a compiler
            some = [launch for launch, where in own if len(where) < len(options.sizes)]
            print(f"{options.name}: {name}: {len(own)} variants, {len(some)} of them for some sizes only", flush=True)
            if some:
                several += 1
                print("\n".join(f"    {line}" for line in differences(some)))
        if "sparse_type" in options.call.options and "is_causal" not in options.call.options:
            for launch in left_by_warmup(options):
                several += 1
                print(f"    warmup does not compile {launch}")
    print(f"{several} kernels wait for a compiler again" if several else "the first call compiles everything")
    return 1 if several else 0


if __name__ == "__main__":
    sys.exit(main())
