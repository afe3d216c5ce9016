"""``aiodatadist doctor``: what this machine offers, and what is missing."""
