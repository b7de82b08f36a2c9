"""Triton kernels, one file a stage. Importing one imports Triton, so `backends.triton` and `backends.hopper` import
them when they are first used.

Names inside: `b_` a block of values, `p_` pointers, `o_` offsets, `m_` a mask. Offsets that grow with the tensors are
int64. A kernel's grid is one-dimensional: heads vary slowest, so that neighbours in time share keys in the cache.
"""
