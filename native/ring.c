/* ring.c: queues, the worker, and the owner of a program at each time. program.c issues programs. */
#include "ring_internal.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* An entry is in one of the ring's lists, or it is the running one: on the worker or in the submitting call. */
typedef struct ring_entry {
    struct ring_entry *next;
    program program;
} ring_entry;

typedef struct entry_list { ring_entry *first, **last; } entry_list;

struct ring {
    ring_stream stream;                   /* what program.c needs: driver, stream, window events, limits */
    pthread_mutex_t lock;                 /* guards everything below */
    pthread_cond_t wake;                  /* work for the worker, or closing */
    pthread_cond_t idle;                  /* nothing runs any longer */
    entry_list free, complete;            /* complete: waiting to be reaped */
    entry_list queued[RING_PRIORITIES];   /* what gave way is the first of its own */
    uint32_t vacant;                      /* entries in `free` */
    ring_entry *running;
    bool closing, has_worker, stuck;
    int last;                             /* the priority of what runs, or ran last */
    bool held;                            /* a serial ring, until the end of an unclean program is reaped */
    pthread_t worker;
    int fd;
    ring_entry entries[];
};

int64_t ring_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t ring_after_ns(int64_t ms)
{
    enum { YEAR_S = 366 * 86400 };
    int64_t most = (int64_t)YEAR_S * 1000;
    return ring_now_ns() + (ms < 0 ? 0 : ms > most ? most : ms) * 1000000;
}

static void list_clear(entry_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

static void list_push(entry_list *list, ring_entry *e)
{
    e->next = NULL;
    *list->last = e;
    list->last = &e->next;
}

static void list_push_front(entry_list *list, ring_entry *e)
{
    if (!(e->next = list->first))
        list->last = &e->next;
    list->first = e;
}

static ring_entry *list_pop(entry_list *list)
{
    ring_entry *e = list->first;
    if (e && !(list->first = e->next))
        list->last = &list->first;
    return e;
}

static void list_remove(entry_list *list, ring_entry *e)
{
    ring_entry **at = &list->first;
    while (*at != e)
        at = &(*at)->next;
    if (!(*at = e->next))
        list->last = at;
}

void ring_signal(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* ---- the queue; the lock is held ---- */

/* The running program looks at this between two windows. */
static int note_wanted(ring *r)
{
    int wanted = RING_PRIORITIES;
    for (int priority = RING_PRIORITIES - 1; priority >= 0; priority--) {
        ring_entry *first = r->queued[priority].first;
        share_note_next(&r->stream, priority, first ? &first->program : NULL);
        wanted = first ? priority : wanted;
    }
    /* relaxed: a hint to the running program, which takes the lock before it acts on it */
    atomic_store_explicit(&r->stream.wanted, wanted, memory_order_relaxed);
    return wanted;
}

static ring_entry *first_queued(const ring *r)
{
    for (int priority = 0; priority < RING_PRIORITIES; priority++)
        if (r->queued[priority].first)
            return r->queued[priority].first;
    return NULL;
}

static void enqueue(ring *r, ring_entry *e)
{
    list_push(&r->queued[e->program.priority], e);
    note_wanted(r);
}

/* The first of a priority, or NULL. */
static ring_entry *dequeue(ring *r, int priority)
{
    ring_entry *e = priority < RING_PRIORITIES ? list_pop(&r->queued[priority]) : NULL;
    note_wanted(r);
    return e;
}

/* Takes the most urgent program; or, for one window, a less urgent one whose turn it is, unless the most urgent one has just
 * waited for such a window. */
static ring_entry *take_turn(ring *r)
{
    int wanted = note_wanted(r);
    r->last = r->last > wanted ? wanted : share_due(&r->stream, wanted);
    return dequeue(r, r->last);
}

static void take_out(ring *r, ring_entry *e)
{
    list_remove(&r->queued[e->program.priority], e);
    note_wanted(r);
}

static ring_entry *find_queued(const ring *r, uint64_t id)
{
    for (int priority = 0; priority < RING_PRIORITIES; priority++)
        for (ring_entry *e = r->queued[priority].first; e; e = e->next)
            if (e->program.done.id == id)
                return e;
    return NULL;
}

static ring_entry *take_free(ring *r, const program *fresh)
{
    ring_entry *e = list_pop(&r->free);
    r->vacant--;
    e->program = *fresh;
    return e;
}

static void set_free(ring *r, ring_entry *e)
{
    list_push(&r->free, e);
    r->vacant++;
}

/* ---- completion; the lock is held ---- */

static void complete(ring *r, ring_entry *e)
{
    if (!r->complete.first)
        ring_signal(r->fd);
    list_push(&r->complete, e);
}

static void finish_running(ring *r, ring_entry *e)
{
    r->stuck |= e->program.done.state == RING_STUCK;
    r->running = NULL;
    if (first_queued(r) || r->closing)
        pthread_cond_signal(&r->wake);
    pthread_cond_broadcast(&r->idle);
}

static void end_queued(ring *r, ring_entry *e, int32_t state)
{
    program_refuse(&e->program, state);
    complete(r, e);
}

/* Ends all programs that wait, including those that gave way. */
static void end_all_queued(ring *r, int32_t state)
{
    for (ring_entry *e; (e = dequeue(r, note_wanted(r)));)
        end_queued(r, e, state);
}

/* Any later program would start the requests that this one left in its communicator. So none runs until the owner of the
 * communicator knows. */
static void hold_if_unclean(ring *r, const ring_entry *e)
{
    if (!r->stream.options.serial || !e->program.done.unclean || r->stuck)
        return;
    r->held = true;
    end_all_queued(r, RING_GIVEN_BACK);
}

/* It continues when it is the most urgent again, unless it was cancelled meanwhile. */
static void put_aside(ring *r, ring_entry *e)
{
    finish_running(r, e);
    e->program.doubted_ns = 0;
    if (r->closing || atomic_load_explicit(&e->program.cancelled, memory_order_relaxed)) {
        end_queued(r, e, RING_CANCELLED);
        return;
    }
    list_push_front(&r->queued[e->program.priority], e);
    note_wanted(r);
}

static void cancel_running(ring *r)
{
    program *p = &r->running->program;
    p->cancelled_ns = p->cancelled_ns ? p->cancelled_ns : ring_now_ns();
    /* relaxed: the program need only see it by its next window; what it is told comes with the lock */
    atomic_store_explicit(&p->cancelled, true, memory_order_relaxed);
}

/* When the running program must have ended: at its time limit or after a cancellation, with time for the device to let go. */
static int64_t running_is_due(const ring *r)
{
    const program *p = &r->running->program;
    const ring_options *o = &r->stream.options;
    int64_t due = p->deadline_ns ? p->deadline_ns : ring_after_ns(p->timeout_ms), patience = (o->patience_ms ? o->patience_ms : o->grace_ms) * 1000000;
    if (p->cancelled_ns && !p->aborting && p->cancelled_ns + patience < due)
        due = p->cancelled_ns + patience;
    return due + 2 * o->grace_ms * 1000000;
}

/* When to look at the running program again; 0: it is overdue, and was a grace ago. A process that was stopped finds everything
 * overdue when it continues, so its worker gets one more grace. */
static int64_t look_again_ns(ring *r)
{
    program *p = &r->running->program;
    int64_t now = ring_now_ns(), due = running_is_due(r);
    if (due > now) {
        p->doubted_ns = 0;
        return due;
    }
    p->doubted_ns = p->doubted_ns ? p->doubted_ns : now;
    int64_t end = p->doubted_ns + r->stream.options.grace_ms * 1000000;
    return end > now ? end : 0;
}

/* ---- the worker ---- */

/* What the worker may take up now: a program that an inline run left behind, or the next in the queue. */
static ring_entry *next_work(ring *r)
{
    if (r->running)
        return r->running->program.handed_over ? r->running : NULL;
    return r->running = take_turn(r);
}

static void *work(void *arg)
{
    ring *r = arg;
    prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);   /* ns: short naps are as short as they say */
    pthread_mutex_lock(&r->lock);
    for (;;) {
        ring_entry *e = next_work(r);
        if (!e && r->closing && !r->running)
            break;
        if (!e) {
            pthread_cond_wait(&r->wake, &r->lock);
            continue;
        }
        bool stuck = r->stuck, ended = true;
        pthread_mutex_unlock(&r->lock);
        if (stuck)
            program_refuse(&e->program, RING_REFUSED);
        else
            ended = program_run(&r->stream, &e->program);
        pthread_mutex_lock(&r->lock);
        if (!ended) {
            put_aside(r, e);
            continue;
        }
        finish_running(r, e);
        hold_if_unclean(r, e);
        complete(r, e);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static bool start_worker(ring *r)
{
    sigset_t all, before;
    sigfillset(&all);                     /* signals are for the threads of the application */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    r->has_worker = pthread_create(&r->worker, NULL, work, r) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r->has_worker)
        pthread_setname_np(r->worker, "aiodatadist");
    return r->has_worker;
}

/* ---- submission ---- */

/* Run it here. If the device is not done by then the worker takes over: this call does not wait for the device. */
static int run_inline(ring *r, ring_entry *e, ring_completion *ran)
{
    bool finished = program_run_inline(&r->stream, &e->program);
    pthread_mutex_lock(&r->lock);
    e->program.handed_over = !finished;
    if (!finished && !r->has_worker && !start_worker(r)) {
        pthread_mutex_unlock(&r->lock);
        program_run(&r->stream, &e->program);   /* no thread to be had: waiting here is all that is left */
        pthread_mutex_lock(&r->lock);
        finished = true;
    }
    if (finished) {
        finish_running(r, e);
        *ran = e->program.done;
        set_free(r, e);
    } else {
        pthread_cond_signal(&r->wake);
    }
    pthread_mutex_unlock(&r->lock);
    return finished ? RING_RAN : RING_QUEUED;
}

/* Locked. True if a program may run in the submitting call: nothing else runs, and all ends were reaped, so that ends are
 * reported in order. */
static bool is_free_now(const ring *r)
{
    return !r->closing && !r->stuck && !r->held && r->free.first && !r->running && !first_queued(r) && !r->complete.first;
}

/* Locked. Less urgent programs leave some room for more urgent ones, which must not wait until those have ended. The first
 * program of a priority is exempt, because only a queued program gets its turn. */
static bool has_room_for(const ring *r, int priority)
{
    uint32_t left = r->stream.options.depth / 8 * (uint32_t)priority, least = r->stream.options.depth / 16;
    return !r->held && r->vacant > (r->queued[priority].first || !priority ? left : left < least ? left : least);
}

int ring_submit(ring *r, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms, ring_completion *ran)
{
    return ring_submit_as(r, RING_NORMAL, id, steps, count, timeout_ms, ran);
}

int ring_submit_as(ring *r, int priority, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms,
                   ring_completion *ran)
{
    program fresh;
    if (!r || !ran || !program_init(&fresh, &r->stream, priority, id, steps, count, timeout_ms))
        return RING_INVALID;
    int status = RING_QUEUED;
    pthread_mutex_lock(&r->lock);
    ring_entry *e;
    if (r->closing)
        status = RING_CLOSED;
    else if (!has_room_for(r, priority))
        status = RING_FULL;
    else if (fresh.may_run_inline && is_free_now(r)) {
        e = r->running = take_free(r, &fresh);
        pthread_mutex_unlock(&r->lock);
        return run_inline(r, e, ran);
    } else if (!r->has_worker && !start_worker(r))
        status = RING_NO_THREAD;
    else {
        enqueue(r, take_free(r, &fresh));
        if (!r->running)
            pthread_cond_signal(&r->wake);
    }
    pthread_mutex_unlock(&r->lock);
    return status;
}

enum { FEW_BLOCKS = 256, MOST_BLOCKS = 4096 };

/* By itself, so that a call of few blocks needs no such stack. */
static __attribute__((noinline)) bool many_repeat(const uint64_t *values, uint32_t count)
{
    uint32_t table[4 * MOST_BLOCKS];
    return ring_first_repeated(values, count, table) < count;
}

static bool any_repeats(const uint64_t *values, uint32_t count)
{
    uint32_t table[4 * FEW_BLOCKS];
    return count > FEW_BLOCKS ? many_repeat(values, count) : ring_first_repeated(values, count, table) < count;
}

int ring_run_blocks(ring_blocks *b, uint32_t count)
{
    program fresh;
    ring *r = b->on;
    const uint64_t *local = b->numbers, *remote = b->numbers + count;
    if (count > MOST_BLOCKS)
        return RING_LATER;
    if (ring_first_outside(local, count, b->local_limit) < count || ring_first_outside(remote, count, b->remote_limit) < count)
        return RING_OUTSIDE;
    if (any_repeats(b->step->op == RING_PUT ? remote : local, count))
        return RING_OUTSIDE;
    b->step->grid.local_index = local;
    b->step->grid.remote_index = remote;
    b->step->grid.blocks = count;
    if (!program_init(&fresh, &r->stream, RING_NORMAL, b->id, b->step, 1, b->timeout_ms) || !fresh.may_run_inline)
        return RING_LATER;
    pthread_mutex_lock(&r->lock);
    ring_entry *e = is_free_now(r) ? take_free(r, &fresh) : NULL;
    r->running = e ? e : r->running;
    pthread_mutex_unlock(&r->lock);
    return e ? run_inline(r, e, &b->ran) : RING_LATER;
}

int ring_cancel(ring *r, uint64_t id)
{
    pthread_mutex_lock(&r->lock);
    ring_entry *e = r->running;
    if (e && e->program.done.id == id) {
        cancel_running(r);
    } else if ((e = find_queued(r, id))) {
        take_out(r, e);
        end_queued(r, e, RING_CANCELLED);
    }
    pthread_mutex_unlock(&r->lock);
    return e != NULL;
}

uint32_t ring_watch(ring *r, uint64_t id)
{
    uint32_t landed = 0;
    pthread_mutex_lock(&r->lock);
    ring_entry *e = r->running;
    if (!e || e->program.done.id != id)
        e = find_queued(r, id);
    if (e) {
        atomic_store(&e->program.watched, true);
        landed = e->program.told = atomic_load(&e->program.landed);
    }
    pthread_mutex_unlock(&r->lock);
    return landed;
}

uint64_t ring_overdue(ring *r, int64_t *left_ms)
{
    uint64_t id = 0;
    pthread_mutex_lock(&r->lock);
    ring_entry *e = r->running ? r->running : first_queued(r);
    *left_ms = e ? e->program.timeout_ms : -1;
    if (r->running) {
        int64_t again = look_again_ns(r);
        *left_ms = again ? (again - ring_now_ns()) / 1000000 + 1 : 0;
        id = again ? 0 : e->program.done.id;
    }
    r->stuck |= id != 0;
    if (id)
        end_all_queued(r, RING_REFUSED);
    pthread_mutex_unlock(&r->lock);
    return id;
}

/* Layers of a program that have landed, if that is news; else 0. */
static uint32_t news_of(const ring_entry *e)
{
    const program *p = e ? &e->program : NULL;
    uint32_t landed = p && atomic_load(&p->watched) ? atomic_load(&p->landed) : 0;
    return landed && landed != p->told ? landed : 0;
}

/* The running program if there is news of it, else one that gave way, if there is of that; or NULL. */
static ring_entry *with_news(const ring *r)
{
    ring_entry *e = news_of(r->running) ? r->running : NULL;
    for (int priority = 0; !e && priority < RING_PRIORITIES; priority++)
        e = news_of(r->queued[priority].first) ? r->queued[priority].first : NULL;
    return e;
}

/* Nothing more is complete: quiet the eventfd, and tell how far a program is, or leave that for the next time. */
static uint32_t tell_news(ring *r, ring_completion *out, uint32_t room)
{
    uint64_t count;                       /* non-blocking: nothing to read is fine */
    while (read(r->fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    ring_entry *e = with_news(r);         /* after the read: what lands from here on signals again */
    if (e && room) {
        uint32_t landed = e->program.told = news_of(e);
        *out = (ring_completion){.id = e->program.done.id, .state = RING_UNDER_WAY, .step = landed};
    }
    if (with_news(r))                     /* one more, or there was no room */
        ring_signal(r->fd);
    return e && room;
}

uint32_t ring_reap(ring *r, ring_completion *out, uint32_t room)
{
    uint32_t n = 0;
    pthread_mutex_lock(&r->lock);
    while (n < room && r->complete.first) {
        ring_entry *e = list_pop(&r->complete);
        out[n++] = e->program.done;
        r->held &= !e->program.done.unclean;
        set_free(r, e);
    }
    if (!r->complete.first)
        n += tell_news(r, &out[n], room - n);
    pthread_mutex_unlock(&r->lock);
    return n;
}

int ring_fd(const ring *r)
{
    return r->fd;
}

/* ---- life ---- */

static void ring_init(ring *r, uint32_t depth)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->wake, &monotonic);
    pthread_cond_init(&r->idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    list_clear(&r->free);
    list_clear(&r->complete);
    for (int priority = 0; priority < RING_PRIORITIES; priority++)
        list_clear(&r->queued[priority]);
    for (uint32_t i = 0; i < depth; i++)
        set_free(r, &r->entries[i]);
}

static void ring_destroy(ring *r)
{
    pthread_cond_destroy(&r->idle);
    pthread_cond_destroy(&r->wake);
    pthread_mutex_destroy(&r->lock);
    if (r->fd >= 0)
        close(r->fd);
    free(r);
}

int ring_open(const ring_driver *driver, aclrtContext context, const ring_options *options, ring **out)
{
    if (!driver || !options || !out || options->depth == 0 || options->window_bytes == 0 ||
        options->grace_ms <= 0 || options->grace_ms > INT32_MAX || options->patience_ms < 0 || options->patience_ms > INT32_MAX ||
        options->abort_ms < 0 || options->abort_ms > INT32_MAX)
        return ACL_ERROR_INVALID_PARAM;
    ring *r = calloc(1, sizeof *r + options->depth * sizeof(ring_entry));
    if (!r)
        return ACL_ERROR_BAD_ALLOC;
    ring_init(r, options->depth);
    r->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int code = r->fd < 0 ? ACL_ERROR_BAD_ALLOC : ring_stream_open(&r->stream, driver, context, options);
    r->stream.fd = r->fd;
    note_wanted(r);
    if (code != ACL_SUCCESS) {
        ring_destroy(r);
        return code;
    }
    *out = r;
    return ACL_SUCCESS;
}

/* Locked. Waits until nothing runs, or for a while. False: it is past the end, or the running program is overdue. */
static bool await_idle(ring *r, int64_t end)
{
    int64_t again = look_again_ns(r), ns = again < end ? again : end;
    struct timespec until = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    if (ring_now_ns() >= ns)
        return false;
    pthread_cond_timedwait(&r->idle, &r->lock, &until);
    return true;
}

int ring_close(ring *r, int64_t timeout_ms)
{
    int64_t end = ring_after_ns(timeout_ms);
    pthread_mutex_lock(&r->lock);
    r->closing = true;
    end_all_queued(r, RING_CANCELLED);
    if (r->running)
        cancel_running(r);
    pthread_cond_signal(&r->wake);
    while (r->running && (timeout_ms < 0 ? !pthread_cond_wait(&r->idle, &r->lock) : await_idle(r, end)))
        ;
    bool running = r->running != NULL, stuck = r->stuck, join = r->has_worker && !running;
    r->has_worker &= !join;
    pthread_mutex_unlock(&r->lock);
    if (running)
        return 1;                         /* a program still uses the ring */
    if (join)
        pthread_join(r->worker, NULL);
    if (stuck && (timeout_ms >= 0 || !ring_stream_await_quiet(&r->stream)))
        return 1;
    ring_stream_close(&r->stream);
    return 0;
}

void ring_free(ring *r)
{
    ring_destroy(r);
}
