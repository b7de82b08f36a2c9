"""Code written for MindIE-SD runs as it is, once it is asked for; a real MindIE-SD is never in its way."""

import importlib.util
import inspect
import subprocess
import sys
import types
import warnings

import pytest
import torch

import rainfusion
from rainfusion import api, backends
from rainfusion.integrations import mindiesd as stand_in

T, H, W, TXT = 3, 10, 24, 40
GRID = [T, H, W]
SPANS = [{"start": 30, "latent_shape": [1, 10, 20]}, {"start": 250, "latent_shape": [2, 10, 24]}]
RF_V2 = dict(sparse_type="rf_v2", sparsity=0.8)

# name: (a client's code, the same call of ours)
CLIENTS = {
    "documented image": (
        """
from mindiesd import sparse_attention
out = sparse_attention(q, k, v, head_num=2, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.6)
""",
        dict(head_num=2, sparse_type="rf_v2", sparsity=0.6),
    ),
    "module": (
        """
import mindiesd
out = mindiesd.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.8, latent_shape_q=grid, latent_shape_k=grid)
""",
        dict(RF_V2, latent_shape_q=GRID, latent_shape_k=GRID),
    ),
    "deepest path": (
        """
from mindiesd.layers.flash_attn.sparse_flash_attn import sparse_attention
out = sparse_attention(q, k, v, None, 0.3, sparse_type="rf_v2", sparsity=0.8)
""",
        dict(RF_V2, scale=0.3),
    ),
    "paths as attributes": (
        """
import mindiesd
from mindiesd.layers import flash_attn
assert mindiesd.layers.flash_attn is flash_attn
assert mindiesd.layers.sparse_attention is flash_attn.sparse_flash_attn.sparse_attention
out = flash_attn.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.8)
""",
        RF_V2,
    ),
    "all positional": (
        """
from mindiesd import *
out = sparse_attention(
    q, k, v, None, 0.2, False, 2, "BNSD", 0, "rf_v2", 0, 128, None, None, spans, True, True, 1.0, 0.7, "bf16", 0.0, None
)
""",
        dict(scale=0.2, sparse_type="rf_v2", sparsity=0.7, video_spans=SPANS),
    ),
    "dense": ("from mindiesd import sparse_attention\nout = sparse_attention(q, k, v)", {}),
    "ada_bsa, every keyword": (
        """
from mindiesd import sparse_attention
out = sparse_attention(
    q, k, v, attn_mask=None, scale=0.25, is_causal=True, head_num=2, input_layout="BNSD", inner_precise=0,
    sparse_type="ada_bsa", txt_len=0, block_size=128, latent_shape_q=None, latent_shape_k=None, keep_sink=False,
    keep_recent=None, cdf_threshold=0.7, sparsity=0.5,
)
""",
        dict(
            scale=0.25, is_causal=True, sparse_type="ada_bsa", keep_sink=False, keep_recent=False, cdf_threshold=0.7,
            sparsity=0.5,
        ),
    ),
}  # fmt: skip

# serving engines hand over [B, S, N, D]: a prefix and a video, or clips in a packed sequence
BSND_CLIENTS = {
    "prefix and video": (
        """
from mindiesd import sparse_attention
common = {
    "scale": 0.2, "head_num": q.shape[-2], "input_layout": "BSND", "inner_precise": 0, "block_size": 128,
    "sparsity": 0.8, "precision": "bf16",
}
common.update(sparse_type="rf_v2", txt_len=prefix, latent_shape_q=grid, latent_shape_k=grid)
out = sparse_attention(q, k, v, **common)
""",
        dict(RF_V2, scale=0.2, txt_len=TXT, latent_shape_q=GRID, latent_shape_k=GRID),
    ),
    "clips": (
        """
from mindiesd import sparse_attention
out = sparse_attention(
    q, k, v, sparse_type="rf_v2", video_spans=spans, scale=0.2, head_num=q.shape[-2], input_layout="BSND",
    inner_precise=0, block_size=128, sparsity=0.8, precision="bf16",
)
""",
        dict(RF_V2, scale=0.2, video_spans=SPANS),
    ),
    "rf_v3": (
        """
from mindiesd import sparse_attention
out = sparse_attention(
    q, k, v, sparse_type="rf_v3", inner_precise=4, block_size=128, sparsity=0.8, precision="bf16",
    input_layout="BSND", head_num=q.shape[2], scale=0.2, video_spans=spans,
)
""",
        dict(RF_V2, scale=0.2, video_spans=SPANS),
    ),
}


@pytest.fixture
def installed():
    stand_in.install()
    yield
    stand_in.uninstall()


@pytest.fixture
def not_warned(monkeypatch):
    """As in a fresh process."""
    monkeypatch.setattr(stand_in, "_warned", False)


@pytest.fixture
def handed_over(monkeypatch):
    """The keywords of the calls that reach `rainfusion.sparse_attention`, which then does nothing."""
    calls = []
    monkeypatch.setattr(api, "sparse_attention", lambda *tensors, **keywords: calls.append(keywords))
    return calls


def tensors(length=T * H * W, *, layout="BNSD"):
    shape = (1, 2, length, 16) if layout == "BNSD" else (1, length, 2, 16)
    return torch.randn(3, *shape).unbind()


def run_client(code, q, k, v):
    names = dict(q=q, k=k, v=v, grid=GRID, spans=SPANS, prefix=TXT)
    exec(code, names)
    return names["out"]


def mindiesd_modules():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "mindiesd"}


# ---------------------------------------------------------------------------------------------------------------------
# calls


@pytest.mark.parametrize("name", CLIENTS)
def test_client_code_gives_our_result_to_the_bit(name, installed):
    code, ours = CLIENTS[name]
    q, k, v = tensors(730 if "spans" in code else T * H * W)
    assert torch.equal(run_client(code, q, k, v), rainfusion.sparse_attention(q, k, v, **ours))


@pytest.mark.parametrize("name", BSND_CLIENTS)
def test_code_of_serving_engines_gives_our_result_to_the_bit(name, installed):
    code, ours = BSND_CLIENTS[name]
    q, k, v = tensors(TXT + T * H * W, layout="BSND")
    out = run_client(code, q, k, v)
    assert out.shape == q.shape
    assert torch.equal(out, rainfusion.sparse_attention(q, k, v, input_layout="BSND", **ours))


def test_a_program_in_files_of_its_own(tmp_path):
    """Nothing but two lines before the client is imported, which knows no rainfusion."""
    (tmp_path / "client.py").write_text(
        "from mindiesd import sparse_attention\n"
        "def attend(q, k, v):\n"
        "    return sparse_attention(q, k, v, sparse_type='rf_v2', sparsity=0.7, precision='mix')\n"
    )
    (tmp_path / "program.py").write_text(
        "import sys, warnings, torch\n"
        "import rainfusion.integrations.mindiesd\n"
        "assert not any(name.startswith('mindiesd') for name in sys.modules), 'importing must change nothing'\n"
        "try:\n"
        "    import client\n"
        "except ModuleNotFoundError:\n"
        "    rainfusion.integrations.mindiesd.install()\n"
        "    import client\n"
        "q, k, v = torch.randn(3, 1, 2, 700, 16).unbind()\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    outs = [client.attend(q, k, v) for _ in range(3)]\n"
        "same = rainfusion.sparse_attention(q, k, v, sparse_type='rf_v2', sparsity=0.7)\n"
        "print(all(torch.equal(out, same) for out in outs), [w.filename.endswith('client.py') for w in said])\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "[True]"], done.stderr  # one warning, and it points at the client


def test_the_signature_is_the_reference_s():
    """Programs look for `precision` and `video_spans` in it before they pass them."""
    *named, rest = inspect.signature(stand_in.sparse_attention).parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in named)
    assert [p.name for p in named[:3]] == ["q", "k", "v"]
    assert [(p.name, p.default) for p in named[3:]] == [
        ("attn_mask", None), ("scale", None), ("is_causal", False), ("head_num", 1), ("input_layout", "BNSD"),
        ("inner_precise", 0), ("sparse_type", None), ("txt_len", 0), ("block_size", 128), ("latent_shape_q", None),
        ("latent_shape_k", None), ("video_spans", None), ("keep_sink", True), ("keep_recent", True),
        ("cdf_threshold", 1.0), ("sparsity", 0.0), ("precision", "bf16"), ("mxfp4_dst_type_max", 0.0),
        ("mxfp4_scale_alg", None),
    ]  # fmt: skip


def test_head_num_is_checked_unless_it_is_the_default():
    q, k, v = tensors(200)
    assert torch.equal(stand_in.sparse_attention(q, k, v, head_num=1), stand_in.sparse_attention(q, k, v, head_num=2))
    with pytest.raises(ValueError, match="head_num must be q's number of heads, 2"):
        stand_in.sparse_attention(q, k, v, head_num=3)


def test_unknown_keywords_have_no_effect():
    """Nor have those that only `rainfusion.sparse_attention` knows: the output is all that returns."""
    q, k, v = tensors()
    plain = stand_in.sparse_attention(q, k, v, **RF_V2, latent_shape_q=GRID)
    extra = dict(window_size=7, return_lse=True, token_order="raster", mxfp4_dst_type_max=7.25, mxfp4_scale_alg=2)
    assert torch.equal(stand_in.sparse_attention(q, k, v, **RF_V2, latent_shape_q=GRID, **extra), plain)


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)])
def test_inner_precise(theirs, ours, handed_over):
    stand_in.sparse_attention(*tensors(200), inner_precise=theirs)
    assert [call["inner_precise"] for call in handed_over] == [ours]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(inner_precise=5), "inner_precise must be 0 or 1 or 2 or 3 or 4, got 5"),
        (dict(precision="fp4", **RF_V2), "precision must be one of 'bf16', 'mix', 'fp8', 'mxfp4', got 'fp4'"),
        (dict(sparse_type="rf_v1"), "sparse_type must be one of"),
        (dict(precision="mix", input_layout="SBND", **RF_V2), "input_layout must be one of 'BNSD', 'BSND'"),
        (dict(is_causal=True, **RF_V2), "is_causal"),
    ],
)
def test_what_cannot_be_done_is_an_error(wrong, words):
    with pytest.raises(ValueError, match=words):
        stand_in.sparse_attention(*tensors(200), **wrong)


# ---------------------------------------------------------------------------------------------------------------------
# precision


@pytest.mark.parametrize("precision", ["mix", "fp8", "mxfp4"])
def test_without_kernels_quantised_calls_run_natively_and_say_so_once(precision, not_warned):
    q, k, v = tensors()
    native = rainfusion.sparse_attention(q, k, v, **RF_V2, latent_shape_q=GRID)
    with pytest.warns(UserWarning, match=f"precision='{precision}' runs as 'bf16' here.*needs an NVIDIA GPU") as said:
        outs = [stand_in.sparse_attention(q, k, v, **RF_V2, latent_shape_q=GRID, precision=precision) for _ in range(2)]
    assert len(said) == 1
    assert all(torch.equal(out, native) for out in outs)


@pytest.mark.parametrize(
    "call", [dict(RF_V2, precision="bf16"), dict(precision="mix"), dict(sparse_type="ada_bsa", precision="mix")]
)
def test_no_warning_where_the_reference_would_not_quantise(call, not_warned):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stand_in.sparse_attention(*tensors(300), **call)


@pytest.mark.parametrize(("theirs", "ours"), [("bf16", "native"), ("mix", "int8"), ("fp8", "fp8"), ("mxfp4", "fp8")])
@pytest.mark.parametrize("sparse_type", ["rf_v2", "rf_v3"])
def test_with_kernels_quantised_calls_are_quantised(theirs, ours, sparse_type, handed_over, monkeypatch, not_warned):
    asked = []

    def why_not(name, call, shapes):
        asked.append((shapes.q[1], call.method.precision))
        return None if name == "hopper" else "has no kernels"

    monkeypatch.setattr(backends, "why_not", why_not)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stand_in.sparse_attention(
            *tensors(300, layout="BSND"), input_layout="BSND", sparse_type=sparse_type, precision=theirs
        )
    assert [call["precision"] for call in handed_over] == [ours]
    assert asked == ([] if ours == "native" else [(2, ours)])  # 2 heads: asked about [B, N, S, D], as backends expect


def test_a_block_size_without_quantised_kernels_runs_natively(handed_over, monkeypatch, not_warned):
    def why_not(name, call, shapes):
        return None if call.method.block_size == 128 else "takes blocks of 128 tokens"

    monkeypatch.setattr(backends, "why_not", why_not)
    with pytest.warns(UserWarning, match="takes blocks of 128 tokens"):
        stand_in.sparse_attention(*tensors(300), **RF_V2, block_size=64, precision="mix")
    assert handed_over[0]["precision"] == "native"


@pytest.mark.parametrize("precision", ["bf16", "mix"])
def test_one_graph_for_torch_compile(precision, installed, not_warned):
    """With the warning, too, which compilers cannot trace."""
    from mindiesd import sparse_attention

    q, k, v = tensors()

    def call(q, k, v):
        return sparse_attention(q, k, v, **RF_V2, latent_shape_q=GRID, precision=precision)

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    assert sum("runs as 'bf16'" in str(w.message) for w in said) == (precision == "mix")
    assert torch.equal(out, call(q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("theirs", "ours"), [("bf16", "native"), ("mix", "int8"), ("fp8", "fp8")])
def test_a_gpu_quantises_where_it_can(theirs, ours, not_warned):
    q, k, v = (x.to("cuda", torch.bfloat16) for x in torch.randn(3, 1, 2, T * H * W, 64).unbind())
    call = dict(RF_V2, latent_shape_q=GRID)
    if ours == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        with pytest.warns(UserWarning, match="runs as 'bf16'"):
            out = stand_in.sparse_attention(q, k, v, **call, precision=theirs)
        ours = "native"
    else:
        out = stand_in.sparse_attention(q, k, v, **call, precision=theirs)
    assert torch.equal(out, rainfusion.sparse_attention(q, k, v, **call, precision=ours))


# ---------------------------------------------------------------------------------------------------------------------
# modules


def test_the_modules_say_whose_they_are(installed):
    for path in stand_in.PATHS:
        module = importlib.import_module(path)
        assert isinstance(module, types.ModuleType)
        assert "rainfusion" in module.__version__
        assert importlib.util.find_spec(path) is module.__spec__
        assert module.__spec__.name == module.__name__ == path
    assert importlib.util.find_spec("mindiesd.compilation") is None


def test_everything_else_is_missing_with_a_reason(installed):
    import mindiesd
    import mindiesd.layers.flash_attn

    for module in (mindiesd, mindiesd.layers, mindiesd.layers.flash_attn):
        with pytest.raises(AttributeError, match=r"no 'attention_forward': it is rainfusion's.*sparse_attention only"):
            module.attention_forward  # noqa: B018
        assert not hasattr(module, "CacheConfig")
    with pytest.raises(ImportError, match=r"attention_forward.*rainfusion"):
        exec("from mindiesd import attention_forward")
    with pytest.raises(ModuleNotFoundError, match=r"mindiesd\.compilation"):
        exec("import mindiesd.compilation")


def test_installing_twice_is_installing_once():
    before = dict(sys.modules)
    stand_in.install()
    first = mindiesd_modules()
    stand_in.install()
    assert mindiesd_modules() == first
    assert set(first) == set(stand_in.PATHS)
    stand_in.uninstall()
    assert sys.modules == before


def test_uninstalled_it_is_gone():
    stand_in.uninstall()  # nothing to do
    stand_in.install()
    stand_in.uninstall()
    assert not mindiesd_modules()
    assert importlib.util.find_spec("mindiesd") is None
    with pytest.raises(ModuleNotFoundError):
        exec("from mindiesd import sparse_attention")
    stand_in.install()
    exec("from mindiesd import sparse_attention")
    stand_in.uninstall()


def test_uninstalling_leaves_what_others_put_there(installed, monkeypatch):
    theirs = types.ModuleType("mindiesd.layers")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mindiesd.layers", theirs)
        patch.setitem(sys.modules, "mindiesd.extra", theirs)
        stand_in.uninstall()
        assert mindiesd_modules() == {"mindiesd.layers": theirs, "mindiesd.extra": theirs}


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_mindiesd_is_not_shadowed(imported, tmp_path, monkeypatch):
    (tmp_path / "mindiesd").mkdir()
    (tmp_path / "mindiesd" / "__init__.py").write_text("def sparse_attention():\n    return 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    try:
        if imported:
            exec("import mindiesd", names)
        before = mindiesd_modules()
        with pytest.raises(RuntimeError, match="does not shadow") as refused:
            stand_in.install()
        assert str(tmp_path) in str(refused.value)
        assert "rainfusion.integrations.mindiesd" in str(refused.value)  # a way out
        stand_in.uninstall()
        assert mindiesd_modules() == before
        exec("from mindiesd import sparse_attention", names)
        assert names["sparse_attention"]() == "the real one"
    finally:
        sys.modules.pop("mindiesd", None)


@pytest.mark.parametrize("path", ["mindiesd", "mindiesd.layers.flash_attn"])
@pytest.mark.parametrize("module", [types.ModuleType("theirs"), None])
def test_nothing_in_sys_modules_is_replaced(path, module, monkeypatch):
    monkeypatch.setitem(sys.modules, path, module)
    with pytest.raises(RuntimeError, match=f"{path} is imported"):
        stand_in.install()
    assert mindiesd_modules() == {path: module}
