/* connection.c: the frames of one connection. The lock is held during one system call at a time. */
#include "net_internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static const char zeros[SCRATCH];

bool broken(net_reason *why, int kind, int code, const char *words, ...)
{
    va_list arguments;
    why->kind = kind;
    why->code = code;
    va_start(arguments, words);
    vsnprintf(why->message, sizeof why->message, words, arguments);
    va_end(arguments);
    return false;
}

static bool against_rules(net_reason *why, const char *words)
{
    return broken(why, NET_PROTOCOL, 0, "the peer sent %s", words);
}

void connection_take(connection *k)
{
    atomic_fetch_add(&k->wanted, 1);
    pthread_mutex_lock(&k->lock);
    atomic_fetch_sub(&k->wanted, 1);
}

void connection_give(connection *k)
{
    pthread_mutex_unlock(&k->lock);
}

/* ---- the payload of a part ---- */

static uint64_t payload_left(const part *p)
{
    return p->bytes - p->moved;
}

/* At most `most` bytes of what is left of the payload, at most `room` pieces. `instead`: a page for a part whose memory must not be
 * touched. Returns the number of pieces, and the bytes in *total. */
static uint32_t payload_pieces(const part *p, struct iovec *out, uint32_t room, uint64_t most, void *instead, uint64_t *total)
{
    uint32_t n = 0;
    uint64_t left = payload_left(p) < most ? payload_left(p) : most;
    *total = left;
    for (uint32_t i = p->at; left && n < room; i++) {
        struct iovec piece = p->spoilt ? (struct iovec){instead, SCRATCH} : p->blocks[i];
        if (piece.iov_len > left)
            piece.iov_len = left;
        left -= piece.iov_len;
        out[n++] = piece;
    }
    *total -= left;
    return n;
}

/* The memory of the part is no longer touched: bytes that arrive are discarded, and zeros are sent. */
void part_spoil(part *p)
{
    p->spoilt = true;
    p->fault = EFAULT;
    p->refused = 0;
}

static void payload_moved(part *p, uint64_t bytes)
{
    p->moved += bytes;
    while (!p->spoilt && bytes) {
        struct iovec *piece = &p->blocks[p->at];
        uint64_t of_this = bytes < piece->iov_len ? bytes : piece->iov_len;
        piece->iov_base = (char *)piece->iov_base + of_this;
        piece->iov_len -= of_this;
        bytes -= of_this;
        p->at += !piece->iov_len;
    }
}

/* The kernel moves plain bytes, and tells of memory that is not there. Sealed ones are read and written by this process, which would end
 * with a signal. So the kernel is asked for the first byte of each block before the part begins: 4 us for 16 blocks. That each byte
 * went through the kernel would take a third more processor time. */
bool connection_reaches(const connection *k, const part *p)
{
    char bytes[NET_MOST_RANGES];
    struct iovec here = {bytes, p->ranges}, there[NET_MOST_RANGES];
    if (!k->sealer)
        return true;
    for (uint32_t i = 0; i < p->ranges; i++)
        there[i] = (struct iovec){p->blocks[i].iov_base, 1};
    ssize_t got = process_vm_readv(getpid(), &here, 1, there, p->ranges, 0);
    return got < 0 ? errno != EFAULT : got == p->ranges;       /* a system that forbids the call has no such check */
}

/* ---- sending ---- */

void connection_queue(connection *k, part *p)
{
    p->state = PART_QUEUED;
    p->head_sent = 0;
    p->next = NULL;
    *k->out_end = p;
    k->out_end = &p->next;
}

bool connection_unqueue(connection *k, part *p)
{
    if (p->state != PART_QUEUED || p->head_sent)
        return false;
    part **at = &k->out;
    while (*at != p)
        at = &(*at)->next;
    if (!(*at = p->next))
        k->out_end = at;
    return true;
}

static bool is_own(const connection *k, const part *p)
{
    return p >= k->own && p < k->own + OWN_PARTS;
}

/* The first part of the queue was sent. */
static void on_sent(connection *k)
{
    part *p = k->out;
    if (!(k->out = p->next))
        k->out_end = &k->out;
    p->state = is_own(k, p) ? PART_AWAITED : PART_FREE;
    if (!is_own(k, p))
        *(p->head.op == NET_OP_ENDED && p->head.status ? &k->counts.refused : &k->counts.served) += 1;
}

/* As much of the queue as one call may send; alone: of its first part. */
static uint32_t gather(const connection *k, struct iovec *iov, uint32_t room, uint64_t most, bool alone, uint64_t *total)
{
    uint32_t n = 0;
    *total = 0;
    for (const part *p = k->out; p && n + 2 <= room && *total < most; p = alone ? NULL : p->next) {
        uint64_t bytes = 0, before = *total;
        if (p->head_sent < p->head_bytes)
            iov[n++] = (struct iovec){(char *)&p->head + p->head_sent, p->head_bytes - p->head_sent};
        *total += p->head_bytes - p->head_sent;
        if (p->has_payload) {
            n += payload_pieces(p, &iov[n], room - n, most > before ? most - before : 0, (void *)zeros, &bytes);
            *total += bytes;
            if (bytes < payload_left(p))
                break;
        }
    }
    return n;
}

static void sent(connection *k, uint64_t bytes)
{
    while (k->out) {
        part *p = k->out;
        uint32_t head = p->head_bytes - p->head_sent;
        head = bytes < head ? (uint32_t)bytes : head;
        p->head_sent += head;
        bytes -= head;
        if (p->has_payload && bytes) {
            uint64_t payload = payload_left(p) < bytes ? payload_left(p) : bytes;
            payload_moved(p, payload);
            k->counts.sent += payload;
            bytes -= payload;
        }
        if (p->head_sent < p->head_bytes || (p->has_payload && payload_left(p)))
            return;
        on_sent(k);
    }
}

static bool cannot_be_read(net_reason *why)
{
    return broken(why, NET_FAILED, EFAULT, "memory that was lent to the peer cannot be read");
}

/* The memory of the first part cannot be read. The frame must be completed; then the peer knows that its destination is spoilt. Of a
 * part of the peer nothing tells it so. */
static bool on_unreadable(connection *k, net_reason *why)
{
    part *p = k->out;
    if (!is_own(k, p))
        return cannot_be_read(why);
    part_spoil(p);
    return true;
}

static ssize_t transmit(connection *k, struct iovec *iov, uint32_t count)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t got;
    if (k->sealer)
        return records_send(k->sealer, k->fd, iov, count);
    while ((got = sendmsg(k->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    return got;
}

/* Bytes of one call. Sealing takes three times as long as sending, and the lock is held meanwhile. */
static uint64_t most_at_once(const connection *k)
{
    return k->sealer ? NET_MOST_BYTES / 4 : NET_MOST_BYTES;
}

/* Returns false if the connection broke. *bytes: 0 if the socket has no room. */
static bool send_some(connection *k, uint64_t most, uint64_t *bytes, bool *is_full, net_reason *why)
{
    enum { PIECES = 2 * NET_MOST_RANGES };
    struct iovec iov[PIECES];
    uint64_t total;
    bool alone = false;
    ssize_t got;
    do {
        got = transmit(k, iov, gather(k, iov, PIECES, most < most_at_once(k) ? most : most_at_once(k), alone, &total));
        alone = !alone;
    } while (got < 0 && errno == EFAULT && alone);        /* once more: memory of a later part may be what cannot be read */
    *bytes = got > 0 ? (uint64_t)got : 0;
    *is_full = *bytes < total || records_wait(k->sealer);
    if (got < 0 && errno == EFAULT) {
        *is_full = false;
        return on_unreadable(k, why);
    }
    if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        return broken(why, NET_ENDED, errno, "sending on a data connection failed");
    k->bytes_out += *bytes;
    sent(k, *bytes);
    return true;
}

static bool has_to_send(const connection *k)
{
    return k->out || records_wait(k->sealer);
}

static void note_interest(connection *k)
{
    bool out = has_to_send(k);
    if (out != k->wants_out)
        io_interest(k, k->wants_out = out);
}

bool connection_push(connection *k, uint64_t most, net_reason *why)
{
    uint64_t bytes;
    bool is_full, fine = true;
    connection_take(k);
    if (k->fd >= 0 && k->out && !k->wants_out) {
        fine = send_some(k, most, &bytes, &is_full, why);
        note_interest(k);
    }
    connection_give(k);
    return fine;
}

/* ---- what arrives ---- */

static void answer(connection *k, part *p, uint8_t op, uint8_t status)
{
    p->head = (net_frame){.op = op, .status = status, .part = p->number, .bytes = op == NET_OP_DATA ? p->bytes : 0,
                          .offset = status == NET_NOT_LENT ? p->refused : 0};
    p->head_bytes = sizeof p->head;
    p->has_payload = op == NET_OP_DATA;
    connection_queue(k, p);
}

static void own_ended(connection *k, part *p, uint8_t status, uint64_t refused)
{
    p->state = PART_ENDED;
    p->status = status;
    p->refused = refused;
    k->has_ended = true;
}

static void expect_head(connection *k)
{
    k->stage = AT_HEAD;
    k->got = 0;
    k->into = NULL;
}

static bool on_payload_end(connection *k)
{
    part *p = k->into;
    expect_head(k);
    if (is_own(k, p))
        own_ended(k, p, NET_DONE, 0);
    else
        answer(k, p, NET_OP_ENDED, p->spoilt ? NET_NOT_LENT : NET_DONE);
    return true;
}

static bool on_request_head(connection *k, net_reason *why)
{
    const net_frame *f = &k->in;
    part *p = k->peer;
    if (f->status || f->offset)
        return against_rules(why, "a request with the fields of an answer");
    if (!f->ranges || f->ranges > NET_MOST_RANGES)
        return against_rules(why, "a request whose number of ranges is outside 1 to 256");
    if (!f->bytes || f->bytes > NET_MOST_BYTES)
        return against_rules(why, "a request whose number of bytes is outside 1 to 1048576");
    if (f->part <= k->last_number)
        return against_rules(why, "a part number that is not above the one before");
    while (p < k->peer + NET_PEER_PARTS && p->state != PART_FREE)
        p++;
    if (p == k->peer + NET_PEER_PARTS)
        return against_rules(why, "more than 16 requests at a time");
    k->last_number = p->number = f->part;
    p->op = f->op;
    p->state = PART_ARRIVING;
    p->bytes = f->bytes;
    p->ranges = f->ranges;
    p->moved = p->refused = 0;
    p->at = 0;
    p->spoilt = false;
    k->stage = AT_RANGES;
    k->got = 0;
    k->into = p;
    return true;
}

static bool on_answer_head(connection *k, net_reason *why)
{
    const net_frame *f = &k->in;
    part *p = k->own;
    bool is_data = f->op == NET_OP_DATA;
    while (p < k->own + OWN_PARTS && (p->number != f->part || p->state != PART_AWAITED))
        p++;
    if (p == k->own + OWN_PARTS)
        return against_rules(why, "an answer to nothing");
    if (f->ranges || (is_data && (f->status || f->offset)) || (!is_data && f->bytes))
        return against_rules(why, "an answer with the fields of a request");
    if (is_data ? p->op != NET_OP_READ || f->bytes != p->bytes : p->op == NET_OP_READ && f->status == NET_DONE)
        return against_rules(why, "an answer of another kind or length");
    if (f->status >= NET_STATUSES || f->offset >= p->ranges || (f->offset && f->status != NET_NOT_LENT))
        return against_rules(why, "an answer that says nothing known");
    if (!is_data) {
        expect_head(k);
        own_ended(k, p, f->status, f->offset);
        return true;
    }
    k->stage = AT_PAYLOAD;
    k->into = p;
    return true;
}

static bool on_head(connection *k, net_reason *why)
{
    if (k->in.zero)
        return against_rules(why, "a frame whose zero is not 0");
    if (k->in.op == NET_OP_READ || k->in.op == NET_OP_WRITE)
        return on_request_head(k, why);
    if (k->in.op == NET_OP_DATA || k->in.op == NET_OP_ENDED)
        return on_answer_head(k, why);
    return against_rules(why, "an unknown frame");
}

/* The position of the first range that is not lent, or the number of ranges. */
static uint32_t first_not_lent(connection *k, const part *p)
{
    uint32_t i = 0;
    int mode = p->op == NET_OP_READ ? NET_READ : NET_WRITE;
    while (i < p->ranges && lent_covers(&k->channel->lent, p->wanted[i].address, p->wanted[i].bytes, mode))
        i++;
    return i;
}

static bool on_ranges(connection *k, net_reason *why)
{
    part *p = k->into;
    uint64_t total = 0;
    for (uint32_t i = 0; i < p->ranges; i++) {
        uint64_t bytes = p->wanted[i].bytes;
        if (!bytes || bytes > NET_MOST_BYTES)
            return against_rules(why, "a range whose number of bytes is outside 1 to 1048576");
        total += bytes;                   /* cannot overflow: 256 x 1 MiB at most */
        p->blocks[i] = (struct iovec){(void *)p->wanted[i].address, bytes};
    }
    if (total != p->bytes)
        return against_rules(why, "ranges that do not add up");
    p->refused = first_not_lent(k, p);
    p->spoilt = p->refused < p->ranges;
    k->stage = AT_PAYLOAD;
    if (!p->spoilt && !connection_reaches(k, p)) {
        if (p->op == NET_OP_READ)
            return cannot_be_read(why);
        part_spoil(p);
    }
    if (p->op == NET_OP_WRITE)
        return true;
    expect_head(k);
    answer(k, p, p->spoilt ? NET_OP_ENDED : NET_OP_DATA, p->spoilt ? NET_NOT_LENT : NET_DONE);
    return true;
}

/* Sorts `bytes` that arrived into what is expected: the ranges or the payload first, then the next head. */
static bool arrived(connection *k, uint64_t bytes, net_reason *why)
{
    bool fine = true;
    if (k->stage == AT_RANGES) {
        uint64_t left = k->into->ranges * sizeof(net_range) - k->got, now = bytes < left ? bytes : left;
        k->got += (uint32_t)now;
        bytes -= now;
        if (now == left)
            fine = on_ranges(k, why);
    } else if (k->stage == AT_PAYLOAD) {
        uint64_t left = payload_left(k->into), now = bytes < left ? bytes : left;
        payload_moved(k->into, now);
        k->counts.received += now;
        bytes -= now;
        if (now == left)
            fine = on_payload_end(k);
    }
    if (fine && k->stage == AT_HEAD) {
        k->got += (uint32_t)bytes;
        if (k->got == sizeof k->in)
            fine = on_head(k, why);
    }
    return fine;
}

/* What is expected next, and behind it the head of the next frame if nothing else can be there. */
static uint32_t expected(connection *k, struct iovec *iov, char *scratch, uint64_t *total)
{
    uint32_t n = 0;
    *total = 0;
    if (k->stage == AT_HEAD) {
        *total = sizeof k->in - k->got;
        iov[n++] = (struct iovec){(char *)&k->in + k->got, *total};
        return n;
    }
    bool is_last = true;
    if (k->stage == AT_RANGES) {
        *total = k->into->ranges * sizeof(net_range) - k->got;
        iov[n++] = (struct iovec){(char *)k->into->wanted + k->got, *total};
        is_last = k->into->op == NET_OP_READ;
    } else {
        n = payload_pieces(k->into, iov, NET_MOST_RANGES, most_at_once(k), scratch, total);
        is_last = *total == payload_left(k->into);
    }
    if (is_last) {
        iov[n++] = (struct iovec){&k->in, sizeof k->in};
        *total += sizeof k->in;
    }
    return n;
}

static ssize_t take_in(connection *k, struct iovec *iov, uint32_t count, bool only_left)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t got;
    if (k->opener)
        return records_receive(k->opener, k->fd, iov, count, only_left);
    while ((got = recvmsg(k->fd, &message, MSG_DONTWAIT)) < 0 && errno == EINTR)
        ;
    return got;
}

/* *is_empty: the socket has nothing more. */
static bool receive_some(connection *k, char *scratch, bool only_left, uint64_t *bytes, bool *is_empty, net_reason *why)
{
    struct iovec iov[NET_MOST_RANGES + 1];
    uint64_t total;
    ssize_t got = take_in(k, iov, expected(k, iov, scratch, &total), only_left);
    *bytes = got > 0 ? (uint64_t)got : 0;
    *is_empty = *bytes < total;
    if (got == 0)
        return broken(why, NET_ENDED, 0, "the peer closed a data connection");
    if (got < 0 && errno == EFAULT && k->stage == AT_PAYLOAD && !k->into->spoilt) {
        part_spoil(k->into);
        *is_empty = false;
        return true;
    }
    if (got < 0 && errno == EBADMSG)
        return broken(why, NET_PROTOCOL, 0, "what came over a data connection has a wrong seal: it was changed or added on its way");
    if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        return broken(why, NET_ENDED, errno, "receiving on a data connection failed");
    k->bytes_in += *bytes;
    return arrived(k, *bytes, why);
}

/* ---- turns ---- */

bool connection_serve(connection *k, uint32_t events, char *scratch, net_reason *why)
{
    enum { CALLS = 32 };
    uint64_t moved = 0, bytes;
    bool in = events & ~(uint32_t)EPOLLOUT, out = true, fine = true, has_left = false, is_full, is_empty;
    bool is_over = false;
    /* No event tells of bytes that were opened and not handed out, so they are handed out when the turn is over, too. */
    for (int calls = 0; fine && (in || out) && (has_left || !is_over); calls++) {
        pthread_mutex_lock(&k->lock);
        if (k->fd < 0)
            in = out = false;
        if (in) {
            fine = receive_some(k, scratch, is_over, &bytes, &is_empty, why);
            in = !is_empty;
            moved += bytes;
        }
        if (fine && k->fd >= 0 && has_to_send(k) && out && !is_over) {
            fine = send_some(k, NET_MOST_BYTES, &bytes, &is_full, why);
            out = !is_full;
            moved += bytes;
        }
        out &= has_to_send(k) || in;
        has_left = in && records_left(k->opener);
        is_over = calls + 1 >= CALLS || moved >= NET_MOST_BYTES;
        bool settle = k->has_ended;
        connection_give(k);
        if (fine && (settle || atomic_load(&k->wanted)))
            channel_settle(k);            /* a thread that waits for this lock may hold the channel's: settling gives it its turn */
    }
    pthread_mutex_lock(&k->lock);
    if (fine && k->fd >= 0)
        note_interest(k);
    connection_give(k);
    return fine;
}

bool connection_take_back(connection *k)
{
    bool fine = true;
    for (part *p = k->peer; p < k->peer + NET_PEER_PARTS; p++) {
        bool moves = p->state == PART_QUEUED ? p->has_payload : p->state == PART_ARRIVING && k->into == p && k->stage == AT_PAYLOAD;
        if (!moves || p->spoilt || (p->refused = first_not_lent(k, p)) == p->ranges)
            continue;
        if (p->state == PART_QUEUED && connection_unqueue(k, p))
            answer(k, p, NET_OP_ENDED, NET_NOT_LENT);
        else
            fine = false;
    }
    return fine;
}

/* What was sent has moved once the peer's kernel has it. */
void connection_look(connection *k, int64_t now)
{
    int queued = 0;
    (void)!ioctl(k->fd, SIOCOUTQ, &queued);
    uint64_t waiting = (uint64_t)queued + records_wait(k->sealer);
    if (k->bytes_in != k->seen.in || k->bytes_out != k->seen.out || waiting < k->seen.waiting)
        k->moved_ns = now;
    k->seen.in = k->bytes_in;
    k->seen.out = k->bytes_out;
    k->seen.waiting = waiting;
}

void connection_shut(connection *k)
{
    if (k->fd < 0)
        return;
    io_drop(k);
    close(k->fd);
    k->fd = -1;
    k->out = NULL;
    k->out_end = &k->out;
    for (part *p = k->peer; p < k->peer + NET_PEER_PARTS; p++)
        p->state = PART_FREE;
}
