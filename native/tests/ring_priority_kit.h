/* ring_priority_kit.h: programs of priorities on the faked device, whose windows of background work are a range. */
#pragma once
#include "ring_kit.h"

enum { GRACE_MS = 40, WINDOW = 400, RANGE = WINDOW / 4, RANGES = 8, BEFORE = 2 * RANGE };   /* a window of background work: a range */

static inline uint64_t landed(uint64_t id)
{
    uint64_t bytes;
    FAKE_DO(bytes = fake.landed[id]);
    return bytes;
}

static inline int submit_as(ring *r, int priority, uint64_t id, const script *s, int64_t timeout_ms)
{
    ring_completion unused;
    return ring_submit_as(r, priority, id, s->steps, s->count, timeout_ms, &unused);
}

static inline ring *open_for(uint32_t depth, uint64_t inline_bytes, int64_t grace_ms)
{
    return open_ring_with((ring_options){ depth, WINDOW, inline_bytes, grace_ms, 0, PATIENCE_MS, 0, RANGE, 0, 0 });
}
