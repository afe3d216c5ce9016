/* program.c: says one program to the device, step by step, and waits until the device let go of its memory. */
#include "ring_internal.h"

#include <stdio.h>
#include <string.h>

enum { BATCH = 256 };                     /* descriptors per HcclBatchGet/Put: the vendor's limit */

/* ---- the device: a stream and two events ---- */

/* Makes the device's context this thread's. *before is for leave(). */
static aclError enter(const device *d, aclrtContext *before)
{
    *before = NULL;
    if (d->driver.get_context(before) != ACL_SUCCESS)
        d->driver.recent_error();         /* that this thread has none is not news */
    return *before && *before == d->context ? ACL_SUCCESS : d->driver.set_context(d->context);
}

static void leave(const device *d, aclrtContext before)
{
    if (before && before != d->context)
        d->driver.set_context(before);
}

static aclError create(device *d)
{
    aclError code = d->driver.create_stream(&d->stream, 0, ACL_STREAM_FAST_LAUNCH);
    if (code != ACL_SUCCESS)
        return code;
    code = d->driver.create_event(&d->window[0], ACL_EVENT_SYNC);
    if (code != ACL_SUCCESS)
        goto destroy_stream;
    code = d->driver.create_event(&d->window[1], ACL_EVENT_SYNC);
    if (code != ACL_SUCCESS)
        goto destroy_event;
    return ACL_SUCCESS;
destroy_event:
    d->driver.destroy_event(d->window[0]);
destroy_stream:
    d->driver.destroy_stream(d->stream);
    return code;
}

int device_open(device *d, const ring_driver *driver, aclrtContext context, const ring_options *options)
{
    aclrtContext before;
    *d = (device){.driver = *driver, .options = *options, .context = context};
    aclError code = enter(d, &before);
    if (code == ACL_SUCCESS)
        code = create(d);
    leave(d, before);
    return code;
}

void device_close(device *d)
{
    aclrtContext before;
    enter(d, &before);
    d->driver.destroy_event(d->window[1]);
    d->driver.destroy_event(d->window[0]);
    d->driver.destroy_stream(d->stream);
    leave(d, before);
}

/* ---- a program, before it runs ---- */

static bool moves_bytes(const ring_step *s)
{
    return s->op == RING_GET || s->op == RING_PUT || s->op == RING_COPY;
}

/* Asynchronous host-to-host copies do not exist on the device side; the thread that issues does them on the spot. */
static bool is_host_copy(const ring_step *s)
{
    return s->op == RING_COPY && s->kind == ACL_MEMCPY_HOST_TO_HOST;
}

static bool step_is_valid(const ring_step *s, const device *d)
{
    const ring_grid *g = &s->grid;
    if (s->op == RING_WAIT || s->op == RING_RECORD)
        return s->handle && (s->kind == RING_EVENT || (s->kind == RING_NOTIFY && d->driver.wait_notify && d->driver.record_notify));
    if (!moves_bytes(s) || g->bytes == 0 || g->tail == 0 || g->tail > g->bytes)
        return false;
    if (s->op == RING_COPY ? s->kind < 0 || s->kind > ACL_MEMCPY_DEFAULT : !s->handle || !d->driver.get || !d->driver.put)
        return false;
    return (g->tensors == 0 || (g->local && g->remote)) && (g->blocks == 0 || (g->local_index && g->remote_index));
}

static bool layers_are_valid(const ring_step *s, const device *d)
{
    const ring_layers *l = s->layers;
    if (!l->tensors || !l->group || s->grid.tensors % l->tensors || (l->gates && !d->driver.wait_notify))
        return false;
    for (uint32_t i = 0; l->gates && i < s->grid.tensors / l->tensors; i++)
        if (!l->gates[i])
            return false;
    return true;
}

/* Adds up; false when the bytes of all steps do not fit 64 bits. */
static bool add_bytes(const ring_step *s, uint64_t *ranges, uint64_t *total)
{
    uint64_t count = (uint64_t)s->grid.tensors * s->grid.blocks, bytes;
    *ranges += count;                     /* cannot overflow when the bytes do not */
    return !__builtin_mul_overflow(count, s->grid.bytes, &bytes) && !__builtin_add_overflow(*total, bytes, total);
}

bool program_init(program *p, const device *d, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms)
{
    uint64_t total = 0, ranges = 0;
    bool waits = false, on_stream = false;
    const ring_layers *layers = NULL;
    if (count && !steps)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        const ring_step *s = &steps[i];
        if (!step_is_valid(s, d) || (moves_bytes(s) && !add_bytes(s, &ranges, &total)))
            return false;
        if (s->layers && (layers || !moves_bytes(s) || !layers_are_valid(s, d)))
            return false;
        layers = s->layers ? s->layers : layers;
        waits |= s->op == RING_WAIT || layers || (is_host_copy(s) && on_stream);
        on_stream |= !is_host_copy(s);
    }
    memset(p, 0, sizeof *p);
    p->steps = steps;
    p->layers = layers;
    p->count = count;
    p->timeout_ms = timeout_ms;
    p->may_run_inline = d->options.inline_bytes && !waits && ranges <= BATCH && total <= d->options.inline_bytes &&
                        total <= d->options.window_bytes;    /* a second window would wait for the first */
    p->done.id = id;
    p->done.submitted_ns = ring_now_ns();
    return true;
}

/* ---- failure ---- */

static bool goes_on(const program *p)
{
    return p->done.state == RING_DONE && !atomic_load_explicit(&p->cancelled, memory_order_relaxed);
}

static void end_as(device *d, program *p, int32_t state, int32_t origin, int32_t code)
{
    if (p->done.state != RING_DONE)
        return;                           /* the first failure is the one to tell */
    p->done.state = state;
    p->done.origin = origin;
    p->done.code = code;
    const char *words = d->driver.recent_error();   /* of this thread: the one that made the call */
    if (words)
        snprintf(p->done.message, sizeof p->done.message, "%s", words);
}

static bool check(device *d, program *p, aclError code)
{
    if (code != ACL_SUCCESS)
        end_as(d, p, RING_FAILED, RING_ACL, code);
    return code == ACL_SUCCESS;
}

/* ---- waiting for the device ---- */

static int32_t ms_until(int64_t ns, int32_t most)
{
    int64_t left = ns - ring_now_ns();
    return left <= 0 ? 1 : left / 1000000 >= most ? most : (int32_t)(left / 1000000 + 1);
}

/* A cancellation shortens the time limit to our patience. `code`: what to say when time is up. */
static void watch_time(device *d, program *p, aclError code)
{
    if (!p->stopping && atomic_load_explicit(&p->cancelled, memory_order_relaxed)) {
        int64_t patience_ends = ring_after_ns(d->options.patience_ms ? d->options.patience_ms : d->options.grace_ms);
        p->stopping = true;
        p->deadline_ns = patience_ends < p->deadline_ns ? patience_ends : p->deadline_ns;
    }
    if (ring_now_ns() < p->deadline_ns)
        return;
    if (p->stopping)
        p->done.state = RING_CANCELLED;
    else
        end_as(d, p, RING_TIMED_OUT, RING_ACL, code);
}

/* Waits for the event, or for the whole stream; false: the program ended otherwise. A call into the vendor's library
 * cannot be interrupted, so it is made in slices: only a transfer that makes no progress ever sees the end of one.  */
static bool await_device(device *d, program *p, aclrtEvent event)
{
    enum { SLICE_MS = 20 };
    while (p->done.state == RING_DONE) {
        int32_t ms = ms_until(p->deadline_ns, SLICE_MS);
        aclError code = event ? d->driver.sync_event(event, ms) : d->driver.sync_stream(d->stream, ms);
        if (code != ACL_ERROR_RT_EVENT_SYNC_TIMEOUT && code != ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
            return check(d, p, code);
        watch_time(d, p, code);
        d->driver.recent_error();         /* the slice's own timeout is not news */
    }
    return false;
}

/* Waits for all that this program gave to the stream. */
static bool drain(device *d, program *p)
{
    if (p->on_stream && !await_device(d, p, NULL))
        return false;
    p->on_stream = false;
    p->done.bytes = p->issued;
    return true;
}

/* Did the device let go? An error is told once, and says nothing about what comes after it: so ask again. */
static bool is_quiet(device *d)
{
    int64_t end = ring_after_ns(d->options.grace_ms);
    aclError code = d->driver.sync_stream(d->stream, ms_until(end, (int32_t)d->options.grace_ms));
    if (code != ACL_SUCCESS && code != ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
        code = d->driver.sync_stream(d->stream, ms_until(end, (int32_t)d->options.grace_ms));
    return code == ACL_SUCCESS;
}

/* After a failure work may still be under way. Nothing of it may touch memory once the program is complete. */
static void quiesce(device *d, program *p)
{
    bool overdue = p->done.state == RING_TIMED_OUT || p->done.state == RING_CANCELLED;
    if (overdue || !is_quiet(d)) {
        d->driver.abort_stream(d->stream);
        if (!is_quiet(d))
            p->done.state = RING_STUCK;
    }
    d->driver.recent_error();
}

/* ---- issuing ---- */

/* So many layers have landed; false: that is no news. */
static bool stamp(program *p, uint32_t layers)
{
    uint32_t before = atomic_load_explicit(&p->landed, memory_order_relaxed);
    if (layers == before)
        return false;
    int64_t now = ring_now_ns();
    for (uint32_t i = before; p->layers->landed_ns && i < layers; i++)
        p->layers->landed_ns[i] = now;
    atomic_store(&p->landed, layers);
    return true;
}

/* Tells who watches, and gives the rest of the program a time limit of its own. */
static void pass(device *d, program *p, uint32_t layers)
{
    if (!stamp(p, layers))
        return;
    if (!p->stopping)
        p->deadline_ns = ring_after_ns(p->timeout_ms);
    if (atomic_load(&p->watched))         /* behind the stamp: ring_watch() does the two the other way round */
        ring_signal(d->fd);
}

/* Closes a window, and waits for the one before it: two are under way at most. */
static void fence(device *d, program *p)
{
    aclrtStreamStatus status;
    uint32_t now = p->windows++ & 1;
    p->on_stream = true;
    p->fenced[now] = p->issued;
    p->fenced_layers[now] = p->sent;
    if (!check(d, p, d->driver.record_event(d->window[now], d->stream)))
        return;
    if (p->windows >= 2) {
        if (!await_device(d, p, d->window[!now]))
            return;
        /* An event comes also after copies that failed; the query tells of those. */
        if (!check(d, p, d->driver.query_stream(d->stream, &status)))
            return;
        p->done.bytes = p->fenced[!now];
        pass(d, p, p->fenced_layers[!now]);
    }
    watch_time(d, p, ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
}

/* The next range of the grid, at most `most` bytes of it; neighbours on both sides are one. */
static bool next_range(const ring_grid *g, cursor *c, uint64_t most, HcclOneSideOpDesc *range)
{
    if (c->tensor >= g->tensors || g->blocks == 0)
        return false;
    uint32_t i = c->block, last = g->blocks - 1;
    uint64_t block = i == last ? g->tail : g->bytes, bytes = block - c->offset;
    range->localAddr = (void *)(g->local[c->tensor] + g->local_index[i] * g->local_stride + c->offset);
    range->remoteAddr = (void *)(g->remote[c->tensor] + g->remote_index[i] * g->remote_stride + c->offset);
    range->dataType = HCCL_DATA_TYPE_UINT8;
    bool dense = g->bytes == g->local_stride && g->bytes == g->remote_stride;
    while (dense && i < last && bytes < most && g->local_index[i + 1] == g->local_index[i] + 1 &&
           g->remote_index[i + 1] == g->remote_index[i] + 1) {
        i++;
        block = i == last ? g->tail : g->bytes;
        bytes += block;
    }
    uint64_t over = bytes > most ? bytes - most : 0;    /* of the last block; it is where the next range begins */
    range->count = bytes - over;
    c->block = over ? i : i + 1;
    c->offset = over ? block - over : 0;
    if (c->block == g->blocks) {
        c->block = 0;
        c->tensor++;
    }
    return true;
}

/* `total`: bytes that the ranges are a part of */
static aclError copy(device *d, program *p, const ring_step *s, const HcclOneSideOpDesc *r, uint32_t n, uint64_t total)
{
    if (is_host_copy(s)) {
        d->driver.copy(r, n, total);
        return ACL_SUCCESS;
    }
    p->on_stream = true;
    return d->driver.copy_async(r->localAddr, r->count, r->remoteAddr, r->count, (aclrtMemcpyKind)s->kind, d->stream);
}

static bool issue_ranges(device *d, program *p, const ring_step *s, HcclOneSideOpDesc *ranges, uint32_t n, uint64_t total)
{
    if (s->op == RING_COPY)
        return check(d, p, copy(d, p, s, ranges, n, total));
    p->on_stream = true;
    HcclResult code = (s->op == RING_GET ? d->driver.get : d->driver.put)(s->handle, s->rank, ranges, n, d->stream);
    if (code != HCCL_SUCCESS)
        end_as(d, p, RING_FAILED, RING_HCCL, code);
    return code == HCCL_SUCCESS;
}

/* The tensors from `first` to before `stop`. false: stopped before the last range */
static bool issue_tensors(device *d, program *p, const ring_step *s, uint32_t first, uint32_t stop)
{
    HcclOneSideOpDesc batch[BATCH];
    ring_grid part = s->grid;
    part.tensors = stop;
    uint32_t n = 0, most = s->op == RING_COPY && !is_host_copy(s) ? 1 : BATCH;
    uint64_t bytes = 0, total = s->grid.bytes * s->grid.blocks * (stop - first);   /* of the batch; about, of all */
    cursor at = {.tensor = first};
    if (is_host_copy(s) && !drain(d, p))  /* it would overtake what came before it */
        return false;
    while (goes_on(p)) {
        uint64_t room = d->options.window_bytes - (p->issued - p->fenced[(p->windows + 1) & 1]);
        bool more = next_range(&part, &at, room - bytes, &batch[n]);
        if (more)
            bytes += batch[n++].count;
        bool full = bytes == room;
        if (n && (n == most || full || !more)) {
            if (!issue_ranges(d, p, s, batch, n, total))
                return false;
            p->issued += bytes;
            p->done.ranges += n;
            n = 0;
            bytes = 0;
        }
        if (full && goes_on(p))
            fence(d, p);
        if (!more)
            return true;
    }
    return false;
}

static aclError wait_for(device *d, const ring_step *s)
{
    enum { FOR_EVER = 0 };
    return s->kind == RING_NOTIFY ? d->driver.wait_notify(s->handle, d->stream, FOR_EVER)
                                  : d->driver.wait_event(d->stream, s->handle);
}

static aclError record(device *d, const ring_step *s)
{
    return s->kind == RING_NOTIFY ? d->driver.record_notify(s->handle, d->stream) : d->driver.record_event(s->handle, d->stream);
}

static bool wait_for_gates(device *d, program *p, const ring_layers *l, uint32_t first, uint32_t stop)
{
    enum { FOR_EVER = 0 };
    p->on_stream |= l->gates != NULL;
    for (uint32_t i = first; l->gates && i < stop; i++)
        if (!check(d, p, d->driver.wait_notify(l->gates[i], d->stream, FOR_EVER)))
            return false;
    return true;
}

static bool issue_layers(device *d, program *p, const ring_step *s)
{
    const ring_layers *l = s->layers;
    uint32_t count = s->grid.tensors / l->tensors;
    for (uint32_t first = 0, stop; first < count; first = stop) {
        stop = count - first > l->group ? first + l->group : count;
        if (!wait_for_gates(d, p, l, first, stop) || !issue_tensors(d, p, s, first * l->tensors, stop * l->tensors))
            return false;
        p->sent = stop;
        fence(d, p);
        if (!goes_on(p))
            return false;
    }
    return true;
}

static bool issue_step(device *d, program *p, const ring_step *s)
{
    if (moves_bytes(s))
        return s->layers ? issue_layers(d, p, s) : issue_tensors(d, p, s, 0, s->grid.tensors);
    p->on_stream = true;
    return check(d, p, s->op == RING_WAIT ? wait_for(d, s) : record(d, s));
}

static void issue(device *d, program *p)
{
    while (p->step < p->count && goes_on(p) && issue_step(d, p, &p->steps[p->step]))
        p->step++;
}

/* ---- from the beginning to the end ---- */

/* false: this thread cannot reach the device */
static bool begin(device *d, program *p, aclrtContext *before)
{
    if (!p->handed_over) {
        p->done.started_ns = ring_now_ns();
        p->deadline_ns = ring_after_ns(p->timeout_ms);
    }
    return check(d, p, enter(d, before));
}

static void settle(device *d, program *p)
{
    if (p->done.state == RING_DONE && drain(d, p)) {
        stamp(p, p->sent);                /* the completion is news enough */
        if (p->step < p->count)
            p->done.state = RING_CANCELLED;   /* stopped half-way; what was issued has landed */
    }
    if (p->on_stream)
        quiesce(d, p);
    p->done.step = p->step;
    p->done.finished_ns = ring_now_ns();
}

void program_refuse(program *p, int32_t state)
{
    p->done.state = state;
    p->done.started_ns = p->done.finished_ns = ring_now_ns();
}

void program_run(device *d, program *p)
{
    aclrtContext before;
    if (begin(d, p, &before) && !p->handed_over)
        issue(d, p);
    settle(d, p);
    leave(d, before);
}

bool program_run_inline(device *d, program *p)
{
    aclrtContext before;
    aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
    if (begin(d, p, &before))
        issue(d, p);
    if (p->on_stream && !check(d, p, d->driver.query_stream(d->stream, &status)))
        status = ACL_STREAM_STATUS_NOT_READY;
    bool finished = !p->on_stream || status == ACL_STREAM_STATUS_COMPLETE;
    if (finished)
        settle(d, p);
    leave(d, before);
    return finished;
}
