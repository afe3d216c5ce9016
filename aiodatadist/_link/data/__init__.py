"""The bytes of one link: the channels that reach the peer's memory, and what it costs to use them.

``channels`` opens and closes them. ``remote_operation`` is a transfer that does not run on a stream of this end.
``cost_model`` predicts how long a transfer takes, and ``statistics`` counts what the link has moved.
"""
