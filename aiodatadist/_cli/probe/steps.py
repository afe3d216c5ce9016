"""All steps in order: what each expects of the vendor's libraries, and which prediction it decides."""

from __future__ import annotations

from aiodatadist._cli.probe import expansion, links, memory, order, races, start, streams
from aiodatadist._cli.probe.step import Step

STEPS: tuple[Step, ...] = (
    Step("1", "libraries", "144 functions; aclInit 0, then 100002", start.load),
    Step("2", "device", "0; without a context 107002", start.take_device),
    Step("3", "memory", "allocated and freed with 0", memory.allocate),
    Step("4", "copies", "0, and the bytes are equal", memory.copy_around),
    Step("5", "notify", "0 when it is recorded, 507046 when not", streams.notify),
    Step("6", "abort", "0 within 100 ms, and the stream can be used", streams.abort, decides="B13", limit=120),
    Step("7a", "copy too long", "refused, or told by the synchronize", streams.too_small),
    Step(
        "7b",
        "failed copy",
        "the query is silent, the synchronize tells",
        streams.freed,
        decides="B10",
        soft_allows=True,
    ),
    Step("8", "time-outs", "100 times 507046", streams.time_outs, decides="B11"),
    Step(
        "9",
        "registrations",
        "0, 0, 0, 0 and the same handle, 1; 0, then 1",
        memory.register,
        decides="B16",
        soft_allows=True,
    ),
    Step("10", "rank table", "ids and address of the device", start.own_place),
    Step("11", "transfers", "0, and the bytes are equal", together=links.move, limit=180),
    Step("12", "refusals", "4, and items 1 and 2 land; 4; 1; 1", together=links.refuse, decides="B3", soft_allows=True),
    Step(
        "13", "HOST of a peer", "4 over HCCS, 0 over RoCE", together=links.host_of_peer, decides="B5", soft_allows=True
    ),
    Step(
        "14",
        "unaligned region",
        "not 0 over HCCS, 0 over RoCE",
        together=links.unaligned,
        decides="B6",
        soft_allows=True,
    ),
    Step(
        "15",
        "two streams",
        "none complete before its bytes landed",
        together=order.two_streams,
        decides="B1",
        limit=600,
    ),
    Step("16", "shut gate", "the bytes behind it do not move", together=order.gate_holds, decides="B1"),
    Step("17", "2000 requests", "no call blocks", together=order.many_requests, decides="B9", limit=180),
    Step("18", "aborted get", "its memory stays as it is", together=order.abort_is_quiet, decides="B2", limit=180),
    Step("19", "two communicators", "0, and the second goes on", together=links.two_channels),
    Step("20", "two threads", "0 each time", together=races.two_threads, decides="B12", limit=120),
    Step("21", "clean up", "as much free memory as before", together=links.clean_up),
    Step("22", "unfolding", "on the host if HOST is asked for", together=expansion.unfolding, decides="B19", limit=180),
)
