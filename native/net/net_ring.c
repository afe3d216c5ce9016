/* net_ring.c: programs of one net ring: submitted, cancelled, watched, reaped. */
#include "net_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

int64_t ring_now_ns(void);
int64_t ring_after_ns(int64_t ms);
void ring_signal(int fd);

static bool is_forked(const net_ring *r)
{
    return r->channel->pid != getpid();
}

int net_open(net_channel *c, const net_options *options, net_ring **out)
{
    if (!c || !options || !out || !options->depth || c->pid != getpid())
        return ACL_ERROR_INVALID_PARAM;
    net_ring *r = calloc(1, sizeof *r + options->depth * sizeof(net_program));
    if (!r)
        return ACL_ERROR_BAD_ALLOC;
    r->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (r->fd < 0) {
        free(r);
        return ACL_ERROR_BAD_ALLOC;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&r->idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    r->channel = c;
    r->is_ordered = options->ordered;
    r->depth = r->vacant = options->depth;
    node_clear(&r->free);
    node_clear(&r->live);
    node_clear(&r->complete);
    for (int priority = 0; priority < RING_PRIORITIES; priority++)
        node_clear(&r->behind[priority]);
    for (uint32_t i = 0; i < r->depth; i++) {
        node_clear(&r->programs[i].turn);
        node_insert(&r->free, &r->programs[i].live);
    }
    pthread_mutex_lock(&c->lock);
    node_insert(&c->rings, &r->on_channel);
    pthread_mutex_unlock(&c->lock);
    *out = r;
    return ACL_SUCCESS;
}

/* ---- submission ---- */

static bool step_is_valid(const ring_step *s, const net_ring *r)
{
    const ring_grid *g = &s->grid;
    if ((s->op != RING_GET && s->op != RING_PUT) || s->handle != r->channel || !g->bytes || !g->tail || g->tail > g->bytes)
        return false;
    if ((g->tensors && (!g->local || !g->remote)) || (g->blocks && (!g->local_index || !g->remote_index)))
        return false;
    return !s->layers || (!s->layers->gates && s->layers->tensors && s->layers->group && g->tensors % s->layers->tensors == 0);
}

static uint64_t tensor_bytes(const ring_grid *g)
{
    return g->blocks ? (g->blocks - 1) * g->bytes + g->tail : 0;
}

/* Fills in what a program starts with; false if its steps make no sense. */
static bool prepare(net_program *p, net_ring *r, const ring_step *steps, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const ring_step *s = &steps[i];
        uint64_t most, bytes;
        if (!step_is_valid(s, r) || (s->layers && p->layers) ||
            __builtin_mul_overflow((uint64_t)s->grid.tensors * s->grid.blocks, s->grid.bytes, &most))
            return false;
        bytes = s->grid.tensors * tensor_bytes(&s->grid);
        if (s->layers) {
            p->layers = s->layers;
            p->before_layers = p->total;
            p->layer_bytes = s->layers->tensors * tensor_bytes(&s->grid);
            p->layer_count = s->grid.tensors / s->layers->tensors;
        }
        if (__builtin_add_overflow(p->total, bytes, &p->total))
            return false;
    }
    return true;
}

/* As ring.c: less urgent programs leave some room for more urgent ones. */
static bool has_room_for(const net_ring *r, int priority)
{
    uint32_t left = r->depth / 8 * (uint32_t)priority, least = r->depth / 16;
    bool is_first = true;
    for (const node *n = r->live.next; n != &r->live && is_first; n = n->next)
        is_first = OWNER(n, net_program, live)->priority != priority;
    return r->vacant > (!is_first || !priority ? left : left < least ? left : least);
}

static net_program *take_free(net_ring *r)
{
    net_program *p = OWNER(r->free.next, net_program, live);
    node_remove(&p->live);
    r->vacant--;
    *p = (net_program){.ring = r};
    node_clear(&p->turn);
    node_insert(&r->live, &p->live);
    return p;
}

static int start(net_ring *r, const net_program *fresh, uint32_t *touched)
{
    net_channel *c = r->channel;
    if (r->closing)
        return RING_CLOSED;
    if (!has_room_for(r, fresh->priority))
        return RING_FULL;
    net_program *p = take_free(r);
    node live = p->live;
    *p = *fresh;
    p->live = live;
    node_clear(&p->turn);
    program_enqueue(p);
    if (fault_is(p, NET_FAIL))
        program_stop(p, RING_FAILED, fault_code(p), NULL, ring_now_ns());
    else if (c->reason.kind)
        program_stop(p, RING_FAILED, CODE_LOST, c->reason.message, ring_now_ns());
    else
        *touched = queue_cut(c, c->connections_count);
    return RING_QUEUED;
}

/* Of its first step that moves bytes. */
static int first_op(const net_program *p)
{
    const ring_step *s = p->steps;
    while (!s->grid.tensors || !s->grid.blocks)
        s++;
    return s->op;
}

int net_submit_as(net_ring *r, int priority, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms,
                  ring_completion *ran)
{
    if (!r || !ran || (count && !steps) || priority < 0 || priority >= RING_PRIORITIES)
        return RING_INVALID;
    if (is_forked(r))
        return RING_CLOSED;
    int64_t now = ring_now_ns();
    uint32_t touched = 0;
    net_program fresh = {.ring = r, .priority = priority, .steps = steps, .count = count, .timeout_ms = timeout_ms};
    fresh.done.id = id;
    fresh.done.submitted_ns = now;
    if (!prepare(&fresh, r, steps, count))
        return RING_INVALID;
    fresh.fault = fresh.total ? fault_of(first_op(&fresh)) : NULL;
    pthread_mutex_lock(&r->channel->lock);
    int status = r->closing ? RING_CLOSED : fresh.total ? start(r, &fresh, &touched) : RING_RAN;
    pthread_mutex_unlock(&r->channel->lock);
    if (status != RING_QUEUED)
        fault_drop(fresh.fault);
    if (status == RING_RAN) {
        fresh.done.step = count;
        fresh.done.started_ns = fresh.done.finished_ns = now;
        *ran = fresh.done;
    }
    channel_push(r->channel, touched);
    io_look_at(r->channel);
    return status;
}

/* ---- ends ---- */

static void complete(net_ring *r, net_program *p)
{
    if (node_is_alone(&r->complete))
        ring_signal(r->fd);
    r->watched -= p->watched;
    node_remove(&p->live);
    node_insert(&r->complete, &p->live);
}

/* In an ordered ring an end is held back until those before it are reported. */
void ring_file(net_program *p)
{
    net_ring *r = p->ring;
    int priority = p->priority;
    if (p->layers && p->done.state == RING_DONE)
        p->landed = p->layer_count;
    if (!r->is_ordered) {
        complete(r, p);
    } else {
        for (node *n = r->live.next, *next; n != &r->live; n = next) {
            net_program *q = OWNER(n, net_program, live);
            next = n->next;
            if (q->priority != priority)
                continue;
            if (q->state != PROGRAM_ENDED)
                break;
            complete(r, q);
        }
    }
    if (node_is_alone(&r->live))
        pthread_cond_broadcast(&r->idle);
}

static net_program *find(const net_ring *r, uint64_t id)
{
    for (node *n = r->live.next; n != &r->live; n = n->next)
        if (OWNER(n, net_program, live)->done.id == id)
            return OWNER(n, net_program, live);
    return NULL;
}

int net_cancel(net_ring *r, uint64_t id)
{
    if (is_forked(r))
        return 0;
    uint32_t touched = 0;
    pthread_mutex_lock(&r->channel->lock);
    net_program *p = find(r, id);
    bool found = p && p->state != PROGRAM_ENDED;
    if (found) {
        program_stop(p, RING_CANCELLED, 0, NULL, ring_now_ns());
        touched = queue_cut(r->channel, r->channel->connections_count);
    }
    pthread_mutex_unlock(&r->channel->lock);
    channel_push(r->channel, touched);
    io_look_at(r->channel);
    return found;
}

uint32_t net_watch(net_ring *r, uint64_t id)
{
    uint32_t landed = 0;
    if (is_forked(r))
        return 0;
    pthread_mutex_lock(&r->channel->lock);
    net_program *p = find(r, id);
    if (p) {
        r->watched += !p->watched;
        p->watched = true;
        landed = p->told = p->landed;
    }
    pthread_mutex_unlock(&r->channel->lock);
    return landed;
}

uint64_t net_overdue(net_ring *r, int64_t *left_ms)
{
    (void)r;
    *left_ms = -1;
    return 0;
}

static net_program *with_news(const net_ring *r)
{
    for (node *n = r->live.next; r->watched && n != &r->live; n = n->next) {
        net_program *p = OWNER(n, net_program, live);
        if (p->watched && p->landed != p->told && p->state != PROGRAM_ENDED)
            return p;
    }
    return NULL;
}

/* As ring.c: nothing more is complete. */
static uint32_t tell_news(net_ring *r, ring_completion *out, uint32_t room)
{
    uint64_t count;
    while (read(r->fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    net_program *p = with_news(r);
    if (p && room) {
        p->told = p->landed;
        *out = (ring_completion){.id = p->done.id, .state = RING_UNDER_WAY, .step = p->landed};
    }
    if (with_news(r))
        ring_signal(r->fd);
    return p && room;
}

uint32_t net_reap(net_ring *r, ring_completion *out, uint32_t room)
{
    uint32_t n = 0;
    if (is_forked(r))
        return 0;
    pthread_mutex_lock(&r->channel->lock);
    while (n < room && !node_is_alone(&r->complete)) {
        net_program *p = OWNER(r->complete.next, net_program, live);
        out[n++] = p->done;
        p->state = PROGRAM_FREE;
        node_remove(&p->live);
        node_insert(&r->free, &p->live);
        r->vacant++;
    }
    if (node_is_alone(&r->complete))
        n += tell_news(r, &out[n], room - n);
    pthread_mutex_unlock(&r->channel->lock);
    return n;
}

int net_fd(const net_ring *r)
{
    return r->fd;
}

int net_close(net_ring *r, int64_t timeout_ms)
{
    if (is_forked(r))
        return 0;
    int64_t end = ring_after_ns(timeout_ms);
    struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    pthread_mutex_lock(&r->channel->lock);
    r->closing = true;
    for (bool found = true; found;) {     /* an end may move others, so begin again after each */
        found = false;
        for (node *n = r->live.next; !found && n != &r->live; n = n->next) {
            net_program *p = OWNER(n, net_program, live);
            found = p->state != PROGRAM_ENDED && !p->is_stopping;
            if (found)
                program_stop(p, RING_CANCELLED, 0, NULL, ring_now_ns());
        }
    }
    uint32_t touched = queue_cut(r->channel, r->channel->connections_count);       /* other rings may use the room */
    pthread_mutex_unlock(&r->channel->lock);
    channel_push(r->channel, touched);
    io_look_at(r->channel);
    pthread_mutex_lock(&r->channel->lock);
    int code = 0;
    while (!code && !node_is_alone(&r->live))
        code = timeout_ms < 0 ? pthread_cond_wait(&r->idle, &r->channel->lock)
                              : pthread_cond_timedwait(&r->idle, &r->channel->lock, &until);
    int left = !node_is_alone(&r->live);
    pthread_mutex_unlock(&r->channel->lock);
    return left;
}

void net_free(net_ring *r)
{
    if (is_forked(r))
        return;
    pthread_mutex_lock(&r->channel->lock);
    node_remove(&r->on_channel);
    pthread_mutex_unlock(&r->channel->lock);
    pthread_cond_destroy(&r->idle);
    close(r->fd);
    free(r);
}
