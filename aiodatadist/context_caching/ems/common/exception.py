"""EMS's exceptions and their codes, under the name that EMS has for this module."""

from aiodatadist.context_caching.errors import (
    EmsErrorCode,
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
)

__all__ = ["EmsErrorCode", "EmsException", "EmsInternalError", "EmsInvalidArgument", "EmsIoError", "EmsTimeout"]
