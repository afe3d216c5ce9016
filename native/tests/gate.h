/* gate.h: a host function that holds a stream until the test lets it go on; how tests wait for states without sleeping. */
#pragma once
#include <pthread.h>
#include "check.h"

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool entered, open;
} gate;
#define GATE { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false }

static inline void gate_hold(void *argument)                /* the host function */
{
    gate *it = argument;
    pthread_mutex_lock(&it->lock);
    it->entered = true;
    pthread_cond_broadcast(&it->changed);
    while (!it->open)
        pthread_cond_wait(&it->changed, &it->lock);
    pthread_mutex_unlock(&it->lock);
}

static inline void gate_await(gate *it)                     /* until the stream has come to it */
{
    pthread_mutex_lock(&it->lock);
    while (!it->entered)
        pthread_cond_wait(&it->changed, &it->lock);
    pthread_mutex_unlock(&it->lock);
}

static inline void gate_open(gate *it)
{
    pthread_mutex_lock(&it->lock);
    it->open = true;
    pthread_cond_broadcast(&it->changed);
    pthread_mutex_unlock(&it->lock);
}

static inline void set_flag(void *argument)                 /* a host function or callback */
{
    atomic_store((_Atomic int *)argument, 1);
}

/* Device memory, pinned memory or a stream, or the test ends here: nothing after it would make sense. */
static inline void *device_bytes(size_t size)
{
    void *got = NULL;
    CHECK_OK(aclrtMalloc(&got, size, ACL_MEM_MALLOC_HUGE_FIRST));
    return got ? got : (exit(check_done()), NULL);
}

static inline void *pinned_bytes(size_t size)
{
    void *got = NULL;
    CHECK_OK(aclrtMallocHost(&got, size));
    return got ? got : (exit(check_done()), NULL);
}

static inline aclrtStream new_stream(void)
{
    aclrtStream got = NULL;
    CHECK_OK(aclrtCreateStream(&got));
    return got ? got : (exit(check_done()), NULL);
}

static inline aclrtEvent new_event(void)
{
    aclrtEvent got = NULL;
    CHECK_OK(aclrtCreateEventExWithFlag(&got, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
    return got ? got : (exit(check_done()), NULL);
}
