/* queue.c: a stream as an executor: tasks run one at a time, in the order of their submission.
 *
 *   submit ──> idle, and the work is small ──> runs in the submitting thread ──┐
 *      └────> queue ──> runs on the stream's worker thread ───────────────────┴──> finished
 *                └──> dropped: by an abort, or after a failure in a stream that stops on failure
 *
 * `running` is set by the thread that runs a task and makes all others queue up behind it, so order holds between threads.
 *
 * An abort drops what is queued and asks the running task to stop; it does not wait. Until that task has stopped,
 * `running` stays set: work submitted after the abort runs after it, and a synchronize that begins after the abort
 * returns when it has stopped. A synchronize that was waiting during the abort also returns only then (with 107023).
 * So either way, once it returned, nothing of the aborted work can write any longer.                                  */
#include "runtime.h"
#include <stdio.h>
#include <sys/eventfd.h>

static _Thread_local soft_stream *inside;                   /* the stream whose task this thread is running */

soft_stream *soft_queue_inside(void)
{
    return inside;
}

/* ---- running ---- */

aclError soft_task_run(soft_task *task)
{
    const soft_exec_fault *fault = &task->fault;
    soft_hold_stand(fault->hold);
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

soft_task *soft_queue_detach(soft_stream *stream)
{
    soft_task *list = stream->head;
    for (soft_task *task = list; task; task = task->next)
        stream->dropping++;
    stream->head = NULL;
    stream->tail = &stream->head;
    return list;
}

void soft_queue_drop(soft_stream *stream, soft_task *list)
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
    return soft_queue_detach(stream);
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
    soft_stream *outer = inside;
    stream->running = true;
    pthread_mutex_unlock(&stream->lock);

    inside = stream;
    char *diverted = soft_error_divert(text);
    aclError code = soft_task_run(task);
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
        soft_queue_drop(stream, rest);
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

static _Thread_local uint64_t run_here;                     /* what softnpu_run_here() was told in this thread */

uint64_t softnpu_run_here(uint64_t bytes)
{
    uint64_t before = run_here;
    run_here = bytes;
    return before;
}

static bool is_small(const soft_task *task)
{
    uint64_t usual = soft_setting.inline_bytes;
    return task->bytes <= usual || (usual && task->bytes <= run_here && task->bytes != SOFT_MAY_BLOCK);
}

static bool runs_here(const soft_stream *stream, const soft_task *task)   /* locked */
{
    const soft_exec_fault *fault = &task->fault;
    bool is_quick = is_small(task) && !fault->hang && !fault->delay_ms && !fault->hold && !fault->half;
    return is_quick && !stream->running && !stream->head;
}

typedef struct ticket { uint64_t number, aborts; bool done, aborted; } ticket;

/* Locked. `patient`: the caller will wait anyway, so it may do the work itself however long it takes. */
static aclError admit(soft_stream *stream, soft_task *task, bool patient, ticket *out)
{
    SOFT_TRY(refuse(stream));
    if (stream->capture) {
        soft_capture_take(stream->capture, task);
        *out = (ticket){ .done = true };
        return ACL_SUCCESS;
    }
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
    aclError code = admit(stream, task, patient, out);
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

aclError soft_submit_wait(soft_stream *stream, soft_task *task)
{
    struct timespec never;
    soft_deadline(&never, -1);
    aclError code = soft_queue_refuse_inside(stream);
    if (code) {
        task->drop(task);
        return code;
    }
    ticket got;
    SOFT_TRY(submit(stream, task, true, &got));
    pthread_mutex_lock(&stream->lock);
    if (!got.done)
        code = soft_queue_await(stream, got.number, got.aborts, &never);
    else if (got.aborted)
        code = soft_queue_aborted(stream);
    pthread_mutex_unlock(&stream->lock);
    return code;
}
