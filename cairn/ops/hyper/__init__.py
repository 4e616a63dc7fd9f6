"""Hyper-connections: several residual streams, mixed before and after every block."""

from cairn.ops.hyper.mhc_head import mhc_head
from cairn.ops.hyper.mhc_post import mhc_post
from cairn.ops.hyper.mhc_pre import mhc_pre

__all__ = ["mhc_head", "mhc_post", "mhc_pre"]
