/* handle.c: handles are numbers that look like pointers.
 *
 *   63      56 55   52 51         24 23        0
 *   [  0x5a  ][ kind ][ generation  ][  index  ]
 *
 * The top byte makes the number an address that no x86-64 or aarch64 process can own, so that following one by mistake
 * traps at once. The generation grows when an entry is given back: a stale handle is never taken for its successor.   */
#include "runtime.h"
#include <stdlib.h>

enum { KINDS = SOFT_GRAPH + 1, INDEX_BITS = 24, GENERATION_BITS = 28 };
#define MAGIC 0x5aull

typedef struct entry {
    soft_object *object;                                    /* NULL: free */
    uint32_t generation;
    uint32_t next_free;                                     /* index + 1 of the next free entry */
} entry;
typedef struct table {
    pthread_mutex_t lock;
    entry *entries;
    uint32_t used, room, first_free;                        /* first_free is index + 1, 0 when none */
    uint64_t live;
} table;
#define TABLE { .lock = PTHREAD_MUTEX_INITIALIZER }
static table tables[] = { TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, TABLE };
_Static_assert(sizeof tables / sizeof *tables == KINDS, "a table for each kind");

static void *to_handle(soft_kind kind, uint32_t generation, uint32_t index)
{
    return (void *)(uintptr_t)(MAGIC << 56 | (uint64_t)kind << 52 | (uint64_t)generation << INDEX_BITS | index);
}

static entry *find(soft_kind kind, const void *handle)      /* the table is locked */
{
    uint64_t number = (uintptr_t)handle;
    uint32_t index = number & ((1u << INDEX_BITS) - 1);
    uint32_t generation = number >> INDEX_BITS & ((1u << GENERATION_BITS) - 1);
    if (number >> 56 != MAGIC || (number >> 52 & 0xf) != (uint64_t)kind || index >= tables[kind].used)
        return NULL;
    entry *found = &tables[kind].entries[index];
    return found->object && found->generation == generation ? found : NULL;
}

static entry *take_entry(table *in)
{
    if (in->first_free) {
        entry *free_entry = &in->entries[in->first_free - 1];
        in->first_free = free_entry->next_free;
        return free_entry;
    }
    if (in->used == in->room) {
        uint32_t room = in->room ? in->room * 2 : 64;
        entry *entries = room <= 1u << INDEX_BITS ? realloc(in->entries, room * sizeof *entries) : NULL;
        if (!entries)
            return NULL;
        in->entries = entries;
        in->room = room;
    }
    entry *fresh = &in->entries[in->used++];
    *fresh = (entry){ .generation = 1 };
    return fresh;
}

void *soft_handle_new(soft_kind kind, soft_object *object)
{
    table *in = &tables[kind];
    void *handle = NULL;
    pthread_mutex_lock(&in->lock);
    entry *place = take_entry(in);
    if (place) {
        place->object = object;
        in->live++;
        handle = to_handle(kind, place->generation, (uint32_t)(place - in->entries));
    }
    pthread_mutex_unlock(&in->lock);
    return handle;
}

void *soft_handle_get(soft_kind kind, const void *handle)
{
    pthread_mutex_lock(&tables[kind].lock);
    entry *found = find(kind, handle);
    soft_object *object = found ? found->object : NULL;
    if (object)
        soft_ref(object);
    pthread_mutex_unlock(&tables[kind].lock);
    return object;
}

void *soft_handle_remove(soft_kind kind, const void *handle)
{
    table *in = &tables[kind];
    pthread_mutex_lock(&in->lock);
    entry *found = find(kind, handle);
    soft_object *object = found ? found->object : NULL;
    if (found) {
        found->object = NULL;
        found->generation = (found->generation + 1) & ((1u << GENERATION_BITS) - 1);
        found->next_free = in->first_free;
        in->first_free = (uint32_t)(found - in->entries) + 1;
        in->live--;
    }
    pthread_mutex_unlock(&in->lock);
    return object;
}

uint64_t soft_handle_count(soft_kind kind)
{
    pthread_mutex_lock(&tables[kind].lock);
    uint64_t live = tables[kind].live;
    pthread_mutex_unlock(&tables[kind].lock);
    return live;
}

void soft_ref(soft_object *object)
{
    /* relaxed: the caller has a reference already, so the object cannot be destroyed meanwhile */
    atomic_fetch_add_explicit(&object->refs, 1, memory_order_relaxed);
}

void soft_unref(soft_object *object)
{
    /* release: our writes come before the destruction; acquire: the destroyer sees those of everyone else */
    if (atomic_fetch_sub_explicit(&object->refs, 1, memory_order_acq_rel) == 1)
        object->destroy(object);
}
