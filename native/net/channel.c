/* channel.c: the data connections of a link, which live and end together. */
#include "net_internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

int64_t ring_now_ns(void);
void ring_signal(int fd);

static bool is_forked(const net_channel *c)
{
    return c->pid != getpid();
}

int net_channel_open(const net_channel_options *options, net_channel **out)
{
    enum { MOST_THREADS = 16 };
    if (!options || !out || !options->threads || options->threads > MOST_THREADS || options->patience_ms <= 0 ||
        options->patience_ms > INT32_MAX || options->silence_ms < 0 || options->silence_ms > INT32_MAX)
        return -EINVAL;
    net_channel *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->fd < 0) {
        int code = -errno;
        free(c);
        return code;
    }
    c->pid = getpid();
    c->options = *options;
    c->due_ns = INT64_MAX;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->lent.lock, NULL);
    node_clear(&c->rings);
    node_clear(&c->standing);
    for (int priority = 0; priority < RING_PRIORITIES; priority++)
        node_clear(&c->queue[priority]);
    *out = c;
    return 0;
}

/* A socket of another family has none of these, which is fine. */
static int set_up(const net_channel *c, int fd)
{
    int type = 0, on = 1, low = 256 << 10, idle = 30, every = 10, times = 3, silence = (int)c->options.silence_ms;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size))
        return -errno;
    if (type != SOCK_STREAM)
        return -EINVAL;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &low, sizeof low);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    if (silence)
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof silence);
    return 0;
}

static void free_connection(connection *k)
{
    records_free(k->sealer);
    records_free(k->opener);
    pthread_mutex_destroy(&k->lock);
    free(k);
}

static int new_connection(net_channel *c, int fd, const uint8_t *keys, connection **out)
{
    connection *k = calloc(1, sizeof *k);
    if (!k)
        return -ENOMEM;
    k->channel = c;
    k->fd = fd;
    k->index = c->connections_count;
    k->out_end = &k->out;
    pthread_mutex_init(&k->lock, NULL);
    int code = keys ? records_new(keys, true, &k->sealer) : 0;
    if (!code && keys)
        code = records_new(keys + NET_KEY, false, &k->opener);
    if (code)
        free_connection(k);
    else
        *out = k;
    return code;
}

int net_channel_add(net_channel *c, int fd, const uint8_t *keys)
{
    if (is_forked(c))
        return -EPERM;
    int code = set_up(c, fd);
    if (code)
        return code;
    pthread_mutex_lock(&c->lock);
    connection *k = NULL;
    if (c->reason.kind)
        code = -EPIPE;
    else if (c->connections_count == NET_MOST_CONNECTIONS)
        code = -EMFILE;
    else if (!(code = new_connection(c, fd, keys, &k)) && (code = io_join(k, c->options.threads)))
        free_connection(k);
    uint32_t touched = 0;
    if (!code) {
        c->connections[k->index] = k;
        c->connections_count++;           /* last: io_look_at() uses the first one as soon as it counts */
        touched = queue_cut(c, UINT32_MAX);
    }
    pthread_mutex_unlock(&c->lock);
    channel_push(c, touched);
    io_look_at(c);
    return code;
}

/* ---- lending ---- */

int net_lend(net_channel *c, uint64_t address, uint64_t bytes, int modes)
{
    return is_forked(c) ? -EPERM : lent_add(&c->lent, address, bytes, modes);
}

int net_take_back(net_channel *c, uint64_t address, uint64_t bytes, int modes)
{
    int code = is_forked(c) ? -EPERM : lent_remove(&c->lent, address, bytes, modes);
    if (code)
        return code;
    bool fine = true;
    uint32_t touched = 0;
    pthread_mutex_lock(&c->lock);
    for (uint32_t i = 0; i < c->connections_count; i++) {
        connection *k = c->connections[i];
        connection_take(k);
        fine &= k->fd < 0 || connection_take_back(k);
        touched |= k->out ? 1u << i : 0;
        connection_give(k);
    }
    if (!fine) {
        net_reason why;
        broken(&why, NET_TAKEN_BACK, 0, "memory was taken back while the peer used it");
        channel_break_locked(c, &why);
    }
    pthread_mutex_unlock(&c->lock);
    channel_push(c, touched);
    return 0;
}

/* ---- between the connections and the queue ---- */

void channel_push(net_channel *c, uint32_t connections)
{
    enum { MOST = 64 << 10 };
    for (uint32_t i = 0; connections; i++, connections >>= 1) {
        net_reason why;
        if ((connections & 1) && !connection_push(c->connections[i], MOST, &why))
            channel_break(c, &why);
    }
}

void channel_settle(connection *k)
{
    net_channel *c = k->channel;
    pthread_mutex_lock(&c->lock);
    queue_harvest(k);
    uint32_t touched = queue_cut(c, UINT32_MAX);
    pthread_mutex_unlock(&c->lock);
    channel_push(c, touched);
    io_look_at(c);                        /* another thread may keep the time of what has begun */
}

void channel_look(net_channel *c)
{
    net_reason why;
    pthread_mutex_lock(&c->lock);
    if (!queue_look(c, ring_now_ns(), &why))
        channel_break_locked(c, &why);
    uint32_t touched = queue_cut(c, UINT32_MAX);
    pthread_mutex_unlock(&c->lock);
    channel_push(c, touched);
}

/* ---- the end ---- */

/* Bytes of pulls that landed before the end are counted; no part is under way afterwards. */
static void drop_parts(connection *k)
{
    for (part *q = k->own; q < k->own + OWN_PARTS; q++) {
        net_program *p = q->state != PART_FREE ? q->program : NULL;
        if (p) {
            bool has_ended = q->state == PART_ENDED, has_left = q->state == PART_AWAITED || q->head_sent;
            p->parts--;
            if (q->op == NET_OP_READ)
                p->done.bytes += q->spoilt ? 0 : q->moved;
            else
                p->done.bytes += has_ended && !q->status && !q->fault ? q->bytes : 0;
            p->is_unconfirmed |= q->op == NET_OP_WRITE && !has_ended && has_left;
        }
        q->state = PART_FREE;
        q->program = NULL;
    }
    k->own_parts = k->own_puts = 0;
    k->outstanding = 0;
    k->has_ended = false;
}

/* An end may move others out of the list, so begin again after each. */
static net_program *first_live(const net_ring *r)
{
    for (node *n = r->live.next; n != &r->live; n = n->next)
        if (OWNER(n, net_program, live)->state != PROGRAM_ENDED)
            return OWNER(n, net_program, live);
    return NULL;
}

static void end_programs(net_ring *r, const net_reason *why)
{
    for (net_program *p; (p = first_live(r));) {
        bool cancelled = why->kind == NET_CLOSED && !p->is_unconfirmed;      /* what is unconfirmed may still land */
        p->is_stopping = false;           /* what stops it may be the reason for this end */
        program_stop(p, cancelled ? RING_CANCELLED : RING_FAILED, cancelled ? 0 : CODE_LOST, why->message, ring_now_ns());
    }
}

void channel_break_locked(net_channel *c, const net_reason *why)
{
    if (c->reason.kind)
        return;
    c->reason = *why;
    for (uint32_t i = 0; i < c->connections_count; i++) {
        connection *k = c->connections[i];
        connection_take(k);
        connection_shut(k);
        drop_parts(k);
        connection_give(k);
    }
    for (node *n = c->rings.next; n != &c->rings; n = n->next)
        end_programs(OWNER(n, net_ring, on_channel), why);
    if (why->kind != NET_CLOSED)
        ring_signal(c->fd);
}

void channel_break(net_channel *c, const net_reason *why)
{
    pthread_mutex_lock(&c->lock);
    channel_break_locked(c, why);
    pthread_mutex_unlock(&c->lock);
}

int net_channel_why(net_channel *c, net_reason *out)
{
    uint64_t count;
    if (is_forked(c)) {
        *out = (net_reason){.kind = NET_CLOSED};
        return NET_CLOSED;
    }
    pthread_mutex_lock(&c->lock);
    *out = c->reason;
    while (read(c->fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    pthread_mutex_unlock(&c->lock);
    return out->kind;
}

int net_channel_fd(const net_channel *c)
{
    return c->fd;
}

void net_channel_count(net_channel *c, net_counts *out)
{
    *out = (net_counts){0};
    if (is_forked(c))
        return;
    pthread_mutex_lock(&c->lock);
    for (uint32_t i = 0; i < c->connections_count; i++) {
        connection *k = c->connections[i];
        connection_take(k);
        out->connections += k->fd >= 0;
        out->sent += k->counts.sent;
        out->received += k->counts.received;
        out->served += k->counts.served;
        out->refused += k->counts.refused;
        connection_give(k);
    }
    pthread_mutex_unlock(&c->lock);
}

/* The parent's threads and its epoll know the descriptors by what they stand for, so a child closes only its own copies. */
static void close_copies(net_channel *c)
{
    for (uint32_t i = 0; i < c->connections_count; i++) {
        if (c->connections[i]->fd >= 0)
            close(c->connections[i]->fd);
        c->connections[i]->fd = -1;
    }
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

void net_channel_close(net_channel *c)
{
    net_reason why;
    if (is_forked(c)) {
        close_copies(c);
        return;
    }
    broken(&why, NET_CLOSED, 0, "the link was closed");
    channel_break(c, &why);
}

void net_channel_free(net_channel *c)
{
    net_channel_close(c);
    if (is_forked(c))
        return;
    io_leave(c);
    for (uint32_t i = 0; i < c->connections_count; i++)
        free_connection(c->connections[i]);
    pthread_mutex_destroy(&c->lent.lock);
    pthread_mutex_destroy(&c->lock);
    free(c->lent.ranges);
    close(c->fd);
    free(c);
}
