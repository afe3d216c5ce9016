"""What was done, in numbers that are always counted, and who is told of each call while it goes on."""

from aiodatadist.counting.figures import Figures, FlowFigures
from aiodatadist.counting.flow import SECONDS, Flow
from aiodatadist.counting.observer import Call, Ended, Observer, tell
from aiodatadist.counting.totals import Totals

__all__ = ["SECONDS", "Call", "Ended", "Figures", "Flow", "FlowFigures", "Observer", "Totals", "tell"]
