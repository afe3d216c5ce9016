/* task.c: lets a running task find out that its stream was aborted, and wakes it then. */
#include "runtime.h"
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>

enum { BLIND_MS = 10 };

bool soft_task_aborted(const soft_task *task)
{
    /* relaxed: the flag carries no data; a thread that acts on the end of the task synchronizes by the stream's lock */
    return atomic_load_explicit(&task->stream->abort_running, memory_order_relaxed);
}

void soft_task_half(const soft_task *task, uint64_t end)
{
    if (task->fault.half && end > task->bytes / 2)
        soft_hold_stand(task->fault.half);
}

/* The stream's abort signal, or -1 when no descriptor is left for one. */
static int abort_fd(soft_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    if (stream->abort_fd < 0)
        stream->abort_fd = eventfd(soft_task_aborted(&(soft_task){ .stream = stream }), EFD_CLOEXEC | EFD_NONBLOCK);
    int fd = stream->abort_fd;
    pthread_mutex_unlock(&stream->lock);
    return fd;
}

int soft_task_poll(soft_task *task, int fd, short events, int timeout_ms)
{
    struct pollfd wait[2] = { { .fd = fd, .events = events }, { .fd = abort_fd(task->stream), .events = POLLIN } };
    int64_t end = soft_now_ns() + timeout_ms * 1000000ll;
    for (;;) {
        int64_t left = timeout_ms < 0 ? INT32_MAX : (end - soft_now_ns() + 999999) / 1000000;
        left = left < 0 ? 0 : left;
        bool blind = wait[1].fd < 0 && left > BLIND_MS;     /* look at the flag now and then instead */
        int ready = poll(wait, 2, blind ? BLIND_MS : (int)left);
        if (soft_task_aborted(task))
            return -1;
        if (ready > 0 && wait[0].revents)
            return 1;
        if (ready < 0 && errno != EINTR)
            return 1;                                       /* the caller's use of fd will tell what is wrong */
        if (ready == 0 && !blind && timeout_ms >= 0)
            return 0;
    }
}
