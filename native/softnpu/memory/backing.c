/* backing.c: memory that another process can map: memfds of a fixed size.
 *
 * The size is sealed, so a process that has mapped one can trust that no page of it disappears: touching memory of a peer must
 * never raise SIGBUS here. Nothing is touched when it is made; pages come with their first use.                      */
#include "runtime.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

uint64_t soft_backing_align(uint64_t size)
{
    return size >= SOFT_HUGE_PAGE ? SOFT_HUGE_PAGE : SOFT_PAGE;
}

static aclError failed(const char *what, uint64_t size)
{
    int why = errno;
    struct rlimit files = { 0, 0 };
    getrlimit(RLIMIT_NOFILE, &files);
    if (why == EMFILE)
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s of %llu bytes: every allocation takes a file descriptor, and "
                          "RLIMIT_NOFILE is %llu", what, (unsigned long long)size, (unsigned long long)files.rlim_cur);
    if (why == EFBIG) {
        getrlimit(RLIMIT_FSIZE, &files);
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s of %llu bytes: %s: memory of softnpu counts as files, and "
                          "RLIMIT_FSIZE (ulimit -f) is %llu bytes", what, (unsigned long long)size, strerror(why),
                          (unsigned long long)files.rlim_cur);
    }
    if (why == ENOMEM)
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s of %llu bytes: out of host memory, of addresses (RLIMIT_AS) or of "
                          "mappings (vm.max_map_count)", what, (unsigned long long)size);
    return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s of %llu bytes: %s", what, (unsigned long long)size, strerror(why));
}

aclError soft_backing_new(uint64_t size, int *fd)
{
    *fd = memfd_create("softnpu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 && (errno == EPERM || errno == EACCES || errno == ENOSYS))
        return soft_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "memfd_create is refused: %s: a filter of the container (seccomp) or "
                          "a security module forbids it, or the kernel is too old", strerror(errno));
    if (*fd < 0)
        return failed("memfd_create", size);
    if (ftruncate(*fd, (off_t)size) || fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        aclError code = failed("sizing a memfd", size);
        close(*fd);
        *fd = -1;
        return code;
    }
    return ACL_SUCCESS;
}

/* Addresses outside the arena that start on a huge page when that is worth it; cut out of a larger piece. */
static void *ordinary_addresses(uint64_t size)
{
    uint64_t page = soft_page_size(), align = size >= SOFT_HUGE_PAGE ? SOFT_HUGE_PAGE : page, slack = align - page;
    char *piece = mmap(NULL, size + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (piece == MAP_FAILED)
        return NULL;
    char *start = (char *)soft_round_up((uintptr_t)piece, align);
    if (start > piece)
        munmap(piece, (size_t)(start - piece));
    if (piece + slack > start)
        munmap(start + size, (size_t)(piece + slack - start));
    return start;
}

aclError soft_backing_map(int fd, uint64_t offset, uint64_t size, void *at, void **addr)
{
    return soft_backing_map_as(fd, offset, size, at, true, addr);
}

aclError soft_backing_map_as(int fd, uint64_t offset, uint64_t size, void *at, bool writable, void **addr)
{
    void *place = at ? at : ordinary_addresses(size);
    if (!place)
        return failed("mmap", size);
    if (mmap(place, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED) {
        aclError code = failed("mmap", size);
        if (!at)
            munmap(place, size);
        return code;
    }
    if (size >= SOFT_HUGE_PAGE)
        madvise(place, size, MADV_HUGEPAGE);                /* advice: a kernel without it still works */
    *addr = place;
    return ACL_SUCCESS;
}

aclError soft_backing_check(int fd, uint64_t offset, uint64_t size)
{
    struct stat info;
    if (fstat(fd, &info) || !S_ISREG(info.st_mode))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "file descriptor %d is no shareable memory", fd);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "file descriptor %d is not sealed against shrinking: its owner could "
                          "take the pages away while they are in use", fd);
    uint64_t have = (uint64_t)info.st_size;
    if (!size || offset > have || size > have - offset)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "bytes [%llu, +%llu) of a peer's memory that has %llu",
                          (unsigned long long)offset, (unsigned long long)size, (unsigned long long)have);
    return ACL_SUCCESS;
}
