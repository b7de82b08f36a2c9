"""A laboratory: a small video DiT, trained for real, to compare full and sparse attention pixel by pixel.

data      procedural clips and their prompts, made on the device
model     the DiT; attention is a callable that one passes in
sampling  prompts -> frames, with any attention
training  `python -m rainfusion.lab.training --help`
weights   the trained model, a file of the repository
pictures  contact sheets and GIFs of samples
metrics   how far two clips are apart
rules     which blocks others keep, and bounds
methods   ours and theirs as rows of data, each as an attention: `rainfusion quality` compares them

    model = lab.load()
    prompts = lab.random_prompts(4, torch.Generator().manual_seed(0))
    full = lab.sample(model, prompts)
    fast = lab.sample(model, prompts, attention=lab.sparse(sparsity=0.8))
    moved = lab.sample(model, prompts, image=lab.images(prompts, model.config.size))
"""

from rainfusion.lab.data import describe, encode, images, parse, random_prompts
from rainfusion.lab.model import Attention, Config, DiT, Place, dense, sparse
from rainfusion.lab.sampling import sample
from rainfusion.lab.weights import load

__all__ = [
    "Attention",
    "Config",
    "DiT",
    "Place",
    "dense",
    "describe",
    "encode",
    "images",
    "load",
    "parse",
    "random_prompts",
    "sample",
    "sparse",
]
