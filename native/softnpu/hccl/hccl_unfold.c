/* Batches that are unfolded on the device; hccl_unfold.h explains that. */
#include "hccl_unfold.h"
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "hccl_queue_pair.h"

struct hccl_unfolding {
    soft_object object;                                     /* a reference has the communicator, and each task */
    soft_stream *stream;                                    /* the communicator's own; a reference */
    int flag;                                               /* the one notify: an eventfd */
    pthread_mutex_t lock;                                   /* everything below */
    aclError failure;                                       /* of the first batch that failed, once the flag is broken */
    char failure_text[SOFT_TEXT];
    hccl_copy arguments[HCCL_BATCH_MAX];
};

static void destroy(soft_object *object)
{
    hccl_unfolding *unfolding = (hccl_unfolding *)object;   /* its first member */
    soft_stream_put(unfolding->stream);
    close(unfolding->flag);
    pthread_mutex_destroy(&unfolding->lock);
    free(unfolding);
}

void hccl_unfolding_put(hccl_unfolding *unfolding)
{
    if (unfolding)
        soft_unref(&unfolding->object);
}

static hccl_unfolding *create(soft_context *context)
{
    hccl_unfolding *unfolding = calloc(1, sizeof *unfolding);
    if (!unfolding)
        return NULL;
    unfolding->object = (soft_object){ .refs = 1, .destroy = destroy };
    unfolding->flag = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (unfolding->flag >= 0 && !soft_stream_new(context, &unfolding->stream)) {
        pthread_mutex_init(&unfolding->lock, NULL);
        return unfolding;
    }
    if (unfolding->flag >= 0)
        close(unfolding->flag);
    free(unfolding);
    return NULL;
}

HcclResult hccl_unfolding_of(const char *function, hccl_comm *comm, soft_stream *caller, hccl_unfolding **out)
{
    pthread_mutex_lock(&comm->lock);
    if (!comm->unfolding)
        comm->unfolding = create(caller->context);
    *out = comm->unfolding;
    if (*out)
        soft_ref(&(*out)->object);
    pthread_mutex_unlock(&comm->lock);
    return *out ? HCCL_SUCCESS : soft_hccl_error(HCCL_E_MEMORY, "%s: no room for the communicator's own stream", function);
}

/* ---- what the kernel starts: the copies of a batch, on the communicator's own stream ---- */

typedef struct unfolded { soft_task task; hccl_unfolding *unfolding; hccl_transfer *transfer; } unfolded;

static void drop_unfolded(soft_task *task)
{
    unfolded *batch = (unfolded *)task;
    hccl_transfer_drop(&batch->transfer->task);
    hccl_unfolding_put(batch->unfolding);
    free(batch);
}

static aclError copy_all(unfolded *batch)
{
    soft_task *copies = &batch->transfer->task;
    copies->stream = batch->task.stream;
    return soft_task_run(copies);
}

static void break_flag(hccl_unfolding *unfolding, aclError code, const char *text)
{
    pthread_mutex_lock(&unfolding->lock);
    if (!unfolding->failure) {
        unfolding->failure = code;
        snprintf(unfolding->failure_text, sizeof unfolding->failure_text, "%s", text);
        hccl_flag_break(unfolding->flag);
    }
    pthread_mutex_unlock(&unfolding->lock);
}

static aclError run_unfolded(soft_task *task)
{
    unfolded *batch = (unfolded *)task;
    char text[SOFT_TEXT] = "";
    char *outer = soft_error_divert(text);
    aclError code = copy_all(batch);
    soft_error_divert(outer);
    if (code)
        break_flag(batch->unfolding, code, text);
    else
        hccl_flag_set(batch->unfolding->flag);
    return code;
}

/* ---- what the caller's stream gets: the kernel, and the wait for the notify ---- */

typedef struct kernel { soft_task task; unfolded *batch; } kernel;
typedef struct waiting { soft_task task; hccl_unfolding *unfolding; uint32_t rank; } waiting;

static void drop_kernel(soft_task *task)
{
    kernel *launched = (kernel *)task;
    if (launched->batch)
        drop_unfolded(&launched->batch->task);
    free(launched);
}

static aclError run_kernel(soft_task *task)
{
    kernel *launched = (kernel *)task;
    unfolded *batch = launched->batch;
    launched->batch = NULL;
    return soft_submit(batch->unfolding->stream, &batch->task);
}

static void drop_waiting(soft_task *task)
{
    hccl_unfolding_put(((waiting *)task)->unfolding);
    free(task);
}

static aclError failed(hccl_unfolding *unfolding)
{
    pthread_mutex_lock(&unfolding->lock);
    aclError code = soft_error(unfolding->failure, "%s", unfolding->failure_text);
    pthread_mutex_unlock(&unfolding->lock);
    return code;
}

static aclError await_notify(soft_task *task)
{
    waiting *wait = (waiting *)task;
    hccl_flag_state state = hccl_flag_await(task, wait->unfolding->flag);
    switch (state) {
    case HCCL_FLAG_SET:     return ACL_SUCCESS;
    case HCCL_FLAG_BROKEN:  return failed(wait->unfolding);
    case HCCL_FLAG_ABORTED: return ACL_ERROR_RT_STREAM_ABORT;
    default:                return soft_error(ACL_ERROR_RT_WAIT_TIMEOUT, "rank %u: the communicator's notify was not set "
                                              "(HCCL_EXEC_TIMEOUT)", wait->rank);
    }
}

static HcclResult submit_wait(hccl_unfolding *unfolding, const char *function, uint32_t rank, soft_stream *caller)
{
    waiting *wait = malloc(sizeof *wait);
    if (!wait)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
    *wait = (waiting){ { .function = function, .run = await_notify, .drop = drop_waiting, .bytes = SOFT_MAY_BLOCK }, unfolding, rank };
    soft_ref(&unfolding->object);
    return soft_submit(caller, &wait->task) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

/* ---- the call ---- */

void hccl_unfolding_note(hccl_unfolding *unfolding, uint32_t number, const hccl_copy *copy)
{
    pthread_mutex_lock(&unfolding->lock);
    unfolding->arguments[number] = *copy;
    pthread_mutex_unlock(&unfolding->lock);
}

/* Between the last item and here the vendor's call copies the buffer to the device, in which time another call may fill it. */
static void take_arguments(hccl_unfolding *unfolding, hccl_transfer *transfer, uint32_t count)
{
    sched_yield();
    pthread_mutex_lock(&unfolding->lock);
    for (uint32_t i = 0; i < count; i++)
        hccl_transfer_add(transfer, unfolding->arguments[i]);
    pthread_mutex_unlock(&unfolding->lock);
}

HcclResult hccl_unfolding_launch(hccl_unfolding *unfolding, hccl_transfer *transfer, uint32_t count, soft_stream *caller)
{
    const char *function = transfer->task.function;
    uint32_t rank = transfer->rank;
    kernel *launched = malloc(sizeof *launched);
    unfolded *batch = launched ? malloc(sizeof *batch) : NULL;
    if (!batch) {
        free(launched);
        hccl_transfer_drop(&transfer->task);
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
    }
    take_arguments(unfolding, transfer, count);
    *batch = (unfolded){ { .function = function, .run = run_unfolded, .drop = drop_unfolded, .bytes = SOFT_MAY_BLOCK }, unfolding,
                         transfer };
    soft_ref(&unfolding->object);
    *launched = (kernel){ { .function = function, .run = run_kernel, .drop = drop_kernel }, batch };
    return soft_submit(caller, &launched->task) ? HCCL_E_RUNTIME : submit_wait(unfolding, function, rank, caller);
}

/* ---- the end ---- */

void hccl_unfolding_drain(hccl_unfolding *unfolding)
{
    if (!unfolding)
        return;
    int64_t left = (hccl_exec_deadline() - soft_now_ns()) / 1000000;
    struct timespec until;
    soft_deadline(&until, left);
    soft_queue_wait(unfolding->stream, &until);
}

void hccl_unfolding_end(hccl_unfolding *unfolding)
{
    if (!unfolding)
        return;
    break_flag(unfolding, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "the communicator was destroyed");
    soft_stream_close(unfolding->stream, true);             /* its context may have closed it before */
}
