"""We agreed: what two endpoints tell each other.

Pure: no sockets, no clock, no device. ``messages`` says what can be said, ``framing`` how it looks as bytes, ``handshake``
in which order, ``auth`` who may. Promises: any bytes are messages or a ``ProtocolError``, nothing is allocated from an
unverified length, and no message makes the receiver follow an address.
"""
