"""Where callers of EMS find its exceptions, too."""
