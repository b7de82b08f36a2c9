"""The old path of `rainfusion.integrations`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.compat", "rainfusion.integrations")
