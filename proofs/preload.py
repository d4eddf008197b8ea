"""What the fork server imports once, so that each isolated process starts in milliseconds."""

import torch._dynamo  # activation checkpointing imports it at its first call

import proofs.child
import registry

registry.load()

__all__ = ["proofs", "registry", "torch"]
