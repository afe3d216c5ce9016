"""The advice in messages about a missing package that a pool needs."""


def how_to_install(extra: str) -> str:
    """Return how to install a missing extra of aiodatadist.

    No package index has aiodatadist, so the command names a clone or a wheel.
    """
    return f"install the extra, pip install '.[{extra}]' in a clone, or pip install 'FILE[{extra}]' with a wheel's FILE"
