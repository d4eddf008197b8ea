"""Wrong and right optimizer steps."""

from __future__ import annotations

import torch

import registry
from fractus.operators.optimizer_step import total_norm, trained


def step(
    parameters,
    state,
    lr,
    momentum,
    max_norm,
    *,
    clip=True,
    epsilon=1e-6,
    nesterov=False,
    decay=0.0,
    damp=0.0,
    each=False,
):
    """SGD with momentum after a clip, with something to go wrong in each part."""
    with torch.no_grad():
        triples = trained(parameters, state)
        norm = total_norm([g for _, _, g in triples])
        coefficient = torch.clamp(max_norm / (norm + epsilon), max=1.0) if clip else torch.ones(())
        for p, m, g in triples:
            g = g.to_dense() if g.is_sparse else g
            if each:
                coefficient = torch.clamp(max_norm / (torch.linalg.vector_norm(g) + epsilon), max=1.0)
            g = g * coefficient + decay * p
            m.mul_(momentum).add_(g * (1 - damp))
            p.add_(g + momentum * m if nesterov else m, alpha=-lr)
        return norm


@registry.variant(operator="optimizer_step", name="nothing")
def nothing(parameters, state, lr, momentum, max_norm):
    """1. Does nothing."""
    return total_norm([g for _, _, g in trained(parameters, state)])


@registry.variant(operator="optimizer_step", name="not_clipped")
def not_clipped(parameters, state, lr, momentum, max_norm):
    """13. Does not clip."""
    return step(parameters, state, lr, momentum, max_norm, clip=False)


@registry.variant(operator="optimizer_step", name="clips_each_tensor")
def clips_each_tensor(parameters, state, lr, momentum, max_norm):
    """14. Clips each tensor by its own norm."""
    return step(parameters, state, lr, momentum, max_norm, each=True)


@registry.variant(operator="optimizer_step", name="no_epsilon", dtypes=("float64",))
def no_epsilon(parameters, state, lr, momentum, max_norm):
    """44. No epsilon in the clip coefficient."""
    return step(parameters, state, lr, momentum, max_norm, epsilon=0.0)


@registry.variant(operator="optimizer_step", name="nesterov")
def nesterov(parameters, state, lr, momentum, max_norm):
    """14. Nesterov's momentum."""
    return step(parameters, state, lr, momentum, max_norm, nesterov=True)


@registry.variant(operator="optimizer_step", name="weight_decay")
def weight_decay(parameters, state, lr, momentum, max_norm):
    """3. A weight decay of a hundredth."""
    return step(parameters, state, lr, momentum, max_norm, decay=1e-2)


@registry.variant(operator="optimizer_step", name="dampened")
def dampened(parameters, state, lr, momentum, max_norm):
    """14. Dampening of the momentum."""
    return step(parameters, state, lr, momentum, max_norm, damp=0.1)


@registry.variant(operator="optimizer_step", name="clipped_norm")
def clipped_norm(parameters, state, lr, momentum, max_norm):
    """14. Returns the norm after clipping."""
    return step(parameters, state, lr, momentum, max_norm).clamp_max(max_norm)


@registry.variant(operator="optimizer_step", name="absent_gradients_decay")
def absent_gradients_decay(parameters, state, lr, momentum, max_norm):
    """42. A parameter without a gradient moves by its momentum all the same."""
    norm = step(parameters, state, lr, momentum, max_norm)
    with torch.no_grad():
        for p, m in zip(parameters, state, strict=True):
            if p.grad is None:
                p.add_(m.mul_(momentum), alpha=-lr)
    return norm


@registry.variant(operator="optimizer_step", name="touched_rows_only")
def touched_rows_only(parameters, state, lr, momentum, max_norm):
    """38. Rows without a sparse gradient keep still, though their momentum moves them."""
    with torch.no_grad():
        triples = trained(parameters, state)
        norm = total_norm([g for _, _, g in triples])
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for p, m, g in triples:
            if g.is_sparse:
                rows = g.indices()[0]
                m[rows] = m[rows] * momentum + g.values() * coefficient
                p[rows] -= lr * m[rows]
            else:
                m.mul_(momentum).add_(g * coefficient)
                p.add_(m, alpha=-lr)
        return norm


@registry.variant(operator="optimizer_step", name="gradients_zeroed")
def gradients_zeroed(parameters, state, lr, momentum, max_norm):
    """22. Zeroes the gradients it was given."""
    norm = step(parameters, state, lr, momentum, max_norm)
    for p in parameters:
        if p.grad is not None:
            p.grad = None
    return norm


@registry.variant(operator="optimizer_step", name="state_not_written")
def state_not_written(parameters, state, lr, momentum, max_norm):
    """24. Moves the parameters and forgets to keep the momentum."""
    kept = [m.clone() for m in state]
    norm = step(parameters, state, lr, momentum, max_norm)
    for m, k in zip(state, kept, strict=True):
        m.copy_(k)
    return norm


@registry.variant(operator="optimizer_step", name="foreach")
def foreach(parameters, state, lr, momentum, max_norm):
    """RIGHT 41. All tensors at once."""
    with torch.no_grad():
        triples = trained(parameters, state)
        norm = total_norm([g for _, _, g in triples])
        if triples:
            coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            grads = [(g.to_dense() if g.is_sparse else g) * coefficient for _, _, g in triples]
            moments = [m for _, m, _ in triples]
            torch._foreach_mul_(moments, momentum)
            torch._foreach_add_(moments, grads)
            torch._foreach_add_([p for p, _, _ in triples], moments, alpha=-lr)
        return norm
