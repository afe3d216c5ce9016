/* sorted.c: ranges in an array sorted by address. Looking up is O(log n) and touches few cache lines; inserting moves
 * the tail, which costs less than the system calls that come with every new range. */
#include "runtime.h"
#include <stdlib.h>
#include <string.h>

size_t soft_sorted_after(const soft_sorted *sorted, uintptr_t addr)
{
    size_t low = 0, high = sorted->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (sorted->entries[middle].base <= addr)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool soft_sorted_insert(soft_sorted *sorted, soft_entry entry)
{
    if (sorted->count == sorted->room) {
        size_t room = sorted->room ? sorted->room * 2 : 64;
        soft_entry *entries = realloc(sorted->entries, room * sizeof *entries);
        if (!entries)
            return false;
        sorted->entries = entries;
        sorted->room = room;
    }
    size_t at = soft_sorted_after(sorted, entry.base);
    memmove(sorted->entries + at + 1, sorted->entries + at, (sorted->count - at) * sizeof entry);
    sorted->entries[at] = entry;
    sorted->count++;
    return true;
}

void soft_sorted_remove(soft_sorted *sorted, size_t index)
{
    sorted->count--;
    memmove(sorted->entries + index, sorted->entries + index + 1, (sorted->count - index) * sizeof *sorted->entries);
    if (!sorted->count) {                                   /* so that an idle library owns nothing */
        free(sorted->entries);
        *sorted = (soft_sorted){ .count = 0 };
    }
}
