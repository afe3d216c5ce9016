/* heartbeats.c: a table of lines, the turns of the thread, and the queue of news. */
#pragma GCC visibility push(default)
#include "heartbeats.h"
#pragma GCC visibility pop
#include "blake2b.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 64, READ = 4096 };        /* taken of epoll at a time; bytes of a line at a time: thousands of beats */
enum { EXCUSED = 3 };                     /* silences after the last sealed beat in which other signs of life count */
enum { EARLY_AT = 224 };                  /* of tcpi_rcv_ooopack in the kernel's struct tcp_info; older headers lack it */
#ifndef TCP_THIN_LINEAR_TIMEOUTS
#define TCP_THIN_LINEAR_TIMEOUTS 16
#endif
static const uint64_t WAKE = UINT64_MAX;  /* what epoll says of the eventfd that wakes the thread */
static const int64_t NEVER = INT64_MAX;

typedef struct seals {                    /* of a line with keys */
    uint8_t out_key[HEARTBEATS_KEY], in_key[HEARTBEATS_KEY];
    uint64_t out_counter, in_counter;     /* the next one to send; the lowest one that is accepted */
    uint8_t out[HEARTBEATS_BEAT], in[HEARTBEATS_BEAT];
    uint32_t unsent, unread;              /* bytes at the end of `out` that are not sent; bytes of `in` that came */
    int64_t proved_ns;                    /* when the last beat came, or from when on silence counts */
} seals;

typedef struct line {
    int fd;                               /* -1: it was closed, or the slot is free */
    uint32_t generation;                  /* grows when the slot is given back */
    bool is_taken, has_begun, is_silent;
    bool tells_begun, tells_end, is_told; /* is_told: it is in the list of lines with news */
    int end, code;                        /* HEARTBEATS_CLOSED or _BROKEN */
    int64_t silence_ns, heard_ns;         /* heard: when the last beat came, or from when on silence counts */
    seals *seals;                         /* NULL: a beat is a byte */
    uint32_t early;                       /* packets that came before one that is missing, when a byte was heard last */
    uint32_t next;                        /* in the list of free slots, or of lines with news */
} line;

enum { NO_SLOT = UINT32_MAX };

struct heartbeats {
    pthread_mutex_t lock;                 /* guards everything below; held for one call of the kernel at a time */
    line *lines;
    uint32_t count, free;                 /* slots; the first free one */
    uint32_t first_news, last_news;
    int64_t interval_ns, next_beat_ns, next_judgement_ns;
    int64_t turned_ns, due_ns;            /* the last turn; when the next one was due */
    bool closing, has_thread;
    pid_t pid;                            /* of the process that has the thread */
    pthread_t thread;
    int epoll, wake, news;
};

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Without a thread, the time is the last one that heartbeats_turn() was given. */
static int64_t now_of(const heartbeats *h)
{
    return h->has_thread ? clock_ns() : h->turned_ns;
}

static int64_t sum(int64_t a, int64_t b)  /* of times that are not negative; never overflows */
{
    return a > NEVER - b ? NEVER : a + b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void ring_bell(int fd)
{
    uint64_t one = 1;
    ssize_t ignored = write(fd, &one, sizeof one);       /* full: it rings already */
    (void)ignored;
}

static void quieten(int fd)
{
    uint64_t count;
    ssize_t ignored = read(fd, &count, sizeof count);
    (void)ignored;
}

/* ---- lines. Locked, all of it ---- */

static uint64_t name_of(const heartbeats *h, uint32_t slot)
{
    return (uint64_t)h->lines[slot].generation << 32 | slot;
}

static line *find(const heartbeats *h, uint64_t name)
{
    uint32_t slot = (uint32_t)name;
    if (slot >= h->count || !h->lines[slot].is_taken || name_of(h, slot) != name)
        return NULL;
    return &h->lines[slot];
}

/* A free slot is the first of its list afterwards. */
static bool have_room(heartbeats *h)
{
    if (h->free != NO_SLOT)
        return true;
    uint32_t count = h->count ? 2 * h->count : 16;
    line *more = count > h->count && count < NO_SLOT ? realloc(h->lines, count * sizeof *more) : NULL;
    if (!more)
        return false;
    memset(more + h->count, 0, (count - h->count) * sizeof *more);
    for (uint32_t slot = count; slot-- > h->count;) {
        more[slot].fd = -1;
        more[slot].next = h->free;
        h->free = slot;
    }
    h->lines = more;
    h->count = count;
    return true;
}

static void tell(heartbeats *h, line *l)
{
    if (l->is_told)
        return;
    uint32_t slot = (uint32_t)(l - h->lines);
    l->is_told = true;
    l->next = NO_SLOT;
    if (h->first_news == NO_SLOT)
        h->first_news = slot;
    else
        h->lines[h->last_news].next = slot;
    h->last_news = slot;
    ring_bell(h->news);
}

static void shut(heartbeats *h, line *l)
{
    if (l->fd < 0)
        return;
    epoll_ctl(h->epoll, EPOLL_CTL_DEL, l->fd, NULL);     /* a forked child may have a copy, which close() leaves polled */
    close(l->fd);
    l->fd = -1;
}

static void end(heartbeats *h, line *l, int kind, int code)
{
    shut(h, l);
    l->end = kind;
    l->code = code;
    l->tells_end = true;
    tell(h, l);
}

/* Any process on the way can make other signs of life than a sealed beat. */
static int64_t most_excused(const line *l, int64_t heard_ns)
{
    return l->seals ? least(heard_ns, sum(l->seals->proved_ns, EXCUSED * least(l->silence_ns, NEVER / EXCUSED))) : heard_ns;
}

static void count_from(heartbeats *h, line *l, int64_t heard_ns)
{
    if (heard_ns > l->heard_ns)
        l->heard_ns = heard_ns;
    h->next_judgement_ns = least(h->next_judgement_ns, sum(l->heard_ns, l->silence_ns));
}

/* The number of the peer's packets that came early: one before them is missing, and the kernel delivers none of their bytes until
 * that one was sent again. They are signs of life all the same. 0: not TCP, or the kernel does not count them. */
static uint32_t early_packets(const line *l)
{
    unsigned char info[256];
    uint32_t packets = 0;
    socklen_t size = sizeof info;
    if (getsockopt(l->fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0 && size >= EARLY_AT + sizeof packets)
        memcpy(&packets, info + EARLY_AT, sizeof packets);
    return packets;
}

/* The first beat ends the patience, so that `heard` may move back. */
static void hear(heartbeats *h, line *l, int64_t now)
{
    l->heard_ns = now;
    if (l->seals)
        l->seals->proved_ns = now;
    l->early = early_packets(l);
    l->is_silent = false;
    count_from(h, l, now);
    if (!l->has_begun) {
        l->has_begun = l->tells_begun = true;
        tell(h, l);
    }
}

static void write_beat(const uint8_t *key, uint64_t counter, uint8_t *beat)
{
    for (int i = 0; i < 8; i++)
        beat[i] = (uint8_t)(counter >> (8 * (7 - i)));
    blake2b_seal(key, HEARTBEATS_KEY, beat, 8, beat + 8);
}

/* Takes the same time however much of a seal is right, so that nothing can be learnt from the time. */
static bool is_sealed(const seals *s)
{
    uint8_t seal[BLAKE2B_SEAL], differences = 0;
    blake2b_seal(s->in_key, HEARTBEATS_KEY, s->in, 8, seal);
    for (int i = 0; i < BLAKE2B_SEAL; i++)
        differences |= seal[i] ^ s->in[8 + i];
    return differences == 0;
}

/* One whole beat. false: it is forged. */
static bool hear_beat(heartbeats *h, line *l, int64_t now)
{
    seals *s = l->seals;
    uint64_t counter = 0;
    if (!is_sealed(s))
        return false;
    for (int i = 0; i < 8; i++)
        counter = counter << 8 | s->in[i];
    if (counter >= s->in_counter) {       /* else it came before */
        s->in_counter = counter + 1;
        hear(h, l, now);
    }
    return true;
}

static void hear_bytes(heartbeats *h, line *l, const uint8_t *bytes, uint32_t count, int64_t now)
{
    seals *s = l->seals;
    if (!s) {
        hear(h, l, now);
        return;
    }
    while (count) {
        uint32_t part = HEARTBEATS_BEAT - s->unread < count ? HEARTBEATS_BEAT - s->unread : count;
        memcpy(s->in + s->unread, bytes, part);
        s->unread += part;
        bytes += part;
        count -= part;
        if (s->unread < HEARTBEATS_BEAT)
            return;
        s->unread = 0;
        if (!hear_beat(h, l, now)) {
            end(h, l, HEARTBEATS_FORGED, 0);
            return;
        }
    }
}

/* Reads what is there, up to this number of bytes. */
static void listen_to(heartbeats *h, line *l, int64_t now)
{
    uint8_t bytes[READ];
    if (l->fd < 0)
        return;
    ssize_t count = recv(l->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (count > 0)
        hear_bytes(h, l, bytes, (uint32_t)count, now);
    else if (count == 0)
        end(h, l, HEARTBEATS_CLOSED, 0);
    else if (errno != EAGAIN && errno != EINTR)
        end(h, l, HEARTBEATS_BROKEN, errno);
}

static bool is_overdue(const line *l, int64_t now)
{
    return l->fd >= 0 && !l->is_silent && now - l->heard_ns >= l->silence_ns;
}

/* A last look before it counts as silent. */
static void look_for_life(heartbeats *h, line *l, int64_t now)
{
    listen_to(h, l, now);
    if (!is_overdue(l, now))
        return;
    uint32_t early = early_packets(l);
    if (early != l->early)
        count_from(h, l, most_excused(l, now));
    l->early = early;
}

/* A beat that cannot be sent is left out: the buffer of a stopped peer is full, and a broken socket tells the reader. */
static void beat(const line *l)
{
    seals *s = l->seals;
    if (l->fd < 0)
        return;
    if (!s) {
        (void)send(l->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        return;
    }
    if (!s->unsent) {                     /* else the kernel took only the beginning of the last one */
        write_beat(s->out_key, s->out_counter++, s->out);
        s->unsent = HEARTBEATS_BEAT;
    }
    ssize_t count = send(l->fd, s->out + HEARTBEATS_BEAT - s->unsent, s->unsent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0)
        s->unsent -= (uint32_t)count;
    else if (s->unsent == HEARTBEATS_BEAT)
        s->unsent = 0;
}

/* The owner has something for the thread. */
static void wake(heartbeats *h, int64_t now)
{
    h->due_ns = least(h->due_ns, now);
    ring_bell(h->wake);
}

/* The owner may have its turn between any two lines. */
static void breathe(heartbeats *h)
{
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_lock(&h->lock);
}

/* ---- the thread. Locked, all of it ---- */

static void forgive(heartbeats *h, int64_t now)
{
    int64_t late = now - (h->due_ns > h->turned_ns ? h->due_ns : h->turned_ns);
    for (uint32_t slot = 0; late > 0 && slot < h->count; slot++)
        if (h->lines[slot].fd >= 0 && late > h->lines[slot].silence_ns / 2) {
            if (h->lines[slot].seals)
                h->lines[slot].seals->proved_ns = now;
            count_from(h, &h->lines[slot], now);
        }
}

/* All that came, before anything is judged: a process that was stopped finds its peers' beats. */
static void listen_to_all(heartbeats *h, int64_t now)
{
    struct epoll_event events[EVENTS];
    for (int count = EVENTS, rounds = 0; count == EVENTS && (uint32_t)rounds <= h->count / EVENTS; rounds++) {
        count = epoll_wait(h->epoll, events, EVENTS, 0);
        for (int i = 0; i < count; i++) {
            line *l = events[i].data.u64 == WAKE ? NULL : find(h, events[i].data.u64);
            if (events[i].data.u64 == WAKE)
                quieten(h->wake);
            else if (l)
                listen_to(h, l, now);
            breathe(h);
        }
    }
}

static void judge(heartbeats *h, int64_t now)
{
    h->next_judgement_ns = NEVER;
    for (uint32_t slot = 0; slot < h->count; slot++) {
        line *l = &h->lines[slot];
        if (is_overdue(l, now))
            look_for_life(h, l, now);
        if (is_overdue(l, now)) {
            l->is_silent = true;
            tell(h, l);
        }
        if (l->fd >= 0 && !l->is_silent)
            h->next_judgement_ns = least(h->next_judgement_ns, sum(l->heard_ns, l->silence_ns));
        breathe(h);
    }
}

static void beat_all(heartbeats *h, int64_t now)
{
    h->next_beat_ns = NEVER;
    for (uint32_t slot = 0; slot < h->count; slot++) {
        if (h->lines[slot].fd >= 0)
            h->next_beat_ns = sum(now, h->interval_ns);
        beat(&h->lines[slot]);
        breathe(h);
    }
}

static int64_t turn(heartbeats *h, int64_t now)
{
    forgive(h, now);
    h->turned_ns = now;
    listen_to_all(h, now);
    if (now >= h->next_judgement_ns)
        judge(h, now);
    if (now >= h->next_beat_ns)
        beat_all(h, now);
    h->due_ns = least(h->next_beat_ns, h->next_judgement_ns);
    return h->due_ns;
}

static void *run(void *arg)
{
    heartbeats *h = arg;
    pthread_mutex_lock(&h->lock);
    while (!h->closing) {
        int64_t due = turn(h, clock_ns());
        pthread_mutex_unlock(&h->lock);
        struct pollfd any = { .fd = h->epoll, .events = POLLIN };
        int64_t left = due == NEVER ? NEVER : due - clock_ns();
        struct timespec time = { .tv_sec = left / 1000000000, .tv_nsec = left % 1000000000 };
        if (left > 0)
            ppoll(&any, 1, left == NEVER ? NULL : &time, NULL);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* ---- the owner's calls ---- */

static bool is_a_child(const heartbeats *h)
{
    return getpid() != h->pid;
}

static int set_up(heartbeats *h)
{
    struct epoll_event woken = { .events = EPOLLIN, .data.u64 = WAKE };
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->wake = h->epoll < 0 ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    h->news = h->wake < 0 ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (h->news < 0 || epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->wake, &woken))
        return -errno;
    return 0;
}

int heartbeats_open(int64_t interval_ns, heartbeats **out)
{
    if (interval_ns <= 0)
        return -EINVAL;
    heartbeats *h = calloc(1, sizeof *h);
    if (!h)
        return -ENOMEM;
    pthread_mutex_init(&h->lock, NULL);
    h->free = h->first_news = NO_SLOT;
    h->interval_ns = interval_ns;
    h->next_beat_ns = h->next_judgement_ns = h->due_ns = NEVER;
    h->pid = getpid();
    h->epoll = h->wake = h->news = -1;
    int status = set_up(h);
    if (status) {
        heartbeats_close(h);
        return status;
    }
    *out = h;
    return 0;
}

int heartbeats_start(heartbeats *h)
{
    if (h->has_thread || is_a_child(h))
        return -EINVAL;
    sigset_t all, before;
    sigfillset(&all);                     /* signals are for the threads of the application */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    h->turned_ns = clock_ns();
    h->has_thread = true;
    int failed = pthread_create(&h->thread, NULL, run, h);
    h->has_thread &= !failed;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed)
        pthread_setname_np(h->thread, "heartbeats");
    return -failed;
}

/* Locked. */
static int take_up(heartbeats *h, int fd, uint32_t slot, int64_t silence_ns, int64_t patience_ns, seals *sealed)
{
    line *l = &h->lines[slot];
    struct epoll_event readable = { .events = EPOLLIN, .data.u64 = name_of(h, slot) };
    if (epoll_ctl(h->epoll, EPOLL_CTL_ADD, fd, &readable))
        return -errno;
    h->free = l->next;
    int linear = 1;                       /* a lost beat is sent again each 200 ms or so, not after 200, 400, 800 ...; TCP alone has it */
    setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &linear, sizeof linear);
    int64_t now = now_of(h);
    *l = (line){ .fd = fd, .generation = l->generation, .is_taken = true, .silence_ns = silence_ns, .seals = sealed };
    if (sealed)
        sealed->proved_ns = sum(now, patience_ns);
    count_from(h, l, sum(now, patience_ns));
    h->next_beat_ns = least(h->next_beat_ns, sum(now, h->interval_ns));
    beat(l);
    wake(h, now);
    return 0;
}

/* Wipes keys before their memory is given to others. */
static void forget(seals *s)
{
    if (s)
        explicit_bzero(s, sizeof *s);
    free(s);
}

int heartbeats_watch(heartbeats *h, int fd, int64_t silence_ns, int64_t patience_ns, const uint8_t *keys, uint64_t *name)
{
    if (fd < 0 || silence_ns <= 0 || patience_ns < 0 || is_a_child(h))
        return -EINVAL;
    seals *sealed = keys ? calloc(1, sizeof *sealed) : NULL;
    if (keys && !sealed)
        return -ENOMEM;
    if (sealed) {
        memcpy(sealed->out_key, keys, HEARTBEATS_KEY);
        memcpy(sealed->in_key, keys + HEARTBEATS_KEY, HEARTBEATS_KEY);
    }
    pthread_mutex_lock(&h->lock);
    int status = -ENOMEM;
    if (have_room(h)) {
        uint32_t slot = h->free;
        *name = name_of(h, slot);
        status = take_up(h, fd, slot, silence_ns, patience_ns, sealed);
    }
    pthread_mutex_unlock(&h->lock);
    if (status)
        forget(sealed);
    return status;
}

/* Locked. Keeps the order of the news. */
static void take_out_of_news(heartbeats *h, uint32_t slot)
{
    uint32_t before = NO_SLOT;
    for (uint32_t at = h->first_news; at != slot; at = h->lines[at].next)
        before = at;
    if (before == NO_SLOT)
        h->first_news = h->lines[slot].next;
    else
        h->lines[before].next = h->lines[slot].next;
    if (h->last_news == slot)
        h->last_news = before;
    h->lines[slot].is_told = false;
}

void heartbeats_stop(heartbeats *h, uint64_t name)
{
    if (is_a_child(h)) {                  /* the lock may be held by a thread that is not here, the epoll set is the parent's */
        line *l = find(h, name);
        if (l && l->fd >= 0) {
            close(l->fd);
            l->fd = -1;
        }
        return;
    }
    pthread_mutex_lock(&h->lock);
    line *l = find(h, name);
    if (l) {
        uint32_t slot = (uint32_t)name;
        if (l->is_told)
            take_out_of_news(h, slot);
        shut(h, l);
        forget(l->seals);
        *l = (line){ .fd = -1, .generation = l->generation + 1, .next = h->free };
        h->free = slot;
    }
    pthread_mutex_unlock(&h->lock);
}

int heartbeats_excuse(heartbeats *h, uint64_t name, int64_t ago_ns)
{
    bool counts = false;
    if (is_a_child(h))
        return 0;
    pthread_mutex_lock(&h->lock);
    line *l = find(h, name);
    if (l && l->fd >= 0) {
        int64_t heard = most_excused(l, now_of(h) - ago_ns);
        counts = !l->seals || now_of(h) - heard < l->silence_ns;
        if (counts) {
            count_from(h, l, heard);
            l->is_silent = false;
        }
        wake(h, now_of(h));
    }
    pthread_mutex_unlock(&h->lock);
    return counts;
}

/* Locked. Leaves the line in the list if there is more of it. */
static bool says(heartbeats *h, line *l, heartbeats_news *out)
{
    *out = (heartbeats_news){ .line = name_of(h, (uint32_t)(l - h->lines)) };
    if (l->is_silent)
        listen_to(h, l, now_of(h));       /* its byte may have come while the owner had no time */
    if (l->tells_begun) {
        l->tells_begun = false;
        out->kind = HEARTBEATS_BEGUN;
        return true;
    }
    take_out_of_news(h, (uint32_t)out->line);
    if (l->tells_end) {
        l->tells_end = false;
        out->kind = l->end;
        out->code = l->code;
    } else if (l->is_silent) {
        out->kind = HEARTBEATS_SILENT;
        out->silent_ns = now_of(h) - l->heard_ns;
    }
    return out->kind != 0;
}

int heartbeats_reap(heartbeats *h, heartbeats_news *out)
{
    if (is_a_child(h))
        return 0;
    pthread_mutex_lock(&h->lock);
    bool found = false;
    quieten(h->news);
    while (!found && h->first_news != NO_SLOT)
        found = says(h, &h->lines[h->first_news], out);
    if (h->first_news != NO_SLOT)
        ring_bell(h->news);
    pthread_mutex_unlock(&h->lock);
    return found;
}

int heartbeats_fd(const heartbeats *h)
{
    return h->news;
}

int64_t heartbeats_turn(heartbeats *h, int64_t now_ns)
{
    pthread_mutex_lock(&h->lock);
    int64_t due = turn(h, now_ns);
    pthread_mutex_unlock(&h->lock);
    return due;
}

void heartbeats_close(heartbeats *h)
{
    if (h->has_thread && !is_a_child(h)) {
        pthread_mutex_lock(&h->lock);
        h->closing = true;
        pthread_mutex_unlock(&h->lock);
        ring_bell(h->wake);
        pthread_join(h->thread, NULL);
    }
    for (uint32_t slot = 0; slot < h->count; slot++) {
        if (h->lines[slot].fd >= 0)
            close(h->lines[slot].fd);
        forget(h->lines[slot].seals);
    }
    int own[] = { h->epoll, h->wake, h->news };
    for (int i = 0; i < 3; i++)
        if (own[i] >= 0)
            close(own[i]);
    if (!is_a_child(h))
        pthread_mutex_destroy(&h->lock);
    free(h->lines);
    free(h);
}
