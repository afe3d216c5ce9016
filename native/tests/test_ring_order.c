/* Who runs a program, where and when: order, the submitting call, the hand-over to the worker. */
#include "ring_kit.h"

TEST(test_programs_run_one_after_the_other_in_order_of_submission)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(8, 1000, 0, 1000);
    script s[5] = { 0 };
    for (uint64_t id = 1; id <= 5; id++) {
        script_copy(&s[id - 1], id, 3, 10);
        CHECK_EQ(submit(r, id, &s[id - 1], 10000), RING_QUEUED);
    }
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(fake_calls(COPY_ASYNC), 3);                    /* of the first program only */
    fake_let_all();
    for (uint64_t id = 1; id <= 5; id++) {
        ring_completion done = next_completion(r);
        CHECK_DONE(done, id, RING_DONE, 30, 3);
        CHECK_EQ(done.step, 1);
        CHECK_EQ(done.message[0], 0);
    }
    for (uint64_t i = 0; i < 15; i++)
        CHECK_EQ(fake.log[i].remote >> 32, i / 3 + 1);
    close_ring(r);
}

TEST(test_small_program_on_an_idle_ring_runs_in_the_submitting_call)
{
    fake_reset();
    ring *r = open_ring(2, 1000, 100, 1000);
    ring_completion ran;
    for (uint64_t id = 1; id <= 20; id++) {                 /* more than its depth: nothing is left behind */
        script s = { 0 };
        script_copy(&s, id, 4, 25);
        CHECK_EQ(ring_submit(r, id, s.steps, s.count, 1000, &ran), RING_RAN);
        CHECK_DONE(ran, id, RING_DONE, 100, 4);
    }
    for (uint64_t i = 0; i < fake.logged; i++)
        CHECK(pthread_equal(fake.log[i].thread, pthread_self()));
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_small_program_of_two_full_windows_runs_in_the_submitting_call)
{
    fake_reset();
    ring *r = open_ring(2, 1000, 1000, 1000);
    ring_completion ran;
    script s = { 0 };
    script_copy(&s, 1, 384, 1);
    CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 1000, &ran), RING_RAN);
    CHECK_DONE(ran, 1, RING_DONE, 384, 384);
    close_ring(r);
}

TEST(test_small_program_does_not_end_before_one_whose_end_was_not_reaped)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 100, 1000);
    script large = { 0 }, small = { 0 };
    script_copy(&large, 1, 2, 60);
    script_copy(&small, 2, 1, 60);
    CHECK_EQ(submit(r, 1, &large, 1000), RING_QUEUED);
    struct pollfd fd = { .fd = ring_fd(r), .events = POLLIN };
    CHECK_EQ(poll(&fd, 1, PATIENCE_MS), 1);
    CHECK_EQ(submit(r, 2, &small, 1000), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 120, 2);
    CHECK_DONE(next_completion(r), 2, RING_DONE, 60, 1);
    ring_completion ran;
    CHECK_EQ(ring_submit(r, 3, small.steps, small.count, 1000, &ran), RING_RAN);
    close_ring(r);
}

static void goes_to_the_worker(const script *s, uint64_t window, uint64_t ranges, uint64_t bytes)
{
    fake_reset();
    ring *r = open_ring(2, window, 1000, 1000);
    CHECK_EQ(submit(r, 7, s, 10000), RING_QUEUED);
    CHECK_DONE(next_completion(r), 7, RING_DONE, bytes, ranges);
    CHECK(!pthread_equal(fake.log[0].thread, pthread_self()));
    close_ring(r);
}

TEST(test_program_that_would_hold_up_the_caller_goes_to_the_worker)
{
    fake_event past = { 1, 1 };
    script large = { 0 }, many = { 0 }, waits = { 0 }, drains = { 0 }, windows = { 0 };
    script_copy(&large, 7, 2, 501);
    goes_to_the_worker(&large, 10000, 2, 1002);
    script_copy(&many, 7, 385, 1);
    goes_to_the_worker(&many, 10000, 385, 385);
    script_event(&waits, RING_WAIT, &past);
    script_copy(&waits, 7, 1, 1);
    goes_to_the_worker(&waits, 10000, 1, 1);
    script_copy(&drains, 7, 1, 1);
    script_host_copy(&drains, 7, 1, 1);
    goes_to_the_worker(&drains, 10000, 2, 2);
    script_copy(&windows, 7, 3, 100);
    goes_to_the_worker(&windows, 100, 3, 300);
}

TEST(test_worker_takes_over_when_the_device_is_not_done)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 100, 1000);
    script first = { 0 }, second = { 0 };
    script_copy(&first, 1, 2, 10);
    script_copy(&second, 2, 2, 10);
    CHECK_EQ(submit(r, 1, &first, 10000), RING_QUEUED);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    CHECK_EQ(fake_calls(COPY_ASYNC), 2);                    /* it was issued here, and will not be again */
    CHECK_EQ(submit(r, 2, &second, 10000), RING_QUEUED);    /* small, but not overtaking */
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(fake_calls(COPY_ASYNC), 2);
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_DONE, 20, 2);
    CHECK(done.started_ns <= now.tv_sec * 1000000000 + now.tv_nsec);
    CHECK_DONE(next_completion(r), 2, RING_DONE, 20, 2);
    CHECK(pthread_equal(fake.log[0].thread, pthread_self()));
    CHECK(!pthread_equal(fake.log[2].thread, pthread_self()));
    ring_completion ran;
    CHECK_EQ(ring_submit(r, 3, first.steps, first.count, 1000, &ran), RING_RAN);     /* idle again */
    close_ring(r);
}

TEST(test_ring_is_full_until_completions_are_reaped)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(2, 1000, 0, 1000);
    script s = { 0 };
    script_copy(&s, 1, 1, 10);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    CHECK_EQ(submit(r, 2, &s, 10000), RING_QUEUED);
    CHECK_EQ(submit(r, 3, &s, 10000), RING_FULL);
    CHECK_EQ(ring_cancel(r, 2), 1);
    CHECK_EQ(submit(r, 3, &s, 10000), RING_FULL);           /* complete, but not reaped */
    CHECK_DONE(next_completion(r), 2, RING_CANCELLED, 0, 0);
    CHECK_EQ(submit(r, 3, &s, 10000), RING_QUEUED);
    fake_let_all();
    CHECK_EQ(next_completion(r).id, 1);
    CHECK_EQ(next_completion(r).id, 3);
    close_ring(r);
}

TEST(test_fd_is_readable_while_completions_wait)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 0, 1000);
    ring_completion done[4];
    script s = { 0 };
    script_copy(&s, 1, 1, 10);
    for (uint64_t id = 1; id <= 3; id++)
        CHECK_EQ(submit(r, id, &s, 10000), RING_QUEUED);
    CHECK(!is_readable(r));
    CHECK_EQ(ring_reap(r, done, 4), 0);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(ring_cancel(r, 3), 1);
    CHECK_EQ(ring_cancel(r, 2), 1);
    CHECK(is_readable(r));
    CHECK_EQ(ring_reap(r, done, 0), 0);
    CHECK(is_readable(r));
    CHECK_EQ(ring_reap(r, done, 1), 1);
    CHECK_EQ(done[0].id, 3);
    CHECK(is_readable(r));
    CHECK_EQ(ring_reap(r, done, 4), 1);
    CHECK_EQ(done[0].id, 2);
    CHECK(!is_readable(r));
    fake_let_all();
    CHECK_EQ(next_completion(r).id, 1);
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_program_without_work_is_done)
{
    for (uint64_t limit = 0; limit <= 100; limit += 100) {
        fake_reset();
        ring *r = open_ring(4, 1000, limit, 1000);
        ring_completion done;
        script s = { 0 };
        for (uint32_t steps = 0; steps < 4; steps++) {
            int status = ring_submit(r, 1, s.steps, steps, 1000, &done);
            CHECK_EQ(status, limit ? RING_RAN : RING_QUEUED);
            if (status == RING_QUEUED)
                done = next_completion(r);
            CHECK_DONE(done, 1, RING_DONE, 0, 0);
            CHECK_EQ(done.step, steps);
            script_copy(&s, 1, steps ? 1 : 0, 10);
            s.steps[steps].grid.tensors = 0;
        }
        close_ring(r);
    }
}

TEST(test_host_copies_wait_for_what_comes_before_them)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1000, 100, 1000);
    fake_event gate = { 1, 0 };
    script s = { 0 };
    script_event(&s, RING_WAIT, &gate);
    script_host_copy(&s, 1, 2, 10);
    script_copy(&s, 1, 2, 10);
    script_host_copy(&s, 1, 2, 10);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    fake_reached(QUERY, 1);
    CHECK_EQ(fake_calls(COPY), 0);
    fake_let(1);
    fake_happen(&gate);
    fake_reached(COPY_ASYNC, 2);
    CHECK_EQ(fake_calls(COPY), 2);
    fake_let(2);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 60, 6);
    CHECK_EQ(fake_calls(COPY), 4);
    close_ring(r);
}

TEST(test_host_copies_alone_run_in_the_submitting_call)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 100, 1000);
    ring_completion ran;
    script s = { 0 };
    script_host_copy(&s, 1, 2, 10);
    script_host_copy(&s, 1, 2, 10);
    CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 1000, &ran), RING_RAN);
    CHECK_DONE(ran, 1, RING_DONE, 40, 4);
    CHECK_EQ(fake_calls(SYNC_STREAM), 0);                   /* nothing of it was on the stream */
    close_ring(r);
}

TEST(test_events_gate_and_are_recorded)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 100, 1000);
    fake_event gate = { 1, 0 }, after = { 0, 0 };
    script s = { 0 };
    script_event(&s, RING_WAIT, &gate);
    script_copy(&s, 1, 2, 10);
    script_event(&s, RING_RECORD, &after);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    fake_reached(QUERY, 1);
    CHECK_EQ(fake.landed[1], 0);
    fake_happen(&gate);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 20, 2);
    CHECK_EQ(after.done, 1);
    close_ring(r);
}

TEST(test_context_of_the_submitting_thread_is_given_back)
{
    fake_reset();
    fake_context = ELSEWHERE;
    ring *r = open_ring(4, 1000, 100, 1000);
    CHECK(fake_context == ELSEWHERE);
    ring_completion ran;
    script s = { 0 };
    script_copy(&s, 1, 2, 10);
    CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 1000, &ran), RING_RAN);
    CHECK(fake_context == ELSEWHERE);
    fake_context = NULL;                                    /* a thread that never touched the device */
    fake_fail(COPY_ASYNC, 3, ACL_ERROR_RT_PARAM_INVALID);
    CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 1000, &ran), RING_RAN);
    CHECK_EQ(ran.state, RING_FAILED);
    CHECK(!strcmp(ran.message, "the fake was told to fail"));   /* nothing about a missing context */
    fake_context = ELSEWHERE;
    close_ring(r);
    CHECK(fake_context == ELSEWHERE);
}

TEST(test_time_limits_of_any_size_are_taken)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 0, INT32_MAX);
    static const int64_t limits[] = { INT64_MAX, INT64_MAX / 1000000, 0, -1, INT64_MIN };
    script s = { 0 };
    script_copy(&s, 1, 2, 10);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        CHECK_EQ(submit(r, i, &s, limits[i]), RING_QUEUED);
        CHECK_DONE(next_completion(r), i, RING_DONE, 20, 2);    /* the device was prompt */
    }
    CHECK_EQ(ring_close(r, INT64_MAX), 0);
    ring_free(r);
}

TEST(test_nonsense_is_refused)
{
    fake_reset();
    ring *r = open_ring(4, 1000, 100, 1000), *none = NULL;
    ring_completion ran;
    fake_event event = { 0, 0 };
    script good = { 0 }, s;
    script_copy(&good, 1, 2, 10);
#define REFUSED(change) do { s = good; s.steps[0].grid.local = s.local; change; \
        CHECK_EQ(ring_submit(r, 1, s.steps, 1, 1000, &ran), RING_INVALID); } while (0)
    REFUSED(s.steps[0].op = 0);
    REFUSED(s.steps[0].op = RING_RECORD + 1);
    REFUSED(s.steps[0].kind = -1);
    REFUSED(s.steps[0].kind = ACL_MEMCPY_DEFAULT + 1);
    REFUSED(s.steps[0].grid.bytes = 0);
    REFUSED(s.steps[0].grid.tail = 0);
    REFUSED(s.steps[0].grid.tail = 11);
    REFUSED(s.steps[0].grid.local = NULL);
    REFUSED(s.steps[0].grid.remote_index = NULL);
    REFUSED(s.steps[0].op = RING_WAIT; s.steps[0].handle = NULL);
    REFUSED(s.steps[0].op = RING_GET; s.steps[0].handle = NULL);
    REFUSED(s.steps[0].grid.tensors = UINT32_MAX; s.steps[0].grid.blocks = UINT32_MAX);    /* 2^67 bytes */
    CHECK_EQ(ring_submit(r, 1, NULL, 1, 1000, &ran), RING_INVALID);
    CHECK_EQ(ring_submit(r, 1, good.steps, 1, 1000, NULL), RING_INVALID);
    CHECK_EQ(ring_submit(NULL, 1, good.steps, 1, 1000, &ran), RING_INVALID);
    CHECK_EQ(ring_cancel(r, 1), 0);
    s = (script){ 0 };                                      /* the grid of an event's step means nothing */
    script_event(&s, RING_RECORD, &event);
    s.steps[0].grid.tensors = s.steps[0].grid.blocks = UINT32_MAX;
    CHECK_EQ(ring_submit(r, 1, s.steps, 1, 1000, &ran), RING_RAN);
    close_ring(r);

    static const ring_options bad[] = { { 0, 1, 1, 1, 0, 0, 0, 0, 0, 0 }, { 1, 0, 1, 1, 0, 0, 0, 0, 0, 0 }, { 1, 1, 1, 0, 0, 0, 0, 0, 0, 0 },
                                        { 1, 1, 1, INT32_MAX + 1ll, 0, 0, 0, 0, 0, 0 }, { 1, 1, 1, 1, -1, 0, 0, 0, 0, 0 },
                                        { 1, 1, 1, 1, 0, -1, 0, 0, 0, 0 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_EQ(ring_open(&fake_driver, HOME, &bad[i], &none), ACL_ERROR_INVALID_PARAM);
    CHECK(!none);
}

TEST(test_blocks_run_at_once_or_nothing_is_done)
{
    uint64_t numbers[] = { 3, 5, 1, 2 };
    script s = { 0 }, big = { 0 };
    fake_reset();
    script_move(&s, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, 1, 1, 8);
    script_copy(&big, 2, 4, 4096);
    ring *r = open_ring(4, 1 << 20, 64, 1000);
    ring_blocks b = { .on = r, .step = s.steps, .numbers = numbers, .local_limit = 6, .remote_limit = 3, .id = 7, .timeout_ms = 1000 };
    CHECK_EQ(ring_run_blocks(&b, 2), RING_RAN);
    CHECK_DONE(b.ran, 7, RING_DONE, 16, 2);
    CHECK_EQ(s.steps[0].grid.blocks, 2);
    uint64_t logged = fake.logged;
    ring_blocks low = b, high = b, large = b;
    low.remote_limit = 2;
    high.local_limit = 5;
    large.step = big.steps;
    CHECK_EQ(ring_run_blocks(&low, 2), RING_OUTSIDE);
    CHECK_EQ(ring_run_blocks(&high, 2), RING_OUTSIDE);
    CHECK_EQ(ring_run_blocks(&large, 2), RING_LATER);   /* too much */
    uint64_t twice[] = { 3, 3, 1, 2 };
    ring_blocks repeated = b;
    repeated.numbers = twice;
    CHECK_EQ(ring_run_blocks(&repeated, 2), RING_OUTSIDE);
    CHECK_EQ(ring_run_blocks(&b, 4097), RING_LATER);
    CHECK_EQ(fake.logged, logged);
    script_copy(&big, 3, 4, 4096);
    CHECK_EQ(submit(r, 9, &big, 1000), RING_QUEUED);
    b.id = 10;
    CHECK_EQ(ring_run_blocks(&b, 2), RING_LATER);       /* ends are told in order */
    ring_completion told = next_completion(r);
    CHECK_EQ(told.id, 9);
    b.id = 11;
    CHECK_EQ(ring_run_blocks(&b, 2), RING_RAN);
    CHECK_EQ(b.ran.id, 11);
    close_ring(r);
}

int main(void)
{
    RUN(test_blocks_run_at_once_or_nothing_is_done);
    RUN(test_programs_run_one_after_the_other_in_order_of_submission);
    RUN(test_small_program_on_an_idle_ring_runs_in_the_submitting_call);
    RUN(test_small_program_of_two_full_windows_runs_in_the_submitting_call);
    RUN(test_small_program_does_not_end_before_one_whose_end_was_not_reaped);
    RUN(test_program_that_would_hold_up_the_caller_goes_to_the_worker);
    RUN(test_worker_takes_over_when_the_device_is_not_done);
    RUN(test_ring_is_full_until_completions_are_reaped);
    RUN(test_fd_is_readable_while_completions_wait);
    RUN(test_program_without_work_is_done);
    RUN(test_host_copies_wait_for_what_comes_before_them);
    RUN(test_host_copies_alone_run_in_the_submitting_call);
    RUN(test_events_gate_and_are_recorded);
    RUN(test_context_of_the_submitting_thread_is_given_back);
    RUN(test_time_limits_of_any_size_are_taken);
    RUN(test_nonsense_is_refused);
    return check_done();
}
