"""A platform for vLLM-Omni on a CPU, where it has none: for tests only, found by its entry point."""

from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import OmniPlatformEnum, UnspecifiedOmniPlatform


def name():
    return "cpu_platform.CpuPlatform"


class CpuPlatform(UnspecifiedOmniPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        if selected_backend is None or selected_backend.upper() == "TORCH_SDPA":
            return "cpu_sdpa.CpuSDPABackend"
        cls.validate_diffusion_attn_backend(selected_backend)
        return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()
