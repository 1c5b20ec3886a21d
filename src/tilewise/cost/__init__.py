"""What attention costs: operations, exponentials, and bytes at each level of memory, for standard attention, FlashAttention-1
and FlashAttention-2; in what time a machine could do it, and which tiles suit it. The same counts come out of a `Meter` that
watches the reference run, and tests hold the two equal.

Source: Dao et al. 2022, FlashAttention, theorem 2; Dao 2023, FlashAttention-2, section 3.1 (query tiles outside)."""

from . import blocks as blocks
from . import keys_outside as keys_outside
from .count import Cost as Cost
from .count import Meter as Meter
from .count import Moved as Moved
from .flash import backward as backward
from .flash import decode as decode
from .flash import delta as delta
from .flash import dk_dv as dk_dv
from .flash import dq as dq
from .flash import forward as forward
from .flash import useful_flops as useful_flops
from .keys_outside import Accounting as Accounting
from .orders import Order as Order
from .orders import orders as orders
from .ring import Ring as Ring
from .ring import ring as ring
from .roofline import Roofline as Roofline
from .roofline import in_turn as in_turn
from .roofline import roofline as roofline
from .stored import Passes as Passes
from .stored import score_passes as score_passes
from .stored import standard as standard
from .stored import steps as steps
