/* expect.c: how long a program will take, learned from the ones before it.
 *
 * A small program runs in the submitting call, because waking another core and being woken again costs more. The sum of its bytes
 * does not say what is small: a thousand ranges of some bytes take as long as half a MiB, and memory that the kernel copies, or that
 * no one has touched so far, is two to thirty times slower than a pool's. So the ring compares what programs took with what they
 * would have taken on memory as fast as a pool's, and expects of the next one what it has found. */
#include "ring_internal.h"

enum { ONE = 16, MOST_SLOW = 4096 * ONE, OUTLIER = 16 };  /* slowness: 16 is as fast as a pool's memory, 32 half as fast */
enum { CALL_NS = 1000, RANGE_NS = 45, KIB_NS = 64, WORTH_NS = 8000 };

static uint64_t work_ns(uint64_t ranges, uint64_t bytes)
{
    return CALL_NS + ranges * RANGE_NS + bytes / 1024 * KIB_NS;
}

/* relaxed: a number by itself, and a stale one is an estimate, too */
static uint64_t slowness(const ring_stream *on)
{
    uint32_t known = atomic_load_explicit(&on->slowness, memory_order_relaxed);
    return known ? known : ONE;
}

uint64_t expected_ns(const ring_stream *on, uint64_t ranges, uint64_t bytes)
{
    return work_ns(ranges, bytes) * slowness(on) / ONE;
}

/* Slow memory must not hold the caller twice, so half of what is worse counts at once; what is better, by a quarter: a program may
 * have been fast because all of it was in the cache. A thread that had to wait for a processor may have taken any time. */
void expect_learn(ring_stream *on, const program *p, uint64_t bytes, uint64_t ranges)
{
    uint64_t work = work_ns(ranges, bytes), known = slowness(on);
    if (p->done.state != RING_DONE || p->layers || p->is_gated || p->done.aside_ns || work < WORTH_NS)
        return;
    uint64_t took = (uint64_t)(p->done.finished_ns - p->done.started_ns), found = took * ONE / work + 1;
    found = found > OUTLIER * known ? OUTLIER * known : found;
    known = found > known ? known + (found - known + 1) / 2 : known - (known - found) / 4;
    known = known > MOST_SLOW ? MOST_SLOW : known;
    atomic_store_explicit(&on->slowness, (uint32_t)known, memory_order_relaxed);
}
