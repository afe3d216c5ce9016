"""The transfers of one link, whichever end asks for them.

``running`` holds those that are on a stream of this end. ``requester`` runs transfers for which the peer must be asked, and
``pull_requests`` those that it asks the peer to carry out. ``responder`` serves what the peer asks for, and
``requests_in_line`` holds what must wait for its turn. ``checksums`` compares what arrived with what was sent, and
``leased_pull`` pulls blocks that the peer keeps for this end.
"""
