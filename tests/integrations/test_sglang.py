"""SGLang without SGLang: its rules as plain values, and the backend's classes on stand-ins for its modules.

With the real one: tests/hosts/sglang, `make test-hosts`.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tomllib
import torch

import rainfusion
from rainfusion.integrations import sglang
from rainfusion.integrations.decider import Dense, Kind
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.sglang import private_names, rules
from rainfusion.integrations.sglang.rules import Facts, Options

GRID, LENGTH = (3, 16, 24), 3 * 16 * 24
LATENTS = (1, 16, 3, 32, 48)
OPTIONS = Options(sparsity=0.5, skip_first_steps=2)

# ---------------------------------------------------------------------------------------------------------------------
# rules


@pytest.mark.parametrize(
    ("latents", "patch", "grid"),
    [
        ((1, 16, 21, 60, 104), (1, 2, 2), (21, 30, 52)),
        ([21, 61, 105], [1, 2, 2], (21, 30, 52)),
        (torch.Size((1, 16, 21, 60, 104)), (3, 2, 2), (7, 30, 52)),
        ((16, 16), (1, 2, 2), None),
        ((1, 16, 1, 1, 1), (1, 2, 2), None),
        ((1, 16, 21, 60, 104), (2, 2), None),
        ((1, 16, 21, 60, 104), 2, None),
        (None, (1, 2, 2), None),
    ],
)
def test_the_grid_of_latents(latents, patch, grid):
    assert rules.grid_of(latents, patch) == grid


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1.0, 0), r"sparsity must be in \[0, 1\), got 1.0"),
        ((-0.1, 0), "sparsity must be in"),
        ((0.5, -1), "skip_first_steps must be at least 0"),
    ],
)
def test_wrong_options_are_named(given, words):
    with pytest.raises(ValueError, match=words):
        Options(*given)


def test_options_of_a_wrong_type_are_named():
    with pytest.raises(TypeError, match=r"sparsity must be a number, got '0\.5'"):
        Options("0.5", 0)
    with pytest.raises(TypeError, match="skip_first_steps must be an int"):
        Options(0.5, 1.5)


def test_the_method_is_the_recommended_one_with_what_was_asked_for():
    assert OPTIONS.method == rainfusion.Method.recommended(sparsity=0.5)


def test_the_video_is_all_of_the_sequence():
    found = rules.place(Facts(OPTIONS, step=2, grid=GRID))
    assert found == Scene((GRID,), alone=True)
    assert found.place(LENGTH) is not None and found.place(LENGTH + 1) is None


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        (Facts(None), Kind.UNSUPPORTED, "says nothing"),
        (Facts(Options(0.0, 0), 3, GRID), Kind.ASKED, "sparsity is 0"),
        (Facts(OPTIONS, None, GRID), Kind.UNSUPPORTED, "which step it is"),
        (Facts(OPTIONS, 1, GRID), Kind.ASKED, "(skip_first_steps)"),
        (Facts(OPTIONS, 2, GRID, causal=True), Kind.UNSUPPORTED, "causal"),
        (Facts(OPTIONS, 2, None), Kind.UNSUPPORTED, "no grid"),
    ],
)
def test_calls_that_are_dense_say_why(facts, kind, words):
    found = rules.place(facts)
    assert isinstance(found, Dense) and found.kind is kind and words in found.reason


def test_without_dense_steps_the_step_need_not_be_known():
    assert isinstance(rules.place(Facts(Options(0.5, 0), None, GRID)), Scene)


# ---------------------------------------------------------------------------------------------------------------------
# stand-ins for its modules


class DenseImpl:
    """The platform's own attention."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def forward(self, query, key, value, metadata):
        assert metadata is None  # FlashAttention reads what ours do not have
        return "dense"


class PlatformBase:
    npu = False

    def is_npu(self):
        return self.npu

    @classmethod
    def get_attn_backend_cls_str(cls, selected_backend, head_size, dtype):
        return "stand_in_dense.Backend"


class Platform(PlatformBase):
    """Inherits what is hooked, as SGLang's platforms for GPUs do."""


@dataclasses.dataclass
class AttentionMetadata:
    current_timestep: int


def modules(hooks, platform):
    runtime = "sglang.multimodal_gen.runtime"
    return {
        "sglang": {},
        "sglang.multimodal_gen": {},
        runtime: {},
        f"{runtime}.platforms": {
            "current_platform": platform,
            "AttentionBackendEnum": SimpleNamespace(RAIN_FUSION_ATTN="ours"),
        },
        f"{runtime}.platforms.plugins": {
            "HookType": SimpleNamespace(AROUND="around"),
            "plugin_hook": lambda target, kind: lambda hook: hooks.append((target, kind, hook)),
        },
        f"{runtime}.layers": {},
        f"{runtime}.layers.attention": {},
        f"{runtime}.layers.attention.backends": {},
        f"{runtime}.layers.attention.backends.attention_backend": {
            "AttentionBackend": type("AttentionBackend", (), {}),
            "AttentionImpl": type("AttentionImpl", (), {}),
            "AttentionMetadata": AttentionMetadata,
            "AttentionMetadataBuilder": type("AttentionMetadataBuilder", (), {}),
        },
        f"{runtime}.utils": {},
        f"{runtime}.utils.precision": {"get_compute_dtype": lambda: torch.float32},
        "stand_in_dense": {"Backend": SimpleNamespace(get_impl_cls=lambda: DenseImpl)},
    }


@pytest.fixture
def host(monkeypatch):
    found = SimpleNamespace(hooks=[], version="0.5.23", platform=Platform())
    for name, names in modules(found.hooks, found.platform).items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(type(private_names.HOST), "version", lambda host: found.version)
    monkeypatch.delitem(sys.modules, "rainfusion.integrations.sglang.backend", raising=False)
    sglang.ENGINE.reset()
    yield found
    sys.modules.pop("rainfusion.integrations.sglang.backend", None)
    vars(sglang).pop("backend", None)
    sglang.ENGINE.reset()


@pytest.fixture
def backend(host):
    from rainfusion.integrations.sglang import backend

    return backend


def impl(backend, **arguments):
    usual = dict(num_heads=1, head_size=16, causal=False, softmax_scale=0.2, prefix="blocks.3.attn1.impl")
    return backend.RainfusionImpl(**{**usual, **arguments}, is_cross_attention=False)


def metadata(backend, step=2, **changes):
    usual = dict(skip_first_steps=2, sparsity=0.5, raw_latent_shape=LATENTS, patch_size=(1, 2, 2), device="cpu")
    return backend.RainfusionMetadataBuilder().build(current_timestep=step, **{**usual, **changes})


def tensors(length=LENGTH):
    return torch.randn(3, 1, length, 1, 16).unbind()


def test_the_hook_is_on_the_class_that_has_the_method(host, backend):
    sglang.register()
    ((target, kind, hook),) = host.hooks
    assert target == f"{PlatformBase.__module__}.PlatformBase.get_attn_backend_cls_str" and kind == "around"
    original = PlatformBase.get_attn_backend_cls_str.__func__
    path = hook(original, Platform, "ours", 64, torch.float32)
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is backend.RainfusionBackend
    assert hook(original, Platform, selected_backend="ours", head_size=64, dtype=torch.float32) == path
    for other in (None, "flash"):
        assert hook(original, Platform, other, 64, torch.float32) == "stand_in_dense.Backend"
        assert hook(original, Platform, selected_backend=other, head_size=64, dtype=None) == "stand_in_dense.Backend"


def test_on_an_npu_nothing_is_hooked(host, monkeypatch):
    monkeypatch.setattr(PlatformBase, "npu", True)
    sglang.register()
    assert host.hooks == []


@pytest.mark.parametrize("missing", ["plugin_hook", "HookType"])
def test_another_version_that_lacks_a_name_is_a_warning_and_nothing_is_hooked(host, monkeypatch, caplog, missing):
    host.version = "0.4.0"
    monkeypatch.delattr(sys.modules["sglang.multimodal_gen.runtime.platforms.plugins"], missing)
    sglang.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and host.hooks == []
    assert record.getMessage().startswith("rainfusion works with SGLang 0.5.23; SGLang 0.4.0 lacks what is used of it")


def test_a_platform_without_the_method_is_a_warning(host, monkeypatch, caplog):
    monkeypatch.delattr(PlatformBase, "get_attn_backend_cls_str")
    sglang.register()
    assert "Platform.get_attn_backend_cls_str" in caplog.records[0].getMessage() and host.hooks == []


def test_a_version_that_takes_other_arguments_is_a_warning(host, monkeypatch, caplog):
    host.version = "0.99"
    plugins = sys.modules["sglang.multimodal_gen.runtime.platforms.plugins"]
    monkeypatch.setattr(plugins, "plugin_hook", lambda target: None)
    sglang.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "SGLang 0.99 does not take a backend (TypeError" in record.getMessage()


def test_without_sglang_registering_is_a_warning(caplog):
    sglang.register()
    (record,) = caplog.records
    assert "SGLang is not installed here" in record.getMessage()


@pytest.mark.parametrize("module", ["platforms", "utils.precision", "layers.attention.backends.attention_backend"])
def test_another_version_is_named_when_the_backend_is_chosen(host, monkeypatch, module):
    host.version = "0.6.0"
    monkeypatch.setitem(sys.modules, f"sglang.multimodal_gen.runtime.{module}", ModuleType(module))
    with pytest.raises(ImportError, match=r"works with SGLang 0\.5\.23; SGLang 0\.6\.0 lacks what is used"):
        import rainfusion.integrations.sglang.backend  # noqa: F401


def test_a_version_that_was_not_tested_works_with_a_warning(host, backend, caplog):
    host.version = "0.6.0"
    impl(backend), impl(backend)
    (record,) = caplog.records
    assert "SGLang 0.6.0 is not among those that were tested" in record.getMessage()


def test_a_sparse_call_is_the_librarys(backend):
    one, (q, k, v) = impl(backend), tensors()
    out = one.forward(q, k, v, metadata(backend))
    method = rainfusion.Method.recommended(sparsity=0.5)
    options = dict(scale=0.2, latent_shape_q=GRID, method=method, input_layout="BSND")
    assert torch.equal(out, rainfusion.sparse_attention(q, k, v, **options))
    assert sglang.stats().calls == {"blocks.3.attn1": (1, 0)}


def test_the_step_tells_where_a_run_ends(backend, caplog):
    caplog.set_level("INFO")
    one = impl(backend)
    for step in (0, 1, 0):
        one.forward(*tensors(), metadata(backend, step=step))
    (record,) = caplog.records
    assert record.getMessage().startswith("rainfusion in SGLang: 0 sparse and 2 dense attention calls")
    assert record.name == "sglang.rainfusion"


def test_compiled_code_ends_before_attention(backend):
    one, found, (q, k, v) = impl(backend), metadata(backend), tensors()
    block = torch.compile(lambda q, k, v: one.forward(q * 2, k, v, found) + 1, backend="eager")
    assert torch.equal(block(q, k, v), one.forward(q * 2, k, v, found) + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(one.forward, fullgraph=True, backend="eager")(q, k, v, found)


def test_dense_calls_are_the_platforms(backend):
    one = impl(backend)
    assert one.forward(*tensors(), metadata(backend, step=1)) == "dense"
    assert one.forward(*tensors(LENGTH + 1), metadata(backend)) == "dense"
    assert one.forward(*tensors(), None) == "dense"
    assert one.forward(*tensors(), AttentionMetadata(3)) == "dense"
    assert impl(backend, causal=True).forward(*tensors(), metadata(backend)) == "dense"
    assert one.dense.arguments["softmax_scale"] == 0.2 and one.dense.arguments["is_cross_attention"] is False
    assert list(sglang.stats().reasons.values()) == [2, 1, 1] and sglang.stats().sparse_calls == 0


def test_metadata_have_what_flash_attention_reads(backend):
    found = metadata(backend)
    assert found.max_seqlen_q is None and found.max_seqlen_k is None
    found.max_seqlen_q = 5  # it fills them in
    assert isinstance(found, AttentionMetadata) and found.grid == GRID and found.options == OPTIONS


def test_wrong_options_are_errors_of_the_builder(backend):
    with pytest.raises(ValueError, match="sparsity must be"):
        metadata(backend, sparsity=1.0)
    with pytest.raises(ValueError, match="skip_first_steps must be"):
        metadata(backend, skip_first_steps=-1)


def test_the_backend_leads_to_its_parts(backend):
    kind = backend.RainfusionBackend
    assert kind.get_enum() == "ours" and kind.get_impl_cls() is backend.RainfusionImpl
    assert kind.get_metadata_cls() is backend.RainfusionMetadata
    assert kind.get_builder_cls() is backend.RainfusionMetadataBuilder


def test_importing_imports_no_engine():
    code = """
import sys
import rainfusion, rainfusion.integrations.sglang, rainfusion.integrations.sglang.rules
assert not {"vllm", "vllm_omni", "sglang", "torch._dynamo"} & set(sys.modules)
assert "rainfusion.integrations.sglang.backend" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_entry_point_is_in_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    path = project["entry-points"]["sglang.multimodal_gen.plugins"]["rainfusion"]
    assert path == f"{sglang.__name__}:{sglang.register.__name__}"
