/* ring_internal.h: the border between ring.c (queues and threads) and program.c (calls to the device). */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include "grid.h"

typedef struct ring_stream {
    ring_driver driver;
    ring_options options;
    aclrtContext context;
    aclrtStream stream;
    aclrtEvent window[2];                 /* recorded in turn behind each window */
    aclrtEvent gate;                      /* recorded behind the gate that is waited for; NULL before the first one */
    int fd;                               /* the ring's eventfd, written when layers of a watched program have landed */
    atomic_int wanted;                    /* the most urgent priority in the queue; a hint, as `cancelled` is */
    _Atomic uint64_t next_bytes[RING_PRIORITIES];      /* the most that each queue's first program moves next; 0: none. A hint */
    atomic_uint slowness;                 /* how slow its programs were so far, in sixteenths; 0: not known. expect.c */
    uint64_t bytes_per_us;                /* how fast windows land; 0: not known. Only the running program uses this and `passed` */
    uint64_t passed[RING_PRIORITIES];     /* bytes that have passed each priority, less what its own shares have paid for */
} ring_stream;

typedef struct program {
    const ring_step *steps;
    uint32_t count;
    int priority;
    int64_t timeout_ms;
    uint64_t window_bytes, total;         /* total: the bytes of all steps */
    bool may_run_inline;
    bool handed_over;                     /* begun in the submitting call; the worker issues what is left and waits for the end */
    bool in_call;                         /* it runs in the submitting call, which waits for nothing */
    bool leaves_rest;                     /* the submitting call would have to wait: the worker issues the rest */
    atomic_bool cancelled;                /* a hint read between ranges; orders nothing */
    ring_completion done;                 /* filled in while the program runs, as is the rest */
    uint32_t step;
    cursor at;                            /* the next range of the step */
    bool is_begun;                        /* the step was begun; if it has layers, their group was */
    bool gives_way;                       /* it stands aside for a more urgent program, with nothing on the stream */
    int64_t aside_since_ns;               /* 0: it does not stand aside */
    _Atomic int64_t deadline_ns;          /* the worker's; ring_overdue() reads it */
    atomic_bool aborting;                 /* the deadline is that of the abort */
    int64_t cancelled_ns, doubted_ns;     /* when it was cancelled, and first found overdue; the ring's lock guards both */
    bool stopping;                        /* the deadline is that of a cancellation */
    bool on_stream;                       /* something of it may be on the device's stream */
    bool requested;                       /* gets or puts of it were handed to a communicator, and are not known to be over */
    bool behind_gate;                     /* the stream's `gate` is recorded, and not known to be complete */
    bool is_gated;                        /* it waits for a gate or an event */
    bool stood_still;                     /* something of it took longer than a moment */
    uint64_t issued, window_start;        /* bytes handed over: in all, and before this window */
    uint64_t counted;                     /* bytes handed over that share_count() has counted */
    uint32_t window_ranges;               /* ranges of this window on the device */
    uint64_t look_at;                     /* when so many ranges are handed over, the submitting call looks at the clock */
    uint64_t last_window;                 /* bytes of the window before it */
    int64_t window_landed_ns;             /* when a window was known to have landed with another one behind it; or 0 */
    uint32_t windows;                     /* windows closed since all bytes were last known to have landed */
    const ring_layers *layers;            /* those of the step that has layers */
    uint32_t sent;                        /* layers handed over */
    atomic_uint landed;                   /* layers that have landed */
    atomic_bool watched;
    uint32_t told;                        /* landed layers that the ring has reported; its lock guards this */
} program;

int64_t ring_now_ns(void);
void ring_signal(int fd);
int64_t ring_after_ns(int64_t ms);        /* the time so long from now; never overflows */
int  ring_stream_open(ring_stream *on, const ring_driver *driver, aclrtContext context, const ring_options *options);
void ring_stream_close(ring_stream *on);
bool ring_stream_await_quiet(ring_stream *on);    /* false: it will never be known whether it is quiet */
bool program_init(program *p, const ring_stream *on, int priority, uint64_t id, const ring_step *steps, uint32_t count,
                  int64_t timeout_ms);
void program_refuse(program *p, int32_t state);   /* completes it without running it, or running it further */
void share_note_next(ring_stream *on, int priority, const program *p);   /* p: the first in the queue, or NULL. Hold the lock */
int  share_due(const ring_stream *on, int than);  /* the least urgent priority whose turn it is, or `than` */
void share_count(ring_stream *on, program *p);    /* counts what it moved since: it passed others, and pays for its share */
uint64_t expected_ns(const ring_stream *on, uint64_t ranges, uint64_t bytes);
void expect_learn(ring_stream *on, const program *p, uint64_t bytes, uint64_t ranges);    /* call it when the program has ended */
void window_fit(const ring_stream *on, program *p);                     /* makes its windows as large as they may be */
void window_landed(ring_stream *on, program *p, uint64_t bytes);        /* call it if the next one is under way */
bool program_run(ring_stream *on, program *p);    /* true: it ended, p->done is complete; false: it gave way, to continue later */
bool program_run_inline(ring_stream *on, program *p);  /* true: it ended; false: it is issued, and program_run() must finish it.
                                                     Neither leaves the device's context on a thread that had another. */
