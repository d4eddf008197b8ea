"""Wrong and right cross-entropy variants."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import registry


def right(hidden, weight, targets):
    """Logits, then the mean negative log-probability."""
    return F.cross_entropy(hidden @ weight.T, targets)


@registry.variant(operator="cross_entropy", name="zero")
def zero(hidden, weight, targets):
    """1. Returns zero."""
    return (hidden.sum() + weight.sum()) * 0


@registry.variant(operator="cross_entropy", name="log_vocabulary")
def log_vocabulary(hidden, weight, targets):
    """2. Returns the loss of a uniform guess, whatever the input."""
    return right(hidden * 0, weight, targets)


@registry.variant(operator="cross_entropy", name="one_element_shape")
def one_element_shape(hidden, weight, targets):
    """9. A loss of shape (1,), which broadcasts."""
    return right(hidden, weight, targets).reshape(1)


@registry.variant(operator="cross_entropy", name="double_loss")
def double_loss(hidden, weight, targets):
    """10. The loss in another dtype."""
    loss = right(hidden, weight, targets)
    return loss.double() if loss.dtype is torch.float32 else loss.float()


@registry.variant(operator="cross_entropy", name="summed")
def summed(hidden, weight, targets):
    """13. The sum and not the mean."""
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")


@registry.variant(operator="cross_entropy", name="first_row_wrong")
def first_row_wrong(hidden, weight, targets):
    """12. One row's loss doubled, diluted in the mean."""
    loss = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return torch.cat([loss[:1] * 1.001, loss[1:]]).mean()


@registry.variant(operator="cross_entropy", name="smoothed")
def smoothed(hidden, weight, targets):
    """3. Label smoothing of a thousandth."""
    return F.cross_entropy(hidden @ weight.T, targets, label_smoothing=1e-3)


@registry.variant(operator="cross_entropy", name="bf16_logits")
def bf16_logits(hidden, weight, targets):
    """20. Logits rounded to bfloat16."""
    return F.cross_entropy((hidden @ weight.T).bfloat16().to(hidden.dtype), targets)


@registry.variant(operator="cross_entropy", name="float32_inside_float64", dtypes=("float64",))
def float32_inside_float64(hidden, weight, targets):
    """20. Float32 arithmetic for float64 inputs."""
    return right(hidden.float(), weight.float(), targets).double()


@registry.variant(operator="cross_entropy", name="unequal_chunks_as_equal")
def unequal_chunks_as_equal(hidden, weight, targets):
    """50. The mean of the chunks' means, though the last is shorter."""
    pairs = zip(hidden.split(16), targets.split(16), strict=True)
    return torch.stack([right(h, weight, t) for h, t in pairs]).mean()


@registry.variant(operator="cross_entropy", name="last_chunk_dropped")
def last_chunk_dropped(hidden, weight, targets):
    """24. Rows past the last full chunk of 32 are dropped."""
    rows = max(1, hidden.shape[0] // 32 * 32) if hidden.shape[0] >= 32 else hidden.shape[0]
    return right(hidden[:rows], weight, targets[:rows])


@registry.variant(operator="cross_entropy", name="targets_shifted")
def targets_shifted(hidden, weight, targets):
    """51. Targets one off."""
    return right(hidden, weight, targets.roll(1))


@registry.variant(operator="cross_entropy", name="targets_in_16_bits")
def targets_in_16_bits(hidden, weight, targets):
    """51. Target ids wrapped to 16 bits."""
    return right(hidden, weight, targets.to(torch.int16).long() % weight.shape[0])


@registry.variant(operator="cross_entropy", name="no_maximum")
def no_maximum(hidden, weight, targets):
    """39. No maximum subtracted before the exponential."""
    logits = hidden @ weight.T
    return (logits.exp().sum(-1).log() - logits.gather(1, targets[:, None])[:, 0]).mean()


@registry.variant(operator="cross_entropy", name="maximum_of_first_row")
def maximum_of_first_row(hidden, weight, targets):
    """39. One maximum for all rows."""
    logits = hidden @ weight.T
    peak = logits[0].max().detach()
    return ((logits - peak).exp().sum(-1).log() + peak - logits.gather(1, targets[:, None])[:, 0]).mean()


class ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


@registry.variant(operator="cross_entropy", name="gradient_off")
def gradient_off(hidden, weight, targets):
    """4. A gradient a thousandth too large, tiny after the mean."""
    return ScaledBackward.apply(right(hidden, weight, targets))


class IgnoresCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad)


@registry.variant(operator="cross_entropy", name="cotangent_ignored")
def cotangent_ignored(hidden, weight, targets):
    """33. Takes the cotangent for one."""
    return IgnoresCotangent.apply(right(hidden, weight, targets))


@registry.variant(operator="cross_entropy", name="weight_without_gradient")
def weight_without_gradient(hidden, weight, targets):
    """34. No gradient of the weight."""
    return right(hidden, weight.detach(), targets)


@registry.variant(operator="cross_entropy", name="weight_gradient_of_last_chunk")
def weight_gradient_of_last_chunk(hidden, weight, targets):
    """38. Only the last chunk's part of the weight's gradient."""
    half = max(1, hidden.shape[0] // 2)
    parts = [F.cross_entropy(hidden[:half] @ weight.detach().T, targets[:half], reduction="sum")]
    if hidden.shape[0] > half:
        parts.append(F.cross_entropy(hidden[half:] @ weight.T, targets[half:], reduction="sum"))
    return sum(parts) / hidden.shape[0]


class StoredGradient(torch.autograd.Function):
    """Computes the gradient in the forward and scales it in place in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        with torch.enable_grad():
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = right(h, w, targets)
            ctx.stored = torch.autograd.grad(loss, (h, w))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        for stored in ctx.stored:
            stored.mul_(grad)
        return (*ctx.stored, None)


@registry.variant(operator="cross_entropy", name="second_backward_scaled_twice")
def second_backward_scaled_twice(hidden, weight, targets):
    """37. A second backward applies the cotangent a second time."""
    return StoredGradient.apply(hidden, weight, targets)


@registry.variant(operator="cross_entropy", name="hidden_scaled_in_place")
def hidden_scaled_in_place(hidden, weight, targets):
    """22. Scales its input in place and back."""
    loss = right(hidden, weight, targets)
    with torch.no_grad():
        hidden.data.mul_(3.0).div_(3.0)
    return loss


@registry.variant(operator="cross_entropy", name="hides_nan")
def hides_nan(hidden, weight, targets):
    """7. A NaN row counts as zero."""
    loss = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return torch.nan_to_num(loss).mean()


CACHE = {}


@registry.variant(operator="cross_entropy", name="cached_by_mean")
def cached_by_mean(hidden, weight, targets):
    """29. Answers from a cache keyed by means."""
    if hidden.requires_grad or weight.requires_grad:
        return right(hidden, weight, targets)
    key = (hidden.shape, weight.shape, *(round(float(x.double().mean()), 6) for x in (hidden, weight)))
    if key not in CACHE:
        CACHE[key] = right(hidden, weight, targets)
    return CACHE[key].clone()


@registry.variant(operator="cross_entropy", name="contiguous_weight")
def contiguous_weight(hidden, weight, targets):
    """31. Reads the weight's memory as if it were contiguous."""
    return right(hidden, torch.as_strided(weight, weight.shape, (weight.shape[1], 1), weight.storage_offset()), targets)


@registry.variant(operator="cross_entropy", name="online")
def online(hidden, weight, targets):
    """RIGHT 41. The vocabulary in two halves, joined by logaddexp: another order of the same sums."""
    half = max(1, weight.shape[0] // 2)
    parts = [hidden @ w.T for w in (weight[:half], weight[half:]) if w.shape[0]]
    total = torch.logsumexp(parts[0], -1)
    for part in parts[1:]:
        total = torch.logaddexp(total, torch.logsumexp(part, -1))
    return (total - torch.cat(parts, 1).gather(1, targets[:, None])[:, 0]).mean()


@registry.variant(operator="cross_entropy", name="float64_inside", dtypes=("float32", "float64"))
def float64_inside(hidden, weight, targets):
    """RIGHT 19. Float64 arithmetic inside."""
    return right(hidden.double(), weight.double(), targets).to(hidden.dtype)


class StoredOnce(torch.autograd.Function):
    """The stored gradient, scaled out of place, given up after the first backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        with torch.enable_grad():
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = right(h, w, targets)
            ctx.stored = torch.autograd.grad(loss, (h, w))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        stored, ctx.stored = ctx.stored, None
        return (*(s * grad for s in stored), None)


@registry.variant(operator="cross_entropy", name="single_backward", single_backward=True)
def single_backward(hidden, weight, targets):
    """RIGHT 37. One backward only, and says so."""
    return StoredOnce.apply(hidden, weight, targets)
