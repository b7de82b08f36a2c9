"""Putting sparse attention on the layers of a transformer, keeping it there, and taking it off again."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rainfusion.integrations.diffusers import scope
from rainfusion.integrations.diffusers.scope import LAYER, Arrival, Scope
from rainfusion.integrations.layer_names import plain_name


@dataclass
class _Layer:
    """A self-attention module, and what was put on it."""

    module: nn.Module
    processor: Any = None  # whose class is ours
    original: Any = None  # the processor that stood there, where ours is a copy of it
    scope: Scope | None = None  # where there is no processor that could be ours

    def holds(self, arrival: Arrival) -> bool:
        """Whether nobody has changed anything since: adapters and fusing swap processors."""
        if getattr(self.module, "processor", None) is not self.processor:
            return self.scope is not None and self.scope.is_in_place
        if self.processor is None:
            return self.scope is None or self.scope.is_in_place
        kind = type(self.processor)
        return kind is scope.scoped(scope.unscoped(kind), arrival)


class Attachment:
    """The self-attention layers of one transformer, with sparse attention on them.

    Args:
        names: of the layers.
        arrival: how their calls come to us.
        number: of the host that answers them.
        originals: for a copy of a model: processors to put back, by layer.
    """

    def __init__(
        self, names: tuple[str, ...], arrival: Arrival, number: int, originals: dict[int, Any] | None = None
    ) -> None:
        self.names, self.arrival, self.number = names, arrival, number
        self.unreachable: dict[int, str] = {}  # layers whose attention cannot even be watched, and what they have
        self._originals = originals or {}
        self._layers: list[_Layer] = []
        self._links: list[tuple[dict[str, Any], str, nn.Module]] = []

    def module(self, layer: int) -> nn.Module:
        return self._layers[layer].module

    def originals(self) -> dict[int, Any]:
        """The processors that copies of ours stand for, by layer."""
        return {
            number: layer.original for number, layer in enumerate(self._layers) if layer.original is not None
        } or self._originals

    def follow(self, model: nn.Module, arrival: Arrival | None = None) -> None:
        """Puts on what is not on yet: blocks, processors and forwards may have been replaced since the last forward.

        One look at each layer, where nothing has changed.
        """
        wanted = arrival or self.arrival
        if not self._layers or not all(children.get(key) is child for children, key, child in self._links):
            self._release(self._layers)
            self._find(model)
            changed = self._layers
        else:
            changed = [layer for layer in self._layers if not layer.holds(wanted)]
            self._release(changed)
        if changed:
            self._take(model, wanted)

    def take_off(self, model: nn.Module) -> None:
        """Leaves the layers as they were found."""
        if not self._layers:  # a copy that never ran
            self._find(model)
            for layer in self._layers:
                layer.processor = getattr(layer.module, "processor", None)
        self._release(self._layers)
        for layer in self._layers:
            scope.take_off(getattr(layer.module, "processor", None))  # adapters may make theirs of our class
            layer.module.__dict__.pop(LAYER, None)
        self._layers, self._links = [], []

    def _find(self, model: nn.Module) -> None:
        """The modules by name, where each hangs, and their labels."""
        for layer in self._layers:
            layer.module.__dict__.pop(LAYER, None)
        paths = {plain_name(name): name for name, _ in model.named_modules()}
        links: dict[tuple[int, str], tuple[dict[str, Any], str, nn.Module]] = {}
        self._layers = []
        for number, name in enumerate(self.names):
            module = model
            for part in paths[name].split("."):
                parent, module = module, module._modules[part]  # type: ignore[assignment]
                links[id(parent), part] = (parent._modules, part, module)
            setattr(module, LAYER, torch.tensor([self.number, number], device="cpu"))
            self._layers.append(_Layer(module, original=self._originals.get(number)))
        self._links = list(links.values())
        self._originals = {}

    def _take(self, model: nn.Module, arrival: Arrival) -> None:
        users = _users(model)
        mine = {id(layer.module) for layer in self._layers}
        self.unreachable = {}
        for number, layer in enumerate(self._layers):
            if layer.holds(arrival) and layer.processor is not None:
                continue
            processor = getattr(layer.module, "processor", None)
            if processor is not None and not users[id(processor)] <= mine:  # shared with modules to be left alone
                layer.original, processor = processor, copy.copy(processor)
                layer.module.processor = processor
            if processor is not None and scope.put_on(processor, arrival):
                layer.processor = processor
            elif arrival == "sdpa":
                self._put_scope(layer)
            else:
                has = "a module without a processor" if processor is None else _called(processor)
                self.unreachable[number] = has

    @staticmethod
    def _put_scope(layer: _Layer) -> None:
        if layer.scope is not None and layer.scope.is_in_place:
            return
        copied = vars(layer.module).get("forward")
        if isinstance(copied, Scope):  # with the block of another layer
            copied.take_off()
        layer.scope = Scope(layer.module)
        layer.scope.put_on()

    @staticmethod
    def _release(layers: list[_Layer]) -> None:
        for layer in layers:
            copied = vars(layer.module).get("forward")
            for found in (layer.scope, copied):
                if isinstance(found, Scope):
                    found.take_off()
            if layer.original is not None and getattr(layer.module, "processor", None) is layer.processor:
                layer.module.processor = layer.original
            if layer.processor is not None:
                scope.take_off(layer.processor)
            layer.processor = layer.original = layer.scope = None


def _users(model: nn.Module) -> dict[int, set[int]]:
    """Which modules have a processor, by its id."""
    found: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None:
            found[id(processor)].add(id(module))
    return found


def _called(processor: Any) -> str:
    """The name of a function, or else of the class."""
    return getattr(processor, "__name__", None) or type(processor).__name__
