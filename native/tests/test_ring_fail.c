/* Failures: of every driver function at any call, of work that was accepted, of time, and of a device that holds on. */
#include "ring_kit.h"

enum { GRACE_MS = 250, CODE = ACL_ERROR_RT_DRV_INTERNAL_ERROR };

/* Two windows of copies, descriptors both ways, host copies behind them, events: every call a program can make. */
static fake_event past, after;
static void write_long_script(script *s, uint64_t id)
{
    past = (fake_event){ 1, 1 };
    after = (fake_event){ 0, 0 };
    *s = (script){ 0 };
    script_event(s, RING_WAIT, &past);
    script_copy(s, id, 6, 50);
    script_move(s, RING_GET, 0, id, 4, 50);
    script_host_copy(s, id, 2, 50);
    script_move(s, RING_PUT, 0, id, 4, 50);
    script_event(s, RING_RECORD, &after);
}

/* The same without what needs the worker. */
static void write_inline_script(script *s, uint64_t id)
{
    *s = (script){ 0 };
    script_copy(s, id, 2, 50);
    script_move(s, RING_GET, 0, id, 2, 50);
    script_move(s, RING_PUT, 0, id, 2, 50);
    script_event(s, RING_RECORD, &after);
}

static ring_completion run_program(ring *r, uint64_t id, const script *s)
{
    ring_completion done;
    int status = ring_submit(r, id, s->steps, s->count, PATIENCE_MS, &done);
    CHECK(status == RING_RAN || status == RING_QUEUED);
    return status == RING_QUEUED ? next_completion(r) : done;
}

static void check_failed(int call, ring_completion done)
{
    CHECK_EQ(done.id, 1);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.origin, call == GET || call == PUT ? RING_HCCL : call == SYNC_STREAM || call == SYNC_EVENT ? RING_WORK : RING_ACL);
    CHECK_EQ(done.code, CODE);
    CHECK(!strcmp(done.message, "the fake was told to fail"));
    CHECK(done.step <= 6);
    CHECK(done.bytes <= fake.landed[1]);
    CHECK_EQ(done.ranges, fake.taken[1]);
    CHECK_EQ(fake_waiting(), 0);
}

/* The n-th call of this function fails, for every n that a program reaches; how many those are. */
static uint64_t fail_each_call_of(int call, uint64_t inline_bytes)
{
    for (uint64_t n = 1; ; n++) {
        script s, next = { 0 };
        fake_reset();
        ring *r = open_ring(4, inline_bytes ? 10000 : 100, inline_bytes, PATIENCE_MS);
        (inline_bytes ? write_inline_script : write_long_script)(&s, 1);
        uint64_t before = fake_calls(call);
        fake_fail(call, before + n, CODE);
        ring_completion done = run_program(r, 1, &s);
        bool struck = fake_calls(call) >= before + n;
        int failures = check_failures;
        if (struck)
            check_failed(call, done);
        else
            CHECK_EQ(done.state, RING_DONE);
        fake_fail(call, 0, 0);
        script_copy(&next, 2, 6, 50);
        CHECK_DONE(run_program(r, 2, &next), 2, RING_DONE, 300, 6);     /* the ring is as good as ever */
        CHECK(!is_readable(r));
        close_ring(r);
        if (check_failures > failures)
            printf("at call %d of function %d\n", (int)n, call);
        if (!struck)
            return n - 1;
    }
}

TEST(test_every_call_on_the_worker_may_fail_at_any_time)
{
    CHECK_EQ(fail_each_call_of(SET_CONTEXT, 0), 1);         /* once, when the thread is new */
    CHECK_EQ(fail_each_call_of(WAIT_EVENT, 0), 1);
    CHECK_EQ(fail_each_call_of(COPY_ASYNC, 0), 6);
    CHECK_EQ(fail_each_call_of(GET, 0), 2);
    CHECK_EQ(fail_each_call_of(PUT, 0), 2);
    CHECK_EQ(fail_each_call_of(RECORD, 0), 6);              /* a fence between two windows, and the step */
    CHECK_EQ(fail_each_call_of(SYNC_EVENT, 0), 3);
    CHECK_EQ(fail_each_call_of(QUERY_EVENT, 0), 2);         /* before it is waited for, too */
    CHECK_EQ(fail_each_call_of(SYNC_STREAM, 0), 2);         /* before the host copies, and at the end */
}

TEST(test_every_call_of_an_inline_run_may_fail_at_any_time)
{
    CHECK_EQ(fail_each_call_of(COPY_ASYNC, 1000), 2);
    CHECK_EQ(fail_each_call_of(GET, 1000), 1);
    CHECK_EQ(fail_each_call_of(PUT, 1000), 1);
    CHECK_EQ(fail_each_call_of(RECORD, 1000), 1);
    CHECK_EQ(fail_each_call_of(QUERY, 1000), 1);
    CHECK_EQ(fail_each_call_of(SYNC_STREAM, 1000), 1);
}

TEST(test_ring_does_not_open_without_its_stream_and_events)
{
    static const struct { int call; uint64_t n; } faults[] = { { SET_CONTEXT, 1 }, { CREATE_STREAM, 1 }, { CREATE_EVENT, 1 }, { CREATE_EVENT, 2 } };
    ring_options options = { 4, 100, 0, 100, 0, 0, 0, 0, 0, 0 };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        ring *r = NULL;
        fake_reset();
        fake_context = ELSEWHERE;
        fake_fail(faults[i].call, faults[i].n, CODE);
        CHECK_EQ(ring_open(&fake_driver, HOME, &options, &r), CODE);
        CHECK(r == NULL);
        CHECK(fake_words != NULL);                          /* the caller can still read them */
        CHECK(fake_context == ELSEWHERE);
        CHECK_EQ(fake.live_streams + fake.live_events, 0);
    }
}

TEST(test_failed_work_is_found_after_sixteen_windows_at_the_latest)
{
    fake_reset();
    fake.bad_copy = 20;
    ring *r = open_ring(4, 100, 0, PATIENCE_MS);
    script s = { 0 };
    script_copy(&s, 1, 100, 100);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_FAILED, 1600, 32);             /* the stream was synchronized twice */
    CHECK_EQ(done.code, FAKE_EXEC_CODE);
    CHECK(!strcmp(done.message, "a piece of work failed"));
    CHECK_EQ(fake_calls(ABORT), 0);
    close_ring(r);
}

TEST(test_failed_work_of_a_small_program_is_found_at_the_end)
{
    for (uint64_t limit = 0; limit <= 1000; limit += 1000) {
        fake_reset();
        fake.bad_copy = 1;
        ring *r = open_ring(4, 1000, limit, PATIENCE_MS);
        script s = { 0 };
        script_copy(&s, 1, 3, 10);
        ring_completion done = run_program(r, 1, &s);
        CHECK_DONE(done, 1, RING_FAILED, 0, 3);
        CHECK_EQ(done.origin, RING_WORK);
        CHECK_EQ(done.code, FAKE_EXEC_CODE);
        close_ring(r);
    }
}

static void check_message(ring *r, uint64_t id, int code, const char *words)
{
    ring_completion done = next_completion(r);
    CHECK_EQ(done.id, id);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.code, code);
    CHECK(!strcmp(done.message, words));
    if (strcmp(done.message, words))
        printf("it says: %s\n", done.message);
}

TEST(test_only_the_first_failure_is_told_and_in_its_own_words)
{
    fake_reset();
    fake_hold();
    fake.bad_copy = 2;
    ring *r = open_ring(4, 1000, 100, GRACE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(QUERY, 2);                                 /* it stands still */
    fake_let(3);
    check_message(r, 1, FAKE_EXEC_CODE, "a piece of work failed");
    fake_fail(COPY_ASYNC, fake_calls(COPY_ASYNC) + 2, CODE);    /* the first copy stays, until an abort */
    fake_fail(QUERY, fake_calls(QUERY) + 1, CODE + 1);
    CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
    check_message(r, 2, CODE, "the fake was told to fail");
    CHECK_EQ(fake_calls(ABORT), 1);
    script_event(&s, RING_WAIT, &(fake_event){ 1, 1 });     /* for the worker */
    fake_fail(COPY_ASYNC, fake_calls(COPY_ASYNC) + 1, CODE);
    CHECK_EQ(submit(r, 3, &s, PATIENCE_MS), RING_QUEUED);
    check_message(r, 3, CODE, "the fake was told to fail");
    close_ring(r);
}

TEST(test_failure_does_not_complete_before_the_rest_has_landed)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 0, PATIENCE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    fake_fail(COPY_ASYNC, 3, CODE);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK(!is_readable(r));
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_FAILED, 0, 2);
    CHECK_EQ(fake.landed[1], 20);
    close_ring(r);
}

TEST(test_program_that_misses_its_time_limit_is_aborted)
{
    for (uint64_t limit = 0; limit <= 1000; limit += 1000) {
        fake_reset();
        fake_hold();
        ring *r = open_ring(4, 1000, limit, PATIENCE_MS);
        script s = { 0 };
        script_copy(&s, 1, 3, 10);
        CHECK_EQ(submit(r, 1, &s, 30), RING_QUEUED);
        ring_completion done = next_completion(r);
        CHECK_DONE(done, 1, RING_TIMED_OUT, 0, 3);
        CHECK_EQ(done.origin, RING_ACL);
        CHECK_EQ(done.code, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        CHECK(done.finished_ns - done.started_ns >= 30000000);
        CHECK_EQ(fake_calls(ABORT), 1);
        CHECK_EQ(fake_waiting(), 0);
        fake_let_all();
        CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), limit ? RING_RAN : RING_QUEUED);
        if (!limit)
            CHECK_DONE(next_completion(r), 2, RING_DONE, 30, 3);
        close_ring(r);
    }
}

TEST(test_time_limit_holds_for_a_program_that_makes_progress)
{
    fake_reset();
    fake.slow_ms = 2;
    ring *r = open_ring(4, 100, 0, PATIENCE_MS);
    script s = { 0 };
    script_host_copy(&s, 1, 1000, 100);                     /* two seconds */
    CHECK_EQ(submit(r, 1, &s, 20), RING_QUEUED);
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    CHECK(done.ranges < 500 && done.bytes + 200 >= done.ranges * 100);
    close_ring(r);
}

static void check_stuck(ring *r, const script *s)
{
    uint64_t calls[FAKE_CALLS];
    memcpy(calls, fake.calls, sizeof calls);
    CHECK_EQ(submit(r, 9, s, PATIENCE_MS), RING_QUEUED);
    CHECK_DONE(next_completion(r), 9, RING_REFUSED, 0, 0);
    leave_stuck(r);
    CHECK_EQ(ring_close(r, 1000), 1);
    CHECK(!memcmp(calls, fake.calls, sizeof calls));        /* the device is left alone */
    CHECK_EQ(fake.live_streams, 1);
}

static void *close_without_limit(void *r)
{
    return (void *)(intptr_t)ring_close(r, -1);
}

TEST(test_device_that_does_not_let_go_is_stuck_and_all_that_follows_with_it)
{
    static const int states[] = { RING_TIMED_OUT, RING_CANCELLED, RING_FAILED };
    for (int i = 0; i < 3; i++) {
        fake_reset();
        fake_hold();
        fake.deaf = true;
        ring *r = open_ring(8, 1000, 1000, GRACE_MS);
        script s = { 0 };
        script_copy(&s, 1, 4, 10);
        if (states[i] == RING_FAILED)
            fake_fail(COPY_ASYNC, 4, CODE);
        CHECK_EQ(submit(r, 1, &s, states[i] == RING_TIMED_OUT ? 30 : PATIENCE_MS), RING_QUEUED);
        CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
        CHECK_EQ(submit(r, 3, &s, PATIENCE_MS), RING_QUEUED);
        if (states[i] == RING_CANCELLED)
            CHECK_EQ(ring_cancel(r, 1), 1);
        CHECK_DONE(next_completion(r), 1, RING_STUCK, 0, states[i] == RING_FAILED ? 3 : 4);
        CHECK_DONE(next_completion(r), 2, RING_REFUSED, 0, 0);
        CHECK_DONE(next_completion(r), 3, RING_REFUSED, 0, 0);
        CHECK_EQ(fake_calls(ABORT), 1);
        check_stuck(r, &s);
        uint64_t waits = fake_calls(SYNC_STREAM);
        pthread_t closer;
        pthread_create(&closer, NULL, close_without_limit, r);
        fake_reached(SYNC_STREAM, waits + 1);
        CHECK_EQ(fake.live_streams, 1);                     /* not before the device has let go */
        fake_let_all();
        void *left;
        pthread_join(closer, &left);
        CHECK(!left);
        CHECK_EQ(fake.live_streams + fake.live_events, 0);
    }
}

/* The process was stopped: the time of its wait ran, and the device did not. */
TEST(test_device_that_was_stopped_with_the_process_has_time_to_let_go)
{
    fake_reset();
    fake_hold();
    fake_fail(SYNC_STREAM, 2, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);   /* the first one behind the abort */
    ring *r = open_ring(8, 1000, 0, GRACE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_DONE(next_completion(r), 1, RING_CANCELLED, 0, 3);
    CHECK_EQ(fake_calls(SYNC_STREAM), 3);
    close_ring(r);
}

TEST(test_device_that_never_says_it_is_quiet_is_stuck)
{
    fake_reset();
    ring *r = open_ring(8, 1000, 0, GRACE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    fake_fail(SYNC_STREAM, 0, CODE);                        /* lost: an error is no proof that nothing runs */
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_STUCK, 0, 3);
    CHECK_EQ(done.code, CODE);                              /* and yet one can read why */
    check_stuck(r, &s);
    CHECK_EQ(ring_close(r, -1), 1);                         /* it does not wait for what can never be known */
    CHECK_EQ(fake.live_streams, 1);
}

TEST(test_abort_that_is_refused_leaves_the_device_stuck)
{
    fake_reset();
    fake_hold();
    fake_fail(ABORT, 0, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    ring *r = open_ring(8, 1000, 0, GRACE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    CHECK_EQ(submit(r, 1, &s, 20), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_STUCK, 0, 3);
    check_stuck(r, &s);
}

TEST(test_thread_that_cannot_reach_the_device_fails_what_it_did_not_begin)
{
    for (uint64_t limit = 0; limit <= 1000; limit += 1000) {
        fake_reset();
        fake_context = ELSEWHERE;
        ring *r = open_ring(8, 1000, limit, GRACE_MS);
        fake_fail(SET_CONTEXT, 0, CODE);
        script s = { 0 };
        script_copy(&s, 1, 3, 10);
        ring_completion done;
        if (ring_submit(r, 1, s.steps, s.count, PATIENCE_MS, &done) == RING_QUEUED)
            done = next_completion(r);
        CHECK_DONE(done, 1, RING_FAILED, 0, 0);
        CHECK_EQ(done.code, CODE);
        CHECK_EQ(fake_calls(COPY_ASYNC) + fake_calls(SYNC_STREAM), 0);
        fake_fail(SET_CONTEXT, 0, 0);
        close_ring(r);
    }
}

int main(void)
{
    RUN(test_every_call_on_the_worker_may_fail_at_any_time);
    RUN(test_every_call_of_an_inline_run_may_fail_at_any_time);
    RUN(test_ring_does_not_open_without_its_stream_and_events);
    RUN(test_failed_work_is_found_after_sixteen_windows_at_the_latest);
    RUN(test_failed_work_of_a_small_program_is_found_at_the_end);
    RUN(test_only_the_first_failure_is_told_and_in_its_own_words);
    RUN(test_failure_does_not_complete_before_the_rest_has_landed);
    RUN(test_program_that_misses_its_time_limit_is_aborted);
    RUN(test_time_limit_holds_for_a_program_that_makes_progress);
    RUN(test_device_that_does_not_let_go_is_stuck_and_all_that_follows_with_it);
    RUN(test_device_that_was_stopped_with_the_process_has_time_to_let_go);
    RUN(test_device_that_never_says_it_is_quiet_is_stuck);
    RUN(test_abort_that_is_refused_leaves_the_device_stuck);
    RUN(test_thread_that_cannot_reach_the_device_fails_what_it_did_not_begin);
    return check_done();
}
