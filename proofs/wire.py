"""Arguments and tensors as JSON and raw bytes: the parent never unpickles what a child sends."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

import numpy as np
import torch

from registry import Bound, Bundle, Catalogue

TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
LIMIT_BYTES = 16 << 30


class ForgedMessageError(ValueError):
    """A message that is not what its header says."""


def send(connection: Connection, value: Any) -> None:
    """Send a tree of tensors, arrays, generators, bound variants and plain values."""
    buffers: list[np.ndarray[Any, Any]] = []
    header = json.dumps(_pack(value, buffers)).encode()
    connection.send_bytes(json.dumps([len(header), [b.nbytes for b in buffers]]).encode())
    connection.send_bytes(header)
    for buffer in buffers:
        if buffer.nbytes:
            connection.send_bytes(memoryview(buffer))  # type: ignore[arg-type]


def receive(connection: Connection, catalogue: Catalogue | None = None) -> Any:
    """Receive what ``send`` sent; ``ForgedMessageError`` for anything else, ``EOFError`` at the end."""
    try:
        preface = json.loads(connection.recv_bytes(1 << 20))
        length, sizes = int(preface[0]), [int(n) for n in preface[1]]
        if length < 0 or any(n < 0 for n in sizes) or sum(sizes) > LIMIT_BYTES:
            raise ForgedMessageError("impossible sizes")
        packed = json.loads(connection.recv_bytes(1 << 28))
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ForgedMessageError(f"not a message of the protocol: {error}") from error
    buffers = []
    for size in sizes:
        buffer = np.empty(size, dtype=np.uint8)
        if size and connection.recv_bytes_into(memoryview(buffer)) != size:  # type: ignore[arg-type]
            raise ForgedMessageError("a tensor is shorter than its header says")
        buffers.append(buffer)
    try:
        return _unpack(packed, buffers, catalogue)
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        raise ForgedMessageError(f"not a message of the protocol: {error}") from error


def _pack(value: Any, buffers: list[np.ndarray[Any, Any]]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, buffers)
    if isinstance(value, np.ndarray):
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return {"array": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, torch.Generator):
        return {"generator": _pack_tensor(value.get_state(), buffers), "device": value.device.type}
    if isinstance(value, Bound):
        return {"bound": value.variant.key, "options": dict(value.options)}
    if isinstance(value, FunctionType):
        return {"function": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, Mapping):
        kind = "bundle" if isinstance(value, Bundle) else "map"
        return {kind: [[key, _pack(item, buffers)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_pack(item, buffers) for item in value]}
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise TypeError(f"cannot send a {type(value).__name__}")


def _pack_tensor(value: torch.Tensor, buffers: list[np.ndarray[Any, Any]]) -> Any:
    tensor = value.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return {
            "sparse": [_pack_tensor(tensor.indices(), buffers), _pack_tensor(tensor.values(), buffers)],
            "shape": list(tensor.shape),
        }
    expanded = [
        axis
        for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if stride == 0 and size > 1
    ]
    stored = tensor
    for axis in expanded:
        stored = stored.narrow(axis, 0, 1)
    raw = torch.empty(stored.numel(), dtype=stored.dtype).copy_(stored.reshape(-1))
    buffers.append(raw.view(torch.uint8).numpy() if raw.numel() else np.empty(0, dtype=np.uint8))
    packed: dict[str, Any] = {"tensor": str(tensor.dtype).removeprefix("torch."), "shape": list(stored.shape)}
    if expanded:
        packed["expand"] = list(tensor.shape)
    if value.is_leaf and value.grad is not None:
        packed["grad"] = _pack_tensor(value.grad, buffers)
    return packed


def _unpack(packed: Any, buffers: list[np.ndarray[Any, Any]], catalogue: Catalogue | None) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return _unpack_tensor(packed, buffers)
    if "sparse" in packed:
        indices = _unpack_tensor(packed["sparse"][0], buffers)
        values = _unpack_tensor(packed["sparse"][1], buffers)
        return torch.sparse_coo_tensor(indices, values, packed["shape"], check_invariants=True).coalesce()
    if "array" in packed:
        return buffers.pop(0).view(np.dtype(packed["array"])).reshape(packed["shape"])
    if "generator" in packed:
        generator = torch.Generator(device=packed["device"])
        generator.set_state(_unpack_tensor(packed["generator"], buffers))
        return generator
    if "bound" in packed:
        if catalogue is None:
            raise ForgedMessageError("a variant cannot be sent back")
        return catalogue.bind(packed["bound"], **packed["options"])
    if "function" in packed:
        if catalogue is None:
            raise ForgedMessageError("a function cannot be sent back")
        module, _, name = packed["function"].partition(":")
        return getattr(importlib.import_module(module), name)
    for kind, build in (("bundle", Bundle), ("map", dict)):
        if kind in packed:
            return build({key: _unpack(item, buffers, catalogue) for key, item in packed[kind]})
    items = [_unpack(item, buffers, catalogue) for item in (packed["tuple"] if "tuple" in packed else packed["list"])]
    return tuple(items) if "tuple" in packed else items


def _unpack_tensor(packed: dict[str, Any], buffers: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    dtype = TORCH_DTYPES[packed["tensor"]]
    raw = buffers.pop(0)
    tensor = torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(packed["shape"])
    if "expand" in packed:
        tensor = tensor.expand(packed["expand"])
    if "grad" in packed:
        grad = packed["grad"]
        tensor.grad = _unpack(grad, buffers, None)
    return tensor
