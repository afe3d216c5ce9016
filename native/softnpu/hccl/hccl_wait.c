/* A blocking call waits for its peer, for its deadline, and for being called off: by a destroy, or by its caller. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include "hccl_soft.h"

static int poll_ms(int64_t deadline)
{
    if (deadline == INT64_MAX)
        return -1;
    int64_t left = deadline - soft_now_ns();
    if (left <= 0)
        return 0;
    return left / 1000000 >= 60000 ? 60000 : (int)(left / 1000000) + 1;   /* never early, and looked at once a minute */
}

/* E_AGAIN: `until` came first */
static HcclResult wait_until(const hccl_wait *wait, int fd, short events, int64_t until)
{
    struct pollfd fds[2] = {{fd, events, 0}, {wait->cancel, POLLIN, 0}};
    int64_t stop = until < wait->deadline ? until : wait->deadline;
    for (;;) {
        int ready = poll(fds, 2, poll_ms(stop));
        if (ready < 0 && errno != EINTR)
            return HCCL_E_SYSCALL;
        if (ready > 0)
            return fds[1].revents ? HCCL_E_NOT_FOUND : HCCL_SUCCESS;
        if (soft_now_ns() >= stop)
            return stop == wait->deadline ? HCCL_E_TIMEOUT : HCCL_E_AGAIN;
    }
}

HcclResult hccl_wait_fd(const hccl_wait *wait, int fd, short events)
{
    return wait_until(wait, fd, events, INT64_MAX);
}

HcclResult hccl_wait_pause(const hccl_wait *wait, int ms)
{
    HcclResult code = wait_until(wait, -1, 0, soft_now_ns() + ms * (int64_t)1000000);
    return code == HCCL_E_AGAIN ? HCCL_SUCCESS : code;
}

HcclResult hccl_wait_failed(const hccl_wait *wait, uint32_t rank, HcclResult code)
{
    switch (code) {
    case HCCL_SUCCESS:
        return code;
    case HCCL_E_TIMEOUT:
        return soft_hccl_error(code, "%s: rank %u did not answer in time; is it making the same call?", wait->function,
                               rank);
    case HCCL_E_UNAVAIL:
        return soft_hccl_error(code, "%s: rank %u closed the connection; it has ended or has given up", wait->function,
                               rank);
    case HCCL_E_NOT_FOUND:
        return soft_hccl_error(code, "%s: another thread destroyed the communicator or called the wait off", wait->function);
    case HCCL_E_SYSCALL:
        return soft_hccl_error(code, "%s: talking to rank %u: %s", wait->function, rank, strerror(errno));
    case HCCL_E_INTERNAL:
        return soft_hccl_error(code, "%s: rank %u sent a message that makes no sense here; is it making the same call?",
                               wait->function, rank);
    default:
        return soft_hccl_error(code, "%s: rank %u reports: %s", wait->function, rank, HcclGetErrorString(code));
    }
}
