/* How much is on the device at a time, and what becomes of limits and cancellations when the queue is full or a call hangs. */
#include "ring_kit.h"

enum { QUEUE_DEPTH = 510, GRACE_MS = 40, MOST = 386 };       /* of a one-sided connection; HCCL blocks its caller behind that */

static ring *behind_a_shut_gate(script *s, int op, int64_t timeout_ms)
{
    fake_reset();
    fake_hold();
    fake.depth = QUEUE_DEPTH;
    ring *r = open_ring(4, 1 << 20, 0, GRACE_MS);
    *s = (script){ 0 };
    script_move(s, op, ACL_MEMCPY_DEVICE_TO_DEVICE, 1, SCRIPT_RANGES, 16);
    CHECK_EQ(submit(r, 1, s, timeout_ms), RING_QUEUED);
    fake_reached(op == RING_GET ? GET : op == RING_PUT ? PUT : COPY_ASYNC, 2);
    return r;
}

TEST(test_cancellation_is_seen_while_nothing_drains)
{
    static const int ops[] = { RING_GET, RING_PUT, RING_COPY };
    for (int k = 0; k < 3; k++) {
        script s;
        ring *r = behind_a_shut_gate(&s, ops[k], PATIENCE_MS);
        CHECK_EQ(ring_cancel(r, 1), 1);
        ring_completion done = next_completion(r);
        CHECK_EQ(done.state, RING_CANCELLED);
        CHECK(done.finished_ns - done.started_ns < 10000000000);    /* HCCL's own limit is 120 s */
        CHECK_EQ(fake_waiting(), 0);
        close_ring(r);
    }
}

TEST(test_time_limit_is_kept_while_nothing_drains)
{
    script s;
    ring *r = behind_a_shut_gate(&s, RING_PUT, 50);
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    CHECK(done.ranges < MOST);
    CHECK(fake.most <= MOST);
    close_ring(r);
}

TEST(test_requests_that_are_not_done_are_bounded)
{
    static const int ops[] = { RING_GET, RING_PUT, RING_COPY }, calls[] = { GET, PUT, COPY_ASYNC };
    for (int k = 0; k < 3; k++) {
        script s;
        ring *r = behind_a_shut_gate(&s, ops[k], PATIENCE_MS);
        for (uint64_t before = 0, now = 1; now != before; ) {   /* until the device has done it all, a piece at a time */
            before = now;
            fake_let(1);
            now = fake.head;
        }
        fake_let_all();
        CHECK_DONE(next_completion(r), 1, RING_DONE, 16 * SCRIPT_RANGES, SCRIPT_RANGES);
        uint64_t calls_made = fake_calls(calls[k]);
        CHECK(fake.most <= MOST);
        CHECK(ops[k] == RING_COPY || calls_made <= SCRIPT_RANGES / 192 + 1);
        close_ring(r);
    }
}

TEST(test_waiting_leaves_no_flood_of_error_records)
{
    fake_event never = { 1, 0 };
    for (int behind_event = 0; behind_event < 2; behind_event++) {
        fake_reset();
        fake.hold = !behind_event;
        ring *r = open_ring(4, 1000, 0, GRACE_MS);
        script s = { 0 };
        if (behind_event)
            script_event(&s, RING_WAIT, &never);
        script_copy(&s, 1, 2, 10);
        CHECK_EQ(submit(r, 1, &s, 400), RING_QUEUED);
        CHECK_EQ(next_completion(r).state, RING_TIMED_OUT);
        CHECK(fake.records <= !behind_event);               /* what is known to wait costs none, what stands still one */
        CHECK(fake_calls(QUERY) < 200);                     /* and is not asked for all the time */
        close_ring(r);
    }
}

/* ---- a call that does not return ---- */

static ring *in_a_call_that_hangs(script *s, int call, int64_t timeout_ms)
{
    fake_reset();
    fake_hold();
    fake_stop(call);
    ring *r = open_aborting_ring(4, 1 << 20, GRACE_MS, GRACE_MS);
    *s = (script){ 0 };
    script_move(s, RING_GET, 0, 1, 10, 16);
    CHECK_EQ(submit(r, 1, s, timeout_ms), RING_QUEUED);
    fake_reached(call, 1);
    return r;
}

static void await_overdue(ring *r, uint64_t id)
{
    int64_t left_ms;
    uint64_t overdue;
    while (!(overdue = ring_overdue(r, &left_ms))) {
        CHECK(left_ms > 0 && left_ms <= PATIENCE_MS + 3 * GRACE_MS + 1);
        nanosleep(&(struct timespec){ left_ms / 1000, left_ms % 1000 * 1000000 }, NULL);
    }
    CHECK_EQ(overdue, id);
}

/* What was queued behind it was not begun, and the device is left alone. */
static void is_lost(ring *r, const script *s)
{
    CHECK_DONE(next_completion(r), 2, RING_REFUSED, 0, 0);
    CHECK(!is_readable(r));                                 /* its memory is not let go of */
    CHECK_EQ(ring_close(r, PATIENCE_MS), 1);
    fake_go();
    fake_let_all();
    CHECK_EQ(next_completion(r).id, 1);                     /* now the call has returned, and the stream is quiet */
    CHECK_EQ(submit(r, 3, s, PATIENCE_MS), RING_CLOSED);
    leave_stuck(r);
    CHECK_EQ(ring_close(r, -1), 0);
    CHECK_EQ(fake.live_streams, 0);
}

TEST(test_limit_of_a_program_is_told_although_a_call_hangs)
{
    static const int calls[] = { GET, SYNC_STREAM };
    for (int k = 0; k < 2; k++) {
        script s;
        ring *r = in_a_call_that_hangs(&s, calls[k], 50);
        CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
        await_overdue(r, 1);
        is_lost(r, &s);
    }
}

TEST(test_cancellation_is_told_although_a_call_hangs)
{
    script s;
    int64_t left_ms;
    ring *r = in_a_call_that_hangs(&s, GET, PATIENCE_MS);
    CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(ring_overdue(r, &left_ms), 0);
    CHECK(left_ms > PATIENCE_MS / 2);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_EQ(ring_overdue(r, &left_ms), 0);
    CHECK(left_ms <= 4 * GRACE_MS + 1);
    await_overdue(r, 1);
    is_lost(r, &s);
}

TEST(test_worker_has_a_chance_when_its_process_was_stopped)
{
    script s;
    int64_t left_ms;
    ring *r = in_a_call_that_hangs(&s, GET, 50);
    nanosleep(&(struct timespec){ .tv_nsec = (50 + 5 * GRACE_MS) * 1000000 }, NULL);
    CHECK_EQ(ring_overdue(r, &left_ms), 0);                 /* as if it had gone on just now */
    CHECK(left_ms > 0 && left_ms <= GRACE_MS + 1);
    fake_go();
    fake_let_all();
    CHECK(next_completion(r).state != RING_STUCK);
    close_ring(r);
}

TEST(test_nothing_is_overdue_on_an_idle_ring)
{
    int64_t left_ms = 0;
    fake_reset();
    ring *r = open_ring(4, 1000, 0, GRACE_MS);
    CHECK_EQ(ring_overdue(r, &left_ms), 0);
    CHECK_EQ(left_ms, -1);
    close_ring(r);
}

/* ---- aborts ---- */

TEST(test_abort_has_its_own_time)
{
    for (int takes_too_long = 0; takes_too_long < 2; takes_too_long++) {
        script s = { 0 };
        int64_t left_ms;
        fake_reset();
        fake_hold();
        fake_stop(ABORT);
        ring *r = open_aborting_ring(4, 1000, GRACE_MS, takes_too_long ? GRACE_MS : PATIENCE_MS);
        script_copy(&s, 1, 2, 10);
        CHECK_EQ(submit(r, 1, &s, 20), RING_QUEUED);
        CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
        fake_reached(ABORT, 1);
        if (takes_too_long) {
            await_overdue(r, 1);
            is_lost(r, &s);
            continue;
        }
        nanosleep(&(struct timespec){ .tv_nsec = 5 * GRACE_MS * 1000000 }, NULL);   /* longer than the grace, and its own */
        CHECK_EQ(ring_overdue(r, &left_ms), 0);
        CHECK(left_ms > PATIENCE_MS / 2);
        fake_go();
        fake_let_all();
        CHECK_DONE(next_completion(r), 1, RING_TIMED_OUT, 0, 2);
        CHECK_DONE(next_completion(r), 2, RING_DONE, 20, 2);
        close_ring(r);
    }
}

TEST(test_code_of_a_refused_abort_is_told)
{
    for (int lets_go = 0; lets_go < 2; lets_go++) {
        script s = { 0 };
        fake_reset();
        fake_hold();
        fake_fail(ABORT, 0, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
        ring *r = open_ring(4, 1000, 0, lets_go ? PATIENCE_MS : GRACE_MS);
        script_copy(&s, 1, 2, 10);
        CHECK_EQ(submit(r, 1, &s, 20), RING_QUEUED);
        fake_reached(ABORT, 1);
        if (lets_go)
            fake_let_all();                                 /* by itself */
        ring_completion done = next_completion(r);
        CHECK_DONE(done, 1, lets_go ? RING_TIMED_OUT : RING_STUCK, 0, 2);
        CHECK_EQ(done.abort_code, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
        CHECK(!strcmp(done.message, "the fake was told to fail"));
        lets_go ? close_ring(r) : leave_stuck(r);
    }
}

int main(void)
{
    RUN(test_cancellation_is_seen_while_nothing_drains);
    RUN(test_time_limit_is_kept_while_nothing_drains);
    RUN(test_requests_that_are_not_done_are_bounded);
    RUN(test_waiting_leaves_no_flood_of_error_records);
    RUN(test_limit_of_a_program_is_told_although_a_call_hangs);
    RUN(test_cancellation_is_told_although_a_call_hangs);
    RUN(test_worker_has_a_chance_when_its_process_was_stopped);
    RUN(test_nothing_is_overdue_on_an_idle_ring);
    RUN(test_abort_has_its_own_time);
    RUN(test_code_of_a_refused_abort_is_told);
    return check_done();
}
