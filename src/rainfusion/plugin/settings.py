"""The old path of `rainfusion.integrations.settings`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.plugin.settings", "rainfusion.integrations.settings", "rainfusion.options")
