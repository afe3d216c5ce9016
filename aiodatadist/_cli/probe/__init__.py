"""``aiodatadist doctor --device N``: what the vendor's libraries do on this machine, step by step.

The calls are made through the cffi bindings, not through the library's data path, so that reports are about the
vendor's libraries only. Each step runs in a child process (``child``) with a hard limit (``children``), so a hang or a
crash is a result. Steps that need two devices have a *far end*, a second child process that follows the near end's
requests (``far_end``): on the next device of this host, or behind ``aiodatadist doctor --serve`` on another host
(``serve``).
"""
