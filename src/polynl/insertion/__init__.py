"""Put a block before or after any named module of any model, remove it, and put it back into a new model.

The block becomes a child of the module it stands next to (`polynl_before` or `polynl_after`), and a forward
hook on that module runs it. No module is wrapped or renamed, so the host's state-dict keys stay as they are.
"""

from polynl.insertion.evidence import proportional
from polynl.insertion.forward_pass import at_rest
from polynl.insertion.inserting import insert, inserted, remove
from polynl.insertion.padding import ignore_padding
from polynl.insertion.replacing import replace_attention
from polynl.insertion.specs import restore, spec

__all__ = [
    "at_rest",
    "ignore_padding",
    "insert",
    "inserted",
    "proportional",
    "remove",
    "replace_attention",
    "restore",
    "spec",
]
