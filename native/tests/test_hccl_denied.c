/* Systems that keep processes of one user apart. A process that cannot be dumped cannot be reached into, even by its own
 * user: that stands here for Yama, for containers and for seccomp filters.                                               */
#include <sys/prctl.h>
#include "hccl_pair.h"

static void drop_privileges(void)
{
    if (geteuid() == 0)                                     /* root may reach into every process */
        CHECK_EQ(setresuid(65534, 65534, 65534), 0);
    CHECK_EQ(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), 0);
}

static HcclResult prepare_with(uint32_t rank, CommMemType type, void *addr, uint64_t size)
{
    HcclComm comm = new_one_sided("denied", rank);
    void *handle = bind_memory(comm, type, addr, size);
    HcclResult code = prepare(comm, 20);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    return code;
}

static void denied(uint32_t rank, int other)
{
    static char ordinary[4096];
    void *pinned;
    CHECK_OK(aclrtMallocHost(&pinned, 4096));
    drop_privileges();
    in_step(other);
    HcclResult code = prepare_with(rank, COMM_MEM_TYPE_HOST, ordinary, sizeof ordinary);
    const char *why = aclGetRecentErrMsg();
    CHECK_EQ(code, HCCL_E_NOT_SUPPORT);
    CHECK(why && (strstr(why, "process_vm_readv") || strstr(why, "ptrace_scope") || strstr(why, "reports: not supported")));
    in_step(other);
    CHECK_OK(prepare_with(rank, COMM_MEM_TYPE_HOST, pinned, 4096));           /* what is shared needs no permission */
    in_step(other);
    CHECK_EQ(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
    in_step(other);
    CHECK_OK(prepare_with(rank, COMM_MEM_TYPE_HOST, ordinary, sizeof ordinary));
    CHECK_OK(aclrtFreeHost(pinned));
}

TEST(test_private_memory_that_the_system_does_not_let_us_reach)
{
    run_pair(denied);
}

int main(void)
{
    RUN(test_private_memory_that_the_system_does_not_let_us_reach);
    return check_done();
}
