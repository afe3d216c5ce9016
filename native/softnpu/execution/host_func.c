/* host_func.c: a host function on a thread of the runtime: the stream's worker, which holds the stream until it returns. */
#include "runtime.h"
#include <stdlib.h>

typedef struct host_task {
    soft_task task;
    aclrtHostFunc fn;
    void *args;
} host_task;

static aclError run(soft_task *task)
{
    host_task *host = (host_task *)task;
    char *diverted = soft_error_divert(NULL);               /* what the function does wrong is its own affair */
    if (!task->fault.drop)
        host->fn(host->args);
    soft_error_divert(diverted);
    return ACL_SUCCESS;
}

static void drop(soft_task *task)
{
    free(task);
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args)
{
    soft_exec_fault fault;
    SOFT_TRY(soft_fault(__func__, &fault));
    if (!fn)
        return soft_null("fn");
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = ACL_SUCCESS;
    host_task *made = malloc(sizeof *made);
    if (made) {
        *made = (host_task){ { .function = __func__, .run = run, .drop = drop, .bytes = SOFT_MAY_BLOCK, .fault = fault }, fn, args };
        code = soft_submit(found, &made->task);
    } else {
        code = soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    }
    soft_stream_put(found);
    return code;
}
