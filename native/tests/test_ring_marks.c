/* Marks: a long program tells how far it is, and its time limit counts from the last mark it passed. */
#include "ring_kit.h"

static int64_t ring_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* `layers` times: one range of 100 bytes, then a mark. */
static void script_layers(script *s, uint64_t id, int layers)
{
    for (int i = 0; i < layers; i++) {
        script_copy(s, id, 1, 100);
        s->steps[s->count++] = (ring_step){ .op = RING_MARK };
    }
}

static void let_layers(uint64_t n)
{
    fake_let(2 * n);                                        /* the range, and the event that closes the window */
}

/* What ring_reap() says next that is not the end; 0 if it has nothing to say. */
static uint32_t marks_passed(ring *r, uint64_t id)
{
    ring_completion news;
    if (ring_reap(r, &news, 1) != 1)
        return 0;
    CHECK_EQ(news.id, id);
    CHECK_EQ(news.state, RING_UNDER_WAY);
    return news.step;
}

/* The program's end, behind whatever news of it. */
static ring_completion end_of(ring *r)
{
    ring_completion done = next_completion(r);
    while (done.state == RING_UNDER_WAY)
        done = next_completion(r);
    return done;
}

TEST(test_passed_marks_are_told_while_the_program_runs)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script s = { 0 };
    script_layers(&s, 1, 4);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);                            /* two layers are on the device, the first is awaited */
    CHECK(!is_readable(r));
    let_layers(1);
    fake_reached(COPY_ASYNC, 3);                            /* it has landed: the third was issued */
    CHECK_EQ(marks_passed(r, 1), 1);
    CHECK_EQ(marks_passed(r, 1), 0);                        /* told once */
    let_layers(2);
    fake_reached(SYNC_STREAM, 1);                           /* three have landed, all is issued */
    CHECK_EQ(marks_passed(r, 1), 3);                        /* the latest news only */
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, 400, 4);
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_the_end_comes_after_all_news_of_the_program)
{
    fake_reset();
    ring *r = open_ring(4, 1 << 20, 1 << 20, PATIENCE_MS);
    script s = { 0 };
    script_layers(&s, 1, 4);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);   /* marks are for the worker, however small the program is */
    ring_completion news;
    do {
        news = next_completion(r);
        CHECK_EQ(news.id, 1);
    } while (news.state == RING_UNDER_WAY);
    CHECK_DONE(news, 1, RING_DONE, 400, 4);
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_news_are_not_lost_when_there_is_no_room_for_them)
{
    fake_reset();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script first = { 0 }, second = { 0 };
    script_copy(&first, 1, 1, 100);
    CHECK_EQ(submit(r, 1, &first, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    fake_hold();
    script_layers(&second, 2, 3);
    CHECK_EQ(submit(r, 2, &second, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    let_layers(1);
    fake_reached(COPY_ASYNC, 4);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 100, 1);   /* room for one: the news of the second wait */
    CHECK(is_readable(r));
    CHECK_EQ(marks_passed(r, 2), 1);
    fake_let_all();
    for (ring_completion done = next_completion(r); done.state != RING_DONE; done = next_completion(r))
        CHECK_EQ(done.state, RING_UNDER_WAY);
    close_ring(r);
}

TEST(test_the_time_limit_counts_from_the_last_mark)
{
    enum { LIMIT_MS = 200, LAYERS = 4 };
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script s = { 0 };
    script_layers(&s, 1, LAYERS);
    int64_t began = ring_time();
    CHECK_EQ(submit(r, 1, &s, LIMIT_MS), RING_QUEUED);
    for (uint64_t i = 0; i < LAYERS; i++) {                 /* each takes most of the limit: together they take far more */
        struct timespec most = { 0, LIMIT_MS * 700000 };
        nanosleep(&most, NULL);
        let_layers(1);
    }
    ring_completion done = end_of(r);
    CHECK_DONE(done, 1, RING_DONE, 400, 4);
    CHECK(done.finished_ns - began > LIMIT_MS * 1000000ll);
    close_ring(r);
}

TEST(test_a_program_that_stands_still_between_marks_is_stopped)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script s = { 0 };
    script_layers(&s, 1, 4);
    CHECK_EQ(submit(r, 1, &s, 50), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    let_layers(1);
    ring_completion done = end_of(r);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    CHECK_EQ(done.bytes, 100);
    CHECK_EQ(fake_calls(ABORT), 1);
    close_ring(r);
}

TEST(test_a_cancelled_program_passes_no_more_marks_than_have_landed)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script s = { 0 };
    script_layers(&s, 1, 4);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_let_all();
    ring_completion done = end_of(r);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.bytes, 200);
    close_ring(r);
}

int main(void)
{
    RUN(test_passed_marks_are_told_while_the_program_runs);
    RUN(test_the_end_comes_after_all_news_of_the_program);
    RUN(test_news_are_not_lost_when_there_is_no_room_for_them);
    RUN(test_the_time_limit_counts_from_the_last_mark);
    RUN(test_a_program_that_stands_still_between_marks_is_stopped);
    RUN(test_a_cancelled_program_passes_no_more_marks_than_have_landed);
    return check_done();
}
