"""Integrations: programs that run models, with sparse attention in them.

decider    sparse or dense, for every call of a model, and the tally; knows no host
scenes     where the picture lies in a sequence
settings   what a user asked for, checked
stats      what was counted
diffusers  the host for diffusers: `rainfusion.enable`
mindiesd   the signature of MindIE-SD on every torch device
"""
