/* strict_kit.h: a connection between two ranks as HCCL has it (SOFTNPU_STRICT). Rank 1 only lends its memory, filled with
 * pattern(1, at); rank 0 does what a test is about. The tests' names are the vendor's rules; [src] names the vendor's file
 * (hcomm unless it says otherwise) that a rule was read in, [doc] its documentation. roce_kit.h has more for queue pairs. */
#pragma once
#include "hccl_pair.h"

enum { LENT = 2 << 20 };

typedef struct strict_end {
    uint32_t rank;
    int other;
    HcclComm comm;
    uint8_t *mine, *remote;                                 /* LENT bytes each, DEVICE memory */
    void *handle;
    aclrtStream stream;
} strict_end;

static inline strict_end open_end(uint32_t rank, int other)
{
    strict_end end = { .rank = rank, .other = other };
    void *mine = NULL;
    CHECK_OK(aclrtMalloc(&mine, LENT, ACL_MEM_MALLOC_HUGE_FIRST));
    end.mine = mine;
    if (rank)
        fill(mine, LENT, 1);
    end.comm = new_one_sided("strict", rank);
    end.handle = bind_memory(end.comm, COMM_MEM_TYPE_DEVICE, mine, LENT);
    CHECK_OK(prepare(end.comm, 20));
    tell(other, &end.mine, sizeof end.mine);
    hear(other, &end.remote, sizeof end.remote);
    end.stream = new_stream();
    return end;
}

static inline void close_end(strict_end *end)
{
    in_step(end->other);
    CHECK_OK(HcclCommUnbindMem(end->comm, end->handle));
    CHECK_OK(HcclCommDestroy(end->comm));
    CHECK_OK(HcclDeregisterGlobalMem(end->handle));
    CHECK_OK(aclrtDestroyStream(end->stream));
    CHECK_OK(aclrtFree(end->mine));
}

/* One item of `bytes` between the same offset of both memories. */
static inline HcclOneSideOpDesc item(const strict_end *end, uint64_t at, uint64_t bytes)
{
    return (HcclOneSideOpDesc){ end->mine + at, end->remote + at, bytes, HCCL_DATA_TYPE_UINT8 };
}

/* A whole item behind those of a refused batch: over RoCE they run only at its doorbell. */
static inline void drain(const strict_end *end)
{
    HcclOneSideOpDesc one = item(end, LENT - 1, 1);
    CHECK_OK(HcclBatchGet(end->comm, 1, &one, 1, end->stream));
    CHECK_OK(aclrtSynchronizeStream(end->stream));
}

static inline void run_strict(const char *mode, rank_body *body)
{
    setenv("SOFTNPU_STRICT", mode, 1);                      /* read by the ranks' aclInit */
    run_pair(body);
    unsetenv("SOFTNPU_STRICT");
}

/* One process, device 0. */
static inline void run_alone(const char *mode, void (*body)(void))
{
    int status = -1;
    setenv("SOFTNPU_STRICT", mode, 1);
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        check_failures = 0;
        setenv("HCCL_NPU_SOCKET_PORT_RANGE", "auto", 0);
        open_device(0);
        body();
        close_device(0);
        exit(check_failures ? 1 : 0);
    }
    waitpid(pid, &status, 0);
    unsetenv("SOFTNPU_STRICT");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
