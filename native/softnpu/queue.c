/* queue.c: a stream as an executor: tasks run one at a time, in the order of their submission.
 *
 *   submit ──> idle, and the work is small ──> runs in the submitting thread ──┐
 *      └────> queue ──> runs on the stream's worker thread ───────────────────┴──> finished
 *                └──> dropped: by an abort, or after a failure in a stream that stops on failure
 *
 * `running` is set by whoever runs a task and makes everyone else queue up behind it, so order holds between threads.
 *
 * An abort drops what is queued and asks the running task to stop; it does not wait. Until that task has stopped,
 * `running` stays set: work submitted after the abort runs after it, and a synchronize that begins after the abort
 * returns when it has stopped. A synchronize that was waiting during the abort also returns only then (with 107023).
 * So either way, once it returned, nothing of the aborted work can write any more.                                  */
#include "runtime.h"
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static _Thread_local const soft_stream *inside;             /* the stream whose task this thread is running */

void soft_queue_init(soft_stream *stream)
{
    pthread_mutex_init(&stream->lock, NULL);
    soft_cond_init(&stream->work);
    soft_cond_init(&stream->progress);
    stream->tail = &stream->head;
    stream->abort_fd = -1;
}

void soft_queue_destroy(soft_stream *stream)
{
    if (stream->abort_fd >= 0)
        close(stream->abort_fd);
    pthread_cond_destroy(&stream->work);
    pthread_cond_destroy(&stream->progress);
    pthread_mutex_destroy(&stream->lock);
}

/* ---- running ---- */

static aclError run_with_fault(soft_task *task)
{
    const soft_exec_fault *fault = &task->fault;
    if (fault->hang)
        soft_task_poll(task, -1, 0, -1);
    else if (fault->delay_ms)
        soft_task_poll(task, -1, 0, fault->delay_ms > INT32_MAX ? INT32_MAX : (int)fault->delay_ms);
    if (soft_task_aborted(task))
        return ACL_ERROR_RT_STREAM_ABORT;
    if (fault->code)
        return soft_error(fault->code, "injected failure");
    return task->run(task);
}

static soft_task *detach_all(soft_stream *stream)           /* locked; the caller drops them with drop_all */
{
    soft_task *list = stream->head;
    for (soft_task *task = list; task; task = task->next)
        stream->dropping++;
    stream->head = NULL;
    stream->tail = &stream->head;
    return list;
}

static void drop_all(soft_stream *stream, soft_task *list)  /* not locked */
{
    uint64_t count = 0;
    while (list) {
        soft_task *next = list->next;
        list->drop(list);
        list = next;
        count++;
    }
    if (!count)
        return;
    pthread_mutex_lock(&stream->lock);
    stream->dropping -= count;
    stream->finished += count;
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->lock);
}

static soft_task *note_failure(soft_stream *stream, const char *function, aclError code, const char *text)   /* locked */
{
    if (!stream->failure) {
        stream->failure = code;
        snprintf(stream->failure_text, sizeof stream->failure_text, "%s: %s", function, text);
    }
    if (!stream->context->stop_on_failure)
        return NULL;
    stream->stopped = true;
    return detach_all(stream);
}

static void end_abort(soft_stream *stream)                  /* locked; the task that was asked to stop has stopped */
{
    eventfd_t count;
    atomic_store_explicit(&stream->abort_running, false, memory_order_relaxed);
    if (stream->abort_fd >= 0)
        eventfd_read(stream->abort_fd, &count);
}

/* Runs one task whose turn it is. Locked on entry and on return, not in between. False: it was aborted. */
static bool run(soft_stream *stream, soft_task *task)
{
    char text[SOFT_TEXT] = "";
    const char *function = task->function;
    const soft_stream *outer = inside;
    stream->running = true;
    pthread_mutex_unlock(&stream->lock);

    inside = stream;
    char *diverted = soft_error_divert(text);
    aclError code = run_with_fault(task);
    task->drop(task);
    soft_error_divert(diverted);
    inside = outer;

    pthread_mutex_lock(&stream->lock);
    soft_task *rest = NULL;
    bool aborted = atomic_load_explicit(&stream->abort_running, memory_order_relaxed);
    if (aborted)
        end_abort(stream);
    else if (code)
        rest = note_failure(stream, function, code, text);
    stream->running = false;
    stream->finished++;
    if (rest) {
        pthread_mutex_unlock(&stream->lock);
        drop_all(stream, rest);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_cond_broadcast(&stream->progress);
    if (stream->head)
        pthread_cond_signal(&stream->work);
    return !aborted;
}

static soft_task *next_task(soft_stream *stream)            /* locked; NULL: the stream is closing and nothing is left */
{
    while (stream->running || !stream->head) {
        if (stream->closing && !stream->head)
            return NULL;
        pthread_cond_wait(&stream->work, &stream->lock);
    }
    soft_task *task = stream->head;
    stream->head = task->next;
    if (!stream->head)
        stream->tail = &stream->head;
    return task;
}

static void *work(void *argument)
{
    soft_stream *stream = argument;
    soft_context_bind(stream->context->handle);
    pthread_mutex_lock(&stream->lock);
    for (soft_task *task; (task = next_task(stream)); )
        run(stream, task);
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* ---- submitting ---- */

static aclError refuse(soft_stream *stream)                 /* locked */
{
    if (stream->closing)
        return soft_error(ACL_ERROR_RT_INVALID_HANDLE, "stream %d is being destroyed", stream->id);
    if (stream->stopped)
        return soft_error(stream->failure, "stream %d stopped at its first failure: %s", stream->id, stream->failure_text);
    return ACL_SUCCESS;
}

static aclError start_worker(soft_stream *stream)           /* locked */
{
    char name[16];
    if (stream->has_worker)
        return ACL_SUCCESS;
    snprintf(name, sizeof name, "softnpu-s%d", stream->id);
    if (soft_thread_start(&stream->worker, name, work, stream))
        return soft_error(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "stream %d: no thread for its queue", stream->id);
    stream->has_worker = true;
    return ACL_SUCCESS;
}

static bool runs_here(const soft_stream *stream, const soft_task *task)   /* locked */
{
    return !stream->running && !stream->head && task->bytes <= soft_setting.inline_bytes && !task->fault.hang && !task->fault.delay_ms;
}

typedef struct ticket { uint64_t number, aborts; bool done, aborted; } ticket;

/* Locked. `patient`: the caller will wait anyway, so it may do the work itself however long it takes. */
static aclError accept(soft_stream *stream, soft_task *task, bool patient, ticket *out)
{
    SOFT_TRY(refuse(stream));
    bool here = patient ? !stream->running && !stream->head : runs_here(stream, task);
    if (!here)
        SOFT_TRY(start_worker(stream));
    *out = (ticket){ .number = ++stream->submitted, .aborts = stream->aborts, .done = here };
    if (here) {
        SOFT_COUNT(tasks_inline, 1);
        out->aborted = !run(stream, task);
        return ACL_SUCCESS;
    }
    SOFT_COUNT(tasks_queued, 1);
    *stream->tail = task;
    stream->tail = &task->next;
    pthread_cond_signal(&stream->work);
    return ACL_SUCCESS;
}

static aclError submit(soft_stream *stream, soft_task *task, bool patient, ticket *out)
{
    task->stream = stream;
    task->next = NULL;
    pthread_mutex_lock(&stream->lock);
    aclError code = accept(stream, task, patient, out);
    pthread_mutex_unlock(&stream->lock);
    if (code)
        task->drop(task);
    return code;
}

aclError soft_submit(soft_stream *stream, soft_task *task)
{
    ticket unused;
    return submit(stream, task, false, &unused);
}

/* ---- waiting ---- */

static aclError aborted(const soft_stream *stream)
{
    return soft_error(stream->abort_code, "stream %d was aborted", stream->id);
}

/* Locked. Until task `number` and all before it finished, or an abort ended them and has taken effect. */
static aclError await(soft_stream *stream, uint64_t number, uint64_t aborts, const struct timespec *deadline)
{
    for (;;) {
        bool ended = stream->aborts != aborts;
        if (ended && !stream->dropping && !atomic_load_explicit(&stream->abort_running, memory_order_relaxed))
            return aborted(stream);
        if (!ended && stream->finished >= number)
            return ACL_SUCCESS;
        if (pthread_cond_timedwait(&stream->progress, &stream->lock, deadline))
            return soft_error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d: %llu of %llu tasks not finished in time; they go on",
                              stream->id, (unsigned long long)(stream->submitted - stream->finished), (unsigned long long)stream->submitted);
    }
}

static aclError take_failure(soft_stream *stream)           /* locked; reported once, unless the stream stopped for good */
{
    aclError code = stream->failure;
    if (!code)
        return ACL_SUCCESS;
    soft_error(code, "%s", stream->failure_text);
    if (!stream->stopped)
        stream->failure = ACL_SUCCESS;
    return code;
}

static aclError refuse_inside(const soft_stream *stream)
{
    if (inside == stream)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "stream %d: a callback running on a stream cannot wait for that stream", stream->id);
    return ACL_SUCCESS;
}

aclError soft_queue_wait(soft_stream *stream, const struct timespec *deadline)
{
    SOFT_TRY(refuse_inside(stream));
    pthread_mutex_lock(&stream->lock);
    aclError code = await(stream, stream->submitted, stream->aborts, deadline);
    if (code == ACL_SUCCESS)
        code = take_failure(stream);
    pthread_mutex_unlock(&stream->lock);
    return code;
}

aclError soft_submit_wait(soft_stream *stream, soft_task *task)
{
    struct timespec never;
    soft_deadline(&never, -1);
    aclError code = refuse_inside(stream);
    if (code) {
        task->drop(task);
        return code;
    }
    ticket got;
    SOFT_TRY(submit(stream, task, true, &got));
    pthread_mutex_lock(&stream->lock);
    if (!got.done)
        code = await(stream, got.number, got.aborts, &never);
    else if (got.aborted)
        code = aborted(stream);
    pthread_mutex_unlock(&stream->lock);
    return code;
}

aclError soft_queue_query(soft_stream *stream, aclrtStreamStatus *status)
{
    pthread_mutex_lock(&stream->lock);
    *status = stream->finished == stream->submitted ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    aclError code = take_failure(stream);
    pthread_mutex_unlock(&stream->lock);
    return code;
}

/* ---- ending ---- */

static void signal_abort(soft_stream *stream)               /* locked */
{
    atomic_store_explicit(&stream->abort_running, true, memory_order_relaxed);
    if (stream->abort_fd >= 0)
        eventfd_write(stream->abort_fd, 1);
}

void soft_queue_abort(soft_stream *stream, aclError code)
{
    pthread_mutex_lock(&stream->lock);
    soft_task *list = detach_all(stream);
    if (stream->running && !atomic_load_explicit(&stream->abort_running, memory_order_relaxed))
        signal_abort(stream);
    if (list || stream->running) {
        stream->aborts++;
        stream->abort_code = code;
    }
    stream->failure = ACL_SUCCESS;
    stream->stopped = false;
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->lock);
    drop_all(stream, list);
}

aclError soft_queue_close(soft_stream *stream, bool force)
{
    SOFT_TRY(refuse_inside(stream));
    pthread_mutex_lock(&stream->lock);
    bool first = !stream->closing;
    stream->closing = true;
    pthread_mutex_unlock(&stream->lock);
    if (!first)
        return soft_error(ACL_ERROR_RT_INVALID_HANDLE, "stream %d is being destroyed already", stream->id);
    if (force)
        soft_queue_abort(stream, ACL_ERROR_RT_STREAM_ABORT);
    pthread_mutex_lock(&stream->lock);
    while (stream->finished < stream->submitted)
        pthread_cond_wait(&stream->progress, &stream->lock);
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
    if (stream->has_worker)
        pthread_join(stream->worker, NULL);
    return ACL_SUCCESS;
}
