/* slots.h: finds the tokens of a paged KV cache, at C speed.
 *
 * A slot is the place of one token in every tensor of a cache. Slots are given as runs: starts[i] and the slots behind it,
 * lengths[i] in all. If `lengths` is NULL, each run is one slot. A run of length 0 is ignored, wherever it starts.
 *
 * No call blocks. Any thread may call, but a map must be used by one thread at a time.                               */
#pragma once
#include <stdint.h>

enum { SLOTS_OK = 0, SLOTS_OUTSIDE = -1, SLOTS_TWICE = -2, SLOTS_BUSY = -3, SLOTS_NO_MEMORY = -4 };

/* Checks that all runs lie in [0, slots) and do not overlap. If not, *at is the first run that does not fit. */
int slots_check(const int64_t *starts, const int64_t *lengths, uint64_t count, uint64_t slots, uint64_t *at);

/* The users of a slot: none, a number of readers, or one writer. Runs must have been checked. */
enum { SLOTS_FREE = 0, SLOTS_READERS = 65534, SLOTS_WRITER = 65535 };
int  slots_take(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count, int writes, uint64_t *at);  /* takes all or none; SLOTS_BUSY: *at is the run */
void slots_give(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count);

/* The values that a call moves. Value i has tokens[i] tokens, which are in the slots of its chunk: tokens[i] entries of slots[],
 * where chunks follow each other. If `whole` is set, they are in slots[i] and the slots behind it. */
typedef struct slots_values {
    const int64_t *slots;
    const uint64_t *tokens;
    const uint64_t *addresses;            /* where the first token's bytes are in each value; 0: the value is left out */
    uint64_t count;
    uint64_t token_bytes;
    int32_t whole;
} slots_values;

/* Pieces that make one grid: `count` of them from `first`, each `run` tokens long, of values with `tokens` tokens. */
typedef struct slots_class { uint64_t tokens, run, first, count; } slots_class;

/* Cuts values into maximal runs of consecutive slots: piece p has its first token in slot starts[p] and at places[p]. The arrays
 * must have room for as many pieces and classes as there are tokens or, if `whole` is set, values. Returns the number of
 * classes, or SLOTS_NO_MEMORY. */
int64_t slots_pieces(const slots_values *values, uint64_t *starts, uint64_t *places, slots_class *classes);
