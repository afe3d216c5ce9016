/* reporter.c: the threads that callbacks run in. A thread is named by its pthread_self(); streams are subscribed to it,
 * and what they hand over runs inside its aclrtProcessReport.
 * One lock for all: a callback is rare, and the lock is the last one taken and never held while one runs.             */
#include "runtime.h"
#include <stdlib.h>

struct soft_reporter {                                      /* one thread that streams are subscribed to */
    soft_reporter *next;
    uint64_t thread;
    int device;
    uint32_t streams;                                       /* subscribed to it */
    uint32_t waiting;                                       /* calls of aclrtProcessReport inside */
    pthread_cond_t wake;
    soft_report *head, **tail;
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
    pthread_cond_broadcast(&reporter->wake);                /* a waiter may have nothing left to wait for */
    free_if_unused(reporter);
}

static void push(soft_reporter *reporter, soft_report *one)
{
    one->next = NULL;
    *reporter->tail = one;
    reporter->tail = &one->next;
    pthread_cond_signal(&reporter->wake);
}

static soft_report *pop(soft_reporter *reporter)
{
    soft_report *one = reporter->head;
    reporter->head = one->next;
    if (!reporter->head)
        reporter->tail = &reporter->head;
    return one;
}

/* ---- what streams hand over ---- */

void soft_report_free(soft_report *one)
{
    if (one->done)
        soft_unref(&one->done->object);
    free(one);
}

aclError soft_report_push(soft_stream *stream, soft_report *one)
{
    pthread_mutex_lock(&lock);
    bool subscribed = stream->reporter;
    if (subscribed)
        push(stream->reporter, one);
    pthread_mutex_unlock(&lock);
    if (subscribed)
        return ACL_SUCCESS;
    soft_report_free(one);
    return soft_error(ACL_ERROR_RT_STREAM_NO_CB_REG, "the stream's thread unsubscribed before the callback's turn came");
}

soft_report *soft_report_take_back(const soft_fence *done)
{
    soft_report *found = NULL;
    pthread_mutex_lock(&lock);
    for (soft_reporter *reporter = reporters; reporter && !found; reporter = reporter->next) {
        soft_report **at = &reporter->head;
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

bool soft_reporter_serves(soft_stream *stream)
{
    pthread_mutex_lock(&lock);
    bool subscribed = stream->reporter;
    pthread_mutex_unlock(&lock);
    return subscribed;
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
        code = soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "the thread serves device %d: it cannot also serve device %d", reporter->device,
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

void soft_reporter_forget(soft_stream *stream)
{
    pthread_mutex_lock(&lock);
    if (stream->reporter)
        unsubscribe(stream);
    pthread_mutex_unlock(&lock);
}

static void run_reports(soft_reporter *reporter, soft_report *last)       /* locked, not while they run; up to and with `last` */
{
    for (bool more = true; more; ) {
        soft_report *one = pop(reporter);
        more = one != last;
        pthread_mutex_unlock(&lock);
        one->fn(one->data);
        if (one->done)
            soft_fence_set(one->done, SOFT_DONE);
        soft_report_free(one);
        pthread_mutex_lock(&lock);
        more = more && reporter->head;                      /* an abort may have taken `last` back meanwhile */
    }
}

static aclError process(soft_reporter *reporter, int32_t timeout)         /* locked */
{
    struct timespec deadline;
    soft_deadline(&deadline, timeout);
    for (bool late = false; !reporter->head; late = pthread_cond_timedwait(&reporter->wake, &lock, &deadline) != 0) {
        if (!reporter->streams)
            return soft_error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "no stream is subscribed to this thread any longer");
        if (late)
            return soft_error(ACL_ERROR_RT_REPORT_TIMEOUT, "no callback within %d ms", timeout);
    }
    soft_report *last = reporter->head;
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

void soft_reporters_shutdown(void)                          /* streams are gone; what their threads never fetched goes, too */
{
    pthread_mutex_lock(&lock);
    for (soft_reporter *reporter = reporters, *next; reporter; reporter = next) {
        next = reporter->next;
        while (reporter->head && !reporter->waiting)
            soft_report_free(pop(reporter));
        free_if_unused(reporter);
    }
    pthread_mutex_unlock(&lock);
}
