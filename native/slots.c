/* slots.c: checks slot numbers, records their users, and cuts values into pieces that make few grids. */
#pragma GCC visibility push(default)
#include "slots.h"
#pragma GCC visibility pop

#include <stdbool.h>
#include <stdlib.h>

static uint64_t length_of(const int64_t *lengths, uint64_t i)
{
    return lengths ? (uint64_t)lengths[i] : 1;
}

static bool is_inside(int64_t start, uint64_t length, uint64_t slots)
{
    return length == 0 || (start >= 0 && length <= slots && (uint64_t)start <= slots - length);
}

int slots_check(const int64_t *starts, const int64_t *lengths, uint64_t count, uint64_t slots, uint64_t *at)
{
    enum { BITS = 64 };
    int status = SLOTS_OK;
    uint64_t *seen = calloc(slots / BITS + 1, sizeof *seen);
    if (!seen)
        return SLOTS_NO_MEMORY;
    for (uint64_t i = 0; i < count && status == SLOTS_OK; i++) {
        uint64_t start = (uint64_t)starts[i], length = length_of(lengths, i);
        *at = i;
        if (!is_inside(starts[i], length, slots))
            status = SLOTS_OUTSIDE;
        for (uint64_t slot = start; slot < start + length && status == SLOTS_OK; slot++) {
            uint64_t bit = 1ULL << slot % BITS;
            if (seen[slot / BITS] & bit)
                status = SLOTS_TWICE;
            seen[slot / BITS] |= bit;
        }
    }
    free(seen);
    return status;
}

int slots_take(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count, int writes, uint64_t *at)
{
    uint16_t most = writes ? SLOTS_FREE : SLOTS_READERS - 1;
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < length_of(lengths, i); k++)
            if (map[(uint64_t)starts[i] + k] > most) {
                *at = i;
                return SLOTS_BUSY;
            }
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < length_of(lengths, i); k++) {
            uint16_t *slot = &map[(uint64_t)starts[i] + k];
            *slot = writes ? SLOTS_WRITER : (uint16_t)(*slot + 1);
        }
    return SLOTS_OK;
}

void slots_give(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < length_of(lengths, i); k++) {
            uint16_t *slot = &map[(uint64_t)starts[i] + k];
            *slot = *slot == SLOTS_WRITER ? SLOTS_FREE : (uint16_t)(*slot - 1);
        }
}

/* ---- pieces ---- */

typedef struct piece { uint64_t tokens, run, start, place; } piece;

static bool same_class(const piece *a, const piece *b)
{
    return a->tokens == b->tokens && a->run == b->run;
}

/* By class; within one as they came, which is the order of their places' values. */
static int compare(const void *left, const void *right)
{
    const piece *a = left, *b = right;
    if (!same_class(a, b))
        return a->tokens != b->tokens ? (a->tokens < b->tokens ? -1 : 1) : a->run < b->run ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

/* The runs of one value; how many. */
static uint64_t cut(const slots_values *values, uint64_t i, const int64_t *slots, piece *out)
{
    uint64_t tokens = values->tokens[i], made = 0;
    for (uint64_t t = 0, run; t < tokens; t += run) {
        run = values->whole ? tokens : 1;
        while (t + run < tokens && slots[t + run] == slots[t] + (int64_t)run)
            run++;
        out[made++] = (piece){ tokens, run, (uint64_t)slots[t], values->addresses[i] + t * values->token_bytes };
    }
    return made;
}

static uint64_t cut_all(const slots_values *values, piece *out)
{
    const int64_t *slots = values->slots;
    uint64_t made = 0;
    for (uint64_t i = 0; i < values->count; i++) {
        if (values->addresses[i])
            made += cut(values, i, slots, out + made);
        slots += values->whole ? 1 : values->tokens[i];
    }
    return made;
}

static uint64_t room_for(const slots_values *values)
{
    uint64_t room = 0;
    for (uint64_t i = 0; i < values->count; i++)
        room += values->whole ? 1 : values->tokens[i];
    return room;
}

int64_t slots_pieces(const slots_values *values, uint64_t *starts, uint64_t *places, slots_class *classes)
{
    piece *pieces = malloc((room_for(values) + 1) * sizeof *pieces);
    if (!pieces)
        return SLOTS_NO_MEMORY;
    uint64_t count = cut_all(values, pieces), known = 0;
    bool sorted = true;
    for (uint64_t p = 1; p < count && sorted; p++)
        sorted = same_class(&pieces[p - 1], &pieces[p]);
    if (!sorted)
        qsort(pieces, count, sizeof *pieces, compare);
    for (uint64_t p = 0; p < count; p++) {
        starts[p] = pieces[p].start;
        places[p] = pieces[p].place;
        if (p == 0 || !same_class(&pieces[p - 1], &pieces[p]))
            classes[known++] = (slots_class){ pieces[p].tokens, pieces[p].run, p, 0 };
        classes[known - 1].count++;
    }
    free(pieces);
    return (int64_t)known;
}
