"""Runs `hopper`'s attention kernel without a GPU: its own source, with a language that computes instead of compiling.

    with emulated(seed=0):
        out = sparse_attention(q, k, v, backend="hopper", ...)  # on a CPU

The copy engine, tensor cores, barriers and the machine code that stands in the kernel are emulated as they are
documented; the passes before run in Triton's interpreter. Where hardware is free to choose, so is the emulation, at
random by its seed: which warps go on, and when copies and products are done. From the moment a copy into shared memory
begins there is NaN or garbage in its place. So a barrier that is missing, or waits for the wrong phase, gives wrong
numbers or a deadlock, which is an error here. What it cannot show is speed, and races between lanes of one warpgroup,
which are one value here.

Addresses in shared memory are those of the layouts, swizzled; addresses in global memory are checked against the
memory that the caller's tensor is in.
"""

import builtins
import math
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.experimental.gluon import language as real

from helpers import benchmarks

TYPES = {
    real.float32: torch.float32, real.float16: torch.float16, real.bfloat16: torch.bfloat16,
    real.float8e4nv: torch.float8_e4m3fn, real.int8: torch.int8, real.int16: torch.int16, real.int32: torch.int32,
    real.int64: torch.int64, real.int1: torch.bool,
}  # fmt: skip
NAMES = {kind: name for name, kind in TYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SOURCE = Path(__file__).parents[2] / "src/rainfusion/backends/hopper/kernels/attention.py"
SHARED_BYTES = 227 * 1024  # that a program may have
LONGEST = 120.0  # seconds without a step, of a program that does not end


# ---------------------------------------------------------------------------------------------------------------------
# values of registers, and pointers


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def garbage(shape: Any, kind: torch.dtype) -> torch.Tensor:
    """What nobody wrote: NaN, or a number that is far from all others."""
    if kind == torch.bool:
        return torch.ones(shape, dtype=kind)
    if kind.is_floating_point:
        return torch.full(shape, math.nan).to(kind)
    return torch.full(shape, torch.iinfo(kind).min, dtype=kind)


class Value:
    """A tensor of the language, or a number if it has no dimensions. layout: of its lanes, where that is known."""

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data, self.layout = data, layout

    @property
    def dtype(self) -> Any:
        return NAMES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout)

    def to(self, kind: Any, bitcast: bool = False) -> "Value":
        target = TYPES[kind]
        if bitcast:
            return Value(self.data.contiguous().view(target), self.layout)
        if target == torch.float8_e4m3fn:  # the largest where there is none as large
            return Value(self.data.float().clamp(-448.0, 448.0).to(target), self.layout)
        if self.data.is_floating_point() and not target.is_floating_point:
            return Value(self.data.float().nan_to_num(0.0).trunc().to(target), self.layout)
        return Value(self.data.to(target), self.layout)

    def reshape(self, shape: list[int]) -> "Value":
        return Value(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Value":
        return Value(self.data.permute(order))

    def __getitem__(self, where: Any) -> "Value":
        return Value(self.data[where])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> "Value":
        return Value(-self.data, self.layout)


def as_value(x: Any, like: Value | None = None) -> Value:
    """A number becomes an int32 or an fp32, or has the type of what it meets."""
    if isinstance(x, Value):
        return x
    kind = torch.float32 if isinstance(x, float) else torch.bool if isinstance(x, bool) else torch.int32
    if like is not None and (like.data.is_floating_point() or not isinstance(x, float)):
        kind = like.data.dtype
    return Value(torch.tensor(x, dtype=kind))


def alike(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Both of one type, and the layout of the result."""
    x, y = as_value(x, y if isinstance(y, Value) else None), as_value(y, x if isinstance(x, Value) else None)
    kind = torch.promote_types(x.data.dtype, y.data.dtype)
    shape = torch.broadcast_shapes(x.data.shape, y.data.shape)
    layout = next((z.layout for z in (x, y) if z.layout is not None and z.data.shape == shape), None)
    return x.data.to(kind), y.data.to(kind), layout


def _binary(name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def forwards(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        x, y, layout = alike(self, other)
        return Value(function(x, y), layout)

    def backwards(self: Value, other: Any) -> Value:
        x, y, layout = alike(other, self)
        return Value(function(x, y), layout)

    setattr(Value, f"__{name}__", forwards)
    setattr(Value, f"__r{name}__", backwards)


def _divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "floordiv": _divided,
    "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "rshift": torch.bitwise_right_shift, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "eq": torch.eq, "ne": torch.ne,
}.items():  # fmt: skip
    _binary(_name, _function)


class Pointer:
    """Places in the memory that a tensor is in, counted in its elements."""

    def __init__(self, memory: torch.Tensor, at: Value) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to(cls, x: torch.Tensor) -> "Pointer":
        size = x.untyped_storage().nbytes() // x.element_size()
        whole = x.as_strided((size,), (1,), 0)
        return cls(whole, Value(torch.tensor(x.storage_offset(), dtype=torch.int64)))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=NAMES[self.memory.dtype])

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.at + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.at - other)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where, and which of them count; an error if one of these is in nobody's memory."""
        at = self.at.data
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else as_value(mask).data
        at, mask = torch.broadcast_tensors(at, mask)
        used = at[mask]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= self.memory.numel()):
            raise IndexError(
                f"elements {int(used.min())} to {int(used.max())} of memory that has {self.memory.numel()}"
            )
        return torch.where(mask, at, 0), mask


# ---------------------------------------------------------------------------------------------------------------------
# shared memory


def addresses(shape: list[int], size: int, layout: Any) -> torch.Tensor:
    """Bytes from the start of a buffer, int64 of this shape; size: bytes of an element."""
    swizzle = getattr(layout, "swizzle_byte_width", 0)
    rank = layout.rank if swizzle else len(shape)
    parts, block = shape[: len(shape) - rank], shape[len(shape) - rank :]
    columns = block[-1]
    rows = math.prod(block[:-1])
    width = min(columns * size, swizzle) if swizzle else columns * size
    o_row = torch.arange(rows)[:, None]
    o_byte = torch.arange(columns)[None, :] * size
    at = o_byte // width * (rows * width) + o_row * width + o_byte % width
    if swizzle:  # bits 4 to 6, by the row of 128 bytes, as many as the swizzle is wide
        at = at ^ ((at >> 7) & (swizzle // 16 - 1)) << 4
    of_parts = torch.arange(math.prod(parts))[:, None, None] * (rows * columns * size)
    return (of_parts + at).reshape(shape)


class Buffer:
    """Shared memory. by_lanes: what they wrote last, of which tensor cores know nothing before the next fence."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.by_lanes = torch.zeros(size, dtype=torch.bool)


class Shared:
    """A view of a buffer. at: bytes, of each element."""

    def __init__(self, buffer: Buffer, kind: Any, at: torch.Tensor, layout: Any) -> None:
        self.buffer, self.dtype, self.at, self.layout = buffer, kind, at, layout

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    @property
    def size(self) -> int:
        return int(TYPES[self.dtype].itemsize)

    def index(self, i: Any) -> "Shared":
        i = int(i)
        assert 0 <= i < self.shape[0], f"part {i} of {self.shape[0]}"
        return Shared(self.buffer, self.dtype, self.at[i], self.layout)

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.buffer, self.dtype, self.at.reshape(shape), self.layout)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.buffer, self.dtype, self.at.permute(order), self.layout)

    def _reinterpret(self, kind: Any, shape: list[int], layout: Any) -> "Shared":
        at = addresses(shape, TYPES[kind].itemsize, layout)
        assert at.numel() * TYPES[kind].itemsize == self.buffer.bytes.numel()
        return Shared(self.buffer, kind, at, layout)

    def load(self, layout: Any = None) -> Value:
        found = self.buffer.bytes.view(BITS[self.size])[self.at // self.size]
        return Value(found.view(TYPES[self.dtype]), layout)

    def store(self, x: Value, by_lanes: bool = True) -> None:
        assert x.shape == self.shape and x.dtype == self.dtype
        self.buffer.bytes.view(BITS[self.size])[self.at // self.size] = bits(x.data)
        self.buffer.by_lanes[self.at] = by_lanes

    def forget(self) -> None:
        self.store(Value(garbage(self.shape, TYPES[self.dtype])), by_lanes=False)


class Barrier:
    """Its phase ends when so many have arrived, and so many bytes."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def check(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


class Barriers:
    def __init__(self, shape: list[int]) -> None:
        self.shape = shape
        self.each = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


# ---------------------------------------------------------------------------------------------------------------------
# warps and copies that run side by side


class Task:
    """Warps of a program that do the same. number: of the program."""

    def __init__(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.number, self.function, self.args = number, function, args
        self.ready: Callable[[], bool] = lambda: True
        self.go, self.done = threading.Semaphore(0), False
        self.error: BaseException | None = None
        self.products: list[Product] = []  # tensor cores', under way
        self.fetched: list[Callable[[], None]] = []  # copies by lanes, before they are a group
        self.groups: list[list[Callable[[], None]]] = []


class Machine:
    """All programs of a launch: tasks of which one runs at a time, and copies that arrive in between."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.copies: list[Callable[[], None]] = []
        self.back = threading.Semaphore(0)
        self.stopped = False
        self.speeds: list[int] = []  # of the tasks and of copies
        self.local = threading.local()

    @property
    def task(self) -> Task:
        task: Task = self.local.task
        return task

    def run(self) -> None:
        self.speeds = [1] * (1 + len(self.tasks))
        threads = [threading.Thread(target=self._live, args=(task,), daemon=True) for task in self.tasks]
        for thread in threads:
            thread.start()
        try:
            while not all(task.done for task in self.tasks):
                self._step()
        finally:
            self.stopped = True
            for task, thread in zip(self.tasks, threads, strict=True):
                task.go.release()
                thread.join(LONGEST)
        assert not self.copies, "copies that nobody waited for"
        left = (task.products or task.fetched or task.groups for task in self.tasks)
        assert not any(left), "work that nobody waited for"

    def _step(self) -> None:
        choices: list[Any] = [task for task in self.tasks if not task.done and task.ready()]
        choices += [None] if self.copies else []
        if not choices:
            raise RuntimeError("deadlock: every warp waits for a barrier")
        if self.random.random() < 0.05:  # for a while some are much faster than others
            self.speeds = self.random.choices([1, 10, 1000], k=1 + len(self.tasks))
        speeds = dict(zip([*self.tasks, None], self.speeds, strict=True))
        weights = [speeds[task] for task in choices]
        task = self.random.choices(choices, weights)[0]
        if task is None:
            self.copies.pop(self.random.randrange(len(self.copies)))()
            return
        task.go.release()
        if not self.back.acquire(timeout=LONGEST):
            raise RuntimeError("a warp that does not end")
        if task.error is not None:
            raise task.error

    def _live(self, task: Task) -> None:
        self.local.task = task
        task.go.acquire()
        try:
            if not self.stopped:
                task.function(*task.args)
        except _Stopped:
            pass
        except BaseException as error:
            task.error = error
        task.done = True
        self.back.release()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Others may go on first."""
        task = self.task
        task.ready = ready
        self.back.release()
        task.go.acquire()
        if self.stopped:
            raise _Stopped


class _Stopped(Exception):
    pass


class Product:
    """Of tensor cores, computed until it is waited for. sums: how they add up, see `Sums`."""

    def __init__(self, a: Any, b: Shared, start: Value, use_start: Any, sums: "Sums") -> None:
        for x in (a, b):
            if isinstance(x, Shared):
                assert not x.buffer.by_lanes[x.at].any(), "lanes wrote it, and no fence followed"
        if b.size == 1:
            assert int(b.at[1, 0] - b.at[0, 0]) == 1, "eight bits: what is summed over lies side by side"
        self.a, self.b, self.start, self.use_start, self.sums = a, b, start, bool(use_start), sums
        self.result: Value | None = None

    def finish(self) -> None:
        a = (self.a.load() if isinstance(self.a, Shared) else self.a).data
        b, start = self.b.load().data, self.start.data
        assert a.dtype == b.dtype and a.shape[1] == b.shape[0] and list(start.shape) == [a.shape[0], b.shape[1]]
        start = start if self.use_start else torch.zeros_like(start)
        kind = start.dtype
        if kind == torch.int32:
            total = start + (a.double() @ b.double()).to(kind)
        elif a.dtype != torch.float8_e4m3fn:
            total = (start.double() + a.double() @ b.double()).to(kind)
        else:
            total = start
            for keys in torch.arange(a.shape[1]).split(32):
                total = self.sums(a.double()[:, keys], b.double()[keys], total.double()).to(kind)
        self.result = Value(total, self.start.layout)


Sums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def exact_sums(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return start + a @ b


# as a Hopper GPU adds up products of eight bits
sums_of_14_bits: Sums = benchmarks.load("accumulators").one_step


# ---------------------------------------------------------------------------------------------------------------------
# machine code in the kernel


def lanes(layout: Any, shape: list[int]) -> torch.Tensor:
    """int64 [threads, registers]: which element of a tensor, counted over all of it, a lane's register has."""
    if isinstance(layout, real.DotOperandLayout) and layout.k_width == 4:  # the left one, of eight bits
        assert shape[0] == 64 and layout.operand_index == 0
        registers = [[0, 1], [0, 2], [8, 0], *([0, 16 << i] for i in range((shape[1] // 16).bit_length() - 1))]
        bases = [registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]]
    elif isinstance(layout, real.NVMMADistributedLayout):
        columns = layout.instr_shape[1]
        assert shape == [64, columns] and layout.warps_per_cta == [4, 1], "one instruction's result of one warpgroup"
        registers = [[0, 1], [8, 0], *([0, 8 << i] for i in range((columns // 8).bit_length() - 1))]
        bases = [registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]]
    else:
        assert isinstance(layout, real.DistributedLinearLayout), f"which lane has what of {layout}?"
        bases = [layout.reg_bases, layout.lane_bases, layout.warp_bases]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]

    def spanned(group: list[list[int]]) -> torch.Tensor:
        at = torch.zeros(1, len(shape), dtype=torch.int64)
        for base in group:
            at = torch.cat([at, at ^ torch.tensor(base)])
        return at

    registers, lane, warp = (spanned(group) for group in bases)
    threads = (warp[:, None] ^ lane[None]).flatten(0, 1)
    return ((threads[:, None] ^ registers[None]) * torch.tensor(strides)).sum(2)


class Code:
    """Instructions in PTX, for all lanes at once. Registers are tensors of bits, int32 or int16."""

    def __init__(self, text: str) -> None:
        text = text.strip()
        if text.startswith("{ .reg"):
            text = text[1:-1]
        self.lines = [line.strip() for line in text.split(";") if line.strip() and not line.strip().startswith(".reg")]

    def run(self, registers: dict[str, torch.Tensor]) -> None:
        self.registers, away = registers, {}
        self.active: torch.Tensor | None = None
        for line in self.lines:
            label = re.match(r"(\w+):", line)
            if label:
                self.active, line = away.pop(label[1]), line[label.end() :].strip()
            jump = re.match(r"@(!?)(\w+) bra (\w+)", line)
            if jump:
                away[jump[3]] = self.active
                taken = self.registers[jump[2]] ^ bool(jump[1])
                self.active = ~taken if self.active is None else self.active & ~taken
            elif line:
                self.step(*line.split(None, 1))

    def step(self, code: str, rest: str) -> None:
        names = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        target, *sources = names
        if target.startswith("{"):  # halves of a register
            low, high = target[1:-1].split(",")
            found = self.read(sources[0])
            self.write(low.strip(), found.to(torch.int16))
            self.write(high.strip(), (found >> 16).to(torch.int16))
            return
        self.write(target, OPERATIONS[code](*(self.read(x) for x in sources)))

    def read(self, name: str) -> torch.Tensor:
        if name.startswith("{"):
            low, high = (self.read(x.strip()).to(torch.int32) for x in name[1:-1].split(","))
            return (high << 16) | (low & 0xFFFF)
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name[:2] in ("0f", "0x") else int(name)
        return torch.tensor(number - (number >> 31 << 32), dtype=torch.int32)

    def write(self, name: str, found: torch.Tensor) -> None:
        before = self.registers.get(name)
        if self.active is not None and before is not None:
            found = torch.where(self.active, found, before)
        self.registers[name] = found


def _floats(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of float64, which hold products of two fp32 exactly -> rounded to fp32."""
    return lambda *xs: bits(function(*(x.view(torch.float32).double() for x in xs)).float())


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """16 bits: NaN has all of them set but its sign's, which the kernel relies on."""
    return torch.where(x.isnan(), torch.tensor(0x7FFF, dtype=torch.int16).view(x.dtype), x)


def _halves(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of two numbers of f16 in a register each, likewise."""

    def run(*xs: torch.Tensor) -> torch.Tensor:
        xs = tuple(bits(x).unsqueeze(-1).view(torch.float16).double() for x in torch.broadcast_tensors(*xs))
        return _canonical(function(*xs).to(torch.float16)).view(torch.int32).squeeze(-1)

    return run


def _converted(kind: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        both = torch.stack([low.view(torch.float32), high.view(torch.float32)], -1).to(kind)
        return _canonical(both).view(torch.int32).squeeze(-1)

    return run


def _e4m3(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    both = torch.stack([low.view(torch.float32), high.view(torch.float32)], -1).clamp(-448.0, 448.0)
    return both.to(torch.float8_e4m3fn).view(torch.int16).squeeze(-1)


def _bytes(x: torch.Tensor, y: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(x)
    for i in range(4):
        which = (int(picked) >> 4 * i) & 7
        found = found | ((((x, y)[which // 4] >> (which % 4 * 8)) & 0xFF) << (8 * i))
    return found


def _rounded_up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    exact = x.view(torch.float32).double() + y.view(torch.float32).double()
    near = exact.float()
    return bits(torch.where(near.double() < exact, near.nextafter(torch.tensor(math.inf)), near))


def _any(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Over the lanes of a warp: [threads, groups]."""
    return x.unflatten(0, (-1, 32)).any(1, keepdim=True).expand(-1, 32, -1).flatten(0, 1)


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda x: x,
    "mov.f32": lambda x: x,
    "and.b32": torch.bitwise_and,
    "prmt.b32": _bytes,
    "add.rp.f32": _rounded_up,
    "sub.f32": _floats(torch.sub),
    "mul.f32": _floats(torch.mul),
    "max.f32": _floats(torch.fmax),
    "fma.rn.f32": _floats(lambda x, y, z: x * y + z),
    "ex2.approx.ftz.f32": _floats(torch.exp2),
    "cvt.rn.f16x2.f32": _converted(torch.float16),
    "cvt.rn.bf16x2.f32": _converted(torch.bfloat16),
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3,
    "cvt.f32.f16": lambda x: bits(x.view(torch.float16).float()),
    "max.f16": lambda x, y: bits(torch.fmax(x.view(torch.float16), y.view(torch.float16))),
    "max.f16x2": _halves(torch.fmax),
    "add.rn.f16x2": _halves(torch.add),
    "fma.rn.f16x2": _halves(lambda x, y, z: x * y + z),
    "fma.rn.relu.f16x2": _halves(lambda x, y, z: (x * y + z).clamp(min=0.0)),
    "setp.eq.b32": torch.eq,
    "setp.neu.f32": lambda x, y: x.view(torch.float32) != y.view(torch.float32),
    "setp.neu.or.f32": lambda x, y, z: (x.view(torch.float32) != y.view(torch.float32)) | z,
    "vote.sync.any.pred": _any,
}


def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """pack: how many neighbours of a lane's registers one run of the code has; as many registers as they fill."""
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    values = [as_value(x) for x in args]
    data = torch.broadcast_tensors(*(x.data for x in values))
    shape = data[0].shape
    layout = next((x.layout for x in values if x.layout is not None and x.data.shape == shape), None)
    order = None if pack == 1 else lanes(layout, list(shape))
    taken = [register for x in data for register in _taken_apart(bits(x), order, pack)]
    given = [max(1, pack * TYPES[kind].itemsize // 4) for kind in kinds]
    assert len(constraints.split(",")) == sum(given) + len(taken), "registers and constraints"
    registers = {f"${sum(given) + i}": x for i, x in enumerate(taken)}
    Code(asm).run(registers)
    found, at = [], 0
    for kind, number in zip(kinds, given, strict=True):
        outs = [registers[f"${at + i}"] for i in range(number)]
        found.append(Value(_put_together(outs, TYPES[kind], order, pack, shape), layout))
        at += number
    return tuple(found) if isinstance(dtype, tuple) else found[0]


def _taken_apart(x: torch.Tensor, order: torch.Tensor | None, pack: int) -> list[torch.Tensor]:
    if order is None:
        return [x]
    groups = x.flatten()[order].unflatten(1, (-1, pack))
    if x.element_size() < 4:
        groups = groups.contiguous().view(torch.int32)
    return list(groups.unbind(2))


def _put_together(
    registers: list[torch.Tensor], kind: torch.dtype, order: torch.Tensor | None, pack: int, shape: Any
) -> torch.Tensor:
    if order is None:
        return registers[0].expand(shape).contiguous().view(kind)
    groups = torch.stack([x.expand(order.shape[0], order.shape[1] // pack) for x in registers], 2)
    groups = groups.contiguous().view(BITS[kind.itemsize]).flatten(1)  # [threads, registers]
    found = torch.empty(math.prod(shape), dtype=groups.dtype)
    found[order.flatten()] = groups.flatten()
    return found.reshape(shape).view(kind)


# ---------------------------------------------------------------------------------------------------------------------
# the language


def _largest(x: Value, axis: int) -> Value:
    """Of numbers; NaN if there are none."""
    data = x.data.float() if x.data.is_floating_point() else x.data
    if not data.is_floating_point():
        return Value(data.amax(axis))
    nan = data.isnan()
    found = data.masked_fill(nan, -math.inf).amax(axis).masked_fill(nan.all(axis), math.nan)
    return Value(found.to(x.data.dtype))


def _reduce(x: Value, axis: int, function: Callable[[Value, Value], Value]) -> Value:
    parts = [Value(part) for part in x.data.unbind(axis)]
    while len(parts) > 1:
        parts = [function(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _where(condition: Any, x: Any, y: Any) -> Value:
    x, y, layout = alike(x, y)
    return Value(torch.where(as_value(condition).data, x, y), layout)


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def run(x: Any, y: Any) -> Value:
        x, y, layout = alike(x, y)
        return Value(function(x, y), layout)

    return run


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    at, mask = pointer.places(mask)
    found = pointer.memory[at]
    missing = garbage((), found.dtype) if other is None else as_value(other).data.to(found.dtype)
    return Value(torch.where(mask, found, missing))


def _store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at, mask = pointer.places(mask)
    pointer.memory[at[mask]] = as_value(x).data.to(pointer.memory.dtype).broadcast_to(at.shape)[mask]


class Language:
    """`gluon.language`, and what the kernel imports beside it, for one launch after the other."""

    def __init__(self, sums: Sums) -> None:
        self.sums = sums

    def start(self, programs: int, seed: int) -> None:
        self.programs, self.machine = programs, Machine(seed)
        self.buffers: list[list[Buffer]] = []  # of each program

    def set_up(self, number: int) -> None:
        """What follows is done by a program before its warps go their ways."""
        self.number = number
        self.buffers.append([])
        self.room = SHARED_BYTES

    def module(self) -> SimpleNamespace:
        kinds = {str(name): getattr(real, name) for name in ("float32", "float16", "bfloat16", "float8e4nv")}
        kinds.update({name: getattr(real, name) for name in ("int8", "int16", "int32", "int64")})
        layouts = (
            "BlockedLayout", "SliceLayout", "DotOperandLayout", "DistributedLinearLayout", "NVMMADistributedLayout",
            "NVMMASharedLayout", "SwizzledSharedLayout",
        )  # fmt: skip
        return SimpleNamespace(
            **kinds,
            **{name: getattr(real, name) for name in layouts},
            constexpr=lambda x: x, static_range=range, to_tensor=as_value,
            program_id=lambda axis: as_value(self.machine.task.number),
            num_programs=lambda axis: as_value(self.programs),
            arange=lambda start, end, layout: Value(torch.arange(start, end, dtype=torch.int32), layout),
            full=lambda shape, x, kind, layout: Value(torch.full(shape, x, dtype=TYPES[kind]), layout),
            zeros=lambda shape, kind, layout: Value(torch.zeros(shape, dtype=TYPES[kind]), layout),
            zeros_like=lambda x: Value(torch.zeros_like(x.data), x.layout),
            where=_where, maximum=_elementwise(torch.fmax), minimum=_elementwise(torch.fmin),
            abs=lambda x: Value(x.data.abs(), x.layout), log2=lambda x: Value(x.data.log2(), x.layout),
            sum=lambda x, axis: Value(x.data.sum(axis, dtype=x.data.dtype)), max=_largest, reduce=_reduce,
            split=lambda x: tuple(Value(part) for part in x.data.unbind(-1)),
            join=lambda x, y: Value(torch.stack([x.data, y.data], -1)),
            convert_layout=lambda x, layout: Value(x.data, layout),
            load=_load, store=_store, atomic_add=self._atomic_add, inline_asm_elementwise=inline_asm_elementwise,
            thread_barrier=lambda: None, allocate_shared_memory=self._allocate, warp_specialize=self._specialize,
        )  # fmt: skip

    def imports(self) -> dict[str, Any]:
        """What each name that begins with `triton` is."""
        language = self.module()
        hopper = SimpleNamespace(
            fence_async_shared=self._fence, warpgroup_mma=self._product, warpgroup_mma_wait=self._wait_for_products,
            mbarrier=SimpleNamespace(
                MBarrierLayout=lambda: "barriers", init=self._init, wait=self._wait, arrive=self._arrive,
                expect=self._expect,
            ),
            tma=SimpleNamespace(async_copy_global_to_shared=self._copy),
        )  # fmt: skip
        lanes = SimpleNamespace(
            async_copy_global_to_shared=self._fetch, commit_group=self._commit, wait_group=self._wait_for_groups
        )
        return {
            "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=_jit)),
            "triton.experimental.gluon": SimpleNamespace(language=language),
            "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(async_copy=lanes),
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
        }

    def _atomic_add(self, pointer: Pointer, x: int, sem: str) -> Value:
        self.machine.wait()
        before = _load(pointer)
        _store(pointer, before + x)
        return before

    def _allocate(self, kind: Any, shape: list[int], layout: Any, value: Value | None = None) -> Any:
        size = TYPES[kind].itemsize
        self.room -= math.prod(shape) * size
        assert self.room >= 0, "more shared memory than there is"
        if layout == "barriers":
            return Barriers(shape)
        buffer = Buffer(math.prod(shape) * size)
        self.buffers[self.number].append(buffer)
        made = Shared(buffer, kind, addresses(list(shape), size, layout), layout)
        if value is None:
            made.forget()
        else:
            made.store(value)
        return made

    def _specialize(self, parts: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        self.machine.tasks += [Task(self.number, *part) for part in parts]

    def _fence(self) -> None:
        number = getattr(self.machine.local, "task", self).number
        for buffer in self.buffers[number]:
            buffer.by_lanes.zero_()

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _wait(self, barrier: Barrier, phase: Any) -> None:
        phase = int(phase)
        self.machine.wait(lambda: barrier.phase != phase)

    def _arrive(self, barrier: Barrier, count: int) -> None:
        barrier.pending -= count
        barrier.check()
        self.machine.wait()

    def _expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        barrier.pending -= 1
        barrier.check()
        self.machine.wait()

    def _copy(self, box: "Box", at: list[Any], barrier: Barrier, target: Shared) -> None:
        """By the copy engine: what lies past an end of the tensor is 0."""
        places = [int(x) for x in at]
        target.forget()

        def arrive() -> None:
            target.store(Value(box.read(places).reshape(target.shape)), by_lanes=False)
            barrier.bytes -= box.block_type.nbytes
            assert barrier.bytes >= 0, "more bytes than were expected"
            barrier.check()

        assert target.shape == box.block_type.shape and target.layout == box.layout
        assert int(target.at.min()) % max(16, 8 * box.layout.swizzle_byte_width) == 0, "it would be swizzled otherwise"
        self.machine.copies.append(arrive)
        self.machine.wait()

    def _fetch(self, target: Shared, pointer: Pointer, mask: Any) -> None:
        """By lanes; 0 where the mask is."""
        target.forget()
        task = self.machine.task
        task.fetched.append(lambda: target.store(_load(pointer, mask, 0.0)))

    def _commit(self) -> None:
        task = self.machine.task
        task.groups.append(task.fetched)
        task.fetched = []

    def _wait_for_groups(self, outstanding: int) -> None:
        groups = self.machine.task.groups
        while len(groups) > outstanding:
            for fetch in groups.pop(0):
                fetch()

    def _product(self, a: Any, b: Shared, start: Value, use_acc: Any, is_async: bool) -> Product:
        assert is_async
        product = Product(a, b, start, use_acc, self.sums)
        self.machine.task.products.append(product)
        if self.machine.random.random() < 0.5:  # as soon as it may be, or as late
            product.finish()
        return product

    def _wait_for_products(self, outstanding: int, deps: list[Any]) -> Any:
        under_way = self.machine.task.products
        while len(under_way) > outstanding:
            product = under_way.pop(0)
            if product.result is None:
                product.finish()
        assert not any(x in under_way for x in deps), "a product that is still under way"
        results = tuple(x.result for x in deps)
        return results if len(results) > 1 else results[0]


@dataclass
class Box:
    """A descriptor for the copy engine."""

    base: torch.Tensor
    sizes: list[int]
    strides: list[int]
    layout: Any
    block_type: Any

    @classmethod
    def of(cls, descriptor: Any) -> "Box":
        base = descriptor.base
        shape = list(descriptor.block_shape)
        block = SimpleNamespace(shape=shape, nbytes=math.prod(shape) * base.element_size())
        steps = [stride * base.element_size() for stride in descriptor.strides[:-1]]
        assert base.data_ptr() % 16 == 0 and descriptor.strides[-1] == 1 and max(shape) <= 256
        assert all(step > 0 and step % 16 == 0 for step in steps), f"the copy engine has no steps of {steps} bytes"
        return cls(base, list(descriptor.shape), list(descriptor.strides), descriptor.layout, block)

    @property
    def dtype(self) -> Any:
        return NAMES[self.base.dtype]

    def read(self, at: list[int]) -> torch.Tensor:
        shape = self.block_type.shape
        found = torch.zeros(shape, dtype=BITS[self.base.element_size()])
        begin = [max(0, x) for x in at]
        end = [min(x + n, size) for x, n, size in zip(at, shape, self.sizes, strict=True)]
        whole = self.base.view(found.dtype).as_strided(self.sizes, self.strides, self.base.storage_offset())
        part = whole[tuple(slice(x, max(x, y)) for x, y in zip(begin, end, strict=True))]
        inside = tuple(slice(x - y, x - y + n) for x, y, n in zip(begin, at, part.shape, strict=True))
        found[inside] = part
        return found.view(self.base.dtype)


def _jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda function: function


class Kernel:
    """Launched as the real one is."""

    def __init__(self, seed: int, sums: Sums, source: str) -> None:
        self.seed = seed
        self.language = Language(sums)
        self.launched = 0
        fakes = self.language.imports()

        def imported(name: str, *args: Any, **kwargs: Any) -> Any:
            return fakes[name] if name.startswith("triton") else builtins.__import__(name, *args, **kwargs)

        names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": imported}, "__name__": "emulated"}
        exec(compile(source, str(SOURCE), "exec"), names)
        self.names = names  # of the source
        self.function = names["hopper_attention_kernel"]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            self.launched += 1
            given = [self._argument(x) for x in args]
            self.language.start(grid[0], self.seed)
            for number in range(grid[0]):
                self.language.set_up(number)
                self.function(*given, **constants)
            self.language.machine.run()

        return run

    @staticmethod
    def _argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer.to(x)
        if hasattr(x, "block_shape"):
            return Box.of(x)
        if isinstance(x, int) and not isinstance(x, bool) and abs(x) >= 2**31:
            return Value(torch.tensor(x, dtype=torch.int64))
        return x if x is None else as_value(x)


@contextmanager
def emulated(seed: int = 0, programs: int = 3, sums: Sums = exact_sums, source: str | None = None) -> Iterator[Kernel]:
    """`hopper` takes CPU tensors in the meantime, as if they were a Hopper GPU's with so many multiprocessors.

    source: of the kernel, if it is to be another.
    """
    from rainfusion.backends import hopper
    from rainfusion.backends.hopper.kernels import attention

    kernel = Kernel(seed, sums, SOURCE.read_text() if source is None else source)
    asked = hopper.why_not

    def why_not(call: Any, shapes: Any) -> str | None:
        return asked(call, shapes._replace(device=torch.device("cuda")))

    with (
        mock.patch.object(attention, "hopper_attention_kernel", kernel),
        mock.patch.object(hopper, "why_not", why_not),
        mock.patch.object(hopper, "_multiprocessors", return_value=programs),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        yield kernel
