"""A call as the library plans it: for tests of single stages."""

from rainfusion import pipeline, planning


def planned(q, k, v=None, attn_mask=None, mask=None, backend="portable", **kwargs):
    """The arguments of `sparse_attention` -> its checked tensors and its plan."""
    inputs = planning.check(q, k, k if v is None else v, attn_mask, mask, input_layout="BNSD")
    return inputs, planning.plan(planning.ask_flat(inputs, backend=backend, **kwargs), inputs.shapes)


def request(q, k, v=None, attn_mask=None, mask=None, **kwargs):
    """What a backend is asked."""
    return pipeline.request_for(*planned(q, k, v, attn_mask, mask, **kwargs))
