"""The demo as its user meets it: whole processes, started, watched and killed."""
