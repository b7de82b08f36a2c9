"""The old path of `rainfusion.integrations.diffusers.models`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.plugin.models", "rainfusion.integrations.diffusers.models")
