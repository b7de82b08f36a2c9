"""The old path of `rainfusion.integrations.mindiesd`: works for one release, and warns."""

from rainfusion.deprecation import moved

__getattr__ = moved("rainfusion.compat.mindiesd", "rainfusion.integrations.mindiesd")
