/* lent.c: the ranges that the peer may reach. */
#include "net_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The number of ranges that begin at or before this address. */
static size_t upto(const lent_table *t, uint64_t address)
{
    size_t low = 0, high = t->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (t->ranges[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Ranges may overlap, so the search for one goes back as far as any of them reaches. */
static void note_reach(lent_table *t, size_t from)
{
    for (size_t i = from; i < t->count; i++) {
        uint64_t before = i ? t->ranges[i - 1].reach : 0, end = t->ranges[i].end;
        t->ranges[i].reach = end > before ? end : before;
    }
}

int lent_add(lent_table *t, uint64_t address, uint64_t bytes, int modes)
{
    uint64_t end;
    if (!bytes || !modes || (modes & ~(NET_READ | NET_WRITE)) || __builtin_add_overflow(address, bytes, &end))
        return -EINVAL;
    int code = 0;
    pthread_mutex_lock(&t->lock);
    if (t->count == t->room) {
        size_t room = t->room ? 2 * t->room : 16;
        lent_range *more = realloc(t->ranges, room * sizeof *more);
        code = more ? 0 : -ENOMEM;
        t->ranges = more ? more : t->ranges;
        t->room = more ? room : t->room;
    }
    if (!code) {
        size_t at = upto(t, address);
        memmove(&t->ranges[at + 1], &t->ranges[at], (t->count - at) * sizeof *t->ranges);
        t->ranges[at] = (lent_range){.address = address, .end = end, .modes = modes};
        t->count++;
        note_reach(t, at);
    }
    pthread_mutex_unlock(&t->lock);
    return code;
}

int lent_remove(lent_table *t, uint64_t address, uint64_t bytes, int modes)
{
    int code = -ENOENT;
    pthread_mutex_lock(&t->lock);
    for (size_t i = upto(t, address); code && i-- && t->ranges[i].address == address;)
        if (t->ranges[i].end == address + bytes && t->ranges[i].modes == modes) {
            t->count--;
            memmove(&t->ranges[i], &t->ranges[i + 1], (t->count - i) * sizeof *t->ranges);
            note_reach(t, i);
            code = 0;
        }
    pthread_mutex_unlock(&t->lock);
    return code;
}

bool lent_covers(lent_table *t, uint64_t address, uint64_t bytes, int modes)
{
    uint64_t end;
    bool found = false;
    if (__builtin_add_overflow(address, bytes, &end))
        return false;
    pthread_mutex_lock(&t->lock);
    for (size_t i = upto(t, address); !found && i-- && t->ranges[i].reach >= end;)
        found = t->ranges[i].end >= end && (t->ranges[i].modes & modes) == modes;
    pthread_mutex_unlock(&t->lock);
    return found;
}
