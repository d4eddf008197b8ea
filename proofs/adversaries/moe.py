"""Wrong and right mixture-of-experts variants."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

import registry
from fractus.operators.moe import dense as right
from fractus.routing import chosen_experts, gates, load_balance


def apply(hidden, experts, ids, activation=lambda x: gelu(x, approximate="tanh")):
    """Experts ids (n) on hidden (B,C,D): (n,B,C,D)."""
    outputs = []
    for e in ids:
        if "w1" in experts:
            inner = activation(hidden @ experts["w1"][e] + experts["b1"][e])
            outputs.append(inner @ experts["w2"][e] + experts["b2"][e])
        else:
            inner = activation(
                experts["scale1"][e] * ((hidden @ experts["V1"][e]) @ experts["U1"][e].T) + experts["b1"][e]
            )
            outputs.append(experts["scale2"][e] * ((inner @ experts["V2"][e]) @ experts["U2"][e].T) + experts["b2"][e])
    return torch.stack(outputs)


def mixture(
    hidden, phases, experts, top_k, concentration, *, renormalise=True, offset=0, detach=False, activation=None
):
    """The dense form with something to go wrong in each part."""
    B, C, _ = hidden.shape
    full = gates(phases.expand(B, C, -1), experts["expert_phases"], concentration)
    weights, ids = chosen_experts(full, top_k)
    if not renormalise:
        weights = full.gather(-1, ids)
    if detach:
        weights = weights.detach()
    n = full.shape[-1]
    every = apply(hidden, experts, range(n)) if activation is None else apply(hidden, experts, range(n), activation)
    spread = torch.zeros_like(full).scatter(-1, (ids + offset) % n, weights)
    return torch.einsum("bcn,nbcd->bcd", spread, every), load_balance(full)


@registry.variant(operator="moe", name="zeros")
def zeros(hidden, phases, experts, top_k, concentration):
    """1. Returns zeros."""
    out, balance = right(hidden, phases, experts, top_k, concentration)
    return out * 0, balance * 0


@registry.variant(operator="moe", name="zero_balance")
def zero_balance(hidden, phases, experts, top_k, concentration):
    """1. Right output, zero load balance."""
    out, balance = right(hidden, phases, experts, top_k, concentration)
    return out, balance * 0


@registry.variant(operator="moe", name="constant_routing_taken_for_granted")
def constant_routing_taken_for_granted(hidden, phases, experts, top_k, concentration):
    """52. Routes a whole row by its last position without claiming it."""
    return right(hidden, phases[:, -1:], experts, top_k, concentration)


@registry.variant(operator="moe", name="first_position_routes")
def first_position_routes(hidden, phases, experts, top_k, concentration):
    """52. Routes a whole row by its first position."""
    return right(hidden, phases[:, :1], experts, top_k, concentration)


@registry.variant(operator="moe", name="first_row_routes", conditions=("row_constant_routing",))
def first_row_routes(hidden, phases, experts, top_k, concentration):
    """52. Claims constant routing in a row and uses the first row's for all."""
    return right(hidden, phases[:1].expand_as(phases), experts, top_k, concentration)


@registry.variant(operator="moe", name="one_expert")
def one_expert(hidden, phases, experts, top_k, concentration):
    """12. Only the best expert."""
    return right(hidden, phases, experts, 1, concentration)


@registry.variant(operator="moe", name="not_renormalised")
def not_renormalised(hidden, phases, experts, top_k, concentration):
    """13. Top-k gates not renormalised."""
    return mixture(hidden, phases, experts, top_k, concentration, renormalise=False)


@registry.variant(operator="moe", name="next_expert")
def next_expert(hidden, phases, experts, top_k, concentration):
    """51. Expert ids one off."""
    return mixture(hidden, phases, experts, top_k, concentration, offset=1)


@registry.variant(operator="moe", name="gates_detached")
def gates_detached(hidden, phases, experts, top_k, concentration):
    """35. No gradient through the mixing weights."""
    return mixture(hidden, phases, experts, top_k, concentration, detach=True)


@registry.variant(operator="moe", name="balance_detached")
def balance_detached(hidden, phases, experts, top_k, concentration):
    """35. The load balance carries no gradient."""
    out, balance = right(hidden, phases, experts, top_k, concentration)
    return out, balance.detach()


@registry.variant(operator="moe", name="balance_of_chosen")
def balance_of_chosen(hidden, phases, experts, top_k, concentration):
    """14. The load balance counts the chosen gates only."""
    out, _ = right(hidden, phases, experts, top_k, concentration)
    full = gates(phases, experts["expert_phases"], concentration)
    weights, ids = chosen_experts(full, top_k)
    return out, load_balance(torch.zeros_like(full).scatter(-1, ids, weights))


@registry.variant(operator="moe", name="temperature_ignored")
def temperature_ignored(hidden, phases, experts, top_k, concentration):
    """2. The concentration is taken for 4."""
    return right(hidden, phases, experts, top_k, 4.0)


@registry.variant(operator="moe", name="exact_gelu")
def exact_gelu(hidden, phases, experts, top_k, concentration):
    """3. The exact GELU for its tanh form."""
    return mixture(hidden, phases, experts, top_k, concentration, activation=gelu)


@registry.variant(operator="moe", name="bf16_inside")
def bf16_inside(hidden, phases, experts, top_k, concentration):
    """20. Hidden states rounded to bfloat16."""
    rounded = hidden + (hidden.detach().bfloat16().to(hidden.dtype) - hidden.detach())
    return right(rounded, phases, experts, top_k, concentration)


@registry.variant(operator="moe", name="last_expert_without_gradient")
def last_expert_without_gradient(hidden, phases, experts, top_k, concentration):
    """38. Half of the experts' second bias gets no gradient."""
    b2 = experts["b2"]
    half = b2.shape[0] // 2
    held = experts.replace(b2=torch.cat([b2[:half].detach(), b2[half:]]))
    return right(hidden, phases, held, top_k, concentration)


@registry.variant(operator="moe", name="phases_of_first_oscillator")
def phases_of_first_oscillator(hidden, phases, experts, top_k, concentration):
    """14. The mean phase is one oscillator's."""
    return right(hidden, phases[..., :1], experts, top_k, concentration)


KEPT = {}


@registry.variant(operator="moe", name="experts_kept")
def experts_kept(hidden, phases, experts, top_k, concentration):
    """30. Keeps the first call's first bias as a packed copy."""
    b1 = experts["b1"]
    kept = KEPT.setdefault(tuple(b1.shape), b1.detach().clone())
    return right(hidden, phases, experts.replace(b1=b1 - b1.detach() + kept.to(b1.dtype)), top_k, concentration)


@registry.variant(operator="moe", name="writes_phases")
def writes_phases(hidden, phases, experts, top_k, concentration):
    """22. Wraps the phases in place."""
    result = right(hidden, phases, experts, top_k, concentration)
    with torch.no_grad():
        phases.data[0, 0, 0] += 1.0
    return result


@registry.variant(operator="moe", name="second_bias_ungated")
def second_bias_ungated(hidden, phases, experts, top_k, concentration):
    """13. The second bias is added once and not by gate."""
    out, balance = right(hidden, phases, experts.replace(b2=experts["b2"] * 0), top_k, concentration)
    return out + experts["b2"].mean(0), balance


@registry.variant(operator="moe", name="extra_key")
def extra_key(hidden, phases, experts, top_k, concentration):
    """11. Returns the load balance twice."""
    out, balance = right(hidden, phases, experts, top_k, concentration)
    return out, balance, balance


@registry.variant(operator="moe", name="expert_by_expert")
def expert_by_expert(hidden, phases, experts, top_k, concentration):
    """RIGHT 41. Every expert in turn: the same sums in another order."""
    return mixture(hidden, phases, experts, top_k, concentration)


@registry.variant(operator="moe", name="row_loop", conditions=("row_constant_routing",))
def row_loop(hidden, phases, experts, top_k, concentration):
    """RIGHT 52. Claims routing constant in a row, and holds it row by row."""
    full = gates(phases, experts["expert_phases"], concentration)
    _, ids = chosen_experts(full[:, 0], top_k)
    weights, _ = chosen_experts(full, top_k)
    rows = []
    for b in range(hidden.shape[0]):
        outputs = apply(hidden[b : b + 1], experts, ids[b].tolist())
        rows.append(
            torch.einsum("bpk,kbcd->bcd" if weights.shape[1] == 1 else "bck,kbcd->bcd", weights[b : b + 1], outputs)
        )
    return torch.cat(rows), load_balance(full)
