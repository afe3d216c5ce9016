"""Counters that are always on, and observers that are notified of each call while it runs."""

from aiodatadist._counting.callbacks import guarded
from aiodatadist._counting.figures import SUCCESS, Figures, FlowFigures
from aiodatadist._counting.flow import SECONDS, Flow, figures_of
from aiodatadist._counting.incidents import OF_POOLS, OF_PROCESS, Incident, Incidents
from aiodatadist._counting.observer import Call, Ended, Observer, Tell, tell
from aiodatadist._counting.totals import Totals, forget_oldest

__all__ = [
    "OF_POOLS",
    "OF_PROCESS",
    "SECONDS",
    "SUCCESS",
    "Call",
    "Ended",
    "Figures",
    "Flow",
    "FlowFigures",
    "Incident",
    "Incidents",
    "Observer",
    "Tell",
    "Totals",
    "figures_of",
    "forget_oldest",
    "guarded",
    "tell",
]
