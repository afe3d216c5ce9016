/* ring.h: a stream is an executor.
 *
 * A ring owns one device stream. A transfer is one *program*: a few steps, each of which may name thousands of ranges.
 * ring_submit() takes it; one worker thread issues it to the stream and waits for the device, without any lock, any
 * Python or any event loop; then its completion is queued and the eventfd becomes readable. Programs of
 * one ring and priority run one after the other, in order of submission, and their ends are reported in that order. Only a program
 * that is cancelled while it waits may end earlier.
 *
 * A more urgent program does not wait for the end of a less urgent one, which gives way between two windows: its issued work lands,
 * the urgent program runs alone on the stream, and then the other one continues. So an abort or a failure of either leaves the
 * other untouched, and a program that has given way ends at once if it is cancelled. Its time limit is paused meanwhile. A program
 * that waits for a gate or an event does not give way, because the stream accepts nothing behind the wait. A caller with urgent
 * work needs another ring for programs that wait.
 *
 * Small programs on an idle ring run in the submitting call, if all completions have been reaped: waking another core costs as much
 * as copying a MiB. Small is what is expected to take at most inline_us, by what earlier programs took (expect.c). The call goes on
 * from window to window while the device is done with the one before, and leaves the rest to the worker otherwise. It also leaves
 * the rest if what it has done took more than its share of twice inline_us: it looks at the clock after 32 ranges, and every 64.
 * Ranges are handed to the device in windows, two at a time, each of at most window_bytes and 192 ranges. So a cancelled program
 * stops after at most two windows, and no call waits for room in a connection's queue, not even behind a shut gate. A program
 * that misses its time limit is aborted. The limit counts from the start of the program, and again from each group of layers
 * that has landed, or whose last gate has opened. Each gate has its own limit.
 *
 * A program that is passed keeps a share. Once eight times as many bytes have passed as the first program of its priority moves in
 * a window, that program has its turn, and then gives way again. So a ninth of all bytes is left for background work, however much
 * is urgent. A more urgent program waits for at most one such window, and for none if it has just waited for less urgent work.
 *
 * Bytes are reported as landed only if they have: only synchronizing the stream reports work that failed. Bytes are known to have
 * landed at the end and, in a long program, every 16 windows; layers once their group has, and then the next group is issued.
 * A failure that is reported so may belong to another stream of the same context: the vendor does not tell them apart.
 *
 * A wait that times out leaves an error record at the vendor. So a program that waits for a gate or an event is polled instead. The
 * pause between polls is a sixteenth of the time waited so far, at most 10 ms. Any other program is polled once it has stood still
 * for 20 ms.
 *
 * A step may move its grid layer by layer, each behind a gate on the device. To follow its progress, call ring_watch(): from then
 * on the eventfd becomes readable when more layers have landed, and ring_reap() returns a completion RING_UNDER_WAY with their
 * number. Only the latest number counts. An unwatched program wakes no thread.
 *
 *   call                  from                     blocks
 *   ring_open             any thread               no
 *   ring_submit           one thread at a time     no (runs at most inline_bytes of copies, for about inline_us)
 *   ring_run_blocks       the same one             no
 *   ring_cancel           any thread               no
 *   ring_watch            any thread               no
 *   ring_overdue          any thread               no
 *   ring_reap, ring_fd    one thread at a time     no
 *   ring_close            any thread, until it     until the running program let go, at most timeout_ms
 *                         gave 0
 *   ring_free             any thread, last         no
 *
 * Steps, grids and index arrays stay the caller's: they must not move or change until the completion is reaped. The
 * memory that a program names belongs to the device until then, even if the program was cancelled. After RING_STUCK it belongs to
 * the device until a ring_close() without a limit has returned 0. The ring can then no longer be used: later programs end as
 * RING_REFUSED, because nothing of them is on the device.
 *
 * A serial ring is for a communicator that a program may leave unclean: its owner must destroy it before any other work is carried
 * out. So all queued programs end as RING_GIVEN_BACK before the end of the unclean one is reported. This includes programs that
 * gave way, whose issued work has landed. The ring is full until the end of the unclean program is reaped.
 *
 * A vendor call that does not return holds the worker, and no completion comes. ring_overdue() reports this once the time limit or
 * the patience, the abort's own time and three times the grace have passed. The program then counts as stuck.            */
#pragma once
#include "acl.h"
#include "hccl.h"

typedef struct ring ring;

/* The vendor's calls, looked up at run time where the libraries were opened. The hccl pair and the notify pair may be NULL.
 * Only `copy` is our own: host memory needs no device. */
typedef struct ring_driver {
    aclError (*set_context)(aclrtContext);
    aclError (*get_context)(aclrtContext *);
    aclError (*create_stream)(aclrtStream *, uint32_t, uint32_t);
    aclError (*destroy_stream)(aclrtStream);
    aclError (*abort_stream)(aclrtStream);
    aclError (*sync_stream)(aclrtStream, int32_t);
    aclError (*query_stream)(aclrtStream, aclrtStreamStatus *);
    aclError (*query_event)(aclrtEvent, aclrtEventRecordedStatus *);
    aclError (*wait_event)(aclrtStream, aclrtEvent);
    aclError (*create_event)(aclrtEvent *, uint32_t);
    aclError (*destroy_event)(aclrtEvent);
    aclError (*record_event)(aclrtEvent, aclrtStream);
    aclError (*sync_event)(aclrtEvent, int32_t);
    void (*copy)(const HcclOneSideOpDesc *, uint32_t, uint64_t);          /* ring_copy() */
    aclError (*copy_async)(void *, size_t, const void *, size_t, aclrtMemcpyKind, aclrtStream);
    const char *(*recent_error)(void);
    uint64_t (*run_here)(uint64_t);                                       /* softnpu_run_here(), or NULL */
    HcclResult (*get)(HcclComm, uint32_t, HcclOneSideOpDesc *, uint32_t, aclrtStream);
    HcclResult (*put)(HcclComm, uint32_t, HcclOneSideOpDesc *, uint32_t, aclrtStream);
    aclError (*wait_notify)(aclrtNotify, aclrtStream, uint32_t);
    aclError (*record_notify)(aclrtNotify, aclrtStream);
} ring_driver;

typedef struct ring_options {
    uint32_t depth;                       /* the most programs that are submitted and not yet reaped. An eighth is reserved for
                                           * critical ones, another for these and normal ones. The first of each priority is exempt */
    uint64_t window_bytes;                /* the most bytes handed to the device between two looks at the cancel flag */
    uint64_t inline_bytes;                /* programs up to this size run in the submitting call; 0: all run on the worker */
    int64_t  grace_ms;                    /* time for the device to let go after an abort */
    int64_t  patience_ms;                 /* time from a cancellation to the abort; 0: the same as the grace */
    int64_t  abort_ms;                    /* time that the aborting call may take; the vendor's takes at least 15 */
    uint32_t serial;                      /* 1: if a program ends unclean, the programs queued behind it are given back */
    uint64_t background_bytes;            /* window_bytes of RING_BACKGROUND: an urgent program waits for two such windows at most.
                                           * 0: the same as the others                                                        */
    uint32_t background_us;               /* longer background windows are made smaller, down to an eighth; 0: never */
    uint32_t inline_us;                   /* programs that are expected to take longer do not run in the submitting call; 0: whatever
                                           * they take, if they have at most 384 ranges */
} ring_options;

/* tensors x blocks. Range (t, i) is local[t] + local_index[i] * local_stride and the same with remote, `bytes` long;
 * the last block of each tensor is `tail` bytes long. Neighbours on both sides travel as one range.               */
typedef struct ring_grid {
    const uint64_t *local, *remote;       /* addresses, one per tensor */
    const uint64_t *local_index, *remote_index;       /* one per block */
    uint32_t tensors, blocks;
    uint64_t local_stride, remote_stride, bytes, tail;
} ring_grid;

/* The tensors of a grid as layers, `group` of which travel at a time. The stream waits for the gates of a group before it. */
typedef struct ring_layers {
    uint32_t tensors, group;              /* tensors in a layer; layers that travel at a time */
    const aclrtNotify *gates;             /* one per layer, each waited for once; or NULL */
    int64_t *landed_ns;                   /* one per layer, written when it is known to have landed; or NULL */
    int64_t gate_ms;                      /* time for a gate to open, from when the one before it opened or its group landed */
} ring_layers;

enum { RING_GET = 1, RING_PUT, RING_COPY, RING_WAIT, RING_RECORD };
enum { RING_EVENT = 0, RING_NOTIFY };     /* an event must be recorded before a wait is issued, a notify need not be */
typedef struct ring_step {
    int32_t  op;                          /* GET and COPY write the local side, PUT writes the remote side */
    int32_t  kind;                        /* COPY: an aclrtMemcpyKind; WAIT, RECORD: RING_EVENT or RING_NOTIFY */
    uint32_t rank;                        /* GET, PUT: the peer's rank */
    void    *handle;                      /* GET, PUT: communicator; WAIT, RECORD: event, notify */
    ring_grid grid;
    const ring_layers *layers;            /* how the grid is cut into layers, for at most one step of a program; NULL: not at all */
} ring_step;

enum { RING_CRITICAL = 0, RING_NORMAL, RING_BACKGROUND, RING_PRIORITIES };
enum { RING_DONE = 0, RING_FAILED, RING_CANCELLED, RING_TIMED_OUT, RING_STUCK, RING_REFUSED, RING_UNDER_WAY, RING_GIVEN_BACK };
enum { RING_NO_LIBRARY = 0, RING_ACL, RING_HCCL, RING_WORK };    /* WORK: an ACL code that waiting for the stream returned */
typedef struct ring_completion {
    uint64_t id;
    int32_t  state;
    int32_t  origin, code;                /* which library refused, and its code */
    int32_t  abort_code;                  /* the code that the abort returned, if there was one */
    uint32_t step;                        /* the number of finished steps, or the step that failed; UNDER_WAY: landed layers */
    uint64_t bytes, ranges;               /* bytes known to have landed; ranges handed to the device */
    uint32_t unclean;                     /* 1: gets or puts may be left in the communicator. Over RDMA any later use of it carries
                                           * them out, until it is destroyed                                         */
    uint32_t gate;                        /* TIMED_OUT: the layer, counted from 1, whose gate stayed shut for too long; 0: none */
    int64_t  submitted_ns, started_ns, finished_ns;   /* CLOCK_MONOTONIC */
    int64_t  aside_ns;                    /* the share of started to finished in which more urgent programs ran */
    char     message[192];                /* the vendor's own words, or empty */
} ring_completion;

enum { RING_QUEUED = 0, RING_RAN = 1, RING_FULL = -1, RING_CLOSED = -2, RING_INVALID = -3, RING_NO_THREAD = -4 };
int  ring_open(const ring_driver *driver, aclrtContext context, const ring_options *options, ring **out); /* 0, or an ACL code */
int  ring_submit(ring *r, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms, ring_completion *ran);
/* Does the same with a priority. ring_submit() uses RING_NORMAL. */
int  ring_submit_as(ring *r, int priority, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms,
                    ring_completion *ran);

/* A small transfer that is made again and again, each time of other blocks, in every tensor of the step's grid. The caller has set
 * the rest of the grid. */
typedef struct ring_blocks {
    ring      *on;
    ring_step *step;
    uint64_t  *numbers;                   /* `count` block numbers of the local side, then as many of the remote side */
    uint64_t   local_limit, remote_limit; /* the number of blocks at each side */
    uint64_t   id;
    int64_t    timeout_ms;
    ring_completion ran;
} ring_blocks;

/* Returns RING_RAN if it ran: `ran` has the result. Returns RING_QUEUED if the device is not done yet: until it is, `b` and all that
 * it names must not move or change. Otherwise nothing was done: RING_OUTSIDE if a number is not below its limit, or a block would be
 * written twice; RING_LATER if it cannot run in this call and must be submitted. */
enum { RING_OUTSIDE = -5, RING_LATER = -6 };
int  ring_run_blocks(ring_blocks *b, uint32_t count);

int  ring_cancel(ring *r, uint64_t id);   /* 1: its completion reports the end; 0: no such program, or it is complete */
uint32_t ring_watch(ring *r, uint64_t id);            /* returns its landed layers; 0 if it is not under way */
/* Returns the id of the running program if its time was over a grace ago, when this was asked last, and it still has not ended. It
 * is stuck then, and queued programs are refused. Otherwise returns 0, and sets *left_ms to the milliseconds after which to ask
 * again, or to -1 if nothing is under way. */
uint64_t ring_overdue(ring *r, int64_t *left_ms);
uint32_t ring_reap(ring *r, ring_completion *out, uint32_t room);     /* how many were written */
int  ring_fd(const ring *r);               /* readable when ring_reap() has something to tell; now and then when it has not */
/* Cancels all programs. Returns 0 once the device is quiet, 1 if it is not quiet yet or is stuck. A negative limit means none: the
 * call waits for stuck programs, too, and returns 1 only if it can never be known that the device let go. Then the stream is leaked
 * on purpose. */
int  ring_close(ring *r, int64_t timeout_ms);
void ring_free(ring *r);                  /* call it after ring_close() returned 0 and all completions were reaped */

/* Copies ranges of host memory, remote to local, in the calling thread. `total` is the size of the whole step. */
void ring_copy(const HcclOneSideOpDesc *ranges, uint32_t count, uint64_t total);

/* Returns the first position whose value is not below the limit, or `count`. */
uint32_t ring_first_outside(const uint64_t *values, uint32_t count, uint64_t limit);

/* Returns the first position whose value is at an earlier one, too, or `count`. `table` has room for four times as many values. It
 * is not touched if the values ascend. */
uint32_t ring_first_repeated(const uint64_t *values, uint32_t count, uint32_t *table);

/* Renumbers parts in place. They count through a list of blocks, `each` parts to a block; afterwards through the whole cache. */
void ring_number_parts(uint64_t *parts, uint32_t count, const uint64_t *blocks, uint64_t each);

/* The numbering of the units of one end's blocks. A unit is what both ends of a transfer have in one piece. */
typedef struct {
    uint64_t first_token, tokens;           /* first_token counts from the first token of the first block */
    uint64_t stretch;                       /* tokens in a row that one offset has before the next offset follows */
    uint64_t block_tokens, block_units;     /* tokens and units in a block */
    uint64_t unit_tokens, step;             /* tokens in a unit; distance from a unit to that of the next tokens */
} ring_units;

/* Writes the numbers stretch by stretch; within a stretch offset by offset; within an offset token by token. */
void ring_number_units(uint64_t *numbers, const ring_units *units, const uint64_t *offsets, uint32_t count);

/* Returns the first position whose range is not memory of this process that can be read, or with `writes` written; or `count`. */
uint32_t ring_first_unusable(const uint64_t *addresses, const uint64_t *bytes, uint32_t count, int writes);
