"""``aiodatadist doctor``: what this machine provides, and what is missing."""
