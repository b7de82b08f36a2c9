"""What hosts that serve models share: a `Layer` for each attention layer, and an `Engine` for all of a process.

A serving engine makes an object for every attention layer, and tells it of every call: tensors [B, S, N, D], where the
picture lies in them, and the step. The objects of an engine have nothing else in common, so that the counts, the
messages and the end of a run are found here:

    ENGINE = Engine("Example", logger="example.rainfusion")
    layer = ENGINE.layer("blocks.0.attn1", scale=64**-0.5)
    out = layer.attend(method, Scene(((21, 45, 80),)), q, k, v, dense=lambda: ..., step=3)
    print(ENGINE.stats())
"""

from __future__ import annotations

import atexit
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rainfusion.calls import Inputs
from rainfusion.integrations.decider import Decider, Dense, Kind, Way, checked, run
from rainfusion.integrations.hosts import Host
from rainfusion.integrations.scenes import Scene
from rainfusion.integrations.settings import Settings
from rainfusion.integrations.stats import Stats, Tally
from rainfusion.options import Method

_MOST_METHODS = 64  # that a layer keeps; then what is known of them is found again
_NUMBERS = itertools.count()  # of layers, in the order in which they were made


def register_with(host: Host, register: Callable[[], object]) -> None:
    """What an engine calls in each of its processes, asked for or not: whatever goes wrong, the engine runs without us.

    Args:
        host: the engine.
        register: tells it of our classes.
    """
    log = logging.getLogger("rainfusion")
    try:
        register()
    except ImportError as error:  # a sentence, see `Host.names`
        log.warning("%s", error)
    except Exception as error:
        log.warning("%s", host.misfit(f"does not take a backend ({type(error).__name__}: {error})"))


class Engine:
    """The attention layers of one serving engine in this process.

    Args:
        name: of the engine, as people write it.
        logger: the name of a logger that the engine's logging shows.
        native: how the engine's users ask for the tensors' own precision, in words.
    """

    def __init__(self, name: str, *, logger: str, native: str = "precision='native'") -> None:
        self.name, self.native = name, native
        self._log = logging.getLogger(logger)
        self._layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self._warned: set[str] = set()
        self._has_begun = self._has_been_sparse = False
        self._step: int | None = None

    def layer(self, name: str, scale: float | None = None) -> Layer:
        """One more attention layer: counted as long as it lives. `scale`: of the logits; None: D ** -0.5."""
        if not self._has_begun:
            self._has_begun = True
            atexit.register(self._at_exit)
        layer = Layer(self, name or "attention", scale, self._warned)
        self._layers.add(layer)
        return layer

    def stats(self) -> Stats:
        """What the attention calls of this process did. Waits for the device."""
        return self._stats(layer.all_calls() for layer in self._in_order())

    def reset(self) -> None:
        """Counts begin again, and so does what is said once."""
        for layer in self._in_order():
            layer.forget()
        self._warned.clear()
        self._has_been_sparse, self._step = False, None

    def warn(self, message: str | None) -> None:
        """Said once; None: there is nothing to say."""
        if message is not None and message not in self._warned:
            self._warned.add(message)
            self.say(message)

    def say(self, message: str) -> None:
        """A warning, where the engine's logging shows it; of several processes one says it."""
        if _speaks():
            self._log.warning("%s", message)

    # -----------------------------------------------------------------------------------------------------------------
    # what layers tell

    def at_step(self, step: int | None) -> None:
        """A call is of this step: where it is the first again, a run has ended, and the log says what it did.

        Not at every step that goes back: requests may take turns.
        """
        if step == 0 and self._step:
            self._summarise()
            for layer in self._in_order():
                layer.begin_run()
        self._step = self._step if step is None else step

    def at_sparse(self, layer: Layer, inputs: Inputs, way: Way) -> None:
        """A call is about to be sparse: the first of the process is said in the log."""
        if self._has_been_sparse:
            return
        self._has_been_sparse = True
        if not _speaks():
            return
        batch, heads, tokens, size = inputs.q.shape
        method = way.call.method
        self._log.info(
            "rainfusion: sparse attention in %s: %s; %d x %d heads of %d, %d tokens, %s; sparsity %s, precision %s, "
            "backend %s",
            layer.name, way.words, batch, heads, size, tokens, inputs.q.dtype, method.sparsity, method.precision,
            way.plan.backend,
        )  # fmt: skip

    # -----------------------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[Layer]:
        return sorted(self._layers, key=lambda layer: layer.number)

    def _stats(self, tallies: Iterable[Tally]) -> Stats:
        names = _told_apart([layer.name for layer in self._in_order()])
        return Stats.of({"": (names, Tally.side_by_side(tallies))})

    def _summarise(self) -> None:
        """What was counted since the last time."""
        if not _speaks():
            return
        stats = self._stats(layer.tally for layer in self._in_order())
        if stats.sparse_calls or stats.dense_calls:
            self._log.info("rainfusion in %s: %s", self.name, stats.summary)

    def _at_exit(self) -> None:
        try:
            self._summarise()
        except RuntimeError:  # the device is gone already, and the counts with it
            return


class Layer:
    """One attention layer of an engine: decides for its calls, and counts them."""

    def __init__(self, engine: Engine, name: str, scale: float | None, warned: set[str]) -> None:
        self.name, self.scale, self.number = name, scale, next(_NUMBERS)
        self.tally = Tally(1)  # of this run
        self._engine, self._warned = engine, warned
        self._past = Tally(1)  # of the runs before
        self._deciders: dict[Method, Decider] = {}

    def attend(
        self,
        method: Method,
        scene: Scene | Dense,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Callable[[], Tensor],
        *,
        step: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """One attention call, sparse or dense.

        Args:
            method: how a sparse call is run.
            scene: where the picture lies in the sequence, or why the call is dense.
            q: the queries, [B, S, N, D].
            k: the keys, [B, S, N, D], of as many heads as q or fewer.
            v: the values, of k's shape.
            dense: what the engine would have called, without arguments.
            step: the number of the denoising step, from 0, if it is known.
            rows: so many tokens are used, and the others are padding: the answer there is the query itself. None: all.

        Returns:
            [B, S, N, D].
        """
        self._engine.at_step(step)
        decider = self._decider(method)

        def sparse() -> Tensor:
            if isinstance(scene, Dense):
                raise scene.again()
            return self._sparse(decider, scene, q, k, v, q.shape[1] if rows is None else rows)

        return decider.answer(0, sparse, dense)

    def _sparse(self, decider: Decider, scene: Scene, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        if q.dim() != 4:
            raise Dense.unsupported(f"q must be [B, S, N, D], got {list(q.shape)}")
        q_used, k_used, v_used = (x[:, :rows].transpose(1, 2) for x in (q, k, v))  # BSND -> BNSD view
        inputs = checked(q_used, k_used, v_used, None)
        way = self._way(decider, scene, inputs)
        self._engine.at_sparse(self, inputs, way)
        out = run(decider.tally, 0, inputs, way).transpose(1, 2)
        return out if rows == q.shape[1] else torch.cat([out, q[:, rows:]], dim=1)

    def _way(self, decider: Decider, scene: Scene, inputs: Inputs) -> Way:
        """How to run it. A precision that no kernel has here is an error, and not dense attention without a word."""
        try:
            return decider.way(0, scene, inputs, self.scale)
        except Dense as why:
            method = decider.settings.method
            if method.precision == "native" or why.kind is not Kind.UNSUPPORTED:
                raise
            native = self._decider(replace(method, precision="native"))
            native.way(0, scene, inputs, self.scale)  # raises a reason of its own, if it is not the precision
            raise ValueError(
                f"attention in {self.name} cannot run in the precision that was asked for: {why.reason}. Ask for "
                f"{self._engine.native} instead"
            ) from why

    def _decider(self, method: Method) -> Decider:
        """There is one for each method: engines give the options with every call, and may change them."""
        if method not in self._deciders:
            if len(self._deciders) >= _MOST_METHODS:
                self._deciders.clear()
            settings = Settings(method, min_tokens=0)  # the user asked for it by name: no crossover decides
            self._deciders[method] = Decider(
                settings, [self.name], tally=self.tally, warned=self._warned, say=self._engine.say
            )
        return self._deciders[method]

    # -----------------------------------------------------------------------------------------------------------------
    # counts

    def all_calls(self) -> Tally:
        whole = Tally(1)
        whole.add(self._past)
        whole.add(self.tally)
        return whole

    def begin_run(self) -> None:
        """What was counted so far is past."""
        self._past = self.all_calls()
        self._count_anew()

    def forget(self) -> None:
        self._past = Tally(1)
        self._count_anew()

    def _count_anew(self) -> None:
        self.tally = Tally(1)
        for decider in self._deciders.values():
            decider.tally = self.tally


def _speaks() -> bool:
    """Of several processes that run a model together, the first one does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _told_apart(names: list[str]) -> list[str]:
    """Two models of one process may give their layers the same names.

    >>> _told_apart(["blocks.0", "blocks.1", "blocks.0"])
    ['blocks.0', 'blocks.1', 'blocks.0 (2)']
    """
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
