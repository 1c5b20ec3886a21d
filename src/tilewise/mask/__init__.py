"""Which keys a query sees, as a value: `Causal() & Window(left=3)`."""

from .band import Causal as Causal
from .band import Full as Full
from .band import Window as Window
from .base import Both as Both
from .base import Encoded as Encoded
from .base import Mask as Mask
from .base import Tile as Tile
from .parse import parse as parse
from .sequence import Chunked as Chunked
from .sequence import Documents as Documents
from .sequence import Lengths as Lengths
from .sequence import Prefix as Prefix
from .where import Where as Where
