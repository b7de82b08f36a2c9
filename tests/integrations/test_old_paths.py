"""Names that have moved work for one release, and warn; importing rainfusion does not."""

import subprocess
import sys

import pytest

import rainfusion
from rainfusion.integrations import mindiesd, scenes, settings, stats
from rainfusion.integrations.diffusers import grids, models


def test_importing_warns_of_nothing():
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", "import rainfusion"], check=True)


@pytest.mark.parametrize(
    ("path", "name", "new"),
    [
        ("rainfusion.plugin", "enable", rainfusion.enable),
        ("rainfusion.plugin", "Handle", rainfusion.Handle),
        ("rainfusion.plugin", "register_model", rainfusion.register_model),
        ("rainfusion.plugin.grids", "latent_shape", grids.latent_shape),
        ("rainfusion.plugin.grids", "NoGrid", scenes.NoGrid),
        ("rainfusion.plugin.grids", "Scene", scenes.Scene),
        ("rainfusion.plugin.models", "MODELS", models.MODELS),
        ("rainfusion.plugin.settings", "Settings", settings.Settings),
        ("rainfusion.plugin.settings", "VIDEO_SPARSITY", 0.8),
        ("rainfusion.plugin.stats", "Stats", stats.Stats),
        ("rainfusion.compat.mindiesd", "sparse_attention", mindiesd.sparse_attention),
    ],
)
def test_old_names(path, name, new):
    module = __import__(path, fromlist=["x"])
    with pytest.warns(DeprecationWarning, match=rf"^{path}\.{name} is deprecated .* use rainfusion\."):
        assert getattr(module, name) == new
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_the_plug_in_without_an_import_of_its_own():
    with pytest.warns(DeprecationWarning, match=r"rainfusion\.plugin\.disable"):
        assert rainfusion.plugin.disable is rainfusion.disable
