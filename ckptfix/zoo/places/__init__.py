"""Where a zoo lies: a folder of this machine, or an fsspec URL."""

from ckptfix.zoo.places.opening import open_place
from ckptfix.zoo.places.place import Entry, Place, walk_if_there

__all__ = ["Entry", "Place", "open_place", "walk_if_there"]
