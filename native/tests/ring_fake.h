/* ring_fake.h: a device for tests of the ring. It has one stream, whose work moves no byte, and a driver to it that
 * counts and logs. On request calls fail or stop half-way, work waits to be let go, and aborts fall on deaf ears.
 * As at the vendor, queries and events tell nothing of failed work, a wait that runs out of time is an error record, and
 * a batch does not return before the queue has room for its requests and for the fenced read that ends it.
 *
 *   fake_reset()               before each case; leaves this thread in the context HOME
 *   fake_hold(), fake_let(n)   work waits; n pieces of it may run. Without hold it runs as it is submitted
 *   fake_fail(call, n, code)   the n-th call since the reset returns code and does nothing; n 0: every call
 *   fake_stop(call), fake_go() calls of this kind stop half-way; go on
 *   fake_reached(call, n)      returns when the n-th call was made                                                */
#pragma once
#include "check.h"
#include "ring.h"
#include <pthread.h>
#include <time.h>

enum { SET_CONTEXT, GET_CONTEXT, CREATE_STREAM, DESTROY_STREAM, ABORT, SYNC_STREAM, QUERY, QUERY_EVENT, WAIT_EVENT, CREATE_EVENT,
       DESTROY_EVENT, RECORD, SYNC_EVENT, COPY, COPY_ASYNC, GET, PUT, FAKE_CALLS };
enum { FAKE_LOG = 1 << 16, FAKE_IDS = 1 << 12, FAKE_EXEC_CODE = ACL_ERROR_RT_COPY_DATA };

typedef struct fake_event { uint64_t recorded, done; } fake_event;
typedef struct fake_piece {                                /* of work */
    int call;                                              /* that submitted it */
    uint64_t local, remote, bytes;
    uint64_t number;                                       /* in the life of the event; or how many came in this call */
    fake_event *event;
    pthread_t thread;
} fake_piece;

static struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t calls[FAKE_CALLS], fail_at[FAKE_CALLS];
    int fail_code[FAKE_CALLS];
    int stopped;                                           /* calls of this kind stop; -1: none do */
    bool hold, deaf;                                       /* deaf: an abort does nothing */
    uint64_t let;                                          /* pieces that may run */
    uint64_t bad_copy, copies;                             /* the n-th copy to run fails; how many ran */
    int failure;                                           /* of the stream, not yet told */
    int slow_ms;                                           /* that a COPY takes */
    uint64_t depth;                                        /* of the queue: pieces not done; 0: no end */
    uint64_t most, records;                                /* pieces that were not done at a time; waits that ran out of time */
    uint64_t live_events, live_streams, strays;            /* strays: calls from a thread in another context */
    fake_piece log[FAKE_LOG], work[FAKE_LOG];              /* all that was accepted; what waits is [head, tail) */
    uint64_t logged, head, tail;
    uint64_t landed[FAKE_IDS], taken[FAKE_IDS];            /* bytes done, ranges accepted: by the upper half of `remote` */
} fake = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .stopped = -1 };
static _Thread_local aclrtContext fake_context;
static _Thread_local const char *fake_words;
static char fake_places[2];
#define HOME ((aclrtContext)&fake_places[0])
#define ELSEWHERE ((aclrtContext)&fake_places[1])

static inline void fake_reset(void)
{
    pthread_mutex_lock(&fake.lock);
    memset(fake.calls, 0, offsetof(struct fake, log) - offsetof(struct fake, calls));
    fake.stopped = -1;
    fake.logged = fake.head = fake.tail = 0;
    memset(fake.landed, 0, sizeof fake.landed);
    memset(fake.taken, 0, sizeof fake.taken);
    pthread_mutex_unlock(&fake.lock);
    fake_context = HOME;
    fake_words = NULL;
}

/* ---- telling it what to do, and asking what it did ---- */

static inline void fake_run(void)                           /* locked: whatever may run now */
{
    while (fake.head < fake.tail && (!fake.hold || fake.let)) {
        fake_piece *p = &fake.work[fake.head % FAKE_LOG];
        if (p->call == WAIT_EVENT && p->event->done < p->number)
            break;
        fake.head++;
        fake.let -= fake.hold;
        if (p->call == RECORD)
            p->event->done = p->number;
        else if (p->call == WAIT_EVENT)
            continue;
        else if (++fake.copies == fake.bad_copy)
            fake.failure = FAKE_EXEC_CODE;
        else
            fake.landed[(p->remote >> 32) % FAKE_IDS] += p->bytes;
    }
    pthread_cond_broadcast(&fake.changed);
}

#define FAKE_DO(statement) do { pthread_mutex_lock(&fake.lock); statement; fake_run(); pthread_mutex_unlock(&fake.lock); } while (0)

static inline void fake_hold(void) { FAKE_DO(fake.hold = true); }
static inline void fake_let(uint64_t n) { FAKE_DO(fake.let += n); }
static inline void fake_let_all(void) { FAKE_DO(fake.hold = false); }
static inline void fake_stop(int call) { FAKE_DO(fake.stopped = call); }
static inline void fake_go(void) { FAKE_DO(fake.stopped = -1); }
static inline void fake_happen(fake_event *e) { FAKE_DO(e->done = e->recorded); }

static inline void fake_fail(int call, uint64_t at, int code)
{
    FAKE_DO((fake.fail_at[call] = at, fake.fail_code[call] = code));
}

static inline uint64_t fake_calls(int call)
{
    uint64_t n;
    FAKE_DO(n = fake.calls[call]);
    return n;
}

static inline uint64_t fake_waiting(void)
{
    uint64_t n;
    FAKE_DO(n = fake.tail - fake.head);
    return n;
}

static inline struct timespec fake_in(int64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += ms / 1000 + (t.tv_nsec + ms % 1000 * 1000000) / 1000000000;
    t.tv_nsec = (t.tv_nsec + ms % 1000 * 1000000) % 1000000000;
    return t;
}

static inline void fake_reached(int call, uint64_t n)
{
    struct timespec until = fake_in(30000);
    pthread_mutex_lock(&fake.lock);
    while (fake.calls[call] < n)
        if (pthread_cond_timedwait(&fake.changed, &fake.lock, &until)) {
            printf("call %d was made %d times, not %d\n", call, (int)fake.calls[call], (int)n);
            abort();
        }
    pthread_mutex_unlock(&fake.lock);
}

/* ---- the driver ---- */

static inline void fake_say(const char *words)
{
    fake_words = fake_words ? "more than one message" : words;
}

static inline int fake_enter(int call)                      /* locked from here on; what to return at once, or 0 */
{
    pthread_mutex_lock(&fake.lock);
    uint64_t n = ++fake.calls[call];
    pthread_cond_broadcast(&fake.changed);
    while (fake.stopped == call)
        pthread_cond_wait(&fake.changed, &fake.lock);
    if (call != SET_CONTEXT && call != GET_CONTEXT && fake_context != HOME) {
        fake.strays++;
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    if (!fake.fail_code[call] || (fake.fail_at[call] && fake.fail_at[call] != n))
        return ACL_SUCCESS;
    fake_say("the fake was told to fail");
    return fake.fail_code[call];
}

static inline int fake_leave(int code)
{
    fake_run();
    pthread_mutex_unlock(&fake.lock);
    return code;
}

static inline void fake_log(fake_piece p)                   /* locked */
{
    p.thread = pthread_self();
    fake.log[fake.logged++ % FAKE_LOG] = p;
    if (p.call != COPY)
        fake.work[fake.tail++ % FAKE_LOG] = p;
    fake.most = fake.tail - fake.head > fake.most ? fake.tail - fake.head : fake.most;
    if (p.call == COPY)
        fake.landed[(p.remote >> 32) % FAKE_IDS] += p.bytes;
    if (p.call != RECORD && p.call != WAIT_EVENT)
        fake.taken[(p.remote >> 32) % FAKE_IDS]++;
}

static inline void fake_await_room(uint64_t n)              /* locked */
{
    while (fake.depth && fake.tail - fake.head + n > fake.depth)
        pthread_cond_wait(&fake.changed, &fake.lock);
}

static inline int fake_submit(int call, fake_piece p)
{
    int code = fake_enter(call);
    if (code == 0)
        fake_await_room(1);
    p.call = call;
    if (code == 0 && call == RECORD)
        p.number = ++p.event->recorded;
    if (code == 0 && call == WAIT_EVENT)
        p.number = p.event->recorded;
    if (code == 0)
        fake_log(p);
    return fake_leave(code);
}

static inline aclError fake_set_context(aclrtContext c)
{
    int code = fake_enter(SET_CONTEXT);
    if (code == 0)
        fake_context = c;
    return fake_leave(code);
}

static inline aclError fake_get_context(aclrtContext *c)
{
    int code = fake_enter(GET_CONTEXT);
    if (code == 0 && !fake_context) {
        code = ACL_ERROR_RT_CONTEXT_NULL;
        fake_say("no context");
    }
    if (code == 0)
        *c = fake_context;
    return fake_leave(code);
}

static inline aclError fake_create_stream(aclrtStream *s, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    int code = fake_enter(CREATE_STREAM);
    if (code == 0) {
        fake.live_streams++;
        *s = &fake;
    }
    return fake_leave(code);
}

static inline aclError fake_destroy_stream(aclrtStream s)
{
    (void)s;
    int code = fake_enter(DESTROY_STREAM);
    fake.live_streams -= code == 0;
    return fake_leave(code);
}

static inline aclError fake_create_event(aclrtEvent *e, uint32_t flag)
{
    (void)flag;
    int code = fake_enter(CREATE_EVENT);
    if (code == 0) {
        fake.live_events++;
        *e = calloc(1, sizeof(fake_event));
    }
    return fake_leave(code);
}

static inline aclError fake_destroy_event(aclrtEvent e)
{
    int code = fake_enter(DESTROY_EVENT);
    if (code == 0) {
        fake.live_events--;
        free(e);
    }
    return fake_leave(code);
}

static inline aclError fake_abort(aclrtStream s)
{
    (void)s;
    int code = fake_enter(ABORT);
    if (code == 0 && !fake.deaf)
        fake.head = fake.tail;
    return fake_leave(code);
}

static inline int fake_tell(void)                           /* locked: a failure is told once */
{
    int code = fake.failure;
    fake.failure = 0;
    if (code)
        fake_say("a piece of work failed");
    return code;
}

static inline aclError fake_sync_stream(aclrtStream s, int32_t ms)
{
    (void)s;
    struct timespec until = fake_in(ms < 0 ? 30000 : ms);
    int code = fake_enter(SYNC_STREAM);
    while (code == 0 && fake.head < fake.tail)
        if (pthread_cond_timedwait(&fake.changed, &fake.lock, &until))
            code = fake.head < fake.tail ? ACL_ERROR_RT_STREAM_SYNC_TIMEOUT : 0;
    if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
        fake.records++, fake_say("the stream was not done in time");
    return fake_leave(code ? code : fake_tell());
}

static inline aclError fake_sync_event(aclrtEvent event, int32_t ms)
{
    fake_event *e = event;
    struct timespec until = fake_in(ms);
    int code = fake_enter(SYNC_EVENT);
    while (code == 0 && e->done < e->recorded)
        if (pthread_cond_timedwait(&fake.changed, &fake.lock, &until))
            code = e->done < e->recorded ? ACL_ERROR_RT_EVENT_SYNC_TIMEOUT : 0;
    if (code == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT)
        fake.records++, fake_say("the event was not done in time");
    return fake_leave(code);
}

static inline aclError fake_query(aclrtStream s, aclrtStreamStatus *status)
{
    (void)s;
    int code = fake_enter(QUERY);
    *status = fake.head < fake.tail ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    return fake_leave(code);
}

static inline aclError fake_query_event(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    fake_event *e = event;
    int code = fake_enter(QUERY_EVENT);
    *status = e->done < e->recorded ? ACL_EVENT_RECORDED_STATUS_NOT_READY : ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return fake_leave(code);
}

static inline aclError fake_wait_event(aclrtStream s, aclrtEvent e)
{
    (void)s;
    return fake_submit(WAIT_EVENT, (fake_piece){ .event = e });
}

static inline aclError fake_record_event(aclrtEvent e, aclrtStream s)
{
    (void)s;
    return fake_submit(RECORD, (fake_piece){ .event = e });
}

static inline void fake_copy(const HcclOneSideOpDesc *ranges, uint32_t count, uint64_t total)
{
    (void)total;
    for (uint32_t i = 0; i < count; i++) {
        nanosleep(&(struct timespec){ .tv_nsec = fake.slow_ms * 1000000l }, NULL);
        fake_submit(COPY, (fake_piece){ .local = (uint64_t)ranges[i].localAddr, .remote = (uint64_t)ranges[i].remoteAddr,
                                        .bytes = ranges[i].count, .number = 1 });
    }
}

static inline aclError fake_copy_async(void *to, size_t room, const void *from, size_t n, aclrtMemcpyKind kind, aclrtStream s)
{
    (void)room, (void)kind, (void)s;
    return fake_submit(COPY_ASYNC, (fake_piece){ .local = (uint64_t)to, .remote = (uint64_t)from, .bytes = n, .number = 1 });
}

static inline HcclResult fake_batch(int call, const HcclOneSideOpDesc *d, uint32_t n)
{
    int code = fake_enter(call);
    if (code == 0)
        fake_await_room(n + 1);
    for (uint32_t i = 0; code == 0 && i < n; i++)
        fake_log((fake_piece){ call, (uint64_t)d[i].localAddr, (uint64_t)d[i].remoteAddr, d[i].count, n, NULL, pthread_self() });
    return (HcclResult)fake_leave(code);
}

static inline HcclResult fake_get(HcclComm c, uint32_t rank, HcclOneSideOpDesc *d, uint32_t n, aclrtStream s)
{
    (void)c, (void)rank, (void)s;
    return fake_batch(GET, d, n);
}

static inline HcclResult fake_put(HcclComm c, uint32_t rank, HcclOneSideOpDesc *d, uint32_t n, aclrtStream s)
{
    (void)c, (void)rank, (void)s;
    return fake_batch(PUT, d, n);
}

static inline const char *fake_recent_error(void)
{
    const char *words = fake_words;
    fake_words = NULL;
    return words;
}

static const ring_driver fake_driver = {
    fake_set_context, fake_get_context, fake_create_stream, fake_destroy_stream, fake_abort, fake_sync_stream, fake_query,
    fake_query_event, fake_wait_event, fake_create_event, fake_destroy_event, fake_record_event, fake_sync_event, fake_copy, fake_copy_async,
    fake_recent_error, NULL, fake_get, fake_put, NULL, NULL,
};
