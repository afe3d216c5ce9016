/* hccl_queue_pair.h: a connection between two servers (SOFTNPU_STRICT=roce), as a NIC has it. The calls HcclBatchGet and
 * HcclBatchPut put requests into it at once. A stream only gets a task that rings the doorbell, and one that waits for the flag.
 * So the order of requests is the order of calls, and they are unaffected by a stream's gate, abort or end:
 *
 *     posted ---(a doorbell of any stream)---> started ---(the executor, a thread)---> done
 *
 *   hccl_queue_pair.c   the ring of requests, its room, its executor        hccl_request.c    one request, carried out
 *   hccl_doorbell.c     the two tasks that a stream gets                    hccl_post.c       a batch, item by item
 *
 * Its lock comes after the communicator's. After a failed request the connection carries out nothing more, and every wait for
 * its flag lasts until HCCL_EXEC_TIMEOUT, an abort, or the end of the communicator.                                                             */
#pragma once
#include "hccl_soft.h"
#include "runtime.h"

enum { HCCL_QUEUE_DEPTH = 512, HCCL_QUEUE_ROOM = 510 };     /* HCCL_QUEUE_ROOM requests may be unanswered */

typedef struct hccl_request {
    bool fence;                                             /* done after all before it, then sets the flag; moves nothing */
    bool put, mapped;                                       /* mapped: `remote` is an address here, else in the peer */
    char *local;
    uint64_t remote, bytes;
    soft_exec_fault fault;
} hccl_request;

typedef struct hccl_queue_pair {
    soft_object object;                                     /* a reference has the communicator, and each task */
    uint32_t rank;                                          /* the peer: */
    int side, link;
    pid_t pid;
    hccl_gate *gate;
    int flag;                                               /* an eventfd: the only one for all streams of the connection */
    atomic_bool ended;
    pthread_t executor;
    pthread_mutex_t lock;                                   /* everything below */
    pthread_cond_t work, room;                              /* to the executor; to callers of a full queue */
    uint64_t posted, started, done;
    aclError failure;
    char failure_text[SOFT_TEXT];
    hccl_request ring[HCCL_QUEUE_DEPTH];
} hccl_queue_pair;

/* ---- hccl_queue_pair.c ---- */
HcclResult hccl_queue_pair_of(const char *function, hccl_comm *comm, uint32_t rank, hccl_queue_pair **out); /* a reference */
void       hccl_queue_pair_put(hccl_queue_pair *pair);
void       hccl_queue_pair_end(hccl_queue_pair *pair);      /* or NULL. Requests are gone; nothing moves when it has returned */
bool       hccl_queue_pair_idle(hccl_queue_pair *pair);     /* or NULL */
bool       hccl_queue_pair_post(hccl_queue_pair *pair, const hccl_request *request, int64_t deadline); /* false: no room until then */
uint64_t   hccl_queue_pair_posted(hccl_queue_pair *pair);
void       hccl_queue_pair_start(hccl_queue_pair *pair, uint64_t number);   /* the first `number` requests may be carried out */
void       hccl_queue_pair_pause(hccl_queue_pair *pair, int64_t ms);        /* of its executor; -1: until it ends */
aclError   hccl_queue_pair_failed(hccl_queue_pair *pair);   /* and says why; 0: it did not */

/* ---- hccl_flag.c ---- */
typedef enum { HCCL_FLAG_CLEAR, HCCL_FLAG_SET, HCCL_FLAG_BROKEN, HCCL_FLAG_ABORTED } hccl_flag_state;
void            hccl_flag_set(int flag);
void            hccl_flag_break(int flag);                  /* from now on it is set or broken, never clear */
hccl_flag_state hccl_flag_take(int flag);                   /* and clears what was set */
/* Waits for it in a task: CLEAR if it was not set within HCCL_EXEC_TIMEOUT, ABORTED if the task's stream was. */
hccl_flag_state hccl_flag_await(soft_task *task, int flag);

/* ---- hccl_request.c ---- */
aclError hccl_request_run(hccl_queue_pair *pair, const hccl_request *request);

/* ---- hccl_doorbell.c: takes its own reference for each task ---- */
HcclResult hccl_doorbell_submit(hccl_queue_pair *pair, const char *function, soft_stream *stream);

/* ---- hccl_post.c ---- */
typedef struct hccl_posting {
    const char *function;
    hccl_comm *comm;
    uint32_t rank;
    bool put;
    soft_exec_fault fault;                                  /* strikes the first request; or the one with the byte `flip_at` */
    hccl_queue_pair *pair;                                  /* NULL until there is one */
    int64_t deadline;
} hccl_posting;
HcclResult hccl_post_item(hccl_posting *posting, const hccl_copy *copy);    /* may block: the queue is full */
HcclResult hccl_post_end(hccl_posting *posting, soft_stream *stream);       /* the fence, the doorbell, the wait */
