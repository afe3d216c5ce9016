/* Cancelling and closing: what stops, when, and how many bytes are known to have landed. */
#include "ring_kit.h"
#include <sched.h>

enum { GRACE_MS = 250 };            /* a process that gets no core for so long is no device that hangs */

/* Two windows of one 100-byte range each are on the device, which is held; the worker waits for the first of them. */
static ring *in_the_middle(script *s, int64_t grace_ms)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 100, 0, grace_ms);
    script_copy(s, 1, 6, 100);
    CHECK_EQ(submit(r, 1, s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    return r;
}

TEST(test_cancelled_queued_program_ends_at_once_and_the_others_go_on)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(8, 1000, 0, PATIENCE_MS);
    script s[6] = { 0 };
    for (uint64_t id = 1; id <= 5; id++) {
        script_copy(&s[id], id, 2, 10);
        CHECK_EQ(submit(r, id, &s[id], PATIENCE_MS), RING_QUEUED);
    }
    fake_reached(SYNC_STREAM, 1);
    static const uint64_t victims[] = { 3, 5, 2 };           /* in the middle, at the end, at the beginning */
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(ring_cancel(r, victims[i]), 1);
        CHECK_EQ(ring_cancel(r, victims[i]), 0);            /* it is complete */
        CHECK_DONE(next_completion(r), victims[i], RING_CANCELLED, 0, 0);
        CHECK_EQ(ring_cancel(r, victims[i]), 0);
    }
    CHECK_EQ(submit(r, 6, &s[5], PATIENCE_MS), RING_QUEUED);    /* the end of the queue is where it was */
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, 20, 2);
    CHECK_DONE(next_completion(r), 4, RING_DONE, 20, 2);
    CHECK_DONE(next_completion(r), 6, RING_DONE, 20, 2);
    CHECK_EQ(ring_cancel(r, 4), 0);
    CHECK_EQ(ring_cancel(r, 77), 0);
    close_ring(r);
}

TEST(test_cancelled_program_stops_after_two_windows_and_counts_them)
{
    script s = { 0 };
    ring *r = in_the_middle(&s, PATIENCE_MS);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_EQ(ring_cancel(r, 1), 1);                         /* twice is once */
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_CANCELLED, 200, 2);
    CHECK_EQ(done.step, 0);
    CHECK_EQ(fake.landed[1], 200);
    CHECK_EQ(fake_calls(ABORT), 0);
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_cancelled_program_is_aborted_when_the_device_does_not_let_go)
{
    script s = { 0 }, next = { 0 };
    ring *r = in_the_middle(&s, GRACE_MS);
    fake_let(2);                                            /* one window lands */
    fake_reached(COPY_ASYNC, 3);
    CHECK_EQ(ring_cancel(r, 1), 1);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_CANCELLED, 0, 3);              /* an event is no proof that a window has landed */
    CHECK_EQ(done.origin, RING_NO_LIBRARY);
    CHECK(done.finished_ns - done.started_ns >= GRACE_MS * 1000000ll);
    CHECK_EQ(fake_calls(ABORT), 1);
    CHECK_EQ(fake_waiting(), 0);                            /* nothing can land any longer */
    CHECK_EQ(fake.landed[1], 100);
    fake_let_all();
    script_copy(&next, 2, 3, 100);
    CHECK_EQ(submit(r, 2, &next, PATIENCE_MS), RING_QUEUED);
    CHECK_DONE(next_completion(r), 2, RING_DONE, 300, 3);   /* the ring is as good as new */
    close_ring(r);
}

TEST(test_cancelled_descriptors_are_counted_when_they_were_handed_over)
{
    static const int ops[] = { RING_GET, RING_PUT }, calls[] = { GET, PUT };
    for (int k = 0; k < 2; k++) {
        fake_reset();
        fake_stop(calls[k]);
        ring *r = open_ring(4, 100000, 0, PATIENCE_MS);
        script s = { 0 };
        script_copy(&s, 1, 3, 10);
        script_move(&s, ops[k], 0, 1, 600, 10);
        CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
        fake_reached(calls[k], 1);
        CHECK_EQ(ring_cancel(r, 1), 1);
        fake_go();
        ring_completion done = next_completion(r);
        CHECK_DONE(done, 1, RING_CANCELLED, 1920, 192);
        CHECK_EQ(done.step, 1);                             /* finished one, is in the second */
        CHECK_EQ(fake.landed[1], 1920);
        close_ring(r);
    }
}

TEST(test_cancellation_that_comes_too_late_changes_nothing)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 0, PATIENCE_MS);
    script s = { 0 };
    script_copy(&s, 1, 2, 10);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);                           /* everything is issued */
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_reached(QUERY, 3);                                 /* it was seen, and the device has time */
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, 20, 2);
    CHECK_EQ(fake_calls(ABORT), 0);
    close_ring(r);
}

TEST(test_cancelled_program_that_waits_for_an_event_is_aborted)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 0, GRACE_MS);
    fake_event never = { 1, 0 };
    script s = { 0 };
    script_event(&s, RING_WAIT, &never);
    script_copy(&s, 1, 2, 10);
    CHECK_EQ(submit(r, 1, &s, INT64_MAX), RING_QUEUED);
    fake_reached(QUERY, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_DONE(next_completion(r), 1, RING_CANCELLED, 0, 2);
    CHECK_EQ(fake.landed[1], 0);
    close_ring(r);
}

TEST(test_abort_of_a_cancelled_program_comes_after_the_patience_and_not_after_the_grace)
{
    enum { SHORT_MS = 30 };
    fake_reset();
    ring *r = open_patient_ring(4, 1000, 0, PATIENCE_MS, SHORT_MS);
    fake_event never = { 1, 0 };
    script s = { 0 };
    script_event(&s, RING_WAIT, &never);
    CHECK_EQ(submit(r, 1, &s, INT64_MAX), RING_QUEUED);
    fake_reached(QUERY, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_CANCELLED, 0, 0);
    CHECK(done.finished_ns - done.started_ns >= SHORT_MS * 1000000ll);
    CHECK(done.finished_ns - done.started_ns < PATIENCE_MS * 500000ll);
    CHECK_EQ(fake_calls(ABORT), 1);
    close_ring(r);
}

TEST(test_cancelled_program_stays_cancelled_when_its_time_limit_passes)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 0, PATIENCE_MS);           /* the limit comes long before the end of the grace */
    script s = { 0 };
    script_copy(&s, 1, 2, 10);
    fake_stop(SYNC_STREAM);
    CHECK_EQ(submit(r, 1, &s, 60), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_go();
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_CANCELLED, 0, 2);
    CHECK(done.finished_ns - done.started_ns < PATIENCE_MS * 500000ll);
    CHECK_EQ(fake_calls(ABORT), 1);
    close_ring(r);
}

TEST(test_close_cancels_what_is_queued_and_what_runs)
{
    script s = { 0 };
    ring *r = in_the_middle(&s, GRACE_MS);
    ring_completion done[4], ran;
    CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(submit(r, 3, &s, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(ring_close(r, PATIENCE_MS), 0);
    CHECK_EQ(ring_submit(r, 4, s.steps, s.count, 1000, &ran), RING_CLOSED);
    CHECK_EQ(ring_cancel(r, 1), 0);
    CHECK_EQ(fake.live_streams + fake.live_events, 0);
    CHECK_EQ(ring_reap(r, done, 4), 3);
    CHECK_DONE(done[0], 2, RING_CANCELLED, 0, 0);
    CHECK_DONE(done[1], 3, RING_CANCELLED, 0, 0);
    CHECK_DONE(done[2], 1, RING_CANCELLED, 0, 2);
    CHECK_EQ(ring_reap(r, done, 4), 0);
    ring_free(r);
}

TEST(test_close_gives_up_in_time_and_may_be_tried_again)
{
    fake_reset();
    fake_stop(COPY_ASYNC);                                  /* a call that does not return */
    ring *r = open_ring(4, 1000, 0, GRACE_MS);
    script s = { 0 };
    script_copy(&s, 1, 3, 10);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(COPY_ASYNC, 1);
    CHECK_EQ(ring_close(r, 5), 1);
    CHECK_EQ(ring_close(r, 0), 1);
    CHECK_EQ(submit(r, 2, &s, PATIENCE_MS), RING_CLOSED);
    CHECK(!is_readable(r));
    fake_go();
    CHECK_DONE(next_completion(r), 1, RING_CANCELLED, 10, 1);
    close_ring(r);
}

TEST(test_close_of_a_ring_that_was_never_used)
{
    fake_reset();
    close_ring(open_ring(1, 1, 0, 1));
    CHECK_EQ(fake_calls(DESTROY_EVENT), 2);
    CHECK_EQ(fake_calls(DESTROY_STREAM), 1);
}

/* ---- while the program runs in the submitting call of another thread ---- */

typedef struct inline_run { ring *r; script s; ring_completion ran; int status; pthread_t thread; } inline_run;

static void *submit_inline(void *arg)
{
    inline_run *run = arg;
    fake_context = HOME;
    run->status = ring_submit(run->r, 1, run->s.steps, run->s.count, PATIENCE_MS, &run->ran);
    return NULL;
}

static void start_inline(inline_run *run, bool with_worker) /* it stops in its first copy */
{
    script large = { 0 };
    fake_reset();
    run->r = open_ring(1, 1000, 1000, GRACE_MS);
    if (with_worker) {                                      /* there is one already, and it is idle */
        script_copy(&large, 2, 1, 1001);
        CHECK_EQ(submit(run->r, 2, &large, PATIENCE_MS), RING_QUEUED);
        CHECK_DONE(next_completion(run->r), 2, RING_DONE, 1001, 2);
    }
    fake_stop(COPY_ASYNC);
    script_copy(&run->s, 1, 3, 10);
    uint64_t before = fake_calls(COPY_ASYNC);
    pthread_create(&run->thread, NULL, submit_inline, run);
    fake_reached(COPY_ASYNC, before + 1);
}

TEST(test_inline_run_can_be_cancelled_from_another_thread)
{
    inline_run run = { 0 };
    start_inline(&run, false);
    CHECK_EQ(ring_cancel(run.r, 1), 1);
    fake_go();
    pthread_join(run.thread, NULL);
    CHECK_EQ(run.status, RING_RAN);
    CHECK_DONE(run.ran, 1, RING_CANCELLED, 10, 1);
    CHECK(!is_readable(run.r));
    close_ring(run.r);
}

static void *close_it(void *r)
{
    return (void *)(intptr_t)ring_close(r, PATIENCE_MS);
}

TEST(test_close_waits_for_an_inline_run)
{
    for (int k = 0; k < 4; k++) {
        bool hands_over = k % 2, with_worker = k / 2;
        inline_run run = { 0 };
        pthread_t closer;
        void *closed;
        start_inline(&run, with_worker);
        pthread_create(&closer, NULL, close_it, run.r);
        while (submit(run.r, 3, &run.s, 1) == RING_FULL)    /* RING_CLOSED: it waits. Nothing can be taken here. */
            sched_yield();
        if (hands_over)
            fake_hold();                                    /* for ever: only an abort ends it */
        fake_go();
        pthread_join(run.thread, NULL);
        pthread_join(closer, &closed);
        CHECK_EQ((intptr_t)closed, 0);
        CHECK_EQ(run.status, hands_over ? RING_QUEUED : RING_RAN);
        if (hands_over)
            run.ran = next_completion(run.r);
        CHECK_DONE(run.ran, 1, RING_CANCELLED, hands_over ? 0 : 10, 1);
        CHECK_EQ(fake.live_streams + fake.live_events, 0);
        ring_free(run.r);
    }
}

int main(void)
{
    RUN(test_cancelled_queued_program_ends_at_once_and_the_others_go_on);
    RUN(test_cancelled_program_stops_after_two_windows_and_counts_them);
    RUN(test_cancelled_program_is_aborted_when_the_device_does_not_let_go);
    RUN(test_cancelled_descriptors_are_counted_when_they_were_handed_over);
    RUN(test_cancellation_that_comes_too_late_changes_nothing);
    RUN(test_cancelled_program_that_waits_for_an_event_is_aborted);
    RUN(test_abort_of_a_cancelled_program_comes_after_the_patience_and_not_after_the_grace);
    RUN(test_cancelled_program_stays_cancelled_when_its_time_limit_passes);
    RUN(test_close_cancels_what_is_queued_and_what_runs);
    RUN(test_close_gives_up_in_time_and_may_be_tried_again);
    RUN(test_close_of_a_ring_that_was_never_used);
    RUN(test_inline_run_can_be_cancelled_from_another_thread);
    RUN(test_close_waits_for_an_inline_run);
    return check_done();
}
