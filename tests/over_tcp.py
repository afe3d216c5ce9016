"""The suites that run over ``transport="tcp"`` as well: ``python -m tests.over_tcp`` prints their files for ``make tcp``.

``AIODATADIST_TEST_TRANSPORT=tcp`` gives the clusters of tests that transport, unless a test chooses another one. Holds and
faults of ``HcclBatchGet`` and ``HcclBatchPut`` are then those of programs over TCP (``aiodatadist.testing.soft_hold``).
"""

from __future__ import annotations

import sys

import pytest

from aiodatadist._testing.faults import transport_of_run

FILES = (
    "tests/conformance", "tests/faults", "tests/model", "tests/test_after_linking.py", "tests/test_block_leases.py",
    "tests/test_checksums.py", "tests/test_deadlines.py", "tests/test_layered.py", "tests/test_layered_checksums.py",
    "tests/test_layered_relink.py", "tests/test_notifications.py", "tests/test_priorities.py", "tests/test_pull.py",
    "tests/test_push.py", "tests/test_relink.py", "tests/test_request_response.py", "tests/test_symmetric_links.py",
)  # fmt: skip
"""The tests that ``make tcp`` runs; ``make nightly`` includes it."""

SHORT = (
    "tests/test_pull.py", "tests/test_push.py", "tests/test_deadlines.py", "tests/test_priorities.py",
    "tests/test_request_response.py", "tests/test_symmetric_links.py",
)  # fmt: skip
"""What a change must pass: at most 20 s of processor time."""

FURTHER = "HCCL's calls fail while a further channel is opened: over TCP a link has one channel, which is enough"
LETS_GO = "the device does not let go of memory: over TCP a stopped transfer ends at once, and memory is never withheld"
PASSES = "what stands holds up what was submitted later: over TCP it does not, and test_net_order.c has the order"
SOFTNPU = "looks at streams, tasks or calls of softnpu: over TCP there are none"
BUSY = "moves 75 MiB in a second, which the loopback of a busy machine does not"
ITS_OWN = "chooses HCCL itself, whose calls a run over TCP does not hold"
JUMPS = "its clock jumps while the data connections are being made, which C and the kernel do in real time"
TOGETHER = "over TCP the programs of a link are under way together: others land while one is held, or fails"
SUSPECTS = "quotes a device that suspects the peer: over TCP a lost connection is named"
BY_HAND = "the test is one end of the handshake by hand, and speaks of HCCL there"

LEFT_OUT = {
    "tests/conformance/test_communicators.py": {
        "TestPreparing::test_each_attempt_at_a_link_has_a_communicator_of_its_own": SOFTNPU,
    },
    "tests/conformance/test_examples.py": {
        "test_14_a_timeout_concerns_its_transfer_only_and_nothing_stale_is_handed_out": SOFTNPU,
    },
    "tests/conformance/test_host_over_hccs.py": {
        "": "is about links over HCCS",
    },
    "tests/conformance/test_statuses.py": {
        "test_llm_suspect_remote_error_on_a_link_costs_the_link_whose_failure_holds_the_number": SUSPECTS,
    },
    "tests/faults/test_cancellation_whole.py": {
        "test_a_pull_that_needs_a_further_channel": FURTHER,
    },
    "tests/faults/test_engine.py": {
        "test_a_cache_is_not_given_up_while_a_link_is_being_made": BY_HAND,
        "test_a_stranger_with_a_peers_id_does_not_end_the_peers_link": BY_HAND,
        "test_clients_that_die_while_they_link_hold_up_no_other": BY_HAND,
    },
    "tests/faults/test_engine_survives.py": {
        "test_a_link_outlives_the_time_that_a_handshake_has": JUMPS,
        "test_a_requested_pull_does_not_end_before_its_owner_stopped_writing": LETS_GO,
    },
    "tests/faults/test_finalized_under_a_copy.py": {
        "": ITS_OWN,
    },
    "tests/faults/test_full_memory.py": {
        "": "is about memory that softnpu shares, and counts descriptors of its links",
    },
    "tests/faults/test_held_transfers.py": {
        "test_end_of_a_stopped_transfer_is_reported_when_the_device_has_let_go": LETS_GO,
    },
    "tests/faults/test_idle_links.py": {
        "test_links_on_a_busy_machine_are_not_lost": BUSY,
    },
    "tests/faults/test_killed_whole.py": {
        "test_a_member_killed_while_the_others_meet": "a rank table links by HCCL only",
        "test_a_peer_killed_while[half_a_request]": "stops the peer in a call of HCCL's",
    },
    "tests/faults/test_leases.py": {
        "test_memory_that_the_device_does_not_let_go_of_is_never_handed_out_again": LETS_GO,
    },
    "tests/faults/test_no_buffers.py": {
        "": "counts the sockets of a link by HCCL",
    },
    "tests/faults/test_no_threads.py": {
        "test_a_cluster_outlives_links_and_memory_that_end_meanwhile": "a stream over TCP starts no thread",
    },
    "tests/faults/test_relinking.py": {
        "test_a_link_that_is_being_made_is_seen_until_nothing_is_left_of_it": SOFTNPU,
    },
    "tests/faults/test_slow_aborts.py": {
        "": LETS_GO,
    },
    "tests/faults/test_stopped_writers.py": {
        "": LETS_GO,
    },
    "tests/faults/test_timeouts.py": {
        "test_patience_that_ends_together_stops_nothing": TOGETHER,
    },
    "tests/test_after_linking.py": {
        "test_a_further_channel_that_cannot_be_opened_fails_what_needs_it_and_no_more": FURTHER,
    },
    "tests/test_block_leases.py": {
        "test_blocks_that_landed_before_a_pull_failed_are_told": TOGETHER,
    },
    "tests/test_checksums.py": {
        "test_all_damaged_blocks_are_named_and_each_once": SOFTNPU,
        "test_what_was_damaged_of_kept_blocks_is_not_landed": TOGETHER,
    },
    "tests/test_priorities.py": {
        "test_a_link_has_a_stream_for_what_is_critical_when_it_needs_one": SOFTNPU,
        "test_a_link_with_many_transfers_does_not_starve_another": PASSES,
        "test_equals_keep_their_order": PASSES,
        "test_the_more_urgent_does_not_wait_in_the_line_of_others": PASSES,
        "test_the_more_urgent_passes_and_all_bytes_arrive": SOFTNPU,
        "test_the_passed_one_can_be_cancelled_and_the_critical_one_ends_well": SOFTNPU,
    },
}
"""Tests of each file that say nothing over TCP, and why; without a name, all of the file."""


def mark(items: list[pytest.Item]) -> None:
    """Skip those tests in a run over TCP."""
    if transport_of_run() != "tcp":
        return
    for item in items:
        file, _, test = item.nodeid.partition("::")
        left_out = LEFT_OUT.get(file, {})
        if reason := left_out.get("") or left_out.get(test) or left_out.get(test.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=f"over TCP: {reason}"))


if __name__ == "__main__":
    print(*(SHORT if "--short" in sys.argv else FILES))
