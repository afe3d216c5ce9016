"""The blocking calls, on asyncio's own loop and on uvloop."""
