"""The old path of `rainfusion.integrations.diffusers.steps`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.plugin.steps", "rainfusion.integrations.diffusers.steps")
