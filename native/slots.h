/* slots.h: where the tokens of a paged KV cache are, at C speed.
 *
 * A slot is the place of one token in every tensor of a cache. Runs say which slots are meant: starts[i] and the slots
 * behind it, lengths[i] in all; lengths NULL: one slot each. A run of length 0 means nothing, wherever it starts.
 *
 * None of these blocks. From any thread; a map by one thread at a time.                                              */
#pragma once
#include <stdint.h>

enum { SLOTS_OK = 0, SLOTS_OUTSIDE = -1, SLOTS_TWICE = -2, SLOTS_BUSY = -3, SLOTS_NO_MEMORY = -4 };

/* All runs within [0, slots) and apart from each other? If not, *at is the first that is not. */
int slots_check(const int64_t *starts, const int64_t *lengths, uint64_t count, uint64_t slots, uint64_t *at);

/* Who uses a slot: no call, so many readers, or one writer. Runs have to be checked before. */
enum { SLOTS_FREE = 0, SLOTS_READERS = 65534, SLOTS_WRITER = 65535 };
int  slots_take(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count, int writes, uint64_t *at);  /* all or nothing; SLOTS_BUSY: *at is the run */
void slots_give(uint16_t *map, const int64_t *starts, const int64_t *lengths, uint64_t count);

/* What a call moves: values, each of so many tokens. The tokens of value i are in the slots of its chunk: tokens[i] entries of
 * slots[], the chunks one behind the other; or, `whole`, in slots[i] and the slots behind it. */
typedef struct slots_values {
    const int64_t *slots;
    const uint64_t *tokens;
    const uint64_t *addresses;            /* of the first token's bytes in each value; 0: leave this value out */
    uint64_t count;
    uint64_t token_bytes;
    int32_t whole;
} slots_values;

/* Pieces first to first + count are all `run` tokens long and of values with `tokens` tokens: one grid. */
typedef struct slots_class { uint64_t tokens, run, first, count; } slots_class;

/* Cuts values into maximal runs of consecutive slots: piece p has its first token in slot starts[p] and at places[p]. Room
 * for as many pieces and classes as there are tokens or, `whole`, values. Gives the number of classes, or SLOTS_NO_MEMORY. */
int64_t slots_pieces(const slots_values *values, uint64_t *starts, uint64_t *places, slots_class *classes);
