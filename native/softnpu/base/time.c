/* time.c: one clock for everything, the monotonic one. */
#include "runtime.h"
#include <limits.h>
#include <time.h>

int64_t soft_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void soft_deadline(struct timespec *at, int64_t ms)
{
    if (ms < 0) {
        at->tv_sec = sizeof(time_t) == 8 ? (time_t)INT64_MAX : (time_t)INT32_MAX;
        at->tv_nsec = 0;
        return;
    }
    int64_t ns = soft_now_ns() + ms % 1000 * 1000000;
    at->tv_sec = (time_t)(ns / 1000000000 + ms / 1000);
    at->tv_nsec = (long)(ns % 1000000000);
}

void soft_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}
