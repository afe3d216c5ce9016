"""Layered transfer: a future made of futures. Prefill computes the next layer while the last one travels.

``request`` is what was asked for, checked; ``part`` one destination under way; ``transfer`` all of them together, and who
says that a layer is ready. Promises: one destination's failure is its own, and a transfer ends when its link does. Refuses to
know: who else uses the caches.
"""

from aiodatadist.layered.destination import Destination
from aiodatadist.layered.request import LayeredRequest, check_apart
from aiodatadist.layered.transfer import LayerDone, LayeredTransfer

__all__ = ["Destination", "LayerDone", "LayeredRequest", "LayeredTransfer", "check_apart"]
