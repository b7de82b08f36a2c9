"""Compile the Triton kernels for GPUs that are not here.

`backends.triton`, and for sm_90 `backends.hopper` too, run on small CPU tensors as if such a GPU were there, and what
they launch is compiled instead: the kernels, constants, tiles and warps are their own. A line for each variant; the
exit status is 1 if one does not compile, or needs more shared memory than the GPU has.

    python tests/helpers/targets.py --target sm_90 --target gfx942    each kernel, bf16, head dim 128
    python tests/helpers/targets.py --target sm_90 --all              every dtype, head dim, block size and flag
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where helpers are, also for a program


class Target(NamedTuple):
    """A GPU: Triton's names for it, and the shared memory that one program may have."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int

    @property
    def capability(self) -> tuple[int, int] | str:
        return "hip" if isinstance(self.arch, str) else divmod(self.arch, 10)

    @property
    def eight_bits(self) -> tuple[str, ...]:
        """What `triton` quantises to there, as its `why_not` says."""
        if self.arch == "gfx1100":
            return ()
        return ("int8", "fp8") if self.backend == "hip" or self.arch >= 89 else ("int8",)

    @property
    def exact_products(self) -> str:
        return "ieee" if self.backend == "hip" else "tf32x3"


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_86": Target("cuda", 86, 32, 99 * 1024),
    "sm_89": Target("cuda", 89, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024),
    "sm_120": Target("cuda", 120, 32, 99 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
    "gfx1100": Target("hip", "gfx1100", 32, 64 * 1024),
}
TENSOR_MEMORY = 512  # columns of it on sm_100
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")

GRID, TXT = (3, 8, 16), 20
LENGTH = 3 * 8 * 16 + TXT


# ---------------------------------------------------------------------------------------------------------------------
# what is launched


class Call(NamedTuple):
    """One call of the backend."""

    dtype: torch.dtype
    head_dim: int
    options: dict[str, Any]  # of `sparse_attention`
    masked: bool = False  # with a key mask, and two query heads to a key head
    given: bool = False  # with a block mask
    return_lse: bool = False
    strided: bool = False  # head dims apart in memory


def calls(everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
    ada_bsa = dict(sparse_type="ada_bsa", sparsity=0.5, cdf_threshold=0.9)
    if not everything:
        yield Call(torch.bfloat16, 128, video)
        yield Call(torch.bfloat16, 128, ada_bsa, masked=True, return_lse=True)
        yield Call(torch.bfloat16, 128, dict(video, predictor="submeans", compensate=True))
        yield Call(torch.bfloat16, 128, dict(video, predictor="spread", compensate=True, block_size=(128, 32)))
        yield Call(torch.bfloat16, 128, dict(video, sparsity=[0.9, 0.5, 0.3, 0.7], exact_budget=True))
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (128,) if dtype == torch.float16 else (64, 72, 128, 256):  # fp16 is laid out as bf16 is
            for block_size in (64, 128, (128, 32)):
                here = dict(video, block_size=block_size)
                yield Call(dtype, head_dim, here)
                yield Call(dtype, head_dim, here, masked=True, return_lse=True)
                yield Call(dtype, head_dim, dict(here, predictor="submeans", compensate=True), masked=head_dim == 64)
                yield Call(dtype, head_dim, dict(here, predictor="spread", compensate=True), masked=head_dim == 64)
                yield Call(dtype, head_dim, dict(is_causal=True, block_size=block_size), given=True)
                yield Call(dtype, head_dim, dict(block_size=block_size), given=True, masked=True)
            yield Call(dtype, head_dim, ada_bsa)
            yield Call(dtype, head_dim, dict(ada_bsa, is_causal=True), masked=True, return_lse=True)
        yield Call(dtype, 128, dict(video, inner_precise=1), return_lse=True)
        yield Call(dtype, 128, video, strided=True)
    for sink, recent in ((False, True), (True, False), (False, False)):
        for is_causal in (False, True):
            choice = dict(ada_bsa, keep_sink=sink, keep_recent=recent, is_causal=is_causal, cdf_threshold=1.0)
            yield Call(torch.bfloat16, 128, choice, masked=is_causal)


def quantised_calls(target: Target, everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
    for precision in target.eight_bits:
        yield Call(torch.bfloat16, 128, dict(video, precision=precision))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision, block_size=(128, 32), compensate=True))
        if not everything:
            continue
        for head_dim in (64, 72, 128, 256):
            for block_size in (64, 128, (128, 64), (128, 32)):
                here = dict(video, precision=precision, block_size=block_size)
                yield Call(torch.bfloat16, head_dim, here)
                yield Call(torch.bfloat16, head_dim, here, masked=True, return_lse=True)
                yield Call(torch.bfloat16, head_dim, dict(here, compensate=True), return_lse=True)
                yield Call(torch.bfloat16, head_dim, dict(here, compensate=True, predictor="spread"), masked=True)
                causal = dict(precision=precision, block_size=block_size, is_causal=True)
                yield Call(torch.bfloat16, head_dim, causal, given=True, return_lse=True)
        yield Call(torch.float16, 128, dict(video, precision=precision, scale=-1.0), masked=True)
        yield Call(torch.bfloat16, 128, dict(sparse_type="ada_bsa", sparsity=0.5, precision=precision), strided=True)


def hopper_calls(everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5, latent_shape_q=GRID, latent_shape_k=GRID, txt_len=TXT)
    for precision in ("native", "fp8", "int8"):
        yield Call(torch.bfloat16, 128, dict(video, precision=precision))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision, compensate=True))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision, block_size=(128, 32)))
        if not everything:
            continue
        for head_dim in (64, 80, 128):
            for block_size in ((128, 64), (128, 32)):
                here = dict(video, precision=precision, block_size=block_size)
                yield Call(torch.bfloat16, head_dim, here)
                yield Call(torch.bfloat16, head_dim, here, masked=True, return_lse=True)
                yield Call(torch.bfloat16, head_dim, dict(here, compensate=True, predictor="submeans"))
                yield Call(torch.bfloat16, head_dim, dict(here, compensate=True, predictor="spread"))
        for dtype in (torch.bfloat16, torch.float16):
            for head_dim in (64, 96, 128):
                yield Call(dtype, head_dim, dict(video, precision=precision))
                yield Call(dtype, head_dim, dict(video, precision=precision, scale=-1.0), masked=True, return_lse=True)
                yield Call(dtype, head_dim, dict(precision=precision), given=True, return_lse=True)
                yield Call(dtype, head_dim, dict(video, precision=precision, compensate=True), masked=True)
                yield Call(dtype, head_dim, dict(video, precision=precision, compensate=True, predictor="spread"))
        yield Call(torch.bfloat16, 128, dict(sparse_type="ada_bsa", sparsity=0.5, precision=precision), strided=True)


class Launch(NamedTuple):
    """A kernel, and everything that the compiler is told about its arguments."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, int]

    @property
    def key(self) -> str:
        return repr((self.kernel.__name__, *self[1:]))

    def __str__(self) -> str:
        types = sorted({kind[1:] for kind in self.signature.values() if kind in ("*bf16", "*fp16", "*fp32")})
        written = [f"{name}={value}" for name, value in self.constants.items() if name.isupper() and value is not None]
        return " ".join(
            [
                f"{self.kernel.__name__:24}",
                "/".join(types),
                *written,
                *map("{0[0]}={0[1]}".format, self.options.items()),
            ]
        )


def specialise(kernel: Any, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """As Triton does when it launches: None, 1 and `tl.constexpr` are constants, multiples of 16 are known as such.

    Which a kernel may forbid for some of its arguments.
    """
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False), **kwargs)
    launch = Launch(kernel, {}, {}, {}, options)
    for i, parameter in enumerate(kernel.params):
        value = options[parameter.name] if parameter.name in options else values.pop(parameter.name)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            kind = "constexpr"
            launch.constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            kind = "*" + TYPES[value.dtype]
            small = [["tt.pointer_range", 32]] if target.backend == "hip" else []
            aligned = [] if parameter.do_not_specialize_on_alignment else [["tt.divisibility", 16]]
            launch.attributes[(i,)] = [*aligned, *small]
        elif hasattr(value, "block_shape"):  # what the copy engine reads
            kind = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                launch.attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float), f"{parameter.name}: {value!r}"
            kind = "fp32"
        launch.signature[parameter.name] = kind
    assert not values, f"{kernel.__name__} has no argument {list(values)}"
    return launch


def launches(target: Target, everything: bool) -> list[Launch]:
    """What the backend launches in these calls, each variant once."""
    from triton.runtime.jit import JITFunction

    from rainfusion.backends import hopper
    from rainfusion.backends import triton as backend

    found: dict[str, Launch] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = specialise(kernel, target, args, kwargs)
        found.setdefault(launch.key, launch)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        patches.enter_context(mock.patch.object(backend, "_capability", return_value=target.capability))
        patches.enter_context(mock.patch.object(backend, "_exact_products", return_value=target.exact_products))
        patches.enter_context(mock.patch.object(torch.version, "hip", "7.0" if target.backend == "hip" else None))
        for call in calls(everything):
            run(call, backend)
        for call in quantised_calls(target, everything):
            run(call, backend)
        for call in hopper_calls(everything) if target.capability == (9, 0) else ():
            run(call, hopper)
    return list(found.values())


def run(call: Call, backend: Any) -> None:
    """The backend's part of `sparse_attention` and of `predict_mask`. Its results are not computed, and not read."""
    from helpers.planned import request
    from rainfusion import BlockMask
    from rainfusion.options import sides
    from rainfusion.pipeline import predict

    def tensor(heads: int) -> torch.Tensor:
        if call.strided:
            return torch.zeros(1, heads, call.head_dim, LENGTH, dtype=call.dtype).transpose(2, 3)
        return torch.zeros(1, heads, LENGTH, call.head_dim, dtype=call.dtype)

    q = tensor(4)
    k, v = (tensor(2 if call.masked else 4) for _ in range(2))
    keep = torch.ones(1, LENGTH, dtype=torch.bool) if call.masked else None
    mask = None
    if call.given:
        size = call.options.get("block_size", 128)
        rows, columns = (-(-LENGTH // side) for side in sides(size))
        mask = BlockMask.from_dense(torch.ones(1, 4, rows, columns, dtype=torch.bool), size)
    # planned for a backend that runs here, then asked of the one that is looked at
    options = {name: value for name, value in call.options.items() if name != "precision"}
    asked = request(q, k, v, keep, mask, return_lse=call.return_lse, **options)
    asked = asked._replace(method=replace(asked.method, precision=call.options.get("precision", "native")))
    keys = backend.prepare(asked)
    backend.attend(asked, keys, mask if mask is not None else predict(asked, backend, keys))
    if asked.predicts:
        predict(asked, backend)


# ---------------------------------------------------------------------------------------------------------------------
# compiling it


def compiled(launch: Launch, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kind = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = kind(launch.kernel, launch.signature, launch.constants, launch.attributes)
    return triton.compile(source, target=GPUTarget(*target[:3]), options=launch.options)


def resources(binary: Any) -> str:
    """Registers of a thread and what did not fit into them, in the compiler's words."""
    if "amdgcn" in binary.asm:
        names = ("vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_spill_count")
        found = [(name, re.search(rf"\.{name}:\s+(\d+)", binary.asm["amdgcn"])) for name in names]
        return ", ".join(f"{name} {match[1]}" for name, match in found if match)
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
        match = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
        found = f"{match[1]} registers, stack {match[2]}" if match else "registers unknown"
        if binary.metadata.name == "hopper_attention_kernel":
            code = disassembled(file.name)
            found += (
                f", {longest_loop(code)} instructions in the longest loop, {moved_in_loops(code)} moves in loops, "
                f"{overlapped_exponentials(code)} exponentials while P V runs"
            )
    return found


def disassembled(cubin: str) -> list[str]:
    from triton import knobs

    command = [knobs.nvidia.nvdisasm.path, "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def loops_of_products(code: list[str]) -> list[list[str]]:
    labels = {match[1]: i for i, line in enumerate(code) if (match := re.match(r"\s*(\.L_x_\w+):", line))}
    jumps = ((i, re.search(r"@!?U?P\d+ BRA `\((\.L_x_\w+)\)", line)) for i, line in enumerate(code))
    loops = [(labels[match[1]], i) for i, match in jumps if match and labels[match[1]] < i]
    found = [code[start : end + 1] for start, end in loops]
    return [loop for loop in found if sum("gsb0, 0x1" in line for line in loop) == 1]


def moved_in_loops(code: list[str]) -> int:
    """The most instructions, in a loop with products, that move what registers should hold or hold together."""
    loops = loops_of_products(code)
    return max(sum(bool(re.search(r"\b(LDL|STL|PRMT)\b", line)) for line in loop) for loop in loops)


def longest_loop(code: list[str]) -> int:
    """Of those with products."""
    return max(sum(line.endswith(";") for line in loop) for loop in loops_of_products(code))


def overlapped_exponentials(code: list[str]) -> int:
    """Of each warpgroup's loop: how many stand between the wait for Q K^T, with P V under way, and the wait for P V.

    The compiler may move the latter up; then nothing overlaps, and the kernel is a tenth slower.
    """
    counts, counting = [], False
    for line in code:
        if "WARPGROUP.DEPBAR" in line:
            counting = "gsb0, 0x1" in line  # all but the last product are done
            if counting:
                counts.append(0)
        elif counting and "MUFU.EX2" in line:
            counts[-1] += 1
    return min(counts, default=0)


def why_not(launch: Launch, target: Target) -> tuple[str, str | None]:
    """-> what it takes, and why it cannot run there, or None."""
    try:
        binary = compiled(launch, target)
    except Exception as error:  # whatever the compiler raises is the answer
        return "", f"does not compile: {type(error).__name__}: {error}"
    shared, tensor_memory = binary.metadata.shared, getattr(binary.metadata, "tmem_size", 0) or 0
    takes = f"{shared} B shared, {resources(binary)}"
    if shared > target.shared_bytes:
        return takes, f"needs {shared} B of shared memory, and {target.shared_bytes} B is all there is"
    if tensor_memory > TENSOR_MEMORY:
        return takes, f"needs {tensor_memory} columns of tensor memory, and {TENSOR_MEMORY} is all there is"
    return takes, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="a GPU; may be repeated; all by default")
    parser.add_argument("--all", action="store_true", help="every variant rather than each kernel once")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    chosen = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    failures = 0
    for name in chosen.target or TARGETS:
        target = TARGETS[name]
        for launch in launches(target, chosen.all):
            if chosen.kernel not in launch.kernel.__name__:
                continue
            start = time.perf_counter()
            takes, reason = why_not(launch, target)
            seconds = time.perf_counter() - start
            print(
                f"{name:8} {launch}: {takes} ({seconds:.1f} s)" + (f"\n    FAILED: {reason}" if reason else ""),
                flush=True,
            )
            failures += reason is not None
    print(f"{failures} failed" if failures else "all compile and fit")
    return 1 if failures else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:  # what an earlier run compiled does not count
        os.environ["TRITON_CACHE_DIR"] = cache
        sys.exit(main())
