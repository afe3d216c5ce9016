"""The transfers of one link, whichever end asks for them.

``transfers`` starts those of this end, and holds the others. ``running`` holds those that are on a stream of this end, and
``shortcuts`` repeats small ones with one call of C. ``requester`` runs transfers for which the peer must be asked, and
``pull_requests`` those that it asks the peer to carry out. ``responder`` serves what the peer asks for, and
``requests_in_line`` holds what must wait for its turn. ``checksums`` compares what arrived with what was sent.
``leased_pull`` pulls blocks that the peer keeps for this end, and ``awaited_link`` holds transfers until a broken link
has been re-established.
"""
