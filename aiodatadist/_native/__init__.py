"""The only package that knows that there is C.

Here the vendor's libraries, or softnpu in their place, are opened at run time, and statuses become exceptions.
Everything above asks for a :class:`Runtime` and calls its methods. ``Any`` stands for cffi's objects and does not leave
this package, ``device`` and ``transport``, which hold handles without looking into them.
"""
