/* mark.c: something that becomes done once: a record of an event, the end of a callback. */
#include "runtime.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BLIND_MS = 2, SHARED_MS = 5 };

static void destroy(soft_object *object)
{
    soft_mark *mark = (soft_mark *)object;                  /* its first member */
    if (mark->fd >= 0)
        close(mark->fd);
    if (mark->shared)
        soft_unref(&mark->shared->object);
    pthread_mutex_destroy(&mark->lock);
    free(mark);
}

soft_mark *soft_mark_new(void)
{
    soft_mark *mark = calloc(1, sizeof *mark);
    if (!mark)
        return NULL;
    mark->object = (soft_object){ .refs = 1, .destroy = destroy };
    mark->fd = -1;
    pthread_mutex_init(&mark->lock, NULL);
    return mark;
}

void soft_mark_set(soft_mark *mark, soft_mark_state state)
{
    pthread_mutex_lock(&mark->lock);
    if (mark->state == SOFT_PENDING) {
        mark->at_ns = soft_now_ns();
        if (mark->shared && state == SOFT_DONE)
            soft_shared_event_done(mark->shared, mark->number);
        mark->state = state;
        if (mark->fd >= 0)
            eventfd_write(mark->fd, 1);
    }
    pthread_mutex_unlock(&mark->lock);
}

soft_mark_state soft_mark_get(soft_mark *mark)
{
    if (mark->shared)
        return soft_shared_event_is_done(mark->shared, mark->number) ? SOFT_DONE : SOFT_PENDING;
    return (soft_mark_state)mark->state;
}

static int descriptor(soft_mark *mark)                      /* -1: none to be had */
{
    pthread_mutex_lock(&mark->lock);
    if (mark->fd < 0)
        mark->fd = eventfd(mark->state != SOFT_PENDING, EFD_CLOEXEC | EFD_NONBLOCK);
    int fd = mark->fd;
    pthread_mutex_unlock(&mark->lock);
    return fd;
}

/* Sleeps until the mark is worth another look. False: the task was aborted. */
static bool doze(soft_mark *mark, soft_task *task, int64_t left_ms)
{
    if (mark->shared) {                                     /* another process ends it: no descriptor to wait for */
        soft_shared_event_wait(mark->shared, mark->number, left_ms < SHARED_MS ? left_ms : SHARED_MS);
        return !task || !soft_task_aborted(task);
    }
    struct pollfd wait = { .fd = descriptor(mark), .events = POLLIN };
    int64_t most = wait.fd < 0 ? BLIND_MS : INT32_MAX;
    int timeout = (int)(left_ms < most ? left_ms : most);
    if (task)
        return soft_task_poll(task, wait.fd, POLLIN, timeout) >= 0;
    poll(&wait, 1, timeout);
    return true;
}

int soft_mark_wait(soft_mark *mark, soft_task *task, int64_t timeout_ms)
{
    int64_t end = soft_now_ns() + (timeout_ms < 0 ? 0 : timeout_ms) * 1000000;
    for (;;) {
        if (soft_mark_get(mark) != SOFT_PENDING)
            return 1;
        int64_t left = timeout_ms < 0 ? INT32_MAX : (end - soft_now_ns() + 999999) / 1000000;
        if (left <= 0)
            return 0;
        if (!doze(mark, task, left))
            return -1;
    }
}
