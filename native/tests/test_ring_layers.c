/* Layers: a long program tells who watches it how far it is, and its time limit counts from the last layer that landed. */
#include "ring_kit.h"

static int64_t ring_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

enum { MOST = 8 };
typedef struct layered { ring_step step; ring_layers layers; uint64_t local[MOST], remote[MOST], index; int64_t landed_ns[MOST]; } layered;

/* `count` layers of one range of 100 bytes, `group` at a time. */
static void set_layers(layered *s, uint64_t id, uint32_t count, uint32_t group)
{
    *s = (layered){ .layers = { .tensors = 1, .group = group, .landed_ns = s->landed_ns } };
    for (uint32_t i = 0; i < count; i++) {
        s->local[i] = 0x100000000000 + i * 0x1000;
        s->remote[i] = (id << 32) + i * 0x1000;
    }
    s->step = (ring_step){ .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &s->layers, .grid = {
        .local = s->local, .remote = s->remote, .local_index = &s->index, .remote_index = &s->index,
        .tensors = count, .blocks = 1, .local_stride = 100, .remote_stride = 100, .bytes = 100, .tail = 100 } };
}

static int submit_layers(ring *r, uint64_t id, const layered *s, int64_t timeout_ms)
{
    ring_completion unused;
    return ring_submit(r, id, &s->step, 1, timeout_ms, &unused);
}

static void let_layers(uint64_t n)
{
    fake_let(n);                                            /* a range each */
}

/* What ring_reap() says next that is not the end; 0 if it has nothing to say. */
static uint32_t layers_landed(ring *r, uint64_t id)
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

TEST(test_landed_layers_are_told_while_the_program_runs)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 4, 1);
    CHECK_EQ(submit_layers(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(ring_watch(r, 1), 0);
    fake_reached(SYNC_STREAM, 1);                           /* the first layer is on the device, and awaited */
    CHECK(!is_readable(r));
    let_layers(1);
    fake_reached(COPY_ASYNC, 2);                            /* it has landed: the second was issued */
    CHECK_EQ(layers_landed(r, 1), 1);
    CHECK_EQ(layers_landed(r, 1), 0);                        /* told once */
    let_layers(2);
    fake_reached(COPY_ASYNC, 4);                            /* three have landed */
    CHECK_EQ(layers_landed(r, 1), 3);                        /* the latest news only */
    fake_let_all();
    CHECK_DONE(end_of(r), 1, RING_DONE, 400, 4);
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_the_end_comes_after_all_news_of_the_program)
{
    fake_reset();
    ring *r = open_ring(4, 1 << 20, 1 << 20, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 4, 1);
    CHECK_EQ(submit_layers(r, 1, &s, PATIENCE_MS), RING_QUEUED);   /* layers are for the worker, however small they are */
    ring_watch(r, 1);
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
    script first = { 0 };
    layered second;
    script_copy(&first, 1, 1, 100);
    CHECK_EQ(submit(r, 1, &first, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    fake_hold();
    set_layers(&second, 2, 3, 1);
    CHECK_EQ(submit_layers(r, 2, &second, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(ring_watch(r, 2), 0);
    fake_reached(SYNC_STREAM, 2);
    let_layers(1);
    fake_reached(COPY_ASYNC, 3);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 100, 1);   /* room for one: the news of the second wait */
    CHECK(is_readable(r));
    CHECK_EQ(layers_landed(r, 2), 1);
    fake_let_all();
    for (ring_completion done = next_completion(r); done.state != RING_DONE; done = next_completion(r))
        CHECK_EQ(done.state, RING_UNDER_WAY);
    close_ring(r);
}

TEST(test_the_time_limit_counts_from_the_last_layer)
{
    enum { LIMIT_MS = 200, LAYERS = 4 };
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, LAYERS, 1);
    int64_t began = ring_time();
    CHECK_EQ(submit_layers(r, 1, &s, LIMIT_MS), RING_QUEUED);
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

TEST(test_a_program_that_stands_still_between_layers_is_stopped)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 4, 1);
    CHECK_EQ(submit_layers(r, 1, &s, 50), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    let_layers(1);
    ring_completion done = end_of(r);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    CHECK_EQ(done.bytes, 100);
    CHECK_EQ(fake_calls(ABORT), 1);
    close_ring(r);
}

TEST(test_a_cancelled_program_tells_no_more_layers_than_have_landed)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 4, 1);
    CHECK_EQ(submit_layers(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_let_all();
    ring_completion done = end_of(r);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.bytes, 100);
    close_ring(r);
}

TEST(test_an_unwatched_program_wakes_no_thread)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 6, 1);
    CHECK_EQ(submit_layers(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    let_layers(2);
    fake_reached(COPY_ASYNC, 3);
    CHECK(!is_readable(r));
    CHECK_EQ(layers_landed(r, 1), 0);
    CHECK_EQ(ring_watch(r, 1), 2);                    /* how far it is, to begin with */
    CHECK_EQ(layers_landed(r, 1), 0);
    let_layers(1);
    fake_reached(COPY_ASYNC, 4);
    CHECK_EQ(layers_landed(r, 1), 3);
    CHECK_EQ(ring_watch(r, 2), 0);                    /* no such program */
    fake_let_all();
    CHECK_DONE(end_of(r), 1, RING_DONE, 600, 6);
    close_ring(r);
}

TEST(test_layers_are_stamped_when_they_land_and_travel_in_groups)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    layered s;
    set_layers(&s, 1, 5, 2);
    CHECK_EQ(submit_layers(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(fake_calls(COPY_ASYNC), 2);                    /* one group is on the device */
    let_layers(2);
    fake_reached(COPY_ASYNC, 3);
    CHECK_EQ(ring_watch(r, 1), 2);
    CHECK(s.landed_ns[0] && s.landed_ns[0] == s.landed_ns[1]);
    CHECK_EQ(s.landed_ns[2], 0);
    fake_let_all();
    ring_completion done = end_of(r);
    CHECK_DONE(done, 1, RING_DONE, 500, 5);
    for (int i = 1; i < 5; i++)
        CHECK(s.landed_ns[i] >= s.landed_ns[i - 1] && s.landed_ns[i] <= done.finished_ns);
    close_ring(r);
}

TEST(test_layers_that_make_no_sense_are_refused)
{
    fake_reset();
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    ring_completion ran;
    layered good, s;
    const aclrtNotify none[4] = { NULL };
    set_layers(&good, 1, 4, 1);
#define REFUSED(change) do { s = good; s.step.layers = &s.layers; change; \
        CHECK_EQ(ring_submit(r, 1, &s.step, 1, 1000, &ran), RING_INVALID); } while (0)
    REFUSED(s.layers.tensors = 0);
    REFUSED(s.layers.group = 0);
    REFUSED(s.layers.tensors = 3);                          /* four tensors are no whole number of layers */
    REFUSED(s.layers.gates = none);
    REFUSED(s.step.op = RING_RECORD);
    ring_step both[2] = { good.step, good.step };
    CHECK_EQ(ring_submit(r, 1, both, 2, 1000, &ran), RING_INVALID);
    close_ring(r);
}

int main(void)
{
    RUN(test_landed_layers_are_told_while_the_program_runs);
    RUN(test_the_end_comes_after_all_news_of_the_program);
    RUN(test_news_are_not_lost_when_there_is_no_room_for_them);
    RUN(test_the_time_limit_counts_from_the_last_layer);
    RUN(test_a_program_that_stands_still_between_layers_is_stopped);
    RUN(test_a_cancelled_program_tells_no_more_layers_than_have_landed);
    RUN(test_an_unwatched_program_wakes_no_thread);
    RUN(test_layers_are_stamped_when_they_land_and_travel_in_groups);
    RUN(test_layers_that_make_no_sense_are_refused);
    return check_done();
}
