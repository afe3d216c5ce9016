/* Priorities: what goes first, what a program is that gave way, and that neither is touched by what becomes of the other. */
#include "ring_priority_kit.h"

static uint64_t taken(uint64_t id)                          /* ranges accepted */
{
    uint64_t n;
    FAKE_DO(n = fake.taken[id]);
    return n;
}

/* Two windows of background program 1 are on the device, which is held, and a critical one is queued: program 2, of one range. */
static void begin(ring *r, script s[2], int op, int64_t background_ms, int64_t critical_ms)
{
    fake_hold();
    memset(s, 0, 2 * sizeof *s);
    script_move(&s[0], op, ACL_MEMCPY_DEVICE_TO_DEVICE, 1, RANGES, RANGE);
    script_move(&s[1], op, ACL_MEMCPY_DEVICE_TO_DEVICE, 2, 1, RANGE);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &s[0], background_ms), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(submit_as(r, RING_CRITICAL, 2, &s[1], critical_ms), RING_QUEUED);
    CHECK_EQ(taken(1), 2);
    CHECK_EQ(taken(2), 0);
}

/* The background program has given way: what was issued of it has landed, and the critical one is on the device. */
static void let_it_give_way(int op)
{
    fake_let(4);                                            /* two windows, and the event behind each */
    fake_reached(op == RING_GET ? GET : COPY_ASYNC, 3);
    CHECK_EQ(landed(1), BEFORE);
    CHECK_EQ(taken(1), 2);
    CHECK_EQ(taken(2), 1);
}

static ring *in_between(script s[2], int64_t grace_ms, int64_t background_ms, int64_t critical_ms)
{
    fake_reset();
    ring *r = open_for(4, 0, grace_ms);
    begin(r, s, RING_COPY, background_ms, critical_ms);
    let_it_give_way(RING_COPY);
    return r;
}

TEST(test_urgent_program_passes_one_that_runs)
{
    script s[2];
    ring *r = in_between(s, PATIENCE_MS, PATIENCE_MS, PATIENCE_MS);
    CHECK(!is_readable(r));
    fake_let(1);
    CHECK_DONE(next_completion(r), 2, RING_DONE, RANGE, 1);
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_DONE, RANGES * RANGE, RANGES);
    CHECK(done.aside_ns > 0 && done.aside_ns < done.finished_ns - done.started_ns);
    CHECK_EQ(landed(1), RANGES * RANGE);
    CHECK_EQ(fake_calls(ABORT), 0);
    close_ring(r);
}

TEST(test_ranges_are_moved_once_and_none_is_left_out)
{
    script s[2];
    ring *r = in_between(s, PATIENCE_MS, PATIENCE_MS, PATIENCE_MS);
    fake_let_all();
    CHECK_EQ(next_completion(r).id, 2);
    CHECK_EQ(next_completion(r).id, 1);
    uint64_t n = 0;
    for (uint64_t i = 0; i < fake.logged; i++)
        if (fake.log[i].call == COPY_ASYNC && fake.log[i].remote >> 32 == 1)
            CHECK_EQ(fake.log[i].remote & 0xffffffff, 2 * RANGE * n++);
    CHECK_EQ(n, RANGES);
    close_ring(r);
}

TEST(test_the_most_urgent_goes_first_and_equals_in_order)
{
    static const int priority[] = { 0, RING_NORMAL, RING_BACKGROUND, RING_NORMAL, RING_CRITICAL, RING_BACKGROUND, RING_CRITICAL };
    static const uint64_t turns[] = { 1, 4, 6, 3, 2, 5 };
    script s[7] = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(16, 0, PATIENCE_MS);
    for (uint64_t id = 1; id <= 6; id++) {
        script_copy(&s[id], id, 1, 10);
        CHECK_EQ(submit_as(r, priority[id], id, &s[id], PATIENCE_MS), RING_QUEUED);
        if (id == 1)
            fake_reached(SYNC_STREAM, 1);                   /* all of it is issued: it no longer gives way */
    }
    fake_let_all();
    for (int i = 0; i < 6; i++)
        CHECK_DONE(next_completion(r), turns[i], RING_DONE, 10, 1);
    close_ring(r);
}

TEST(test_program_that_passes_may_be_passed)
{
    script s[2], third = { 0 };
    fake_reset();
    ring *r = open_for(4, 0, PATIENCE_MS);
    fake_hold();
    memset(s, 0, sizeof s);
    script_copy(&s[0], 1, RANGES, RANGE);
    script_copy(&s[1], 2, RANGES, WINDOW);                  /* normal: a window each */
    script_copy(&third, 3, 1, 10);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &s[0], PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(submit_as(r, RING_NORMAL, 2, &s[1], PATIENCE_MS), RING_QUEUED);
    fake_let(4);
    fake_reached(COPY_ASYNC, 4);                            /* two of either are issued */
    CHECK_EQ(submit_as(r, RING_CRITICAL, 3, &third, PATIENCE_MS), RING_QUEUED);
    fake_let(4);
    fake_reached(COPY_ASYNC, 5);
    CHECK_EQ(taken(3), 1);
    fake_let_all();
    CHECK_DONE(next_completion(r), 3, RING_DONE, 10, 1);
    CHECK_DONE(next_completion(r), 2, RING_DONE, RANGES * WINDOW, RANGES);
    CHECK_DONE(next_completion(r), 1, RING_DONE, RANGES * RANGE, RANGES);
    close_ring(r);
}

TEST(test_small_urgent_program_runs_in_the_submitting_call_on_an_idle_ring_only)
{
    script large = { 0 }, small = { 0 };
    ring_completion ran;
    fake_reset();
    ring *r = open_for(4, 100, PATIENCE_MS);
    script_copy(&large, 1, RANGES, RANGE);
    script_copy(&small, 2, 1, 10);
    CHECK_EQ(ring_submit_as(r, RING_CRITICAL, 2, small.steps, 1, PATIENCE_MS, &ran), RING_RAN);
    fake_hold();
    uint64_t before = fake_calls(SYNC_EVENT);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &large, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, before + 1);
    CHECK_EQ(ring_submit_as(r, RING_CRITICAL, 3, small.steps, 1, PATIENCE_MS, &ran), RING_QUEUED);
    fake_let_all();
    CHECK_DONE(next_completion(r), 3, RING_DONE, 10, 1);
    CHECK_EQ(next_completion(r).id, 1);
    close_ring(r);
}

/* ---- what becomes of the one does not touch the other ---- */

TEST(test_what_gave_way_ends_at_once_when_it_is_cancelled)
{
    script s[2];
    ring *r = in_between(s, PATIENCE_MS, PATIENCE_MS, PATIENCE_MS);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_EQ(ring_cancel(r, 1), 0);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_CANCELLED, BEFORE, 2);
    CHECK(done.aside_ns > 0);
    CHECK_EQ(done.unclean, 0);
    fake_let_all();
    CHECK_DONE(next_completion(r), 2, RING_DONE, RANGE, 1);
    CHECK_EQ(landed(1), BEFORE);
    CHECK_EQ(fake_calls(ABORT), 0);
    close_ring(r);
}

TEST(test_cancelled_program_does_not_give_way)
{
    script s[2];
    fake_reset();
    ring *r = open_for(4, 0, PATIENCE_MS);
    begin(r, s, RING_COPY, PATIENCE_MS, PATIENCE_MS);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_CANCELLED, BEFORE, 2);
    CHECK_DONE(next_completion(r), 2, RING_DONE, RANGE, 1);
    close_ring(r);
}

TEST(test_abort_of_the_urgent_program_takes_nothing_from_what_gave_way)
{
    for (int limit = 0; limit < 2; limit++) {
        script s[2];
        ring *r = in_between(s, GRACE_MS, PATIENCE_MS, limit ? GRACE_MS : PATIENCE_MS);
        if (!limit)
            CHECK_EQ(ring_cancel(r, 2), 1);
        CHECK_DONE(next_completion(r), 2, limit ? RING_TIMED_OUT : RING_CANCELLED, 0, 1);
        CHECK_EQ(fake_calls(ABORT), 1);
        fake_let_all();
        CHECK_DONE(next_completion(r), 1, RING_DONE, RANGES * RANGE, RANGES);
        CHECK_EQ(landed(1), RANGES * RANGE);
        CHECK_EQ(fake_calls(ABORT), 1);
        close_ring(r);
    }
}

TEST(test_failure_of_either_is_its_own)
{
    for (int urgent = 0; urgent < 2; urgent++) {
        script s[2];
        fake_reset();
        ring *r = open_for(4, 0, PATIENCE_MS);
        begin(r, s, RING_COPY, PATIENCE_MS, PATIENCE_MS);
        FAKE_DO(fake.bad_copy = urgent ? 3 : 1);            /* the third to run is the urgent one's */
        fake_let_all();
        ring_completion first = next_completion(r), second = next_completion(r);
        CHECK_EQ(first.id, urgent ? 2 : 1);                 /* a failed program has nothing to go on with */
        CHECK_EQ(first.state, RING_FAILED);
        CHECK_EQ(second.state, RING_DONE);
        CHECK_EQ(second.bytes, urgent ? RANGES * RANGE : RANGE);
        close_ring(r);
    }
}

TEST(test_stuck_urgent_program_leaves_what_gave_way_with_what_has_landed)
{
    script s[2];
    ring *r = in_between(s, GRACE_MS, PATIENCE_MS, PATIENCE_MS);
    FAKE_DO(fake.deaf = true);
    CHECK_EQ(ring_cancel(r, 2), 1);
    CHECK_DONE(next_completion(r), 2, RING_STUCK, 0, 1);
    CHECK_DONE(next_completion(r), 1, RING_REFUSED, BEFORE, 2);
    fake_let_all();
    leave_stuck(r);
}

TEST(test_time_limit_stands_still_for_what_gave_way)
{
    enum { LIMIT_MS = 3000 };
    script s[2];
    ring *r = in_between(s, PATIENCE_MS, LIMIT_MS, PATIENCE_MS);
    nanosleep(&(struct timespec){ LIMIT_MS / 1000, LIMIT_MS % 1000 * 1000000 }, NULL);
    fake_let_all();
    CHECK_DONE(next_completion(r), 2, RING_DONE, RANGE, 1);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_DONE, RANGES * RANGE, RANGES);
    CHECK(done.aside_ns >= LIMIT_MS * 1000000ll);
    close_ring(r);
}

TEST(test_close_ends_both)
{
    script s[2];
    ring_completion done[2];
    ring *r = in_between(s, GRACE_MS, PATIENCE_MS, PATIENCE_MS);
    CHECK_EQ(ring_close(r, PATIENCE_MS), 0);
    CHECK_EQ(ring_reap(r, done, 2), 2);
    CHECK_DONE(done[0], 1, RING_CANCELLED, BEFORE, 2);
    CHECK_DONE(done[1], 2, RING_CANCELLED, 0, 1);
    CHECK_EQ(fake.live_streams + fake.live_events, 0);
    ring_free(r);
}

/* ---- gates and layers ---- */

TEST(test_what_waits_for_an_event_gives_way_when_that_has_come)
{
    script s = { 0 }, urgent = { 0 };
    fake_event gate = { 1, 0 };
    fake_reset();
    ring *r = open_for(4, 0, PATIENCE_MS);
    script_event(&s, RING_WAIT, &gate);
    script_copy(&s, 1, RANGES, RANGE);
    script_copy(&urgent, 2, 1, 10);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(QUERY_EVENT, 1);
    CHECK_EQ(submit_as(r, RING_CRITICAL, 2, &urgent, PATIENCE_MS), RING_QUEUED);
    fake_reached(QUERY_EVENT, 4);
    CHECK_EQ(taken(2), 0);                             /* the stream would not take it past the event */
    fake_happen(&gate);
    CHECK_DONE(next_completion(r), 2, RING_DONE, 10, 1);
    CHECK_DONE(next_completion(r), 1, RING_DONE, RANGES * RANGE, RANGES);
    close_ring(r);
}

TEST(test_layers_give_way_and_what_landed_is_told)
{
    enum { LAYERS = 4 };
    int64_t landed_ns[LAYERS] = { 0 };
    uint64_t local[LAYERS], remote[LAYERS], zero = 0;
    ring_layers layers = { .tensors = 1, .group = 1, .landed_ns = landed_ns };
    for (uint32_t i = 0; i < LAYERS; i++) {
        local[i] = 0x100000000000 + i * 0x1000;
        remote[i] = (1ull << 32) + i * 0x1000;
    }
    ring_step step = { .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &layers, .grid = {
        .local = local, .remote = remote, .local_index = &zero, .remote_index = &zero,
        .tensors = LAYERS, .blocks = 1, .local_stride = RANGE, .remote_stride = RANGE, .bytes = RANGE, .tail = RANGE } };
    script urgent = { 0 };
    ring_completion ran;
    fake_reset();
    fake_hold();
    ring *r = open_for(4, 0, PATIENCE_MS);
    script_copy(&urgent, 2, 1, 10);
    CHECK_EQ(ring_submit_as(r, RING_NORMAL, 1, &step, 1, PATIENCE_MS, &ran), RING_QUEUED);
    CHECK_EQ(ring_watch(r, 1), 0);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(submit_as(r, RING_CRITICAL, 2, &urgent, PATIENCE_MS), RING_QUEUED);
    fake_let(1);
    fake_reached(COPY_ASYNC, 2);
    CHECK_EQ(taken(2), 1);
    ring_completion news = next_completion(r);
    CHECK_EQ(news.id, 1);
    CHECK_EQ(news.state, RING_UNDER_WAY);
    CHECK_EQ(news.step, 1);
    CHECK(landed_ns[0] && !landed_ns[1]);
    fake_let_all();
    bool has_passed = false;
    for (;;) {
        ring_completion done = next_completion(r);
        has_passed |= done.id == 2;
        if (done.state == RING_UNDER_WAY || done.id == 2)
            continue;
        CHECK_DONE(done, 1, RING_DONE, LAYERS * RANGE, LAYERS);
        break;
    }
    CHECK(has_passed);
    CHECK_EQ(taken(1), LAYERS);
    close_ring(r);
}

/* ---- a serial ring: nothing follows a program that left requests in its communicator ---- */

static ring *open_serial(void)
{
    return open_ring_with((ring_options){ 3, WINDOW, 0, GRACE_MS, 0, PATIENCE_MS, 1, RANGE, 0, 0 });
}

TEST(test_what_gave_way_to_an_unclean_program_is_given_back_first)
{
    script s[2], next = { 0 };
    fake_reset();
    ring *r = open_serial();
    begin(r, s, RING_GET, PATIENCE_MS, PATIENCE_MS);
    let_it_give_way(RING_GET);
    CHECK_EQ(ring_cancel(r, 2), 1);
    ring_completion back = next_completion(r);
    CHECK_DONE(back, 1, RING_GIVEN_BACK, BEFORE, 2);
    CHECK_EQ(back.unclean, 0);
    script_move(&next, RING_GET, 0, 3, 1, RANGE);
    CHECK_EQ(submit(r, 3, &next, PATIENCE_MS), RING_FULL);  /* until its owner knows */
    ring_completion done = next_completion(r);
    CHECK_EQ(done.id, 2);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.unclean, 1);
    fake_let_all();
    CHECK_EQ(submit(r, 3, &next, PATIENCE_MS), RING_QUEUED);
    CHECK_DONE(next_completion(r), 3, RING_DONE, RANGE, 1);
    CHECK_EQ(taken(1), 2);
    close_ring(r);
}

TEST(test_what_waits_behind_an_unclean_program_is_given_back_first)
{
    script s[2];
    fake_reset();
    ring *r = open_serial();
    begin(r, s, RING_GET, PATIENCE_MS, PATIENCE_MS);
    CHECK_EQ(ring_cancel(r, 1), 1);
    CHECK_DONE(next_completion(r), 2, RING_GIVEN_BACK, 0, 0);
    ring_completion done = next_completion(r);
    CHECK_EQ(done.id, 1);
    CHECK_EQ(done.unclean, 1);
    CHECK_EQ(taken(2), 0);
    fake_let_all();
    close_ring(r);
}

TEST(test_other_rings_go_on_behind_an_unclean_program)
{
    script s[2];
    fake_reset();
    ring *r = open_for(4, 0, GRACE_MS);
    begin(r, s, RING_GET, PATIENCE_MS, PATIENCE_MS);
    let_it_give_way(RING_GET);
    CHECK_EQ(ring_cancel(r, 2), 1);
    CHECK_EQ(next_completion(r).id, 2);
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, RANGES * RANGE, RANGES);
    close_ring(r);
}

/* ---- room ---- */

TEST(test_less_urgent_programs_leave_room)
{
    enum { DEPTH = 16 };
    static const int priorities[] = { RING_BACKGROUND, RING_NORMAL, RING_CRITICAL };
    static const uint64_t full[] = { DEPTH - DEPTH / 4, DEPTH - DEPTH / 8, DEPTH };
    script s = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(DEPTH, 0, PATIENCE_MS);
    script_copy(&s, 1, 1, 10);
    uint64_t id = 0;
    for (int i = 0; i < 3; i++) {
        while (submit_as(r, priorities[i], id + 1, &s, PATIENCE_MS) == RING_QUEUED)
            id++;
        CHECK_EQ(id, full[i]);
        CHECK_EQ(submit_as(r, priorities[i], id + 1, &s, PATIENCE_MS), RING_FULL);
    }
    fake_let_all();
    for (uint64_t i = 0; i < id; i++)
        CHECK_EQ(next_completion(r).state, RING_DONE);
    close_ring(r);
}

TEST(test_there_are_no_other_priorities)
{
    script s = { 0 };
    fake_reset();
    ring *r = open_for(4, 0, PATIENCE_MS);
    script_copy(&s, 1, 1, 10);
    CHECK_EQ(submit_as(r, -1, 1, &s, PATIENCE_MS), RING_INVALID);
    CHECK_EQ(submit_as(r, RING_PRIORITIES, 1, &s, PATIENCE_MS), RING_INVALID);
    close_ring(r);
}

int main(void)
{
    RUN(test_urgent_program_passes_one_that_runs);
    RUN(test_ranges_are_moved_once_and_none_is_left_out);
    RUN(test_the_most_urgent_goes_first_and_equals_in_order);
    RUN(test_program_that_passes_may_be_passed);
    RUN(test_small_urgent_program_runs_in_the_submitting_call_on_an_idle_ring_only);
    RUN(test_what_gave_way_ends_at_once_when_it_is_cancelled);
    RUN(test_cancelled_program_does_not_give_way);
    RUN(test_abort_of_the_urgent_program_takes_nothing_from_what_gave_way);
    RUN(test_failure_of_either_is_its_own);
    RUN(test_stuck_urgent_program_leaves_what_gave_way_with_what_has_landed);
    RUN(test_time_limit_stands_still_for_what_gave_way);
    RUN(test_close_ends_both);
    RUN(test_what_waits_for_an_event_gives_way_when_that_has_come);
    RUN(test_layers_give_way_and_what_landed_is_told);
    RUN(test_what_gave_way_to_an_unclean_program_is_given_back_first);
    RUN(test_what_waits_behind_an_unclean_program_is_given_back_first);
    RUN(test_other_rings_go_on_behind_an_unclean_program);
    RUN(test_less_urgent_programs_leave_room);
    RUN(test_there_are_no_other_priorities);
    return check_done();
}
