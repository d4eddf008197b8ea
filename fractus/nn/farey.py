"""Expert angles from the Farey sequence: rationals of [0, 1] in ascending order, spread over the circle."""

from __future__ import annotations

import math


def farey_sequence(n: int) -> list[tuple[int, int]]:
    """The Farey sequence F_n: all reduced p/q in [0, 1] with q <= n as (p, q), ascending; ``ValueError`` below 1.

    Successor of neighbours a/b, c/d: ``(k*c - a) / (k*d - b)`` with ``k = (n + b) // d``
    (Graham, Knuth, Patashnik, Concrete Mathematics, 4.5).
    """
    if n < 1:
        raise ValueError(f"the Farey sequence needs n >= 1, not {n}")
    terms = [(0, 1)]
    a, b, c, d = 0, 1, 1, n
    while c <= n:
        terms.append((c, d))
        k = (n + b) // d
        a, b, c, d = c, d, k * c - a, k * d - b
    return terms


def expert_phases(n_experts: int) -> list[float]:
    """Each expert's angle in radians: 2*pi*p/q of term ``min(floor(i*n/E), n-1)`` of F_{2E}; ``ValueError`` below 1."""
    if n_experts < 1:
        raise ValueError(f"expert_phases needs n_experts >= 1, not {n_experts}")
    terms = farey_sequence(2 * n_experts)
    count = len(terms)
    chosen = [terms[min(i * count // n_experts, count - 1)] for i in range(n_experts)]
    return [2.0 * math.pi * p / q for p, q in chosen]
