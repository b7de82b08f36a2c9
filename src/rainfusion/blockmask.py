"""BlockMask: which key blocks each query block attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rainfusion.geometry import TokenOrderKey
from rainfusion.options import checked_block_size, sides

_INT16_BLOCKS = 2**15 - 1  # as many as an int16 counts


def index_dtype(block_size: int | tuple[int, int], columns: int) -> torch.dtype:
    """Of lists that the library makes: int16 for keys in finer blocks than the queries, of which there are many."""
    q_block, k_block = sides(block_size)
    return torch.int16 if k_block < q_block and columns <= _INT16_BLOCKS else torch.int32


@dataclass(frozen=True, eq=False)
class BlockMask:
    """For every query block, how many key blocks it attends to and which.

    counts   int32 [B, H, NQ]               number of key blocks of a row
    indices  int32 or int16 [B, H, NQ, NK]  those blocks first, ascending; then all the others, ascending

    The convention is FlexAttention's: a row is a permutation of all key blocks, so reading past `counts` is safe. Lists
    of key blocks that are finer than the query blocks are int16 where that counts them, half the memory; every other
    list that the library makes is int32, and `indices.int()` always is. Either is taken.

    Example: two query blocks and three key blocks; the first row keeps blocks 0 and 2, the second keeps block 1.

    >>> mask = BlockMask.from_dense(torch.tensor([[[[1, 0, 1], [0, 1, 0]]]], dtype=torch.bool))
    >>> mask.counts.tolist()
    [[[2, 1]]]
    >>> mask.indices.tolist()
    [[[[0, 2, 1], [1, 0, 2]]]]
    >>> mask.density()
    0.5

    `block_size` is the number of tokens of a block, or a pair: of a query block, of a key block. `q_len` and `k_len`
    are the numbers of tokens the mask was predicted for, and `orders` says in which order of q's and of k's tokens its
    blocks are cut; None if it does not know, as a mask made by hand.
    """

    counts: Tensor
    indices: Tensor
    block_size: int | tuple[int, int] = 128
    q_len: int | None = None
    k_len: int | None = None
    orders: tuple[TokenOrderKey, TokenOrderKey] | None = None

    def __post_init__(self) -> None:
        for name, x, dims in (("counts", self.counts, 3), ("indices", self.indices, 4)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.dtype != torch.int32 and not (name == "indices" and x.dtype == torch.int16):
                raise TypeError(f"{name} must be int32{' or int16' if name == 'indices' else ''}, got {x.dtype}")
            if x.dim() != dims:
                raise ValueError(f"{name} must have {dims} dimensions, got shape {list(x.shape)}")
        if self.counts.shape != self.indices.shape[:3]:
            raise ValueError(
                f"counts [B, H, NQ] must match indices [B, H, NQ, NK], got {list(self.counts.shape)} and "
                f"{list(self.indices.shape)}"
            )
        if self.indices.dtype == torch.int16 and self.indices.shape[3] > _INT16_BLOCKS:
            raise ValueError(f"indices must be int32 for {self.indices.shape[3]} key blocks: int16 cannot count them")
        if self.counts.device != self.indices.device:
            devices = f"{self.counts.device} and {self.indices.device}"
            raise ValueError(f"counts and indices must be on one device, got {devices}")
        object.__setattr__(self, "block_size", checked_block_size(self.block_size))
        rows, columns = self.indices.shape[2:]
        q_side, k_side = ("q_len", self.q_len, rows, self.q_block), ("k_len", self.k_len, columns, self.k_block)
        for name, length, blocks, size in (q_side, k_side):
            if length is None:
                continue
            if not isinstance(length, int):
                raise TypeError(f"{name} must be an int or None, got {length!r} ({type(length).__name__})")
            if -(-length // size) != blocks:
                raise ValueError(f"{name}={length} does not make {blocks} blocks of {size} tokens")

    @classmethod
    def from_dense(cls, dense: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """From a bool tensor [B, H, NQ, NK], True where a block is kept. The result knows no lengths and no order."""
        if not isinstance(dense, Tensor) or dense.layout != torch.strided:
            raise TypeError(f"dense must be a dense torch.Tensor, got {type(dense).__name__}")
        if dense.dtype != torch.bool:
            raise TypeError(f"dense must be bool (True = keep), got {dense.dtype}")
        if dense.dim() != 4:
            raise ValueError(f"dense must have 4 dimensions [B, H, NQ, NK], got shape {list(dense.shape)}")
        rank = dense.cumsum(-1, dtype=torch.int32)  # of kept blocks, from 1
        counts = dense.sum(-1, dtype=torch.int32)
        dtype = index_dtype(checked_block_size(block_size), dense.shape[-1])
        columns = torch.arange(dense.shape[-1], dtype=dtype, device=dense.device).expand(dense.shape)
        # kept blocks go to 0, 1, ...; a dropped one has `column - rank` dropped ones before it
        position = torch.where(dense, rank - 1, counts.unsqueeze(-1) + columns - rank)
        indices = torch.empty_like(columns, memory_format=torch.contiguous_format)
        return cls(counts, indices.scatter_(-1, position.long(), columns), block_size)

    @classmethod
    def full(
        cls,
        batch: int,
        heads: int,
        q_len: int,
        k_len: int,
        *,
        block_size: int | tuple[int, int] = 128,
        is_causal: bool = False,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Every block, or with `is_causal` every block that is not wholly in the future."""
        q_block, k_block = sides(checked_block_size(block_size))
        if min(q_len, k_len) < 0:
            raise ValueError(f"q_len and k_len must be at least 0, got {q_len} and {k_len}")
        rows, columns = -(-q_len // q_block), -(-k_len // k_block)
        dense = torch.ones(batch, heads, rows, columns, dtype=torch.bool, device=device)
        if is_causal:  # the first key of a block is not after the last query of the row
            last = torch.arange(1, rows + 1, device=device).unsqueeze(1) * q_block
            dense &= torch.arange(columns, device=device) * k_block < last
        return replace(cls.from_dense(dense, block_size), q_len=q_len, k_len=k_len)

    @property
    def q_block(self) -> int:
        """Tokens of a query block."""
        return sides(self.block_size)[0]

    @property
    def k_block(self) -> int:
        """Tokens of a key block."""
        return sides(self.block_size)[1]

    @property
    def num_q_blocks(self) -> int:
        return self.indices.shape[2]

    @property
    def num_k_blocks(self) -> int:
        return self.indices.shape[3]

    def to_dense(self) -> Tensor:
        """bool [B, H, NQ, NK]: True where a block is kept, whatever stands after `counts`."""
        slots = torch.arange(self.num_k_blocks, device=self.counts.device)
        kept = slots < self.counts.unsqueeze(-1)
        columns = torch.where(kept, self.indices, self.num_k_blocks).long()  # one more, for those that are not
        dense = kept.new_zeros((*kept.shape[:3], self.num_k_blocks + 1))
        return dense.scatter_(-1, columns, True)[..., :-1].contiguous()

    def to_dense_tokens(self, q_len: int | None = None, k_len: int | None = None) -> Tensor:
        """bool [B, H, Sq, Sk]: for small sizes and pictures; the lengths only where the mask does not know them."""
        q_len = self.q_len if q_len is None else q_len
        k_len = self.k_len if k_len is None else k_len
        dense = self.to_dense().repeat_interleave(self.q_block, -2).repeat_interleave(self.k_block, -1)
        return dense[..., :q_len, :k_len]

    def density(self) -> float:
        """The share of blocks kept, 0 to 1 (reads the counts back from the device)."""
        blocks = self.counts.numel() * self.num_k_blocks
        return int(self.counts.sum(dtype=torch.int64)) / blocks if blocks else 0.0

    def check_values(self) -> None:
        """Raises where counts or indices break the convention. On a CPU only: elsewhere it waits for the device."""
        if self.indices.device.type != "cpu" or self.indices.numel() == 0:
            return
        columns = self.num_k_blocks
        for name, x, limit in (("counts", self.counts, columns), ("indices", self.indices, columns - 1)):
            smallest, largest = (int(end) for end in x.aminmax())
            if smallest < 0 or largest > limit:
                raise ValueError(f"mask.{name} must be in 0..{limit}, got values from {smallest} to {largest}")
        past_the_end = torch.arange(1, columns, device=self.indices.device) >= self.counts.unsqueeze(-1)
        if not ((self.indices[..., 1:] > self.indices[..., :-1]) | past_the_end).all():
            raise ValueError("mask.indices must ascend, without repeats, over the first counts entries of each row")

    def to(self, device: torch.device | str) -> BlockMask:
        return replace(self, counts=self.counts.to(device), indices=self.indices.to(device))

    def __repr__(self) -> str:
        batch, heads, rows, columns = self.indices.shape
        return (
            f"BlockMask(batch={batch}, heads={heads}, blocks={rows}x{columns}, block_size={self.block_size}, "
            f"q_len={self.q_len}, k_len={self.k_len}, device={self.indices.device})"
        )


def unchecked(
    counts: Tensor,
    indices: Tensor,
    block_size: int | tuple[int, int],
    q_len: int | None = None,
    k_len: int | None = None,
    orders: tuple[TokenOrderKey, TokenOrderKey] | None = None,
) -> BlockMask:
    """A `BlockMask` of parts that the library made to fit each other: checking takes longer than all the rest."""
    mask = object.__new__(BlockMask)
    vars(mask).update(counts=counts, indices=indices, block_size=block_size, q_len=q_len, k_len=k_len, orders=orders)
    return mask
