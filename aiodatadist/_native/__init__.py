"""The only place that knows there is C.

Here the vendor's libraries, or softnpu in their place, are opened at run time, and statuses become exceptions. Everything
above asks for a :class:`Runtime` and calls its methods. ``Any`` stands for cffi's objects and does not leave this package
and ``device``/``transport``, which hold handles without looking into them.
"""
