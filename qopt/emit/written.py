"""What an emitter tells of the file that it wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

from qopt.lower import Choice

Signature = list[tuple[str, str, list[int | str]]]  # name, numpy dtype, shape


@dataclass
class Written:
    """The nodes and signature of a file; opset and versions where the format has them."""

    nodes: dict[str, int]
    choices: list[Choice]
    inputs: Signature
    outputs: Signature
    shared_buffer: bool = False
    batched_chunks: bool = True  # several new tokens of several rows may meet a filled cache
    opset: int | None = None
    ir_version: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    data_size: int = 0
    data_hash: str = ""
    shared: int = 0  # bytes not written since an equal weight was there already
    notes: list[str] = field(default_factory=list)
