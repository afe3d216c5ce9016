/* Two ranks tell each other about their memory. The lower one speaks first, so neither waits for the other to listen.
 * Memory with a file behind it is handed over as that file, and every later transfer is a plain memcpy. Private memory
 * (ordinary memory of the process, adopted) is reached with process_vm_readv and process_vm_writev, which some systems
 * forbid: that is tried here, with one byte, and not discovered by the first transfer.
 *
 * A rank of this process is told, and reached, in the same ways. Its own addresses would not do: its memory may be freed, and
 * unmapped, while a transfer of this rank is in the middle of it.                                                       */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
#include "hccl_soft.h"

/* Under Yama's ptrace_scope 1 a process may name one other that is allowed to reach into it. From the second on it has
 * to be "any", which still means processes of our own user. Without Yama the call is refused, which does not matter.   */
static void let_in(pid_t pid)
{
    static _Atomic pid_t allowed;                       /* 0: none yet, -1: any */
    pid_t before = 0;
    if (pid == getpid())
        return;
    if (atomic_compare_exchange_strong(&allowed, &before, pid) || before == pid) {
        prctl(PR_SET_PTRACER, (unsigned long)pid, 0, 0, 0);
    } else {
        atomic_store(&allowed, -1);
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
}

static bool describe(const hccl_region *region, const hccl_peer *peer, hccl_message *message)
{
    soft_span span;
    hccl_wire_region *wire = &message->body.regions[message->head.count];
    if (!soft_span_of(region->mem.addr, region->mem.size, &span)
        || span.placement != (region->mem.type == COMM_MEM_TYPE_DEVICE))
        return false;
    uint64_t base = (uintptr_t)region->mem.addr;
    *wire = (hccl_wire_region){region->id, base, region->mem.size, 0, region->mem.type, 0};
    if (span.fd >= 0) {
        wire->shared = 1;
        wire->fd_offset = span.fd_offset + (base - span.base);
        message->fds[message->nfds++] = span.fd;        /* the allocation's own; the kernel duplicates it for the peer */
    } else {
        let_in(peer->pid);
    }
    message->head.count++;
    return true;
}

static HcclResult tell(const hccl_wait *wait, uint32_t rank, const hccl_peer *peer, const hccl_regions *mine,
                       uint16_t purpose)
{
    hccl_message message;
    size_t at = 0;
    do {
        hccl_message_init(&message, HCCL_REGIONS, purpose, 0);
        for (; at < mine->count && message.head.count < HCCL_MESSAGE_REGIONS; at++)
            if (!hccl_strict_hides(mine->item[at]) && !describe(mine->item[at], peer, &message))
                return soft_hccl_error(HCCL_E_PARA, "%s: the registered %llu bytes at %p have been freed", wait->function,
                                       (unsigned long long)mine->item[at]->mem.size, mine->item[at]->mem.addr);
        if (at == mine->count)
            message.head.flags |= HCCL_LAST;
        HcclResult code = hccl_message_send(wait, peer->link, &message);
        if (code)
            return hccl_wait_failed(wait, rank, code);
    } while (at < mine->count);
    return HCCL_SUCCESS;
}

static HcclResult take_in(hccl_comm *comm, uint32_t rank, hccl_message *message, bool enable)
{
    int next = 0;
    for (uint32_t i = 0; i < message->head.count; i++) {
        const hccl_wire_region *wire = &message->body.regions[i];
        if (wire->shared && next == message->nfds)
            return HCCL_E_INTERNAL;
        HcclResult code = hccl_remote_add(comm, rank, wire, wire->shared ? message->fds[next++] : -1, enable);
        if (code)
            return code;
    }
    return next == message->nfds ? HCCL_SUCCESS : HCCL_E_INTERNAL;
}

static HcclResult hear(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, uint16_t purpose)
{
    hccl_message message;
    for (size_t total = 0;;) {
        HcclResult code = hccl_message_receive(wait, comm->peers[rank].link, HCCL_REGIONS, purpose, &message);
        if (code)
            return hccl_wait_failed(wait, rank, code);
        total += message.head.count;
        bool last = message.head.flags & HCCL_LAST, sound = total <= HCCL_REGIONS_MAX && (last || message.head.count);
        code = sound ? take_in(comm, rank, &message, purpose == HCCL_PREPARE) : HCCL_E_INTERNAL;
        hccl_message_close(&message);
        if (code == HCCL_E_INTERNAL)
            return soft_hccl_error(code, "%s: rank %u describes memory that cannot be", wait->function, rank);
        if (code)
            return soft_hccl_error(code, "%s: memory of rank %u could not be mapped", wait->function, rank);
        if (last)
            return HCCL_SUCCESS;
    }
}

static int yama_scope(void)
{
    char text[8] = "";
    int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    return length > 0 ? atoi(text) : 0;
}

static HcclResult cannot_reach(const char *function, uint32_t rank, pid_t pid, int error)
{
    if (error == ESRCH && pid)
        return soft_hccl_error(HCCL_E_UNAVAIL, "%s: rank %u (process %d) has ended", function, rank, pid);
    if (error == EFAULT)
        return soft_hccl_error(HCCL_E_INTERNAL, "%s: rank %u bound memory that it has not mapped", function, rank);
    if (error == EPERM && yama_scope())
        return soft_hccl_error(HCCL_E_NOT_SUPPORT, "%s: rank %u bound private memory, and kernel.yama.ptrace_scope=%d forbids "
                               "process %d to read it; set it to 0, or bind memory from aclrtMalloc or aclrtMallocHost",
                               function, rank, yama_scope(), getpid());
    return soft_hccl_error(HCCL_E_NOT_SUPPORT, "%s: rank %u bound private memory, and process_vm_readv of process %d fails: %s "
                           "(a seccomp filter, a missing CAP_SYS_PTRACE, PR_SET_DUMPABLE, or separate pid namespaces); bind "
                           "memory from aclrtMalloc or aclrtMallocHost", function, rank, pid, strerror(error));
}

static HcclResult probe(hccl_comm *comm, const hccl_wait *wait, uint32_t rank)
{
    const hccl_peer *peer = &comm->peers[rank];
    char byte;
    for (size_t i = 0; i < peer->remotes.count; i++) {
        const hccl_remote *entry = &peer->remotes.item[i];
        struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)entry->base, 1};
        if (entry->local)
            continue;
        if (process_vm_readv(peer->pid, &here, 1, &there, 1, 0) == 1)
            return HCCL_SUCCESS;
        return cannot_reach(wait->function, rank, peer->pid, errno);
    }
    return HCCL_SUCCESS;
}

HcclResult hccl_swap(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, const hccl_regions *mine, uint16_t purpose)
{
    const hccl_peer *peer = &comm->peers[rank];
    bool first = comm->rank < rank;
    HcclResult code = HCCL_SUCCESS;
    if (first)
        code = tell(wait, rank, peer, mine, purpose);
    if (!code)
        code = hear(comm, wait, rank, purpose);
    if (!code && !first)
        code = tell(wait, rank, peer, mine, purpose);
    if (!code)
        code = probe(comm, wait, rank);
    HcclResult agreed = hccl_message_confirm(wait, peer->link, code);
    return code ? code : hccl_wait_failed(wait, rank, agreed);
}
