"""Kernels in Gluon, Triton's language for one architecture."""
