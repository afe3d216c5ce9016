/* HcclCommPrepare: who meets whom, what happens when no peer comes, and what a link costs. */
#include "hccl_pair.h"

static void meets(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("meets", rank);
    HcclResult error = HCCL_E_REMOTE;
    (void)other;
    CHECK_OK(prepare(comm, 20));
    CHECK_OK(prepare(comm, 20));                            /* at once: it is prepared */
    CHECK_OK(HcclGetCommAsyncError(comm, &error));
    CHECK_EQ(error, HCCL_SUCCESS);
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_two_ranks_meet)
{
    run_pair(meets);
}

static void too_late(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("late", rank);
    if (rank == 0) {
        double start = seconds_now();
        CHECK_ERR(prepare(comm, 1), HCCL_E_TIMEOUT);        /* as the listening rank */
        CHECK(seconds_now() - start > 0.99);
        in_step(other);
        CHECK_OK(prepare(comm, 20));
        in_step(other);
    } else {
        in_step(other);
        CHECK_OK(prepare(comm, 20));
        in_step(other);
    }
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_a_communicator_that_no_peer_joined_can_be_prepared_again)
{
    run_pair(too_late);
}

static void environment(uint32_t rank, int other)
{
    (void)other;
    if (rank == 0)
        return;
    HcclComm comm = new_one_sided("environment", rank);
    setenv("HCCL_CONNECT_TIMEOUT", "1", 1);
    CHECK_ERR(prepare(comm, 0), HCCL_E_TIMEOUT);            /* as the connecting rank */
    setenv("HCCL_CONNECT_TIMEOUT", "soon", 1);
    CHECK_ERR(prepare(comm, 0), HCCL_E_PARA);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_zero_means_the_limit_of_the_environment)
{
    run_pair(environment);
}

static HcclComm shared;

static void *prepare_for_ever(void *code)
{
    *(HcclResult *)code = prepare(shared, -1);
    return NULL;
}

static void destroyed(uint32_t rank, int other)
{
    pthread_t thread;
    static char memory[64];
    HcclResult code = HCCL_SUCCESS;
    (void)other;
    shared = new_one_sided("destroyed", rank);              /* the other rank never comes */
    void *handle = bind_memory(shared, COMM_MEM_TYPE_HOST, memory, sizeof memory);
    pthread_create(&thread, NULL, prepare_for_ever, &code);
    do                                                      /* until the thread is inside */
        HcclCommUnbindMem(shared, handle);
    while (HcclCommBindMem(shared, handle) != HCCL_E_AGAIN);
    CHECK_ERR(prepare(shared, 1), HCCL_E_AGAIN);
    CHECK_OK(HcclCommDestroy(shared));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    pthread_join(thread, NULL);
    CHECK_EQ(code, HCCL_E_NOT_FOUND);
}

static void destroyed_listening(uint32_t rank, int other)
{
    if (rank == 0)
        destroyed(rank, other);
}

static void destroyed_connecting(uint32_t rank, int other)
{
    if (rank == 1)
        destroyed(rank, other);
}

TEST(test_destroying_ends_a_blocked_prepare)
{
    run_pair(destroyed_listening);
    run_pair(destroyed_connecting);
}

/* ---- called off ---- */

/* Called off before or while it waits; for good. The other rank then meets a new communicator. */
static void called_off(uint32_t rank, int other, uint32_t early)
{
    HcclComm comm = new_one_sided("called off", rank);
    if (rank == early) {
        pthread_t thread;
        HcclResult code = HCCL_SUCCESS;
        shared = comm;
        pthread_create(&thread, NULL, prepare_for_ever, &code);
        CHECK_OK(softnpu_comm_cancel(comm));
        pthread_join(thread, NULL);
        CHECK_EQ(code, HCCL_E_NOT_FOUND);
        CHECK_ERR(prepare(comm, 20), HCCL_E_NOT_FOUND);
        CHECK_OK(HcclCommDestroy(comm));
        CHECK_EQ(softnpu_comm_cancel(comm), -1);
        comm = new_one_sided("called off", rank);
    }
    in_step(other);
    CHECK_OK(prepare(comm, 20));
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

static void called_off_listening(uint32_t rank, int other)
{
    called_off(rank, other, 0);
}

static void called_off_connecting(uint32_t rank, int other)
{
    called_off(rank, other, 1);
}

TEST(test_a_prepare_that_its_caller_calls_off_ends)
{
    run_pair(called_off_listening);
    run_pair(called_off_connecting);
}

/* ---- what it touches ---- */

static long shared_kib(void)
{
    char line[128];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        sscanf(line, "RssShmem: %ld kB", &kib);
    if (status)
        fclose(status);
    return kib;
}

static void large(uint32_t rank, int other)
{
    enum { EDGE = 4096 };
    const uint64_t size = (uint64_t)1 << 30;
    HcclComm comm = new_one_sided("large", rank);
    aclrtStream stream = new_stream();
    char *device, *remote;
    CHECK_OK(aclrtMalloc((void **)&device, size, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(device + size - EDGE, EDGE, rank);
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, device, size);
    CHECK_OK(prepare(comm, 20));
    CHECK(shared_kib() >= 0 && shared_kib() < 8192);
    tell(other, &device, sizeof device);
    hear(other, &remote, sizeof remote);
    HcclOneSideOpDesc desc = { device, remote + size - EDGE, EDGE, HCCL_DATA_TYPE_INT8 };
    CHECK_OK(HcclBatchGet(comm, 1 - rank, &desc, 1, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK(holds(device, EDGE, 1 - rank));
    CHECK(shared_kib() < 8192);
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_no_page_of_a_large_region_is_touched_before_it_is_used)
{
    run_pair(large);
}

static void bind_too_late(uint32_t rank, int other)
{
    static char memory[64];
    CommMem mem = { COMM_MEM_TYPE_HOST, memory, sizeof memory };
    void *handle;
    HcclComm comm = new_one_sided("bind late", rank);
    CHECK_OK(prepare(comm, 20));
    CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
    CHECK_ERR(HcclCommBindMem(comm, handle), HCCL_E_PARA);
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_memory_is_bound_before_prepare)
{
    run_pair(bind_too_late);
}

static void freed_before(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("freed", rank);
    void *device, *handle = NULL;
    if (rank == 1) {
        CHECK_OK(aclrtMalloc(&device, 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
        handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, device, 4096);
        CHECK_OK(aclrtFree(device));
    }
    CHECK_ERR(prepare(comm, 20), HCCL_E_PARA);              /* the other rank is told, too */
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    if (handle)
        CHECK_OK(HcclDeregisterGlobalMem(handle));
}

TEST(test_bound_memory_that_was_freed_is_an_error_on_both_sides)
{
    run_pair(freed_before);
}

static void many_regions(uint32_t rank, int other)
{
    enum { COUNT = 300, BYTES = 8192, STEP = 1000 };        /* more than one message, and not page by page */
    HcclComm comm = new_one_sided("regions", rank);
    aclrtStream stream = new_stream();
    void *device, *scratch, *handles[COUNT];
    char *remote;
    CHECK_OK(aclrtMalloc(&device, (uint64_t)COUNT * BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&scratch, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(device, (uint64_t)COUNT * BYTES, rank);
    for (int i = 0; i < COUNT; i++)
        handles[i] = bind_memory(comm, COMM_MEM_TYPE_DEVICE, (char *)device + i * BYTES, STEP);
    CHECK_OK(prepare(comm, 20));
    tell(other, &device, sizeof device);
    hear(other, &remote, sizeof remote);
    for (int i = 0; i < COUNT; i++) {
        HcclOneSideOpDesc desc = { scratch, remote + i * BYTES, STEP, HCCL_DATA_TYPE_INT8 };
        CHECK_OK(HcclBatchGet(comm, 1 - rank, &desc, 1, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        for (int at = 0; at < STEP; at++)
            if (((uint8_t *)scratch)[at] != pattern(1 - rank, (uint64_t)(i * BYTES + at)))
                CHECK_EQ(i, -1);
        desc.count++;
        CHECK_ERR(HcclBatchGet(comm, 1 - rank, &desc, 1, stream), HCCL_E_INTERNAL);
    }
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    for (int i = 0; i < COUNT; i++)
        CHECK_OK(HcclDeregisterGlobalMem(handles[i]));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtFree(scratch));
}

TEST(test_300_small_regions)
{
    run_pair(many_regions);
}

int main(void)
{
    RUN(test_two_ranks_meet);
    RUN(test_a_communicator_that_no_peer_joined_can_be_prepared_again);
    RUN(test_zero_means_the_limit_of_the_environment);
    RUN(test_destroying_ends_a_blocked_prepare);
    RUN(test_a_prepare_that_its_caller_calls_off_ends);
    RUN(test_no_page_of_a_large_region_is_touched_before_it_is_used);
    RUN(test_memory_is_bound_before_prepare);
    RUN(test_bound_memory_that_was_freed_is_an_error_on_both_sides);
    RUN(test_300_small_regions);
    return check_done();
}
