/* big_copy.c: stores that bypass the cache, and reads far ahead.
 *
 * An ordinary store first reads the line that it is about to overwrite; the C library avoids that from some hundred MiB on,
 * but only within one call, and a cache travels in ranges. The processor by itself reads ahead within one page only, which
 * is over soon in ranges of some KiB: so the range after this one is fetched while this one is copied.
 *
 * Measured on an EPYC (Zen 5, glibc 2.36), 128 MiB in ranges of 16 KiB, median of nine: memcpy 9.4 to 13 ms, streaming
 * stores that read 2 KiB ahead 8.7 to 10.3, 8 KiB ahead 7.6 to 8.1, 16 KiB ahead 7.2 to 7.4. A first-level cache may be as
 * small as 32 KiB, and both sides go through it: so it is 8. Four pages side by side, which a Xeon liked, are no better when
 * they read far ahead, and worse than memcpy (17 ms) when they do not. Other processors, and sanitizers, which do not see these
 * stores, get memcpy.                                                                                                  */
#include "big_copy.h"
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>

enum { LINE = 64, AHEAD = 8 << 10 };

static void stream_line(char *dst, const char *src)
{
    const __m128i *from = (const __m128i *)src;
    __m128i *to = (__m128i *)dst;
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

/* Whole lines; `ahead` is what will be read when these have been. */
static void stream_lines(char *dst, const char *src, size_t bytes, const char *ahead)
{
    for (size_t at = 0; at < bytes; at += LINE) {
        _mm_prefetch(ahead + at, _MM_HINT_T0);
        stream_line(dst + at, src + at);
    }
}

void big_copy(void *dst, const void *src, size_t bytes, const void *next)
{
    char *to = dst;
    const char *from = src;
    size_t head = -(uintptr_t)to % LINE;
    if (bytes < head + LINE) {
        memcpy(dst, src, bytes);
        return;
    }
    size_t tail = (bytes - head) % LINE, lines = bytes - head - tail, last = lines < AHEAD ? lines : AHEAD;
    memcpy(to, from, head);
    stream_lines(to + head, from + head, lines - last, from + head + last);
    stream_lines(to + bytes - tail - last, from + bytes - tail - last, last, next ? next : from);   /* `from` is in the cache already */
    memcpy(to + bytes - tail, from + bytes - tail, tail);
}

void big_copy_fence(void)
{
    _mm_sfence();
}
#else
void big_copy(void *dst, const void *src, size_t bytes, const void *next)
{
    (void)next;
    memcpy(dst, src, bytes);
}

void big_copy_fence(void)
{
}
#endif
