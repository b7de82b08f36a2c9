"""vLLM-Omni without vLLM-Omni: its rules as plain values, and the backend's classes on stand-ins for its modules.

With the real one: tests/hosts/vllm_omni, `make test-hosts`.
"""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tomllib
import torch

import rainfusion
from rainfusion.integrations import vllm_omni
from rainfusion.integrations.decider import Dense, Kind
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.vllm_omni import private_names, rules
from rainfusion.integrations.vllm_omni.rules import Facts, Layout, Options, Span

GRID, ROWS = (4, 32, 32), 4096
PLAIN = Layout(prefix=0, grid=GRID, used=ROWS)
OPTIONS = Options(sparsity=0.8)


# ---------------------------------------------------------------------------------------------------------------------
# options


def test_options_have_their_defaults():
    assert Options.of(None) == Options.of({}) == Options(0.0, 0, 0, "bf16", frozenset())
    given = {"sparsity": 0.8, "start_step": 2, "end_step": 1, "precision": "mix", "skip_layers": [0, 3], "other": 1}
    assert Options.of(given) == Options(0.8, 2, 1, "mix", frozenset({0, 3}))


@pytest.mark.parametrize(
    "given", [{"sparsity": 1.1}, {"sparsity": -0.1}, {"start_step": -1}, {"end_step": -1}, {"precision": "mxfp4"}]
)
def test_wrong_options_are_named(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"block_sparse.{name} must be"):
        Options.of(given)


@pytest.mark.parametrize(
    ("precision", "cache", "found"),
    [
        ("bf16", None, "native"),
        ("fp8", None, "fp8"),
        ("mix", None, "int8"),
        ("bf16", "fp8", "fp8"),
        ("mix", "float", "native"),
    ],
)
def test_the_method_is_the_recommended_one_with_what_was_asked_for(precision, cache, found):
    method = Options(sparsity=0.7, precision=precision).method(cache)
    assert method == rainfusion.Method.recommended(sparsity=0.7, precision=found)


def test_a_dtype_of_the_kv_cache_that_is_unknown_is_an_error():
    with pytest.raises(ValueError, match="diffusion_kv_cache_dtype must be"):
        OPTIONS.method("mxfp4")


@pytest.mark.parametrize(
    ("prefix", "number"),
    [("blocks.3.attn1", 3), ("3", 3), ("", None), ("attn", None), ("blocks.3.attn.1", None), ("a.b3.c", None)],
)
def test_the_number_of_a_layer(prefix, number):
    assert rules.layer_number(prefix) == number


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"causal": True}, "no causal attention"),
        ({"qkv_layout": "BNSD"}, "qkv_layout='BSND', and this layer has 'BNSD'"),
        ({"ring": 2}, "ring_degree=2"),
        ({"allgather": 4}, "allgather_degree=4"),
    ],
)
def test_layers_that_are_refused(change, words):
    usual = {"causal": False, "qkv_layout": "bsnd", "ring": 1, "allgather": 1}
    rules.check_layer(OPTIONS, **usual)
    rules.check_layer(OPTIONS, **{**usual, "qkv_layout": None})
    with pytest.raises(ValueError, match=words):
        rules.check_layer(OPTIONS, **{**usual, **change})
    rules.check_layer(Options(sparsity=0.0), **{**usual, **change})  # it would be dense all the same


# ---------------------------------------------------------------------------------------------------------------------
# where the video lies


def test_a_video_behind_a_prefix():
    assert rules.place(OPTIONS, Facts(layout=PLAIN)) == (Scene((GRID,), before=0), ROWS)
    layout = Layout(prefix=10, grid=GRID, used=ROWS + 10)
    assert rules.place(OPTIONS, Facts(layout=layout)) == (Scene((GRID,), before=10), ROWS + 10)


def test_the_rows_of_a_packed_sequence_count_where_the_model_says_them():
    assert rules.place(OPTIONS, Facts(layout=PLAIN._replace(used=None), packed_rows=ROWS)).rows == ROWS
    assert isinstance(rules.place(OPTIONS, Facts(layout=PLAIN, packed_rows=ROWS + 1)), Dense)


def test_several_videos_in_their_order():
    spans = [Span(2200, (2, 32, 32), "target"), Span(10, (2, 32, 32), "reference")]
    found = rules.place(OPTIONS, Facts(layout=Layout(used=4300, spans=spans)))
    assert found == (Scene.of_clips([(10, 2, 32, 32), (2200, 2, 32, 32)]), 4300)
    swapped = [span._replace(role=other.role) for span, other in zip(spans, reversed(spans), strict=True)]
    assert rules.place(OPTIONS, Facts(layout=Layout(used=4300, spans=swapped))) == found


def test_the_last_video_needs_no_rows_to_fill_its_last_block():
    spans = [Span(0, (2, 32, 32), "reference"), Span(2048, (2, 30, 35), "target")]
    assert rules.place(OPTIONS, Facts(layout=Layout(used=4148, spans=spans))).rows == 4148


SPANS = [Span(0, (2, 32, 32), "reference"), Span(2100, (2, 32, 32), "target")]
CLIPS = Layout(used=4300, spans=SPANS)


@pytest.mark.parametrize(
    ("options", "change", "kind", "words"),
    [
        ({"sparsity": 0.0}, {}, Kind.ASKED, "sparsity is 0"),
        ({"skip_layers": frozenset({3})}, {"layer": 3}, Kind.ASKED, "skip_layers"),
        ({"start_step": 1}, {"step": 0}, Kind.ASKED, r"\(start_step\)"),
        ({"end_step": 1}, {"step": 9, "steps": 10}, Kind.ASKED, r"\(end_step\)"),
        ({"start_step": 1}, {}, Kind.UNSUPPORTED, "which step it is"),
        ({"end_step": 1}, {"step": 3}, Kind.UNSUPPORTED, "how many steps there are"),
        ({}, {"qkv_layout": None}, Kind.UNSUPPORTED, "qkv_layout"),
        ({}, {"has_metadata": False}, Kind.ASKED, "cross-attention"),
        ({}, {"layout": None}, Kind.UNSUPPORTED, "video_layout"),
        ({}, {"special": "a mask"}, Kind.UNSUPPORTED, "a mask"),
        ({}, {"layout": PLAIN._replace(used=None)}, Kind.UNSUPPORTED, "neither used_len nor max_seqlen_q"),
        ({}, {"layout": PLAIN._replace(grid=None)}, Kind.UNSUPPORTED, "neither a grid behind a prefix nor spans"),
        ({}, {"layout": PLAIN._replace(prefix=None)}, Kind.UNSUPPORTED, "neither a grid behind a prefix nor spans"),
        ({}, {"layout": PLAIN._replace(used=4097)}, Kind.UNSUPPORTED, "0 and a grid of 4x32x32 do not fill 4097"),
        ({}, {"layout": Layout(9, (1, 1, 4095), 4104)}, Kind.EXPECTED, "fewer than 4096 video rows"),
        ({}, {"layout": CLIPS, "packed_rows": 4299}, Kind.UNSUPPORTED, "used_len=4300 .* max_seqlen_q=4299"),
        ({}, {"layout": CLIPS._replace(spans=SPANS[:1] * 2)}, Kind.UNSUPPORTED, "does not fit between 2048 and 4300"),
        ({}, {"layout": CLIPS._replace(used=4100)}, Kind.UNSUPPORTED, "does not fit between 2048 and 4100"),
        ({}, {"layout": CLIPS._replace(spans=[SPANS[1]] * 1)}, Kind.EXPECTED, "fewer than 4096"),
        ({}, {"layout": CLIPS._replace(spans=[SPANS[0]])}, Kind.UNSUPPORTED, "0 spans with role 'target'"),
        ({}, {"layout": CLIPS._replace(spans=[SPANS[1]._replace(role="x")])}, Kind.UNSUPPORTED, "role 'x'"),
        ({}, {"layout": CLIPS._replace(spans=[Span(0, (0, 1, 1), "target")])}, Kind.UNSUPPORTED, "does not fit"),
        (
            {},
            {"layout": Layout(used=4198, spans=[Span(0, (2, 30, 35), "reference"), SPANS[1]])},
            Kind.UNSUPPORTED,
            "50 rows beside the spans, and 76 are needed",
        ),
    ],
)
def test_calls_that_are_dense_say_why(options, change, kind, words):
    facts = Facts(layout=PLAIN, layer=1)._replace(**change)
    found = rules.place(Options(**{"sparsity": 0.8, **options}), facts)
    assert isinstance(found, Dense) and found.kind is kind
    assert re.search(words, found.reason)
    assert found.__traceback__ is None  # a reason that is kept holds on to no frame


@pytest.mark.parametrize("step", [2, 7])
def test_steps_between_are_sparse(step):
    options = Options(sparsity=0.8, start_step=2, end_step=2, skip_layers=frozenset({0}))
    assert rules.place(options, Facts(layout=PLAIN, layer=1, step=step, steps=10)).rows == ROWS


def test_masks_that_only_hide_padding():
    assert rules.mask_in_words(2, True, True) is None
    for other in ((2, False, True), (4, True, True), (2, True, False)):
        assert "a mask of" in rules.mask_in_words(*other)


def test_shapes_of_one_sequence():
    rules.check_tensors((1, 9, 4, 64), (1, 9, 2, 64), (1, 9, 2, 64), 9)
    for k, v, rows in (
        ((1, 8, 4, 64), (1, 8, 4, 64), 8),
        ((1, 9, 4, 64), (1, 9, 2, 64), 9),
        ((1, 9, 4, 64),) * 2 + (10,),
    ):
        with pytest.raises(ValueError, match=f"at least the {rows} rows"):
            rules.check_tensors((1, 9, 4, 64), k, v, rows)


# ---------------------------------------------------------------------------------------------------------------------
# stand-ins for its modules


class DenseImpl:
    """The platform's own attention."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def forward(self, query, key, value, metadata):
        return "dense"


class DenseBackend:
    get_impl_cls = staticmethod(lambda: DenseImpl)
    supports_attention_mask = classmethod(lambda cls, spec: True)
    supports_packed_mask_free = classmethod(lambda cls: False)


class Standin:
    """A vLLM-Omni of a few modules, whose state tests can set."""

    def __init__(self):
        self.registered, self.npu, self.roles, self.version = [], False, [], "0.30.0"
        self.context = self.parallel = None

    def modules(self):
        attention = "vllm_omni.diffusion.attention"
        return {
            "vllm_omni": {},
            "vllm_omni.platforms": {"current_omni_platform": SimpleNamespace(is_npu=lambda: self.npu)},
            "vllm_omni.diffusion": {},
            attention: {},
            f"{attention}.backends": {},
            f"{attention}.backends.registry": {
                "DiffusionAttentionBackendEnum": SimpleNamespace(RAINFUSION_ATTN="member"),
                "register_diffusion_backend": lambda *arguments: self.registered.append(arguments),
            },
            f"{attention}.backends.abstract": {
                "AttentionBackend": type("AttentionBackend", (), {}),
                "AttentionImpl": type("AttentionImpl", (), {}),
            },
            f"{attention}.selector": {
                "get_attn_backend_for_role": lambda **asked: self.roles.append(asked) or (DenseBackend, None),
                "get_attn_backend_for_capability": lambda **_: DenseBackend,
            },
            "vllm_omni.diffusion.forward_context": {
                "is_forward_context_available": lambda: self.context is not None,
                "get_forward_context": lambda: self.context,
            },
            "vllm_omni.diffusion.config": {
                "get_current_diffusion_config_or_none": lambda: SimpleNamespace(parallel_config=self.parallel)
            },
        }

    def at(self, step, steps=None):
        self.context = SimpleNamespace(denoise_step_idx=step, total_denoise_steps=steps)


@pytest.fixture
def omni(monkeypatch):
    found = Standin()
    for name, names in found.modules().items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(type(private_names.HOST), "version", lambda host: found.version)
    monkeypatch.delitem(sys.modules, "rainfusion.integrations.vllm_omni.backend", raising=False)
    vllm_omni.ENGINE.reset()
    yield found
    sys.modules.pop("rainfusion.integrations.vllm_omni.backend", None)
    vars(vllm_omni).pop("backend", None)
    vllm_omni.ENGINE.reset()


@pytest.fixture
def backend(omni):
    from rainfusion.integrations.vllm_omni import backend

    return backend


def layout(**changes):
    return SimpleNamespace(**{"prefix_len": 0, "latent_grid": GRID, "used_len": ROWS, "video_spans": (), **changes})


def metadata(**changes):
    usual = {"video_layout": layout(), "attn_mask": None, "full_attn_spans": None, "extra": {}}
    return SimpleNamespace(**{**usual, **changes})


def impl(backend, prefix="blocks.3.attn1", **options):
    keywords = dict(num_heads=1, head_size=16, softmax_scale=0.2, prefix=prefix, qkv_layout="BSND")
    return backend.RainfusionImpl(**keywords, backend_kwargs={"sparsity": 0.8, **options}, backend_explicit=True)


def tensors(rows=ROWS):
    return torch.randn(3, 1, rows, 1, 16).unbind()


def test_registering_gives_a_path_that_leads_to_the_class(omni, backend):
    vllm_omni.register()
    ((member, path),) = omni.registered
    module, _, name = path.rpartition(".")
    assert member == "member" and getattr(sys.modules[module], name) is backend.RainfusionBackend


def test_on_an_npu_nothing_is_registered(omni):
    omni.npu = True
    vllm_omni.register()
    assert omni.registered == []


def test_another_version_that_lacks_a_name_is_a_warning_and_nothing_is_registered(omni, monkeypatch, caplog):
    omni.version = "0.12.0"
    monkeypatch.delattr(sys.modules["vllm_omni.diffusion.attention.backends.registry"], "register_diffusion_backend")
    vllm_omni.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and omni.registered == []
    assert record.getMessage().startswith("rainfusion works with vLLM-Omni 0.30.0; vLLM-Omni 0.12.0 lacks what is used")


def test_a_version_that_takes_other_arguments_is_a_warning(omni, monkeypatch, caplog):
    omni.version = "0.99"
    registry = sys.modules["vllm_omni.diffusion.attention.backends.registry"]
    monkeypatch.setattr(registry, "register_diffusion_backend", lambda backend: None)
    vllm_omni.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "vLLM-Omni 0.99 does not take a backend (TypeError" in record.getMessage()


def test_without_vllm_omni_registering_is_a_warning(caplog):
    vllm_omni.register()
    (record,) = caplog.records
    assert "vLLM-Omni is not installed here" in record.getMessage()


@pytest.mark.parametrize("module", ["selector", "backends.abstract"])
def test_another_version_is_named_when_the_backend_is_chosen(omni, monkeypatch, module):
    omni.version = "0.31.0"
    monkeypatch.setitem(sys.modules, f"vllm_omni.diffusion.attention.{module}", ModuleType(module))
    with pytest.raises(ImportError, match=r"works with vLLM-Omni 0\.30\.0; vLLM-Omni 0\.31\.0 lacks what is used"):
        import rainfusion.integrations.vllm_omni.backend  # noqa: F401


def test_a_version_that_was_not_tested_works_with_a_warning(omni, backend, caplog):
    omni.version = "0.31.0"
    impl(backend), impl(backend)
    (record,) = caplog.records
    assert "vLLM-Omni 0.31.0 is not among those that were tested" in record.getMessage()


def test_builds_of_a_version_that_was_tested_are_like_it(omni, backend, caplog):
    omni.version = "0.30.0+cu130"
    impl(backend)
    assert not caplog.records


def test_a_sparse_call_is_the_librarys(omni, backend):
    one, (q, k, v) = impl(backend), tensors(ROWS + 20)
    out = one.forward(q, k, v, metadata(video_layout=layout(prefix_len=20, used_len=ROWS + 20)))
    method = rainfusion.Method.recommended(sparsity=0.8)
    options = dict(scale=0.2, txt_len=20, latent_shape_q=GRID, method=method, input_layout="BSND")
    assert torch.equal(out, rainfusion.sparse_attention(q, k, v, **options))
    assert vllm_omni.stats().calls == {"blocks.3.attn1": (1, 0)}


def test_padding_comes_back_as_it_was(omni, backend):
    one, (q, k, v) = impl(backend), tensors(ROWS + 9)
    out = one.forward(q, k, v, metadata())
    assert torch.equal(out[:, ROWS:], q[:, ROWS:]) and vllm_omni.stats().layouts == {"grid 4x32x32": 1}


def test_the_step_tells_where_a_run_ends(omni, backend, caplog):
    caplog.set_level("INFO")
    one = impl(backend, start_step=9)
    for step in (0, 1, 0):
        omni.at(step)
        one.forward(*tensors(), metadata())
    (record,) = caplog.records
    assert record.getMessage().startswith("rainfusion in vLLM-Omni: 0 sparse and 2 dense attention calls")
    assert record.name == "vllm_omni.rainfusion"


def test_compiled_code_ends_before_attention(omni, backend):
    one = impl(backend)
    block = torch.compile(lambda q, k, v: one.forward(q * 2, k, v, metadata()) + 1, backend="eager")
    q, k, v = tensors()
    assert torch.equal(block(q, k, v), one.forward(q * 2, k, v, metadata()) + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(one.forward, fullgraph=True, backend="eager")(q, k, v, metadata())


def test_dense_calls_are_the_platforms(omni, backend):
    one = impl(backend, start_step=1)
    omni.at(0)
    assert one.forward(*tensors(), metadata()) == "dense"
    (asked,) = omni.roles
    assert asked["attention_config"] is None and asked["head_size"] == 16  # the platform's own choice
    assert one.dense.arguments["backend_kwargs"] is None and one.dense.arguments["softmax_scale"] == 0.2
    omni.at(1)
    assert one.forward(*tensors(), metadata()) != "dense"
    omni.context = None
    assert one.forward(*tensors(), metadata()) == "dense"
    assert len(vllm_omni.stats().reasons) == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "says nothing"),
        (metadata(video_layout=None), "no video_layout"),
        (metadata(full_attn_spans=[[(0, 4)]]), "full_attn_spans"),
        (metadata(attn_mask=torch.ones(1, 1, ROWS, ROWS)), "a mask of 4 dimensions"),
        (metadata(attn_mask=torch.ones(1, ROWS)), "a mask of 2 dimensions"),
        (metadata(extra={"max_seqlen_q": ROWS + 1}), "do not fill 4097 rows"),
    ],
)
def test_what_metadata_say_reaches_the_rules(omni, backend, given, reason):
    one = impl(backend)
    assert one.forward(*tensors(), given) == "dense"
    (found,) = vllm_omni.stats().reasons
    assert reason in found


def test_spans_reach_the_rules(omni, backend):
    spans = [SimpleNamespace(start=s, latent_grid=[2, 32, 32], role=r) for s, r in ((0, "reference"), (2048, "target"))]
    one = impl(backend)
    one.forward(*tensors(), metadata(video_layout=layout(video_spans=spans, prefix_len=None, latent_grid=None)))
    assert vllm_omni.stats().layouts == {"grid 2x32x32 and 2x32x32": 1}


def test_refusals_reach_the_host(omni, backend):
    omni.parallel = SimpleNamespace(ring_degree=2)
    with pytest.raises(ValueError, match="ring_degree=2"):
        impl(backend)
    omni.parallel = SimpleNamespace(ulysses_degree=2)
    with pytest.raises(ValueError, match="at least the 4096 rows"):
        impl(backend).forward(*tensors(ROWS - 1), metadata())


def test_the_dtype_of_the_kv_cache_reaches_the_method(omni, backend, monkeypatch):
    one = impl(backend, precision="fp8")
    seen = []
    monkeypatch.setattr(one.layer, "attend", lambda method, *_, **__: seen.append(method.precision))
    for extra in ({}, {"kv_cache_dtype": "float"}):
        one.forward(*tensors(), metadata(extra=extra))
    assert seen == ["fp8", "native"]


def test_the_backend_answers_for_the_platforms_own(omni, backend):
    assert backend.RainfusionBackend.get_name() == "RAINFUSION_ATTN"
    assert backend.RainfusionBackend.get_impl_cls() is backend.RainfusionImpl
    assert backend.RainfusionBackend.get_supported_head_sizes() == []
    assert backend.RainfusionBackend.supports_attention_mask() is True
    assert backend.RainfusionBackend.supports_packed_mask_free() is False
    assert not getattr(backend.RainfusionBackend, "supports_prefix_kv_slicing", False)


def test_importing_imports_no_engine():
    code = """
import sys
import rainfusion, rainfusion.integrations.vllm_omni, rainfusion.integrations.vllm_omni.rules
assert not {"vllm", "vllm_omni", "sglang", "torch._dynamo"} & set(sys.modules)
assert "rainfusion.integrations.vllm_omni.backend" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_entry_point_is_in_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    path = project["entry-points"]["vllm_omni.general_plugins"]["rainfusion"]
    assert path == f"{vllm_omni.__name__}:{vllm_omni.register.__name__}"
