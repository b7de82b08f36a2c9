"""What tests share: oracles, tiny models and pipelines, measurements."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
