/* faults.c: programs that stand still, fail or damage a byte, for tests. Costs one load for each program while there are none. */
#include "net_internal.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

void ring_signal(int fd);

struct net_fault {
    int kind, op, number;
    int fd;                               /* counts those that stand */
    uint64_t nth, seen;
    int64_t value;
    bool is_used;
    _Atomic bool has_ended;
    uint32_t users;                       /* programs */
};

static struct {
    pthread_mutex_t lock;
    atomic_uint armed;
    int begun;
    net_fault all[NET_MOST_FAULTS];
} faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

int net_fault_begin(int kind, int op, uint64_t nth, int64_t value)
{
    int code = -ENOSPC;
    if (kind < NET_HOLD || kind > NET_FLIP || op < 0 || op > RING_PUT || (op == NET_STOP && kind != NET_HOLD))
        return -EINVAL;
    pthread_mutex_lock(&faults.lock);
    net_fault *f = faults.all;
    while (f < faults.all + NET_MOST_FAULTS && f->is_used)
        f++;
    if (f < faults.all + NET_MOST_FAULTS) {
        *f = (net_fault){.kind = kind, .op = op, .number = faults.begun, .nth = nth, .value = value};
        f->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        f->is_used = f->fd >= 0;
        code = f->is_used ? faults.begun++ : -errno;
        atomic_fetch_add(&faults.armed, f->is_used);
    }
    pthread_mutex_unlock(&faults.lock);
    return code;
}

/* Locked. NULL: it has ended. */
static net_fault *find(int number)
{
    for (net_fault *f = faults.all; f < faults.all + NET_MOST_FAULTS; f++)
        if (f->is_used && !f->has_ended && f->number == number)
            return f;
    return NULL;
}

int net_fault_fd(int number)
{
    pthread_mutex_lock(&faults.lock);
    net_fault *f = find(number);
    int fd = f ? f->fd : -1;
    pthread_mutex_unlock(&faults.lock);
    return fd;
}

static void free_unused(net_fault *f)
{
    if (!f->has_ended || f->users)
        return;
    close(f->fd);
    f->is_used = false;
}

void net_fault_end(int number)
{
    pthread_mutex_lock(&faults.lock);
    net_fault *f = find(number);
    if (f) {
        atomic_store(&f->has_ended, true);
        atomic_fetch_sub(&faults.armed, 1);
        free_unused(f);
    }
    pthread_mutex_unlock(&faults.lock);
    if (f)
        io_look_at_all();
}

net_fault *fault_of(int op)
{
    net_fault *found = NULL;
    if (!atomic_load(&faults.armed))
        return NULL;
    pthread_mutex_lock(&faults.lock);
    for (net_fault *f = faults.all; f < faults.all + NET_MOST_FAULTS; f++) {
        if (!f->is_used || f->has_ended || f->op != op || (++f->seen != f->nth && f->nth) || found)
            continue;
        found = f;
        f->users++;
    }
    pthread_mutex_unlock(&faults.lock);
    return found;
}

void fault_drop(net_fault *f)
{
    if (!f)
        return;
    pthread_mutex_lock(&faults.lock);
    f->users--;
    free_unused(f);
    pthread_mutex_unlock(&faults.lock);
}

void fault_tell_stop(void)
{
    net_fault *f = fault_of(NET_STOP);
    if (f)
        ring_signal(f->fd);
    fault_drop(f);
}

bool fault_is(const net_program *p, int kind)
{
    return p->fault && p->fault->kind == kind;
}

int32_t fault_code(const net_program *p)
{
    return (int32_t)p->fault->value;
}

uint64_t fault_stands_at(const net_program *p)
{
    bool stands = (fault_is(p, NET_HOLD) || fault_is(p, NET_HOLD_HALF)) && !atomic_load(&p->fault->has_ended);
    return !stands ? UINT64_MAX : fault_is(p, NET_HOLD) ? 0 : p->total / 2;
}

void fault_arrived(net_program *p)
{
    if (!p->has_arrived)
        ring_signal(p->fault->fd);
    p->has_arrived = true;
}

/* The position of the byte that is damaged, among those of the program; UINT64_MAX if there is none. */
static uint64_t damaged(const net_program *p)
{
    if (!fault_is(p, NET_FLIP))
        return UINT64_MAX;
    int64_t byte = p->fault->value, total = (int64_t)p->total;
    return (uint64_t)(byte >= 0 ? byte : byte + total > 0 ? byte + total : 0);
}

uint64_t fault_most(const net_program *p, uint64_t position, uint64_t most)
{
    uint64_t byte = damaged(p), end = fault_stands_at(p);
    uint64_t until = byte < position ? end : byte == position ? position + 1 : byte < end ? byte : end;
    return until - position < most ? until - position : most;
}

void fault_change(net_program *p, uint64_t position, struct iovec *block)
{
    if (position != damaged(p))
        return;
    if (p->steps[p->step].op == RING_PUT) {
        p->changed = *(uint8_t *)block->iov_base ^ 1;
        block->iov_base = &p->changed;
    } else {
        p->to_change = block->iov_base;
    }
}

void fault_landed(net_program *p)
{
    if (p->to_change && p->in_a_row > damaged(p)) {
        *p->to_change ^= 1;
        p->to_change = NULL;
    }
    if (p->in_a_row >= fault_stands_at(p))
        fault_arrived(p);
}
