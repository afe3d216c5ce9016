/* Turns: how small the windows of background work are, and what share is left for what is passed. */
#include "ring_priority_kit.h"

/* ---- how long urgent work waits ---- */

/* How many bytes the next copy of a background program has whose device took 2 ms for each of its windows. */
static uint64_t last_window(uint32_t background_us)
{
    enum { LARGE = 800, WINDOWS_IN_ALL = 12 };
    script s = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_ring_with((ring_options){ 4, LARGE, 0, PATIENCE_MS, 0, PATIENCE_MS, 1, LARGE, background_us, 0 });
    script_copy(&s, 1, 1, WINDOWS_IN_ALL * LARGE);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &s, PATIENCE_MS), RING_QUEUED);
    for (uint64_t window = 1; window <= WINDOWS_IN_ALL / 2; window++) {
        fake_reached(SYNC_EVENT, window);
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
        fake_let(2);                                        /* a window, and the event behind it */
    }
    fake_reached(SYNC_EVENT, WINDOWS_IN_ALL / 2 + 1);
    uint64_t slow = fake.logged;                            /* what is let go now takes no time */
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_DONE);
    CHECK_EQ(done.bytes, WINDOWS_IN_ALL * LARGE);
    uint64_t at = 0, bytes = 0;
    for (uint64_t i = 0; i < fake.logged; i++)
        if (fake.log[i].call == COPY_ASYNC) {
            CHECK_EQ(fake.log[i].remote & 0xffffffff, at);
            at += fake.log[i].bytes;
            if (i < slow)
                bytes = fake.log[i].bytes;
        }
    close_ring(r);
    return bytes;
}

TEST(test_windows_of_background_work_are_as_small_as_its_device_is_slow)
{
    CHECK_EQ(last_window(0), 800);
    CHECK_EQ(last_window(1000000), 800);
    CHECK(last_window(1) <= 101);
}

/* A layer ends in the middle of a window, and the device turns out to be slow while the program is aside. */
TEST(test_background_layers_that_gave_way_go_on_in_windows)
{
    enum { LAYERS = 2, BLOCKS = 3, BLOCK = 100, LARGE = 400, SMALLEST = LARGE / 8 + 1 };
    uint64_t local[LAYERS], remote[LAYERS], index[BLOCKS] = { 0, 1, 2 };
    ring_layers layers = { .tensors = 1, .group = 1 };
    for (uint32_t i = 0; i < LAYERS; i++) {
        local[i] = 0x100000000000 + i * 0x1000;
        remote[i] = (1ull << 32) + i * 0x1000;
    }
    ring_step step = { .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &layers, .grid = {
        .local = local, .remote = remote, .local_index = index, .remote_index = index, .tensors = LAYERS, .blocks = BLOCKS,
        .local_stride = 2 * BLOCK, .remote_stride = 2 * BLOCK, .bytes = BLOCK, .tail = BLOCK } };
    script urgent = { 0 };
    ring_completion ran;
    fake_reset();
    fake_hold();
    ring *r = open_ring_with((ring_options){ 4, LARGE, 0, PATIENCE_MS, 0, PATIENCE_MS, 0, LARGE, 1, 0 });
    script_copy(&urgent, 2, 6, LARGE);
    CHECK_EQ(ring_submit_as(r, RING_BACKGROUND, 1, &step, 1, PATIENCE_MS, &ran), RING_QUEUED);
    fake_reached(SYNC_STREAM, 1);
    CHECK_EQ(submit_as(r, RING_CRITICAL, 2, &urgent, PATIENCE_MS), RING_QUEUED);
    fake_let(BLOCKS);
    for (uint64_t window = 1; window <= 4; window++) {
        fake_reached(SYNC_EVENT, window);
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
        fake_let(2);                                        /* a window, and the event behind it */
    }
    fake_let_all();
    CHECK_EQ(next_completion(r).id, 2);
    CHECK_EQ(next_completion(r).state, RING_DONE);
    uint64_t first = 0;                                     /* of the second layer: what comes behind it takes no time */
    for (uint64_t i = 0; i < fake.logged && !first; i++)
        if (fake.log[i].call == COPY_ASYNC && fake.log[i].remote == remote[1])
            first = fake.log[i].bytes;
    CHECK(first && first <= SMALLEST);
    close_ring(r);
}

/* ---- what is passed keeps a share ---- */

enum { MANY = 180, PASSING = 8 };                           /* bytes that pass for each of what is passed */

/* How many bytes of each program came to the device before the last range of `last`. */
static void bytes_until(uint64_t last, uint64_t bytes[4])
{
    uint64_t sum[4] = { 0 };
    for (uint64_t i = 0; i < fake.logged; i++) {
        uint64_t id = fake.log[i].remote >> 32;
        if ((fake.log[i].call != COPY_ASYNC && fake.log[i].call != GET) || id > 3)
            continue;
        sum[id] += fake.log[i].bytes;
        if (id == last)
            memcpy(bytes, sum, sizeof sum);
    }
}

TEST(test_background_work_keeps_a_share_beside_one_large_program)
{
    script background = { 0 }, normal = { 0 };
    uint64_t bytes[4] = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(4, 0, PATIENCE_MS);
    script_copy(&background, 1, MANY, RANGE);
    script_copy(&normal, 2, MANY, WINDOW);
    CHECK_EQ(submit_as(r, RING_NORMAL, 2, &normal, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &background, PATIENCE_MS), RING_QUEUED);
    fake_let_all();
    CHECK_DONE(next_completion(r), 2, RING_DONE, MANY * WINDOW, MANY);
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_DONE, MANY * RANGE, MANY);
    CHECK(done.aside_ns > 0);
    bytes_until(2, bytes);
    CHECK(bytes[1] * 9 >= (bytes[2] - PASSING * WINDOW) && bytes[1] * PASSING <= bytes[2] + PASSING * RANGE);
    CHECK_EQ(landed(1), MANY * RANGE);
    CHECK_EQ(landed(2), MANY * WINDOW);
    close_ring(r);
}

TEST(test_background_work_keeps_a_share_beside_many_small_programs)
{
    enum { SMALL = 200, BYTES = 50 };
    script background = { 0 }, small = { 0 };
    uint64_t bytes[4] = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(SMALL + 4, 0, PATIENCE_MS);
    script_copy(&background, 1, MANY, RANGE);
    script_copy(&small, 2, 1, BYTES);
    for (uint64_t id = 2; id < SMALL + 2 - SMALL / 8; id++)
        CHECK_EQ(submit_as(r, id % 2 ? RING_CRITICAL : RING_NORMAL, id, &small, PATIENCE_MS), RING_QUEUED);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, 1, &background, PATIENCE_MS), RING_QUEUED);
    fake_let_all();
    for (uint64_t id = 1; id < SMALL + 2 - SMALL / 8; id++)
        CHECK_EQ(next_completion(r).state, RING_DONE);
    bytes_until(2, bytes);
    uint64_t passed = bytes[2];
    CHECK(bytes[1] >= passed / PASSING - 2 * RANGE && bytes[1] <= passed / PASSING + RANGE);
    close_ring(r);
}

/* Windows that are full of ranges before they are full of bytes, and programs that are smaller than a window. */
TEST(test_a_share_is_of_the_bytes_whatever_a_turn_moves)
{
    enum { SMALL = 20 };
    script background[SMALL] = { 0 }, normal = { 0 };
    uint64_t bytes[4] = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(SMALL + 40, 0, PATIENCE_MS);
    script_copy(&normal, 2, MANY, WINDOW);
    CHECK_EQ(submit_as(r, RING_NORMAL, 2, &normal, PATIENCE_MS), RING_QUEUED);
    for (int i = 0; i < SMALL; i++) {
        script_copy(&background[i], 1, 1, i % 2 ? RANGE : RANGE / 2);
        CHECK_EQ(submit_as(r, RING_BACKGROUND, 10 + i, &background[i], PATIENCE_MS), RING_QUEUED);
    }
    fake_let_all();
    for (int i = 0; i <= SMALL; i++)
        CHECK_EQ(next_completion(r).state, RING_DONE);
    bytes_until(2, bytes);
    CHECK_EQ(bytes[1], SMALL * RANGE * 3 / 4);              /* an eighth of what passed is far more */
    uint64_t before = 0;
    for (uint64_t i = 0, passed = 0; i < fake.logged; i++)
        if (fake.log[i].call == COPY_ASYNC) {
            bool is_background = fake.log[i].remote >> 32 == 1;
            CHECK(!is_background || before + fake.log[i].bytes <= passed / PASSING + 2 * RANGE);
            *(is_background ? &before : &passed) += fake.log[i].bytes;
        }
    close_ring(r);
}

TEST(test_what_waits_behind_work_without_a_pause_is_not_held_back_by_it_being_full)
{
    enum { DEPTH = 16 };
    script s = { 0 };
    fake_reset();
    fake_hold();
    ring *r = open_for(DEPTH, 0, PATIENCE_MS);
    script_copy(&s, 1, 1, 10);
    uint64_t id = 0;
    while (submit_as(r, RING_NORMAL, id + 1, &s, PATIENCE_MS) == RING_QUEUED)
        id++;
    CHECK_EQ(id, DEPTH - DEPTH / 8);
    CHECK_EQ(submit_as(r, RING_BACKGROUND, ++id, &s, PATIENCE_MS), RING_QUEUED);   /* one of each has room, */
    CHECK_EQ(submit_as(r, RING_BACKGROUND, id + 1, &s, PATIENCE_MS), RING_FULL);
    CHECK_EQ(submit_as(r, RING_CRITICAL, ++id, &s, PATIENCE_MS), RING_QUEUED);     /* and what is urgent still has some */
    fake_let_all();
    for (uint64_t i = 0; i < id; i++)
        CHECK_EQ(next_completion(r).state, RING_DONE);
    close_ring(r);
}

int main(void)
{
    RUN(test_windows_of_background_work_are_as_small_as_its_device_is_slow);
    RUN(test_background_layers_that_gave_way_go_on_in_windows);
    RUN(test_background_work_keeps_a_share_beside_one_large_program);
    RUN(test_background_work_keeps_a_share_beside_many_small_programs);
    RUN(test_a_share_is_of_the_bytes_whatever_a_turn_moves);
    RUN(test_what_waits_behind_work_without_a_pause_is_not_held_back_by_it_being_full);
    return check_done();
}
