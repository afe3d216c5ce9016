"""Other libraries that move the same blocks in the same run, each in its own environment.

peers          their side: a script that needs nothing of this package
environments   where it runs
contender      a peer, as the initiator sees it
"""
