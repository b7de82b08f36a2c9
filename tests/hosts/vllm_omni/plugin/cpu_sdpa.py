"""vLLM-Omni's backend for torch's attention, which does not know this platform: its way for GPUs runs."""

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

CALLS = []  # layers, in their order


class CpuSDPAImpl(SDPAImpl):
    def __init__(self, *args, prefix="", **kwargs):
        super().__init__(*args, prefix=prefix, **kwargs)
        self.prefix = prefix

    def forward(self, query, key, value, attn_metadata=None):
        CALLS.append(self.prefix)
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return CpuSDPAImpl
