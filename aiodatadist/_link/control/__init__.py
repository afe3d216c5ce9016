"""The conversation with one peer: messages, questions and their answers, and what each end reports to the other.

``connection`` and ``wire`` carry messages, and ``questions`` those that need an answer. ``notifications`` announces
transfers, and ``layer_events`` layers that have landed. ``peer_leases`` records which memory of this end the peer may reach.
``block_leases`` keeps blocks for peers, which claim them with a ``peer_claim``; ``early_claims`` wait for their lease.
``served_requests`` remembers which requests of the peer have been answered.

These files know nothing of channels, of transfers or of the life of the link.
"""
