/* heartbeats.h: signs of life on many connections, from one thread that needs no interpreter.
 *
 * A process whose interpreter is held inside a call of an extension is alive, and its peers must see that. So this thread sends
 * a beat per interval on each connection, reads what the peers send, and notes when a peer's last beat came. It knows nothing of
 * links: it reports its findings as news, which the owner reaps and acts on.
 *
 * A beat is one byte, whatever it is. On a line with keys it is 24 bytes, a counter and its seal: the counter as 8 bytes, the
 * highest first, and keyed BLAKE2b of these. A beat whose counter is not above the last one is ignored, so it is no sign of life.
 * A beat whose seal is wrong ends the line: it was added or changed on its way.
 *
 *   call                  from                     blocks
 *   heartbeats_open       any thread               no
 *   heartbeats_start      the owner's thread       no
 *   heartbeats_watch      the owner's thread       no
 *   heartbeats_stop       the owner's thread       no
 *   heartbeats_excuse     the owner's thread       no
 *   heartbeats_reap, _fd  the owner's thread       no
 *   heartbeats_close      the owner's thread,      for the thread, which ends within its current send or receive
 *                         last: frees all of it
 *   heartbeats_turn       tests, without a thread  no
 *
 * A line is one connection. It exists from heartbeats_watch(), which takes its descriptor, to heartbeats_stop(), which closes it.
 * A line whose connection ended is closed at once; its number stays taken until heartbeats_stop().
 *
 * A line is silent if no beat came for its `silence`, nor a packet whose bytes wait for a lost one. With keys, such packets, which
 * any process on the way can send, count for `3 x silence` after the last beat, and so does heartbeats_excuse(). Silence is news,
 * not an end: the thread continues to send and read, and news of a silence that ended before it was reaped is dropped. Time in which this thread
 * did not run does not count against a peer if it is more than half of the peer's `silence`: peers may have been stopped together
 * with it, and their bytes may still be on the way. The clock is CLOCK_MONOTONIC, which steps of the wall clock do not move and
 * which stands still during a suspend.
 *
 * In a forked child there is no such thread. There heartbeats_stop() and heartbeats_close() close the child's copies of the
 * descriptors and touch nothing that is shared with the parent.                                                              */
#pragma once
#include <stdint.h>

typedef struct heartbeats heartbeats;

enum { HEARTBEATS_BEGUN = 1, HEARTBEATS_SILENT, HEARTBEATS_CLOSED, HEARTBEATS_BROKEN, HEARTBEATS_FORGED };
enum { HEARTBEATS_KEY = 32, HEARTBEATS_BEAT = 24 };   /* bytes of a key; of a beat on a line with keys */
typedef struct heartbeats_news {
    uint64_t line;
    int32_t  kind;                        /* BEGUN: the peer's first beat came; CLOSED, BROKEN, FORGED: the line is closed */
    int32_t  code;                        /* BROKEN: the errno */
    int64_t  silent_ns;                   /* SILENT: since the last beat, or since beats were due */
} heartbeats_news;

/* Each returns 0 or a negative errno, unless stated otherwise. */
int heartbeats_open(int64_t interval_ns, heartbeats **out);
int heartbeats_start(heartbeats *h);      /* starts the thread; call it once */

/* Takes over a connected stream socket, unless the call fails. The peer's first beat has `patience_ns` more time.
 * `keys`: two keys of HEARTBEATS_KEY bytes, for our beats and for the peer's; NULL: beats of one byte.               */
int heartbeats_watch(heartbeats *h, int fd, int64_t silence_ns, int64_t patience_ns, const uint8_t *keys, uint64_t *line);
void heartbeats_stop(heartbeats *h, uint64_t line);       /* ends its news; no effect if there is no such line */
/* Counts the peer's silence from `ago_ns` before now, because it gave a sign of life elsewhere then. 1: it counts; 0: it does not,
 * because the peer's last sealed beat is too long ago, or there is no such line.                                                */
int heartbeats_excuse(heartbeats *h, uint64_t line, int64_t ago_ns);
int heartbeats_reap(heartbeats *h, heartbeats_news *out); /* 1: there is news; 0: there is none */
int heartbeats_fd(const heartbeats *h);   /* readable when there may be news */
void heartbeats_close(heartbeats *h);

/* Takes one turn at this time, as the thread does. Returns the time of the next turn, or INT64_MAX. */
int64_t heartbeats_turn(heartbeats *h, int64_t now_ns);
