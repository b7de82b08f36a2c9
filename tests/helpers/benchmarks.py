"""The scripts in benchmarks/, as modules."""

import importlib.util
import sys
from pathlib import Path


def load(name):
    """Anew each time. Known by its name, where its dataclasses look for it."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
