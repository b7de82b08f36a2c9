"""The Triton kernels compile for every kind of GPU they are made for, and fit it. No GPU is needed to find out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rainfusion
from helpers.targets import TARGETS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only"),
    pytest.mark.timeout(1800),  # compilers take their time
]

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "helpers" / "targets.py"
BACKENDS = Path(rainfusion.__file__).parent / "backends"


def run(*arguments, interpret="0"):
    """Another process, because this one may have Triton's interpreter on."""
    environment = dict(os.environ, TRITON_INTERPRET=interpret)
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def kernels_of(target):
    backends = ("triton", "hopper") if target == "sm_90" else ("triton",)
    files = [file for name in backends for file in (BACKENDS / name / "kernels").glob("*.py")]
    if not TARGETS[target].eight_bits:
        files = [file for file in files if file.name != "quantise.py"]
    return {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("target", ["sm_86", "sm_90", "gfx942"])
def test_every_kernel_compiles_and_fits(target):
    done = run(SCRIPT, "--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kernels_of(target) == set(re.findall(rf"^{target} +(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles_and_fits(target):
    done = run(SCRIPT, "--target", target, "--all")
    assert done.returncode == 0, "\n".join(re.findall(r".*\n    FAILED.*", done.stdout)) + done.stderr
    assert kernels_of(target) == set(re.findall(rf"^{target} +(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_the_hopper_kernel_overlaps_softmax_and_products():
    """64 exponentials a lane and block. What the compiler moves, or does not keep in registers, costs a tenth.

    Packing four e4m3 values to a register takes 16 moves. Tiles that are filled from several places take no more, but
    for a few copies that keep fp8's softmax where it stands.
    """
    done = run(SCRIPT, "--target", "sm_90", "--kernel", "hopper")
    found = re.findall(
        r"QUANT=(\d).* KEYS=(\d+).* stack \d+, (\d+) instructions in the longest loop, (\d+) moves in loops, "
        r"(\d+) exponentials while P V runs",
        done.stdout,
    )
    found = [tuple(map(int, numbers)) for numbers in found]
    # plain, with stand-ins, finer, with a key mask and an LSE
    variants = [(quant, keys) for quant in range(3) for keys in (128, 128, 32, 128)]
    assert [numbers[:2] for numbers in found] == variants, done.stdout + done.stderr
    for plain, stand_ins, finer, masked in zip(*[iter(found)] * 4, strict=True):
        most = (0, 16, 16)[plain[0]]
        assert max(plain[3], stand_ins[3], finer[3], masked[3] - 1) <= most, done.stdout
        assert min(exponentials for *_, exponentials in (plain, stand_ins, finer, masked)) >= 64, done.stdout
        assert finer[2] <= plain[2] + 16 * (plain[0] == 1), done.stdout


@pytest.mark.slow
def test_products_of_the_triton_kernel_run_by_themselves():
    """One wait a step on Hopper. Where the compiler finds a reason, each product waits for the one before it."""
    done = run(SCRIPT, "--target", "sm_90", "--kernel", "attention_kernel")
    found = re.findall(r"^sm_90 +attention_kernel.* BN=(\d+).* (\d+) instructions and (\d+) waits", done.stdout, re.M)
    assert len(found) == 8, done.stdout + done.stderr
    assert all(int(waits) == 1 and int(length) < 12 * int(keys) for keys, length, waits in found), done.stdout


def test_a_kernel_that_does_not_fit_is_an_error():
    """On a GPU with 1000 bytes of shared memory."""
    small = "targets.TARGETS['sm_90'] = targets.TARGETS['sm_90']._replace(shared_bytes=1000)"
    arguments = "sys.argv += ['--target', 'sm_90', '--kernel', 'pool']"
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from helpers import targets; {small}; {arguments}"
    done = run("-c", f"{code}; sys.exit(targets.main())")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAILED: needs \d+ B of shared memory, and 1000 B is all there is", done.stdout)


def test_the_interpreter_compiles_nothing():
    done = run(SCRIPT, "--target", "sm_90", interpret="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
