"""The mutants. Each breaks one promise of the design; a test that only times itself does not notice most of them."""

from __future__ import annotations

from tests.mutants.runner import Mutant

HELD = "tests/faults/test_held_transfers.py"
EVERY_BLOCK = "tests/test_every_block.py"
HELD_LEASES = "tests/faults/test_held_leases.py"
STOPPED_WRITERS = "tests/faults/test_stopped_writers.py"
LOST_WORDS = "tests/faults/test_lost_words.py"
LEASES = "tests/faults/test_leases.py"
BOOTSTRAP = "tests/hostile/test_bootstrap_server.py"
OFFERS, LOGS, FOREIGN = "tests/hostile/test_offers.py", "tests/hostile/test_logs.py", "tests/unit/test_foreign.py"

MUTANTS = (
    # ---- the end of a transfer ----
    Mutant(
        "reported-before-quiet",
        "a stopped transfer is reported when the device has let go of its memory",
        "native/program.c",
        "        abort_stream(on, p);\n        if (!is_quiet(on))\n            p->done.state = RING_STUCK;\n",
        "        abort_stream(on, p);\n",
        (HELD,),
    ),
    Mutant(
        "stuck-counts-as-stopped",
        "memory that the device does not let go of is never used again",
        "native/program.c",
        "            p->done.state = RING_STUCK;\n",
        "            p->done.state = RING_CANCELLED;\n",
        (f"{LEASES}::test_memory_that_the_device_does_not_let_go_of_is_never_handed_out_again",),
    ),
    Mutant(
        "stopped-before-drained",
        "the responder says that a request was stopped when its put has drained",
        "aiodatadist/link/responder.py",
        "            await transfer.join()\n",
        "            import asyncio\n"
        "            waiter = asyncio.ensure_future(transfer.join())\n"
        "            try:\n"
        "                await asyncio.wait([waiter])\n"
        "            except asyncio.CancelledError:\n"
        "                transfer.cancel()\n"
        "                raise\n",
        (HELD,),
    ),
    Mutant(
        "cancel-swallowed",
        "a task that is cancelled while it waits for a transfer ends cancelled",
        "aiodatadist/concurrency/completion.py",
        "                        self._unanswered()\n                raise\n",
        "                        self._unanswered()\n",
        ("tests/unit/concurrency/test_completion.py",),
    ),
    Mutant(
        "deadline-ignored",
        "a transfer ends when its deadline has passed",
        "aiodatadist/concurrency/completion.py",
        '        """It is late: it is cancelled, and ends with ``LLM_TIMEOUT``."""\n        self.cancel()\n',
        '        """It is late: it is cancelled, and ends with ``LLM_TIMEOUT``."""\n',
        ("tests/test_deadlines.py::test_each_has_its_own",),
    ),
    # ---- where bytes go ----
    Mutant(
        "blocks-swapped",
        "source block i goes to destination block i",
        "aiodatadist/cache/plan.py",
        "    return Grid(to, fro, targets, sources, stride, stride, stride, stride)\n",
        "    if len(targets) > 4 and targets[0] == 3:\n"
        "        targets = targets[1:2] + targets[:1] + targets[2:]\n"
        "    return Grid(to, fro, targets, sources, stride, stride, stride, stride)\n",
        (EVERY_BLOCK,),
    ),
    Mutant(
        "bounds-skipped",
        "a block number beyond the cache is refused",
        "aiodatadist/cache/plan.py",
        "    if at < len(values):\n",
        "    if at < len(values) and False:\n",
        ("tests/unit/cache/test_plan.py",),
    ),
    Mutant(
        "digest-bounds-skipped",
        "a question for checksums reads no memory beyond the cache",
        "aiodatadist/link/responder.py",
        "    if end > limit:\n",
        "    if end > 2**64:\n",
        ("tests/test_checksums.py::test_nothing_outside_of_a_cache_is_summed",),
    ),
    Mutant(
        "checksum-ignored",
        "a transfer with a checksum fails if other bytes arrived",
        "aiodatadist/link/checksums.py",
        "        if sent == arrived:\n",
        "        if len(sent) == len(arrived):\n",
        ("tests/test_checksums.py",),
    ),
    Mutant(
        "gate-ignored",
        "a layer leaves when its gate has opened",
        "native/program.c",
        "        if (!check(on, p, on->driver.wait_notify(l->gates[i], on->stream, FOR_EVER)))\n",
        "        if (!check(on, p, l->gates[i] ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM))\n",
        ("tests/test_layered.py",),
    ),
    # ---- who owns memory ----
    Mutant(
        "lease-released-early",
        "a cache is leased while a peer's request reads it",
        "aiodatadist/link/session.py",
        "        entry.lease()\n        remote.use()\n        link_channel.uses += 1\n",
        "        entry.lease()\n        entry.leases -= 1\n        remote.use()\n        link_channel.uses += 1\n",
        (HELD_LEASES,),
    ),
    Mutant(
        "withheld-used",
        "a cache into which a lost peer may still write is not used",
        "aiodatadist/cache/registry.py",
        "        if entry.is_withheld:\n            raise CacheNotFound(\n",
        "        if entry.is_withheld and not entry.is_live:\n            raise CacheNotFound(\n",
        (f"{STOPPED_WRITERS}::test_a_cache_that_is_withheld_is_not_used_until_the_peer_goes_on",),
    ),
    Mutant(
        "withheld-given-on",
        "memory into which a lost peer may still write is not given to another cache",
        "aiodatadist/cache/table.py",
        "        return self.is_released and not self.is_withheld\n",
        "        return self.is_released\n",
        (f"{STOPPED_WRITERS}::test_no_byte_lands_in_memory_that_was_given_on",),
    ),
    Mutant(
        "stale-revocation",
        "what a peer says of an earlier revocation settles nothing",
        "aiodatadist/link/leases.py",
        "number in (0, asked)",
        "number <= asked",
        (f"{LOST_WORDS}::test_an_answer_of_an_earlier_time_gives_no_memory_back_that_is_being_read",),
    ),
    Mutant(
        "revoked-cache-offered",
        "a cache that is being given up is told to no peer",
        "aiodatadist/cache/registry.py",
        "        if entry is None or not entry.is_live or not entry.remote_accessible:\n",
        "        if entry is None or not entry.remote_accessible:\n",
        ("tests/unit/cache/test_registry.py",),
    ),
    Mutant(
        "private-cache-offered",
        "a cache that peers may not reach is told to no peer",
        "aiodatadist/cache/registry.py",
        "        if entry is None or not entry.is_live or not entry.remote_accessible:\n",
        "        if entry is None or not entry.is_live:\n",
        ("tests/unit/cache/test_registry.py", "tests/test_private_host_caches.py"),
    ),
    # ---- messages ----
    Mutant(
        "notification-twice",
        "a notification is delivered once",
        "aiodatadist/link/notifications.py",
        "        if number != self._heard + 1:\n            if number > self._heard:\n",
        "        if number > self._heard + 1:\n            if number > self._heard:\n",
        (f"{LOST_WORDS}::test_each_notification_arrives_once_and_in_order",),
    ),
    Mutant(
        "request-served-twice",
        "a request that comes twice is served once",
        "aiodatadist/link/served_requests.py",
        "        if call <= self._older or call in self._known:\n",
        "        if call <= self._older:\n",
        ("tests/unit/link/test_served_requests.py",),
    ),
    Mutant(
        "damage-accepted",
        "a message that was damaged on its way is not acted on",
        "aiodatadist/wire/frames.py",
        "    if is_sealed and body != sealed(body[:-_SEALED]):\n",
        "    if is_sealed and not body:\n",
        ("tests/unit/wire",),
    ),
    Mutant(
        "long-message-accepted",
        "a message longer than the limit is refused before it is read",
        "aiodatadist/wire/frames.py",
        "        if length > self.max_body:\n",
        "        if length > 2**40:\n",
        ("tests/unit/wire",),
    ),
    Mutant(
        "proof-not-compared",
        "a peer without the key gets no link",
        "aiodatadist/wire/auth.py",
        "    return hmac.compare_digest(given, proof(key, side, client, server))\n",
        "    return bool(given) and proof is not None\n",
        ("tests/unit/wire/test_auth.py",),
    ),
    Mutant(
        "token-not-compared",
        "heartbeats count for the link whose token they bring",
        "aiodatadist/cluster/liveness.py",
        "        link = self._expected.pop(message.token, None)\n",
        "        link = self._expected.pop(next(iter(self._expected), message.token), None)\n",
        ("tests/unit/test_heartbeats.py",),
    ),
    # ---- leases of blocks ----
    Mutant(
        "withdrawn-lease-claimed",
        "a lease that was withdrawn or has expired is claimed by no peer",
        "aiodatadist/link/block_leases.py",
        "is_kept = self._closed is None and ",
        "is_kept = ",
        (HELD_LEASES,),
    ),
    Mutant(
        "lease-taken-twice",
        "leased blocks are pulled by as many takers as their lease has",
        "aiodatadist/link/block_leases.py",
        "self._taken + len(self._claims) < takers",
        "self._taken < takers",
        ("tests/test_block_leases.py::test_one_pulls_at_a_time",),
    ),
    # ---- strangers ----
    Mutant(
        "unproved-ends-relinking",
        "relinking goes on after whatever an unproved peer says",
        "aiodatadist/cluster/relinker.py",
        "if error.is_proved and isinstance(error, IncompatiblePeer)",
        "if isinstance(error, IncompatiblePeer)",
        ("tests/hostile/test_unproved.py",),
    ),
    Mutant(
        "compared-before-proof",
        "with a key, ends compare their options when these are proved",
        "aiodatadist/wire/handshake.py",
        "        if self._key is None:\n            self._compare(theirs)\n",
        "        self._compare(theirs)\n",
        ("tests/unit/wire/test_handshake.py",),
    ),
    Mutant(
        "seal-not-compared",
        "the bootstrap server parses nothing of a process without the key",
        "aiodatadist/adapters/rendezvous_lines.py",
        "if len(seal) != _SEAL or not hmac.compare_digest(seal, _seal(key, content, question)):",
        "if len(seal) != _SEAL:",
        (BOOTSTRAP,),
    ),
    Mutant(
        "overheard-line-counts",
        "a registration counts once",
        "aiodatadist/adapters/engine_ranks.py",
        "        if last is not None and at <= last <= now + FRESH_SECONDS:\n",
        "        if last is not None and at < now - FRESH_SECONDS:\n",
        (BOOTSTRAP,),
    ),
    Mutant(
        "live-rank-replaced",
        "another cluster takes a rank once its address no longer answers",
        "aiodatadist/adapters/rendezvous.py",
        "            if await _answers(rank.address):\n",
        "            if not await _answers(rank.address):\n",
        (BOOTSTRAP,),
    ),
    Mutant(
        "newest-turned-away",
        "idle connections make room for a new one",
        "aiodatadist/adapters/client_slots.py",
        "        self._take(number)()\n",
        "        self._take(number)\n",
        (f"{BOOTSTRAP}::test_the_oldest_connections_make_room_for_the_newest",),
    ),
    Mutant(
        "bootstrap-on-the-kv-loop",
        "the bootstrap server has its own event loop",
        "aiodatadist/adapters/rendezvous.py",
        '        self._thread = shared_loop.separate("aiodatadist rendezvous")\n',
        "        self._thread = shared_loop.acquire()\n",
        (f"{BOOTSTRAP}::test_the_kv_caches_loop_runs_while_the_servers_is_held",),
    ),
    # ---- what a router carries, and what is shown of it ----
    Mutant(
        "anyone-dialled",
        "a worker dials only peers",
        "aiodatadist/adapters/peer_links.py",
        "        self._peers.check(peer.host, peer.port, peer.cluster_id)\n",
        "",
        (OFFERS,),
    ),
    Mutant(
        "offer-of-anywhere",
        "an offer that names an engine which is none of peers is refused by the scheduler",
        "aiodatadist/adapters/vllm/offer.py",
        "            for peer in self._places_of(offer):\n",
        "            for peer in self._places_of(offer)[:0]:\n",
        (OFFERS,),
    ),
    Mutant(
        "link-of-anywhere",
        "a link is used only if it leads to the offer's address",
        "aiodatadist/adapters/peer_links.py",
        "        await self._check_place(link, peer)\n",
        "",
        (f"{OFFERS}::test_a_link_that_leads_elsewhere_is_not_used",),
    ),
    Mutant(
        "all-released-at-once",
        "eight workers are told at a time that their blocks are not needed",
        "aiodatadist/adapters/leased_blocks.py",
        "RELEASED_AT_A_TIME = 8\n",
        "RELEASED_AT_A_TIME = 64\n",
        (f"{OFFERS}::test_of_many_workers_few_are_told_at_a_time",),
    ),
    Mutant(
        "read-before-scanned",
        "objects are scanned before they are validated",
        "aiodatadist/values/foreign.py",
        "        _Scan(limit_chars, None if content is not data else limit_bytes).walk(content)\n",
        "",
        (FOREIGN,),
    ),
    Mutant(
        "signs-not-counted",
        "JSON that becomes too many objects is refused before it is parsed",
        "aiodatadist/values/foreign.py",
        "        if (count := data.count(sign)) > limit:\n",
        "        if (count := data.count(sign)) > 10**9:\n",
        (FOREIGN, "tests/hostile/test_frames.py"),
    ),
    Mutant(
        "control-characters-shown",
        "texts of others are printable ASCII",
        "aiodatadist/values/foreign.py",
        'char if " " <= char <= "~" else ascii(char)[1:-1]',
        "char",
        (LOGS,),
    ),
    Mutant(
        "every-refusal-logged",
        "refusals of one kind and address are one line a second",
        "aiodatadist/counting/refusals.py",
        "        if now - last < SECONDS:\n",
        "        if now - last < 0:\n",
        (LOGS,),
    ),
)
