"""The old path of `rainfusion.integrations.diffusers`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.plugin", "rainfusion", "rainfusion.integrations.diffusers", "rainfusion.integrations")
