/* ring_fake.h: a device for tests of the ring: one stream whose work does not move a byte, and a driver to it that
 * records every call. On request calls fail or stop half-way, work waits to be let go, and aborts fall on deaf ears.
 *
 *   fake_reset()               before each case
 *   fake.hold                  work waits for fake_let(n), n pieces; without it work is done when it is submitted
 *   fake_fail(call, n, code)   the n-th call from the reset returns code and does nothing; n 0: every call
 *   fake_stop(call), fake_go() calls stop in there; go on
 *   fake_reached(call, n)      waits until the n-th call was made                                              */
#pragma once
#include "check.h"
#include "ring.h"
#include <poll.h>
#include <pthread.h>
#include <time.h>

enum { SET_CONTEXT, GET_CONTEXT, CREATE_STREAM, DESTROY_STREAM, ABORT, SYNC_STREAM, QUERY, WAIT_EVENT, CREATE_EVENT,
       DESTROY_EVENT, RECORD, SYNC_EVENT, COPY, COPY_ASYNC, RECENT_ERROR, GET, PUT, FAKE_CALLS };
enum { FAKE_LOG = 1 << 16, FAKE_PATIENCE_S = 20 };

typedef struct fake_event { uint64_t recorded, done; } fake_event;
typedef struct fake_piece {                                /* of work on the stream, or in the log */
    int call;                                              /* COPY, COPY_ASYNC, GET, PUT, RECORD or WAIT_EVENT */
    uint64_t local, remote, bytes, number;                 /* number: in the event's life; or of the ranges of one call */
    fake_event *event;
    pthread_t thread;
} fake_piece;

typedef struct fake_fault { uint64_t at; int code; bool every; } fake_fault;
static struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t calls[FAKE_CALLS];
    fake_fault faults[FAKE_CALLS];
    int stopped;                                           /* calls to this stop; -1: none do */
    bool hold, deaf;
    uint64_t let;                                          /* pieces that may run while held */
    uint64_t bad_piece, ran;                               /* the n-th piece to run fails; how many ran */
    int failure;                                           /* of the stream, not yet told */
    int slow_ms;                                           /* what a copy costs */
    uint64_t live_events, live_streams;
    fake_piece log[FAKE_LOG], work[FAKE_LOG];              /* everything accepted; what waits: [head, tail) */
    uint64_t logged, head, tail;
} fake = { .lock = PTHREAD_MUTEX_INITIALIZER, .stopped = -1 };
static _Thread_local aclrtContext fake_context;
static _Thread_local const char *fake_words;
static char fake_home, fake_elsewhere;                     /* two contexts */
#define HOME ((aclrtContext)&fake_home)
#define ELSEWHERE ((aclrtContext)&fake_elsewhere)

static inline void fake_reset(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)once;
    pthread_mutex_lock(&fake.lock);
    if (!fake.live_streams) {                              /* a leaked ring's events stay what they are */
        fake.live_events = 0;
    }
    memset(fake.calls, 0, sizeof fake.calls);
    memset(fake.faults, 0, sizeof fake.faults);
    fake.stopped = -1;
    fake.hold = fake.deaf = false;
    fake.let = fake.bad_piece = fake.ran = fake.logged = fake.head = fake.tail = 0;
    fake.live_events = fake.live_streams = 0;
    fake.failure = fake.slow_ms = 0;
    fake_context = HOME;
    fake_words = NULL;
    pthread_mutex_unlock(&fake.lock);
}
