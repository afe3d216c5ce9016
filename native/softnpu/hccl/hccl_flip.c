/* The fault `flip`: a byte that has arrived is not the one that was sent. By the bare system call, as hccl_request.c says: the
 * memory may be another process's, and what damages it is no thread of a program.                                       */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include "hccl_soft.h"

uint64_t hccl_flip_place(int64_t at, uint64_t bytes)
{
    uint64_t back = at < 0 ? 0 - (uint64_t)at : 0;
    if (at < 0)
        return back < bytes ? bytes - back : 0;
    return (uint64_t)at < bytes ? (uint64_t)at : bytes - 1;
}

aclError hccl_flip(void *address, pid_t pid)
{
    unsigned char byte;
    struct iovec here = { &byte, 1 }, there = { address, 1 };
    if (syscall(SYS_process_vm_readv, (long)pid, &here, 1L, &there, 1L, 0L) == 1) {
        byte ^= 1;
        if (syscall(SYS_process_vm_writev, (long)pid, &here, 1L, &there, 1L, 0L) == 1)
            return ACL_SUCCESS;
    }
    return soft_error(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "no bit could be flipped at %p: %s", address, strerror(errno));
}
