/* callback.c: host functions in stream order.
 *
 * Launched callbacks run in the thread that subscribed to the stream, inside its aclrtProcessReport; a thread is named
 * by its pthread_self(). A blocking one holds its stream until it has run. Host functions run on the stream's worker.
 * One lock for all reporters: a callback is rare, and the lock is the last one taken and never held while one runs.    */
#include "runtime.h"
#include <stdlib.h>

typedef struct report {
    struct report *next;
    aclrtCallback fn;
    void *data;
    soft_mark *done;                                        /* of a blocking callback: its task waits for this */
} report;

struct soft_reporter {                                      /* one thread that streams are subscribed to */
    soft_reporter *next;
    uint64_t thread;
    int device;
    uint32_t streams;                                       /* subscribed to it */
    uint32_t waiting;                                       /* calls of aclrtProcessReport inside */
    pthread_cond_t wake;
    report *head, **tail;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static soft_reporter *reporters;

static soft_reporter *find(uint64_t thread)                 /* locked, like everything down to "the calls" */
{
    soft_reporter *reporter = reporters;
    while (reporter && reporter->thread != thread)
        reporter = reporter->next;
    return reporter;
}

static soft_reporter *find_or_make(uint64_t thread, int device)
{
    soft_reporter *reporter = find(thread);
    if (reporter)
        return reporter;
    reporter = calloc(1, sizeof *reporter);
    if (!reporter)
        return NULL;
    *reporter = (soft_reporter){ .next = reporters, .thread = thread, .device = device, .tail = &reporter->head };
    soft_cond_init(&reporter->wake);
    return reporters = reporter;
}

static void free_if_unused(soft_reporter *reporter)
{
    if (reporter->streams || reporter->waiting || reporter->head)
        return;
    soft_reporter **at = &reporters;
    while (*at != reporter)
        at = &(*at)->next;
    *at = reporter->next;
    pthread_cond_destroy(&reporter->wake);
    free(reporter);
}

static void unsubscribe(soft_stream *stream)
{
    soft_reporter *reporter = stream->reporter;
    stream->reporter = NULL;
    reporter->streams--;
    pthread_cond_broadcast(&reporter->wake);                /* whoever waits may have nothing left to wait for */
    free_if_unused(reporter);
}

static void push(soft_reporter *reporter, report *one)
{
    one->next = NULL;
    *reporter->tail = one;
    reporter->tail = &one->next;
    pthread_cond_signal(&reporter->wake);
}

static report *pop(soft_reporter *reporter)
{
    report *one = reporter->head;
    reporter->head = one->next;
    if (!reporter->head)
        reporter->tail = &reporter->head;
    return one;
}

/* ---- the task ---- */

typedef struct launch_task {
    soft_task task;
    aclrtCallback fn;
    void *data;
    bool block;
} launch_task;

static void free_report(report *one)
{
    if (one->done)
        soft_unref(&one->done->object);
    free(one);
}

static report *new_report(const launch_task *launch)
{
    report *one = calloc(1, sizeof *one);
    if (!one)
        return NULL;
    *one = (report){ .fn = launch->fn, .data = launch->data, .done = launch->block ? soft_mark_new() : NULL };
    if (!launch->block || one->done)
        return one;
    free(one);
    return NULL;
}

static aclError hand_over(soft_stream *stream, report *one)
{
    pthread_mutex_lock(&lock);
    bool subscribed = stream->reporter;
    if (subscribed)
        push(stream->reporter, one);
    pthread_mutex_unlock(&lock);
    if (subscribed)
        return ACL_SUCCESS;
    free_report(one);
    return soft_error(ACL_ERROR_RT_STREAM_NO_CB_REG, "the stream's thread unsubscribed before the callback's turn came");
}

/* Takes back the report that `done` belongs to, unless it is being run. */
static report *take_back(const soft_mark *done)
{
    report *found = NULL;
    pthread_mutex_lock(&lock);
    for (soft_reporter *reporter = reporters; reporter && !found; reporter = reporter->next) {
        report **at = &reporter->head;
        while (*at && (*at)->done != done)
            at = &(*at)->next;
        found = *at;
        if (found) {
            *at = found->next;
            if (!found->next)
                reporter->tail = at;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void await_callback(soft_task *task, soft_mark *done)
{
    if (soft_mark_wait(done, task, -1) > 0)
        return;
    report *unused = take_back(done);                       /* aborted */
    if (unused)
        free_report(unused);
    else
        soft_mark_wait(done, NULL, -1);                     /* running: it may write, so the stream is not at rest before */
}

static aclError run_launch(soft_task *task)
{
    launch_task *launch = (launch_task *)task;
    if (task->fault.drop)
        return ACL_SUCCESS;
    report *one = new_report(launch);
    if (!one)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a callback");
    soft_mark *done = one->done;
    if (done)
        soft_ref(&done->object);
    aclError code = hand_over(task->stream, one);
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

/* ---- the calls ---- */

static aclError subscribe(uint64_t thread, soft_stream *stream)
{
    int device = stream->context->device->id;
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    soft_reporter *reporter = stream->reporter ? NULL : find_or_make(thread, device);
    if (stream->reporter)
        code = soft_error(ACL_ERROR_RT_STREAM_SUBSCRIBE, "stream %d has a thread already", stream->id);
    else if (!reporter)
        code = soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a subscription");
    else if (reporter->streams && reporter->device != device)
        code = soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "the thread serves device %d; it cannot serve device %d, too", reporter->device,
                          device);
    if (code == ACL_SUCCESS) {
        reporter->device = device;
        reporter->streams++;
        stream->reporter = reporter;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!threadId)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "threadId is 0: want the pthread_self() of the thread that will process reports");
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = subscribe(threadId, found);
    soft_stream_put(found);
    return code;
}

static aclError end_subscription(uint64_t thread, soft_stream *stream)
{
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!stream->reporter)
        code = soft_error(ACL_ERROR_RT_STREAM_NO_CB_REG, "stream %d has no thread subscribed", stream->id);
    else if (stream->reporter->thread != thread)
        code = soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "stream %d has another thread subscribed", stream->id);
    else
        unsubscribe(stream);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = end_subscription(threadId, found);
    soft_stream_put(found);
    return code;
}

void soft_callback_forget(soft_stream *stream)
{
    pthread_mutex_lock(&lock);
    if (stream->reporter)
        unsubscribe(stream);
    pthread_mutex_unlock(&lock);
}

static void run_reports(soft_reporter *reporter, report *last)            /* locked, not while they run; up to and with `last` */
{
    for (bool more = true; more; ) {
        report *one = pop(reporter);
        more = one != last;
        pthread_mutex_unlock(&lock);
        one->fn(one->data);
        if (one->done)
            soft_mark_set(one->done, SOFT_DONE);
        free_report(one);
        pthread_mutex_lock(&lock);
        more = more && reporter->head;                      /* an abort may have taken `last` back meanwhile */
    }
}

static aclError process(soft_reporter *reporter, int32_t timeout)         /* locked */
{
    struct timespec deadline;
    soft_deadline(&deadline, timeout);
    while (!reporter->head) {
        if (!reporter->streams)
            return soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "no stream is subscribed to this thread any more");
        if (pthread_cond_timedwait(&reporter->wake, &lock, &deadline))
            return soft_error(ACL_ERROR_RT_REPORT_TIMEOUT, "no callback within %d ms", timeout);
    }
    report *last = reporter->head;
    while (last->next)
        last = last->next;
    run_reports(reporter, last);
    return ACL_SUCCESS;
}

aclError aclrtProcessReport(int32_t timeout)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!timeout || timeout < -1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "timeout %d: want milliseconds above 0, or -1 for no limit", timeout);
    SOFT_TRY(soft_context_need());
    pthread_mutex_lock(&lock);
    soft_reporter *reporter = find((uint64_t)pthread_self());
    aclError code = ACL_SUCCESS;
    if (reporter) {
        reporter->waiting++;
        code = process(reporter, timeout);
        reporter->waiting--;
        free_if_unused(reporter);
    } else {
        code = soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "no stream is subscribed to this thread");
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static bool is_subscribed(soft_stream *stream)
{
    pthread_mutex_lock(&lock);
    bool subscribed = stream->reporter;
    pthread_mutex_unlock(&lock);
    return subscribed;
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
    aclError code = is_subscribed(found) ? submit(found, launch)
        : soft_error(ACL_ERROR_RT_STREAM_NO_CB_REG, "stream %d has no thread subscribed: call aclrtSubscribeReport first", found->id);
    soft_stream_put(found);
    return code;
}

void soft_callbacks_shutdown(void)                          /* streams are gone; what their threads never fetched goes, too */
{
    pthread_mutex_lock(&lock);
    for (soft_reporter *reporter = reporters, *next; reporter; reporter = next) {
        next = reporter->next;
        while (reporter->head && !reporter->waiting)
            free_report(pop(reporter));
        free_if_unused(reporter);
    }
    pthread_mutex_unlock(&lock);
}
