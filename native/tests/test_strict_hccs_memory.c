/* What memory a peer on the same server can be shown. hccl_strict_memory.c names the sources. */
#include "strict_kit.h"

enum { LENDER = 1, SIZE = 8192 };

typedef struct host_end { HcclComm comm; void *host, *device, *remote, *handle[2]; aclrtStream stream; } host_end;

static host_end open_host_end(uint32_t rank, int other)
{
    host_end end = { .comm = new_one_sided("host", rank) };
    CHECK_OK(aclrtMallocHost(&end.host, SIZE));
    CHECK_OK(aclrtMalloc(&end.device, SIZE, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(end.host, SIZE, rank);
    end.handle[0] = bind_memory(end.comm, COMM_MEM_TYPE_HOST, end.host, SIZE);
    end.handle[1] = bind_memory(end.comm, COMM_MEM_TYPE_DEVICE, end.device, SIZE);
    CHECK_OK(prepare(end.comm, 20));
    tell(other, &end.host, sizeof end.host);
    hear(other, &end.remote, sizeof end.remote);
    end.stream = new_stream();
    return end;
}

static void close_host_end(host_end *end, int other)
{
    in_step(other);
    CHECK_OK(HcclCommDestroy(end->comm));
    for (int i = 0; i < 2; i++)
        CHECK_OK(HcclDeregisterGlobalMem(end->handle[i]));
    CHECK_OK(aclrtDestroyStream(end->stream));
    CHECK_OK(aclrtFreeHost(end->host));
    CHECK_OK(aclrtFree(end->device));
}

static void refused(uint32_t rank, int other)
{
    host_end end = open_host_end(rank, other);
    HcclOneSideOpDesc one = { end.device, end.remote, SIZE, HCCL_DATA_TYPE_UINT8 };
    CHECK_ERR(HcclBatchGet(end.comm, 1 - rank, &one, 1, end.stream), HCCL_E_INTERNAL);
    CHECK_ERR(HcclBatchPut(end.comm, 1 - rank, &one, 1, end.stream), HCCL_E_INTERNAL);
    close_host_end(&end, other);
}

TEST(test_host_memory_of_a_peer_is_out_of_reach_over_hccs)
{
    run_strict("hccs", refused);
}

static void reached(uint32_t rank, int other)
{
    host_end end = open_host_end(rank, other);
    HcclOneSideOpDesc one = { end.device, end.remote, SIZE, HCCL_DATA_TYPE_UINT8 };
    CHECK_OK(HcclBatchGet(end.comm, 1 - rank, &one, 1, end.stream));
    CHECK_OK(aclrtSynchronizeStream(end.stream));
    CHECK(holds(end.device, SIZE, 1 - rank));
    close_host_end(&end, other);
}

TEST(test_host_memory_of_a_peer_is_in_reach_over_roce)
{
    run_strict("roce", reached);
}

static void local_host(uint32_t rank, int other)
{
    host_end end = open_host_end(rank, other);
    void *remote;
    tell(other, &end.device, sizeof end.device);
    hear(other, &remote, sizeof remote);
    if (rank == LENDER)
        fill(end.device, SIZE, 5);
    in_step(other);
    HcclOneSideOpDesc one = { end.host, remote, SIZE, HCCL_DATA_TYPE_UINT8 };
    if (rank != LENDER) {
        CHECK_OK(HcclBatchGet(end.comm, LENDER, &one, 1, end.stream));
        CHECK_OK(aclrtSynchronizeStream(end.stream));
        CHECK(holds(end.host, SIZE, 5));
    }
    close_host_end(&end, other);
}

TEST(test_host_memory_of_this_side_is_as_good_as_any_over_hccs)
{
    run_strict("hccs", local_host);
}

/* ---- where a region starts ---- */

static HcclResult prepare_with(uint32_t rank, void *addr, uint64_t size)
{
    HcclComm comm = new_one_sided("pages", rank);
    CommMem mem = { COMM_MEM_TYPE_DEVICE, addr, size };
    void *handle = NULL;
    if (addr) {
        CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));     /* a record only */
        CHECK_OK(HcclCommBindMem(comm, handle));
    }
    HcclResult code = prepare(comm, 10);
    CHECK_OK(HcclCommDestroy(comm));
    if (handle)
        CHECK_OK(HcclDeregisterGlobalMem(handle));
    return code;
}

static void check_start(uint32_t rank, int other, void *addr, bool good)
{
    HcclResult code = prepare_with(rank, rank == LENDER ? addr : NULL, SIZE);
    if (good)
        CHECK_OK(code);
    else if (rank == LENDER)
        CHECK_EQ(code, HCCL_E_RUNTIME);
    else
        CHECK(code != HCCL_SUCCESS);
    in_step(other);
}

static void starts(uint32_t rank, int other)
{
    bool hccs = !strcmp(getenv("SOFTNPU_STRICT"), "hccs");
    void *large, *small, *ordinary = NULL;
    CHECK_OK(aclrtMalloc(&large, 8 << 20, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_OK(aclrtMalloc(&small, 3 * SIZE, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_EQ(posix_memalign(&ordinary, 2 << 20, 4 << 20), 0);
    check_start(rank, other, large, true);
    check_start(rank, other, (char *)large + (4 << 20), true);
    check_start(rank, other, (char *)large + 64, !hccs);
    check_start(rank, other, (char *)large + 4096, !hccs);  /* its pages are huge */
    check_start(rank, other, small, true);
    check_start(rank, other, (char *)small + 4096, true);
    check_start(rank, other, (char *)small + 64, !hccs);
    check_start(rank, other, ordinary, true);
    check_start(rank, other, (char *)ordinary + 4096, !hccs);      /* another allocator's */
    CHECK_OK(aclrtFree(large));
    CHECK_OK(aclrtFree(small));
    free(ordinary);
}

static void pinned(uint32_t rank, int other)
{
    bool hccs = strcmp(getenv("SOFTNPU_STRICT"), "roce") != 0;
    void *ordinary = malloc(SIZE), *memory;
    CHECK_OK(aclrtMallocHost(&memory, SIZE));
    for (int i = 0; i < 2; i++) {
        HcclComm comm = new_one_sided("pinned", rank);
        CommMem mem = { COMM_MEM_TYPE_HOST, i ? ordinary : memory, SIZE };
        void *handle = NULL;
        CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
        CHECK_OK(HcclCommBindMem(comm, handle));
        CHECK_EQ(prepare(comm, 10), i && hccs ? HCCL_E_RUNTIME : HCCL_SUCCESS);
        CHECK_OK(HcclCommDestroy(comm));
        CHECK_OK(HcclDeregisterGlobalMem(handle));
        in_step(other);
    }
    CHECK_OK(aclrtFreeHost(memory));
    free(ordinary);
}

TEST(test_host_memory_is_pinned_over_hccs)
{
    run_strict("hccs", pinned);
    run_strict("aicpu", pinned);
    run_strict("roce", pinned);
}

TEST(test_a_region_starts_on_a_page_over_hccs)
{
    run_strict("hccs", starts);
}

TEST(test_a_region_starts_anywhere_over_roce)
{
    run_strict("roce", starts);
}

int main(void)
{
    RUN(test_host_memory_of_a_peer_is_out_of_reach_over_hccs);
    RUN(test_host_memory_of_a_peer_is_in_reach_over_roce);
    RUN(test_host_memory_of_this_side_is_as_good_as_any_over_hccs);
    RUN(test_host_memory_is_pinned_over_hccs);
    RUN(test_a_region_starts_on_a_page_over_hccs);
    RUN(test_a_region_starts_anywhere_over_roce);
    return check_done();
}
