"""The two ends as clusters: opened, and linked."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from aiodatadist import LLMConfig, LLMDataDist, LLMRole
from aiodatadist._cli.bench.initiator import RemoteOwner
from aiodatadist._cli.bench.options import BenchOptions
from aiodatadist._cli.bench.owner import serve
from aiodatadist._cli.kit.children import module_command, open_child
from aiodatadist._cli.kit.errors import CommandError
from aiodatadist._cli.kit.place import Place, place_options

OWNER_ID = 1
TRANSFER_MILLISECONDS = 120_000
LISTENING = "listening on "

Address = tuple[str, int]


@asynccontextmanager
async def open_end(options: BenchOptions, role: LLMRole, cluster_id: int, place: Place) -> AsyncIterator[LLMDataDist]:
    config = LLMConfig(
        listen_ip_info=options.listen or ("127.0.0.1:0" if role is LLMRole.PROMPT else None),
        transport=options.transport,
        sync_kv_timeout=TRANSFER_MILLISECONDS,
        auth_key=options.auth_key,
        **await place_options(place),
    )
    async with LLMDataDist(role, cluster_id, config) as datadist:
        yield datadist


@asynccontextmanager
async def open_owner(options: BenchOptions) -> AsyncIterator[Address]:
    """Serve as owner on this event loop until the end of the ``with`` block. Yields the address where the owner listens."""
    async with (
        open_end(options, LLMRole.PROMPT, OWNER_ID, options.places[0]) as datadist,
        anyio.create_task_group() as tasks,
    ):
        assert datadist.listen_address is not None
        tasks.start_soon(serve, datadist)
        yield datadist.listen_address
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_child_owner(options: BenchOptions) -> AsyncIterator[Address]:
    """Serve as owner in a child process, which ends with the ``with`` block or with this process."""
    command = module_command("bench", *options.owner_arguments, "--until-stdin-closes")
    async with open_child("owner", command, stderr=None) as child:
        line = await child.line()
        if line is None:
            raise CommandError("the owner's process ended before it listened; its output is above")
        host, _, port = line.decode().removeprefix(LISTENING).rpartition(":")
        yield host, int(port)


@asynccontextmanager
async def open_initiator(options: BenchOptions, address: Address) -> AsyncIterator[tuple[LLMDataDist, RemoteOwner]]:
    """Open a cluster to measure the owner at this address."""
    number = 2 + secrets.randbelow(2**31)  # several initiators may measure one owner
    async with open_end(options.as_initiator(), LLMRole.DECODER, number, options.places[-1]) as datadist:
        yield datadist, RemoteOwner(datadist, OWNER_ID, address)


def say_listening(address: Address) -> None:
    print(f"{LISTENING}{address[0]}:{address[1]}", flush=True)
