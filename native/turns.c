/* turns.c: a program that is passed keeps a share of the bytes, and its windows take no longer than urgent work may wait. */
#include "ring_internal.h"

/* Bytes that pass for each byte of what waits: so a ninth of all is left for it, a tenth and something to spare. */
enum { PASSING = 8, MOST_TURNS = 2 };     /* turns that are owed at most: behind a gate nothing gives way for as long as it takes */

static uint64_t min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

void share_note_next(ring_stream *on, int priority, const program *p)
{
    uint64_t bytes = p ? min(p->window_bytes, p->total - p->issued) : 0;
    /* relaxed: a number by itself, by which windows are ordered; a stale one costs a window */
    atomic_store_explicit(&on->next_bytes[priority], p && !bytes ? 1 : bytes, memory_order_relaxed);
}

static bool is_due(const ring_stream *on, int priority)
{
    uint64_t next = atomic_load_explicit(&on->next_bytes[priority], memory_order_relaxed);
    return next && on->passed[priority] >= PASSING * next;
}

int share_due(const ring_stream *on, int than)
{
    int priority = RING_PRIORITIES - 1;
    while (priority > than && !is_due(on, priority))
        priority--;
    return priority;
}

void share_count(ring_stream *on, program *p)
{
    uint64_t bytes = p->issued - p->counted, paid = PASSING * bytes, *mine = &on->passed[p->priority];
    p->counted = p->issued;
    *mine -= min(*mine, paid);
    for (int priority = p->priority + 1; priority < RING_PRIORITIES; priority++)
        if (atomic_load_explicit(&on->next_bytes[priority], memory_order_relaxed))
            on->passed[priority] = min(on->passed[priority] + bytes, MOST_TURNS * PASSING * on->options.window_bytes);
}

/* ---- windows of background work ---- */

/* A window that took longer than the one before it may have waited for a processor: it counts for an eighth. */
static void learn(ring_stream *on, uint64_t bytes, int64_t ns)
{
    uint64_t now = bytes * 1000 / (uint64_t)(ns > 0 ? ns : 1), *known = &on->bytes_per_us;
    *known = !*known || now > *known ? now + 1 : *known - (*known - now) / 8;
}

void window_fit(const ring_stream *on, program *p)
{
    enum { LEAST = 8 };
    const ring_options *o = &on->options;
    if (p->priority != RING_BACKGROUND || !o->background_us || !o->background_bytes || !on->bytes_per_us)
        return;
    uint64_t fits = on->bytes_per_us * o->background_us, least = o->background_bytes / LEAST + 1;
    p->window_bytes = fits < least ? least : min(fits, min(o->background_bytes, o->window_bytes));
}

void window_landed(ring_stream *on, program *p, uint64_t bytes)
{
    int64_t now = ring_now_ns();
    if (p->window_landed_ns)
        learn(on, bytes, now - p->window_landed_ns);
    p->window_landed_ns = now;
    window_fit(on, p);
}
