/* callback.c: a host function in stream order, run by the thread that subscribed to the stream (reporter.c). A blocking
 * one holds its stream until it has run. */
#include "runtime.h"
#include <stdlib.h>

typedef struct launch_task {
    soft_task task;
    aclrtCallback fn;
    void *data;
    bool block;
} launch_task;

static soft_report *new_report(const launch_task *launch)
{
    soft_report *one = calloc(1, sizeof *one);
    if (!one)
        return NULL;
    *one = (soft_report){ .fn = launch->fn, .data = launch->data, .done = launch->block ? soft_fence_new() : NULL };
    if (!launch->block || one->done)
        return one;
    free(one);
    return NULL;
}

static void await_callback(soft_task *task, soft_fence *done)
{
    if (soft_fence_wait(done, task, -1) > 0)
        return;
    soft_report *unused = soft_report_take_back(done);      /* aborted */
    if (unused)
        soft_report_free(unused);
    else
        soft_fence_wait(done, NULL, -1);                    /* running: it may write, so the stream is not at rest before */
}

static aclError run_launch(soft_task *task)
{
    launch_task *launch = (launch_task *)task;
    if (task->fault.drop)
        return ACL_SUCCESS;
    soft_report *one = new_report(launch);
    if (!one)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a callback");
    soft_fence *done = one->done;
    if (done)
        soft_ref(&done->object);
    aclError code = soft_report_push(task->stream, one);
    if (done && code == ACL_SUCCESS)
        await_callback(task, done);
    if (done)
        soft_unref(&done->object);
    return code;
}

static void drop(soft_task *task)
{
    free(task);
}

static aclError submit(soft_stream *stream, launch_task value)
{
    launch_task *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    *made = value;
    return soft_submit(stream, &made->task);
}

aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType, aclrtStream stream)
{
    launch_task launch = { .task = { .function = __func__, .run = run_launch, .drop = drop }, .fn = fn, .data = userData };
    SOFT_TRY(soft_fault(__func__, &launch.task.fault));
    if (!fn)
        return soft_null("fn");
    if (blockType != ACL_CALLBACK_NO_BLOCK && blockType != ACL_CALLBACK_BLOCK)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "block type %d: want 0 (no block) or 1 (block)", (int)blockType);
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    launch.block = blockType == ACL_CALLBACK_BLOCK;
    launch.task.bytes = launch.block ? SOFT_MAY_BLOCK : 0;
    aclError code = soft_reporter_serves(found) ? submit(found, launch)
        : soft_error(ACL_ERROR_RT_STREAM_NO_CB_REG, "stream %d has no thread subscribed: call aclrtSubscribeReport first", found->id);
    soft_stream_put(found);
    return code;
}
