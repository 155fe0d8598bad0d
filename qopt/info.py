"""What is known of a model, layer by layer: shared by compiler and (without torch) runtime."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class LayerInfo(BaseModel):
    """One attention layer of a decoder: what its cache looks like and which keys it sees."""

    model_config = ConfigDict(extra="forbid")

    kv_heads: int
    key_size: int  # elements of one cached key
    value_size: int  # elements of one cached value
    window: int | None = None  # a query at position i sees positions i - window < j <= i
    owner: int | None = None  # the layer whose cache this one reads; None when it keeps its own


class ModelInfo(BaseModel):
    """Facts about a model that passes, emitters and the runtime share."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["decoder", "module"]
    model_type: str | None = None  # the type in the checkpoint's config.json
    layers: list[LayerInfo] = []
    vocab_size: int | None = None
    hidden_size: int | None = None
    attention_heads: int | None = None
    context_length: int | None = None  # tokens, prompt and answer together
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []  # every id that ends a generation, in the order found
    pad_token_id: int | None = None
    ragged: bool = True  # unequal rows of one batch are exact; else the runtime runs them apart
    rope: dict[str, object] = {}  # rope parameters as the config states them
