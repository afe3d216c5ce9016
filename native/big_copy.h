/* big_copy.h: copying more than the processor's caches hold, range by range. */
#pragma once
#include <stddef.h>

/* From this many bytes in all it is faster than memcpy, on x86-64. Elsewhere it is memcpy. A ring's batch of 192 blocks of 4 KiB
 * is that much: it is one of many. */
#define BIG_COPY_WORTH ((size_t)500 << 10)

/* memcpy of one range. `next`: where the range after it will be read from, or NULL. The bytes are there for other threads
 * behind big_copy_fence(), once for many ranges.                                                                    */
void big_copy(void *dst, const void *src, size_t bytes, const void *next);
void big_copy_fence(void);
