"""The old path of `rainfusion.integrations.diffusers.grids`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved(
    "rainfusion.plugin.grids", "rainfusion.integrations.diffusers.grids", "rainfusion.integrations.scenes"
)
