"""A package that exists because EMS's exceptions are in ``ems.common.exception``."""
