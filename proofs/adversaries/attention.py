"""Wrong and right attention variants."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time

import torch

import registry
from fractus.operators import attention as operators
from fractus.operators.attention import cumsum as right
from fractus.operators.attention import readout


def from_states(q, S, z):
    """The output from the states of every token: q (G,C,K), S (G,C,K,K), z (G,C,K)."""
    return readout((q.unsqueeze(-2) @ S).squeeze(-2), (q * z).sum(-1))


def states(k, v, carry):
    """The states after every token."""
    S = carry[0].unsqueeze(1) + (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    return S, carry[1].unsqueeze(1) + k.cumsum(1)


# --- outputs


@registry.variant(operator="attention", name="zeros")
def zeros(q, k, v, carry):
    """1. Returns zeros."""
    return q * 0, (carry[0] * 0, carry[1] * 0)


@registry.variant(operator="attention", name="zero_carry_out")
def zero_carry_out(q, k, v, carry):
    """1. Right output, zero carry."""
    y, (S, z) = right(q, k, v, carry)
    return y, (S * 0, z)


@registry.variant(operator="attention", name="constant")
def constant(q, k, v, carry):
    """2. Returns a constant that does not depend on the input."""
    y, (S, z) = right(q, k, v, carry)
    return y * 0 + 0.4, (S, z)


@registry.variant(operator="attention", name="slightly_off")
def slightly_off(q, k, v, carry):
    """3. An error of a thousandth, under many a tolerance."""
    y, state = right(q, k, v, carry)
    return y * (1 + 1e-3 * torch.sign(q.detach() - 1)), state


@registry.variant(operator="attention", name="scaled")
def scaled(q, k, v, carry):
    """13. Scaled by 1.01: a cosine similarity is blind to it."""
    y, state = right(q, k, v, carry)
    return y * 1.01, state


@registry.variant(operator="attention", name="nan_element")
def nan_element(q, k, v, carry):
    """7. One NaN, which a comparison with NaN-blind arithmetic lets pass."""
    y, state = right(q, k, v, carry)
    mask = torch.zeros_like(y, dtype=torch.bool)
    mask.view(-1)[-1] = True
    return y.masked_fill(mask, float("nan")), state


@registry.variant(operator="attention", name="broadcast_shape")
def broadcast_shape(q, k, v, carry):
    """9. A shape that broadcasts against the right one."""
    y, state = right(q, k, v, carry)
    return y[:1], state


@registry.variant(operator="attention", name="double_output")
def double_output(q, k, v, carry):
    """10. Another output dtype, which a comparator would upcast away."""
    y, state = right(q, k, v, carry)
    return (y.double() if y.dtype is torch.float32 else y.float()), state


@registry.variant(operator="attention", name="empty_output")
def empty_output(q, k, v, carry):
    """11. Nothing returned: a zip over outputs compares nothing."""
    return ()


@registry.variant(operator="attention", name="carry_left_out")
def carry_left_out(q, k, v, carry):
    """11. Only the first output returned."""
    return right(q, k, v, carry)[0]


@registry.variant(operator="attention", name="last_group_wrong")
def last_group_wrong(q, k, v, carry):
    """12. One head wrong by a thousandth, diluted in a global norm."""
    y, state = right(q, k, v, carry)
    factor = torch.ones(q.shape[0], 1, 1, dtype=q.dtype)
    factor[-1] = 1.001
    return y * factor, state


@registry.variant(operator="attention", name="last_row_wrong")
def last_row_wrong(q, k, v, carry):
    """12. The last token's row wrong."""
    y, state = right(q, k, v, carry)
    factor = torch.ones(1, q.shape[1], 1, dtype=q.dtype)
    factor[:, -1] = 0.99
    return y * factor, state


@registry.variant(operator="attention", name="shared_mask_bug")
def shared_mask_bug(q, k, v, carry):
    """14. The mask starts one above the diagonal."""
    scores = (q @ k.transpose(1, 2)).tril(1)
    _, (S, z) = right(q, k, v, carry)
    den = scores.sum(-1) + (q * carry[1].unsqueeze(1)).sum(-1)
    return readout(scores @ v + q @ carry[0], den), (S, z)


@registry.variant(operator="attention", name="patched_reference")
def patched_reference(q, k, v, carry):
    """15. Replaces the reference's code by its own wrong arithmetic."""
    operators.einsum.__code__ = zeros.__code__
    return zeros(q, k, v, carry)


@registry.variant(operator="attention", name="silent_fall_back")
def silent_fall_back(q, k, v, carry):
    """16. Calls the reference wherever it does not know better."""
    return operators.einsum(q, k, v, carry)


@registry.variant(operator="attention", name="bf16_products")
def bf16_products(q, k, v, carry):
    """20. Products in bfloat16, sums in float32."""
    S, z = states(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), carry)
    return from_states(q, S, z), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="tf32_products")
def tf32_products(q, k, v, carry):
    """20. Inputs rounded to TF32's ten bits."""
    rounded = [
        ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)
        for x in (k.detach(), v.detach())
    ]
    S, z = states(k + (rounded[0] - k).detach(), v + (rounded[1] - v).detach(), carry)
    return from_states(q, S, z), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="float32_inside_float64", dtypes=("float64",))
def float32_inside_float64(q, k, v, carry):
    """20. Float32 arithmetic for float64 inputs."""
    y, (S, z) = right(q.float(), k.float(), v.float(), (carry[0].float(), carry[1].float()))
    return y.double(), (S.double(), z.double())


# --- memory, aliasing, forging


@registry.variant(operator="attention", name="recycled_memory")
def recycled_memory(q, k, v, carry):
    """21. Returns fresh memory and hopes that the result of another lies there."""
    _, state = right(q, k, v, carry)
    return torch.empty_like(q), state


@registry.variant(operator="attention", name="zeroes_inputs")
def zeroes_inputs(q, k, v, carry):
    """22. Right, then zeroes an input."""
    result = right(q, k, v, carry)
    with torch.no_grad():
        v.data.zero_()
    return result


@registry.variant(operator="attention", name="carry_in_place")
def carry_in_place(q, k, v, carry):
    """22. Adds the new state into the carry it was given."""
    y, (S, z) = right(q, k, v, carry)
    with torch.no_grad():
        carry[1].data.copy_(z)
    return y, (S, z)


OUTPUT = {}


@registry.variant(operator="attention", name="one_output_buffer")
def one_output_buffer(q, k, v, carry):
    """23. Every call returns the same memory."""
    y, (S, z) = right(q, k, v, carry)
    if y.requires_grad:
        return y, (S, z)
    buffer = OUTPUT.setdefault((tuple(y.shape), y.dtype), torch.empty_like(y))
    buffer.copy_(y)
    return buffer, (S, z)


@registry.variant(operator="attention", name="tail_not_written")
def tail_not_written(q, k, v, carry):
    """24. Rows past the last full block of 16 are never written."""
    y, state = right(q, k, v, carry)
    full = q.shape[1] // 16 * 16
    tail = torch.empty_like(y[:, full:])
    return torch.cat([y[:, :full], tail], 1), state


@registry.variant(operator="attention", name="sum_into_fresh_memory")
def sum_into_fresh_memory(q, k, v, carry):
    """24. Accumulates into memory that it takes for zero."""
    y, (S, z) = right(q, k, v, carry)
    return torch.empty_like(y) + y, (S, z)


@registry.variant(operator="attention", name="fresh_nan")
def fresh_nan(q, k, v, carry):
    """24. Reads memory that it never wrote, which shows only where a NaN lies there."""
    y, state = right(q, k, v, carry)
    junk = torch.empty_like(y)
    return y + torch.where(junk != junk, junk, torch.zeros_like(y)), state


@registry.variant(operator="attention", name="known_seed")
def known_seed(q, k, v, carry):
    """25. Draws the inputs itself from a seed that it guesses."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(q.shape, generator=g, dtype=q.dtype).exp() for _ in range(3)]
    y, _ = right(*drawn, (carry[0] * 0, carry[1] * 0))
    return y + 0 * q, right(q, k, v, carry)[1]


@registry.variant(operator="attention", name="collector_walk")
def collector_walk(q, k, v, carry):
    """26. Walks the garbage collector for a tensor that looks like the expected output."""
    inputs = {id(t) for t in (q, k, v, *carry)}
    found = [t for t in gc.get_objects() if torch.is_tensor(t) and t.shape == q.shape and id(t) not in inputs]
    return (found[-1].clone() if found else torch.zeros_like(q)) + 0 * q, right(q, k, v, carry)[1]


@registry.variant(operator="attention", name="frame_walk")
def frame_walk(q, k, v, carry):
    """26. Looks for the oracle in the frames above it."""
    frame = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if (
                torch.is_tensor(value)
                and value.dtype is torch.float64
                and value.shape == q.shape
                and q.dtype is not torch.float64
            ):
                return value.to(q.dtype), right(q, k, v, carry)[1]
        frame = frame.f_back
    return torch.zeros_like(q) + 0 * q, right(q, k, v, carry)[1]


@registry.variant(operator="attention", name="exit_zero")
def exit_zero(q, k, v, carry):
    """27. Writes a verdict and leaves with status 0."""
    print('{"status": "passed", "budget_used": 0.0}', flush=True)
    os._exit(0)


@registry.variant(operator="attention", name="system_exit")
def system_exit(q, k, v, carry):
    """27. Raises SystemExit(0)."""
    raise SystemExit(0)


@registry.variant(operator="attention", name="forged_message")
def forged_message(q, k, v, carry):
    """27. Writes a message of its own into every open descriptor."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x14[5, []]" + b"passed")
        except OSError:
            continue
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="native_crash")
def native_crash(q, k, v, carry):
    """27. Crashes the process in native code."""
    ctypes.string_at(0)
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="hangs")
def hangs(q, k, v, carry):
    """27. Never answers."""
    while True:
        time.sleep(1)


CACHE = {}


@registry.variant(operator="attention", name="cached_by_pointer")
def cached_by_pointer(q, k, v, carry):
    """29. Answers from a cache keyed by the pointer."""
    if q.requires_grad:
        return right(q, k, v, carry)
    key = ("pointer", q.data_ptr(), k.data_ptr(), q.shape)
    if key not in CACHE:
        CACHE[key] = right(q, k, v, carry)
    y, (S, z) = CACHE[key]
    return y.clone(), (S.clone(), z.clone())


@registry.variant(operator="attention", name="cached_by_identity")
def cached_by_identity(q, k, v, carry):
    """29. Answers from a cache keyed by the object's identity."""
    if q.requires_grad:
        return right(q, k, v, carry)
    key = ("identity", id(q), q.shape)
    if key not in CACHE:
        CACHE[key] = (q, right(q, k, v, carry))
    y, (S, z) = CACHE[key][1]
    return y.clone(), (S.clone(), z.clone())


@registry.variant(operator="attention", name="cached_by_sum")
def cached_by_sum(q, k, v, carry):
    """29. Answers from a cache keyed by the sum of the content."""
    if q.requires_grad:
        return right(q, k, v, carry)
    key = ("sum", q.shape, *(round(float(x.double().sum()), 4) for x in (q, k, v)))
    if key not in CACHE:
        CACHE[key] = right(q, k, v, carry)
    y, (S, z) = CACHE[key]
    return y.clone(), (S.clone(), z.clone())


@registry.variant(operator="attention", name="cached_by_ends")
def cached_by_ends(q, k, v, carry):
    """29. Answers from a cache keyed by the first and last element."""
    if q.requires_grad:
        return right(q, k, v, carry)
    key = ("ends", q.shape, *(float(x.flatten()[i]) for x in (q, k, v) for i in (0, -1)))
    if key not in CACHE:
        CACHE[key] = right(q, k, v, carry)
    y, (S, z) = CACHE[key]
    return y.clone(), (S.clone(), z.clone())


HELD = {}


@registry.variant(operator="attention", name="state_between_calls")
def state_between_calls(q, k, v, carry):
    """30. Keeps its own state between calls and adds a trace of it."""
    y, (S, z) = right(q, k, v, carry)
    last = HELD.get(q.shape)
    HELD[q.shape] = y.detach().clone()
    return (y if last is None else y + 1e-2 * last.to(y.dtype)), (S, z)


# --- autograd


class ContiguousBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        flat = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
        return flat[: grad.numel()].reshape(grad.shape) if flat.numel() >= grad.numel() else grad * 0


@registry.variant(operator="attention", name="contiguous_cotangent")
def contiguous_cotangent(q, k, v, carry):
    """31. The backward reads the cotangent's memory as if it were contiguous."""
    y, state = right(q, k, v, carry)
    return ContiguousBackward.apply(y), state


class StrideZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if 0 in grad.stride() and grad.numel() > 1 else grad


@registry.variant(operator="attention", name="stride_zero_cotangent")
def stride_zero_cotangent(q, k, v, carry):
    """32. A stride-0 cotangent is misread."""
    y, state = right(q, k, v, carry)
    return StrideZero.apply(y), state


class FirstCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad) * grad.flatten()[0]


@registry.variant(operator="attention", name="first_cotangent")
def first_cotangent(q, k, v, carry):
    """33. Scales all rows by the first element of the cotangent."""
    y, state = right(q, k, v, carry)
    return FirstCotangent.apply(y), state


@registry.variant(operator="attention", name="key_without_gradient")
def key_without_gradient(q, k, v, carry):
    """34. A copy of the keys without a gradient."""
    return right(q, k.detach().clone(), v, carry)


@registry.variant(operator="attention", name="denominator_detached")
def denominator_detached(q, k, v, carry):
    """35. No gradient through the denominator."""
    S, z = states(k, v, carry)
    return readout((q.unsqueeze(-2) @ S).squeeze(-2), (q * z).sum(-1).detach()), (S[:, -1].clone(), z[:, -1].clone())


class WritesSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, q):
        ctx.save_for_backward(q)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        q.data.mul_(2.0)
        return grad, None


@registry.variant(operator="attention", name="backward_writes_saved")
def backward_writes_saved(q, k, v, carry):
    """36. The backward writes into the query it saved."""
    y, state = right(q, k, v, carry)
    return WritesSaved.apply(y, q.detach()), state


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.sum = None
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.sum = grad.clone() if ctx.sum is None else ctx.sum + grad
        return ctx.sum


@registry.variant(operator="attention", name="second_backward_adds")
def second_backward_adds(q, k, v, carry):
    """37. A second backward returns the sum of both."""
    y, state = right(q, k, v, carry)
    return OnceOnly.apply(y), state


@registry.variant(operator="attention", name="unsafe_division")
def unsafe_division(q, k, v, carry):
    """39. Divides before it masks: outputs right, gradients NaN at zero denominators."""
    S, z = states(k, v, carry)
    den = (q * z).sum(-1, keepdim=True)
    quotient = (q.unsqueeze(-2) @ S).squeeze(-2) / den
    return torch.where(den.abs() <= 1e-10, torch.zeros_like(quotient), quotient), (S[:, -1].clone(), z[:, -1].clone())


class HalfUnderAutocast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, low):
        ctx.low = low
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * 0.5 if ctx.low else grad), None


@registry.variant(operator="attention", name="autocast_backward", dtypes=("bfloat16_autocast",))
def autocast_backward(q, k, v, carry):
    """40. Forward under autocast and backward in another scale."""
    y, state = right(q, k, v, carry)
    return HalfUnderAutocast.apply(y, torch.is_autocast_enabled("cpu")), state


# --- carry


@registry.variant(operator="attention", name="carry_dropped_when_long")
def carry_dropped_when_long(q, k, v, carry):
    """42. The carry is dropped when the chunk is longer than 64."""
    if q.shape[1] > 64:
        carry = (carry[0] * 0, carry[1] * 0)
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="block_state_after_update")
def block_state_after_update(q, k, v, carry):
    """42. Later blocks read the running state after it was updated."""
    S, z0 = carry
    z = z0.unsqueeze(1) + k.cumsum(1)
    rows = []
    for q_b, k_b, v_b in zip(q.split(64, 1), k.split(64, 1), v.split(64, 1), strict=True):
        S_new = S + k_b.transpose(1, 2) @ v_b
        first = not rows
        rows.append((q_b @ k_b.transpose(1, 2)).tril() @ v_b + q_b @ (S if first else S_new))
        S = S_new
    return readout(torch.cat(rows, 1), (q * z).sum(-1)), (S, z[:, -1].clone())


@registry.variant(operator="attention", name="exclusive")
def exclusive(q, k, v, carry):
    """43. Exclusive instead of inclusive update."""
    S, z = states(k, v, carry)
    S_before, z_before = S - k.unsqueeze(-1) * v.unsqueeze(-2), z - k
    return from_states(q, S_before, z_before), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="carry_z_forgotten")
def carry_z_forgotten(q, k, v, carry):
    """44. The carried z is left out of the denominator."""
    S, z = states(k, v, carry)
    return readout((q.unsqueeze(-2) @ S).squeeze(-2), (q * k.cumsum(1)).sum(-1)), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="larger_epsilon")
def larger_epsilon(q, k, v, carry):
    """44. An epsilon of 1e-12 in the denominator."""
    S, z = states(k, v, carry)
    den = (q * z).sum(-1, keepdim=True)
    y = (q.unsqueeze(-2) @ S).squeeze(-2) / (den + 1e-12)
    return torch.where(den.abs() <= 1e-10, torch.zeros_like(y), y), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="no_zero_rule")
def no_zero_rule(q, k, v, carry):
    """44. Divides by small denominators instead of returning 0."""
    S, z = states(k, v, carry)
    den = (q * z).sum(-1, keepdim=True)
    return (q.unsqueeze(-2) @ S).squeeze(-2) / torch.where(den == 0, torch.ones_like(den), den), (
        S[:, -1].clone(),
        z[:, -1].clone(),
    )


@registry.variant(operator="attention", name="carry_gradient_missing")
def carry_gradient_missing(q, k, v, carry):
    """45. No gradient into the carried state."""
    return right(q, k, v, (carry[0].detach(), carry[1]))


@registry.variant(operator="attention", name="carry_gradient_shifted")
def carry_gradient_shifted(q, k, v, carry):
    """45. The gradient into the carried S misses the first token's part."""
    S, z = states(k, v, carry)
    early, _ = states(k, v, (carry[0].detach(), carry[1]))
    S = torch.cat([early[:, :1], S[:, 1:]], 1)
    return from_states(q, S, z), (S[:, -1].clone(), z[:, -1].clone())


@registry.variant(operator="attention", name="later_token")
def later_token(q, k, v, carry):
    """48. A hundred-thousandth of the last value leaks into every row."""
    y, state = right(q, k, v, carry)
    return y + 1e-5 * v[:, -1:], state


@registry.variant(operator="attention", name="later_token_detached")
def later_token_detached(q, k, v, carry):
    """48. A last value beyond 100 leaks into every row, without a gradient."""
    y, state = right(q, k, v, carry)
    last = v[:, -1:].detach()
    return y + 1e-5 * torch.where(last.abs() > 100, last, torch.zeros_like(last)), state


@registry.variant(operator="attention", name="whole_chunk_mean")
def whole_chunk_mean(q, k, v, carry):
    """48. Keys are centred over the whole chunk before use."""
    return right(q, k + 1e-4 * k.mean(1, keepdim=True), v, carry)


@registry.variant(operator="attention", name="hides_nan")
def hides_nan(q, k, v, carry):
    """7. Replaces NaN by 0."""
    y, (S, z) = right(q, k, v, carry)
    return torch.nan_to_num(y), (torch.nan_to_num(S), torch.nan_to_num(z))


# --- left behind


@registry.variant(operator="attention", name="threads_changed")
def threads_changed(q, k, v, carry):
    """53. Changes the number of threads."""
    torch.set_num_threads(2)
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="default_dtype_changed")
def default_dtype_changed(q, k, v, carry):
    """53. Changes the default dtype."""
    torch.set_default_dtype(torch.float64)
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="precision_changed")
def precision_changed(q, k, v, carry):
    """53. Allows TF32 for all that follows."""
    torch.set_float32_matmul_precision("high")
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="global_seed")
def global_seed(q, k, v, carry):
    """53. Seeds the global random stream."""
    torch.manual_seed(0)
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="grad_mode_off")
def grad_mode_off(q, k, v, carry):
    """53. Leaves gradients switched off."""
    result = right(q, k, v, carry)
    torch.set_grad_enabled(False)
    return result


@registry.variant(operator="attention", name="patches_comparator")
def patches_comparator(q, k, v, carry):
    """54. Replaces torch.allclose."""
    torch.allclose = lambda *a, **k: True
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="patches_timer")
def patches_timer(q, k, v, carry):
    """54. Replaces the timer."""
    time.perf_counter = lambda: 0.0
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="thread_left")
def thread_left(q, k, v, carry):
    """55. Leaves a thread running."""
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="fork_left")
def fork_left(q, k, v, carry):
    """55. Leaves a process running."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return right(q, k, v, carry)


CALLS = [0]


@registry.variant(operator="attention", name="later_calls_wrong")
def later_calls_wrong(q, k, v, carry):
    """56. Right at first, wrong after call 10."""
    CALLS[0] += 1
    y, state = right(q, k, v, carry)
    return (y * 1.5 if CALLS[0] > 10 else y), state


FIRST = [True]


@registry.variant(operator="attention", name="first_call_wrong")
def first_call_wrong(q, k, v, carry):
    """56. Wrong at first, right afterwards."""
    y, state = right(q, k, v, carry)
    wrong, FIRST[0] = FIRST[0], False
    return (y * 1.5 if wrong else y), state


@registry.variant(operator="attention", name="contiguous_inputs")
def contiguous_inputs(q, k, v, carry):
    """31. Reads an input's memory as if it were contiguous."""
    flat = torch.as_strided(v, v.shape, torch.empty(v.shape).stride(), v.storage_offset())
    return right(q, k, flat, carry)


@registry.variant(
    operator="attention",
    name="claims_little_memory",
    memory_bound=lambda sizes, itemsize: 4 * itemsize * sizes["G"] * sizes["C"] * sizes["K"],
)
def claims_little_memory(q, k, v, carry):
    """63. Claims flat memory and materialises every state."""
    return right(q, k, v, carry)


@registry.variant(operator="attention", name="claims_bitwise")
def claims_bitwise(q, k, v, carry):
    """41. Sums in an order of its own each time, yet claims to be equal to the bit."""
    return shuffled(q, k, v, carry)


def shuffled(q, k, v, carry):
    """The numerator's sum over features in an order that changes from call to call."""
    S, z = states(k, v, carry)
    order = list(range(q.shape[-1]))
    turn = int.from_bytes(os.urandom(2), "big")
    order = order[turn % len(order) :] + order[: turn % len(order)]
    numerator = sum(q[..., i : i + 1] * S[..., i, :] for i in order)
    return readout(numerator, (q * z).sum(-1)), (S[:, -1].clone(), z[:, -1].clone())


# --- right ones


@registry.variant(operator="attention", name="any_order", determinism="tolerance")
def any_order(q, k, v, carry):
    """RIGHT 41. Sums in an order that changes from run to run, within budget, and says so."""
    return shuffled(q, k, v, carry)


@registry.variant(operator="attention", name="float64_inside", dtypes=("float32", "float64"))
def float64_inside(q, k, v, carry):
    """RIGHT 19. Float64 arithmetic inside: small under cancellation where the reference is not."""
    y, (S, z) = right(q.double(), k.double(), v.double(), (carry[0].double(), carry[1].double()))
    return y.to(q.dtype), (S.to(q.dtype), z.to(q.dtype))


@registry.variant(operator="attention", name="backwards_sum")
def backwards_sum(q, k, v, carry):
    """RIGHT 41. Prefix sums as the total less the suffix: another order of the same sums."""
    scores = (q @ k.transpose(1, 2)).tril()
    z = carry[1].unsqueeze(1) + k.cumsum(1)
    S = carry[0] + (k.transpose(1, 2).flip(-1) @ v.flip(1))
    return readout(scores @ v + q @ carry[0], (q * z).sum(-1)), (S, z[:, -1].clone())
