"""What kernels are not compiled for, so that a size that was not seen before waits for no compiler.

Triton compiles a kernel again for an integer that is 1, or a multiple of 16, and for a tensor that does not begin at a
multiple of 16 bytes. With these names only types, `tl.constexpr` and which tensors there are make a difference; on AMD
GPUs also whether a tensor has less than 2 GB, for which they have other instructions.

Rows of channels are read 16 bytes at once where their size is a multiple of that: strides come in units of so many
elements, UNIT, and the compiler sees them multiplied (`backends.triton.whole_rows` takes care that they can).
"""

_STRIDES = tuple(f"{x}stride_{side}" for x in ("", "q_", "k_", "v_", "out_") for side in "bhs")
SIZES = (
    *_STRIDES, "rows_stride", "schedule_stride", "weights_stride", "H", "SHARED", "S", "Sq", "Sk", "N", "NQ", "NK",
    "ALL", "EACH", "FIRST", "SPARE", "TILES", "TURNS", "TOGETHER", "W", "pieces", "parts_q", "parts_k", "heads",
    "number", "candidates", "protected", "share_bits",
)  # fmt: skip
# the caller's, and parts of larger ones
ANYWHERE = (
    "keep", "live", "spreads", "farthest", "counts", "indices", "numbers", "protected_rows", "protected_columns",
)  # fmt: skip
