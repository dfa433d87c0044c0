"""A model as a chain of decoder blocks: transformers' own modelling code on the meta device, one block materialised at a time.

Peak memory is one block (and, at the ends, the embedding or the head) in fp32 plus the hidden states. Within `with torch.device(card)` blocks are brought to the card one after
the other, and run there. Nothing here knows a model family: the
blocks are found by structure, and what each block is called with is recorded by running the model's own forward with blocks that only pass on.

Letters: B windows, T tokens of a window, D hidden width, V vocabulary, N positions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qforge import numerics
from qforge.errors import UnsupportedError
from qforge.models import experts
from qforge.models.key_values import Passing, rounded_cache
from qforge.models.model import Model

_CACHES = ("cache", "past_key_values")  # what blocks call a cache of keys and values: since transformers 5.24, and before
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """What a block is called with beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _passing(passed: torch.Tensor, block: Any) -> Callable[..., torch.Tensor]:
    """What takes a block's place and gives these hidden states, whatever it is given."""
    return lambda *args, **kwargs: passed


class _PassedOn(TorchFunctionMode):
    """While open, hidden states from blocks that only pass on also serve modelling code that takes the first of a tuple: of `passed`, `[0]` is the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if args and args[0] is self.passed is not None:
            if func is torch.Tensor.__getitem__ and type(args[1]) is int and args[1] == 0:
                return args[0]
            if func is torch.Tensor.unbind:
                raise UnsupportedError("the decoder blocks of this family give more than hidden states to the model's own forward; such models are not available yet")
        return func(*args, **(kwargs or {}))


class BlockModel:
    """Decoder blocks of one model, to be run one after the other. Where the model's own schemes say that a linear rounds its input, it does; and so do caches of keys and values.

    Attributes:
        num_blocks: decoder blocks.
        block_names: module name of each block (`model.layers.0`, ...).
        routers: what decides over experts and stays as it is: shape by module name.
        experts: linears of experts, by module name, with the share of tokens that each is given if all are given as many.
        output_head: its weight on the meta device unless the head is open; None where the model has none.
        head_name: module name of the output head (`lm_head`), None where the model has none.
        embedding_name: of the embedding's weight.
        vocab_size, hidden_size: shape of the embedding.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._weights = model.weights
        self._module = _skeleton(model)
        self._stored = experts.split(self._module)
        prefix, self._blocks = _find_blocks(self._module, model.config.num_hidden_layers)
        self.num_blocks = len(self._blocks)
        self.block_names = [f"{prefix}.{i}" for i in range(self.num_blocks)]
        head = self._module.get_output_embeddings()
        names = {id(m): n for n, m in self._module.named_modules()}
        self.output_head: nn.Module | None = head
        self.head_name: str | None = names.get(id(head)) if head is not None else None
        self.embedding_name = f"{names[id(self._module.get_input_embeddings())]}.weight"
        embedding = self._module.get_input_embeddings().weight
        self.vocab_size, self.hidden_size = int(embedding.shape[0]), int(embedding.shape[1])
        self.routers = {experts.stored_module(self._stored, name): shape for name, shape in experts.routers(self._module).items()}
        chosen = getattr(model.config, "num_experts_per_tok", None)
        self.experts = {experts.stored_module(self._stored, name): 1.0 if chosen is None else chosen / count for name, count in experts.linears(self._module).items()}
        self._kv_scales = [next((s for n, s in model.kv_scales.items() if n.startswith(f"{block}.")), None) for block in self.block_names]
        self._calls: dict[tuple[int, int], list[Call]] = {}

    def stored_dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor of the model is stored, by its full name."""
        return self._weights.info(name).dtype

    def full_name(self, index: int, name: str) -> str:
        """What checkpoints call a tensor or a module with a weight, by its name within the block."""
        full = f"{self.block_names[index]}.{name}"
        return self._stored.get(full) or experts.stored_module(self._stored, full)

    def module(self, index: int) -> nn.Module:
        """A block's module, its weights on the meta device unless the block is open."""
        module: nn.Module = self._blocks[index]
        return module

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """The linear layers of a block by full module name, in the order of the modelling code (their weights may be on the meta device)."""
        return {self.full_name(index, n): m for n, m in self._blocks[index].named_modules() if isinstance(m, nn.Linear)}

    def embed(self, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Token ids `[B, T]` -> the hidden states `[B, T, D]` fp32 that the first block takes, batch by batch; remembers what the blocks of each shape are called with."""
        with self._outer(self._module.base_model, embeds=False), self._looked_up():
            for windows in batches:
                yield self._embed(windows)

    @torch.no_grad()
    def _embed(self, windows: torch.Tensor) -> torch.Tensor:
        calls: list[Call] = []
        inputs: list[torch.Tensor] = []

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(Call(args, kwargs))
            inputs.append(hidden)
            mode.passed = hidden
            return hidden

        with self._patched(lambda _: record), _PassedOn() as mode:
            self._module.base_model(input_ids=_here(windows), use_cache=False)
        self._calls[(int(windows.shape[0]), int(windows.shape[1]))] = calls
        return inputs[0].clone()

    @contextlib.contextmanager
    def block(self, index: int, replace: Callable[[str], torch.Tensor | None] = lambda name: None, rounding: Callable[[str], Rounding | None] | None = None) -> Iterator[nn.Module]:
        """Materialise one block in fp32. Released on leaving.

        Args:
            index: which one.
            replace: may give another value than the model's own, by tensor name.
            rounding: what the linear of a module name does to its input (`numerics.input_rounding`), instead of what the model's own schemes say.
        """
        module = self._blocks[index]
        wanted = [*module.named_parameters(), *_persistent_buffers(module)]
        state = {}
        for name, _ in wanted:
            full = self.full_name(index, name)
            value = replace(full)
            state[name] = self._read(full) if value is None else _here(value.float())
        module.load_state_dict(state, strict=True, assign=True)
        state.clear()  # a weight that is replaced while the block is open goes
        _bring_buffers(module)
        try:
            with _rounded_inputs(self.linears(index), rounding or self.own_rounding):
                yield module
        finally:
            release(module)

    def own_rounding(self, name: str) -> Rounding | None:
        """What the model's own schemes do to the input of a linear; None where they leave it."""
        scheme = self._model.schemes.get(name)
        static = scheme is not None and scheme.activations is not None and scheme.activations.static
        return numerics.input_rounding(scheme, self._model.linear(name).input_scale if static else None)

    def run(self, index: int, module: nn.Module, hidden: torch.Tensor, *, gradients: bool = False, cache: Passing | None = None) -> torch.Tensor:
        """One block forward, `[B, T, D] -> [B, T, D]`, called as the model itself calls it for windows of this shape (`embed` first); differentiable with `gradients`.

        `cache`: what keys and values pass through, instead of what the model's own scales of them say.
        """
        call, scales = self._calls[(int(hidden.shape[0]), int(hidden.shape[1]))][index], self._kv_scales[index]
        if cache is None and scales is not None:
            cache = rounded_cache(scales)
        with torch.set_grad_enabled(gradients):
            out = module(hidden, *call.args, **(call.kwargs if cache is None else call.kwargs | {_cache_argument(module): cache}))
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def caches(self) -> bool:
        """Whether all blocks take a cache of keys and values as transformers 5 gives it."""
        return all(_cache_argument(block) for block in self._blocks)

    def caching(self) -> list[str]:
        """Full names of the modules that store keys and values, as the code says: those of a block that take a cache, and have no such module in them."""
        found = []
        for block, prefix in zip(self._blocks, self.block_names, strict=True):
            names = [name for name, module in block.named_modules() if name and _cache_argument(module)]
            found += [f"{prefix}.{name}" for name in names if not any(other.startswith(f"{name}.") for other in names)]
        return found

    @contextlib.contextmanager
    def head(self, replace: Callable[[str], torch.Tensor | None] = lambda name: None, *, gradients: bool = False) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Everything after the last block: yields a function from hidden states `[N, D]` to logits `[N, V]` (position by position), differentiable with `gradients`."""

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = []
            for piece in hidden.split(self._learned_positions() or max(1, len(hidden))):
                with torch.set_grad_enabled(gradients), _PassedOn() as mode:
                    passed = mode.passed = piece[None]
                    with self._patched(functools.partial(_passing, passed)):
                        found.append(self._module(inputs_embeds=passed, use_cache=False).logits[0].float())
            return found[0] if len(found) == 1 else torch.cat(found)

        head = {} if self.head_name is None else {self.head_name: self._module.get_output_embeddings()}
        with self._outer(self._module, replace), _rounded_inputs(head, self.own_rounding):
            yield logits

    def _learned_positions(self) -> int | None:
        """How many positions have embeddings, which a module takes to its inputs whatever becomes of these; None where none have any."""
        tokens = self._module.get_input_embeddings()
        others = any(isinstance(m, torch.nn.Embedding) and m is not tokens for m in self._module.modules())
        return int(self._model.config.max_position_embeddings) if others else None

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        """Transformers' module with all weights in fp32, inputs of linears rounded where the model's own schemes say so. Keys and values are kept as transformers keeps them."""
        with contextlib.ExitStack() as open_parts:
            open_parts.enter_context(self._outer(self._module.base_model))
            open_parts.enter_context(self.head())
            for index in range(self.num_blocks):
                open_parts.enter_context(self.block(index))
            yield self._module

    @torch.no_grad()
    def head_inputs(self, hidden: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the output head takes, `[N, D]`, for each batch `[B, T, D]` of the last block's outputs."""
        head = self._module.get_output_embeddings()
        seen: list[torch.Tensor] = []

        def record(x: torch.Tensor) -> torch.Tensor:
            seen.append(x[0])
            return x.new_zeros(*x.shape[:-1], 1)

        head.forward = record
        try:
            with self.head() as logits:
                for batch in hidden:
                    logits(batch.reshape(-1, batch.shape[-1]))
                    yield torch.cat(seen)
                    seen.clear()
        finally:
            del head.forward

    def head_weight(self) -> torch.Tensor:
        """The output head's weight `[V, D]` fp32; the embedding's when tied."""
        name = f"{self.head_name}.weight"
        if name not in set(self._weights.names()):
            name = self.embedding_name
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        """A tensor of the model in fp32."""
        with torch.device("cpu"):
            stored = self._weights.read(name)
        return _here(stored).float()

    @contextlib.contextmanager
    def _looked_up(self) -> Iterator[None]:
        """While open, the embedding has the rows that it is asked for: the whole of it stays as it is stored, in the processor's memory."""
        with torch.device("cpu"):
            stored = self._weights.read(self.embedding_name)
        embedding = self._module.get_input_embeddings()
        lookup, padding = embedding.forward, embedding.padding_idx

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows, places = ids.unique(return_inverse=True)
            embedding.weight = nn.Parameter(_here(stored[rows.cpu()].float()), requires_grad=False)
            found: torch.Tensor = lookup(places)
            return found

        embedding.forward, embedding.padding_idx = forward, None  # which is a place in the whole table, and only matters for its gradients
        try:
            yield
        finally:
            del embedding.forward
            embedding.padding_idx = padding
            embedding.weight = nn.Parameter(torch.empty(stored.shape, device="meta"), requires_grad=False)

    @contextlib.contextmanager
    def _outer(self, part: nn.Module, replace: Callable[[str], torch.Tensor | None] = lambda name: None, *, embeds: bool = True) -> Iterator[None]:
        """Materialise what lies outside the blocks: of the base model (without its embedding, where that is not wanted), or of the whole one with its head (then without an untied
        embedding, which only feeds the first block)."""
        head, embedding = self._module.get_output_embeddings(), self._module.get_input_embeddings()
        inside = {id(m) for b in self._blocks for m in b.modules()}
        available = set(self._weights.names())
        tied = head is not None and f"{self.head_name}.weight" not in available and replace(f"{self.head_name}.weight") is None
        loaded: list[nn.Module] = []
        for prefix, module in self._module.named_modules():
            names = [n for n, p in module._parameters.items() if p is not None]
            wanted = id(module) not in inside and not (module is head and part is not self._module)
            if module is head and tied:
                names.remove("weight")  # the embedding's
            if not names or not wanted or (module is embedding and not (embeds and (tied or part is not self._module))):
                continue
            for name in names:
                full = self._stored.get(f"{prefix}.{name}", f"{prefix}.{name}")
                value = replace(full)
                module._parameters[name] = nn.Parameter(self._read(full) if value is None else _here(value.float()), requires_grad=False)
            loaded.append(module)
        _bring_buffers(self._module)
        if tied and part is self._module:
            head.weight = embedding.weight
            loaded.append(head)
        try:
            yield
        finally:
            for module in loaded:
                release(module, recurse=False)

    @contextlib.contextmanager
    def _patched(self, forward: Callable[[int], Callable[..., torch.Tensor]]) -> Iterator[None]:
        """Give every block another forward for a while."""
        for i, block in enumerate(self._blocks):
            block.forward = forward(i)
        try:
            yield
        finally:
            for block in self._blocks:
                del block.forward


def _skeleton(model: Model) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=model.trust_remote_code)
    return module.eval().requires_grad_(False)


def _find_blocks(module: nn.Module, count: int) -> tuple[str, list[Any]]:
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == count and any(isinstance(m, nn.Linear) for m in child[0].modules()):
            for block in child:
                stacked = next((n for n, p in block.named_parameters() if p.dim() > 2), None)
                if stacked is not None:
                    raise UnsupportedError(f"{name}.*.{stacked} has more than two dimensions; models with such tensors are not available yet")
            return name, list(child)
    conv = next((n for n, m in module.named_modules() if type(m).__name__ == "Conv1D"), None)
    if conv is not None:
        raise UnsupportedError(f"{type(module).__name__} keeps the weights of its decoder blocks in transformers' Conv1D ({conv}), and qforge quantizes nn.Linear alone")
    raise UnsupportedError(f"{type(module).__name__} has no list of {count} decoder blocks with linear layers; qforge quantizes decoder-only language models")


@contextlib.contextmanager
def _rounded_inputs(linears: Mapping[str, nn.Module], rounding: Callable[[str], Rounding | None]) -> Iterator[None]:
    """While open, linears round what they are given."""
    roundings = {name: rounding(name) for name in linears}
    hooks = [linears[name].register_forward_pre_hook(_hook(found)) for name, found in roundings.items() if found is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook(rounding: Rounding) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    return lambda module, args: (rounding(args[0]), *args[1:])


def _cache_argument(module: nn.Module) -> str:
    """Empty where it takes none."""
    taken = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHES if name in taken), "")


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    persistent = set(module.state_dict(keep_vars=True))
    return [(n, b) for n, b in module.named_buffers() if n in persistent]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """On the device where tensors come into being (`torch.device` as a context)."""
    return tensor.to(torch.get_default_device())


def _bring_buffers(module: nn.Module) -> None:
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and not buffer.is_meta:
                m._buffers[name] = _here(buffer)


def release(module: nn.Module, recurse: bool = True) -> None:
    """Let go of the memory of a module's parameters: they go to the meta device."""
    for m in module.modules() if recurse else [module]:
        for name, parameter in m._parameters.items():
            if parameter is not None:
                m._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
