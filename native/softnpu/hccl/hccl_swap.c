/* Two ranks tell each other about their memory. The lower one speaks first, so neither waits for the other to listen.
 * Memory with a file behind it is handed over as that file, and every later transfer is a plain memcpy. Private memory
 * (ordinary memory of the process, adopted) is reached with process_vm_readv and process_vm_writev, which some systems
 * forbid: that is tried here, with one byte, and not discovered by the first transfer.
 *
 * A rank of this process is told, and reached, in the same ways. Its own addresses would not do: its memory may be freed, and
 * unmapped, while a transfer of this rank is in the middle of it.                                                       */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
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

/* A second, read-only opening of an allocation's file: a process that gets it can map it for reading only. */
static int readable_fd(int fd)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* Descriptors that are opened for one message, and closed when it has been sent. */
typedef struct openings { int count, fds[HCCL_MESSAGE_REGIONS]; } openings;

static bool describe(const hccl_region *region, const hccl_peer *peer, bool readable, hccl_message *message, openings *opened)
{
    soft_span span;
    hccl_wire_region *wire = &message->body.regions[message->head.count];
    if (!soft_span_of(region->mem.addr, region->mem.size, &span)
        || span.placement != (region->mem.type == COMM_MEM_TYPE_DEVICE))
        return false;
    uint64_t base = (uintptr_t)region->mem.addr;
    *wire = (hccl_wire_region){region->id, base, region->mem.size, 0, region->mem.type, readable ? HCCL_READABLE : 0};
    if (span.fd >= 0) {
        int fd = readable ? readable_fd(span.fd) : span.fd;
        if (fd < 0)
            return false;
        if (readable)
            opened->fds[opened->count++] = fd;
        wire->shared |= HCCL_SHARED;
        wire->fd_offset = span.fd_offset + (base - span.base);
        message->fds[message->nfds++] = fd;             /* the kernel duplicates it for the peer */
    } else {
        let_in(peer->pid);
    }
    message->head.count++;
    return true;
}

static void close_opened(openings *opened)
{
    while (opened->count)
        close(opened->fds[--opened->count]);
}

static bool is_told(const hccl_comm *comm, const hccl_region *region, uint16_t purpose)
{
    return !hccl_strict_hides(region) && !(purpose == HCCL_PREPARE && hccl_regions_contain(&comm->hidden, region));
}

/* The marks of softnpu_comm_show do not change while a communicator is being set up. */
static HcclResult tell(const hccl_comm *comm, const hccl_wait *wait, uint32_t rank, const hccl_regions *mine, uint16_t purpose)
{
    const hccl_peer *peer = &comm->peers[rank];
    hccl_message message;
    openings opened = {0};
    size_t at = 0;
    HcclResult code = HCCL_SUCCESS;
    do {
        hccl_message_init(&message, HCCL_REGIONS, purpose, 0);
        for (; !code && at < mine->count && message.head.count < HCCL_MESSAGE_REGIONS; at++) {
            const hccl_region *region = mine->item[at];
            bool readable = purpose == HCCL_PREPARE && hccl_regions_contain(&comm->readable, region);
            if (is_told(comm, region, purpose) && !describe(region, peer, readable, &message, &opened))
                code = soft_hccl_error(HCCL_E_PARA, "%s: the registered %llu bytes at %p have been freed, or no file can be opened",
                                       wait->function, (unsigned long long)region->mem.size, region->mem.addr);
        }
        if (at == mine->count)
            message.head.flags |= HCCL_LAST;
        HcclResult sent = code ? code : hccl_message_send(wait, peer->link, &message);
        close_opened(&opened);
        if (!code && sent)
            code = hccl_wait_failed(wait, rank, sent);
    } while (!code && at < mine->count);
    return code;
}

static HcclResult take_in(hccl_comm *comm, uint32_t rank, hccl_message *message, bool enable)
{
    int next = 0;
    for (uint32_t i = 0; i < message->head.count; i++) {
        const hccl_wire_region *wire = &message->body.regions[i];
        bool shared = wire->shared & HCCL_SHARED;
        if (shared && next == message->nfds)
            return HCCL_E_INTERNAL;
        HcclResult code = hccl_remote_add(comm, rank, wire, shared ? message->fds[next++] : -1, enable);
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
        code = tell(comm, wait, rank, mine, purpose);
    if (!code)
        code = hear(comm, wait, rank, purpose);
    if (!code && !first)
        code = tell(comm, wait, rank, mine, purpose);
    if (!code)
        code = probe(comm, wait, rank);
    HcclResult agreed = hccl_message_confirm(wait, peer->link, code);
    return code ? code : hccl_wait_failed(wait, rank, agreed);
}
