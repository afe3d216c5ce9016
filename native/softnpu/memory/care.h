/* care.h: a thread that looks after the pages of large memory: before they are needed, and giving way to transfers. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef enum soft_care {
    SOFT_POPULATE,                                          /* softnpu's memory gets its pages before their first use */
    SOFT_MAP,                                               /* pages of a peer's memory that exist get into this process's tables */
    SOFT_ENLARGE,                                           /* the caller's memory gets pages of 2 MiB where all of it is there */
} soft_care;

/* Advice: where there is no thread, or no room for it, memory is as it is. From a fork's child it does nothing. */
void soft_care_begin(soft_care kind, uintptr_t base, uint64_t size);
/* Nothing of it is touched from here on. Returns at once if there is no such care. */
void soft_care_end(soft_care kind, uintptr_t base);

/* headroom.c: the bytes that may get pages until the machine, or the container, has only an eighth left. */
uint64_t soft_headroom(void);
