/* One request of a queue pair, carried out by its executor: in pieces of at most a MiB, between which it looks whether the peer
 * and the connection are still there. It runs whenever the doorbell rings, maybe long after the caller has forgotten it, and
 * uses the memory as it is then. So the bytes are moved by a system call even within this process: memory that was given
 * back meanwhile is a failed request and not a crash. And by the bare system call: a NIC's accesses are no thread's, so a
 * thread sanitizer shall not take a program that looks at its memory meanwhile for a racy one.                          */
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include "hccl_queue_pair.h"

static aclError lost(const hccl_queue_pair *pair, const char *why)
{
    return soft_error(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "rank %u: %s", pair->rank, why);
}

static aclError gone(const hccl_queue_pair *pair)
{
    return lost(pair, "the peer has ended or has destroyed the communicator");
}

static aclError freed(const hccl_request *request)
{
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "local memory at %p was freed before the transfer ran", (void *)request->local);
}

static aclError look_up(const hccl_queue_pair *pair)
{
    if (pair->ended)
        return ACL_ERROR_RT_STREAM_ABORT;                   /* is not told: the connection has failed already */
    return hccl_socket_alive(pair->link) ? ACL_SUCCESS : gone(pair);
}

static aclError suffer(hccl_queue_pair *pair, const soft_exec_fault *fault)
{
    soft_hold_stand(fault->hold);
    if (fault->hang || fault->delay_ms)
        hccl_queue_pair_pause(pair, fault->hang ? -1 : fault->delay_ms);
    return fault->code ? soft_error(fault->code, "injected failure") : ACL_SUCCESS;
}

static aclError check_range(const hccl_request *request)
{
    soft_span span;
    return soft_span_of(request->local, request->bytes, &span) ? ACL_SUCCESS : freed(request);
}

static void stand_half_way(const hccl_request *request, uint64_t end)
{
    if (request->fault.half && end > request->bytes / 2)
        soft_hold_stand(request->fault.half);
}

static aclError move(const hccl_queue_pair *pair, const hccl_request *request, uint64_t done, uint64_t bytes)
{
    soft_span span;
    stand_half_way(request, done + bytes);
    struct iovec local = { request->local + done, bytes }, remote = { (void *)(uintptr_t)(request->remote + done), bytes };
    pid_t pid = request->mapped ? getpid() : pair->pid;
    long moved = syscall(request->put ? SYS_process_vm_writev : SYS_process_vm_readv, (long)pid, &local, 1L, &remote, 1L, 0L);
    if (moved >= 0 && (uint64_t)moved == bytes) {
        SOFT_COUNT(bytes_copied, bytes);
        return ACL_SUCCESS;
    }
    if (moved < 0 && errno != EFAULT)
        return lost(pair, errno == ESRCH ? "the process has ended" : strerror(errno));
    return soft_span_of(request->local, request->bytes, &span) ? lost(pair, "its memory is no longer mapped") : freed(request);
}

/* A put is inside of the link's gate meanwhile, so that the peer knows whether we may still write. */
static aclError move_piece(const hccl_queue_pair *pair, const hccl_request *request, uint64_t done, uint64_t bytes)
{
    aclError code = look_up(pair);
    if (code || !request->put)
        return code ? code : move(pair, request, done, bytes);
    code = hccl_gate_enter(pair->gate, pair->side) ? move(pair, request, done, bytes) : gone(pair);
    hccl_gate_leave(pair->gate, pair->side, pair->link);
    return code;
}

static aclError move_all(const hccl_queue_pair *pair, const hccl_request *request)
{
    aclError code = check_range(request);
    for (uint64_t done = 0, bytes; !code && done < request->bytes; done += bytes) {
        bytes = request->bytes - done < HCCL_PIECE ? request->bytes - done : HCCL_PIECE;
        code = move_piece(pair, request, done, bytes);
    }
    return code;
}

static aclError flip(hccl_queue_pair *pair, const hccl_request *request)
{
    uint64_t at = (uint64_t)request->fault.flip_at;
    if (!request->put)
        return hccl_flip(request->local + at, getpid());
    void *place = (void *)(uintptr_t)(request->remote + at);
    aclError code = hccl_gate_enter(pair->gate, pair->side) ? hccl_flip(place, request->mapped ? getpid() : pair->pid) : gone(pair);
    hccl_gate_leave(pair->gate, pair->side, pair->link);
    return code;
}

aclError hccl_request_run(hccl_queue_pair *pair, const hccl_request *request)
{
    aclError code = suffer(pair, &request->fault);
    if (!code && request->bytes)
        code = move_all(pair, request);
    if (!code && request->fault.flip)
        code = flip(pair, request);
    return code ? code : look_up(pair);
}
