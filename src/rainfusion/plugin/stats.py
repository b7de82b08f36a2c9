"""The old path of `rainfusion.integrations.stats`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.plugin.stats", "rainfusion.integrations.stats")
