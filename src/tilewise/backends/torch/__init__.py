"""Blocked online softmax in plain torch operations: any device, any float dtype, every mask and score. The permanent
fallback, and the second witness of every faster backend."""

from .backward import backward as backward
from .config import Config as Config
from .config import configure as configure
from .forward import differentiable as differentiable
from .forward import forward as forward
from .tile import why_not as why_not
