"""One of two processes that run an attention layer together, with Ulysses: `two_ranks.py RANK PORT`."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

rank, port = int(sys.argv[1]), sys.argv[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))

import sgl_kernel_ops  # noqa: F401
import torch
import torchvision_ops  # noqa: F401
from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    maybe_init_distributed_environment_and_model_parallel,
)
from sglang.multimodal_gen.runtime.layers.attention import USPAttention
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks
from sglang.multimodal_gen.runtime.server_args import set_global_server_args

import rainfusion
from rainfusion.integrations import sglang

GRID, LENGTH = (4, 32, 36), 4 * 32 * 36

torch.set_num_threads(1)
apply_plugin_hooks()
set_global_server_args(SimpleNamespace(attention_backend="rain_fusion_attn", kv_gather_degree=1, sp_split_auto=False))
maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=2, ulysses_degree=2, ring_degree=1)
layer = USPAttention(num_heads=4, head_size=64, causal=False, prefix="blocks.0.attn1")
builder = sglang.backend.RainfusionBackend.get_builder_cls()()
torch.manual_seed(0)
whole = torch.randn(3, 1, LENGTH, 4, 64).unbind()
mine = [x.chunk(2, dim=1)[rank].contiguous() for x in whole]
metadata = builder.build(5, 1, 0.7, (1, 16, 4, 64, 72), (1, 2, 2))
with set_forward_context(current_timestep=5, attn_metadata=metadata):
    out = layer(*mine)
method = rainfusion.Method.recommended(sparsity=0.7)
wanted = rainfusion.sparse_attention(*whole, input_layout="BSND", latent_shape_q=GRID, method=method)
assert sglang.stats().sparse_calls == 1, sglang.stats()
torch.testing.assert_close(out, wanted.chunk(2, dim=1)[rank])
print("the same")
