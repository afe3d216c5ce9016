/* roce_kit.h: a connection between two ranks as it is between two servers (SOFTNPU_STRICT=roce), and gates to shut before it.
 * Rank 1 only lends its memory, filled with pattern(1, at); rank 0 does what a test is about, and hands in what is left.
 * The tests' names are the vendor's rules; [src] names the vendor's file (hcomm, one-sided service) that a rule was read in. */
#pragma once
#include "hccl_pair.h"

enum { LENT = 1 << 20, QUARTER = LENT / 4, SPARE = 4096 };

typedef struct roce_end {
    uint32_t rank;
    int other;
    HcclComm comm;
    uint8_t *mine, *remote;                                 /* LENT bytes each */
    void *handle;
    void *spare, *spare_handle;                             /* SPARE bytes, bound, too; a test may free it and set NULL */
    aclrtStream gated, free;                                /* `gated`: what a test shuts; `free` is open always */
    aclrtNotify gate;
} roce_end;

static inline roce_end open_end(uint32_t rank, int other)
{
    roce_end end = { .rank = rank, .other = other };
    void *mine = NULL;
    CHECK_OK(aclrtMalloc(&mine, LENT, ACL_MEM_MALLOC_HUGE_FIRST));
    end.mine = mine;
    if (rank)
        fill(mine, LENT, 1);
    end.comm = new_one_sided("roce", rank);
    end.handle = bind_memory(end.comm, COMM_MEM_TYPE_DEVICE, mine, LENT);
    CHECK_OK(aclrtMalloc(&end.spare, SPARE, ACL_MEM_MALLOC_NORMAL_ONLY));
    end.spare_handle = bind_memory(end.comm, COMM_MEM_TYPE_DEVICE, end.spare, SPARE);
    CHECK_OK(prepare(end.comm, 20));
    tell(other, &end.mine, sizeof end.mine);
    hear(other, &end.remote, sizeof end.remote);
    end.gated = new_stream();
    end.free = new_stream();
    CHECK_OK(aclrtCreateNotify(&end.gate, 0));
    return end;
}

/* Both ranks come here; the communicator may be gone already (then `comm` is NULL). */
static inline void close_end(roce_end *end)
{
    in_step(end->other);
    CHECK_OK(aclrtStreamAbort(end->gated));
    CHECK_OK(aclrtStreamAbort(end->free));
    CHECK_OK(HcclCommDestroy(end->comm));
    CHECK_OK(HcclDeregisterGlobalMem(end->handle));
    if (end->spare) {
        CHECK_OK(HcclDeregisterGlobalMem(end->spare_handle));
        CHECK_OK(aclrtFree(end->spare));
    }
    CHECK_OK(aclrtDestroyStream(end->gated));
    CHECK_OK(aclrtDestroyStream(end->free));
    CHECK_OK(aclrtDestroyNotify(end->gate));
    CHECK_OK(aclrtFree(end->mine));
}

static inline void shut_gate(roce_end *end)
{
    CHECK_OK(aclrtWaitAndResetNotify(end->gate, end->gated, 0));
}

static inline void open_gate(roce_end *end)
{
    aclrtStream opener = new_stream();
    CHECK_OK(aclrtRecordNotify(end->gate, opener));
    CHECK_OK(aclrtDestroyStream(opener));
}

/* One item of `bytes` between the same offset of both memories, or of `at` here and `there` of the peer's. */
static inline HcclOneSideOpDesc item(const roce_end *end, uint64_t at, uint64_t there, uint64_t bytes)
{
    return (HcclOneSideOpDesc){ end->mine + at, end->remote + there, bytes, HCCL_DATA_TYPE_UINT8 };
}

static inline HcclResult get(const roce_end *end, aclrtStream stream, uint64_t at, uint64_t there, uint64_t bytes)
{
    HcclOneSideOpDesc one = item(end, at, there, bytes);
    return HcclBatchGet(end->comm, 1, &one, 1, stream);
}

static inline HcclResult put(const roce_end *end, aclrtStream stream, uint64_t at, uint64_t there, uint64_t bytes)
{
    HcclOneSideOpDesc one = item(end, at, there, bytes);
    return HcclBatchPut(end->comm, 1, &one, 1, stream);
}

/* A thread sanitizer does not see what the executor moves: a volatile look is enough. Nothing else tells of it, and who looks
 * without a pause takes from the executor, under a sanitizer and beside other tests, the processor that it needs. */
static inline void await_change(const uint8_t *at, uint8_t from)
{
    while (*(const volatile uint8_t *)at == from)
        nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
}

static inline void run_roce(rank_body *body)
{
    setenv("SOFTNPU_STRICT", "roce", 1);
    run_pair(body);
}
