"""Ring attention on one device's arrays, with its own backward ring."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..operands import Operands
from ..spec import AttentionSpec
from .local import Block, Call, Ring
from .merge import with_sink
from .sweep import sweep
