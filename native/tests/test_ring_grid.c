/* Ranges: whatever is merged and cut, the same bytes go to the same places in the same order, window by window. */
#include "ring_kit.h"

enum { GRIDS = 1500, MOST_BLOCKS = 160 };

static uint64_t seed = 20260817;
static uint64_t below(uint64_t n)                           /* splitmix64 */
{
    uint64_t z = seed += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % n;
}

typedef struct random_grid {
    ring_step step;
    uint64_t local[3], remote[3], local_index[MOST_BLOCKS], remote_index[MOST_BLOCKS];
} random_grid;

static void random_index(uint64_t *index, uint32_t n)       /* runs of neighbours, and jumps */
{
    for (uint32_t i = 0; i < n; i++)
        index[i] = i && below(3) ? index[i - 1] + 1 : below(64);
}

static void make_grid(random_grid *g, int op)
{
    uint32_t tensors = (uint32_t)below(4), blocks = (uint32_t)below(MOST_BLOCKS + 1);
    uint64_t bytes = 1 + below(16);
    for (uint32_t t = 0; t < tensors; t++) {
        g->local[t] = 0x1000000 * (t + 1) + below(100);
        g->remote[t] = 0x2000000 * (t + 1) + below(100);
    }
    random_index(g->local_index, blocks);
    random_index(g->remote_index, blocks);
    if (below(2))
        memcpy(g->remote_index, g->local_index, sizeof g->local_index);
    g->step = (ring_step){ .op = op, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .handle = g, .grid = {
        g->local, g->remote, g->local_index, g->remote_index, tensors, blocks,
        bytes + (below(4) ? 0 : below(3)), bytes + (below(4) ? 0 : below(3)), bytes, 1 + below(bytes) } };
}

/* One byte after the other, as the contract says it: tensors x blocks. False: that was all. */
typedef struct bytewise { uint32_t t, i; uint64_t at; } bytewise;
static bool next_byte(const ring_grid *g, bytewise *c, uint64_t *local, uint64_t *remote)
{
    if (c->t >= g->tensors || !g->blocks)
        return false;
    *local = g->local[c->t] + g->local_index[c->i] * g->local_stride + c->at;
    *remote = g->remote[c->t] + g->remote_index[c->i] * g->remote_stride + c->at;
    if (++c->at < (c->i + 1 < g->blocks ? g->bytes : g->tail))
        return true;
    c->at = 0;
    if (++c->i == g->blocks) {
        c->i = 0;
        c->t++;
    }
    return true;
}

/* The log holds exactly the bytes of these grids. Gives the number of ranges; *total: of bytes. */
static uint64_t check_bytes(const random_grid *grids, uint32_t n, uint64_t *total)
{
    uint64_t ranges = 0, at = 0, local, remote, wrong = 0;
    *total = 0;
    for (uint32_t k = 0; k < n; k++)
        for (bytewise c = { 0 }; next_byte(&grids[k].step.grid, &c, &local, &remote); at++, (*total)++) {
            while (ranges < fake.logged && (fake.log[ranges].call == RECORD || at == fake.log[ranges].bytes)) {
                ranges++;
                at = 0;
            }
            const fake_piece *p = &fake.log[ranges];
            wrong += ranges >= fake.logged || p->local + at != local || p->remote + at != remote;
        }
    CHECK_EQ(wrong, 0);
    if (*total && ranges < fake.logged)
        CHECK_EQ(at, fake.log[ranges].bytes);               /* the last range ends with the last byte */
    ranges = 0;
    for (uint64_t i = 0; i < fake.logged; i++)
        ranges += fake.log[i].call != RECORD;
    return ranges;
}

/* Neighbours are cut only where a window ends. A full window that is not the last is followed by its fence, the
 * 16th by a synchronize instead. */
static uint64_t full_of_ranges;
static void check_windows(uint64_t window, uint32_t grids)
{
    uint64_t in_window = 0, ranges = 0, unproven = 0, cuts = 0, tensors = 3 * grids;
    bool fence = false;                                     /* must come next */
    for (uint64_t i = 0; i < fake.logged; i++) {
        const fake_piece *p = &fake.log[i], *next = &fake.log[i + 1];
        CHECK_EQ(p->call == RECORD, fence);                 /* the first piece behind a full window */
        fence = false;
        if (p->call == RECORD)
            continue;
        in_window += p->bytes;
        unproven += p->bytes;
        CHECK(p->bytes > 0 && in_window <= window);
        if (in_window == window || ++ranges == 192) {
            full_of_ranges += in_window < window;
            in_window = ranges = 0;
            fence = unproven < 16 * window;
            unproven = fence ? unproven : 0;
        } else if (i + 1 < fake.logged && p->local + p->bytes == next->local && p->remote + p->bytes == next->remote)
            cuts++;
    }
    CHECK(cuts <= tensors);
}

static void run_grids(int op, uint32_t n, uint64_t window, uint64_t limit)
{
    random_grid grids[3];
    ring_step steps[3];
    ring_completion done;
    uint64_t total;
    fake_reset();
    ring *r = open_ring(2, window, limit, 1000);
    for (uint32_t k = 0; k < n; k++) {
        make_grid(&grids[k], op);
        steps[k] = grids[k].step;
    }
    if (ring_submit(r, 1, steps, n, 20000, &done) == RING_QUEUED)
        done = next_completion(r);
    close_ring(r);
    uint64_t ranges = check_bytes(grids, n, &total);
    CHECK_DONE(done, 1, RING_DONE, total, ranges);
    check_windows(window, n);
}

TEST(test_random_grids_move_the_bytes_that_their_blocks_name)
{
    static const int ops[] = { RING_COPY, RING_GET, RING_PUT };
    static const uint64_t mosts[] = { 20, 400, 10000 };
    for (int i = 0; i < GRIDS && !check_failures; i++)
        run_grids(ops[below(3)], (uint32_t)below(4), 1 + below(mosts[below(3)]), below(2) * 1000);
    if (check_failures)
        printf("the seed was %llu\n", (unsigned long long)seed);
    CHECK(full_of_ranges > 10);
}

TEST(test_neighbours_travel_as_one_range)
{
    fake_reset();
    ring *r = open_ring(2, 1000, 1000, 1000);
    uint64_t local[2] = { 1000, 5000 }, remote[2] = { 0x10000, 0x20000 };
    uint64_t here[6] = { 3, 4, 5, 9, 10, 11 }, there[6] = { 7, 8, 9, 10, 20, 21 };
    ring_step s = { .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .grid = { local, remote, here, there, 2, 6, 10, 10, 10, 4 } };
    ring_completion done;
    CHECK_EQ(ring_submit(r, 1, &s, 1, 1000, &done), RING_RAN);
    CHECK_DONE(done, 1, RING_DONE, 108, 6);
    CHECK_EQ(fake.log[0].local, 1030);
    CHECK_EQ(fake.log[0].bytes, 30);
    CHECK_EQ(fake.log[1].bytes, 10);                        /* a neighbour there, but not here */
    CHECK_EQ(fake.log[2].bytes, 14);                        /* the tail */
    CHECK_EQ(fake.log[3].local, 5030);
    CHECK_EQ(fake.log[5].remote, 0x20000 + 200);
    close_ring(r);
}

TEST(test_range_larger_than_the_window_is_cut)
{
    fake_reset();
    ring *r = open_ring(2, 64, 0, 1000);
    script s = { 0 };
    script_copy(&s, 1, 2, 100);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 200, 5);
    static const uint64_t want[] = { 64, 0, 36, 28, 0, 64, 0, 8 };       /* 0: a fence */
    CHECK_EQ(fake.logged, 8);
    for (int i = 0; i < 8; i++)
        CHECK_EQ(fake.log[i].bytes, want[i]);
    close_ring(r);
}

TEST(test_descriptors_go_in_batches_of_at_most_192)
{
    static const int ops[] = { RING_GET, RING_PUT }, calls[] = { GET, PUT };
    for (int k = 0; k < 2; k++) {
        fake_reset();
        ring *r = open_ring(2, 1000000, 0, 1000);
        script s = { 0 };
        script_move(&s, ops[k], 0, 1, 600, 3);
        CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
        CHECK_DONE(next_completion(r), 1, RING_DONE, 1800, 600);
        CHECK_EQ(fake_calls(calls[k]), 4);
        CHECK_EQ(fake.log[0].number, 192);
        CHECK_EQ(fake.log[599].number, 24);
        close_ring(r);
    }
}

TEST(test_two_windows_are_under_way_at_most)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(2, 100, 0, 1000);
    script s = { 0 };
    script_copy(&s, 1, 6, 100);
    CHECK_EQ(submit(r, 1, &s, 30000), RING_QUEUED);
    for (uint64_t window = 2; window <= 6; window++) {
        fake_reached(COPY_ASYNC, window);                   /* it waits for the window before last */
        fake_reached(RECORD, window < 6 ? window : 5);        /* the last has none */
        CHECK_EQ(fake_calls(COPY_ASYNC), window);
        fake_let(2);                                        /* a copy and its fence */
    }
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, 600, 6);
    CHECK_EQ(fake.most, 4);                                 /* two copies, two fences */
    close_ring(r);
}

TEST(test_first_outside)
{
    static const uint64_t values[] = { 3, 0, 7, 9, 7, UINT64_MAX };
    CHECK_EQ(ring_first_outside(values, 6, 10), 5);
    CHECK_EQ(ring_first_outside(values, 6, 9), 3);
    CHECK_EQ(ring_first_outside(values, 6, 3), 0);
    CHECK_EQ(ring_first_outside(values, 5, 10), 5);
    CHECK_EQ(ring_first_outside(values, 6, UINT64_MAX), 5);
    CHECK_EQ(ring_first_outside(NULL, 0, 0), 0);
}

TEST(test_parts_of_blocks_are_numbered_through_the_cache)
{
    static const uint64_t blocks[] = { 7, 2 };
    uint64_t parts[] = { 5, 0, 3, 2 };
    ring_number_parts(parts, 4, blocks, 3);
    CHECK_EQ(parts[0], 2 * 3 + 2);
    CHECK_EQ(parts[1], 7 * 3);
    CHECK_EQ(parts[2], 2 * 3);
    CHECK_EQ(parts[3], 7 * 3 + 2);
    ring_number_parts(parts, 0, NULL, 1);
    CHECK_EQ(parts[0], 2 * 3 + 2);
}

TEST(test_units_are_numbered_stretch_by_stretch)
{
    /* Blocks of two heads of three tokens each, from the second token on: of each token the unit of either head. */
    static const ring_units one_by_one = { 1, 4, 1, 3, 6, 1, 1 }, in_a_row = { 0, 5, 5, 1, 2, 2, 2 };
    static const uint64_t heads[] = { 0, 3 }, expected[] = { 1, 4, 2, 5, 6, 9, 7, 10 }, rows[] = { 1, 3, 5 };
    uint64_t numbers[9] = { 0 };
    ring_number_units(numbers, &one_by_one, heads, 2);
    for (int i = 0; i < 8; i++)
        CHECK_EQ(numbers[i], expected[i]);
    CHECK_EQ(numbers[8], 0);
    static const uint64_t second[] = { 1 };
    ring_number_units(numbers, &in_a_row, second, 1);        /* two tokens in a unit: the last one has one of them */
    for (int i = 0; i < 3; i++)
        CHECK_EQ(numbers[i], rows[i]);
    CHECK_EQ(numbers[3], expected[3]);
}

int main(void)
{
    RUN(test_random_grids_move_the_bytes_that_their_blocks_name);
    RUN(test_parts_of_blocks_are_numbered_through_the_cache);
    RUN(test_units_are_numbered_stretch_by_stretch);
    RUN(test_neighbours_travel_as_one_range);
    RUN(test_range_larger_than_the_window_is_cut);
    RUN(test_descriptors_go_in_batches_of_at_most_192);
    RUN(test_two_windows_are_under_way_at_most);
    RUN(test_first_outside);
    return check_done();
}
