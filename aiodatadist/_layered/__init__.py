"""Layered transfer: one completion made of several. Prefill computes the next layer while the last one travels.

``request`` has the checked arguments; ``destination`` is one destination under way; ``transfer`` is all of them
together, with the source of readiness. Promises: a destination's failure affects no other, and a transfer ends when its
links do. It knows nothing of other users of the caches.
"""

from aiodatadist._layered.destination import Destination
from aiodatadist._layered.request import LayeredRequest, check_apart
from aiodatadist._layered.transfer import LayerDone, LayeredTransfer

__all__ = ["Destination", "LayerDone", "LayeredRequest", "LayeredTransfer", "check_apart"]
