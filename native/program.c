/* program.c: issues one program to the device, step by step, and waits until the device has let go of its memory. */
#include "ring_internal.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* A connection's queue takes 510 requests, and behind that HCCL blocks its caller for up to two minutes. A ring has 386 under
 * way at most: two windows, each of them a batch with the fenced read that ends it, where a program has one step that
 * moves bytes, as all have; each step ends a batch. HCCL takes batches of up to 256 ranges. */
enum { WINDOWS = 2, WINDOW_RANGES = 192, HOST_BATCH = 256 };
enum { IN_CALL_BYTES = 256 << 10 };       /* of a window in the submitting call: softnpu carries this much out at once */
enum { FIRST_LOOK = 32, LOOK_RANGES = 64 };     /* ranges between two looks at the clock in the submitting call */
enum { WINDOWS_UNPROVEN = 16 };           /* so much may be under way or done that no synchronize has told of */

/* ---- a device's stream, and two events of it ---- */

/* Makes the device's context this thread's. *before is for leave(). */
static aclError enter(const ring_stream *on, aclrtContext *before)
{
    *before = NULL;
    if (on->driver.get_context(before) != ACL_SUCCESS)
        on->driver.recent_error();        /* that this thread has none is not news */
    return *before && *before == on->context ? ACL_SUCCESS : on->driver.set_context(on->context);
}

static void leave(const ring_stream *on, aclrtContext before)
{
    if (before && before != on->context)
        on->driver.set_context(before);
}

static aclError create(ring_stream *on)
{
    aclError code = on->driver.create_stream(&on->stream, 0, ACL_STREAM_FAST_LAUNCH);
    if (code != ACL_SUCCESS)
        return code;
    code = on->driver.create_event(&on->window[0], ACL_EVENT_SYNC);
    if (code != ACL_SUCCESS)
        goto destroy_stream;
    code = on->driver.create_event(&on->window[1], ACL_EVENT_SYNC);
    if (code != ACL_SUCCESS)
        goto destroy_event;
    return ACL_SUCCESS;
destroy_event:
    on->driver.destroy_event(on->window[0]);
destroy_stream:
    on->driver.destroy_stream(on->stream);
    return code;
}

int ring_stream_open(ring_stream *on, const ring_driver *driver, aclrtContext context, const ring_options *options)
{
    aclrtContext before;
    *on = (ring_stream){.driver = *driver, .options = *options, .context = context};
    aclError code = enter(on, &before);
    if (code == ACL_SUCCESS)
        code = create(on);
    leave(on, before);
    return code;
}

void ring_stream_close(ring_stream *on)
{
    aclrtContext before;
    enter(on, &before);
    if (on->gate)
        on->driver.destroy_event(on->gate);
    on->driver.destroy_event(on->window[1]);
    on->driver.destroy_event(on->window[0]);
    on->driver.destroy_stream(on->stream);
    leave(on, before);
}

/* Waits without a limit until the device has let go of everything. An error is reported once, and says nothing about later work,
 * so ask again. After a second error it can never be known. */
bool ring_stream_await_quiet(ring_stream *on)
{
    aclrtContext before;
    bool quiet = enter(on, &before) == ACL_SUCCESS;
    quiet = quiet && (on->driver.sync_stream(on->stream, -1) == ACL_SUCCESS || on->driver.sync_stream(on->stream, -1) == ACL_SUCCESS);
    leave(on, before);
    return quiet;
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

static bool step_is_valid(const ring_step *s, const ring_stream *on)
{
    const ring_grid *g = &s->grid;
    if (s->op == RING_WAIT || s->op == RING_RECORD)
        return s->handle &&
               (s->kind == RING_EVENT || (s->kind == RING_NOTIFY && on->driver.wait_notify && on->driver.record_notify));
    if (!moves_bytes(s) || g->bytes == 0 || g->tail == 0 || g->tail > g->bytes)
        return false;
    if (s->op == RING_COPY ? s->kind < 0 || s->kind > ACL_MEMCPY_DEFAULT : !s->handle || !on->driver.get || !on->driver.put)
        return false;
    return (g->tensors == 0 || (g->local && g->remote)) && (g->blocks == 0 || (g->local_index && g->remote_index));
}

static bool layers_are_valid(const ring_step *s, const ring_stream *on)
{
    const ring_layers *l = s->layers;
    if (!l->tensors || !l->group || s->grid.tensors % l->tensors || (l->gates && (!on->driver.wait_notify || l->gate_ms <= 0)))
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

/* So few bytes are short on any memory; a program that had to wait for a processor must not make them look long. */
static bool is_short(const ring_stream *on, bool is_background, uint64_t ranges, uint64_t total)
{
    uint64_t most_us = on->options.inline_us, background_us = on->options.background_us;
    if (is_background && background_us && background_us < most_us)
        most_us = background_us;
    bool is_small = ranges <= WINDOWS * WINDOW_RANGES && (!most_us || total <= IN_CALL_BYTES);
    return is_small || expected_ns(on, ranges, total) <= most_us * 1000;
}

bool program_init(program *p, const ring_stream *on, int priority, uint64_t id, const ring_step *steps, uint32_t count,
                  int64_t timeout_ms)
{
    uint64_t total = 0, ranges = 0, window_bytes = on->options.window_bytes;
    bool waits = false, on_stream = false;
    const ring_layers *layers = NULL;
    if ((count && !steps) || priority < 0 || priority >= RING_PRIORITIES)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        const ring_step *s = &steps[i];
        if (!step_is_valid(s, on) || (moves_bytes(s) && !add_bytes(s, &ranges, &total)))
            return false;
        if (s->layers && (layers || !moves_bytes(s) || !layers_are_valid(s, on)))
            return false;
        layers = s->layers ? s->layers : layers;
        waits |= s->op == RING_WAIT || layers || (is_host_copy(s) && on_stream);
        on_stream |= !is_host_copy(s);
    }
    memset(p, 0, sizeof *p);
    p->steps = steps;
    p->layers = layers;
    p->count = count;
    p->priority = priority;
    p->timeout_ms = timeout_ms;
    p->total = total;
    p->window_bytes = window_bytes;
    if (priority == RING_BACKGROUND && on->options.background_bytes && on->options.background_bytes < window_bytes)
        p->window_bytes = on->options.background_bytes;
    p->may_run_inline = on->options.inline_bytes && !waits && total <= on->options.inline_bytes && total <= p->window_bytes &&
                        is_short(on, priority == RING_BACKGROUND, ranges, total);
    p->done.id = id;
    p->done.submitted_ns = ring_now_ns();
    return true;
}

/* ---- failure ---- */

static bool goes_on(const program *p)
{
    return p->done.state == RING_DONE && !atomic_load_explicit(&p->cancelled, memory_order_relaxed);
}

static void end_as(ring_stream *on, program *p, int32_t state, int32_t origin, int32_t code)
{
    if (p->done.state != RING_DONE)
        return;                           /* the first failure is the one to tell */
    p->done.state = state;
    p->done.origin = origin;
    p->done.code = code;
    const char *words = on->driver.recent_error();  /* of this thread: the one that made the call */
    if (words)
        snprintf(p->done.message, sizeof p->done.message, "%s", words);
}

static bool check(ring_stream *on, program *p, aclError code)
{
    if (code != ACL_SUCCESS)
        end_as(on, p, RING_FAILED, RING_ACL, code);
    return code == ACL_SUCCESS;
}

/* The same for a call that reports on work: on this stream's, or on that of another stream in the same context. */
static bool check_work(ring_stream *on, program *p, aclError code)
{
    if (code != ACL_SUCCESS)
        end_as(on, p, RING_FAILED, RING_WORK, code);
    return code == ACL_SUCCESS;
}

/* ---- waiting for the device ---- */

static int32_t ms_until(int64_t ns, int32_t most)
{
    int64_t left = ns - ring_now_ns();
    return left <= 0 ? 1 : left / 1000000 >= most ? most : (int32_t)(left / 1000000 + 1);
}

/* A cancellation shortens the time limit to our patience. `code`: what to say when time is up. */
static void watch_time(ring_stream *on, program *p, aclError code)
{
    if (!p->stopping && atomic_load_explicit(&p->cancelled, memory_order_relaxed)) {
        int64_t patience_ends = ring_after_ns(on->options.patience_ms ? on->options.patience_ms : on->options.grace_ms);
        p->stopping = true;
        p->deadline_ns = patience_ends < p->deadline_ns ? patience_ends : p->deadline_ns;
    }
    if (ring_now_ns() < p->deadline_ns)
        return;
    if (p->stopping)
        p->done.state = RING_CANCELLED;
    else
        end_as(on, p, RING_TIMED_OUT, RING_ACL, code);
}

/* Is the event, or the whole stream, complete? This does not report work that failed. */
static bool is_complete(ring_stream *on, program *p, aclrtEvent event)
{
    aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
    if (!check(on, p, event ? on->driver.query_event(event, &recorded) : on->driver.query_stream(on->stream, &status)))
        return false;
    return event ? recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE : status == ACL_STREAM_STATUS_COMPLETE;
}

/* Polls, with naps of a sixteenth of the time waited so far. So the end is noticed later by that share at most. */
static bool ask_until_complete(ring_stream *on, program *p, aclrtEvent event)
{
    enum { SHORTEST_NS = 50000, LONGEST_NS = 10000000 };
    for (int64_t began = ring_now_ns(); !is_complete(on, p, event);) {
        watch_time(on, p, event ? ACL_ERROR_RT_EVENT_SYNC_TIMEOUT : ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        if (p->done.state != RING_DONE)
            return false;
        int64_t nap = (ring_now_ns() - began) / 16;
        nap = nap < SHORTEST_NS ? SHORTEST_NS : nap > LONGEST_NS ? LONGEST_NS : nap;
        nanosleep(&(struct timespec){.tv_nsec = nap}, NULL);
    }
    return true;
}

/* Waits until the gate has opened. From then on the work behind it has the program's own time limit. */
static bool await_gate(ring_stream *on, program *p)
{
    if (!p->behind_gate)
        return true;
    if (p->done.state != RING_DONE || !ask_until_complete(on, p, on->gate))
        return false;
    p->behind_gate = false;
    p->done.gate = 0;
    if (!p->stopping)
        p->deadline_ns = ring_after_ns(p->timeout_ms);
    return true;
}

/* Waits for the event, or for the whole stream; false: the program ended otherwise. A call that waits can neither be
 * interrupted nor run out of time without an error record at the vendor. So it is made only for work that should end in a
 * moment. A program behind a gate, or one that has stood still for longer, is polled. */
static bool await_device(ring_stream *on, program *p, aclrtEvent event)
{
    enum { MOMENT_MS = 20 };
    if (!await_gate(on, p))
        return false;
    while (p->done.state == RING_DONE && ((!p->is_gated && !p->stood_still) || ask_until_complete(on, p, event))) {
        int32_t ms = ms_until(p->deadline_ns, MOMENT_MS);
        aclError code = event ? on->driver.sync_event(event, ms) : on->driver.sync_stream(on->stream, ms);
        if (code != ACL_ERROR_RT_EVENT_SYNC_TIMEOUT && code != ACL_ERROR_RT_STREAM_SYNC_TIMEOUT) {
            p->is_gated = false;
            return check_work(on, p, code);
        }
        p->stood_still = true;
        on->driver.recent_error();        /* that it took longer is not news */
        watch_time(on, p, code);
    }
    return false;
}

/* Waits for everything that this program gave to the stream. Only here is it known that it has landed: synchronizing a
 * stream reports work that failed, and neither an event nor a query does. */
static bool drain(ring_stream *on, program *p)
{
    if (p->on_stream && !await_device(on, p, NULL))
        return false;
    p->on_stream = p->requested = false;
    p->windows = 0;
    p->window_landed_ns = 0;
    p->done.bytes = p->issued;
    return true;
}

/* Did the device let go? An error is reported once, and says nothing about later work, so ask again. And again after half of
 * the grace: if the process was stopped, that half has passed when it continues, and the device had none of it. */
static bool is_quiet(ring_stream *on)
{
    int32_t half_ms = (int32_t)(on->options.grace_ms / 2 + 1);
    aclError code = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
    for (int half = 0; half < 2 && code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT; half++) {
        int64_t end = ring_after_ns(half_ms);
        code = on->driver.sync_stream(on->stream, half_ms);
        if (code != ACL_SUCCESS && code != ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
            code = on->driver.sync_stream(on->stream, ms_until(end, half_ms));
    }
    return code == ACL_SUCCESS;
}

/* The abort has its own time, which begins now. If it is refused, the work may still end by itself. */
static void abort_stream(ring_stream *on, program *p)
{
    on->driver.recent_error();
    p->aborting = true;
    p->deadline_ns = ring_after_ns(on->options.abort_ms);
    p->done.abort_code = on->driver.abort_stream(on->stream);
    const char *words = p->done.abort_code ? on->driver.recent_error() : NULL;
    if (words && !p->done.message[0])
        snprintf(p->done.message, sizeof p->done.message, "%s", words);
}

/* After a failure work may still be under way. Nothing of it may touch memory once the program is complete. */
static void quiesce(ring_stream *on, program *p)
{
    bool overdue = p->done.state == RING_TIMED_OUT || p->done.state == RING_CANCELLED;
    if (overdue || !is_quiet(on)) {
        abort_stream(on, p);
        if (!is_quiet(on))
            p->done.state = RING_STUCK;
    }
    on->driver.recent_error();
}

/* ---- issuing ---- */

/* Notes how many layers have landed. False: that was known. */
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

/* Notifies the watcher, and starts the time limit again for the rest of the program. */
static void pass(ring_stream *on, program *p, uint32_t layers)
{
    if (!stamp(p, layers))
        return;
    if (!p->stopping)
        p->deadline_ns = ring_after_ns(p->timeout_ms);
    if (atomic_load(&p->watched))         /* behind the stamp: ring_watch() does the two the other way round */
        ring_signal(on->fd);
}

/* True if more urgent work waits, or less urgent work has its turn. A program that must stop anyway, or in which the stream may
 * be held, does not give way. */
static bool is_in_the_way(ring_stream *on, program *p)
{
    share_count(on, p);
    bool is_passed = atomic_load_explicit(&on->wanted, memory_order_relaxed) < p->priority;
    return goes_on(p) && !p->is_gated && (is_passed || share_due(on, p->priority) > p->priority);
}

/* Not before everything that was issued has landed: from then on, what happens to the stream does not affect this program. */
static void give_way(ring_stream *on, program *p)
{
    if (drain(on, p) && goes_on(p))
        p->gives_way = true;
}

/* All of it may take twice as long as expected. A part may take its share, and an eighth of it all to begin with: a thread that
 * waits for a processor once loses that much. */
static bool is_taking_long(const ring_stream *on, program *p)
{
    enum { AS_EXPECTED = 2, TO_BEGIN = 8 };
    double most_ns = (double)on->options.inline_us * 1000 * AS_EXPECTED, begin_ns = most_ns / TO_BEGIN;
    double share = (double)p->issued / (double)p->total;
    p->look_at = p->done.ranges + LOOK_RANGES;
    return on->options.inline_us && (double)(ring_now_ns() - p->done.started_ns) > begin_ns + (most_ns - begin_ns) * share;
}

/* The same within a window, which may have thousands of ranges: one takes 45 ns, or 7 us if its pages were never touched. */
static bool is_late(const ring_stream *on, program *p)
{
    return p->in_call && p->done.ranges >= p->look_at && is_taking_long(on, p);
}

/* The submitting call waits for nothing: it goes on if all has landed. It leaves the rest to the worker, too, if it was mistaken in
 * how long that would take. */
static void fence_in_call(ring_stream *on, program *p)
{
    if (!p->on_stream || is_complete(on, p, NULL)) {
        drain(on, p);
        p->leaves_rest = is_taking_long(on, p);
    } else if (goes_on(p) && check(on, p, on->driver.record_event(on->window[p->windows % WINDOWS], on->stream))) {
        p->windows++;
        p->leaves_rest = true;
    }
}

/* Closes a window, and waits for the one before it: two are under way at most. */
static void fence(ring_stream *on, program *p)
{
    uint64_t before = p->last_window;
    p->last_window = p->issued - p->window_start;
    p->window_start = p->issued;
    p->window_ranges = 0;
    if (p->in_call) {
        fence_in_call(on, p);
        return;
    }
    uint64_t most = WINDOWS_UNPROVEN * (on->options.window_bytes / p->window_bytes);   /* windows that are smaller are more */
    bool is_unproven = p->windows >= most || p->issued - p->done.bytes >= WINDOWS_UNPROVEN * on->options.window_bytes;
    if (!p->on_stream || is_unproven) {
        drain(on, p);
    } else if (check(on, p, on->driver.record_event(on->window[p->windows % WINDOWS], on->stream))) {
        p->windows++;
        if (p->windows >= WINDOWS && await_device(on, p, on->window[p->windows % WINDOWS]))
            window_landed(on, p, before);
    }
    watch_time(on, p, ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    if (is_in_the_way(on, p))
        give_way(on, p);
}

/* `total`: bytes that the ranges are a part of */
static aclError copy(ring_stream *on, program *p, const ring_step *s, const HcclOneSideOpDesc *r, uint32_t n, uint64_t total)
{
    if (is_host_copy(s)) {
        on->driver.copy(r, n, total);
        return ACL_SUCCESS;
    }
    p->on_stream = true;
    return on->driver.copy_async(r->localAddr, r->count, r->remoteAddr, r->count, (aclrtMemcpyKind)s->kind, on->stream);
}

static bool issue_ranges(ring_stream *on, program *p, const ring_step *s, HcclOneSideOpDesc *ranges, uint32_t n, uint64_t total)
{
    if (s->op == RING_COPY)
        return check(on, p, copy(on, p, s, ranges, n, total));
    p->on_stream = p->requested = true;   /* also where it is refused: the items before the bad one were accepted */
    HcclResult code = (s->op == RING_GET ? on->driver.get : on->driver.put)(s->handle, s->rank, ranges, n, on->stream);
    if (code != HCCL_SUCCESS)
        end_as(on, p, RING_FAILED, RING_HCCL, code);
    return code == HCCL_SUCCESS;
}

/* The tensors from `first` to before `stop`, or what is left of them. false: stopped before the last range */
static bool issue_tensors(ring_stream *on, program *p, const ring_step *s, uint32_t first, uint32_t stop)
{
    HcclOneSideOpDesc batch[HOST_BATCH];
    ring_grid part = s->grid;
    part.tensors = stop;
    bool is_host = is_host_copy(s);
    uint32_t n = 0, most = !is_host ? s->op == RING_COPY ? 1 : WINDOW_RANGES : p->in_call ? FIRST_LOOK : HOST_BATCH;
    uint64_t bytes = 0, total = s->grid.bytes * s->grid.blocks * (stop - first);   /* of the batch; about, of all */
    if (!p->is_begun)
        p->at = (cursor){.tensor = first};
    p->is_begun = true;
    if (is_host && !drain(on, p))          /* it would overtake what came before it */
        return false;
    while (goes_on(p) && !p->gives_way && !p->leaves_rest) {
        uint64_t room = p->window_bytes - (p->issued - p->window_start);
        bool more = has_range(&part, &p->at), full = bytes == room || (!is_host && p->window_ranges + n == WINDOW_RANGES);
        if (n && (n == most || full || !more)) {
            if (!issue_ranges(on, p, s, batch, n, total))
                return false;
            p->issued += bytes;
            p->window_ranges += is_host ? 0 : n;
            p->done.ranges += n;
            n = 0;
            bytes = 0;
        } else if (!more) {
            p->is_begun = false;
            return true;
        } else if (full || (n == 0 && is_late(on, p))) {
            fence(on, p);
        } else {
            batch[n] = next_range(&part, &p->at, room - bytes);
            bytes += batch[n++].count;
        }
    }
    return false;
}

/* If the record of the event is captured into a graph, waiting would pull this stream into the capture. So ask first. */
static aclError wait_for(ring_stream *on, const ring_step *s)
{
    enum { FOR_EVER = 0 };
    aclrtEventRecordedStatus unused;
    aclError code = s->kind == RING_EVENT ? on->driver.query_event(s->handle, &unused) : ACL_SUCCESS;
    if (code != ACL_SUCCESS && code != ACL_ERROR_RT_FEATURE_NOT_SUPPORT)    /* an event of another process cannot be asked */
        return code;
    return s->kind == RING_NOTIFY ? on->driver.wait_notify(s->handle, on->stream, FOR_EVER)
                                  : on->driver.wait_event(on->stream, s->handle);
}

static aclError record(ring_stream *on, const ring_step *s)
{
    return s->kind == RING_NOTIFY ? on->driver.record_notify(s->handle, on->stream)
                                  : on->driver.record_event(s->handle, on->stream);
}

/* Each gate has its own time, so the next one is put on the stream when this one has opened. The copies go behind the last one. */
static bool wait_for_gates(ring_stream *on, program *p, const ring_layers *l, uint32_t first, uint32_t stop)
{
    enum { FOR_EVER = 0 };
    if (!l->gates)
        return true;
    if (!on->gate && !check(on, p, on->driver.create_event(&on->gate, ACL_EVENT_SYNC)))
        return false;
    p->on_stream = p->is_gated = true;
    for (uint32_t i = first; i < stop; i++) {
        if (!await_gate(on, p) || !check(on, p, on->driver.wait_notify(l->gates[i], on->stream, FOR_EVER)) ||
            !check(on, p, on->driver.record_event(on->gate, on->stream)))
            return false;
        p->behind_gate = true;
        p->done.gate = i + 1;
        if (!p->stopping)
            p->deadline_ns = ring_after_ns(l->gate_ms);
    }
    return true;
}

/* The next group is not issued before this one is known to have landed: behind its gate the stream could not be asked. */
static bool land(ring_stream *on, program *p)
{
    if (!drain(on, p))
        return false;
    pass(on, p, p->sent);
    watch_time(on, p, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    if (is_in_the_way(on, p))
        give_way(on, p);
    return goes_on(p) && !p->gives_way;
}

static bool issue_layers(ring_stream *on, program *p, const ring_step *s)
{
    const ring_layers *l = s->layers;
    uint32_t count = s->grid.tensors / l->tensors;
    for (uint32_t first = p->sent, stop; first < count; first = stop) {
        stop = count - first > l->group ? first + l->group : count;
        if ((!p->is_begun && !wait_for_gates(on, p, l, first, stop)) || !issue_tensors(on, p, s, first * l->tensors, stop * l->tensors))
            return false;
        p->sent = stop;
        if (stop < count && !land(on, p))
            return false;
    }
    return true;
}

static bool issue_step(ring_stream *on, program *p, const ring_step *s)
{
    if (moves_bytes(s))
        return s->layers ? issue_layers(on, p, s) : issue_tensors(on, p, s, 0, s->grid.tensors);
    p->on_stream = true;
    p->is_gated |= s->op == RING_WAIT;
    return check(on, p, s->op == RING_WAIT ? wait_for(on, s) : record(on, s));
}

static void issue(ring_stream *on, program *p)
{
    while (p->step < p->count && goes_on(p) && issue_step(on, p, &p->steps[p->step]))
        p->step++;
}

/* ---- from the beginning to the end ---- */

/* The more urgent programs have ended. The time limit continues where it stood still. All issued work has landed, so a window
 * begins. */
static void come_back(program *p, int64_t now)
{
    int64_t aside = now - p->aside_since_ns;
    p->window_start = p->issued;
    p->window_ranges = 0;
    p->gives_way = false;
    p->aside_since_ns = 0;
    p->done.aside_ns += aside;
    p->deadline_ns += aside;
}

/* false: this thread cannot reach the device */
static bool begin(ring_stream *on, program *p, aclrtContext *before)
{
    if (p->aside_since_ns) {
        come_back(p, ring_now_ns());
    } else if (!p->handed_over) {
        p->done.started_ns = ring_now_ns();
        p->deadline_ns = ring_after_ns(p->timeout_ms);
    }
    window_fit(on, p);
    return check(on, p, enter(on, before));
}

static void settle(ring_stream *on, program *p)
{
    if (p->done.state == RING_DONE && drain(on, p)) {
        stamp(p, p->sent);                /* the completion is news enough */
        if (p->step < p->count)
            p->done.state = RING_CANCELLED;   /* stopped half-way; what was issued has landed */
    }
    if (p->on_stream)
        quiesce(on, p);
    share_count(on, p);
    p->done.unclean = p->requested;
    p->done.step = p->step;
    p->done.finished_ns = ring_now_ns();
    expect_learn(on, p, p->issued, p->done.ranges);
}

void program_refuse(program *p, int32_t state)
{
    int64_t now = ring_now_ns();
    if (p->aside_since_ns)
        come_back(p, now);
    else
        p->done.started_ns = now;
    p->done.state = state;
    p->done.step = p->step;
    p->done.finished_ns = now;
}

/* A program that fits a window is carried out by the thread that issues it, and by the device's copiers, rather than by one more
 * thread that must wake up first. Larger ones are issued while the device is copying. */
static bool carries_out(const ring_stream *on, const program *p)
{
    return on->driver.run_here && p->total <= on->options.window_bytes;
}

bool program_run(ring_stream *on, program *p)
{
    aclrtContext before;
    uint64_t usual = carries_out(on, p) ? on->driver.run_here(UINT64_MAX) : 0;
    p->leaves_rest = false;
    if (begin(on, p, &before))
        issue(on, p);
    if (p->gives_way)
        p->aside_since_ns = ring_now_ns();
    else
        settle(on, p);
    leave(on, before);
    if (carries_out(on, p))
        on->driver.run_here(usual);
    return !p->gives_way;
}

bool program_run_inline(ring_stream *on, program *p)
{
    aclrtContext before;
    aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
    p->in_call = true;
    p->look_at = FIRST_LOOK;
    bool is_there = begin(on, p, &before);
    uint64_t window_bytes = p->window_bytes;          /* behind begin(), which may make them larger */
    p->window_bytes = window_bytes < IN_CALL_BYTES ? window_bytes : IN_CALL_BYTES;
    if (is_there)
        issue(on, p);
    p->in_call = false;
    p->window_bytes = window_bytes;
    if (p->on_stream && !check(on, p, on->driver.query_stream(on->stream, &status)))
        status = ACL_STREAM_STATUS_NOT_READY;
    bool finished = !p->leaves_rest && (!p->on_stream || status == ACL_STREAM_STATUS_COMPLETE);
    if (finished)
        settle(on, p);
    leave(on, before);
    return finished;
}
