/* What the ring says has landed has: only synchronizing the stream tells of failed work; queries and events do not. */
#include "ring_kit.h"

enum { LAYERS = 6 };
typedef struct layered { ring_step step; ring_layers layers; uint64_t local[LAYERS], remote[LAYERS], index; int64_t landed_ns[LAYERS]; } layered;

/* Layers of one range of 100 bytes, one at a time. */
static void set_layers(layered *s, uint64_t id)
{
    *s = (layered){ .layers = { .tensors = 1, .group = 1, .landed_ns = s->landed_ns } };
    for (uint32_t i = 0; i < LAYERS; i++) {
        s->local[i] = 0x100000000000 + i * 0x1000;
        s->remote[i] = (id << 32) + i * 0x1000;
    }
    s->step = (ring_step){ .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &s->layers, .grid = {
        .local = s->local, .remote = s->remote, .local_index = &s->index, .remote_index = &s->index,
        .tensors = LAYERS, .blocks = 1, .local_stride = 100, .remote_stride = 100, .bytes = 100, .tail = 100 } };
}

TEST(test_layer_whose_copy_failed_is_never_said_to_have_landed)
{
    for (uint64_t bad = 1; bad <= LAYERS; bad++) {
        fake_reset();
        fake.bad_copy = bad;
        ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
        layered s;
        ring_completion done;
        set_layers(&s, 1);
        CHECK_EQ(ring_submit(r, 1, &s.step, 1, PATIENCE_MS, &done), RING_QUEUED);
        ring_watch(r, 1);
        for (done = next_completion(r); done.state == RING_UNDER_WAY; done = next_completion(r))
            CHECK(done.step < bad);
        CHECK_DONE(done, 1, RING_FAILED, 100 * (bad - 1), bad);     /* and those behind it were not begun */
        CHECK_EQ(done.code, FAKE_EXEC_CODE);
        for (uint64_t i = 0; i < LAYERS; i++)
            CHECK_EQ(s.landed_ns[i] != 0, i + 1 < bad);
        close_ring(r);
    }
}

TEST(test_bytes_of_a_window_whose_copy_failed_are_not_counted)
{
    for (uint64_t bad = 1; bad <= 100; bad += 11) {
        fake_reset();
        fake.bad_copy = bad;
        ring *r = open_ring(4, 100, 0, PATIENCE_MS);
        script s = { 0 };
        script_copy(&s, 1, 100, 100);
        CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
        ring_completion done = next_completion(r);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.code, FAKE_EXEC_CODE);
        CHECK(done.bytes <= (bad - 1) * 100);
        close_ring(r);
    }
}

/* Windows are full by their number of ranges, too: 43 of them here, and few bytes. */
TEST(test_a_copy_that_failed_in_a_long_program_of_small_ranges_is_told_after_some_windows)
{
    enum { WINDOW_RANGES = 192, SOME = 16 + 3 };
    fake_reset();
    fake.bad_copy = 1;
    ring *r = open_ring(4, 1 << 20, 0, PATIENCE_MS);
    script s = { 0 };
    for (int step = 0; step < SCRIPT_STEPS; step++)
        script_copy(&s, 1, SCRIPT_RANGES, 8);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.bytes, 0);
    CHECK(fake.copies <= SOME * WINDOW_RANGES);
    close_ring(r);
}

int main(void)
{
    RUN(test_layer_whose_copy_failed_is_never_said_to_have_landed);
    RUN(test_bytes_of_a_window_whose_copy_failed_are_not_counted);
    RUN(test_a_copy_that_failed_in_a_long_program_of_small_ranges_is_told_after_some_windows);
    return check_done();
}
