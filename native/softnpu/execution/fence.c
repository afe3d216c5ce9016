/* fence.c: something that becomes done once: a record of an event, the end of a callback. */
#include "runtime.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BLIND_MS = 2, SHARED_MS = 5 };

static void destroy(soft_object *object)
{
    soft_fence *fence = (soft_fence *)object;               /* its first member */
    if (fence->fd >= 0)
        close(fence->fd);
    if (fence->shared)
        soft_unref(&fence->shared->object);
    pthread_mutex_destroy(&fence->lock);
    free(fence);
}

soft_fence *soft_fence_new(void)
{
    soft_fence *fence = calloc(1, sizeof *fence);
    if (!fence)
        return NULL;
    fence->object = (soft_object){ .refs = 1, .destroy = destroy };
    fence->fd = -1;
    pthread_mutex_init(&fence->lock, NULL);
    return fence;
}

void soft_fence_set(soft_fence *fence, soft_fence_state state)
{
    pthread_mutex_lock(&fence->lock);
    if (fence->state == SOFT_PENDING) {
        fence->at_ns = soft_now_ns();
        if (fence->shared && state == SOFT_DONE)
            soft_shared_event_done(fence->shared, fence->number);
        fence->state = state;
        if (fence->fd >= 0)
            eventfd_write(fence->fd, 1);
    }
    pthread_mutex_unlock(&fence->lock);
}

soft_fence_state soft_fence_get(soft_fence *fence)
{
    if (fence->shared)
        return soft_shared_event_is_done(fence->shared, fence->number) ? SOFT_DONE : SOFT_PENDING;
    return (soft_fence_state)fence->state;
}

static int descriptor(soft_fence *fence)                    /* -1: none to be had */
{
    pthread_mutex_lock(&fence->lock);
    if (fence->fd < 0)
        fence->fd = eventfd(fence->state != SOFT_PENDING, EFD_CLOEXEC | EFD_NONBLOCK);
    int fd = fence->fd;
    pthread_mutex_unlock(&fence->lock);
    return fd;
}

/* Sleeps until the fence is worth another look. False: the task was aborted. */
static bool doze(soft_fence *fence, soft_task *task, int64_t left_ms)
{
    if (fence->shared) {                                    /* another process ends it: no descriptor to wait for */
        soft_shared_event_wait(fence->shared, fence->number, left_ms < SHARED_MS ? left_ms : SHARED_MS);
        return !task || !soft_task_aborted(task);
    }
    struct pollfd wait = { .fd = descriptor(fence), .events = POLLIN };
    int64_t most = wait.fd < 0 ? BLIND_MS : INT32_MAX;
    int timeout = (int)(left_ms < most ? left_ms : most);
    if (task)
        return soft_task_poll(task, wait.fd, POLLIN, timeout) >= 0;
    poll(&wait, 1, timeout);
    return true;
}

int soft_fence_wait(soft_fence *fence, soft_task *task, int64_t timeout_ms)
{
    int64_t end = soft_now_ns() + (timeout_ms < 0 ? 0 : timeout_ms) * 1000000;
    for (;;) {
        if (soft_fence_get(fence) != SOFT_PENDING)
            return 1;
        int64_t left = timeout_ms < 0 ? INT32_MAX : (end - soft_now_ns() + 999999) / 1000000;
        if (left <= 0)
            return 0;
        if (!doze(fence, task, left))
            return -1;
    }
}
