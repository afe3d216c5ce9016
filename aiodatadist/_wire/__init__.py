"""The protocol: messages between two endpoints.

Pure: no sockets, no clock, no device. ``messages`` defines the messages, ``frames`` their bytes, ``handshake`` their
order at the beginning of a link, ``auth`` the proof of a key. Promises: any bytes are messages or a ``ProtocolError``,
nothing is allocated from an unverified length, and no message makes the receiver follow an address.
"""
