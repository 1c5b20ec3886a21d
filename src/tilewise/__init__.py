"""Exact attention, tile by tile: softmax(QKᵀ)V and its gradients without ever storing the matrix of scores."""

from . import ring as ring
from ._errors import DtypeError as DtypeError
from ._errors import OptionError as OptionError
from ._errors import PeerLost as PeerLost
from ._errors import ShapeError as ShapeError
from ._errors import Unsupported as Unsupported
from .api import attention as attention
from .api import attention_varlen as attention_varlen
from .api import attention_with_lse as attention_with_lse
from .api import merge as merge
from .api import plan as plan
from .backends.plan import Plan as Plan
from .mask import Causal as Causal
from .mask import Chunked as Chunked
from .mask import Documents as Documents
from .mask import Full as Full
from .mask import Lengths as Lengths
from .mask import Mask as Mask
from .mask import Prefix as Prefix
from .mask import Tile as Tile
from .mask import Where as Where
from .mask import Window as Window
from .positions import Positions as Positions
from .problem import Partial as Partial
from .ragged import Ragged as Ragged
from .warm import Warmth as Warmth
from .warm import warmup as warmup

__version__ = "0.1.0"
