/* program.c: says one program to the device, step by step, and waits until the device let go of its memory. */
#include "ring_internal.h"

#include <stdio.h>
#include <string.h>

enum { BATCH = 256 };                     /* descriptors per HcclBatchGet/Put: the vendor's limit */

/* ---- the device: a stream and two events ---- */

int device_open(device *d, const ring_driver *driver, aclrtContext context, const ring_options *options)
{
    d->driver = *driver;
    d->options = *options;
    d->context = context;
    aclrtContext before = NULL;
    driver->get_context(&before);
    aclError code = driver->set_context(context);
    if (code != ACL_SUCCESS)
        return code;
    code = driver->create_stream(&d->stream, 0, ACL_STREAM_FAST_LAUNCH);
    if (code != ACL_SUCCESS)
        goto restore;
    code = driver->create_event(&d->window[0], ACL_EVENT_SYNC);
    if (code != ACL_SUCCESS)
        goto destroy_stream;
    code = driver->create_event(&d->window[1], ACL_EVENT_SYNC);
    if (code == ACL_SUCCESS)
        goto restore;
    driver->destroy_event(d->window[0]);
destroy_stream:
    driver->destroy_stream(d->stream);
restore:
    if (before && before != context)
        driver->set_context(before);
    return code;
}

void device_close(device *d)
{
    aclrtContext before = NULL;
    d->driver.get_context(&before);
    d->driver.set_context(d->context);
    d->driver.destroy_event(d->window[1]);
    d->driver.destroy_event(d->window[0]);
    d->driver.destroy_stream(d->stream);
    if (before && before != d->context)
        d->driver.set_context(before);
}

/* ---- a program, before it runs ---- */

static bool moves_bytes(const ring_step *s)
{
    return s->op == RING_GET || s->op == RING_PUT || s->op == RING_COPY;
}

static bool step_is_valid(const ring_step *s, const device *d)
{
    const ring_grid *g = &s->grid;
    if (s->op == RING_WAIT || s->op == RING_RECORD)
        return s->handle != NULL;
    if (!moves_bytes(s) || g->bytes == 0 || g->tail == 0 || g->tail > g->bytes)
        return false;
    if (s->op == RING_COPY ? s->kind < 0 || s->kind > ACL_MEMCPY_DEFAULT : !s->handle || !d->driver.get || !d->driver.put)
        return false;
    return (g->tensors == 0 || (g->local && g->remote)) && (g->blocks == 0 || (g->local_index && g->remote_index));
}

/* false when the bytes of one step do not fit 64 bits */
static bool step_bytes(const ring_step *s, uint64_t *total)
{
    uint64_t ranges, bytes;
    return moves_bytes(s) ? !__builtin_mul_overflow((uint64_t)s->grid.tensors, (uint64_t)s->grid.blocks, &ranges) &&
                                !__builtin_mul_overflow(ranges, s->grid.bytes, &bytes) &&
                                !__builtin_add_overflow(*total, bytes, total)
                          : true;
}

bool program_init(program *p, const device *d, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms)
{
    memset(p, 0, sizeof *p);
    uint64_t total = 0, ranges = 0;
    bool waits = false;
    for (uint32_t i = 0; i < count; i++) {
        if (!step_is_valid(&steps[i], d) || !step_bytes(&steps[i], &total))
            return false;
        waits |= steps[i].op == RING_WAIT;
        ranges += (uint64_t)steps[i].grid.tensors * steps[i].grid.blocks;
    }
    p->steps = steps;
    p->count = count;
    p->timeout_ms = timeout_ms;
    p->may_run_inline = d->options.inline_bytes && !waits && total <= d->options.inline_bytes && ranges <= BATCH;
    p->done.id = id;
    p->done.submitted_ns = ring_now_ns();
    return true;
}

void program_copy(program *to, const program *from)
{
    memcpy(to, from, offsetof(program, cancelled));
    atomic_init(&to->cancelled, false);
    to->done = from->done;
    to->step = 0;
    to->deadline_ns = 0;
    to->issued = to->fenced[0] = to->fenced[1] = 0;
    to->windows = 0;
}

/* ---- failure ---- */

static void fail(device *d, program *p, int32_t origin, int32_t code)
{
    if (p->done.state != RING_DONE)
        return;                           /* the first failure is the one to tell */
    p->done.state = RING_FAILED;
    p->done.origin = origin;
    p->done.code = code;
    p->done.step = p->step;
    const char *words = d->driver.recent_error();   /* of this thread: the one that made the call */
    if (words)
        snprintf(p->done.message, sizeof p->done.message, "%s", words);
}

static bool goes_on(const program *p)
{
    return p->done.state == RING_DONE && !atomic_load_explicit(&p->cancelled, memory_order_relaxed);
}

/* ---- waiting for the device ---- */

static int64_t remaining_ms(const program *p)
{
    int64_t left = p->deadline_ns - ring_now_ns();
    return left <= 0 ? 0 : left / 1000000 + 1;
}

static aclError wait_slice(device *d, aclrtEvent event, int32_t ms)
{
    return event ? d->driver.sync_event(event, ms) : d->driver.sync_stream(d->stream, ms);
}

/* Waits for the event, or for the whole stream. A call into the vendor's library cannot be interrupted, so it is made
 * in slices: only a transfer that makes no progress ever sees the end of one.                                      */
static void await_device(device *d, program *p, aclrtEvent event)
{
    enum { SLICE_MS = 20 };
    int64_t give_up_ns = 0;               /* set when cancellation is first seen here */
    for (;;) {
        int64_t left = remaining_ms(p);
        aclError code = wait_slice(d, event, (int32_t)(left < SLICE_MS ? (left > 0 ? left : 1) : SLICE_MS));
        if (code == ACL_SUCCESS)
            return;
        if (code != ACL_ERROR_RT_EVENT_SYNC_TIMEOUT && code != ACL_ERROR_RT_STREAM_SYNC_TIMEOUT) {
            fail(d, p, RING_ACL, code);
            return;
        }
        d->driver.recent_error();         /* the slice's own timeout is not news */
        if (atomic_load_explicit(&p->cancelled, memory_order_relaxed)) {
            if (!give_up_ns)
                give_up_ns = ring_now_ns() + d->options.grace_ms * 1000000;
            if (ring_now_ns() >= give_up_ns) {
                p->done.state = RING_CANCELLED;
                return;
            }
        }
        if (remaining_ms(p) == 0) {
            fail(d, p, RING_ACL, code);
            p->done.state = RING_TIMED_OUT;
            return;
        }
    }
}

/* After a failure work may still be under way. Nothing of it may touch memory once the program is complete. */
static void quiesce(device *d, program *p)
{
    bool overdue = p->done.state == RING_TIMED_OUT || p->done.state == RING_CANCELLED;
    if (overdue)
        d->driver.abort_stream(d->stream);
    aclError code = d->driver.sync_stream(d->stream, (int32_t)d->options.grace_ms);
    if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT && !overdue) {
        d->driver.abort_stream(d->stream);
        code = d->driver.sync_stream(d->stream, (int32_t)d->options.grace_ms);
    }
    if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
        p->done.state = RING_STUCK;
    d->driver.recent_error();
}

/* ---- issuing ---- */

/* Closes a window, and waits for the one before it: two are under way at most. */
static void fence(device *d, program *p)
{
    uint32_t now = p->windows++ & 1;
    aclError code = d->driver.record_event(d->window[now], d->stream);
    if (code != ACL_SUCCESS) {
        fail(d, p, RING_ACL, code);
        return;
    }
    p->fenced[now] = p->issued;
    if (p->windows < 2)
        return;
    await_device(d, p, d->window[!now]);
    if (p->done.state == RING_DONE)
        p->done.bytes = p->fenced[!now];
}

/* The next range of the grid, at most `most` bytes of it; neighbours on both sides are one. */
static bool next_range(const ring_grid *g, cursor *c, uint64_t most, uint64_t *local, uint64_t *remote, uint64_t *bytes)
{
    if (c->tensor >= g->tensors || g->blocks == 0)
        return false;
    uint32_t i = c->block, last = g->blocks - 1;
    uint64_t whole = (i == last ? g->tail : g->bytes);
    *local = g->local[c->tensor] + g->local_index[i] * g->local_stride + c->offset;
    *remote = g->remote[c->tensor] + g->remote_index[i] * g->remote_stride + c->offset;
    *bytes = whole - c->offset;
    bool dense = g->bytes == g->local_stride && g->bytes == g->remote_stride;
    while (dense && i < last && *bytes < most && g->local_index[i + 1] == g->local_index[i] + 1 &&
           g->remote_index[i + 1] == g->remote_index[i] + 1) {
        i++;
        *bytes += whole = (i == last ? g->tail : g->bytes);
    }
    uint64_t over = *bytes > most ? *bytes - most : 0;
    *bytes -= over;                       /* most is at least one block or this is a single block cut short */
    c->block = i;
    c->offset = over ? whole - over : 0;
    if (!over && i == last) {
        c->block = 0;
        c->tensor++;
    } else if (!over)
        c->block++;
    return true;
}

static void issue_batch(device *d, program *p, const ring_step *s, HcclOneSideOpDesc *batch, uint32_t n)
{
    HcclResult code = (s->op == RING_GET ? d->driver.get : d->driver.put)(s->handle, s->rank, batch, n, d->stream);
    if (code != HCCL_SUCCESS)
        fail(d, p, RING_HCCL, code);
}

static void issue_copy(device *d, program *p, const ring_step *s, uint64_t local, uint64_t remote, uint64_t bytes)
{
    void *to = (void *)local;
    const void *from = (const void *)remote;
    /* Asynchronous host-to-host copies do not exist on the device side; the worker is as good a place for them. */
    aclError code = s->kind == ACL_MEMCPY_HOST_TO_HOST ? d->driver.copy(to, bytes, from, bytes, (aclrtMemcpyKind)s->kind)
                    : d->driver.copy_async(to, bytes, from, bytes, (aclrtMemcpyKind)s->kind, d->stream);
    if (code != ACL_SUCCESS)
        fail(d, p, RING_ACL, code);
}

/* false: stopped before the last range */
static bool issue_grid(device *d, program *p, const ring_step *s)
{
    HcclOneSideOpDesc batch[BATCH];
    uint64_t local, remote, bytes, window = d->options.window_bytes;
    uint32_t n = 0;
    cursor at = {0};
    while (goes_on(p)) {
        uint64_t room = window - (p->issued - p->fenced[(p->windows + 1) & 1]);
        bool more = next_range(&s->grid, &at, room, &local, &remote, &bytes);
        if (more && s->op == RING_COPY)
            issue_copy(d, p, s, local, remote, bytes);
        else if (more)
            batch[n++] = (HcclOneSideOpDesc){(void *)local, (void *)remote, bytes, HCCL_DATA_TYPE_UINT8};
        bool full = more && bytes == room;
        if (n == BATCH || (n && (full || !more))) {
            issue_batch(d, p, s, batch, n);
            n = 0;
        }
        if (!more)
            return true;
        p->issued += bytes;
        p->done.ranges++;
        if (full && goes_on(p))
            fence(d, p);
    }
    return false;
}

static bool issue_step(device *d, program *p, const ring_step *s)
{
    if (moves_bytes(s))
        return issue_grid(d, p, s) && p->done.state == RING_DONE;
    aclError code = ACL_SUCCESS;
    if (s->op == RING_WAIT)
        code = d->driver.wait_event(d->stream, s->handle);
    else
        code = d->driver.record_event(s->handle, d->stream);
    if (code != ACL_SUCCESS)
        fail(d, p, RING_ACL, code);
    return code == ACL_SUCCESS;
}

static void issue(device *d, program *p)
{
    p->done.started_ns = ring_now_ns();
    p->deadline_ns = p->done.started_ns + p->timeout_ms * 1000000;
    while (p->step < p->count && goes_on(p) && issue_step(d, p, &p->steps[p->step]))
        p->step++;
}

/* ---- the end ---- */

static void settle(device *d, program *p)
{
    if (p->done.state == RING_DONE)
        await_device(d, p, NULL);
    if (p->done.state != RING_DONE) {
        quiesce(d, p);
    } else {
        p->done.bytes = p->issued;
        p->done.step = p->step;
        if (p->step < p->count)           /* stopped half-way; what was issued has landed */
            p->done.state = RING_CANCELLED;
    }
    p->done.finished_ns = ring_now_ns();
}

void program_refuse(program *p, int32_t state)
{
    p->done.state = state;
    p->done.started_ns = p->done.finished_ns = ring_now_ns();
}

void program_run(device *d, program *p)
{
    if (!p->handed_over)
        issue(d, p);
    settle(d, p);
}

bool program_run_inline(device *d, program *p)
{
    issue(d, p);
    if (p->count) {
        aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
        aclError code = d->driver.query_stream(d->stream, &status);
        if (code == ACL_SUCCESS && status != ACL_STREAM_STATUS_COMPLETE)
            return false;
        if (code != ACL_SUCCESS)
            fail(d, p, RING_ACL, code);
        settle(d, p);
    }
    p->done.finished_ns = ring_now_ns();
    return true;
}
