/* The flag that a fence sets and that a stream waits for: one bit, as the hardware's. Set twice it is set once, and of several
 * streams that wait for it any one gets it. An eventfd, so that an abort can wake the stream, too: its low half counts how
 * often it was set since it was last taken, its high half is for a connection that failed, and is always put back.        */
#include <poll.h>
#include <sys/eventfd.h>
#include "hccl_queue_pair.h"

#define BROKEN ((eventfd_t)1 << 32)

void hccl_flag_set(int flag)
{
    eventfd_write(flag, 1);
}

void hccl_flag_break(int flag)
{
    eventfd_write(flag, BROKEN);
}

hccl_flag_state hccl_flag_take(int flag)
{
    eventfd_t count;
    if (eventfd_read(flag, &count))
        return HCCL_FLAG_CLEAR;
    if (count >= BROKEN)
        eventfd_write(flag, BROKEN);
    return count % BROKEN ? HCCL_FLAG_SET : HCCL_FLAG_BROKEN;
}

hccl_flag_state hccl_flag_await(soft_task *task, int flag)
{
    for (int64_t deadline = hccl_exec_deadline();;) {
        hccl_flag_state state = hccl_flag_take(flag);
        int64_t left = (deadline - soft_now_ns()) / 1000000;
        if (state != HCCL_FLAG_CLEAR || left <= 0)
            return state;
        if (soft_task_poll(task, flag, POLLIN, left < INT32_MAX ? (int)left : INT32_MAX) < 0)
            return HCCL_FLAG_ABORTED;
    }
}
