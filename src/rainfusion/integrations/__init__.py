"""Integrations: programs that run models, with sparse attention in them.

decider      sparse or dense, for every call of a model, and the tally; knows no host
scenes       where the picture lies in a sequence
layer_names  which modules are the layers
settings     what a user asked for, checked
stats        what was counted
serving      what hosts that serve models share
hosts        which versions of a host were tested
diffusers    the host for diffusers: `rainfusion.enable`
comfyui      the host for ComfyUI: `apply` and two nodes
vllm_omni    the host for vLLM-Omni, found by its entry point
sglang       the host for SGLang, found by its entry point
mindiesd     the signature of MindIE-SD on every torch device
"""
