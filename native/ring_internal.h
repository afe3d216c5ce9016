/* ring_internal.h: the border between ring.c (queues and threads) and program.c (calls to the device). */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#pragma GCC visibility push(default)
#include "ring.h"
#pragma GCC visibility pop

typedef struct ring_stream {
    ring_driver driver;
    ring_options options;
    aclrtContext context;
    aclrtStream stream;
    aclrtEvent window[2];                 /* the ends of the last two windows, in turns */
    aclrtEvent gate;                      /* behind the gate that is waited for; NULL before the first program with gates */
    int fd;                               /* the ring's: written when layers of a watched program have landed */
    atomic_int wanted;                    /* the most urgent priority in the queue; a hint, as `cancelled` is */
    _Atomic uint64_t next_bytes[RING_PRIORITIES];      /* what the first in each queue moves next, at most; 0: there is none. A hint */
    uint64_t bytes_per_us;                /* how fast windows land; 0: not known. The running program's, as is what follows */
    uint64_t passed[RING_PRIORITIES];     /* bytes that passed, and were not answered with a share of its own */
} ring_stream;

/* A place in the ranges of a grid. */
typedef struct cursor { uint32_t tensor, block; uint64_t offset; } cursor;

typedef struct program {
    const ring_step *steps;
    uint32_t count;
    int priority;
    int64_t timeout_ms;
    uint64_t window_bytes, total;         /* total: of all steps */
    bool may_run_inline;
    bool handed_over;                     /* issued in the submitting call; the worker has only to wait for the end */
    atomic_bool cancelled;                /* a hint read between ranges; orders nothing */
    ring_completion done;                 /* filled as it goes */
    /* while it runs */
    uint32_t step;
    cursor at;                            /* the next range of the step, */
    bool is_begun;                        /* which was begun; where it has layers, their group */
    bool gives_way;                       /* to a more urgent program: nothing of this one is on the stream */
    int64_t aside_since_ns;               /* 0: it does not stand aside */
    _Atomic int64_t deadline_ns;          /* the worker's; ring_overdue() reads it */
    atomic_bool aborting;                 /* the deadline is that of the abort */
    int64_t cancelled_ns, doubted_ns;     /* when it was, or was first found overdue; the ring's lock guards them */
    bool stopping;                        /* the deadline is that of a cancellation */
    bool on_stream;                       /* something of it may be on the device's stream */
    bool requested;                       /* gets or puts of it were handed to a communicator, and are not known to be over */
    bool behind_gate;                     /* the stream's `gate` is recorded, and not known to be complete */
    bool is_gated;                        /* it waits for others: for a gate, or an event */
    bool stood_still;                     /* something of it took longer than a moment */
    uint64_t issued, window_start;        /* bytes handed over: in all, and before this window */
    uint64_t counted;                     /* of those handed over: for the shares of what they pass */
    uint32_t window_ranges;               /* in this window, on the device */
    uint64_t last_window;                 /* bytes of the one before it */
    int64_t window_landed_ns;             /* when one was known to have landed, and another one was behind it; or 0 */
    uint32_t windows;                     /* closed, since all of it was known to have landed */
    const ring_layers *layers;            /* of the step that has some */
    uint32_t sent;                        /* layers handed over */
    atomic_uint landed;                   /* layers */
    atomic_bool watched;
    uint32_t told;                        /* how many landed layers the ring has told; its lock guards it */
} program;

int64_t ring_now_ns(void);
void ring_signal(int fd);
int64_t ring_after_ns(int64_t ms);        /* from now; never overflows */
int  ring_stream_open(ring_stream *on, const ring_driver *driver, aclrtContext context, const ring_options *options);
void ring_stream_close(ring_stream *on);
bool ring_stream_await_quiet(ring_stream *on);    /* false: it will never be known */
bool program_init(program *p, const ring_stream *on, int priority, uint64_t id, const ring_step *steps, uint32_t count,
                  int64_t timeout_ms);
void program_refuse(program *p, int32_t state);   /* complete without having run, or gone on */
void share_note_next(ring_stream *on, int priority, const program *p);   /* p: the first in a queue, or NULL; the lock is held */
int  share_due(const ring_stream *on, int than);  /* the least urgent priority whose turn it is; `than`: none that is less urgent */
void share_count(ring_stream *on, program *p);    /* what it moved passed others, and is paid for by itself */
void window_fit(const ring_stream *on, program *p);                     /* makes its windows as large as they may be */
void window_landed(ring_stream *on, program *p, uint64_t bytes);        /* the next one was under way at that time */
bool program_run(ring_stream *on, program *p);    /* true: to its end, p->done is complete; false: until it gave way, so go on later */
bool program_run_inline(ring_stream *on, program *p);  /* true: to its end; false: issued, program_run() has to finish it.
                                                     Neither leaves the device's context on a thread that had another. */
