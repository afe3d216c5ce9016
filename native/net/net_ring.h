/* net_ring.h: a net ring is to a link's data connections what a ring is to a device stream.
 *
 * A *channel* has the data connections of one link. Programs of its net rings are cut into parts of at most 1 MiB and 256 ranges.
 * The first connection with room takes the next part. The peer's I/O threads look up each range in what was lent to this end, gather
 * or scatter the bytes, and answer. A few threads of the process serve all connections of all channels. They start with the first
 * connection, and end with the last one. They know no Python and need no interpreter.
 *
 *   call                  from                     blocks
 *   net_channel_open      any thread               no
 *   net_channel_add       any thread               no
 *   net_lend              any thread               no
 *   net_take_back         any thread               for system calls under way, which move at most 1 MiB each
 *   net_channel_why, _fd  any thread               no
 *   net_channel_close     any thread               as net_take_back
 *   net_channel_free      any thread, last         until the I/O threads have finished their current turn
 *   net_open              any thread               no
 *   net_submit_as         one thread at a time     no (sends at most 64 KiB, if the socket has room)
 *   net_cancel            any thread               as net_take_back
 *   net_watch             any thread               no
 *   net_reap, net_fd      one thread at a time     no
 *   net_close             any thread               until the pushes under way have ended, at most timeout_ms
 *   net_free              any thread, last         no
 *
 * Ownership. net_channel_add() takes over the descriptor if it succeeds, and only then. Steps, grids and index arrays stay the
 * caller's until the completion is reaped, and so does the memory that they name. A channel is freed after all its rings. Any order
 * of net_channel_close() and net_close() will do.
 *
 * Once a completion is reaped, no byte of its program moves any longer. A cancelled pull ends at once: what still arrives for it is
 * discarded. A cancelled push ends when the peer has confirmed the parts that were being sent. If nothing moves on their connection for
 * the time of the patience, or the peer has not confirmed them in NET_MOST_PATIENCE times as long, the channel is broken, and the push
 * ends as failed.
 *
 * A channel breaks once: a connection ended, the peer broke the rules of frames.h, or a part overran its patience. All programs then
 * end as RING_FAILED with code 507057, and net_channel_fd() becomes readable. After net_channel_close() no byte from the peer lands
 * in this process, and none leaves.
 *
 * In a forked child there are no threads. There net_channel_close() closes the child's copies of the descriptors, net_submit_as()
 * returns RING_CLOSED, and the other calls do nothing.                                                                        */
#pragma once
#include "ring.h"

typedef struct net_channel net_channel;
typedef struct net_ring net_ring;

typedef struct net_channel_options {
    uint32_t threads;                     /* I/O threads of the process, 1 to 16; the first channel's value counts */
    int64_t  patience_ms;                 /* how long nothing may move while a cancelled or late program has parts under way */
    int64_t  silence_ms;                  /* TCP_USER_TIMEOUT: how long sent bytes may stay unacknowledged; 0: the kernel's default */
} net_channel_options;

enum { NET_MOST_PATIENCE = 20 };          /* the time in all, in patiences, for a peer that keeps bytes moving */

/* 0 or a negative errno. */
int  net_channel_open(const net_channel_options *options, net_channel **out);

/* Adds a connected stream socket. Returns 0, or a negative errno: the descriptor is the caller's then.
 * `keys`: NULL for a connection whose bytes travel as they are; otherwise 2 x NET_KEY bytes, the key of what this end sends and the
 * key of what the peer sends. Each key belongs to one direction of one connection, and is never used again. -ENOTSUP: no library
 * with AES-256-GCM can be opened. */
enum { NET_KEY = 32, NET_MOST_CONNECTIONS = 32 };
int  net_channel_add(net_channel *c, int fd, const uint8_t *keys);

/* The peer may reach this range from now on, by NET_READ (it pulls) or NET_WRITE (it pushes) or both. A range may be lent several
 * times, and ranges may overlap. A part of the peer must lie within one of them. */
enum { NET_READ = 1, NET_WRITE = 2 };
int  net_lend(net_channel *c, uint64_t address, uint64_t bytes, int modes);       /* 0, -EINVAL or -ENOMEM */
/* Undoes one net_lend() of the same range and modes. When the call returns, no byte of it moves, unless it is lent otherwise. If a
 * part of the peer was in the middle of it, the channel breaks. Returns 0, or -ENOENT if it was not lent. */
int  net_take_back(net_channel *c, uint64_t address, uint64_t bytes, int modes);

/* Why the channel broke. Returns NET_WHOLE while it is whole, and NET_CLOSED after net_channel_close(), unless it broke before. */
enum { NET_WHOLE = 0, NET_ENDED, NET_PROTOCOL, NET_LATE, NET_TAKEN_BACK, NET_FAILED, NET_CLOSED };
typedef struct net_reason {
    int32_t kind;                         /* ENDED: by the peer or the network; LATE: the patience is over; FAILED: at this end */
    int32_t code;                         /* the errno, or 0 */
    char    message[160];
} net_reason;
int  net_channel_why(net_channel *c, net_reason *out);                 /* returns out->kind; quiets net_channel_fd() */
int  net_channel_fd(const net_channel *c);   /* readable once the channel is broken, until net_channel_why() is called */

typedef struct net_counts {
    uint64_t connections;                 /* those that are open */
    uint64_t sent, received;              /* bytes of payload: what this end's programs pushed and pulled is a part of it */
    uint64_t served, refused;             /* parts of the peer: that ended well, or named a range that was not lent to it */
} net_counts;
void net_channel_count(net_channel *c, net_counts *out);

void net_channel_close(net_channel *c);   /* all programs end; may be called twice */
void net_channel_free(net_channel *c);    /* closes it as well */

/* ---- programs ---- */

typedef struct net_options {
    uint32_t depth;                       /* as in ring_options */
    uint32_t ordered;                     /* 1: the ends of a priority are reported in the order of submission, not as they come */
} net_options;

/* The calls of ring.h with the same meaning, except:
 * - A step is RING_GET or RING_PUT, and its handle is the channel. Steps of a program move at the same time.
 * - Layers have no gates.
 * - Completions are reported as programs end, unless the ring is ordered. `bytes` is what has landed.
 * - The origin is RING_ACL. Code 507057: the channel broke; 107000 (ACL_ERROR_RT_PARAM_INVALID): the peer has not lent a range, which
 *   the message names, or memory at this end could not be read or written.
 * - Nothing gets stuck: net_overdue() always returns 0 and sets *left_ms to -1. */
int  net_open(net_channel *c, const net_options *options, net_ring **out);       /* 0, or an ACL code */
int  net_submit_as(net_ring *r, int priority, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms,
                   ring_completion *ran);
int  net_cancel(net_ring *r, uint64_t id);
uint32_t net_watch(net_ring *r, uint64_t id);
uint64_t net_overdue(net_ring *r, int64_t *left_ms);
uint32_t net_reap(net_ring *r, ring_completion *out, uint32_t room);
int  net_fd(const net_ring *r);
int  net_close(net_ring *r, int64_t timeout_ms);      /* 0: all programs have ended; 1: not yet, call it again */
void net_free(net_ring *r);               /* after net_close() returned 0 */

/* ---- faults, for tests ---- */

/* What becomes of the nth program of any net ring of the process from now on that begins with this operation, or of every one if nth is
 * 0. NET_HOLD: it stands before its first byte; its time limit runs. NET_HOLD_HALF: it stands when half of its bytes have landed. It can
 * be stopped meanwhile. NET_FAIL: it fails with the code `value`. NET_FLIP: a bit of byte number `value` is changed on its way, counted
 * from the end if that is negative. With operation NET_STOP, a hold holds nothing: programs that are stopped count as arrivals.
 * Returns the number of the fault, which no other one ever has, or a negative errno. */
enum { NET_STOP = 0, NET_HOLD = 1, NET_HOLD_HALF, NET_FAIL, NET_FLIP, NET_MOST_FAULTS = 64 };
int  net_fault_begin(int kind, int op, uint64_t nth, int64_t value);
int  net_fault_fd(int number);            /* an eventfd that counts arrivals at a hold; -1: there is no such fault */
void net_fault_end(int number);           /* what stands continues, and later programs pass */
