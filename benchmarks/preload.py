"""What the fork server imports once, so that each measuring process starts in milliseconds."""

import torch._dynamo  # gradients through given cotangents and activation checkpointing import it at their first call

import benchmarks.cell
import registry

registry.load()

__all__ = ["benchmarks", "registry", "torch"]
