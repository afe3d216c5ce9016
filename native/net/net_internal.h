/* net_internal.h: what the files of native/net/ share.
 *
 *   lent.c          what the peer may reach
 *   records.c       bytes under a seal
 *   connection.c    frames of one connection: sends, receives, checks, answers
 *   queue.c         which program's part goes next, and what its end means
 *   channel.c       connections that live and end together
 *   net_ring.c      submission, cancellation, completions
 *   io.c            the threads
 *   faults.c        programs that stand still or fail, for tests
 *
 * Locks: the channel's guards programs, rings and the use of slots for own parts; a connection's guards its descriptor, frames and the
 * content of slots, during one system call at a time. Take the channel's before a connection's, and that before the table's.     */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>
#include "frames.h"
#include "grid.h"
#include "records.h"
#pragma GCC visibility push(default)
#include "net_ring.h"
#pragma GCC visibility pop

enum { OWN_PARTS = 4, OWN_PUTS = 2, PARTS_IN_A_ROW = NET_MOST_CONNECTIONS * OWN_PARTS };
enum { CODE_LOST = 507057, SCRATCH = 1 << 16, SPARE_IOV = 8 };

/* ---- what is lent ---- */

typedef struct lent_range { uint64_t address, end, reach; int modes; } lent_range;    /* reach: the highest end up to here */
typedef struct lent_table {
    pthread_mutex_t lock;
    lent_range *ranges;                   /* by address */
    size_t count, room;
} lent_table;

int  lent_add(lent_table *t, uint64_t address, uint64_t bytes, int modes);
int  lent_remove(lent_table *t, uint64_t address, uint64_t bytes, int modes);
bool lent_covers(lent_table *t, uint64_t address, uint64_t bytes, int modes);

/* ---- a connection ---- */

typedef struct net_program net_program;
typedef struct connection connection;
typedef struct io_thread io_thread;
typedef struct net_fault net_fault;

/* A request, of this end (own) or of the peer. */
enum { PART_FREE = 0, PART_ARRIVING, PART_QUEUED, PART_AWAITED, PART_ENDED };
typedef struct part {
    net_frame head;                       /* what is sent, with the ranges behind it if it is a request */
    net_range wanted[NET_MOST_RANGES];    /* the owner's ranges */
    struct iovec blocks[NET_MOST_RANGES]; /* where the bytes are at this end */
    struct part *next;                    /* in the queue of what is to be sent */
    uint64_t number, bytes, moved;        /* moved: of the payload */
    uint32_t head_bytes, head_sent, at;   /* at: the first block that is not moved yet */
    uint16_t ranges;
    uint8_t  op, state, status;           /* op: NET_OP_READ or NET_OP_WRITE; status: how it ended */
    bool     has_payload;                 /* the payload follows the head that is sent */
    bool     spoilt;                      /* its memory must not be touched: what comes is discarded, what goes is zeros */
    int32_t  fault;                       /* the errno of touching this end's memory, or 0 */
    uint64_t refused;                     /* the position of the range that is not lent */
    net_program *program;                 /* own: whose it is, NULL once that has ended. The channel's lock guards this */
    uint64_t sequence;                    /* own: its place in the program */
    int64_t  since_ns;                    /* own, stopped: from when on the peer's patience counts; otherwise 0 */
} part;

enum { AT_HEAD = 0, AT_RANGES, AT_PAYLOAD };
struct connection {
    net_channel *channel;
    io_thread *io;
    uint32_t index;
    connection *next_of_io;
    /* the channel's lock */
    uint32_t own_parts, own_puts;
    uint64_t outstanding;                 /* bytes of own parts */
    atomic_uint wanted;                   /* threads that wait for the lock */
    pthread_mutex_t lock;                 /* guards the rest */
    int fd;                               /* -1: closed */
    records *sealer, *opener;             /* NULL: bytes travel as they are */
    bool wants_out;                       /* epoll tells when there is room to send */
    uint64_t last_number, next_number;    /* the peer's last part; our next one */
    part *out, **out_end;
    int stage;
    net_frame in;
    uint32_t got;                         /* bytes of `in`, or of the ranges */
    part *into;                           /* whose ranges or payload arrive */
    bool has_ended;                       /* a slot is PART_ENDED */
    net_counts counts;
    uint64_t bytes_in, bytes_out;         /* bytes received and sent, of all kinds */
    struct { uint64_t in, out, waiting; } seen;   /* waiting: what the peer's kernel does not have yet */
    int64_t moved_ns;                     /* when connection_look() last found that bytes had moved */
    part own[OWN_PARTS], peer[NET_PEER_PARTS];
};

void connection_take(connection *k);      /* locks it soon, although the I/O thread takes the lock again and again */
void connection_give(connection *k);
void connection_queue(connection *k, part *p);                   /* locked: sends it when its turn comes */
bool connection_unqueue(connection *k, part *p);                 /* locked; false: its first byte was sent */
bool connection_push(connection *k, uint64_t most, net_reason *why);   /* sends what the socket takes now; false: it broke */
bool connection_serve(connection *k, uint32_t events, char *scratch, net_reason *why);
bool connection_take_back(connection *k);                        /* locked; false: a part is in the middle of what is lent no longer */
void connection_look(connection *k, int64_t now);                /* locked: notes whether bytes have moved since the last look */
bool connection_reaches(const connection *k, const part *p);     /* false: its memory is not there */
void part_spoil(part *p);
void connection_shut(connection *k);      /* locked: closes the descriptor */
__attribute__((format(printf, 4, 5))) bool broken(net_reason *why, int kind, int code, const char *words, ...);   /* returns false */

/* ---- programs ---- */

typedef struct node { struct node *prev, *next; } node;          /* of a circular list, whose head is a node as well */
static inline void node_clear(node *n) { n->prev = n->next = n; }
static inline bool node_is_alone(const node *n) { return n->next == n; }
static inline void node_insert(node *before, node *n)
{
    n->prev = before->prev;
    n->next = before;
    n->prev->next = before->prev = n;
}
static inline void node_remove(node *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    node_clear(n);
}
#define OWNER(n, type, member) ((type *)((char *)(n) - offsetof(type, member)))

enum { PROGRAM_FREE = 0, PROGRAM_BEHIND, PROGRAM_QUEUED, PROGRAM_CUT, PROGRAM_ENDED };
struct net_program {
    node live;                            /* in the ring's lists */
    node turn;                            /* QUEUED: in the channel's queue; BEHIND: in the ring's */
    net_ring *ring;
    int state, priority;
    const ring_step *steps;
    uint32_t count, step;                 /* step, at: what is cut next */
    cursor at;
    int64_t timeout_ms;
    uint64_t total, cut, in_turn;         /* bytes: of all steps, cut so far, cut in this turn */
    uint32_t parts;                       /* under way */
    uint64_t next_sequence, first_sequence;
    uint64_t ends[PARTS_IN_A_ROW];        /* of parts from first_sequence on: the bytes up to its end */
    bool landed_parts[PARTS_IN_A_ROW];
    uint64_t in_a_row;                    /* bytes that have landed without a gap */
    const ring_layers *layers;
    uint64_t before_layers, layer_bytes;
    uint32_t layer_count, landed, told;
    bool watched;
    int64_t deadline_ns, aside_since_ns;  /* 0: not begun; it does not stand aside */
    bool is_stopping;                     /* it ends when the peer has ended its parts */
    bool is_unconfirmed;                  /* the channel ended while the peer had bytes of a push that it did not confirm */
    ring_completion done;
    net_fault *fault;                     /* NULL but in tests */
    uint8_t changed, *to_change;          /* NET_FLIP: the byte that goes out instead; that changes when it has landed */
    bool has_arrived;                     /* at the hold */
};

struct net_ring {
    net_channel *channel;
    node on_channel;
    bool is_ordered, closing;
    uint32_t depth, vacant, watched;
    node free, live, complete;
    node behind[RING_PRIORITIES];         /* ordered: programs that wait until the one before them is cut */
    net_program *cutting[RING_PRIORITIES];
    pthread_cond_t idle;                  /* no program is live */
    int fd;
    net_program programs[];
};

struct net_channel {
    pid_t pid;
    net_channel_options options;
    lent_table lent;
    pthread_mutex_t lock;                 /* guards the rest */
    net_reason reason;
    int fd;
    _Atomic uint32_t connections_count;   /* io_look_at() reads it without the lock */
    connection *connections[NET_MOST_CONNECTIONS];
    node rings;
    node queue[RING_PRIORITIES];
    node standing;                        /* programs that a hold keeps out of the queue */
    uint64_t passed[RING_PRIORITIES];
    bool is_aside[RING_PRIORITIES];
    _Atomic int64_t due_ns;               /* when to look at time limits; INT64_MAX: never */
};

/* The channel's lock is held in all of these. */
void program_enqueue(net_program *p);
void program_stop(net_program *p, int32_t state, int32_t code, const char *words, int64_t now);
uint32_t queue_cut(net_channel *c, uint32_t most);      /* cuts and queues parts; returns the connections that have some, one bit each */
void queue_harvest(connection *k);        /* what has ended on this connection */
bool queue_look(net_channel *c, int64_t now, net_reason *why);   /* ends what is late; false: patience is over */
void ring_file(net_program *p);           /* net_ring.c: it has ended */
void channel_break_locked(net_channel *c, const net_reason *why);

void channel_break(net_channel *c, const net_reason *why);
void channel_push(net_channel *c, uint32_t connections);         /* no lock is held */
void channel_settle(connection *k);       /* no lock is held: harvests, cuts, pushes */
void channel_look(net_channel *c);        /* at time limits */

/* ---- threads ---- */

int  io_join(connection *k, uint32_t threads);      /* 0 or a negative errno: a thread serves it from now on */
void io_leave(net_channel *c);            /* returns when no thread uses its connections, which are closed */
void io_interest(connection *k, bool out);          /* locked */
void io_drop(connection *k);              /* locked: before its descriptor is closed */
void io_look_at(net_channel *c);          /* its due_ns may be earlier than what its thread waits for */
void io_look_at_all(void);                /* the channels of the process */

/* ---- faults ---- */

net_fault *fault_of(int op);              /* that of a new program, or NULL; fault_drop() ends its use */
void fault_drop(net_fault *f);
void fault_tell_stop(void);
bool fault_is(const net_program *p, int kind);
int32_t fault_code(const net_program *p);
uint64_t fault_stands_at(const net_program *p);       /* how many bytes may land, or UINT64_MAX */
void fault_arrived(net_program *p);
uint64_t fault_most(const net_program *p, uint64_t position, uint64_t most);      /* bytes that the next range may have */
void fault_change(net_program *p, uint64_t position, struct iovec *block);        /* redirects the byte that is damaged */
void fault_landed(net_program *p);
