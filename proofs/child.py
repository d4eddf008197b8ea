"""The isolated process: runs one variant on what the parent sends and returns tensors, never a verdict.

An exception of the variant ends the process; the parent reads the traceback from the log. Neither an
oracle nor a tolerance is ever in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from proofs import wire, world
from registry import Bound, Catalogue, leaves, load, map_leaves

_M_MMAP_THRESHOLD, _M_PERTURB = -3, -6
Request = dict[str, Any]


def serve(connection: Connection, log: str, plugins: list[str], threads: int) -> None:
    """Answer requests until the parent closes the connection."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Whatever the fork server holds open is not the variant's: it could write a message into it.
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 4096)
    torch.set_num_threads(threads)
    _warm_up()
    # Whatever loading or a call changes counts, at whichever call it is looked at.
    names, start = world.names(), world.snapshot()
    catalogue = load(plugins=plugins)
    wire.send(connection, {"ready": _listing(catalogue)})
    while True:
        try:
            request = wire.receive(connection, catalogue)
        except EOFError:
            return
        answer = _OPERATIONS[request["op"]](catalogue, request)
        if request.get("observe"):
            answer["changed"] += [c for c in world.changes(start, world.snapshot()) if c not in answer["changed"]]
            answer["patched"] = world.changes(names, world.names())
        wire.send(connection, answer)


def _warm_up() -> None:
    """Let torch start what it starts once, so that a variant is not blamed for it."""
    x = torch.ones(4, 4, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x @ x


def _listing(catalogue: Catalogue) -> list[dict[str, Any]]:
    fields = (
        "operator",
        "name",
        "devices",
        "dtypes",
        "conditions",
        "grad",
        "single_backward",
        "requires",
        "determinism",
        "compiled",
        "summary",
    )
    found = []
    for variant in catalogue.variants.values():
        entry = {name: getattr(variant, name) for name in fields}
        entry["module"] = variant.function.__module__
        entry["options"] = {name: [o.default, o.low, o.high] for name, o in variant.options.items()}
        entry["shapes"] = {letter: list(bounds) for letter, bounds in variant.shapes.items()}
        entry["memory_bound"] = variant.memory_bound is not None
        entry["falls_back"] = variant.falls_back is not None
        found.append(entry)
    return found


def _arguments(bound: Bound, request: Request) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The call's arguments in the requested layout and device, and the leaves that want a gradient."""
    wanted = set(request.get("grad", ()))
    layouts = request.get("layout", {})
    device = request["device"]
    tracked: dict[str, torch.Tensor] = {}

    def place(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        placed = laid_out(leaf.to(device), layouts.get(name, "contiguous"))
        if leaf.is_leaf and leaf.grad is not None:
            placed.grad = leaf.grad.to(device)
        if name in wanted:
            placed = placed.detach().requires_grad_()
            tracked[name] = placed
        return placed

    arguments = {name: map_leaves(place, value, name) for name, value in request["arguments"].items()}
    values = list(arguments.values())
    if bound.variant.prepare is not None:
        values[0] = bound.prepare(values[0])
    return values, tracked


def laid_out(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values in another memory layout: transposed, strided (gaps) or offset; others as they are."""
    if kind == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "strided" and tensor.dim() >= 1:
        spread = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        spread[..., ::2] = tensor
        return spread[..., ::2]
    if kind == "offset":
        room = tensor.new_zeros(tensor.numel() + 3)
        view = room[3:].view(tensor.shape)
        return view.copy_(tensor)
    return tensor


@contextlib.contextmanager
def _poisoned(active: bool) -> Iterator[None]:
    """Fresh allocations hold NaN (torch) or huge values (the allocator) while active."""
    if not active:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    libc = ctypes.CDLL(None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    libc.mallopt(_M_PERTURB, 0x80)
    try:
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _autocast(request: Request) -> contextlib.AbstractContextManager[Any]:
    if request.get("autocast"):
        return torch.autocast(torch.device(request["device"]).type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _call(bound: Bound, request: Request, values: list[Any]) -> Any:
    with _poisoned(request.get("poison", False)), _autocast(request):
        if request.get("chain"):
            return _chain(bound, request["chain"], values)
        return bound(*values)


def _chain(bound: Bound, splits: list[int], values: list[Any]) -> Any:
    """The same tokens in several calls, each carry fed to the next; outputs joined along the time axis."""
    operator = bound.operator
    names = list(_signature(bound))
    start, pieces, carry = 0, [], values[names.index("carry")]
    for length in splits:
        piece = [
            value.narrow(operator.time[name], start, length) if name in operator.time else value
            for name, value in zip(names, values, strict=True)
        ]
        piece[names.index("carry")] = carry
        *outputs, carry = bound(*piece)
        pieces.append(outputs)
        start += length
    joined = [
        torch.cat([piece[i] for piece in pieces], dim=operator.time[operator.outputs[i]])
        if operator.outputs[i] in operator.time
        else pieces[-1][i]
        for i in range(len(pieces[0]))
    ]
    return (*joined, carry)


def _signature(bound: Bound) -> tuple[str, ...]:
    code: CodeType = bound.operator.contract.__code__
    return code.co_varnames[1 : code.co_argcount]


def _gradients(
    outputs: Any, tracked: dict[str, torch.Tensor], request: Request
) -> list[dict[str, torch.Tensor | None]]:
    found = []
    flat = [leaf for _, leaf in leaves(outputs)]
    sets = request.get("cotangents", [])
    for index, cotangents in enumerate(sets):
        pairs = [
            (output, laid_out(cotangent.to(output.device), request.get("cotangent_layout", "contiguous")))
            for output, cotangent in zip(flat, cotangents, strict=False)
            if isinstance(output, torch.Tensor) and output.requires_grad and cotangent is not None
        ]
        if not pairs or not tracked:
            found.append(dict.fromkeys(tracked))
            continue
        results = torch.autograd.grad(
            [p[0] for p in pairs],
            list(tracked.values()),
            [p[1] for p in pairs],
            retain_graph=index + 1 < len(sets),
            allow_unused=True,
        )
        found.append(dict(zip(tracked, results, strict=True)))
    return found


def run(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    """Call the variant ``repeats`` times on the same inputs, with gradients for each set of cotangents."""
    bound = catalogue.bind(request["variant"], **request["options"])
    values, tracked = _arguments(bound, request)
    versions = {name: leaf._version for name, leaf in leaves(dict(enumerate(values))) if isinstance(leaf, torch.Tensor)}
    before = world.snapshot() if request.get("observe") else {}
    answer: dict[str, Any] = {}
    called = _Calls(catalogue, bound) if request.get("identify") else contextlib.nullcontext()
    kept = []
    with called:
        for _ in range(request.get("repeats", 1)):
            outputs = _call(bound, request, values)
            kept.append(outputs)
            answer["grads"] = _gradients(outputs, tracked, request)
    if request.get("observe"):
        if request["device"].startswith("cuda"):
            torch.cuda.synchronize(request["device"])
        answer["changed"] = world.changes(before, world.snapshot())
        answer["touched"] = [
            name
            for name, leaf in leaves(dict(enumerate(values)))
            if isinstance(leaf, torch.Tensor) and leaf._version != versions[name]
        ]
        answer["aliased"] = _aliases(kept, values)
    if isinstance(called, _Calls):
        answer["reference_ran"], answer["own_ran"] = called.reference_ran, called.own_ran
    if request.get("return_inputs") or bound.operator.mutates:
        # A mutated parameter is an output; its gradient goes back only where the inputs are asked for.
        full = bool(request.get("return_inputs"))
        answer["inputs"] = [_plain(value) if full else map_leaves(_without_grad, value) for value in values]
    if len(kept) > 1:
        answer["first"] = [_plain(leaf) for _, leaf in leaves(kept[0])]
        if request.get("every"):
            answer["every"] = [[_plain(leaf) for _, leaf in leaves(outputs)] for outputs in kept]
    answer["outputs"] = [_plain(leaf) for _, leaf in leaves(kept[-1])]
    answer["requires_grad"] = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for _, leaf in leaves(kept[-1])]
    return answer


def refill(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    """Call on one set of inputs, overwrite the same tensors with another set, call again: the second answer."""
    bound = catalogue.bind(request["variant"], **request["options"])
    values, _ = _arguments(bound, request)
    _call(bound, request, values)
    others, _ = _arguments(bound, {**request, "arguments": request["second"]})
    for (_, leaf), (_, other) in zip(leaves(values), leaves(others), strict=True):
        if isinstance(leaf, torch.Tensor):
            _stored(leaf).copy_(_stored(other))
        elif isinstance(leaf, np.ndarray):
            leaf[...] = other
    return {"outputs": [_plain(leaf) for _, leaf in leaves(_call(bound, request, values))]}


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def refuses(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    """Whether the call raises ``ValueError``, and its message."""
    bound = catalogue.bind(request["variant"], **request["options"])
    values, _ = _arguments(bound, request)
    try:
        _call(bound, request, values)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": None}


def declared(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    """What a declared predicate says: the memory bound of some sizes, or whether arguments may fall back."""
    bound = catalogue.bind(request["variant"], **request["options"])
    if "sizes" in request:
        assert bound.variant.memory_bound is not None
        return {"bound": int(bound.variant.memory_bound(request["sizes"], request["itemsize"], **request["options"]))}
    values, _ = _arguments(bound, request)
    assert bound.variant.falls_back is not None
    return {"falls_back": bool(bound.variant.falls_back(*values, **bound.options))}


def memory(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    """Peak bytes of one call above its inputs, from the kernel's high-water mark (CPU) or the allocator (CUDA)."""
    bound = catalogue.bind(request["variant"], **request["options"])
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # large blocks go back to the system when freed
    values, tracked = _arguments(bound, request)
    gc.collect()
    if request["device"].startswith("cuda"):
        device = torch.device(request["device"])
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        outputs = _call(bound, request, values)
        _gradients(outputs, tracked, request)
        return {"peak": torch.cuda.max_memory_allocated(device) - base, "outputs": _bytes_of(outputs)}
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    base = _status_bytes("VmRSS")
    outputs = _call(bound, request, values)
    _gradients(outputs, tracked, request)
    return {"peak": max(0, _status_bytes("VmHWM") - base), "outputs": _bytes_of(outputs)}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def _bytes_of(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, (torch.Tensor, np.ndarray, int, float, str, bool, torch.Generator)) or leaf is None:
        return leaf
    if isinstance(leaf, (tuple, list)):
        return [_plain(item) for item in leaf]
    return map_leaves(lambda _, item: _plain(item), leaf) if hasattr(leaf, "items") else f"<{type(leaf).__name__}>"


def _without_grad(_: str, leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else None


def _span(tensor: Any) -> tuple[int, int] | None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    start = tensor.data_ptr()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + extent * tensor.element_size()


def _storage(tensor: Any) -> int:
    return (
        tensor.untyped_storage().data_ptr()
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        else 0
    )


def _aliases(kept: list[Any], values: list[Any]) -> list[str]:
    """Outputs that share memory with an input, an earlier call's output or another output of the call."""
    inputs = {_storage(leaf): f"input {name}" for name, leaf in leaves(dict(enumerate(values))) if _storage(leaf)}
    for name, leaf in leaves(dict(enumerate(values))):
        if isinstance(leaf, np.ndarray) and leaf.size:
            inputs[leaf.__array_interface__["data"][0]] = f"input {name}"
    arrays = [leaf for _, leaf in leaves(dict(enumerate(values))) if isinstance(leaf, np.ndarray)]
    found = []
    earlier: dict[int, str] = {}
    for call, outputs in enumerate(kept):
        spans: list[tuple[str, tuple[int, int]]] = []
        for name, leaf in leaves(outputs):
            storage, span = _storage(leaf), _span(leaf)
            if not storage or span is None:
                continue
            if storage in inputs:
                found.append(f"output {name or 0} shares memory with {inputs[storage]}")
            if storage in earlier:
                found.append(f"output {name or 0} of call {call + 1} shares memory with {earlier[storage]}")
            if any(np.shares_memory(array, leaf.detach().numpy()) for array in arrays if leaf.device.type == "cpu"):
                found.append(f"output {name or 0} shares memory with an input array")
            found += [
                f"outputs {other} and {name} overlap"
                for other, (low, high) in spans
                if span[0] < high and low < span[1]
            ]
            spans.append((name, span))
        earlier.update(
            {
                _storage(leaf): f"output {name or 0} of call {call + 1}"
                for name, leaf in leaves(outputs)
                if _storage(leaf)
            }
        )
    return found


class _Calls:
    """Which of the reference's and the variant's own code ran, seen by the interpreter's profiler on every thread."""

    def __init__(self, catalogue: Catalogue, bound: Bound) -> None:
        self.reference = catalogue.reference(bound.operator.name).variant.function.__code__
        self.own = bound.variant.function.__code__
        self.reference_ran = self.own_ran = False

    def _see(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.reference_ran |= frame.f_code is self.reference
            self.own_ran |= frame.f_code is self.own

    def __enter__(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


_OPERATIONS = {"run": run, "refill": refill, "refuses": refuses, "declared": declared, "memory": memory}
