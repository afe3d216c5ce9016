/* Communicators in use: who may destroy what when, what an abort leaves behind, and ranks that are threads. */
#include <sched.h>
#include "hccl_pair.h"

enum { BYTES = 8 << 20 };

static HcclOneSideOpDesc whole(void *mine, void *remote)
{
    return (HcclOneSideOpDesc){ mine, remote, BYTES, HCCL_DATA_TYPE_INT8 };
}

static void busy(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("busy", rank);
    aclrtStream stream = new_stream();
    void *mine, *remote;
    HcclMemDesc none;
    memset(&none, 0, sizeof none);
    CHECK_OK(aclrtMalloc(&mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, mine, BYTES);
    CHECK_OK(prepare(comm, 20));
    tell(other, &mine, sizeof mine);
    hear(other, &remote, sizeof remote);
    HcclOneSideOpDesc desc = whole(mine, remote);
    if (rank == 0) {
        softnpu_fault("HcclBatchGet:hang");
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));  /* queued behind it */
        CHECK_ERR(HcclCommDestroy(comm), HCCL_E_AGAIN);
        CHECK_OK(aclrtStreamAbort(stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
    }
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));                        /* at once: what was synchronized is over */
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(mine));
}

TEST(test_a_communicator_with_tasks_is_busy)
{
    run_pair(busy);
}

/* Looks into memory that is being written, on purpose. */
__attribute__((noinline, no_sanitize_thread)) static char peek(const volatile char *at)
{
    return *at;
}

/* After abort and synchronize not one byte may land any longer. */
static void aborted(uint32_t rank, int other, bool private_memory)
{
    HcclComm comm = new_one_sided("aborted", rank);
    aclrtStream stream = new_stream();
    void *mine, *remote;
    if (private_memory)
        mine = malloc(BYTES);
    else
        CHECK_OK(aclrtMalloc(&mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    memset(mine, rank ? 1 : 0, BYTES);
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, mine, BYTES);
    CHECK_OK(prepare(comm, 20));
    tell(other, &mine, sizeof mine);
    hear(other, &remote, sizeof remote);
    HcclOneSideOpDesc desc = whole(mine, remote);
    for (int i = 0; rank == 0 && i < 12; i++) {
        memset(mine, 0, BYTES);
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        if (i % 2)                                          /* in the middle of it, or before it began */
            while (peek(mine) == 0)
                sched_yield();
        CHECK_OK(aclrtStreamAbort(stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        memset(mine, 9, BYTES);
        sched_yield();
        CHECK(all_are(mine, BYTES, 9));
    }
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtDestroyStream(stream));
    if (private_memory)
        free(mine);
    else
        CHECK_OK(aclrtFree(mine));
}

static void aborted_mapped(uint32_t rank, int other)
{
    aborted(rank, other, false);
}

static void aborted_private(uint32_t rank, int other)
{
    aborted(rank, other, true);
}

TEST(test_nothing_lands_after_an_abort)
{
    run_pair(aborted_mapped);
    run_pair(aborted_private);
}

/* ---- two ranks, two threads, two devices, one process ---- */

enum { SMALL = 3 << 20 };
static void *memory_of[2][2];                               /* [rank][device memory, ordinary memory] */
static pthread_barrier_t both;

static void *rank_thread(void *argument)
{
    uint32_t rank = (uint32_t)(uintptr_t)argument;
    void *scratch, *handles[2];
    CHECK_OK(aclrtSetDevice((int32_t)rank));
    HcclComm comm = new_one_sided("threads", rank);
    aclrtStream stream = new_stream();
    CHECK_OK(aclrtMalloc(&memory_of[rank][0], SMALL, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&scratch, SMALL, ACL_MEM_MALLOC_NORMAL_ONLY));
    memory_of[rank][1] = malloc(SMALL);
    for (int i = 0; i < 2; i++) {
        fill(memory_of[rank][i], SMALL, rank * 2 + (uint32_t)i);
        handles[i] = bind_memory(comm, COMM_MEM_TYPE_DEVICE, memory_of[rank][i], SMALL);
    }
    CHECK_OK(prepare(comm, 20));
    pthread_barrier_wait(&both);
    for (int i = 0; i < 2; i++) {
        HcclOneSideOpDesc desc = { scratch, memory_of[1 - rank][i], SMALL, HCCL_DATA_TYPE_INT8 };
        CHECK_OK(HcclBatchGet(comm, 1 - rank, &desc, 1, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        CHECK(holds(scratch, SMALL, (1 - rank) * 2 + (uint32_t)i));
        desc.remoteAddr = (char *)desc.remoteAddr + 1;
        CHECK_ERR(HcclBatchGet(comm, 1 - rank, &desc, 1, stream), HCCL_E_INTERNAL);
    }
    pthread_barrier_wait(&both);
    CHECK_OK(HcclCommDestroy(comm));
    for (int i = 0; i < 2; i++)
        CHECK_OK(HcclDeregisterGlobalMem(handles[i]));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(scratch));
    CHECK_OK(aclrtFree(memory_of[rank][0]));
    free(memory_of[rank][1]);
    CHECK_OK(aclrtResetDevice((int32_t)rank));
    return NULL;
}

static void threads(uint32_t rank, int other)
{
    pthread_t thread[2];
    (void)other;
    if (rank)
        return;
    pthread_barrier_init(&both, NULL, 2);
    for (uintptr_t i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, rank_thread, (void *)i);
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&both);
}

TEST(test_ranks_may_be_threads)
{
    run_pair(threads);
}

/* ---- all at once: submitters, a setter-up, a destroyer ---- */

static HcclComm shared;
static void *mine_shared, *remote_shared;
static _Atomic int submitters;

static void *submitter(void *number)
{
    CHECK_OK(aclrtSetDevice(0));
    aclrtStream stream = new_stream();
    HcclOneSideOpDesc desc = { (char *)mine_shared + (uintptr_t)number * 30000, remote_shared, 30000, HCCL_DATA_TYPE_INT8 };
    HcclResult code = HCCL_SUCCESS, error;
    submitters++;
    for (int i = 0; i < 2000 && code == HCCL_SUCCESS; i++) {  /* a limit, because the destroyer may find it busy each time */
        code = HcclBatchGet(shared, 1, &desc, 1, stream);
        HcclGetCommAsyncError(shared, &error);
        if (!code)
            CHECK_OK(aclrtSynchronizeStream(stream));
    }
    CHECK(code == HCCL_SUCCESS || code == HCCL_E_NOT_FOUND);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtResetDevice(0));
    return NULL;
}

static void all_ranks(uint32_t rank, int other)
{
    pthread_t thread[3];
    shared = new_one_sided("all", rank);
    CHECK_OK(aclrtMalloc(&mine_shared, 100000, ACL_MEM_MALLOC_NORMAL_ONLY));
    void *handle = bind_memory(shared, COMM_MEM_TYPE_DEVICE, mine_shared, 100000);
    CHECK_OK(prepare(shared, 20));
    tell(other, &mine_shared, sizeof mine_shared);
    hear(other, &remote_shared, sizeof remote_shared);
    if (rank == 0) {
        for (uintptr_t i = 0; i < 3; i++)
            pthread_create(&thread[i], NULL, submitter, (void *)i);
        while (submitters < 3)
            sched_yield();
        HcclResult code;
        while ((code = HcclCommDestroy(shared)) == HCCL_E_AGAIN)
            sched_yield();
        CHECK_OK(code);
        for (int i = 0; i < 3; i++)
            pthread_join(thread[i], NULL);
        in_step(other);
    } else {
        in_step(other);
        CHECK_OK(HcclCommDestroy(shared));
    }
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtFree(mine_shared));
}

TEST(test_destroying_while_others_submit)
{
    run_pair(all_ranks);
}

int main(void)
{
    RUN(test_a_communicator_with_tasks_is_busy);
    RUN(test_nothing_lands_after_an_abort);
    RUN(test_ranks_may_be_threads);
    RUN(test_destroying_while_others_submit);
    return check_done();
}
