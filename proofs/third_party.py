"""Third-party cross-entropies as variants, a plug-in file: ``python -m proofs --plugin proofs/third_party.py``.

Each stands twice: as it is, and claiming a single backward. Their packages are optional; without one the variant is
skipped with its reason. Small cases run on a CPU: Liger's Triton kernels need ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import torch
import torch._dynamo
from torch import Tensor

import registry

CCE = ("cut-cross-entropy>=25.1",)
LIGER = ("liger-kernel>=0.5", "triton>=3")


def cut(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cut-cross-entropy in its torch.compile implementation."""
    from cut_cross_entropy import linear_cross_entropy

    # Many shapes in one process: it compiles with fullgraph=True and fails hard at the default limit of recompiles.
    with torch._dynamo.config.patch(recompile_limit=1000):
        loss: Tensor = linear_cross_entropy(hidden, weight, targets, impl="torch_compile")
    return loss


def torch_own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked linear cross-entropy."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    return torch.nn.functional.linear_cross_entropy(hidden, weight, targets, options=options)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


@registry.variant(operator="cross_entropy", name="cce_compiled", requires=CCE, dtypes=("float32",), compiled=True)
def cce_compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cut-cross-entropy, torch.compile implementation."""
    return cut(hidden, weight, targets)


@registry.variant(
    operator="cross_entropy",
    name="cce_compiled_once",
    requires=CCE,
    dtypes=("float32",),
    compiled=True,
    single_backward=True,
)
def cce_compiled_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cut-cross-entropy, torch.compile implementation, claiming one backward."""
    return cut(hidden, weight, targets)


@registry.variant(
    operator="cross_entropy", name="torch_chunked", requires=("torch>=2.13",), dtypes=("float32", "float64")
)
def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, chunked."""
    return torch_own(hidden, weight, targets)


@registry.variant(
    operator="cross_entropy",
    name="torch_chunked_once",
    requires=("torch>=2.13",),
    dtypes=("float32", "float64"),
    single_backward=True,
)
def torch_chunked_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, chunked, claiming one backward."""
    return torch_own(hidden, weight, targets)


@registry.variant(operator="cross_entropy", name="liger_fused", requires=LIGER, dtypes=("float32",))
def liger_fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy."""
    return liger(hidden, weight, targets)


@registry.variant(
    operator="cross_entropy", name="liger_fused_once", requires=LIGER, dtypes=("float32",), single_backward=True
)
def liger_fused_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy, claiming one backward."""
    return liger(hidden, weight, targets)
