"""A model becomes a graph, without its weights: decoders by two roads, any other module by export.

The first road goes through transformers' own attention and expert interfaces, so that an attention
is one `qopt::attention` node, its window and scale taken from the call and from the mask function
that the model asked for. What does not fit it takes the second road: the model's own attention
stays aten and its cache is explicit, through `Cache.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from qopt import compat
from qopt.binding import bind_weights
from qopt.compat import call_model
from qopt.errors import UnsupportedError
from qopt.experts import call_experts
from qopt.export import (
    DoesNotFit,
    capture_module,
    fake_mode_of,
    graph_of,
    quiet,
    reason_of,
    with_fake_parameters,
)
from qopt.graph import Graph
from qopt.guards import FrozenSize, check_guards
from qopt.info import LayerInfo, ModelInfo
from qopt.ops import OPS
from qopt.positions import default_positions_are_plain
from qopt.ragged import rows_are_independent
from qopt.states import (
    KeptStates,
    Key,
    NoLayers,
    NoStates,
    SeenStates,
    StateShape,
    state_name,
)
from qopt.weights import LazyWeight

if TYPE_CHECKING:
    from qopt.sources import ModelSource

# No example size may be 0 or 1 (the dimension would freeze), and no two may be equal.
BATCH, NEW, PAST = 2, 3, 5
LONG = 263  # new tokens of a second try, more than one chunk of a scan
INTERFACE = "qopt"
FAR = 1 << 20  # a position beyond any window that a mask could have


@dataclass(frozen=True)
class Visibility:
    """Which keys a mask lets a query see: all, those before it, or a window of those."""

    causal: bool
    window: int | None


@dataclass
class Recording:
    """What the model did with its cache and masks during one traced call."""

    past: Any  # tokens already cached, a symbolic integer
    mask: Tensor
    updates: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: list[tuple[Tensor, Visibility]] = field(default_factory=list)
    layers: dict[int, LayerInfo] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def visibility(self, mask: Tensor | None, module: nn.Module) -> Visibility:
        """What a mask handed to an attention stands for."""
        if mask is None:
            return Visibility(bool(getattr(module, "is_causal", True)), None)
        for known, meaning in self.masks:
            if known is mask:
                return meaning
        raise DoesNotFit("the model changes its attention mask after making it")

    def layer_of(self, key: Tensor, value: Tensor) -> int:
        """The layer whose cache holds exactly these keys and values."""
        for layer, (known_key, known_value) in self.updates.items():
            if known_key is key and known_value is value:
                return layer
        raise DoesNotFit("an attention reads keys that are not what the cache returned")


_recording: Recording | None = None


class ImpliedCache(NoStates, Cache):
    """Stands in for the cache on the first road: hands the new keys back, the op holds the past."""

    def __init__(self, recording: Recording, layers: int) -> None:
        self.recording, self.count, self.layers = recording, layers, NoLayers()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Note the new keys and values of a layer."""
        if layer_idx in self.recording.updates:
            raise DoesNotFit(f"layer {layer_idx} writes its cache twice")
        self.recording.updates[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0, *_: Any) -> Any:
        """Tokens already cached."""
        return self.recording.past

    def get_query_offset(self, layer_idx: int | None = 0) -> Any:
        """Slot of the first new token."""
        return self.recording.past

    def get_mask_sizes(self, query_length: Any, layer_idx: int | None = 0) -> tuple[Any, int]:
        """Keys in sight, and the slot of the first of them."""
        return self.recording.past + length_of(query_length), 0

    def get_max_length(self, *_: Any) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, *_: Any) -> int:
        """No limit (its name before transformers 5.20)."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops keys: windows are arguments of the op."""
        return [False] * self.count

    @property
    def is_compileable(self) -> bool:
        """Take the plain branches of the model."""
        return False

    @property
    def is_initialized(self) -> bool:
        """There is a past."""
        return True

    def __len__(self) -> int:
        return self.count


class ProbeCache(SeenStates, ImpliedCache):
    """Looks on while a model makes its cache: what it keeps, and in which shapes."""

    def __init__(self, recording: Recording, layers: int) -> None:
        SeenStates.__init__(self)
        ImpliedCache.__init__(self, recording, layers)


class ExplicitCache(KeptStates, ImpliedCache):
    """The cache of the second road: `update` concatenates in plain sight."""

    def __init__(
        self,
        recording: Recording,
        layers: int,
        past: dict[int, tuple[Tensor, Tensor]],
        states: dict[Key, Tensor],
    ) -> None:
        super().__init__(recording, layers)
        self.past, self.past_states, self.new_states = past, states, {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Join past and new; the result is also the graph's output."""
        if layer_idx in self.recording.updates:
            raise DoesNotFit(f"layer {layer_idx} writes its cache twice")
        if layer_idx not in self.past:
            raise DoesNotFit(f"layer {layer_idx} writes its cache only in a later call")
        past_key, past_value = self.past[layer_idx]
        joined = torch.cat([past_key, key_states], 2), torch.cat([past_value, value_states], 2)
        self.recording.updates[layer_idx] = joined
        return joined


def length_of(query: Any) -> Any:
    """The number of queries, which older transformers give as a tensor of positions."""
    return query.shape[0] if isinstance(query, Tensor) else query


def record_mask(
    *, batch_size: Any, mask_function: Callable[..., Any], dtype: Any = None, **_: Any
) -> Tensor:
    """Stand in for transformers' mask maker: returns a token that `record_attention` recognises."""
    assert _recording is not None
    token = torch.empty(batch_size, 1, 2, 2, dtype=torch.bool)
    _recording.masks.append((token, classify(mask_function)))
    return token


def classify(mask_function: Callable[..., Any]) -> Visibility:
    """Find out what a mask function lets a query see, by asking it."""
    with _disable_current_modes():

        def row(query: int, keys: Tensor) -> Tensor:
            zero = torch.zeros((), dtype=torch.int64)
            seen = mask_function(zero, zero, torch.tensor(query), keys)
            return torch.as_tensor(seen).expand(keys.shape)

        near = torch.arange(FAR - 2, FAR + 3)
        if bool(row(FAR, near).all()):
            found = Visibility(False, None)
        else:
            seen = row(FAR, torch.arange(FAR + 1))
            width = int(seen.sum())
            found = Visibility(True, None if width == FAR + 1 else width)
        for query in (0, 1, 2, 7, *(w for w in (found.window or 0,) for w in (w - 1, w, w + 1))):
            keys = torch.arange(max(query, 0) + 9)
            want = torch.ones_like(keys, dtype=torch.bool)
            if found.causal:
                want &= keys <= query
            if found.window is not None:
                want &= query - keys < found.window
            if query >= 0 and not torch.equal(row(query, keys).bool(), want):
                raise DoesNotFit("a mask is neither causal nor a window")
    return found


IGNORED = {
    "dropout",
    "training",
    "output_attentions",
    "use_cache",
    "cache_position",
    "position_ids",
}


def record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Stand in for an attention kernel: one `qopt::attention` node."""
    recording = _recording
    assert recording is not None
    unknown = [k for k, v in rest.items() if isinstance(v, Tensor) and k not in IGNORED]
    if unknown:
        raise DoesNotFit(f"an attention takes {', '.join(unknown)}")
    if len(query.shape) != 4:
        raise DoesNotFit(f"an attention takes queries of {len(query.shape)} dimensions")
    layer = recording.layer_of(key, value)
    sees = recording.visibility(attention_mask, module)
    if is_causal is not None and attention_mask is None:
        sees = Visibility(is_causal, None)
    if not sees.causal:
        raise DoesNotFit("an attention over a cache sees the future")
    if sliding_window is not None and sees.window is None and attention_mask is None:
        sees = Visibility(True, sliding_window)
    own = len(recording.read) and layer in recording.read
    here = LayerInfo(
        kv_heads=int(key.shape[1]),
        key_size=int(key.shape[3]),
        value_size=int(value.shape[3]),
        window=sees.window,
    )
    recording.read.add(layer)
    if own and recording.layers[layer].window != sees.window:
        # The cache serves the wider of the two.
        here.window = None
    recording.layers[layer] = here
    out = OPS["attention"].target(
        query,
        key,
        value,
        recording.mask,
        s_aux,
        layer=layer,
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        window=sees.window,
        softcap=float(softcap) if softcap else None,
    )
    return out, None


AttentionInterface.register(INTERFACE, record_attention)
AttentionMaskInterface.register(INTERFACE, record_mask)
compat.register_experts(INTERFACE, call_experts)


class ImpliedStep(nn.Module):
    """One call of a decoder on the first road: logits, the cache implied."""

    def __init__(self, model: nn.Module, layers: int, positions: bool) -> None:
        super().__init__()
        self.model, self.layers, self.positions = model, layers, positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Trace the model over (B, S) ids; `attention_mask` is (B, past + S)."""
        global _recording
        past = attention_mask.shape[1] - input_ids.shape[1]
        _recording = Recording(past, attention_mask)
        cache = ImpliedCache(_recording, self.layers)
        return call_model(
            self.model, input_ids, attention_mask, position_ids if self.positions else None, cache
        )


@dataclass(frozen=True)
class Kept:
    """What a model keeps from call to call: (heads, key size, value size) by layer, and states."""

    layers: dict[int, tuple[int, int, int]]
    states: dict[Key, StateShape]

    def names(self, word: str, kv: str) -> list[str]:
        """Names in the order of the graph's inputs and outputs, `word` past or present."""
        pairs = [(i, part) for i in range(len(self.layers)) for part in ("key", "value")]
        states = [f"{word}_state.{state_name(key)}" for key in self.states]
        return [f"{kv}.{i}.{part}" for i, part in pairs] + states


class ExplicitStep(nn.Module):
    """One call of a decoder on the second road: logits, the grown cache and the new states."""

    def __init__(self, model: nn.Module, positions: bool, kept: Kept, layers: int) -> None:
        super().__init__()
        self.model, self.positions, self.kept, self.layers = model, positions, kept, layers

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: list[tuple[Tensor, Tensor]],
        states: list[Tensor],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Trace the model over (B, S) ids and a past of (B, heads, P, size) a layer."""
        tokens = past[0][0].shape[2] if past else attention_mask.shape[1] - input_ids.shape[1]
        # A model without attention multiplies its new tokens alone with the mask.
        mask = attention_mask if past else attention_mask[:, tokens:]
        recording = Recording(tokens, mask)
        held = dict(zip(self.kept.layers, past, strict=True))
        cache = ExplicitCache(
            recording, self.layers, held, dict(zip(self.kept.states, states, strict=True))
        )
        logits = call_model(
            self.model, input_ids, mask, position_ids if self.positions else None, cache
        )
        missing = [n for n in held if n not in recording.updates]
        missing += [n for n, _ in self.kept.states.keys() - cache.new_states.keys()]
        if missing:
            raise DoesNotFit(f"layers {missing} never write the cache")
        new = [cache.new_states[key] for key in self.kept.states]
        return logits, [recording.updates[n] for n in held], new


def capture(source: ModelSource, dtype: torch.dtype) -> Graph:
    """Turn a source into a graph in `dtype`.

    Raises `UnsupportedError` where the model cannot be captured, with the reason of each road.
    """
    if source.kind == "decoder":
        return capture_decoder(source, dtype)
    return capture_module(source, dtype)


def capture_decoder(source: ModelSource, dtype: torch.dtype) -> Graph:
    """Capture a transformers decoder by the first road that fits."""
    config = source.config
    model = compat.empty_decoder(config, dtype, INTERFACE)
    bound = bind_weights(model, source)
    stateful(model)
    with patched_rope(model) as by_length, compat.no_autocast():
        with quiet():
            plain = default_positions_are_plain(model, config)
        reasons = []
        for road in (first_road, second_road):
            try:
                with quiet():
                    graph = road(model, config, dtype, plain is not False)
                break
            except Exception as error:
                reasons.append(f"{road.__name__.replace('_', ' ')}: {reason_of(error)}")
        else:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be captured",
                why="; ".join(reasons),
                todo="give it as file.py:function, which compiles one forward of any torch module"
                if compat.TRANSFORMERS_5
                else "a mixture of experts needs transformers 5: pip install -U transformers",
            )
    attach_weights(graph, model, bound, dtype)
    describe_model(graph.info, source)
    # Frequencies that follow the longest row of a batch are not those of a shorter row alone.
    # Padding would enter a recurrent state.
    states = any(name.startswith("present_state.") for name in graph.outputs)
    graph.info.ragged = not by_length and not states and rows_are_independent(graph, config)
    if isinstance(plain, str):
        graph.notes.append(f"positions are taken as 0, 1, 2, ...: the model was not seen ({plain})")
    if reasons:
        graph.notes.append(f"attention stays as the model writes it ({reasons[0]})")
    return graph


def stateful(model: nn.Module) -> None:
    """Put the model into the mode in which it is served."""
    model.eval()
    model.requires_grad_(False)


@contextmanager
def patched_rope(model: nn.Module) -> Iterator[bool]:
    """Put qopt's stateless form of length-dependent rotary embeddings in; yields if it has any."""
    from qopt.rope import stateless

    with stateless(model) as changed:
        yield changed


def first_road(model: PreTrainedModel, config: Any, dtype: torch.dtype, positions: bool) -> Graph:
    """Attention and experts as one node each, the cache implied."""
    compat.set_attention(model, INTERFACE)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with_fake_parameters(model, mode)
    layers = compat.layer_count(config)
    step = ImpliedStep(model, layers, positions)
    dynamic = torch.export.Dim.DYNAMIC
    with mode, torch.no_grad():
        args = (
            torch.ones(BATCH, NEW, dtype=torch.int64),
            torch.ones(BATCH, PAST + NEW, dtype=torch.int64),
            torch.ones(BATCH, NEW, dtype=torch.int64),
        )
        shapes = ({0: dynamic, 1: dynamic},) * 3
        program = torch.export.export(step, args, dynamic_shapes=shapes, strict=False)
    check_guards(program, most=context_length(config))
    recording = _recording  # export puts back what a trace assigns to a module
    assert recording is not None
    unread = sorted(set(recording.updates) - recording.read)
    if unread or not recording.read:
        raise DoesNotFit(
            f"the attention of layers {unread} does not go through the interface"
            if unread
            else "no attention goes through the interface"
        )
    info = ModelInfo(kind="decoder", layers=cache_layers(recording))
    return graph_of(program, info, fake_mode_of(program), ["logits"])


def cache_layers(recording: Recording) -> list[LayerInfo]:
    """The layers in order; the numbers that models give them may have gaps."""
    return [recording.layers[n] for n in sorted(recording.layers)]


def second_road(model: PreTrainedModel, config: Any, dtype: torch.dtype, positions: bool) -> Graph:
    """The model's own attention as aten, the cache and other states as inputs and outputs."""
    compat.set_attention(model, "eager")
    layers = compat.layer_count(config)
    kept = what_is_kept(model, layers)

    def guarded(new: int, least: int, most: int | None) -> Graph:
        program = explicit_program(model, dtype, positions, kept, layers, new)
        check_guards(program, least, most)
        return explicit_graph(program, kept)

    try:
        return guarded(NEW, 2, context_length(config))
    except FrozenSize:  # such as the number of chunks of a scan, which was 1
        if not kept.states:
            raise
        # One chunk, of which this graph knows nothing, is what the check's probes run.
        return guarded(LONG, LONG, None)
    except UserError as error:
        if not kept.states or "specialized" not in str(error):
            raise
        raise DoesNotFit(
            "the code that updates the recurrent state loops over the tokens"
        ) from None  # the reason of a road is that of the first cause


def explicit_program(
    model: PreTrainedModel, dtype: torch.dtype, positions: bool, kept: Kept, layers: int, new: int
) -> ExportedProgram:
    """Export a call with `new` tokens."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with_fake_parameters(model, mode)
    dynamic = torch.export.Dim.DYNAMIC
    step = ExplicitStep(model, positions, kept, layers)
    with mode, torch.no_grad():
        past = [
            tuple(torch.zeros(BATCH, heads, PAST, size, dtype=dtype) for size in sizes)
            for heads, *sizes in kept.layers.values()
        ]
        states = [example_state(state) for state in kept.states.values()]
        args = (
            torch.ones(BATCH, new, dtype=torch.int64),
            torch.ones(BATCH, PAST + new, dtype=torch.int64),
            torch.ones(BATCH, new, dtype=torch.int64),
            past,
            states,
        )
        token = {0: dynamic, 1: dynamic}
        grows = {0: dynamic, 2: dynamic}
        fixed = [grows if s.grows else {0: dynamic} for s in kept.states.values()]
        return torch.export.export(
            step,
            args,
            dynamic_shapes=(token, token, token, [(grows, grows)] * len(past), fixed),
            strict=False,
        )


def explicit_graph(program: ExportedProgram, kept: Kept) -> Graph:
    """The graph of such a program, its inputs and outputs under the artifact's names."""
    info = ModelInfo(
        kind="decoder",
        layers=[
            LayerInfo(kv_heads=h, key_size=k, value_size=v) for h, k, v in kept.layers.values()
        ],
    )
    names = ["logits", *kept.names("present", "present")]
    graph = graph_of(program, info, fake_mode_of(program), names)
    rename_inputs(graph, kept.names("past", "past_key_values"))
    unread = [
        str(name)
        for node in graph.inputs
        if not node.users and (name := node.meta.get("input", "")).startswith("past_state.")
    ]
    if unread:  # the scan of mamba starts anew whenever a call has more than one token
        raise DoesNotFit(f"the model's code does not read its recurrent state {unread[0]}")
    return graph


def example_state(state: StateShape) -> Tensor:
    """A state of the batch that is traced."""
    shape = list(state.shape)
    if state.grows:
        shape[1] = PAST
    return torch.zeros(BATCH, *shape, dtype=state.dtype)


def what_is_kept(model: PreTrainedModel, layers: int) -> Kept:
    """What a model keeps, seen once on fake tensors of fixed size."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with_fake_parameters(model, mode)
    with mode, torch.no_grad():
        ids = torch.ones(BATCH, NEW, dtype=torch.int64)
        mask = torch.ones(BATCH, NEW, dtype=torch.int64)
        try:
            cache = ProbeCache(Recording(0, mask), layers)
            call_model(model, ids, mask, None, cache)
        except DataDependentOutputException:  # a question about the mask's values
            cache = ProbeCache(Recording(0, mask), layers)
            call_model(model, ids, None, None, cache)
    updates = cache.recording.updates
    if not updates and not cache.shapes:
        raise DoesNotFit("the model never writes a KV cache")
    for key, _ in updates.values():
        if key.dim() != 4 or key.shape[2] != NEW:
            raise DoesNotFit(
                f"a cache of shape {tuple(key.shape)} is not (batch, heads, tokens, size)"
            )
    found = {
        n: (int(k.shape[1]), int(k.shape[3]), int(v.shape[3]))
        for n, (k, v) in sorted(updates.items())
    }
    return Kept(found, dict(sorted(cache.shapes.items())))


def rename_inputs(graph: Graph, names: list[str]) -> None:
    """Give the cache inputs the artifact's names."""
    past = [
        n for n in graph.inputs if n.name not in ("input_ids", "attention_mask", "position_ids")
    ]
    if len(past) != len(names):
        raise DoesNotFit(f"{len(past)} cache inputs, not {len(names)}")
    for node, name in zip(past, names, strict=True):
        node.meta["input"] = name


def attach_weights(
    graph: Graph, model: nn.Module, bound: dict[str, LazyWeight], dtype: torch.dtype
) -> None:
    """Give every `get_attr` its weight: from the checkpoint, or a buffer that the model made."""
    buffers = dict(model.named_buffers())
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        name = str(node.target)
        wanted: torch.dtype = node.meta["val"].dtype
        if name in bound:
            graph.weights[name] = bound[name].cast(wanted)
        elif name in buffers and not hasattr(buffers[name], "fake_mode"):
            graph.weights[name] = LazyWeight.memory(buffers[name]).cast(wanted)
    graph.share_weights()


def describe_model(info: ModelInfo, source: ModelSource) -> None:
    """Fill in what the config says of the whole model."""
    config, generation = source.config, source.generation_config
    info.model_type = told(config, "model_type")
    for name in ("vocab_size", "hidden_size"):
        value = told(config, name)
        setattr(info, name, int(value) if isinstance(value, int) else None)
    heads = told(config, "num_attention_heads")
    info.attention_heads = heads if isinstance(heads, int) else None
    info.context_length = context_length(config)
    info.bos_token_id = scalar(generation.get("bos_token_id", told(config, "bos_token_id")))
    info.pad_token_id = scalar(generation.get("pad_token_id", told(config, "pad_token_id")))
    ids: list[int] = []
    for found in (told(config, "eos_token_id"), generation.get("eos_token_id")):
        for value in found if isinstance(found, list | tuple) else [found]:
            if isinstance(value, int) and value not in ids:
                ids.append(value)
    info.eos_token_ids = ids


CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def context_length(config: Any) -> int | None:
    """Tokens that a model can hold, prompt and answer together."""
    found = (told(config, name) for name in CONTEXT_NAMES)
    return next((length for length in found if isinstance(length, int) and length > 0), None)


def told(config: Any, name: str) -> Any:
    """A setting of the config; None where it has none, or another one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises an error of its own for the second
        return None


def scalar(value: Any) -> int | None:
    """A single id; a list has none (F06)."""
    return value if isinstance(value, int) else None
