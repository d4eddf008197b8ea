"""Every tolerance of the operators: k, c and the reason, in one place."""

from __future__ import annotations

from registry.declare import Tolerance

ATTENTION = Tolerance(
    k=8.0,
    c=32.0,
    reason="sums of up to C + 1 terms in another order; the carry is one more rounding a block",
    grows=("S", "z"),
)
CROSS_ENTROPY = Tolerance(
    k=8.0,
    c=32.0,
    reason="the loss is a mean over rows in another order, the weight's gradient a sum over chunks of rows",
    # A confident row's gradient is what is left of 1 - p: its error is the eps of 1, however small the rest.
    cancelling={"dhidden": 512.0, "dweight": 512.0},
)
MOE = Tolerance(
    k=8.0,
    c=32.0,
    reason="the same products in batched matmuls of another blocking; sums over D and F in another order",
)
BLOCK = Tolerance(
    k=8.0,
    c=64.0,
    reason="a chain of attention, clock and experts: rounding of the first passes through the gain of the others",
    grows=("S", "z"),
    # Sums of terms of both signs that nearly cancel; the original's own float32 lies as far from float64 there.
    cancelling={
        "dparameters.kuramoto.*": 2048.0,
        "dparameters.norm_kur.*": 2048.0,
        "dparameters.attn.level_logits": 2048.0,
    },
)
SAMPLER = Tolerance(
    k=0.0,
    c=0.0,
    reason="tokens are judged by their distribution, not by a distance",
)
DATA_FETCH = Tolerance(
    k=0.0,
    c=0.0,
    reason="token ids are integers: a copy is right or wrong",
    exact=True,
)
OPTIMIZER_STEP = Tolerance(
    k=8.0,
    c=32.0,
    reason="the norm sums squares of all gradients in another order; the update itself is three roundings",
)
ENGINE = Tolerance(
    k=16.0,
    c=256.0,
    reason="a whole engine over consecutive chunks and updates: each block's rounding passes through all later ones",
)
