/* queue.c: whose part goes next, and what the end of a part means for its program. The channel's lock is held throughout. */
#include "net_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

/* Bytes that pass for each byte of what waits, as in turns.c; bytes of a program before others of its priority have their turn. */
enum { PASSING = 8, MOST_TURNS = 2, TURN = 4 << 20 };

int64_t ring_now_ns(void);
int64_t ring_after_ns(int64_t ms);

static uint64_t min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static net_program *first_of(const net_channel *c, int priority)
{
    const node *queue = &c->queue[priority];
    return node_is_alone(queue) ? NULL : OWNER(queue->next, net_program, turn);
}

static void look_by(net_channel *c, int64_t ns)
{
    if (ns < atomic_load(&c->due_ns))
        atomic_store(&c->due_ns, ns);
}

/* ---- in the queue, and out of it ---- */

static bool moves_on(net_program *p)
{
    while (p->step < p->count && !has_range(&p->steps[p->step].grid, &p->at)) {
        p->step++;
        p->at = (cursor){0};
    }
    return p->step < p->count;
}

/* Its time limit begins. */
static void begin(net_program *p, int64_t now)
{
    if (p->deadline_ns)
        return;
    p->done.started_ns = now;
    p->deadline_ns = ring_after_ns(p->timeout_ms);
    look_by(p->ring->channel, p->deadline_ns);
}

static bool stands(const net_program *p)
{
    return p->fault && p->cut >= fault_stands_at(p);
}

static void enter(net_program *p)
{
    net_channel *c = p->ring->channel;
    p->state = PROGRAM_QUEUED;
    p->in_turn = 0;
    node_insert(stands(p) ? &c->standing : &c->queue[p->priority], &p->turn);
    if (stands(p)) {
        begin(p, ring_now_ns());
        if (p->in_a_row == p->cut)
            fault_arrived(p);
    }
}

/* Of the programs that stand, those whose hold was released. */
static void let_go_on(net_channel *c)
{
    for (node *n = c->standing.next, *next; n != &c->standing; n = next) {
        net_program *p = OWNER(n, net_program, turn);
        next = n->next;
        if (stands(p))
            continue;
        node_remove(n);
        enter(p);
    }
}

void program_enqueue(net_program *p)
{
    net_ring *r = p->ring;
    moves_on(p);                          /* its first step may be empty, and of another operation */
    if (!r->is_ordered || !r->cutting[p->priority]) {
        r->cutting[p->priority] = p;
        enter(p);
    } else {
        p->state = PROGRAM_BEHIND;
        node_insert(&r->behind[p->priority], &p->turn);
    }
}

/* Nothing more of it will be cut. In an ordered ring, that lets the next one be cut. */
static void leave(net_program *p)
{
    net_ring *r = p->ring;
    node *behind = &r->behind[p->priority];
    node_remove(&p->turn);
    p->state = PROGRAM_CUT;
    if (r->cutting[p->priority] != p)
        return;
    r->cutting[p->priority] = NULL;
    if (!node_is_alone(behind)) {
        net_program *next = OWNER(behind->next, net_program, turn);
        node_remove(&next->turn);
        r->cutting[p->priority] = next;
        enter(next);
    }
}

static void finish(net_program *p, int64_t now)
{
    if (p->aside_since_ns)
        p->done.aside_ns += now - p->aside_since_ns;
    p->aside_since_ns = 0;
    p->state = PROGRAM_ENDED;
    p->done.finished_ns = now;
    p->done.started_ns = p->done.started_ns ? p->done.started_ns : now;
    p->done.step = p->done.state == RING_DONE || p->step == p->count ? p->count : p->step + 1;
    fault_drop(p->fault);
    p->fault = NULL;
    ring_file(p);
}

/* ---- priorities ---- */

/* The time limits of programs that are passed stand still. */
static void stand_aside(net_channel *c, int priority, int64_t now)
{
    for (node *n = c->queue[priority].next; n != &c->queue[priority]; n = n->next) {
        net_program *p = OWNER(n, net_program, turn);
        if (p->deadline_ns && !p->aside_since_ns)
            p->aside_since_ns = now;
    }
    c->is_aside[priority] = true;
}

static void come_back(net_channel *c, int priority, int64_t now)
{
    for (node *n = c->queue[priority].next; n != &c->queue[priority]; n = n->next) {
        net_program *p = OWNER(n, net_program, turn);
        if (!p->aside_since_ns)
            continue;
        p->deadline_ns += now - p->aside_since_ns;
        p->done.aside_ns += now - p->aside_since_ns;
        p->aside_since_ns = 0;
        look_by(c, p->deadline_ns);
    }
    c->is_aside[priority] = false;
}

static bool is_most_urgent(const net_channel *c, const net_program *p)
{
    int priority = 0;
    while (!first_of(c, priority))
        priority++;
    return priority == p->priority;
}

/* The most urgent program; or a less urgent one whose turn it is. */
static net_program *pick(const net_channel *c)
{
    net_program *urgent = NULL;
    for (int priority = 0; priority < RING_PRIORITIES; priority++) {
        net_program *p = first_of(c, priority);
        if (p && urgent && c->passed[priority] >= PASSING * min(NET_MOST_BYTES, p->total - p->cut))
            return p;
        urgent = urgent ? urgent : p;
    }
    return urgent;
}

static void count_share(net_channel *c, int priority, uint64_t bytes, int64_t now)
{
    uint64_t *mine = &c->passed[priority];
    *mine -= min(*mine, PASSING * bytes);
    if (c->is_aside[priority])
        come_back(c, priority, now);
    for (int less = priority + 1; less < RING_PRIORITIES; less++) {
        if (!first_of(c, less)) {
            c->passed[less] = 0;
            continue;
        }
        c->passed[less] = min(c->passed[less] + bytes, (uint64_t)MOST_TURNS * PASSING * NET_MOST_BYTES);
        if (!c->is_aside[less])
            stand_aside(c, less, now);
    }
}

/* ---- cutting ---- */

/* The connection with room and the fewest bytes under way. Critical programs have a slot that others leave free. */
static connection *with_room(const net_channel *c, const net_program *p)
{
    bool is_put = p->steps[p->step].op == RING_PUT, is_critical = p->priority == RING_CRITICAL;
    uint32_t most = is_critical ? OWN_PARTS : OWN_PARTS - 1, most_puts = is_critical ? OWN_PUTS + 1 : OWN_PUTS;
    connection *found = NULL;
    for (uint32_t i = 0; i < c->connections_count; i++) {
        connection *k = c->connections[i];
        if (k->own_parts < most && (!is_put || k->own_puts < most_puts) && (!found || k->outstanding < found->outstanding))
            found = k;
    }
    return found;
}

/* As many ranges as a part may have. A part is of one operation. */
static void fill(net_program *p, part *q)
{
    int op = p->steps[p->step].op;
    q->ranges = 0;
    q->bytes = 0;
    while (q->ranges < NET_MOST_RANGES && q->bytes < NET_MOST_BYTES && moves_on(p) && p->steps[p->step].op == op) {
        uint64_t position = p->cut + q->bytes, most = NET_MOST_BYTES - q->bytes;
        if (p->fault && !(most = fault_most(p, position, most)))
            break;
        HcclOneSideOpDesc r = next_range(&p->steps[p->step].grid, &p->at, most);
        q->blocks[q->ranges] = (struct iovec){r.localAddr, r.count};
        if (p->fault)
            fault_change(p, position, &q->blocks[q->ranges]);
        q->wanted[q->ranges++] = (net_range){(uint64_t)r.remoteAddr, r.count};
        q->bytes += r.count;
    }
    moves_on(p);
}

static uint64_t cut_part(net_program *p, connection *k, int64_t now)
{
    part *q = k->own;
    connection_take(k);
    while (q->state != PART_FREE)
        q++;
    q->op = p->steps[p->step].op == RING_PUT ? NET_OP_WRITE : NET_OP_READ;
    fill(p, q);
    q->number = ++k->next_number;
    q->moved = 0;
    q->since_ns = 0;
    q->at = 0;
    q->fault = 0;
    q->spoilt = false;
    q->has_payload = q->op == NET_OP_WRITE;
    if (!connection_reaches(k, q))
        part_spoil(q);
    q->head = (net_frame){.op = q->op, .ranges = q->ranges, .part = q->number, .bytes = q->bytes};
    q->head_bytes = (uint32_t)(sizeof q->head + q->ranges * sizeof(net_range));
    q->program = p;
    q->sequence = p->next_sequence++;
    uint64_t bytes = q->bytes;
    p->cut += bytes;
    p->done.ranges += q->ranges;
    connection_queue(k, q);
    connection_give(k);
    k->own_parts++;
    k->own_puts += q->op == NET_OP_WRITE;
    k->outstanding += bytes;
    p->ends[q->sequence % PARTS_IN_A_ROW] = p->cut;
    p->landed_parts[q->sequence % PARTS_IN_A_ROW] = false;
    p->parts++;
    begin(p, now);
    return bytes;
}

uint32_t queue_cut(net_channel *c, uint32_t most)
{
    uint32_t touched = 0;
    int64_t now = ring_now_ns();
    net_program *p;
    while (most-- && (p = pick(c))) {
        connection *k = with_room(c, p);
        if (!k || p->next_sequence - p->first_sequence >= PARTS_IN_A_ROW) {
            if (c->is_aside[p->priority] && is_most_urgent(c, p))
                come_back(c, p->priority, now);       /* it waits for room, not for urgent programs */
            break;
        }
        uint64_t bytes = cut_part(p, k, now);
        touched |= 1u << k->index;
        count_share(c, p->priority, bytes, now);
        p->in_turn += bytes;
        if (p->cut == p->total) {
            leave(p);
        } else if (p->in_turn >= TURN || stands(p)) {
            node_remove(&p->turn);
            enter(p);
        }
    }
    return touched;
}

/* ---- what has landed ---- */

static void note_layers(net_program *p, int64_t now)
{
    if (!p->layers || p->in_a_row < p->before_layers)
        return;
    uint64_t landed = p->layer_bytes ? (p->in_a_row - p->before_layers) / p->layer_bytes : p->layer_count;
    landed = landed >= p->layer_count ? p->layer_count : landed - landed % p->layers->group;
    if (landed <= p->landed)
        return;
    for (uint32_t i = p->landed; p->layers->landed_ns && i < landed; i++)
        p->layers->landed_ns[i] = now;
    p->landed = (uint32_t)landed;
    p->deadline_ns = p->is_stopping ? p->deadline_ns : ring_after_ns(p->timeout_ms);
    if (p->watched) {
        uint64_t one = 1;
        (void)!write(p->ring->fd, &one, sizeof one);
    }
}

static void land(net_program *p, const part *q, int64_t now)
{
    p->done.bytes += q->bytes;
    p->landed_parts[q->sequence % PARTS_IN_A_ROW] = true;
    while (p->first_sequence < p->next_sequence && p->landed_parts[p->first_sequence % PARTS_IN_A_ROW])
        p->in_a_row = p->ends[p->first_sequence++ % PARTS_IN_A_ROW];
    if (p->fault)
        fault_landed(p);
    note_layers(p, now);
}

static void set_free(connection *k, part *q)
{
    k->own_parts--;
    k->own_puts -= q->op == NET_OP_WRITE;
    k->outstanding -= q->bytes;
    q->state = PART_FREE;
    q->program = NULL;
}

/* Says in the program's completion why a part did not land. */
static void explain(const part *q, char *words, size_t size)
{
    const net_range *r = &q->wanted[q->refused];
    if (q->fault)
        snprintf(words, size, "memory of this end could not be %s%s", q->op == NET_OP_READ ? "written" : "read",
                 q->op == NET_OP_READ ? "" : "; the destination is spoilt");
    else if (q->status == NET_NOT_LENT)
        snprintf(words, size, "the peer does not lend %" PRIu64 " bytes at 0x%" PRIx64 " for %s", r->bytes, r->address,
                 q->op == NET_OP_READ ? "reading" : "writing");
    else
        snprintf(words, size, "the peer %s", q->status == NET_CLOSING ? "is closing the link" : "stopped the transfer");
}

/* Locked connection. The part has ended at the peer; its slot is free afterwards. */
static void take_end(connection *k, part *q, int64_t now)
{
    net_program *p = q->program;
    bool is_good = q->status == NET_DONE && !q->fault;
    if (p) {
        p->parts--;
        if (is_good)
            land(p, q, now);
        else if (p->done.state == RING_DONE) {     /* program_stop() waits until the connection is unlocked */
            p->done.state = RING_FAILED;
            p->done.origin = RING_ACL;
            p->done.code = ACL_ERROR_RT_PARAM_INVALID;
            explain(q, p->done.message, sizeof p->done.message);
        }
    }
    set_free(k, q);
}

void queue_harvest(connection *k)
{
    net_program *ended[OWN_PARTS];
    uint32_t n = 0;
    int64_t now = ring_now_ns();
    connection_take(k);
    k->has_ended = false;
    for (part *q = k->own; q < k->own + OWN_PARTS; q++)
        if (q->state == PART_ENDED) {
            net_program *p = q->program;
            take_end(k, q, now);
            for (uint32_t i = 0; p && i < n; i++)
                p = ended[i] == p ? NULL : p;
            if (p)
                ended[n++] = p;
        }
    connection_give(k);
    for (uint32_t i = 0; i < n; i++) {
        net_program *p = ended[i];
        if (p->done.state != RING_DONE && !p->is_stopping)
            program_stop(p, p->done.state, p->done.code, NULL, now);
        else if (!p->parts && p->state == PROGRAM_CUT)
            finish(p, now);
    }
}

/* ---- stopping ---- */

/* Locked connection. Takes back what was not sent; leaves a pull without its blocks; what is pushed is waited for. */
static void stop_part(connection *k, part *q, int32_t state, int64_t now)
{
    net_program *p = q->program;
    if (q->state == PART_ENDED) {
        take_end(k, q, now);
    } else if (connection_unqueue(k, q)) {
        p->parts--;
        set_free(k, q);
    } else if (q->op == NET_OP_READ) {
        p->parts--;
        p->done.bytes += q->spoilt ? 0 : q->moved;
        q->program = NULL;
        q->spoilt = true;
        int64_t passed_ns = p->aside_since_ns ? now - p->aside_since_ns : 0;
        q->since_ns = state == RING_TIMED_OUT ? now : p->deadline_ns + passed_ns;
        look_by(k->channel, q->since_ns); /* the peer has as long as it would have had for the program */
    } else {
        connection_look(k, now);
        q->since_ns = now;
        look_by(k->channel, now);
    }
}

/* Ends it as soon as nothing of it moves. */
void program_stop(net_program *p, int32_t state, int32_t code, const char *words, int64_t now)
{
    net_channel *c = p->ring->channel;
    if (p->state == PROGRAM_ENDED || p->is_stopping)
        return;
    fault_tell_stop();
    p->done.state = state;
    p->done.origin = code ? RING_ACL : p->done.origin;
    p->done.code = code;
    if (words)
        snprintf(p->done.message, sizeof p->done.message, "%s", words);
    if (p->state != PROGRAM_CUT)
        leave(p);
    for (uint32_t i = 0; i < c->connections_count && p->parts; i++) {
        connection *k = c->connections[i];
        connection_take(k);
        for (part *q = k->own; q < k->own + OWN_PARTS; q++)
            if (q->state != PART_FREE && q->program == p)
                stop_part(k, q, state, now);
        connection_give(k);
    }
    p->is_stopping = true;
    if (!p->parts)
        finish(p, now);
}

/* ---- time ---- */

/* Returns true if it stopped the program, which may move others out of the list. */
static bool look_at(net_program *p, int64_t now)
{
    if (p->state == PROGRAM_ENDED || p->is_stopping || !p->deadline_ns || p->aside_since_ns)
        return false;
    if (now >= p->deadline_ns) {
        program_stop(p, RING_TIMED_OUT, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, NULL, now);
        return true;
    }
    look_by(p->ring->channel, p->deadline_ns);
    return false;
}

/* Locked connection. A stopped part is late when nothing has moved on its connection for the time of the patience. */
static bool is_late(connection *k, const part *q, int64_t now)
{
    enum { LOOKS = 8 };
    int64_t patience_ns = k->channel->options.patience_ms * 1000000;
    if (now < q->since_ns) {
        look_by(k->channel, q->since_ns);
        return false;
    }
    connection_look(k, now);
    int64_t still_since_ns = k->moved_ns > q->since_ns ? k->moved_ns : q->since_ns;
    look_by(k->channel, now + patience_ns / LOOKS);
    return now >= still_since_ns + patience_ns || now >= q->since_ns + NET_MOST_PATIENCE * patience_ns;
}

bool queue_look(net_channel *c, int64_t now, net_reason *why)
{
    bool found = false;
    atomic_store(&c->due_ns, INT64_MAX);
    let_go_on(c);
    for (node *n = c->rings.next; n != &c->rings; n = n->next) {
        net_ring *r = OWNER(n, net_ring, on_channel);
        for (node *m = r->live.next; m != &r->live;)
            m = look_at(OWNER(m, net_program, live), now) ? r->live.next : m->next;
    }
    for (uint32_t i = 0; i < c->connections_count; i++) {
        connection *k = c->connections[i];
        connection_take(k);
        for (part *q = k->own; q < k->own + OWN_PARTS; q++)
            found |= q->state != PART_FREE && q->since_ns && is_late(k, q, now);
        connection_give(k);
    }
    return !found || broken(why, NET_LATE, 0, "the peer did not end a part of a transfer in time");
}
