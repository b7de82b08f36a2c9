"""One of two processes that run an attention layer together, with Ulysses: `two_ranks.py RANK PORT`."""

import os
import sys
from pathlib import Path

rank, port = int(sys.argv[1]), sys.argv[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "plugin")]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))

import torch
import torchvision_ops  # noqa: F401
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.config import set_current_diffusion_config
from vllm_omni.diffusion.data import AttentionConfig, DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.plugins import load_omni_general_plugins

import rainfusion
from rainfusion.integrations import vllm_omni

GRID, ROWS = (4, 32, 36), 4 * 32 * 36

torch.set_num_threads(1)
load_omni_general_plugins()
with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
    init_distributed_environment(world_size=2, rank=rank, local_rank=rank, distributed_init_method="env://")
    initialize_model_parallel(sequence_parallel_size=2, ulysses_degree=2)
config = OmniDiffusionConfig(
    dtype=torch.float32,
    parallel_config=DiffusionParallelConfig(sequence_parallel_size=2, ulysses_degree=2),
    diffusion_attention_config=AttentionConfig(
        per_role={"self": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.7}}}
    ),
)
with set_current_diffusion_config(config), set_forward_context(omni_diffusion_config=config):
    layer = Attention(4, 64, causal=False, softmax_scale=0.1, prefix="blocks.0.attn1", qkv_layout="BSND")
    torch.manual_seed(0)
    whole = torch.randn(3, 1, ROWS, 4, 64).unbind()
    mine = [x.chunk(2, dim=1)[rank].contiguous() for x in whole]
    layout = VideoTokenLayout(prefix_len=0, latent_grid=GRID, used_len=ROWS)
    out = layer(*mine, AttentionMetadata(video_layout=layout))
method = rainfusion.Method.recommended(sparsity=0.7)
wanted = rainfusion.sparse_attention(*whole, scale=0.1, input_layout="BSND", latent_shape_q=GRID, method=method)
assert vllm_omni.stats().sparse_calls == 1, vllm_omni.stats()
torch.testing.assert_close(out, wanted.chunk(2, dim=1)[rank])
print("the same")
