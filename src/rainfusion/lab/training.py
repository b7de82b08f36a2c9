"""Trains the laboratory's model: minutes on one GPU, in as many commands as it takes.

A step is a function of the weights, the seed and its number: clips, times and noise come from a generator that each
step seeds anew. So a checkpoint needs no state of a generator, and a run that was interrupted goes on as if it had not
been.

    x_t = (1 - t) clip + t noise,    loss = mean (v(x_t, t, prompt) - (noise - clip))^2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rainfusion.lab import data, weights
from rainfusion.lab.model import Attention, Config, DiT, Place, dense

Drawn = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # clips, times, prompts, noise and, for some, images

GOLDEN = (math.sqrt(5) - 1) / 2
HELD_OUT = 500_000_000  # the step whose clips are held out: no training gets that far


@dataclass(frozen=True)
class Batch:
    """A kind of batch. Clips of one frame are images."""

    frames: int
    size: int  # height and width in pixels
    count: int
    share: float  # the share of steps that have such a batch
    image: bool = False  # whether the model is given the first frame

    def __str__(self) -> str:
        return f"{self.frames}x{self.size}x{self.size}" + (" from an image" if self.image else "")


@dataclass(frozen=True)
class Phase:
    """A stretch of the training, and the batches that take turns in it."""

    share: float  # the share of all steps
    kinds: tuple[Batch, ...]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Phase:
        """The phase that `dataclasses.asdict` was called on."""
        return cls(fields["share"], tuple(Batch(**kind) for kind in fields["kinds"]))


def _videos(frames: int, size: int, count: int, images: int) -> tuple[Batch, ...]:
    """Batches of pictures, of videos from text, and of videos from text and an image."""
    return (
        Batch(1, size, images, 0.1),
        Batch(frames, size, count, 0.5),
        Batch(frames, size, count, 0.4, image=True),
    )


@dataclass(frozen=True)
class Recipe:
    """What to train and how; the same recipe gives the same model.

    Attention takes most of the time, and most of that in the last phase: what moves where is learnt in small pictures.
    """

    config: Config = field(default_factory=Config)
    phases: tuple[Phase, ...] = (
        Phase(0.48, _videos(81, 24, 48, 128)),
        Phase(0.34, _videos(81, 36, 32, 128)),
        Phase(0.18, _videos(81, 72, 8, 64)),
    )
    steps: int = 8900
    rate: float = 4e-3  # the highest learning rate
    warmup: int = 200
    decay: float = 0.01  # weight decay of matrices
    muon: bool = True  # for the matrices of layers; AdamW has the rest, or all of them
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0  # the largest norm of a gradient
    ema: float = 0.999
    no_prompt: float = 0.1  # the share of clips that the model sees without their prompt
    shift: float = 3.0  # moves times towards the noise
    seed: int = 0

    def batch(self, step: int) -> Batch:
        """The kind of batch of a step; kinds follow one another in their shares."""
        kinds = self.phase(step).kinds
        point = step * GOLDEN % 1 * sum(kind.share for kind in kinds)
        for kind in kinds[:-1]:
            if point < kind.share:
                return kind
            point -= kind.share
        return kinds[-1]

    def phase(self, step: int) -> Phase:
        """The phase of a step."""
        end = 0.0
        for phase in self.phases[:-1]:
            end += phase.share * self.steps
            if step < end:
                return phase
        return self.phases[-1]

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: a ramp, a plateau, and from the middle on a straight way to zero."""
        return self.rate * max(0.0, min((step + 1) / self.warmup, 1.0, 2 * (1 - step / self.steps)))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Recipe:
        """The recipe that `to_dict` was called on."""
        phases = tuple(map(Phase.from_dict, fields["phases"]))
        given = {**fields, "phases": phases, "config": Config(**fields["config"]), "betas": tuple(fields["betas"])}
        return cls(**given)


RECIPES = {
    "full": Recipe(),
    "tiny": Recipe(  # a model of 5 x 8 x 8 tokens, for a CPU
        config=Config(frames=17, size=32, patch=4, dim=128, depth=6, mlp=512),
        phases=(
            Phase(0.5, (Batch(1, 32, 32, 0.75), Batch(17, 32, 8, 0.25))),
            Phase(0.5, (Batch(1, 32, 32, 0.25), Batch(17, 32, 8, 0.5), Batch(17, 32, 8, 0.25, image=True))),
        ),
        steps=1200,
        warmup=50,
        ema=0.99,
        rate=4e-3,
    ),
}


def generator_of(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The generator of a step, seeded anew."""
    return torch.Generator(device).manual_seed(seed * 1_000_000_007 + step)


def draw_times(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Random times [B] in (0, 1): logit-normal, shifted towards 1."""
    even = torch.randn(count, generator=generator, device=generator.device).sigmoid()
    return shift * even / (1 + (shift - 1) * even)


def flow_loss(
    model: DiT,
    clips: Tensor,
    time: Tensor,
    prompts: Tensor,
    noise: Tensor,
    attention: Attention,
    image: Tensor | None = None,
) -> Tensor:
    """mean (v(x_t, t, prompt, image) - (noise - clip))^2, with x_t = (1 - t) clip + t noise."""
    t = time[:, None, None, None, None]
    with torch.autocast(clips.device.type, torch.bfloat16):
        velocity: Tensor = model(torch.lerp(clips, noise, t), time, prompts, attention, image=image)
    return (velocity.float() - (noise - clips)).square().mean()


def cudnn_first(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
    """Full attention by cuDNN where that can run: the fastest there is for training on Hopper GPUs."""
    kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kinds, set_priority=True):
        return dense(q, k, v, place)


class Recorded:
    """A function of a batch as a CUDA graph: whatever it does on the device, without the host between."""

    def __init__(self, function: Callable[..., Tensor], drawn: Drawn) -> None:
        self.inputs = cast(Drawn, tuple(None if x is None else x.clone() for x in drawn))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = function(*self.inputs)

    def __call__(self, drawn: Drawn) -> Tensor:
        for place, x in zip(self.inputs, drawn, strict=True):
            if place is not None and x is not None:
                place.copy_(x)
        self.graph.replay()
        return self.out.clone()


class Trainer:
    """A model on its way: weights, their running mean, the optimisers and the number of the next step.

    graphs: whether to record each kind of batch once as a CUDA graph, since small pictures wait for the host.
    """

    def __init__(
        self, recipe: Recipe, device: torch.device | str = "cpu", attention: Attention = dense, *, graphs: bool = False
    ) -> None:
        self.recipe, self.device, self.attention = recipe, torch.device(device), attention
        self._recorded: dict[Batch, Recorded] | None = {} if graphs else None
        self.step = 0
        self.seconds = 0.0  # the time spent so far, in all commands
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = DiT(recipe.config).to(self.device)
        self.ema = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.optimisers = _optimisers(self.model, recipe, self.device)

    def advance(self) -> Tensor:
        """Makes one step and returns its loss, on the device."""
        recipe = self.recipe
        kind = recipe.batch(self.step)
        drawn = self._draw(kind, generator_of(recipe.seed, self.step, self.device))
        loss = self._learn(*drawn) if self._recorded is None else self._replay(kind, drawn)
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate(self.step)
            optimiser.step()
        self._average()
        self.step += 1
        return loss

    def _draw(self, kind: Batch, generator: torch.Generator) -> Drawn:
        """A batch: clips, times, prompts, noise and, for some, images."""
        clips, prompts = data.batch(kind.count, kind.frames, kind.size, kind.size, generator)
        dropped = torch.rand(kind.count, 1, generator=generator, device=self.device) < self.recipe.no_prompt
        time = draw_times(kind.count, self.recipe.shift, generator)
        noise = torch.randn(clips.shape, generator=generator, device=self.device)
        image = clips[:, :, 0] if kind.image else None
        return clips, time, prompts.masked_fill(dropped, data.EMPTY), noise, image

    def _learn(self, clips: Tensor, time: Tensor, prompts: Tensor, noise: Tensor, image: Tensor | None) -> Tensor:
        """The loss of a batch; the weights' gradients are those of this batch afterwards."""
        for weight in self.model.parameters():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.zero_()
        loss = flow_loss(self.model, clips, time, prompts, noise, self.attention, image)
        loss.backward()
        return loss.detach()

    def _replay(self, kind: Batch, drawn: Drawn) -> Tensor:
        """The same by a CUDA graph, which is recorded when a kind of batch first comes."""
        assert self._recorded is not None
        if kind not in self._recorded:
            self._recorded[kind] = Recorded(self._learn, drawn)
        return self._recorded[kind](drawn)

    @torch.no_grad()
    def _average(self) -> None:
        follow = max(1 - self.recipe.ema, 9 / (10 + self.step))  # the mean follows quickly at first
        torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), follow)

    @torch.no_grad()
    def held_out_loss(self, count: int = 16, times: int = 8) -> float:
        """The loss of the running mean of the weights, on clips that no step has seen, at even times."""
        model, config = averaged(self), self.recipe.config
        generator = generator_of(self.recipe.seed, HELD_OUT, self.device)
        clips, prompts = data.batch(count, config.frames, config.size, config.size, generator)
        noise = torch.randn(clips.shape, generator=generator, device=self.device)
        losses = [
            flow_loss(model, clips, clips.new_full((count,), (i + 0.5) / times), prompts, noise, self.attention)
            for i in range(times)
        ]
        return float(torch.stack(losses).mean())

    def save(self, path: Path) -> None:
        """Writes a checkpoint of everything in one move: an interrupted save leaves the checkpoint before it."""
        state = dict(
            recipe=self.recipe.to_dict(),
            step=self.step,
            seconds=self.seconds,
            model=self.model.state_dict(),
            ema=self.ema,
            optimisers=[optimiser.state_dict() for optimiser in self.optimisers],
        )
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        os.replace(part, path)

    @classmethod
    def restore(
        cls, path: Path, device: torch.device | str = "cpu", attention: Attention = dense, *, graphs: bool = False
    ) -> Trainer:
        """The trainer that was saved as a checkpoint."""
        state = torch.load(path, map_location=device, weights_only=True)
        trainer = cls(Recipe.from_dict(state["recipe"]), device, attention, graphs=graphs)
        trainer.model.load_state_dict(state["model"])
        for optimiser, saved in zip(trainer.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        trainer.ema, trainer.step, trainer.seconds = state["ema"], state["step"], state["seconds"]
        return trainer

    def export(self, path: Path, command: str) -> None:
        """Writes the running mean of the weights, with notes on how it came about."""
        notes = dict(
            recipe=json.dumps(self.recipe.to_dict()),
            step=str(self.step),
            loss=f"{self.held_out_loss():.5f}",
            seconds=f"{self.seconds:.0f}",
            command=command,
            torch=torch.__version__,
            device=_device_name(self.device),
        )
        weights.save(path, self.recipe.config, self.ema, notes)


def averaged(trainer: Trainer) -> DiT:
    """A model with the running mean of a trainer's weights."""
    model = DiT(trainer.recipe.config).to(trainer.device)
    model.load_state_dict(trainer.ema)
    return model.requires_grad_(False).eval()


def _optimisers(model: DiT, recipe: Recipe, device: torch.device) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and name.endswith("weight"))]
    inner = [p for p in model.blocks.parameters() if any(p is matrix for matrix in matrices)] if recipe.muon else []
    outer = [p for p in matrices if not any(p is matrix for matrix in inner)]
    groups = [dict(params=outer, weight_decay=recipe.decay), dict(params=rest, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=device.type == "cuda")
    if not inner:
        return [adam]
    # steps as long as AdamW's, so that one learning rate is right for both
    return [adam, torch.optim.Muon(inner, recipe.rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw")]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Log:
    """Mean loss and time of each kind of batch since the last line."""

    def __init__(self, every: int) -> None:
        self.every, self.losses, self.mark = every, dict[str, list[Tensor]](), time.monotonic()

    def add(self, trainer: Trainer, kind: Batch, loss: Tensor) -> None:
        """Notes the loss of a step, and prints a line every so often."""
        self.losses.setdefault(str(kind), []).append(loss)
        if trainer.step % self.every == 0 or trainer.step == trainer.recipe.steps:
            self.write(trainer)

    def write(self, trainer: Trainer) -> None:
        """Prints a line. Reading the losses waits for the device, so that the times are true."""
        means = {name: float(torch.stack(losses).mean()) for name, losses in sorted(self.losses.items())}
        count = sum(map(len, self.losses.values()))
        pace = (time.monotonic() - self.mark) / count
        self.losses, self.mark = {}, time.monotonic()
        shown = "  ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        print(f"step {trainer.step}/{trainer.recipe.steps}  loss {shown}  {1000 * pace:.0f} ms a step", flush=True)
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(f"the loss is {means} at step {trainer.step}: go back to the last checkpoint")


def run(trainer: Trainer, out: Path, until: float, *, log_every: int = 50, save_every: float = 60.0) -> None:
    """Trains to the end of the recipe, or until `time.monotonic()` says so; saves on the way and at the end."""
    log, begun, before = Log(log_every), time.monotonic(), trainer.seconds
    saved = begun
    while trainer.step < trainer.recipe.steps and time.monotonic() < until:
        kind = trainer.recipe.batch(trainer.step)
        log.add(trainer, kind, trainer.advance())
        trainer.seconds = before + time.monotonic() - begun
        if time.monotonic() - saved > save_every and not log.losses:  # right after a line: its losses were finite
            trainer.save(out)
            saved = time.monotonic()
    if log.losses:
        log.write(trainer)
    trainer.save(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says, and returns the exit status."""
    begun = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    attention = cudnn_first if device.type == "cuda" and args.cudnn else dense
    graphs = device.type == "cuda" and args.graphs
    if args.out.exists():
        if not args.resume:
            parser.error(f"{args.out} exists: pass --resume to go on with it")
        trainer = Trainer.restore(args.out, device, attention, graphs=graphs)
    else:
        trainer = Trainer(_asked_for(args, RECIPES[args.size or "full"]), device, attention, graphs=graphs)
    if _asked_for(args, trainer.recipe) != trainer.recipe:
        parser.error(f"{args.out} has another recipe: {_command(trainer.recipe)}")
    if args.compile if args.compile is not None else device.type == "cuda":
        trainer.model.compile_layers()
    millions = sum(weight.numel() for weight in trainer.ema.values()) / 1e6
    print(f"{millions:.2f} M parameters, step {trainer.step} of {trainer.recipe.steps}, {device}", flush=True)
    try:
        run(trainer, args.out, begun + args.seconds, log_every=args.log_every)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {_left(args.out)}", file=sys.stderr, flush=True)
        return 130
    print(f"{trainer.seconds:.0f} s in all, held-out loss {trainer.held_out_loss():.5f}", flush=True)
    if args.export:
        trainer.export(args.export, _command(trainer.recipe))
        print(f"{args.export}: {args.export.stat().st_size} bytes, SHA-256 {weights.digest(args.export)}", flush=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for a number out of its range, and for a file that cannot be written."""
    from rainfusion.cli import arguments, outputs

    arguments.check_counts(args, "steps", "log_every")
    arguments.check_finite(args, "rate")
    if args.rate is not None and args.rate <= 0:
        raise ValueError(f"--rate must be above 0, got {args.rate}")
    if not args.seconds >= 0:  # inf is "to the last step"
        raise ValueError(f"--seconds must be at least 0, got {args.seconds}")
    if args.seed is not None:
        arguments.check_seed(args)
    outputs.check_file("--out", args.out, example="lab.pt")
    if args.export is not None:
        outputs.check_file("--export", args.export, example="lab.safetensors")
        if args.export == args.out:
            raise ValueError(f"--export must be another file than --out, got {str(args.out)!r} for both")


def _left(checkpoint: Path) -> str:
    """What a run that was cut short has left, and how to go on."""
    if not checkpoint.exists():
        return f"{checkpoint} was not written yet: it is saved every minute"
    return f"{checkpoint} was saved in the last minute or two: the same command with --resume goes on with it"


def _asked_for(args: argparse.Namespace, recipe: Recipe) -> Recipe:
    """A recipe with what the command line says of it."""
    config = RECIPES[args.size].config if args.size else recipe.config
    given = dict(config=config, steps=args.steps, rate=args.rate, seed=args.seed)
    return dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})


def _command(recipe: Recipe) -> str:
    """The command that trains this model again from nothing."""
    size = next((name for name, known in RECIPES.items() if known.config == recipe.config), "full")
    return (
        f"python -m rainfusion.lab.training --size {size} --steps {recipe.steps} --rate {recipe.rate} "
        f"--seed {recipe.seed} --out lab.pt --resume"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rainfusion.lab.training",
        description="Trains the laboratory's model. Repeat the command until the last step is done.",
        epilog="example:\n"
        "  python -m rainfusion.lab.training --seconds 540 --out lab.pt --resume --export lab.safetensors\n"
        "  python -m rainfusion.lab.training --size tiny --seconds 300 --out tiny.pt  # on a CPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="checkpoint, saved every minute")
    parser.add_argument("--resume", action="store_true", help="go on with FILE where it exists, with its recipe")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this command (default: to the last step)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the averaged weights in bf16 (safetensors)")
    parser.add_argument("--size", choices=RECIPES, help="default: full")
    parser.add_argument("--steps", type=int, help="planned in all; the learning rate ends at zero there")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument(
        "--cudnn", action=argparse.BooleanOptionalAction, default=True, help="its attention, on CUDA (default: yes)"
    )
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs, on CUDA (default: yes)"
    )
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS", help="default: 50")
    return parser


if __name__ == "__main__":
    sys.exit(main())
