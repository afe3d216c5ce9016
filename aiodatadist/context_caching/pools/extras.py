"""What a message says where a package that a pool needs is not installed."""


def how_to_install(extra: str) -> str:
    """What to do about an extra of aiodatadist that is not there: no index has the package."""
    return f"install the extra, pip install '.[{extra}]' in a clone, or pip install 'FILE[{extra}]' with a wheel's FILE"
