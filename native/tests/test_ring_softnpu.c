/* The ring on softnpu: bytes arrive, events order rings, faults end programs, and nothing lands afterwards. */
#include "ring_soft.h"
#include <sched.h>

enum { TENSORS = 2, BLOCKS = 48, STRIDE = 1024, SIZE = TENSORS * 64 * STRIDE, EXEC_CODE = 507057 };

typedef enum { DEVICE, PINNED, PLAIN } place;
typedef struct buffer { uint8_t *bytes; uint64_t size; place where; } buffer;

static buffer new_buffer(place where, uint64_t size)
{
    void *bytes = NULL;
    if (where == DEVICE)
        CHECK_OK(aclrtMalloc(&bytes, size, ACL_MEM_MALLOC_NORMAL_ONLY));
    else if (where == PINNED)
        CHECK_OK(aclrtMallocHost(&bytes, size));
    else
        bytes = malloc(size);
    return (buffer){ bytes, size, where };
}

static void free_buffer(buffer b)
{
    if (b.where == DEVICE)
        CHECK_OK(aclrtFree(b.bytes));
    else if (b.where == PINNED)
        CHECK_OK(aclrtFreeHost(b.bytes));
    else
        free(b.bytes);
}

static uint8_t pattern(uint64_t seed, uint64_t at)           /* seed 0: zeros */
{
    return seed ? (uint8_t)((at + seed) * 0x9e3779b97f4a7c15u >> 56) : 0;
}

static void fill(buffer b, uint64_t seed)
{
    uint8_t *here = malloc(b.size);
    for (uint64_t i = 0; i < b.size; i++)
        here[i] = pattern(seed, i);
    CHECK_OK(aclrtMemcpy(b.bytes, b.size, here, b.size, ACL_MEMCPY_DEFAULT));
    free(here);
}

static uint8_t *fetch(buffer b)
{
    uint8_t *here = malloc(b.size);
    CHECK_OK(aclrtMemcpy(here, b.size, b.bytes, b.size, ACL_MEMCPY_DEFAULT));
    return here;
}

static bool holds(buffer b, uint64_t seed)
{
    uint8_t *here = fetch(b);
    uint64_t same = 0;
    while (same < b.size && here[same] == pattern(seed, same))
        same++;
    free(here);
    return same == b.size;
}

/* ---- copies ---- */

typedef struct blocks { uint64_t local[TENSORS], remote[TENSORS], to[BLOCKS], from[BLOCKS]; ring_step step; } blocks;

/* Block to[i] comes from block from[i]; here and there are runs of neighbours. */
static void write_blocks(blocks *g, int kind, buffer local, buffer remote, uint64_t bytes)
{
    for (uint64_t t = 0; t < TENSORS; t++) {
        g->local[t] = (uint64_t)local.bytes + t * SIZE / TENSORS;
        g->remote[t] = (uint64_t)remote.bytes + t * SIZE / TENSORS;
    }
    for (uint64_t i = 0; i < BLOCKS; i++) {
        g->to[i] = i;
        g->from[i] = i % 3 ? g->from[i - 1] + 1 : (i * 29 + 5) % 60;
    }
    g->step = (ring_step){ .op = RING_COPY, .kind = kind, .grid = {
        g->local, g->remote, g->to, g->from, TENSORS, BLOCKS, STRIDE, STRIDE, bytes, bytes / 2 } };
}

static bool has_blocks(const blocks *g, const uint8_t *got)
{
    uint8_t *want = calloc(1, SIZE);
    for (uint64_t t = 0; t < TENSORS; t++)
        for (uint64_t i = 0; i < BLOCKS; i++)
            for (uint64_t k = 0; k < (i + 1 < BLOCKS ? g->step.grid.bytes : g->step.grid.tail); k++)
                want[t * SIZE / TENSORS + g->to[i] * STRIDE + k] = pattern(3, t * SIZE / TENSORS + g->from[i] * STRIDE + k);
    bool same = !memcmp(want, got, SIZE);                   /* also where nothing was to be written */
    free(want);
    return same;
}

static void copy_blocks(int kind, place to, place from, uint64_t bytes, uint64_t window, uint64_t inline_bytes)
{
    buffer local = new_buffer(to, SIZE), remote = new_buffer(from, SIZE);
    blocks g;
    fill(local, 0);
    fill(remote, 3);
    write_blocks(&g, kind, local, remote, bytes);
    ring *r = open_ring(window, inline_bytes, 1000);
    CHECK_DONE(run_steps(r, 5, &g.step, 1, PATIENCE_MS), 5, RING_DONE, TENSORS * ((BLOCKS - 1) * bytes + bytes / 2));
    close_ring(r);
    uint8_t *got = fetch(local);
    CHECK(has_blocks(&g, got));
    free(got);
    free_buffer(local);
    free_buffer(remote);
}

TEST(test_blocks_arrive_from_and_to_every_kind_of_memory)
{
    static const struct { int kind; place to, from; } ways[] = {
        { ACL_MEMCPY_DEVICE_TO_DEVICE, DEVICE, DEVICE }, { ACL_MEMCPY_HOST_TO_DEVICE, DEVICE, PINNED }, { ACL_MEMCPY_HOST_TO_DEVICE, DEVICE, PLAIN },
        { ACL_MEMCPY_DEVICE_TO_HOST, PINNED, DEVICE }, { ACL_MEMCPY_DEVICE_TO_HOST, PLAIN, DEVICE }, { ACL_MEMCPY_HOST_TO_HOST, PLAIN, PINNED },
        { ACL_MEMCPY_HOST_TO_HOST, PINNED, PLAIN }, { ACL_MEMCPY_DEFAULT, DEVICE, PINNED },
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (int k = 0; k < 4; k++)                         /* dense or not; one window, in the call, or many windows */
            copy_blocks(ways[i].kind, ways[i].to, ways[i].from, k % 2 ? STRIDE : STRIDE - 100, k < 2 ? 1 << 20 : 5000, k < 2 ? 1 << 20 : 0);
}

TEST(test_event_orders_two_rings)
{
    buffer first = new_buffer(DEVICE, SIZE), second = new_buffer(DEVICE, SIZE), third = new_buffer(DEVICE, SIZE);
    single a, b;
    aclrtEvent event;
    ring_completion unused;
    fill(first, 1);
    fill(second, 2);
    fill(third, 0);
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
    ring *producer = open_ring(1 << 20, 1 << 20, 1000), *consumer = open_ring(1 << 20, 1 << 20, 1000);
    one_range(&a, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, second.bytes, first.bytes, SIZE);
    one_range(&b, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, third.bytes, second.bytes, SIZE);
    const ring_step make[] = { a.step, { .op = RING_RECORD, .handle = event } };
    const ring_step take[] = { { .op = RING_WAIT, .handle = event }, b.step };
    CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:delay=60"), 0);
    CHECK_EQ(ring_submit(producer, 1, make, 2, PATIENCE_MS, &unused), RING_QUEUED);     /* issued here, and slow */
    CHECK_EQ(ring_submit(consumer, 2, take, 2, PATIENCE_MS, &unused), RING_QUEUED);
    ring_completion took = next_completion(consumer), made = next_completion(producer);
    CHECK_DONE(made, 1, RING_DONE, SIZE);
    CHECK_DONE(took, 2, RING_DONE, SIZE);
    CHECK(took.finished_ns - made.started_ns >= 60000000);
    CHECK(holds(third, 1));
    close_ring(producer);
    close_ring(consumer);
    CHECK_OK(aclrtDestroyEvent(event));
    free_buffer(first);
    free_buffer(second);
    free_buffer(third);
}

TEST(test_notifies_gate_layers_that_are_not_ready_when_they_are_asked_for)
{
    enum { LAYERS = 3, LAYER = SIZE / LAYERS };
    buffer from = new_buffer(DEVICE, SIZE), to = new_buffer(DEVICE, SIZE);
    uint64_t local[LAYERS], remote[LAYERS], index = 0;
    aclrtNotify gates[LAYERS];
    const ring_layers layers = { .tensors = 1, .group = 1, .gates = gates, .gate_ms = 30000 };
    const ring_step send = { .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &layers, .grid = {
        .local = local, .remote = remote, .local_index = &index, .remote_index = &index, .tensors = LAYERS, .blocks = 1,
        .local_stride = LAYER, .remote_stride = LAYER, .bytes = LAYER, .tail = LAYER } };
    ring_completion news = { 0 };
    fill(from, 7);
    fill(to, 0);
    ring *compute = open_ring(1 << 20, 0, 1000), *wire = open_ring(1 << 20, 1 << 20, 1000);
    for (int i = 0; i < LAYERS; i++) {
        CHECK_OK(aclrtCreateNotify(&gates[i], 0));
        local[i] = (uintptr_t)(to.bytes + i * LAYER);
        remote[i] = (uintptr_t)(from.bytes + i * LAYER);
    }
    CHECK_EQ(ring_submit(wire, 1, &send, 1, PATIENCE_MS, &news), RING_QUEUED);
    ring_watch(wire, 1);
    for (int i = 0; i < LAYERS; i++) {
        const ring_step ready = { .op = RING_RECORD, .kind = RING_NOTIFY, .handle = gates[i] };
        CHECK(memcmp(to.bytes + i * LAYER, from.bytes + i * LAYER, LAYER) != 0);
        CHECK_EQ(ring_submit(compute, 10 + i, &ready, 1, PATIENCE_MS, &news), RING_QUEUED);
        CHECK_DONE(next_completion(compute), 10 + i, RING_DONE, 0);
        news = next_completion(wire);
        CHECK(i == LAYERS - 1 || (news.state == RING_UNDER_WAY && news.step == (uint32_t)i + 1));
    }
    while (news.state == RING_UNDER_WAY)
        news = next_completion(wire);
    CHECK_DONE(news, 1, RING_DONE, LAYERS * LAYER);
    CHECK(memcmp(to.bytes, from.bytes, LAYERS * LAYER) == 0);
    close_ring(compute);
    close_ring(wire);
    for (int i = 0; i < LAYERS; i++)
        CHECK_OK(aclrtDestroyNotify(gates[i]));
    free_buffer(from);
    free_buffer(to);
}

/* ---- faults ---- */

typedef struct scene { ring *r; buffer to, from; single s; } scene;

static void set_scene(scene *c, uint64_t size, uint64_t window, uint64_t inline_bytes, int64_t grace_ms)
{
    c->to = new_buffer(DEVICE, size);
    c->from = new_buffer(DEVICE, size);
    fill(c->to, 0);
    fill(c->from, 1);
    c->r = open_ring(window, inline_bytes, grace_ms);
    one_range(&c->s, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, c->to.bytes, c->from.bytes, size);
}

/* Whatever happened: later work of the ring arrives, and nothing of the earlier work writes where it was to write. */
static void strike_scene(scene *c)
{
    buffer other = new_buffer(DEVICE, c->to.size);
    single s;
    softnpu_fault_clear();
    fill(c->to, 7);
    fill(other, 0);
    CHECK_DONE(run_steps(c->r, 99, one_range(&s, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, other.bytes, c->from.bytes, other.size), 1, PATIENCE_MS),
               99, RING_DONE, other.size);
    CHECK(holds(other, 1));
    CHECK(holds(c->to, 7));
    close_ring(c->r);
    free_buffer(other);
    free_buffer(c->to);
    free_buffer(c->from);
}

TEST(test_refused_copy_fails_the_program)
{
    for (uint64_t inline_bytes = 0; inline_bytes <= SIZE; inline_bytes += SIZE) {
        scene c;
        set_scene(&c, SIZE, SIZE, inline_bytes, 1000);
        CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:fail=207005"), 0);
        ring_completion done = run_steps(c.r, 1, &c.s.step, 1, PATIENCE_MS);
        CHECK_DONE(done, 1, RING_FAILED, 0);
        CHECK_EQ(done.origin, RING_ACL);
        CHECK_EQ(done.code, 207005);
        CHECK(strstr(done.message, "aclrtMemcpyAsync") != NULL);
        strike_scene(&c);
    }
}

TEST(test_copy_that_fails_when_it_runs_fails_the_program)
{
    for (uint64_t inline_bytes = 0; inline_bytes <= SIZE; inline_bytes += SIZE) {
        scene c;
        set_scene(&c, SIZE, inline_bytes ? SIZE : SIZE / 8, inline_bytes, 1000);
        CHECK_EQ(softnpu_fault(inline_bytes ? "aclrtMemcpyAsync:exec=507057" : "aclrtMemcpyAsync:exec=507057@3"), 0);
        ring_completion done = run_steps(c.r, 1, &c.s.step, 1, PATIENCE_MS);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.code, EXEC_CODE);
        CHECK(done.bytes <= (inline_bytes ? 0 : SIZE / 4));
        CHECK(strstr(done.message, "aclrtMemcpyAsync") != NULL);
        strike_scene(&c);
    }
}

TEST(test_late_copy_arrives)
{
    scene c;
    set_scene(&c, SIZE, SIZE, SIZE, 1000);
    CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:delay=50"), 0);
    ring_completion done = run_steps(c.r, 1, &c.s.step, 1, PATIENCE_MS);
    CHECK_DONE(done, 1, RING_DONE, SIZE);
    CHECK(done.finished_ns - done.started_ns >= 50000000);
    CHECK(holds(c.to, 1));
    strike_scene(&c);
}

TEST(test_copy_that_hangs_is_aborted_at_the_time_limit_and_memory_is_quiet)
{
    for (uint64_t inline_bytes = 0; inline_bytes <= SIZE; inline_bytes += SIZE) {
        scene c;
        set_scene(&c, SIZE, 2 * SIZE, inline_bytes, 1000);
        CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:hang"), 0);
        ring_completion done = run_steps(c.r, 1, &c.s.step, 1, 40);
        CHECK_DONE(done, 1, RING_TIMED_OUT, 0);
        CHECK(done.finished_ns - done.started_ns >= 40000000);
        CHECK(holds(c.to, 0));
        strike_scene(&c);
    }
}

TEST(test_copy_that_hangs_is_aborted_after_a_cancellation_and_memory_is_quiet)
{
    for (uint64_t inline_bytes = 0; inline_bytes <= SIZE; inline_bytes += SIZE) {
        scene c;
        ring_completion unused;
        set_scene(&c, SIZE, SIZE, inline_bytes, 250);
        CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:hang"), 0);
        CHECK_EQ(ring_submit(c.r, 1, &c.s.step, 1, PATIENCE_MS, &unused), RING_QUEUED);
        CHECK_EQ(ring_submit(c.r, 2, NULL, 0, PATIENCE_MS, &unused), RING_QUEUED);
        CHECK_EQ(ring_cancel(c.r, 1), 1);
        ring_completion done = next_completion(c.r);
        CHECK_DONE(done, 1, RING_CANCELLED, 0);
        CHECK_DONE(next_completion(c.r), 2, RING_DONE, 0);
        strike_scene(&c);
    }
}

TEST(test_close_ends_a_copy_that_hangs)
{
    scene c;
    ring_completion done[2];
    set_scene(&c, SIZE, SIZE, SIZE, 250);
    CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:hang"), 0);
    CHECK_EQ(ring_submit(c.r, 1, &c.s.step, 1, PATIENCE_MS, done), RING_QUEUED);
    CHECK_EQ(ring_close(c.r, PATIENCE_MS), 0);
    CHECK_EQ(ring_reap(c.r, done, 2), 1);
    CHECK_DONE(done[0], 1, RING_CANCELLED, 0);
    ring_free(c.r);
    free_buffer(c.to);
    free_buffer(c.from);
}

TEST(test_what_is_counted_after_a_cancellation_has_landed_and_no_more_lands)
{
    enum { LARGE = 2 << 20, WINDOW = 64 << 10, BEFORE = 19 };
    softnpu_counters now;
    ring_completion done;
    scene c;
    set_scene(&c, LARGE, WINDOW, 0, 250);
    CHECK_EQ(softnpu_fault("aclrtMemcpyAsync:hang@20"), 0);
    softnpu_get_counters(&now);
    uint64_t enough = now.bytes_copied + BEFORE * WINDOW;
    CHECK_EQ(ring_submit(c.r, 1, &c.s.step, 1, PATIENCE_MS, &done), RING_QUEUED);
    while (softnpu_get_counters(&now), now.bytes_copied < enough)
        sched_yield();
    CHECK_EQ(ring_cancel(c.r, 1), 1);
    done = next_completion(c.r);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK(done.bytes >= 16 * WINDOW && done.bytes <= BEFORE * WINDOW);    /* the stream was synchronized after sixteen windows */
    uint8_t *got = fetch(c.to);
    uint64_t landed = 0;
    while (landed < LARGE && got[landed] == pattern(1, landed))
        landed++;
    CHECK(landed >= done.bytes && landed < (BEFORE + 1) * WINDOW);
    free(got);
    strike_scene(&c);
}

int main(void)
{
    softnpu_counters before, after;
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    softnpu_get_counters(&before);
    RUN(test_blocks_arrive_from_and_to_every_kind_of_memory);
    RUN(test_event_orders_two_rings);
    RUN(test_notifies_gate_layers_that_are_not_ready_when_they_are_asked_for);
    RUN(test_refused_copy_fails_the_program);
    RUN(test_copy_that_fails_when_it_runs_fails_the_program);
    RUN(test_late_copy_arrives);
    RUN(test_copy_that_hangs_is_aborted_at_the_time_limit_and_memory_is_quiet);
    RUN(test_copy_that_hangs_is_aborted_after_a_cancellation_and_memory_is_quiet);
    RUN(test_close_ends_a_copy_that_hangs);
    RUN(test_what_is_counted_after_a_cancellation_has_landed_and_no_more_lands);
    softnpu_get_counters(&after);
    CHECK_EQ(after.streams, before.streams);
    CHECK_EQ(after.events, before.events);
    CHECK_EQ(after.threads, before.threads);
    CHECK_EQ(after.device_bytes + after.pinned_bytes, before.device_bytes + before.pinned_bytes);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
