"""`rainfusion calibrate`: a budget for each layer and head of a diffusers pipeline, or of the lab model."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rainfusion import backends, checks
from rainfusion.integrations import diffusers as plugin
from rainfusion.prediction.calibration import Recorder, allocate
from rainfusion.profiles import Profile
from rainfusion.table import table

LAB = "lab"


@dataclass(frozen=True)
class Plan:
    """What to measure, on which samples, for which options."""

    model: str  # "lab", or a pipeline as diffusers' from_pretrained knows it
    sparsity: float
    out: Path
    device: torch.device
    options: Mapping[str, Any]  # of `enable`: token_order, predictor, compensate, first_frame
    prompts: Sequence[str] = ()
    count: int = 2  # of the lab's prompts
    call: Mapping[str, Any] = field(default_factory=dict)  # of the pipeline: num_inference_steps, height, ...
    dtype: torch.dtype = torch.bfloat16


def run(plan: Plan) -> int:
    start = time.perf_counter()
    plan.out.parent.mkdir(parents=True, exist_ok=True)  # before hours of work
    profile = _of_lab(plan) if plan.model == LAB else _of_pipeline(plan)
    profile.save(plan.out)
    for line in report(profile):
        print(line)
    use = (
        "lab.sparse(profile=Profile.load(...))"
        if plan.model == LAB
        else f"rainfusion.enable(pipe, profile={str(plan.out)!r})"
    )
    print(f"wrote {plan.out} after {time.perf_counter() - start:.0f} s; use it with {use}")
    _draw(profile, plan.out.with_suffix(".png"))
    return 0


def report(profile: Profile) -> list[str]:
    """Sparsities by layer, the least and the most sparse head of each."""
    rows = [
        (name, f"{sum(heads) / len(heads):.3f}", f"{min(heads):.3f}", f"{max(heads):.3f}")
        for name, heads in profile.sparsities.items()
    ]
    heading = f"sparsity of {profile.sparsity:g} in all, protected blocks counted in"
    return [heading, table(("layer", "mean", "least", "most"), rows)]


def _of_lab(plan: Plan) -> Profile:
    from rainfusion import lab
    from rainfusion.lab.model import Place, arguments_at, dense

    refused = sorted({"width", "prompt"} & ({*plan.call} | ({"prompt"} if plan.prompts else set())))
    if refused:
        raise ValueError(
            f"the lab draws prompts of its own, and squares: leave out {', '.join(refused)}; see --samples"
        )
    model, recorder, bar = lab.load(device=plan.device), Recorder(plan.sparsity), _bar()

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        checked = checks.options(q, k, predicts=True, sparsity=plan.sparsity, **arguments_at(place), **plan.options)
        runner = backends.choose("auto", q, k, v, None, checked)
        recorder.add(str(place.layer), q, k, v, None, None, checked, runner)
        bar.update()
        return dense(q, k, v, place)

    given = {"steps": "num_inference_steps", "guidance": "guidance_scale", "frames": "num_frames", "size": "height"}
    chosen = {name: plan.call[theirs] for name, theirs in given.items() if theirs in plan.call}
    lab.sample(model, lab.random_prompts(plan.count, torch.Generator().manual_seed(0)), attention=attend, **chosen)
    bar.close()
    calls = sum(layer.calls for layer in recorder.layers.values())
    return Profile(allocate(recorder.layers, plan.sparsity), plan.sparsity, plan.options, dict(model=LAB, calls=calls))


def _of_pipeline(plan: Plan) -> Profile:
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(plan.model, torch_dtype=plan.dtype)  # type: ignore[no-untyped-call]
    pipe = pipe.to(plan.device)
    known = inspect.signature(pipe.__call__).parameters
    unknown = sorted(plan.call.keys() - known.keys())
    if unknown:
        raise ValueError(f"{type(pipe).__name__} has no {', '.join(unknown)}; it takes {', '.join(known)}")

    def sample() -> None:
        for number, prompt in enumerate(plan.prompts, 1):
            print(f"sample {number} of {len(plan.prompts)}: {prompt}", flush=True)
            generator = torch.Generator("cpu").manual_seed(number)
            pipe(prompt, generator=generator, output_type="latent", **plan.call)

    found = plugin.calibrate(pipe, sample, sparsity=plan.sparsity, **plan.options)
    notes = {**found.notes, "model": plan.model, "prompts": list(plan.prompts), "call": dict(plan.call)}
    return Profile(found.sparsities, found.sparsity, found.options, notes)


class _Counter:
    """Stands in for a bar where tqdm is not installed."""

    def __init__(self) -> None:
        self.calls = 0

    def update(self) -> None:
        self.calls += 1
        if self.calls % 50 == 0:
            print(f"{self.calls} attention calls measured", flush=True)

    def close(self) -> None:
        pass


def _bar() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _Counter()
    return tqdm(desc="attention calls measured", unit="call")


def _draw(profile: Profile, path: Path) -> None:
    """Sparsity by layer and head, as a picture, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    heads = max(map(len, profile.sparsities.values()))
    grid = torch.full((len(profile.sparsities), heads), torch.nan)
    for row, shares in zip(grid, profile.sparsities.values(), strict=True):
        row[: len(shares)] = torch.tensor(shares)
    figure = Figure(figsize=(2.5 + 0.28 * heads, 1.5 + 0.22 * len(grid)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set(xlabel="head", ylabel="layer", title=f"sparsity, {profile.sparsity:g} in all")
    figure.colorbar(image)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
