/* bytes.c: moving and filling memory, in pieces between which a task can be told to stop. */
#include "big_copy.h"
#include "runtime.h"
#include <string.h>

enum { PIECE = 1 << 20 };

static void count(soft_task *task, uint64_t piece)
{
    if (task)
        soft_task_half(task, task->moved += piece);
}

void soft_copy(soft_task *task, void *dst, const void *src, uint64_t bytes, const void *next)
{
    uint64_t total = task && task->bytes > bytes ? task->bytes : bytes;
    for (uint64_t done = 0; done < bytes && !(task && soft_task_aborted(task)); ) {
        uint64_t piece = bytes - done < PIECE ? bytes - done : PIECE;
        char *to = (char *)dst + done;
        const char *from = (const char *)src + done;
        count(task, piece);
        if (total >= BIG_COPY_WORTH)
            big_copy(to, from, piece, done + piece < bytes ? from + piece : next);
        else
            memmove(to, from, piece);
        done += piece;
        SOFT_COUNT(bytes_copied, piece);
    }
    if (total >= BIG_COPY_WORTH)
        big_copy_fence();
}

void soft_fill(soft_task *task, void *dst, int value, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes && !(task && soft_task_aborted(task)); ) {
        uint64_t piece = bytes - done < PIECE ? bytes - done : PIECE;
        count(task, piece);
        memset((char *)dst + done, value, piece);
        done += piece;
    }
}
