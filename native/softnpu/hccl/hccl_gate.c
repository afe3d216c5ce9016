/* The gate of a link: a page that both ends share. An end that puts into the other's memory is inside while it copies a piece,
 * and goes in only while the gate is open. So the end that shuts it knows at once whether the other may still write. That
 * is so where the other was stopped (SIGSTOP) in the middle of a piece: it will finish that piece when it continues.
 *
 *     writer   writing++, then looks at `shut`          owner   shut = 1, then looks at `writing`
 *
 * One of them sees the other, because all four are sequentially consistent. A writer that finds the gate shut when it comes
 * out hangs up, which wakes an owner that waits for it.                                                                  */
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "hccl_soft.h"
#include "runtime.h"

int hccl_gate_new(void)
{
    int fd;
    return soft_backing_new(soft_page_size(), &fd) ? -1 : fd;
}

hccl_gate *hccl_gate_map(int fd)
{
    if (soft_backing_check(fd, 0, sizeof(hccl_gate)))   /* and no process can shrink it: touching it never traps */
        return NULL;
    void *at = mmap(NULL, sizeof(hccl_gate), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

void hccl_gate_unmap(hccl_gate *gate)
{
    if (gate)
        munmap(gate, sizeof *gate);
}

bool hccl_gate_enter(hccl_gate *gate, int side)
{
    atomic_fetch_add(&gate->writing[side], 1);
    return !atomic_load(&gate->shut);
}

void hccl_gate_leave(hccl_gate *gate, int side, int link)
{
    bool last = atomic_fetch_sub(&gate->writing[side], 1) == 1;
    if (last && atomic_load(&gate->shut))
        shutdown(link, SHUT_RDWR);
}

void hccl_gate_shut(hccl_gate *gate)
{
    atomic_store(&gate->shut, 1);
}

bool hccl_gate_busy(const hccl_gate *gate, int side)
{
    return atomic_load(&gate->writing[side]) != 0;
}

/* For our own side: its threads come out soon, and while this process is stopped so is the caller. */
void hccl_gate_clear(const hccl_gate *gate, int side)
{
    while (hccl_gate_busy(gate, side))
        sched_yield();
}
