"""Expert layers at capture: one `qopt::experts` node, its gate found by asking the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from qopt.ops import ACTIVATIONS, OPS, expert_gate


def call_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Stand in for transformers' expert forward: x (tokens, W), ids and weights (tokens, top)."""
    gated = bool(module.has_gate)
    up = module.gate_up_proj if gated else module.up_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if gated else module.up_proj_bias
        down_bias = module.down_proj_bias
    gate = None if getattr(module, "has_post_expert_norm", False) else find_gate(module, gated)
    if gate is None:
        return loop(module, x, ids, weights, up, up_bias, down_bias)
    return OPS["experts"].target(  # type: ignore[no-any-return]
        x,
        ids,
        weights,
        up,
        up_bias,
        module.down_proj,
        down_bias,
        transposed=bool(module.is_transposed),
        **gate,
    )


def find_gate(module: Any, gated: bool) -> dict[str, Any] | None:
    """Arguments of `qopt::experts` under which its gate equals the module's own, on a probe."""
    with _disable_current_modes(), torch.no_grad():
        probe = torch.linspace(-9, 9, 64).view(4, 16)
        probe = probe[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))]
        try:
            want = module._apply_gate(probe) if gated else module.act_fn(probe)
        except Exception:  # a gate with parameters of its own: no single node
            return None
        for gate in candidates(module, gated):
            args = (
                gate["activation"],
                gate["layout"],
                gate.get("alpha", 1.0),
                gate.get("limit"),
                gate.get("up_offset", 0.0),
            )
            got = expert_gate(probe, *args)
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-7):
                return gate
    return None


def candidates(module: Any, gated: bool) -> list[dict[str, Any]]:
    """The gates that an op can express, with the numbers that the module holds."""
    if not gated:
        return [{"activation": name, "layout": "single"} for name in ACTIVATIONS]
    found = []
    limits = {None, getattr(module, "limit", None), getattr(module, "swiglu_limit", None)}
    for layout in ("concatenated", "interleaved"):
        for limit in limits:
            plain = {"layout": layout} | ({"limit": float(limit)} if limit is not None else {})
            found += [{"activation": name, **plain} for name in ACTIVATIONS]
            alpha = getattr(module, "alpha", None)
            if isinstance(alpha, float):
                swish = {"activation": "swish", "alpha": alpha, **plain}
                found += [swish, {**swish, "up_offset": 1.0}]
    return found


def loop(
    module: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Every expert on every token in plain ops, for gates that no op expresses."""
    down: Tensor = module.down_proj
    out = torch.zeros_like(x)
    norm: nn.Module | None = (
        module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    )
    for expert in range(up.shape[0]):
        share = (weights * (ids == expert)).sum(1, keepdim=True).to(x.dtype)
        first, second = up[expert], down[expert]
        if module.is_transposed:
            first, second = first.t(), second.t()
        inner = F.linear(x, first, None if up_bias is None else up_bias[expert])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        inner = F.linear(inner, second, None if down_bias is None else down_bias[expert])
        out = out + (inner if norm is None else norm(inner)) * share
    return out
