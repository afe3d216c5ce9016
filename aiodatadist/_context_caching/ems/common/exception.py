"""EMS's exceptions and their codes, under EMS's name for this module."""

from aiodatadist._context_caching.errors import (
    EmsErrorCode,
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
)

__all__ = ["EmsErrorCode", "EmsException", "EmsInternalError", "EmsInvalidArgument", "EmsIoError", "EmsTimeout"]
