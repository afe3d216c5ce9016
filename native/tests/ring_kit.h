/* ring_kit.h: programs, rings and completions for tests of the ring on the fake device. */
#pragma once
#include "ring_fake.h"
#include <poll.h>

enum { PATIENCE_MS = 30000 };

/* ---- a program ---- */

enum { SCRIPT_STEPS = 8, SCRIPT_RANGES = 1024 };
typedef struct script {
    ring_step steps[SCRIPT_STEPS];
    uint32_t count;
    uint64_t local[SCRIPT_STEPS], remote[SCRIPT_STEPS], index[SCRIPT_RANGES];
} script;

/* Ranges with gaps between them, so that none are merged. The fake finds `id` in the upper half of remote addresses. */
static inline void script_move(script *s, int op, int kind, uint64_t id, uint32_t ranges, uint64_t bytes)
{
    uint32_t k = s->count++;
    s->local[k] = 0x100000000000 + k * 0x10000000;
    s->remote[k] = (id << 32) + k * 0x10000000;
    for (uint32_t i = 0; i < ranges; i++)
        s->index[i] = i;
    s->steps[k] = (ring_step){ .op = op, .kind = kind, .rank = 1, .handle = s, .grid = {
        .local = &s->local[k], .remote = &s->remote[k], .local_index = s->index, .remote_index = s->index,
        .tensors = 1, .blocks = ranges, .local_stride = 2 * bytes, .remote_stride = 2 * bytes, .bytes = bytes, .tail = bytes } };
}

static inline void script_copy(script *s, uint64_t id, uint32_t ranges, uint64_t bytes)
{
    script_move(s, RING_COPY, ACL_MEMCPY_DEVICE_TO_DEVICE, id, ranges, bytes);
}

static inline void script_host_copy(script *s, uint64_t id, uint32_t ranges, uint64_t bytes)
{
    script_move(s, RING_COPY, ACL_MEMCPY_HOST_TO_HOST, id, ranges, bytes);
}

static inline void script_event(script *s, int op, fake_event *event)
{
    s->steps[s->count++] = (ring_step){ .op = op, .handle = event };
}

/* ---- a ring ---- */

static inline ring *open_ring_with(ring_options options)
{
    ring *r = NULL;
    int code = ring_open(&fake_driver, HOME, &options, &r);
    if (code || !r) {
        printf("ring_open gave %d\n", code);
        abort();
    }
    return r;
}

static inline ring *open_patient_ring(uint32_t depth, uint64_t window_bytes, uint64_t inline_bytes, int64_t grace_ms, int64_t patience_ms)
{
    return open_ring_with((ring_options){ depth, window_bytes, inline_bytes, grace_ms, patience_ms, PATIENCE_MS, 0, 0, 0, 0 });
}

static inline ring *open_aborting_ring(uint32_t depth, uint64_t window_bytes, int64_t grace_ms, int64_t abort_ms)
{
    return open_ring_with((ring_options){ depth, window_bytes, 0, grace_ms, 0, abort_ms, 0, 0, 0, 0 });
}

static inline ring *open_ring(uint32_t depth, uint64_t window_bytes, uint64_t inline_bytes, int64_t grace_ms)
{
    return open_patient_ring(depth, window_bytes, inline_bytes, grace_ms, 0);
}

static inline void close_ring(ring *r)
{
    CHECK_EQ(ring_close(r, PATIENCE_MS), 0);
    ring_free(r);
    CHECK_EQ(fake.live_streams, 0);
    CHECK_EQ(fake.live_events, 0);
    CHECK_EQ(fake.strays, 0);
    CHECK_EQ(fake_waiting(), 0);
}

/* A ring that is stuck is leaked on purpose; here it stays in sight of the leak checker. */
static ring *volatile stuck_rings[64];
static inline void leave_stuck(ring *r)
{
    static int n;
    CHECK_EQ(ring_close(r, PATIENCE_MS), 1);
    stuck_rings[n++ % 64] = r;
}

static inline int submit(ring *r, uint64_t id, const script *s, int64_t timeout_ms)
{
    ring_completion unused;
    return ring_submit(r, id, s->steps, s->count, timeout_ms, &unused);
}

static inline bool is_readable(const ring *r)
{
    struct pollfd fd = { .fd = ring_fd(r), .events = POLLIN };
    return poll(&fd, 1, 0) == 1;
}

/* A wake may have nothing to tell: a layer's news can be reaped before its signal is written. */
static inline ring_completion next_completion(ring *r)
{
    ring_completion done;
    struct pollfd fd = { .fd = ring_fd(r), .events = POLLIN };
    do {
        if (poll(&fd, 1, PATIENCE_MS) != 1) {
            printf("no completion came\n");
            abort();
        }
    } while (ring_reap(r, &done, 1) != 1);
    return done;
}

#define CHECK_DONE(got, want_id, want_state, want_bytes, want_ranges) do { ring_completion done_ = (got); \
        CHECK_EQ(done_.id, want_id); CHECK_EQ(done_.state, want_state); \
        CHECK_EQ(done_.bytes, want_bytes); CHECK_EQ(done_.ranges, want_ranges); \
        CHECK(done_.submitted_ns > 0 && done_.submitted_ns <= done_.started_ns && done_.started_ns <= done_.finished_ns); } while (0)
