/* big_copy.h: copying more than the processor's caches hold, range by range. */
#pragma once
#include <stddef.h>

/* From this many bytes in all big_copy() is faster than memcpy, on x86-64. Elsewhere it is memcpy. A ring's batch of 192 blocks
 * of 4 KiB is more than that. */
#define BIG_COPY_WORTH ((size_t)500 << 10)

/* Copies one range. `next` is where the range after it will be read from, or NULL. Other threads see the bytes only after
 * big_copy_fence(), which is called once for many ranges.                                                           */
void big_copy(void *dst, const void *src, size_t bytes, const void *next);
void big_copy_fence(void);
