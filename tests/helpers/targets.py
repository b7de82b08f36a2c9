"""Compile the Triton kernels for GPUs that are not here.

`backends.triton`, and for sm_90 `backends.hopper` too, run on small CPU tensors as if such a GPU were there, and what
they launch is compiled instead: the kernels, constants, tiles and warps are their own. A line for each variant; the
exit status is 1 if one does not compile, or needs more shared memory than the GPU has.

    python tests/helpers/targets.py --target sm_90 --target gfx942    each kernel, bf16, head dim 128
    python tests/helpers/targets.py --target sm_90 --all              every dtype, head dim, block size and flag
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Size(NamedTuple):
    """Of one call: everything for which no kernel is compiled again."""

    grid: tuple[int, int, int] = (3, 8, 16)
    txt_len: int = 20
    batch: int = 1
    heads: int = 4  # of the keys
    shared: int = 1  # query heads to one of these
    kind: str = "BNSD"  # how tensors lie in memory

    @property
    def length(self) -> int:
        return math.prod(self.grid) + self.txt_len

    def tensor(self, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[batch, heads, length, head_dim]; its values do not matter."""
        batch, length = self.batch, self.length
        if self.kind == "BSND":
            return torch.empty(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)
        if self.kind == "packed":  # a part of q, k and v in one
            return torch.empty(batch, length, heads, 3 * head_dim, dtype=dtype)[..., head_dim:-head_dim].transpose(1, 2)
        if self.kind == "expanded":
            return torch.empty(1, 1, length, head_dim, dtype=dtype).expand(batch, heads, -1, -1)
        if self.kind == "shifted":  # rows start anywhere
            return torch.empty(batch, heads, length, head_dim + 1, dtype=dtype)[..., 1:]
        if self.kind == "channels apart":
            return torch.empty(batch, heads, head_dim, length, dtype=dtype).transpose(2, 3)
        assert self.kind == "BNSD", self.kind
        return torch.empty(batch, heads, length, head_dim, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# what is launched


class Call(NamedTuple):
    """One call of the backend."""

    dtype: torch.dtype
    head_dim: int
    options: dict[str, Any]  # of `sparse_attention`; grid=False: tokens without one, sparsity may be "by head"
    masked: bool = False  # with a key mask
    given: bool = False  # with a block mask
    return_lse: bool = False


def calls(everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5)
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
    for sink, recent in ((False, True), (True, False), (False, False)):
        for is_causal in (False, True):
            choice = dict(ada_bsa, keep_sink=sink, keep_recent=recent, is_causal=is_causal, cdf_threshold=1.0)
            yield Call(torch.bfloat16, 128, choice, masked=is_causal)


def quantised_calls(target: Target, everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5)
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
        yield Call(torch.bfloat16, 128, dict(sparse_type="ada_bsa", sparsity=0.5, precision=precision))


def hopper_calls(everything: bool) -> Iterator[Call]:
    video = dict(sparse_type="rf_v2", sparsity=0.5)
    for precision in ("native", "fp8", "int8"):
        yield Call(torch.bfloat16, 128, dict(video, precision=precision))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision, compensate=True))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision, block_size=(128, 32)))
        yield Call(torch.bfloat16, 128, dict(video, precision=precision), masked=True, return_lse=True)
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
        yield Call(torch.bfloat16, 128, dict(sparse_type="ada_bsa", sparsity=0.5, precision=precision))


class Launch(NamedTuple):
    """A kernel, and everything that the compiler is told about its arguments."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def key(self) -> str:
        return repr((self.kernel.__name__, *self[1:]))

    @property
    def known(self) -> dict[str, str]:
        """The same in words, for each argument and option."""
        found = dict(self.signature)
        for (i, *_), value in self.constants.items():
            found[self.kernel.arg_names[i]] += f" {value}"
        for (i, *_), value in self.attributes.items():
            found[self.kernel.arg_names[i]] += f" {value}"
        return found | {name: str(value) for name, value in self.options.items()}

    def __str__(self) -> str:
        types = sorted({kind[1:] for kind in self.signature.values() if kind in ("*bf16", "*fp16", "*fp32")})
        constants = {self.kernel.arg_names[i]: value for (i, *_), value in self.constants.items()}
        written = [f"{name}={value}" for name, value in constants.items() if name.isupper() and value is not None]
        return " ".join(
            [
                f"{self.kernel.__name__:24}",
                "/".join(types),
                *written,
                *map("{0[0]}={0[1]}".format, self.options.items()),
            ]
        )


def specialise(kernel: Any, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """By Triton's own rules, of what is constant and what is known of the other arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    compiler = make_backend(GPUTarget(*target[:3]))
    bind = create_function_from_signature(kernel.signature, kernel.params, compiler)
    bound, known, rest = bind(*args, **kwargs)
    _, signature, constants, attributes = kernel._pack_args(compiler, dict(kwargs), bound, known, rest)
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    return Launch(kernel, signature, constants, attributes, options)


@contextmanager
def recorded(target: Target, record: Callable[[Launch], Any]) -> Iterator[None]:
    """Kernels are not launched in the meantime but told to `record`, as if the GPU were there."""
    from triton.runtime.jit import JITFunction

    from rainfusion.backends import triton as backend

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        record(specialise(kernel, target, args, kwargs))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(backend, "_capability", return_value=target.capability))
        patches.enter_context(mock.patch.object(backend, "_exact_products", return_value=target.exact_products))
        patches.enter_context(mock.patch.object(torch.version, "hip", "7.0" if target.backend == "hip" else None))
        yield


def launches(target: Target, everything: bool) -> list[Launch]:
    """What the backend launches in these calls, each variant once."""
    from rainfusion.backends import hopper
    from rainfusion.backends import triton as backend

    found: dict[str, Launch] = {}
    with recorded(target, lambda launch: found.setdefault(launch.key, launch)):
        for call in calls(everything):
            run(call, backend)
        for call in quantised_calls(target, everything):
            run(call, backend)
        for call in hopper_calls(everything) if target.capability == (9, 0) else ():
            run(call, hopper)
    return list(found.values())


def run(call: Call, backend: Any, size: Size = Size(), mask_alone: bool = True) -> None:  # noqa: B008 # it never changes
    """The backend's part of `sparse_attention` and of `predict_mask`. Its results are not computed, and not read."""
    from helpers.planned import request
    from rainfusion import BlockMask
    from rainfusion.options import sides
    from rainfusion.pipeline import predict

    q = size.tensor(size.shared * size.heads, call.head_dim, call.dtype)
    k, v = (size.tensor(size.heads, call.head_dim, call.dtype) for _ in range(2))
    keep = torch.ones(size.batch, size.length + 1, dtype=torch.bool)[:, 1:] if call.masked else None
    mask = None
    if call.given:
        block_size = call.options.get("block_size", 128)
        rows, columns = (-(-size.length // side) for side in sides(block_size))
        mask = BlockMask.from_dense(torch.ones(*q.shape[:2], rows, columns, dtype=torch.bool), block_size)
    # planned for a backend that runs here, then asked of the one that is looked at
    options = {name: value for name, value in call.options.items() if name not in ("precision", "grid")}
    if options.get("sparsity") == "by head":
        options["sparsity"] = [0.9, *[0.5] * (q.shape[1] - 1)]
    if options.get("sparse_type") == "rf_v2" and call.options.get("grid", True):
        options.update(latent_shape_q=size.grid, latent_shape_k=size.grid, txt_len=size.txt_len)
    asked = request(q, k, v, keep, mask, return_lse=call.return_lse, **options)
    asked = asked._replace(method=replace(asked.method, precision=call.options.get("precision", "native")))
    keys = backend.prepare(asked)
    backend.attend(asked, keys, mask if mask is not None else predict(asked, backend, keys))
    if asked.predicts and mask_alone:
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
        elif binary.metadata.name == "attention_kernel" and (loop := first_loop(disassembled(file.name))):
            waits = sum("WARPGROUP.DEPBAR" in line for line in loop)
            found += f", {sum(line.endswith(';') for line in loop)} instructions and {waits} waits in the first loop"
    return found


def disassembled(cubin: str) -> list[str]:
    from triton import knobs

    command = [knobs.nvidia.nvdisasm.path, "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def loops_of_products(code: list[str]) -> list[list[str]]:
    labels = {match[1]: i for i, line in enumerate(code) if (match := re.match(r"\s*(\.L_x_\w+):", line))}
    jumps = ((i, re.search(r"@!?U?P\d+ BRA `\((\.L_x_\w+)\)", line)) for i, line in enumerate(code))
    loops = [(labels[match[1]], i) for i, match in jumps if match and labels[match[1]] < i]
    # the loop over rows is around them
    loops = [(start, end) for start, end in loops if not any(start < inner < end for inner, _ in loops)]
    found = [code[start : end + 1] for start, end in loops]
    return [loop for loop in found if sum(_waits_for_logits(line) for line in loop) == 1]


def _waits_for_logits(line: str) -> bool:
    """All products are done but the last, P V, or the last two, if rows of P are summed so, too."""
    return "gsb0, 0x1" in line or "gsb0, 0x2" in line


def first_loop(code: list[str]) -> list[str]:
    """Of those with products that run by themselves; none, where products are instructions that a warp waits for."""
    labels = {match[1]: i for i, line in enumerate(code) if (match := re.match(r"\s*(\.L_x_\w+):", line))}
    for i, line in enumerate(code):
        match = re.search(r"BRA.* `\((\.L_x_\w+)\)", line)
        if match and labels[match[1]] < i and any("GMMA" in one for one in code[labels[match[1]] : i]):
            return code[labels[match[1]] : i + 1]
    return []


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
            counting = _waits_for_logits(line)
            if counting:
                counts.append(0)
        elif counting and "MUFU.EX2" in line:
            counts[-1] += 1
        elif counting and re.search(r"HFMA2\S*\.RELU", line):  # what fp8 has instead, of two at once
            counts[-1] += 2
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
